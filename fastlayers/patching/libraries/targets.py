"""Models by name, for the command line: ``timm:resnet50``, ``transformers:bert``, ``package.module:callable``."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TARGET", "TINY", "Shapes", "TargetError", "default_inputs", "load_target", "names_library", "random_inputs"]

#: What the command line says of a target, and of --tiny.
TARGET = (
    "TARGET is timm:NAME, torchvision:NAME, transformers:NAME (bert, BertConfig, BertForMaskedLM, owner/name) or "
    "package.module:CALLABLE (anything that returns a module). Weights are random."
)
TINY = "Make a model of transformers with few and small layers."
EXPECTED = "expected timm:NAME, torchvision:NAME, transformers:NAME or package.module:CALLABLE"

#: Shapes of inputs, with a name for each keyword argument.
Shapes = list[tuple[str | None, tuple[int, ...]]]

#: The numbers in the configuration of a tiny model, by their usual names in transformers.
TINY_SIZES: dict[int, tuple[str, ...]] = {
    64: ("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "embedding_size", "decoder_hidden_size",
         "word_embed_proj_dim", "projection_dim", "lru_width"),
    128: ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "ffn_hidden_size",
          "dim_feedforward", "hidden_dim_ffn", "decoder_intermediate_size", "max_position_embeddings", "n_positions",
          "n_ctx", "max_source_positions", "max_target_positions", "max_seq_len", "moe_intermediate_size"),
    256: ("vocab_size", "vocab_size_per_layer_input"),
    16: ("head_dim", "d_kv", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
         "rotary_dim", "hidden_size_per_layer_input", "state_size"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_experts", "num_local_experts", "n_routed_experts"),
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
        "num_decoder_layers", "num_encoder_layers", "num_key_value_heads", "num_experts_per_tok",
        "decoder_num_hidden_layers"),
    1: ("n_group", "topk_group", "first_k_dense_replace"),
}  # fmt: skip
TINY_BY_NAME = {name: size for size, names in TINY_SIZES.items() for name in names}


class TargetError(ValueError):
    """A target is not the name of a model. The message has the given target and the expected form."""


def names_library(target: str) -> bool:
    """Whether a target is a model of a library, whose inputs are known."""
    return target.startswith(("timm:", "torchvision:", "transformers:"))


def load_target(target: str, *, tiny: bool = False, weights: bool = True) -> nn.Module:
    """Create the model that a target names, with random weights.

    Args:
        target: ``timm:NAME``, ``torchvision:NAME``, ``transformers:NAME``, or ``package.module:CALLABLE`` for a module
            or anything that returns one (a class, a function). The current directory is searched too. A name of
            transformers is a model type (``bert``), a class of a configuration or of a model (``BertForMaskedLM``), or
            a folder or repository (``owner/name``) with a ``config.json``.
        tiny: whether to give a model of transformers few and small layers.
        weights: if False, a model of transformers is created on the "meta" device, without memory.

    Raises:
        TargetError: there is no such model.
    """
    package, colon, name = target.partition(":")
    if not (package and colon and name):
        raise TargetError(f"{target!r} is not the name of a model; {EXPECTED}")
    if package == "transformers":
        return from_transformers(name, tiny, weights)
    if tiny:
        raise TargetError(f"only a model of transformers has a configuration to make tiny; {target} is not one")
    if package == "timm":
        return from_library("timm", lambda timm: timm.create_model(name, pretrained=False))
    if package == "torchvision":
        return from_library("torchvision.models", lambda models: models.get_model(name, weights=None))
    return from_callable(package, name)


def from_library(module: str, build: Callable[[Any], nn.Module]) -> nn.Module:
    package = module.partition(".")[0]
    try:
        library = importlib.import_module(module)
    except ImportError as error:
        raise TargetError(f"{package} cannot be imported ({error}); pip install {package}") from None
    try:
        return build(library)
    except (RuntimeError, ValueError) as error:
        raise TargetError(f"{package} has no such model: {error}") from None


def from_callable(package: str, name: str) -> nn.Module:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(package)
    except ImportError as error:
        raise TargetError(f"cannot import {package}: {error}; {EXPECTED}") from None
    for attribute in name.split("."):
        if not hasattr(found, attribute):
            raise TargetError(f"{package} has no {name}; {EXPECTED}")
        found = getattr(found, attribute)
    if not isinstance(found, nn.Module) and callable(found):
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise TargetError(
                f"{package}:{name} cannot be called without arguments ({error}): name a function that takes none and "
                f"returns the model"
            ) from None
        found = found()
    if not isinstance(found, nn.Module):
        raise TargetError(f"{package}:{name} gives a {type(found).__name__}; expected a torch.nn.Module")
    return found


# -- transformers -----------------------------------------------------------------------------------------------------


def from_transformers(name: str, tiny: bool, weights: bool) -> nn.Module:
    def build(transformers: Any) -> nn.Module:
        config, make = find_configuration(transformers, name)
        if tiny:
            config = shrink(config)
        if weights and hasattr(config, "use_cache"):
            config.use_cache = False  # A training step is run, not a generation.
        with torch.device("cpu" if weights else "meta"):
            model: nn.Module = make(config)
        return model

    return from_library("transformers", build)


def find_configuration(transformers: Any, name: str) -> tuple[Any, Callable[[Any], Any]]:
    """A configuration, and the function that creates a model from it."""
    types = transformers.CONFIG_MAPPING
    if name in types:
        return types[name](), transformers.AutoModel.from_config
    if os.path.isdir(name) or "/" in name:
        try:
            config = transformers.AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise TargetError(f"{name!r} gives no configuration of transformers: {error}") from None
        model = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        return config, getattr(model, "from_config", model)
    found: Any = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found.config_class(), found  # type: ignore[attr-defined]
    if isinstance(found, type) and hasattr(found, "model_type"):
        return found(), transformers.AutoModel.from_config
    close = difflib.get_close_matches(name, types.keys(), 3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(
        f"{name!r} is not a model type (bert, llama, ...), a class of a configuration or a model, a folder or an "
        f"owner/name{hint}"
    )


def shrink(config: Any) -> Any:
    """A configuration like this one, with few and small layers."""
    chosen: dict[str, Any] = {}
    for name, value in vars(config).items():
        if hasattr(type(value), "model_type"):
            chosen[name] = shrink(value)
        elif name in TINY_BY_NAME and type(value) is int:
            chosen[name] = min(value, TINY_BY_NAME[name])
        elif name.endswith("_token_id") and type(value) is int:
            chosen[name] = min(value, TINY_BY_NAME["vocab_size"] - 1)
        elif name == "depths":
            chosen[name] = [min(depth, 2) for depth in value]
    heads, groups = (vars(config).get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if groups is not None and groups == heads:
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    return type(config)(**chosen)


# -- inputs -----------------------------------------------------------------------------------------------------------


def default_inputs(model: nn.Module) -> Shapes:
    """The usual shapes of a model's inputs, such as two images, or two texts of 64 tokens.

    Raises:
        TargetError: they are not known.
    """
    main = getattr(model, "main_input_name", None)
    if main is None:
        configuration = getattr(model, "pretrained_cfg", None) or {}
        return [(None, (2, *configuration.get("input_size", (3, 224, 224))))]
    config: Any = model.config
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None) or 224
        return [
            (main, (2, getattr(vision, "num_channels", 3), *(size if isinstance(size, list | tuple) else (size, size))))
        ]
    if main == "input_ids":
        shapes: Shapes = [(main, (2, 64))]
    elif main == "input_values":
        shapes = [(main, (2, 16000))]
    elif main == "input_features":
        shapes = [(main, (2, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)))]
    else:
        raise TargetError(f"a {type(model).__name__} takes {main!r}, of unknown shape; give it as --input {main}=SHAPE")
    if (
        getattr(config, "is_encoder_decoder", False)
        and "decoder_input_ids" in inspect.signature(model.forward).parameters
    ):
        shapes.append(("decoder_input_ids", (2, 64)))
    return shapes


def random_inputs(
    model: nn.Module, shapes: Shapes, device: torch.device | str, dtype: torch.dtype | None = None
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Random tensors of these shapes as positional and as keyword arguments.

    Names that end with ``ids`` get token numbers, names that end with ``mask`` ones, and others floating-point numbers.
    An input without a name is the main input of a model of transformers.
    """
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    main = getattr(model, "main_input_name", None)
    for name, shape in shapes:
        name = name or (main if main not in kwargs else None)
        if name is not None and name.endswith("ids"):
            tensor = torch.randint(vocabulary(model), shape, device=device)
        elif name is not None and name.endswith("mask"):
            tensor = torch.ones(shape, dtype=torch.long, device=device)
        else:
            tensor = torch.randn(shape, device=device, dtype=dtype)
        if name is None:
            args.append(tensor)
        else:
            kwargs[name] = tensor
    return tuple(args), kwargs


def vocabulary(model: nn.Module) -> int:
    """The number of tokens of a model: by its configuration, or by the smallest of its embeddings."""
    config = getattr(model, "config", None)
    known: int | None = getattr(getattr(config, "text_config", config), "vocab_size", None)
    sizes = (module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
    return known or min(sizes, default=2)
