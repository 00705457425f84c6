"""Errors of the paper, and the right formulas, which paceline.control computes.

Every row has a test of its number in tests/control, in which the printed form fails, unless it is a slip of
the pen that no number can show.
"""

from typing import NamedTuple


class Erratum(NamedTuple):
    """A slip."""

    number: str
    where: str  # the paper's label, or what it is about
    printed: str
    right: str


_LIST = """
E1 | eq:lqg-dynamics | … dt + C W_t | … dt + C dW_t
E2 | cor:lqg-finalcost | dP/dt = A'P + PA − P²/r | −dP/dt = A'P + PA − P²/r
E3 | eq:lqg-cost | R positive semidefinite | R positive definite: it is inverted
E4 | thm:yule-walker | γ(1) = φ₁γ(0) | γ(1) = φ₁γ(0) + φ₂γ(1)
E5 | proof of thm:optimal_control_relaxed | p = −λ(…) | p = +λ(…)
E6 | eq:approx-optimal-control | no factor μ − θ | times (μ − θ)
E7 | after thm:optimal_control_relaxed | 1/(2√(α² + 1/λT)) ≥ 1/(2α) | ≤; and e^(−α(T−t)) ≈ 0 needs T − t ≫ \
1/α
E7b | two gains, both “used in our algorithm” | relaxed, long before the end | only 1/(T(1 + λα²T)) leads \
to PACE
E8 | lem:original_objective_solution_scalar | g = τ/α² − 2(1 − e)/(2α³) + (1 − e²)/(2α³), e = e^(−ατ) | g = \
τ/α² − 2(1 − e)/α³ + (1 − e²)/(2α³)
E9 | the same, last display | denominator αλT + τ/α − … | denominator αλT² + τ/α − …
E10 | cor:optimal_control_unknown_mustar | denominator αλT² + τ/α − (3/(2α²))(1 − e) | denominator αλT² + \
τ/α − (2/α²)(1 − e) + (1 − e²)/(2α²)
E11 | Σ diagonal without loss of generality | for gains and estimate | for the gains only
E12 | the posterior mean | not computable in closed form | closed for a Gaussian prior
E13 | eq:dc_kc | D_C² = · (…) | a stray dot, no factor is lost
E14 | proof of thm:convex_convergence_general | E_k[…] | E_{k−1}[…]
E15 | the same | βη²V² | η²V²
E16 | the same | sums to k − 2 and T − 1, flat mean from 0 | indices shifted by one; harmless
E17 | prop:arbitrarily_large_improvement | at most 8ηα times SGD's error | at most 2ηα times the average's
E18 | prop:improved_convergence_quadratic_tight | EMA of θ_k | EMA of θ_{k+1}
E19 | eq:decoupled_update | c θ̂_k 0 − ηξ | c θ̂_k − ηξ
E20 | Algorithm 1 | preconditioner(θ_t') | θ_t' is never defined; the one of this step
E21 | Algorithm 1 and its description | three readings of the pull | by the gap before the step; the others \
are variants
E22 | Algorithm 1 | v̂_t, elsewhere v_t | bias-corrected
E23 | the experiments | γ = 1, ρ = 0, undefined | rates (1 + γ max(0, t − ρ))^−κ, as in the published code
E24 | the choice of C | inversely with A and T | like A⁻²T⁻² if λA²T ≫ 1, else like T⁻¹ without A
E25 | the exact control | most impactful in the early stages | its gain grows until shortly before the end, \
if λ is small
E26 | thm:convex_convergence_informal | the returned average converges | the flat mean of the live weights, \
constant C and β
E27 | after thm:convex_convergence | the factor 1/β likely cannot be improved | √(3/β − 2) where all \
coordinates are pulled alike
E28 | κ = 1 is the uniform average | always | only if the average moves at every step
E29 | c → ∞ is Lookahead with one inner step | of Algorithm 1 | of the reading that averages first \
(`order="average, then pull"`)
"""

ERRATA = tuple(Erratum(*line.split(" | ")) for line in _LIST.strip().splitlines())
