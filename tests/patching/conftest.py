from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastlayers import backends
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.region import Region
from tests.patching.harness import builder
from tests.patching.networks import Net


@pytest.fixture(autouse=True)
def _torch_answers_on_a_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of patching compare with stock torch to the bit, so that no kernel for CPUs serves there unasked.

    What patched models answer with these kernels is tested where a file or a test is marked ``cpu_kernels``.
    """
    if request.node.get_closest_marker("cpu_kernels"):
        yield
        return

    def choose(device: torch.device) -> str:
        return "eager" if device.type == "cpu" and backends.get_backend() is None else chosen(device)

    chosen = backends.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "choose", choose)
        backends.changed()
        yield
    backends.changed()


@pytest.fixture
def any_size(request, monkeypatch):
    """Regions of few operations, which would not pay."""
    if "small" not in request.node.name:
        monkeypatch.setattr(regions, "LEAST", dict.fromkeys(regions.LEAST, (1, 1)))


@pytest.fixture
def ran(monkeypatch):
    """The regions that ran, one for each call."""
    found, run = [], Region.run
    monkeypatch.setattr(Region, "run", lambda self, *args: found.append(self) or run(self, *args))
    return found


@pytest.fixture
def build(tmp_path):
    """A function that makes a module of source."""
    return builder(tmp_path)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 4, 6, 6)
