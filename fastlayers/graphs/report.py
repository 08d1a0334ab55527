"""The report on the graphs of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastlayers.patching.report import Report, readable
from fastlayers.tables import Table

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

    def _table(self) -> Table:
        """A row for each module and signature."""
        header = ("module", "class", "call", "replays", "memory", "state")
        rows = [
            (row.fqn or "(model)", row.was, row.what, str(row.replays), readable(row.memory) if row.memory else "",
             f"{row.state}: {row.reason}" if row.reason else row.state)
            for row in self.rows
        ]  # fmt: skip
        styles = [{"captured": "green", "uncaptured": "yellow"}.get(row.state, "dim") for row in self.rows]
        return Table(header, rows, self.summary(), right=("replays", "memory"), styles=styles)

    def to_dict(self) -> dict[str, Any]:
        """All rows as plain Python data."""
        return {"model": self.model, "rows": [vars(row) for row in self.rows]}
