"""Tables in pages of the documentation, between marks: made anew from code and records."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

_PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page with its tables made anew.

    >>> print(filled("<!-- table: sum -->\\n<!-- end -->", {"sum": lambda: "| 1 + 1 | 2 |"}))
    <!-- table: sum -->
    <BLANKLINE>
    | 1 + 1 | 2 |
    <BLANKLINE>
    <!-- end -->
    """
    return _PLACE.sub(lambda found: f"{found[1]}\n{tables[found[2]]()}\n\n{found[3]}", page)


def refill(path: Path, tables: Mapping[str, Callable[[], str]]) -> None:
    """The same of a file."""
    path.write_text(filled(path.read_text(encoding="utf-8"), tables), encoding="utf-8")


def tables_in(page: str) -> list[str]:
    """Their names."""
    return [found[2] for found in _PLACE.finditer(page)]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table.

    >>> print(markdown(["", "ms"], [["AdamW", "1.0"]]))
    |  | ms |
    | --- | --- |
    | AdamW | 1.0 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
