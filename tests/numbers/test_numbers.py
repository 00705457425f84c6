"""Every number of README and docs comes from a record, or is one that nobody measured."""

import doctest

import pytest
import said
from of_results import RESULTS
from of_speed import SPEED
from of_study import STUDY
from said import ROOT, Numbers, unexplained

ALL: tuple[Numbers, ...] = (RESULTS, STUDY, SPEED)
"""Where numbers come from. A page may have some of each."""
PAGES = sorted({page for numbers in ALL for page in (*numbers.measured, *numbers.fixed)})


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_number_is_explained(page):
    phrases = [phrase for numbers in ALL for phrase in numbers.phrases(page)]
    missing, left = unexplained((ROOT / page).read_text(encoding="utf-8"), phrases)
    assert not missing, f"records say this, {page} does not"
    assert not left, f"{page} says this, and no record"


def test_numbers_are_found_in_prose_alone():
    assert doctest.testmod(said).failed == 0
    page = "Takes 3 ms, `0.7`, [see](a0.5.md).\n\n```\n1.0\n```\n    paceline 0.1\n"
    page += "<!-- table: a -->\n2.0\n<!-- end -->\n"
    assert unexplained(page, []) == ([], ["3"])
    assert unexplained(page, ["3 ms", "0.7"]) == (["0.7"], [])


def test_no_page_is_left_out():
    pages = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
    for page in set(pages) - set(PAGES):
        assert unexplained((ROOT / page).read_text(encoding="utf-8"), []) == ([], []), page
