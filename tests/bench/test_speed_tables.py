"""Tables about speed in docs: they are what records give, and say what was measured."""

import json
from pathlib import Path

import pytest

from paceline.experiments.bench import tables
from paceline.experiments.bench.tables import by_optimizer, lost, read, runs_of

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "records"


def test_a_cell_is_the_number_of_its_record():
    """Typed by hand from the files."""
    lines = tables.step_table(RECORDS).splitlines()
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines}
    assert rows["PACE, fused"][1:] == ["16", "", "1.27", "1.26", "", "0.25", "0.14"]
    assert rows["PACE, fused, paper, no momentum"][1:] == ["8", "", "0.80", "0.80", "", "0.22", "0.12"]
    everything = {name for record in tables.STEPS.values() for _, name in by_optimizer(read(RECORDS, record))}
    removed = {name for name in everything if any(word in name for word in tables._REMOVED)}
    assert set(rows) - {"state", "---"} >= everything - removed and len(removed) == 6
    assert "| 3.773 ± 0.018 | 3.776 ± 0.020 | 3.775 ± 0.008 | 0.00007 | 0.00047 |" in tables.whole_runs(
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
