"""`paceline sweep`: grids, lists and seeds of runs, done by the engine, and the table of what they came to.

.. code-block:: text

    FOLDER/results.jsonl    each run that has ended as a line (studies/lines.py), in the order of the sweep
    FOLDER/runs/NAME/       each run as `paceline train` leaves it
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.runs import config, flags
from paceline.runs.config import ConfigError, Run, nearest
from paceline.runs.terminal import say, warn
from paceline.studies.lines import Finished, write
from paceline.studies.runs import SEVERAL, Named, count, folder_of, grid, rate, read, refuse_others, text
from paceline.studies.table import Mean
from paceline.studies.text import Listing

if TYPE_CHECKING:
    from paceline.studies.engine import Message

GRIDS = """examples:
  paceline sweep --out sweeps/first --model gpt:1m --steps 300 --seeds 3 --lr 1e-3 2e-3 4e-3 \\
      --method adamw pace pace+push:strength=0.7,power=0.5
      27 runs: all combinations of three methods, three rates and three seeds
  paceline sweep --out sweeps/more --seed 11 13 17 --steps 300 --grid batch-size 8 16 32
      seeds of your choice
  paceline sweep --out sweeps/mine --config mine.toml --jobs 4 --dry-run
      list the runs that a file describes; without --dry-run they are done, four in parallel
  paceline sweep --out /shared/mine --config mine.toml --ray 10.0.0.1:6379
      the same on a Ray cluster; every node sees the folder under this name

mine.toml has the settings of `paceline train`, and what is swept:
  model = "gpt:1m"
  steps = 300
  lr = [1e-3, 2e-3, 4e-3]       # as may be method
  seeds = 3                     # or seed = [11, 13, 17]
  [grid]                        # all combinations of these
  batch_size = [16, 32]
  [[cells]]                     # settings that belong together, each with all of the grid
  method = "adamw@wsd"
  averages = ["power:0.7"]
  [[cells]]
  method = "pace"

Stop it any time (Ctrl-C): the same command resumes, and repeats no finished run. The table at the end is best
first. Runs that were done elsewhere count once they are copied to FOLDER/runs."""


# --- Flags --------------------------------------------------------------------------------------------


def add(parser: argparse.ArgumentParser) -> None:
    """Add all flags: where, how many in parallel, the list of runs, and the settings of a run."""
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the folder of the runs")
    parser.add_argument("--dry-run", action="store_true", help="list the runs, and do none")
    parser.add_argument(
        "--jobs", type=count, metavar="N", help="runs in parallel [one a GPU; on CPUs one a core, up to 4]"
    )
    text = "on a Ray cluster: this one; auto: RAY_ADDRESS, or the one here, or a new one"
    parser.add_argument("--ray", metavar="HOST:PORT|auto", help=text)
    for name, metavar in zip(SEVERAL, ("METHOD", "X"), strict=True):
        text = f"one or several. {config.documentation()[name]}".replace("%", "%%")
        kind = rate if name == "lr" else str
        parser.add_argument(
            f"--{name}", nargs="+", type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text
        )
    parser.add_argument("--seeds", type=count, metavar="N", help="seeds per setting [1]")
    text = "the first of them, or a list of all [42]"
    parser.add_argument("--seed", nargs="+", default=argparse.SUPPRESS, metavar="S", help=text)
    text = "any other setting and its values; of several settings, all combinations"
    parser.add_argument(
        "--grid", nargs="+", action="append", default=[], metavar=("NAME", "VALUE"), help=text
    )
    flags.add_settings(parser, flags.COMMON)


def grid_of(words: Sequence[Sequence[str]]) -> dict[str, Sequence[str]]:
    """Return the grid that flags give: of each, the name of a setting and its values.

    >>> grid_of([["batch-size", "8", "16"], ["data", "a.txt", "b.txt"]])
    {'batch_size': ['8', '16'], 'data': ['a.txt', 'b.txt']}
    """
    found: dict[str, Sequence[str]] = {}
    for flag, *values in words:
        name = flag.replace("-", "_")
        if "=" in flag or not values:
            meant = flag.partition("=")[0]
            raise ConfigError(
                f"--grid {flag[:80]}: write --grid {meant} VALUE VALUE, with spaces between them"
            )
        if name not in (known := config.documentation()):
            raise ConfigError(f"--grid: unknown setting {flag[:80]!r}{nearest(name, list(known))}")
        if name in found:
            raise ConfigError(f"--grid {name} is there twice; give all of its values after one")
        found[name] = values
    return found


def asked(options: argparse.Namespace) -> list[Named]:
    """Return the runs that file and flags ask for; flags win."""
    found = read(options.config) if options.config else {"settings": {}, "values": {}, "seeds": None}
    given = flags.settings_given(options)
    if "seed" in given or options.seeds is not None:
        found["seeds"] = options.seeds
        if isinstance(found["settings"].get("seed"), list):
            del found["settings"]["seed"]
    for name in SEVERAL:
        if name in given:
            found["values"].pop(name, None)
    given |= {name: one[0] for name in (*SEVERAL, "seed") if len(one := given.get(name, ())) == 1}
    found["settings"] |= given
    found["values"] |= grid_of(options.grid)
    return grid(**found)


# --- The command --------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Do the runs that are asked for; return 1 if one could not be done."""
    runs = asked(options)
    from paceline.runs.methods import check_methods

    methods = ((r.run.method, r.run.schedule, r.run.averages, r.run.telemetry_every) for r in runs)
    for one in dict(zip(methods, runs, strict=True)).values():
        check_methods(one.run)
    return perform(runs, options, tuple(runs[0].tags))


def perform(
    runs: Sequence[Named], options: argparse.Namespace, by: Sequence[str], later: Sequence[Named] = ()
) -> int:
    """Do runs, show what happens and what came out; return 1 if a run could not be done.

    Arguments:
        runs: all of them; those that are done already are only shown.
        options: those of `add`.
        by: the tags that tell the runs apart; without any, runs go by their names.
        later: runs that are not done now; checkpoints that they will continue stay.
    """
    if options.out is None:
        raise ConfigError("--out FOLDER is needed: where the runs go")
    refuse_others(runs, options.out)
    from paceline.studies import live
    from paceline.studies.engine import do, held, local

    if options.dry_run:
        return _list(runs, options.out, by)
    if options.ray is None:
        workers = local([one.run for one in runs], options.jobs)
    else:  # a cluster that is not there is said before anything is written
        from paceline.studies import cluster

        workers = cluster.workers(None if options.ray == "auto" else options.ray, options.jobs)
    with held(options.out):
        results = Results(options.out, runs)
        results.write()
        for message in live.shown(do(runs, options.out, workers, later), runs, options.out, by):
            results.take(message)
    for line in results.table(by).titled():
        say(line)
    if results.mixed():
        warn("runs of this sweep have seen different data, as a file has changed: do not compare them")
    say(f"results: {results.path}")
    for name, why in results.failed.items():
        warn(f"{name}: {why}")
    return 1 if results.failed else 0


def _list(runs: Sequence[Named], folder: Path, by: Sequence[str]) -> int:
    """Show every run, with its steps and tokens."""
    from paceline.studies.engine import is_done

    done = [is_done(folder, one.name) for one in runs]
    continued = ["continues"] if any(one.run.fork for one in runs) else []
    rows = tuple(
        (
            one.name,
            *(text(one.tags[tag]) for tag in by),
            *(one.run.fork or "" for _ in continued),
            *_size(one.run),
            "done" if is_done else "",
        )
        for one, is_done in zip(runs, done, strict=True)
    )
    columns = ("run", *by, *continued, "steps", "tokens", "")
    numeric = tuple(column in ("steps", "tokens") for column in columns)
    for line in Listing(columns=columns, rows=rows, numeric=numeric).lines():
        say(line)
    say(f"{len(runs)} runs, {sum(done)} done")
    return 0


def _size(run: Run) -> tuple[str, str]:
    """Return the steps and tokens that are its own; of a budget that depends on the data, that budget."""
    from paceline.runs.build import steps_of

    if run.epochs is not None:
        return f"{run.epochs:g} epochs", "?"
    if run.chinchilla is not None:
        return f"{run.chinchilla:g} chinchilla", "?"
    steps = steps_of(run, 0, 0) - (run.after[1] if run.after else 0)
    return f"{steps:,}", f"{steps * run.batch_size * run.length:,}"


# --- Results ------------------------------------------------------------------------------------------


class Results:
    """The results of runs that have ended: on the disk, and from the engine."""

    def __init__(self, folder: Path, runs: Sequence[Named]) -> None:
        from paceline.studies.engine import is_done

        self.path, self._folder, self._runs = folder / "results.jsonl", folder, runs
        self.failed: dict[str, str] = {}
        """Runs that could not be done, and why."""
        self._given_up = set[str]()  # diverged in the part that they have in common with another run
        done = (one for one in runs if is_done(folder, one.name))
        found = [Finished.of_folder(folder_of(folder, one.name), one.tags) for one in done]
        self._finished = {run.name: run for run in found if run is not None}
        # Lines of another sweep into this folder, or of runs whose folders are gone, may be all that is left.
        self._before = Finished.read([self.path]) if self.path.exists() else {}

    @property
    def finished(self) -> dict[str, Finished]:
        """The runs that have ended, by name, in the order of the sweep."""
        return {one.name: self._finished[one.name] for one in self._runs if one.name in self._finished}

    def take(self, message: "Message") -> None:
        """Learn from a message of the engine, and rewrite the file if a run has ended."""
        from paceline.studies.pool import Ended

        match message:
            case (one, Ended(how=how, text=why)):
                found = Finished.of_folder(folder_of(self._folder, one.name), one.tags)
                if found is not None and found.is_ended:
                    self._finished[one.name] = found
                    self.write()
                elif how == "diverged":
                    self._given_up.add(one.name)
                elif how != "stopped":
                    self.failed[one.name] = why

    def mixed(self) -> bool:
        """Return whether runs of the same settings of data have seen different data."""
        seen: dict[str, object] = {}
        for run in self.finished.values():
            asked = str([run.config.get(name) for name in ("task", "data", "tokenizer", "model", "length")])
            if seen.setdefault(asked, run.data.get("fingerprint")) != run.data.get("fingerprint"):
                return True
        return False

    def write(self) -> None:
        """Write all runs that have ended to the file, and after them those that stood there before."""
        write({**self.finished, **self._before, **self.finished}.values(), self.path)

    def table(self, by: Sequence[str]) -> Listing:
        """Return a table, best first: a row for all seeds of the same tags; without tags, a row a run."""
        tags = tuple(tag for tag in by if tag != "seed")
        groups: dict[tuple[str, ...], list[str]] = {}
        for one in self._runs:
            key = tuple(text(one.tags[tag]) for tag in tags) if by else (one.name,)
            groups.setdefault(key, []).append(one.name)
        tags = tags if by else ("run",)
        rows = sorted((self._row(key, names) for key, names in groups.items()), key=lambda row: row[0])
        return Listing(
            key="sweep",
            title="Best first",
            caption="Held-out loss of the returned weights in nats, ± its standard error over seeds.",
            columns=(*tags, "loss", "weights", "live", "seeds", "ended"),
            rows=tuple(row[1] for row in rows),
            numeric=(*(False for _ in tags), True, False, True, True, False),
        )

    def _row(self, key: tuple[str, ...], names: list[str]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """Return what to sort by, and the row: those of which every seed came to its end are first."""
        ended = [self._finished[name] for name in names if name in self._finished]
        known = [run for run in ended if run.loss is not None]
        loss = Mean.of(run.loss for run in known if run.loss is not None)
        live = Mean.of(last for run in known if (last := run.evaluations[-1][1].get("live")) is not None)
        outcomes = [run.outcome for run in ended]
        outcomes += ["diverged" for name in names if name in self._given_up]
        counts = {outcome: outcomes.count(outcome) for outcome in ("finished", "diverged")}
        counts["failed"] = sum(name in self.failed for name in names)
        shown = (
            loss.text() if loss else "",
            known[0].returned if known else "",
            f"{live.value:.4f}" if live else "",
            str(len(names)),
            ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count),
        )
        order = loss is None, len(known) < len(names), loss.value if loss else 0.0
        return order, (*key, *shown)
