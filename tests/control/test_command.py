"""`paceline theory`: its numbers, pictures, page and advice."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.control.advice import Situation, advise
from paceline.runs.config import ConfigError, Run
from paceline.runs.methods import control_of
from paceline.theory import controllers, convex, page
from paceline.theory.errata import ERRATA
from paceline.theory.page import CHAPTERS, figure
from paceline.theory.picture import Picture
from paceline.theory.runs import advise_on

ROOT = Path(__file__).parents[2]
COMPARISON = ROOT / "records" / "2026-11-15-compare-enwiki-h200"


# --- Advice -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_advice_on_a_real_comparison_agrees_with_what_its_runs_showed(tmp_path, capsys):
    assert main(["theory", "advise", str(COMPARISON), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "advice.png").stat().st_size > 20_000
    text = capsys.readouterr().out
    assert "AdamW · long EMA is best at lr 0.002." in text
    assert "Best of all: AdamW WSD at lr 0.002, 3.339." in text
    parts = dict(
        re.findall(
            r"^lr ([\d.]+), PACE \(gain=paper\): (.*?)(?=^lr |\Z)", text, flags=re.DOTALL | re.MULTILINE
        )
    )
    assert sorted(map(float, parts)) == [0.001, 0.002, 0.004, 0.008]
    for lr, part in parts.items():
        expected = set(re.findall(r"Expected: (\w+ gain|a gain)", part))
        seen = [float(x) for x in re.findall(r"([+-][\d.]+)\.$", part, flags=re.MULTILINE)]
        assert len(seen) == 2  # PACE, and PACE with a longer average
        if float(lr) > 0.003:
            assert expected == {"a gain"} and max(seen) < -0.1 and "Lower it to 0.002" in part
        else:
            assert expected == {"no gain"} and -0.01 < min(seen) <= max(seen) < 0.01  # seeds differ by that


def test_advice_needs_folders_of_runs_with_readings_of_the_pull(capsys):
    assert main(["theory", "advise", "nowhere"]) == 2
    assert capsys.readouterr().err == "paceline: nowhere is not a folder\n"
    folder = next((COMPARISON / "runs").glob("adamw-constant*"))
    assert main(["theory", "advise", str(folder)]) == 2
    assert "--set telemetry_every" in capsys.readouterr().err


@pytest.mark.slow
def test_advice_on_one_run_says_what_it_does_not_know(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    folder = next((COMPARISON / "runs").glob("pace-constant-lr-0.004-seed-42*"))
    assert main(["theory", "advise", str(folder), *out]) == 0
    text = capsys.readouterr().out
    assert "--best-lr" in text and "Expected" not in text
    assert main(["theory", "advise", str(folder), "--best-lr", "1e-3", *out]) == 0
    assert "4 times the best one. Lower it to 0.001" in capsys.readouterr().out


@pytest.mark.slow
def test_advice_tells_runs_that_were_not_made_from_runs_that_diverged(tmp_path, capsys):
    runs = COMPARISON / "runs"
    folders = [*runs.glob("pace-constant-lr-0.004*"), *runs.glob("adamw-constant-lr-0.002*")]
    assert main(["theory", "advise", *map(str, folders), "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "was not run at this rate" in text and "diverged" not in text and "edge of what was tried" in text


READING = {"ratio/q10": 0.1, "ratio/q50": 0.4, "ratio/q90": 1.0, "saturated": 0.0, "t": 50.0, "lr": 4e-3}


def _run(folder: Path, readings: list[dict[str, float]], outcome: str = "finished", **config: Any) -> Path:
    """The records of a short run of PACE, as `paceline train` would have written them."""
    records = next((COMPARISON / "runs").glob("pace*0.004*42*")) / "records.jsonl"
    about = json.loads(records.read_text().partition("\n")[0])
    about["config"] |= {"steps": 50, "lr": 4e-3} | config
    control = control_of(Run(method=config.get("method", "pace"), steps=50))
    assert control is not None
    about["control"] = asdict(control)
    losses = {"held-out": {"live": 3.5, "average": 3.4, "long_ema": 3.3}}
    lines = [
        about,
        {"kind": "step", "step": 1, "loss": 8.0},
        {"kind": "evaluation", "step": 50, "losses": losses},
    ]
    lines += [{"kind": "telemetry", "step": 1} | reading for reading in readings]
    folder.mkdir(parents=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = [{"kind": "start", "time": 0.0}, {"kind": "end", "outcome": outcome, "time": 1.0, "step": 50}]
    (folder / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "readings", "text", "right"),
    [
        (
            {"method": "pace+push:strength=0.3,power=0.5,step=1"},
            [READING | dict.fromkeys(("ratio/q10", "ratio/q50", "ratio/q90"), -0.3)],
            "R = -0.3 for a typical coordinate: slow changes see a learning rate of 0.00539",
            "1",
        ),
        (
            {"method": "pace+push:strength=0.3,power=0.5"},  # its step keeps the meaning of lr
            [READING | dict.fromkeys(("ratio/q10", "ratio/q50", "ratio/q90"), -0.3)],
            "slow changes see a learning rate of 0.00377, not 0.004",
            "0.4",
        ),
        (
            {"schedule": "cosine"},  # the pull is as it was at the full rate, not as it faded
            [READING, READING | {"lr": 0.0, "ratio/q50": 0.0, "t": 60.0}],
            "R = 0.4 for a typical coordinate: slow changes see a learning rate of 0.00298",
            "1",
        ),
    ],
)
def test_advice_on_other_runs_of_pace(config, readings, text, right, tmp_path):
    lines, picture = advise_on([_run(tmp_path / "run", readings, **config)], 2e-3)
    assert text in "\n".join(lines)
    assert picture.draw(tmp_path).stat().st_size > 20_000
    assert picture.table.rows[0][-1] == right  # R*


def test_runs_of_different_strength_are_kept_apart_and_unlike_ones_refused(tmp_path):
    first = _run(tmp_path / "a", [READING])
    second = _run(tmp_path / "b", [READING | {"ratio/q50": 2.0}], "stopped", method="pace:power=0.7")
    lines = "\n".join(advise_on([first, second])[0])
    assert "R = 0.4 for" in lines and "R = 2 for" in lines and "so far" in lines
    third = _run(tmp_path / "c", [READING], model="gpt:12m")
    with pytest.raises(ConfigError, match="differ in model"):
        advise_on([first, third])


def test_the_right_ratio_makes_up_for_a_rate_too_high():
    run = Situation(lr=6e-3, steps=10_000, ratio=0.5, best_lr=2e-3)
    assert run.right_ratio == pytest.approx(2.0)
    there = Situation(lr=6e-3, steps=10_000, ratio=run.right_ratio)
    assert there.effective_lr == pytest.approx(2e-3, rel=0.02)  # 1 - β instead of 1
    assert Situation(lr=1e-3, steps=1, ratio=50.0, power=0.0).gain == 1.0  # rate 1, and no gain above 1


def test_below_the_best_rate_a_pull_is_advised_against():
    text = " ".join(advise(Situation(lr=5e-4, steps=1000, ratio=0.1, best_lr=2e-3)))
    assert "cannot help" in text and "push (R = -0.75" in text
    assert "about the best one" in " ".join(advise(Situation(lr=2e-3, steps=9, ratio=0.1, best_lr=1.9e-3)))


# --- The page -----------------------------------------------------------------------------------------

OF_THE_PEN = {"E14", "E20"}  # no number can show them
OF_THE_OPTIMIZER = {"E22"}  # bias correction: the golden trajectories in tests/optim


def test_every_erratum_has_a_test_in_which_the_printed_form_fails():
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tested = set(re.findall(r"def test_(E\d+b?)_", text))
    assert {erratum.number for erratum in ERRATA} - tested <= OF_THE_PEN | OF_THE_OPTIMIZER


def test_the_page_shows_every_erratum_once():
    shown = [number for chapter in CHAPTERS for number in chapter.errata.split()]
    assert sorted(shown) == sorted(erratum.number for erratum in ERRATA)


def test_figures_without_scikit_learn_leave_one_out_and_write_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    chapters = (CHAPTERS[0]._replace(pictures=(controllers.practical_range, convex.logistic)),)
    monkeypatch.setattr(page, "CHAPTERS", chapters)
    assert main(["theory", "figures", "--out", str(tmp_path)]) == 0
    assert "left out: the logistic problem needs scikit-learn" in capsys.readouterr().out
    assert (tmp_path / "index.html").read_text().count("data:image/png;base64,") == 1


def test_the_documentation_lists_the_same_errata():
    text = (ROOT / "docs" / "theory.md").read_text()
    for erratum in ERRATA:
        assert f"| {' | '.join(erratum)} |" in text


@pytest.mark.long
def test_figures_make_a_page_that_needs_nothing_else(tmp_path, capsys):
    assert main(["theory", "figures", "--out", str(tmp_path)]) == 0
    assert "page: " in capsys.readouterr().out
    text = (tmp_path / "index.html").read_text()
    assert text.count("data:image/png;base64,") == sum(len(chapter.pictures) for chapter in CHAPTERS) == 9
    assert not re.search(r"(src|href)=.?https?:", text)
    assert len({path.stem for path in tmp_path.glob("*.png")}) == 9


def test_a_figure_of_the_page_is_escaped_and_shows_every_number(tmp_path):
    (tmp_path / "x.png").write_bytes(b"png")
    text = figure(Picture("x", "<x>", ("a < b", "c"), [("1", "2")]), tmp_path / "x.png")
    assert "a &lt; b" in text and "<x>" not in text and ">2<" in text
