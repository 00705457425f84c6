"""Do the runs of our studies, of which docs/results.md is made.

examples:
  python -m paceline.experiments.evidence tuning basin --out runs --text wiki.jsonl.xz \\
      --text-held-out val.jsonl.xz --keep new.jsonl --jobs 6
      the studies one after the other, six runs at once; the same command again goes on
  python -m paceline.experiments.evidence basin --records records/tuning.jsonl --out runs …
      on another day and another machine: runs that are in records are not done again
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from paceline.experiments.config import ConfigError
from paceline.experiments.evidence.studies import ROOMS, STUDIES, placed


def main(words: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.experiments.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"{', '.join(STUDIES)} [all]")
    parser.add_argument("--room", choices=tuple(ROOMS), default="gpu", help="what is trained [gpu]")
    parser.add_argument("--records", nargs="+", type=Path, default=[], metavar="FILE", help="of earlier days")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--keep", type=Path, required=True, metavar="FILE", help="gets a line a run")
    parser.add_argument(
        "--jobs", type=int, default=4, metavar="N", help="runs at once, if the GPU holds them [4]"
    )
    for name in ("text", "text-held-out", "chat", "chat-held-out"):
        parser.add_argument(
            f"--{name}", nargs="+", default=[], metavar="X", help="as --data of paceline train"
        )
    parser.add_argument("--tokenizer", metavar="X", help="auto, for text that is prepared")
    parser.add_argument("--base-model", metavar="X", help="a folder or .gguf file instead of the hub's model")
    given = parser.parse_args(words)
    unknown = [name for name in given.studies if name not in STUDIES]
    if unknown:
        parser.error(f"there is no study {unknown[0]!r}; there are {', '.join(STUDIES)}")
    try:
        return _run(given)
    except ConfigError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    from paceline.experiments.evidence.work import work
    from paceline.experiments.run import Interrupted

    text: dict[str, Any] = {"data": tuple(given.text), "held_out": tuple(given.text_held_out)}
    chat: dict[str, Any] = {"data": tuple(given.chat), "held_out": tuple(given.chat_held_out)}
    text |= {"tokenizer": given.tokenizer} if given.tokenizer else {}
    chat |= {"model": given.base_model} if given.base_model else {}
    room = placed(ROOMS[given.room], text=_given(text), chat=_given(chat))
    try:
        failed = work(
            given.studies or STUDIES, room, given.out, given.records, given.keep, given.jobs,
            lambda said: print(said, flush=True),
        )  # fmt: skip
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return 130
    return 1 if failed else 0


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value}


if __name__ == "__main__":
    sys.exit(main())
