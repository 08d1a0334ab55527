"""The public functions that patch a model, say what they would do or did, and take it back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from fastlayers.patching.measure.runs import arguments
from fastlayers.patching.measure.traffic import bytes_saved
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.report import PatchReport
from fastlayers.patching.rewrite.classes import become, is_folded
from fastlayers.patching.rewrite.plan import (
    FilterFn,
    Pattern,
    carry_out,
    left_alone,
    make_plan,
    restore,
    swap,
    warn_of_stuck,
)
from fastlayers.patching.runtime.checks import original_class
from fastlayers.patching.runtime.folded_layers import forget

__all__ = [
    "fold_batch_norm",
    "patch_model",
    "patch_report",
    "plan_fold",
    "plan_patch",
    "unfold_batch_norm",
    "unpatch_model",
]


# -- the public functions ---------------------------------------------------------------------------------------------


def plan_patch(
    model: nn.Module,
    *,
    include: Pattern | None = None,
    exclude: Pattern | None = None,
    filter_fn: FilterFn | None = None,
    example_inputs: Any = None,
) -> PatchReport:
    """What :func:`patch_model` would do with the same arguments. Changes nothing.

    Args:
        model, include, exclude, filter_fn: as for :func:`patch_model`.
        example_inputs: where given, what to call the model with, for an estimate of the bytes that each row saves a
            step: a tensor, a sequence of positional or a mapping of keyword arguments. The model is run twice, forward
            only; :mod:`fastlayers.patching.measure.traffic` says how they are counted. A model and inputs on the "meta"
            device need no memory for it.

    Returns:
        A report with a row for every module. Print it, or see :class:`PatchReport`.

    Raises:
        TypeError: as :func:`patch_model`, or ``example_inputs`` is none of these.
    """
    plan = make_plan(model, include, exclude, filter_fn)
    if example_inputs is None:
        return plan.report
    changed = swap(plan)
    try:
        return with_bytes(plan.report, model, example_inputs)
    finally:
        restore(changed)


def with_bytes(report: PatchReport, model: nn.Module, example_inputs: Any) -> PatchReport:
    """A report on a model, which is patched as it says, with the bytes that its rows save."""
    saved = bytes_saved(model, *arguments(example_inputs))
    rows = (replace(row, bytes_saved=saved.get(model.get_submodule(row.fqn))) for row in report.rows)
    return replace(report, rows=tuple(rows))


def patch_model(
    model: nn.Module,
    *,
    include: Pattern | None = None,
    exclude: Pattern | None = None,
    filter_fn: FilterFn | None = None,
    strict: bool = False,
) -> nn.Module:
    """Put fused layers in the place of what they can replace, in place.

    Layers are swapped (``nn.Softmax`` becomes ``FusedSoftmax``), and the forward of any module is rewritten where it
    says, say, ``relu(x) + y`` in whatever spelling. Only classes change: parameters, buffers, hooks, names, devices,
    ``training`` and optimizers stay as they are, the state dict keeps its keys, and :func:`unpatch_model` takes
    everything back. A module that cannot be rewritten safely is left alone; :func:`patch_report` says which and why.

    Args:
        model: any module. Shared modules are patched once.
        include: patch only these: patterns as in :mod:`fnmatch` over fully qualified names (``"layer1.*"``), module
            classes, or a list of both. One that fits a module covers everything inside it. The model itself has the
            empty name.
        exclude: leave these alone, in the same terms; wins over ``include``. An excluded child is not absorbed into its
            parent either.
        filter_fn: called with a module and its name; patch where it returns True. Says nothing about the module's
            children.
        strict: raise instead of leaving anything out: where a selected module was refused, a pattern matched nothing or
            nothing was patched. Nothing is changed then.

    Returns:
        The same model.

    Raises:
        TypeError: the model, a pattern or ``filter_fn`` is of the wrong type.
        PatchError: ``strict`` and something was left out.

    Warns:
        PatchWarning: nothing was patched, a pattern matched nothing, or the model is wrapped, scripted or quantised.
    """
    carry_out(make_plan(model, include, exclude, filter_fn), strict)
    return model


def patch_report(model: nn.Module, *, example_inputs: Any = None) -> PatchReport:
    """How a model stands now: what is patched, and why the rest is not.

    Args:
        model: any module.
        example_inputs: as for :func:`plan_patch`, for an estimate of the bytes that each row saves a step.

    Returns:
        A report in which only modules that are patched have a ``became``. What :func:`patch_model` would still do is
        shown as not selected.
    """
    plan = make_plan(model)
    rows = []
    for step in plan.steps:
        pending = step.cls is not None
        rows.append(left_alone(step.row, Refusal(Reason.NOT_SELECTED)) if pending else step.row)
    report = PatchReport(tuple(rows), original_class(model).__name__)
    return report if example_inputs is None else with_bytes(report, model, example_inputs)


def unpatch_model(model: nn.Module) -> nn.Module:
    """Give every patched module its own class back; parameters keep the values that they have now.

    What :func:`fold_batch_norm` did is taken back too.

    Returns:
        The same model. Nothing happens to a model that is not patched.

    Warns:
        PatchWarning: a module stays patched, because its class was changed again after patching or a wrapper, which
            calls the fused forward, was put around its forward: undo that first.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        forget(module)
    warn_of_stuck(model, restore(model.modules()), stacklevel=2)
    return model


# -- folding ----------------------------------------------------------------------------------------------------------


def plan_fold(
    model: nn.Module,
    *,
    include: Pattern | None = None,
    exclude: Pattern | None = None,
    filter_fn: FilterFn | None = None,
) -> PatchReport:
    """What :func:`fold_batch_norm` would do with the same arguments, or has done. Changes nothing.

    Returns:
        A report with a row for every module; a module whose forward holds a BatchNorm after a convolution has the
        number of those, or the reason why not.

    Raises:
        TypeError: as :func:`patch_model`.
    """
    return make_plan(model, include, exclude, filter_fn, folding=True).report


def fold_batch_norm(
    model: nn.Module,
    *,
    include: Pattern | None = None,
    exclude: Pattern | None = None,
    filter_fn: FilterFn | None = None,
    strict: bool = False,
) -> nn.Module:
    """For inference: compute each BatchNorm that follows a convolution or a linear layer as part of that layer.

    What follows, a sum and an activation (also one that the norm holds, as timm's BatchNormAct2d does), is part of the
    folded layer: on a GPU one kernel adds the bias and the residual and applies the activation. Under autocast several
    folded convolutions, one after the other and with a gate between them, are one call.

    Only classes change, and only the results' rounding does: parameters, buffers and state-dict keys stay, patches by
    :func:`patch_model` stay where they are, and :func:`unfold_batch_norm` takes it back. The folded weights are kept
    beside the model, as much memory again as the weights of those layers in the dtype that they are used in (that of
    autocast, say), and are made anew where a parameter or a running statistic has changed; writes that torch does not
    count, ``p.data.copy_(...)``, call for unfolding and folding again, as :func:`load_model` and ``load_state_dict`` do
    not.

    In training mode, and where a gradient of a folded parameter is wanted, the unfolded forward answers: a folded model
    that is trained trains as it did before, and is folded with its new weights when it is back in eval.

    Args:
        model: in eval mode. BatchNorms that are in training mode are left alone.
        include, exclude, filter_fn: which modules to look at, the blocks or ``nn.Sequential`` that hold the layers, as
            for :func:`patch_model`.
        strict: raise instead of leaving anything out, as for :func:`patch_model`.

    Returns:
        The same model.

    Raises:
        TypeError: the model, a pattern or ``filter_fn`` is of the wrong type.
        PatchError: ``strict`` and something was left out.

    Warns:
        PatchWarning: nothing was folded, or as :func:`patch_model`.
    """
    carry_out(make_plan(model, include, exclude, filter_fn, folding=True), strict)
    return model


def unfold_batch_norm(model: nn.Module) -> nn.Module:
    """Take back what :func:`fold_batch_norm` did; patches stay.

    Returns:
        The same model. Nothing happens to a model that is not folded.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        forget(module)
    folded = filter(is_folded, model.modules())
    stuck = [module for module in folded if not become(module, type(module).__fastlayers_unfolded__)]  # type: ignore[attr-defined]
    warn_of_stuck(model, stuck, stacklevel=2)
    return model
