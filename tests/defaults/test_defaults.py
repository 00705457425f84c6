"""The study behind the defaults: its optimizer, its runs, and what is made of their lines."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import write_text
from torch import nn

from paceline.experiments.candidates import GAINS, Candidate
from paceline.experiments.config import ConfigError, Run, parse_spec
from paceline.experiments.defaults import figures, regret, runs
from paceline.experiments.defaults.regret import Pick
from paceline.experiments.defaults.work import work
from paceline.experiments.methods import MissingPackageError, check_methods, make_optimizer
from paceline.optim import PACE, averaged_weights

# --- The optimizer that gains are tried in ------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def _train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = (torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (8, 3))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(("gain", "strength"), [("paper", 0.3), ("uniform", 1.5)])
def test_a_candidate_with_a_gain_of_the_library_is_pace(gain, strength):
    ours, theirs = _model(), _model()
    pace = PACE(ours.parameters(), lr=1e-2, pullback_strength=strength, gain=gain)
    _train(pace, ours, 60)
    _train(Candidate(theirs.parameters(), lr=1e-2, gain=gain, strength=strength), theirs, 60)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)  # eps is added before or after a mean


SETTINGS = {
    "paper": {"strength": 0.3},
    "uniform": {"strength": 1.0},
    "relative": {"strength": 1.0},
    "hypergradient": {},
    "without_drift": {"strength": 2.0},
    "gated": {"strength": 3.0, "threshold": 1.0},
    "push_then_pull": {"strength": 2.0, "steps": 60},
    "leash": {"length": 0.1},
    "scaled": {"strength": 15.0},
    "signal": {"strength": 60.0},
    "softened": {"strength": 15.0},
    "split": {"strength": 15.0, "push": 0.3},
    "tensorwise": {"strength": 15.0},
    "sized": {"strength": 4.0},
    "stable": {},
    "clipped": {},
    "capped": {"length": 0.03, "strength": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("gain", GAINS)
def test_a_candidate_goes_on_from_its_state(gain):
    whole, before, after = _model(), _model(), _model()
    _train(Candidate(whole.parameters(), lr=1e-2, gain=gain, **SETTINGS[gain]), whole, 30)
    first = Candidate(before.parameters(), lr=1e-2, gain=gain, **SETTINGS[gain])
    generator = torch.Generator().manual_seed(0)
    second = None
    for step in range(30):
        if step == 15:
            second = Candidate(after.parameters(), lr=1e-2, gain=gain, **SETTINGS[gain])
            after.load_state_dict(before.state_dict())
            second.load_state_dict(first.state_dict())
        optimizer, model = (first, before) if second is None else (second, after)
        x, y = (torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (8, 3))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    for a, b in zip(whole.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)  # its scalars are kept in float32


@pytest.mark.slow
@pytest.mark.parametrize("gain", sorted(GAINS.keys() - {"paper"}))
def test_all_gains_but_the_papers_are_blind_to_the_scale_of_the_loss(gain):
    plain, scaled = _model(), _model()
    ours = Candidate(plain.parameters(), lr=1e-2, eps=1e-8, gain=gain, **SETTINGS[gain])
    theirs = Candidate(scaled.parameters(), lr=1e-2, eps=1e-5, gain=gain, **SETTINGS[gain])
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        x, y = (torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (8, 3))
        for model, optimizer, scale in ((plain, ours, 1.0), (scaled, theirs, 1000.0)):
            optimizer.zero_grad()
            ((model(x) - y).square().mean() * scale).backward()
            optimizer.step()
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_gate_pulls_noise_and_lets_drift_go():
    """Coordinates whose steps agree get as far as under AdamW, or farther; those whose steps do not, less."""

    def travelled(gain: str, **settings: float) -> torch.Tensor:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.zeros(2000, dtype=torch.float64))
        optimizer = Candidate([weight], lr=1e-3, weight_decay=0.0, gain=gain, **settings)
        for _ in range(400):
            weight.grad = torch.randn(2000, dtype=torch.float64)
            weight.grad[:1000] -= 1.0  # signal as large as the noise
            optimizer.step()
        return weight.detach()

    free = travelled("uniform", strength=0.0)
    pulled = travelled("gated", strength=3.0, threshold=1.0, push=0.0)
    pushed = travelled("gated", strength=3.0, threshold=1.0, push=0.5)
    assert pulled[:1000].mean() > 0.9 * free[:1000].mean() > 0
    assert pulled[1000:].square().mean() < 0.5 * free[1000:].square().mean()
    assert pushed[:1000].mean() > 1.1 * free[:1000].mean()


# --- Its runs -----------------------------------------------------------------------------------------


def _scale(name: str) -> runs.Scale:
    scale = runs.SCALES[name]
    model = "a-pretrained-one" if scale.settings.get("task") == "sft" else "gpt:0.3m"
    return replace(scale, settings={**scale.settings, "data": ("python",), "model": model})


CHECKED: set[object] = set()  # scales have most of their methods in common


@pytest.mark.slow
@pytest.mark.parametrize("group", runs.GROUPS)
@pytest.mark.parametrize("size", runs.SCALES)
def test_every_run_of_the_study_can_be_built(group, size):
    scale = _scale(size)
    named = runs.GROUPS[group](scale, 1)
    assert named
    for name, run in named.items():
        method, lr, seed = name.rsplit("-", 2)
        assert method and float(lr) == pytest.approx(run.lr) and int(seed) == run.seed == 1
        spec = run.optimizer, run.averages, run.schedule
        if spec not in CHECKED and "schedule_free_plus" not in name:  # of a newer package than is released
            check_methods(run)
            CHECKED.add(spec)


def test_averages_are_stored_in_each_precision_beside_the_same_in_full():
    """And apart from how they are stored, the runs of a kind are one run."""
    scale = _scale("7m")
    named = runs.GROUPS["storages"](scale, 11)
    assert len(named) == 12 and "PACE:paper,int8,kappa:0.5-0.002-11" in named
    kinds: dict[object, set[str]] = {}
    for name, run in named.items():
        optimizer, positional, settings = parse_spec(run.optimizer)
        storage, kind = settings.pop("average_dtype"), name.split("-")[0]
        assert optimizer == "pace" and not positional and run.lr == scale.middle and storage in kind
        kinds.setdefault(kind.replace(storage, ""), set()).add(storage)
        made = PACE([nn.Parameter(torch.zeros(1))], lr=run.lr, **settings).param_groups[0]
        returned = made["return_power"] or made["ema_power"]
        assert run.averages == (f"power:{returned}",)
    assert len(kinds) == 4 and all(stored == set(runs.STORAGES) for stored in kinds.values())


@pytest.mark.slow
def test_a_study_is_done_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path / "text.txt", paragraphs=120)
    scale = _scale("tiny")
    small = {"steps": 10, "length": 16, "batch_size": 2, "held_out_samples": 2, "tokenizer": "bpe:300"}
    small |= {"data": (str(tmp_path / "text.txt"),)}
    scale = replace(scale, settings={**scale.settings, **small})
    plain = runs.grid(scale, "gated", "candidate:gain=gated,strength=3", (0,), averages=("power:0.7",))
    everything = plain | runs.decayed(plain)
    record, told = tmp_path / "record.jsonl", []
    work(everything, tmp_path / "runs", record, 2, told.append)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    lines.sort(key=lambda line: len(line["name"]))
    assert [line["name"] for line in lines] == ["gated-0.003-1", "gated+wsd-0.003-1"]
    assert all(math.isfinite(line["losses"]["power_0_7"]) for line in lines)
    assert lines[0]["losses"] != lines[1]["losses"]
    assert lines[0]["config"]["data"] == ["text.txt"]  # no folder of this machine
    assert not (tmp_path / "runs/gated+wsd-0.003-1/checkpoints").exists()
    work(everything, tmp_path / "runs", record, 2, told.append)
    assert told[-1] == "0 runs to do, 2 done before"
    assert len(record.read_text().splitlines()) == 2
    assert {result.method for result in regret.read([record])} == {"gated", "gated+wsd"}


def test_a_blend_is_part_of_an_average_and_the_rest_live():
    model = nn.Linear(2, 1)
    averages = ("half=blend:0.5,decay,0.9", "whole=decay:0.9")
    run = Run(steps=1, optimizer="adamw", averages=averages, lr=0.1)
    optimizer = make_optimizer(run, model)
    for _ in range(3):
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
    live = model.weight.detach().clone()
    with averaged_weights(optimizer["whole"]):
        whole = model.weight.detach().clone()
    with averaged_weights(optimizer["half"]):
        torch.testing.assert_close(model.weight.detach(), (live + whole) / 2)
    with pytest.raises(ConfigError, match=r"average 'decai' is unknown \(did you mean decay\?\)"):
        check_methods(replace(run, averages=("blend:0.5,decai,0.9",)))


def test_schedule_free_plus_of_a_package_that_is_too_old_is_refused():
    if importlib.util.find_spec("schedulefree.adamc_schedulefree_plus_paper"):
        pytest.skip("it is new enough")
    with pytest.raises(MissingPackageError, match=r"needs its package: pip install schedulefree, newer"):
        check_methods(Run(steps=1, optimizer="schedule_free_plus"))


# --- What its lines say -------------------------------------------------------------------------------


def _result(method: str, lr: float, seed: int, **losses: float | None) -> regret.Result:
    return regret.Result(method=method, lr=lr, seed=seed, losses=losses, train=(4.0, 3.5, None, 3.2))


RESULTS = [
    _result("a", 1e-3, 11, live=3.2, average=2.99),
    _result("a", 1e-3, 12, live=3.3, average=3.2),
    _result("a", 2e-3, 11, live=3.1, average=3.3),
    _result("a", 2e-3, 12, live=3.1, average=None),
    _result("b", 1e-3, 11, average=3.05),
    _result("b", 1e-3, 12, average=3.15),
]


def test_best_rates_and_weights():
    assert regret.best_rate(RESULTS, Pick("a", "average")) == 1e-3  # a run that diverged never wins
    assert regret.best_rate(RESULTS, Pick("a", "live")) == 2e-3
    assert regret.best_weights(RESULTS, "a") == Pick("a", "average")  # 3.095 at its best, live 3.1
    assert regret.best_weights(RESULTS, "a", ["live"]) == Pick("a", "live")
    assert regret.losses_of(RESULTS, Pick("a", "average"))[2e-3] == {11: 3.3, 12: math.inf}


def test_regret_is_paired_by_seed():
    found = regret.regret(RESULTS, Pick("b", "average"), 1e-3, Pick("a", "average"), 1e-3)
    assert found is not None and found.mean == pytest.approx(0.005) and found.seeds == 2
    assert found.error == pytest.approx(0.055)  # of +0.06 and −0.05
    assert regret.regret(RESULTS, Pick("b", "average"), 5e-3, Pick("a", "average"), 1e-3) is None


def test_the_seed_that_settings_were_chosen_by_reports_only_where_there_is_no_other():
    chosen = [_result(m, lr, 1, average=9.0) for m, lr in (("a", 1e-3), ("b", 1e-3), ("b", 4e-3))]
    known = RESULTS + chosen
    found = regret.regret(known, Pick("b", "average"), 1e-3, Pick("a", "average"), 1e-3)
    assert found is not None and found.mean == pytest.approx(0.005) and found.seeds == 2
    assert regret.table(known)[2][2:] == ["3.100 ± 0.050", "", "9.000"]


def test_the_expected_best_of_some_trials_is_that_of_all_orders():
    from itertools import combinations

    losses = [3.0, 3.7, 3.1, 5.0, 3.3]
    for trials in range(1, 6):
        chosen = [min(some) for some in combinations(losses, trials)]
        assert regret.after_trials(losses, trials) == pytest.approx(sum(chosen) / len(chosen))
    with pytest.raises(ValueError, match="trials is 6; allowed: 1 to 5"):
        regret.after_trials(losses, 6)


def test_steps_to_a_target():
    assert regret.steps_to(RESULTS[0].train, 3.5) == 100
    assert regret.steps_to(RESULTS[0].train, 3.4) == 200
    assert regret.steps_to(RESULTS[0].train, 3.0) is None


def test_the_table_has_a_row_for_each_method():
    rows = regret.table(RESULTS)
    assert rows[0] == ["method", "weights", "0.001", "0.002"]
    assert rows[1] == ["a", "average", "3.095 ± 0.105", "inf"]
    assert rows[2] == ["b", "average", "3.100 ± 0.050", ""]


@pytest.mark.slow
def test_the_figures_say_what_they_show(tmp_path: Path):
    lines = figures.draw(RESULTS, ["a", "b"], tmp_path / "f.png")
    assert lines[0] == "regret against a (average) at 0.001"
    assert lines[2] == "  b: 0.001: 0.005 ± 0.055"
    assert "steps to a training loss of 3.200, each at its best rate" in lines
    assert lines[-1] == "  b at 0.001: 200.000 ± 0.000 (2 of 2 runs)"
    assert (tmp_path / "f.png").stat().st_size > 10_000
    lines = figures.draw(RESULTS, ["a/live", "b"], tmp_path / "f.png")
    assert lines[0] == "regret against a (live) at 0.002"


def test_a_file_of_records_is_read(tmp_path: Path):
    line = {"name": "paper:0.003-0.002-11", "losses": {"live": 3.0}, "train": [3.5], "outcome": "finished"}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "losses": {"live": 2.0}}) + "\n")
    assert regret.read([path]) == [
        regret.Result(method="paper:0.003", lr=0.002, seed=11, losses={"live": 2.0}, train=(3.5,))
    ]
