"""The Schedule-Free optimizers of the `schedulefree` package, behind the evaluation of this library."""

from typing import Any, TypeVar, final
from weakref import ref

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from paceline.rebuilt.attach import Attachment, Work
from paceline.rebuilt.state import Entry, State

Base = TypeVar("Base", bound=Optimizer)


def schedule_free(base: Base) -> Base:
    """Let `averaged_weights` evaluate a Schedule-Free optimizer (Defazio et al., arXiv 2405.15682); return
    it.

    It takes an optimizer of the `schedulefree` package: AdamW, SGD, RAdam or ScheduleFree+. The parameters
    hold the weights to take gradients at, y; evaluated and returned is the average x, shown by
    `averaged_weights` and taken back bit for bit. The package's own `eval()` and `train()` go there and back
    by arithmetic, and drift: do not call them.

    The paper's settings: lr 1 to 10 times that of a schedule, betas (0.9, 0.999) or (0.95, 0.99), a warm-up,
    no decay of the rate. The package overwrites `.grad` in its step.
    """
    if not isinstance(base, Optimizer) or not all("train_mode" in group for group in base.param_groups):
        raise TypeError(
            f"schedule_free takes an optimizer of the schedulefree package, not {type(base).__name__}"
        )
    _train(base)
    Attachment(base, _ScheduleFree(base))
    return base


def _train(base: Any) -> None:
    """Leave the package's eval mode, in which a fresh or loaded optimizer may be."""
    if not all(group["train_mode"] for group in base.param_groups):
        base.train()


@final
class _ScheduleFree:
    """The rule of `schedule_free`."""

    kept: tuple[str, ...] = ()
    moves_live = False
    settings: dict[str, Any] = {}  # noqa: RUF012  all settings are the package's

    def __init__(self, base: Optimizer) -> None:
        self._base = ref(base)  # a load replaces its groups and states

    def check(self, group: dict[str, Any]) -> None:
        """Accept all settings, which are the package's."""

    def factor(self, group: dict[str, Any]) -> float:
        return 1.0

    def returned(self, group: dict[str, Any]) -> str:
        return "x"

    def entries(self, live: Tensor, group: dict[str, Any]) -> dict[str, Entry]:
        return {"step": Entry(torch.float64, (), on_host=True)}

    def before_(self, work: Work) -> None:
        """Prepare nothing."""

    def undo_(self, work: Work) -> None:
        """Undo nothing: nothing was changed."""

    def after_(self, works: list[Work], t: int) -> None:
        """Nothing is kept here: x follows from y and the package's z."""

    def value(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor:
        """Return x from y = beta · x + (1 − beta) · z."""
        base = self._base()
        assert base is not None
        entries = base.state[parameter]
        if "x" in entries:  # ScheduleFree+ keeps it
            average: Tensor = entries["x"]
            return average
        group = next(g for g in base.param_groups if any(p is parameter for p in g["params"]))
        if not group["train_mode"]:  # the package's own eval() was called: the parameter is x
            return live
        beta = group["betas"][0] if "betas" in group else group["momentum"]
        return torch.lerp(live, entries["z"].to(live), 1 - 1 / beta)
