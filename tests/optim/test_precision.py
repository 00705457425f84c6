"""Low-precision weights keep a float32 average that moves."""

import pytest
import torch
from problems import PATHS, assert_same_bits, everything, make_gradients, make_parameters

from paceline import PACE


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_bfloat16_model_of_2000_steps_has_an_accurate_average(foreach):
    """The average in the state is within 1e-3 (in fact 1e-5) of a float64 one of the same iterates."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).bfloat16()
    optimizer = PACE(
        model.parameters(), lr=3e-3, return_power=0.8, gain="paper", pullback_strength=0.1, foreach=foreach
    )
    exact = {k: [p.detach().double() for p in model.parameters()] for k in (0.5, 0.8)}
    frozen = [p.detach().clone() for p in model.parameters()]  # an average kept in bfloat16
    truth = torch.randn(8, 1)
    for t in range(1, 2001):
        x = torch.randn(16, 8)
        loss = (model(x.bfloat16()) - (x @ truth).bfloat16()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for power, averages in exact.items():
            for a, p in zip(averages, model.parameters(), strict=True):
                a.lerp_(p.detach().double(), (1 + t) ** -power)
        for a, p in zip(frozen, model.parameters(), strict=True):
            a.lerp_(p.detach(), (1 + t) ** -0.8)
    worst_bfloat16 = 0.0
    for i, p in enumerate(model.parameters()):
        for key, power in (("average", 0.5), ("returned", 0.8)):
            ours, expected = optimizer.state[p][key], exact[power][i]
            assert ours.dtype == torch.float32
            assert (ours - expected).norm() / expected.norm() <= 1e-5
        worst_bfloat16 = max(worst_bfloat16, float((frozen[i] - exact[0.8][i]).norm() / exact[0.8][i].norm()))
    assert worst_bfloat16 > 1e-3, "the test could not tell a bfloat16 average"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_moves_where_a_low_precision_one_stands_still(dtype):
    """0.99 toward 1.0 at t ≈ 4700, where the averaging rate is 1/69."""
    parameter = torch.full((4,), 0.99, dtype=dtype).requires_grad_()
    optimizer = PACE([parameter], lr=0.0, eps=1e-3)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.state[parameter]["step"].fill_(4700)
    with torch.no_grad():
        parameter.fill_(1.0)
    for _ in range(300):
        optimizer.step()
    assert (optimizer.state[parameter]["average"] > 0.9995).all()


@pytest.mark.parametrize(
    "dtype, kept",
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_precision_of_the_state(dtype, kept):
    parameter = torch.ones(2, dtype=dtype).requires_grad_()
    optimizer = PACE([parameter], return_power=0.9)
    state = optimizer.state[parameter]
    assert state["average"].dtype == state["returned"].dtype == kept
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == dtype
    assert state["step"].dtype == torch.float64 and state["step"].shape == ()


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_gradients_of_another_precision_than_their_parameters(kinds, foreach):
    """As if they had been cast first."""
    of, given = kinds
    parameters, twins = make_parameters(dtype=of), make_parameters(dtype=of)
    one, other = (PACE(ps, lr=1e-2, foreach=foreach) for ps in (parameters, twins))
    for step in make_gradients(3):
        for p, q, g in zip(parameters, twins, step, strict=True):
            p.grad_dtype, p.grad, q.grad = given, g.to(given), g.to(given).to(of)
        one.step()
        other.step()
    assert_same_bits(everything(one), everything(other))
