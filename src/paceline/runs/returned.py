"""The model that a run returns: evaluated, and exported for others to load."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from paceline.lm import checkpoint
from paceline.lm.evaluate import held_out_loss
from paceline.lm.files import TEMPORARY, describe, locked, new_folder, verify, write_atomically
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


def _open(folder: Path, step: int | None, weights: str | None, device: str | None = None) -> _Opened:
    place = build.checkpoint_of(folder, step)
    saved = checkpoint.load(place)
    facts, tokenizer = saved["facts"], place.parents[1] / "tokenizer"
    verify(tokenizer, facts["tokenizer"])
    run = make(facts["config"])
    model, write = build.model_of(run, tokenizer)
    model.to(build.device_of(device or run.device))
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
    opened = _open(folder, step, weights)
    device = build.device_of(opened.run.device)
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
    opened = _open(run, step, weights, "cpu")
    # Next to its place, under a lock: what a killed export has left is removed by the next one.
    room = folder.with_name(f"{TEMPORARY}{folder.name}")
    with locked(room):
        try:
            with new_folder(room / "model") as made:
                with opened.view():
                    opened.write(made)
                about = {
                    "weights": opened.name,
                    "step": opened.facts["progress"]["step"],
                    "config": opened.facts["config"],
                    "files": describe(path for path in sorted(made.iterdir()) if path.is_file()),
                }
                write_atomically(made / "paceline.json", (json.dumps(about, indent=1) + "\n").encode())
            (room / "model").rename(folder)
        except Exception as error:  # safetensors and tokenizers have errors of their own for a full disk
            raise OSError(f"cannot write {folder}: {error}") from error
        finally:
            shutil.rmtree(room)
    return about
