"""`paceline theory`: its numbers, pictures, page and advice."""

import re
import shutil
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.control.advice import Situation, advise
from paceline.experiments.theory import pictures
from paceline.experiments.theory.errata import ERRATA
from paceline.experiments.theory.page import CHAPTERS, page

ROOT = Path(__file__).parents[2]
COMPARISON = ROOT / "records" / "2026-11-15-compare-enwiki-h200"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "name", "number"),
    [
        (["gains", "--horizon", "20"], "gains", "0.04444"),
        (["limits", "--speed", "0.1", "--rate", "0.05"], "limits", "0.5823"),
        (["bounds", "--paths", "4"], "bounds", "15.91"),
        (["simulate", "--paths", "50", "--steps", "40"], "controllers", "0.04938"),
        (["simulate", "--problem", "logistic", "--paths", "2", "--steps", "20"], "logistic", "flat mean"),
    ],
)
def test_a_part_prints_its_numbers_and_draws_a_picture(arguments, name, number, tmp_path, capsys):
    assert main(["theory", *arguments, "--out", str(tmp_path / "out")]) == 0
    assert number in capsys.readouterr().out
    from matplotlib.image import imread

    image = imread(tmp_path / "out" / f"{name}.png")
    assert image.shape[1] > 700 and image.std() > 0.05


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gains", "--horizon", "-3"], "Invalid horizon: -3.0; allowed: a finite number > 0"),
        (["gains", "--penalty", "0"], "Invalid penalty: 0.0; allowed: a finite number > 0"),
        (["limits", "--speed", "1.5"], "Invalid speed: 1.5; allowed: 0 < speed < 1"),
        (["limits", "--rate", "2"], "Invalid rate: 2.0; allowed: 0 < rate <= 1"),
        (["bounds", "--pull", "3"], "Invalid pull: "),
        (["simulate", "--paths", "1"], "Invalid paths: 1; allowed: an integer >= 2"),
        (["advise", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_bad_input_is_answered_in_one_line(arguments, text, tmp_path, capsys):
    out = [] if arguments[0] == "advise" else ["--out", str(tmp_path)]
    assert main(["theory", *arguments, *out]) != 0
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


# --- Advice -------------------------------------------------------------------------------------------


def test_advice_on_a_real_comparison_agrees_with_what_its_runs_showed(capsys):
    assert main(["theory", "advise", str(COMPARISON)]) == 0
    text = capsys.readouterr().out
    assert "AdamW · long EMA is best at lr 0.002." in text
    parts = dict(re.findall(r"^lr ([\d.]+): (.*?)(?=^lr |\Z)", text, flags=re.DOTALL | re.MULTILINE))
    assert sorted(map(float, parts)) == [0.001, 0.002, 0.004, 0.008]
    for lr, part in parts.items():
        expected = set(re.findall(r"Expected: (\w+ gain|a gain)", part))
        seen = [float(x) for x in re.findall(r"([+-][\d.]+)\.$", part, flags=re.MULTILINE)]
        assert len(seen) == 2  # PACE, and PACE with a longer average
        if float(lr) > 0.003:
            assert expected == {"a gain"} and max(seen) < -0.1
        else:
            assert expected == {"no gain"} and min(seen) > -0.02  # seeds differ by about that


def test_advice_needs_readings_of_the_pull(capsys):
    folder = next((COMPARISON / "runs").glob("adamw-constant*"))
    assert main(["theory", "advise", str(folder)]) == 2
    assert "--telemetry-every" in capsys.readouterr().err


def test_the_right_strength_makes_up_for_a_rate_too_high():
    run = Situation(lr=6e-3, steps=10_000, root=2e-5, best_lr=2e-3)
    assert run.right_ratio == pytest.approx(2.0)
    there = Situation(lr=6e-3, steps=10_000, root=2e-5, best_lr=2e-3, strength=run.right_strength)
    assert there.effective_lr == pytest.approx(2e-3, rel=0.02)  # 1 - β instead of 1


def test_below_the_best_rate_a_pull_is_advised_against():
    text = " ".join(advise(Situation(lr=5e-4, steps=1000, root=1e-5, best_lr=2e-3)))
    assert "cannot help" in text and "push" in text
    assert Situation(lr=5e-4, steps=1000, root=1e-5, best_lr=2e-3).right_strength == 0


def test_curvature_shows_both_sides_of_the_trade():
    lines = advise(Situation(lr=1e-3, steps=1000, root=1e-3, curvature=(1e-3, 0.5)))
    assert "flattest" in lines[-3] and "sharpest" in lines[-2] and "at equal speed" in lines[-1].lower()
    assert any("overshoots" in x for x in advise(Situation(lr=1.0, steps=9, root=1e-3, curvature=(1.0, 2.0))))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"root": -1.0},
        {"steps": 0},
        {"ema_power": 2.0},
        {"strength": -1.0},
        {"curvature": (2.0, 1.0)},
    ],
)
def test_a_situation_is_checked(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"Invalid {name}: .*; allowed: "):
        Situation(**{"lr": 1e-3, "steps": 10, "root": 1e-3} | wrong)


# --- The page -----------------------------------------------------------------------------------------

OF_THE_PEN = {"E1", "E6", "E14", "E16", "E19", "E20"}  # no number can show them
OF_THE_OPTIMIZER = {"E22"}  # bias correction: the golden trajectories in tests/optim


def test_every_erratum_has_a_test_in_which_the_printed_form_fails():
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tested = set(re.findall(r"def test_(E\d+b?)_", text))
    assert {erratum.number for erratum in ERRATA} - tested <= OF_THE_PEN | OF_THE_OPTIMIZER


def test_the_documentation_lists_the_same_errata():
    text = (ROOT / "docs" / "theory.md").read_text()
    for erratum in ERRATA:
        assert f"| {' | '.join(erratum)} |" in text


@pytest.mark.slow
def test_figures_make_a_page_that_needs_nothing_else(tmp_path, capsys):
    assert main(["theory", "figures", "--out", str(tmp_path)]) == 0
    assert "page: " in capsys.readouterr().out
    text = (tmp_path / "index.html").read_text()
    assert text.count("data:image/png;base64,") == sum(len(chapter.pictures) for chapter in CHAPTERS) == 8
    assert not re.search(r"(src|href)=.?https?:", text)
    assert {path.stem for path in tmp_path.glob("*.png")} == {n for c in CHAPTERS for n in c.pictures}
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no Chromium to look at the page with")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for width in (1200, 390):
            shown, messages = started.new_page(viewport={"width": width, "height": 900}), list[str]()
            shown.on("console", lambda message, kept=messages: kept.append(message.text))
            shown.goto((tmp_path / "index.html").as_uri())
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
            assert shown.evaluate(broken) == 0 and not messages
        started.close()


def test_the_page_escapes_and_shows_every_number(tmp_path):
    rows = (("a < b", "c"), ("1", "2"))
    picture = pictures.Picture(name="x", title="<x>", rows=rows, panels=())
    names = {name for chapter in CHAPTERS for name in chapter.pictures}
    for name in {*names, "x"}:
        (tmp_path / f"{name}.png").write_bytes(b"png")
    text = page(dict.fromkeys(names, picture), tmp_path)
    assert "a &lt; b" in text and "<x>" not in text
