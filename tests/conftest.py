from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastlayers import backends

# Tests are small and run side by side. OpenMP's threads wait by spinning: on shared cores a test is ten times slower.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _leave_backend_alone() -> Iterator[None]:
    """A test that fails inside of a forced backend forces nothing on the next one."""
    before = backends.get_backend()
    yield
    backends.set_backend(before)
