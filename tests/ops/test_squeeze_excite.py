"""squeeze_excite: the two Functions that share the gradient of one x, in every way that a graph may run them."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastlayers import functional, patch_model, patch_report, verify_patch
from fastlayers.ops import elementwise, reference, squeeze_excite
from fastlayers.patching.runtime import calls


class StandIns:
    """The raw ops in torch, on a machine without kernels, with a count of their calls."""

    backend = "cuda"
    unasked = False

    def __init__(self) -> None:
        self.called: list[str] = []

    def spatial_sum(self, x: Tensor, y: Tensor | None, factor: float) -> Tensor:
        self.called.append("mean" if y is None else "sum")
        return (x * (factor if y is None else y)).sum((2, 3), keepdim=True)

    def scale_shift(self, x: Tensor, scale: Tensor, shift: Tensor, factor: float) -> Tensor:
        self.called.append("scale_shift")
        return x * scale + factor * shift

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def mul_backward(self, dy: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (dy * y).sum_to_size(x.shape), (dy * x).sum_to_size(y.shape)


@pytest.fixture
def kernels(monkeypatch, op_by_op):
    found = StandIns()
    for family in (squeeze_excite.FAMILY, elementwise.FAMILY):
        monkeypatch.setattr(family, "kernels_for", lambda x: None if torch.compiler.is_compiling() else found)
    monkeypatch.setattr(elementwise, "GPU_LEAST", 0)
    return found


def inputs(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(shape or (2, 3, 4, 5), dtype=torch.float64, requires_grad=True)
    return x, torch.randn(x.shape[1], 1, 1, dtype=torch.float64, requires_grad=True)


def gate_of(w: Tensor):
    return lambda mean: torch.sigmoid(mean * w)


def both(function, *leaves: Tensor):
    """``function`` of squeeze_excite and of the reference."""
    torch.testing.assert_close(
        function(functional.squeeze_excite, *leaves), function(reference.squeeze_excite, *leaves)
    )


def test_one_pass_for_both_gradients(kernels):
    x, w = inputs()
    both(lambda f, x, w: torch.autograd.grad(f(x, gate_of(w)).sin().sum(), (x, w)), x, w)
    assert kernels.called == ["mean", "sum", "scale_shift"]
    with torch.no_grad():
        functional.squeeze_excite(x, gate_of(w))
    assert kernels.called[3:] == ["mean"]


CALLS = {
    "x alone": lambda f, x, w: torch.autograd.grad(f(x, gate_of(w)).sum(), x),
    "the weight alone": lambda f, x, w: torch.autograd.grad(f(x, gate_of(w)).sum(), w),
    "a gate without gradient": lambda f, x, w: torch.autograd.grad(f(x, lambda m: gate_of(w)(m).detach()).sum(), x),
    "a gate of something else": lambda f, x, w: torch.autograd.grad(
        f(x, lambda m: torch.sigmoid(w).expand(2, 3, 1, 1)).sum(), (x, w)
    ),
    "a gate of another shape": lambda f, x, w: torch.autograd.grad(f(x, lambda m: gate_of(w)(m)[:1]).sum(), (x, w)),
    "a gate that broadcasts": lambda f, x, w: torch.autograd.grad(f(x, lambda m: m.mean() * w).sum(), (x, w)),
    "a gate as large as x": lambda f, x, w: torch.autograd.grad(f(x, lambda m: m * w + x).sum(), (x, w)),
    "a number": lambda f, x, w: torch.autograd.grad(f(x, lambda m: 2.0).sum(), x),
    "x used besides": lambda f, x, w: torch.autograd.grad((f(x, gate_of(w)) + x.sin()).sum(), (x, w)),
    "x an intermediate result": lambda f, x, w: torch.autograd.grad(f(x.sin(), gate_of(w)).sum(), (x, w)),
    "twice": lambda f, x, w: torch.autograd.grad(f(f(x, gate_of(w)), gate_of(w)).sum(), (x, w)),
    "twice the same x": lambda f, x, w: torch.autograd.grad((f(x, gate_of(w)) * f(x, gate_of(w.exp()))).sum(), (x, w)),
}


@pytest.mark.parametrize("call", CALLS)
def test_gradients(kernels, call):
    both(CALLS[call], *inputs())


def test_a_mean_that_goes_on(kernels):
    """The mean is a result too, and its gradient has two sources."""

    def run(f, x, w):
        kept = []
        y = f(x, lambda mean: kept.append(mean) or torch.sigmoid(mean * w))
        loss, (mean,) = y.sum(), kept
        alone = torch.autograd.grad(mean.sin().sum(), x, retain_graph=True)
        together = torch.autograd.grad(loss + mean.sin().sum(), (x, w, mean), retain_graph=True)
        again = torch.autograd.grad(mean.sin().sum(), x)
        return alone, together, again

    both(run, *inputs())


def test_graphs_that_are_run_again(kernels):
    def run(f, x, w):
        y = f(x, gate_of(w))
        first = torch.autograd.grad(y.sum(), w, retain_graph=True)  # leaves the gate behind
        graph = torch.autograd.grad(y.sin().sum(), (x, w), create_graph=True)
        plain = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
        penalty = sum(g.square().sum() for g in graph)
        return first, graph, plain, torch.autograd.grad(penalty + y.sum(), (x, w))

    both(run, *inputs())


def test_batched_gradients_after_plain_ones(kernels):
    def run(f, x, w):
        y = f(x, gate_of(w))
        plain = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
        dys = torch.stack([torch.ones_like(y), y.detach()])
        return plain, torch.autograd.grad(y, (x, w), dys, is_grads_batched=True)

    both(run, *inputs())


def test_second_derivatives(kernels):
    x, w = inputs(2, 2, 2, 3)
    call = lambda x, w: functional.squeeze_excite(x, gate_of(w))  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, w), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (x, w))


def test_an_image_that_is_written_in_between(kernels):
    """What was squeezed is no longer what is excited: each use sends its own gradient."""

    def run(written):
        x, w = inputs()
        y = x * 1
        mean, squeezed = calls.squeeze(y, (2, 3)) if written else (y.mean((2, 3), keepdim=True), y)
        y.add_(1)
        gate = gate_of(w)(mean)
        out = calls.excite(squeezed, gate) if written else y * gate
        return torch.autograd.grad(out.sin().sum(), (x, w))

    torch.testing.assert_close(run(True), run(False))
    assert "scale_shift" not in kernels.called


def test_a_link_that_is_excited_twice(kernels):
    """The first product shares the gradient of x with the mean, the second one is a product like any other."""

    def run(linked):
        x, w = inputs()
        mean, image = calls.squeeze(x, (2, 3)) if linked else (x.mean((2, 3), keepdim=True), x)
        gates = gate_of(w)(mean), gate_of(w.exp())(mean)
        first, second = (calls.excite(image, gate) if linked else x * gate for gate in gates)
        return torch.autograd.grad((first * second).sum(), (x, w))

    torch.testing.assert_close(run(True), run(False))


def test_another_image(kernels):
    x, w = inputs()
    other = (x.detach() + 1).requires_grad_()
    mean, _ = calls.squeeze(x, (2, 3))
    out = calls.excite(other, gate_of(w)(mean))
    expected = other * gate_of(w)(x.mean((2, 3), keepdim=True))
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), (x, other, w)), torch.autograd.grad(expected.sum(), (x, other, w))
    )


def test_an_image_that_is_never_excited_keeps_nothing(kernels):
    """An exception in the gate, say: no cycle holds the graph."""
    x, _ = inputs()
    before = x * 2
    alive = weakref.ref(before)
    gc.disable()
    try:
        mean, link = calls.squeeze(before, (2, 3))
        del before, mean, link
        assert alive() is None
    finally:
        gc.enable()


def test_without_gradient_where_it_is_excited(kernels):
    x, w = inputs()
    mean, link = calls.squeeze(x, (2, 3))
    gate = gate_of(w)(mean)
    with torch.no_grad():
        out = calls.excite(link, gate)
    assert not out.requires_grad
    torch.testing.assert_close(torch.autograd.grad(mean.sum(), x)[0], torch.full_like(x, 1 / 20))


def test_images_of_other_dimensions(kernels):
    x = torch.randn(3, 4, 5, requires_grad=True)
    mean, image = calls.squeeze(x, None)
    torch.testing.assert_close(calls.excite(image, mean.sigmoid()), x * x.mean((1, 2), keepdim=True).sigmoid())


# -- a convolution of the product --------------------------------------------------------------------------------------


def gated_convolution(convolve, x: Tensor, w: Tensor, layer: nn.Module) -> Tensor:
    mean, x = calls.squeeze(x, (2, 3))
    return convolve(layer, calls.excite(x, gate_of(w)(mean)))


def plainly(layer: nn.Module, product: Tensor) -> Tensor:
    return layer(product)


def layer_and_leaves() -> tuple[nn.Module, tuple[Tensor, ...]]:
    x, w = inputs()
    layer = nn.Conv2d(3, 4, 1, bias=False, dtype=torch.float64)
    return layer, (x, w, layer.weight)


OF_PRODUCT = {
    "gradients": lambda y, given: torch.autograd.grad(y.sin().sum(), given),
    "again": lambda y, given: [torch.autograd.grad(y.sin().sum(), given, retain_graph=True) for _ in range(2)],
    "the weight alone": lambda y, given: torch.autograd.grad(y.sum(), given[2]),
    "second derivatives": lambda y, given: torch.autograd.grad(
        sum(g.square().sum() for g in torch.autograd.grad(y.sin().sum(), given, create_graph=True)), given
    ),
    "batched": lambda y, given: torch.autograd.grad(
        y, given, torch.stack([torch.ones_like(y), y.detach()]), is_grads_batched=True
    ),
}


@pytest.mark.parametrize("call", OF_PRODUCT)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_convolution_of_product(kernels, call, checkpointed):
    found = []
    for convolve in (squeeze_excite.convolution_of_product, plainly):
        layer, given = layer_and_leaves()
        layer.weight.data.copy_(torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3, 1, 1))
        if checkpointed:
            y = checkpoint(gated_convolution, convolve, *given[:2], layer, use_reentrant=False)
        else:
            y = gated_convolution(convolve, *given[:2], layer)
        found.append(OF_PRODUCT[call](y, given))
    torch.testing.assert_close(*found)


def test_the_product_is_not_kept(kernels):
    layer, (x, w, weight) = layer_and_leaves()
    kept = []

    def convolve(layer, product):
        kept.append(weakref.ref(product))
        return squeeze_excite.convolution_of_product(layer, product)

    y = gated_convolution(convolve, x, w, layer)
    assert kept[0]() is None
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), weight)


def test_a_product_that_was_written(kernels):
    """What the convolution is given is no longer x·gate."""
    found = []
    for convolve in (squeeze_excite.convolution_of_product, plainly):
        layer, given = layer_and_leaves()
        layer.weight.data.fill_(0.5)

        def written(layer, product, convolve=convolve):
            with torch.no_grad():
                product.mul_(2)
            return convolve(layer, product)

        found.append(torch.autograd.grad(gated_convolution(written, *given[:2], layer).sum(), given))
    torch.testing.assert_close(*found)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc(x.mean((2, 3), keepdim=True)))


class Scaled(SqueezeExcite):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(x.mean((2, 3), keepdim=True))


class Block(nn.Module):
    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.first, self.se, self.last = nn.Conv2d(3, 3, 1), gate, nn.Conv2d(3, 4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.se(self.first(x)))


@pytest.mark.parametrize(("gate", "found"), [(SqueezeExcite, 1), (Scaled, 0), (nn.Identity, 0)])
def test_convolutions_of_products_are_found(kernels, gate, found):
    model = patch_model(Block(gate()).double())
    assert patch_report(model).counts().get("conv_of_product", 0) == found
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    assert verify_patch(model, x)
    kernels.called.clear()
    seen = []
    model.last.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    model(x).sum().backward()
    assert len(seen) == 1


def test_one_graph_under_torch_compile(kernels):
    model = patch_model(Block(SqueezeExcite()).double())
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    found = [torch.autograd.grad(call(x).square().sum(), list(call.parameters())) for call in (model, compiled)]
    torch.testing.assert_close(*found)
