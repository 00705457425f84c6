"""Checks of a folder: its content, and whether files are as they were written."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.lm import checkpoint
from paceline.lm.chat_samples import open_chat
from paceline.lm.files import Damaged, plain_file, read_json, verify
from paceline.lm.manifest import silent
from paceline.lm.shards import open_tokens
from paceline.runs import records
from paceline.runs.config import ConfigError, make
from paceline.runs.data import open_prepared

Findings = Iterator[str | Damaged]


def examine(folder: Path) -> tuple[list[str], bool]:
    """Return lines about what a folder holds, each damaged file in one of them, and whether it is whole."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    found = list(_holds(folder))
    lines = [f"NOT whole: {item}" if isinstance(item, Damaged) else item for item in found]
    return list(dict.fromkeys(lines)), not any(isinstance(item, Damaged) for item in found)


def _holds(folder: Path) -> Findings:
    for mark, kind in _KINDS.items():
        if any(folder.glob(mark)):
            yield from kind(folder)
            return
    raise ConfigError(f"{folder} holds nothing that paceline knows: no run, checkpoint, model, data or study")


def _damage(place: Path, check: Callable[[], object]) -> Iterator[Damaged]:
    """Yield what a check finds wrong in that place, if anything."""
    try:
        check()
    except Damaged as error:
        yield error
    except FileNotFoundError as error:
        yield Damaged(f"{error.filename or place} is missing")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        yield Damaged(f"{place}: {error!r}")


def _files(folder: Path, listed: Mapping[str, Any]) -> Iterator[Damaged]:
    """Yield each file that is not what `describe` said of it."""
    for name, known in listed.items():
        yield from _damage(folder / name, partial(verify, folder, {name: known}))


# --- Studies, runs and their checkpoints --------------------------------------------------------------


def _study(folder: Path) -> Findings:
    runs = [path for path in sorted(folder.glob("runs/*")) if path.is_dir()]
    yield f"{folder}: {len(runs)} runs"
    if (plan := folder / "plan.json").exists():
        yield from _damage(plan, lambda: read_json(plan))
    if (results := folder / "results.jsonl").exists():
        yield from _damage(results, lambda: list(records.read(results)))
    for run in runs:
        yield from _run(run)


def _run(folder: Path) -> Findings:
    yield f"{folder}: a run"
    path, tokenizer = folder / "records.jsonl", dict[str, Any]()
    yield from _damage(path, lambda: [tokenizer.update(r.get("tokenizer", {})) for r in records.read(path)])
    yield from _damage(folder, lambda: records.times_of(folder))
    checkpoints = checkpoint.all_of(folder / "checkpoints")
    for _, place in checkpoints:
        yield from _checkpoint(place)
    if not checkpoints:
        yield "  no checkpoint"
        yield from _files(folder / "tokenizer", tokenizer)


def _checkpoint(folder: Path) -> Findings:
    def files() -> Any:
        return read_json(plain_file(folder, "manifest.json"))["files"]

    if damaged := [*_damage(folder / "manifest.json", files)] or [*_files(folder, files())]:
        yield from damaged
        return
    said: list[str] = []
    yield from _damage(folder, lambda: said.extend([*_described(folder)]))
    yield from said
    if said:
        yield from _files(folder.parents[1] / "tokenizer", checkpoint.load_facts(folder).get("tokenizer", {}))


def _described(folder: Path) -> Iterator[str]:
    """Yield lines about a checkpoint."""
    manifest, facts = checkpoint.check(folder), checkpoint.load_facts(folder)
    size = sum(file["bytes"] for file in manifest["files"].values())
    yield (
        f"{folder.name}: whole; step {facts['progress']['step']} of a {facts['config']['task']} run of "
        f"{facts['config']['model']} with {make(facts['config']).name}; {size:,} bytes"
    )
    yield from _parts(read_json(folder / "state.json"))
    yield f"  returned by this run: {facts['returned']}"
    if (path := folder.parents[1] / "records.jsonl").exists() and records.whole_lines(path) < facts[
        "records"
    ]:
        raise Damaged(f"{path} has lost its end: {facts['records']} bytes were written")


def _parts(described: dict[str, Any]) -> list[str]:
    live = f"the live weights ({len(described['live'])} tensors)"
    kinds = sorted(
        {key for entry in described["optimizer"].values() if isinstance(entry, dict) for key in entry}
    )
    averages = [key for key in kinds if "average" in key or "returned" in key or key == "z"]
    others = ", ".join(key for key in kinds if key not in averages) or "nothing"
    named = f"averages as NAME.{', NAME.'.join(averages)}" if averages else "no average"
    return [f"  live.safetensors: {live}", f"  optimizer.safetensors: {named}; also {others}"]


# --- Data and models ----------------------------------------------------------------------------------


def _prepared(folder: Path) -> Findings:
    is_chat = (folder / "samples.bin").exists()
    yield f"{folder}: prepared {'conversations' if is_chat else 'tokens'}"
    yield from _damage(folder, lambda: (open_chat if is_chat else open_tokens)(folder, verify=True))


def _data(folder: Path) -> Findings:
    for part in ("train", "held-out"):
        yield from _prepared(folder / part)
    yield from _damage(folder, lambda: open_prepared(folder, silent))


def _cache(folder: Path) -> Findings:
    yield f"{folder}: a cache of prepared data"
    for manifest in sorted(folder.glob("*/*/manifest.json")):
        if manifest.parents[1].name == "tokenizers":
            yield from _files(manifest.parent, read_json(manifest)["files"])
        else:
            yield from _prepared(manifest.parent)


def _exported(folder: Path) -> Findings:
    def about() -> tuple[str, Any]:
        facts = read_json(folder / "paceline.json")
        return f"the {facts['weights']} weights of step {facts['step']}", dict(facts["files"])

    if damaged := [*_damage(folder / "paceline.json", about)]:
        yield from damaged
        return
    weights, files = about()
    yield f"{folder}: a model exported by paceline: {weights}"
    yield from _files(folder, files)


_KINDS: dict[str, Callable[[Path], Findings]] = {
    "plan.json": _study,
    "runs/*/*.jsonl": _study,
    "checkpoints": _run,
    "records.jsonl": _run,
    "tokens-*.bin": _prepared,
    "samples.bin": _prepared,
    "*/manifest.json": _data,
    "*/*/manifest.json": _cache,
    "manifest.json": _checkpoint,
    "state.json": _checkpoint,
    "paceline.json": _exported,
}
"""Kinds of folders, by a file that only they have. The first that is there tells."""
