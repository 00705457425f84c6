"""The Schedule-Free optimizers of the `schedulefree` package, behind the evaluation of this library."""

from typing import Any, final
from weakref import ref

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from paceline.optim.attach import Attachment, Base
from paceline.optim.state import STEP, Entry, State
from paceline.optim.steering import Rule


def schedule_free(base: Base) -> Base:
    """Let `averaged_weights` evaluate a Schedule-Free optimizer (Defazio et al., arXiv 2405.15682).

    It takes an optimizer of the `schedulefree` package (AdamW, SGD or RAdam) and returns it.
    The parameters hold the weights to take gradients at, y; evaluated and returned is the average x, shown by
    `averaged_weights` and taken back bit for bit. The package's own `eval()` and `train()` go there and back
    by arithmetic, and drift: do not call them.

    The paper's settings: lr 1 to 10 times that of a schedule, betas (0.9, 0.999) or (0.95, 0.99), a warm-up,
    no decay of the rate. The package overwrites `.grad` in its step.
    """
    if not isinstance(base, Optimizer) or not all("train_mode" in group for group in base.param_groups):
        raise TypeError(
            f"schedule_free takes an optimizer of the schedulefree package, not {type(base).__name__}"
        )
    if not all(group["train_mode"] for group in base.param_groups):  # a fresh or loaded one is in eval mode
        base.train()  # type: ignore[attr-defined]
    Attachment(base, _ScheduleFree(base))
    return base


@final
class _ScheduleFree(Rule):
    """The rule of `schedule_free`: nothing is kept, since x follows from y and the package's z."""

    kept = ()

    def __init__(self, base: Optimizer) -> None:
        self.settings = {}  # all of them are the package's
        self._base = ref(base)  # a load replaces its groups and states

    def names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("x",)

    def entries(self, live: Tensor, group: dict[str, Any]) -> dict[str, Entry]:
        return {"step": STEP}

    def value(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor | None:
        """Return x from y = beta · x + (1 − beta) · z."""
        base = self._base()
        if base is None or state["step"].item() == 0:
            return None
        # The package's own eval() was called: the parameter is x. A group that was added later has no mode.
        if not base.param_groups[0]["train_mode"]:
            return live
        group = next(g for g in base.param_groups if any(p is parameter for p in g["params"]))
        beta = group["betas"][0] if "betas" in group else group["momentum"]
        return torch.lerp(live, base.state[parameter]["z"].to(live), 1 - 1 / beta)
