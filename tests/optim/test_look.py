"""look.cpp: how it is built, tried out and done without. What it sees is in test_fits.py."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from paceline.optim import building, look

pytestmark = pytest.mark.skipif(
    not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))),
    reason="needs a C++ compiler",
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache with nothing in it, and nothing that is known of an earlier one."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(look, "functions", look.functions.__wrapped__)
    return tmp_path


def test_it_is_there():
    """Else all that test_fits.py asks of it is asked of Python twice."""
    assert look.functions() is not None
    look.try_out(look.functions())


@pytest.mark.long
def test_what_crashes_is_not_used_nor_tried_again(fresh, monkeypatch):
    """As with a torch whose headers say otherwise than it is."""
    broken = fresh / "look.cpp"
    text = look.SOURCE.read_text()
    broken.write_text(text.replace("= *behind(parameter);", "= *reinterpret_cast<TensorImpl *>(16);"))
    assert broken.read_text() != text
    monkeypatch.setattr(look, "SOURCE", broken)
    assert look.functions() is None
    (kept,) = fresh.rglob("look-*")
    assert kept.suffix == ".txt" and f"torch {torch.__version__}" in kept.read_text()

    def run(command, *arguments, **options):
        raise AssertionError(command)

    monkeypatch.setattr(subprocess, "run", run)
    assert look.functions() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "lacking",
    [
        lambda patch: patch.setenv("CXX", "/nonexistent/c++"),
        lambda patch: patch.setattr(sysconfig, "get_path", lambda name: "/nonexistent"),
        lambda patch: patch.setattr(sysconfig, "get_config_var", lambda name: 1),
        lambda patch: patch.setattr(look, "TORCH", Path("/nonexistent")),
    ],
    ids=["compiler", "headers", "lock", "headers of torch"],
)
def test_what_is_lacking_is_done_without(lacking, fresh, monkeypatch):
    lacking(monkeypatch)
    assert look.functions() is None


def test_a_reason_is_kept_and_a_trial_that_was_broken_off_is_not(fresh):
    source, asked = fresh / "small.c", []
    source.write_text("int one(void) { return 1; }\n")

    def never(path):
        asked.append(path.exists())
        return "it is of no use"

    def broken_off(path):
        raise subprocess.TimeoutExpired("trial", 1)

    flags = ("-shared", "-fPIC")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="it is of no use"):
            building.built(source, "small", flags, trial=never)
    assert asked == [True]
    for _ in range(2):
        with pytest.raises(subprocess.TimeoutExpired):
            building.built(source, "small", flags, about=("other",), trial=broken_off)
    made = building.built(source, "small", flags, about=("other",), trial=lambda path: None)
    assert made.exists() and made == building.built(source, "small", flags, about=("other",), trial=never)
    assert not list(fresh.rglob(".tmp-*"))
