"""Records of runs that never were, to ask the report about."""

import json
from dataclasses import asdict

from paceline.runs.config import Run, as_mapping
from paceline.runs.naming import methods_of
from paceline.runs.steering import control_in


def write_run(
    folder, *, optimizer="adamw", schedule="constant", averages=(), lr=1e-3, seed=1, steps=100, **more
):
    """A run with these `losses` at its end, by weights, or one that diverged or goes on (`outcome`)."""
    losses, outcome = more.pop("losses"), more.pop("outcome", "finished")
    more_lines = more.pop("evaluations", 3)  # before it diverged
    batches, fingerprint = more.pop("batches", f"batches-{seed}"), more.pop("fingerprint", "data")
    run = Run(
        optimizer=optimizer, schedule=schedule, averages=averages, lr=lr, seed=seed, steps=steps, **more
    )
    control = control_in(optimizer)
    name = f"{optimizer}-{schedule}-{lr:g}-{seed}".replace(":", "-")
    path = folder / name
    path.mkdir(parents=True)
    about = {"fingerprint": fingerprint, "held_out_fingerprint": "held-out", "samples": 1000}
    lines = [
        {"kind": "run", "config": as_mapping(run), "environment": {"torch": "2"}, "parameters": 1000}
        | {"methods": methods_of(run, losses), "control": None if control is None else asdict(control)}
        | {"steps": steps, "data": about},
        {"kind": "step", "step": 1, "loss": 7.0},
    ]
    for step in range(steps // 10, steps + 1, steps // 10):
        now = {view: None if loss is None else loss + 1 - step / steps for view, loss in losses.items()}
        lines.append({"kind": "evaluation", "step": step, "losses": {"held-out": now}, "batches": batches})
    if optimizer.startswith("pace"):
        lines.append({"kind": "telemetry", "step": steps, "saturated": 0.25, "gap_rms": 0.001})
    times = [
        {"kind": "begin", "time": 100.0, "step": 0},
        {"kind": "speed", "time": 110.0, "step": steps, "tokens_per_second": 1000.0},
    ]
    if outcome == "finished":
        sizes = dict.fromkeys((n for n in losses if n not in ("live", "average")), 4000)
        end = {"outcome": "finished", "optimizer_bytes": 8000, "average_bytes": sizes}
        times.append({"kind": "end", "time": 111.0, "step": steps, **end})
    elif outcome == "diverged":
        del lines[2 + more_lines :]
        times.append(
            {"kind": "end", "time": 105.0, "step": 33, "outcome": "diverged", "text": "loss nan at step 33"}
        )
    for name, content in (("records", lines), ("timing", times)):
        (path / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in content), encoding="utf-8"
        )
    return path


def write_comparison(folder, table, seeds=(1, 2, 3), noise=0.001):
    """AdamW with an average, and PACE: `table` gives their returned losses by learning rate.

    Seeds shift all methods alike, and each by a little of its own.
    """
    paths = []
    for number, seed in enumerate(seeds):
        for lr, (long, pace) in table.items():
            shift = 0.05 * number  # common to all methods: paired differences do not see it
            own = noise * (number - (len(seeds) - 1) / 2)
            adamw = None if long is None else {"live": long + 0.1 + shift, "long_ema": long + shift}
            pulled = None if pace is None else {"live": pace + 0.2 + shift, "average": pace + shift + own}
            for losses, optimizer, averages in (
                (adamw, "adamw", ("long_ema=power:0.7",)),
                (pulled, "pace", ()),
            ):
                names = ("live", "long_ema") if optimizer == "adamw" else ("live", "average")
                paths.append(
                    write_run(
                        folder,
                        optimizer=optimizer,
                        averages=averages,
                        lr=lr,
                        seed=seed,
                        losses=losses or dict.fromkeys(names, 6.0),
                        outcome="diverged" if losses is None else "finished",
                    )
                )
    return paths
