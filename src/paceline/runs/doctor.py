"""Which weights a folder holds, and whether all of it is as it was written; and what this machine can do."""

import json
import platform
from pathlib import Path
from typing import Any

import torch

from paceline.lm import checkpoint
from paceline.lm.files import plain_file, sha256_of
from paceline.optim.fused import missing
from paceline.runs.config import ConfigError, make


def examine_machine() -> list[str]:
    """Return lines about the machine: versions, devices, and how PACE steps on each."""
    lines = [
        f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    ]
    kinds = {"cpu": platform.processor() or platform.machine()}
    if torch.cuda.is_available():
        kinds["cuda"] = torch.cuda.get_device_name()
    for kind, name in kinds.items():
        lacking = missing(kind)
        path = "foreach operations" if lacking else "one pass over memory (fused)"
        lines.append(f"{kind} ({name}): PACE steps by {path}")
        if lacking is not None:
            lines.append(f"  fused=True {lacking}")
    return lines


def examine(folder: Path) -> tuple[list[str], bool]:
    """Return lines about a run, a checkpoint or an exported model, and whether it is whole."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    if any((folder / name).exists() for name in ("manifest.json", "state.json")):
        return _checkpoint(folder)
    if (folder / "checkpoints").is_dir():
        return _run(folder)
    if (folder / "paceline.json").exists():
        return _exported(folder)
    if any(folder.glob("*.safetensors")):
        text = "weights of another origin; nothing says whether they are live or an average"
        return [f"{folder}: {text}"], True
    raise ConfigError(f"{folder} holds no run, checkpoint or model that paceline knows")


def _run(folder: Path) -> tuple[list[str], bool]:
    found = [_checkpoint(path) for _, path in checkpoint.all_of(folder / "checkpoints")]
    lines = [line for said, _ in found for line in said] or ["  no checkpoint yet"]
    return [f"{folder}: a run", *lines], all(is_whole for _, is_whole in found)


def _checkpoint(folder: Path) -> tuple[list[str], bool]:
    try:
        manifest = checkpoint.check(folder)
        facts = checkpoint.load_facts(folder)
        described = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        size = sum(file["bytes"] for file in manifest["files"].values())
        lines = [
            f"{folder.name}: whole; step {facts['progress']['step']} of a {facts['config']['task']} run of "
            f"{facts['config']['model']} with {make(facts['config']).name}; {size:,} bytes",
            *_parts(described, manifest["files"]),
            f"  returned by this run: {facts['returned']}",
        ]
        if facts["best"]:
            best = facts["best"]
            lines.append(f"  best held-out loss so far: {best['loss']:.4f} at step {best['step']}")
        return lines, True
    except (ValueError, KeyError, TypeError, OSError) as error:
        return [f"{folder.name}: NOT whole: {error}"], False


def _parts(described: dict[str, Any], files: dict[str, Any]) -> list[str]:
    live = f"the live weights ({len(described['live'])} tensors)"
    kinds = sorted(
        {key for entry in described["optimizer"].values() if isinstance(entry, dict) for key in entry}
    )
    averages = [key for key in kinds if "average" in key or "returned" in key or key == "z"]
    others = ", ".join(key for key in kinds if key not in averages) or "nothing"
    named = f"averages as NAME.{', NAME.'.join(averages)}" if averages else "no average"
    if "live.safetensors" in files:
        return [f"  live.safetensors: {live}", f"  optimizer.safetensors: {named}; also {others}"]
    count = len(files) - 1  # state.json
    return [f"  in {count} shard(s): live.NAME, {live}", f"  optimizer.NAME: {named}; also {others}"]


def _exported(folder: Path) -> tuple[list[str], bool]:
    try:
        facts = json.loads((folder / "paceline.json").read_text(encoding="utf-8"))
        for name, sha256 in facts["files"].items():
            if sha256_of(plain_file(folder, name)) != sha256:
                raise ValueError(f"the content of {name} is not what was written")
        text = f"a model exported by paceline: the {facts['weights']} weights of step {facts['step']}"
        return [f"{folder}: {text}"], True
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{folder}: a model exported by paceline, NOT whole: {error!r}"], False
