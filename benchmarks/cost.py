"""The cost model (`paceline cost`, docs/cost.md) beside measurements: memory and time of training steps.

    python benchmarks/cost.py --record FILE
        on a GPU that the model knows: a 25M GPT, GPT-2 124M and a Llama of 1.2B with activation
        checkpointing, each with fused AdamW and PACE with averages in float32 and int8; compiled, bfloat16
        products. Some minutes, most of them to compile.
    python benchmarks/cost.py --device cpu
        tiny sizes in float32 on this machine, whose speed is measured first: bytes are to agree, seconds are
        of no use there

Tokens are random: neither memory nor speed depends on them. Nothing is fitted to what is measured here.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from paceline import PACE
from paceline.experiments.bench.command import environment
from paceline.experiments.bench.measure import copy_bandwidth, temporary_bytes
from paceline.experiments.bench.subjects import state_bytes
from paceline.experiments.cost.estimate import cost
from paceline.experiments.cost.hardware import HARDWARE, Hardware
from paceline.experiments.cost.memory import kept
from paceline.experiments.cost.optimizer import PRESETS, Optimizer
from paceline.experiments.cost.shape import Shape, named
from paceline.experiments.cost.speed import computing, optimizer_seconds
from paceline.experiments.cost.training import Training
from paceline.lm.batch import Batch
from paceline.lm.evaluate import LossOf, autocast, summed_loss
from paceline.lm.gpt import GPT, GPTShape

# --- A Llama ------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.keys, self.size = shape.heads, shape.keys, shape.width // shape.heads

        def linear(out: int, into: int) -> nn.Linear:
            return nn.Linear(into, out, bias=False)

        query, key, value, self.out, gate, up, self.down = (linear(*size) for size in shape.products())
        self.query, self.key, self.value, self.gate, self.up = query, key, value, gate, up
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(shape.width) for _ in range(2))

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.out(self.attend(self.attention_norm(x), cosine, sine))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def attend(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, _ = x.shape
        queries, keys, values = (
            made(x).view(batch, length, -1, self.size).transpose(1, 2)
            for made in (self.query, self.key, self.value)
        )

        def turned(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return (y * cosine + torch.cat((-second, first), -1) * sine).to(y.dtype)

        seen = F.scaled_dot_product_attention(
            turned(queries), turned(keys), values, is_causal=True, enable_gqa=self.keys != self.heads
        )
        return seen.transpose(1, 2).reshape(batch, length, -1)


class Llama(nn.Module):
    """As in `Shape`: grouped keys, rotary positions, a gated MLP, RMSNorm."""

    def __init__(self, shape: Shape, activation_checkpointing: bool) -> None:
        super().__init__()
        self.again = activation_checkpointing
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        if shape.tied:
            self.head.weight = self.tokens.weight
        half = shape.width // shape.heads // 2
        speeds = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(shape.length), speeds).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the layers make of tokens."""
        x = self.tokens(tokens)
        for layer in self.layers:
            if self.again:
                x = checkpoint(layer, x, self.cosine, self.sine, use_reentrant=False)
            else:
                x = layer(x, self.cosine, self.sine)
        return x

    def summed_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Of what comes out of the layers."""
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def loss_of(model: nn.Module, *, compiled: bool) -> LossOf:
    """A GPT is compiled as a whole, as `paceline train` does; a Llama layer by layer, as large trainings do:
    inside one graph, activation checkpointing is the compiler's affair."""
    if not isinstance(model, Llama):
        return torch.compile(summed_loss) if compiled else summed_loss
    last = model.summed_loss
    if compiled:
        last = torch.compile(last)
        for layer in model.layers:
            layer.compile()
    return lambda model, batch: last(model.hidden(batch.tokens), batch.targets)


def model_of(shape: Shape, activation_checkpointing: bool) -> nn.Module:
    if shape.kind == "llama":
        return Llama(shape, activation_checkpointing)
    own = GPTShape(
        vocabulary=shape.vocabulary,
        length=shape.positions,
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
    )
    return GPT(own, activation_checkpointing=activation_checkpointing)


# --- What is measured -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Size:
    name: str
    shape: Shape
    batch: int
    activation_checkpointing: bool = False


# Large enough batches that the device, not the host, is what takes time.
ON_A_GPU = (
    Size(name="gpt:25m", shape=named("gpt:25m", vocabulary=8192, length=1024), batch=64),
    Size(name="gpt2", shape=named("gpt2"), batch=16),
    Size(name="1b", shape=named("1b", length=2048), batch=8, activation_checkpointing=True),
)
_TINY = "llama:width=64,layers=3,heads=4,keys=2,inner=160,vocabulary=512,length=64,tied=true"
ON_A_CPU = (
    Size(name="gpt:0.3m", shape=named("gpt:0.3m", vocabulary=512, length=64), batch=8),
    Size(name="gpt:1m", shape=named("gpt:1m", vocabulary=512, length=64), batch=8),
    Size(name="llama", shape=named(_TINY), batch=8, activation_checkpointing=True),
)
INT8 = PRESETS["pace"].with_settings(average_dtype="int8")
OPTIMIZERS: dict[str, Optimizer] = {"AdamW": PRESETS["adamw"], "PACE": PRESETS["pace"], "PACE, int8": INT8}


def made(name: str, model: nn.Module) -> Any:
    if name == "AdamW":
        return AdamW(model.parameters(), fused=True)
    return PACE(model.parameters(), average_dtype=OPTIMIZERS[name].average_dtype)


class Steps:
    """Whole steps of one model with one optimizer, timed by parts."""

    def __init__(self, model: nn.Module, optimizer: Any, loss_of: Any, batch: Batch, precision: torch.dtype):
        self.model, self.optimizer, self.loss_of, self.batch = model, optimizer, loss_of, batch
        self.precision, self.device = precision, batch.tokens.device

    def gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.precision):
            loss = self.loss_of(self.model, self.batch) / self.batch.targets.numel()
        loss.backward()

    def whole(self) -> None:
        self.gradient()
        self.optimizer.step()

    def times(self, rounds: int) -> tuple[float, float]:
        """Seconds of a step and of its optimizer: medians. The device is waited for at the end only."""
        marks = []
        for _ in range(rounds):
            marks.append(self._mark())
            self.gradient()
            marks.append(self._mark())
            self.optimizer.step()
        marks.append(self._mark())
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            spans = [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
        else:
            spans = [b - a for a, b in pairwise(marks)]
        steps = [a + b for a, b in zip(spans[::2], spans[1::2], strict=True)]
        return statistics.median(steps), statistics.median(spans[1::2])

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def peak(self) -> int:
        """Bytes at the fullest moment of a step."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.whole()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        held = sum(p.nbytes for p in self.model.parameters()) + state_bytes(self.optimizer, "cpu")
        return held + temporary_bytes(self.whole, "cpu")


def measured(size: Size, options: argparse.Namespace, hardware: Hardware) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    device = torch.device(options.device)
    precision = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = model_of(size.shape, size.activation_checkpointing)
        tokens, targets = torch.randint(size.shape.vocabulary, (2, size.batch, size.shape.length))
    loss = loss_of(model, compiled=options.compile)
    for name, about in OPTIMIZERS.items():
        training = Training(
            shape=size.shape,
            hardware=hardware,
            optimizer=about,
            precision="bfloat16" if precision == torch.bfloat16 else "float32",
            compile=options.compile,
            micro_batch=size.batch,
            activation_checkpointing=size.activation_checkpointing,
            clip=False,
        )
        steps = Steps(model, made(name, model), loss, Batch(tokens, targets, None), precision)
        for _ in range(3):  # which compile and allocate
            steps.whole()
        seconds, own = steps.times(options.rounds)
        found = {
            "peak": float(steps.peak()),
            "weights": float(sum(p.nbytes for p in model.parameters())),
            "state": float(state_bytes(steps.optimizer, device.type)),
            "step_seconds": seconds,
            "optimizer_seconds": own,
        }
        yield row_of(size, name, training, found)
        model.zero_grad(set_to_none=True)
        del steps
        gc.collect()
    del model
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def row_of(size: Size, name: str, training: Training, found: dict[str, float]) -> dict[str, Any]:
    whole, state = cost(training), kept(training)
    # On a CPU no launches are waited for.
    alone = computing(training).seconds + optimizer_seconds(training)
    predicted = {
        "peak": whole.memory.total,
        "weights": float(state.weights),
        "state": float(state.moments + state.averages),
        "step_seconds": whole.step_seconds if training.precision == "bfloat16" else alone,
        "optimizer_seconds": whole.optimizer_seconds,
    }
    return {
        "model": size.name,
        "parameters": training.shape.parameters,
        "tokens": training.micro_tokens,
        "optimizer": name,
        "measured": found,
        "predicted": predicted,
        "parts": asdict(whole.memory),
        "mfu": whole.operations / found["step_seconds"] / training.hardware.peak,
        "error": {key: predicted[key] / found[key] - 1 for key in found},
    }


def this_cpu() -> Hardware:
    """A CPU, by what products and copying reach on it."""
    a, b = torch.randn(2, 1024, 1024)
    best = min(_seconds_of_product(a, b) for _ in range(5))
    bandwidth = copy_bandwidth("cpu", rounds=3)
    peak = 2 * 1024**3 / best
    return Hardware(
        name="this CPU",
        peak=peak,
        peak_float32=peak,
        memory=1e12,
        bandwidth=bandwidth,
        link=1e9,
        network=1e9,
        bus=bandwidth,
        copying=1.0,
        products=1.0,
    )


def _seconds_of_product(a: Tensor, b: Tensor) -> float:
    began = time.perf_counter()
    a @ b
    return time.perf_counter() - began


def line(row: dict[str, Any]) -> str:
    found, guess, error = row["measured"], row["predicted"], row["error"]
    cells = [f"{row['model']:10} {row['optimizer']:12}"]
    for key, scale, unit in (
        ("peak", 1e9, "GB"),
        ("step_seconds", 1e-3, "ms"),
        ("optimizer_seconds", 1e-3, "ms"),
    ):
        cells.append(f"{found[key] / scale:9.3f} {guess[key] / scale:9.3f} {unit} {error[key]:+7.1%}")
    return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="[a GPU if there is one]")
    parser.add_argument("--hardware", choices=HARDWARE, default="h200", help="which GPU it is [h200]")
    parser.add_argument("--only", nargs="+", help="of the models")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="[on a GPU]")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each that count [15]")
    parser.add_argument("--record", type=Path, help="write the result to this JSON file")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = options.device == "cuda"
    options.compile = on_gpu if options.compile is None else options.compile
    hardware = HARDWARE[options.hardware] if on_gpu else this_cpu()
    sizes = [s for s in (ON_A_GPU if on_gpu else ON_A_CPU) if not options.only or s.name in options.only]
    if not sizes:
        parser.error(f"--only: there are {', '.join(s.name for s in (ON_A_GPU if on_gpu else ON_A_CPU))}")
    about = {"benchmark": "cost", **environment(options.device), "compiled": options.compile}
    about |= {"rounds": options.rounds, "taken_for": asdict(hardware)}
    rows: list[dict[str, Any]] = []
    print(f"{'':23}  {'peak, measured, predicted':^34}  {'a step':^31}  {'its optimizer':^31}")
    for size in sizes:
        try:
            for row in measured(size, options, hardware):
                rows.append(row)
                print(line(row), flush=True)
        except RuntimeError as error:  # the other sizes are worth having
            print(f"{size.name}: {' '.join(str(error).split())[:300]}")
            about.setdefault("failed", {})[size.name] = str(error)[:2000]
        worst = {
            key: max((abs(row["error"][key]) for row in rows), default=None)
            for key in ("peak", "state", "step_seconds", "optimizer_seconds")
        }
        if options.record:  # what is known stays known
            text = json.dumps({**about, "worst": worst, "rows": rows}, indent=1)
            options.record.write_text(text + "\n", encoding="utf-8")
    print(
        "largest errors: "
        + ", ".join(f"{key} {value:.1%}" for key, value in worst.items() if value is not None)
    )


if __name__ == "__main__":
    main()
