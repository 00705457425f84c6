"""Sweeps of tiny cells, for tests of both engines."""

import os
import re
import subprocess
import sys

SMALL = ["--model", "gpt:0.3m", "--tokenizer", "bpe:300", "--length", "16", "--batch-size", "2"]
SMALL += ["--steps", "40", "--evaluate-every", "10", "--held-out-samples", "3", "--warmup", "2"]
SMALL += ["--device", "cpu", "--cpus-per-cell", "1"]
FOUR = ["--grid", "lr", "1e-3", "2e-3", "--seeds", "1", "2"]


def words(room, out, *more):
    return ["sweep", "--out", str(out), "--data", str(room / "text.txt"), *SMALL, *map(str, more)]


def start(line, **environment):
    """The command, as a process with a group of its own."""

    return subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )


def content(out):
    """Everything that a sweep has computed, by file."""
    files = [out / "results.jsonl", *out.glob("cells/*/records.jsonl")]
    return {str(path.relative_to(out)): _without_commit(path.read_bytes()) for path in files}


def _without_commit(data):
    """The first line of records says of which commit the source is, and there may be one meanwhile."""
    return re.sub(rb'"commit": ("[^"]*"|null)', b'"commit": 0', data)
