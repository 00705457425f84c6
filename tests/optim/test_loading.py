"""Loading: precision, other optimizers' states, and what does not fit."""

import copy
import io
import warnings

import pytest
import torch
from problems import (
    PATHS,
    SETTINGS,
    VARIANTS,
    Net,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    run,
)
from torch.optim import Optimizer

from paceline import PACE, Pullback, averaged_weights, reset_average

# --- Precision on load ----------------------------------------------------------------------------

PRECISIONS = [torch.float32, torch.bfloat16]


def loaded_average_precision(load, parameter_dtype, average_dtype):
    first = PACE([torch.ones(3, dtype=parameter_dtype).requires_grad_()])
    advance(first, first.param_groups[0]["params"], [[torch.ones(3)]])
    saved = copy.deepcopy(first.state_dict())
    saved["state"][0]["average"] = torch.tensor([1.001, 2.002, 3.003], dtype=average_dtype)
    second = PACE([torch.ones(3, dtype=parameter_dtype).requires_grad_()])
    load(second, saved)
    (state,) = second.state.values()
    entries = state.entries if hasattr(state, "entries") else state
    assert entries["step"].dtype == torch.float64
    return torch.equal(entries["average"], saved["state"][0]["average"]), entries["average"].dtype


@pytest.mark.parametrize("average_dtype", PRECISIONS)
@pytest.mark.parametrize("parameter_dtype", PRECISIONS)
def test_loading_keeps_the_precision_of_the_average(parameter_dtype, average_dtype):
    """S4: in all four combinations."""
    same, dtype = loaded_average_precision(PACE.load_state_dict, parameter_dtype, average_dtype)
    assert same and dtype == average_dtype


def test_stock_loading_would_fail_that():
    """S4, broken twin: torch's own load_state_dict rounds a float32 average to bfloat16."""

    class Stock(Optimizer):
        pass

    def stock_load(optimizer, saved):
        plain = Stock(optimizer.param_groups, {})
        plain.load_state_dict(saved)
        optimizer.state = plain.state

    same, dtype = loaded_average_precision(stock_load, torch.bfloat16, torch.float32)
    assert not same and dtype == torch.bfloat16


def test_a_low_precision_step_count_is_refused():
    optimizer = run(make_parameters(), make_gradients(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = torch.tensor(256.0, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"step of parameter 0 of group 0 is 256.0 in torch.bfloat16"):
        optimizer.load_state_dict(saved)


def test_two_optimizers_never_share_a_tensor_after_loading():
    first = run(make_parameters(), make_gradients(3), **SETTINGS)
    second = PACE(make_parameters(), **SETTINGS)
    second.load_state_dict(first.state_dict())
    before = everything(second)
    advance(first, first.param_groups[0]["params"], make_gradients(3, seed=4))
    assert_same_bits(before, everything(second))


# --- Other optimizers' states ---------------------------------------------------------------------


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("weights_after_state", [False, True])
def test_an_adamw_checkpoint_goes_on_with_averages_from_the_loaded_weights(foreach, weights_after_state):
    """S3: m, v, t kept; the average is seeded from the weights after load, and a warning says so."""
    gradients = make_gradients(20)
    theirs = make_parameters(dtype=torch.float32)
    adamw = torch.optim.AdamW(theirs, lr=1e-2, foreach=foreach)
    advance(adamw, theirs, gradients[:10])
    buffer = io.BytesIO()
    torch.save(adamw.state_dict(), buffer)  # what the Hugging Face Trainer calls optimizer.pt
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)

    ours = make_parameters(seed=50, dtype=torch.float32)
    pace = PACE(ours, lr=1e-3, foreach=foreach, pullback_strength=0.0, ema_power=0.7)

    def load_weights():
        with torch.no_grad():
            for p, q in zip(ours, theirs, strict=True):
                p.copy_(q)

    if not weights_after_state:
        load_weights()
    with pytest.warns(UserWarning, match=r"no 'average' for 4 parameter.*starts from the live") as caught:
        pace.load_state_dict(saved)
    assert caught[0].filename == __file__
    if weights_after_state:
        load_weights()
    group = pace.param_groups[0]
    assert group["lr"] == 1e-2 and group["ema_power"] == 0.7 and "amsgrad" not in group
    assert torch.equal(pace.state_dict()["state"][0]["average"], ours[0])
    start = [p.detach().clone() for p in ours]
    for t, step in enumerate(gradients[10:], 11):
        advance(adamw, theirs, [step])
        advance(pace, ours, [step])
        if t == 11:
            for p, s in zip(ours, start, strict=True):
                expected = s + 12**-0.7 * (p.detach() - s)
                assert torch.allclose(pace.state[p]["average"], expected, rtol=1e-6)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q) and torch.equal(pace.state[p]["exp_avg_sq"], adamw.state[q]["exp_avg_sq"])


@pytest.mark.parametrize("foreach", PATHS)
def test_a_pace_state_goes_on_in_adamw(foreach):
    """S3: m, v and t carry over; the average is ignored."""
    gradients = make_gradients(20)
    ours = make_parameters(dtype=torch.float32)
    pace = run(ours, gradients[:10], pullback_strength=0.0, foreach=foreach)
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    adamw = torch.optim.AdamW(theirs)
    adamw.load_state_dict(copy.deepcopy(pace.state_dict()))
    adamw.param_groups[0]["foreach"] = foreach
    advance(pace, ours, gradients[10:])
    advance(adamw, theirs, gradients[10:])
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_a_round_trip_before_the_first_step_does_not_fix_the_average():
    """Accelerate loads an optimizer's own state back into it when it takes it over."""
    for unseed in ("adamw", "reset"):
        model = Net()
        optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
        if unseed == "adamw":
            adamw = torch.optim.AdamW(model.parameters())
            advance(adamw, list(model.parameters()), make_gradients(3))
            with pytest.warns(UserWarning, match="no 'average'"):
                optimizer.load_state_dict(adamw.state_dict())
        else:
            advance(optimizer, list(model.parameters()), make_gradients(3))
            reset_average(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())  # no second warning
        model.load_state_dict(Net(seed=8).state_dict())
        with averaged_weights(optimizer):
            assert torch.equal(model.p0, Net(seed=8).p0)
        advance(optimizer, list(model.parameters()), make_gradients(1, seed=2))
        start, (p, *_) = Net(seed=8).p0.detach(), model.parameters()
        state = optimizer.state[p]
        assert "unseeded" not in state
        expected = start + 5**-0.5 * (p.detach() - start)  # t = 4, the first update after
        assert torch.allclose(state["average"], expected, rtol=1e-6)


def test_other_adams_are_named_in_a_warning():
    for other, message in (
        (torch.optim.AdamW(make_parameters(), amsgrad=True), "AMSGrad"),
        (torch.optim.Adam(make_parameters(), weight_decay=0.1), "weight decay in the gradient"),
    ):
        advance(other, other.param_groups[0]["params"], make_gradients(1))
        optimizer = PACE(make_parameters())
        with pytest.warns(UserWarning) as caught:
            optimizer.load_state_dict(other.state_dict())
        assert any(message in str(w.message) for w in caught)
        assert "max_exp_avg_sq" not in optimizer.state[optimizer.param_groups[0]["params"][0]]


def test_a_warning_turned_error_leaves_the_loaded_state_whole():
    adamw = torch.optim.AdamW(make_parameters(), lr=0.5)
    advance(adamw, adamw.param_groups[0]["params"], make_gradients(2))
    optimizer, fired = PACE(make_parameters()), []
    optimizer.register_load_state_dict_post_hook(lambda _: fired.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no 'average'"):
            optimizer.load_state_dict(adamw.state_dict())
    assert fired == [1] and optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item() == 2


def test_entries_of_others_in_the_state_are_left_alone():
    parameters = make_parameters()
    optimizer = run(parameters, make_gradients(2))
    optimizer.state[parameters[0]].update(tag="mine", rank=torch.tensor(3))
    advance(optimizer, parameters, make_gradients(1))
    twin = PACE(make_parameters())
    twin.load_state_dict(optimizer.state_dict())
    state = twin.state[twin.param_groups[0]["params"][0]]
    assert state["tag"] == "mine" and state["rank"].dtype == torch.int64


def test_a_missing_returned_average_starts_from_the_control_average():
    first = run(make_parameters(), make_gradients(5), pullback_strength=30.0)
    second = PACE(make_parameters(), return_power=0.9)
    with pytest.warns(UserWarning, match="no 'returned' for 4 parameter.*from the control average"):
        second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["return_power"] == 0.9
    for p in second.param_groups[0]["params"]:
        assert torch.equal(second.state[p]["returned"], second.state[p]["average"])


@pytest.mark.parametrize("around", [False, True])
def test_a_state_of_one_average_stays_so_unless_another_is_asked_for(around):
    """What PACE takes by itself has two. A state comes with its own settings and returns what it did."""

    def make(parameters, **settings):
        base = torch.optim.AdamW(parameters)
        return Pullback(base, **{"gain": "scaled"} | settings) if around else PACE(parameters, **settings)

    parameters = make_parameters()
    first = make(parameters, gain="paper")
    advance(first, parameters, make_gradients(5))
    fresh = make_parameters()
    second = make([{"params": fresh[:2]}, {"params": fresh[2:], "return_power": 0.9}])
    assert [group["return_power"] for group in second.param_groups] == [0.7, 0.9]
    second = make(fresh)
    second.load_state_dict(first.state_dict())
    assert [second.param_groups[0][name] for name in ("gain", "return_power")] == ["paper", None]
    saved = second.state_dict()["state"].values()
    assert not any("returned" in key for entries in saved for key in entries)
    asked = make([{"params": make_parameters(), "return_power": 0.9}])
    with pytest.warns(UserWarning, match="from the control average"):
        asked.load_state_dict(first.state_dict())
    assert asked.param_groups[0]["return_power"] == 0.9


def test_a_return_power_set_or_unset_in_mid_run():
    parameters = make_parameters()
    optimizer = run(parameters, make_gradients(5), pullback_strength=30.0)
    optimizer.param_groups[0]["return_power"] = 1.0
    with averaged_weights(optimizer):
        assert torch.equal(parameters[0], optimizer.state[parameters[0]]["average"])
    advance(optimizer, parameters, make_gradients(3, seed=3))
    assert not torch.equal(
        optimizer.state[parameters[0]]["returned"], optimizer.state[parameters[0]]["average"]
    )
    optimizer.param_groups[0]["return_power"] = None
    advance(optimizer, parameters, make_gradients(1, seed=4))
    assert "returned" not in optimizer.state[parameters[0]]


def test_a_state_of_another_kind_of_optimizer_is_refused():
    parameters = make_parameters()
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    advance(sgd, parameters, make_gradients(1))
    with pytest.raises(ValueError, match="parameter 0 of group 0 lacks step, exp_avg_sq"):
        PACE(make_parameters()).load_state_dict(sgd.state_dict())


@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda s: s["state"][2].update(average=torch.ones(7)),
            r"average of parameter 'p2' has shape \(7,\).*\(\)",
        ),
        (lambda s: s["state"][3].update(exp_avg=torch.ones(7)), r"exp_avg of parameter 'p3'"),
        (lambda s: s["param_groups"][0].update(ema_power=3.0), "ema_power"),
        (lambda s: s["param_groups"][0]["params"].pop(), "size of optimizer's group"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "number of parameter groups"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil, message):
    """S5: all or nothing, naming parameter and both shapes."""
    model = Net()
    optimizer = PACE(model.named_parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(4))
    saved = copy.deepcopy(optimizer.state_dict())
    advance(optimizer, list(model.parameters()), make_gradients(2, seed=5))
    before, groups = everything(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same_bits(before, everything(optimizer))
    assert optimizer.state_dict()["param_groups"] == groups


def test_renamed_parameters_load_by_position():
    """S5: as in torch, names are labels; the saved ones come along."""
    first = PACE(Net().named_parameters(), lr=1e-2, **SETTINGS)
    advance(first, first.param_groups[0]["params"], make_gradients(3))
    renamed = [(f"layer.{name}", p) for name, p in Net().named_parameters()]
    second = PACE(renamed, **SETTINGS)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["param_names"] == ["p0", "p1", "p2", "p3"]
    for p, q in zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
        assert torch.equal(first.state[p]["average"], second.state[q]["average"])


def test_load_hooks_see_tensors_and_may_rename():
    """S5: a user's pre-hook reorders a state saved for other parameters; ours comes after it."""
    first = run(make_parameters(), make_gradients(4), **SETTINGS)
    second = PACE(list(reversed(make_parameters())), **SETTINGS)
    seen = []

    def reorder(optimizer, state_dict):
        seen.append(type(state_dict["state"][0]["average"]))
        return {**state_dict, "state": {3 - i: v for i, v in state_dict["state"].items()}}

    second.register_load_state_dict_pre_hook(reorder)
    second.load_state_dict(first.state_dict())
    assert seen == [torch.Tensor]
    ours, theirs = first.param_groups[0]["params"], second.param_groups[0]["params"]
    for p, q in zip(ours, reversed(theirs), strict=True):
        assert torch.equal(first.state[p]["average"], second.state[q]["average"])


@pytest.mark.parametrize("name", VARIANTS)
def test_load_nontensor_step_and_older_groups(name):
    """A state from before an option existed, or with a plain number for t."""
    optimizer = run(make_parameters(), make_gradients(3), **VARIANTS[name])
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["step"] = int(entry["step"])
    for group in saved["param_groups"]:
        for key in ("parameters_hold", "gap", "foreach"):
            del group[key]
    twin = PACE(
        [p.detach().clone().requires_grad_() for p in optimizer.param_groups[0]["params"]],
        **{"lr": 1e-2, **VARIANTS[name]},
    )
    twin.load_state_dict(saved)
    advance(optimizer, optimizer.param_groups[0]["params"], make_gradients(3, seed=2))
    advance(twin, twin.param_groups[0]["params"], make_gradients(3, seed=2))
    assert_same_bits(everything(optimizer), everything(twin))


def test_a_load_in_inference_mode_and_a_state_carried_from_adamw():
    optimizer = run(make_parameters(), make_gradients(2))
    with torch.inference_mode():
        optimizer.load_state_dict(optimizer.state_dict())
    advance(optimizer, optimizer.param_groups[0]["params"], make_gradients(1))
    parameters = make_parameters()
    adamw = torch.optim.AdamW(parameters)
    advance(adamw, parameters, make_gradients(2))
    pace = PACE(parameters)
    for p in parameters:
        pace.state[p] = dict(adamw.state[p])
    reset_average(pace)
    advance(pace, parameters, make_gradients(1))
    assert pace.state[parameters[0]]["step"].item() == 3


def test_right_after_a_load_the_state_is_complete():
    """Steps in float64, and a state for parameters that the saved one has none for."""
    parameters, others = make_parameters(), make_parameters()
    adamw = torch.optim.AdamW(parameters, lr=1e-2)
    advance(adamw, parameters, [[*make_gradients(1)[0][:3], None]])
    optimizer = PACE(others, lr=1e-2)
    with pytest.warns(UserWarning, match="no 'average' for 3 parameter"):
        optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
    for i, parameter in enumerate(others):
        state = optimizer.state[parameter]
        assert state["step"].dtype == torch.float64 and state["step"] == (i < 3)
        assert {"exp_avg", "exp_avg_sq", "average"} <= state.keys()


def test_a_fresh_state_without_averages_lacks_nothing():
    """Before the first step the average is live anyway: no warning."""
    parameters, others = make_parameters(), make_parameters()
    saved = copy.deepcopy(PACE(parameters).state_dict())
    for entries in saved["state"].values():
        del entries["average"]
    PACE(others).load_state_dict(saved)


def test_live_weights_of_another_shape_are_refused():
    parameters = make_parameters()
    optimizer = run(parameters, make_gradients(3))
    before = everything(optimizer)
    with averaged_weights(optimizer):
        saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["live"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"saved live of parameter 1 of group 0 has shape \(7,\)"):
        optimizer.load_state_dict(saved)
    assert_same_bits(everything(optimizer), before)
