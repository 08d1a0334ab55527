"""The tape of a call: the raw operations of its forward and of its backward, as a program.

A call is run once under :class:`Tape`, which sees every operation below autograd and autocast, and then its backward,
whose operations autograd chooses: a product contributes ``addmm`` and later two ``mm``, a fused op its raw kernels.
The same calls in the same order, without the machinery that chose them, are the region's forward and backward, which
:mod:`fastlayers.patching.program.executors` runs.

Values are told apart by the memory that they occupy. While a tape is recorded all its tensors stay alive, so a tensor
at the same address with the same geometry is the same value, also when autograd or a view made another Python object.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fastlayers.ops.modes import Mode
from fastlayers.patching.program.numbers import hint_of, is_one, map_numbers
from fastlayers.patching.program.program import (
    STATISTICS,
    Operation,
    Program,
    Value,
    alive,
    is_kernel,
    storage,
)
from fastlayers.patching.reasons import Reason, Refusal

__all__ = ["EMPTY", "Tape", "communicates", "written_arguments"]

#: What tells a value from others while all are alive: memory, dtype and geometry.
Key: TypeAlias = tuple[int, torch.dtype, int, tuple[int, ...], tuple[int, ...]]

#: The arguments of a call, positional ones and others.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

#: Operations whose result or control flow depends on the values of tensors.
DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

#: Operations whose result has no values yet,
EMPTY = ("::empty", "::empty_like", "::empty_strided", "::new_empty", "::new_empty_strided", "::empty_permuted")
#: those that read only the geometry of their argument,
METADATA = (
    *EMPTY,
    *("::zeros_like", "::ones_like", "::full_like", "::rand_like", "::randn_like"),
    *("::new_zeros", "::new_ones", "::new_full"),
)
#: and those that write all of it.
FILLING = (
    *("::fill_", "::zero_", "::copy_", "::bernoulli_", "::uniform_", "::normal_", "::random_"),
    *("::exponential_", "::geometric_", "::log_normal_", "::cauchy_"),
)
#: Those that write some of it, whatever was there: what they leave is garbage without a region, too.
PLACING = ("::index_put_", "::index_copy_", "::scatter_")

#: Arguments that are written and whose version stays, as torch has it: backwards of other calls of a batch norm refer
#: to its statistics.
UNCOUNTED = frozenset({"running_mean", "running_var"})

#: The namespaces of operations that declare what they write, but for those that update running statistics.
DECLARING = frozenset({"aten", "fastlayers"})

#: Operations that wait for other processes,
COLLECTIVES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
)
#: and the arguments of those that other libraries register.
GROUPS = frozenset({"group_name", "process_group"})

#: Files whose lines are nobody's forward: those of torch, of this package, and of the layers that it swapped.
LIBRARIES = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    os.path.join(Path(__file__).parents[2], ""),
    "<fastlayers Fused",
)

aten = torch.ops.aten

#: Operations that make a tensor like another one, and the same without that one.
NEW = {aten.new_empty.default: aten.empty.memory_format, aten.new_zeros.default: aten.zeros.default}


class Tape(Mode):
    """Records operations while it is active.

    Args:
        inputs: the tensors that the region is given. No operation may write one of them.
        state: tensors among them that an operation may write all the same: buffers of modules.
        sources: whether to note the lines that operations come from.
        like: a tape of the same call, of which this one has no memory: torch describes what its kernels return, and not
            always the strides of dimensions with one element.

    Attributes:
        layouts: by the place of each operation the shape and the strides of each tensor that it returned; None for
            other results.
    """

    def __init__(
        self, inputs: Sequence[Tensor], state: Iterable[Tensor], sources: bool = False, like: Tape | None = None
    ) -> None:
        super().__init__()
        self.layouts: dict[int, list[Any]] = {}
        self._like = like
        self.operations: list[Operation] = []
        self.written: list[Tensor] = []
        self._names: dict[Key, str] = {}
        self._alive: list[Tensor] = []
        self.values: dict[str, Tensor] = {}
        #: The names of views, with the value that made their memory.
        self._roots: dict[str, str] = {}
        self._state = {storage(t) for t in state}
        #: Memory that was allocated, and into which nothing was written that the tape saw.
        self._unwritten: set[int] = set()
        self._protected = {storage(t) for t in inputs} - self._state
        self.inputs = tuple(self.define(t, f"x{i}") for i, t in enumerate(inputs))
        #: What torch made of numbers: further inputs, the same in every call.
        self.constants: list[Tensor] = []
        self._given = set(self.inputs)
        #: The lines that nodes of autograd come from, by their numbers.
        self._lines: dict[int, str | None] | None = {} if sources else None

    # -- values --------------------------------------------------------------------------------------------------

    def define(self, t: Tensor, name: str) -> str:
        """Give a value its name; one that is there keeps its own."""
        self._alive.append(t)
        name = self._names.setdefault(key(t), name)
        self.values.setdefault(name, t)
        return name

    def add_constant(self, t: Tensor) -> str:
        name = self.protect(t, f"c{len(self.constants)}")
        self.inputs += (name,)
        self.constants.append(t)
        return name

    def protect(self, t: Tensor, name: str) -> str:
        """:meth:`define` for a further input."""
        self._protected.add(storage(t))
        self._given.add(name)
        return self.define(t, name)

    def known(self, t: Tensor) -> str | None:
        """The name of a value; None if it was made elsewhere."""
        return self._names.get(key(t))

    def name(self, t: Tensor) -> str:
        """The name of a value.

        Raises:
            Refusal: it was made elsewhere.
        """
        name = self.known(t)
        if name is not None:
            return name
        # The tensors that Python reads are inputs, so torch made this one of a number: in x[0] = 3, in TorchScript, in
        # torch.FloatTensor([3]).
        if t.numel() == 1 and t.device.type == "cpu" and not t.requires_grad:
            return self.add_constant(t)
        raise Refusal(Reason.READS_STATE, f"a tensor of shape {tuple(t.shape)} from outside")

    # -- recording -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.record(func, func, args, kwargs or {})

    def record(self, func: Any, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of an operation, which ``compute`` gives."""
        if any(tag in func.tags for tag in DEPENDENT) and not indexes_by_number(func, args):
            raise Refusal(Reason.DATA_DEPENDENT, f"{func} needs the value of a tensor")
        schema = func._schema
        # A recording runs a call more than once, and at a time of its own in each process: the others would wait, or
        # take what is sent for the next call.
        if communicates(func):
            raise Refusal(Reason.UNKNOWN_CALL, f"{func} communicates with other processes")
        written = written_arguments(func, args, kwargs)
        uncounted = written_arguments(func, args, kwargs, UNCOUNTED)
        if func is aten.lift_fresh.default:  # torch.tensor([1, 2]): a new tensor in each call
            with _disable_current_modes():
                constant = args[0].clone()
            self.add(aten.clone.default, (Value(self.add_constant(constant)),), {}, args[0], effect=False)
            return args[0]
        self._check_written(written, uncounted)
        if func.namespace == "prim":  # What a tensor without memory is asked for.
            return compute(*args, **kwargs)
        if is_nothing(func, args):
            return args[0]
        if func is aten.scaled_dot_product_attention.default:
            with self:  # In inference mode it arrives whole: it would choose in each call, and plan for each size.
                return func.decompose(*args, **kwargs)
        if func is aten.cat.default:
            args = (without_nothing(args[0]), *args[1:])
        name = schema.name
        is_view = not written and bool(schema.returns) and schema.returns[0].alias_info is not None
        is_view |= name == "aten::_unsafe_view"
        if not is_view and not name.endswith((*METADATA, *FILLING)):
            self.check_read((*args[name.endswith(PLACING) :], *kwargs.values()))
        self._unwritten -= {storage(t) for t in written if isinstance(t, Tensor)}
        call = self.arguments(args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        out = compute(*args, **kwargs)
        out = out if written else self._laid_out(out)
        if name.endswith(EMPTY) and out.numel() > 0:
            self._unwritten.add(storage(out))
        if func is aten._to_copy.default and set(kwargs) == {"dtype"} and out.dtype is not args[0].dtype:
            func, call = aten.to.dtype, self.arguments((args[0], out.dtype), {})  # Python has a C function for it
        if func in NEW:  # The first argument only says dtype and device, and would be kept for that.
            func, call = NEW[func], self.arguments((list(args[1]),), {"dtype": out.dtype, "device": out.device})
        # In inference mode reshape and the like arrive whole, which may copy.
        is_view = is_view and isinstance(out, Tensor | tuple | list) and in_memory_of(out, args[0])
        if isinstance(out, Tensor) and is_view:
            func, call = self._view(args[0], out) or (func, call)
        changes = bool(written)
        if func.namespace not in DECLARING or name.endswith(STATISTICS):  # These need not declare what they update.
            given = {storage(t) for t in (*args, *kwargs.values()) if isinstance(t, Tensor)}
            changes |= not self._state.isdisjoint(given)
        self.add(func, *call, out, changes or draws, is_view)
        return out

    def _laid_out(self, out: Any) -> Any:
        """The results of an operation, with the strides that they had on a tape of the same call."""
        if not isinstance(out, Tensor | tuple | list):
            return out
        each, place = [out] if isinstance(out, Tensor) else [*out], len(self.operations)
        self.layouts[place] = [(t.shape, t.stride()) if isinstance(t, Tensor) else None for t in each]
        known = [] if self._like is None else self._like.layouts.get(place, [])
        if len(known) != len(each):
            return out
        found = [like_recorded(t, *before) if before else t for t, before in zip(each, known, strict=True)]
        return found[0] if isinstance(out, Tensor) else type(out)(found)

    def _view(self, x: Tensor, view: Tensor) -> tuple[Any, Arguments] | None:
        """A view of a view as one of what made the memory; None where it must stay as it is."""
        direct = self.name(x)
        root = self._roots.get(direct, direct)
        self._roots.setdefault(self._names.get(key(view), f"v{len(self.values)}"), root)
        base = self.values[root]
        if root == direct or base.dtype is not view.dtype:
            return None
        whole = base.is_contiguous() and view.is_contiguous() and base.numel() == view.numel()
        # By the strides of dimensions with one element torch chooses kernels too, which round differently.
        if whole and (self._is_a_view_there() or base.view(view.shape).stride() == view.stride()):
            return aten.view.default, self.arguments((base, tuple(view.shape)), {})
        if root in self._given:  # Its offset differs from call to call.
            return None
        return aten.as_strided.default, self.arguments(
            (base, tuple(view.shape), view.stride(), view.storage_offset()), {}
        )

    def _is_a_view_there(self) -> bool:
        """Whether the next operation is a plain view on the tape of the same call."""
        known, place = self._like, len(self.operations)
        return known is not None and [o.function for o in known.operations[place : place + 1]] == [aten.view.default]

    def kernel(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a kernel that is no operation of torch, and record the call."""
        call = self.arguments(args, kwargs)
        with _disable_current_modes():
            out = function(*args, **kwargs)
        self._unwritten -= {storage(t) for t in args if isinstance(t, Tensor)}
        self.add(function, *call, out, True)
        return out

    def _check_written(self, written: Iterable[Any], uncounted: Sequence[Any]) -> None:
        for given in written:
            for t in given if isinstance(given, list | tuple) else [given]:
                if isinstance(t, Tensor):
                    if storage(t) in self._protected:
                        raise Refusal(Reason.VISIBLE_MUTATION, "an input is overwritten")
                    if storage(t) in self._state and not any(t is other for other in uncounted):
                        self.written.append(t)

    def check_read(self, values: Iterable[Any]) -> None:
        """Refuse to read memory that only a kernel can have written which torch's dispatcher does not see."""
        for value in values:
            if isinstance(value, list | tuple):
                self.check_read(value)
            elif isinstance(value, Tensor) and storage(value) in self._unwritten:
                raise Refusal(Reason.UNKNOWN_CALL, "a kernel that is no operation of torch")

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a call, with names in place of tensors."""
        return tuple(map(self._argument, args)), {name: self._argument(arg) for name, arg in kwargs.items()}

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Value(self.name(value))
        if isinstance(value, tuple | list):
            return (list if type(value) is list else tuple)(map(self._argument, value))
        if isinstance(value, torch.Generator | torch.UntypedStorage):
            raise Refusal(Reason.UNKNOWN_CALL, f"an argument of type {type(value).__name__}")
        return value

    def add(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, effect: bool, view: bool = False
    ) -> None:
        single = not isinstance(out, tuple | list)
        makes: list[str] = []
        for t in (out,) if single else out:
            if isinstance(t, Tensor):
                if t.layout is not torch.strided or t.is_conj() or t.is_neg():
                    raise Refusal(Reason.UNKNOWN_CALL, f"{function} makes a {t.layout} tensor")
                new = f"v{len(self.values)}"
                makes.append(new if self.define(t, new) == new else "")
            elif isinstance(t, tuple | list) or hasattr(t, "__tensor_flatten__"):
                raise Refusal(Reason.UNKNOWN_CALL, f"{function} returns a {type(t).__name__}")
            else:
                makes.append("")
        if effect or any(makes):
            source = None if self._lines is None else self.source(self._lines)
            self.operations.append(Operation(function, args, kwargs, tuple(makes), single, effect, view, source))

    @staticmethod
    def source(lines: dict[int, str | None]) -> str | None:
        """The line of a forward that an operation comes from. That of a backward is the line of its node."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            return lines.get(node._sequence_nr())
        found = line_of(sys._getframe(1))
        # That of the last node is set by the first operation after it: the others have none, or are part of it.
        lines.setdefault(torch._C._autograd._get_sequence_nr() - 1, found)  # type: ignore[attr-defined]
        return found

    def size(self, split: int) -> int:
        """The number of operations of torch that the first operations stand for, without views."""
        return sum(
            2 if is_kernel(op.function) else 1
            for op in self.operations[:split]
            if op.effect or (any(op.makes) and not op.view)
        )

    # -- the program ---------------------------------------------------------------------------------------------

    def program(
        self, split: int, results: Sequence[str], grads: Sequence[str], wanted: Sequence[str | None]
    ) -> Program:
        """The program of a tape whose first ``split`` operations are the forward.

        Args:
            split: the number of operations of the forward.
            results: the names of its results.
            grads: the names of their gradients; empty if there is no backward.
            wanted: the names of the gradients that backward returns.
        """
        forward, backward = self.operations[:split], self.operations[split:]
        steps = alive(backward, [name for name in wanted if name is not None])
        own = {name for step in steps for name in step.makes} | set(grads)
        used = frozenset().union(*(step.uses for step in steps), [name for name in wanted if name is not None])
        # Autograd sees whether an input or a result was changed since, but not whether another view of its memory was.
        owners = {storage(self.values[name]): name for name in (*self.inputs, *results)}
        kept, views = set(), []
        for name in sorted(used - own):
            owner = owners.get(storage(self.values[name]), name)
            if owner in self.inputs and name not in self.inputs:
                views += [op for op in alive([op for op in forward if op.view], [name]) if op not in views]
                continue
            kept.add(name if name in self.inputs else owner)
            if owner not in (name, *self.inputs):
                t = self.values[name]
                call = self.arguments((self.values[owner], tuple(t.shape), t.stride(), t.storage_offset()), {})
                views.append(Operation(aten.as_strided.default, *call, (name,), single=True, effect=False, view=True))
        kept |= {name for view in views for name in view.uses} - {name for view in views for name in view.makes}
        return Program(
            inputs=self.inputs,
            forward=alive(forward, [*results, *kept]),
            results=tuple(results),
            kept=tuple(sorted(kept)),
            grads=tuple(grads),
            backward=[*views, *steps] if grads else [],
            wanted=tuple(wanted),
            constants=tuple(self.name(t) for t in self.constants),
            values=self.values,
        )


def line_of(frame: FrameType | None) -> str | None:
    """The innermost line on a stack that is neither torch's nor of this package: ``block.py:88: x = self.norm(x)``;
    ``Block, rewritten: ...`` for the new source of a forward."""
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return None
    file, number = frame.f_code.co_filename, frame.f_lineno
    made = re.fullmatch(r"<fastlayers (.*) \d+>", file)
    place = f"{made[1]}, rewritten" if made else f"{Path(file).name}:{number}"
    return f"{place}: {linecache.getline(file, number).strip()}"


def written_arguments(
    function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], names: Container[str] | None = None
) -> list[Any]:
    """What a call is given that the operation writes: tensors, and lists of them; those with these names only."""
    return [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(function._schema.arguments)
        if argument.is_write and (names is None or argument.name in names)
    ]


def without_nothing(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Operands of a concatenation without those that torch leaves out, whatever their number of dimensions: a cache
    begins with ``torch.tensor([])``."""
    some = [t for t in tensors if t.dim() != 1 or t.numel() > 0]
    return some if any(t.dim() > 1 for t in some) else tensors


def is_nothing(function: OpOverload, args: Sequence[Any]) -> bool:
    """Whether a call returns its first argument: a dropout in inference mode, where it arrives whole, and the gradient
    of a slice of all, which torch leaves out where it knows the size."""
    if function is aten.slice_backward.default:
        _, _, _, *slice_ = args
        return slice_ == [0, sys.maxsize, 1]
    return function is aten.dropout.default and not args[2]


def like_recorded(t: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The tensor with these strides of the dimensions that have one element. No element depends on them: they are what
    strides and sizes of the others give, where that is the same number."""
    same = [*map(hint_of, t.shape)] == [*shape] if isinstance(t, Tensor) else False
    ones = [d for d, size in enumerate(t.shape) if is_one(size)] if same else []
    if not ones or all(hint_of(t.stride(d)) == strides[d] for d in ones):
        return t
    others = [(n, s) for n, s in zip(t.shape, t.stride(), strict=True) if not is_one(n)]
    known = {hint_of(each): each for n, s in others for each in (s, n * s)}
    new = [known.get(strides[d], strides[d]) if d in ones else stride for d, stride in enumerate(t.stride())]
    return t.as_strided(t.shape, new, t.storage_offset())


def communicates(function: OpOverload) -> bool:
    """Whether an operation sends to other processes, or waits for them."""
    return function.namespace in COLLECTIVES or any(given.name in GROUPS for given in function._schema.arguments)


def indexes_by_number(function: Any, args: Sequence[Any]) -> bool:
    """Whether a call indexes by positions, not by a mask, so that the shapes say what it returns."""
    if function._schema.name not in ("aten::index", "aten::index_put", "aten::_unsafe_index"):
        return False
    return not any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def in_memory_of(made: Any, t: Tensor) -> bool:
    return all(storage(other) == storage(t) for other in ((made,) if isinstance(made, Tensor) else made))


def key(t: Tensor) -> Key:
    if t.layout is not torch.strided or t.is_conj() or t.is_neg():
        raise Refusal(Reason.UNKNOWN_CALL, f"a {t.layout} tensor of {t.dtype}")
    geometry: Any = t.storage_offset(), t.shape, t.stride()
    if type(t) is FakeTensor:  # What a symbol stands for: a symbol may turn out to be another one.
        geometry = map_numbers((geometry[0], tuple(t.shape), t.stride()), lambda symbol: symbol.node.hint)
    return storage(t), t.dtype, *geometry
