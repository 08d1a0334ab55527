"""Models in and out of safetensors files: the same keys whether a model is patched or not.

A file holds the entries of ``state_dict()``. Tensors that share their memory are stored once, with the other names in
the file's metadata. Wrappers (``torch.compile``, DDP, DataParallel) do not show in the keys. Sharded parameters (the
DTensors of FSDP2 and tensor parallelism) are whole in the file, and a model may be sharded otherwise when it is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastlayers.ops.guard import is_dtensor
from fastlayers.version import __version__

__all__ = ["CheckpointError", "IncompatibleKeys", "load_model", "save_model"]

#: Attributes under which a wrapper holds the model, by the package of the wrapper's class.
WRAPPED = {"torch._dynamo": "_orig_mod", "torch.nn.parallel": "module"}
#: Key of the file's metadata: JSON, the names that were not stored and the name that holds their tensor.
TIED = "tied"


class CheckpointError(RuntimeError):
    """A file that cannot be read, or that does not fit the model; nothing was changed."""


class IncompatibleKeys(NamedTuple):
    """What :func:`load_model` left out with ``strict=False``."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def save_model(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write all parameters and persistent buffers of a model to one safetensors file.

    The file appears whole or not at all: it is written beside ``path`` and renamed. One that was there stays until
    then.

    If parameters are sharded, all processes must call this. They gather one tensor after the other, and the first
    process keeps them on the CPU and writes the file: call ``torch.distributed.barrier()`` before another one reads it.

    Args:
        model: any module, patched or not, with or without a ``torch.compile``, DDP or DataParallel wrapper.
        path: the file, usually ``*.safetensors``; its directory must exist.

    Raises:
        TypeError: ``model`` is not a module, or its state holds something else than plain, dense, materialised tensors.
        OSError: the file cannot be written.
    """
    from safetensors.torch import save_file

    path = Path(path)
    state = canonical_state(model)
    for key, value in state.items():
        check_storable(key, value)
    tied = {key: first for first, *others in tied_groups(state) for key in others}
    writes = is_writer(state)
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        if key not in tied:
            whole = gather(value) if is_dtensor(value) else value
            if writes:
                tensors[key] = (whole.cpu() if is_dtensor(value) else whole).detach().contiguous()
    if not writes:
        return
    # After the last tensor is gathered: an error before would leave the other processes waiting.
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot save to {path}: there is no directory {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"cannot save to {path}: it is a directory")
    # Views of one memory that are not the same tensor: the format wants memory of their own.
    seen: set[int] = set()
    for key, value in tensors.items():
        pointer = value.untyped_storage().data_ptr()
        if value.numel() and (pointer in seen or value.untyped_storage().nbytes() != value.nbytes):
            tensors[key] = value.clone()
        seen.add(pointer)
    metadata = {"format": "pt", "fastlayers": __version__, TIED: json.dumps(tied)}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_model(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> IncompatibleKeys:
    """Read a safetensors file into a model, in place. Everything is checked before anything is changed.

    Args:
        model: the module to fill, patched or not, on any device. If its parameters are sharded, every process reads the
            file, and keeps its shards.
        path: a file from :func:`save_model`, or any other safetensors file with these keys. One name of several tied
            ones is enough.
        strict: the keys must be exactly those of the model, as :meth:`torch.nn.Module.load_state_dict` has it.

    Returns:
        The keys that were missing and unexpected, both empty with ``strict``.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, or its keys, shapes or dtypes are not the model's. The message has all
            differences.
        TypeError: ``model`` is not a module.
    """
    state = canonical_state(model)
    stored, tied = read(Path(path))
    twins = {key: group for group in tied_groups(state) for key in group}
    values: dict[str, Tensor] = {}
    for key in state:
        names = [name for name in (key, tied.get(key), *twins.get(key, ())) if name in stored]
        if names:
            values[key] = stored[names[0]]
    missing = [key for key in state if key not in values]
    used = {id(value) for value in values.values()}
    unexpected = [key for key, value in stored.items() if key not in state and id(value) not in used]
    problems = [*mismatches(state, values), *conflicts(tied_groups(state), values)]
    if strict:
        problems += [f"missing key: {key} ({describe(state[key])})" for key in missing]
        problems += [f"unexpected key: {key} ({describe(stored[key])})" for key in unexpected]
    if problems:
        lines = "\n  ".join(problems)
        raise CheckpointError(f"{path} does not fit {type(model).__name__}; nothing was loaded:\n  {lines}")
    wrapped = dict(zip(canonical_keys(model), model.state_dict(), strict=True))
    loaded = {wrapped[key]: shard(value, state[key]) for key, value in values.items()}
    model.load_state_dict(loaded, strict=False)
    return IncompatibleKeys(missing, unexpected)


def canonical_state(model: nn.Module) -> dict[str, Any]:
    """The state dict under the names that it has without wrappers."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    state = model.state_dict()
    if any(map(is_dtensor, state.values())):
        state = model.state_dict(keep_vars=True)  # Only the parameter itself tells whether it has several names.
    return dict(zip(canonical_keys(model), state.values(), strict=True))


def is_writer(state: dict[str, Any]) -> bool:
    """Whether this process is the first of those that share the parameters."""
    ranks = {rank for value in state.values() if is_dtensor(value) for rank in value.device_mesh.mesh.view(-1).tolist()}
    return not ranks or torch.distributed.get_rank() == min(ranks)


def gather(value: Any) -> Tensor:
    """The whole of a DTensor, in every process that has a part of it."""
    with torch.no_grad():
        return value.full_tensor()  # type: ignore[no-any-return]


def shard(value: Tensor, like: Any) -> Tensor:
    """A whole tensor as ``like`` is, a DTensor if that is one. All processes have the same tensor."""
    if not is_dtensor(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def canonical_keys(model: nn.Module) -> list[str]:
    """The keys of ``model.state_dict()``, in its order, without the atoms that wrappers put in."""
    wrappers: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for package, attribute in WRAPPED.items():
            if type(module).__module__.startswith(package) and attribute in module._modules:
                wrappers[f"{path}.{attribute}" if path else attribute] = attribute
    keys = []
    for key in model.state_dict():
        atoms = key.split(".")
        kept = [atom for i, atom in enumerate(atoms) if wrappers.get(".".join(atoms[: i + 1])) != atom]
        keys.append(".".join(kept))
    return keys


def tied_groups(state: dict[str, Any]) -> list[list[str]]:
    """Names that stand for the very same elements of the same memory."""
    groups: dict[Any, list[str]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() and value.layout == torch.strided and not value.is_meta:
            place: Any = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            if is_dtensor(value):  # It has no memory of its own, and its shard may be empty here.
                place = id(value)
            groups.setdefault(place, []).append(key)
    return [group for group in groups.values() if len(group) > 1]


def check_storable(key: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"cannot save {key}: a safetensors file holds tensors, and this is a {type(value).__name__}")
    if not is_dtensor(value) and (type(value) not in (Tensor, nn.Parameter) or value.is_quantized):
        raise TypeError(f"cannot save {key}: it is a {type(value).__name__}; gather or dequantise it first")
    if value.layout != torch.strided:
        raise TypeError(f"cannot save {key}: its layout is {value.layout}, expected a dense tensor")
    if value.is_meta:
        raise TypeError(f"cannot save {key}: it is on the meta device and has no values")


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a file, and its table of tied names."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tied = json.loads((file.metadata() or {}).get(TIED, "{}"))
            if not isinstance(tied, dict) or not all(isinstance(name, str) for name in tied.values()):
                raise ValueError(f"its table of tied names is {shortened(tied)}; expected names by names")
            return {key: file.get_tensor(key) for key in file.keys()}, tied  # noqa: SIM118
    except (SafetensorError, ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file; truncated or damaged? ({error})") from error


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."


def mismatches(state: dict[str, Any], values: dict[str, Tensor]) -> Iterator[str]:
    for key, value in values.items():
        expected = state[key]
        if isinstance(expected, Tensor) and expected.is_meta:
            yield f"{key}: the model has it on the meta device; give it memory first, with model.to_empty(device=...)"
        elif not isinstance(expected, Tensor) or (value.shape, value.dtype) != (expected.shape, expected.dtype):
            yield f"{key}: the file has {describe(value)}, the model expects {describe(expected)}"


def conflicts(groups: list[list[str]], values: dict[str, Tensor]) -> Iterator[str]:
    for first, *others in groups:
        for key in others:
            one, other = values.get(first), values.get(key)
            if one is None or other is None or one is other or (one.shape, one.dtype) != (other.shape, other.dtype):
                continue
            if not torch.equal(one, other):
                yield f"{first} and {key} are one tensor in the model, and two different ones in the file"


def describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
