"""The reason codes of a report, and the exceptions of patching."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node

__all__ = ["Left", "PatchError", "PatchWarning", "Reason", "Refusal"]


class Reason(str, Enum):
    """Why a module, or one place in its forward, was not fused. A report prints the value."""

    # The module as a whole
    NOT_SELECTED = "not selected by include, exclude or filter_fn"
    NO_RULE = "no rule looks for this layer"
    NOTHING_TO_FUSE = "nothing in its forward that a rule fuses"
    SAVES_NOTHING = "a fused kernel would save neither a launch nor a byte"
    UNKNOWN_NORM = "normalises by hand, in a way that is not known"
    SUBCLASS = "a subclass of a layer that a rule replaces, with code of its own"
    FORWARD_REPLACED = "its forward was replaced on the instance (accelerate and others do), which bypasses its class"
    PARAMETRIZED = "parametrized, which already swaps its class"
    SCRIPTED = "scripted, there is no Python forward"
    GRAPH_MODULE = "a torch.fx GraphModule, which rewrites its own class"
    QUANTIZED = "quantised"
    UNINITIALIZED = "its parameters are uninitialised, which the first call changes: call the model, and patch it then"
    WRAPPER = "a wrapper; only what is inside is patched"
    GRAPHED = "runs as CUDA graphs (graph_model): patch it before"
    FOLDED = "its BatchNorms are folded: unfold, patch, and fold again"
    CALLS_MODULES = "its captured graph calls modules, which Dynamo does where inline_inbuilt_nn_modules is off"
    RESHAPED_IN_PLACE = "its captured graph gives a tensor another shape in place, and the recorded shapes may be wrong"
    CLASS_HOOKS = "its class reacts to being subclassed (a metaclass or __init_subclass__)"

    # Its forward cannot be rewritten safely
    NO_SOURCE = "the source of its forward is not available"
    DECORATED = "its forward is decorated"
    SIGNATURE = "its forward has parameters that a rewritten one could not have"
    SYNTAX = "its forward uses a construct that the tracer does not follow"
    CONTEXT_MANAGER = "its forward opens a context manager, which a graph would lose"
    CHANGES_STATE = "its forward changes Python state"
    READS_STATE = "its forward reads Python state that could change unnoticed"
    DATA_DEPENDENT = "its forward branches or loops on a traced value"
    IDENTITY_TEST = "its forward asks whether a computed value is None or another object"
    TYPE_TEST = "its forward asks for the type of a computed value"
    UNKNOWN_CALL = "its forward calls something that can be neither followed nor recorded"
    TRACE_FAILED = "its forward could not be traced"
    RECORDING_FAILED = "an error of fastlayers in tracing or recording: calls run without what failed"

    # Calls that run op by op, although the forward may be a region
    SEEN_ONCE = "seen once so far: the second call with a signature is recorded"
    SIZES = "its program is another one for other sizes"
    REGION_SIZE = "too few operations for a region, or too many"
    UNKNOWN_ARGUMENT = "an argument of a type that no signature has"
    MANY_SIGNATURES = "signatures keep changing: each further one is recorded after twice as many calls"
    DIFFERENTIATED = "a backward of such a call was differentiated"
    SOME_GRADIENTS = "a result got no gradient, and generated kernels take those of all"

    # A place that looks fusable and is not
    UNKNOWN_LOSS = "its loss function is not one that is known"
    UNKNOWN_HEAD = "the layer that computes the logits is no linear layer of torch, peft or bitsandbytes"
    LOGITS_USED = "its forward uses the logits for more than the loss"
    USED_ELSEWHERE = "an intermediate result is used elsewhere"
    USED_BETWEEN = "an intermediate result is used before the last of the operations"
    VISIBLE_MUTATION = "an in-place operation changes a tensor that something else can see"
    WRITTEN_BETWEEN = "an operand may be overwritten between the two operations"
    DRAWN_BETWEEN = "random numbers may be drawn between the two operations, whose order would change"
    BIAS_DTYPE = "the bias of a linear layer is not of the dtype of its weight"
    ALPHA = "alpha of the addition is not 1"
    FINITE_FILL = "the masked positions get a finite value, not minus infinity"
    TENSOR_SCALE = "the scale is a tensor, not a number"
    IMPLICIT_DIM = "the dimension of the softmax is not given"
    TRAINING = "in training mode, where a BatchNorm uses the statistics of its batch: call eval() first"
    NO_STATISTICS = "a BatchNorm without running statistics"
    HOOKED_CHILD = "a hook on a child layer would not run"
    EXCLUDED_CHILD = "a child layer that would be absorbed is excluded"


class Refusal(Exception):  # noqa: N818 - not an error: it ends up in the report
    """Raised while a module is looked at, to leave it alone. The report shows it as the reason."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail
        #: The operation of a graph that was looked at.
        self.node: Node | None = None

    def kept(self) -> Refusal:
        """Itself without the frames in which it was raised, whose variables would live as long: models and tensors."""
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self


@dataclass(eq=False)
class Left:
    """Why the forward of a class was left alone; without a reason if it was not.

    A captured call compares what the classes of its modules hold: an object of its own may get another detail when a
    further model is patched, and is still the same.
    """

    reason: Reason | None = None
    detail: str = ""


class PatchError(RuntimeError):
    """With ``strict=True``, something would be left alone; the message lists it, and nothing was changed.

    Also raised by ``torch.jit.script`` for a patched module.
    """


class PatchWarning(UserWarning):
    """Patching did less than requested, or the model has a wrapper that needs attention."""
