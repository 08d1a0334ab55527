"""Imports the libraries, which takes seconds, once in the process from which all workers of models.py are forked.

Nothing here may start a thread, a process or a CUDA context: a fork has no threads and cannot use the context. So
Inductor's compiler is not imported here, which may start processes. diffusers and MONAI are not either, which look for
a GPU and import what else is installed, and neither is Liger, which only its own mode needs.
"""

import os
from contextlib import suppress
from importlib import import_module

DECODERS = ("llama", "gpt2", "gpt_neox", "qwen3", "gemma3", "qwen3_moe")
ENCODERS = ("bert", "modernbert", "deberta_v2", "t5", "bart", "whisper", "wav2vec2", "clip", "siglip")
CLASSIFIERS = ("resnet", "vit", "convnext", "swin")
LIBRARIES = (
    "benchmarks.model_worker",
    "torch._dynamo",
    "timm",
    "torchvision.models",
    *(f"transformers.models.{name}.modeling_{name}" for name in (*DECODERS, *ENCODERS, *CLASSIFIERS)),
)

# torch.cuda.is_available() then asks NVML and does not initialise CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
for library in LIBRARIES:
    with suppress(Exception):  # the worker that needs a missing or broken library reports it
        import_module(library)
