"""Norms that libraries write out: what they compute is found, whatever they call it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fastlayers.patching import Reason, patch_model, plan_patch, unpatch_model
from tests.patching.harness import fused, same, tensors, written
from tests.patching.networks import Parts


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden_size))
        self.variance_epsilon = eps

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class Llama(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """A docstring."""
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class LlamaAsMetaWroteIt(LlamaRMSNorm):
    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class Llama4L2(LlamaRMSNorm):
    def forward(self, x):
        return self._norm(x.float()).type_as(x)


class Gemma(LlamaRMSNorm):
    def forward(self, x):
        output = self._norm(x.float())
        # Llama does x.to(float16) * w whilst Gemma is (x * w).to(float16)
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class T5(LlamaRMSNorm):
    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class Olmo(LlamaRMSNorm):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.square().mean(dim=-1, keepdim=True)
        hidden_states = hidden_states * (variance + self.variance_epsilon).rsqrt()
        return (self.weight * hidden_states).to(input_dtype)


class Helium(LlamaRMSNorm):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = (hidden_states**2).mean(-1, keepdim=True)
        hidden_states = torch.rsqrt(variance + self.variance_epsilon) * hidden_states
        return (self.weight.to(torch.float32) * hidden_states).to(input_dtype)


class Gemma3n(LlamaRMSNorm):
    def __init__(self, hidden_size, with_scale=True):
        super().__init__(hidden_size)
        self.with_scale = with_scale

    def _norm(self, hidden_states: torch.Tensor):
        mean_squared = hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon
        return hidden_states * torch.pow(mean_squared, -0.5)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed_output = self._norm(hidden_states.float())
        if self.with_scale:
            normed_output = normed_output * self.weight.float()
        return normed_output.type_as(hidden_states)


class Cohere(LlamaRMSNorm):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        mean = hidden_states.mean(-1, keepdim=True)
        variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)
        hidden_states = (hidden_states - mean) * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight.to(torch.float32) * hidden_states
        return hidden_states.to(input_dtype)


WRITTEN = {
    Llama: "rms_norm (llama)",
    LlamaAsMetaWroteIt: "rms_norm (llama)",
    Gemma: "rms_norm (gemma)",
    T5: "rms_norm (t5)",
    Olmo: "rms_norm (olmo)",
    Helium: "rms_norm (helium)",
    Gemma3n: "rms_norm (gemma3n)",
    Llama4L2: "rms_norm (llama4_l2)",
    Cohere: "layer_norm (cohere)",
}


def half(x, dtype):
    return x.detach().to(dtype).requires_grad_()


@pytest.mark.parametrize(("cls", "rule"), WRITTEN.items())
def test_written_out_norms(cls, rule):
    norm = cls(8)
    assert fused(norm) == {rule: 1}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for weight in (torch.float32, torch.bfloat16):
            same(norm.to(weight), half(tensors((3, 5, 8))[0], dtype))
    with pytest.raises(RuntimeError):
        patch_model(cls(8))(torch.randn(3, 7)) if cls is not Llama4L2 else torch.ones(2) @ torch.ones(3)
    same(cls(1), *tensors((3, 5, 8)))  # a weight that broadcasts
    patched = patch_model(norm)
    norm.variance_epsilon = 0.5
    x = torch.randn(3, 8)
    torch.testing.assert_close(patched(x), unpatch_model(copy.deepcopy(norm))(x))


@pytest.mark.parametrize("cls", WRITTEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_out_norms_under_autocast(cls, dtype):
    norm = cls(8)
    patched = patch_model(copy.deepcopy(norm))
    x = torch.randn(3, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = norm(x), patched(x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected)


def test_a_norm_whose_scale_is_switched():
    norm = Gemma3n(8, with_scale=False)
    patched = patch_model(copy.deepcopy(norm))
    x = torch.randn(3, 8)
    for scaled in (False, True, False):
        norm.with_scale = patched.with_scale = scaled
        torch.testing.assert_close(patched(x), norm(x))


@pytest.mark.parametrize(
    "body",
    [
        "return self.weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6))",
        "return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(0, keepdim=True) + 1e-6)).to(x.dtype)",
        "return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "x = x.to(torch.float32)\nx *= torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)\nreturn self.weight * x",
        "return x * self.scale(x)",
    ],
)
def test_unknown_bodies_are_left_alone_and_said_so(body):
    row = plan_patch(written(ScaledNorm, body, globals())(8))[""]
    assert (row.became, row.reason) == (None, Reason.UNKNOWN_NORM)
    assert "torch.rsqrt(" in row.detail


class ScaledNorm(LlamaRMSNorm):
    def scale(self, x):
        return torch.rsqrt(x.var(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize("cls", WRITTEN)
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("y", [torch.float32, torch.bfloat16])
def test_a_sum_and_a_written_out_norm(cls, x, y):
    class Layer(Parts):
        def forward(self, hidden_states, other):
            residual = hidden_states
            hidden_states = residual + other
            residual = hidden_states
            hidden_states = self.norm(hidden_states)
            return residual + self.fc(hidden_states.to(self.fc.weight.dtype))

    torch.manual_seed(0)
    layer = Layer(fc=nn.Linear(8, 8), norm=cls(8))
    assert fused(layer) == {"add_layer_norm" if cls is Cohere else "add_rms_norm": 1}
    a, b = (half(t, d) for t, d in zip(tensors((3, 5, 8), (3, 5, 8)), (x, y), strict=True))
    same(layer, a, b)
    same(layer, a, half(tensors((8,))[0], y))
    same(layer.to(torch.bfloat16), a, b)
