"""The control problem behind the theory: linear dynamics, quadratic cost, Gaussian noise, finite horizon.

.. code-block:: text

    dx = (A x + B u) dt + C dW         J(u) = E[ x_T' Q_f x_T + ∫ x' Q x + u' R u dt ]

The best control is u = −R⁻¹ B' P_t x with −dP/dt = A'P + PA − P B R⁻¹ B' P + Q, P_T = Q_f (thm:lqg). The
paper's eq. lqg-dynamics lacks the d of dW (E1). The paper calls R semidefinite (E3), and the sign of dP/dt in
its cor:lqg-finalcost is wrong (E2).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp
from scipy.linalg import expm

from paceline.control.checks import (
    Array,
    finite,
    not_negative,
    one,
    positive,
    require,
    square,
    symmetric,
    time_in,
)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LQG:
    """A control problem with its solution.

    >>> problem = LQG(drift=[[-1.0]], final_cost=[[1.0]], control_cost=[[0.5]], horizon=2.0)
    >>> round(problem.riccati(0.0).item(), 6)
    0.009242
    """

    drift: ArrayLike  # A, (n, n)
    horizon: float  # T
    control_cost: ArrayLike  # R, (m, m), positive definite
    running_cost: ArrayLike | None = None  # Q, (n, n); none: 0
    final_cost: ArrayLike | None = None  # Q_f, (n, n); none: 0
    input: ArrayLike | None = None  # B, (n, m); none: the identity
    noise: ArrayLike | None = None  # C, (n, k); none: the identity

    def __post_init__(self) -> None:
        one("horizon", positive("horizon", self.horizon))
        square("drift", self.drift)
        symmetric("control_cost", self.control_cost, definite=True)
        for name in ("running_cost", "final_cost"):
            value = getattr(self, name)
            if value is not None:
                symmetric(name, value, definite=False)
        for name in ("input", "noise"):
            if (value := getattr(self, name)) is not None:
                finite(name, value)
        n, m = self._a.shape[0], self._r.shape[0]
        for name, value, shape in (
            ("running_cost", self._q, (n, n)),
            ("final_cost", self._qf, (n, n)),
            ("input", self._b, (n, m)),
            ("noise", self._c, (n, self._c.shape[-1])),
        ):
            require(value.shape == shape, name, value.shape, f"a matrix of shape {shape}")

    # --- The matrices ---------------------------------------------------------------------------------

    @cached_property
    def _a(self) -> Array:
        return square("drift", self.drift)

    @cached_property
    def _r(self) -> Array:
        return square("control_cost", self.control_cost)

    @cached_property
    def _q(self) -> Array:
        return self._or_zero(self.running_cost)

    @cached_property
    def _qf(self) -> Array:
        return self._or_zero(self.final_cost)

    @cached_property
    def _b(self) -> Array:
        return np.eye(len(self._a)) if self.input is None else np.atleast_2d(np.asarray(self.input, float))

    @cached_property
    def _c(self) -> Array:
        return np.eye(len(self._a)) if self.noise is None else np.atleast_2d(np.asarray(self.noise, float))

    @cached_property
    def _brb(self) -> Array:
        """The product B R⁻¹ B'."""
        brb: Array = self._b @ np.linalg.solve(self._r, self._b.T)
        return brb

    def _or_zero(self, cost: ArrayLike | None) -> Array:
        return np.zeros_like(self._a) if cost is None else square("cost", cost)

    # --- The solution ---------------------------------------------------------------------------------

    def riccati(self, time: float) -> Array:
        """Return P at a time, in closed form: (n, n).

        Over an interval P changes as P → Γ + Ψ'P(I + ΘP)⁻¹Ψ. Two such changes in a row are again one. So the
        change over a short interval is doubled and then applied repeatedly.
        """
        # Doubling ends when Ψ is so large that P would be lost in its rounding.
        left = float(self.horizon - time_in(one("time", finite("time", time)), np.asarray(self.horizon)))
        hamiltonian = np.block([[self._a, -self._brb], [-self._q, -self._a.T]])
        size = float(np.linalg.norm(hamiltonian, 2))
        doublings = max(0, int(np.ceil(np.log2(max(2 * size * left, 1.0)))))
        change = _Change.over(hamiltonian, left / 2**doublings)
        while doublings and np.linalg.norm(change.psi) < 10 * len(self._a):
            change, doublings = change.twice(), doublings - 1
        value = self._qf
        for _ in range(2**doublings):
            before, value = value, change.of(value)
            if np.array_equal(before, value):  # the steady state
                break
        return value

    def riccati_by_ode(self, times: ArrayLike) -> Array:
        """Return P at several times: (times, n, n). It is slow, and independent of the closed form.

        The Riccati equation is integrated backward from the horizon.
        """
        wanted = time_in(times, np.asarray(self.horizon)).reshape(-1)
        return self._integrate(self.horizon - wanted)[0]

    def gain(self, time: float) -> Array:
        """Return K of the best control u = −K x at a time: (m, n)."""
        return np.asarray(np.linalg.solve(self._r, self._b.T @ self.riccati(time)), dtype=np.float64)

    def cost(self, start: ArrayLike) -> float:
        """Return J of the best control from a start: x_0' P_0 x_0 + ∫ tr(P C C') dt."""
        x = np.atleast_1d(finite("start", start))
        require(x.shape == (len(self._a),), "start", start, f"{len(self._a)} numbers")
        values, integral = self._integrate(np.array([self.horizon]))
        return float(x @ values[0] @ x + integral)

    def _integrate(self, left: Array) -> tuple[Array, float]:
        """Return P at these times before the horizon, and ∫ tr(P C C') over the longest of them."""
        n, cc = len(self._a), self._c @ self._c.T

        def slope(_: float, state: Array) -> Array:
            p = state[:-1].reshape(n, n)
            change = self._a.T @ p + p @ self._a - p @ self._brb @ p + self._q
            return np.append(change.reshape(-1), np.trace(p @ cc))

        ends, places = np.unique(left, return_inverse=True)
        begin = np.append(self._qf.reshape(-1), 0.0)
        # The number of steps of an explicit method grows with the fastest rate times the horizon.
        found = solve_ivp(
            slope, (0.0, max(float(ends[-1]), 1e-300)), begin, "Radau" if self._is_stiff else "DOP853",
            t_eval=ends, rtol=1e-11, atol=1e-14,
        )  # fmt: skip
        require(found.success, "problem", found.message, "one whose Riccati equation can be integrated")
        return found.y[:-1].T.reshape(-1, n, n)[places], float(found.y[-1, -1])

    @property
    def _is_stiff(self) -> bool:
        return float(np.linalg.norm(self._a, 2)) * self.horizon > 1e3


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


def with_running_cost(drift: ArrayLike, state: float, control: float, horizon: float) -> LQG:
    """Return the problem of cor:lqg-scalarcost: Q = q I, R = r I, no final cost."""
    unit = np.eye(len(square("drift", drift)))
    q, r = positive("state", state) * unit, positive("control", control) * unit
    return LQG(drift=drift, horizon=horizon, running_cost=q, control_cost=r)


def with_final_cost(drift: ArrayLike, state: float, control: float, horizon: float) -> LQG:
    """Return the problem of cor:lqg-finalcost: Q_f = q I, R = r I, no running cost.

    Its Riccati equation has −dP/dt, not dP/dt as printed (E2).
    """
    unit = np.eye(len(square("drift", drift)))
    q, r = positive("state", state) * unit, positive("control", control) * unit
    return LQG(drift=drift, horizon=horizon, final_cost=q, control_cost=r)


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
    a = finite("drift", drift)
    q, qf = not_negative("running_cost", running_cost), not_negative("final_cost", final_cost)
    r, end = positive("control_cost", control_cost), positive("horizon", horizon)
    left = end - time_in(time, end)
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
