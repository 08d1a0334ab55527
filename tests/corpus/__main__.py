"""The corpus: ``PYTHONPATH=.:tests python -m corpus [NAMES]``, where NAMES are patterns.

The whole of it writes its table to TABLE.md beside this file. Ends with 1 where a model errs or differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from corpus.check import Entry, check
from corpus.models import build, names
from corpus.table import table

TABLE = Path(__file__).with_name("TABLE.md")


def main() -> int:
    parser = argparse.ArgumentParser(prog="corpus", description=__doc__)
    parser.add_argument("--results", type=Path, help="add each result to this file, and take those that are in it")
    parser.add_argument("names", nargs="*", help="patterns: 'timm:*', 'transformers:bert'")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    chosen = [
        name
        for library in ("torchvision", "timm", "transformers")
        for name in names(library)
        if any(fnmatchcase(name, pattern) for pattern in options.names or ["*"])
    ]
    entries, known = [], read(options.results)
    for i, name in enumerate(chosen):
        if name in known:
            entries.append(known[name])
            continue
        started = time.monotonic()
        entries.append(one(name))
        print(f"[{i + 1}/{len(chosen)}, {time.monotonic() - started:.0f} s] {entries[-1].line()}", flush=True)
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(json.dumps(vars(entries[-1])) + "\n")
        gc.collect()
    if not options.names:
        TABLE.write_text(table(entries))
    wrong = [entry.name for entry in entries if entry.problems]
    print(f"{len(entries)} models, {len(wrong)} err or differ{': ' if wrong else ''}{' '.join(wrong)}")
    return bool(wrong)


def read(results: Path | None) -> dict[str, Entry]:
    """Results of an earlier run, so that one that was interrupted goes on. What was wrong is looked at again."""
    if results is None or not results.exists():
        return {}
    entries = [Entry(**json.loads(line)) for line in results.read_text().splitlines()]
    return {entry.name: entry for entry in entries if not entry.problems}


def one(name: str) -> Entry:
    try:
        return check(name, build(name))
    except Exception:
        return Entry(name, problems=[traceback.format_exc()])


if __name__ == "__main__":
    sys.exit(main())
