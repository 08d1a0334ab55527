"""What the norms do besides the answer of one call: running statistics, casting orders, autocast, dropout, layers."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlayers
from fastlayers import backends, functional
from fastlayers.ops import layer_norm, reference
from tests.harness import DEVICES, PLACES, Place, assert_close, assert_no_worse, needs_gpu

EVERYWHERE = pytest.mark.parametrize(
    "place", [pytest.param(place, marks=place.marks(), id=str(place)) for place in PLACES if place.backend != "cpu"]
)


def images(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


# ---- batch norm: running statistics ----------------------------------------------------------------------------------

SETTINGS = {
    "as usual": {},
    "cumulative average": {"momentum": None},
    "momentum 1": {"momentum": 1.0},
    "momentum 0": {"momentum": 0.0},
    "not tracked": {"track_running_stats": False},
    "not affine": {"affine": False},
    "eps": {"eps": 0.1},
}
BATCH_NORMS = {
    (nn.BatchNorm1d, fastlayers.FusedBatchNorm1d): (7, 6),
    (nn.BatchNorm2d, fastlayers.FusedBatchNorm2d): (3, 6, 5, 4),
    (nn.BatchNorm3d, fastlayers.FusedBatchNorm3d): (3, 6, 2, 3, 2),
}


def step(layer: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A result, and the gradients of x and the parameters."""
    x = x.clone().requires_grad_()
    out = layer(x)
    return out.detach(), list(torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()]))


@EVERYWHERE
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("layers", "shape"), BATCH_NORMS.items(), ids=[s.__name__ for s, _ in BATCH_NORMS])
def test_running_statistics(layers, shape, settings, place):
    """Through training and eval, gradients included, every result and every buffer is torch's."""
    stock, fused = (layer(6, **SETTINGS[settings]).to(place.device, torch.float64) for layer in layers)
    for i, training in enumerate((True, True, False, True, False)):
        x = images(place.device, *shape, seed=i, dtype=torch.float64) * (i + 1) + i
        expected = step(stock.train(training), x)
        with backends.backend(place.backend):
            ours = step(fused.train(training), x)
        assert_close(ours, expected)
        assert_close(fused.state_dict(), stock.state_dict())


@EVERYWHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_running_statistics_of_bfloat16(dtype, place):
    """x in bfloat16, as autocast leaves it, with parameters and statistics of float32 or of its own dtype."""
    stock, fused = nn.BatchNorm2d(8).to(place.device, dtype), fastlayers.FusedBatchNorm2d(8).to(place.device, dtype)
    for seed in range(3):
        x = images(place.device, 4, 8, 5, 5, seed=seed, dtype=torch.bfloat16)
        with backends.backend(place.backend):
            ours = fused(x)
        assert_no_worse((ours, fused.state_dict()), lambda stock, x: (stock(x), stock.state_dict()), stock, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("stock", "fused", "shape"),
    [
        (nn.BatchNorm1d, fastlayers.FusedBatchNorm1d, (1, 6)),
        (nn.BatchNorm2d, fastlayers.FusedBatchNorm2d, (1, 6, 1, 1)),
        (nn.BatchNorm2d, fastlayers.FusedBatchNorm2d, (2, 6)),
        (nn.BatchNorm2d, fastlayers.FusedBatchNorm2d, (2, 5, 3, 3)),
        (nn.InstanceNorm2d, fastlayers.FusedInstanceNorm2d, (2, 6, 1, 1)),
        (nn.InstanceNorm1d, fastlayers.FusedInstanceNorm1d, (2, 6, 1, 1)),
    ],
)
def test_errors_are_torchs(stock, fused, shape, device):
    x = torch.ones(shape, device=device)
    messages = []
    for layer in (stock(6).to(device), fused(6).to(device)):
        with pytest.raises((ValueError, RuntimeError)) as error:
            layer(x)
        messages.append((error.type, str(error.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layer_updates_its_statistics(device, backend):
    """One graph, in training and in eval, with torch's statistics after every call."""
    torch._dynamo.reset()
    stock = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU()).to(device)
    fused = fastlayers.FusedBatchNormAct2d(6).to(device)
    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    for i, training in enumerate((True, True, False)):
        x = images(device, 3, 6, 5, 4, seed=i) + i
        stock.train(training)
        fused.train(training)
        out, expected = compiled(x), stock(x)
        assert_close(out, expected)
        parameters = zip(fused.parameters(), stock.parameters(), strict=True)
        grads = [torch.autograd.grad(y.sin().sum(), p) for y, p in zip((out, expected), zip(*parameters, strict=True))]  # noqa: B905
        assert_close(*grads)
        assert_close(list(fused.state_dict().values()), list(stock.state_dict().values()))


def test_sync_batch_norm_takes_the_fused_layer():
    """convert_sync_batchnorm replaces it as it does torch's: the same parameters and buffers, the same answer."""
    fused = nn.Sequential(nn.Conv2d(3, 6, 1), fastlayers.FusedBatchNorm2d(6, momentum=0.3))
    fused(images("cpu", 4, 3, 5, 5))
    state = copy.deepcopy(fused.state_dict())
    x = images("cpu", 2, 3, 4, 4)
    expected = fused.eval()(x)
    weight = fused[1].weight
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(fused)
    assert type(synced[1]) is nn.SyncBatchNorm
    assert synced[1].weight is weight
    assert synced[1].momentum == 0.3
    assert_close(synced.state_dict(), state)
    assert_close(synced(x), expected)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("converter", [nn.SyncBatchNorm, fastlayers.FusedSyncBatchNormAct, "timm"])
def test_sync_batch_norm_keeps_the_activation(dims, converter):
    """The converters of torch and timm know parameters and buffers alone, and would lose it."""
    if converter == "timm":
        convert = pytest.importorskip("timm.layers").convert_sync_batchnorm
    else:
        convert = converter.convert_sync_batchnorm
    layer = getattr(fastlayers, f"FusedBatchNormAct{dims}d")
    model = nn.Sequential(nn.Linear(6, 6), layer(6, act="silu", momentum=0.3), layer(6, act=None)).eval()
    x = images("cpu", *(2, 6, 6, 6, 6)[: dims + 2])
    expected, state = model(x), model.state_dict()
    synced = convert(model)
    assert type(synced[1]) is fastlayers.FusedSyncBatchNormAct
    assert synced[1].act == "silu"
    assert synced[1].momentum == 0.3
    assert isinstance(synced[2], nn.SyncBatchNorm)
    assert synced.state_dict().keys() == state.keys()
    assert_close(synced(x), expected)
    again = convert(synced)
    assert_close(again(x), expected)


def test_a_converter_that_would_lose_an_activation_is_told():
    def convert_sync_batchnorm(module):
        return [convert_sync_batchnorm(child) for _, child in module.named_children()]

    model = nn.Sequential(fastlayers.FusedBatchNormAct2d(6))
    with pytest.raises(TypeError, match=r"would lose its activation .*FusedSyncBatchNormAct.convert_sync_batchnorm"):
        convert_sync_batchnorm(model)
    assert list(model.modules()) == [model, *model.children()]


# ---- casting orders --------------------------------------------------------------------------------------------------


class LlamaRMSNorm(nn.Module):
    """The code of transformers' Llama, word for word in what it computes."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class GemmaRMSNorm(nn.Module):
    """The code of transformers' Gemma."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


CASTING = {"llama": LlamaRMSNorm, "gemma": GemmaRMSNorm}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parameters", ["same", "float32"])
@pytest.mark.parametrize("casting", CASTING)
def test_casting_order(casting, parameters, dtype, place):
    """The dtype of the code of the model libraries, and its values where a sum in another order lets them be."""
    if place == Place("cpu", "triton") and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates to bfloat16")
    layer = CASTING[casting](96).to(place.device, dtype if parameters == "same" else torch.float32)
    with torch.no_grad():
        layer.weight.add_(images(place.device, 96, seed=5, dtype=layer.weight.dtype))
    x = images(place.device, 33, 96, dtype=dtype)
    expected = layer(x)
    with backends.backend(place.backend):
        ours = functional.rms_norm(x, (96,), layer.weight, 1e-6, casting=casting)
    assert ours.dtype == expected.dtype
    if place.backend == "eager":
        assert torch.equal(ours, expected)
        return
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, expected, rtol=4 * unit, atol=0)
    if dtype != torch.float32:  # of halves another order gives other bits in every third element
        assert (ours == expected).float().mean() > 0.97


@pytest.mark.parametrize("function", [functional.rms_norm, lambda x, *a, **k: functional.add_rms_norm(x, x, *a, **k)])
def test_unknown_casting_order(function):
    with pytest.raises(ValueError, match=r"unknown casting order 'mistral'; expected one of 'torch', 'llama', 'gemma'"):
        function(torch.ones(2, 3), (3,), casting="mistral")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@EVERYWHERE
def test_default_eps(dtype, place):
    """eps=None: the epsilon of the type that is computed in, which shows on tiny values."""
    x = images(place.device, 4, 32, dtype=dtype) * (1e-8 if dtype == torch.float64 else 3e-4)
    weight = torch.ones(32, device=place.device, dtype=dtype)
    with backends.backend(place.backend):
        ours = functional.rms_norm(x, (32,), weight)
    torch.testing.assert_close(ours, F.rms_norm(x, (32,), weight))


# ---- autocast --------------------------------------------------------------------------------------------------------

AUTOCAST = {
    "layer_norm": (functional.layer_norm, F.layer_norm),
    "rms_norm": (lambda x, s, w, b: functional.rms_norm(x, s, w), lambda x, s, w, b: F.rms_norm(x, s, w)),
    "group_norm": (
        lambda x, s, w, b: functional.group_norm(x, 4, w, b),
        lambda x, s, w, b: F.group_norm(x, 4, w, b),
    ),
    "batch_norm": (
        lambda x, s, w, b: functional.batch_norm(x, None, None, w, b, True),
        lambda x, s, w, b: F.batch_norm(x, None, None, w, b, True),
    ),
    "instance_norm": (
        lambda x, s, w, b: functional.instance_norm(x[:, :, None].expand(-1, -1, 3), None, None, w, b),
        lambda x, s, w, b: F.instance_norm(x[:, :, None].expand(-1, -1, 3), None, None, w, b),
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_of_half_with_float32_parameters(name, device):
    """What AMP sends into a norm: a bfloat16 x, parameters of float32."""
    ours, stock = AUTOCAST[name]
    x = images(device, 6, 32, dtype=torch.bfloat16)
    weight, bias = images(device, 32, seed=1), images(device, 32, seed=2)
    with torch.autocast(device, torch.bfloat16):
        got = ours(x, (32,), weight, bias)
        assert (got.dtype == torch.float32) == (name in reference.FLOAT32_UNDER_AUTOCAST[device])
        assert_no_worse(got, stock, x, (32,), weight, bias)


@needs_gpu
@pytest.mark.parametrize("name", AUTOCAST)
def test_half_with_float32_parameters(name):
    """Outside autocast the result has x's dtype, whether torch's own kernel takes the mixture or not."""
    ours, stock = AUTOCAST[name]
    x = images("cuda", 6, 32, dtype=torch.bfloat16)
    weight, bias = images("cuda", 32, seed=1), images("cuda", 32, seed=2)
    expected = stock(x.float(), (32,), weight, bias).bfloat16()
    for backend in (None, "eager"):
        with backends.backend(backend):
            got = ours(x, (32,), weight, bias)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, expected, rtol=0.01, atol=0.01)


# ---- with a residual -------------------------------------------------------------------------------------------------

ADDS = {
    "layer_norm": (functional.add_layer_norm, F.layer_norm),
    "rms_norm": (functional.add_rms_norm, F.rms_norm),
}


@EVERYWHERE
@pytest.mark.parametrize("used", ["norm", "sum", "both"])
@pytest.mark.parametrize("name", ADDS)
def test_gradients_of_either_result(name, used, place):
    fused, norm = ADDS[name]
    x, residual = (images(place.device, 5, 16, seed=seed).requires_grad_() for seed in range(2))
    weight = images(place.device, 16, seed=2).requires_grad_()

    def gradients(y: Tensor, s: Tensor) -> tuple[Tensor | None, ...]:
        loss = {"norm": y.sin().sum(), "sum": s.cos().sum(), "both": (y * s).sum()}[used]
        return torch.autograd.grad(loss, (x, residual, weight), allow_unused=True)

    expected = gradients(norm(x + residual, (16,), weight), x + residual)
    with backends.backend(place.backend):
        ours = gradients(*fused(x, residual, (16,), weight))
    assert_close(ours, expected)


@pytest.mark.parametrize("name", ADDS)
def test_dropout_before_the_sum(name):
    """torch's dropout, drawn from torch's generator, in training only."""
    fused, norm = ADDS[name]
    x, residual = images("cpu", 5, 16), images("cpu", 5, 16, seed=1)
    torch.manual_seed(3)
    s = F.dropout(x, 0.4) + residual
    torch.manual_seed(3)
    assert_close(fused(x, residual, (16,), dropout=0.4, training=True), (norm(s, (16,)), s))
    assert_close(fused(x, residual, (16,), dropout=0.4), (norm(x + residual, (16,)), x + residual))


@EVERYWHERE
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_without_a_residual(name, place):
    """s is x, no copy, with the gradients of both uses; what writes to it raises, or has torch's gradient."""
    weight = images(place.device, 6, seed=1)

    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        return getattr(functional, name)(x, None, (6,), weight, eps=1e-5)  # type: ignore[no-any-return]

    x = images(place.device, 4, 6).requires_grad_()
    with backends.backend(place.backend):
        with torch.no_grad():
            assert pair(x)[1] is x
        y, s = pair(x)
        assert s.data_ptr() == x.data_ptr()
        (both,) = torch.autograd.grad((y.sin() + s.square()).sum(), x)
        (of_y,) = torch.autograd.grad(pair(x)[0].sin().sum(), x)
        assert_close(both, of_y + 2 * x.detach())
        (of_s,) = torch.autograd.grad(pair(x)[1].square().sum(), x)
        assert_close(of_s, 2 * x.detach())
        if place.backend != "eager":
            with pytest.raises(RuntimeError, match="inplace"):
                pair(x * 1)[1].add_(1)


@EVERYWHERE
@pytest.mark.parametrize("casting", [None, "torch", "llama", "gemma"])
def test_results_of_16_bits_are_rounded_once(casting, place):
    """Second derivatives are there, and those of the norm."""
    options = {"eps": 1e-5} if casting is None else {"eps": 1e-5, "casting": casting}
    norm = functional.layer_norm if casting is None else functional.rms_norm
    x, weight = images(place.device, 4, 6).requires_grad_(), images(place.device, 6, seed=1).requires_grad_()
    with backends.backend(place.backend):
        found = []
        for dtype in (None, torch.float16):
            y = norm(x, (6,), weight, **options, dtype=dtype)
            assert y.dtype == (dtype or torch.float32)
            first = torch.autograd.grad(y.float().square().sum(), (x, weight), create_graph=True)
            second = torch.autograd.grad(sum(g.sin().sum() for g in first), (x, weight))
            found.append((y, *first, *second))
    for whole, rounded in zip(*found, strict=True):
        torch.testing.assert_close(rounded.float(), whole.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layer", [fastlayers.FusedAddLayerNorm, fastlayers.FusedAddRMSNorm])
def test_dropout_of_a_layer(layer):
    x, residual = images("cpu", 5, 16), images("cpu", 5, 16, seed=1)
    module = layer(16, dropout=0.5)
    assert_close(module.eval()(x, residual)[1], x + residual)
    torch.manual_seed(3)
    s = F.dropout(x, 0.5) + residual
    torch.manual_seed(3)
    assert_close(module.train()(x, residual)[1], s)


def stand_in() -> SimpleNamespace:
    """Kernels of layer_norm in torch ops, for what happens around them."""

    def forward(x, dims, weight, bias, eps, kind, dtype, keep):
        norm = (
            F.rms_norm(x, x.shape[-dims:], weight, eps) if kind else F.layer_norm(x, x.shape[-dims:], weight, bias, eps)
        )
        return norm, x.new_tensor(eps)

    def add_forward(x, residual, *rest):
        y, stats = forward(x + residual, *rest)
        return y, x + residual, stats

    def backward(dy, ds, x, dims, weight, stats, kind, for_weight, for_bias):
        return layer_norm.decomposed_backward(dy, ds, x, weight, dims, float(stats), kind, for_weight, for_bias)

    return SimpleNamespace(
        unasked=False,
        backend="cuda",
        layer_norm_forward=forward,
        add_layer_norm_forward=add_forward,
        layer_norm_backward=backward,
    )


OUTLIVING = {
    "layer_norm": lambda x, r, w, b: functional.layer_norm(x, (16,), w, b),
    "rms_norm": lambda x, r, w, b: functional.rms_norm(x, (16,), w),
    "add_layer_norm": lambda x, r, w, b: functional.add_layer_norm(x, r, (16,), w, b)[0],
    "add_rms_norm": lambda x, r, w, b: functional.add_rms_norm(x, r, (16,), w)[0],
}


@pytest.mark.parametrize("outlived", range(4))
@pytest.mark.parametrize("call", OUTLIVING.values(), ids=OUTLIVING)
def test_a_tensor_that_outlived_its_transform(monkeypatch, call, outlived):
    """torch.func.grad wraps tensors. One that leaks is part of the graph outside, also where a kernel takes it."""
    leaves = [
        images("cpu", *shape, seed=i).requires_grad_() for i, shape in enumerate([(5, 16), (5, 16), (16,), (16,)])
    ]
    given = list(leaves)

    def leak(x: Tensor) -> Tensor:
        given[outlived] = x * 2
        return x.sum()

    torch.func.grad(leak)(leaves[outlived])
    gradients = []
    for kernels in (None, stand_in()):
        monkeypatch.setitem(layer_norm.FAMILY._by_device, torch.device("cpu"), kernels)
        loss = call(*given).sin().sum()
        gradients.append(torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True))
    assert_close(gradients[1], gradients[0])


# ---- activations, layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda act: functional.batch_norm(torch.ones(4, 3), None, None, training=True, act=act),
        lambda act: functional.group_norm(torch.ones(4, 3), 1, act=act),
        lambda act: functional.instance_norm(torch.ones(4, 3, 2), act=act),
        lambda act: fastlayers.FusedBatchNormAct2d(3, act=act),
        lambda act: fastlayers.FusedGroupNormAct(1, 3, act=act),
    ],
)
@pytest.mark.parametrize("act", ["swish", ["relu"], nn.ReLU()], ids=str)
def test_unknown_activation(call, act):
    with pytest.raises(ValueError, match=r"unknown activation .*; expected one of None, 'relu', 'silu'"):
        call(act)


@EVERYWHERE
@pytest.mark.parametrize(("act", "stock"), [("mish", F.mish), ("elu", F.elu), ("tanh", torch.tanh)])
def test_activations_that_the_norms_leave_to_bias_act(place, act, stock):
    x, residual = images(place.device, 3, 6, 5, 4), images(place.device, 3, 6, 5, 4, seed=1)
    with backends.backend(place.backend):
        ours = (
            functional.batch_norm(x, None, None, training=True, residual=residual, act=act),
            functional.group_norm(x, 2, act=act),
            functional.instance_norm(x, act=act),
        )
    z = F.batch_norm(x, None, None, training=True) + residual
    assert_close(ours, (stock(z), stock(F.group_norm(x, 2)), stock(F.instance_norm(x))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [True, False])
def test_layers_with_residual_and_activation(training, device):
    x, residual = images(device, 3, 6, 5, 4), images(device, 3, 6, 5, 4, seed=1)
    fused = fastlayers.FusedBatchNormAct2d(6, act="gelu").to(device).train(training)
    stock = nn.BatchNorm2d(6).to(device).train(training)
    assert_close(fused(x, residual), F.gelu(stock(x) + residual))
    assert_close(fused(x), F.gelu(stock(x)))
    assert_close(fused.state_dict(), stock.state_dict())


def test_reprs():
    assert repr(fastlayers.FusedBatchNormAct2d(6)) == repr(nn.BatchNorm2d(6)).replace(
        "BatchNorm2d", "FusedBatchNormAct2d"
    ).replace(")", ", act=relu)")
    assert repr(fastlayers.FusedGroupNormAct(2, 6, act="gelu_tanh")).endswith(", act=gelu_tanh)")
    assert repr(fastlayers.FusedAddLayerNorm(6)) == "FusedAdd" + repr(nn.LayerNorm(6))
    assert repr(fastlayers.FusedAddLayerNorm(6, dropout=0.1)).endswith(", dropout=0.1)")
    assert repr(fastlayers.FusedAddRMSNorm(6, casting="llama")).endswith(", casting=llama)")
    assert repr(fastlayers.FusedLayerNorm2d(6)) == repr(nn.LayerNorm(6, 1e-6)).replace("LayerNorm", "FusedLayerNorm2d")


@EVERYWHERE
def test_rows_in_the_order_of_memory(place):
    """A query that was split and transposed goes through Llama's norm as it lies, and comes out so."""
    x = images(place.device, 2, 5, 12, 16)[:, :, :4].transpose(1, 2)
    weight = images(place.device, 16, seed=1)
    expected = reference.rms_norm(x, (16,), weight, 1e-6, "llama")
    with backends.backend(place.backend):
        ours = functional.rms_norm(x, (16,), weight, 1e-6, casting="llama")
    assert_close(ours, expected)
    assert ours.stride() == expected.stride()
    assert ours.transpose(1, 2).is_contiguous()


def test_residual_and_relu_after_torchs_batch_norm():
    """Where the batch_norm of small planes is torch's, the sum and the ReLU are add_relu: its kernel if built."""
    x, residual = (torch.randn(24, 256, 14, 14, requires_grad=True) for _ in range(2))
    ours = functional.batch_norm(x, None, None, training=True, residual=residual, act="relu")
    z = F.batch_norm(x, None, None, training=True)
    assert torch.equal(ours, torch.relu(z + residual))
    assert type(ours.grad_fn) is type(functional.add_relu(z, residual).grad_fn)
