"""What users write, as one list: a name that comes or goes is a decision, and changes this file."""

import argparse
import re

import matrix

import paceline
from paceline import cli
from paceline.runs import config

SETTINGS = """
    task model data held-out held-out-samples tokenizer chat-template length batch-size micro-batch-size steps
    tokens epochs chinchilla method lr schedule warmup horizon averages clip-norm precision device compile
    parallel activation-checkpointing dropout seed evaluate-every checkpoint-every keep keep-steps
    skip-nonfinite telemetry-every fork
"""
ENGINE = "out dry-run jobs engine ray-address cpus-per-run gpus-per-run stop-diverged keep-models"
OWN = {
    "bench": "models only seconds out",
    "compare": "out methods seeds time jobs keep-models",
    "cost": "parameters weights gpus bench step json",
    "data": "",
    "doctor": "",
    "eval": "weights step",
    "export": "weights step",
    "paper": f"{ENGINE} scale records text text-held-out chat chat-held-out tulu tulu-held-out base-model",
    "report": "out",
    "sweep": f"{ENGINE} config seeds grid",
    "theory": "",
    "train": "out config",
}
"""Flags of each command that are no settings of a run."""
NAMES = """
    BEMA PACE Blend Control FixedDecay HalfLife Polynomial PowerLaw __version__ attach averaged_state_dict
    averaged_tensors averaged_weights parameter_groups pull_statistics reset_average save_averaged schedules
"""


def test_commands_flags_and_names_are_these():
    settings = set(SETTINGS.split())
    assert {name.replace("_", "-") for name in config.documentation()} == settings
    own = {}
    for command in cli.COMMANDS.values():
        parser = argparse.ArgumentParser(add_help=False)
        command.add(parser)
        flags = set(re.findall(r"--([a-z][\w-]*)", parser.format_usage()))
        own[command.name] = {flag for flag in flags - settings if not flag.startswith("no-")}
    assert own == {name: set(flags.split()) for name, flags in OWN.items()}
    assert paceline.__all__ == NAMES.split()


def test_every_promise_names_what_holds_it():
    for _, promise, held in matrix.promises():
        assert held, promise
        for path, _, name in (one.partition("::") for one in held):
            assert (matrix.ROOT / "tests" / path).exists() and (not name or name in matrix.tests_of(path)), (
                name
            )
