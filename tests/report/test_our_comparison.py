"""docs/compare.md: its table is what the records of our comparison give."""

from pathlib import Path

from paceline.experiments.pages import filled, tables_in
from paceline.experiments.report.__main__ import main, tables

ROOT = Path(__file__).parents[2]
COMPARISON = ROOT / "records" / "2026-11-15-compare-enwiki-h200"


def test_the_page_is_what_records_give(tmp_path):
    page = (ROOT / "docs/compare.md").read_text(encoding="utf-8")
    made = tables(COMPARISON)
    assert sorted(tables_in(page)) == sorted(made)
    assert filled(page, made) == page, "make it again: make figures"
    spoilt = page.replace("| AdamW WSD | 3.3394", "| AdamW WSD | 3.2394")
    assert spoilt != page
    (tmp_path / "compare.md").write_text(spoilt, encoding="utf-8")
    main(tmp_path, COMPARISON)
    assert (tmp_path / "compare.md").read_text(encoding="utf-8") == page
