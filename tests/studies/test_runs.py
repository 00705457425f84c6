"""Lists of runs: combinations, names, and runs that continue others. Nothing is trained."""

import json
from dataclasses import replace

import pytest

from paceline.runs.changes import refuse_lost_checkpoints
from paceline.runs.config import (
    MAY_CHANGE,
    NO_OTHER_RUN,
    ConfigError,
    Run,
    as_mapping,
    make,
    mark_of,
    name_of,
)
from paceline.schedules import WSD
from paceline.studies.runs import Named, decayed, folder_of, grid, in_order, read, read_plan, refuse_others

# --- Combinations -------------------------------------------------------------------------------------


def test_all_combinations_in_order_with_seeds_changing_first_then_the_last_of_the_grid():
    push = "pace+push:strength=0.7,power=0.5"
    found = grid(
        {"steps": 5, "lr": ["1e-3", 2e-3], "seed": 1, "method": ["adamw", push]},
        values={"warmup": [7]},
        seeds=2,
    )
    tags = [tuple(one.tags.values()) for one in found]
    lrs = [(1e-3, 1), (1e-3, 2), (2e-3, 1), (2e-3, 2)]
    assert tags == [(method, *rest) for method in ("adamw", push) for rest in lrs]
    for one in found:
        assert one.name == name_of(one.run) and one.run.steps == 5
        assert one.tags == {"method": one.run.method, "lr": one.run.lr, "seed": one.run.seed}


def test_cells_go_with_all_of_the_grid_and_win_over_the_settings():
    cells = ({"method": "adamw", "schedule": "wsd"}, {"method": "pace", "warmup": 7})
    found = grid({"steps": 5, "warmup": 3}, cells=cells, values={"clip_norm": [1.0, 2.0]})
    assert [tuple(one.tags.values()) for one in found] == [
        ("adamw", "wsd", 3, 1.0),
        ("adamw", "wsd", 3, 2.0),
        ("pace", "constant", 7, 1.0),
        ("pace", "constant", 7, 2.0),
    ]


def test_one_run_has_no_tags_and_lists_of_texts_are_values_too():
    assert [(one.run, one.tags) for one in grid({"steps": 5, "seed": 3})] == [(Run(steps=5, seed=3), {})]
    found = grid(
        {"steps": 5, "method": "adamw"}, values={"averages": [["power:0.5"], ["power:0.7", "bema:0.5"]]}
    )
    assert [one.run.averages for one in found] == [("power:0.5",), ("power:0.7", "bema:0.5")]


def test_a_file_has_the_words_of_flags(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text('steps = "1k"\nlr = [1e-3, "2e-3"]\nseeds = 2\n[grid]\nmethod = ["sgd", "pace:c=0.01"]\n')
    flags = grid({"steps": 1000, "lr": ["1e-3", "2e-3"]}, values={"method": ["sgd", "pace:c=0.01"]}, seeds=2)
    assert grid(**read(path)) == flags
    path.write_text('steps = 5\nseed = [3, 9]\n[[cells]]\nmethod = "adamw"\n[[cells]]\nschedule = "wsd"\n')
    assert [(one.run.method, one.run.schedule, one.run.seed) for one in grid(**read(path))] == [
        ("adamw", "constant", 3),
        ("adamw", "constant", 9),
        ("pace", "wsd", 3),
        ("pace", "wsd", 9),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("steps = 5\ngrid = 3", "grid is '3'; allowed: a table, [grid]"),
        ("steps = 5\n[grid]\nlr = 1e-3", "grid: lr is 0.001; allowed: a list of values"),
        ("steps = 5\n[grid]\nlr = []", "grid: lr is []"),
        ("steps = 5\nlr = [1]\n[grid]\nlr = [2]", "lr is given twice"),
        ("steps = 5\n[grid]\nlrr = [1]", "unknown setting 'lrr' (did you mean lr?)"),
        ("steps = 5\ncells = 3", "cells is '3'; allowed: tables"),
        ("steps = 5\ncells = [3]", "cells are tables of settings"),
        ("steps = 5\nseeds = 0", "seeds is '0'; allowed: how many, 1 to 1000"),
        ("steps = 5\nseeds = [1, 2]", "seeds is '[1, 2]'; allowed: how many"),
        ("steps = 5\nseeds = 2\nseed = [1, 2]", "seeds counts from one seed, and seed lists several"),
        ("steps = 5\nseed = []", "seed is an empty list"),
        ('steps = 5\nseed = ["x"]', "seed is 'x'; allowed: a whole number"),
        ("steps = 5\n[grid]\nseed = [1]", "give it outside, as a list"),
        ('steps = 5\n[grid]\ndevice = ["cpu", "cuda"]', "device changes no result"),
        ("steps = 5\n[grid]\nlr = [1]\n[[cells]]\nlr = 2", "lr is both in the grid and in cells"),
        ("steps = 5\n[grid]\nlr = [1e-3, 0.001]", "runs 1 and 2 of the grid are the same"),
        ("steps = 5\nseed = [4, 4]", "runs 1 and 2 of the grid are the same"),
        ("[grid]\nlr = [1]", "give exactly one of steps, tokens, epochs, chinchilla"),
        ("steps = [", "cannot read"),
    ],
)
def test_mistakes_in_a_file_are_said_in_its_words(tmp_path, content, said):
    path = tmp_path / "sweep.toml"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        grid(**read(path))
    assert said in str(refused.value)


# --- Runs that continue others ------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "share"), [(100, 0.2), (33, 0.1), (4750, 0.25), (3, 0.01)])
def test_a_decayed_run_continues_where_the_schedule_begins_to_decay(steps, share):
    whole = Named(
        name="whole", run=Run(steps=2 * steps, keep_steps=(7,)), tags={"method": "PACE", "lr": 1e-3}
    )
    one = decayed(whole, steps=steps, share=share)
    factor = WSD(steps=steps, decay=share)
    name, begins = one.run.after
    # The last step at the full rate is done by the run that is continued.
    assert name == "whole" and factor(begins) == 1.0 > factor(begins + 1)
    assert begins == steps - factor.decay_steps
    assert make({"steps": steps, "schedule": one.run.schedule}).schedule == f"wsd:decay={share:g}"
    assert one.tags == {"method": "PACE", "lr": 1e-3, "schedule": "wsd", "steps": steps}
    assert one.name == name_of(one.run) and one.run.keep_steps == ()
    assert decayed(whole, name="own").name == "own" and decayed(whole).run.steps == 2 * steps


def test_runs_come_after_those_that_they_continue_which_keep_their_checkpoints():
    whole = Named(name="whole", run=Run(steps=20, keep_steps=(3,)))
    other = Named(name="other", run=Run(steps=20, seed=3))
    late, early = decayed(whole), decayed(whole, steps=10)
    found = in_order([late, early, whole, other, late])
    assert [one.name for one in found] == ["whole", "other", late.name, early.name]
    assert [one.run.keep_steps for one in found] == [(3, 8, 16), (), (), ()]
    with pytest.raises(ConfigError, match="two runs have the name whole"):
        in_order([whole, Named(name="whole", run=Run(steps=21))])


# --- Names --------------------------------------------------------------------------------------------


OTHER = {
    "task": "sft",
    "model": "gpt2",
    "data": ["a.txt"],
    "held_out": ["b.txt"],
    "tokenizer": "gpt2",
    "method": "adamw",
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
def test_names_differ_where_results_may_and_only_there(name):
    other = {"steps": 5, "model": "x", name: OTHER.get(name, 7)}
    if name == "tokens":
        del other["steps"]
    usual = {"steps": 5, "model": "x"}
    # Shards are of FSDP2 alone, and PACE keeps no averages but its own.
    needed = {"shards": {"parallel": "fsdp2"}, "averages": {"method": "sgd"}}.get(name, {})
    usual, other = {**usual, **needed}, {**other, **needed}
    usual, changed = make(usual), make(other)
    assert usual != changed
    assert (mark_of(usual) == mark_of(changed)) == (name in NO_OTHER_RUN)
    assert (name_of(usual) == name_of(changed)) == (name in NO_OTHER_RUN)


def test_a_run_of_the_same_name_is_never_refused_when_it_resumes():
    assert NO_OTHER_RUN < MAY_CHANGE and {"skip_nonfinite"} == MAY_CHANGE - NO_OTHER_RUN


def test_a_copy_under_the_name_of_another_run_is_refused(tmp_path):
    one, other = grid({"steps": 9, "lr": [1e-3, 2e-3]})
    place = folder_of(tmp_path, other.name)
    place.mkdir(parents=True)
    line = {"kind": "run", "config": as_mapping(replace(one.run, keep=7, compile=True))}
    (place / "records.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=r"other settings \(lr: 0.001, now 0.002\)"):
        refuse_others([one, other], tmp_path)
    place.rename(folder_of(tmp_path, one.name))
    refuse_others([one, other], tmp_path)


PLAN = {"request": {}, "steps": 9, "jobs": 1, "threads": 1, "trial": {}, "missing": {}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"runs": [', "line 1, column 11: this is no JSON"),
        ("[]", "holds a list; a JSON object was written"),
        ('{"request": {}, "steps": "9"}', "steps is '9'; allowed: a whole number"),
        ('{"request": {}, "steps": 9, "jobs": 1, "threads": 1}', "trial is 'None'; allowed: an object"),
        (json.dumps(PLAN | {"runs": ["../x"]}), "allowed: names of folders"),
    ],
)
def test_a_damaged_plan_is_named(tmp_path, content, said):
    assert read_plan(tmp_path) is None
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ConfigError, match=r"plan\.json.*; move it away") as refused:
        read_plan(tmp_path)
    assert said in str(refused.value)


def test_records_alone_are_not_overwritten(tmp_path):
    refuse_lost_checkpoints(tmp_path)
    (tmp_path / "records.jsonl").write_text('{"kind": "run"}\n{"kind": "evaluation"}\n')
    with pytest.raises(ConfigError, match="would be overwritten"):
        refuse_lost_checkpoints(tmp_path)
    (tmp_path / "timing.jsonl").write_text("")  # killed before its first checkpoint
    refuse_lost_checkpoints(tmp_path)
