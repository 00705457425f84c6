"""Tables about the study of the default: what they are made of, and by hand."""

from pathlib import Path

from paceline.experiments.defaults import page, regret, tables
from paceline.experiments.defaults.regret import Pick, Result
from paceline.experiments.defaults.tables import Row

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "records").glob("*defaults*.jsonl"))


def test_what_others_are_compared_with_is_the_best_of_adamw():
    known = tables.read_study(RECORDS)
    for trained, reference in page.REFERENCES.items():
        assert regret.best_weights(known[trained], "adamw") == reference


def test_the_seed_that_chose_gives_the_best_of_each_alone():
    """docs/defaults.md says so, and names the one that is another."""
    known = tables.read_study(RECORDS)
    others = []
    for trained, rows in ((page.GPT, page.BASELINES), (page.CHAT, page.CHAT_BASELINES)):
        for row in rows:
            seeds = (known[trained], tables.chosen_by(known[trained]))
            picks = {(pick := row.pick(own), regret.best_rate(own, pick)) for own in seeds}
            others += [row.title] * (len(picks) > 1)
    assert others == ["AdamW, WSD"]


# --- Tables of made-up runs, by hand ----------------------------------------------------------------------


def _run(method: str, lr: float, seed: int, readings: tuple[float, ...] = (), **losses: float) -> Result:
    return Result(method=method, lr=lr, seed=seed, losses=losses, train=(), readings=readings)


K5, K6 = "power_0_5", "power_0_6"
RUNS = [
    _run("adamw", 1e-3, 1, (0.1, 0.9), live=3.3, power_0_5=3.2, power_0_6=3.1),
    _run("adamw", 2e-3, 1, (0.125, 0.4), live=3.5, power_0_5=3.4, power_0_6=3.3),
    _run("adamw", 1e-3, 11, live=3.3, power_0_5=3.2, power_0_6=3.0),
    _run("adamw", 1e-3, 12, live=3.3, power_0_5=3.2, power_0_6=3.2),
    _run("ours", 1e-3, 11, power_0_5=3.1, power_0_6=3.05),
    _run("ours", 1e-3, 12, power_0_5=3.1, power_0_6=3.19),
    _run("ours", 2e-3, 1, power_0_5=3.15, power_0_6=3.2),
]
ADAMW, OURS = Row("AdamW", "adamw", K6), Row("ours", "ours")


def rows(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_losses_are_means_over_seeds_of_what_a_row_returns():
    text = tables.losses(RUNS, [ADAMW, OURS])
    assert text.splitlines()[0] == "|  | returned | 1e-3 | 2e-3 |"
    assert rows(text) == [
        ["AdamW", "κ = 0.6", "3.100 ± 0.058", "3.300"],
        ["ours", "κ = 0.5", "3.100 ± 0.000", "3.150"],  # 3.12 at its best rate with the other average
    ]
    assert rows(tables.losses(tables.chosen_by(RUNS), [ADAMW]))[0][2:] == ["3.100", "3.300"]
    assert rows(tables.losses(tables.others(RUNS), [ADAMW]))[0][2:] == ["3.100 ± 0.100"]
    assert rows(tables.losses(tables.at([2e-3], RUNS), [ADAMW]))[0][2:] == ["3.300"]


def test_regrets_are_paired_and_the_reference_is_zero():
    text = tables.regrets(RUNS, [ADAMW, Row("ours", "ours", K6)], Pick("adamw", K6), ("1/2", "1", "2"))
    assert rows(text) == [
        ["AdamW", "κ = 0.6", "", "0", "+0.200"],
        ["ours", "κ = 0.6", "", "+0.020 ± 0.030", "+0.100"],  # of +0.05 and −0.01
    ]


def test_the_best_of_each_leaves_out_the_seed_that_chose():
    found = rows(tables.bests(RUNS, [Row("AdamW", "adamw", settings="none"), OURS]))
    assert found == [
        ["AdamW", "none", "2", "4", "1e-3", "κ = 0.6", "3.100 ± 0.100"],
        ["ours", "", "2", "3", "1e-3", "κ = 0.5", "3.100 ± 0.000"],
    ]


def test_powers_are_over_the_best_of_adamw_at_a_multiple_of_its_rate():
    found = rows(tables.powers({"a": RUNS}, "ours", [("once", "a", 1), ("twice", "a", 2)]))
    assert found[0][:3] == ["once", "+0.000 ± 0.100", "+0.020 ± 0.030"]
    assert found[1][:3] == ["twice", "+0.050", "+0.100"]


def test_signs_are_those_of_the_seed_that_has_readings():
    assert rows(tables.signs(RUNS, K6)) == [
        ["cosine of gradient and gap", "0.10", "0.12"],
        ["gap²/noise", "0.90", "0.40"],
        ["live less κ = 0.6", "0.200", "0.200"],
    ]


def test_files_of_several_days_are_one_study(tmp_path):
    line = '{"name": "adamw-0.002-%d", "losses": {"live": 3.0}, "train": []}\n'
    (tmp_path / "2026-11-15-defaults-7m.jsonl").write_text(line % 1)
    (tmp_path / "2026-11-16-defaults-7m.jsonl").write_text(line % 2)
    (tmp_path / "2026-11-16-defaults-25m.jsonl").write_text(line % 3)
    known = tables.read_study(tmp_path.iterdir())
    assert {trained: [run.seed for run in own] for trained, own in known.items()} == {
        "7m": [1, 2],
        "25m": [3],
    }


def test_weights_in_words():
    words = {
        "live": "live",
        "average": "its average",
        "power_1_0": "κ = 1",
        "half_life_0_25": "half-life 25 %",
        "blend_0_5_half_life_0_06": "50 % of half-life 6 %, the rest live",
        "blend_0_75_half_life_0_06": "75 % of half-life 6 %, the rest live",
    }
    for weights, said in words.items():
        assert tables.weights_in_words(weights) == said
