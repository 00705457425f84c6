"""Checkpoints that are whole or not there, in safetensors and JSON.

A checkpoint is a folder `step-00000100`:

.. code-block:: text

    live.safetensors        the live weights, by name
    optimizer.safetensors   what the optimizer remembers, by parameter: NAME.average, NAME.exp_avg, …
    state.safetensors       random generators and other tensors
    state.json              everything that is not a tensor: groups, schedule, step, losses, config
    manifest.json           sizes and sha256 of the files above; written last

It is made under another name and renamed when it is complete, so a folder of that name is whole; if the
disk damages it later, the manifest tells. No file is a pickle.
"""

import errno
import json
import math
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.lm.evaluate import NotFiniteError
from paceline.lm.files import TEMPORARY, new_folder, plain_file, sha256_of

FORMAT = 1
_PARTS = ("live", "optimizer", "state")
_NAME = re.compile(r"step-(\d{8,})")


class Damaged(ValueError):
    """A checkpoint that is not as it was written."""


# --- The state of a run -----------------------------------------------------------------------------


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once: tied weights under their first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def collect(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The tensors of a run by name, and the random generators; to be saved, or given to `restore`.

    The parameters must hold live weights.
    """
    names = _names(model, optimizer)
    saved = optimizer.state_dict()
    entries = {names[k] if isinstance(k, int) else k: v for k, v in saved["state"].items()}
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {
        "live": {name: tensor.detach() for name, tensor in named_tensors(model).items()},
        "optimizer": entries,
        "state": {"groups": saved["param_groups"], "random": {"cpu": torch.get_rng_state(), "cuda": cuda}},
    }


@torch.no_grad()
def restore(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Put the weights and the optimizer's state back. The generators are left to `restore_random`."""
    own = named_tensors(model)
    _check_same_names(own, saved["live"])
    for name, tensor in own.items():
        tensor.copy_(saved["live"][name])
    numbers = {name: i for i, name in enumerate(_names(model, optimizer))}
    entries = {numbers.get(name, name): entry for name, entry in saved["optimizer"].items()}
    try:
        optimizer.load_state_dict({"state": entries, "param_groups": saved["state"]["groups"]})
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the checkpoint is of another optimizer than this one: {error!r}") from error


def restore_random(saved: Mapping[str, Any]) -> None:
    """Put torch's random generators back as they were."""
    random = saved["state"]["random"]
    torch.set_rng_state(random["cpu"])
    if random["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(random["cuda"][: torch.cuda.device_count()])  # may be another machine


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in the order in which it numbers them."""
    known = {parameter: name for name, parameter in model.named_parameters()}
    return [known[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _check_same_names(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name in sorted(own.keys() | saved.keys()):
        if name not in saved or name not in own:
            where = "the checkpoint" if name not in saved else "this model"
            raise ValueError(f"{where} has no {name!r}: the checkpoint is of another model")
        if own[name].shape != saved[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(saved[name].shape)} in the checkpoint and "
                f"{tuple(own[name].shape)} in this model"
            )


# --- Writing ----------------------------------------------------------------------------------------


def save(root: Path, step: int, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
    """Write a checkpoint of a step; `facts` are plain values that come back with it."""
    for name, tensor in state["live"].items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise NotFiniteError(f"{name} has values that are not finite at step {step}; nothing was saved")
    final = root / f"step-{step:08d}"
    try:
        with new_folder(final) as folder:
            described: dict[str, Any] = {}
            for part in _PARTS:
                tensors: dict[str, Tensor] = {}
                described[part] = _pack(state[part], "", tensors)
                _write_tensors(folder / f"{part}.safetensors", tensors)
            described["facts"] = _pack(facts, "", {})
            _write_json(folder / "state.json", described)
            files = {
                path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
                for path in folder.iterdir()
            }
            _write_json(folder / "manifest.json", {"format": FORMAT, "step": step, "files": files})
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _no_room(error, root, state) from error
        raise
    return final


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False), encoding="utf-8")


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(_on_their_own(tensors), path)
    except SafetensorError as error:  # what the system said is in its text only
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error


def _on_their_own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the host, contiguous, no two in one storage: what safetensors writes."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _no_room(error: OSError, root: Path, state: Mapping[str, Any]) -> OSError:
    tensors: dict[str, Tensor] = {}
    for part in _PARTS:
        _pack(state[part], part, tensors)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return OSError(
        error.errno,
        f"no room for a checkpoint of {needed:,} bytes ({shutil.disk_usage(root).free:,} are free); "
        "earlier checkpoints are untouched",
        str(root),
    )


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; its tensors go to `tensors` under their path, and are named in their place."""
    match value:
        case Tensor():
            if path in tensors:
                raise ValueError(f"cannot save two tensors under one name, {path}")
            tensors[path] = value
            return {"$tensor": path}
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"$float": repr(value)}
        case list() | tuple():
            items = [_pack(item, _join(path, i), tensors) for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        case Mapping():
            if not all(isinstance(key, str) and not key.startswith("$") for key in value):
                raise TypeError(f"{path or 'the state'} has keys that are not names: {list(value)[:5]}")
            return {key: _pack(item, _join(path, key), tensors) for key, item in value.items()}
    raise TypeError(f"cannot save {path}: a {type(value).__name__}")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


# --- Reading ----------------------------------------------------------------------------------------


def load(folder: Path) -> dict[str, Any]:
    """A checkpoint that was checked against its manifest; `Damaged` says what is wrong with any other."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check(folder)
    try:
        described = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        tensors = {part: load_file(folder / f"{part}.safetensors") for part in _PARTS}
        loaded = {part: _unpack(described[part], tensors[part]) for part in _PARTS}
        return {**loaded, "facts": _unpack(described["facts"], {})}
    except (ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise Damaged(f"{folder} cannot be read: {error!r}") from error


def load_facts(folder: Path) -> dict[str, Any]:
    """The plain values of a checkpoint, without reading its tensors."""
    described = json.loads(plain_file(folder, "state.json").read_text(encoding="utf-8"))
    facts: dict[str, Any] = _unpack(described["facts"], {})
    return facts


def check(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all as they were written; else `Damaged`."""
    try:
        manifest = json.loads(plain_file(folder, "manifest.json").read_text(encoding="utf-8"))
        if (version := manifest["format"]) != FORMAT:
            raise ValueError(f"its format is {version!r}; this version of paceline reads {FORMAT}")
        files = manifest["files"]
        expected = {"state.json", *(f"{part}.safetensors" for part in _PARTS)}
        if set(files) != expected:
            raise ValueError(f"its manifest lists {sorted(files)}, not {sorted(expected)}")
        for name, known in files.items():
            path = plain_file(folder, name)
            if (size := path.stat().st_size) != known["bytes"]:
                raise ValueError(f"{name} has {size} bytes; {known['bytes']} were written")
            if sha256_of(path) != known["sha256"]:
                raise ValueError(f"the content of {name} is not what was written")
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{folder} is damaged: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise Damaged(f"{folder} is damaged: its manifest is none ({error!r})") from error
    return dict(manifest)


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": path}:
            return tensors[path]
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(_unpack(item, tensors) for item in items)
    return {key: _unpack(item, tensors) for key, item in value.items()}


# --- Which ones there are ---------------------------------------------------------------------------


def all_of(root: Path) -> list[tuple[int, Path]]:
    """Step and folder of each checkpoint, oldest first; they may be damaged."""
    found = ((_NAME.fullmatch(path.name), path) for path in root.glob("step-*"))
    return sorted((int(match[1]), path) for match, path in found if match and not path.is_symlink())


def newest(root: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest checkpoint that is whole, loaded, and what is wrong with newer ones."""
    problems: list[str] = []
    for _, folder in reversed(all_of(root)):
        try:
            return load(folder), problems
        except Damaged as error:
            problems.append(str(error))
    return None, problems


def prune(root: Path, *, up_to: int, keep: int, best: int | None, others: Collection[int] = ()) -> None:
    """Remove all but the newest `keep` checkpoints up to a step, the one of the best step, and `others`.

    What is beyond that step was passed over as damaged: it must not count as the newest.
    """
    for step, folder in [found for found in all_of(root) if found[0] <= up_to][:-keep]:
        if step != best and step not in others:
            # Under another name first: half a checkpoint must not look like one.
            removed = folder.rename(folder.with_name(f"{TEMPORARY}removed-{step}"))
            shutil.rmtree(removed, ignore_errors=True)
