"""The runs of the paper's experiments against its tables, typed here once more by hand."""

from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest

from paceline.paper.labels import FIGURES, TABLES, chosen, runs_of
from paceline.paper.runs import readings
from paceline.paper.scales import CPU, GPU, PAPER, SCALES, located
from paceline.runs.names import ConfigError, parse_spec

# --- Typed from the paper -------------------------------------------------------------------------------

LABELS = {
    "fig:train_curves", "fig:pretrain", "fig:135m_grid", "fig:clip_frac_body", "fig:bema_sf", "fig:c_kappa",
    "fig:appendix_train_curves", "fig:appendix_135m_full_grid", "fig:appendix_pretrain_kappa_sweep",
    "fig:appendix_tulu_qwen", "fig:appendix_full_train_curves", "fig:appendix_clip_frac",
    "fig:appendix_clip_frac_vs_c", "fig:appendix_wsd_val_curves", "fig:appendix_wsd_finetune",
    "fig:appendix_fig1_all_schedules", "fig:appendix_multiseed_robust", "fig:appendix_pretrain_csweep",
    "fig:appendix_pretrain_csweep_kappa", "fig:appendix_pretrain_river",
}  # fmt: skip

SMOLTALK, TULU = "hf:HuggingFaceTB/smol-smoltalk", "hf:allenai/tulu-3-sft-mixture"
# tab:models. Model, data, sequence length, effective batch, steps.
MODELS = {
    "SmolLM2-135M": ("HuggingFaceTB/SmolLM2-135M", SMOLTALK, 1280, 128, 889),
    "SmolLM2-135M, long": ("HuggingFaceTB/SmolLM2-135M", SMOLTALK, 1280, 128, 3557),
    "SmolLM2-1.7B": ("HuggingFaceTB/SmolLM2-1.7B", SMOLTALK, 1280, 256, 1778),
    "Qwen3-1.7B": ("Qwen/Qwen3-1.7B", SMOLTALK, 1280, 256, 1779),
    "Qwen3-1.7B on tulu-3": ("Qwen/Qwen3-1.7B", TULU, 1280, 256, 1779),
    "Gemma3-1B": ("google/gemma-3-1b-pt", SMOLTALK, 1280, 256, 1779),
    "GPT-2-124M": ("gpt2", "hf:HuggingFaceFW/fineweb/sample-10BT", 1024, 512, 4750),
}

# tab:hp_per_experiment. Labels, η of each model, c, κ, uf of PACE at a constant rate with the headline seed.
C_1B = {1e-4, 5e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1}
FIRST = ("fig:train_curves", "fig:c_kappa", "fig:appendix_full_train_curves")
CLIP = ("fig:appendix_clip_frac", "fig:appendix_clip_frac_vs_c")
C_CLIP = {5e-3, 1.5e-2, 5e-2, 1.5e-1, 5e-1}
C_135M = {1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1}
ETA_135M = {1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3}
RIVALS = ("fig:bema_sf", "fig:appendix_train_curves")
ETA_GPT = {3e-4, 1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3, 1e-2}
C_GPT = {1e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 1e-1, 3e-1}
C_LOCAL = {3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2}
LARGE = {"SmolLM2-1.7B": {3e-4, 7e-4, 1e-3}, "Qwen3-1.7B": {3e-4, 5e-4}, "Gemma3-1B": {1e-3, 5e-3}}
HEADLINE = {"SmolLM2-1.7B": {1e-3}, "Qwen3-1.7B": {5e-4}, "Gemma3-1B": {1e-3}}
RIVAL_RATES = {"SmolLM2-135M, long": {1e-3, 5e-3}}, {"Qwen3-1.7B": {3e-4, 5e-4}}
SMALL, TULU_RATES = {"SmolLM2-135M": ETA_135M}, {"Qwen3-1.7B on tulu-3": {3e-4, 5e-4}}
SHOWN = {"SmolLM2-135M": {1e-3, 2e-3, 5e-3}}  # three, as the caption says
BUDGETS, GPT = {"SmolLM2-135M": {3e-3, 5e-3}}, {"GPT-2-124M": {2e-3}}
K, K_135M = {0.2, 0.5, 0.7}, {0.3, 0.5, 0.7}
SCHEDULED = ("fig:appendix_pretrain_csweep_kappa", "fig:appendix_pretrain_csweep")
SWEEPS = [
    (FIRST, LARGE, C_1B, K, {1}),
    (("fig:appendix_fig1_all_schedules",), HEADLINE, C_1B, K, {1}),
    (("fig:appendix_multiseed_robust",), HEADLINE, {1e-1}, {0.2}, {1}),
    (("fig:appendix_tulu_qwen",), TULU_RATES, {5e-2, 1e-1, 1.5e-1, 2.5e-1}, K, {1}),
    (("fig:clip_frac_body",), {"SmolLM2-1.7B": {3e-4}}, C_CLIP, K, {1}),
    (CLIP, {"SmolLM2-1.7B": {3e-4, 1e-3}}, C_CLIP, K, {1}),
    (("fig:135m_grid",), SMALL, C_135M, {0.3}, {1, 5, 10}),
    (("fig:appendix_135m_full_grid",), SMALL, C_135M, K_135M, {1, 5, 10}),
    (("fig:appendix_wsd_val_curves",), SHOWN, C_135M, K_135M, {1}),
    (("fig:appendix_wsd_finetune",), SMALL, C_135M, K_135M, {1}),
    (RIVALS, RIVAL_RATES[0], C_135M, K_135M, {1}),
    (RIVALS, RIVAL_RATES[1], C_1B, K, {1}),
    (("fig:bema_sf",), BUDGETS, {1e-1}, {0.3}, {1}),
    (("fig:appendix_pretrain_kappa_sweep",), {"GPT-2-124M": ETA_GPT}, C_GPT, K, {1}),
    (SCHEDULED, GPT, C_LOCAL, {0.1, 0.2, 0.3, 0.5}, {1}),
    (("fig:appendix_pretrain_river",), GPT, {2e-3, 3e-3}, {0.5}, {1}),
]

CONSTANT, TWO, ALL = {"constant"}, {"constant", "wsd"}, {"constant", "cosine", "wsd"}
# Of AdamW: labels, η of each model, schedules, seeds.
BASELINES = [
    (("fig:train_curves", "fig:appendix_full_train_curves"), LARGE, ALL, {42}),
    (("fig:c_kappa",), LARGE, CONSTANT, {42}),
    (("fig:appendix_fig1_all_schedules",), HEADLINE, ALL, {42}),
    (("fig:appendix_multiseed_robust",), HEADLINE, TWO, {42, 1337, 2024}),
    (("fig:appendix_tulu_qwen",), TULU_RATES, CONSTANT, {42}),
    (("fig:135m_grid", "fig:appendix_135m_full_grid"), SMALL, CONSTANT, {42}),
    (("fig:appendix_wsd_val_curves",), SHOWN, ALL, {42}),
    (("fig:appendix_wsd_finetune",), SMALL, ALL, {42}),
    (RIVALS, RIVAL_RATES[0] | RIVAL_RATES[1], CONSTANT, {42}),
    (("fig:bema_sf",), BUDGETS, TWO, {42}),
    (("fig:appendix_pretrain_kappa_sweep",), {"GPT-2-124M": ETA_GPT}, CONSTANT, {42}),
    (("fig:appendix_pretrain_csweep",), GPT, ALL, {0, 1, 42}),
    (("fig:appendix_pretrain_csweep_kappa",), GPT, ALL, {42}),
]


@cache
def kept(scale_name):
    """The runs of everything by name, which keep the checkpoints that others continue."""
    return {one.name: one.run for one in runs_of(FIGURES, SCALES[scale_name])}


@cache
def cells(label, scale_name="paper"):
    """The runs of a label under each model that they stand for, with their tags as fields."""
    once = {(one.tags["model"], one.name): one for one in FIGURES[label].runs(SCALES[scale_name])}
    return sorted(
        (
            SimpleNamespace(name=one.name, one=one, run=kept(scale_name)[one.name], **one.tags)
            for one in once.values()
        ),
        key=lambda cell: cell.run.after is not None,
    )


def found(label, model, method, **wanted):
    """The cells of a label with these values."""
    return [
        cell
        for cell in cells(label)
        if (cell.model, cell.method) == (model, method)
        and all(getattr(cell, k) == v for k, v in wanted.items())
    ]


def everything(scale_name="paper"):
    return {cell.name: cell for label in FIGURES for cell in cells(label, scale_name)}


# --- Against what is defined ----------------------------------------------------------------------------


def test_every_figure_of_the_paper_is_there():
    assert set(FIGURES) == LABELS and len(LABELS) == 20
    assert set(TABLES) == {"tab:models", "tab:hp_per_experiment"}


def test_the_tables_say_what_is_run():
    rows = {row[0]: row for row in TABLES["tab:models"](PAPER).rows}
    assert {name: (model, data, int(n), int(batch), int(steps)) for name, (_, model, data, n, batch, steps)
            in rows.items()} == MODELS  # fmt: skip
    rows = TABLES["tab:hp_per_experiment"](PAPER).rows
    assert {row[0] for row in rows} == LABELS
    (row,) = [row for row in rows if row[:3] == ("fig:appendix_pretrain_csweep", "GPT-2-124M", "AdamW")]
    assert row[3:] == ("0.002", "", "", "", "constant cosine wsd", "0 1 42")


@pytest.mark.parametrize("labels, models, strengths, powers, periods", SWEEPS)
def test_the_sweeps_of_pace(labels, models, strengths, powers, periods):
    for label, (model, rates) in product(labels, models.items()):
        own = found(label, model, "PACE", schedule="constant", seed=42)
        expected = set(product(rates, strengths, powers, periods))
        assert {(cell.lr, cell.c, cell.kappa, cell.uf) for cell in own} == expected
        assert len(own) == len(expected)


@pytest.mark.parametrize("labels, models, schedules, seeds", BASELINES)
def test_the_sweeps_of_adamw(labels, models, schedules, seeds):
    for label, (model, rates) in product(labels, models.items()):
        own = found(label, model, "AdamW", steps=MODELS[model][4])
        assert {(c.lr, c.schedule, c.seed) for c in own} == set(product(rates, schedules, seeds))


def test_fig_pretrain_is_at_one_power_and_decays_at_one_rate():
    constant = found("fig:pretrain", "GPT-2-124M", "PACE", schedule="constant")
    decayed = found("fig:pretrain", "GPT-2-124M", "PACE", schedule="wsd")
    # Beside the sweep at κ = .5: the runs that those with WSD go on from.
    assert {(c.lr, c.c) for c in constant} == set(product(ETA_GPT, C_GPT)) | {(2e-3, 3e-4)}
    assert {(c.lr, c.c) for c in decayed} == {(2e-3, c) for c in C_LOCAL}
    assert {c.kappa for c in constant + decayed} == {0.5}
    assert {c.lr for c in found("fig:pretrain", "GPT-2-124M", "AdamW", schedule="wsd")} == {2e-3}


@pytest.mark.parametrize("schedule, seed", list(product(("constant", "cosine", "wsd"), (0, 1, 42))))
def test_the_grid_of_schedules_is_shared(schedule, seed):
    own = found("fig:appendix_pretrain_csweep", "GPT-2-124M", "PACE", schedule=schedule, seed=seed)
    assert {(c.lr, c.c, c.kappa) for c in own} == set(product({2e-3}, C_LOCAL, {0.1, 0.2, 0.3, 0.5}))


@pytest.mark.parametrize("model, rates", [
    ("SmolLM2-135M, long", {1e-3, 3e-3, 5e-3, 1e-2}), ("Qwen3-1.7B", {3e-4, 1e-3}),
])  # fmt: skip
def test_schedule_free_has_its_authors_settings(model, rates):
    for label in RIVALS:
        own = found(label, model, "Schedule-Free")
        assert {cell.lr for cell in own} == rates
        for run in (cell.run for cell in own):
            spec = parse_spec(run.method)
            assert spec.word == "schedule_free"
            assert spec.settings == {"betas": (0.98, 0.95), "weight_decay": 0.05}
            assert run.clip_norm is None and run.schedule == "constant" and run.steps == MODELS[model][4]


@pytest.mark.parametrize(
    "label, model, budgets, starts",
    [
        ("fig:bema_sf", "SmolLM2-135M", [444, 667, 889], [355, 534, 711]),
        ("fig:appendix_pretrain_river", "GPT-2-124M", [2375, 3563, 4750], [1900, 2850, 3800]),
    ],
)
def test_branches_leave_the_constant_run_when_a_fifth_of_their_budget_is_left(label, model, budgets, starts):
    branches = found(label, model, "AdamW", schedule="wsd")
    for lr in {cell.lr for cell in branches}:
        own = [cell for cell in branches if cell.lr == lr]
        (whole,) = found(label, model, "AdamW", schedule="constant", lr=lr)
        assert [cell.steps for cell in own] == budgets == [cell.run.steps for cell in own]
        assert [cell.run.after for cell in own] == [(whole.name, start) for start in starts]
        assert set(starts) <= set(whole.run.keep_steps)
        assert whole.run.steps == budgets[-1]


def test_the_river_decays_pace_too():
    own = found("fig:appendix_pretrain_river", "GPT-2-124M", "PACE", schedule="wsd")
    assert [(cell.c, cell.kappa, cell.steps) for cell in own] == [(3e-3, 0.5, n) for n in (2375, 3563, 4750)]


@pytest.mark.parametrize("model", MODELS)
def test_models_and_budgets(model):
    name, data, length, batch, steps = MODELS[model]
    own = [cell for cell in everything().values() if cell.model == model]
    assert own
    for run in (cell.run for cell in own):
        assert (run.model, run.data, run.length, run.batch_size) == (name, (data,), length, batch)
        assert run.task == ("pretrain" if model == "GPT-2-124M" else "sft")
    assert {cell.run.steps for cell in own if cell.schedule != "wsd"} == {steps}
    if model == "GPT-2-124M":
        assert 2.4e9 < steps * batch * length < 2.5e9  # "2.5B tokens"
        assert {cell.run.tokenizer for cell in own} == {"gpt2"}


def test_settings_that_all_runs_share():
    adamw = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    for cell in everything().values():
        run = cell.run
        assert (run.warmup, run.precision, run.dropout, run.lr) == (50, "bfloat16", 0.0, cell.lr)
        assert run.seed == cell.seed and run.skip_nonfinite == 0
        schedule = {"wsd": "wsd:decay=0.2"}.get(cell.schedule, cell.schedule)
        assert run.schedule == schedule and (run.fork is not None) == (cell.schedule == "wsd")
        spec = parse_spec(run.method)
        name, settings = spec.word, spec.settings
        if cell.method == "Schedule-Free":
            continue
        assert run.clip_norm == 1.0
        if cell.method == "AdamW":
            assert (name, settings) == ("adamw", adamw)
        else:
            own = {"c": cell.c, "power": cell.kappa, "every": cell.uf}
            assert (name, settings) == ("pace", adamw | own) and run.averages == ()
            assert run.telemetry_every is not None


def test_every_ema_of_a_figure_is_beside_one_run_of_adamw():
    expected = {
        "SmolLM2-135M": set(product((0.3, 0.5, 0.7), (1, 5, 10))),  # c = 0 of the dense sweep
        "SmolLM2-1.7B": {(0.2, 1), (0.5, 1), (0.7, 1)},
        "GPT-2-124M": {(0.1, 1), (0.2, 1), (0.3, 1), (0.5, 1), (0.7, 1)},
    }
    for model, averages in expected.items():
        cell = next(c for c in everything().values() if (c.model, c.method) == (model, "AdamW"))
        found = [tags for _, tags in readings(cell.one)]
        assert {(tags["kappa"], tags["uf"]) for tags in found if tags["method"] == "EMA"} == averages
        specs = {f"power:{k}" + ("" if uf == 1 else f",every={uf}") for k, uf in averages}
        assert set(cell.run.averages) == specs


# --- Names, order, scales -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_one_name_is_one_run_and_one_run_has_one_name(scale):
    named, seen = kept(scale), set()
    for name, run in named.items():
        assert run.after is None or run.after[0] in seen, "a run before the one that it continues"
        seen.add(name)
    assert seen == everything(scale).keys()
    for label in FIGURES:
        own = {cell.name: cell for cell in cells(label, scale)}
        assert all(replace(cell.one.run, keep_steps=cell.run.keep_steps) == cell.run for cell in own.values())
        assert {cell.run.after[0] for cell in own.values() if cell.run.after} <= own.keys()
    without = {name: replace(run, keep_steps=()) for name, run in named.items()}
    assert len(set(without.values())) == len(named)
    assert all(len(name) < 100 and "/" not in name and "@" not in name for name in named)


@pytest.mark.parametrize("scale", SCALES)
def test_checkpoints_to_fork_from_are_kept_and_no_others(scale):
    wanted = {}
    for run in kept(scale).values():
        if run.after is not None:
            wanted.setdefault(run.after[0], set()).add(run.after[1])
    for name, run in kept(scale).items():
        assert set(run.keep_steps) == wanted.get(name, set())
        assert all(step < run.steps for step in run.keep_steps)


def test_scales_differ_in_model_data_and_budget_only():
    for label in FIGURES:
        kinds = [
            [(c.model, c.method, c.lr, c.c, c.kappa, c.uf, c.schedule, c.seed) for c in cells(label, scale)]
            for scale in SCALES
        ]
        assert sorted(map(str, kinds[0])) == sorted(map(str, kinds[1])) == sorted(map(str, kinds[2]))
    for cell in everything("cpu").values():
        run = cell.run
        assert (run.warmup, run.clip_norm) == (50, None if cell.method == "Schedule-Free" else 1.0)
    models = {cell.run.model for cell in everything("gpu").values()}
    assert models == {"gpt:7m", "HuggingFaceTB/SmolLM2-135M"}


def test_data_of_this_machine_change_no_name():
    data = {"text": ["t.jsonl"], "text_held_out": ["v.jsonl"], "chat": ["c.jsonl"]}
    here = located(PAPER, data | {"tulu": ["u.jsonl"], "Qwen3-1.7B": ["qwen"]})
    runs = runs_of(FIGURES, here)
    assert {one.name for one in runs} == everything().keys()
    # At a smaller scale tulu-3 is the same run as the other data, which it therefore reads.
    small = runs_of(["fig:appendix_tulu_qwen"], located(GPU, data))
    assert {one.run.data for one in small} == {("c.jsonl",)}
    with pytest.raises(
        ConfigError, match="scale cpu has no place 'gpt3'; there are chat, chat_held_out, tin"
    ):
        located(CPU, {"gpt3": ["x"]})


def test_an_unknown_label_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no label 'fig:clip_frac' \(did you mean fig:"):
        chosen(["fig:clip_frac"])
