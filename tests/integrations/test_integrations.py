"""Switches of other packages that turn fastlayers on, and trainers that take a patched model as it is.

The packages are the real ones, but for Axolotl: its dependencies pin other versions, so a stub has its hooks.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

import fastlayers
from fastlayers.patching.rewrite.classes import working
from fastlayers.patching.runtime.checks import rewritten_everywhere
from tests import ROOT
from tests.harness import assert_like, excess, greatest_error

WORDS = 96
STEPS = 2


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def words(seed: int = 1, batch: int = 2) -> Tensor:
    return torch.randint(WORDS, (batch, 7), generator=torch.Generator().manual_seed(seed))


def training_step(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Loss, logits and gradients."""
    model.zero_grad()
    result = model(ids, labels=ids)
    result.loss.backward()
    return [result.loss.detach(), result.logits.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_equal(found, expected, **tolerances) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerances)


def in_new_process(code: str) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout


# ---- kernels, and transformers' use_kernels --------------------------------------------------------------------------


def transformers_with_kernels():
    """transformers as it is where it accepts the installed kernels. Only a new process can import it so."""
    from transformers import utils
    from transformers.utils import import_utils

    # transformers 5.23 asks for kernels 0.18.2, which is not on every index; what it imports is in 0.17.2, too.
    utils.is_kernels_available = import_utils.is_kernels_available = lambda *args, **kwargs: True
    import transformers

    return transformers


def operations(model: nn.Module, ids: Tensor) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        training_step(model, ids)
    return {event.key for event in profile.key_averages()}


def switch_a_llama() -> None:
    transformers_with_kernels()
    import kernels
    from kernels.layer import repos
    from kernels.layer.globals import _KERNEL_MAPPING
    from transformers.models.llama import modeling_llama

    from fastlayers.integrations import hub_kernels
    from fastlayers.integrations.hub_kernels import layers

    model, ids = llama(), words()
    norm, act, rotary = model.model.norm, model.model.layers[0].mlp.act_fn, modeling_llama.apply_rotary_pos_emb
    expected = training_step(model, ids)

    def is_switched() -> bool:
        forwards = {norm: layers.RMSNorm, act: layers.SiLU, rotary: layers.RotaryEmbedding}
        switched = {layer.forward.__func__ is forward.forward for layer, forward in forwards.items()}
        assert len(switched) == 1
        return switched.pop()

    hub_kernels.register()
    model.set_use_kernels(True)
    assert is_switched()
    assert_equal(training_step(model, ids), expected)
    assert {"fastlayers::layer_norm_forward", "fastlayers::layer_norm_backward", "fastlayers::rotary"} <= operations(
        model, ids
    )
    # transformers switches again when the mode changes, with what it has registered by itself.
    model.eval()
    model.train()
    assert is_switched()
    repos._find_capability = lambda: 90
    for name, layer in layers.LAYERS.items():
        (repository,) = _KERNEL_MAPPING.get()[name]["cuda"].repos.values()
        assert repository.load() is layer, name

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal(training_step(compiled, ids), expected)
    assert_equal(training_step(model, ids), expected)
    torch.compiler.reset()

    # transformers cannot undo it, and kernels can.
    model.use_kernels = False
    assert is_switched()
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING)
    assert not is_switched()
    assert_equal(training_step(model, ids), expected, rtol=0, atol=0)
    kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu")
    assert is_switched()
    assert_equal(training_step(model, ids), expected)


def layers_of(transformers):
    """Instances of all layers of transformers that we replace, by what they are replaced with."""
    from fastlayers.integrations.hub_kernels.layers import LAYERS

    package = Path(transformers.__file__).parent
    files = [package / "activations.py", *sorted((package / "models").glob("*/modeling_*.py"))]
    for file in files:
        if "use_kernel_forward_from_hub(" not in file.read_text():
            continue
        name = ".".join(("transformers", *file.relative_to(package).with_suffix("").parts))
        for value in vars(importlib.import_module(name)).values():
            own = isinstance(value, nn.Module) or getattr(value, "__module__", None) == name
            layer = LAYERS.get(getattr(value, "kernel_layer_name", "")) if own else None
            if layer is None:
                continue
            if not isinstance(value, type):
                yield value, layer
            elif layer.__name__ == "RMSNorm":
                yield value(16), layer
            else:
                yield value(), layer
                if layer.__name__ in ("GeLU", "GeluTanh"):
                    yield value(True), layer  # written out in Python


def results(forward, module: nn.Module, inputs: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """What a forward of the module returns, and the gradients of its parameters and of at most two inputs."""
    given = [x.clone().requires_grad_(i < 2) for i, x in enumerate(inputs)]
    out = MethodType(forward, module)(*given)
    outs = out if isinstance(out, tuple) else (out,)
    by = [*given[:2], *module.parameters()]
    found = torch.autograd.grad(outs, by, [dy.to(y) for dy, y in zip(gradients, outs, strict=False)])
    return [*(y.detach() for y in outs), *found]


def same_as_stock(module: nn.Module, layer: type[nn.Module], *inputs: Tensor) -> None:
    """In 16 bits a handwritten function rounds after each operation, and ours once: there errors are compared."""
    stock_forward, what = type(module).forward, f"{module} as {layer.__name__}"
    gradients = [torch.randn_like(x, dtype=torch.float32) for x in inputs]
    ours = results(layer.forward, module, list(inputs), gradients)
    stock = results(stock_forward, module, list(inputs), gradients)
    exact = results(stock_forward, copy.deepcopy(module).double(), [x.double() for x in inputs], gradients)
    for mine, theirs, true in zip(ours, stock, exact, strict=True):
        assert_like(mine, theirs, what)
        if mine.dtype != torch.bfloat16 and inputs[0].dtype != torch.bfloat16:
            torch.testing.assert_close(mine, theirs, msg=lambda text: f"{what}: {text}")
        else:
            assert not (problem := excess(mine, true, greatest_error(theirs, true))), f"{what}: {problem}"


def compare_all_layers() -> None:
    transformers = transformers_with_kernels()
    from fastlayers.integrations.hub_kernels import layers

    torch.manual_seed(0)
    fused = {"RMSNorm": 0, "RotaryEmbedding": 0}
    dtypes = torch.float32, torch.bfloat16, torch.float64
    for module, layer in layers_of(transformers):
        kind = layer.__name__
        if kind == "RotaryEmbedding":
            fused[kind] += layers.rotates_halves(type(module))
            # gpt-oss has one column for each pair of elements.
            tables = torch.randn(2, 2, 5, 16 if "rotate_half" in names_in_function(module) else 8).unbind(0)
            for dtype in dtypes:
                q, k = torch.randn(2, 4, 5, 16, dtype=dtype), torch.randn(2, 2, 5, 16, dtype=dtype)
                for table in (torch.float32, dtype):
                    same_as_stock(module, layer, q, k, *(t.to(table) for t in tables))
            continue
        fused["RMSNorm"] += kind == "RMSNorm" and layers.norm_of(type(module)) is not None
        for dtype in dtypes:
            x = torch.randn(3, 5, 16, dtype=dtype)
            for weight in (torch.float32, dtype) if kind == "RMSNorm" else (dtype,):
                same_as_stock(module.to(weight), layer, x)
                with torch.autocast("cpu", torch.bfloat16):
                    same_as_stock(module, layer, x)
    assert min(fused.values()) > 50, fused  # most are Llama's


def names_in_function(module: nn.Module) -> tuple[str, ...]:
    (function,) = (cell.cell_contents for cell in type(module).forward.__closure__)
    return function.__code__.co_names


@pytest.mark.parametrize("check", [switch_a_llama, compare_all_layers])
def test_hub_kernels(check):
    pytest.importorskip("kernels")
    pytest.importorskip("transformers")
    in_new_process(f"from tests.integrations import test_integrations; test_integrations.{check.__name__}()")


# ---- Axolotl ---------------------------------------------------------------------------------------------------------


class BasePlugin:
    """The hooks of Axolotl 0.19 around the load of a model, in the order of their calls."""

    def pre_model_load(self, cfg): ...

    def post_model_build(self, cfg, model): ...

    def pre_lora_load(self, cfg, model): ...

    def post_lora_load(self, cfg, model): ...

    def post_model_load(self, cfg, model): ...


@pytest.fixture
def axolotl(monkeypatch):
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin
    name = "fastlayers.integrations.axolotl"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name)


def test_axolotl(axolotl):
    peft = pytest.importorskip("peft")
    plugin = axolotl.FastLayersPlugin()
    assert isinstance(plugin, BasePlugin)
    model, cfg = llama(), {}
    plugin.pre_model_load(cfg)
    plugin.post_model_build(cfg, model)
    plugin.pre_lora_load(cfg, model)
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    plugin.post_lora_load(cfg, model)
    stock = copy.deepcopy(model)
    assert not working(stock)
    plugin.post_model_load(cfg, model)
    assert working(model)
    assert model.state_dict().keys() == stock.state_dict().keys()
    losses = [m(words(), labels=words()).loss for m in (model, stock)]
    torch.testing.assert_close(*losses)


# ---- torchtitan ------------------------------------------------------------------------------------------------------


def titan_block(*names: str) -> nn.Module:
    """The first block of torchtitan's Llama 3, without attention, and with these of our overrides."""
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.models.common.nn_modules import LayerNorm
    from torchtitan.models.llama3 import model_registry

    root = model_registry("debugmodel").model
    root.layers = root.layers[:1]
    root.norm = LayerNorm.Config(normalized_shape=256)
    apply_overrides(OverrideConfig(imports=[f"fastlayers.integrations.torchtitan.{name}" for name in names]), root)
    torch.manual_seed(0)
    model = root.build()
    model.init_states()
    layer = model.layers["0"]
    return nn.ModuleDict({"norm": layer.ffn_norm, "mlp": layer.feed_forward, "last": model.norm})


def test_torchtitan():
    pytest.importorskip("torchtitan.models.llama3")
    stock, fused = titan_block(), titan_block("rms_norm", "feed_forward", "layer_norm")
    names = [type(layer).__name__ for layer in fused.values()]
    assert names == ["FusedRMSNorm", "FusedFeedForward", "FusedLayerNorm"]
    assert all(isinstance(layer, type(stock[name])) for name, layer in fused.items())
    assert stock.state_dict().keys() == fused.state_dict().keys()
    assert_equal(fused.state_dict().values(), stock.state_dict().values(), rtol=0, atol=0)
    x = torch.randn(2, 8, 256)
    results = []
    for block in (fused, stock):
        out = block["last"](block["mlp"](block["norm"](x)))
        results.append([out, *torch.autograd.grad(out.square().mean(), block.parameters())])
    assert_equal(*results)


def test_torchtitan_keeps_subclasses():
    pytest.importorskip("torchtitan.models.llama3")
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.muse_glimmer.model import RMSGainCenterNorm

    root = model_registry("debugmodel").model
    root.norm = RMSGainCenterNorm.Config(normalized_shape=256, gain_center=1.0)
    apply_overrides(OverrideConfig(imports=["fastlayers.integrations.torchtitan.rms_norm"]), root)
    assert type(root.norm) is RMSGainCenterNorm.Config
    assert type(root.layers[0].ffn_norm).__qualname__ == "FusedRMSNorm.Config"


# ---- trainers that take a patched model ------------------------------------------------------------------------------


def with_lightning(model: nn.Module) -> list[float]:
    import lightning.pytorch as lightning

    losses = []

    class Training(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, ids):
            loss = self.model(ids, labels=ids).loss
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Training(), torch.utils.data.DataLoader(words(batch=2 * STEPS), batch_size=2))
    return losses


def with_accelerate(model: nn.Module) -> list[float]:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = torch.utils.data.DataLoader(words(batch=2 * STEPS), batch_size=2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for ids in batches:
        loss = model(ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def same_training(train) -> None:
    stock = llama()
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    fused = working(patched)
    assert fused
    with rewritten_everywhere():
        found = train(patched)
    assert len(found) == STEPS
    torch.testing.assert_close(found, train(stock), rtol=1e-4, atol=1e-5)
    assert_equal(patched.parameters(), stock.parameters(), rtol=1e-3, atol=1e-5)
    assert working(patched) == fused


def test_lightning():
    """In a process of its own: importing lightning replaces ``torch.compile`` for all that runs after it."""
    pytest.importorskip("transformers")
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs lightning")
    in_new_process("from tests.integrations import test_integrations as t; t.same_training(t.with_lightning)")


def test_accelerate():
    same_training(with_accelerate)
