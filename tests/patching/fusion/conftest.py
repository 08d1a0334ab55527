from __future__ import annotations

import pytest

from fastlayers import backends
from tests.patching.fusion.programs import PLACES


@pytest.fixture(autouse=True)
def generates(monkeypatch):
    if backends.triton_interprets():
        monkeypatch.setattr(backends, "generates_kernels", lambda device: True)


@pytest.fixture(params=PLACES)
def device(request):
    return request.param
