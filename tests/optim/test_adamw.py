"""Strength 0 is torch.optim.AdamW bit for bit, with an exact EMA beside it."""

import pytest
import torch
from problems import PATHS, advance, make_gradients, make_parameters, run, set_gradients

from paceline import PACE


def two_groups(parameters):
    return [
        {"params": parameters[:2], "weight_decay": 0.1, "lr": 3e-3},
        {"params": parameters[2:], "betas": (0.8, 0.99), "eps": 1e-6},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize(
    ("dtype", "steps"), [(torch.float32, 1000), (torch.bfloat16, 200), (torch.float64, 200)]
)
def test_strength_0_is_adamw_and_its_average_an_exact_ema(dtype, steps, foreach):
    """Over 1,000 steps with a schedule, groups and weight decay; gradients depend on the weights."""
    ours, theirs = make_parameters(dtype=dtype), make_parameters(dtype=dtype)
    pace = PACE(two_groups(ours), lr=1e-2, pullback_strength=0.0, ema_power=0.5, foreach=foreach)
    adamw = torch.optim.AdamW(two_groups(theirs), lr=1e-2, foreach=foreach)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-2, 3e-2], total_steps=steps) for o in (pace, adamw)
    ]
    average = [p.detach().double() for p in ours]
    noise = make_gradients(steps)
    for t in range(1, steps + 1):
        for parameters, optimizer in ((ours, pace), (theirs, adamw)):
            pulled = [p.detach().double() + g for p, g in zip(parameters, noise[t - 1], strict=True)]
            set_gradients(parameters, pulled)
            optimizer.step()
        rate = (1 + t) ** -0.5
        average = [(1 - rate) * a + rate * p.detach().double() for a, p in zip(average, ours, strict=True)]
        for schedule in schedules:
            schedule.step()
        if t % 100 == 0 or t < 5:
            for p, q in zip(ours, theirs, strict=True):
                assert torch.equal(p, q), f"live differs at step {t}"
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(pace.state[p][key], adamw.state[q][key]), f"{key} at step {t}"
    for p, expected in zip(ours, average, strict=True):
        error = (pace.state[p]["average"].double() - expected).abs().max()
        assert error <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("strength", [0.0, 30.0])
def test_a_returned_average_leaves_live_bit_identical(foreach, strength):
    gradients = make_gradients(80)
    plain, with_second = make_parameters(), make_parameters()
    settings = {"pullback_strength": strength, "ema_power": 0.5, "foreach": foreach}
    a, b = run(plain, gradients, **settings), run(with_second, gradients, return_power=0.9, **settings)
    for p, q in zip(plain, with_second, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(a.state[p]["average"], b.state[q]["average"])
        assert not torch.equal(b.state[q]["average"], b.state[q]["returned"])


@pytest.mark.parametrize("lr", [torch.tensor(3e-3), torch.tensor([3e-3]), torch.tensor([[3e-3]])])
def test_tensor_learning_rate_is_adamws(lr):
    gradients = make_gradients(20)
    ours, theirs = make_parameters(dtype=torch.float32), make_parameters(dtype=torch.float32)
    run(ours, gradients, lr=lr, pullback_strength=0.0)
    advance(torch.optim.AdamW(theirs, lr=lr), theirs, gradients)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


@pytest.mark.slow
@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("every", [1, 2, 3, 5, 10, 61])
def test_between_updates_a_step_is_adamws(every, foreach):
    """N10: updates at exactly t = n, 2n, … of 60; in between live moves as AdamW moves it."""
    gradients = make_gradients(60)
    parameters = make_parameters(dtype=torch.float32)
    pace = PACE(
        parameters, lr=1e-2, gain="paper", pullback_strength=30.0, update_every=every, foreach=foreach
    )
    updated = []
    for t, step_gradients in enumerate(gradients, 1):
        twins = [p.detach().clone().requires_grad_() for p in parameters]
        adamw = torch.optim.AdamW(twins, lr=1e-2, foreach=foreach)
        if t > 1:
            for p, q in zip(parameters, twins, strict=True):
                keys = ("step", "exp_avg", "exp_avg_sq")
                adamw.state[q] = {k: pace.state[p][k].clone() for k in keys}
        before = [pace.state[p]["average"].clone() for p in parameters]
        advance(pace, parameters, [step_gradients])
        advance(adamw, twins, [step_gradients])
        moved = [
            not torch.equal(a, pace.state[p]["average"]) for a, p in zip(before, parameters, strict=True)
        ]
        assert len(set(moved)) == 1
        if moved[0]:
            updated.append(t)
        else:
            assert all(torch.equal(p, q) for p, q in zip(parameters, twins, strict=True))
    assert updated == list(range(every, 61, every))


@pytest.mark.parametrize("foreach", PATHS)
def test_without_momentum_the_memory_is_adamws(foreach):
    """Its first moment is the gradient: the same weights as AdamW's to the bit, and nothing kept for it."""
    ours, theirs, steps = make_parameters(), make_parameters(), make_gradients(20)
    settings = {"lr": 1e-2, "betas": (0.0, 0.99)}
    own = PACE(ours, pullback_strength=0.0, foreach=foreach, **settings)
    other = torch.optim.AdamW(theirs, foreach=foreach, **settings)
    for step in steps:
        advance(own, ours, [step])
        advance(other, theirs, [step])
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert sorted(own.state[ours[0]]) == ["average", "exp_avg_sq", "step"]
    # A state of AdamW has one all the same, and momentum that begins in mid-run begins with a gradient.
    with pytest.warns(UserWarning, match="no 'average'"):
        own.load_state_dict(other.state_dict())
    advance(own, ours, steps[:1])
    assert "exp_avg" not in own.state[ours[0]]
    own.param_groups[0]["betas"] = (0.9, 0.99)
    PACE(ours).load_state_dict(own.state_dict())  # a state between the change and the step is one to load
    advance(own, ours, steps[:1])
    assert torch.equal(own.state[ours[0]]["exp_avg"], steps[0][0])
