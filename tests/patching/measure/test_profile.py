"""profile_patch: what it measures, and that the model is afterwards what it was."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import ProfileReport, patch_model, profile_patch
from fastlayers.patching.measure import profile as profiling
from fastlayers.patching.measure.profile import Measurement, kind_of
from tests.patching.networks import Parts, Snapshot


class Block(Parts):
    def forward(self, x):
        self.modes.append(torch.is_grad_enabled())
        return self.drop(self.norm(self.fc(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(fc=nn.Linear(16, 16), norm=nn.BatchNorm1d(16), drop=nn.Dropout(0.5), modes=[])
        self.soft = nn.Softmax(-1)

    def forward(self, x, labels=None):
        y = self.soft(self.block(x))
        return {"loss": F.mse_loss(y, labels), "y": y} if labels is not None else y


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(profiling, "SECONDS", 0.0)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    return torch.randn(8, 16)


REPORT = ProfileReport(
    before=Measurement(4.0, 0.1, {"norm": 1.0, "elementwise": 2.0}, 30, 4096),
    after=Measurement(2.0, 0.1, {"norm": 1.5}, 10, 2048),
    model="Net",
    patched=2,
    training=True,
    device="CPU, 1 threads",
    on_gpu=False,
)


@pytest.mark.parametrize("state", ["unpatched", "patched"])
def test_the_model_is_left_as_it_was(net, x, state):
    net(x).sum().backward()
    if state == "patched":
        patch_model(net)
    before, given, seen = Snapshot(net), x.clone(), []
    next(net.parameters()).register_post_accumulate_grad_hook(seen.append)  # an optimizer in the backward
    report = profile_patch(net, x)
    before.check(net)
    assert torch.equal(x, given)
    assert seen == []
    assert report.patched == 3
    assert report.training


def test_it_is_restored_after_an_error(net, x):
    before = Snapshot(net)
    with pytest.raises(RuntimeError):
        profile_patch(net, x[:, 1:])
    before.check(net)


def test_what_it_measures(net, x):
    report = profile_patch(net, x.requires_grad_())
    for side in (report.before, report.after):
        assert side.step_ms > 0
        assert side.device_ms > 0
        assert side.kernels > 5
        assert side.peak_bytes >= 8 * 16 * 4
        assert {"matmul", "norm", "reduction"} <= set(side.kinds)
    assert report.device.startswith("CPU")


def test_a_step_is_what_the_mode_says(net, x):
    assert profile_patch(net, x, labels=torch.rand(8, 16)).training
    net.eval()
    net.block.modes.clear()
    assert not profile_patch(net, x).training
    assert not any(net.block.modes)
    net.train()
    with torch.no_grad():
        assert not profile_patch(net, x).training


def test_the_loss_is_what_is_differentiated(net, x):
    outputs = net(x, labels=torch.rand(8, 16))
    assert profiling.loss_or_outputs(outputs) == [outputs["loss"]]
    assert profiling.loss_or_outputs((outputs["y"], 3, x)) == [outputs["y"]]


def test_unpatched_and_patched_take_turns(x):
    class Seen(Parts):
        def forward(self, x):
            self.classes.append(repr(self.soft).split("(")[0])
            return self.soft(x)

    model = Seen(soft=nn.Softmax(-1), classes=[])
    profile_patch(model, x)
    warm = profiling.WARM_UPS
    assert model.classes[: 2 * warm + 4] == (
        ["Softmax"] * warm + ["FusedSoftmax"] * warm + ["Softmax", "FusedSoftmax", "Softmax", "FusedSoftmax"]
    )
    assert type(model.soft) is nn.Softmax


def test_wrappers_are_looked_through(net, x):
    assert profile_patch(nn.DataParallel(net), x).model == "Net"
    with pytest.raises(TypeError, match="got int"):
        profile_patch(3)


def test_the_table_in_every_form():
    text = str(REPORT)
    assert text.startswith("Net, 2 modules patched, forward and backward on CPU, 1 threads: 2.00x as fast")
    assert "  elementwise    2.000 ms  0.000 ms  -100 %" in text
    assert "| peak memory | 4.0 KiB | 2.0 KiB | -50 % |" in REPORT.to_markdown()
    data = json.loads(REPORT.to_json())
    assert data["speedup"] == 2.0
    assert data["before"]["kinds"] == {"norm": 1.0, "elementwise": 2.0}
    assert data["after"]["device_ms"] == 1.5


def test_the_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = REPORT.plot(tmp_path / "profile.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert REPORT.plot(str(tmp_path / "profile.svg")).read_text().count("<svg") == 1
    monkeypatch.delitem(sys.modules, "fastlayers.patching.measure.picture")
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    with pytest.raises(ImportError, match="matplotlib"):
        REPORT.plot(tmp_path / "no.png")


def test_every_kind_has_a_colour():
    pytest.importorskip("matplotlib")
    from fastlayers.patching.measure.picture import COLOURS

    assert set(COLOURS) == {kind for kind, _ in profiling.KINDS} | {profiling.OTHER}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("attention", ["void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::half_t>>()",
                       "fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop",
                       "aten::_scaled_dot_product_flash_attention_for_cpu"]),
        ("convolution", ["sm80_xmma_fprop_implicit_gemm_bf16f16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_stage3",
                         "void cudnn::cnn::wgrad2d_grouped_direct_kernel<float>()", "aten::mkldnn_convolution",
                         "cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized_bf16>(Params)",
                         "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3>()"]),
        ("matmul", ["nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "ampere_sgemm_128x64_nn", "aten::addmm", "aten::bmm",
                    "void cublasLt::splitKreduce_kernel<32, 16, int, float>()", "void gemv2T_kernel_val<int, float>()",
                    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32>()"]),
        ("generated", ["fused_add_layer_norm_gelu__block_py_88", "fused_copy"]),
        ("norm", ["void fastlayers::(anonymous namespace)::layer_norm_forward_rows<float>(int)", "_whole_forward",
                  "void at::native::batch_norm_backward_kernel<float>()", "aten::native_layer_norm",
                  "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>()", "triton_red_fused_native_layer_norm_add_0",
                  "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)"]),
        ("copy", ["Memcpy DtoD (Device -> Device)", "Memset (Device)", "aten::copy_",
                  "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>()",
                  "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(X)>()",
                  "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>()"]),
        ("reduction", ["void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>()", "aten::_softmax",
                       "void fastlayers::(anonymous namespace)::softmax_forward_rows<float>()", "aten::sum",
                       "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>()",
                       "void fastlayers::(anonymous namespace)::cross_entropy_rows<float>()"]),
        ("elementwise", ["void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>()",
                         "void fastlayers::(anonymous namespace)::relu_forward<float, true>()", "_add_relu", "_gated",
                         "void fastlayers::(anonymous namespace)::gated_backward<float>()", "aten::add_",
                         "void fastlayers::(anonymous namespace)::rotate<float>()", "aten::threshold_backward",
                         "triton_poi_fused_add_relu_0", "fastlayers::relu_add_forward"]),
        ("other", ["void at::native::indexSelectLargeIndex<float>()", "aten::embedding", "aten::max_pool2d"]),
    ],
)  # fmt: skip
def test_kinds_of_kernels(kind, names):
    assert {name: kind_of(name) for name in names} == dict.fromkeys(names, kind)
