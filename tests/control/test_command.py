"""`paceline theory`: its numbers, pictures, page and advice."""

import re
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.control.advice import Situation, advise
from paceline.theory import controllers, convex, page
from paceline.theory.errata import ERRATA
from paceline.theory.page import CHAPTERS, figure
from paceline.theory.picture import Picture

ROOT = Path(__file__).parents[2]


# --- Advice -------------------------------------------------------------------------------------------


def test_advice_is_by_numbers(capsys):
    words = ["theory", "advise", "--lr", "4e-3", "--steps", "4000", "--ratio"]
    assert main([*words, "0.4", "--best-lr", "1e-3"]) == 0
    assert "4 times the best one. Lower it to 0.001" in capsys.readouterr().out
    assert main([*words, "-0.5"]) == 0  # a push
    assert "see a learning rate of 0.00788, not 0.004" in capsys.readouterr().out
    assert main([*words, "-2"]) == 2
    assert "Invalid ratio: -2.0; allowed: a finite number > -1" in capsys.readouterr().err


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
