"""A module whose calls are replayed: it decides, per signature, which calls run as they are and which are captured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fastlayers.graphs.capture import COMMUNICATES, Capture, capturing
from fastlayers.graphs.pool import Pool
from fastlayers.graphs.state import Counter, Generators, State, UncapturedError, draw, waits
from fastlayers.patching.capture.values import containers_in, contents, same_items
from fastlayers.patching.plan import refuse_kind
from fastlayers.patching.program.program import storage
from fastlayers.patching.reasons import Left, Reason, Refusal
from fastlayers.patching.regions.entries import described, random_state
from fastlayers.patching.regions.patterns import NONE, flatten
from fastlayers.patching.regions.results import OpaqueError, Taken, put_together, take_apart
from fastlayers.patching.rewrite.classes import become, check_subclassing, generated_class, is_sharded
from fastlayers.patching.runtime.checks import original_class, original_of

__all__ = ["Graphs", "Signature", "graph_module", "graphs_of", "is_graphed", "release_module"]

#: Operations for which a graph pays: a replay takes some 100 us of the host, an operation of torch 5 us.
LEAST = 30
#: The operations of a forward and its backward as a multiple of those of the forward.
WITH_BACKWARD = 3
#: Changes of the modules after which a signature is not captured again.
MAX_CHANGES = 8

_graphs: WeakKeyDictionary[nn.Module, Graphs] = WeakKeyDictionary()


class Signature:
    """Calls with the same arguments, but for the values of tensors, in the same modes.

    Attributes:
        what: describes them in a report.
        calls: so many ran as they are.
        captures: more than one if a forward began before the backward of another.
        reason: why they run as they are; empty if they do not, or not yet.
        used: the numbers of the results that received a gradient.
        draws: whether random numbers are drawn on the GPU.
        chances: how many numbers are drawn on the CPU that decide nothing.
        waits: where a call waited for the GPU. Code that asks whether it is captured may do without.
        changes: how often the modules changed after a capture.
        state: of the modules when a call was last watched.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.calls = 0
        self.captures: list[Capture] = []
        self.reason = ""
        self.used: set[int] = set()
        self.draws = False
        self.chances = 0
        self.waits = ""
        self.changes = 0
        self.state: State | None = None
        self._past = 0

    @property
    def replays(self) -> int:
        return self._past + sum(capture.replays for capture in self.captures)

    def turn_off(self, reason: str) -> None:
        self._past, self.captures, self.state, self.reason = self.replays, [], None, reason

    def drop(self, capture: Capture) -> None:
        self.captures.remove(capture)
        self._past += capture.replays
        self.used = capture.received or self.used
        self.changes += 1

    @property
    def memory(self) -> int:
        """Bytes that the graphs reserve."""
        return sum(capture.memory for capture in self.captures)


class Graphs:
    """The signatures of one module's calls.

    Args:
        present: the class of the module without graphs.
        inner: whether it is tried since a larger module could not be captured.
        pool: the memory of graphs that it shares with others of the model.
    """

    def __init__(self, present: type[nn.Module], warmup: int, max_graphs: int, inner: bool, pool: Pool) -> None:
        self.present: Any = present
        self.inner, self.pool = inner, pool
        self.warmup, self.max_graphs = warmup, max_graphs
        self.signatures: dict[Any, Signature] = {}
        #: Reasons that hold for calls of any signature.
        self.refused: dict[str, int] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: list[Tensor] = []
        pattern = flatten(args, given), flatten(kwargs, given) if kwargs else NONE
        reason, mode = unfit(pattern, given), other_modes()
        if reason or mode:
            if reason and reason not in self.refused:
                self.descend(module)
            self.refuse(reason or mode)
            return self.present.forward(module, *args, **kwargs)
        if torch.cuda.is_current_stream_capturing():  # by somebody else, as a part of something larger
            return self.present.forward(module, *args, **kwargs)
        key = key_of(module, pattern, given)
        signature = self.signatures.get(key)
        if signature is None:
            signature = self.new_signature(key, described(module, given))
        if signature.reason:
            return self.present.forward(module, *args, **kwargs)
        signature.calls += 1
        if signature.calls < self.warmup:
            return self.present.forward(module, *args, **kwargs)
        if signature.calls == self.warmup:
            return self.watched(signature, module, args, kwargs, given)
        with (
            self.pool.lock
        ):  # Another thread must not replay between the copy of the arguments and that of the results.
            capture = self.capture(signature, module, pattern, given)
            if capture is not None:
                draw(signature.chances)
                return capture.run(pattern, given)
        return self.present.forward(module, *args, **kwargs)

    def new_signature(self, key: Any, what: str) -> Signature:
        if len(self.signatures) >= 4 * self.max_graphs:  # Shapes keep changing. The oldest of those is forgotten.
            spare = (known for known, signature in self.signatures.items() if not signature.captures)
            del self.signatures[next(spare)]
        self.signatures[key] = signature = Signature(what)
        return signature

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def turn_off(self, signature: Signature, module: nn.Module, reason: str, inside: bool = True) -> None:
        """Let the calls of a signature run as they are from now on. ``inside``: the children are to be tried."""
        signature.turn_off(reason)
        if inside:
            self.descend(module)
        elif self.inner and all(other.reason for other in self.signatures.values()):
            release_module(module)

    def descend(self, module: nn.Module) -> None:
        """Try the children. A child of which no call is captured costs nothing more then."""
        # They need the calls before a capture themselves: those of this module may have been one region.
        graph_children(module, self.warmup, self.max_graphs, self.pool)
        if self.inner and all(other.reason for other in self.signatures.values()):
            release_module(module)

    def watched(
        self,
        signature: Signature,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
    ) -> Any:
        """The result of the last call before the capture, which shows whether the GPU can do such calls alone."""
        try:
            signature.state = state = State(module, given[0].device)
        except UncapturedError as error:
            self.turn_off(signature, module, str(error))
            return self.present.forward(module, *args, **kwargs)
        on_cpu, on_gpu = Generators(), random_state(given)
        containers = [*containers_in((*args, *kwargs.values()))]
        held = [contents(container) for container in containers]
        with waits() as places, Counter() as counter:
            out = self.present.forward(module, *args, **kwargs)
        signature.draws = any(not torch.equal(a, b) for a, b in zip(on_gpu, random_state(given), strict=True))
        signature.chances = len(counter.chances)
        results = Taken()
        try:
            parts = take_apart(out, results)
        except OpaqueError:  # The capture will say so.
            parts, results = out, Taken()
        trains = any(t.requires_grad for t in results)
        if counter.count * (WITH_BACKWARD if trains else 1) < LEAST:
            self.turn_off(signature, module, f"too small: {counter.count} operations", inside=False)
        elif counter.communicates and not state.is_parallel:
            self.turn_off(signature, module, COMMUNICATES)
        elif counter.copies:
            self.turn_off(signature, module, "copies a tensor of the CPU")
        elif counter.decided or not on_cpu.drew(signature.chances):
            self.turn_off(signature, module, "draws random numbers on the CPU")
        elif not state.holds():
            self.turn_off(signature, module, "changes attributes of its modules")
        elif not counter.written.isdisjoint(map(storage, given)):
            self.turn_off(signature, module, "writes into an argument")
        elif any(not same_items(contents(each), before) for each, before in zip(containers, held, strict=True)):
            self.turn_off(signature, module, "changes a list or a dict that it is given")
        elif any(each is container for each in containers_in(out) for container in containers):
            self.turn_off(signature, module, "returns a list or a dict that it is given")
        if signature.reason:
            return out
        state.note_written(counter.written)
        signature.waits = places[0] if places else ""
        # Other tensors than those of the module, which get a gradient in there too: logits that the loss comes from do.
        outside = [t.view_as(t) if t.requires_grad else t for t in results]
        for i, t in enumerate(outside):
            if t.requires_grad:
                t.register_hook(functools.partial(note, signature.used, i))
        return put_together(parts, outside)

    def capture(self, signature: Signature, module: nn.Module, pattern: Any, given: list[Tensor]) -> Capture | None:
        """The graphs for a call; None if it has to run as it is."""
        for capture in list(signature.captures):
            if not capture.holds():
                signature.drop(capture)
                if signature.changes > MAX_CHANGES or "create_graph" in capture.stale:
                    self.turn_off(signature, module, capture.stale or "its modules change between calls", inside=False)
                    return None
            elif not capture.busy():
                return capture
        if not (signature.state and signature.state.holds()):  # Watch the next call again.
            signature.calls, signature.state = self.warmup - 1, None
            return None
        if sum(len(other.captures) for other in self.signatures.values()) >= self.max_graphs:
            if not signature.captures:
                self.turn_off(signature, module, f"there are max_graphs={self.max_graphs} graphs already", inside=False)
            return None
        before = torch.get_rng_state()
        try:
            made = Capture(
                module,
                self.present.forward,
                pattern,
                given,
                signature.used,
                signature.draws,
                signature.state,
                # Memory of its own takes less where there is one backward: its gradients need not be copied.
                self.pool if self.inner or not torch.is_grad_enabled() else Pool(shared=False),
            )
        except (UncapturedError, RuntimeError) as error:
            waits = signature.waits and f"waits for the GPU at {signature.waits}"
            self.turn_off(signature, module, waits or str(error).splitlines()[0])
            return None
        finally:
            torch.set_rng_state(before)
        signature.captures.append(made)
        return made


def note(used: set[int], i: int, grad: Tensor) -> None:
    used.add(i)


def unfit(pattern: Any, given: list[Tensor]) -> str:
    """Why a call with such arguments is not captured; empty if it may be."""
    if None in pattern:
        return "an argument is neither a tensor nor a plain value"
    if not given:
        return "no argument is a tensor"
    device = given[0].device
    if device.type != "cuda" or any(t.device != device for t in given):
        return f"arguments are on {', '.join(sorted({str(t.device) for t in given}))}"
    return ""


def other_modes() -> str:
    """Why no call is captured in the present modes of torch; empty if one may be."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "inside of a mode of torch"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:  # type: ignore[attr-defined]
        return "inside of a transform of torch.func"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # type: ignore[attr-defined]
        return "inside of a checkpoint, or of other hooks on saved tensors"
    return ""


def key_of(module: nn.Module, pattern: Any, given: list[Tensor]) -> Any:
    return (
        pattern,
        tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in given),
        module.training,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )


# -- the class ---------------------------------------------------------------------------------------------------------


def is_graphed(module: nn.Module) -> bool:
    return "__fastlayers_graphed__" in type(module).__dict__


def graphs_of(module: nn.Module) -> Graphs | None:
    return _graphs.get(module)


def graph_module(module: nn.Module, warmup: int, max_graphs: int, outer: Pool | None = None) -> None:
    """Let the calls of a module be captured; into the memory of the ``outer`` module, if that cannot be.

    Raises:
        Refusal: its class cannot be swapped.
    """
    refuse_kind(module)
    original = original_class(module)
    check_subclassing(original, harmless=original.__mro__)
    present, inner = type(module), outer is not None
    if not become(module, graphed_class(present, warmup, max_graphs, inner)):
        raise Refusal(Reason.FORWARD_REPLACED)
    _graphs[module] = Graphs(present, warmup, max_graphs, inner, outer or Pool(shared=True))


def release_module(module: nn.Module) -> bool:
    """Undo :func:`graph_module`, and free the graphs. False if a wrapper calls the present forward."""
    _graphs.pop(module, None)
    return not is_graphed(module) or become(module, type(module).__fastlayers_graphed__)  # type: ignore[attr-defined]


def graph_children(module: nn.Module, warmup: int, max_graphs: int, pool: Pool) -> None:
    """Let the calls of the children be captured; of containers without a forward, those of what they hold.

    Not inside of FSDP2's modules, whose parameters have memory while these run and no longer.
    """
    if any(map(is_sharded, type(module).__mro__)):
        return
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            graph_children(child, warmup, max_graphs, pool)
        elif not is_graphed(child) and any(True for _ in child.children()):
            try:
                graph_module(child, warmup, max_graphs, pool)
            except Refusal:
                graph_children(child, warmup, max_graphs, pool)


def graphed_class(present: type[nn.Module], warmup: int, max_graphs: int, inner: bool) -> type[nn.Module]:
    """A subclass whose forward is replayed where it can be."""
    original = original_of(present)
    plain: Callable[..., Any] = present.forward
    is_compiling, is_tracing = torch.compiler.is_compiling, torch._C._is_tracing

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or capturing() or is_tracing():
            return plain(self, *args, **kwargs)
        if not isinstance(self, made):  # It is not graphed any more, and a wrapper of its forward is left.
            return type(self).forward(self, *args, **kwargs)
        graphs = _graphs.get(self)
        if graphs is None or graphs.present is not present:
            graphs = _graphs[self] = Graphs(present, warmup, max_graphs, inner, Pool(shared=True))
        return graphs(self, args, kwargs)

    members = {"forward": forward, "__fastlayers_graphed__": present}
    if original is present:
        members["__fastlayers_reason__"] = Left(Reason.GRAPHED)
    made = generated_class(f"Graphed{original.__name__}", present, members, unseen=True)
    return made
