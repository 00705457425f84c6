"""AdEMAMix: AdamW with a second, slow momentum (Pagliardini, Ablin & Grangier, arXiv 2409.03137)."""

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from paceline.optim.checkpoint import is_dummy_step
from paceline.optim.foreach import chunks, number
from paceline.optim.settings import ALLOWED, COUNT, NOT_NEGATIVE, Allowed, check, is_number
from paceline.optim.sharding import local
from paceline.optim.state import STEP, Entry, follow_, name_of

_WARMUP: Allowed = (lambda v: v is None or COUNT[0](v), f"None, or {COUNT[1]}")
_ALLOWED: dict[str, Allowed] = {
    **{name: ALLOWED[name] for name in ("lr", "eps", "weight_decay", "maximize")},
    "betas": (
        lambda v: isinstance(v, tuple | list) and len(v) == 3 and all(is_number(b) and 0 <= b < 1 for b in v),
        "three numbers, each >= 0 and < 1",
    ),
    "alpha": NOT_NEGATIVE,
    "alpha_warmup": _WARMUP,
    "beta3_warmup": _WARMUP,
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
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"alpha": alpha, "alpha_warmup": alpha_warmup, "beta3_warmup": beta3_warmup}
        defaults["maximize"] = maximize
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
        work: list[tuple[Tensor, dict[str, Any], object]] = []
        for i, group in enumerate(self.param_groups):
            for j, live in enumerate(group["params"]):
                if live.grad is not None:  # refused before any weight moves
                    t = self._prepare(live, name_of(group, i, j))
                    work.append((live, group, (i, t)))
        for chunk in () if is_dummy else chunks(work, key=lambda each: (each[0], each[2])):
            self._step_chunk([live for live, _, _ in chunk], chunk[0][1])
        return loss

    def _prepare(self, live: Tensor, name: str) -> float:
        """Make a state or let it follow a cast or move, and return its count of steps."""
        assert live.grad is not None
        if live.grad.layout != torch.strided:
            raise RuntimeError(
                f"{name} has a gradient of layout {live.grad.layout}; make it dense (for nn.Embedding: "
                "sparse=False)"
            )
        state = self.state[live]
        entries = {"step": STEP, **dict.fromkeys(_MOMENTS, Entry(live.dtype))}
        follow_(live, state, entries, "float32", name)
        return float(state["step"])

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
        torch._foreach_lerp_(fast, grads, 1 - beta1)
        torch._foreach_lerp_(slow, grads, 1 - beta3_at(t, beta1, beta3, group["beta3_warmup"]))
        torch._foreach_mul_(squares, number(beta2, lives))
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        # A list of floats: by one float a GPU would multiply by its inverse.
        torch._foreach_div_(roots, [(1 - beta2**t) ** 0.5] * len(roots))
        torch._foreach_add_(roots, group["eps"])
        # Only the fast momentum is corrected for its start at 0, by the size of the step.
        correction = 1 - beta1**t
        share = alpha_at(t, group["alpha"], group["alpha_warmup"]) * correction
        mixed = torch._foreach_add(fast, slow, alpha=share)
        torch._foreach_addcdiv_(lives, mixed, roots, -lr / correction)
