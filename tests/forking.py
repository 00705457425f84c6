"""Runs pytest again and again, each time in a fork of this process, which has imported torch already.

Reads lines of JSON: arguments of pytest, and the file that its output goes to. Answers each with two lines:
the fork's process, which leads a session of its own, and its exit code. The first line of all is where
`paceline` would be imported from: only a fork imports it, so that it may be another one every time.
"""

import importlib
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import pytest
import torch

# What most tests import sooner or later, and takes seconds. No plugin of pytest, which wants to do it itself.
IMPORTED = ("numpy", "torch._dynamo", "torch.distributed.tensor", "torch.utils.data")


def main() -> None:
    sys.path[0] = str(Path.cwd())  # as `python -m pytest` has it
    if not torch.cuda.is_available():  # as in conftest.py; torch's compiler imports Triton
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in IMPORTED:
        importlib.import_module(name)
    spec = importlib.util.find_spec("paceline")
    print(spec.origin if spec is not None else "nowhere", flush=True)
    for line in sys.stdin:
        arguments, output = json.loads(line)
        process = os.fork()
        if process == 0:
            run(arguments, output)
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def run(arguments: list[str], output: str) -> NoReturn:
    """All of a fork's life."""
    code = 3  # as pytest, where it is itself what failed
    try:
        os.setsid()
        for descriptor, path, mode in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY)):
            os.dup2(os.open(path, mode), descriptor)
        os.dup2(1, 2)
        code = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
