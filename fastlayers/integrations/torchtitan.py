"""Overrides of torchtitan. List those that you want in a job's configuration, or on its command line::

    --override.imports fastlayers.integrations.torchtitan.rms_norm fastlayers.integrations.torchtitan.feed_forward

The modules have the parameters, the state dict and the sharding of those that they replace. Of DTensors, as with tensor
parallelism, each rank computes its shard.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.nn_modules import LayerNorm, RMSNorm

from fastlayers import functional

__all__ = ["FusedFeedForward", "FusedLayerNorm", "FusedRMSNorm", "feed_forward", "layer_norm", "rms_norm"]


class FusedRMSNorm(RMSNorm):
    """torchtitan's RMSNorm through :func:`fastlayers.functional.rms_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class FusedLayerNorm(LayerNorm):
    """torchtitan's LayerNorm through :func:`fastlayers.functional.layer_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(LayerNorm.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class FusedFeedForward(FeedForward):
    """torchtitan's gated MLP with :func:`fastlayers.functional.swiglu`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.swiglu(self.w1(x), self.w3(x)))


# exact: a subclass, such as a norm with a shifted weight, has another formula.


@override(target=RMSNorm.Config, exact=True, description="fastlayers' RMSNorm")
def rms_norm(config: RMSNorm.Config) -> FusedRMSNorm.Config:
    return derive(config, FusedRMSNorm.Config)


@override(target=LayerNorm.Config, exact=True, description="fastlayers' LayerNorm")
def layer_norm(config: LayerNorm.Config) -> FusedLayerNorm.Config:
    return derive(config, FusedLayerNorm.Config)


@override(target=FeedForward.Config, exact=True, description="fastlayers' SwiGLU")
def feed_forward(config: FeedForward.Config) -> FusedFeedForward.Config:
    return derive(config, FusedFeedForward.Config)
