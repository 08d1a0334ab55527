"""What patching did, or would do: one row per module."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastlayers.patching.reasons import Reason

__all__ = ["PatchReport", "Row"]

#: Rows that say no more than that there was nothing to do; a table counts them and leaves them out.
QUIET = frozenset({Reason.NO_RULE, Reason.NOTHING_TO_FUSE, Reason.NOT_SELECTED})


@dataclass(frozen=True)
class Row:
    """One module.

    Attributes:
        fqn: its fully qualified name; the model itself has the empty name.
        was: the name of its class without fastlayers.
        became: the name of its class with fastlayers; None where it was left alone.
        fused: what was fused, rule by rule, with the number of places.
        reason: why it was left alone; None where it was not.
        detail: what exactly the reason refers to.
        left: places in a forward that looked fusable and were not, as (reason, detail).
        aliases: further names of a shared module.
    """

    fqn: str
    was: str
    became: str | None = None
    fused: tuple[tuple[str, int], ...] = ()
    reason: Reason | None = None
    detail: str = ""
    left: tuple[tuple[Reason, str], ...] = ()
    aliases: tuple[str, ...] = ()

    def outcome(self) -> str:
        """The row's result in words."""
        if self.became is None:
            return f"{self.reason.value if self.reason else ''}{f' ({self.detail})' if self.detail else ''}"
        return ", ".join(f"{rule} x{count}" if count > 1 else rule for rule, count in self.fused)

    def notes(self) -> list[str]:
        return [f"{reason.value} ({detail})" if detail else reason.value for reason, detail in self.left]


@dataclass(frozen=True)
class PatchReport:
    """The result of :func:`plan_patch` and :func:`patch_report`; iterates over its rows.

    Printing it gives a table of what was patched and of what was refused; modules with nothing to fuse are counted.
    """

    rows: tuple[Row, ...]
    model: str = ""
    unmatched: tuple[str, ...] = field(default=())

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, fqn: str) -> Row:
        """The row of a module by its name."""
        for row in self.rows:
            if fqn == row.fqn or fqn in row.aliases:
                return row
        raise KeyError(f"no module is called {fqn!r} in this report")

    @property
    def patched(self) -> tuple[Row, ...]:
        """The rows of modules that became something else."""
        return tuple(row for row in self.rows if row.became is not None)

    @property
    def refused(self) -> tuple[Row, ...]:
        """The rows of modules that were left alone for another reason than having nothing to fuse."""
        return tuple(row for row in self.rows if row.reason is not None and row.reason not in QUIET)

    def counts(self) -> dict[str, int]:
        """Places fused, by rule."""
        total: Counter[str] = Counter()
        for row in self.rows:
            total.update(dict(row.fused))
        return dict(total)

    def reasons(self) -> dict[Reason, int]:
        """Modules left alone, by reason."""
        return dict(Counter(row.reason for row in self.rows if row.reason is not None))

    def summary(self) -> str:
        """One line: how many modules, how many places, what was left."""
        places = ", ".join(f"{count} {rule}" for rule, count in self.counts().items()) or "nothing to fuse"
        return f"{self.model or 'model'}: {len(self.patched)} of {len(self.rows)} modules patched: {places}"

    def _table(self) -> list[tuple[str, str, str, str]]:
        lines = []
        for row in self.rows:
            if row.reason in QUIET and not row.left:
                continue
            lines.append((row.fqn or "(model)", row.was, row.became or "-", row.outcome()))
            lines.extend(("", "", "", f"left: {note}") for note in row.notes())
        return lines

    def _footer(self) -> list[str]:
        quiet = [f"{count} modules: {reason.value}" for reason, count in self.reasons().items() if reason in QUIET]
        return [*quiet, *(f"pattern {pattern!r} matched nothing" for pattern in self.unmatched)]

    def __str__(self) -> str:
        header = ("module", "was", "became", "fused, or why not")
        lines = self._table()
        widths = [max(len(line[i]) for line in (header, *lines)) for i in range(3)]
        text = [self.summary()]
        if lines:
            for line in (header, *lines):
                cells = [cell.ljust(width) for cell, width in zip(line[:3], widths, strict=True)]
                text.append("  ".join([*cells, line[3]]).rstrip())
        return "\n".join([*text, *self._footer()])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        footer = [Text(line, style="dim") for line in self._footer()]
        lines = self._table()
        if not lines:
            return Group(Text(self.summary()), *footer)
        table = Table(title=Text(self.summary()), title_justify="left")
        for column in ("module", "was", "became", "fused, or why not"):
            table.add_column(column, overflow="fold")
        for fqn, was, became, outcome in lines:
            style = "green" if became not in ("-", "") else ("dim" if fqn == "" else "yellow")
            table.add_row(*(Text(cell, style=style) for cell in (fqn, was, became, outcome)))
        return Group(table, *footer)

    def to_markdown(self) -> str:
        """The table in Markdown, with the summary above and the counts of what was left out below."""
        lines, table = [self.summary()], self._table()
        if table:
            lines += ["", "| module | was | became | fused, or why not |", "|---|---|---|---|"]
        for line in table:
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
        return "\n".join([*lines, "", *(f"- {line}" for line in self._footer())]).rstrip() + "\n"

    def to_dict(self) -> dict[str, Any]:
        """All rows, those with nothing to fuse included, as plain Python data."""
        rows = [
            {
                "module": row.fqn,
                "aliases": list(row.aliases),
                "was": row.was,
                "became": row.became,
                "fused": dict(row.fused),
                "reason": row.reason.name if row.reason else None,
                "explanation": row.outcome() if row.reason else None,
                "left": [{"reason": reason.name, "detail": detail} for reason, detail in row.left],
            }
            for row in self.rows
        ]
        return {"model": self.model, "counts": self.counts(), "unmatched": list(self.unmatched), "modules": rows}

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)
