"""Records of runs read into one class, chosen by tags in one table, and written as one text."""

import json
import math
from dataclasses import replace

import pytest

from paceline.runs.config import ConfigError
from paceline.studies.lines import FORMAT, Finished, find_runs, write
from paceline.studies.noise import quantile
from paceline.studies.table import Mean, Table
from paceline.studies.text import Listing

stats = pytest.importorskip("scipy.stats")


def run(lr=1e-3, seed=1, live=3.0, ema=2.9, outcome="finished", **more):
    return Finished(
        name=f"{lr} {seed}",
        config={"lr": lr, "seed": seed, "optimizer": "adamw"},
        methods={"AdamW": "live", "AdamW · EMA": "ema"},
        method="AdamW · EMA",
        returned="ema",
        outcome=outcome,
        evaluations=((5, {"live": 4.0, "ema": 4.0}), (9, {"live": live, "ema": ema})),
        **more,
    )


def folder_of(path, *, kinds=("finished",), losses=(3.0, 2.5), back=0.0, **more):
    """Write the folder of a run that lost its number once, was stopped, resumed and ended."""
    path.mkdir(parents=True)
    about = {"config": {"lr": 0.1, "seed": 7, "data": ["/home/me/x.txt"]}, "steps": 2, "parameters": 9}
    about |= {
        "methods": {"AdamW": "live"},
        "returned": "live",
        "control": None,
        "data": {},
        "environment": {},
    }
    lines = [{"kind": "run", **about, **more}]
    lines += [{"kind": "step", "step": i, "loss": x, "skipped": False} for i, x in enumerate((9.0, None), 1)]
    lines += [
        {"kind": "evaluation", "step": i, "losses": {"held-out": {"live": x}}}
        for i, x in enumerate(losses, 1)
    ]
    times = [{"kind": "begin", "time": 10.0}, {"kind": "speed", "time": 14.0, "tokens_per_second": 5.0}]
    times += [
        {"kind": "begin", "time": 100.0},
        {"kind": "speed", "time": 103.0 - back, "tokens_per_second": 7.0},
    ]
    times += [{"kind": "end", "time": 104.0, "step": 2, "outcome": kind, "text": ""} for kind in kinds]
    for name, content in (("records", lines), ("timing", times)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    return path


# --- Records --------------------------------------------------------------------------------------------


def test_a_folder_and_its_line_are_the_same_run(tmp_path):
    found = Finished.of_folder(folder_of(tmp_path / "runs" / "a"), tags={"batch": "b"})
    assert (found.lr, found.seed, found["batch"], found.loss) == (0.1, 7, "b", 2.5)
    assert (found.seconds, found.speed, found.start, found.train) == (8.0, 6.0, 9.0, ((1, 9.0), (2, None)))
    write([found, replace(found, name="b")], tmp_path / "x.jsonl")
    assert Finished.read([tmp_path / "x.jsonl"]) == {"a": found, "b": replace(found, name="b")}
    text = (tmp_path / "x.jsonl").read_text()
    assert "/home/me" not in text
    (tmp_path / "x.jsonl").write_text(text.replace("2.5", "2.4", 1))
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1 is not what was written"):
        Finished.read([tmp_path / "x.jsonl"])


def test_a_run_that_was_made_longer_has_its_last_steps_and_its_first_horizon(tmp_path):
    config = {"lr": 0.1, "seed": 7, "steps": 1, "tokens": None, "epochs": None, "horizon": None}
    longer = Finished.of_folder(folder_of(tmp_path / "a", config=config, steps=1))
    assert (longer.steps, longer["steps"], longer["horizon"]) == (2, 2, 1)
    whole = Finished.of_folder(folder_of(tmp_path / "b", config={**config, "steps": 2}))
    assert (whole.steps, whole["steps"], whole["horizon"]) == (2, 2, None)
    assert Table.of([longer, whole]).differences() == ({}, {"horizon": ["1", "None"]})


def test_runs_are_found_in_and_below_folders(tmp_path):
    for place in ("runs/b", "runs/a"):
        folder_of(tmp_path / place)
    both = [tmp_path / "runs" / "a", tmp_path / "runs" / "b"]
    assert find_runs([tmp_path]) == find_runs([tmp_path / "runs"]) == find_runs(both) == both
    more = folder_of(tmp_path / "more")
    assert find_runs([tmp_path]) == [more, *both]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="nothing is finished yet"):
        find_runs([tmp_path / "empty"])


def test_a_run_that_has_not_ended_is_no_result(tmp_path):
    running = Finished.of_folder(folder_of(tmp_path / "runs" / "a", kinds=()))
    assert running.outcome == "unfinished" and running.loss is None
    assert Finished.read([tmp_path]) == {} and Table.of([running]).losses == {}
    (tmp_path / "runs" / "a" / "timing.jsonl").write_text("")  # it has just begun
    assert Finished.of_folder(tmp_path / "runs" / "a").seconds == 0.0
    with pytest.raises(ConfigError, match="has not come to its end"):
        running.as_line()


def test_a_run_that_diverged_has_no_loss_whatever_it_evaluated_before(tmp_path):
    lost = Finished.of_folder(folder_of(tmp_path / "a", kinds=("diverged",)))
    assert lost.diverged and lost.loss is None and lost.curve() == [(1, 3.0), (2, 2.5)]


def test_the_time_of_a_clock_that_went_back_is_not_known(tmp_path):
    """Between two sessions it may: they are measured one by one."""
    found = [Finished.of_folder(folder_of(tmp_path / str(back), back=back)).seconds for back in (0.0, 4.0)]
    assert found == [8.0, None]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: lines[:-1], "is cut off: it lacks the evaluation of the last step, 2"),
        (lambda lines: lines[1:], "holds no record of a run: KeyError"),
        (lambda lines: ["[]", *lines[1:]], "line 1 is no record"),
        (lambda lines: [lines[0].replace('"methods": {', '"methods": 3, "x": {'), *lines[1:]], "no record"),
        (lambda lines: [*lines[:2], lines[2][:9], *lines[3:]], "line 3 is no JSON"),
    ],
)
def test_damaged_records_are_named(tmp_path, damage, said):
    path = folder_of(tmp_path / "a") / "records.jsonl"
    path.write_text("\n".join(damage(path.read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match=said) as refused:
        Finished.of_folder(tmp_path / "a")
    assert str(refused.value).startswith(str(path))


@pytest.mark.parametrize("line", [{"format": 1}, {}, 3, {"format": FORMAT, "name": "a"}])
def test_what_is_no_run_is_refused_with_its_place(line, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1 is no record"):
        Finished.read([tmp_path / "x.jsonl"])


# --- Tables ---------------------------------------------------------------------------------------------


def test_rows_are_chosen_by_tags_settings_and_methods():
    table = Table.of([run(lr, seed, tags={"batch": lr}) for lr in (1.0, 2.0) for seed in (1, 2)])
    assert len(table) == 8 and table.values("method") == ("AdamW", "AdamW · EMA")
    assert len(table.where(method="AdamW", lr=(1.0, 3.0))) == 2
    assert [len(part) for part in table.by("batch", "method").values()] == [2, 2, 2, 2]
    with pytest.raises(AttributeError):
        table.where(colour="red")


def test_the_best_rate_has_the_lowest_mean_of_whole_groups():
    rows = [run(1.0, s, ema=3.0) for s in (1, 2)] + [run(2.0, s, ema=2.0, outcome=o) for s, o in
            ((1, "finished"), (2, "diverged"))] + [run(4.0, 1, ema=1.0)]  # fmt: skip
    ema = Table.of(rows).where(method="AdamW · EMA")
    assert ema.best("lr").values("lr") == (1.0,)
    assert ema.where(lr=2.0).mean() is None and ema.where(lr=2.0).diverged == 1
    assert ema.where(lr=2.0).best("lr") is None


def test_the_error_of_a_mean_is_the_standard_error():
    mean = Mean.of([1.0, 2.0, 4.0])
    assert mean.error == pytest.approx(math.sqrt(7 / 3) / math.sqrt(3))
    assert mean.interval() == pytest.approx(4.302653 * mean.error)
    assert Mean.of([1.0]) == Mean(1.0, None, 1) and Mean.of([]) is None


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 101])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.9999])
def test_students_quantiles(level, freedom):
    assert quantile(level, freedom) == pytest.approx(stats.t.ppf(0.5 + level / 2, freedom), rel=1e-9)


def test_a_listing_escapes_what_its_form_would_read():
    listing = Listing(columns=("a|b", "n"), rows=(("<x>", "1"), ("y,z", "20")))
    assert listing.markdown().splitlines()[0] == "| a\\|b | n |"
    html = listing.html(lambda cell: "*" if cell == "<x>" else None)
    assert '<th scope="row">*&lt;x&gt;</th><td class="n">1</td>' in html and "<td>y,z</td>" in html
    assert listing.csv() == 'a|b,n\n<x>,1\n"y,z",20\n'


def test_a_run_that_diverged_was_as_long_as_the_others_of_a_budget_in_tokens():
    ended = [run(steps=9, ended=9), run(seed=2, steps=9, ended=4, outcome="diverged")]
    ended = [replace(one, config={**one.config, "tokens": 99, "steps": None}) for one in ended]
    assert Table.of(ended).differences() == ({}, {})
    assert "steps" in Table.of([*ended, run(seed=3, steps=12, ended=12)]).differences()[0]


def test_forks_of_runs_that_are_not_here_are_named():
    whole, other = run(), run(seed=2)
    branch = replace(other, config={**other.config, "fork": f"{whole.name}@5"})
    assert Table.of([whole, branch]).differences() == ({}, {})
    elsewhere = replace(other, config={**other.config, "fork": "elsewhere@5"})
    assert Table.of([whole, elsewhere]).differences() == ({}, {"fork": ["None", "elsewhere@5"]})


def test_different_averages_under_one_name_are_not_compared():
    one, other = run(), run(seed=2)
    same = [replace(each, config={**each.config, "averages": ["ema"]}) for each in (one, other)]
    assert Table.of(same).differences() == ({}, {})
    named = replace(other, config={**other.config, "averages": ["ema=power:0.2"]})
    assert list(Table.of([same[0], named]).differences()[0]) == ["the average of AdamW · EMA"]
