"""All pictures, in the order in which they are made."""

from collections.abc import Callable

from paceline.theory import controllers, convex, quadratics
from paceline.theory.picture import Picture

ALL: tuple[Callable[[], Picture], ...] = (
    controllers.controllers,
    controllers.gains_over_time,
    controllers.practical_range,
    quadratics.limiting_errors,
    quadratics.equal_speed,
    quadratics.basin,
    quadratics.right_ratios,
    convex.convex,
    convex.logistic,
)
