"""What the tests of patching share: modules made from source, and the comparison of a patched one with itself."""

from __future__ import annotations

import copy
import itertools
import linecache
import textwrap
from contextlib import nullcontext

import pytest
import torch

from fastlayers.patching import patch_model, plan_patch, unpatch_model, verify_patch
from tests.harness import judge, mapped


def spelled(body, inputs="x, y", init=""):
    """A module class whose forward has this body. Written to a file, since patching reads the source."""
    return pytest.param(init, inputs, body, id=body.replace("\n", "; ")[:70])


def builder(tmp_path):
    """What the fixture ``build`` is: a function of ``__init__``, parameters and body that makes such a module."""

    def build(init, inputs, body):
        lines = ["import math, operator, torch", "import torch.nn as nn", "import torch.nn.functional as F"]
        lines += ["class Block(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in init.splitlines()]
        lines += [f"    def forward(self, {inputs}):", *(f"        {line}" for line in body.splitlines())]
        path = tmp_path / "block.py"
        path.write_text("\n".join(lines) + "\n")
        scope = {"__name__": "block", "cached": cached, "keep": keep}
        exec(compile("\n".join(lines) + "\n", str(path), "exec"), scope)
        torch.manual_seed(0)
        return scope["Block"]()

    return build


STORE = torch.ones(3, 4)


def cached(x):
    with torch.no_grad():  # so that it is recorded, not followed
        return STORE


def keep(x):
    with torch.no_grad():
        STORE.sum()


def written(base, body, scope, inputs="x", name="Written"):
    """A subclass of ``base`` whose forward has this body. Patching finds its source where tracebacks do."""
    source = f"class {name}(base):\n    def forward(self, {inputs}):\n{textwrap.indent(body, ' ' * 8)}\n"
    file = f"<{body} of {name}({base.__name__})>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    scope = {**scope, "base": base}
    exec(compile(source, file, "exec"), scope)
    return scope[name]


def counts(model):
    return plan_patch(model).counts()


def fused(module):
    return dict(plan_patch(module)[""].fused)


def reasons(module):
    row = plan_patch(module)[""]
    return {row.reason, *(reason for reason, _ in row.left)} - {None}


def clone(values):
    return [v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v for v in values]


def outcome(module, inputs, grad):
    """Output, gradients, and the inputs as they are afterwards; or the error."""
    STORE.fill_(1)
    with torch.set_grad_enabled(grad):
        return outcome_of(module, clone(inputs))


def outcome_of(module, given):
    # Not leaves, so that a forward may write them in place.
    passed = [v * 1 if isinstance(v, torch.Tensor) and v.requires_grad else v for v in given]
    try:
        out = module(*passed)
    except Exception as error:  # the kind of error is what is compared
        return type(error)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, torch.Tensor)]
    leaves = [v for v in (*given, *module.parameters()) if isinstance(v, torch.Tensor) and v.requires_grad]
    floats = [o for o in outs if o.requires_grad]
    torch.manual_seed(1)
    try:
        grads = (
            torch.autograd.grad(floats, leaves, [torch.randn(o.shape).to(o) for o in floats], allow_unused=True)
            if floats
            else []
        )
    except RuntimeError:
        grads = None  # torch itself has no gradient where an in-place operation destroyed what relu had saved
    written = [*(v for v in passed if isinstance(v, torch.Tensor)), *module.buffers()]
    return [*outs, *(v.detach().clone() for v in written)], grads


def same(module, *inputs):
    """The patched module does what the unpatched one does, also to its inputs and buffers; in both modes."""
    patched = copy.deepcopy(module)
    with pytest.warns() if not plan_patch(module).patched else nullcontext():
        patch_model(patched)

    def run(module, inputs, grad):
        torch.manual_seed(2)
        return outcome(module, inputs, grad)

    # Twice: the first call of a region records, the second one runs what was recorded.
    for mode, grad, _ in itertools.product((True, False), (True, False), range(2)):
        given = mapped(torch.clone, (module.train(mode), inputs, grad))
        expected, actual = run(module, inputs, grad), run(patched.train(mode), inputs, grad)
        if isinstance(expected, type):
            assert actual is expected
        elif expected[1] is None:
            judge(actual[0], expected[0], lambda *given: run(*given)[0], given)
        else:
            judge(actual, expected, run, given)


def undone(model, x):
    """Patching and undoing leave the classes and the state dict as they were; a copy stays patched."""
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    patch_model(model)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in copy.deepcopy(model).modules()] == [type(m) for m in model.modules()]
    assert verify_patch(model, x)
    unpatch_model(model)
    assert [type(m) for m in model.modules()] == kinds


def tensors(*shapes):
    torch.manual_seed(3)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]
