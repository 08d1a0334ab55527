"""The report on the graphs of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastlayers.patching.report import Report, markdown_table, plain_table, readable

__all__ = ["GraphReport", "GraphRow"]


@dataclass(frozen=True)
class GraphRow:
    """The calls of one module with one signature.

    Attributes:
        fqn: the module's name; empty for the model itself.
        was: its class.
        what: shapes and dtypes of the arguments, and the modes.
        state: ``"captured"``, ``"warming up"`` or ``"uncaptured"``.
        graphs: the number of captured calls: two if a forward begins before the backward of another.
        replays: how often they were replayed.
        memory: bytes that they reserve.
        reason: why these calls run as they are; empty otherwise.
    """

    fqn: str
    was: str
    what: str
    state: str
    graphs: int
    replays: int
    memory: int
    reason: str


@dataclass(frozen=True)
class GraphReport(Report):
    """The result of :func:`fastlayers.graph_report`; iterates over its rows. Printing it gives a table."""

    rows: tuple[GraphRow, ...]
    model: str = ""

    def __iter__(self) -> Iterator[GraphRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def captured(self) -> tuple[GraphRow, ...]:
        """The rows whose calls are replayed."""
        return tuple(row for row in self.rows if row.state == "captured")

    def summary(self) -> str:
        """One line: the number of graphs, their replays and their memory."""
        graphs, replays = (sum(getattr(row, name) for row in self.rows) for name in ("graphs", "replays"))
        memory = readable(sum(row.memory for row in self.rows))
        return f"{self.model or 'model'}: {graphs} calls captured, replayed {replays} times, {memory} reserved"

    def _header(self) -> tuple[str, ...]:
        return ("module", "class", "call", "replays", "memory", "state")

    def _table(self) -> list[tuple[str, ...]]:
        return [
            (row.fqn or "(model)", row.was, row.what, str(row.replays), readable(row.memory) if row.memory else "",
             f"{row.state}: {row.reason}" if row.reason else row.state)
            for row in self.rows
        ]  # fmt: skip

    def __str__(self) -> str:
        lines = self._table()
        return "\n".join([self.summary(), *(plain_table(self._header(), lines) if lines else [])])

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self.summary()), title_justify="left")
        for column in self._header():
            table.add_column(column, overflow="fold", justify="right" if column in ("replays", "memory") else "left")
        for row, line in zip(self.rows, self._table(), strict=True):
            style = {"captured": "green", "uncaptured": "yellow"}.get(row.state, "dim")
            table.add_row(*(Text(cell, style=style) for cell in line))
        return table

    def to_markdown(self) -> str:
        """The table in Markdown, after the summary."""
        lines = self._table()
        table = ["", *markdown_table(self._header(), lines)] if lines else []
        return "\n".join([self.summary(), *table]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """All rows as plain Python data."""
        return {"model": self.model, "rows": [vars(row) for row in self.rows]}
