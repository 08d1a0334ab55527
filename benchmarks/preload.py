"""Imports the libraries, which takes seconds, once in the process from which all workers of models.py are forked.

Nothing here may start a thread, a process or a CUDA context: a fork has no threads and cannot use the context. So
Inductor's compiler is not imported here, which may start processes. Liger is not either: only its own mode needs it.
"""

import os
from contextlib import suppress
from importlib import import_module

LIBRARIES = (
    "benchmarks.model_worker",
    "torch._dynamo",
    "timm",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "bert")),
)

# torch.cuda.is_available() then asks NVML and does not initialise CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
for library in LIBRARIES:
    with suppress(Exception):  # the worker that needs a missing or broken library reports it
        import_module(library)
