"""The libraries, which take seconds to import: once, in the process that every worker of models.py is a fork of.

Nothing here may start a thread, a process or a CUDA context: a fork would lack the one and could not use the other. So
Inductor's compiler is not here, which may start processes as it is imported; nor Liger, which is for its own mode only.
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

# A library that asks torch.cuda.is_available() then gets the answer from NVML, and CUDA is not initialised.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
for library in LIBRARIES:
    with suppress(Exception):  # what is not there, or broken, the worker that needs it tells of
        import_module(library)
