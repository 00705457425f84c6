"""The theory: controllers, limiting errors and convergence bounds, in numpy and scipy only.

.. code-block:: text

    checks   checks of arguments
    lqg      linear-quadratic-Gaussian control, finite horizon
    gains    the gains of the best controller, and the approximations that lead to PACE
    unknown  estimates of an unknown optimum, and control by an estimate
    simulate simulation of the controlled diffusion, many paths in parallel
    recursion, limits   the stylised update, and its errors on one coordinate of a quadratic
    bounds   guarantees for every convex loss
    family   EMA, EMA-Nesterov, GPA, Schedule-Free and PACE as one recursion
    drift    a quadratic whose optimum moves: when to push away from the average
    discrete the stylised update on convex losses and real data
    advice   sentences about the strength and the averaging power of a run

All formulas are the corrected ones. Docstrings name the paper's label and, if it has an error, its number
(E1 to E29) in the list of docs/theory.md.
"""

try:
    import scipy  # noqa: F401
except ImportError:
    raise ImportError("paceline.control needs numpy and scipy: pip install numpy scipy") from None

from paceline.control.advice import Situation, advise
from paceline.control.bounds import convex_bound, convex_bound_tuned
from paceline.control.gains import (
    original_cost,
    original_gains,
    original_gains_matrix,
    practical_gain,
    relaxed_gain,
)
from paceline.control.limits import (
    error_at_equal_speed,
    limiting_error,
    optimal_pull,
    spectral_radius,
)
from paceline.control.lqg import LQG, scalar_riccati
from paceline.control.simulate import Diffusion
from paceline.control.unknown import Seen, flat_prior_estimate, posterior

__all__ = [
    "LQG",
    "Diffusion",
    "Seen",
    "Situation",
    "advise",
    "convex_bound",
    "convex_bound_tuned",
    "error_at_equal_speed",
    "flat_prior_estimate",
    "limiting_error",
    "optimal_pull",
    "original_cost",
    "original_gains",
    "original_gains_matrix",
    "posterior",
    "practical_gain",
    "relaxed_gain",
    "scalar_riccati",
    "spectral_radius",
]
