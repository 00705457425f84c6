"""What the Trainer of transformers adds to a step of PACE, on a GPU: `python benchmarks/huggingface.py`.

GPT-2 124M, bfloat16 autocast. In each of several rounds the Trainer takes some steps, then a plain loop as
many with an optimizer of its own; both are timed from before step() to after it, on a device that has nothing
else to do. To be shown: at most 1.02 times the plain loop's. AdamW, torch's fused one, stands beside it.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import paceline
from paceline.integrations.huggingface import AveragedModelCallback, pace_for_trainer

WARM_UP = 5


class Stopwatch(TrainerCallback):
    """Milliseconds from before each step of the optimizer to after it."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.mark()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.mark()

    def mark(self) -> None:
        # The Trainer itself waits here, to see the norm of the gradients.
        torch.cuda.synchronize()
        self._marks.append(time.perf_counter())

    def times(self) -> list[float]:
        begun, ended = self._marks[::2], self._marks[1::2]
        return [1e3 * (end - begin) for begin, end in zip(begun, ended, strict=True)][WARM_UP:]


def make_model(small: bool) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2} if small else {}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def arguments(folder: str, options: argparse.Namespace) -> TrainingArguments:
    return TrainingArguments(
        folder,
        max_steps=options.steps + WARM_UP,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-3,
        bf16=True,
        optim="adamw_torch_fused",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )


def in_trainer(options: argparse.Namespace, rows: list[Any], pace: bool) -> tuple[list[float], str]:
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, options)
        ours: dict[str, Any] = {"optimizer_cls_and_kwargs": pace_for_trainer(args)} if pace else {}
        callbacks = [watch, *([AveragedModelCallback()] if pace else [])]
        trainer = Trainer(make_model(options.small), args, train_dataset=rows, callbacks=callbacks, **ours)
        trainer.train()
        path = repr(trainer.optimizer.optimizer).splitlines()[-2].strip()
    return watch.times(), path


def in_plain_loop(options: argparse.Namespace, rows: list[Any]) -> list[float]:
    model = make_model(options.small).cuda()
    # The groups that the Trainer makes: with weight decay and without.
    optimizer = paceline.PACE(paceline.parameter_groups(model, weight_decay=0.0), lr=1e-3)
    watch = Stopwatch()
    for i in range(options.steps + WARM_UP):
        own = rows[i * options.batch % len(rows) :][: options.batch]
        tokens = torch.stack([row["input_ids"] for row in own]).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        watch.mark()
        optimizer.step()
        watch.mark()
        optimizer.zero_grad()
    return watch.times()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25, help="of each, in a round")
    parser.add_argument("--batch", type=int, default=16, help="rows of 1,024 tokens")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try this program")
    parser.add_argument("--record", type=Path, help="write the figures here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/huggingface.py needs a GPU: on a CPU there is no kernel to keep")

    rows = [{"input_ids": row, "labels": row} for row in torch.randint(50257, (8 * options.batch, 1024))]
    times: dict[str, list[float]] = {"PACE, Trainer": [], "PACE, plain loop": [], "AdamW, Trainer": []}
    for number in range(options.rounds):
        found, path = in_trainer(options, rows, pace=True)
        times["PACE, Trainer"].append(statistics.median(found))
        times["PACE, plain loop"].append(statistics.median(in_plain_loop(options, rows)))
        times["AdamW, Trainer"].append(statistics.median(in_trainer(options, rows, pace=False)[0]))
        print(
            f"round {number + 1}: " + ", ".join(f"{k} {v[-1]:.3f} ms" for k, v in times.items()), flush=True
        )
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratio = medians["PACE, Trainer"] / medians["PACE, plain loop"]
    print(f"{path}\nPACE in the Trainer takes {ratio:.3f} of a plain loop's step (at most 1.02 wanted)")
    if options.record:
        record = {
            "what": "time of optimizer.step(), GPT-2 124M, medians of rounds, milliseconds",
            "hardware": torch.cuda.get_device_name(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "paceline": paceline.__version__,
            },
            "settings": {key: value for key, value in vars(options).items() if key != "record"},
            "path": path,
            "milliseconds": times,
            "ratio to a plain loop": ratio,
        }
        options.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
