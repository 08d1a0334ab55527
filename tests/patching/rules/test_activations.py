"""Activations that a library wrote out, with what is around them."""

from __future__ import annotations

import pytest
import torch

from fastlayers.patching import plan_patch
from tests.patching.harness import fused, same, tensors

WRITTEN_OUT = {
    "gelu_pow": "0.5 * g * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * torch.pow(g, 3.0))))",
    "gelu_mul": "0.5 * g * (1.0 + torch.tanh(g * 0.7978845608 * (1.0 + 0.044715 * g * g)))",
}
WRITTEN_INIT = """class Act(nn.Module):
    def forward(self, g):
        return {}
self.act = Act()
self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)"""


@pytest.mark.parametrize("code", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("return {} * self.up(x)", "geglu"),
        ("return self.up(x) * {}", "geglu"),
        ("u = self.up(x)\nu *= {}\nreturn u", "geglu"),
        ("return self.down({} * self.up(x))", "gated_linear"),
        ("return self.down(self.up(x) * {})", "gated_linear"),
        ("return {}", "linear_act"),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_an_activation_that_is_written_out(build, tmp_path, code, child, body, rule, autocast):
    given = "self.act(g)" if child else f"({code})"
    path = tmp_path / "act.py"
    path.write_text(f"import math, torch\nfrom torch import nn\n{WRITTEN_INIT.partition('self.act')[0].format(code)}")
    init = (
        f"scope = {{}}\nexec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'), scope)\nAct = scope['Act']\n"
    )
    init += "self.act" + WRITTEN_INIT.partition("self.act")[2]
    block = build(init, "x", f"g = self.gate(x)\n{body.format(given)}")
    assert fused(block) == {rule: 1}, plan_patch(block)
    with torch.autocast("cpu", enabled=autocast):
        same(block, *tensors((3, 4)))
