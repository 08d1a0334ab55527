"""Models of packages for text, detection, graphs and tables, small and with random weights: see
:mod:`tests.corpus.models`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tests.corpus.models import Sample, images
from tests.corpus.packages.recipes import Recipe, build, drawn, load, models, noise, numbers, words

__all__ = ["MODELS"]


# -- images and text --------------------------------------------------------------------------------------------------


SEEN: dict[str, Any] = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
READ: dict[str, Any] = {"context_length": 16, "vocab_size": 30, "width": 32, "heads": 4, "layers": 2}


def clip(
    path: str, seen: dict[str, Any], read: dict[str, Any], size: int = 32, length: int = 16, **options: Any
) -> Sample:
    options["vision_cfg"] = load("open_clip.model:CLIPVisionCfg")(**SEEN | seen)
    options["text_cfg"] = load("open_clip.model:CLIPTextCfg")(**READ | read)
    inputs = images(size), words(2, length)
    return build(f"open_clip.{path}", {"embed_dim": 32, **options}, lambda: inputs, fill=False)


def coca() -> Sample:
    writing = load("open_clip.coca_model:MultimodalCfg")(**READ, attn_pooler_heads=4)
    seen = {"attentional_pool": True, "attn_pooler_queries": 8, "attn_pooler_heads": 4, "output_tokens": True}
    read = {"embed_cls": True, "output_tokens": True}
    found = clip("coca_model:CoCa", seen, read, length=15, multimodal_cfg=writing)
    return drawn(found, "text_decoder.text_projection")


#: Blocks of another class.
SCALED: dict[str, Any] = {"qk_norm": True, "scale_heads": True, "scale_attn": True, "scale_fc": True}
CLIPS: dict[str, Callable[[], Sample]] = {
    "CLIP": lambda: clip("model:CLIP", {}, {}),
    "CLIP/quick_gelu": lambda: clip("model:CLIP", {"ls_init_value": 0.1}, {"ls_init_value": 0.1}, quick_gelu=True),
    "CLIP/ModifiedResNet": lambda: clip("model:CLIP", {"layers": (1, 2, 1, 1), "width": 16, "image_size": 64}, {}, 64),
    "CLIP/attentional_pool": lambda: clip(
        "model:CLIP",
        {"attentional_pool": True, "attn_pooler_queries": 8, "attn_pooler_heads": 4, "no_ln_pre": True},
        {},
        init_logit_bias=-10.0,
    ),
    "CLIP/scaled": lambda: clip("model:CLIP", SCALED, SCALED),
    "CustomTextCLIP": lambda: clip(
        "model:CustomTextCLIP",
        {"pool_type": "avg", "final_ln_after_pool": True, "pos_embed_type": "sin_cos_2d", "patch_dropout": 0.5},
        {"no_causal_mask": True, "pool_type": "last", "proj_bias": True},
    ),
    "CustomTextCLIP/timm": lambda: clip(
        "model:CustomTextCLIP",
        {"timm_model_name": "test_vit", "timm_proj": "mlp"},
        {"embed_cls": True},
        160,
        15,
    ),
    "CoCa": coca,
}


def yolo(kind: str, configuration: str) -> Sample:
    model = load(f"ultralytics.nn.tasks:{kind}")(configuration, verbose=False)
    return Sample(model, (images(64),))


#: The class and the file with the layers.
YOLO = {
    "yolov3-tiny": "DetectionModel", "yolov5n": "DetectionModel", "yolov6n": "DetectionModel",
    "yolov8n": "DetectionModel", "yolov8n-ghost": "DetectionModel", "yolov9t": "DetectionModel",
    "yolov10n": "DetectionModel", "yolo11n": "DetectionModel", "yolo12n": "DetectionModel",
    "yolo26n": "DetectionModel", "yolov8n-cls": "ClassificationModel", "yolov8n-seg": "SegmentationModel",
    "yolov8n-pose": "PoseModel", "yolo11n-obb": "OBBModel", "yolov8n-rtdetr": "RTDETRDetectionModel",
}  # fmt: skip


DETECTORS: dict[str, Recipe] = {
    "RTDETRNet": (
        {"variant": "r18", "num_classes": 4, "num_queries": 20, "hidden_dim": 64, "pretrained_backbone": False},
        lambda: images(64),
    ),
}

T5 = {"vocab_size": 30, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"use_cache": False, "decoder_start_token_id": 0}


def tuned(kind: str, base: str = "Llama", **options: Any) -> Sample:
    """A small language model of transformers with what a method of peft adds to it."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if base == "Llama":
        configuration = transformers.LlamaConfig(vocab_size=30, num_key_value_heads=2, use_cache=False, **sizes)
        model = transformers.LlamaForCausalLM(configuration)
    elif base == "Bert":
        model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=30, **sizes))
    else:
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
    ids = words(2, 12)
    labels = numbers(0, 1) if base == "Bert" else ids
    adapted = load("peft:get_peft_model")(model, load(f"peft:{kind}Config")(**options))
    return Sample(adapted, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})


LLAMA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "up_proj"]}
PEFT: dict[str, Callable[[], Sample]] = {
    "LoRA": lambda: tuned("Lora", r=4, lora_dropout=0.1, init_lora_weights=False, **LLAMA),
    "DoRA": lambda: tuned("Lora", r=4, use_dora=True, init_lora_weights=False, **LLAMA),
    "LoRA/rslora": lambda: tuned(
        "Lora",
        "Bert",
        r=4,
        use_rslora=True,
        init_lora_weights=False,
        task_type="SEQ_CLS",
        target_modules=["query", "dense", "word_embeddings"],
    ),
    "IA3": lambda: tuned("IA3", "T5", task_type="SEQ_2_SEQ_LM"),
    "PrefixTuning": lambda: tuned("PrefixTuning", num_virtual_tokens=4, prefix_projection=True, task_type="CAUSAL_LM"),
    "PromptEncoder": lambda: tuned(
        "PromptEncoder", "Bert", num_virtual_tokens=4, encoder_hidden_size=16, task_type="SEQ_CLS"
    ),
    "LoHa": lambda: tuned("LoHa", r=4, init_weights=False, **LLAMA),
    "OFT": lambda: tuned("OFT", oft_block_size=8, init_weights=False, **LLAMA),
}


def sentences(*names: str, **options: Any) -> Sample:
    """A pipeline of sentence-transformers behind embeddings of words, which are given as numbers already."""
    modules = "sentence_transformers.sentence_transformer.modules"
    vocabulary = [f"w{number}" for number in range(30)]
    tokenizer = load(f"{modules}.tokenizer:WhitespaceTokenizer")(vocabulary, do_lower_case=False)
    table = noise(len(vocabulary), 16).numpy()
    pipeline = [load(f"{modules}:WordEmbeddings")(tokenizer, table, update_embeddings=True)]
    width = 16
    for name in names:
        pipeline.append(load(f"{modules}:{name}")(width, **options))
        width = pipeline[-1].embeddings_dimension
    pipeline.append(load(f"{modules}:Pooling")(width, pooling_mode=("mean", "max")))
    pipeline.append(load("sentence_transformers.base.modules:Dense")(2 * width, 12))
    model = load("sentence_transformers:SentenceTransformer")(modules=pipeline, device="cpu")
    mask = torch.ones(2, 12, dtype=torch.long)
    return Sample(model, ({"input_ids": words(2, 12), "attention_mask": mask, "sentence_lengths": numbers(12, 12)},))


TEXT: dict[str, Callable[[], Sample]] = {
    "sentence-transformers:CNN": lambda: sentences("CNN", out_channels=8),
    "sentence-transformers:LSTM": lambda: sentences("LSTM", hidden_dim=8),
}


# -- tables -----------------------------------------------------------------------------------------------------------


def columns() -> torch.Tensor:
    """Of numbers, of which two may be categories."""
    found = noise(16, 10)
    found[:, [1, 3]] = torch.randint(0, 5, (16, 2)).float()
    return found


TABNET: dict[str, Any] = {"input_dim": 10, "virtual_batch_size": 8, "group_attention_matrix": torch.eye(10)}
TABLES: dict[str, Recipe] = {
    "TabNet": (TABNET | {"output_dim": 4}, columns),
    "TabNet/entmax": (
        TABNET
        | {"output_dim": 4, "mask_type": "entmax", "cat_idxs": [1, 3], "cat_dims": [5, 7], "cat_emb_dim": [3, 3]},
        columns,
    ),
    "TabNetPretraining": (TABNET | {"pretraining_ratio": 0.3}, lambda: noise(16, 10)),
}


#: The columns of the series: what is forecast, and two that are known in advance.
SERIES = ["y", "a", "b"]
COLUMNS: dict[str, Any] = {
    "x_categoricals": [],
    "static_categoricals": [],
    "static_reals": [],
    "time_varying_categoricals_encoder": [],
    "time_varying_categoricals_decoder": [],
    "categorical_groups": {},
    "embedding_sizes": {},
    "embedding_paddings": [],
    "embedding_labels": {},
    "x_reals": SERIES,
    "time_varying_reals_encoder": SERIES,
    "time_varying_reals_decoder": SERIES[1:],
    "dataset_parameters": {"target": "y"},
}


def forecaster(kind: str, loss: str = "MAE", **options: Any) -> Sample:
    """A model of 6 steps after 12 steps of the series."""
    steps = {"target_scale": torch.ones(2, 2)}
    for part, length in (("encoder", 12), ("decoder", 6)):
        steps |= {f"{part}_cont": noise(2, length, 3), f"{part}_cat": words(2, length, 0)}
        steps |= {f"{part}_target": noise(2, length), f"{part}_lengths": numbers(length, length)}
    options["output_transformer"] = load("pytorch_forecasting.data.encoders:TorchNormalizer")(
        method="identity", center=False
    )
    options["loss"] = load(f"pytorch_forecasting.metrics:{loss}")()
    return build(f"pytorch_forecasting.models:{kind}", options, lambda: (steps,), fill=False)


WINDOW = {"context_length": 12, "prediction_length": 6}
FORECASTERS: dict[str, Callable[[], Sample]] = {
    "NBeats": lambda: forecaster("NBeats", widths=[16, 32], backcast_loss_ratio=0.1, **WINDOW),
    "NHiTS": lambda: forecaster("NHiTS", hidden_size=32, n_blocks=[1, 1, 1], **WINDOW, **COLUMNS),
    "TemporalFusionTransformer": lambda: forecaster(
        "TemporalFusionTransformer", "QuantileLoss", attention_head_size=2, max_encoder_length=12, **COLUMNS
    ),
    "DecoderMLP": lambda: forecaster("DecoderMLP", hidden_size=32, **COLUMNS),
    "TiDEModel": lambda: forecaster(
        "TiDEModel", output_chunk_length=6, input_chunk_length=12, hidden_size=32, use_layer_norm=True, **COLUMNS
    ),
    "TimeXer": lambda: forecaster(
        "TimeXer", hidden_size=32, e_layers=2, d_ff=64, patch_length=4, enc_in=3, **WINDOW, **COLUMNS
    ),
    "xLSTMTime": lambda: forecaster("xLSTMTime", input_size=3, hidden_size=16, output_size=6, num_layers=2),
    "xLSTMTime/mlstm": lambda: forecaster("xLSTMTime", input_size=3, hidden_size=16, output_size=6, xlstm_type="mlstm"),
}


# -- graphs -----------------------------------------------------------------------------------------------------------

NODES = 24


def edges() -> torch.Tensor:
    """A circle, which leaves no node alone, and some more edges, in both directions."""
    circle = torch.arange(NODES)
    pairs = torch.cat([torch.stack([circle, circle.roll(1)]), torch.randint(0, NODES, (2, NODES))], dim=1)
    pairs = pairs[:, pairs[0] != pairs[1]]
    return torch.cat([pairs, pairs.flip(0)], dim=1)


def nodes(*more: Any) -> tuple[Any, ...]:
    """With features, the edges between them, and more."""
    return noise(NODES, 16), edges(), *more


def halves() -> torch.Tensor:
    """To which of two graphs a node belongs."""
    return torch.arange(NODES) // 12


def stack(arguments: str, layer: Callable[[], nn.Module], *more: Any) -> Sample:
    """Two layers with a normalization and an activation between them."""
    between = [(load("torch_geometric.nn:BatchNorm")(32), "x -> x"), nn.ReLU()]
    layers = [(layer(), f"{arguments} -> x"), *between, (layer(), f"{arguments} -> x"), nn.Linear(32, 4)]
    model = load("torch_geometric.nn:Sequential")(arguments, layers)
    return Sample(model, (noise(NODES, 32), *more))


def convolution(kind: str, *args: Any, **options: Any) -> Sample:
    return stack("x, edge_index", lambda: load(f"torch_geometric.nn:{kind}")(*args, **options), edges())


def perceptron(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def with_attributes(layer: Callable[[], nn.Module]) -> Sample:
    ends = edges()
    return stack("x, edge_index, edge_attr", layer, ends, noise(ends.shape[1], 8))


def all_pairs(positions: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of atoms of the same molecule, and their distances."""
    near = (batch[:, None] == batch) & ~torch.eye(len(batch), dtype=torch.bool)
    row, column = near.nonzero().t()
    return torch.stack([row, column]), (positions[row] - positions[column]).norm(dim=-1)


WIDTHS = {"in_channels": 16, "hidden_channels": 32, "out_channels": 4}
BASIC = WIDTHS | {"num_layers": 3}
PNA = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"]}


def attributed() -> tuple[torch.Tensor, ...]:
    """Nodes whose edges have features too."""
    ends = edges()
    return noise(NODES, 16), ends, noise(ends.shape[1], 8), halves()


NETWORKS: dict[str, Recipe] = {
    "GCN": (BASIC | {"norm": "batch_norm", "dropout": 0.1}, nodes),
    "GCN/jk": (BASIC | {"jk": "cat", "act": "gelu", "norm": "layer_norm", "act_first": True}, nodes),
    "GraphSAGE": (BASIC | {"norm": "graph_norm", "aggr": "mean"}, nodes),
    "GraphSAGE/jk": (BASIC | {"jk": "lstm", "project": True, "aggr": "max"}, nodes),
    "GIN": (BASIC | {"norm": "pair_norm", "train_eps": True}, nodes),
    "GAT": (BASIC | {"heads": 4, "dropout": 0.1, "act": "elu"}, nodes),
    "GAT/v2": (BASIC | {"heads": 4, "v2": True, "norm": "instance_norm"}, nodes),
    "PNA": (BASIC | PNA | {"deg": numbers(0, 2, 6, 8, 6, 2)}, nodes),
    "EdgeCNN": (BASIC | {"norm": "layer_norm", "act": "leaky_relu"}, nodes),
    "GraphUNet": (WIDTHS | {"depth": 3}, nodes),
    "AttentiveFP": (WIDTHS | {"edge_dim": 8, "num_layers": 2, "num_timesteps": 2, "dropout": 0.1}, attributed),
    "LINKX": (WIDTHS | {"num_nodes": NODES, "num_layers": 2, "dropout": 0.1}, nodes),
    "SGFormer": (WIDTHS | {"trans_num_heads": 2}, lambda: nodes(halves())),
    "Polynormer": (
        WIDTHS | {"hidden_channels": 16, "local_layers": 2, "heads": 2, "pre_ln": True},
        lambda: nodes(halves()),
    ),
    "SchNet": (
        {"hidden_channels": 32, "num_filters": 32, "num_interactions": 2, "num_gaussians": 16}
        | {"interaction_graph": all_pairs},
        lambda: (torch.randint(1, 10, (NODES,)), noise(NODES, 3), halves()),
    ),
}


def deep() -> Sample:
    def layer() -> nn.Module:
        parts = [load(f"torch_geometric.nn:{name}") for name in ("GENConv", "LayerNorm")]
        return load("torch_geometric.nn:DeepGCNLayer")(
            parts[0](32, 32, aggr="softmax", t=1.0, learn_t=True), parts[1](32), nn.ReLU(), block="res+", dropout=0.1
        )

    return stack("x, edge_index", layer, edges())


GRAPHS: dict[str, Callable[[], Sample]] = {
    "GPSConv": lambda: stack(
        "x, edge_index",
        lambda: load("torch_geometric.nn:GPSConv")(
            32, load("torch_geometric.nn:GINConv")(perceptron(32, 32, 32)), heads=4, dropout=0.1
        ),
        edges(),
    ),
    "GPSConv/performer": lambda: stack(
        "x, edge_index",
        lambda: load("torch_geometric.nn:GPSConv")(
            32, load("torch_geometric.nn:GCNConv")(32, 32), heads=4, attn_type="performer", norm="layer_norm"
        ),
        edges(),
    ),
    "TransformerConv": lambda: with_attributes(
        lambda: load("torch_geometric.nn:TransformerConv")(32, 8, heads=4, beta=True, edge_dim=8, dropout=0.1)
    ),
    "GINEConv": lambda: with_attributes(
        lambda: load("torch_geometric.nn:GINEConv")(perceptron(32, 48, 32), train_eps=True, edge_dim=8)
    ),
    "NNConv": lambda: with_attributes(
        lambda: load("torch_geometric.nn:NNConv")(32, 32, perceptron(8, 16, 1024), aggr="mean")
    ),
    "ChebConv": lambda: convolution("ChebConv", 32, 32, K=3),
    "ResGatedGraphConv": lambda: convolution("ResGatedGraphConv", 32, 32),
    "GatedGraphConv": lambda: convolution("GatedGraphConv", 32, num_layers=3),
    "PointNetConv": lambda: stack(
        "x, pos, edge_index",
        lambda: load("torch_geometric.nn:PointNetConv")(perceptron(35, 48, 32), perceptron(32, 32)),
        noise(NODES, 3),
        edges(),
    ),
    "DeepGCNLayer": deep,
}

MODELS: dict[str, Callable[[], Sample]] = {
    **{f"open_clip_torch:{name}": builder for name, builder in CLIPS.items()},
    **{f"ultralytics:{kind}/{name}": partial(yolo, kind, f"{name}.yaml") for name, kind in YOLO.items()},
    **models("rtdetr", "rtdetr.nn", DETECTORS, fill=False),
    **{f"peft:{name}": builder for name, builder in PEFT.items()},
    **TEXT,
    **models("pytorch-tabnet", "pytorch_tabnet.tab_network", TABLES, fill=False),
    **{f"pytorch-forecasting:{name}": builder for name, builder in FORECASTERS.items()},
    **models("torch_geometric", "torch_geometric.nn", NETWORKS, fill=False),
    **{f"torch_geometric:{name}": builder for name, builder in GRAPHS.items()},
}
