"""The commands of one run: train, eval, export, data, doctor."""

import argparse
from pathlib import Path
from textwrap import wrap

from paceline.runs import config, flags
from paceline.runs.terminal import Command, own_rank, say

# --- train --------------------------------------------------------------------------------------------

_TRAIN = """examples:
  paceline train pretrain --out runs/first --steps 300
      a 1M-parameter GPT on the text inside this Python, with PACE; some minutes on two cores
  paceline train pretrain --out runs/mine --data my.txt --model gpt:12m --tokens 10M \\
      --method adamw/ema
      your text, AdamW, and one average kept next to it
  paceline train sft --out runs/chat --model HuggingFaceTB/SmolLM2-135M-Instruct --data chat.jsonl \\
      --length 1024 --epochs 1
      fine-tuning on conversations, for one pass
  torchrun --nproc-per-node 8 --no-python paceline train pretrain --out runs/large --model gpt2 --tokens 2B \\
      --parallel fsdp2
      on eight GPUs, weights and averages in shards (docs/training.md)

Stop it any time (Ctrl-C); run the same command to resume. All settings may stand in a file
(--config run.toml), under the same names, as batch_size = 16; flags win over it."""

_RARE = frozenset(
    {"chat_template", "horizon", "activation_checkpointing", "dropout", "keep_steps"}
    | {"skip_nonfinite", "telemetry_every"}
)
"""Settings without a flag of their own."""


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=("pretrain", "sft"))
    parser.add_argument("--out", required=True, type=Path, metavar="RUN", help="the folder of the run")
    flags.add_settings(parser, config.documentation().keys() - {"task"} - _RARE)
    lines = [wrap(f"{name}  {flags.described(name)}", 100) for name in sorted(_RARE)]
    text = "\n".join(line for one in lines for line in (one[0], *(f"    {rest}" for rest in one[1:])))
    parser.add_argument_group("settings for --set and for files", text)


def run_of(options: argparse.Namespace) -> config.Run:
    """Return the run that a file and flags describe; flags win."""
    settings = config.read_toml(options.config) if options.config else {}
    return config.make(settings | flags.settings_given(options))


def _train(options: argparse.Namespace) -> int:
    run = run_of(options)
    from paceline.runs import display
    from paceline.runs.run import Notice, execute

    with display.opened() as opened:
        screen = display.Screen(opened)
        for event in execute(run, options.out, lambda text: screen.take(Notice(text=text))):
            screen.take(event)
    if not own_rank():
        say(f"done: {options.out}; its model: paceline export {options.out} FOLDER")
    return 0


# --- eval, export ---------------------------------------------------------------------------------------


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a run, or of one of its checkpoints")
    text = "live, average, or the name of another average kept"
    parser.add_argument("--weights", metavar="NAME", help=text)
    parser.add_argument("--step", type=int, help="of which checkpoint; without it, the newest")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    _add_weights(parser)
    text = "other data to evaluate on, as in train; without it, the run's held-out part"
    parser.add_argument("--data", nargs="+", default=[], metavar="X", help=text)


def _eval(options: argparse.Namespace) -> int:
    from paceline.runs.returned import evaluate

    name, loss = evaluate(options.run, options.step, options.weights, tuple(options.data), say)
    say(f"{' '.join(options.data) or 'held-out'}, {name}: {loss:.6f} nats a token")
    return 0


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_weights(parser)
    parser.add_argument("folder", type=Path, help="where to write the model; must not exist")


def _export(options: argparse.Namespace) -> int:
    from paceline.runs.returned import export

    facts = export(options.run, options.step, options.weights, options.folder)
    say(f"wrote the {facts['weights']} weights of step {facts['step']} to {options.folder}")
    return 0


# --- doctor, data ---------------------------------------------------------------------------------------


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run, study, checkpoint, model, cache or prepared data")


def _doctor(options: argparse.Namespace) -> int:
    from paceline.runs.doctor import examine

    lines, whole = examine(options.folder)
    for line in lines:
        say(line)
    return 0 if whole else 1


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where to write the shards")
    parser.add_argument("--data", nargs="+", required=True, help="as in train")
    parser.add_argument("--tokenizer", default="bpe:2048", help="as in train")


def _data(options: argparse.Namespace) -> int:
    from paceline.runs.data import prepare_folder

    text = prepare_folder(options.data, options.tokenizer, options.folder, say)
    for part, tokens in (("train", text.training), ("held-out", text.held_out)):
        say(f"{part}: {tokens.documents:,} documents, {tokens.count:,} tokens of {tokens.vocabulary:,}")
    return 0


_EVAL = """examples:
  paceline eval runs/first --data other.txt
  paceline eval runs/first --weights live --step 200"""
_EXPORT = "example:\n  paceline export runs/first model/ --weights average"
_DOCTOR = "example:\n  paceline doctor runs/first"
_SHARDS = "example:\n  paceline data shards/ --data my.jsonl.xz --tokenizer gpt2"

COMMANDS = (
    Command("train", "train a model: pretrain on text, or sft on conversations", _TRAIN, _add_train, _train),
    Command("eval", "the held-out loss of a run's model, or its loss on other data", _EVAL, _add_eval, _eval),
    Command("export", "a run's model as a folder that transformers loads", _EXPORT, _add_export, _export),
    Command("doctor", "which weights a folder holds, and is it whole", _DOCTOR, _add_doctor, _doctor),
    Command("data", "prepare token shards from text", _SHARDS, _add_data, _data),
)
