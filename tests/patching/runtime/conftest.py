from __future__ import annotations

import pytest
import torch

from tests.patching.runtime.folding import Net, image, warmed


@pytest.fixture
def net():
    torch.manual_seed(0)
    return warmed(Net(), image() * 3 + 1)
