"""AdEMAMix: AdamW with a second, slow momentum (Pagliardini, Ablin & Grangier, arXiv 2409.03137)."""

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from paceline.optim.checkpoint import is_dummy_step
from paceline.optim.foreach import chunks, number, take_gradients_
from paceline.optim.settings import ALLOWED, COUNT, NOT_NEGATIVE, Allowed, check, is_number, or_none
from paceline.optim.sharding import local
from paceline.optim.state import STEP, Entry, follow_, named_parameters

_ALLOWED: dict[str, Allowed] = {
    **{name: ALLOWED[name] for name in ("lr", "eps", "weight_decay", "maximize")},
    "betas": (
        lambda v: isinstance(v, tuple | list) and len(v) == 3 and all(is_number(b) and 0 <= b < 1 for b in v),
        "three numbers, each >= 0 and < 1",
    ),
    "alpha": NOT_NEGATIVE,
    "alpha_warmup": or_none(COUNT),
    "beta3_warmup": or_none(COUNT),
}
_MOMENTS = ("exp_avg", "exp_avg_slow", "exp_avg_sq")


def alpha_at(t: int, alpha: float, warmup: int | None) -> float:
    """Return the weight of the slow momentum at step t = 1, 2, …: alpha · t / warmup, then alpha.

    >>> [alpha_at(t, alpha=8.0, warmup=4) for t in (1, 2, 4, 5)]
    [2.0, 4.0, 8.0, 8.0]
    """
    return alpha if warmup is None or t >= warmup else alpha * t / warmup


def beta3_at(t: int, beta1: float, beta3: float, warmup: int | None) -> float:
    """Return the decay of the slow momentum at step t: its half-life grows linearly from beta1's to beta3's.

    >>> [round(beta3_at(t, beta1=0.5, beta3=0.5**0.01, warmup=99), 6) for t in (0, 1, 49, 99)]
    [0.5, 0.707107, 0.986233, 0.993092]
    """
    if warmup is None or t >= warmup:
        return beta3
    # Half-lives are ln ½ / ln β. The paper's formula, written so that it is finite for β₁ = 0 too:
    # 1 / ln β(t) = (1 − a) / ln β₁ + a / ln β₃ with a = t / warmup.
    a = t / warmup
    first, last = (1 / math.log(beta) if beta else 0.0 for beta in (beta1, beta3))
    inverse_log = (1 - a) * first + a * last
    return math.exp(1 / inverse_log) if inverse_log else 0.0


@final
class AdEMAMix(Optimizer):
    r"""AdamW whose step mixes two averages of the gradient, one fast, one slow.

    At every step t of a parameter, with g its gradient (arXiv 2409.03137, Algorithm 1)

    .. code-block:: text

        m₁ = β₁ m₁ + (1 − β₁) g        m₂ = β₃(t) m₂ + (1 − β₃(t)) g        ν = β₂ ν + (1 − β₂) g²
        live' = live − lr · ((m₁ / (1 − β₁ᵗ) + α(t) m₂) / (√(ν / (1 − β₂ᵗ)) + eps) + weight_decay · live)

    alpha = 0 is exactly `torch.optim.AdamW`. Nothing is averaged but gradients: the parameters are the
    model that is returned.

    Arguments:
        params, lr, eps, weight_decay, maximize: AdamW's; any setting may differ between groups.
        betas: β₁ of the fast momentum, β₂ of the second moment, β₃ of the slow momentum.
        alpha: weight of the slow momentum. The paper's algorithm leaves it open; the authors' own example
            has 8, other public implementations have 5.
        alpha_warmup: steps over which α(t) grows linearly from 0 to alpha. None: α from the start. The
            paper usually sets both warm-ups to the length of the run.
        beta3_warmup: steps over which β₃(t) goes from β₁ to β₃. None: β₃ from the start.

    The moments have the parameter's precision. In bfloat16 a slow momentum with β₃ = 0.9999 stops at 3 %
    of a steady gradient, because smaller moves round to none; keep the parameters in float32.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        alpha: float = 5.0,
        alpha_warmup: int | None = None,
        beta3_warmup: int | None = None,
        maximize: bool = False,
    ) -> None:
        adamw = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        own = {"alpha": alpha, "alpha_warmup": alpha_warmup, "beta3_warmup": beta3_warmup}
        defaults: dict[str, Any] = {**adamw, **own}
        check(defaults, _ALLOWED)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose settings are checked. State is made at the first step."""
        if isinstance(param_group, dict):
            check(param_group, _ALLOWED)
        super().add_param_group(param_group)
        if any(parameter.is_complex() for parameter in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise ValueError("AdEMAMix is for real parameters; train torch.view_as_real of a complex one")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without a gradient are left alone, their state too."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_dummy = not self.state and is_dummy_step(self.param_groups)
        work = [
            (live, group, self._count_of(live, name))  # refused before any weight moves
            for number, group in enumerate(self.param_groups)
            for name, live in named_parameters(group, number)
            if live.grad is not None
        ]
        for chunk in () if is_dummy else chunks(work, lambda each: (each[0], (id(each[1]), each[2]))):
            self._step_chunk([live for live, _, _ in chunk], chunk[0][1])
        return loss

    def _count_of(self, live: Tensor, name: str) -> float:
        """Return how many steps a parameter has taken; its state is made, or follows a cast or move."""
        if live.grad is not None and live.grad.layout != torch.strided:
            raise RuntimeError(f"{name} has a gradient of layout {live.grad.layout}; make it dense")
        entries = {"step": STEP, **dict.fromkeys(_MOMENTS, Entry(live.dtype))}
        follow_(live, self.state[live], entries, "float32", name)
        return float(self.state[live]["step"])

    def _step_chunk(self, lives: list[Tensor], group: dict[str, Any]) -> None:
        """Take one step of parameters of one kind and count of steps.

        In torch's order of operations, so that alpha = 0 equals `torch.optim.AdamW` bit for bit.
        """
        states = [self.state[live] for live in lives]
        for state in states:
            state["step"] += 1
        t = int(states[0]["step"].item())
        lr, (beta1, beta2, beta3) = float(group["lr"]), group["betas"]
        fast, slow, squares = ([local(state[name]) for state in states] for name in _MOMENTS)
        grads = [local(live.grad) for live in lives if live.grad is not None]
        lives = [local(live) for live in lives]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))

        torch._foreach_mul_(lives, number(1 - lr * group["weight_decay"], lives))
        torch._foreach_lerp_(slow, grads, 1 - beta3_at(t, beta1, beta3, group["beta3_warmup"]))
        denominators = take_gradients_(grads, fast, squares, (beta1, beta2), t, group["eps"])
        # Only the fast momentum is corrected for its start at 0, by the size of the step.
        correction = 1 - beta1**t
        share = alpha_at(t, group["alpha"], group["alpha_warmup"]) * correction
        mixed = torch._foreach_add(fast, slow, alpha=share)
        torch._foreach_addcdiv_(lives, mixed, denominators, -lr / correction)
