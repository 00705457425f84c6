"""Tables of results.md, cost.md and compare.md are what records/studies/pages.py makes of the records."""

import importlib.util
import json
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "records/studies/pages.py"
pytest.importorskip("matplotlib")
if not SCRIPT.exists():
    pytest.skip("records are not part of the package", allow_module_level=True)


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("pages", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pages"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_make_figures_changes_nothing(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    for name in ("results.md", "cost.md", "compare.md"):
        (tmp_path / name).write_bytes((ROOT / "docs" / name).read_bytes())
    pages.main()
    for name in ("results.md", "cost.md", "compare.md"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), "run: make figures"
    assert (tmp_path / "results.png").stat().st_size > 10_000


def line(**changes):
    config = {"model": "gpt:7m", "optimizer": "adamw:betas=(0.9,0.999),weight_decay=0.01", "steps": 4000}
    config |= {"schedule": "constant", "lr": 0.002, "seed": 1}
    environment = {"commit": "abc", "gpu": "X"}
    for name, value in changes.items():
        (config if name in config else environment)[name] = value
    return {
        "format": 2, "name": f"run {config['seed']}", "config": config, "environment": environment,
        "methods": {"AdamW": "live"}, "returned": "live", "parameters": 9, "outcome": "finished",
        "evaluations": [[4000, {"live": 3.0, "power_0_5": 2.9}]], "train": [], "pull": [],
    }  # fmt: skip


def test_a_method_is_found_by_its_settings(pages, tmp_path):
    path = tmp_path / "x-evidence-x.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (line(), line(seed=2), line(steps=10, seed=3))))
    runs = pages.read_runs([path])
    assert pages.EMA.losses(runs, "gpt:7m", 4000) == {0.002: {1: 2.9, 2: 2.9}}
    assert pages.PACE.losses(runs, "gpt:7m", 4000) == {}


@pytest.mark.parametrize(
    ("missing", "words"),
    [({"seed": None}, "no seed"), ({"commit": None}, "no code version"), ({"gpu": None}, "no hardware")],
)
def test_a_record_of_unknown_origin_is_refused(pages, tmp_path, missing, words):
    path = tmp_path / "x-evidence-x.jsonl"
    path.write_text(json.dumps(line()) + "\n" + json.dumps(line(**missing)) + "\n")
    with pytest.raises(ValueError, match=f"run .* has {words}"):
        pages.read_runs([path])


def test_a_benchmark_of_unknown_origin_is_refused(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RECORDS", tmp_path)
    record = {"seed": 0, "hardware": "X", "commit": None, "rows": []}
    (tmp_path / "2026-11-19-bench-cpu.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"2026-11-19-bench-cpu\.json has no code version"):
        pages.read_bench("cpu")
    assert pages.read_bench("h200") == {}


def test_verdicts(pages):
    """Of three seeds a 95 % interval is 4.30 standard errors to each side."""

    def verdict(*differences):
        own = {0.1: {seed: 3 + d for seed, d in enumerate(differences)}}
        return pages.compared(own, {0.2: dict.fromkeys(range(len(differences)), 3.0)}, 0.1, 0.2)

    assert verdict(0.0, -0.1, -0.2) == "-0.100 ± 0.058 (3): not settled"
    assert verdict(-0.1, -0.101, -0.102) == "-0.101 ± 0.001 (3): lower"
    assert verdict(0.1, 0.101, 0.102) == "+0.101 ± 0.001 (3): higher"
    assert verdict(0.001, 0.0, -0.001) == "+0.000 ± 0.001 (3): tie"
    assert verdict(-0.5) == "-0.500 (1): not settled"


def test_every_record_is_listed():
    listed = re.findall(r"`([^`]+)`", (ROOT / "records/README.md").read_text())
    folders = {path.name for path in (ROOT / "records").iterdir()} - {"README.md", "studies"}
    unlisted = [name for name in folders if not any(fnmatch(name, one.rstrip("/")) for one in listed)]
    assert not unlisted
