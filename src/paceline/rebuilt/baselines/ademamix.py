"""AdEMAMix: AdamW with a second, slow momentum (Pagliardini, Ablin & Grangier, arXiv 2409.03137)."""

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, ParamsT

from paceline.rebuilt.settings import is_number, require

# --- The two warm-ups -----------------------------------------------------------------------------


def alpha_at(t: float, alpha: float, warmup: int | None) -> float:
    """Weight of the slow momentum at step t = 1, 2, …: alpha · t / warmup, then alpha.

    >>> [alpha_at(t, alpha=8.0, warmup=4) for t in (1, 2, 4, 5)]
    [2.0, 4.0, 8.0, 8.0]
    """
    return alpha if warmup is None or t >= warmup else alpha * t / warmup


def beta3_at(t: float, beta1: float, beta3: float, warmup: int | None) -> float:
    """Decay of the slow momentum at step t = 1, 2, …: its half-life goes linearly from beta1's to beta3's.

    >>> [round(beta3_at(t, beta1=0.5, beta3=0.5**0.01, warmup=99), 6) for t in (0, 1, 49, 99)]
    [0.5, 0.707107, 0.986233, 0.993092]
    """
    if warmup is None or t >= warmup:
        return beta3
    # A gradient's weight falls by half in h(β) = ln ½ / ln β steps, the paper's f(β) + 1. Linear in h is
    # linear in 1 / ln β, since ln ½ cancels:
    #     1 / ln β(t) = (1 − a) / ln β₁ + a / ln β₃,   a = t / warmup,
    # which is the paper's β(t) = exp(ln β₁ ln β₃ / ((1 − a) ln β₃ + a ln β₁)), finite also for β₁ = 0.
    a = t / warmup
    inverse_log = (1 - a) * _inverse_log(beta1) + a * _inverse_log(beta3)
    return math.exp(1 / inverse_log) if inverse_log else 0.0


def _inverse_log(beta: float) -> float:
    return 1 / math.log(beta) if beta else 0.0


# --- The step -------------------------------------------------------------------------------------


def ademamix_step_(
    live: Tensor,  # the parameter (modified in place), real
    grad: Tensor,  # same shape and dtype as live; never modified
    exp_avg: Tensor,  # fast momentum, m₁ in the paper (modified in place), like live
    exp_avg_slow: Tensor,  # slow momentum, m₂ (modified in place), like live
    exp_avg_sq: Tensor,  # second moment, ν (modified in place), like live
    step: Tensor,  # () float64, this parameter's own count (modified in place)
    *,
    lr: float,
    betas: tuple[float, float, float],
    eps: float,
    weight_decay: float,
    alpha: float,
    alpha_warmup: int | None,
    beta3_warmup: int | None,
    maximize: bool,
) -> None:
    """One step of Algorithm 1 for one tensor, in place.

    In torch's order of operations, so that alpha = 0 equals `torch.optim.AdamW` bit for bit.
    """
    step += 1
    t = step.item()
    beta1, beta2, beta3 = betas
    correction = 1 - beta1**t
    root_correction = (1 - beta2**t) ** 0.5
    if maximize:
        grad = -grad

    live.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    slow = beta3_at(t, beta1, beta3, beta3_warmup)
    # Not lerp: of a number that changes from step to step, sharded tensors would remember each.
    exp_avg_slow.mul_(slow).add_(grad, alpha=1 - slow)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    # Only the fast momentum is corrected for its start at 0; -lr / correction does that below.
    mixed = exp_avg.add(exp_avg_slow, alpha=alpha_at(t, alpha, alpha_warmup) * correction)
    denominator = (exp_avg_sq.sqrt() / root_correction).add_(eps)
    live.addcdiv_(mixed, denominator, value=-lr / correction)


# --- The optimizer --------------------------------------------------------------------------------


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
        params: parameters or parameter groups; any setting below may differ between groups.
        lr: learning rate, float or 1-element Tensor.
        betas: β₁ of the fast momentum, β₂ of the second moment, β₃ of the slow momentum.
        eps, weight_decay: AdamW's.
        alpha: weight of the slow momentum. The paper's algorithm leaves it open; the authors' own example
            has 8, other public implementations have 5.
        alpha_warmup: steps over which α(t) grows linearly from 0 to alpha. None: α from the start. The
            paper usually sets both warm-ups to the length of the run.
        beta3_warmup: steps over which β₃(t) goes from β₁ to β₃, its half-life growing linearly. None: β₃
            from the start.
        maximize: ascend instead.

    The moments have the parameter's precision. In bfloat16 a slow momentum with β₃ = 0.9999 stops at 3 %
    of a steady gradient, because smaller moves round to none; keep the parameters in float32.

    >>> import torch
    >>> from paceline.optim.baselines import AdEMAMix
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = AdEMAMix(model.parameters(), lr=1e-3, alpha_warmup=1000, beta3_warmup=1000)
    >>> model(torch.ones(4, 2)).square().mean().backward()
    >>> optimizer.step()
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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "alpha": alpha,
            "alpha_warmup": alpha_warmup,
            "beta3_warmup": beta3_warmup,
            "maximize": maximize,
        }
        _check(defaults)
        super().__init__(params, defaults)

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its settings are checked and its state exists from here on."""
        if isinstance(param_group, dict):
            _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if any(parameter.is_complex() for parameter in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise ValueError("AdEMAMix is for real parameters; train torch.view_as_real of a complex one")
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad and not is_lazy(parameter):
                self.state[parameter] = _allocate(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without a gradient are left alone, their state too."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in work:  # all of them before any weight moves
            _refuse_sparse(parameter)
        for parameter, group in work:
            self._step_one(parameter, group)
        return loss

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:  # thawed since
            state.update(_allocate(parameter))
        # The model may have been cast or moved since.
        for key in ("exp_avg", "exp_avg_slow", "exp_avg_sq"):
            state[key] = state[key].to(parameter)
        assert parameter.grad is not None
        ademamix_step_(
            parameter,
            parameter.grad,
            state["exp_avg"],
            state["exp_avg_slow"],
            state["exp_avg_sq"],
            state["step"],
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            alpha=group["alpha"],
            alpha_warmup=group["alpha_warmup"],
            beta3_warmup=group["beta3_warmup"],
            maximize=group["maximize"],
        )


def _allocate(parameter: Tensor) -> dict[str, Tensor]:
    zeros = {
        key: torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
        for key in ("exp_avg", "exp_avg_slow", "exp_avg_sq")
    }
    return {"step": torch.zeros((), dtype=torch.float64, device="cpu"), **zeros}


def _refuse_sparse(parameter: Tensor) -> None:
    assert parameter.grad is not None
    if parameter.grad.layout != torch.strided:
        raise RuntimeError(
            f"AdEMAMix does not support sparse gradients: one of shape {tuple(parameter.shape)} is "
            f"{parameter.grad.layout}; make it dense (for nn.Embedding: sparse=False)"
        )


# --- What is allowed ------------------------------------------------------------------------------


def _check(group: dict[str, Any]) -> None:
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor):
        require(lr.numel() == 1, "lr value", lr, "a number or a 1-element Tensor")
        lr = lr.item()
    require(is_number(lr) and 0.0 <= lr < math.inf, "lr value", lr, "0 <= lr < inf")
    require(isinstance(betas, tuple | list) and len(betas) == 3, "betas value", betas, "three floats")
    for i, beta in enumerate(betas):
        require(is_number(beta) and 0.0 <= beta < 1.0, f"betas[{i}] value", beta, "0 <= beta < 1")
    for name in ("eps", "weight_decay", "alpha"):
        value = group[name]
        require(is_number(value) and 0.0 <= value < math.inf, f"{name} value", value, ">= 0 and finite")
    for name in ("alpha_warmup", "beta3_warmup"):
        value = group[name]
        count = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
        require(value is None or count, f"{name} value", value, "None, or an integer >= 1")
    require(isinstance(group["maximize"], bool), "maximize value", group["maximize"], "True or False")
