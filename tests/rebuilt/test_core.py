"""The rebuilt optimizer: golden trajectories, AdamW to the bit, paths, storages, states."""

import copy
import pickle
import signal

import numpy as np
import pytest
import torch
from trajectories import DATA, META, OFFERED, settings

from paceline.rebuilt.pace import PACE
from paceline.rebuilt.settings import Control
from paceline.rebuilt.telemetry import pull_statistics
from paceline.rebuilt.weights import averaged_state_dict, averaged_tensors, averaged_weights, reset_average

CONTROLS = {
    "paper": Control.paper(0.3, power=0.4),
    "push": Control.push(),
    "pull": Control.pull(),
    "none": Control.none(),
    "two": Control.paper(0.3, power=0.3, return_power=0.8),
    "lookahead": Control.pull(0.7, gap="after", order="average, then pull"),
    "rare": Control.push(every=3, pull_every=2),
    "late": Control.push(delay=3.0, slope=0.5, least_rate=0.05),
    "limit": Control.paper(float("inf"), power=0.6),
}


def golden_control(case):
    """Translate a golden case; None for readings that are not offered any more."""
    old = settings(META[case])
    gain, offset = old.pop("gain", "paper"), old.pop("ema_offset", 1.0)
    if gain == "relative" or offset not in (0.0, 1.0):
        return None
    names = {
        "pullback_strength": "strength",
        "ema_power": "power",
        "update_every": "every",
        "ema_scale": "slope",
    }
    fields = {"strength": 3e-3, "power": 0.5, "sizing": gain, "delay": 1.0 - offset}
    for name in (*names, "max_gain", "return_power"):
        if name in old:
            fields[names.get(name, name)] = old.pop(name)
    if old.pop("gap", "pre") == "lookahead":
        fields |= {"gap": "after", "order": "average, then pull"}
    return Control(**fields), old


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("case", [case for case in OFFERED if golden_control(case) is not None])
def test_golden_trajectories(case, foreach):
    control, rest = golden_control(case)
    live = [
        torch.tensor(DATA[f"{case}/p0/{j}"], dtype=torch.float64).requires_grad_()
        for j in range(META[case]["tensors"])
    ]
    optimizer = PACE(live, foreach=foreach, control=control, **rest)
    for i, lr in enumerate(DATA[f"{case}/lrs"]):
        optimizer.param_groups[0]["lr"] = float(lr)
        for j, parameter in enumerate(live):
            gradient = DATA[f"{case}/g/{j}"][i]
            parameter.grad = None if np.isnan(gradient).all() else torch.tensor(gradient)
        optimizer.step()
        for j, parameter in enumerate(live):
            state = optimizer.state.get(parameter, {})
            found = {"p": parameter, "ema": state.get("average", parameter)}
            found["ret"] = state.get("returned", found["ema"])
            for key, tensor in found.items():
                golden = DATA[f"{case}/{key}/{j}"][i]
                error = np.abs(tensor.detach().numpy() - golden).max()
                assert error <= 1e-12 * np.abs(golden).max(), (key, j, i, error)


def problem(dtype=torch.float32, seed=0):
    """Return parameters of several shapes and a function that puts step t's gradients into them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 5), (300,), (2, 3, 4), ()]
    live = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]

    def gradients(t):
        own = torch.Generator().manual_seed(1000 + t)
        for parameter in live:
            parameter.grad = (
                0.3 * parameter.detach().float() + torch.randn(parameter.shape, generator=own)
            ).to(dtype)

    return live, gradients


def train(optimizer, gradients, steps, start=1):
    for t in range(start, start + steps):
        gradients(t)
        optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_control_is_adamw_to_the_bit(dtype, foreach):
    (live, gradients), (other, others) = problem(dtype), problem(dtype)
    ours = PACE(live, 1e-2, weight_decay=0.1, control=Control.none(), foreach=foreach)
    theirs = torch.optim.AdamW(other, 1e-2, weight_decay=0.1, foreach=True)
    for optimizer, make in ((ours, gradients), (theirs, others)):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        for t in range(1, 1001):
            make(t)
            optimizer.step()
            scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(live, other, strict=True))


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CONTROLS)
def test_foreach_equals_the_loop_and_resumes(name, dtype, storage):
    if dtype == torch.float64 and storage != "float32":
        pytest.skip("refused")
    found = []
    for foreach in (False, True):
        live, gradients = problem(dtype)
        optimizer = PACE(live, 1e-2, control=CONTROLS[name], foreach=foreach, average_dtype=storage)
        train(optimizer, gradients, 12)
        found.append((live, optimizer))
    again, gradients = problem(dtype)
    resumed = PACE(again, 1e-2, control=CONTROLS[name], average_dtype=storage)
    train(resumed, gradients, 5)
    saved = copy.deepcopy(resumed.state_dict())
    fresh = PACE(again, 1e-2, control=CONTROLS[name], average_dtype=storage)
    fresh.load_state_dict(saved)
    train(fresh, gradients, 7, start=6)
    found.append((again, fresh))
    for live, optimizer in found[1:]:
        for ours, first in zip(live, found[0][0], strict=True):
            assert torch.equal(ours, first)
            mine, reference = optimizer.state[ours], found[0][1].state[first]
            assert mine.keys() == reference.keys()
            if dtype != torch.bfloat16 or optimizer is fresh:
                assert all(torch.equal(mine[key], reference[key]) for key in mine)


def reference(control, lr, steps):
    """Return live and average of one weight in plain floats, written from the definition."""
    live = average = returned = 1.0
    m = v = 0.0
    for t in range(1, steps + 1):
        g = np.sin(t) + 0.3 * live
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        root = np.sqrt(v / (1 - 0.999**t)) + 1e-8
        gap = average - live
        eta = lr * control.step
        live = live * (1 - eta * 0.01) - eta * m / (1 - 0.9**t) / root
        rate = max((1 + control.slope * max(0, t - control.delay)) ** -control.power, control.least_rate)
        if t % (control.pull_every or control.every) == 0:
            ratio = control.strength * (lr / root if control.sizing == "paper" else 1)
            live += min(rate * ratio, control.max_gain) * gap
        if t % control.every == 0:
            average += rate * (live - average)
            late = control.power if control.return_power is None else control.return_power
            late = max((1 + control.slope * max(0, t - control.delay)) ** -late, control.least_rate)
            returned += late * (live - returned)
    return live, average, returned


@pytest.mark.parametrize("name", ["paper", "push", "pull", "two", "rare", "late", "limit"])
def test_floor_delay_and_pull_every_against_plain_floats(name):
    parameter = torch.ones((), dtype=torch.float64, requires_grad=True)
    optimizer = PACE([parameter], 1e-2, control=CONTROLS[name])
    for t in range(1, 40):
        parameter.grad = torch.sin(torch.tensor(float(t), dtype=torch.float64)) + 0.3 * parameter.detach()
        optimizer.step()
    live, average, returned = reference(CONTROLS[name], 1e-2, 39)
    state = optimizer.state[parameter]
    assert parameter.item() == pytest.approx(live, rel=1e-12)
    assert state["average"].item() == pytest.approx(average, rel=1e-12)
    if "returned" in state:
        assert state["returned"].item() == pytest.approx(returned, rel=1e-12)


def test_saturated_gains_are_adamw_at_a_power_law_rate():
    """With every gain at its limit live' = average + Δ and average' = average + β Δ, where Δ is AdamW's
    move."""
    parameter = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    optimizer = PACE([parameter], 1e-2, weight_decay=0.0, control=Control.paper(float("inf"), power=0.5))
    base = torch.tensor([1.0, -2.0], dtype=torch.float64)
    m = v = torch.zeros(2, dtype=torch.float64)
    for t in range(1, 30):
        grad = 0.5 * parameter.detach() + torch.cos(torch.tensor([t, 2.0 * t], dtype=torch.float64))
        parameter.grad = grad
        optimizer.step()
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        move = -1e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        assert torch.allclose(parameter.detach(), base + move, rtol=1e-12)
        base = base + (1 + t) ** -0.5 * move
        assert torch.allclose(optimizer.state[parameter]["average"], base, rtol=1e-12)


@pytest.mark.parametrize("name", ["push", "paper"])
def test_nothing_moves_at_rate_zero(name):
    live, gradients = problem()
    optimizer = PACE(live, 1e-2, control=CONTROLS[name])
    train(optimizer, gradients, 5)
    before = [parameter.detach().clone() for parameter in live]
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, gradients, 3, start=6)
    assert all(torch.equal(a, b) for a, b in zip(live, before, strict=True))


def test_no_state_before_the_first_step_and_the_dummy_step_counts_nothing():
    live, gradients = problem()
    optimizer = PACE(live, 1e-2)
    assert not optimizer.state
    for parameter in live:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert all(optimizer.state[parameter]["step"] == 0 for parameter in live)
    with torch.no_grad():
        for parameter in live:
            parameter.add_(1.0)
    optimizer.param_groups[0]["lr"] = 0.0
    start = [parameter.detach().clone() for parameter in live]
    optimizer.param_groups[0]["lr"] = 1e-2
    train(optimizer, gradients, 1)
    rate = Control.paper().rate(1, 0.5)
    for parameter, begin in zip(live, start, strict=True):
        expected = begin + rate * (parameter.detach() - begin)
        assert torch.allclose(optimizer.state[parameter]["average"], expected, rtol=1e-5)


def test_loads_a_state_of_adamw_and_refuses_another_order():
    live, gradients = problem()
    base = torch.optim.AdamW(live, 1e-2)
    train(base, gradients, 4)
    optimizer = PACE(live, 1e-2)
    with pytest.warns(UserWarning, match="no average"):
        optimizer.load_state_dict(base.state_dict())
    train(optimizer, gradients, 1, start=5)
    assert optimizer.state[live[0]]["step"] == 5
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    named = list(model.named_parameters())
    first = PACE(named, 1e-2)
    model(torch.ones(2, 3)).sum().backward()
    first.step()
    second = PACE([named[2], named[1], named[0], named[3]], 1e-2)
    with pytest.raises(ValueError, match=r"in the place of '1\.weight'"):
        second.load_state_dict(first.state_dict())
    assert not second.state


def test_copies_and_pickles_continue_alike():
    live, gradients = problem()
    optimizer = PACE(live, 1e-2, control=Control.push())
    train(optimizer, gradients, 3)
    other = pickle.loads(pickle.dumps(optimizer))
    twins = other.param_groups[0]["params"]
    for t in (4, 5):
        gradients(t)
        for parameter, twin in zip(live, twins, strict=True):
            twin.grad = parameter.grad.clone()
        optimizer.step()
        other.step()
    with averaged_weights(optimizer), averaged_weights(other):
        assert all(torch.equal(a, b) for a, b in zip(live, twins, strict=True))


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1}, {"average_dtype": "fp8"}])
def test_bad_settings_are_named(bad):
    with pytest.raises(ValueError, match=f"Invalid {next(iter(bad))}.*allowed"):
        PACE([torch.ones(2, requires_grad=True)], **bad)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Control(strength=-1.0, sizing="uniform", power=0.5),
        lambda: Control(strength=-0.1, sizing="paper", power=0.5),
        lambda: Control.push(1.0),
        lambda: Control.paper(power=1.5),
        lambda: Control.push(every=0),
        lambda: Control.push(gap="pre"),
    ],
)
def test_bad_controls_are_refused(make):
    with pytest.raises(ValueError, match=r"Invalid .* allowed"):
        make()


def test_the_defaults_of_push_are_frozen():
    push = Control.push()
    assert (push.strength, push.step, push.power, push.return_power) == (-0.5, 0.5, 0.6, 0.7)
    assert (push.every, push.pull_every, push.gap, push.max_gain) == (1, None, "before", 1.0)


def test_shared_memory_is_refused_with_both_names():
    whole = torch.zeros(10)
    first, second = (torch.nn.Parameter(whole[a:b]) for a, b in ((0, 6), (4, 10)))
    with pytest.raises(ValueError, match="'first' and parameter 'second' share memory"):
        PACE([("first", first), ("second", second)])


def test_the_average_runs_as_a_model_next_to_live():
    model = torch.nn.Linear(3, 2)
    optimizer = PACE(model.parameters(), 0.1)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    x = torch.randn(5, 3)
    teacher = torch.func.functional_call(model, averaged_tensors(model, optimizer), x)
    with averaged_weights(optimizer):
        assert torch.equal(model(x), teacher)
    assert not torch.equal(model(x), teacher)
    assert (
        averaged_tensors(model, optimizer)["weight"].data_ptr()
        == optimizer.state[model.weight]["average"].data_ptr()
    )


def test_a_model_of_two_optimizers_is_exported_whole():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    first, second = PACE(model[0].parameters(), 0.1), PACE(model[1].parameters(), 0.1)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        first.step()
        second.step()
    with pytest.raises(ValueError, match=r"1\.weight"):
        averaged_state_dict(model, first)
    exported = averaged_state_dict(model, [first, second])
    with averaged_weights([first, second]):
        assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())
    assert torch.equal(averaged_state_dict(model, first, others="live")["1.weight"], model[1].weight)


def test_reset_average_starts_again_from_live():
    live, gradients = problem()
    optimizer = PACE(live, 1e-2, control=Control.push())
    train(optimizer, gradients, 5)
    reset_average(optimizer)
    with averaged_weights(optimizer):
        pass
    before = [p.detach().clone() for p in live]
    train(optimizer, gradients, 1, 6)
    rate = (1 + 6) ** -0.7
    for parameter, begin in zip(live, before, strict=True):
        expected = begin + rate * (parameter.detach() - begin)
        assert torch.allclose(optimizer.state[parameter]["returned"], expected, atol=1e-6)


@pytest.mark.parametrize("name", ["paper", "push", "limit", "none"])
def test_statistics_are_those_of_the_rule(name):
    live, gradients = problem(torch.float64)
    optimizer = PACE(live, 1e-2, control=CONTROLS[name])
    train(optimizer, gradients, 7)
    control, t = CONTROLS[name], 7
    gains, ratios, gaps = [], [], []
    for p in live:
        state = optimizer.state[p]
        root = (state["exp_avg_sq"] / (1 - 0.999**t)).sqrt() + 1e-8
        ratio = (
            (1e-2 * control.strength / root)
            if control.sizing == "paper"
            else torch.full_like(p, control.strength)
        )
        ratios.append(ratio.flatten().detach())
        gains.append((control.rate(t, control.power) * ratio).clamp(max=1).flatten().detach())
        gaps.append((state["average"] - p.detach()).flatten())
    gains, ratios, gaps = map(torch.cat, (gains, ratios, gaps))
    found = pull_statistics(optimizer)
    if name == "none":
        assert found["gain/mean"] == found["ratio/mean"] == 0
    else:
        assert found["gain/mean"] == pytest.approx(gains.mean().item())
        assert found["saturated"] == pytest.approx((gains >= 1).double().mean().item())
    if name in ("paper", "push"):
        assert found["ratio/mean"] == pytest.approx(ratios.mean().item())
    assert found["gap_rms"] == pytest.approx(gaps.square().mean().sqrt().item())
    assert (found["t"], found["lr"]) == (7, pytest.approx(1e-2))


def test_interrupts_leave_live_and_average_right():
    """Raise at random moments while a block is entered and left; nothing may ever be wrong."""
    live = [torch.randn(50).requires_grad_() for _ in range(40)]
    optimizer = PACE(live, 1e-2)
    for t in range(3):
        for p in live:
            p.grad = torch.full_like(p, 1.0 + t)
        optimizer.step()
    right = [p.detach().clone() for p in live]
    averages = [optimizer.state[p]["average"].clone() for p in live]

    class Stop(Exception):
        pass

    def ring(number, frame):
        raise Stop

    generator, before = np.random.default_rng(0), signal.signal(signal.SIGALRM, ring)
    hits = 0
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, float(generator.uniform(1e-5, 4e-3)))
                with averaged_weights(optimizer):
                    pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stop:
                hits += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            optimizer.train()
            assert all(torch.equal(a, b) for a, b in zip(live, right, strict=True))
            assert all(
                torch.equal(optimizer.state[p]["average"], a) for p, a in zip(live, averages, strict=True)
            )
            assert all("live" not in optimizer.state[p] for p in live)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits > 30


def test_a_state_dict_taken_outside_and_written_inside_a_block():
    live, gradients = problem()
    optimizer = PACE(live, 1e-2, control=Control.push())
    train(optimizer, gradients, 3)
    taken = optimizer.state_dict()
    right = copy.deepcopy(taken)
    with averaged_weights(optimizer):
        inside = optimizer.state_dict()
        for i, entries in right["state"].items():
            assert all(torch.equal(taken["state"][i][key], value) for key, value in entries.items())
    held = copy.deepcopy(inside)
    train(optimizer, gradients, 1, 4)
    for i, entries in held["state"].items():
        assert all(torch.equal(right["state"][i][key], entries[key]) for key in right["state"][i])


def test_autocast_does_not_compute_with_weights_of_before():
    model = torch.nn.Linear(16, 16)
    optimizer = PACE(model.parameters(), 0.1)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        alone = model(x).clone()
        with averaged_weights(optimizer):
            shown = model(x).clone()
        again = model(x).clone()
    with averaged_weights(optimizer), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(shown, model(x))
    assert torch.equal(alone, again) and not torch.equal(alone, shown)
