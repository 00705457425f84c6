"""Weights in bfloat16: rounded at random, or with what rounding drops kept beside them."""

import copy
import io

import pytest
import torch
from problems import PATHS, SETTINGS, advance, assert_same_bits, everything, make_gradients, make_parameters

from paceline import PACE, Averages, PowerLaw, averaged_state_dict, averaged_weights, reset_average
from paceline.optim.state import average_of, in_full
from paceline.optim.storage import SALTS, encode_, joined, split_

BFLOAT16 = torch.bfloat16
VALUES = [0.0, -0.0, 1.0, 1.0000001, -1.00390625, 3.4e38, -3.4e38, 1e-40, torch.inf, -torch.inf, torch.nan]


def of_bfloat16(parameters):
    """The same numbers in float32, as parameters of another optimizer."""
    return [p.detach().float().requires_grad_() for p in parameters]


def in_bfloat16(steps):
    return [[g.to(BFLOAT16) for g in step] for step in steps]


def test_what_is_split_is_joined_to_the_same_bits():
    values = torch.cat([torch.tensor(VALUES), torch.randn(1000, generator=torch.Generator().manual_seed(0))])
    live, rest = torch.empty_like(values, dtype=BFLOAT16), torch.empty_like(values, dtype=torch.int16)
    split_(live, rest, values)
    again, bad = joined(live, rest), ~values.isfinite()
    assert torch.equal(again[~bad].view(torch.int32), values[~bad].view(torch.int32))
    assert torch.equal(again[bad].nan_to_num(), values[bad].nan_to_num())
    # The upper half alone is the nearest bfloat16; ties are the one exception.
    assert (live == values.to(BFLOAT16))[~bad].float().mean() > 0.99
    assert ((live.float() - values).abs() <= 2**-8 * values.abs() + 1e-38)[~bad][11:].all()


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize(
    "settings", [SETTINGS, {}, {"betas": (0.0, 0.99)}], ids=["paper", "usual", "no momentum"]
)
def test_master_weights_are_those_of_float32(foreach, settings):
    """Beside weights in float32 that are given the same gradients: all bits of weights and state."""
    parameters, steps = make_parameters(dtype=BFLOAT16), in_bfloat16(make_gradients(7))
    wide = of_bfloat16(parameters)
    optimizer = PACE(parameters, lr=1e-2, foreach=foreach, rounding="master", **settings)
    other = PACE(wide, lr=1e-2, foreach=foreach, **settings)
    for step in steps:
        advance(optimizer, parameters, [step])
        advance(other, wide, [step])
    for narrow, full in zip(parameters, wide, strict=True):
        ours, theirs = dict(optimizer.state[narrow]), other.state[full]
        rest = ours.pop("live_rest")
        assert rest.dtype == torch.int16
        assert_same_bits({"live": joined(narrow, rest), **ours}, {"live": full.detach(), **theirs})


def test_masters_with_residuals_are_beside_all_of_the_weight():
    """A residual in int8 is of the whole weight, not of the half that the parameter shows."""
    parameters, steps = make_parameters(dtype=BFLOAT16), in_bfloat16(make_gradients(30))
    optimizer = PACE(parameters, lr=1e-3, rounding="master", average_dtype="int8")
    twins = [p.detach().clone().requires_grad_() for p in parameters]
    exact = PACE(twins, lr=1e-3, rounding="master")
    advance(optimizer, parameters, steps)
    advance(exact, twins, steps)
    for p, q in zip(parameters, twins, strict=True):
        average = average_of(optimizer.state[p], "returned", p)
        apart = (average - exact.state[q]["returned"]).abs()
        assert (apart <= 2e-3 * (in_full(q, exact.state[q]) - average).abs().max() + 1e-3).all()
        assert (apart <= 0.02 * 2**-8 + 0.03 * (in_full(p, optimizer.state[p]) - average).abs().max()).all()


@pytest.mark.parametrize("foreach", PATHS)
def test_rounding_at_random_is_right_on_the_mean(foreach):
    """100,000 weights of 1 that are moved by less than bfloat16 can tell: to 3e-5 of where they should be."""
    ends, moments = {}, {}
    for rounding in ("nearest", "stochastic"):
        parameter = torch.ones(100_000, dtype=BFLOAT16).requires_grad_()
        settings = {"gain": "paper", "lr": 7e-4, "weight_decay": 0.0, "betas": (0.9, 0.999)}
        optimizer = PACE([parameter], foreach=foreach, rounding=rounding, **settings)
        for _ in range(3):
            parameter.grad = torch.full_like(parameter, 0.3)
            optimizer.step()
        ends[rounding] = parameter.detach().double().mean().item()
        moments[rounding] = optimizer.state[parameter]["exp_avg_sq"].double().mean().item()
    gradient = torch.tensor(0.3, dtype=BFLOAT16).double().item()
    assert ends["nearest"] == 1.0
    assert abs(ends["stochastic"] - (1 - 3 * 7e-4)) < 3e-5
    assert abs(moments["stochastic"] / (gradient**2 * (1 - 0.999**3)) - 1) < 3e-5


def test_chances_of_weights_moments_and_averages_are_not_the_same():
    drawn = []
    for salt in SALTS.values():
        code = torch.empty(4000, dtype=BFLOAT16)
        encode_(code, None, torch.full((4000,), 1.002), torch.tensor(5.0), salt)
        drawn.append((code > 1).double())
    table = torch.corrcoef(torch.stack(drawn))
    assert (table - torch.eye(len(drawn)).double()).abs().max() < 0.06


@pytest.mark.parametrize("rounding", ["stochastic", "master"])
def test_a_resumed_run_is_the_same_to_the_bit(rounding):
    parameters, steps = make_parameters(dtype=BFLOAT16), in_bfloat16(make_gradients(8))
    optimizer = PACE(parameters, lr=1e-2, rounding=rounding)
    advance(optimizer, parameters, steps[:4])
    file = io.BytesIO()
    torch.save({"state": optimizer.state_dict(), "weights": parameters}, file)
    advance(optimizer, parameters, steps[4:])
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    again = saved["weights"]
    resumed = PACE(again, lr=1e-2, rounding=rounding)
    resumed.load_state_dict(saved["state"])
    advance(resumed, again, steps[4:])
    assert_same_bits(everything(optimizer), everything(resumed))


def test_states_are_turned_into_what_is_asked_for():
    """From master weights to none and back, and from AdamW: moments and what is dropped come and go."""
    parameters, steps = make_parameters(dtype=BFLOAT16), in_bfloat16(make_gradients(4))
    master = PACE(parameters, lr=1e-2, rounding="master")
    advance(master, parameters, steps[:2])
    plain = PACE(parameters, lr=1e-2)
    plain.load_state_dict(copy.deepcopy(master.state_dict()))
    assert plain.param_groups[0]["rounding"] == "nearest"
    advance(plain, parameters, steps[2:3])
    state = plain.state[parameters[0]]
    assert "live_rest" not in state and state["exp_avg"].dtype == BFLOAT16
    adamw = torch.optim.AdamW(parameters, lr=1e-2)
    advance(adamw, parameters, steps[2:3])
    back = PACE(parameters, lr=1e-2, rounding="master")
    with pytest.warns(UserWarning, match="no 'average'"):
        back.load_state_dict(adamw.state_dict())
    advance(back, parameters, steps[3:])
    state = back.state[parameters[0]]
    assert state["live_rest"].dtype == torch.int16 and state["exp_avg_sq"].dtype == torch.float32


def test_a_rest_of_another_shape_is_refused():
    parameters = make_parameters(dtype=BFLOAT16)
    optimizer = PACE(parameters, rounding="master")
    advance(optimizer, parameters, in_bfloat16(make_gradients(1)))
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1]["live_rest"] = torch.zeros(3, dtype=torch.int16)
    with pytest.raises(ValueError, match="live_rest of parameter 1 of group 0 has shape"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("rounding", ["stochastic", "master"])
def test_averages_are_shown_exported_and_hidden(rounding):
    model = torch.nn.Linear(3, 2).to(BFLOAT16)
    optimizer = PACE(model.parameters(), lr=1e-2, rounding=rounding)
    parameters = list(model.parameters())
    advance(optimizer, parameters, in_bfloat16(make_gradients(3, shapes=[p.shape for p in parameters])))
    before, returned = everything(optimizer), optimizer.state[model.weight]["returned"].clone()
    with averaged_weights(optimizer):
        assert torch.equal(model.weight, returned.to(BFLOAT16))
    assert_same_bits(before, everything(optimizer))
    assert torch.equal(averaged_state_dict(model, optimizer)["weight"], returned)


def test_what_has_nothing_to_round_is_as_ever():
    ends = []
    for rounding in ("nearest", "stochastic", "master"):
        parameters = make_parameters(dtype=torch.float32)
        optimizer = PACE(parameters, lr=1e-2, rounding=rounding)
        advance(optimizer, parameters, make_gradients(3))
        ends.append(everything(optimizer))
    assert_same_bits(ends[0], ends[1])
    assert_same_bits(ends[0], ends[2])


def test_float16_is_refused_with_what_to_do():
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0 is float16; rounding='master' is for bfloat16"
    ):
        PACE([torch.ones(2, dtype=torch.float16).requires_grad_()], rounding="master")


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("kinds", [(torch.float32, BFLOAT16), (BFLOAT16, torch.float32)])
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


# --- Found in review ----------------------------------------------------------------------------------


def masters(steps=3, **settings):
    """A PACE with master weights after some steps, and the same in float32."""
    parameters, given = make_parameters(dtype=BFLOAT16), in_bfloat16(make_gradients(steps))
    wide = of_bfloat16(parameters)
    settings = {"lr": 1e-2, "foreach": True, **settings}  # a path that both can take
    both = PACE(parameters, rounding="master", **settings), PACE(wide, **settings)
    for optimizer, own in zip(both, (parameters, wide), strict=True):
        advance(optimizer, own, given)
    return *both, parameters, wide


def test_weights_that_are_set_to_zero_from_outside_are_no_nan():
    parameter = torch.rand(64, generator=torch.Generator().manual_seed(0)).to(BFLOAT16).requires_grad_()
    optimizer = PACE([parameter], lr=0.1, rounding="master")
    for step in in_bfloat16(make_gradients(10, shapes=[(64,)])):
        advance(optimizer, [parameter], [step])
        with torch.no_grad():
            parameter.clamp_(min=0)
    assert parameter.isfinite().all()


@pytest.mark.parametrize("rounding", ["stochastic", "master"])
def test_neighbours_in_memory_stay_as_they_are(rounding):
    room = torch.full((4, 4), 7.0, dtype=BFLOAT16)
    room[:, :2] = 1
    parameter = room[:, :2].requires_grad_()
    optimizer = PACE([parameter], lr=1e-2, rounding=rounding)
    parameter.grad = torch.ones(4, 2, dtype=BFLOAT16)
    optimizer.step()
    assert (room[:, 2:] == 7).all() and (parameter < 1).all()


def test_what_a_checkpoint_does_not_have_is_not_taken_for_its_own():
    """torch.distributed.checkpoint fills a full state with what the optimizer at hand has."""
    optimizer, _, parameters, _ = masters()
    rests = [optimizer.state[p]["live_rest"].clone() for p in parameters]
    plain = PACE([p.detach().clone().requires_grad_() for p in parameters], lr=1e-2)
    advance(plain, plain.param_groups[0]["params"], in_bfloat16(make_gradients(2)))
    state = copy.deepcopy(plain.state_dict())
    for i, rest in enumerate(rests):
        state["state"][i]["live_rest"] = rest
    optimizer.load_state_dict(state)
    assert not any("live_rest" in entry for entry in optimizer.state.values())


def test_averages_that_begin_anew_begin_with_all_of_the_weight():
    optimizer, other, parameters, wide = masters()
    for one, own in ((optimizer, parameters), (other, wide)):
        reset_average(one)
        advance(one, own, in_bfloat16(make_gradients(2, seed=4)))
    for p, q in zip(parameters, wide, strict=True):
        assert torch.equal(in_full(p, optimizer.state[p]), q)
        assert torch.equal(optimizer.state[p]["average"], other.state[q]["average"])


def test_averages_around_are_of_all_of_the_weight():
    parameters, given = make_parameters(dtype=BFLOAT16), in_bfloat16(make_gradients(6))
    wide, ends = of_bfloat16(parameters), []
    for own, rounding in ((parameters, "master"), (wide, "nearest")):
        around = Averages(PACE(own, lr=1e-4, rounding=rounding), {"long": PowerLaw(0.9)})
        advance(around, own, given)
        ends.append([average for _, average in around["long"].returned_averages()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_the_average_stays_when_masters_are_given_up(storage):
    optimizer, _, parameters, _ = masters(average_dtype=storage)
    before = average_of(optimizer.state[parameters[0]], "returned", parameters[0])
    optimizer.param_groups[0]["rounding"] = "nearest"
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["return_power"] = 1e-9 + 1.0 - 1e-9  # moves by 1/(1 + t) of a gap
    live = parameters[0].detach().float().clone()
    advance(optimizer, parameters, in_bfloat16(make_gradients(1)))
    after = average_of(optimizer.state[parameters[0]], "returned", parameters[0])
    apart = (after - before).abs().max()
    assert apart <= 0.25 * (live - before).abs().max() + 3e-3
