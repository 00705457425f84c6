"""Print the walk of a reader through `paceline compare` and `paceline train`, from their lines to their ends.

    PYTHONPATH=src python tests/studies/walk.py

The walk visits the functions of paceline in the order in which they are first called. A room is a file that
it enters, and a return is a change of file to one that it has left before. Child processes are not followed:
what they do is the walk of `train`.
"""

import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import FrameType

import paceline
from paceline.cli import main

HOME = str(Path(paceline.__file__).parent)
SMALL = "--model gpt:0.3m --tokenizer bpe:300 --length 16 --batch-size 2 --steps 10 --device cpu "
SMALL += "--set held_out_samples=3 warmup=2"


def is_import(frame: FrameType | None) -> bool:
    """Return whether a module of paceline is being imported here."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(HOME):
            return True
        frame = frame.f_back
    return False


def walk(line: list[str]) -> tuple[list[str], int]:
    """Return the rooms of a command, in the order of the walk, and how many returns it has."""
    functions: dict[object, str] = {}

    def see(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME) and not is_import(frame):
            functions.setdefault(code, code.co_filename.removeprefix(HOME + "/"))

    sys.setprofile(see)
    try:
        assert main(line) == 0
    finally:
        sys.setprofile(None)
    files = list(functions.values())
    moves = sum(one != other for one, other in pairwise(files))
    rooms = list(dict.fromkeys(files))
    return rooms, moves - (len(rooms) - 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PACELINE_CACHE"] = f"{folder}/cache"
        text = Path(folder, "text.txt")
        text.write_text("\n\n".join(f"To be or not to be, that is question {i}." for i in range(900)))
        for command in ("compare --methods adamw/ema pace --lr 1e-3 2e-3", "train pretrain --method pace"):
            name, *words = command.split()
            line = [name, *words, *SMALL.split(), "--data", str(text), "--out", f"{folder}/{name}"]
            rooms, returns = walk(line)
            print(f"{name}: {len(rooms)} rooms, {returns} returns: {' '.join(rooms)}")
