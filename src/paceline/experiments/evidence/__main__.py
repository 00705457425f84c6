"""Do the runs of our studies, and make docs/results.md of them.

examples:
  python -m paceline.experiments.evidence run tuning basin --out runs --text wiki.jsonl.xz \\
      --text-held-out val.jsonl.xz --keep new.jsonl --jobs 6
      the studies one after the other, six runs at once; the same command again goes on
  python -m paceline.experiments.evidence run basin --records records/tuning.jsonl --out runs …
      on another day and another machine: runs that are in records are not done again
  python -m paceline.experiments.evidence page docs --records records/*evidence*.jsonl
      the tables in docs/results.md, and the figures beside it
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from paceline.experiments.config import ConfigError
from paceline.experiments.evidence.claims import tables
from paceline.experiments.evidence.studies import ROOMS, STUDIES, placed
from paceline.experiments.pages import refill
from paceline.experiments.paper import lines


def main(words: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.experiments.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs, page = (
        commands.add_parser("run", help="do runs"),
        commands.add_parser("page", help="tables and figures"),
    )
    runs.add_argument("studies", nargs="*", metavar="STUDY", help=f"{', '.join(STUDIES)} [all]")
    page.add_argument("folder", type=Path, metavar="FOLDER", help="with results.md")
    for command in (runs, page):
        command.add_argument("--room", choices=tuple(ROOMS), default="gpu", help="what is trained [gpu]")
        command.add_argument("--records", nargs="+", type=Path, default=[], metavar="FILE")
    runs.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    runs.add_argument("--keep", type=Path, required=True, metavar="FILE", help="gets a line a run")
    runs.add_argument("--jobs", type=int, default=4, metavar="N", help="runs at once [4]")
    for name in ("text", "text-held-out", "chat", "chat-held-out"):
        runs.add_argument(f"--{name}", nargs="+", default=[], metavar="X", help="as --data of paceline train")
    runs.add_argument("--tokenizer", metavar="X", help="auto, for text that is prepared")
    runs.add_argument("--base-model", metavar="X", help="a folder or .gguf file instead of the hub's model")
    given = parser.parse_args(words)
    unknown = [name for name in getattr(given, "studies", ()) if name not in STUDIES]
    if unknown:
        parser.error(f"there is no study {unknown[0]!r}; there are {', '.join(STUDIES)}")
    try:
        return _run(given) if given.command == "run" else _page(given)
    except ConfigError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2


def _page(given: argparse.Namespace) -> int:
    from paceline.experiments.evidence.figures import all_figures

    results, room, path = lines.read(given.records), ROOMS[given.room], given.folder / "results.md"
    if not path.is_file():
        raise ConfigError(f"there is no {path}")
    refill(path, tables(room, results))
    for made in (path, *all_figures(room, results, given.folder)):
        print(made)
    return 0


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
