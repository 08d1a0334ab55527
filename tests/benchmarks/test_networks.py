"""The networks of the benchmark of whole models: each one is built, trained and patched, in a tiny configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import model_report, model_worker
from benchmarks.networks import MAIN, NETWORKS
from benchmarks.networks.language import LanguageModel
from benchmarks.networks.network import Transformer, used

CPU = torch.device("cpu")
LIBRARIES = ("transformers", "timm", "torchvision", "diffusers", "monai")


pytestmark = pytest.mark.usefixtures("few_calls")


def need_libraries(chosen):
    """Skip all but a few networks where a library is missing: `make test-libraries` has them all."""
    few = ("transformers",) if chosen in MAIN and isinstance(chosen, Transformer) else LIBRARIES
    for library in few:
        pytest.importorskip(library)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", NETWORKS, ids=lambda network: network.name)
def test_tiny_networks_agree(chosen):
    need_libraries(chosen)
    tiny = chosen.tiny()
    rows = {mode: model_worker.measure(tiny, mode, CPU, 0.0, False) for mode in ("eager", "fastlayers")}
    assert " patched: " in rows["fastlayers"]["patched"]
    assert list(model_report.disagreements(rows)) == []


@pytest.mark.parametrize(
    "chosen", [network for network in NETWORKS if network.decodes], ids=lambda network: network.name
)
def test_the_cache_of_a_decoder_gives_the_logits_of_the_whole_text(chosen):
    need_libraries(chosen)
    tiny = replace(chosen.tiny(), batch=1)
    torch.manual_seed(0)
    model, batch = tiny.build(CPU).eval(), tiny.example(CPU)
    prompt = batch["input_ids"][:, : tiny.size // 4]
    with torch.no_grad():
        step = tiny.decoder(model, batch)
        token = tiny.predict(model, {"input_ids": prompt}).argmax(-1)
        expected = tiny.predict(model, {"input_ids": torch.cat([prompt, token], 1)})[:, -1]
        for _ in range(3):  # Of one length each, whatever came before.
            torch.testing.assert_close(step()[:, -1], expected)


def test_networks_are_told_apart():
    assert len({network.name for network in NETWORKS}) == len({network.title for network in NETWORKS}) == len(NETWORKS)
    assert len(NETWORKS) - len(MAIN) >= 30
    assert sum(isinstance(network, LanguageModel) for network in NETWORKS) >= 6


def test_what_starts_as_zero_gets_the_values_of_a_trained_network():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm2d(4))
    model.scale = nn.Parameter(torch.full((4, 1, 1), 1e-6))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    used(model)
    assert 0 < model[0].weight.abs().max() < 0.2
    assert (model.scale >= 0.05).all()
    assert (model[1].weight == 1).all()
    assert (model[0].bias == 0).all()
    assert (model[2].running_var != 1).all()
