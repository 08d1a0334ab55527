"""The report on what patching did or would do: one row per module."""

from __future__ import annotations

import abc
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastlayers.patching.reasons import Reason
from fastlayers.tables import Table

__all__ = [
    "QUIET",
    "PatchReport",
    "RegionRow",
    "Report",
    "Row",
    "SignatureRow",
    "change",
    "readable",
    "with_detail",
]

#: With these reasons there was nothing to do. A table only counts such rows, but for those with a detail.
QUIET = frozenset({Reason.NO_RULE, Reason.NOTHING_TO_FUSE, Reason.NOT_SELECTED, Reason.SAVES_NOTHING})


@dataclass(frozen=True)
class SignatureRow:
    """Calls of one signature, which run as a region: a program that was recorded, with its backward.

    Pairs of numbers are of a call with its backward, before and after the passes over the program: of the operations of
    the patched forward, as they would run one by one, and of those that run. They are estimates: an operation launches
    one kernel, reads each of its operands once, and writes each of its results once; a view does nothing. On a CPU no
    kernels are generated, and the numbers are equal.

    Attributes:
        what: shapes and dtypes of the arguments, and the modes.
        calls: how many ran as a region so far, of all modules of the class.
        launches: kernels that are launched, before and after.
        moved: bytes that these read and write, before and after.
        kernels: the names of the generated kernels, as profilers show them.
    """

    what: str
    calls: int
    launches: tuple[int, int]
    moved: tuple[int, int]
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class RegionRow:
    """The calls of a class that run as regions, and why others do not. Models with equal classes share them.

    Attributes:
        was: the name of the class.
        signatures: what was recorded.
        op_by_op: pairs (reason, detail) for calls that run op by op.
    """

    was: str
    signatures: tuple[SignatureRow, ...]
    op_by_op: tuple[tuple[Reason, str], ...] = ()

    @property
    def calls(self) -> int:
        """The number of calls that ran as regions so far."""
        return sum(each.calls for each in self.signatures)

    def total(self, of: str) -> tuple[int, int]:
        """The ``"launches"`` or bytes ``"moved"`` of all these calls, before and after."""
        counts = [(each.calls, *getattr(each, of)) for each in self.signatures]
        return sum(calls * before for calls, before, _ in counts), sum(calls * after for calls, _, after in counts)

    def of_a_call(self, of: str) -> tuple[int, int]:
        """The mean of a call."""
        before, after = self.total(of)
        calls = self.calls or 1
        return before // calls, after // calls

    def notes(self) -> list[str]:
        kernels = {kernel for each in self.signatures for kernel in each.kernels}
        made = f", {len(kernels)} generated kernels" if kernels else ""
        runs = [f"{self.calls} calls with {len(self.signatures)} signatures ran as regions{made}"]
        others = [f"op by op: {with_detail(*each)}" for each in self.op_by_op]
        return [*(runs if self.signatures else ()), *others]


@dataclass(frozen=True)
class Row:
    """One module.

    Attributes:
        fqn: its fully qualified name; the model itself has the empty name.
        was: the name of its original class.
        became: the name of its patched class; None where it was left alone.
        fused: pairs of a rule and the number of places that it fused.
        reason: why it was left alone; None where it was patched.
        detail: what exactly the reason refers to.
        left: pairs (reason, detail) for places in its forward that looked fusable and were not fused.
        aliases: further names of a shared module.
        bytes_saved: estimated memory traffic that it saves a step if example inputs were given, else None. A layer that
            its parent has absorbed saves nothing itself.
        absorbed_by: the name of the module whose rewritten forward does its work; None where it is called. It is
            patched all the same, for calls from elsewhere, but does not count as one more patched module.
        region: how the calls of its class run; None before the first ones.
    """

    fqn: str
    was: str
    became: str | None = None
    fused: tuple[tuple[str, int], ...] = ()
    reason: Reason | None = None
    detail: str = ""
    left: tuple[tuple[Reason, str], ...] = ()
    aliases: tuple[str, ...] = ()
    bytes_saved: int | None = None
    absorbed_by: str | None = None
    region: RegionRow | None = None

    def outcome(self) -> str:
        """The row's result in words."""
        if self.absorbed_by is not None:
            return f"the forward of {self.absorbed_by or '(model)'} does its work"
        if self.became is None:
            return with_detail(self.reason, self.detail) if self.reason else ""
        return ", ".join(f"{rule} x{count}" if count > 1 else rule for rule, count in self.fused)

    def notes(self) -> list[str]:
        notes = Counter(with_detail(*each) for each in self.left)
        return [f"{note} x{count}" if count > 1 else note for note, count in notes.items()]


def is_counted(row: Row) -> bool:
    """Whether a table has no line for a row: there was nothing to do, and there is no more to say."""
    return row.reason in QUIET and not (row.left or row.detail or row.region)


class Report(abc.ABC):
    """The base class of the reports: plain data that prints as text, Markdown, JSON and through rich."""

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python data."""

    @abc.abstractmethod
    def _table(self) -> Table:
        """What is printed."""

    def __str__(self) -> str:
        return str(self._table())

    def __rich__(self) -> Table:
        return self._table()

    def to_markdown(self) -> str:
        """The report as Markdown: the summary, a table, and what follows it."""
        return self._table().to_markdown()

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)


def numberless(fqn: str) -> str:
    """A name with ``*`` for the numbers in it: that of all blocks of a list."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", fqn)


def shared_name(rows: Sequence[Row]) -> str:
    """The name of some modules: their own, or one with ``*`` for numbers that differ, or the first one and dots."""
    first, *others = (row.fqn or "(model)" for row in rows)
    if any(numberless(name) != numberless(first) for name in others):
        return f"{first}, ..."
    parts = zip(*(name.split(".") for name in (first, *others)), strict=True)
    return ".".join(part[0] if len({*part}) == 1 else "*" for part in parts)


def with_detail(reason: Reason, detail: str) -> str:
    return f"{reason.value} ({detail})" if detail else reason.value


def change(before: int, after: int, spelled: Callable[[int], str] = str) -> str:
    return spelled(after) if before == after else f"{spelled(before)} -> {spelled(after)}"


def readable(count: int) -> str:
    """A number of bytes with a binary unit: ``1.5 MiB``."""
    number, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024:
            break
        number, unit = number / 1024, larger
    return f"{count} B" if unit == "B" else f"{number:.1f} {unit}"


#: The columns of what a region costs, and how their numbers are spelled.
COSTS: dict[str, Callable[[int], str]] = {"launches": str, "moved": readable}


@dataclass(frozen=True)
class PatchReport(Report):
    """The result of :func:`plan_patch` and :func:`patch_report`; iterates over its rows.

    Printing it gives a table of what was patched and of what was refused. Modules with nothing to fuse are counted, but
    for those with an operation that a rule fuses with others than those beside it.
    Equal blocks share a line, ``layers.*.mlp``, and so do all layers of a class that were left alone for one reason.
    After the first calls there are columns for what runs: see :class:`SignatureRow` for what they count.

    Attributes:
        rows: all of them, one for each module.
        model: the name of the model's class.
        unmatched: patterns that matched no module.
        details: print a line for each module instead.
    """

    rows: tuple[Row, ...]
    model: str = ""
    unmatched: tuple[str, ...] = field(default=())
    details: bool = False

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
        """The rows of the patched modules, without those whose work the forward of a patched parent does."""
        return tuple(row for row in self.rows if row.became is not None and row.absorbed_by is None)

    @property
    def absorbed(self) -> tuple[Row, ...]:
        """The rows of modules whose work the forward of a patched parent does."""
        return tuple(row for row in self.rows if row.absorbed_by is not None)

    @property
    def refused(self) -> tuple[Row, ...]:
        """The rows of modules that were left alone although they may have something to fuse."""
        return tuple(row for row in self.rows if row.reason is not None and row.reason not in QUIET)

    def counts(self) -> dict[str, int]:
        """The number of fused places by rule."""
        total: Counter[str] = Counter()
        for row in self.patched:
            total.update(dict(row.fused))
        return dict(total)

    def reasons(self) -> dict[Reason, int]:
        """The number of modules left alone by reason."""
        return dict(Counter(row.reason for row in self.rows if row.reason is not None))

    @property
    def bytes_saved(self) -> int | None:
        """Estimated memory traffic that the whole model saves a step; None without example inputs."""
        known = [row.bytes_saved for row in self.rows if row.bytes_saved is not None]
        return sum(known) if known else None

    @property
    def regions(self) -> tuple[RegionRow, ...]:
        """How calls run, by class; empty before the first ones."""
        return tuple({id(row.region): row.region for row in self.rows if row.region is not None}.values())

    def summary(self) -> str:
        """One line: the number of patched modules, of fused places, and of calls that ran as regions."""
        places = ", ".join(f"{count} {rule}" for rule, count in self.counts().items()) or "nothing to fuse"
        saved = "" if self.bytes_saved is None else f"; about {readable(self.bytes_saved)} a step less to move"
        patched = f"{self.model or 'model'}: {len(self.patched)} of {len(self.rows)} modules patched: {places}"
        return f"{patched}{saved}{self._runs()}"

    def _runs(self) -> str:
        """What the summary says of regions."""
        ran = [region for region in self.regions if region.calls]
        if not ran:
            return ""
        totals = ([*map(sum, zip(*(region.total(of) for region in ran), strict=True))] for of in COSTS)
        (launches, fewer), (moved, less) = totals
        saved = f": {launches} launches as {fewer}, {readable(moved)} as {readable(less)}"
        calls = f"; {sum(region.calls for region in ran)} calls of {len(ran)} classes ran as regions"
        return calls if (launches, moved) == (fewer, less) else calls + saved

    def _groups(self) -> list[list[Row]]:
        """The rows to print, those that share a line in one list."""
        groups: dict[Any, list[Row]] = {}
        for i, row in enumerate(self.rows):
            if row.absorbed_by is not None or is_counted(row):
                continue
            place = numberless(row.fqn) if row.became is not None else ""
            key = i if self.details else (row.was, row.became, place, row.outcome(), id(row.region), *row.left)
            groups.setdefault(key, []).append(row)
        return list(groups.values())

    def _table(self) -> Table:
        """A row for what was patched or refused; equal modules share one."""
        numbers = (*(() if self.bytes_saved is None else ("saved a step",)), *(COSTS if self.regions else ()))
        lines, styles, shown = [], [], set[int]()
        for rows in self._groups():
            row = rows[0]
            count = f"{len(rows)} x " if len(rows) > 1 else ""
            known = [each.bytes_saved for each in rows if each.bytes_saved is not None]
            cells = dict.fromkeys(numbers, "")
            if known:
                cells["saved a step"] = readable(sum(known))
            texts = [f"left: {note}" for note in row.notes()]
            if row.region is not None:
                first, calls = id(row.region) not in shown, row.region.calls
                shown.add(id(row.region))
                texts += row.region.notes() if first else []
                for of, spelled in COSTS.items() if calls else ():
                    cells[of] = change(*row.region.of_a_call(of), spelled) if first else "as above"
            lines.append((shared_name(rows), f"{count}{row.was}", row.became or "-", *cells.values(), row.outcome()))
            notes = [("", "", "", *("" for _ in numbers), text) for text in texts]
            lines += notes
            styles += ["green" if row.became else "yellow", *("dim" for _ in notes)]
        header = ("module", "was", "became", *numbers, "fused, or why not")
        return Table(header, lines, self.summary(), self._footer(), right=numbers, styles=styles)

    def _footer(self) -> list[str]:
        counts = Counter(row.reason.value for row in self.rows if row.reason is not None and is_counted(row))
        quiet = [f"{count} modules: {reason}" for reason, count in counts.items()]
        if self.absorbed:
            quiet.insert(0, f"{len(self.absorbed)} modules: the forward of a patched parent does their work")
        if any(len(rows) > 1 for rows in self._groups()):
            quiet.append("a line with a count stands for several modules; details=True gives each its own")
        if any(region.calls for region in self.regions):
            quiet.append(
                "launches and bytes moved are of a call with its backward, estimated: the mean of those so far"
            )
        return [*quiet, *(f"pattern {pattern!r} matched nothing" for pattern in self.unmatched)]

    def to_dict(self) -> dict[str, Any]:
        """All rows as plain Python data, also of modules with nothing to fuse. Each has the number of its region."""
        numbers = {id(region): number for number, region in enumerate(self.regions)}
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
                "bytes_saved": row.bytes_saved,
                "absorbed_by": row.absorbed_by,
                "region": None if row.region is None else numbers[id(row.region)],
            }
            for row in self.rows
        ]
        regions = [
            {
                "was": region.was,
                "signatures": [vars(each) for each in region.signatures],
                "op_by_op": [{"reason": reason.name, "detail": detail} for reason, detail in region.op_by_op],
            }
            for region in self.regions
        ]
        return {
            "model": self.model,
            "counts": self.counts(),
            "reasons": {reason.name: count for reason, count in self.reasons().items()},
            "bytes_saved": self.bytes_saved,
            "unmatched": list(self.unmatched),
            "regions": regions,
            "modules": rows,
        }
