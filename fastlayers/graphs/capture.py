"""One captured call: its forward and its backward as two CUDA graphs, and the node of autograd that replays them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks

from fastlayers.graphs import debug
from fastlayers.graphs.gradients import Gradients
from fastlayers.graphs.pool import Call, Pool, in_memory, in_one_segment
from fastlayers.graphs.state import State, UncapturedError, begun_collectives
from fastlayers.graphs.words import InWords
from fastlayers.ops.autocast import Given
from fastlayers.ops.dtensor import Whole, differentiable_shard_of, memory_of, shard_of
from fastlayers.ops.guard import PLAIN, KeptAsIs, kept_as_is
from fastlayers.patching.capture.run import is_ours
from fastlayers.patching.program.derivative import nodes_of
from fastlayers.patching.program.program import storage
from fastlayers.patching.regions.entries import alias, autocast_as, autocast_state, drawing, random_state
from fastlayers.patching.regions.patterns import Flat, unflatten
from fastlayers.patching.regions.region import text_of
from fastlayers.patching.regions.results import OpaqueError, Taken, put_together, take_apart, tensors_in
from fastlayers.patching.regions.stand_ins import stand_in
from fastlayers.patching.runtime.checks import original_class

__all__ = ["COMMUNICATES", "Capture", "capturing"]

#: Why a call is not captured: a process that runs a forward again, for a backward out of order, would do so alone.
COMMUNICATES = "communicates with other processes"

_retains_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

_streams: dict[torch.device, torch.cuda.Stream] = {}
_lock = threading.RLock()


class _Thread(threading.local):
    """Whether graphs of this thread are left alone, since a larger one is captured or a call is repeated."""

    capturing = False


_thread = _Thread()


def capturing() -> bool:
    return _thread.capturing


@contextmanager
def no_graphs() -> Iterator[None]:
    before, _thread.capturing = _thread.capturing, True
    try:
        yield
    finally:
        _thread.capturing = before


class Capture:
    """The graphs of calls with one signature.

    Args:
        module: whose class is a graphed one.
        present: the forward of the class below it.
        pattern, given: the arguments, as :func:`fastlayers.patching.regions.patterns.flatten` gives them.
        used: the numbers of the results that received a gradient in the calls before.
        draws: whether the forward draws random numbers on the GPU.
        state: of the module.
        pool: the memory of the graphs.

    Raises:
        UncapturedError: the call cannot be captured.
    """

    def __init__(
        self,
        module: nn.Module,
        present: Callable[..., Any],
        pattern: Any,
        given: Sequence[Tensor],
        used: set[int],
        draws: bool,
        state: State,
        pool: Pool,
    ) -> None:
        self.present, self.state, self.pool = present, state, pool
        self.device, self.name = given[0].device, original_class(module).__name__
        self.replays = 0
        #: Why no further call may be replayed; empty as long as that is not so.
        self.stale = ""
        #: The results that received a gradient, where these were others than in the calls before.
        self.received: set[int] = set()
        self._draws, self._lock = draws, threading.RLock()
        self.autocast = autocast_state()
        #: The module as it is, which is captured, and in whose place calls run op by op; and its state.
        self._stand_in = stand_in(module, lambda t: t)
        self._known = State(self._stand_in, self.device)
        self._number = pool.number()
        self._pending: ReferenceType[Call] | None = None
        self.inputs = [like(t) for t in given]
        self._saved = Storages()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        before, begun = torch.cuda.memory_reserved(self.device), begun_collectives()
        with _lock, no_graphs(), torch.cuda.device(self.device):
            parameters = [p for p in module.parameters() if p.requires_grad and torch.is_grad_enabled()]
            # Leaves of their own: those of the calls before belong to the streams of these.
            leaves = [nn.Parameter(p.detach()) for p in parameters]
            other = dict(zip(map(id, parameters), leaves, strict=True))
            copy = self._stand_in  # Another thread may run the module itself.
            try:
                with substituted(copy, other), InWords() if state.is_parallel else nullcontext():
                    try:
                        self._capture_forward(copy, pattern, hooked=True)
                    except UncapturedError as error:
                        if "saved tensor hooks" not in str(error):
                            raise
                        # torch.func inside of the forward allows none. The backward may read all of the module then.
                        self._saved.found = {storage(memory_of(t)) for t in (*state.constant, *parameters)}
                        self._capture_forward(copy, pattern, hooked=False)
                    self._capture_backward(parameters, leaves, used)
            finally:
                torch.clear_autocast_cache()
        #: Whether a replay sends to other processes, or waits for them.
        self.communicates = begun_collectives() != begun
        if self.communicates and not state.is_parallel:
            # Those of a forward were seen before; a backward may have others.
            raise UncapturedError(COMMUNICATES)
        self.memory = torch.cuda.memory_reserved(self.device) - before

    # -- capturing -----------------------------------------------------------------------------------------------

    def _capture_forward(self, module: nn.Module, pattern: Any, hooked: bool) -> None:
        flat = Flat(self.inputs)
        args, kwargs = (unflatten(part, flat) for part in pattern)
        torch.clear_autocast_cache()  # A cast that was made before would be memory of somebody else.
        before = self.pool.blocks(used=True)
        self._forward: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph()
        with captured(self._forward, self.device, self.pool):
            with saved_tensors_hooks(self._saved, kept_as_is) if hooked else nullcontext():
                out = self.present(module, *args, **(kwargs or {}))
            results = Taken()
            try:
                self._parts = take_apart(out, results)
            except OpaqueError as error:
                raise UncapturedError(str(error)) from None
            #: What the results are, of which the graphs have the shards of this rank.
            self._wholes = [Whole.of(t) for t in results]
            self.results: list[Tensor] = [differentiable_shard_of(t) for t in results]
            del results
        self._check(self.results, module)
        self._active = [t.requires_grad for t in self.results]
        left = set(self.pool.blocks(used=True)).difference(before)
        #: What the forward leaves for the backward.
        self._kept = [*(in_memory(block, self.device) for block in left), *(t.detach() for t in self.inputs)]

    def _check(self, results: Sequence[Tensor], module: nn.Module) -> None:
        if not results:
            raise UncapturedError("it returns no tensor")
        for t in results:
            if type(t) not in PLAIN or t.device != self.device:
                raise UncapturedError(f"it returns a {type(t).__name__} on {t.device}")
        memory = [storage(t) for t in results]
        others = {storage(memory_of(t)) for t in (*self.inputs, *module.parameters(), *module.buffers())}
        if len(set(memory)) < len(memory) or not others.isdisjoint(memory):
            raise UncapturedError("a result shares memory with another one, an argument or a parameter")

    def _capture_backward(self, parameters: list[nn.Parameter], leaves: list[nn.Parameter], used: set[int]) -> None:
        known = {id(t) for t in (*self.inputs, *leaves)}
        reached = {*map(id, leaves_of(self.results))}
        if not reached <= known:
            raise UncapturedError("it uses a tensor that needs a gradient and is neither an argument nor a parameter")
        self.used = [i for i in sorted(used) if i < len(self.results) and self._active[i]]
        self._dys = [torch.empty_like(self.results[i]) for i in self.used]
        #: The arguments, by their places, and the parameters that any result depends on.
        self.places = [i for i, t in enumerate(self.inputs) if id(t) in reached]
        self._parameters = [p for p, leaf in zip(parameters, leaves, strict=True) if id(leaf) in reached]
        wanted = [*(self.inputs[i] for i in self.places), *(leaf for leaf in leaves if id(leaf) in reached)]
        grads: Sequence[Tensor | None] = [None] * len(wanted)
        self._backward = torch.cuda.CUDAGraph()
        self._whole_grads: list[Whole | None] = []
        if self.used:
            results = [self.results[i] for i in self.used]
            # What autograd kept stays, so that no other graph that is captured into the same memory writes there.
            keep = self.pool.shared
            with captured(self._backward, self.device, self.pool):
                grads = torch.autograd.grad(results, wanted, self._dys, retain_graph=keep, allow_unused=True)
                self._whole_grads = [Whole.of(grad) for grad in grads if grad is not None]
                grads = [None if grad is None else shard_of(grad) for grad in grads]
            self._nodes = [t.grad_fn for t in results] if keep else []
            # One that is a view would keep the tensor that it is a view of, and seem to share its memory.
            grads = [None if grad is None else grad.detach() for grad in grads]
            del results
        self.results = [t.detach() for t in self.results]
        #: Which of them get a gradient from the results that are used.
        self._given = [grad is not None for grad in grads]
        self._grads = [grad for grad in grads if grad is not None]
        idle = [p for p, leaf in zip(parameters, leaves, strict=True) if id(leaf) not in reached]
        #: The tensors of the module that the backward reads,
        self.needed = [t for t in counted(self.state.tensors) if storage(memory_of(t)) in self._saved.found]
        known = {*map(id, self.needed)}
        #: and after them others that the forward reads again.
        self.read = [*self.needed, *(t for t in counted((*self.state.constant, *idle)) if id(t) not in known)]

    @cached_property
    def _gradients(self) -> Gradients:
        """Made after the capture: autograd's thread may keep a gradient for a moment after it has returned it."""
        grads, self._grads = self._grads, []  # Nothing here may keep one that is moved.
        return Gradients(grads, lend=not self.pool.shared)

    # -- replaying -----------------------------------------------------------------------------------------------

    @property
    def described(self) -> str:
        return f"{self.name}({', '.join(str(tuple(t.shape)) for t in self.inputs)})"

    def holds(self) -> bool:
        """Whether a call may be replayed. Afterwards nobody has a gradient in the memory of the graphs.

        A process that alone keeps gradients replays what the others do, as NCCL asks of collectives.
        """
        with self.pool.lock:  # Another thread may run a backward.
            if self._gradients.in_use():
                self.pool.write(self._number, self.device)
                self._gradients.move()
        return not self.stale and self.state.holds()

    def busy(self) -> bool:
        """Whether the backward of an earlier call may still come, which needs what this one would overwrite."""
        call = self._pending() if self._pending is not None else None
        return call is not None and call.pending

    def run(self, pattern: Any, given: Sequence[Tensor]) -> Any:
        """The result of a call."""
        if not debug.ENABLED:
            return self._run(pattern, given)
        expected = tensors_in(self.uncaptured(pattern, given, random_state(given), {}))
        out = self._run(pattern, given)
        debug.compare(tensors_in(out), expected, f"results of a {self.described}", self.autocast)
        return out

    def _run(self, pattern: Any, given: Sequence[Tensor]) -> Any:
        self.pool.write(self._number, self.device)
        with torch.no_grad():
            torch._foreach_copy_(self.inputs, list(given))
        self.replays += 1
        if not any(self._active):
            return self._put_together(self.forward())
        random = random_state(given) if self._draws else []
        increment_version(self.state.changed)  # A replay does not.
        call = Call(pattern, random, self._kept, self.state.changed, self.read)
        self._pending = ref(call)
        self.pool.expect(self._number, call)
        wanted = *(given[i] for i in self.places), *self._parameters
        return self._put_together(Replay.apply(self, call, given, *wanted))

    def _put_together(self, shards: Sequence[Tensor]) -> Any:
        results = [t if whole is None else whole.of_shard(t) for t, whole in zip(shards, self._wholes, strict=True)]
        return put_together(self._parts, results)

    def __del__(self) -> None:
        """Wait for the GPU before the memory of the graphs may be given back.

        torch unmaps a segment that grows when the stream is done which it was captured on, and graphs are replayed on
        others. For the same reason gradients that are in use get memory of their own.
        """
        if not vars(self).get("replays") or sys.is_finalizing():
            return
        with suppress(RuntimeError):  # An error of the GPU is not one of this object.
            if not torch.cuda.is_current_stream_capturing():  # Before a capture torch has waited for all replays.
                torch.cuda.synchronize(self.device)
                if self._gradients.in_use():
                    self._gradients.move()
                    torch.cuda.synchronize(self.device)

    def uncaptured(
        self, pattern: Any, given: Sequence[Tensor], random: Sequence[Tensor], others: Mapping[int, Tensor]
    ) -> Any:
        """The result of a call op by op, which leaves the buffers as they are. ``others`` are read in place of tensors
        of the module, by identity.

        Raises:
            NotAgainError: something that it reads besides these has changed.
        """
        module, flat = self._stand_in, Flat(given)
        args, kwargs = (unflatten(part, flat) for part in pattern)
        clones = {id(t): others.get(id(t), t).clone() for t in module.buffers()}
        with self._lock, no_graphs(), drawing(random, given):
            if not self._known.same_python():
                raise not_again(self, "what it reads besides its arguments has changed since")
            with substituted(module, {**others, **clones}):
                return self.present(module, *args, **(kwargs or {}))

    def forward(self) -> tuple[Tensor, ...]:
        self._forward.replay()
        results = tuple(t.clone() for t in self.results)
        if debug.ENABLED:
            debug.spoil(self.pool, self.device)
        return results

    def constant(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The results that need no gradient."""
        return [t for t, active in zip(results, self._active, strict=True) if not active]

    def check(self, call: Call) -> None:
        """Raise torch's error if something that the backward reads was written since the call."""
        for t, version in zip(self.needed, call.versions, strict=False):
            if t._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                    f" parameter or buffer of shape {[*t.shape]} of a graphed {self.name} is at version {t._version};"
                    f" expected version {version} instead"
                )

    def fits(self, dys: Sequence[Tensor | None]) -> bool:
        """Whether the results that received a gradient in the calls before do so now.

        Zeros in place of one that is missing would give zeros to parameters that get none, and NaN where a derivative
        is infinite.
        """
        return [i for i, dy in enumerate(dys) if dy is not None] == self.used

    def backward(self, call: Call, dys: Sequence[Tensor | None]) -> list[Tensor | None]:
        again = _retains_graph()
        with self.pool.lock:
            if call.pending:
                self.pool.write(self._number, self.device)
                if again:
                    call.save()
            else:  # Another call may wait for its backward, and somebody have the gradients of an earlier backward.
                self.pool.write(self._number - 1, self.device)
                if self._gradients.in_use():
                    self._gradients.move()
                call.restore()
            torch._foreach_copy_(self._dys, [dy for dy in dys if dy is not None])
            self._backward.replay()
            grads = self._gradients.hand_out()
        if not again:
            call.done, call.copies = True, None
        if debug.ENABLED:
            debug.spoil(self.pool, self.device)
        wholes = zip(grads, self._whole_grads, strict=True)
        found = iter([t if whole is None else whole.of_shard(t) for t, whole in wholes])
        return [next(found) if given else None for given in self._given]


class Storages(KeptAsIs):
    """A hook on saved tensors that notes their storages."""

    def __init__(self) -> None:
        self.found: set[int] = set()

    def __call__(self, t: Tensor) -> Tensor:
        self.found.add(storage(t))
        return t


class Replay(torch.autograd.Function):
    """A replayed call. What its backward needs is in the memory of the graphs. It refers to its arguments in case that
    the forward runs again; were they saved tensors, nobody could write them before a backward that does not need it."""

    @staticmethod
    def forward(ctx: Any, capture: Capture, call: Call, given: Sequence[Tensor], *wanted: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.capture, ctx.call, ctx.count, ctx.given = capture, call, len(given), Given(*given, *wanted)
        results = capture.forward()
        ctx.mark_non_differentiable(*capture.constant(results))
        return results

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        capture, call = ctx.capture, ctx.call
        if all(dy is None for dy in dys):
            return (None,) * (3 + len(ctx.needs_input_grad[3:]))
        if ctx.given is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: what a graphed forward was given was freed. "
                "Specify retain_graph=True in the first backward"
            )
        if torch.is_grad_enabled():
            capture.stale = "its backward is differentiated (create_graph=True)"
        elif not capture.fits(dys):
            capture.received = {i for i, dy in enumerate(dys) if dy is not None}
            capture.stale = "other results receive a gradient than before"
        elif not capture.state.is_in_place():
            capture.stale = "its parameters move between a forward and its backward"
        elif not call.done:
            capture.check(call)
            grads: Sequence[Tensor | None] = capture.backward(call, dys)
            if debug.ENABLED:
                with suppress(NotAgainError):
                    debug.compare(grads, again(ctx, dys), f"gradients of a {capture.described}", capture.autocast)
            return None, None, None, *Replay.freed(ctx, grads)
        return None, None, None, *Replay.freed(ctx, again(ctx, dys))

    @staticmethod
    def freed(ctx: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients, after the node has let go of what it was given, as one that saved it would."""
        if not (torch.is_grad_enabled() or _retains_graph()):
            ctx.given = None
        return grads


def again(ctx: Any, dys: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients by a second forward, uncaptured.

    Raises:
        NotAgainError: it would not be that of the call.
    """
    capture, call = ctx.capture, ctx.call
    if capture.communicates:
        raise not_again(capture, "it communicates with other processes, which might not run it")
    try:
        tensors = ctx.given.unchanged()
    except RuntimeError:
        raise not_again(capture, "its arguments or parameters were written since") from None
    given, wanted = tensors[: ctx.count], tensors[ctx.count :]
    if call.versions != [t._version for t in capture.read]:
        raise not_again(capture, "its parameters or buffers were written since")
    old = dict(zip(map(id, capture.state.changed), call.old, strict=True))
    with torch.enable_grad(), autocast_as(capture.autocast):  # The backward may be outside of it.
        # Of aliases: an argument may itself depend on another one, and a parameter may be frozen by now.
        aliases = [alias(t) if i in capture.places else t for i, t in enumerate(given)]
        parameters = {id(p): alias(p) for p in wanted[len(capture.places) :]}
        out = capture.uncaptured(call.pattern, aliases, call.random, {**old, **parameters})
    results = [differentiable_shard_of(t) for t in tensors_in(out)]
    chosen = [i for i, dy in enumerate(dys) if dy is not None]
    return torch.autograd.grad(
        [results[i] for i in chosen],
        [*(aliases[i] for i in capture.places), *parameters.values()],
        [dys[i] for i in chosen],
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )


class NotAgainError(RuntimeError):
    """A forward would not give again what it gave in a call."""


def not_again(capture: Capture, reason: str) -> NotAgainError:
    why = capture.stale or "its gradients are compared"
    return NotAgainError(
        f"{why}: the forward of a graphed module would have to run again, and {reason}. Call"
        " fastlayers.ungraph_model(model) before such a call"
    )


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Pool) -> Iterator[None]:
    """Capture what runs inside.

    torch keeps the workspace of cuBLAS by stream. That of another graph would be memory of its pool, and is freed there
    when any graph of the stream goes (pytorch/pytorch#193402): each graph gets its own, and leaves it to its pool.

    Raises:
        UncapturedError: something there cannot be captured; torch is as before.
    """
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    present, stream = torch.cuda.current_stream(device), _streams[device]
    # What other threads do, such as one that pins the memory of batches, does not end the capture.
    capture = torch.cuda.graph(graph, pool=pool.handle, stream=stream, capture_error_mode="thread_local")
    try:
        with in_one_segment(device), capture:
            yield
        pool.use(graph)
    except Exception as error:
        torch.cuda.set_stream(present)
        recover(graph, stream)
        if is_ours(error) and not isinstance(error, RuntimeError):  # torch has those for what it cannot capture
            text_of("capturing", error)
        raise UncapturedError(f"{type(error).__name__}: {error}".splitlines()[0]) from None
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def recover(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Undo what torch leaves behind of a capture that failed: a pool in use, and a generator that awaits the end."""
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(stream.device.index, graph.pool())  # type: ignore[attr-defined]
    empty = torch.cuda.CUDAGraph()
    with torch.cuda.graph(empty, stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=stream.device)


@contextmanager
def substituted(module: nn.Module, other: Mapping[int, Tensor]) -> Iterator[None]:
    """Put other tensors, by the identity of each, in the places of parameters or buffers, also in lists, as an LSTM has
    one of its weights."""
    before: list[tuple[Any, Any, Tensor]] = []
    for each in module.modules():
        for owner in (each._parameters, each._buffers, *vars(each).values()):
            if type(owner) in (list, dict):
                places: Any = enumerate(owner) if type(owner) is list else owner.items()
                before += [(owner, place, t) for place, t in places if id(t) in other]
    try:
        for owner, place, t in before:
            owner[place] = other[id(t)]
        yield
    finally:
        for owner, place, t in before:
            owner[place] = t


def leaves_of(results: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves that the gradients of results go to."""
    return (node.variable for node in nodes_of(results) if hasattr(node, "variable"))


def counted(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those of which torch counts the writes: not the ones of inference mode."""
    return (t for t in tensors if not t.is_inference())


def like(t: Tensor) -> Tensor:
    """Memory for an argument, with its strides."""
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return made.copy_(t.detach()).requires_grad_(t.requires_grad)
