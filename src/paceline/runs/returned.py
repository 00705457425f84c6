"""The model that a run returns: evaluated, and exported for others to load."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.lm import checkpoint
from paceline.lm.evaluate import held_out_loss
from paceline.lm.files import sha256_of, write_atomically
from paceline.lm.loop import View
from paceline.runs import build, data
from paceline.runs.changes import refuse_other_data
from paceline.runs.config import ConfigError, Run, make, nearest
from paceline.runs.methods import make_optimizer, make_views


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """A checkpoint, and one set of its weights."""

    run: Run
    facts: dict[str, Any]
    tokenizer: Path
    model: nn.Module
    write: Callable[[Path], object]
    """Write the model to a folder that transformers loads."""
    name: str
    view: View
    """A context in which the model has these weights."""


def _open(folder: Path, step: int | None, weights: str | None, device: torch.device | None = None) -> _Opened:
    place = build.checkpoint_of(folder, step)
    saved = checkpoint.load(place)
    facts, tokenizer = saved["facts"], place.parents[1] / "tokenizer"
    run = make(facts["config"])
    model, write = build.model_of(run, tokenizer)
    model.to(device)
    optimizer = make_optimizer(run, model, facts["steps"])
    checkpoint.restore(model, optimizer, saved)
    views, returned = make_views(run, optimizer, model)
    name = weights or returned
    if name not in views:
        raise ConfigError(f"this run keeps no {name!r}{nearest(name, views)}; it has: {', '.join(views)}")
    return _Opened(
        run=run, facts=facts, tokenizer=tokenizer, model=model, write=write, name=name, view=views[name]
    )


def evaluate(
    folder: Path, step: int | None, weights: str | None, others: tuple[str, ...], tell: data.Tell
) -> tuple[str, float]:
    """Return the loss of a checkpoint on its held-out part, or on other data, and the name of its weights."""
    config = checkpoint.load_facts(build.checkpoint_of(folder, step))["config"]
    device = build.device_of(config["device"])
    opened = _open(folder, step, weights, device)
    run = replace(opened.run, held_out=others, held_out_samples=None) if others else opened.run
    samples = build.held_out_of(run, opened.tokenizer, tell)
    about, name = opened.facts["data"], "held_out_fingerprint"
    if not others:
        refuse_other_data({"data": about}, {"data": {**about, name: samples.fingerprint}})
    with opened.view():
        loss = held_out_loss(
            opened.model,
            samples,
            device=device,
            batch_size=min(run.micro_batch_size or run.batch_size, run.batch_size),
            precision=build.precision_of(run, device),
        )
    return opened.name, loss


def export(run: Path, step: int | None, weights: str | None, folder: Path) -> dict[str, Any]:
    """Write the weights of a checkpoint as a model that plain transformers loads, and say which they are."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another name")
    opened = _open(run, step, weights)
    with opened.view():
        opened.write(folder)
    about = {
        "weights": opened.name,
        "step": opened.facts["progress"]["step"],
        "config": opened.facts["config"],
        "files": {path.name: sha256_of(path) for path in sorted(folder.iterdir()) if path.is_file()},
    }
    write_atomically(folder / "paceline.json", (json.dumps(about, indent=1) + "\n").encode())
    return about
