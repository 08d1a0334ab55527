"""Fused layers as :class:`torch.nn.Module` classes, one file per family.

A layer that subclasses a torch layer of its name has that layer's constructor, parameters, buffers and repr.
"""

from torch import nn

from fastlayers.modules.attention import FusedMultiheadAttention
from fastlayers.modules.batch_norm import (
    FusedBatchNorm1d,
    FusedBatchNorm2d,
    FusedBatchNorm3d,
    FusedBatchNormAct1d,
    FusedBatchNormAct2d,
    FusedBatchNormAct3d,
    FusedSyncBatchNormAct,
)
from fastlayers.modules.bias_act import (
    FusedBiasAct,
    FusedELU,
    FusedGELU,
    FusedHardswish,
    FusedLeakyReLU,
    FusedMish,
    FusedQuickGELU,
    FusedReLU2,
    FusedSiLU,
    FusedSoftplus,
)
from fastlayers.modules.cross_entropy import FusedCrossEntropyLoss
from fastlayers.modules.elementwise import FusedAddReLU, FusedMul, FusedReLUAdd
from fastlayers.modules.glu import FusedGEGLU, FusedGLU, FusedReGLU, FusedSwiGLU
from fastlayers.modules.group_norm import (
    FusedGroupNorm,
    FusedGroupNormAct,
    FusedInstanceNorm1d,
    FusedInstanceNorm2d,
    FusedInstanceNorm3d,
)
from fastlayers.modules.kl_div import FusedJSDivLogitsLoss, FusedKLDivLogitsLoss, FusedKLDivLoss
from fastlayers.modules.layer_norm import (
    FusedAdaLayerNorm,
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    FusedLayerNorm,
    FusedLayerNorm2d,
    FusedRMSNorm,
)
from fastlayers.modules.linear import FusedLinear
from fastlayers.modules.linear_cross_entropy import FusedLinearCrossEntropyLoss
from fastlayers.modules.max_pool2d import FusedMaxPool2d
from fastlayers.modules.residual import FusedDropoutAdd, FusedScaleAdd
from fastlayers.modules.response_norm import FusedGlobalResponseNorm
from fastlayers.modules.rotary import FusedQKNormRotary, FusedRotary
from fastlayers.modules.softmax import FusedLogSoftmax, FusedSoftmax

#: Torch classes that one fused class replaces, layer for layer. A fused class here adds no attribute to the torch
#: class: assigning ``module.__class__`` is all that a swap takes, in both directions.
DROP_IN: dict[type[nn.Module], type[nn.Module]] = {
    nn.Softmax: FusedSoftmax,
    nn.LogSoftmax: FusedLogSoftmax,
    nn.LayerNorm: FusedLayerNorm,
    nn.RMSNorm: FusedRMSNorm,
    nn.GroupNorm: FusedGroupNorm,
    nn.BatchNorm1d: FusedBatchNorm1d,
    nn.BatchNorm2d: FusedBatchNorm2d,
    nn.BatchNorm3d: FusedBatchNorm3d,
    nn.InstanceNorm1d: FusedInstanceNorm1d,
    nn.InstanceNorm2d: FusedInstanceNorm2d,
    nn.InstanceNorm3d: FusedInstanceNorm3d,
    nn.Linear: FusedLinear,
    nn.MultiheadAttention: FusedMultiheadAttention,
    nn.MaxPool2d: FusedMaxPool2d,
    nn.GELU: FusedGELU,
    nn.Mish: FusedMish,
    nn.ELU: FusedELU,
    nn.Softplus: FusedSoftplus,
    nn.GLU: FusedGLU,
    nn.CrossEntropyLoss: FusedCrossEntropyLoss,
    nn.KLDivLoss: FusedKLDivLoss,
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # torch 2.13
    DROP_IN[nn.LinearCrossEntropyLoss] = FusedLinearCrossEntropyLoss

__all__ = [
    "DROP_IN",
    "FusedAdaLayerNorm",
    "FusedAddLayerNorm",
    "FusedAddRMSNorm",
    "FusedAddReLU",
    "FusedBatchNorm1d",
    "FusedBatchNorm2d",
    "FusedBatchNorm3d",
    "FusedBatchNormAct1d",
    "FusedBatchNormAct2d",
    "FusedBatchNormAct3d",
    "FusedBiasAct",
    "FusedCrossEntropyLoss",
    "FusedDropoutAdd",
    "FusedELU",
    "FusedGEGLU",
    "FusedGELU",
    "FusedGLU",
    "FusedGlobalResponseNorm",
    "FusedGroupNorm",
    "FusedGroupNormAct",
    "FusedHardswish",
    "FusedInstanceNorm1d",
    "FusedInstanceNorm2d",
    "FusedInstanceNorm3d",
    "FusedJSDivLogitsLoss",
    "FusedKLDivLogitsLoss",
    "FusedKLDivLoss",
    "FusedLayerNorm",
    "FusedLayerNorm2d",
    "FusedLeakyReLU",
    "FusedLinear",
    "FusedLinearCrossEntropyLoss",
    "FusedLogSoftmax",
    "FusedMaxPool2d",
    "FusedMish",
    "FusedMul",
    "FusedMultiheadAttention",
    "FusedQKNormRotary",
    "FusedQuickGELU",
    "FusedRMSNorm",
    "FusedReGLU",
    "FusedReLU2",
    "FusedReLUAdd",
    "FusedRotary",
    "FusedScaleAdd",
    "FusedSiLU",
    "FusedSoftmax",
    "FusedSoftplus",
    "FusedSwiGLU",
    "FusedSyncBatchNormAct",
]
