"""Layers for the package kernels, which the ``use_kernels`` of transformers takes.

Register them, and load the model as usual, or switch one with ``model.set_use_kernels(True)``::

    from fastlayers.integrations import hub_kernels

    hub_kernels.register()
    model = AutoModelForCausalLM.from_pretrained(name, use_kernels=True)

The folder is a repository as :class:`kernels.LocalLayerRepository` takes it: kernels reads ``metadata.json``, imports
this file once more under the ``id`` that stands there, and looks up the classes in its ``layers``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastlayers.integrations.hub_kernels import layers

__all__ = ["layers", "mapping", "register"]

#: Above the compute capability of any GPU.
MAX_CAPABILITY = 999


def mapping() -> dict[str, dict[Any, Any]]:
    """The layers by the names that models use, for :func:`kernels.register_kernel_mapping`: on CPUs and CUDA GPUs."""
    from kernels import CUDAProperties, Device, LocalLayerRepository

    # With use_kernels=True transformers registers a mapping of its own later, for all GPUs. Of two mappings that fit a
    # GPU kernels takes the one for fewer capabilities.
    cuda = Device("cuda", CUDAProperties(min_capability=0, max_capability=MAX_CAPABILITY))
    folder = Path(__file__).parent
    repositories = {
        name: LocalLayerRepository(folder, layer_name=layer.__name__) for name, layer in layers.LAYERS.items()
    }
    return {name: {"cpu": repository, cuda: repository} for name, repository in repositories.items()}


def register() -> None:
    """Use these layers in the models that kernels changes from now on, by ``use_kernels=True`` or ``kernelize``.

    kernels gives the layers their own forwards again if it finds no mapping::

        with kernels.use_kernel_mapping({}, inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING)
    """
    from kernels import register_kernel_mapping

    register_kernel_mapping(mapping())
