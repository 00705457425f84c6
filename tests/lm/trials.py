"""Work in processes of their own, to be killed, starved and lied to.

They are forked from a server that has imported everything, and computed with one thread only: a fork of a
process whose torch has a pool of threads, such as that of the tests, may hang in its first matrix product.
"""

import atexit
import base64
import dataclasses
import functools
import importlib
import itertools
import json
import multiprocessing.util
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

HERE = Path(__file__).parent


# --- In the server --------------------------------------------------------------------------------


def serve():
    """Fork a process for each line of work that comes in; say what became of those asked for."""
    import torch
    import transformers  # noqa: F401
    from transformers.models.auto import tokenization_auto  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    from paceline.runs import records

    records._commit = lambda: None  # somebody may commit while the tests run
    importlib.import_module("kills")
    torch.set_num_threads(1)
    _warm_up()
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            done, status = os.waitpid(asked["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        elif not (answer := os.fork()):
            _be_the_child(asked)
        print(json.dumps(answer), flush=True)


def _warm_up():
    """What is done at a first step only is done once, for all."""
    from tiny import write_text

    from paceline.runs.config import Run

    with tempfile.TemporaryDirectory() as room:
        os.environ["PACELINE_CACHE"] = f"{room}/cache"
        data = (str(write_text(Path(room) / "text.txt", paragraphs=120)),)
        run = Run(
            data=data, model="gpt:0.3m", tokenizer="bpe:300", length=16, batch_size=2, steps=1, dropout=0.1
        )
        for _ in importlib.import_module("paceline.runs.run").execute(run, Path(room), lambda text: None):
            pass


def _be_the_child(asked):
    code = 70
    try:
        os.setsid()
        said = os.open(asked["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for descriptor, source in enumerate((os.open(os.devnull, os.O_RDONLY), said, said)):
            os.dup2(source, descriptor)
        os.environ.update(asked["environment"])
        work = pickle.loads(base64.b64decode(asked["work"]))
        code = work() or 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


# --- In the tests ---------------------------------------------------------------------------------


@functools.cache
def _server():
    paths = [str(HERE), str(HERE.parent), *sys.path]
    server = subprocess.Popen(
        [sys.executable, "-c", "import trials; trials.serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        text=True,
    )
    atexit.register(server.stdin.close)  # its end
    return server


def _ask(question):
    server = _server()
    server.stdin.write(json.dumps(question) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


class Trial:
    """A process at work. Functions must be of a module, for `pickle` to name them."""

    def __init__(self, said, work, *args, **settings):
        self.said = said
        packed = base64.b64encode(pickle.dumps(functools.partial(work, *args, **settings))).decode()
        environment = {name: os.environ[name] for name in ("PACELINE_CACHE",) if name in os.environ}
        said.unlink(missing_ok=True)
        self.pid = _ask({"work": packed, "said": str(said), "environment": environment})

    def wait(self, seconds=60):
        """Its exit code, -9 if a signal of that number ended it."""
        until = time.monotonic() + seconds
        while (code := _ask({"wait": self.pid})) is None:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"still at work after {seconds} s:\n{self.text()}")
            time.sleep(0.005)
        return code

    def text(self):
        """What it said so far."""
        return self.said.read_text(encoding="utf-8", errors="replace") if self.said.exists() else ""

    def until(self, fact, seconds=60):
        """Wait until something is true."""
        end = time.monotonic() + seconds
        while not fact():
            assert time.monotonic() < end, f"it never came to pass:\n{self.text()}"
            time.sleep(0.002)


# --- Work -------------------------------------------------------------------------------------------


def command(words, *faults):
    """The command line, with faults in its process."""
    from paceline.cli import main

    for fault in faults:
        fault()
    code = main(words)
    multiprocessing.util._exit_function()  # as at the end of any process
    return code


def kill(folder, names, count, seed, **settings):
    """A campaign of kills; what became of it is written to a file."""
    import kills

    runs = kills.runs_in(folder)
    tally = kills.campaign({name: runs[name] for name in names}, count, seed, **settings)
    (folder / "tally.json").write_text(json.dumps(dataclasses.asdict(tally)), encoding="utf-8")


def save_twice(folder, which):
    """A checkpoint of tiny weights, then another of the same step; killed at a call of the second save."""
    import torch
    from kills import die_inside_a_save

    from paceline.lm import checkpoint

    root = folder / "checkpoints"
    for value in (1.0, 2.0):
        if value == 2.0:
            die_inside_a_save(which)
        state = {"live": {"w": torch.full((3,), value)}, "optimizer": {}, "state": {}}
        checkpoint.save(root, 4, state, {"value": value})
        checkpoint.prune(root, up_to=4, keep=1)


def words_of(run, folder):
    """A run as it is asked for on the command line."""
    words = ["train", run.task, "--out", str(folder), "--set"]
    for field in dataclasses.fields(run):
        value = getattr(run, field.name)
        if field.name == "task" or value == field.default:
            continue
        values = value if isinstance(value, tuple) else (value,)
        words += [f"{field.name}={'none' if item is None else item}" for item in values]
    return words


# --- Faults -----------------------------------------------------------------------------------------


def before(target, calls, action, *args):
    """From now on, do something before calls of a function: `calls` holds which, counted from 1."""
    _wrap(target, calls, lambda *_: action(*args), None)


def after(target, calls, action, *args):
    """The same after them, with what the function was called with and what it gave."""
    _wrap(target, calls, None, lambda given, result: action(*args, given, result))


def _wrap(target, calls, first, then):
    module, _, name = target.partition(":")
    *path, name = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    call, count = getattr(owner, name), itertools.count(1)

    @functools.wraps(call)
    def replacement(*args, **settings):
        hit = next(count) in calls
        if hit and first:
            first(args)
        result = call(*args, **settings)
        if hit and then:
            then(args, result)
        return result

    setattr(owner, name, replacement)


def send(*numbers, pause=0.0):
    """Signals to itself; a handler runs as soon as this returns."""
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(pause)


def hurry():
    """Waits between attempts take no time."""
    time.sleep = lambda seconds: None


def fail(number):
    """As a system call that fails."""
    raise OSError(number, os.strerror(number))


def die(given, result):
    """As by `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)


def spoil(given, result):
    """After `_gradient`: a gradient that is not finite, of a loss that is."""
    trainee = given[0]
    next(trainee.model.parameters()).grad.fill_(float("nan"))


def ruin(given, result):
    """After `_take_step`: an update that overflowed."""
    next(given[0].model.parameters()).data[0, 0] = float("inf")


def limit(which, size):
    """A limit of the system's, for this process."""
    resource.setrlimit(which, (size, size))


def starve(more):
    """So much more address space, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(resource.RLIMIT_AS, pages * resource.getpagesize() + more)


def without_lock():
    """The twin: nobody is refused."""
    from contextlib import nullcontext

    from paceline.runs import run

    run.locked = nullcontext


def refuse():
    """End instead of building anything."""
    before("paceline.runs.build:build", EVERY, os._exit, 99)


def turn_back_the_clock():
    """The time of day goes back by an hour whenever it is asked for."""
    now = itertools.count(int(time.time()), -3600)
    time.time = lambda: float(next(now))


def audit(seen):
    """From now on, write down whenever a class is unpickled or the network is asked."""
    file = seen.open("a", encoding="utf-8", buffering=1)

    def hook(event, args):
        if event == "pickle.find_class" or event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
            file.write(f"{event}\n")

    sys.addaudithook(hook)


def misbehave(watch):
    """What the audit must see."""
    import socket

    watch()
    pickle.loads(pickle.dumps(functools.partial(print)))
    with socket.socket() as connection:
        connection.settimeout(0.1)
        connection.connect_ex(("127.0.0.1", 9))


EVERY = range(1, 2**40)
STEP = "paceline.lm.loop:_gradient"
EVALUATION = "paceline.lm.loop:held_out_loss"
EXPORT = "paceline.runs.returned:new_folder"
SAVE = "paceline.lm.checkpoint:_write_tensors"
