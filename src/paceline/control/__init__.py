"""The theory: controllers, limiting errors and convergence bounds, in numpy and scipy only.

.. code-block:: text

    checks   how arguments are refused
    lqg      linear-quadratic-Gaussian control, finite horizon
    gains    how strongly the best controller pulls, and the approximations that end in PACE
    unknown  the optimum is not known: posterior, certainty equivalence
    simulate the controlled diffusion, many paths at once
    recursion, limits   one coordinate of a quadratic: limiting and finite-time errors
    bounds   what is guaranteed for every convex loss
    family   EMA, EMA-Nesterov, GPA and Schedule-Free beside PACE, as one recursion
    drift    a quadratic whose optimum moves: when to push away from the average
    discrete the stylised update on quadratics, convex losses and real data
    advice   from the numbers of a run to what its strength does

Formulas are the corrected ones; docstrings name the paper's label, and its erratum as E1 to E29 where there
is one (docs/theory.md lists them).
"""

try:
    import scipy  # noqa: F401
except ImportError:
    raise ImportError('paceline.control needs numpy and scipy: pip install "paceline[theory]"') from None

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
    finite_time_error,
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
    "finite_time_error",
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
