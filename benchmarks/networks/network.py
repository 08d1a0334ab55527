"""What the benchmark knows of a network: how it is built, its batch, its loss and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Batch = dict[str, Tensor]

#: Batch of the tiny networks. With fewer values in the last layers, a BatchNorm would amplify every rounding.
TINY_BATCH = 8
#: Batch with which the host time is measured. A BatchNorm needs more than one value for each channel.
HOST_BATCH = 2
#: A constant parameter below this is not trained yet: a LayerScale starts at 1e-6, the weight of a last BatchNorm at 0.
UNTRAINED = 1e-2


@dataclass(frozen=True)
class Network:
    """One network and its inputs.

    Args:
        config: the class of a configuration, or the name of a class or an architecture, of the library.
        options: the arguments of ``config``.
        batch: sequences or images in a batch; ``size`` is the length of a sequence or the side of an image.
        tiny_options, tiny_size: options and size with which a CPU runs the network in a second.
        gib: the most GPU memory that the compiled network needs. It limits how many processes compile in parallel.
        amp: on a GPU, float32 weights under autocast to bfloat16. Otherwise the weights are bfloat16.
        host_size: a size for which the GPU is faster than Python; None if ``size`` is small enough.
    """

    name: str
    title: str
    config: str
    batch: int
    size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    tiny_options: Mapping[str, Any] = field(default_factory=dict)
    tiny_size: int = 16
    gib: int = 10
    amp: bool = True
    host_size: int | None = None

    #: Whether it generates text, one token after the other.
    decodes = False

    def describe(self, device: str) -> str:
        """Size and precision of a batch."""
        return f"{self.shape()}, {self.precision(device)}"

    def shape(self) -> str:
        return f"{self.batch}x{self.size}"

    def precision(self, device: str) -> str:
        return "fp32" if device != "cuda" else "AMP bf16" if self.amp else "bf16"

    def tiny(self) -> Network:
        """The same architecture, for a CPU."""
        options = {**self.options, **self.tiny_options}
        return replace(
            self, title=f"tiny {self.title}", batch=TINY_BATCH, size=self.tiny_size, options=options, host_size=None
        )

    def for_host_time(self) -> Network:
        """The same network, with a batch for which the GPU is faster than Python."""
        return replace(self, batch=HOST_BATCH, size=self.host_size or self.size)

    def dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of the weights."""
        return torch.bfloat16 if device.type == "cuda" and not self.amp else torch.float32

    def autocast(self, device: torch.device) -> AbstractContextManager:
        """The context of a forward."""
        return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" and self.amp else nullcontext()

    def build(self, device: torch.device) -> nn.Module:
        raise NotImplementedError

    def example(self, device: torch.device) -> Batch:
        """Inputs and labels of a batch."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        raise NotImplementedError

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        raise NotImplementedError

    def decoder(self, model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
        """A function that computes the logits of the next token of one sequence, with the cache of those before."""
        raise NotImplementedError


@dataclass(frozen=True)
class Transformer(Network):
    """A network of transformers, built by one of its Auto classes."""

    auto: str = "AutoModel"

    def build(self, device: torch.device) -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()  # it warns about token ids that a small vocabulary does not have
        config = getattr(transformers, self.config)(use_cache=False, **self.options)
        with device:
            model = getattr(transformers, self.auto).from_config(config, dtype=self.dtype(device))
        return used(model.to(device))  # wav2vec 2.0 makes a parameter on the CPU all the same

    def ids(self, length: int, device: torch.device) -> Tensor:
        return torch.randint(self.options["vocab_size"], (self.batch, length), device=device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**batch).loss


def used(model: nn.Module) -> nn.Module:
    """Give the parameters that start as zeros, or next to zero, and BatchNorms the values of a trained network.

    Libraries initialise the last BatchNorm of a block to zero, and a LayerScale to 1e-6. Whole branches would then be
    zero, which hides wrong results and, on a GPU, takes less power than data does.
    """
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, _BatchNorm):
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.normal_(std=0.1)
                norm.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
                norm.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
        for name, weight in model.named_parameters():
            low, high = weight.aminmax()
            if not name.endswith("bias") and low == high and abs(low) < UNTRAINED:
                scales = weight.numel() == max(weight.shape)  # a LayerScale, for example of shape (channels, 1, 1)
                weight.uniform_(0.05, 0.15) if scales else weight.normal_(std=0.02)
    return model
