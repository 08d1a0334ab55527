from __future__ import annotations

import pytest

from fastlayers import backends


@pytest.fixture(autouse=True)
def generates(monkeypatch):
    if backends.triton_interprets():
        monkeypatch.setattr(backends, "generates_kernels", lambda device: True)
