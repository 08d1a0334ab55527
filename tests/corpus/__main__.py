"""The corpus: ``python -m tests.corpus [NAMES]``, where NAMES are patterns.

The models of torchvision, timm and transformers are a table, TABLE.md beside this file, and those of the other packages
another one, PACKAGES.md. Each is written when all of its models were chosen. Ends with 1 where a model errs or differs.
Results are kept in build/ for as long as the code is the same, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import os
import sys
import time
import traceback
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from tests import ROOT
from tests.corpus.check import Entry, check
from tests.corpus.models import PACKAGES, build, names
from tests.corpus.table import table, versions

TABLES = {"TABLE.md": ("torchvision", "timm", "transformers"), "PACKAGES.md": (PACKAGES,)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.corpus", description=__doc__)
    parser.add_argument("names", nargs="*", help="patterns: 'timm:*', 'transformers:bert'")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    chosen = [
        name
        for library in itertools.chain(*TABLES.values())
        for name in names(library)
        if any(fnmatchcase(name, pattern) for pattern in options.names or ["*"])
    ]
    results = ROOT / "build" / f"corpus-{digest()}.jsonl"
    results.parent.mkdir(exist_ok=True)
    entries, known = [], read(results)
    for i, name in enumerate(chosen):
        if name in known:
            entries.append(known[name])
            continue
        started = time.monotonic()
        entries.append(one(name))
        print(f"[{i + 1}/{len(chosen)}, {time.monotonic() - started:.0f} s] {entries[-1].line()}", flush=True)
        with results.open("a") as file:
            file.write(json.dumps(vars(entries[-1])) + "\n")
        gc.collect()
    for file, libraries in TABLES.items():
        rows = [entry for entry in entries if entry.library in libraries]
        if len(rows) == sum(len(names(library)) for library in libraries):
            Path(__file__).with_name(file).write_text(table(rows))
    wrong = [entry.name for entry in entries if entry.problems]
    print(f"{len(entries)} models, {len(wrong)} err or differ{': ' if wrong else ''}{' '.join(wrong)}")
    return bool(wrong)


def digest() -> str:
    """Another one for any other code of fastlayers, of the corpus, or version of a library."""
    code = hashlib.sha256(versions().encode())
    for path in sorted((*(ROOT / "fastlayers").rglob("*"), *Path(__file__).parent.rglob("*"))):
        if path.suffix in (".py", ".so"):
            code.update(path.read_bytes())
    return code.hexdigest()[:12]


def read(results: Path) -> dict[str, Entry]:
    """Results of an earlier run but those that were wrong, which are looked at again."""
    lines = results.read_text().splitlines() if results.exists() else []
    entries = [Entry(**json.loads(line)) for line in lines]
    return {entry.name: entry for entry in entries if not entry.problems}


def one(name: str) -> Entry:
    try:
        return check(name, build(name))
    except Exception:
        return Entry(name, problems=[traceback.format_exc()])


if __name__ == "__main__":
    sys.exit(main())
