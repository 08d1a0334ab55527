"""The tutorial docs/first-op.md as a program: writes its CUDA source to a file and runs its Python blocks in order.

On a GPU the last block measures, and prints the tables of section 11. ``--out`` keeps the generated files.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "first-op.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="Folder of first_op.py and relu2_gate.cu; default: a temporary one.")
    chosen = parser.parse_args().out
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run(PAGE.read_text(), folder.absolute())


def run(page: str, folder: Path) -> None:
    """Write the program and the kernels of the page to ``folder`` and run the program there."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    kernels, program = ("".join(code for language, code in blocks if language == name) for name in ("cuda", "python"))
    os.chdir(folder)
    Path("relu2_gate.cu").write_text(kernels)
    path = Path("first_op.py").absolute()  # a file: Triton and patch_model read the source of functions
    path.write_text(program)
    exec(compile(program, str(path), "exec"), {"__name__": "first_op", "__file__": str(path)})


if __name__ == "__main__":
    main()
