"""Numbers in sentences about the study of the default: its page, choose.md, index.md, and README."""

from functools import cache

from said import RECORDS, Numbers

from paceline.experiments.defaults.page import ALL, CHAT, DEFAULT, GPT, K5, K6, K7, K8, PAPER, REFERENCES
from paceline.experiments.defaults.regret import (
    CHOSEN_BY,
    Estimate,
    Pick,
    best_rate,
    best_weights,
    estimate,
    losses_of,
    regret,
)
from paceline.experiments.defaults.tables import POWERS, Study, chosen_by, rate_in_words, read_study

SHORT, WIDE, LARGE, RECIPE = "7m-quarter", "7m-large-batch", "25m-2000-steps", "7m-usual"
OLDER, OLDEST = "7m-short-warmup", "7m-1500-steps"
HARDER = "scaled:60,control:0.2"
LONG = (K8, "power_0_9", ALL, "half_life_0_12", "half_life_0_25")


@cache
def study() -> Study:
    return read_study(RECORDS.glob("*defaults*.jsonl"))


def over(trained, method, weights, times=1.0) -> Estimate:
    """Over AdamW at its best rate with its best average."""
    results, reference = study()[trained], REFERENCES[trained]
    there = best_rate(results, reference)
    return regret(results, Pick(method, weights), times * there, reference, there)


def between(trained, ours, theirs, lr) -> float:
    """A difference of two at one rate."""
    return regret(study()[trained], Pick(*ours), lr, Pick(*theirs), lr).mean


def loss(trained, method, weights, lr, seed=CHOSEN_BY) -> float:
    """Of one run."""
    return losses_of(study()[trained], Pick(method, weights))[lr][seed]


def best(trained, method) -> tuple[Pick, float, float]:
    """Of the seed that settings were chosen by: what is returned, at which rate, and the loss."""
    results = chosen_by(study()[trained])
    pick = best_weights(results, method)
    lr = best_rate(results, pick)
    return pick, lr, losses_of(results, pick)[lr][CHOSEN_BY]


# --- What sentences say ---------------------------------------------------------------------------------


def at_twice(words) -> str:
    """The default and AdamW at twice the best rate, in pretraining and then in fine-tuning."""
    picks = [(task, pick) for task in (GPT, CHAT) for pick in (Pick(DEFAULT, K7), REFERENCES[task])]
    return words.format(*(f"{over(task, *pick, 2).mean:.3f}" for task, pick in picks))


def least_in_both() -> float:
    """At twice the best rate, the larger of a setting's two losses where that is least: with the default."""
    found: dict[Pick, float] = {}
    settings = [{Pick(r.method, name) for r in study()[task] for name in r.losses} for task in (GPT, CHAT)]
    for pick in settings[0] & settings[1]:
        losses = [over(task, *pick, 2) for task in (GPT, CHAT)]
        if None not in losses:
            found[pick] = max(one.mean for one in losses)
    least, second = sorted(found, key=found.__getitem__)[:2]
    assert least == (DEFAULT, K7), f"{least} loses less in both tasks"
    assert f"{found[second]:.3f}" > f"{found[least]:.3f}", f"{second} stays within as much"
    return found[least]


def by_control() -> str:
    """At four times the best rate, from the shortest control average to the longest, then AdamW."""
    ends = [loss(GPT, m, K6, 8e-3) for m in (DEFAULT, "scaled:15,control:0.35", "scaled:15", "adamw")]
    return "{:.3f}, {:.3f} and {:.3f}, AdamW {:.3f}".format(*ends)


def by_strength() -> str:
    """What four times the strength changes, up to four times the best rate."""
    places = [(GPT, K6, lr) for lr in (2e-3, 4e-3, 8e-3)] + [(CHAT, K8, lr) for lr in (3e-4, 6e-4, 1.2e-3)]
    changes = [abs(between(task, (HARDER, k), (DEFAULT, k), lr)) for task, k, lr in places]
    most, at_best = max(changes), max(changes[0], changes[3])
    return f"by at most {most:.3f} up to four times the best rate, in both tasks, and by {at_best:.3f} at the"


def like_averages() -> list[float]:
    """How far the default is below AdamW at AdamW's best rate, with AdamW's average."""
    found = []
    for trained, recipe in ((LARGE, ""), (SHORT, ""), (WIDE, ""), (RECIPE, "@usual")):
        pick = best_weights(study()[trained], f"adamw{recipe}", POWERS)
        lr = best_rate(study()[trained], pick)
        found.append(-between(trained, (f"{DEFAULT}{recipe}", pick.weights), pick, lr))
    return found


def of_signal() -> list[float]:
    """The signal gain less the default, in nine places."""
    places = [(RECIPE, K6, lr) for lr in (2e-3, 4e-3, 8e-3)] + [(WIDE, K5, lr) for lr in (2e-3, 4e-3, 8e-3)]
    places += [(CHAT, K8, lr) for lr in (3e-4, 6e-4, 1.2e-3)]
    return [between(task, ("signal:60,control:0.2", k), (DEFAULT, k), lr) for task, k, lr in places]


def of_signed() -> list[float]:
    """Signed and split over AdamW in fine-tuning, wherever they were run at its best rate or above."""
    runs = [r for r in study()[CHAT] if r.method in ("signed:15,0.5", "split:15,0.5") and r.lr >= 3e-4]
    return [r.losses[K8] - loss(CHAT, "adamw", K8, r.lr) for r in runs]


def far_above() -> tuple[float, float]:
    """The least over AdamW's best at eight times the best rate, and what that method loses at it."""
    results = chosen_by(study()[GPT])
    there = {r.method: best(GPT, r.method)[0] for r in results if r.lr == 1.6e-2}
    least = min(there.values(), key=lambda pick: loss(GPT, *pick, 1.6e-2))
    assert least.method.startswith("gated"), least
    adamw = best(GPT, "adamw")[2]
    return loss(GPT, *least, 1.6e-2) - adamw, loss(GPT, *least, 2e-3) - adamw


def softened_share() -> float:
    """Of what the pull gains over AdamW at twice the best rate."""
    adamw, pull, softened = (over(GPT, m, K6, 2).mean for m in ("adamw", DEFAULT, "softened:15"))
    return (adamw - softened) / (adamw - pull)


def pushed(trained, weights, lr) -> float:
    return loss(trained, "adamw", weights, lr) - loss(trained, "push:0.5", weights, lr)


def longer_are_worse() -> bool:
    """In the older runs of AdamW, up to four times its best rate."""
    rates = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
    return all(loss(OLDER, "adamw", k, lr) > loss(OLDER, "adamw", K7, lr) for k in LONG for lr in rates)


def warmed() -> tuple[float, float]:
    """AdamW at eight times its best rate in the older runs: with a short warm-up, and with a longer one."""
    return loss(OLDER, "adamw", K7, 8e-3), loss(OLDER, "warm", K7, 8e-3)


# --- Pages ----------------------------------------------------------------------------------------------


def defaults_page():
    pretraining, tuning = over(GPT, DEFAULT, K7), over(CHAT, DEFAULT, K7)
    near = [over(GPT, "adamw", k).mean for k in (K5, K7, "half_life_0_03", "half_life_0_06")]
    longer = [over(GPT, "adamw", k).mean for k in LONG]
    below, shorter = like_averages(), [between(t, (DEFAULT, K7), (DEFAULT, K5), 2e-3) for t in (SHORT, WIDE)]
    signal, signed, (far, near_gated) = of_signal(), of_signed(), far_above()
    adamw, _, least = best(GPT, "adamw")
    _, rate, loss_plus = best(GPT, "schedule_free_plus")
    ends = {method: best(OLDEST, method)[2] for method in ("h2-pull", "h2-both", "h2-scale", "adamw")}
    free = ends.pop("adamw")
    short, long_warm = warmed()
    assert rate == 1 / 8 and longer_are_worse()
    rates = [rate_in_words(best_rate(study()[task], REFERENCES[task])) for task in (GPT, CHAT)]
    return [
        *(f"tokens; best rate {rate})" for rate in rates),
        f"{pretraining.mean:.3f} ± {pretraining.error:.3f} nats above them in pretraining",
        f"{-tuning.mean:.3f} ± {tuning.error:.3f} below them in fine-tuning",
        at_twice("loses {} in pretraining, where they lose {}, and {} in fine-tuning, where they lose {}."),
        f"no other stays within {least_in_both():.3f} in both",
        f"0.6 is better by {between(GPT, (DEFAULT, K7), (DEFAULT, K6), 2e-3):.3f};",
        f"better by {between(CHAT, (DEFAULT, K7), (DEFAULT, K8), 6e-4):.3f} at twice it",
        f"the paper's setting costs {over(GPT, PAPER, K5).mean:.3f} at the best rate",
        f"Its best is {loss_plus:.3f}, at 1/8",
        f"by {min(below):.3f} to {max(below):.3f}, and more above it",
        f"κ = 0.7 costs {min(shorter):.2f} to {max(shorter):.2f}, and 0.5 is best",
        f"ends at {loss(RECIPE, *adamw, 2e-3, 11):.3f} there, {loss(GPT, *adamw, 2e-3, 11):.3f} in the older",
        f"{len(study()[GPT])} runs). A row",
        f"{len(study()[CHAT])} runs in all",
        f"0.5, 0.7 and half-lives of 3 % and 6 % of the run are within {max(near):.3f} of it",
        f"by {-over(CHAT, DEFAULT, K8).mean:.3f} and {-over(CHAT, PAPER, K8).mean:.3f}.",
        f"with a cosine to 0 AdamW ends {best(GPT, 'cosine')[2] - least:.2f} higher",
        f"control averages of power 0.2, 0.35 and 0.5 give {by_control()}.",
        f"gives {100 * softened_share():.0f} % of the gain",
        f"costs {over(GPT, 'softened:15', K6)} at the best rate",
        f"({pushed(GPT, K6, 5e-4):.2f} and {pushed(GPT, K6, 1e-3):.2f} at a quarter and half of it)",
        f"({pushed(CHAT, K8, 1.5e-4):.3f} at half)",
        f"it loses {min(signed):.2f} to {max(signed):.2f} at the best rate of fine-tuning",
        by_strength(),
        f"{far:.2f} over AdamW's best at the least (H4, which loses {near_gated:.2f} at the best rate)",
        f"{over(GPT, DEFAULT, K6, 8).mean:.2f} for the scaled gain",
        f"half-lives of 12 % and 25 % lose {min(longer):.2f} to {max(longer):.2f} at AdamW's",
        f"loses {best(GPT, 'gated:3,1,0.1')[2] - least:.2f} at 7M",
        f"lower than the default by {-min(signal):.3f} at the most, and higher by up to {max(signal):.3f}",
        f"gives {loss(GPT, 'PACE:scaled,15,control:0.2', K6, 2e-3, 11):.3f} at 2e-3 where that gives "
        f"{loss(GPT, DEFAULT, K6, 2e-3, 11):.3f} (seed 11",
        f"at 8e-3 is {long_warm:.2f} instead of {short:.2f}",
        f"at {min(ends.values()):.2f} to {max(ends.values()):.2f} where AdamW ends at {free:.2f}",
    ]


def choose_page():
    short, long_warm = warmed()
    large = [loss(WIDE, m, K5, 4e-3, 11) for m in (PAPER, DEFAULT, "adamw")]
    strengths = [best(GPT, f"paper:{c:g}")[2] for c in (1e-3, 3e-3, 1e-2, 3e-2)]
    every = losses_of(study()["7m-lean"], Pick("PACE:paper,every:10", "average"))[2e-3]
    each = losses_of(study()["7m-storages"], Pick("PACE:paper,float32,kappa:0.5", "average"))[2e-3]
    pull = [over(CHAT, PAPER, K8, times) for times in (1, 2, 4)]
    wsd = f"{over(GPT, 'adamw+wsd', 'live'):+}"
    return [
        f"went from {short:.2f} to {long_warm:.2f} by a warm-up of 400 steps",
        f"lost {best(GPT, 'cosine')[2] - best(GPT, 'adamw')[2]:.2f} in pretraining",
        f"it ended at {wsd} there, live, and at {over(CHAT, 'adamw+wsd', K8):+} in fine-tuning",
        f"(κ = 1) gave {over(CHAT, DEFAULT, ALL, 2).mean:.3f} at twice the best rate, and "
        f"{over(CHAT, DEFAULT, ALL, 4).mean:.3f} at four times it where κ = 0.8 gave "
        f"{over(CHAT, DEFAULT, K8, 4).mean:.3f}",
        f"control averages of power 0.2, 0.35 and 0.5 gave {by_control()}.",
        by_strength(),
        "it gave {:.3f}, the default with an average of the same length {:.3f}, AdamW {:.3f}".format(*large),
        f"gave {pull[0].mean:+.3f} at the best rate, {pull[1]:+} at twice and {pull[2]:+} at four times it",
        f"it costs {over(GPT, PAPER, K5)} at the best rate",
        "was {:.3f}, {:.3f}, {:.3f} and {:.3f} (one seed)".format(*strengths),
        f"gave {estimate([*every.values()])} in place of {estimate([*each.values()])}",
        f"AdamW with WSD ended at {wsd}, the default at {over(GPT, DEFAULT, K7):+}",
    ]


def index_page():
    return [at_twice("it loses {} nats where they lose {}; in fine-tuning {} where they lose {}.")]


def readme():
    return [
        f"({over(GPT, DEFAULT, K7):+} nats in pretraining, {over(CHAT, DEFAULT, K7):+} in fine-tuning)",
        at_twice("loses {} in pretraining where they lose {}, and {} in fine-tuning where they lose {}."),
    ]


STUDY = Numbers(
    measured={
        "README.md": readme,
        "docs/defaults.md": defaults_page,
        "docs/choose.md": choose_page,
        "docs/index.md": index_page,
    },
    fixed={
        "docs/defaults.md": [
            "one average of power 0.5",
            "κ = 0.7 is returned",
            "in fine-tuning 0.8 is as good",
            "powers 0.5 to 0.8 and 1",
            "half-lives of 3 to 25 %",
            "κ = 0.5 to 0.8",
            "weight decay 0.1",
            "β₂ 0.95",
            "κ = 0.6",
            "0.5 where it is not said",
            "rms/√v̂ − 0.5",
            "an average of power 0.35",
            "from one of power 0.5",
            "κ = 0.8",
            "powers of 0.8",
            "where 0.8 is best",
            "steered to 0.12",
            "0.3M",
            "averages than κ = 0.7",
            "0.9 and 1",
            "half-lives of 12 % and 25 % of the run",
            "at most 3 % of a tensor",
            "1.2e-2",
        ],
        "docs/choose.md": ["| 0.2 | 0.7 |", "| 0.5 |", "at 0.2.", "κ = 0.5"],
        "docs/index.md": ["Python 3.11", "torch 2.10"],
    },
)
