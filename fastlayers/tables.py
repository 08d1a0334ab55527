"""Tables that fit the place where they are printed. A line breaks at spaces only: a name stays whole."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Table", "make_console", "printed_width"]

#: The width in a pipe or a file if COLUMNS is not set.
PIPE = 120
#: A column whose cells wrap is at least this wide: sentences in narrower ones are hard to read.
SENTENCE = 24
GAP = "  "


def printed_width() -> int:
    """The width of the terminal; in a pipe that of COLUMNS, or 120."""
    return shutil.get_terminal_size((PIPE, 24)).columns


def make_console(**options: Any) -> Console:
    """A console of rich that is :func:`printed_width` wide. It follows a terminal that changes its size."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else printed_width(), **options)


@dataclass(frozen=True)
class Table:
    """A table for ``print`` and for rich.

    If the columns do not fit beside each other, a row has the last ones below the first ones. A word that is longer
    than a line stays whole as well; only a console of rich breaks it.

    Attributes:
        header: the titles of the columns; none is shown if all are empty.
        rows: the cells of each row.
        title: one or more lines above the table.
        footer: lines below it.
        right: the titles of the columns that are aligned to the right.
        style: the style of the title in a console of rich.
        styles: those of the rows.
    """

    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    title: str = ""
    footer: Sequence[str] = ()
    right: Collection[str] = ()
    style: str = ""
    styles: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join(text for text, _ in self.lines(printed_width()))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        for text, style in self.lines(options.max_width):
            yield Text(text, style)

    def to_markdown(self) -> str:
        """The title, the table and a list of the footer."""
        cells = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]
        header, *rows = ["| " + " | ".join(row) + " |" for row in cells]
        table = ["", header, "|" + "---|" * len(self.header), *rows] if rows else []
        return "\n".join([self.title, *table, "", *(f"- {line}" for line in self.footer)]).rstrip() + "\n"

    def lines(self, width: int) -> Iterator[tuple[str, str]]:
        """What is printed, each line with its style."""
        width = max(width, SENTENCE + len(GAP))
        yield from ((text, self.style) for text in wrapped(self.title, width, hanging="    "))
        if self.rows:
            yield from self._table_lines([*self._bands(width)])
        for line in self.footer:
            yield from ((text, "dim") for text in wrapped(line, width, hanging="    "))

    def _table_lines(self, bands: list[dict[int, int]]) -> Iterator[tuple[str, str]]:
        titled = [(self.header, "bold")] if any(self.header) else []
        for row, style in (*titled, *zip_longest(self.rows, self.styles, fillvalue="")):
            for widths in bands:
                cells = [wrapped(row[i], columns) for i, columns in widths.items()]
                for parts in zip_longest(*cells, fillvalue=""):
                    aligned = [
                        part.rjust(columns) if self.header[i] in self.right else part.ljust(columns)
                        for part, (i, columns) in zip(parts, widths.items(), strict=True)
                    ]
                    yield ("" if 0 in widths else GAP) + GAP.join(aligned).rstrip(), style

    def _bands(self, width: int) -> Iterator[dict[int, int]]:
        """The columns that fit beside each other, with their widths; the others of a row are below them, indented."""
        columns = [*zip(self.header, *self.rows, strict=True)]
        longest = [max(map(len, column)) for column in columns]
        # Those of a word that no line has room for are not considered.
        words = ([len(word) for word in " ".join(column).split()] for column in columns)
        sentences = (min(SENTENCE, max(map(len, cells))) for _, *cells in columns)
        least = [
            max(sentence, *(length for length in lengths if length <= width - len(GAP)), 0)
            for sentence, lengths in zip(sentences, words, strict=True)
        ]

        def room(band: list[int]) -> int:
            return width - len(GAP) * (len(band) - (0 in band))

        bands = [[0]]
        for i in range(1, len(columns)):
            if sum(least[j] for j in (*bands[-1], i)) <= room([*bands[-1], i]):
                bands[-1].append(i)
            else:
                bands.append([i])
        for band in bands:
            widths = {i: longest[i] for i in band}
            while sum(widths.values()) > room(band):
                widths[max((i for i in band if widths[i] > least[i]), key=widths.__getitem__)] -= 1
            yield widths


def wrapped(text: str, width: int, hanging: str = "") -> list[str]:
    """The lines of a text, of which none breaks a word."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    return [line for part in text.splitlines() for line in (wrapper.wrap(part) if len(part) > width else [part])]
