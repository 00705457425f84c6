"""Do the runs of the study, or those that are left of them.

example:
  python -m paceline.experiments.defaults --scale 7m --data wiki.jsonl.xz --held-out val.jsonl.xz \\
      --tokenizer bpe:4096 --out runs --record records.jsonl --jobs 10 baselines paper decay
"""

import argparse
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from paceline.experiments.defaults.runs import GROUPS, SCALES
from paceline.experiments.defaults.work import work
from paceline.experiments.run import Interrupted


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.experiments.defaults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("groups", nargs="+", choices=GROUPS, help="what to run")
    parser.add_argument("--scale", choices=SCALES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--record", type=Path, required=True, help="file that gets a line a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--jobs", type=int, default=4, help="runs at once (default 4)")
    parser.add_argument(
        "--only", nargs="+", default=["*"], help="names of runs, with * for anything (default all)"
    )
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--held-out", nargs="*", default=[])
    parser.add_argument("--tokenizer")
    parser.add_argument("--model", help="instead of the scale's: the pretrained one of sft")
    parser.add_argument("--steps", type=int, help="of each run, instead of the scale's")
    given = parser.parse_args()
    scale = SCALES[given.scale]
    more: dict[str, Any] = {"data": tuple(given.data), "held_out": tuple(given.held_out)}
    more |= {k: v for k in ("tokenizer", "model", "steps") if (v := getattr(given, k)) is not None}
    scale = replace(scale, settings={**scale.settings, **more})
    runs = {
        name: run
        for seed in given.seeds
        for group in given.groups
        for name, run in GROUPS[group](scale, seed).items()
        if any(fnmatchcase(name, pattern) for pattern in given.only)
    }
    try:
        # Names do not say the scale, and runs of two scales may be at work at once.
        work(runs, given.out / given.scale, given.record, given.jobs, lambda text: print(text, flush=True))
    except Interrupted as stop:
        sys.exit(str(stop))


if __name__ == "__main__":
    main()
