"""Checks of what may change between the sessions of a run, and what may not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.runs import names, records
from paceline.runs.config import MAY_CHANGE, ConfigError, Run, as_mapping

_BUDGETS = ("steps", "tokens", "epochs")


def _has_end(schedule: str) -> bool:
    return names.schedule_of(schedule).word not in ("constant", "inverse_sqrt")


def horizon_of(facts: Mapping[str, Any], run: Run) -> int | None:
    """Return the horizon of a run that continues a checkpoint: that of its first session.

    A run that is made longer has taken its warm-up already, and was so planned.
    """
    before: dict[str, Any] = facts["config"]
    if run.horizon is not None or _has_end(run.schedule):
        return run.horizon
    is_longer = any(before[name] != getattr(run, name) for name in _BUDGETS)
    horizon: int | None = facts["steps"] if before["horizon"] is None and is_longer else before["horizon"]
    return horizon


def refuse_changes(before: dict[str, Any], run: Run) -> None:
    """Raise ConfigError if a resumed run would not be the one that was begun."""
    now = as_mapping(run)
    # A run without a planned end may be made longer: nothing of what was done depends on it.
    may = MAY_CHANGE | (set() if _has_end(run.schedule) else set(_BUDGETS))
    changed = [
        f"{name}: {before.get(name)!r} → {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if name not in may and before.get(name) != now.get(name)
    ]
    if changed:
        raise ConfigError(
            f"this folder holds a run with other settings ({'; '.join(changed)}); "
            "give those again to resume, choose another folder, or begin a new run with --fork"
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
