"""A run of 20,000 steps: memory, open files and the time of a step must not grow, and nothing warns twice.

    python tests/lm/soak.py --record records/DATE-soak.json

Row F16 of the reliability matrix; some minutes, so not part of `make test`. It trains through the same
`execute` as the command line, with evaluations, checkpoints, an average and telemetry.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tiny import write_text

from paceline.lm.loop import Step
from paceline.runs.config import Run
from paceline.runs.run import Event, Saved, Started, execute

SETTLED = 1_000  # steps after which nothing may grow
GROWTH = 5 * 2**20
TAIL = 3.0


def resident() -> int:
    """Bytes of memory in use."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    """Open files."""
    return len(list(Path("/proc/self/fd").iterdir()))


class Watch:
    """What is measured, step by step."""

    def __init__(self) -> None:
        self.parameters = 0
        self.memory: list[int] = []
        self.files: Counter[int] = Counter()
        self.seconds: list[float] = []
        self.saves = 0
        self._before: float | None = None

    def take(self, event: Event) -> None:
        """Measure, if it was a step; time spent on evaluations and checkpoints is not a step's."""
        now = time.perf_counter()
        match event:
            case Started(parameters=parameters):
                self.parameters = parameters
            case Saved():
                self.saves += 1
            case Step(step=step):
                if self._before is not None and step > SETTLED:
                    self.seconds.append(now - self._before)
                if step >= SETTLED and step % 100 == 0:
                    self.memory.append(resident())
                    self.files[descriptors()] += 1
        self._before = time.perf_counter() if isinstance(event, Step) else None

    def report(self) -> dict[str, object]:
        """The numbers of the row, and whether they are within its limits."""
        ordered = sorted(self.seconds)
        p50, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        growth = max(self.memory) - self.memory[0]
        return {
            "parameters": self.parameters,
            "checkpoints": self.saves,
            "resident_bytes_after_1000_steps": self.memory[0],
            "resident_growth_bytes": growth,
            "resident_growth_limit": GROWTH,
            "open_files": sorted(self.files),
            "step_ms_p50": round(1e3 * p50, 3),
            "step_ms_p99": round(1e3 * p99, 3),
            "p99_over_p50": round(p99 / p50, 2),
            "p99_over_p50_limit": TAIL,
        }


def soak(steps: int, room: Path) -> dict[str, object]:
    """Train for that many steps, and measure."""
    os.environ["PACELINE_CACHE"] = str(room / "cache")
    torch.set_num_threads(1)
    run = Run(
        data=(str(write_text(room / "text.txt", paragraphs=400)),),
        model="gpt:0.3m",
        tokenizer="bpe:300",
        length=16,
        batch_size=2,
        steps=steps,
        averages=("power:0.5",),
        telemetry_every=50,
        evaluate_every=max(1, steps // 40),
        checkpoint_every=max(1, steps // 80),
        held_out_samples=4,
        dropout=0.1,
        device="cpu",
    )
    watch = Watch()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for event in execute(run, room / "run", lambda text: None):
            watch.take(event)
    repeated = {text: count for text, count in Counter(str(w.message) for w in heard).items() if count > 1}
    found = watch.report() | {"warnings": len(heard), "repeated_warnings": repeated}
    found["passed"] = (
        found["resident_growth_bytes"] <= GROWTH and len(watch.files) == 1 and not repeated  # type: ignore[operator]
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as room:
        found = soak(options.steps, Path(room))
    result = {
        "what": "one run of many steps; growth is that of the resident memory after step 1,000",
        "date": time.strftime("%F"),
        "steps": options.steps,
        **found,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "torch": torch.__version__,
    }
    print(json.dumps(result, indent=1))
    if options.record:
        options.record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
