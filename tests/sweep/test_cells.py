"""What a sweep consists of: parsing, hashing, and when a cell is given up. Nothing is trained."""

import io
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.runs.config import MAY_CHANGE, NO_OTHER_RUN, ConfigError, Run, make, mark_of, name_of
from paceline.studies import live, pool
from paceline.studies.pool import do_all
from paceline.studies.sweep.cells import Sweep, differing, grid_of, read, runs_of
from paceline.studies.sweep.divergence import Divergence
from paceline.studies.sweep.results import table_of

# --- Combinations -------------------------------------------------------------------------------------


def test_all_combinations_in_order_with_seeds_changing_first():
    grid = {"lr": ["1e-3", 2e-3], "optimizer": ["adamw", "push:strength=0.7,power=0.5"]}
    runs = runs_of(Sweep(settings={"steps": 5}, grid=grid, seeds=(1, 2)))
    found = [(run.lr, run.optimizer, run.seed) for run in runs]
    paper = "push:strength=0.7,power=0.5"
    assert found[:4] == [(1e-3, "adamw", 1), (1e-3, "adamw", 2), (1e-3, paper, 1), (1e-3, paper, 2)]
    assert found[4:] == [(2e-3, *rest) for _, *rest in found[:4]]
    assert all(run.steps == 5 for run in runs)


def test_cells_go_with_all_of_the_grid_and_win_over_the_settings():
    cells = ({"optimizer": "adamw", "schedule": "wsd"}, {"optimizer": "pace", "warmup": 7})
    runs = runs_of(Sweep(settings={"steps": 5, "warmup": 3}, cells=cells, grid={"lr": [1.0, 2.0]}))
    assert [(r.optimizer, r.schedule, r.warmup, r.lr) for r in runs] == [
        ("adamw", "wsd", 3, 1.0),
        ("adamw", "wsd", 3, 2.0),
        ("pace", "constant", 7, 1.0),
        ("pace", "constant", 7, 2.0),
    ]
    assert list(differing(runs)[2]) == ["optimizer", "lr", "schedule", "warmup"]


def test_without_anything_swept_there_is_one_run():
    assert runs_of(Sweep(settings={"steps": 5, "seed": 3})) == [Run(steps=5, seed=3)]
    assert differing([Run(steps=5)]) == [{}]


def test_lists_of_texts_are_values_too():
    runs = runs_of(
        Sweep(settings={"steps": 5}, grid={"averages": [["power:0.5"], ["power:0.7", "bema:0.5"]]})
    )
    assert [run.averages for run in runs] == [("power:0.5",), ("power:0.7", "bema:0.5")]


def test_a_file_says_the_same_as_flags(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(
        'steps = "1k"\nseeds = [1, 2]\n[grid]\nlr = [1e-3, "2e-3"]\noptimizer = ["sgd", "pace:c=0.01"]\n'
    )
    words = [["lr", "1e-3", "2e-3"], ["optimizer", "sgd", "pace:c=0.01"]]
    flags = Sweep(settings={"steps": 1000}, grid=grid_of(words), seeds=(1, 2))
    assert runs_of(read(path)) == runs_of(flags)
    path.write_text('steps = 5\n[[cells]]\noptimizer = "adamw"\n[[cells]]\nschedule = "wsd"\n')
    assert [(r.optimizer, r.schedule) for r in runs_of(read(path))] == [
        ("adamw", "constant"),
        ("pace", "wsd"),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("steps = 5\ngrid = 3", "grid is '3'; allowed: a table, [grid]"),
        ("steps = 5\n[grid]\nlr = 1e-3", "grid: lr is 0.001; allowed: a list of values"),
        ("steps = 5\n[grid]\nlr = []", "grid: lr is []"),
        ("steps = 5\n[grid]\nlrr = [1]", "unknown setting 'lrr' (did you mean lr?)"),
        ("steps = 5\ncells = 3", "cells is '3'; allowed: tables"),
        ("steps = 5\ncells = [3]", "cells are tables of settings"),
        ("steps = 5\nseeds = 3", "seeds is '3'; allowed: a list of whole numbers"),
        ('steps = 5\nseeds = ["x"]', "seeds is ['x']; allowed: whole numbers"),
        ("steps = 5\n[grid]\nseed = [1]", "seed is not swept by name; give seeds"),
        ('steps = 5\n[grid]\ndevice = ["cpu", "cuda"]', "device makes no other run"),
        ("steps = 5\n[grid]\nlr = [1]\n[[cells]]\nlr = 2", "lr is both in the grid and in cells"),
        ("steps = 5\n[grid]\nlr = [1e-3, 0.001]", "cells 1 and 2 of the sweep are the same run"),
        ("steps = 5\nseeds = [4, 4]", "cells 1 and 2 of the sweep are the same run"),
        ("[grid]\nlr = [1]", "give exactly one of steps, tokens, epochs, chinchilla"),
        ("steps = [", "cannot read"),
    ],
)
def test_mistakes_in_a_file_are_said_in_its_words(tmp_path, content, said):
    path = tmp_path / "sweep.toml"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        runs_of(read(path))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--grid lr=1e-3,3e-3", "--grid lr=1e-3,3e-3: write --grid lr VALUE VALUE, with spaces"),
        ("--grid lr", "--grid lr: write --grid lr VALUE VALUE"),
        ("--grid batch_sise 1 2", "unknown setting 'batch_sise' (did you mean batch_size?)"),
        ("--grid lr 1 --grid lr 2", "--grid lr is there twice"),
        ("--grid lr 1 x", "lr is 'x'; allowed: a number"),
        ("--grid optimizer adam", "optimizer 'adam' is unknown (did you mean adamw?)"),
        ("--seeds 1 -2", "seeds is '-2'; allowed: a whole number, 0 or more"),
        ("--seeds 1 two", "seeds is 'two'; allowed: a whole number"),
        ("--seed 3", "unknown argument '--seed'"),
        ("--jobs 0", "jobs is '0'; allowed: a whole number, 1 or more"),
        ("--stop-diverged 0", "--stop-diverged is '0'; allowed: above 0, and finite"),
        ("--stop-diverged never", "--stop-diverged is 'never'; allowed: a number"),
        ("--heart-seconds -1", "--heart-seconds is '-1'"),
        ("--engine slurm", "invalid choice: 'slurm'"),
        ("--gpus-per-cell 0.25", "--gpus-per-cell is for --engine ray"),
        ("--ray-address auto", "--ray-address is for --engine ray"),
        ("--engine ray --gpus-per-cell 1.5", "--gpus-per-cell is 1.5; allowed: 0 to 1, or a whole number"),
        ("--config nowhere.toml", "there is no file nowhere.toml"),
    ],
)
def test_mistakes_in_flags_are_answered_in_one_line(tmp_path, capsys, words, said):
    assert main(["sweep", "--out", str(tmp_path / "s"), "--steps", "5", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error
    assert not (tmp_path / "s").exists()


def test_flags_win_over_the_file(tmp_path, capsys):
    path = tmp_path / "sweep.toml"
    path.write_text('steps = 5\nbatch_size = 4\nseeds = [1]\n[grid]\nlr = [1e-3]\noptimizer = ["adamw"]\n')
    words = ["--config", str(path), "--batch-size", "3", "--seeds", "8", "9", "--grid", "lr", "5e-3", "6e-3"]
    assert main(["sweep", "--out", str(tmp_path / "s"), *words, "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["cell", "lr", "seed", "steps", "tokens"]
    rows = [line.split() for line in said[1:5]]
    assert [row[1:5] for row in rows] == [
        [lr, seed, "5", f"{5 * 3 * 128:,}"] for lr in ("0.005", "0.006") for seed in ("8", "9")
    ]
    assert all(row[0].startswith(f"adamw-constant-lr-{row[1]}-seed-{row[2]}-") for row in rows)
    assert said[5:] == ["4 cells, 0 done"]
    assert not (tmp_path / "s").exists()


def test_a_budget_that_depends_on_the_data_is_listed_as_it_is(tmp_path, capsys):
    words = ["--epochs", "2", "--grid", "lr", "1e-3", "2e-3", "--dry-run"]
    assert main(["sweep", "--out", str(tmp_path / "s"), *words]) == 0
    said = capsys.readouterr().out
    assert said.count("2 epochs") == 2 and "2 cells, 0 done" in said


# --- Hashes -------------------------------------------------------------------------------------------


OTHER = {
    "task": "sft",
    "model": "gpt2",
    "data": ["a.txt"],
    "held_out": ["b.txt"],
    "tokenizer": "gpt2",
    "optimizer": "adamw",
    "schedule": "wsd",
    "averages": ["power:0.5"],
    "precision": "bfloat16",
    "compile": True,
    "activation_checkpointing": True,
    "dropout": 0.5,
    "chat_template": "x",
    "fork": "x",
    "device": "cuda:1",
    "clip_norm": None,
    "lr": 0.5,
    "parallel": "fsdp2",
}


@pytest.mark.parametrize("name", sorted(Run.__dataclass_fields__.keys() - {"steps", "epochs", "chinchilla"}))
def test_the_hash_changes_where_results_may_and_only_there(name):
    other = {"steps": 5, "model": "x", name: OTHER.get(name, 7)}
    if name == "tokens":
        del other["steps"]
    usual = {"steps": 5, "model": "x"}
    if name == "shards":  # of FSDP2 alone
        usual, other = ({**settings, "parallel": "fsdp2"} for settings in (usual, other))
    usual, changed = make(usual), make(other)
    assert usual != changed
    assert (mark_of(usual) == mark_of(changed)) == (name in NO_OTHER_RUN)
    assert (name_of(usual) == name_of(changed)) == (name in NO_OTHER_RUN)


def test_a_cell_with_the_same_hash_is_never_refused_when_it_goes_on():
    assert NO_OTHER_RUN < MAY_CHANGE and {"skip_nonfinite"} == MAY_CHANGE - NO_OTHER_RUN


# --- Giving up ----------------------------------------------------------------------------------------


def ended_at(losses, *, margin=1.0, warmup=0):
    watch = Divergence(margin=margin, warmup=warmup)
    steps = len(losses)
    return next((i for i, loss in enumerate(losses, 1) if watch.take(i, steps, loss)), None)


def test_a_loss_far_above_the_first_one_for_a_tenth_of_the_run_is_given_up():
    falling = [5 - 0.01 * i for i in range(400)]
    assert ended_at(falling) is None
    assert ended_at([5.0] * 400) is None
    assert ended_at([5.0] + [5.9] * 399) is None  # within the margin
    # Smoothed, 7 takes seven steps from 5 to above 6; then a tenth of 400.
    assert ended_at([5.0] * 100 + [7.0] * 300) == 146
    assert ended_at([5.0] * 100 + [1e30] * 300) == 146  # as far as 2 above, it is cut off
    assert ended_at([5.0] * 100 + [1e30] * 35 + [3.0] * 265) is None  # it came back in time
    assert ended_at([5.0] + [7.0] * 39) == 27  # of short runs, twenty steps
    assert ended_at([5.0] + [7.0] * 399, margin=2.0) is None
    assert ended_at([5.0, *([7.0, None] * 200)][:400]) == 92  # steps that were left out do not count


def test_the_warm_up_does_not_count():
    assert ended_at([5.0] + [7.0] * 399, warmup=30) == 70
    assert ended_at([5.0] + [7.0] * 399, warmup=300) == 80  # the warm-up is a tenth of the run at most


# --- The table ----------------------------------------------------------------------------------------


def line(lr, seed, outcome="finished", **losses):
    settings = {"lr": lr, "seed": seed}
    return {"settings": settings, "outcome": outcome, "returned": "average", "losses": losses}


def test_the_table_is_best_first_with_seeds_together():
    lines = [
        line(1e-3, 1, live=5.0, average=3.0),
        line(1e-3, 2, live=5.0, average=3.2),
        line(2e-3, 1, live=1.0, average=2.0),
        line(2e-3, 2, "diverged"),
        line(4e-3, 1, live=5.5, average=2.5),
        line(4e-3, 2, live=5.5, average=2.5),
        line(8e-3, 1, "failed"),
        line(8e-3, 2, "diverged"),
    ]
    table = table_of(lines)
    assert table.columns == ("lr", "loss", "±", "weights", "live", "seeds", "ended")
    assert table.rows == (
        ("0.004", "2.5000", "0.0000", "average", "5.5000", "2", "2 finished"),
        ("0.001", "3.1000", "0.1414", "average", "5.0000", "2", "2 finished"),
        ("0.002", "2.0000", "", "average", "1.0000", "2", "1 finished, 1 diverged"),
        ("0.008", "", "", "", "", "2", "1 diverged, 1 failed"),
    )


# --- The pool -----------------------------------------------------------------------------------------


def seen_gpu(order, send):
    import os
    import time

    send("began")
    time.sleep(0.5)
    return order, os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.slow
def test_processes_take_orders_as_they_come_and_gpus_by_turns():
    def orders():
        yield 0
        yield 1
        for _ in range(3):
            yield None
        yield 2

    ended = {}
    for told in do_all(seen_gpu, orders(), 2, 1, ("5", "7")):
        if told is not None and told[1] != "began":
            ended[told[0]] = told[1].result
    assert ended[0] == (0, "5") and ended[1] == (1, "7") and ended[2][1] in ("5", "7")


def test_a_run_that_had_been_evaluated_before_it_went_on_is_said_to_be_finished():
    """Its losses were told to an earlier command."""
    cell, said = pool.Cell(run=make({"steps": 5}), folder=Path("none")), io.StringIO()
    lines = live.Lines(live.Rows([cell], ("run",), [("a",)]), said)
    lines.take((cell, pool.Ended(how="finished")))
    assert said.getvalue() == "run a: finished (1 of 1 runs done, about 0 min left)\n"
