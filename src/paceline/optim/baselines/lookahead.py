"""Lookahead: every k steps of a base optimizer, live goes back to its slow weights."""

from paceline.optim.attach import Base, attach
from paceline.optim.settings import Control, is_number, require


def lookahead(base: Base, *, k: int = 5, alpha: float = 0.5) -> Base:
    """Attach Lookahead (Zhang, Lucas, Hinton & Ba, arXiv 1907.08610) to an optimizer, and return it.

    Every k steps: slow ← slow + alpha · (fast − slow), fast ← slow. The slow weights start at the weights
    before the first step; they are the average that is evaluated and exported. It is the pull at its
    strongest: an average that moves by alpha every k steps, and live that goes all the way to it.

    >>> import torch
    >>> parameter = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = lookahead(torch.optim.SGD([parameter], lr=0.1), k=2)
    >>> for _ in range(2):
    ...     parameter.grad = torch.tensor([1.0])
    ...     optimizer.step()
    >>> round(parameter.item(), 6)  # half way from 1.0 to 0.8
    0.9
    """
    require(is_number(alpha) and 0 < alpha <= 1, "alpha", alpha, "0 < alpha <= 1")
    control = Control(
        strength=float("inf"),
        sizing="uniform",
        power=1.0,
        every=k,
        slope=1e300,  # so that the rate is its floor
        least_rate=alpha,
        gap="after",
        order="average, then pull",
    )
    return attach(base, control=control)
