"""Numbers in sentences of pages about time, memory, theory and the commands, and what README says of them."""

import math
from dataclasses import replace
from functools import cache
from statistics import fmean, median, stdev

from said import RECORDS, Numbers
from trajectories import OFFERED

from paceline.experiments.bench.tables import (
    LOW_BIT,
    STEPS,
    STORAGES,
    TRAINING,
    WHOLE,
    by_optimizer,
    lost,
    read,
    runs_of,
    size,
)
from paceline.experiments.cost import checks, communication, estimate, optimizer, speed
from paceline.experiments.cost.estimate import cost
from paceline.experiments.cost.hardware import COPYING, HARDWARE, PRODUCTS
from paceline.experiments.cost.memory import kept
from paceline.experiments.cost.price import of_run, together
from paceline.experiments.cost.shape import HUB, SHAPES, named
from paceline.experiments.cost.speed import MASKED, PASSES_EAGER
from paceline.experiments.cost.tables import BUDGET, PACE, usual
from paceline.experiments.cost.training import Training
from paceline.experiments.paper.labels import EXPERIMENTS, cells
from paceline.experiments.paper.scales import SCALES
from paceline.experiments.report import verdict
from paceline.experiments.report.results import read_outcomes
from paceline.experiments.theory import controllers, quadratics
from paceline.optim import fused

H200 = HARDWARE["h200"]


@cache
def steps():
    """Rows of `paceline bench` on the GPU."""
    return by_optimizer(read(RECORDS, STEPS["H200"]))


def ratio(name):
    """Time of a step of GPT-2 beside torch's fused AdamW."""
    return steps()["gpt2", name]["ratio"]


@cache
def shares():
    rows = read(RECORDS, "2026-11-18-share-h200")["rows"]
    return {row["what"]: 100 * row["optimizer_share"] for row in rows if "optimizer_share" in row}


@cache
def throughput():
    rows = read(RECORDS, TRAINING)["rows"]
    return {(row["what"], row["loop"]): row["tokens_per_second"] for row in rows}


# --- docs/storage.md and docs/around.md -----------------------------------------------------------------


def storage_page():
    stored = runs_of(RECORDS / "2026-11-18-defaults-7m-storages.jsonl")
    lean = runs_of(RECORDS / "2026-11-18-defaults-7m-lean.jsonl")
    most = max(
        lost(stored[method.format(storage), 0.002], shadow)
        for method, shadow in WHOLE.values()
        for storage in STORAGES[1:]
    )
    for method, _ in WHOLE.values():
        of = {
            storage: [each["average"] for each in stored[method.format(storage), 0.002]]
            for storage in STORAGES
        }
        for storage in STORAGES[1:]:  # "no mean is further from float32's than the seeds spread"
            near = max(stdev(of[storage]), stdev(of["float32"]))
            assert abs(fmean(of[storage]) - fmean(of["float32"])) < near
    no_momentum = {lr: fmean(x["average"] for x in lean["PACE:paper,no_momentum", lr]) for lr in (5e-4, 2e-3)}
    with_momentum = fmean(x["average"] for x in stored["PACE:paper,float32,kappa:0.5", 0.002])
    in_one_pass = [
        row["bandwidth"]
        for (model, name), row in steps().items()
        if model != "small" and name.startswith("PACE, fused") and not name.endswith(("host", "graph"))
    ]
    assert all(
        f"{1 - steps()[model, 'AdamW, fused']['bandwidth']:.1f}" == "0.2" for model in ("gpt2", "llama-1.7b")
    )
    share = shares()
    kept, *_, smallest = read(RECORDS, "2026-11-18-kept-h200")["rows"]
    assert smallest["both, kept, more by"][0] > 2 * smallest["both, kept, more by"][1] > 0  # "lose more"
    small = {row["optimizer"]: row["wall"] for row in read(RECORDS, STEPS["small"])["rows"]}
    recorded = [small[f"PACE, fused{gain}, in a CUDA graph"] for gain in ("", ", paper")]
    recorded.append(small["AdamW, fused, in a CUDA graph"])
    return [
        f"It takes {max(recorded):.2f} ms at most, as AdamW's does, where an eager step of "
        f"AdamW takes {small['AdamW, fused']:.1f}.",
        f"storing itself loses {most:.4f} at most",
        f"on a GPU {ratio('PACE, fused, paper, no momentum'):.2f} of the time of its fused step",
        f"the loss is {no_momentum[5e-4]:.2f} at a quarter of the best rate",
        f"and {no_momentum[2e-3]:.2f} at all of it, where it is {with_momentum:.2f} with momentum",
        f"over the bus takes {ratio('PACE, fused, paper, average on the host'):.1f} times AdamW's time",
        f"our kernel {100 * (1 - min(in_one_pass)):.0f} % at most (but for the default in a CUDA graph), "
        "without",
        f"With {fused.LARGE / 1e6:.0f}M weights or more",
        f"That takes {-100 * kept['step, kept, more by'][0] / kept['step']:.0f} % off a step",
        f"the optimizer is {share['AdamW, fused']:.1f} % with torch's fused AdamW, "
        f"{share['PACE, fused, paper']:.1f} % with",
        f"and {share['PACE, fused']:.1f} % with the default",
    ]


def around_page():
    cpu = read(RECORDS, LOW_BIT["CPU"])
    results = {row["optimizer"]: row for row in cpu["regression"]}
    eight = [row for row in results.values() if "twin" in row]
    off = [100 * row["distance"] for row in eight]

    def apart(what):
        pairs = [(row[what], results[row["twin"]][what]) for row in eight if row[what] is not None]
        return 100 * max(abs(one / other - 1) for one, other in pairs)

    state = by_optimizer(cpu)["gpt-18m", "torchao"]["state"]
    return [
        f"the two moments in {state:.2f} bytes a weight",
        f"{min(off):.1f} to {max(off):.1f} % of the way that they went",
        f"Losses differ by at most {apart('loss'):.2f} %, those of the averages by at most "
        f"{apart('loss_of_average'):.2f} %.",
        f"it keeps {size(steps()['gpt2', 'PACE, fused, int8']['state'])} bytes a weight, two averages",
    ]


# --- Commands and trainers ------------------------------------------------------------------------------


def training_page():
    kills = read(RECORDS, "2026-11-18-kills")
    packing = {row["what"]: row["ms"] for row in read(RECORDS, "2026-11-17-packed-h200")["rows"]}
    assert not kills["differences"] and not kills["errors"]
    return [
        f"{kills['kills']:,} kills of {kills['runs']} runs",
        f"{kills['inside_save']} of them inside a save, made no difference",
        f"16 × 1,024 tokens of packed conversations, take {packing['packed, compiled']:.1f} ms in place of "
        f"{packing['packed']:.1f} (",
    ]


@cache
def comparison():
    return read_outcomes([RECORDS / "2026-11-15-compare-enwiki-h200"])


def tokens():
    """Of a run of the comparison, millions."""
    config = comparison().results[0].config
    return config["steps"] * config["batch_size"] * config["length"] / 1e6


def compare_page():
    two, three = verdict._STUDENT[:2]
    others = set(comparison().methods) - {"AdamW WSD"}
    for seed, loss in comparison().losses("AdamW WSD", 0.002).items():  # "ended lowest on both seeds"
        assert all(loss < comparison().losses(name, 0.002)[seed] for name in others)
    return [
        f"{tokens():.1f}M tokens of English Wikipedia a run",
        f"{len(comparison().results)} runs",
        verdict.judge(comparison(), {}),
        f"with two seeds that is {two:.1f} standard errors, with three {three:.1f}",
    ]


def huggingface_page():
    found = read(RECORDS, "2026-11-16-huggingface-h200")["milliseconds"]
    ours, plain, adamw = (
        median(found[name]) for name in ("PACE, Trainer", "PACE, plain loop", "AdamW, Trainer")
    )
    return [f"{ours:.2f} ms against {plain:.2f} for GPT-2 124M", f"AdamW takes {adamw:.2f} then"]


def sweep_page():
    found = read(RECORDS, "2026-11-16-sweep-h200")
    one, four = (found["rounds"][0][name]["tokens_per_second"] for name in ("one at a time", "four at once"))
    return [f"gave {four / one:.1f} times the tokens a second"]


def paper_page():
    def hours(scale):
        each_once = {cell.name: cell for label in EXPERIMENTS for cell in cells(label, scale)}
        prices = (of_run(c.run, H200, scale.models[c.model].parameters) for c in each_once.values())
        return together(prices).seconds / 3600

    gpu, paper = (hours(SCALES[name]) for name in ("gpu", "paper"))
    return [f"the scale is {gpu:.0f} hours on an H200 and the scale {paper:,.0f}, runs one after the other"]


# --- docs/theory.md, docs/algorithm.md, docs/optax.md ---------------------------------------------------


def theory_page():
    """What `paceline theory figures` prints."""
    ratios = {row[0]: float(row[2]) for row in quadratics.right_ratios().rows[1:]}
    best = [f"{ratios[share]:.2g}".replace("-", "−") for share in ("0.25", "0.5", "2", "4", "8", "16")]
    basins = {row[0]: row for row in quadratics.basin().rows}
    kinds = [basins[name] for name in ("EMA", "PACE, R = 1", "PACE, R = 3", "push, R = −0.5")]
    equal = dict(quadratics.equal_speed().rows[1:])
    rows = {row[0]: [float(cell) for cell in row[1:] if cell] for row in controllers.controllers().rows[1:]}
    mean, least = rows["practical: pull toward the mean"], rows["least J: posterior mean"]
    return [
        f"is {', '.join(best[:-1])} and {best[-1]} (",
        "the least expected loss is {}, {}, {} and {}".format(*(row[1] for row in kinds)),
        "at learning rates of {}, {}, {} and {}".format(*(row[2] for row in kinds)),
        f"it raises it: {equal['0']}, {equal['0.01']}, {equal['1']} at c = 0, .01, 1 and radius .99",
        f"plain SGD has {equal['SGD, live']}",
        f"the squared error of {rows['none'][0]:.4f} by {mean[1]:.4f} ± {mean[2]:.4f}; the best control",
        f"it by {-least[1]:.4f} ± {least[2]:.4f}",
        f"and {rows['least without knowing the optimum'][0]:.4f} is the least",
    ]


def golden():
    return [f"{len(OFFERED)} golden trajectories"]


# --- docs/cost.md ---------------------------------------------------------------------------------------


def packed_beside(measured, compiled):
    """Milliseconds of fine-tuning by the arithmetic, and by how much that is less, in percent."""
    shape = replace(HUB["HuggingFaceTB/SmolLM2-135M"], length=1024)
    about = Training(
        shape=shape, hardware=H200, optimizer=optimizer.PRESETS["adamw"], micro_batch=16, packed=True,
        compile=compiled,
    )  # fmt: skip
    ms = 1e3 * speed.micro_batch_seconds(about)
    return ms, 100 * (1 - ms / measured)


def cost_page():
    adamw = optimizer.PRESETS["adamw"]
    walls = [steps()["gpt2", name]["wall"] for name in ("PACE, fused, paper", "PACE, fused")]
    wide = usual("70b", 16384, PACE)
    fullest = kept(wide).weights * 16384 / (4 * SHAPES["70b"].parameters)
    reached = [
        100 * cost(each).mfu
        for each in (
            Training(shape=named("gpt:7m"), hardware=H200, optimizer=adamw, micro_batch=512),
            Training(shape=named("gpt2"), hardware=H200, optimizer=adamw, micro_batch=16),
            usual("70b", 1024, adamw),
        )
    ]
    host = [1e3 * speed.HOST_OF_LAYER[compiled] for compiled in (True, False)]
    shares_of_copying = [optimizer.FUSED_PACE, optimizer.FUSED_ADAMW, optimizer.FOREACH]
    took, small = checks.foretold(RECORDS, "step_seconds"), checks.of_small(RECORDS)
    ours = checks.foretold(RECORDS, "optimizer_seconds")
    long, short = max(took, key=took.get), min(ours, key=ours.get)
    assert long[0] == "gpt:25m" and short == ("gpt:25m", "PACE, int8")
    rest = [abs(e) for at, e in took.items() if at[0] != "gpt:25m"]
    rest += [abs(e) for at, e in ours.items() if at != short]
    packed = read(RECORDS, "2026-11-17-packed-h200")
    packing = {row["what"]: row["ms"] for row in packed["rows"]}
    eager, compiled = (
        packed_beside(packing[what], what == "packed, compiled") for what in ("packed", "packed, compiled")
    )
    return [
        f"GPU-hours (of {cost(usual('70b', 1024, adamw)).gpu_hours(BUDGET) / 1e6:.1f} million)",
        f"(under {math.ceil(max(walls))} ms for the 148 tensors of GPT-2)",
        f"does not fit into {100 * estimate.ROOM:.0f} % of an H200's {H200.memory / 1e9:.0f} GB",
        f"({100 * (1 - estimate.ROOM):.0f} % of memory are left for them)",
        f"the fullest GPU has {fullest:.1f} times the mean",
        f"takes its operations at {100 * PRODUCTS:.0f} % of the peak",
        f"The {100 * PRODUCTS:.0f} % were fitted",
        f"not compiled: {PASSES_EAGER['gpt']:.0f} in a GPT of ours, {PASSES_EAGER['llama']} in a Llama",
        f"Attention with a mask reaches {100 * MASKED:.0f} % of the peak",
        f"1,024 tokens: {packed['attention_ms']:.1f} ms of {packing['packed']:.1f} that forward",
        f"Compiled, forward and backward take {packing['packed, compiled']:.1f} ms.",
        f"they take {eager[0]:.1f} and {compiled[0]:.1f} ms, {eager[1]:.0f} % and {compiled[1]:.0f} % less;",
        f"the {100 * PRODUCTS:.0f} % of GPT-2's step",
        f"the speed of copying, {100 * COPYING:.0f} % of what",
        f"of whole steps {reached[0]:.0f} % for a 7M GPT in batches of 512",
        f"{reached[1]:.0f} % for GPT-2 in batches of 16, {reached[2]:.0f} % at 70B",
        f"at least {host[0]:g} ms for each compiled layer ({host[1]:g} ms if not) and "
        f"{1e3 * speed.HOST_OF_STEP:g} ms a step",
        "PACE's kernel {:.2f}, torch's fused AdamW {:.2f}, an EMA or clipping by foreach {:.2f}.".format(
            *shares_of_copying
        ),
        "shares of copying's speed ({:.2f}, {:.2f}, {:.2f})".format(*shares_of_copying),
        f"runs at {100 * communication.REACHED:.0f} % of NVLink's",
        f"each takes {1e6 * communication.LATENCY:.0f} µs",
        f"Up to {100 * wide.overlap:.0f} % of forward and backward",
        f"the whole step is predicted {100 * took[long]:.0f} % too long, and the optimizer in int8 "
        f"{-100 * ours[short]:.0f} % too short; of the others {100 * max(rest):.0f} % is the worst of either",
        f"predicted {100 * small[1]:.0f} % too quick alone",
        f"{100 * small[6]:.0f} % too quick with six at once",
    ]


# --- README.md ------------------------------------------------------------------------------------------


def readme():
    batch = "GPT-2 124M, 32 x 15 x 1024"
    ours, nanogpt = (
        throughput()[batch, loop] for loop in ("paceline, adamw, bias=True", "nanoGPT, bias=True")
    )
    state = {name: size(steps()["gpt2", name]["state"]) for name in ("PACE, fused", "PACE, fused, paper")}
    of_int8 = [steps()["gpt2", f"{name}, int8"]["state"] for name in state]
    share = shares()
    return [
        f"a 7M GPT on {tokens():.1f}M tokens of Wikipedia",
        verdict.judge(comparison(), {}),
        f"It takes {state['PACE, fused']} bytes of state a weight in float32 (AdamW: 8), "
        f"{state['PACE, fused, paper']} with one average, "
        f"{of_int8[0]:.0f} and {of_int8[1]:.0f} with averages in int8.",
        f"takes {ratio('PACE, fused'):.2f} times torch's fused AdamW, {ratio('PACE, fused, paper'):.2f} with",
        f"and {ratio('AdamW, fused, and an EMA'):.2f} is AdamW with a foreach EMA beside it",
        f"the optimizer is {share['PACE, fused']:.1f} % and {share['PACE, fused, paper']:.1f} % instead of "
        f"{share['AdamW, fused']:.1f} %",
        f"trains GPT-2 124M with AdamW at {round(ours, -3):,} tokens/s, "
        f"{ours / nanogpt:.2f} times nanoGPT's script",
    ]


SPEED = Numbers(
    measured={
        "README.md": readme,
        "docs/storage.md": storage_page,
        "docs/around.md": around_page,
        "docs/training.md": training_page,
        "docs/compare.md": compare_page,
        "docs/huggingface.md": huggingface_page,
        "docs/sweep.md": sweep_page,
        "docs/paper.md": paper_page,
        "docs/theory.md": theory_page,
        "docs/algorithm.md": golden,
        "docs/optax.md": golden,
        "docs/cost.md": cost_page,
    },
    fixed={
        "docs/storage.md": [
            "κ = 0.5",
        ],
        "docs/around.md": ["(15, with 0.2 and 0.7 where nothing is said)", "a plain ratio, 0.3 say"],
        "docs/compare.md": [
            "β = (1 + t)^-0.5 or (1 + t)^-0.7",
            "a 95 % interval of Student's t",
            "(β₁ = 0.9)",
        ],
        "docs/sweep.md": ["0.25: four cells share one"],
        "docs/paper.md": [
            "SmolLM2-135M and -1.7B, Qwen3-1.7B",
            "a 0.3M GPT, 20 steps",
            "50, 75 and 100 % of a budget",
            "c = 0.1, κ = 0.2",
        ],
        "docs/theory.md": ["R = 3 and R = −0.5"],
        "docs/cost.md": [
            # Bounds of test_a_layer_keeps_the_bytes_that_are_predicted and test_the_benchmark_on_a_cpu
            "keeps for backward is right to 1 %",
            "with checkpointing is right to 5 %",
        ],
        "docs/accelerate.md": ["(1.15, on a CPU"],
        "docs/torchtitan.md": [
            "torchtitan 0.3.",
            "torchtitan 0.3.0 and torch 2.13.0",
            "torch 2.13.0",
            "torchtitan 0.2",
        ],
        "docs/timm.md": ["timm 1.0.30"],
        "docs/optax.md": ["In bfloat16, 0.999 is 1"],
        "docs/switch.md": ["A fixed decay of 0.999"],
    },
)
