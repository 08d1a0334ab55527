"""The layers of DROP_IN on PyTorch's own samples and error inputs of the layers that they replace (ModuleInfo)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fastlayers import DROP_IN
from tests.harness import DEVICES

pytest.importorskip("expecttest", reason="torch.testing._internal imports it")
from torch.testing._internal.common_modules import FunctionInput, ModuleErrorEnum, ModuleInfo, module_db
from torch.testing._internal.opinfo.core import SampleInput

from tests.functional.test_opinfo import check_all

INFOS = [pytest.param(info, id=info.module_cls.__name__) for info in module_db if info.module_cls in DROP_IN]


def forward_of(cls: type[nn.Module], training: bool, autocast: torch.dtype | None) -> Callable[..., Any]:
    """The forward of a new layer with such arguments, as a function of its parameters and buffers."""

    def forward(state: dict[str, Tensor], made: FunctionInput, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        module = cls(*made.args, **made.kwargs).train(training)
        device = next(t.device.type for t in (*state.values(), *args, *kwargs.values()) if isinstance(t, Tensor))
        with nullcontext() if autocast is None else torch.autocast(device, autocast):
            return functional_call(module, state, args, kwargs)

    return forward


class Layer:
    """A ModuleInfo in the terms of an OpInfo."""

    supports_autograd = True

    def __init__(self, info: ModuleInfo, training: bool, autocast: torch.dtype | None) -> None:
        self.info, self.training, self.name = info, training, info.name
        self.op = forward_of(info.module_cls, training, autocast)

    def supported_dtypes(self, device: str) -> set[torch.dtype]:
        return {*self.info.supported_dtypes(device), torch.bfloat16}

    supported_backward_dtypes = supported_dtypes

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool, **_: Any) -> Iterator[SampleInput]:
        for found in self.info.module_inputs_func(self.info, device, dtype, requires_grad, self.training):
            made, given = found.constructor_input, found.forward_input
            made.kwargs = {key: value for key, value in made.kwargs.items() if key not in ("device", "dtype")}
            state = self.info.module_cls(*made.args, **made.kwargs).to(device, dtype).state_dict(keep_vars=True)
            yield SampleInput(dict(state), args=(made, given.args, given.kwargs))


def test_all_layers_have_samples():
    assert {parameter.values[0].module_cls for parameter in INFOS} == set(DROP_IN)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", INFOS)
@pytest.mark.filterwarnings("ignore")
def test_samples(info, training, autocast, device):
    fused = forward_of(DROP_IN[info.module_cls], training, autocast)
    check_all(fused, Layer(info, training, autocast), device, None, few=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("info", [row for row in INFOS if row.values[0].module_error_inputs_func])
def test_error_inputs(info, device):
    for mistake in info.module_error_inputs_func(info, device, torch.float32, False, True):
        made, given = mistake.module_error_input.constructor_input, mistake.module_error_input.forward_input

        def construct(made: FunctionInput = made) -> nn.Module:
            return DROP_IN[info.module_cls](*made.args, **made.kwargs)

        module = None if mistake.error_on is ModuleErrorEnum.CONSTRUCTION_ERROR else construct()
        with pytest.raises(mistake.error_type, match=mistake.error_regex):
            construct() if module is None else module(*given.args, **given.kwargs)
