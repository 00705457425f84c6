"""The manifest of prepared data: what made them, and the sizes and hashes of their files.

.. code-block:: text

    folder/  manifest.json   written last: without it the folder is not finished
             checked         inodes, sizes and times of the files whose hashes were compared
"""

import hashlib
import json
import reprlib
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from paceline.lm.files import (
    FILE,
    TEMPORARY,
    Damaged,
    check_fields,
    describe,
    one_at_a_time,
    plain_file,
    put_in_place,
    read_json,
    remove_temporary,
    stamp,
    verify,
    write_atomically,
)

FORMAT = 2
MANIFEST, SAVED, _CHECKED = "manifest.json", "saved.json", "checked"
_LARGE = 10**9  # bytes whose hashes take about a second

Tell = Callable[[str], None]
T = TypeVar("T")


def silent(text: str) -> None:
    """Say nothing."""


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write a manifest atomically."""
    write_atomically(path, json.dumps(sealed(content), indent=1).encode())


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a manifest with its format and its own hash."""
    content = {"format": FORMAT, **content}
    return {**content, "sha256": _digest(content)}


def read_manifest(path: Path, fields: Mapping[str, type]) -> dict[str, Any]:
    """Return the content of a manifest.

    Arguments:
        path: a file with `sealed` content.
        fields: the type of each field that it must have, next to its files.

    Raises:
        Damaged: the content is not what was written; the message names file and place.
    """
    content = read_json(plain_file(path.parent, path.name))
    if (version := content.get("format")) != FORMAT:
        raise Damaged(f"{path}: format {reprlib.repr(version)}; allowed: {FORMAT}")
    known = content.pop("sha256", None)
    try:
        is_same = known == _digest(content)
    except RecursionError:  # read_json may be able to read what just cannot be written
        is_same = False
    if not is_same:
        raise Damaged(f"the content of {path} is not what was written")
    check_fields(path, content, {**fields, "files": dict})
    for file in content["files"].values():
        check_fields(path, file, FILE)
    return content


def check_files(folder: Path, manifest: Mapping[str, Any], tell: Tell, *, again: bool) -> None:
    """Raise Damaged, naming the file, if one is not what the manifest says.

    Content is compared at the first opening. Later ones trust inode, size and times of change.

    Arguments:
        folder: where the files are.
        manifest: the content of its manifest, with the `describe` of its files under "files".
        tell: called with a line before a check that takes more than about a second.
        again: compare the content even if it was compared before.
    """
    files: Mapping[str, Any] = manifest["files"]
    found = {name: stamp(plain_file(folder, name)) for name in files}
    fact = json.dumps([_digest(manifest), found]).encode()
    with suppress(OSError, ValueError):
        if not again and plain_file(folder, _CHECKED).read_bytes() == fact:
            return
    size = sum(size for _, size, *_ in found.values())
    if size > _LARGE:
        tell(f"checking {folder} ({size / 1e9:.1f} GB), once")
    verify(folder, files)
    with suppress(OSError):  # a folder that cannot be written is checked at each opening
        remove_temporary(folder, _CHECKED)
        write_atomically(folder / _CHECKED, fact)


def refuse_other(settings: Mapping[str, Any], manifest: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError if a folder was prepared with other settings."""
    say = reprlib.repr
    other = {key: ours for key, ours in settings.items() if manifest.get(key) != ours}
    if other:
        changes = "; ".join(f"{key} {say(manifest.get(key))} → {say(ours)}" for key, ours in other.items())
        raise ValueError(f"{folder} was prepared from something else; choose another folder ({changes})")


def prepared(
    folder: Path,
    opened: Callable[[], T],
    fill: Callable[[Path], Mapping[str, Any]],
    *,
    tell: Tell,
    is_cache: bool,
) -> T:
    """Return what is prepared in a folder; prepare it if need be, while other processes wait for it.

    The folder appears when it is complete. What an interrupted preparation has left is for the next.

    Arguments:
        folder: an absolute path.
        opened: opens the folder, with all checks.
        fill: writes the files into another folder, which may hold those of an interrupted preparation, and
            returns the other fields of the manifest.
        tell: called with lines about damage, and about waiting.
        is_cache: prepare a damaged folder again, instead of refusing it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        try:
            return opened()
        except Damaged as error:
            if not is_cache:
                raise
            tell(f"{error}; it is prepared again")
    with one_at_a_time(folder.with_name(f".{folder.name}.lock"), tell):
        with suppress(FileNotFoundError, Damaged):  # another process was quicker
            return opened()
        remove_temporary(folder.parent, folder.name)
        made = folder.with_name(f"{TEMPORARY}{folder.name}.part")
        if not (made / SAVED).exists():
            shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True, exist_ok=True)
        try:
            fields = fill(made)
        except BaseException:
            if not (made / SAVED).exists():
                shutil.rmtree(made, ignore_errors=True)
            raise
        files = sorted(path for path in made.iterdir() if path.name not in (MANIFEST, SAVED))
        write_manifest(made / MANIFEST, {**fields, "files": describe(files)})
        (made / SAVED).unlink(missing_ok=True)
        put_in_place(made, folder)
        return opened()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
