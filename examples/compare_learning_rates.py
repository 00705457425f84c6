"""What a wrong learning rate costs: AdamW, the average of its iterates (EMA), and PACE.

A tiny byte-level GPT learns from the Python language reference, which ships inside every Python: six
runs, two to three minutes on two CPU cores. All runs share initial weights and batches; only learning
rate and optimizer differ. Losses are on held-out text, in nats per byte.

One tiny model, one seed, short runs: it shows how the pieces are used and what to look for, and is not
evidence. Vary --seed and --steps before believing a small difference. The text, and so every number,
also depends on the version of Python.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import PACE, averaged_weights

LIVE, EMA, PULLED = METHODS = ("AdamW (live)", "EMA (average)", "PACE (average)")
COLOURS = {LIVE: "#7f7f7f", EMA: "#1f77b4", PULLED: "#d62728"}
Losses = dict[float, dict[str, float]]  # held-out, by learning rate and method


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that the numbers depend on, besides the Python whose text is read."""

    steps: int = 400
    seed: int = 0
    learning_rates: tuple[float, ...] = (1e-3, 4e-3, 1.6e-2)
    pullback_strength: float = 3e-3
    ema_power: float = 0.5
    weight_decay: float = 0.01
    warmup_steps: int = 40
    clip_norm: float = 1.0
    batch: int = 12  # windows per step
    context: int = 64  # bytes per window
    width: int = 128
    heads: int = 4
    layers: int = 2


# --- Text -----------------------------------------------------------------------------------------


def read_text() -> tuple[Tensor, Tensor]:
    """Training and held-out bytes; every tenth topic is held out."""
    names = sorted(topics)
    held_out, rest = names[::10], [name for i, name in enumerate(names) if i % 10]
    # Topics contain each other. Each paragraph counts once and held-out topics choose first, so that
    # no held-out paragraph is trained on.
    seen: set[str] = set()
    held_text, train_text = ("\n\n".join(_new_paragraphs(part, seen)) for part in (held_out, rest))
    return torch.tensor(list(train_text.encode())), torch.tensor(list(held_text.encode()))


def _new_paragraphs(names: list[str], seen: set[str]) -> Iterator[str]:
    for paragraph in (part for name in names for part in topics[name].split("\n\n")):
        content = " ".join(paragraph.split())  # a repeated paragraph may be indented differently
        if content and content not in seen:
            seen.add(content)
            yield paragraph


def batch_of(text: Tensor, step: int, settings: Settings) -> Tensor:
    """Windows of context + 1 bytes: a function of seed and step alone, so all runs see the same."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - settings.context, (settings.batch, 1), generator=generator)
    return text[starts + torch.arange(settings.context + 1)]


# --- Model ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal attention, then a perceptron, each added to the stream it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.perceptron = nn.Sequential(up, nn.ReLU(), down)  # GELU's derivative is slow on some CPUs

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, context, width / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.perceptron_norm(x))


class TinyGPT(nn.Module):
    """Predicts the next byte at every position; called with windows, it gives their mean loss."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(settings.context, width)
        self.blocks = nn.Sequential(*(Block(width, settings.heads) for _ in range(settings.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, windows: Tensor) -> Tensor:
        x = self.byte(windows[:, :-1]) + self.position.weight
        scores = self.head(self.norm(self.blocks(x)))  # (batch, context, 256)
        return F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


# --- Training and evaluation ----------------------------------------------------------------------


def train(model: nn.Module, optimizer: PACE, text: Tensor, settings: Settings) -> Iterator[float]:
    """Train the live weights; yields the training loss of every step."""
    warmup = settings.warmup_steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / warmup))
    for step in range(settings.steps):
        loss = model(batch_of(text, step, settings))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        schedule.step()
        yield loss.item()


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, settings: Settings) -> float:
    """Loss of whichever weights, live or average, the parameters hold; on every other window."""
    windows = text.unfold(0, settings.context + 1, 2 * settings.context)
    return sum(model(part).item() * len(part) for part in windows.split(64)) / len(windows)


def compare_(losses: Losses, settings: Settings) -> Iterator[tuple[str, bool]]:
    """Make all runs, each filling its part of `losses`; yields what to say and whether a run has ended."""
    train_text, held_text = read_text()
    started, steps = time.monotonic(), settings.steps
    # Strength 0 is AdamW exactly, with its EMA beside it: one run serves two methods.
    strengths = {"AdamW": 0.0, "PACE": settings.pullback_strength}
    runs = [(lr, name) for lr in settings.learning_rates for name in strengths]
    for run, (lr, name) in enumerate(runs):
        torch.manual_seed(settings.seed)  # the same initial weights in every run
        model = TinyGPT(settings)
        decay, power = settings.weight_decay, settings.ema_power
        optimizer = PACE(
            model.parameters(), lr, weight_decay=decay, pullback_strength=strengths[name], ema_power=power
        )
        label = f"[{run + 1}/{len(runs)}] lr {lr:<6g}"
        for step, loss in enumerate(train(model, optimizer, train_text, settings), start=1):
            left = (time.monotonic() - started) * (len(runs) * steps / (run * steps + step) - 1)
            yield f"{label} {name}, step {step}/{steps}, training loss {loss:.2f}, {left:.0f} s left", False
        found = {LIVE: held_out_loss(model, held_text, settings)} if name == "AdamW" else {}
        with averaged_weights(optimizer):
            found[EMA if name == "AdamW" else PULLED] = held_out_loss(model, held_text, settings)
        losses[lr] = losses.get(lr, {}) | found
        yield f"{label} held out: {', '.join(f'{m} {loss:.3f}' for m, loss in found.items())}", True


# --- Reporting ------------------------------------------------------------------------------------


def show(progress: Iterator[tuple[str, bool]]) -> None:
    """Print one line per run, rewritten in place on a terminal; elsewhere a new one every 15 seconds."""
    in_place = sys.stdout.isatty()
    printed = time.monotonic()
    for line, ended in progress:
        if ended or time.monotonic() - printed > (0.1 if in_place else 15):
            printed = time.monotonic()
            line = f"\r{line:<79}" if in_place else line
            print(line, end="\n" if ended or not in_place else "", flush=True)


def table(losses: Losses) -> str:
    """Held-out losses, one row per learning rate, * at the best of each row."""
    lines = ["learning rate" + "".join(f"{method:>17} " for method in METHODS)]
    for lr, row in losses.items():
        best = min(row.values()) if len(row) == len(METHODS) else None
        cells = [f"{row[m]:.3f}{'*' if row[m] == best else ' '}" if m in row else "- " for m in METHODS]
        lines.append(f"{lr:<13g}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def conclusion(losses: Losses) -> str:
    """What each method loses at the highest learning rate to the best of the table."""
    best, method, lr = min((loss, m, lr) for lr, row in losses.items() for m, loss in row.items())
    behind = ", ".join(f"{m} {loss - best:.3f}" for m, loss in losses[max(losses)].items())
    return (
        f"Best of the table: {method} at {lr:g}, {best:.3f}.\n"
        f"Nats per byte behind it at the highest rate, {max(losses):g}: {behind}."
    )


def draw(losses: Losses, title: str, path: Path) -> str:
    """Draw held-out loss against learning rate; returns where the picture is, or how to get one."""
    try:
        from matplotlib.figure import Figure  # without pyplot it draws by Agg and needs no display
    except ImportError:
        return "No picture: it needs matplotlib, pip install 'paceline[demo]'"
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    rates = list(losses)
    for method in METHODS:
        axes.plot(rates, [losses[lr][method] for lr in rates], "o-", color=COLOURS[method], linewidth=2)
    low, high = axes.get_ylim()
    label_y = float("-inf")
    for loss, method in sorted((loss, method) for method, loss in losses[rates[-1]].items()):
        label_y = max(loss, label_y + 0.06 * (high - low))  # labels of equal curves are moved apart
        axes.text(rates[-1] * 1.08, label_y, method, color=COLOURS[method], va="center")
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{lr:g}" for lr in rates])
    axes.minorticks_off()
    axes.set(xlabel="learning rate", ylabel="held-out loss (nats per byte)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=150)
    return f"Picture: {path}"


def read_arguments() -> tuple[Settings, Path]:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    steps_help = "steps of each of the six runs, %(default)s if not given; time grows in proportion"
    parser.add_argument("--steps", type=int, default=Settings.steps, metavar="N", help=steps_help)
    seed_help = "initial weights and batches, %(default)s if not given; what changes sign with it is noise"
    parser.add_argument("--seed", type=int, default=Settings.seed, metavar="N", help=seed_help)
    out_help = "folder for results.json and learning_rates.png, %(default)s if not given"
    parser.add_argument("--out", type=Path, default=Path("demo-output"), metavar="DIR", help=out_help)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least 1 is needed")
    return Settings(steps=arguments.steps, seed=arguments.seed), arguments.out


def main() -> int:
    settings, out = read_arguments()
    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made is said before the wait
    size = sum(parameter.numel() for parameter in TinyGPT(settings).parameters())
    title = f"GPT of {size / 1e6:.2f}M parameters, {settings.steps} steps on the Python language reference"
    print(f"{title}, seed {settings.seed}", flush=True)
    losses: Losses = {}
    try:
        show(compare_(losses, settings))
    except KeyboardInterrupt:
        print(f"\n\nInterrupted. Finished so far:\n{table(losses) if losses else 'nothing'}")
        return 130
    print(f"\nHeld-out loss, nats per byte, * best of its row\n\n{table(losses)}\n\n{conclusion(losses)}")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    record = {**versions, "parameters": size, "settings": asdict(settings), "held_out_loss": losses}
    (out / "results.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"Numbers: {out / 'results.json'}\n{draw(losses, title, out / 'learning_rates.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
