"""Runs examples for tests/examples/test_examples.py, each in a fork of a process that has imported what they need.

The imports take longer than the examples' work in a test. A line of its input is a JSON object: ``argv`` as Python
takes it, the number of ``processes`` that run it, with the environment that torchrun gives them, and the files for
``stdout`` and ``stderr``. Its answer is a line with the exit status, of several processes the first one that is not 0.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback

LIBRARIES = (
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "fastlayers", "einops", "matplotlib.pyplot", "sklearn.model_selection", "sklearn.datasets", "safetensors.torch",
    "transformers.trainer", "transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama",
    "lightning",
)  # fmt: skip


def execute(argv: list[str], stdout: str, stderr: str) -> int:
    """As ``python *argv``, in this process; returns the exit status."""
    signal.alarm(600)  # nobody waits longer
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    try:
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # its examples are skipped
            importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy the memory of all that was imported
    for line in sys.stdin:
        asked = json.loads(line)
        world = asked.pop("processes")
        shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        children = []
        for rank in range(world):
            children.append(os.fork())
            if children[-1] == 0:
                if world > 1:
                    os.environ |= shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                status = execute(**asked)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)  # taking all the libraries down takes longer than the example
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(next(filter(None, statuses), 0), flush=True)
    os._exit(0)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
