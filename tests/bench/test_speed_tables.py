"""Tables about speed in docs: they are what records give, and say what was measured."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.experiments.bench import tables
from paceline.experiments.bench.__main__ import main
from paceline.experiments.bench.tables import PAGES, by_optimizer, lost, read, runs_of
from paceline.experiments.pages import filled, tables_in

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "records"


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("storage.md", "| 1.33 | 12 |"),
        ("storage.md", "0.083 |"),
        ("around.md", "| 2,406 |"),
        ("training.md", "| 516,569 |"),
    ],
)
def test_the_page_is_what_records_give(name, cell):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    made = tables.tables(name, RECORDS)
    assert sorted(tables_in(page)) == sorted(made)
    assert filled(page, made) == page, "make it again: make figures"
    assert cell in page and filled(page.replace(cell, "| 7 |"), made) == page


def test_the_command_makes_pages_and_nothing_else(tmp_path):
    for name in PAGES:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        emptied = re.sub(r"(<!-- table: \S+ -->\n).*?(<!-- end -->)", r"\1\2", text, flags=re.DOTALL)
        (tmp_path / name).write_text(emptied, encoding="utf-8")
    main(tmp_path, RECORDS)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(PAGES)
    for name in PAGES:
        assert (tmp_path / name).read_bytes() == (ROOT / "docs" / name).read_bytes()


def test_a_cell_is_the_number_of_its_record():
    """Typed by hand from the files."""
    lines = tables.step_table(RECORDS).splitlines()
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines}
    assert rows["PACE, fused"][1:] == ["16", "1.33", "1.33", "1.30", "0.54", "0.65"]
    assert rows["PACE, fused, paper, no momentum"][1:] == ["8", "4.09", "0.82", "0.82", "0.81", "0.35"]
    everything = {name for record in tables.STEPS.values() for _, name in by_optimizer(read(RECORDS, record))}
    assert set(rows) - {"state", "---"} >= everything
    assert "| 3.766 ± 0.009 | 3.766 ± 0.016 | 3.769 ± 0.014 | 0.00010 | 0.00056 |" in tables.whole_runs(
        RECORDS
    )


def test_what_storing_loses_is_the_most_of_all_seeds(tmp_path):
    lines = [
        {"name": f"M:a-0.002-{seed}", "losses": {"average": 3.0 + more, "power": 3.0}}
        for seed, more in ((1, 0.5), (2, -0.7))
    ]
    lines.append({"name": "M:a-0.001-1", "losses": {"average": 9.0, "power": 3.0}})
    (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    runs = runs_of(tmp_path / "runs.jsonl")
    assert sorted(runs) == [("M:a", 0.001), ("M:a", 0.002)] and len(runs["M:a", 0.002]) == 2
    assert lost(runs["M:a", 0.002], "power") == pytest.approx(0.5)


def test_pages_are_made_without_torch(tmp_path):
    code = """
import sys
from pathlib import Path
from paceline.experiments.bench.tables import PAGES, tables
for page in PAGES:
    for make in tables(page, Path("records")).values():
        assert make()
from paceline.experiments.report.__main__ import tables
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    asked = subprocess.run(
        [sys.executable, "-m", "paceline.experiments.bench", "docs"], capture_output=True, text=True, cwd=ROOT
    )
    assert asked.returncode == 1 and "usage" in asked.stderr
