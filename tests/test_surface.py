"""What users write, as one list: a name that comes or goes is a decision, and changes this file."""

import re

import matrix
import pytest

import paceline
from paceline import cli
from paceline.runs import config

COMMON = "task model data held-out tokenizer length batch-size steps tokens device set config"
FLAGS = {
    "bench": "models only seconds out device",
    "compare": f"{COMMON} out methods lr seeds time jobs",
    "cost": "parameters weights gpus bench step json",
    "data": "data tokenizer",
    "doctor": "",
    "eval": "weights step data",
    "export": "weights step",
    "report": "out",
    "sweep": f"{COMMON} list scale place out dry-run jobs ray method lr seeds seed grid",
    "theory": "",
    "theory advise": "lr steps ratio best-lr",
    "theory figures": "out",
    "train": """
        out set config model data held-out held-out-samples tokenizer length batch-size micro-batch-size steps
        tokens epochs chinchilla method lr schedule warmup averages clip-norm precision device compile
        parallel seed evaluate-every checkpoint-every keep fork
    """,
}
RARE = """
    activation_checkpointing chat_template dropout horizon keep_steps skip_nonfinite telemetry_every
"""
"""Settings of a run without a flag."""
NAMES = """
    BEMA PACE Blend Control FixedDecay HalfLife Polynomial PowerLaw __version__ attach averaged_state_dict
    averaged_tensors averaged_weights parameter_groups pull_statistics reset_average save_averaged schedules
"""


def test_commands_flags_and_names_are_these(capsys):
    found = {}
    for name in (*cli.COMMANDS, *(name for name in FLAGS if " " in name)):
        with pytest.raises(SystemExit):
            cli.main([*name.split(), "--help"])
        usage = capsys.readouterr().out.partition("\n\n")[0]
        found[name] = {flag for flag in re.findall(r"--([a-z][\w-]*)", usage) if flag != "no-compile"}
    assert found == {name: set(flags.split()) for name, flags in FLAGS.items()}
    assert len(cli.COMMANDS) <= 11 and sum(map(len, found.values())) <= 120
    settings = {name.replace("-", "_") for name in found["train"] - {"out", "set", "config"}}
    assert set(config.documentation()) == settings | {"task"} | set(RARE.split())
    assert paceline.__all__ == NAMES.split()


def test_every_promise_names_what_holds_it():
    for _, promise, held in matrix.promises():
        assert held, promise
        for path, _, name in (one.partition("::") for one in held):
            assert (matrix.ROOT / "tests" / path).exists() and (not name or name in matrix.tests_of(path)), (
                name
            )
