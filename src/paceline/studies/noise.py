"""The noise of seeds, pooled over methods, and Student's t without scipy."""

import math
from collections.abc import Mapping, Sequence
from functools import cache


def pooled(columns: Sequence[Mapping[int, float | None]]) -> tuple[float, int]:
    """Return the variance of a loss around its method and its seed, and the degrees of freedom.

    Each column is a method that was trained separately. What a seed does to all of them is no noise.

    >>> pooled([{1: 3.0, 2: 4.0}, {1: 3.1, 2: 4.3}])[1]
    1
    """
    cells = {(i, s): x for i, each in enumerate(columns) for s, x in each.items() if x is not None}
    parts = [{place[axis] for place in cells} for axis in (0, 1)]
    freedom = len(cells) - len(parts[0]) - len(parts[1]) + 1
    if freedom < 1:
        return 0.0, 0
    is_whole = len(cells) == len(parts[0]) * len(parts[1])
    for _ in range(1 if is_whole else 50):  # once is exact, where no run is missing
        for axis in (0, 1):
            sums = dict.fromkeys(parts[axis], (0.0, 0))
            for place, x in cells.items():
                total, count = sums[place[axis]]
                sums[place[axis]] = total + x, count + 1
            means = {part: total / count for part, (total, count) in sums.items()}
            cells = {place: x - means[place[axis]] for place, x in cells.items()}
    return sum(x * x for x in cells.values()) / freedom, freedom


@cache  # a page asks for two of them, for each of its comparisons
def quantile(level: float, freedom: int) -> float:
    """Return how many standard errors hold a share of Student's t around 0.

    >>> [round(quantile(0.95, freedom), 4) for freedom in (1, 2, 3, 10)]
    [12.7062, 4.3027, 3.1824, 2.2281]
    """
    if freedom < 1:
        raise ValueError(f"freedom is {freedom}; allowed: 1 or more")
    low, high = 0.0, 1.0
    while _within(high, freedom) < level:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Return the share of Student's t between -t and t: a finite sum for a whole number of degrees."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
