"""The model that a run returns: evaluated, and exported for others to load."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.lm import checkpoint
from paceline.lm.evaluate import held_out_loss
from paceline.lm.files import sha256_of, write_atomically
from paceline.lm.loop import View
from paceline.runs.build import model_of
from paceline.runs.config import ConfigError, make, nearest
from paceline.runs.methods import make_optimizer, make_views
from paceline.runs.run import checkpoint_of, refuse_other_data, restored


def _view(known: tuple[Mapping[str, View], str], weights: str | None) -> tuple[str, View]:
    views, returned = known
    name = weights or returned
    if name not in views:
        raise ConfigError(
            f"this run keeps no {name!r}{nearest(name, list(views))}; it has: {', '.join(views)}"
        )
    return name, views[name]


def evaluate(run: Path, step: int | None, weights: str | None) -> dict[str, float]:
    """Held-out losses of a checkpoint, by held-out set and weights."""
    job, facts = restored(run, step)
    refuse_other_data(facts, job)
    name, view = _view((job.trainee.views, job.returned), weights)
    with view():
        return {
            f"{label}, {name}": held_out_loss(
                job.trainee.model,
                samples,
                device=job.trainee.device,
                batch_size=job.plan.micro_batch_size,
                precision=job.plan.precision,
            )
            for label, samples in job.trainee.held_out.items()
        }


def export(run: Path, step: int | None, weights: str | None, folder: Path) -> dict[str, Any]:
    """Write the weights of a checkpoint as a model that plain transformers loads, and say which they are."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another name")
    place = checkpoint_of(run, step)
    saved = checkpoint.load(place)
    facts = saved["facts"]
    described = make(facts["config"])
    model, write = model_of(described, place.parents[1] / "tokenizer")
    optimizer = make_optimizer(described, model)
    checkpoint.restore(model, optimizer, saved)
    name, view = _view(make_views(described, optimizer, model), weights)
    with view():
        write(folder)
    about = {
        "weights": name,
        "step": facts["progress"]["step"],
        "config": facts["config"],
        "files": {path.name: sha256_of(path) for path in sorted(folder.iterdir()) if path.is_file()},
    }
    write_atomically(folder / "paceline.json", (json.dumps(about, indent=1) + "\n").encode())
    return about
