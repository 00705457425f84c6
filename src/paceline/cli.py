"""The command `paceline` and its parts, from compare and train to the paper's figures."""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin

from paceline.bench import command as bench
from paceline.cost import command as cost
from paceline.paper import command as paper
from paceline.runs import config
from paceline.runs.config import ConfigError
from paceline.runs.terminal import own_rank, printable
from paceline.studies.compare.method import DEFAULT as METHODS
from paceline.studies.sweep import command as sweep
from paceline.theory import command as theory

if TYPE_CHECKING:
    from paceline.studies.compare.comparison import Reported

EXAMPLES = {
    "compare": """examples:
  paceline compare
      a demonstration: 15 short runs of a small GPT on the text inside this Python; minutes on two cores
  paceline compare --data my.jsonl --model gpt:12m --lr 1e-3,2e-3,4e-3 --seeds 3 --time 8h
      the own text, as many steps as fit the time
  paceline compare --task sft --data chat.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct \\
      --length 1024 --tokens 20M --methods ema_long push pace pace:c=1e-2 wsd
      fine-tuning on conversations, with methods of the own choice

What it costs: methods x learning rates x seeds runs, where adamw, ema_short and ema_long are one run.
Before the first one it tries the model for a few steps, and says how long all will take.
Stop it whenever you like (Ctrl-C): the same command goes on, and repeats no finished run.

methods: NAME, or NAME:setting=value/AVERAGE@SCHEDULE, e.g. adamw:weight_decay=0.1/power:0.9@wsd
  adamw          AdamW, its last weights           wsd, cosine     AdamW with a decay, its last weights
  ema_short      an average of AdamW's weights     pace            PACE as in the paper, its average
  ema_long       a longer one, of the same run     push            PACE with a push, as we recommend it
  schedule_free  bema  lookahead  gpa  ema_nesterov  ademamix  sgd""",
    "sweep": sweep.EXAMPLES,
    "report": """examples:
  paceline report comparison
      once more what `paceline compare` wrote, e.g. while it is still running
  paceline report runs/* --out report
      any runs of `paceline train` that differ in optimizer, schedule, averages, lr and seed only""",
    "train": """examples:
  paceline train pretrain --out runs/first --steps 300
      a 1M-parameter GPT on the text inside this Python, with PACE; some minutes on two cores
  paceline train pretrain --out runs/mine --data my.txt --model gpt:12m --tokens 10M \\
      --optimizer adamw --averages power:0.7
      the own text, AdamW, and one average kept beside it
  paceline train sft --out runs/chat --model HuggingFaceTB/SmolLM2-135M-Instruct --data chat.jsonl \\
      --length 1024 --epochs 1
      fine-tuning on conversations, for one pass
  torchrun --nproc-per-node 8 --no-python paceline train pretrain --out runs/large --model gpt2 --tokens 2B \\
      --parallel fsdp2
      on eight GPUs, weights and averages in shards (docs/distributed.md)

Stop it whenever you like (Ctrl-C): the same command goes on where it was. Settings may also stand in a
file (--config run.toml), under the same names; flags win over it.""",
    "eval": "example:\n  paceline eval runs/first --weights average",
    "export": "example:\n  paceline export runs/first model/ --weights average",
    "doctor": "examples:\n  paceline doctor runs/first\n  paceline doctor",
    "bench": bench.EXAMPLES,
    "cost": cost.EXAMPLES,
    "theory": theory.EXAMPLES,
    "paper": paper.PAPER_EXAMPLES,
    "figures": paper.FIGURES_EXAMPLES,
    "data": "example:\n  paceline data shards/ --data my.jsonl.xz --tokenizer gpt2",
}


class _Parser(argparse.ArgumentParser):
    """Mistakes are answered in one line, with the nearest name."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    try:
        return _answer(arguments)
    except (
        RuntimeError
    ) as error:  # torch's handler of SIGCHLD raises anywhere, also while an error is reported
        return _fail(error, 1)


def _answer(arguments: Sequence[str] | None) -> int:
    """Run the command; its errors in one line."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else list(arguments))
        code: int = options.command(options)
        return code
    except ConfigError as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        print("paceline: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    except (OSError, ValueError, RuntimeError, MemoryError, ImportError) as error:
        return _report(error)


def _report(error: BaseException) -> int:
    if "torch" not in sys.modules:  # then it is none of those below, and importing them takes seconds
        return _fail(error, 1)
    from paceline.lm.memory import explain_memory
    from paceline.runs.run import Interrupted

    if isinstance(error, Interrupted):
        if not own_rank():
            print(f"paceline: {error}; the same command goes on", file=sys.stderr)
        return 128 + error.number
    return _fail(explain_memory(error) or error, 1)


def _fail(error: object, code: int) -> int:
    text = printable(" ".join(str(error).split()) or type(error).__name__)
    if (rank := own_rank()) is not None:
        text = f"rank {rank}: {text}"
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun then says it beside the rank, at its end
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            # It takes what was said first for the cause. If this only follows from the end of another rank,
            # that one is to come first, and one that was killed says nothing: torchrun has to see it itself.
            time.sleep(2)
            get_error_handler().record_exception(RuntimeError(text))
    print(f"paceline: {text}", file=sys.stderr)
    return code


def _say(text: str) -> None:
    print(printable(text))


# --- Flags ------------------------------------------------------------------------------------------


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="paceline", description="Train for the model you return.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, text: str, command: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=EXAMPLES[name],
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(command=command, usage=made.format_usage)
        return made

    _add_compare(
        add("compare", "what averaging and PACE gain on your data: runs side by side, one report", _compare)
    )
    swept = add("sweep", "grids, lists and seeds of training runs, here or on a Ray cluster", _sweep)
    sweep.add(swept)
    _add_settings(swept, frozenset({"seed"}))
    report = add("report", "the report on runs that are there", _report_again)
    report.add_argument("runs", nargs="+", type=Path, help="folders of runs, or that of a comparison")
    report.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write it; without it, to a comparison's own"
    )
    train = add("train", "train a model: pretrain on text, or sft on conversations", _train)
    train.add_argument("task", choices=("pretrain", "sft"))
    train.add_argument("--out", required=True, type=Path, metavar="RUN", help="the folder of the run")
    train.add_argument("--config", type=Path, metavar="FILE", help="settings in a TOML file")
    train.add_argument("--log", action="append", default=[], choices=("tensorboard", "wandb"))
    _add_settings(train, frozenset({"task"}))
    for name, text, command in (
        ("eval", "the held-out loss of a run's model", _eval),
        ("export", "a run's model as a folder that transformers loads", _export),
    ):
        made = add(name, text, command)
        made.add_argument("run", type=Path, help="the folder of a run, or of one of its checkpoints")
        if name == "export":
            made.add_argument("folder", type=Path, help="where to write the model; must not exist")
        made.add_argument(
            "--weights", metavar="NAME", help="live, average, or the name of another average kept"
        )
        made.add_argument("--step", type=int, help="of which checkpoint; without it, the newest")
    doctor = add(
        "doctor", "which weights a folder holds, and whether it is whole; what this machine can do", _doctor
    )
    doctor.add_argument(
        "folder", type=Path, nargs="?", help="a run, a checkpoint or a model; without it, of this machine"
    )
    data = add("data", "prepare token shards from text", _data)
    data.add_argument("folder", type=Path, help="where to write the shards")
    data.add_argument("--data", nargs="+", required=True, help="as in train")
    data.add_argument("--tokenizer", default="bpe:2048", help="as in train")
    bench.add(add("bench", "time and memory of an optimizer's step on this machine, next to AdamW", _bench))
    cost.add(add("cost", "bytes that an optimizer keeps, and its share of your training step", _cost))
    theory.add(
        add("theory", "the theory behind PACE: numbers, pictures, advice on your runs", _theory), _Parser
    )
    paper.add_paper(add("paper", "the paper's experiments: what is done of them, and what they cost", _paper))
    paper.add_figures(add("figures", "figures of the paper, from records of its experiments", _figures))
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].partition("=")[0]
        known = config.nearest(flag, re.findall(r"--[a-z][\w-]*", options.usage()))
        if flag == "--task" and options.command is _train:
            known = "; it is a word: paceline train sft …"
        raise ConfigError(f"unknown argument {unknown[0][:80]!r}{known}")
    return options


# Of a run, but chosen for each by a comparison, whose runs are each of one process.
COMPARED = frozenset(
    {"optimizer", "schedule", "averages", "lr", "telemetry_every", "keep", "keep_steps", "fork"}
    | {"parallel", "shards"}
)


def _add_compare(compare: argparse.ArgumentParser) -> None:
    compare.add_argument(
        "--out",
        type=Path,
        default=Path("comparison"),
        metavar="FOLDER",
        help="where all of it goes [comparison]",
    )
    compare.add_argument("--methods", nargs="+", metavar="METHOD", help=f"[{' '.join(METHODS)}]")
    compare.add_argument("--lr", metavar="X,X,…", help="learning rates; each method is run at each of them")
    compare.add_argument(
        "--seeds", default="1", metavar="N", help="runs of each that differ in chance alone [1]"
    )
    compare.add_argument(
        "--time",
        metavar="10min",
        help="for everything, e.g. 90s, 10min, 8h: as many steps as fit, not --steps",
    )
    compare.add_argument("--jobs", metavar="N", help="runs at once; without it, as many as fit")
    compare.add_argument("--keep-models", action="store_true", help="keep the last checkpoint of every run")
    _add_settings(compare, COMPARED)


def _add_settings(parser: argparse.ArgumentParser, without: frozenset[str]) -> None:
    group = parser.add_argument_group("settings")
    for name, text in config.documentation().items():
        if name in without:
            continue
        kind: Any = config.kind_of(name)
        default = config.Run.__dataclass_fields__[name].default
        shown = (
            ""
            if default in (None, (), False)
            else f" [{' '.join(default) if isinstance(default, tuple) else default}]"
        )
        options: dict[str, Any] = {"help": (text + shown).replace("%", "%%"), "default": argparse.SUPPRESS}
        if kind is bool:
            options |= {"action": argparse.BooleanOptionalAction}
        elif get_origin(kind) is tuple:
            options |= {"nargs": "+", "metavar": "X"}
        else:
            options |= {"metavar": "|".join(get_args(kind)) if get_args(kind) else name.upper()}
        group.add_argument(f"--{name.replace('_', '-')}", **options)


def _run_of(options: argparse.Namespace) -> config.Run:
    settings = config.read_toml(options.config) if options.config else {}
    names = config.documentation()
    settings |= {name: value for name, value in vars(options).items() if name in names}
    return config.make(settings)


# --- Commands ---------------------------------------------------------------------------------------


def _compare(options: argparse.Namespace) -> int:
    names = config.documentation().keys() - COMPARED
    settings = {name: value for name, value in vars(options).items() if name in names}
    from paceline.studies.compare import comparison, live
    from paceline.studies.compare.plan import Plan, Request
    from paceline.studies.live import shown

    request = Request(
        settings=settings,
        methods=tuple(options.methods or METHODS),
        lrs=None if options.lr is None else tuple(_rate(text) for text in options.lr.split(",")),
        seeds=_whole("seeds", options.seeds),
        seconds=None if options.time is None else _seconds(options.time),
        jobs=None if options.jobs is None else _whole("jobs", options.jobs),
    )
    events = comparison.compare(request, options.out, keep_models=options.keep_models, tell=_say)
    plan = next(events)
    assert isinstance(plan, Plan)
    for line in live.announce(plan):
        _say(line)
    ended = None
    with shown(live.rows_of(plan)) as screen:
        for event in events:
            if isinstance(event, comparison.Reported):
                ended = event
            elif not isinstance(event, Plan):
                screen.take(event)
    assert ended is not None
    return _show_report(ended)


def _sweep(options: argparse.Namespace) -> int:
    names = config.documentation()
    settings = {name: value for name, value in vars(options).items() if name in names}
    warn = lambda text: print(f"paceline: {printable(text)}", file=sys.stderr)  # noqa: E731
    return sweep.run(options, settings, _say, warn)


def _report_again(options: argparse.Namespace) -> int:
    from paceline.studies.compare.comparison import report_again

    if options.out is None and not (len(options.runs) == 1 and (options.runs[0] / "plan.json").exists()):
        raise ConfigError("--out FOLDER is needed: where to write the report")
    return _show_report(report_again(options.runs, options.out or options.runs[0], _say))


def _show_report(ended: "Reported") -> int:
    from paceline.studies.live import as_text

    report = ended.report
    cost = next(table for table in report.tables if table.key == "cost")
    for table in (report.results, cost):
        print(f"\n{table.title}. {table.caption}\n")
        for line in as_text(table).splitlines():
            _say(line)
    print()
    for text in (*report.warnings, report.verdict):
        _say(text)
    _say(f"report: {ended.page}")
    for text in ended.failed:
        print(f"paceline: {printable(text)}", file=sys.stderr)
    return 1 if ended.failed else 0


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"lr {text[:80]!r} is no number; write them as 1e-3,3e-3") from None


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name} is {text[:80]!r}; allowed: a whole number")
    return int(text)


def _seconds(text: str) -> float:
    """A time in words.

    >>> _seconds("90s"), _seconds("1.5h"), _seconds("10min")
    (90.0, 5400.0, 600.0)
    """
    units = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", text.strip().lower())
    if not found or found[2] not in units:
        raise ConfigError(f"time is {text[:80]!r}; write it as 90s, 10min or 8h")
    return float(found[1]) * units[found[2]]


def _train(options: argparse.Namespace) -> int:
    run = _run_of(options)
    from paceline.runs import display, sinks
    from paceline.runs.methods import check_methods
    from paceline.runs.run import Notice, execute

    check_methods(run)
    if own_rank():  # the first speaks for all
        display.drive(execute(run, options.out, lambda text: None), [])
        return 0
    with display.shown() as screen:
        others = [sinks.make(name, options.out, run) for name in options.log]
        tell = lambda text: screen.take(Notice(text=text))  # noqa: E731
        display.drive(execute(run, options.out, tell), [screen, *others])
    _say(f"done: {options.out}; its model: paceline export {options.out} FOLDER")
    return 0


def _eval(options: argparse.Namespace) -> int:
    from paceline.runs.returned import evaluate

    for name, loss in evaluate(options.run, options.step, options.weights).items():
        _say(f"{name}: {loss:.6f} nats a token")
    return 0


def _export(options: argparse.Namespace) -> int:
    from paceline.runs.returned import export

    facts = export(options.run, options.step, options.weights, options.folder)
    _say(f"wrote the {facts['weights']} weights of step {facts['step']} to {options.folder}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from paceline.runs.doctor import examine, examine_machine

    lines, whole = (examine_machine(), True) if options.folder is None else examine(options.folder)
    for line in lines:
        _say(line)
    return 0 if whole else 1


def _data(options: argparse.Namespace) -> int:
    from paceline.runs.data import prepare_folder

    text = prepare_folder(options.data, options.tokenizer, options.folder, _say)
    for part, tokens in (("train", text.training), ("held-out", text.held_out)):
        _say(f"{part}: {tokens.documents:,} documents, {tokens.count:,} tokens of {tokens.vocabulary:,}")
    return 0


def _bench(options: argparse.Namespace) -> int:
    return bench.run(options, _say)


def _cost(options: argparse.Namespace) -> int:
    return cost.run(options, _say)


def _theory(options: argparse.Namespace) -> int:
    return theory.run(options, _say)


def _paper(options: argparse.Namespace) -> int:
    return paper.status(options, _say)


def _figures(options: argparse.Namespace) -> int:
    return paper.draw(options, _say)


if __name__ == "__main__":
    sys.exit(main())
