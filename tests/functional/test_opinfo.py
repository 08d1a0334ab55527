"""The functions that bear the name of a torch function, on PyTorch's own samples and error inputs (OpInfo)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fastlayers import backends, functional
from fastlayers.patching.regions.agreement import largest_of
from tests.harness import DEVICES, PLACES, Place, assert_like, excess, greatest_error

pytest.importorskip("expecttest", reason="torch.testing._internal imports it")
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

#: Every function whose name is torch's: a new one joins by its name.
NAMES = [name for name in functional.__all__ if hasattr(F, name) or hasattr(torch, name)]
INFOS = [
    pytest.param(getattr(functional, name), info, id=f"{name} {info.variant_test_name}".strip())
    for name in NAMES
    for info in op_db
    if info.name in (name, f"nn.functional.{name}")
]
#: Unforced, and forced backends where they have a kernel for the sample.
WHERE = [
    pytest.param("cpu", None, id="cpu"),
    pytest.param("cuda", None, id="cuda", marks=DEVICES[1].marks),
    *(
        pytest.param(place.device, place, id=str(place), marks=place.marks())
        for place in PLACES
        if place.backend != "eager"
    ),
]
#: The samples are tiny: torch's greatest error is looked for in up to so many draws.
DRAWS = 12
#: By function, backend and index: the gradient of a group of two, 4.93 and 4.68, is what is left of terms a thousand
#: times as large, and the mean that forward and backward share is rounded to float32, as torch's is.
KNOWN = {("nn.functional.group_norm", "cpu", 20)}
#: max_pool2d has 1440 samples, all combinations of its options. float32 gets them all, where no backend is forced; the
#: rest gets every thirteenth.
MANY, STRIDE = 500, 13


@pytest.fixture(autouse=True)
def _no_search_of_the_stack(monkeypatch) -> None:
    """For every list of samples torch looks for its TestCase on the stack, in 0.2 s: here there is none."""
    monkeypatch.setattr(common_utils, "extract_test_fn", lambda: None)
    monkeypatch.setattr(core, "extract_test_fn", lambda: None)


def test_all_of_torchs_names_have_samples():
    named = {parameter.values[0].__name__ for parameter in INFOS}
    assert named >= set(NAMES) - ({"linear_cross_entropy"} if torch.__version__ < "2.13" else set())
    assert named >= {
        "softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm", "gelu", "silu",
        "mish", "elu", "leaky_relu", "hardswish", "softplus", "glu", "mul", "max_pool2d", "cross_entropy", "kl_div",
        "linear",
    }  # fmt: skip


def samples(info: OpInfo, device: str, dtype: torch.dtype, draw: int = 0) -> list[SampleInput]:
    torch.manual_seed(draw)
    wants_grad = info.supports_autograd and dtype in info.supported_backward_dtypes(device)
    return list(info.sample_inputs(device, dtype, requires_grad=wants_grad, set_seed=False))


def run(
    function: Callable[..., Any], sample: SampleInput, dtype: torch.dtype | None = None, draw: int = 0
) -> list[Tensor]:
    """Results of a call, the tensors that it may have written to, and its gradients, in a given dtype."""

    def leaf(t: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and t.is_floating_point() else t.dtype
        return t.detach().to(wanted, copy=True).requires_grad_(t.requires_grad)

    args, kwargs = tree_map_only(Tensor, leaf, ((sample.input, *sample.args), dict(sample.kwargs)))
    if dtype is not None:
        kwargs.pop("options", None)  # the composition, without chunks
        if "dtype" in kwargs:
            kwargs["dtype"] = dtype
    outs = [t for t in tree_leaves(function(*args, **kwargs)) if isinstance(t, Tensor)]
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    found = outs + [t for t in given if not t.requires_grad]
    sent, leaves = [out for out in outs if out.requires_grad], [t for t in given if t.requires_grad]
    if sent:
        generator = torch.Generator().manual_seed(7 + draw)
        dys = [torch.randn(out.shape, generator=generator).to(out.device, out.dtype) for out in sent]
        grads = torch.autograd.grad(sent, leaves, dys, allow_unused=True)
        found += [torch.empty(0) if grad is None else grad for grad in grads]
    return [t.detach().to(torch.complex64) if t.dtype == torch.complex32 else t.detach() for t in found]


def test_another_draw_has_other_gradients():
    """A bias that is added to the result has a gradient of these alone."""
    first, second = (run(lambda x: x + 0, SampleInput(torch.zeros(3, requires_grad=True)), draw=i)[-1] for i in (0, 1))
    assert not torch.equal(first, second)


def exactly(info: OpInfo) -> Callable[..., Any]:
    """The op in float64. A GPU multiplies hardswish by a sixth in float32, whatever the dtype."""
    return hardswish_as_defined if info.name == "nn.functional.hardswish" else info.op


def hardswish_as_defined(x: Tensor, inplace: bool = False) -> Tensor:
    return x * F.relu6(x + 3) / 6


def errors_of_torch(info: OpInfo, sample: SampleInput, dtype: torch.dtype, draw: int = 0) -> list[float]:
    """The greatest error of each of torch's results, against float64; that of float64 is scaled from float32.

    A chunked loss is judged by torch's composition, whose logits have 16 bits as ours; torch's chunks have wider ones.
    """
    exact, narrow, scale = run(exactly(info), sample, torch.float64, draw), dtype, 1.0
    if dtype == torch.float64:
        narrow, scale = torch.float32, 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return [scale * greatest_error(t, true) for t, true in zip(run(info.op, sample, narrow, draw), exact, strict=True)]


def same_values(ours: Tensor, stock: Tensor) -> bool:
    return bool(((ours == stock) | ((ours != ours) & (stock != stock))).all())


def check(function: Callable[..., Any], info: OpInfo, device: str, dtype: torch.dtype, index: int, sample: Any) -> None:
    """Results and gradients have torch's shape and dtype, and err no more than torch's from the float64 answer."""
    try:
        stock = run(info.op, sample)
    except Exception as error:  # as sums of complex32 do
        with pytest.raises(type(error), match=re.escape(str(error))):
            run(function, sample)
        return
    ours = run(function, sample)
    for i, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        assert_like(mine, theirs, f"result {i}")
        if same_values(mine, theirs):
            continue
        assert mine.is_floating_point(), f"result {i}: {mine}, and torch has {theirs}"
        precise = run(exactly(info), sample, torch.float64)
        exact, allowed = precise[i], errors_of_torch(info, sample, dtype)[i]
        if dtype == torch.float64:  # No wider type judges it: what cancels is rounding of the largest numbers.
            allowed = max(allowed, torch.finfo(dtype).eps * max(map(largest_of, precise)))
        problem = excess(mine, exact, allowed)
        # Of few elements, one draw says little about torch's error: a bias of GroupNorm gets a sum of gradients alone.
        draws = iter(range(1, DRAWS))
        while problem is not None and (draw := next(draws, None)) is not None:
            other = samples(info, device, dtype, draw)[index]
            allowed = max(allowed, errors_of_torch(info, other, dtype, draw)[i])
            problem = excess(mine, exact, allowed)
        assert problem is None, f"result {i}: {problem}"


def checked(info: OpInfo, device: str, few: bool) -> Iterator[tuple[torch.dtype, int, SampleInput]]:
    for dtype in sorted(info.supported_dtypes(device), key=str):
        found = samples(info, device, dtype)
        for index, sample in enumerate(found):
            if len(found) < MANY or (dtype == torch.float32 and not few) or index % STRIDE == 0:
                yield dtype, index, sample


def check_all(function: Callable[..., Any], info: Any, device: str, place: Place | None, few: bool) -> None:
    """Checks the samples, of many ``few``; on a forced backend those for which it has a kernel."""
    failed = []
    for dtype, index, sample in checked(info, device, few):
        if place is not None and (info.name, place.backend, index) in KNOWN:
            continue
        try:
            with nullcontext() if place is None else backends.backend(place.backend):
                check(function, info, device, dtype, index, sample)
        except backends.BackendError:
            assert place is not None
        except Exception as error:
            failed.append(f"{dtype}, sample {index}, {sample}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} samples fail; the first ones:\n" + "\n".join(failed[:5])


@pytest.mark.parametrize(("device", "place"), WHERE)
@pytest.mark.parametrize(("function", "info"), INFOS)
@pytest.mark.filterwarnings("ignore")
def test_samples(function, info, device, place):
    check_all(function, info, device, place, place is not None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("function", "info"), [row for row in INFOS if row.values[1].error_inputs_func])
@pytest.mark.filterwarnings("ignore")
def test_error_inputs(function, info, device):
    for mistake in info.error_inputs(device):
        sample = mistake.sample_input
        with pytest.raises(mistake.error_type, match=mistake.error_regex):
            function(sample.input, *sample.args, **sample.kwargs)


# ---- signatures ------------------------------------------------------------------------------------------------------

#: Private parameters of torch's.
PRIVATE = {"_stacklevel"}
#: Where ours differ on purpose: torch's implicit choice of a dimension is deprecated, and its own first line says so.
OTHER_DEFAULTS = {("softmax", "dim"): -1, ("log_softmax", "dim"): -1}


def torch_signature(name: str) -> inspect.Signature:
    """The signature of torch's function; that of a built-in one as its documentation begins."""
    function = getattr(F, name, None) or getattr(torch, name)
    try:
        signature = inspect.signature(function)
        if "args" not in signature.parameters:
            return signature
    except ValueError:
        pass
    documented = re.search(rf"{name}\((.*?)\)", function.__doc__, re.DOTALL)
    assert documented
    scope: dict[str, Any] = {}
    exec(f"def {name}({documented[1]}): ...", scope)
    return inspect.signature(scope[name])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "linear_cross_entropy" or hasattr(F, name)])
def test_signature_is_torchs(name):
    """Names, order and defaults are torch's; what torch does not have is keyword-only."""
    ours = inspect.signature(getattr(functional, name)).parameters
    theirs = {key: value for key, value in torch_signature(name).parameters.items() if key not in PRIVATE}
    assert [key for key in ours if key in theirs] == list(theirs)
    for key, value in ours.items():
        if key not in theirs:
            assert value.kind is inspect.Parameter.KEYWORD_ONLY, key
            assert value.default is not inspect.Parameter.empty, key
            continue
        assert value.default == OTHER_DEFAULTS.get((name, key), theirs[key].default), key
    positional = [key for key, value in ours.items() if value.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == list(theirs)[: len(positional)]
