"""What pages say in numbers, taken apart: tables that are made, and phrases in prose."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "records"

_NOT_PROSE = (
    re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL),  # made from records, and compared by other tests
    re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE),
    re.compile(r"^(?: {4}|\t)(?![*\-] ).*$", re.MULTILINE),  # code by indentation
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\]\([^)]*\)"),
)
# What could be measured: with a decimal point, in per cent, or with a unit of time.
_NUMBER = re.compile(r"[+−-]?\d*\.\d+(?:e-?\d+)?|\d+(?= %| ms| µs| seconds| s\b| minutes)")


def prose(page: str) -> str:
    """A page without code, addresses and tables that are made; its line breaks are spaces."""
    for what in _NOT_PROSE:
        page = what.sub(" ", page)
    return re.sub(r"\s+", " ", page)


def unexplained(page: str, phrases: Iterable[str]) -> tuple[list[str], list[str]]:
    """Phrases that the page does not have, and numbers in its prose that are in none of them.

    >>> unexplained("It takes 1.33 times as long, with strength 0.5.", ["1.33 times", "2.0 times"])
    (['2.0 times'], ['0.5'])
    """
    text = prose(page)
    missing = [phrase for phrase in phrases if phrase not in text]
    # Longest first: one may be a part of another.
    for phrase in sorted(phrases, key=len, reverse=True):
        text = text.replace(phrase, " ")
    return missing, _NUMBER.findall(text)


@final
@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Phrases of pages, by page."""

    measured: Mapping[str, Callable[[], list[str]]]
    """Written with numbers out of records."""
    fixed: Mapping[str, list[str]]
    """Settings, versions, definitions: nobody measured them."""

    def phrases(self, page: str) -> list[str]:
        """All of a page."""
        return [*self.measured.get(page, list)(), *self.fixed.get(page, [])]
