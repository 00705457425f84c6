"""Commands that are killed at random moments, until they have been killed often enough."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

KILLS = int(os.environ.get("PACELINE_KILLS", "20"))


def start(line: list[str], *code: str) -> subprocess.Popen[str]:
    """Return `paceline`, or other code, with these words, as a process with a group of its own."""
    return subprocess.Popen(
        [sys.executable, *(code or ("-m", "paceline")), *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill_at_random(
    start: Callable[[Path], subprocess.Popen[str]],
    check: Callable[[Path], None],
    folder: Path,
    *,
    at_most: int,
    seconds: tuple[float, float],
) -> None:
    """Alone or with its children: those of a parent that was killed end by themselves.

    Each of several folders is left by its command `at_most` times before it may come to its end, after
    between so many `seconds`; then it is checked.
    """
    seed = random.randrange(2**32)
    print("seed", seed, "killed after", *(round(second, 1) for second in seconds), "s")
    chance = random.Random(seed)
    killed = rounds = 0
    while killed < KILLS:
        out = folder / str(rounds)
        rounds += 1
        for _ in range(min(at_most, KILLS - killed)):
            process = start(out)
            try:
                process.communicate(timeout=chance.uniform(*seconds))
                break
            except subprocess.TimeoutExpired:
                if chance.random() < 0.5:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
                process.communicate()
                killed += 1
        process = start(out)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
        check(out)
    print(f"{killed} kills in {rounds} folders")
