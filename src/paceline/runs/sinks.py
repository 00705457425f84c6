"""TensorBoard and Weights & Biases, where they are installed: the same numbers under the same names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.lm.loop import Evaluation, Step
from paceline.runs.config import ConfigError, Run, as_mapping
from paceline.runs.run import Event

Put = Callable[[int, dict[str, float]], None]


class Scalars:
    """Hands the numbers of a run to a tool that draws them."""

    def __init__(self, put: Put) -> None:
        self._put = put

    def take(self, event: Event) -> None:
        """Draw steps and evaluations."""
        match event:
            case Step():
                self._put(event.step, {f"train/{k}": getattr(event, k) for k in ("loss", "grad_norm", "lr")})
            case Evaluation():
                losses = {f"{name}/{view}": v for name, by in event.losses.items() for view, v in by.items()}
                self._put(event.step, losses)


def open_sink(name: str, folder: Path, run: Run) -> Scalars:
    """Return the sink of that name; raise ConfigError if its package is missing."""
    try:
        return Scalars({"tensorboard": _tensorboard, "wandb": _wandb}[name](folder, run))
    except ImportError:
        raise ConfigError(f"--log {name} needs its package: pip install {name}") from None


def _tensorboard(folder: Path, run: Run) -> Put:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"))  # type: ignore[no-untyped-call, unused-ignore]

    def put(step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return put


def _wandb(folder: Path, run: Run) -> Put:
    import wandb  # type: ignore[import-not-found, unused-ignore]

    wandb.init(project="paceline", name=folder.name, dir=str(folder), config=as_mapping(run), resume="allow")
    return lambda step, values: wandb.log(values, step=step)
