"""A plugin of Axolotl. These lines in the YAML of a run turn it on::

    plugins:
      - fastlayers.integrations.axolotl.FastLayersPlugin

It patches each model that Axolotl loads, with or without adapters.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from torch import nn

from fastlayers.patching import patch_model

__all__ = ["FastLayersPlugin"]


class FastLayersPlugin(BasePlugin):
    """Calls :func:`fastlayers.patch_model`."""

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Patch the model, in place.

        Axolotl calls this method last: LoRA's layers are in the model, it is on its device, and Axolotl's own patches
        are applied. Those of layers that it replaces stay.
        """
        patch_model(model)
