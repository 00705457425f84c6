"""Checkpoints in safetensors and JSON, which are complete or not there.

A checkpoint is a folder `step-00000100`:

.. code-block:: text

    live.safetensors        the live weights, by name
    optimizer.safetensors   the optimizer's state, by parameter: NAME.average, NAME.exp_avg, …
    state.safetensors       random generators and other tensors
    state.json              everything that is not a tensor: groups, schedule, step, losses, config
    manifest.json           sizes and sha256 of the files above; written last

The first rank writes it, also of weights that are sharded: a run can resume on any number of ranks, sharded
or not.

A checkpoint is written under a temporary name and renamed when it is complete. So a folder of the final
name is complete; the manifest shows later damage to the disk. No file is a pickle.
"""

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.lm.evaluate import NotFiniteError
from paceline.lm.files import (
    TEMPORARY,
    Damaged,
    check_fields,
    describe,
    naming,
    new_folder,
    plain_file,
    read_json,
    verify,
)
from paceline.lm.manifest import MANIFEST, read_manifest, sealed
from paceline.lm.packed import pack, unpack
from paceline.lm.parallel import ALONE, Ranks, cut_like

_PARTS = ("live", "optimizer", "state")
_STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")


# --- The state of a run -----------------------------------------------------------------------------


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name. Tied weights appear once, under their first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def collect(model: nn.Module, optimizer: Optimizer, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Return the tensors of a run by name, and the states of its random generators.

    The result can be saved, or given to `restore`. The parameters must hold live weights. All ranks must call
    it, and the first one gets the whole. Of several ranks' generators only the first rank's are saved: they
    matter only if a single process resumes (see `Ranks.reseed`).
    """
    names = _names(model, optimizer)
    saved = optimizer.state_dict()
    entries = {names[k] if isinstance(k, int) else k: v for k, v in saved["state"].items()}
    cuda: list[Tensor] = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Not the devices of other ranks: asking them takes memory there.
        cuda = torch.cuda.get_rng_state_all() if ranks.size == 1 else [torch.cuda.get_rng_state()]
    return {
        "live": {name: ranks.whole(tensor.detach()) for name, tensor in named_tensors(model).items()},
        "optimizer": _whole(entries, ranks),
        "state": {"groups": saved["param_groups"], "random": {"cpu": torch.get_rng_state(), "cuda": cuda}},
    }


def _whole(value: Any, ranks: Ranks) -> Any:
    if isinstance(value, dict):
        return {name: _whole(part, ranks) for name, part in value.items()}
    return ranks.whole(value) if isinstance(value, Tensor) else value


@torch.no_grad()
def restore(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load the weights and the optimizer's state. `restore_random` loads the random generators."""
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
    """Restore the states of torch's random generators."""
    random = saved["state"]["random"]
    torch.set_rng_state(random["cpu"])
    if random["cuda"] and torch.cuda.is_available():
        # The machine may have fewer GPUs than the one that saved.
        torch.cuda.set_rng_state_all(random["cuda"][: torch.cuda.device_count()])


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the order in which it numbers them."""
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


def save(
    root: Path, step: int, state: Mapping[str, Any], facts: Mapping[str, Any], ranks: Ranks = ALONE
) -> Path:
    """Write a checkpoint of a step, and return its folder.

    `facts` are plain values, which `load` returns. All ranks must call it. The first one writes, and if that
    fails, all raise its error.
    """
    final = root / f"step-{step:08d}"
    ranks.of_first(lambda: _save(final, step, state, facts))
    return final


def _save(final: Path, step: int, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    for name, tensor in state["live"].items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise NotFiniteError(f"{name} has values that are not finite at step {step}; nothing was saved")
    with new_folder(final) as folder:
        described: dict[str, Any] = {}
        for part in _PARTS:
            tensors: dict[str, Tensor] = {}
            described[part] = pack(state[part], "", tensors)
            _write_tensors(folder / f"{part}.safetensors", tensors)
        described["facts"] = pack(facts, "", {})
        _write_json(folder / _STATE, described)
        _write_json(folder / MANIFEST, sealed({"step": step, "files": describe(folder.iterdir())}))


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False), encoding="utf-8")


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    # Copies: safetensors needs contiguous tensors in host memory, each with its own storage.
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with naming(path):
        save_file(own, path)


# --- Reading ----------------------------------------------------------------------------------------


def load(folder: Path) -> dict[str, Any]:
    """Check a checkpoint against its manifest and return its content.

    Raises:
        Damaged: it differs from what was written.
    """
    check(folder)
    return read(folder, {})


def read(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the content of a checkpoint without a check of its files.

    Arguments:
        folder: the checkpoint, checked before.
        like: the model's tensors by name. For a sharded one, this rank gets its shards of the weights and of
            the optimizer's state. Other tensors are read as a whole.
    """
    from safetensors import SafetensorError, safe_open

    described = _described(folder)
    try:
        with ExitStack() as files:
            opened = {part: safe_open(folder / f"{part}.safetensors", "pt") for part in _PARTS}
            get = {part: files.enter_context(file).get_tensor for part, file in opened.items()}
            loaded: dict[str, Any] = {"state": unpack(described["state"], get["state"])}
            for part in ("live", "optimizer"):
                loaded[part] = {
                    name: unpack(entry, partial(_cut, get[part], like.get(name)))
                    for name, entry in described[part].items()
                }
            if not all(isinstance(weights, Tensor) for weights in loaded["live"].values()):
                raise TypeError("live weights that are not tensors")
            return {**loaded, "facts": unpack(described["facts"], _no_tensor)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise Damaged(f"{folder} cannot be read: {error!r}") from error


def _cut(get: Callable[[str], Tensor], like: Tensor | None, path: str) -> Tensor:
    return get(path) if like is None else cut_like(get(path), like)


def _no_tensor(path: str) -> Tensor:
    raise ValueError(f"there is a tensor, {path}, among the plain values")


def load_facts(folder: Path) -> dict[str, Any]:
    """Return the plain values of a checkpoint; its tensors are not read."""
    described = _described(folder)
    try:
        facts: dict[str, Any] = unpack(described["facts"], _no_tensor)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{folder / _STATE} cannot be read: {error}") from None
    return facts


def _described(folder: Path) -> dict[str, Any]:
    """Return the packed content of a checkpoint."""
    path = plain_file(folder, _STATE)
    described = read_json(path)
    check_fields(path, described, dict.fromkeys((*_PARTS, "facts"), dict))
    return described


def check(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, after a check of all its files.

    Raises:
        Damaged: a file differs from what was written.
    """
    try:
        if folder.is_symlink():
            raise Damaged("it is a link, and what was written is a folder")
        manifest = read_manifest(plain_file(folder, MANIFEST), {"step": int})
        listed = manifest["files"]
        expected = {_STATE, *(f"{part}.safetensors" for part in _PARTS)}
        if set(listed) != expected:
            raise Damaged(f"its manifest lists {sorted(listed)}, not {sorted(expected)}")
        if (named := _NAME.fullmatch(folder.name)) and int(named[1]) != manifest["step"]:
            raise Damaged(f"its manifest is of step {manifest['step']}")
        verify(folder, listed)
    except (OSError, ValueError) as error:
        raise Damaged(f"{folder} is damaged: {error}") from error
    return manifest


# --- Which ones there are ---------------------------------------------------------------------------


def all_of(root: Path) -> list[tuple[int, Path]]:
    """Return step and folder of each checkpoint, oldest first, without a check of their files."""
    found = ((_NAME.fullmatch(path.name), path) for path in root.glob("step-*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def newest(root: Path) -> tuple[Path | None, list[str]]:
    """Return the folder of the newest undamaged checkpoint or None, and what is wrong with newer ones."""
    problems: list[str] = []
    for _, folder in reversed(all_of(root)):
        try:
            check(folder)
            read(folder, {})  # whether its parts go together
            return folder, problems
        except Damaged as error:
            problems.append(str(error))
    return None, problems


def prune(root: Path, *, keep: int, others: Collection[int] = (), up_to: int = 2**63) -> None:
    """Remove all checkpoints up to a step, but the newest `keep` of them and those of `others`."""
    # Links, and checkpoints beyond that step, are damaged, and must not count among the newest.
    found = [(step, path) for step, path in all_of(root) if step <= up_to and not path.is_symlink()]
    for step, folder in found[: max(0, len(found) - keep)]:
        if step not in others:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, after renaming it: a half-removed one must not pass for a checkpoint."""
    removed = folder.rename(folder.with_name(f"{TEMPORARY}removed-{folder.name.rpartition('-')[2]}"))
    shutil.rmtree(removed, ignore_errors=True)
