"""Damage files at random, and check that no command reads a damaged one without a word.

    python tests/damages.py --damages 200 --record records/2026-11-19-damages.json

Everything that a user's folders hold is damaged: a finished run, one that was killed, a token cache, a
folder of `paceline data`, an export, a comparison. After each damage, every command that reads the folder
must either end as it does on whole files, with the same results, or fail in words that name a file.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from killing import start
from lm.tiny import write_text

from paceline.cli import main
from paceline.runs.records import environment

TINY = ["--model", "gpt:0.3m", "--length", "16", "--batch-size", "2", "--held-out-samples", "3"]
TINY += ["--warmup", "2", "--device", "cpu"]
TRAIN = ["train", "pretrain", *TINY, "--method", "adamw+push:power=0.5", "--evaluate-every", "5"]
TEXT = ["--data", "text.txt", "--tokenizer", "bpe:300"]
METHODS = ["adamw/ema", "pace+push"]


@dataclass(frozen=True)
class Reading:
    """A command that reads a folder, and the files in which its results stand."""

    line: list[str]
    results: tuple[str, ...] = ()


RUN = Reading([*TRAIN, *TEXT, "--steps", "10", "--out", "run"], ("run/records.jsonl",))
STOPPED = Reading(
    [*TRAIN, *TEXT, "--steps", "60", "--checkpoint-every", "10", "--out", "stopped"],
    ("stopped/records.jsonl", "stopped/checkpoints/*60*/live.safetensors"),
)
DATA = Reading([*TRAIN, "--data", "data", "--steps", "5", "--out", "new"], ("new/records.jsonl",))
SHORT = ["--lr", "1e-3", "--steps", "20", "--evaluate-every", "10", "--jobs", "1"]
COMPARE = Reading(
    ["compare", *TINY, *TEXT, "--out", "comparison", "--methods", *METHODS, *SHORT], ("comparison/*.csv",)
)

FOLDERS: dict[str, tuple[Reading, ...]] = {
    "run": (
        Reading(["doctor", "run"]),
        Reading(["report", "run", "--out", "page"], ("page/*.csv",)),
        Reading(["export", "run", "model"], ("model/*",)),
        RUN,
    ),
    "stopped": (STOPPED,),
    "cache": (Reading([*TRAIN, *TEXT, "--steps", "5", "--out", "new"], ("new/records.jsonl",)),),
    "data": (Reading(["doctor", "data"]), DATA),
    "exported": (Reading(["doctor", "exported"]),),
    "comparison": (Reading(["report", "comparison"], ("comparison/*.csv",)), COMPARE),
}


def ended(reading: Reading) -> tuple[int, str, dict[str, str]]:
    """Run a command; return its exit status, what it printed, and hashes of its results."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(reading.line)
        except SystemExit as stop:
            code = int(stop.code or 0)
    found = {str(path) for pattern in reading.results for path in Path().glob(pattern) if path.is_file()}
    return code, said.getvalue(), {path: _hash(Path(path)) for path in sorted(found)}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def damage(path: Path, chance: random.Random) -> str:
    """Change a file, and return how."""
    data = bytearray(path.read_bytes())
    how = chance.choice(("a bit", "a bit", "a bit", "zeros", "cut", "doubled"))
    at = chance.randrange(len(data))
    if how == "a bit":
        data[at] ^= 1 << chance.randrange(8)
    elif how == "zeros":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif how == "cut":
        del data[at:]
    else:
        data[at:at] = data[max(0, at - 40) : at] or b"\n"
    path.write_bytes(data)
    return f"{how} at {at:,} of {len(data):,}"


def prepare() -> None:
    """Make the folders, in the current one."""
    write_text(Path("text.txt"), paragraphs=400)
    for reading in (RUN, COMPARE):
        assert ended(reading)[0] == 0, ended(reading)
    assert ended(Reading(["export", "run", "exported"]))[0] == 0
    assert ended(Reading(["data", "data", *TEXT]))[0] == 0
    process = start(STOPPED.line)
    while not list(Path("stopped").glob("checkpoints/*20*/manifest.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()


def verdict(whole: tuple, after: tuple, name: str) -> str:
    """Return "found", "no effect" or what is wrong."""
    code, said, results = after
    if "Traceback" in said:
        return "traceback: " + said.strip().splitlines()[-1]
    if code:
        return (
            "found"
            if name in said or Path(name).parent.name in said
            else f"found, not named: {said.strip()[-300:]}"
        )
    return "no effect" if results == whole[2] else f"WRONG WITHOUT A WORD: {said.strip()[-300:]}"


def run(damages: int, seed: int) -> dict[str, object]:
    """Damage, read, compare, that often; return the counts and what went wrong."""
    chance, counts, wrong = random.Random(seed), Counter[str](), []
    kept, work = Path("kept").resolve(), Path("work").resolve()
    work.mkdir()
    os.chdir(work)
    os.environ["PACELINE_CACHE"] = str(work / "cache")
    prepare()
    shutil.copytree(work, kept)

    def fresh() -> None:
        os.chdir(kept)
        shutil.rmtree(work)
        shutil.copytree(kept, work)
        os.chdir(work)

    whole: dict[str, list] = {}
    for folder, readings in FOLDERS.items():
        whole[folder] = []
        for reading in readings:
            fresh()
            whole[folder].append(ended(reading))
            assert whole[folder][-1][0] == 0, whole[folder][-1]
    for number in range(damages):
        folder = chance.choice(list(FOLDERS))
        files = sorted(path for path in (kept / folder).rglob("*") if path.is_file() and path.stat().st_size)
        path = chance.choice(files).relative_to(kept)
        state = chance.getstate()
        for before, reading in zip(whole[folder], FOLDERS[folder], strict=True):
            fresh()
            chance.setstate(state)
            how = damage(path, chance)
            try:
                found = verdict(before, ended(reading), path.name)
            except Exception as error:
                found = f"traceback: {error!r}"
            counts[found.split(":")[0]] += 1
            if found not in ("found", "no effect"):
                wrong.append({"file": str(path), "damage": how, "command": reading.line[0], "found": found})
                print(f"{path}, {how}, {reading.line[0]}: {found}", flush=True)
        print(f"{number + 1} of {damages}: {dict(counts)}", end="\r", file=sys.stderr, flush=True)
    about = {"date": time.strftime("%F"), **environment()}
    return {**about, "damages": damages, "seed": seed, "readings": dict(counts), "wrong": wrong}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    record = given.record.resolve() if given.record else None
    with tempfile.TemporaryDirectory() as room:
        os.chdir(room)
        found = run(given.damages, given.seed)
        os.chdir("/")
    print(json.dumps(found, indent=1))
    if record:
        record.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(found["wrong"]))
