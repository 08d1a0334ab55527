"""Result files: JSON with one line for each row, so that a diff of two runs shows the rows that changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def text_of(results: dict[str, Any]) -> str:
    """The results as JSON, one line for each row and for each other entry."""
    entries = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in results.items() if name != "rows"]
    rows = ",\n".join(json.dumps(row) for row in results["rows"])
    entries.append(f'"rows": [\n{rows}\n]' if rows else '"rows": []')
    return "{\n" + ",\n".join(entries) + "\n}\n"


def write(path: Path, results: dict[str, Any]) -> None:
    """Write or replace the file in one step: a run that is cut short leaves the last complete one."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text_of(results))
    unfinished.replace(path)


def rounded(value: float) -> float:
    """Five significant digits: more than any measurement here is good for."""
    return float(f"{value:.5g}")
