"""The Schedule-Free optimizers of the `schedulefree` package, behind the evaluation of this one."""

from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from paceline.optim.loading import Format
from paceline.optim.state import State
from paceline.optim.weights import show_computed_, show_kept_
from paceline.optim.wrapper import Wrapper


def _no_setting_of_ours(group: dict[str, Any]) -> None:
    """All settings are the package's."""


def _wanted(group: dict[str, Any]) -> tuple[str, ...]:
    return ()


@final
class ScheduleFree(Wrapper):
    """A Schedule-Free optimizer (Defazio et al., arXiv 2405.15682) that never has to be told its mode.

    Wraps an optimizer of the `schedulefree` package: AdamW, SGD, RAdam, and ScheduleFree+ (arXiv
    2605.19095; in the package's repository, not yet in its release 1.4.1), which needs `step(closure)`.
    The parameters hold the weights to take gradients at, y; what is evaluated and returned is the
    average x, shown by `averaged_weights` or `eval()` and taken back bit for bit. The package's own
    `eval()` and `train()` are not called: they go there and back by arithmetic, and drift.

    The paper's settings: lr 1 to 10 times that of a schedule, betas (0.9, 0.999) or (0.95, 0.99), a
    warm-up (`warmup_steps`), no decay of the rate. The package overwrites `.grad` in its step.

    >>> import torch, paceline, schedulefree
    >>> from paceline.optim.baselines import ScheduleFree
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ScheduleFree(schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01))
    >>> model(torch.ones(4, 2)).square().mean().backward()
    >>> optimizer.step()
    >>> with paceline.averaged_weights(optimizer):
    ...     loss = model(torch.ones(4, 2)).square().mean()
    """

    format = Format(
        prefix="schedulefree_",
        reads="ScheduleFree loads its own states and those of its base optimizer",
        check=_no_setting_of_ours,
        wanted=_wanted,
        on_device=False,
    )

    def __init__(self, base: Optimizer) -> None:
        if isinstance(base, Optimizer) and not all("train_mode" in group for group in base.param_groups):
            raise TypeError(
                f"ScheduleFree wraps an optimizer of the schedulefree package, not {type(base).__name__}; "
                "for an average beside another optimizer take Pullback or Averages"
            )
        super().__init__(base, {})
        self._be_in_train_mode()

    def _be_in_train_mode(self) -> None:
        """A fresh one starts out in eval mode, and a loaded one may be: from there the package goes to y."""
        if not all(group["train_mode"] for group in self.param_groups):
            self.base.train()  # type: ignore[attr-defined]

    def _prepare(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        self._be_in_train_mode()

    def _finish(self, group: dict[str, Any], moved: list[Tensor], prepared: None) -> None:
        for parameter in moved:
            self._memory[parameter]["step"] += 1

    def _abandon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Nothing was changed."""

    def _average(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor:
        entries = self.base.state[parameter]
        if "x" in entries:  # ScheduleFree+ keeps it
            average: Tensor = entries["x"]
            return average
        # y = beta · x + (1 − beta) · z
        group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
        if not group["train_mode"]:  # the package's own eval() was called: the parameter is x
            return live
        beta = group["betas"][0] if "betas" in group else group["momentum"]
        return torch.lerp(live, entries["z"].to(live), 1 - 1 / beta)

    def _show(self, name: str, parameter: Tensor, state: State) -> None:
        show_computed_(parameter, state, self._average(name, parameter, state, parameter.detach()))

    def _hide(self, parameter: Tensor, state: State) -> None:
        show_kept_(parameter, state)
