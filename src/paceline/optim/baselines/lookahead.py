"""Lookahead: every k steps of a base optimizer, live goes back to its slow weights."""

from numbers import Integral

from torch.optim.optimizer import Optimizer

from paceline.optim.checks import is_number, require
from paceline.optim.pullback import Pullback


def lookahead(base: Optimizer, *, k: int = 5, alpha: float = 0.5) -> Pullback:
    """Lookahead (Zhang, Lucas, Hinton & Ba, arXiv 1907.08610) around any optimizer.

    Every k steps: slow ← slow + alpha · (fast − slow), fast ← slow. The slow weights start at the weights
    before the first step; they are the average of the returned optimizer, evaluated and exported as such.

    It is the pull at its strongest: a `Pullback` that every k steps moves the average by alpha and then
    live all the way to it. The paper's settings: k = 5 or 10, alpha = 0.5 or 0.8; the base's own state is
    kept through a synchronisation.

    >>> import torch
    >>> from paceline.optim.baselines import lookahead
    >>> parameter = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = lookahead(torch.optim.SGD([parameter], lr=0.1), k=2)
    >>> for _ in range(2):
    ...     parameter.grad = torch.tensor([1.0])
    ...     optimizer.step()
    >>> parameter.item()  # half way from 1.0 to 0.8
    0.8999999761581421
    """
    require(isinstance(k, Integral) and k >= 1, "k value", k, "an integer >= 1")
    require(is_number(alpha) and 0 < alpha <= 1, "alpha value", alpha, "0 < alpha <= 1")
    return Pullback(
        base,
        pullback_strength=float("inf"),
        gain="uniform",
        gap="lookahead",
        update_every=int(k),
        # A rate of alpha at every step: (1/alpha + 0 · t)^-1.
        ema_power=1.0,
        ema_offset=1 / alpha,
        ema_scale=0.0,
    )
