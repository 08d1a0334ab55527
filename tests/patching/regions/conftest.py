from __future__ import annotations

import pytest

from fastlayers import backends
from fastlayers.patching.program import executors
from fastlayers.patching.regions import demand
from fastlayers.patching.regions.region import Region


@pytest.fixture
def from_the_first_call(request, monkeypatch):
    if "checkpointing" not in request.node.name:
        monkeypatch.setattr(demand, "CALLS", 1)


@pytest.fixture(params=["python", "native"])
def executor(request, monkeypatch):
    """What runs the regions."""
    if request.param == "python":
        monkeypatch.setattr(executors, "_native", None)
    elif executors.problem is not None:
        pytest.skip(executors.problem)
    return request.param


@pytest.fixture
def operations_of_torch(monkeypatch):
    """What is recorded runs as it is, so that regions are bit-equal. The tests of fusion have what becomes of it."""
    monkeypatch.setattr(backends, "generates_kernels", lambda device: False)


@pytest.fixture
def runs(monkeypatch):
    """The calls that were recorded (True) and those that ran as a region (False)."""
    seen = []
    run, prepared = Region.run, Region.prepared

    def watched(self, *args):
        seen.append(False)
        return run(self, *args)

    def recording(self, *args):
        found = prepared(self, *args)
        if found is not None:
            seen.append(True)
        return found

    monkeypatch.setattr(Region, "run", watched)
    monkeypatch.setattr(Region, "prepared", recording)
    return seen
