"""The control problem behind the theory: linear dynamics, quadratic cost, Gaussian noise, finite horizon.

.. code-block:: text

    dx = (A x + B u) dt + C dW         J(u) = E[ x_T' Q_f x_T + ∫ x' Q x + u' R u dt ]

The best control is u = −R⁻¹ B' P_t x with −dP/dt = A'P + PA − P B R⁻¹ B' P + Q, P_T = Q_f (thm:lqg). The
paper's eq. lqg-dynamics lacks the d of dW (E1). The paper calls R semidefinite (E3), and the sign of dP/dt in
its cor:lqg-finalcost is wrong (E2).
"""

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import expm

from paceline.control import checks
from paceline.control.checks import Array


@final
class LQG:
    """A control problem with its best control. The noise changes the cost, and not the control.

    Arguments:
        drift: A, (n, n).
        horizon: T.
        control_cost: R, (m, m), positive definite.
        running_cost: Q, (n, n); None: 0.
        final_cost: Q_f, (n, n); None: 0.
        input: B, (n, m); None: the identity.

    >>> problem = LQG(drift=[[-1.0]], final_cost=[[1.0]], control_cost=[[0.5]], horizon=2.0)
    >>> round(problem.riccati(0.0).item(), 6)
    0.009242
    """

    def __init__(
        self,
        *,
        drift: ArrayLike,
        horizon: float,
        control_cost: ArrayLike,
        running_cost: ArrayLike | None = None,
        final_cost: ArrayLike | None = None,
        input: ArrayLike | None = None,
    ) -> None:
        self.horizon = checks.one("horizon", checks.positive("horizon", horizon))
        self.drift = checks.square("drift", drift)
        n, none = len(self.drift), np.zeros_like(self.drift)
        self.control_cost = checks.symmetric("control_cost", control_cost, definite=True)
        self.running_cost = checks.symmetric("running_cost", none if running_cost is None else running_cost)
        self.final_cost = checks.symmetric("final_cost", none if final_cost is None else final_cost)
        self.input = np.eye(n) if input is None else np.atleast_2d(checks.finite("input", input))
        for name, shape in (
            ("running_cost", (n, n)),
            ("final_cost", (n, n)),
            ("input", (n, len(self.control_cost))),
        ):
            value = getattr(self, name)
            checks.require(value.shape == shape, name, value.shape, f"a matrix of shape {shape}")

    def riccati(self, time: float) -> Array:
        """Return P at a time, in closed form: (n, n).

        Over an interval P changes as P → Γ + Ψ'P(I + ΘP)⁻¹Ψ. Two such changes in a row are again one. So the
        change over a short interval is doubled and then applied repeatedly.
        """
        # Doubling ends when Ψ is so large that P would be lost in its rounding.
        now = checks.one("time", checks.time_in(time, np.asarray(self.horizon)))
        left = self.horizon - now
        brb = self.input @ np.linalg.solve(self.control_cost, self.input.T)
        hamiltonian = np.block([[self.drift, -brb], [-self.running_cost, -self.drift.T]])
        size = float(np.linalg.norm(hamiltonian, 2))
        doublings = max(0, int(np.ceil(np.log2(max(2 * size * left, 1.0)))))
        change = _Change.over(hamiltonian, left / 2**doublings)
        while doublings and np.linalg.norm(change.psi) < 10 * len(self.drift):
            change, doublings = change.twice(), doublings - 1
        value = self.final_cost
        for _ in range(2**doublings):
            before, value = value, change.of(value)
            if np.array_equal(before, value):  # the steady state
                break
        return value

    def gain(self, time: float) -> Array:
        """Return K of the best control u = −K x at a time: (m, n)."""
        return np.asarray(
            np.linalg.solve(self.control_cost, self.input.T @ self.riccati(time)), dtype=np.float64
        )


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Change:
    """The change of P over an interval: P → Γ + Ψ'P(I + ΘP)⁻¹Ψ."""

    psi: Array
    theta: Array
    gamma: Array

    @classmethod
    def over(cls, hamiltonian: Array, length: float) -> "_Change":
        """Return the change over a short interval.

        It follows from the flow of the Hamiltonian system, x' = Ψx − Θp', p = Γx + Ψ'p'.
        """
        n = len(hamiltonian) // 2
        flow = expm(hamiltonian * length)
        last = flow[n:, n:]
        theta = -np.linalg.solve(last.T, flow[:n, n:].T).T
        gamma = -np.linalg.solve(last, flow[n:, :n])
        return cls(
            psi=np.asarray(np.linalg.inv(last).T), theta=(theta + theta.T) / 2, gamma=(gamma + gamma.T) / 2
        )

    def of(self, value: Array) -> Array:
        """Return P at the beginning of the interval, from P at its end."""
        inner = np.linalg.solve(np.eye(len(value)) + value @ self.theta, value)  # P(I + ΘP)⁻¹
        before = self.gamma + self.psi.T @ inner @ self.psi
        return np.asarray((before + before.T) / 2)

    def twice(self) -> "_Change":
        """Return the change over an interval of twice the length."""
        both = np.eye(len(self.psi)) + self.theta @ self.gamma
        forward = np.linalg.solve(both, self.psi)
        theta = self.theta + self.psi @ np.linalg.solve(both, self.theta) @ self.psi.T
        return _Change(psi=self.psi @ forward, theta=(theta + theta.T) / 2, gamma=self.of(self.gamma))


def scalar_riccati(
    drift: ArrayLike,
    running_cost: ArrayLike,
    control_cost: ArrayLike,
    final_cost: ArrayLike,
    horizon: ArrayLike,
    time: ArrayLike,
) -> Array:
    """Return p(t) with −dp/dt = 2ap − p²/r + q, p(T) = q_f (lem:scalar-riccati-solution).

    The printed form divides by q_f − β₋, which may be 0. This one has no cancellation. With ω = √(a² + q/r)
    and e = e^(−2ω(T−t))

    .. code-block:: text

        p = ( q_f [(ω + a) + (ω − a) e] + q (1 − e) ) / ( (ω − a) + (ω + a) e + (q_f/r)(1 − e) )

    in which every term is positive. Arguments broadcast.

    >>> scalar_riccati(0.0, 0.0, 1.0, 1.0, 3.0, 0.0).item()   # 1/(1 + T)
    0.25
    """
    a = checks.finite("drift", drift)
    q, qf = checks.not_negative("running_cost", running_cost), checks.not_negative("final_cost", final_cost)
    r, end = checks.positive("control_cost", control_cost), checks.positive("horizon", horizon)
    left = end - checks.time_in(time, end)
    omega = np.hypot(a, np.sqrt(q / r))
    # ω − |a| = (q/r)/(ω + |a|), without the difference of two nearly equal numbers.
    with np.errstate(invalid="ignore", divide="ignore"):
        small = np.where(omega > 0, (q / r) / (omega + np.abs(a)), 0.0)
        large = omega + np.abs(a)
        plus, minus = np.where(a >= 0, large, small), np.where(a >= 0, small, large)
        decayed = np.exp(-2 * omega * left)
        spent = np.where(omega > 0, -np.expm1(-2 * omega * left) / (2 * omega), left)  # (1 − e)/2ω → T − t
        towards = np.where(omega > 0, (plus + minus * decayed) / (2 * omega), 1.0)
        against = np.where(omega > 0, (minus + plus * decayed) / (2 * omega), 1.0)
        value: Array = (qf * towards + q * spent) / (against + qf / r * spent)
    return np.where((q == 0) & (qf == 0), 0.0, value)
