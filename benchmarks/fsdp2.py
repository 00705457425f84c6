"""What FSDP2 adds to a step of PACE, on one GPU: `torchrun --nproc-per-node 1 benchmarks/fsdp2.py`.

GPT-2 124M, sharded by `fully_shard` over the ranks at hand, beside the same model as it is. Both take the
same steps by turns in one process, timed from before step() to after it on a device that has nothing else to
do. To be shown, on one GPU: at most 1.02 times the plain model's, by the same path. torch's fused AdamW
stands beside it.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers import GPT2Config, GPT2LMHeadModel

import paceline

WARM_UP = 5
SETTINGS: dict[str, dict[str, Any]] = {"PACE": {}, 'PACE, gain="paper"': {"gain": "paper"}}


def make_model(options: argparse.Namespace, sharded: bool) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512} if options.small else {}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config).to(options.device)
    if sharded:
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    return model


class Trained:
    """A model with its optimizer, and the milliseconds of each of its steps."""

    def __init__(self, options: argparse.Namespace, sharded: bool, make: Any) -> None:
        self.model = make_model(options, sharded)
        self.optimizer = make(self.model.parameters())
        self.device = options.device
        self.times: list[float] = []
        self.collectives = 0

    def take_gradients(self, tokens: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()

    def timed_step(self) -> None:
        self._wait()
        begun = time.perf_counter()
        self.optimizer.step()
        self._wait()
        self.times.append(1e3 * (time.perf_counter() - begun))

    def counted_step(self) -> None:
        with CommDebugMode() as debug:
            self.optimizer.step()
        self.collectives = debug.get_total_counts()

    def path(self) -> str:
        return repr(self.optimizer).splitlines()[-2].strip().removeprefix("step of group 0: ")

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        if name == "AdamW":
            return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        on_cpu = {"fused": True} if options.device == "cpu" else {}
        return paceline.PACE(parameters, lr=1e-4, **SETTINGS[name], **on_cpu)

    pair = {"plain": Trained(options, False, make), "sharded": Trained(options, True, make)}
    vocabulary = pair["plain"].model.config.vocab_size
    rounds: dict[str, list[float]] = {"plain": [], "sharded": []}
    for number in range(options.rounds):
        for own in pair.values():
            own.times.clear()
        for _ in range(options.steps + (WARM_UP if number == 0 else 0)):
            tokens = torch.randint(vocabulary, (options.batch, options.length), device=options.device)
            for own in pair.values():
                own.take_gradients(tokens)
                own.timed_step()
        for kind, own in pair.items():
            rounds[kind].append(statistics.median(own.times[-options.steps :]))
    for own in pair.values():
        own.take_gradients(tokens)
        own.counted_step()
    medians = {kind: statistics.median(found) for kind, found in rounds.items()}
    found = {
        "milliseconds": rounds,
        "ratio": medians["sharded"] / medians["plain"],
        "collectives of a sharded step": pair["sharded"].collectives,
        "path": {kind: own.path() for kind, own in pair.items() if name != "AdamW"},
    }
    print(
        f"{name}: plain {medians['plain']:.3f} ms, sharded {medians['sharded']:.3f} ms, "
        f"ratio {found['ratio']:.3f}, {found['path']}",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30, help="of each, in a round")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try this program")
    parser.add_argument("--record", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --device cpu --small tries this program")

    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(key, value)  # alone, without torchrun
    os.environ.setdefault("MASTER_PORT", "29533")
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    found = {name: compare(name, options) for name in (*SETTINGS, "AdamW")}
    if options.record and dist.get_rank() == 0:
        record = {
            "what": "time of optimizer.step(), GPT-2 124M, sharded and plain, medians of rounds, ms",
            "hardware": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
            "ranks": dist.get_world_size(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "paceline": paceline.__version__,
            },
            "settings": {key: value for key, value in vars(options).items() if key != "record"},
            "found": found,
        }
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
