"""The whole corpus: ``PYTHONPATH=.:tests python -m corpus [NAMES] [--table FILE]``; NAMES are patterns.

Ends with 1 where a model errs or differs.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from corpus.check import Entry, check
from corpus.models import build, names
from corpus.table import table


def main() -> int:
    parser = argparse.ArgumentParser(prog="corpus", description=__doc__)
    parser.add_argument("names", nargs="*", default=["*"], help="patterns: 'timm:*', 'transformers:bert'")
    parser.add_argument("--table", type=Path, help="write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    chosen = [
        name
        for library in ("torchvision", "timm", "transformers")
        for name in names(library)
        if any(fnmatchcase(name, pattern) for pattern in options.names)
    ]
    entries = []
    for i, name in enumerate(chosen):
        entries.append(one(name))
        print(f"[{i + 1}/{len(chosen)}] {entries[-1].line()}", flush=True)
        gc.collect()
    if options.table:
        options.table.write_text(table(entries))
    wrong = [entry.name for entry in entries if entry.problems]
    print(f"{len(entries)} models, {len(wrong)} err or differ{': ' if wrong else ''}{' '.join(wrong)}")
    return bool(wrong)


def one(name: str) -> Entry:
    try:
        return check(name, build(name))
    except Exception:
        return Entry(name, problems=[traceback.format_exc()])


if __name__ == "__main__":
    sys.exit(main())
