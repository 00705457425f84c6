"""Checks of what may change between the sessions of a run, and what may not."""

from pathlib import Path
from typing import Any

from paceline.runs import records
from paceline.runs.config import MAY_CHANGE, ConfigError, Run, as_mapping


def refuse_changes(before: dict[str, Any], run: Run) -> None:
    """Raise ConfigError if a resumed run would not be the one that was begun."""
    now = as_mapping(run)
    changed = [
        f"{name}: {before.get(name)!r} → {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if name not in MAY_CHANGE and before.get(name) != now.get(name)
    ]
    if changed:
        raise ConfigError(
            f"this folder holds a run with other settings ({'; '.join(changed)}); "
            "give those again to resume, choose another folder, or begin a new run with --fork"
        )


def refuse_other_precision(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ConfigError if a resumed run would compute in another precision, as on another device."""
    was, other = before["precision"], now["precision"]
    if was != other:
        raise ConfigError(
            f"this run was begun in {was}, and precision auto is {other} on this device; "
            "resume it on a device like the first one, or begin a new run with --fork"
        )


def refuse_other_data(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ConfigError if the data are not those that a run was begun with."""
    for name in ("fingerprint", "held_out_fingerprint"):
        was, other = before["data"][name], now["data"][name]
        if was != other:
            raise ConfigError(
                f"the data have changed since this run was begun ({name}: {was[:12]}… → {other[:12]}…); "
                "give it those that it had, or begin another run"
            )


def refuse_lost_checkpoints(folder: Path) -> None:
    """Raise ConfigError where a run was that has lost its checkpoints: it would be overwritten."""
    path, kind = folder / "timing.jsonl", "save"
    if not path.exists():  # a copy of the records alone
        path, kind = folder / "records.jsonl", "evaluation"
    if path.exists() and any(line["kind"] == kind for line in records.read(path)):
        raise ConfigError(
            f"{folder} holds the records of a run without its checkpoints; they would be overwritten: "
            "choose another folder, or move it away"
        )
