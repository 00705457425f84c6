"""A branch of a run at a constant rate is the whole run, to the bit."""

from dataclasses import replace

import pytest
import torch
from tiny import write_text

from paceline.lm import checkpoint
from paceline.runs.config import Run
from paceline.runs.run import execute

pytestmark = pytest.mark.slow

METHODS = ("adamw/ema/bema", "ademamix", "ema_nesterov", "schedule_free")


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("horizon")
        patch.setenv("PACELINE_CACHE", str(folder / "cache"))
        write_text(folder / "text.txt", paragraphs=60)
        yield folder


def trunk_of(room, method, steps, **more):
    return Run(
        method=method, steps=steps, data=(str(room / "text.txt"),), model="gpt:0.3m", tokenizer="bpe:300",
        length=8, batch_size=2, held_out_samples=1, evaluate_every=10**6, checkpoint_every=10**6,
        device="cpu", lr=1e-2, **more,
    )  # fmt: skip


def bits_of(run, folder):
    """Train, and return all tensors of the last checkpoint, and the optimizer's groups as text."""
    list(execute(run, folder, print))
    found, _ = checkpoint.newest(folder / "checkpoints")
    saved = checkpoint.load(found)
    state = {
        f"{name}.{key}": value for name, entry in saved["optimizer"].items() for key, value in entry.items()
    }
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return saved["live"] | tensors, repr(saved["state"]["groups"])


def same(one, other):
    (first, groups), (second, others) = one, other
    return (
        groups == others
        and first.keys() == second.keys()
        and all(torch.equal(first[name], second[name]) for name in first)
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_branch_equals_the_whole_run_at_every_length(room, tmp_path, method):
    lengths = (20, 45)
    begins = {steps: steps - round(0.2 * steps) for steps in lengths}
    trunk = trunk_of(room, method, 60, keep_steps=tuple(begins.values()))
    list(execute(trunk, tmp_path / "trunk", print))
    for steps in lengths:
        whole = replace(trunk, steps=steps, horizon=60, schedule="wsd", keep_steps=())
        branch = replace(whole, fork=f"trunk@{begins[steps]}")
        assert same(
            bits_of(whole, tmp_path / f"whole-{steps}"), bits_of(branch, tmp_path / f"branch-{steps}")
        )


@pytest.mark.long
def test_a_branch_of_a_long_run(room, tmp_path):
    trunk = trunk_of(room, "adamw", 550, keep_steps=(416,))
    list(execute(trunk, tmp_path / "trunk", print))
    whole = replace(trunk, steps=520, horizon=550, schedule="wsd", keep_steps=())
    branch = replace(whole, fork="trunk@416")
    assert same(bits_of(whole, tmp_path / "whole"), bits_of(branch, tmp_path / "branch"))
