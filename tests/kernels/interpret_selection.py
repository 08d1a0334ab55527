"""The cases of ``make test-sanitizer`` launch every Triton kernel. None runs here: their launches are noted."""

from __future__ import annotations

import pytest

from fastlayers.kernels import (
    bias_act,
    flat,
    group_norm,
    image_geometry,
    kl_div,
    launch,
    layer_norm,
    norm_rows,
    softmax,
)
from tests.sanitizer import kernels, selection, worker


def test_every_triton_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set()
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *tensors: launched.add(worker.triton_name(self)))
    for family in (softmax, flat, layer_norm, norm_rows, image_geometry, group_norm, bias_act, kl_div):
        monkeypatch.setattr(family, "multiprocessors", lambda device: 132)
    for case in selection.cases():
        if case.backend == "triton":
            case("cpu")
    assert launched == kernels.triton_kernels()
