"""Loading: precision, other optimizers' states, what cannot belong, and torch.distributed.checkpoint."""

import copy
import io
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from problems import (
    advance,
    assert_same_bits,
    copies,
    everything,
    make_gradients,
    make_parameters,
    parameters_of,
    run,
    same,
)
from reference import array, averages_of, distance
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from paceline import PACE, Control, PowerLaw, attach, averaged_weights
from paceline.optim.weights import keeper_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.*:UserWarning")
PUSH = Control.push()


def pushed(parameters, base=torch.optim.AdamW):
    return attach(base(parameters, lr=1e-2), control=PUSH)


MAKERS = {"PACE": lambda p: PACE(p, 1e-2, control=PUSH), "attached": pushed}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def net(seed=0, dtype=torch.float32):
    model = nn.Module()
    for i, parameter in enumerate(make_parameters(seed, dtype)):
        model.register_parameter(f"p{i}", nn.Parameter(parameter.detach()))
    return model


# --- Precision --------------------------------------------------------------------------------------------


@makers
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_keeps_the_precision_of_averages_and_counts(make, dtype, kept):
    first, second = (make([torch.ones(3, dtype=dtype).requires_grad_()]) for _ in range(2))
    advance(first, parameters_of(first), [[torch.ones(3)]])
    saved = copy.deepcopy(first.state_dict())
    name = next(key for key in saved["state"][0] if key.endswith("average"))
    saved["state"][0][name] = torch.tensor([1.001, 2.002, 3.003], dtype=kept)
    second.load_state_dict(saved)
    entries = second.state_dict()["state"][0]
    assert entries[name].dtype == kept and torch.equal(entries[name], saved["state"][0][name])
    assert entries[name.replace("average", "step")].dtype == torch.float64
    plain = torch.optim.Optimizer([torch.ones(3, dtype=dtype).requires_grad_()], {})
    plain.load_state_dict({**saved, "param_groups": [{"params": [0]}]})
    rounds = dtype == torch.bfloat16 and kept == torch.float32  # torch's own loading, which fails this
    assert torch.equal(plain.state_dict()["state"][0][name], saved["state"][0][name]) != rounds


def test_a_count_in_low_precision_is_refused():
    saved = run(make_parameters(), make_gradients(1)).state_dict()
    saved["state"][0]["step"] = torch.tensor(256.0, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"step of parameter 0 of group 0 is 256\.0 in torch\.bfloat16"):
        PACE(make_parameters()).load_state_dict(saved)


def test_a_load_in_inference_mode_leaves_tensors_that_train():
    optimizer = run(make_parameters(), make_gradients(2))
    with torch.inference_mode():
        optimizer.load_state_dict(optimizer.state_dict())
    advance(optimizer, parameters_of(optimizer), make_gradients(1))


# --- Other optimizers' states -----------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("weights_last", [False, True])
def test_a_checkpoint_of_adamw_continues_with_averages_from_the_loaded_weights(weights_last, foreach):
    gradients, theirs = make_gradients(20), make_parameters(dtype=torch.float32)
    adamw = advance(torch.optim.AdamW(theirs, lr=1e-2, foreach=foreach), theirs, gradients[:10])
    buffer = io.BytesIO()
    torch.save(adamw.state_dict(), buffer)
    buffer.seek(0)
    ours = make_parameters(seed=50, dtype=torch.float32)
    pace = PACE(ours, lr=1e-3, foreach=foreach, control=Control.none())

    def load_weights():
        with torch.no_grad():
            torch._foreach_copy_(ours, theirs)

    if not weights_last:
        load_weights()
    with pytest.warns(
        UserWarning, match=r"no average, or not all of them, of 4 parameter.*begins as the live"
    ):
        pace.load_state_dict(torch.load(buffer, weights_only=True))
    load_weights()
    averages = [array(p) for p in ours]
    for t, step in enumerate(gradients[10:], 11):
        advance(pace, ours, [step])
        advance(adamw, theirs, [step])
        averages = [a + (1 + t) ** -0.7 * (array(p) - a) for a, p in zip(averages, ours, strict=True)]
    assert same(ours, theirs)
    for p, expected in zip(ours, averages, strict=True):
        assert pace.state[p]["step"] == 20 and distance(pace.state[p]["average"], expected) < 1e-6


def test_adamw_continues_from_a_state_of_pace():
    ours, theirs, gradients = make_parameters(), make_parameters(), make_gradients(20)
    pace = run(ours, gradients[:10], Control.none())
    adamw = torch.optim.AdamW(theirs)
    adamw.load_state_dict(copy.deepcopy(pace.state_dict()))
    with torch.no_grad():
        torch._foreach_copy_(theirs, ours)
    advance(adamw, theirs, gradients[10:])
    advance(pace, ours, gradients[10:])
    assert same(ours, theirs)


def test_own_settings_of_speed_and_storage_stay_and_all_others_are_loaded():
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(3), PUSH, betas=(0.5, 0.6), foreach=True)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:  # of a version before these settings were there
        del group["control"]["gap"], group["parameters_hold"]
    for entries in saved["state"].values():
        entries["step"] = int(entries["step"])
    others = make_parameters(dtype=torch.float32)
    other = PACE(others, 0.3, foreach=False, average_dtype="bfloat16")
    other.load_state_dict(saved)
    (group,) = other.param_groups
    assert (group["lr"], group["betas"], group["control"]) == (1e-2, (0.5, 0.6), PUSH)
    assert (group["foreach"], group["average_dtype"]) == (False, "bfloat16")
    kept = [averages_of(optimizer, p)["returned"] for p in parameters]
    assert same([averages_of(other, p)["returned"] for p in others], kept)


def spoiled(change):
    def spoil(saved):
        change(saved["state"])

    return spoil


CANNOT = {
    "a shape": (
        spoiled(lambda s: s[1].update(average=torch.zeros(7))),
        r"average of parameter 1 of group 0 has",
    ),
    "a moment": (spoiled(lambda s: s[2].pop("exp_avg")), "state of parameter 2 of group 0 lacks exp_avg"),
    "a setting": (
        lambda saved: saved["param_groups"][0]["control"].update(power=2.0),
        "Invalid power value: 2.0",
    ),
    "groups": (lambda saved: saved["param_groups"].append({"params": []}), "different number of parameter"),
    "parameters": (lambda saved: saved["param_groups"][0]["params"].append(9), "doesn't match the size"),
}


@pytest.mark.parametrize("kind", CANNOT)
def test_a_state_that_cannot_belong_is_refused_and_nothing_is_loaded(kind):
    optimizer = run(make_parameters(), make_gradients(3), PUSH)
    before, saved = everything(optimizer), copy.deepcopy(optimizer.state_dict())
    spoil, words = CANNOT[kind]
    spoil(saved)
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)
    assert_same_bits(before, everything(optimizer))


@makers
def test_parameters_that_show_an_average_take_no_state_of_live_weights(make):
    """Not even before their first step, where both are the same."""
    parameters, others = make_parameters(), make_parameters()
    saved = advance(make(parameters), parameters, make_gradients(2)).state_dict()
    optimizer = make(others)
    keeper_of(optimizer).show()
    with pytest.raises(ValueError, match="the parameters hold the average now"):
        optimizer.load_state_dict(copy.deepcopy(saved))
    keeper_of(optimizer).hide()
    optimizer.load_state_dict(copy.deepcopy(saved))


@makers
def test_a_control_is_loaded_whole_and_what_it_lacks_is_not_ours(make):
    """Otherwise an old push and a new length would make a control that nobody has chosen."""
    optimizer, other = make(make_parameters()), make(make_parameters())
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][0]["control"]["grow"]
    growing = Control.push(0.75, grow=100)
    other.param_groups[0]["control"] = growing
    other.load_state_dict(state)
    assert other.param_groups[0]["control"] == PUSH
    plain = torch.optim.AdamW(make_parameters())
    averaged = attach(torch.optim.AdamW(make_parameters()), averages={"a": PowerLaw(0.5)})
    for without in (plain, averaged):
        other.param_groups[0]["control"] = growing
        other.load_state_dict(without.state_dict())
        assert other.param_groups[0]["control"] == growing


def test_a_second_load_forgets_the_live_weights_of_the_first():
    """The average is live here, so that the weights of the second could be those of a shown average."""
    own = {"control": Control.none(power=0.0)}
    parameters, others = make_parameters(), make_parameters()
    optimizer, other = run(parameters, make_gradients(2), **own), run(others, [], **own)
    with averaged_weights(optimizer):
        first = copy.deepcopy(optimizer.state_dict())
    advance(optimizer, parameters, make_gradients(2))
    other.load_state_dict(first)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        torch._foreach_copy_(others, parameters)
    other.train()
    assert_same_bits(everything(other), everything(optimizer))


@makers
@pytest.mark.parametrize("name", [None, "average"])
def test_a_block_shows_the_average_of_a_state_that_is_loaded_in_it(make, name):
    parameters, others = make_parameters(), make_parameters()
    optimizer, other = make(parameters), make(others)
    advance(optimizer, parameters, make_gradients(3))
    advance(other, others, make_gradients(2, seed=1))
    live = copies(parameters)
    with averaged_weights(optimizer, name):
        state, shown = copy.deepcopy(optimizer.state_dict()), copies(parameters)
    with averaged_weights(other, name):
        other.load_state_dict(state)
        assert same(others, shown)
    assert same(others, live)
    optimizer.zero_grad()
    other.zero_grad()
    assert_same_bits(everything(optimizer), everything(other))


def _block(optimizer):
    with averaged_weights(optimizer):
        pass


@makers
@pytest.mark.parametrize("act", [lambda o: keeper_of(o).hide(), lambda o: o.state_dict(), _block])
def test_a_model_that_is_loaded_last_is_noticed_until_the_first_step(make, act):
    """A look at live and averages between the two loads must not end the watch for the average."""
    parameters, others = make_parameters(), make_parameters()
    optimizer, other = make(parameters), make(others)
    advance(optimizer, parameters, make_gradients(3))
    live = copies(parameters)
    with averaged_weights(optimizer):
        state, shown = copy.deepcopy(optimizer.state_dict()), copies(parameters)
    other.load_state_dict(state)
    act(other)
    with torch.no_grad():
        torch._foreach_copy_(others, shown)
    other.param_groups[0]["lr"] = 0.0
    with pytest.warns(UserWarning, match="the model was loaded after the optimizer"):
        advance(other, others, make_gradients(1))
    assert same(others, live)
    with torch.no_grad():
        torch._foreach_copy_(others, shown)
    advance(other, others, make_gradients(1))  # from now on whatever is loaded is meant
    assert same(others, shown)


def test_averages_that_a_state_lacks_are_named_and_begin_as_live():
    parameters, others = make_parameters(), make_parameters()
    old = attach(torch.optim.AdamW(parameters), control=PUSH, averages={"a": PowerLaw(0.5)})
    advance(old, parameters, make_gradients(5))
    new = attach(torch.optim.AdamW(others), control=PUSH, averages={"a": PowerLaw(0.5), "b": PowerLaw(0.9)})
    with pytest.warns(UserWarning, match="no average, or not all of them, of 4 parameter"):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    with torch.no_grad():
        torch._foreach_copy_(others, parameters)
    live = copies(others)
    with averaged_weights(new, "b"):
        assert same(others, live)
    with averaged_weights(new, "a"):
        assert not same(others, live)


# --- torch.distributed.checkpoint, in one process ---------------------------------------------------------

FLAT = [StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)]
OPTIONS = [*FLAT, StateDictOptions(full_state_dict=True), StateDictOptions(cpu_offload=True)]


@makers
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("when", ["fresh", "mid-run", "shown"])
def test_getting_and_setting_a_state_changes_nothing(make, when, options):
    """A dummy step, a lost state or a swapped average would show in the steps that follow."""
    if when == "fresh" and make is pushed:
        pytest.skip("the dummy step counts in torch's own AdamW")
    found = []
    for disturb in (False, True):
        model = net()
        optimizer, parameters = make(list(model.parameters())), list(model.parameters())
        advance(optimizer, parameters, make_gradients(0 if when == "fresh" else 5))
        optimizer.zero_grad()
        if when == "shown":
            keeper_of(optimizer).show()
        held = copies(parameters)
        if disturb:
            state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
            set_optimizer_state_dict(model, optimizer, state, options=options)
        if when != "shown" or not disturb:  # a load puts live back
            assert same(parameters, held)
        advance(optimizer, parameters, make_gradients(5, seed=6))
        found.append(everything(optimizer))
    assert_same_bits(*found)


@makers
@pytest.mark.parametrize("options", FLAT)
@pytest.mark.parametrize("template", ["live", "average"])
def test_a_shown_average_that_was_saved_resumes_from_live_or_is_refused(make, template, options, tmp_path):
    """Saved between eval() and train(): never continue from the average by accident."""
    model = net()
    optimizer = make(list(model.parameters()))
    advance(optimizer, list(model.parameters()), make_gradients(5))
    optimizer.zero_grad()
    live = everything(optimizer)
    keeper_of(optimizer).show()
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    fresh = net(seed=5)
    other = make(list(fresh.parameters()))
    if template == "average":
        advance(other, list(fresh.parameters()), make_gradients(1))
        other.zero_grad()
        keeper_of(other).show()
    weights, state = get_state_dict(fresh, other, options=options)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    parts = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
    if template == "live":
        with pytest.raises(ValueError, match="held the average, and the live weights of parameter"):
            set_state_dict(fresh, other, options=options, **parts)
    else:
        set_state_dict(fresh, other, options=options, **parts)
        keeper_of(other).hide()
        other.state_dict()
        keeper_of(other).hide()
        assert_same_bits(live, everything(other))


@makers
@pytest.mark.parametrize("options", [StateDictOptions(), StateDictOptions(cpu_offload=True)])
def test_a_state_of_adamw_begins_with_averages_that_are_live(make, options):
    """Other options need ranks: torch wants the names of all settings in a flat state, or a broadcast."""
    model, again = net(), net(seed=5)
    adamw = torch.optim.AdamW(model.parameters(), 1e-2)
    advance(adamw, list(model.parameters()), make_gradients(3))
    adamw.zero_grad()
    state = copy.deepcopy(get_optimizer_state_dict(model, adamw, options=options))
    optimizer = make(list(again.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_optimizer_state_dict(again, optimizer, state, options=options)
    again.load_state_dict(model.state_dict())
    live = copies(again.parameters())
    with averaged_weights(optimizer):
        assert same(again.parameters(), live)
    advance(optimizer, list(again.parameters()), make_gradients(1))
    for parameter, begin in zip(again.parameters(), live, strict=True):
        expected = begin + 5**-0.7 * (parameter.detach() - begin)
        assert torch.allclose(averages_of(optimizer, parameter)["returned"], expected, atol=1e-6)


@makers
def test_no_state_before_the_first_step_and_a_dummy_step_counts_nothing(make):
    parameters = make_parameters(dtype=torch.float32)
    optimizer = make(parameters)
    assert not optimizer.state_dict()["state"]
    optimizer.param_groups[0]["lr"] = 0.0
    advance(optimizer, parameters, [[torch.zeros_like(p) for p in parameters]])
    optimizer.param_groups[0]["lr"] = 1e-2
    with torch.no_grad():
        torch._foreach_add_(parameters, 1.0)  # weights that are loaded after it count
    start = copies(parameters)
    with averaged_weights(optimizer):
        assert same(parameters, start)
    advance(optimizer, parameters, make_gradients(1))
    for parameter, begin in zip(parameters, start, strict=True):
        expected = begin + 2**-0.7 * (parameter.detach() - begin)
        assert torch.allclose(averages_of(optimizer, parameter)["returned"], expected, atol=1e-6)


@makers
def test_a_control_of_another_number_of_averages_keeps_the_one_that_is_returned(make):
    parameters = make_parameters()
    optimizer = make(parameters)
    advance(optimizer, parameters, make_gradients(5))

    def returned():
        return [average.clone() for _, average in keeper_of(optimizer).averages()]

    for control in (Control.none(power=0.9), Control.push(power=0.9, return_power=0.95)):
        before = returned()
        optimizer.param_groups[0]["control"] = control
        advance(optimizer, parameters, make_gradients(1, seed=3))
        live, after = copies(parameters), returned()
        assert all(
            (new - old).norm() < (new - p).norm() for new, old, p in zip(after, before, live, strict=True)
        )


@makers
def test_a_returned_average_that_a_state_lacks_is_named(make):
    optimizer, other = make(make_parameters()), make(make_parameters())
    advance(optimizer, optimizer.param_groups[0]["params"], make_gradients(5))
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        for name in [name for name in entries if name.endswith("returned")]:
            del entries[name]
    with pytest.warns(UserWarning, match="no average, or not all of them, of 4 parameter"):
        other.load_state_dict(state)
