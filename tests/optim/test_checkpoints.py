"""Checkpoints of a shown average, and torch.distributed.checkpoint: training goes on from live."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from problems import (
    SETTINGS,
    Net,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    run,
    set_gradients,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from paceline import PACE, averaged_weights, reset_average


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("when", ["fresh", "mid-run", "shown"])
def test_dcp_get_and_set_change_nothing(when, flat):
    """A dummy step, a lost state or a swapped average would show in the steps that follow."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def trained(disturb):
        model = Net()
        optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
        fired = []
        optimizer.register_step_post_hook(lambda *_: fired.append(1))
        advance(optimizer, list(model.parameters()), make_gradients(0 if when == "fresh" else 5))
        steps = len(fired)
        optimizer.zero_grad()
        if when == "shown":
            optimizer.eval()
        held = [p.detach().clone() for p in model.parameters()]
        if disturb:
            state = get_optimizer_state_dict(model, optimizer, options=options)
            set_optimizer_state_dict(model, optimizer, state, options=options)
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=options)
        assert all(torch.equal(p, h) for p, h in zip(model.parameters(), held, strict=True))
        assert len(fired) == steps and optimizer.shows_average() == (when == "shown")
        advance(optimizer, list(model.parameters()), make_gradients(5, seed=6))
        return everything(optimizer)

    assert_same_bits(trained(False), trained(True))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("template", ["live", "average"])
def test_dcp_of_a_shown_average_resumes_from_live_or_refuses(flat, template, tmp_path):
    """Saved between eval() and train(): never go on from the average by accident."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    optimizer.zero_grad()
    live = everything(optimizer)
    optimizer.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, state = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)

    fresh_model = Net(seed=5)
    fresh = PACE(fresh_model.parameters(), **SETTINGS)
    if template == "average":
        advance(fresh, list(fresh_model.parameters()), make_gradients(1))
        fresh.zero_grad()
        fresh.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, state = get_state_dict(fresh_model, fresh, options=options)
        loaded = {"model": weights, "optimizer": state}
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)

    def put():
        set_state_dict(
            fresh_model,
            fresh,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
            options=options,
        )

    if template == "live":
        with pytest.raises(ValueError, match="held the average, and the live weights of parameter 0"):
            put()
    else:
        put()
        fresh.train()
        assert_same_bits(live, everything(fresh))


def test_a_plain_state_is_not_loaded_while_the_average_is_shown():
    """It has no live weights, and the parameters have none either: which ones should training go on from?"""
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(5), **SETTINGS)
    saved = copy.deepcopy(optimizer.state_dict())
    advance(optimizer, parameters, make_gradients(5, seed=2))
    with averaged_weights(optimizer):
        before = everything(optimizer)
        with pytest.raises(ValueError, match=r"hold the average now .*Call train"):
            optimizer.load_state_dict(saved)
        assert_same_bits(before, everything(optimizer))
    optimizer.load_state_dict(saved)
    set_gradients(parameters, make_gradients(1)[0])
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("then", ["step", "eval", "save"])
def test_saved_while_shown_resumes_from_live_in_either_order(model_first, then, dtype):
    """The model's part of such a checkpoint is the average; torch's set_state_dict loads it last."""
    model = Net(dtype)
    optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    with averaged_weights(optimizer):
        saved = {k: copy.deepcopy(v.state_dict()) for k, v in (("model", model), ("optimizer", optimizer))}
    again = Net(dtype, seed=5)
    resumed = PACE(again.parameters(), **SETTINGS)
    if model_first:
        again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert_same_bits(everything(optimizer), everything(resumed))
    if not model_first:
        again.load_state_dict(saved["model"])
    if then == "save":  # before anything else: the saved state must know that the average is shown
        weights, state = copy.deepcopy(again.state_dict()), copy.deepcopy(resumed.state_dict())
        again = Net(dtype, seed=6)
        resumed = PACE(again.parameters(), **SETTINGS)
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
    if then == "eval":
        resumed.eval()
        resumed.train()
        assert_same_bits(everything(optimizer), everything(resumed))
    advance(optimizer, list(model.parameters()), make_gradients(3, seed=2))
    if then == "step" and not model_first:
        set_gradients(list(again.parameters()), make_gradients(3, seed=2)[0])
        with pytest.warns(UserWarning, match="loaded after the optimizer"):
            resumed.step()
        advance(resumed, list(again.parameters()), make_gradients(3, seed=2)[1:])
    else:
        advance(resumed, list(again.parameters()), make_gradients(3, seed=2))
    assert_same_bits(everything(optimizer), everything(resumed))


def test_saved_while_shown_and_other_weights_loaded_after_it_count():
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    with averaged_weights(optimizer):
        saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    model.load_state_dict(Net(seed=8).state_dict())
    optimizer.train()
    for p, q in zip(model.parameters(), Net(seed=8).parameters(), strict=True):
        assert torch.equal(p, q)


OPTIONS = [
    StateDictOptions(),
    StateDictOptions(flatten_optimizer_state_dict=True),
    StateDictOptions(full_state_dict=True),
    StateDictOptions(cpu_offload=True),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_fresh_optimizer_in_eval_mode_takes_a_checkpoint(options):
    """Trainers call eval() early; what is loaded then is live, in either order."""
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    optimizer.zero_grad()
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    again = Net(seed=5)
    resumed = PACE(again.parameters(), **SETTINGS)
    resumed.eval()
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=state, options=options)
    resumed.train()
    assert_same_bits(everything(optimizer), everything(resumed))


@pytest.mark.parametrize("options", OPTIONS)
def test_dcp_does_not_mix_our_own_entries_into_a_checkpoint(options):
    """full_state_dict fills what a checkpoint lacks with the values at hand, a flat one with {}."""
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, gain="paper", pullback_strength=30.0)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    optimizer.zero_grad()
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    again = Net(seed=5)
    wider = PACE(again.parameters(), return_power=0.9)
    with pytest.warns(UserWarning, match="no 'returned' for 4"):
        set_optimizer_state_dict(again, wider, state, options=options)
    for p in again.parameters():
        assert torch.equal(wider.state[p]["returned"], wider.state[p]["average"])
    optimizer.eval()
    before = everything(optimizer)
    with pytest.raises(ValueError, match="hold the average now"):
        set_optimizer_state_dict(model, optimizer, state, options=options)
    assert_same_bits(before, everything(optimizer))


def test_dcp_set_state_dict_of_a_shown_state_resumes_from_live():
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    optimizer.zero_grad()
    with averaged_weights(optimizer):
        weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    again = Net(seed=5)
    resumed = PACE(again.parameters(), **SETTINGS)
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=state)
    resumed.train()
    assert_same_bits(everything(optimizer), everything(resumed))
    advance(optimizer, list(model.parameters()), make_gradients(3, seed=2))
    advance(resumed, list(again.parameters()), make_gradients(3, seed=2))
    assert_same_bits(everything(optimizer), everything(resumed))


def test_a_flat_dcp_state_loaded_right_after_a_reset_brings_its_average():
    """torch asks for our own entries by name, `unseeded` among them, and fills in what is not there."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, other = Net(), Net(seed=4)
    optimizer, reset = PACE(model.parameters(), lr=1e-2), PACE(other.parameters(), lr=1e-2)
    for each, trained in ((optimizer, model), (reset, other)):
        advance(each, list(trained.parameters()), make_gradients(4))
        each.zero_grad()
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    reset_average(reset)
    set_optimizer_state_dict(other, reset, state, options=options)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["average"], reset.state[q]["average"])
        assert "unseeded" not in reset.state[q]
