"""Tools of other people on a patched model: they give what they give for the stock model, as docs/tools.md says.

Each function runs one tool. The tools of torch run always, the others where they are installed: ``make test-tools``.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import sys
from collections.abc import Callable
from importlib import import_module as load
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.utils.data import DataLoader, TensorDataset

import fastlayers
from tests import ROOT

pytestmark = [pytest.mark.cpu_kernels, pytest.mark.filterwarnings("ignore")]
PAGE = ROOT / "docs" / "tools.md"
LABELS = torch.tensor([0, 1])


class Net(nn.Module):
    """A residual block, a norm and an MLP: layers of which rules fuse several."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1, self.relu1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.norm2, self.relu2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.pool, self.norm, self.fc1 = nn.AdaptiveAvgPool2d(1), nn.LayerNorm(8), nn.Linear(8, 16)
        self.gelu, self.fc2 = nn.GELU(), nn.Linear(16, 4)

    def forward(self, x):
        y = self.relu1(self.norm1(self.conv1(x)))
        y = self.relu2(self.norm2(self.conv2(y)) + y)
        return self.fc2(self.gelu(self.fc1(self.norm(self.pool(y).flatten(1)))))


def images():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def loader():
    return DataLoader(TensorDataset(images(), LABELS), batch_size=2)


def parameters_of(m):
    return torch.cat([p.detach().flatten() for p in m.parameters()])


def kinds(m):
    return [type(module).__name__ for module in m.modules()]


def mlp_of(m):
    return nn.Sequential(m.norm, m.fc1, nn.ReLU(), m.fc2)


def rows():
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(2))


# -- counting and drawing ---------------------------------------------------------------------------------------------


def flop_counter(m):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        m(images()).sum().backward()
    return {name: dict(counts) for name, counts in counter.get_flop_counts().items()}


def ptflops(m, backend="pytorch"):
    count = load("ptflops").get_model_complexity_info
    return count(m, (3, 8, 8), as_strings=False, print_per_layer_stat=False, backend=backend)


def calflops(m):
    count = load("calflops").calculate_flops
    return count(m, input_shape=(2, 3, 8, 8), print_results=False, output_as_string=False)


def deepspeed_flops_profiler(m):
    from deepspeed.profiling.flops_profiler import get_model_profile

    return get_model_profile(m, input_shape=(2, 3, 8, 8), print_profile=False, as_string=False)


def lightning_summary(m):
    import lightning
    from lightning.pytorch.utilities.model_summary import ModelSummary

    module = lightning.LightningModule()
    module.m = m
    return [(layer.num_parameters) for _, layer in ModelSummary(module, max_depth=3)._layer_summary.items()]


def profiler(m):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        m(images())
    events = {event.key: event.count for event in profile.key_averages()}
    return events["aten::convolution"], events["aten::addmm"]


def torchview(m):
    graph = load("torchview").draw_graph(m, input_data=images(), depth=3)
    return str(graph.visual_graph).count("->")


def tensorboard_graph(m):
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard._pytorch_graph import graph

    assert SummaryWriter is not None
    return sorted(node.op for node in graph(m, images())[0].node)


# -- explaining -------------------------------------------------------------------------------------------------------


def captum(kind: str, *layers: str) -> Callable[[nn.Module], Any]:
    def attribute(m):
        explain = getattr(load("captum.attr"), kind)
        return explain(m, *(getattr(m, name) for name in layers)).attribute(images(), target=1)

    return attribute


def captum_deep_lift_shap(m):
    explain = load("captum.attr").DeepLiftShap
    return explain(m).attribute(images(), baselines=torch.zeros(3, 3, 8, 8), target=1)


def captum_lrp(m):
    from captum.attr import LRP
    from captum.attr._utils.lrp_rules import EpsilonRule

    for module in m.modules():
        if isinstance(module, nn.LayerNorm | nn.BatchNorm2d | nn.GELU):
            module.rule = EpsilonRule()
    return LRP(m).attribute(images(), target=1)


def grad_cam(m):
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    with GradCAM(model=m, target_layers=[m.relu2]) as cam:
        return torch.tensor(cam(input_tensor=images(), targets=[ClassifierOutputTarget(1)] * 2))


def shap_deep(m):
    explainer = load("shap").DeepExplainer(m, torch.zeros(2, 3, 8, 8))
    return torch.tensor(explainer.shap_values(images(), check_additivity=False))


def shap_gradient(m):
    explainer = load("shap").GradientExplainer(m, torch.zeros(2, 3, 8, 8))
    return torch.tensor(explainer.shap_values(images(), nsamples=20, rseed=0))


def zennit(m):
    from zennit.attribution import Gradient
    from zennit.composites import EpsilonPlusFlat

    with Gradient(model=m, composite=EpsilonPlusFlat()) as attribute:
        return attribute(images(), torch.eye(4)[LABELS])[1]


# -- quantising, pruning, surgery -------------------------------------------------------------------------------------


def quantize_static(m):
    model = nn.Sequential(quantization.QuantStub(), m.fc1, nn.ReLU(), m.fc2, quantization.DeQuantStub())
    model.qconfig = quantization.get_default_qconfig("x86")
    prepared = quantization.prepare(model.eval())
    prepared(rows())
    return kinds(quantization.convert(prepared))


def prepare_fx(m):
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    prepared = prepare_fx(m, get_default_qconfig_mapping("x86"), (images(),))
    prepared(images())
    return kinds(convert_fx(prepared))


def torchao(m):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(m, Int8WeightOnlyConfig())
    return [type(p.data).__name__ for p in m.parameters()]


def quanto(m):
    from optimum.quanto import freeze, qint8, quantize

    quantize(m, weights=qint8)
    freeze(m)
    return [kind.startswith("Q") for kind in kinds(m)], m(images())


def nncf(m):
    tool = load("nncf")
    return tool.quantize(m, tool.Dataset([images()]))(images())


def torch_prune(m):
    from torch.nn.utils import prune

    prune.l1_unstructured(m.fc1, "weight", 0.5)
    prune.ln_structured(m.conv2, "weight", 0.5, 2, 0)
    masked = m(images())
    prune.remove(m.fc1, "weight")
    return masked, m(images())


def sparsifier(m):
    from torch.ao.pruning import WeightNormSparsifier

    tool = WeightNormSparsifier(sparsity_level=0.5)
    tool.prepare(m, None)
    tool.step()
    tool.squash_mask()
    return m(images())


def torch_pruning(m):
    tool = load("torch_pruning")
    importance = tool.importance.MagnitudeImportance(p=2)
    tool.pruner.MagnitudePruner(m, images(), importance, pruning_ratio=0.5, ignored_layers=[m.fc2]).step()
    return m(images())


def by_type(m):
    """What much code does that replaces layers."""
    return [name for name, child in m.named_children() if type(child) is nn.Linear]


def replaced_children(m):
    for name, child in m.named_children():
        if isinstance(child, nn.ReLU):
            setattr(m, name, nn.SiLU())
    return m(images())


def parametrizations(m):
    from torch.nn.utils import parametrizations

    torch.manual_seed(0)
    parametrizations.spectral_norm(m.fc1)
    parametrizations.weight_norm(m.fc2)
    return m(images())


# -- exporting --------------------------------------------------------------------------------------------------------


def jit_trace(m):
    traced = torch.jit.trace(m, images())
    return [node.kind() for node in traced.inlined_graph.nodes()], traced(images())


def onnx(dynamo: bool) -> Callable[[nn.Module], Any]:
    def export(m):
        file = io.BytesIO()
        if dynamo:
            torch.onnx.export(m, (images(),), dynamo=True).save(file)
        else:
            torch.onnx.export(m, (images(),), file, dynamo=False)
        graph = load("onnx").load_from_string(file.getvalue()).graph
        session = load("onnxruntime").InferenceSession(file.getvalue())
        (result,) = session.run(None, {session.get_inputs()[0].name: images().numpy()})
        torch.testing.assert_close(torch.tensor(result), m(images()), rtol=1e-3, atol=1e-4)
        return [node.op_type for node in graph.node]

    return export


def torchvision_features(m):
    from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

    return get_graph_node_names(m), create_feature_extractor(m, {"relu1": "a"})(images())["a"]


def fastai_hooks(m):
    from fastai.callback.hook import hook_outputs

    with hook_outputs([m.conv1, m.norm1, m.relu2]) as hooks:
        m(images())
        return [t.clone() for t in hooks.stored]


# -- training ---------------------------------------------------------------------------------------------------------


def lightning(m):
    tool = load("lightning")

    class Module(tool.LightningModule):
        def __init__(self):
            super().__init__()
            self.m = m

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.m(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = tool.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(Module(), loader())
    return parameters_of(m)


def skorch(m):
    from skorch import NeuralNetClassifier

    net = NeuralNetClassifier(
        m,
        criterion=nn.CrossEntropyLoss,
        max_epochs=2,
        lr=0.1,
        train_split=None,
        verbose=0,
        iterator_train__shuffle=False,
    )
    return parameters_of(net.fit(images(), LABELS).module_)


def ignite(m):
    from ignite.engine import create_supervised_trainer

    trainer = create_supervised_trainer(m, torch.optim.SGD(m.parameters(), 0.1), nn.CrossEntropyLoss())
    trainer.run([(images(), LABELS)], max_epochs=2)
    return parameters_of(m)


def accelerate(m):
    accelerator = load("accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(m, torch.optim.SGD(m.parameters(), 0.1))
    accelerator.backward(nn.functional.cross_entropy(model(images()), LABELS))
    optimizer.step()
    return parameters_of(m)


def averaged_model(m):
    from torch.optim.swa_utils import AveragedModel, update_bn

    averaged = AveragedModel(m)
    averaged.update_parameters(m)
    update_bn([images()], averaged)
    return averaged(images())


def timm_ema(m):
    average = load("timm.utils").ModelEmaV3(m, decay=0.9)
    average.update(m)
    return average.module(images())


def ema_pytorch(m):
    average = load("ema_pytorch").EMA(m, beta=0.9, update_every=1, update_after_step=0)
    average.update()
    return average(images())


def torch_ema(m):
    average = load("torch_ema").ExponentialMovingAverage(m.parameters(), 0.9)
    average.update()
    with average.average_parameters():
        return m(images())


def wandb_watch(m):
    tool = load("wandb")
    with tool.init(mode="offline"):
        tool.watch(m, log="all", log_freq=1, log_graph=True)
        out = m(images())
        out.sum().backward()
    return out


def forward_hooks(m):
    seen = []
    for name, module in m.named_modules():
        module.register_forward_hook(lambda _, args, out, name=name: seen.append((name, out.detach().clone())))
    m(images())
    return seen


# -- derivatives ------------------------------------------------------------------------------------------------------


def functional_call(m):
    from torch.func import functional_call, grad, vmap

    parameters, buffers = dict(m.named_parameters()), dict(m.named_buffers())

    def loss(parameters, x):
        return functional_call(m, (parameters, buffers), (x[None],)).square().sum()

    return list(vmap(grad(loss), in_dims=(None, 0))(parameters, images()).values())


def backpack(m):
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    model = extend(nn.Sequential(m.fc1, nn.ReLU(), m.fc2))
    with backpack(BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(rows()), torch.tensor([0, 1, 2])).backward()
    return [p.grad_batch for p in model.parameters()]


def opacus(m):
    from opacus import GradSampleModule

    model = GradSampleModule(mlp_of(m).train())
    model(rows()).square().sum().backward()
    return [p.grad_sample for p in model.parameters()]


def opacus_validator(m):
    from opacus.validators import ModuleValidator

    return [type(error).__name__ for error in ModuleValidator.validate(m, strict=False)]


def laplace(m):
    found = load("laplace").Laplace(m, "classification", subset_of_weights="last_layer", hessian_structure="diag")
    found.fit(loader())
    return found(images())


def curvlinops(m):
    tool = load("curvlinops")
    data = [(images(), LABELS)]
    product = tool.GGNLinearOperator(m, nn.CrossEntropyLoss(), list(m.parameters()), data, check_deterministic=False)
    return product @ torch.ones(product.shape[1])


#: The tools that take a patched model as it is, by the names of docs/tools.md, and the package that each needs.
AS_IT_IS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "FlopCounterMode": (flop_counter, "torch"),
    "ptflops (`backend='aten'`)": (lambda m: ptflops(m, "aten"), "ptflops"),
    "fvcore": (
        lambda m: dict(load("fvcore.nn").FlopCountAnalysis(m, images()).unsupported_ops_warnings(False).by_module()),
        "fvcore",
    ),
    "torchinfo": (lambda m: str(load("torchinfo").summary(m, input_data=images(), verbose=0)), "torchinfo"),
    "torchsummary": (lambda m: str(load("torchsummary").summary(m, (3, 8, 8), verbose=0)), "torchsummary"),
    "pytorch-model-summary": (lambda m: load("pytorch_model_summary").summary(m, images()), "pytorch_model_summary"),
    "torchscan": (lambda m: str(load("torchscan").crawl_module(m, (3, 8, 8))["layers"]), "torchscan"),
    "torchprofile": (lambda m: load("torchprofile").profile_macs(m, images()), "torchprofile"),
    "calflops": (calflops, "calflops"),
    "DeepSpeed's profiler": (deepspeed_flops_profiler, "deepspeed"),
    "Lightning's summary": (lightning_summary, "lightning"),
    "torch.profiler": (profiler, "torch"),
    "torchviz": (lambda m: str(load("torchviz").make_dot(m(images()))).count("label") > 3, "torchviz"),
    "torchview": (torchview, "torchview"),
    "torchlens": (lambda m: len(load("torchlens").trace(m, images()).layer_list), "torchlens"),
    "TensorBoard": (tensorboard_graph, "tensorboard"),
    "captum DeepLift": (captum("DeepLift"), "captum"),
    "captum DeepLiftShap": (captum_deep_lift_shap, "captum"),
    "captum IntegratedGradients": (captum("IntegratedGradients"), "captum"),
    "captum Saliency": (captum("Saliency"), "captum"),
    "captum GuidedBackprop": (captum("GuidedBackprop"), "captum"),
    "captum Deconvolution": (captum("Deconvolution"), "captum"),
    "captum LayerGradCam": (captum("LayerGradCam", "conv2"), "captum"),
    "grad-cam": (grad_cam, "pytorch_grad_cam"),
    "shap DeepExplainer": (shap_deep, "shap"),
    "shap GradientExplainer": (shap_gradient, "shap"),
    "zennit": (zennit, "zennit"),
    "torchao": (torchao, "torchao"),
    "optimum-quanto": (quanto, "optimum.quanto"),
    "NNCF": (nncf, "nncf"),
    "torch.nn.utils.prune": (torch_prune, "torch"),
    "torch-pruning": (torch_pruning, "torch_pruning"),
    "replacing children": (replaced_children, "torch"),
    "parametrizations": (parametrizations, "torch"),
    "convert_sync_batchnorm": (
        lambda m: [type(c).__mro__[-3].__name__ for c in nn.SyncBatchNorm.convert_sync_batchnorm(m).modules()],
        "torch",
    ),
    "torch.jit.trace": (jit_trace, "torch"),
    "torch.export": (lambda m: [str(node.target) for node in torch.export.export(m, (images(),)).graph.nodes], "torch"),
    "torch.fx": (lambda m: [str(node) for node in torch.fx.symbolic_trace(m).graph.nodes], "torch"),
    "torch.onnx": (onnx(dynamo=True), "onnxscript"),
    "torch.onnx (`dynamo=False`)": (onnx(dynamo=False), "onnxruntime"),
    "torchvision's feature extraction": (torchvision_features, "torchvision"),
    "fastai's hooks": (fastai_hooks, "fastai"),
    "Lightning": (lightning, "lightning"),
    "skorch": (skorch, "skorch"),
    "ignite": (ignite, "ignite"),
    "accelerate": (accelerate, "accelerate"),
    "AveragedModel": (averaged_model, "torch"),
    "timm's ModelEmaV3": (timm_ema, "timm"),
    "ema-pytorch": (ema_pytorch, "ema_pytorch"),
    "torch-ema": (torch_ema, "torch_ema"),
    "wandb.watch": (wandb_watch, "wandb"),
    "forward hooks": (forward_hooks, "torch"),
    "torch.func": (functional_call, "torch"),
    "torch.autograd.functional": (
        lambda m: torch.autograd.functional.hessian(lambda shift: m(images() + shift).square().sum(), torch.zeros(1)),
        "torch",
    ),
    "opacus": (opacus, "opacus"),
    "laplace-torch": (laplace, "laplace"),
    "curvlinops": (curvlinops, "curvlinops"),
}
#: Those that give something else for a patched model, or raise, and are right in ``with unpatched(model)``.
UNPATCHED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "thop": (lambda m: load("thop").profile(m, (images(),), verbose=False), "thop"),
    "ptflops": (ptflops, "ptflops"),
    "torch-pruning's counts": (
        lambda m: load("torch_pruning").utils.count_ops_and_params(m, images()),
        "torch_pruning",
    ),
    "captum LRP": (captum_lrp, "captum"),
    "quantize_dynamic": (lambda m: kinds(quantization.quantize_dynamic(m, {nn.Linear}, dtype=torch.qint8)), "torch"),
    "torch.ao.quantization.prepare": (quantize_static, "torch"),
    "prepare_fx": (prepare_fx, "torch"),
    "fuse_modules": (lambda m: kinds(quantization.fuse_modules(m, [["conv1", "norm1", "relu1"]])), "torch"),
    "WeightNormSparsifier": (sparsifier, "torch"),
    "`type(module) is nn.Linear`": (by_type, "torch"),
    "torch.jit.script": (lambda m: torch.jit.script(m)(images()), "torch"),
    "BackPACK": (backpack, "backpack"),
    "opacus' ModuleValidator": (opacus_validator, "opacus"),
}


@pytest.fixture(autouse=True)
def aside(monkeypatch, tmp_path):
    """Tools write to the working directory, and leave functions of torch replaced, which others do not understand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    before = [(scope, dict(vars(scope))) for scope in (torch, nn.functional, torch.Tensor)]
    yield
    for scope, members in before:
        for name, member in members.items():
            if callable(member) and vars(scope).get(name) is not member:
                setattr(scope, name, member)


def trained_model():
    torch.manual_seed(0)
    model = Net()
    for _ in range(2):
        model(images())
    return model.eval()


def patched_model():
    model = fastlayers.patch_model(trained_model())
    for _ in range(3):  # with its regions
        model(images())
        model(images().requires_grad_()).sum().backward()
    model.zero_grad()
    return model


def result_of(tool, model):
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return tool(model)


def same(found, expected):
    """The results, apart from the names that patched classes show."""
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.allclose(found, expected, rtol=1e-3, atol=1e-4)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict):
        return same([*map(list, found.items())], [*map(list, expected.items())])
    return shown(found) == shown(expected)


def shown(value):
    return re.sub(r"Fused|[\s=-]+", "", value) if isinstance(value, str) else value


def needs(package):
    if package != "torch":
        pytest.importorskip(package)
    if package in ("onnxruntime", "onnxscript"):
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("name", AS_IT_IS)
def test_a_tool_takes_a_patched_model(name):
    tool, package = AS_IT_IS[name]
    needs(package)
    expected, found = result_of(tool, trained_model()), result_of(tool, patched_model())
    assert same(found, expected)


@pytest.mark.parametrize("name", UNPATCHED)
def test_a_tool_wants_the_model_unpatched(name):
    tool, package = UNPATCHED[name]
    needs(package)
    expected = result_of(tool, trained_model())
    try:
        wants = not same(result_of(tool, patched_model()), expected)
    except Exception:
        wants = True
    assert wants, "move it to the other table, also in docs/tools.md"
    model = patched_model()
    with fastlayers.unpatched(model):
        found = result_of(tool, model)
    assert same(found, expected)


def test_the_page_has_the_tools():
    """Its two tables say what was tested."""
    as_it_is, unpatched = PAGE.read_text().split("## In `with unpatched(model)`")
    assert [name for name in AS_IT_IS if name.strip("`") not in as_it_is] == []
    assert [name for name in UNPATCHED if name.strip("`") not in unpatched] == []
