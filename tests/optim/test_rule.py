"""The update: every path against a float64 reference, AdamW to the bit, and what any reading must have."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from problems import (
    BESIDE,
    CONTROLS,
    INF,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    parameters_of,
    run,
    same,
    set_gradients,
)
from reference import Reference, array, averages_of, distance, distances, references
from torch.optim import lr_scheduler

from paceline import PACE, Control, attach
from paceline.optim import foreach as foreach_path
from paceline.optim.foreach import move_averages_
from paceline.optim.rule import move_average_

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy's, in the interpreter

ADAMW = ("betas", "eps", "weight_decay", "maximize")
PATHS = {
    "loop": lambda groups, control: PACE(groups, foreach=False, control=control),
    "foreach": lambda groups, control: PACE(groups, foreach=True, control=control),
    "fused": lambda groups, control: PACE(groups, fused=True, control=control),
    "attached": lambda groups, control: attach(torch.optim.AdamW(groups), control=control),
}
CASES = [(path, name) for path in PATHS for name in (BESIDE if path == "attached" else CONTROLS)]


@pytest.mark.parametrize(("path", "name"), CASES)
def test_every_path_is_the_reference(path, name, request):
    """Groups with settings of their own, a schedule with a rate of 0, and steps without some gradients."""
    device = request.getfixturevalue("kernel") if path == "fused" else "cpu"
    dtype, tolerance, steps = (torch.float32, 2e-6, 6) if path == "fused" else (torch.float64, 1e-12, 25)
    parameters = [p.detach().to(device).requires_grad_() for p in make_parameters(dtype=dtype)]
    own = [
        {"lr": 1e-2, "weight_decay": 0.3, "betas": (0.8, 0.99)},
        {"lr": 3e-2, "weight_decay": 0.0, "eps": 1e-3, "maximize": True},
    ]
    halves = parameters[:2], parameters[2:]
    expected = [r for half, s in zip(halves, own, strict=True) for r in references(half, CONTROLS[name], **s)]
    optimizer = PATHS[path]([{"params": p, **s} for p, s in zip(halves, own, strict=True)], CONTROLS[name])
    schedule = lr_scheduler.LambdaLR(optimizer, lambda t: (1.0, 0.5, 2.0, 0.0)[t % 4])
    for t, gradients in enumerate(make_gradients(steps)):
        gradients = [None if (t, i) in ((0, 2), (3, 0), (5, 0)) else g for i, g in enumerate(gradients)]
        set_gradients(parameters, gradients)
        for i, (reference, parameter) in enumerate(zip(expected, parameters, strict=True)):
            reference.lr = optimizer.param_groups[i // 2]["lr"]
            reference.step(None if parameter.grad is None else array(parameter.grad))
        optimizer.step()
        schedule.step()
    found = distances(optimizer, parameters, expected)
    assert len(found) >= 4 and max(found.values()) <= tolerance, found


numbers = st.floats(-3, 3)
controls = st.builds(
    lambda kind, own: Control(**kind, **own),
    st.one_of(
        st.builds(lambda s: {"sizing": "paper", "strength": s}, st.sampled_from([0.0, 1e-3, 1.0, 60.0, INF])),
        st.builds(lambda s: {"sizing": "uniform", "strength": s}, st.sampled_from([-0.9, -0.2, 0.7, 5.0])),
    ),
    st.fixed_dictionaries(
        {
            "power": st.floats(0, 1),
            "return_power": st.sampled_from([None, 0.0, 0.7, 1.0]),
            "step": st.sampled_from([1.0, 0.5, 2.0]),
            "every": st.integers(1, 4),
            "pull_every": st.sampled_from([None, 1, 3]),
            "slope": st.sampled_from([1.0, 0.0, 2.5]),
            "delay": st.sampled_from([0.0, 0.5, 5.0]),
            "least_rate": st.sampled_from([0.0, 0.2]),
            "max_gain": st.sampled_from([1.0, 0.3]),
            "gap": st.sampled_from(["before", "after"]),
            "order": st.sampled_from(["pull, then average", "average, then pull"]),
        }
    ),
)
options = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-4, 1e-2, 0.3]),
        "betas": st.tuples(st.sampled_from([0.0, 0.8, 0.95]), st.sampled_from([0.9, 0.999])),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
        "maximize": st.booleans(),
    }
)


@given(st.lists(numbers, min_size=1, max_size=4), controls, options, st.booleans(), st.integers(0, 2**31))
@examples(max_examples=120, deadline=None, derandomize=True)
def test_any_setting_is_the_reference(start, control, adamw, foreach, seed):
    """Twelve steps, some of them without a gradient. A number close to 0 is the difference of larger ones."""
    reference = Reference(start, control, **adamw)
    parameter = torch.tensor(start, dtype=torch.float64).requires_grad_()
    optimizer = PACE([parameter], control=control, foreach=foreach, **adamw)
    noise = np.random.default_rng(seed)
    for _ in range(12):
        gradient = None if noise.random() < 0.1 else 0.3 + noise.standard_normal(len(start))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        optimizer.step()
        reference.step(gradient)
    if not reference.t:
        return
    size = 1 + np.abs(start).max()
    kept = averages_of(optimizer, parameter)
    for ours, theirs in ((parameter, reference.live), (kept[control.averages[-1]], reference.evaluated)):
        assert np.abs(array(ours) - theirs).max() <= 1e-12 * size
    assert optimizer.state[parameter]["step"].item() == reference.t


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["two averages", "push", "every 3, pulled at every 2", "lookahead", "none"])
def test_foreach_is_the_loop_to_the_bit(name, dtype, storage, monkeypatch):
    """Also where the parameters of a group are taken in several chunks."""
    if dtype == torch.float64 and storage != "float32":
        pytest.skip("refused")
    found = []
    for foreach, elements in ((False, 2**24), (True, 2**24), (True, 10)):
        monkeypatch.setitem(foreach_path.CHUNK_ELEMENTS, "cpu", elements)
        shapes = [(4, 3), (300,), (), (0, 2), (2, 3, 2)]
        settings = {"control": CONTROLS[name], "average_dtype": storage, "foreach": foreach}
        settings["betas"] = (0.9, 0.95)  # which bfloat16 has no number for
        parameters = make_parameters(dtype=dtype, shapes=shapes)
        found.append(everything(run(parameters, make_gradients(12, shapes=shapes), **settings)))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


def test_one_float32_step_is_within_ulps_of_the_reference():
    """From equal inputs, 99.9 % of the weights are within 4 units in the last place."""
    shape, control = [(4000,)], CONTROLS["clipped at half"]
    parameters = make_parameters(dtype=torch.float32, shapes=shape)
    optimizer = run(parameters, make_gradients(30, shapes=shape), control)
    state = optimizer.state[parameters[0]]
    reference = Reference(array(parameters[0]), control, lr=1e-2)
    reference.m, reference.v, reference.t = array(state["exp_avg"]), array(state["exp_avg_sq"]), 30
    reference.average = array(state["average"])
    gradient = make_gradients(1, seed=7, shapes=shape)[0][0].float()
    advance(optimizer, parameters, [[gradient]])
    reference.step(array(gradient))
    for ours, theirs in ((parameters[0], reference.live), (state["average"], reference.average)):
        unit = np.spacing(np.maximum(np.abs(theirs), 0.05).astype(np.float32))
        assert (np.abs(array(ours) - theirs) <= 4 * unit).mean() >= 0.999
    clipped = (reference.gain >= 0.5).mean()
    assert 0.05 < clipped < 0.95  # both sides of the clip are there


# --- Without a control ------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 1000), (torch.bfloat16, 100)])
def test_no_control_is_adamw_to_the_bit(dtype, steps, foreach):
    """With groups, weight decay, ascent, and a schedule that turns betas; gradients depend on the weights."""

    def groups(parameters):
        first = {"params": parameters[:2], "weight_decay": 0.1, "maximize": True}
        return [first, {"params": parameters[2:], "betas": (0.8, 0.99), "eps": 1e-6}]

    ours, theirs = make_parameters(dtype=dtype), make_parameters(dtype=dtype)
    pace = PACE(groups(ours), control=Control.none(power=0.5), foreach=foreach)
    # On a CPU torch's own foreach rounds .999 to 1 for bfloat16; ours is torch's loop.
    adamw = torch.optim.AdamW(groups(theirs), foreach=foreach and dtype == torch.float32)
    average = [array(p) for p in ours]
    noise, schedules = make_gradients(steps), []
    for optimizer in (pace, adamw):
        schedules.append(lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 3e-2], total_steps=steps + 1))
    for t in range(1, steps + 1):
        for parameters, optimizer, schedule in zip((ours, theirs), (pace, adamw), schedules, strict=True):
            signs = (-1, -1, 1, 1)
            moved = [s * p.detach() + g for s, p, g in zip(signs, parameters, noise[t - 1], strict=True)]
            advance(optimizer, parameters, [moved])
            schedule.step()
        average = [a + (1 + t) ** -0.5 * (array(p) - a) for a, p in zip(average, ours, strict=True)]
        if t % 100 == 0 or t < 5:
            assert same(ours, theirs), t
            for key in ("exp_avg", "exp_avg_sq"):
                assert same([pace.state[p][key] for p in ours], [adamw.state[p][key] for p in theirs]), t
    for p, expected in zip(ours, average, strict=True):
        assert distance(pace.state[p]["average"], expected) <= 1e-6


@pytest.mark.parametrize("lr", [torch.tensor(3e-3), torch.tensor([3e-3])])
def test_a_learning_rate_that_is_a_tensor_is_adamws(lr):
    gradients = make_gradients(20)
    ours, theirs = make_parameters(dtype=torch.float32), make_parameters(dtype=torch.float32)
    run(ours, gradients, Control.none(), lr=lr)
    advance(torch.optim.AdamW(theirs, lr=lr), theirs, gradients)
    assert same(ours, theirs)


def test_a_returned_average_leaves_live_as_it_is():
    gradients = make_gradients(30)
    one, two = make_parameters(), make_parameters()
    run(one, gradients, Control.paper(30.0, power=0.3))
    run(two, gradients, Control.paper(30.0, power=0.3, return_power=0.9))
    assert same(one, two)


# --- Identities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("control", [Control.paper(INF, power=0.5), Control.pull(INF, power=0.5)], ids=str)
@pytest.mark.parametrize("foreach", [False, True])
def test_an_infinite_strength_is_adamw_at_a_power_law_rate(foreach, control):
    """live' = average + Δ and average' = average + β Δ, where Δ is AdamW's move: a rate of β · lr."""
    parameters, gradients = make_parameters(), make_gradients(30)
    optimizer = run(parameters, [], control, weight_decay=0.0, foreach=foreach)
    slow = Reference(array(parameters[0]), Control.none(), weight_decay=0.0)
    for t, step in enumerate(gradients, 1):
        advance(optimizer, parameters, [step])
        before, slow.lr = slow.live, 1e-2 * (1 + t) ** -0.5
        slow.step(array(step[0]))
        kept = averages_of(optimizer, parameters[0])["average"]
        assert distance(kept, slow.live) <= 1e-12
        assert distance(parameters[0], before + (slow.live - before) * (1 + t) ** 0.5) <= 1e-12


@pytest.mark.parametrize("foreach", [False, True])
def test_lookahead_at_an_infinite_strength_puts_live_on_the_average(foreach):
    parameters = make_parameters()
    optimizer = run(parameters, make_gradients(9), CONTROLS["lookahead"], foreach=foreach)
    for p in parameters:
        assert not torch.equal(p, optimizer.state[p]["average"])
    advance(optimizer, parameters, make_gradients(1))
    for p in parameters:
        assert torch.allclose(p, optimizer.state[p]["average"], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("strength", [-0.9, -0.5, 1.0, 4.0])
def test_a_control_keeps_the_drift(strength):
    """Under a constant gradient live moves at (1 + R)/(1 + R (1 − β)) of the base's rate."""
    make, rate = Control.push if strength < 0 else Control.pull, 0.1
    control = make(abs(strength), power=1.0, least_rate=rate)
    parameter = torch.zeros(1, dtype=torch.float64).requires_grad_()
    optimizer = attach(torch.optim.SGD([parameter], 1.0), control=control)
    for _ in range(400):
        before = parameter.item()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    expected = (1 + strength) / (1 + strength * (1 - rate))
    assert before - parameter.item() == pytest.approx(expected, rel=2e-3)


# --- Bad numbers ------------------------------------------------------------------------------------------

EXTREME = ("paper", "saturated", "push", "pull", "lookahead")


def stepped(make, gradient, steps=4, **settings):
    parameter = torch.tensor([1.0, -2.0, 0.5, 3.0]).requires_grad_()
    optimizer = make([parameter], lr=1e-3, **settings)
    for _ in range(steps):
        parameter.grad = torch.as_tensor(gradient, dtype=torch.float32).expand(4).clone()
        optimizer.step()
    return parameter.detach(), optimizer


@pytest.mark.parametrize("path", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("size", [0.0, -0.0, 1e-45, 1e-30, 1e10, 1e18, 1e19, 1e38])
def test_extreme_gradients_stay_finite_where_adamw_does(size, path, request):
    """At 1e19 the second moment overflows float32, which AdamW survives on a CPU."""
    own = {"fused": True} if path == "fused" else {"foreach": path == "foreach"}
    if path == "fused":
        request.getfixturevalue("kernel")
    theirs, _ = stepped(torch.optim.AdamW, size, foreach=False)
    for name in ("paper",) if path == "fused" else EXTREME:
        if torch.cuda.is_available() and path == "fused":
            pytest.skip("tests of a GPU are in test_cuda.py")
        ours, optimizer = stepped(PACE, size, control=CONTROLS[name], **own)
        assert torch.equal(ours.isfinite(), theirs.isfinite()), name
        (state,) = optimizer.state.values()
        assert torch.equal(state["average"].isfinite(), theirs.isfinite()), name


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", EXTREME)
def test_a_bad_gradient_spoils_its_own_coordinate_and_no_other(name, bad, foreach):
    dirty = torch.tensor([0.1, -0.2, bad, 0.4])
    theirs, _ = stepped(torch.optim.AdamW, dirty, foreach=foreach)
    good, _ = stepped(PACE, dirty.nan_to_num(0.3, 0.3, 0.3), control=CONTROLS[name], foreach=foreach)
    ours, optimizer = stepped(PACE, dirty, control=CONTROLS[name], foreach=foreach)
    (state,) = optimizer.state.values()
    assert theirs.isfinite().tolist() == [True, True, False, True]
    for found in (ours, state["average"]):
        assert torch.equal(found.isfinite(), theirs.isfinite())
    assert torch.equal(ours[[0, 1, 3]], good[[0, 1, 3]])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("make", [Control.paper, Control.pull])
def test_a_gain_beyond_all_numbers_leaves_weights_that_are_on_their_average(make, foreach):
    """An infinite gain times a gap of 0 would be NaN."""
    control = make(INF, max_gain=INF)
    ours, _ = stepped(PACE, 0.0, control=control, foreach=foreach, eps=1e-40, weight_decay=0.0)
    assert ours.tolist() == [1.0, -2.0, 0.5, 3.0]


@pytest.mark.parametrize("foreach", [False, True])
def test_an_average_that_rests_is_not_spoiled(foreach):
    """0 times an infinite weight would be NaN."""
    parameters, start = make_parameters(), make_parameters()
    gradients = [torch.full_like(parameter, INF) for parameter in parameters]
    optimizer = run(parameters, [gradients], Control.push(every=3), foreach=foreach)
    assert same([optimizer.state[parameter]["average"] for parameter in parameters], start)


@pytest.mark.parametrize("foreach", [False, True])
def test_an_average_of_power_0_is_live_whatever_it_was(foreach):
    """0 times an infinite average would be NaN."""
    optimizer = run(make_parameters(), make_gradients(1), Control.none(power=0.0), foreach=foreach)
    parameters = parameters_of(optimizer)
    for parameter in parameters:
        optimizer.state[parameter]["average"].fill_(INF)
    advance(optimizer, parameters, make_gradients(1))
    assert same(parameters, [optimizer.state[parameter]["average"] for parameter in parameters])


def test_an_infinite_strength_stays_finite_where_the_second_moment_overflows():
    ours, _ = stepped(PACE, 1e25, control=Control.paper(INF), foreach=False)
    lists, _ = stepped(PACE, 1e25, control=Control.paper(INF), foreach=True)
    assert ours.isfinite().all() and torch.equal(ours, lists)


# --- Precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_average_of_low_precision_weights_moves_where_a_low_precision_one_stands_still(dtype):
    """From 0.99 toward 1.0 near step 4,700, where the averaging rate is 1/69."""
    parameter = torch.full((4,), 0.99, dtype=dtype).requires_grad_()
    optimizer = PACE([parameter], lr=0.0, eps=1e-3)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[parameter]["step"].fill_(4700)
    with torch.no_grad():
        parameter.fill_(1.0)
    for _ in range(300):
        optimizer.step()
    assert (optimizer.state[parameter]["average"] > 0.9995).all()


@pytest.mark.parametrize("foreach", [False, True])
def test_the_average_of_weights_that_stand_still_does_not_drift(foreach):
    """Were each share rounded by itself, their sum would be off by 1e-8, and that adds up."""
    live = torch.linspace(0.5, 3.0, 100)
    average = live.clone()
    for t in range(1, 20_001):
        if foreach:
            move_averages_([average], [live], 1 / (1 + t))
        else:
            move_average_(average, live, 1 / (1 + t))
    assert ((average - live).abs() / live).max() < 2e-6


@pytest.mark.parametrize("foreach", [False, True])
def test_a_bfloat16_model_has_an_average_as_accurate_as_float32(foreach):
    parameters = make_parameters(dtype=torch.bfloat16)
    exact = [array(p) for p in parameters]
    optimizer = run(parameters, [], Control.push(), foreach=foreach)
    for t, step in enumerate(make_gradients(300), 1):
        advance(optimizer, parameters, [step])
        exact = [a + (1 + t) ** -0.7 * (array(p) - a) for a, p in zip(exact, parameters, strict=True)]
    for p, expected in zip(parameters, exact, strict=True):
        assert distance(optimizer.state[p]["returned"], expected) <= 1e-5


def test_a_parameter_that_takes_the_place_of_another_in_the_same_memory_is_the_one_that_is_stepped():
    """The other one still has a gradient: a plan that knew addresses only would step it again and again."""
    found = []
    for make in (lambda p: PACE(p, 1e-2, control=Control.none()), lambda p: torch.optim.AdamW(p, 1e-2)):
        first = torch.ones(3, requires_grad=True)
        optimizer = make([first])
        advance(optimizer, [first], [[torch.ones(3)]])
        second = torch.nn.Parameter(first.data)
        optimizer.param_groups[0]["params"][0] = second
        advance(optimizer, [second], [[torch.full((3,), float(i - 1))] for i in range(3)])
        found.append(second)
    assert same(*([p] for p in found))
