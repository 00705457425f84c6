"""A table as people read it: on a terminal, in Markdown, in HTML and as CSV."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """Rows of text under a head."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...] = ()
    """Which columns are set flush right; empty: all but the first."""
    key: str = ""
    """The name of its file."""
    title: str = ""
    caption: str = ""

    @property
    def is_numeric(self) -> tuple[bool, ...]:
        """Return whether each column is set flush right."""
        return self.numeric or (False, *[True] * (len(self.columns) - 1))

    def lines(self) -> list[str]:
        """Return the table for a terminal.

        >>> Listing(columns=("a", "b"), rows=(("x", "1"), ("yy", "20"))).lines()
        ['a    b', 'x    1', 'yy  20']
        """
        rows = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(_set(row, widths, self.is_numeric)).rstrip() for row in rows]

    def titled(self) -> list[str]:
        """Return the table for a terminal, below its title and caption."""
        return ["", f"{self.title}. {self.caption}", "", *self.lines()]

    def markdown(self) -> str:
        """Return the table in Markdown.

        >>> print(Listing(columns=("", "loss"), rows=(("PACE", "3.1"),)).markdown())
        |  | loss |
        | --- | ---: |
        | PACE | 3.1 |
        """
        rule = ["---:" if right else "---" for right in self.is_numeric]
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (self.columns, rule, *self.rows)]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def html(self, head: Callable[[str], str | None] = lambda cell: None) -> str:
        """Return the table in HTML, with all text escaped.

        Arguments:
            head: HTML that stands before the first cell of a row, which then is the row's head.
        """
        kinds = [' class="n"' if right else "" for right in self.is_numeric]
        columns = "".join(
            f'<th scope="col"{kind}>{escape(name)}</th>'
            for name, kind in zip(self.columns, kinds, strict=True)
        )
        rows = []
        for row in self.rows:
            cells = [f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)]
            if (before := head(row[0])) is not None:
                cells[0] = f'<th scope="row">{before}{escape(row[0])}</th>'
            rows.append(f"<tr>{''.join(cells)}</tr>")
        return f"<table><thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table>"

    def csv(self) -> str:
        """Return the table as CSV."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()


def _set(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> list[str]:
    """Return the cells of a row, as wide as their columns."""
    cells = zip(row, widths, numeric, strict=True)
    return [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells]
