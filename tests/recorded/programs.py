"""Recorded programs as data, and what the passes make of them as text.

A program that was recorded on a GPU is kept as its operations and the geometry of its values. The passes read nothing
else, so that a machine without a GPU can run them again, on tensors without memory.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import inspect
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import JITFunction

from fastlayers import backends
from fastlayers.kernels.generated import Kernel
from fastlayers.kernels.launch import Launch, Producer, Result, multiprocessors
from fastlayers.patching.fusion import kernels as fusion
from fastlayers.patching.fusion import specialised
from fastlayers.patching.fusion.passes import fused
from fastlayers.patching.program.program import Operation, Program, Value, storage

__all__ = ["NETWORKS", "decode", "encode", "expected_texts", "fused_texts", "read", "text_of", "write"]

PROGRAMS = Path(__file__).parent / "programs"
NETWORKS = sorted(path.name.split(".")[0] for path in PROGRAMS.glob("*.jsonl.gz"))

#: Types of which torch has a constant for each value.
CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
PARTS = ("forward", "backward")
#: What is told of a producer of tensors, of its launch, and of what it makes.
FACTS = (
    *("__name__", "absent", "results", "launch", "function", "programs", "scalars", "constants", "num_warps", "exact"),
    *("sizes", "strides", "dtype"),
)
#: Bytes of an element of the largest dtype.
LARGEST = 16


# -- data --------------------------------------------------------------------------------------------------------------


def encode(program: Program) -> dict[str, Any]:
    """A program and the geometry of its values, as JSON has it."""
    memory: dict[int, int] = {}
    used = names_of(program)
    return {
        **{part: [encode_operation(each) for each in getattr(program, part)] for part in PARTS},
        **{part: value for part, value in vars(program).items() if part not in (*PARTS, "values", "fake", "place")},
        "values": {name: encode_value(t, memory) for name, t in program.values.items() if name in used},
    }


def names_of(program: Program) -> set[str]:
    operations = (*program.forward, *program.backward)
    names = {name for each in operations for name in (*each.uses, *each.makes)}
    return names.union(program.inputs, program.results, program.grads, program.kept, program.wanted) - {None, ""}


def encode_value(t: Tensor, memory: dict[int, int]) -> list[Any]:
    number = memory.setdefault(storage(t), len(memory))
    content = t.tolist() if t.device.type == "cpu" and t.numel() == 1 else None
    size = t.untyped_storage().nbytes()
    return [number, size, str(t.dtype), [*t.shape], [*t.stride()], t.storage_offset(), t.device.type, content]


def encode_operation(operation: Operation) -> list[Any]:
    arguments = [encode_argument(each) for each in operation.args]
    named = {name: encode_argument(each) for name, each in operation.kwargs.items()}
    facts = [operation.single, operation.effect, operation.view]
    return [name_of(operation.function), arguments, named, operation.makes, *facts]


def name_of(function: Any) -> str:
    if isinstance(function, OpOverload):
        return str(function)
    return f"{function.__module__}:{function.__qualname__}"


def encode_argument(value: Any) -> Any:
    if isinstance(value, Value):
        return {"value": value.name}
    if isinstance(value, (list, tuple)):
        return {"list" if type(value) is list else "tuple": [encode_argument(each) for each in value]}
    if isinstance(value, CONSTANTS):
        return {"torch": str(value)}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"an argument of type {type(value).__name__}")


def decode(data: dict[str, Any]) -> Program:
    """The program of what :func:`encode` gave, whose values have no memory."""
    memory: dict[int, Tensor] = {}
    mode = FakeTensorMode()
    values = {name: decode_value(mode, memory, *facts) for name, facts in data["values"].items()}
    parts = {part: [decode_operation(*each) for each in data[part]] for part in PARTS}
    others = {part: tuple(value) for part, value in data.items() if part not in (*PARTS, "values")}
    return Program(**parts, **others, values=values)


def decode_value(
    mode: FakeTensorMode, memory: dict[int, Tensor], number: int, size: int, dtype: str, shape: list[int],
    strides: list[int], offset: int, device: str, content: Any,
) -> Tensor:  # fmt: skip
    kind = torch_constant(dtype)
    if content is not None:
        return torch.tensor(content, dtype=kind).expand(shape)
    with mode:
        whole = torch.empty(-(-size // LARGEST) * LARGEST, dtype=torch.uint8, device=device)
        return memory.setdefault(number, whole).view(kind).as_strided(shape, strides, offset)


def decode_operation(
    function: str, args: list[Any], kwargs: dict[str, Any], makes: list[str], single: bool, effect: bool, view: bool
) -> Operation:
    named = {name: decode_argument(each) for name, each in kwargs.items()}
    return Operation(called(function), tuple(map(decode_argument, args)), named, tuple(makes), single, effect, view)


def called(name: str) -> Any:
    if ":" not in name:
        return functools.reduce(getattr, name.split("."), torch.ops)
    module, path = name.split(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def decode_argument(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "value":
        return Value(content)
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(decode_argument, content))
    return torch_constant(content) if kind == "torch" else torch.device(content, 0 if content == "cuda" else None)


def torch_constant(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def write(path: Path, programs: Iterable[dict[str, Any]]) -> None:
    """Write encoded programs, a line each, with the same bytes at each time."""
    lines = "".join(f"{json.dumps(each)}\n" for each in programs)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


# -- text --------------------------------------------------------------------------------------------------------------


class Names(dict[str, str]):
    """A number for each value, in the order of their first use."""

    def __missing__(self, name: str) -> str:
        self[name] = f"v{len(self)}"
        return self[name]


def text_of(program: Program) -> str:
    """A program with the sources of its kernels, whatever its values are called."""
    names, kernels = Names(), dict[str, str]()
    lines = [f"inputs {shown(program.inputs, names)}"]
    for part, first in (("forward", program.inputs), ("backward", program.grads)):
        lines.append(f"{part} of {shown(first, names)}")
        for operation in getattr(program, part):
            made = shown(operation.makes, names)
            call = [*(f"{shown(each, names, kernels)}" for each in operation.args)]
            call += [f"{name}={shown(each, names, kernels)}" for name, each in operation.kwargs.items()]
            facts = [name for name in ("single", "effect", "view") if getattr(operation, name)]
            lines.append(
                f"  {made} = {shown(operation.function, names, kernels)}({', '.join(call)})  # {' '.join(facts)}"
            )
    lines.append(f"results {shown(program.results, names)}")
    lines.append(f"wanted {shown(program.wanted, names)}")
    lines.append(f"kept {sorted(shown(name, names) for name in program.kept)}")
    return "\n".join([*lines, *itertools.chain(*((name, source) for source, name in kernels.items()))])


def shown(value: Any, names: Names, kernels: dict[str, str] | None = None) -> str:
    """A part of an operation: names are strings, and so are the arguments that are none, in quotes."""
    if isinstance(value, Value):
        return names[value.name]
    if isinstance(value, str):
        return names[value] if kernels is None and value else repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(shown(each, names, kernels) for each in value)}]"
    if kernels is None or value is None or isinstance(value, (bool, int, float, *CONSTANTS, torch.device)):
        return str(value)
    if isinstance(value, Kernel):
        number = kernels.setdefault(value.source, f"kernel {len(kernels)}")
        return f"{number} {value.results} {value.dtypes} {value._arguments} {value._warps}"
    if isinstance(value, OpOverload):
        return str(value)
    if isinstance(value, functools.partial):
        facts = shown_facts(value.keywords, names, kernels)
        return f"partial({shown([value.func, *value.args], names, kernels)}, {facts})"
    if isinstance(value, JITFunction):
        value = value.fn
    if inspect.isroutine(value):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, (Producer, Result, Launch)):
        facts = {name: getattr(value, name) for name in FACTS if hasattr(value, name)}
        return f"{type(value).__name__}({shown_facts(facts, names, kernels)})"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def shown_facts(facts: Mapping[str, Any], names: Names, kernels: dict[str, str] | None) -> str:
    return ", ".join(f"{name}={shown(each, names, kernels)}" for name, each in sorted(facts.items()))


# -- passes ------------------------------------------------------------------------------------------------------------

#: What the passes ask of the GPU that the programs were recorded on.
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", multi_processor_count=132, total_memory=85_017_755_648)


@contextmanager
def as_on_an_h100() -> Iterator[None]:
    """Let the passes work for a GPU that need not be there, and compile nothing."""
    replaced = [
        (torch.cuda, "get_device_properties", lambda device: H100),
        (backends, "problem", lambda name, device=None: None),
        (specialised, "draws_the_same", lambda device: True),
        (fusion, "compile_together", lambda kernels: None),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    multiprocessors.cache_clear()
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        multiprocessors.cache_clear()


def fused_texts(network: str) -> list[str]:
    """What the passes make of the programs of a network."""
    with as_on_an_h100():
        return [text_of(fused(decode(data))) for data in read(PROGRAMS / f"{network}.jsonl.gz")]


def expected_texts(network: str) -> list[str]:
    return json.loads(gzip.decompress((PROGRAMS / f"{network}.fused.gz").read_bytes()))


if __name__ == "__main__":  # Accept what the passes make now: python3 -m tests.recorded.programs [NETWORK ...]
    for network in sys.argv[1:] or NETWORKS:
        text = json.dumps(fused_texts(network), indent=0)
        (PROGRAMS / f"{network}.fused.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        print(network, f"{len(text)} characters")
