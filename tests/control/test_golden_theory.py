"""Every golden value of the theory: computed elsewhere, from another transcription of the paper."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.control import bounds, gains, limits, lqg, recursion, unknown
from paceline.optim.averages import BEMA

CASES = json.loads((Path(__file__).parent.parent / "golden" / "golden_theory.json").read_text())


def _trajectory(theta0, A, eta, C, beta, variant, steps, noise):
    assert noise == "sin(k)"
    pair, seen = recursion.Pair(np.array(theta0), np.array(theta0)), []
    for k in range(steps):
        pair = recursion.step(pair, np.array(A) * pair.live + np.sin(k), eta, C, beta, variant)
        seen.append(pair)
    return seen


def _posterior(theta, theta0, int_theta, int_u, t, A, Sigma, m0, P0):
    seen = unknown.Seen(time=t, start=theta0, weights=theta, integral=int_theta, control=int_u)
    mean, covariance = unknown.posterior(seen, A, Sigma, m0, P0)
    return np.concatenate([mean, covariance.reshape(-1)])


def _control(theta, int_theta, mu, A, lam, T, t):
    seen = unknown.Seen(time=t, start=theta, weights=theta, integral=int_theta, control=np.zeros_like(mu))
    return unknown.certainty_equivalent_control(seen, mu, gains.original_gains_matrix(A, lam, T, t))


def bema(thetas, kappa, eta, gamma, rho, uf):
    """The EMA and the BEMA of a trajectory, as the optimizer keeps them."""
    rule = BEMA(power=kappa, bias_power=eta, offset=rho, scale=gamma, every=uf)
    path = torch.tensor(np.array(thetas), dtype=torch.float64)
    parts, seen = {name: [path[0].clone()] for name in rule.parts}, []
    for t, live in enumerate(path[1:], 1):
        rule.move_(parts, [live], t)
        seen.append([parts["ema"][0].tolist(), parts["average"][0].tolist()])
    return np.array(seen).swapaxes(0, 1)


def _without_t(function):
    """Approximations whose golden cases carry a time that they do not depend on."""
    return lambda alpha, lam, T, t=None: function(alpha, lam, T)


FUNCTIONS = {
    "gains_original": lambda alpha, lam, T, t: gains.original_gains(alpha, lam, T, t),
    "mns_original": lambda alpha, lam, T, t: gains.original_riccati(alpha, lam, T, t),
    "gain_relaxed": lambda alpha, lam, T, t: gains.relaxed_gain(alpha, lam, T, t),
    "gain_relaxed_approx": _without_t(gains.relaxed_gain_far),
    "gain_practical": _without_t(gains.practical_gain),
    "scalar_riccati": lambda a, q, r, qf, T, t: lqg.scalar_riccati(a, q, r, qf, T, t),
    "mns_matrix": lambda A, lam, T, t: gains.original_riccati_matrix(A, lam, T, t),
    "control_matrix": _control,
    "kalman_bucy": _posterior,
    "optimal_cost_original": lambda x0, alpha, lam, T, sigma2: gains.original_cost(x0, alpha, lam, T, sigma2),
    "gamma0_variant": lambda a, beta, c, eta2s2, variant: limits.limiting_error(a, beta, c, eta2s2, variant),
    "dgamma0_dc": lambda a, beta, c, eta2s2: limits.limiting_error_slope(a, beta, c, eta2s2),
    "spectral_radius": lambda a, beta, c: limits.spectral_radius(a, beta, c),
    "finite_time_mse": lambda a, beta, c, x0, eta2s2, T: recursion.stylized(a, beta, c).error_after(
        T, x0, eta2s2
    ),
    "optimal_c": lambda a, beta, clip: limits.optimal_pull(a, beta, clipped=clip),
    "gamma0_min": lambda a, beta, eta2s2: limits.least_limiting_error(a, beta, eta2s2),
    "convex_bound_tuned": lambda T, C, beta, G, sigma, delta: bounds.convex_bound_tuned(
        T, C, beta, G, sigma, delta
    ),
    "convex_bound": lambda etas, C, beta, G, sigma, delta: bounds.convex_bound(
        etas, C, beta, G, sigma, delta
    ),
    "ar2_variance": lambda phi1, phi2, s2: limits.ar2_variance(phi1, phi2, s2),
    "stylized_trajectory": _trajectory,
    "bema": bema,
}

# The golden values of the one 4 x 4 matrix are themselves off by up to 3.3e-8 (relative, in one entry of S;
# 7e-11 absolute): in 40 digits ours are right to 3e-15, see the next test.
LOOSER = {("mns_matrix", 4): 5e-8, ("control_matrix", 4): 5e-9}


def test_there_are_162_cases_and_every_function_is_known():
    assert len(CASES) == 162 and {case["fn"] for case in CASES} == FUNCTIONS.keys()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["fn"])
def test_golden(case):
    ours = np.asarray(FUNCTIONS[case["fn"]](**case["in"]), dtype=float)
    golden = np.asarray(case["out"], dtype=float)
    rtol = LOOSER.get((case["fn"], len(case["in"].get("A", ()))), 1e-10)
    zero = golden == 0
    assert ours.shape == golden.shape
    assert np.all(np.abs(ours[zero]) <= 1e-12)
    np.testing.assert_allclose(ours[~zero], golden[~zero], rtol=rtol, atol=0)


@pytest.mark.slow
def test_the_matrix_whose_golden_values_are_rough_in_forty_digits():
    import mpmath as mp

    case = next(c["in"] for c in CASES if c["fn"] == "mns_matrix" and len(c["in"]["A"]) == 4)
    with mp.workdps(40):
        d, tau = 4, mp.mpf(case["T"]) - mp.mpf(case["t"])
        a = mp.matrix(case["A"])

        def h(s):
            block = mp.zeros(2 * d)
            block[0:d, 0:d], block[0:d, d : 2 * d] = -a * s, mp.eye(d) * s
            return mp.expm(block)[0:d, d : 2 * d]

        g = mp.zeros(d)
        for node, weight in mp.calculus.quadrature.GaussLegendre(mp.mp).calc_nodes(4, 130):
            part = h(tau * (node + 1) / 2)
            g += weight * tau / 2 * (part * part.T)
        s = (mp.mpf(case["T"]) ** 2 * mp.eye(d) + g / mp.mpf(case["lam"])) ** -1
        exact = [h(tau).T * s * h(tau), h(tau).T * s, s]
    ours = gains.original_riccati_matrix(case["A"], case["lam"], case["T"], case["t"])
    for mine, true in zip(ours, exact, strict=True):
        np.testing.assert_allclose(mine, np.array(true.tolist(), dtype=float), rtol=1e-13)
