"""`attach`: averages and a control beside any optimizer, and every point that its hooks must survive."""

import copy
import pickle

import pytest
import torch
from problems import (
    BESIDE,
    advance,
    assert_same_bits,
    copies,
    everything,
    make_gradients,
    make_parameters,
    parameters_of,
    same,
)
from reference import SGDReference, array, averages_of, distance, distances, references
from torch import optim
from torch.optim import lr_scheduler

from paceline import PACE, Control, HalfLife, PowerLaw, attach
from paceline.optim.weights import keeper_of

PUSH = Control.push()
MATRICES = [(4, 3), (3, 3)]  # which all bases take
BASES = {
    "AdamW": lambda p: optim.AdamW(p, 1e-2),
    "fused AdamW": lambda p: optim.AdamW(p, 1e-2, fused=True),
    "AMSGrad": lambda p: optim.AdamW(p, 1e-2, amsgrad=True),
    "momentum": lambda p: optim.SGD(p, 1e-2, momentum=0.9),
    "SGD": lambda p: optim.SGD(p, 1e-2),
    "Adafactor": lambda p: optim.Adafactor(p, 1e-2),
    "NAdam": lambda p: optim.NAdam(p, 1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, 1e-2),
    "Muon": lambda p: optim.Muon(p, 1e-2, ns_steps=2),
}
bases = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


def pushed(base, parameters, *lr):
    return attach(base(parameters, *lr), control=PUSH)


# --- What is kept -----------------------------------------------------------------------------------------


@bases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_unchanged_to_the_bit_next_to_an_exact_average(base, dtype):
    """With a schedule, a parameter without gradients at times, and gradients that depend on the weights."""
    parameters, others = (make_parameters(dtype=dtype, shapes=MATRICES) for _ in range(2))
    ours = attach(base(parameters), averages={"main": PowerLaw(0.7), "half": HalfLife(0.5)})
    theirs = base(others)
    schedules = [lr_scheduler.ExponentialLR(each, 0.9) for each in (ours, theirs)]
    exact, counts = [array(p) for p in parameters], [0, 0]
    for t, noise in enumerate(make_gradients(15, shapes=MATRICES)):
        moved = [0.3 * p.detach() + g for p, g in zip(parameters, noise, strict=True)]
        moved[0] = None if t % 4 == 2 else moved[0]
        advance(ours, parameters, [moved])
        advance(theirs, others, [moved])
        for schedule in schedules:
            schedule.step()
        for i, p in enumerate(parameters):
            if moved[i] is not None:
                counts[i] += 1
                exact[i] = exact[i] + (1 + counts[i]) ** -0.7 * (array(p) - exact[i])
    assert same(parameters, others)
    for (p, average), expected in zip(keeper_of(ours).averages(), exact, strict=True):
        assert distance(average, expected) < 1e-6 < distance(p, expected)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", BESIDE)
def test_a_control_beside_momentum_is_the_reference(name, storage):
    dtype, tolerance = (torch.float64, 1e-12) if storage == "float32" else (torch.float32, 0.01)
    parameters = make_parameters(dtype=dtype, shapes=[(40, 3), (9,)])
    expected = references(parameters, BESIDE[name], SGDReference, lr=1e-2)
    optimizer = attach(BASES["momentum"](parameters), control=BESIDE[name], average_dtype=storage)
    for gradients in make_gradients(20, shapes=[(40, 3), (9,)]):
        advance(optimizer, parameters, [gradients])
        for reference, p in zip(expected, parameters, strict=True):
            reference.step(array(p.grad))
    found = distances(optimizer, parameters, expected)
    assert len(found) >= 2 and max(found.values()) < tolerance, found


# --- Copies, loads, groups --------------------------------------------------------------------------------


def loaded(optimizer, other):
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    return optimizer


LOST = {
    "copied": copy.deepcopy,
    "pickled": lambda o: pickle.loads(pickle.dumps(o)),
    "made again": lambda o: type(o)(o.param_groups),
    "loaded": lambda o: loaded(type(o)(copies(parameters_of(o))), o),
}


@pytest.mark.parametrize("way", LOST)
def test_what_has_lost_its_hooks_is_refused_and_can_be_attached_anew(way):
    parameters, steps = make_parameters(), make_gradients(6)
    optimizer = advance(pushed(optim.AdamW, parameters, 1e-2), parameters, steps[:3])
    optimizer.zero_grad()
    lost = LOST[way](optimizer)
    before = copies(parameters_of(lost))
    with pytest.raises(RuntimeError, match="is a copy of an attached optimizer, or has loaded the state"):
        advance(lost, parameters_of(lost), steps[3:4])
    assert same(parameters_of(lost), before)
    again = [p.requires_grad_() for p in copies(before)]
    new = advance(loaded(pushed(optim.AdamW, again), optimizer), again, steps[3:])
    assert_same_bits(everything(new), everything(advance(optimizer, parameters, steps[3:])))


@bases
def test_a_base_begins_its_own_state_next_to_averages_that_were_loaded(base):
    """A base may ask whether it has a state; ours alone is none."""
    parameters, others = (make_parameters(dtype=torch.float32, shapes=MATRICES) for _ in range(2))
    old = advance(pushed(optim.SGD, parameters), parameters, make_gradients(2, shapes=MATRICES))
    new, fresh = pushed(base, parameters), base(others)
    groups = new.state_dict()["param_groups"]
    new.load_state_dict({**copy.deepcopy(old.state_dict()), "param_groups": groups})
    with torch.no_grad():
        torch._foreach_copy_(others, parameters)
    kept = [{key: array(v) for key, v in averages_of(new, p).items()} for p in parameters]
    gaps = [own["average"] - array(p) for own, p in zip(kept, parameters, strict=True)]
    fresh.param_groups[0]["lr"] *= PUSH.step
    gradients = make_gradients(1, seed=5, shapes=MATRICES)
    advance(new, parameters, gradients)
    advance(fresh, others, gradients)
    for p, raw, own, gap in zip(parameters, others, kept, gaps, strict=True):
        live = array(raw) - 0.5 * 4**-0.6 * gap  # the third step of the control, the first of the base
        assert distance(p, live) < 1e-6
        for key, power in (("average", 0.6), ("returned", 0.7)):
            expected = own[key] + 4**-power * (live - own[key])
            assert distance(averages_of(new, p)[key], expected) < 1e-6


def test_a_control_may_be_a_groups_own_and_change():
    parameters, pull = make_parameters(), Control.pull(2.0, power=0.5, return_power=None)
    optimizer = attach(optim.SGD(parameters[:2], 1e-2))
    optimizer.add_param_group({"params": parameters[2:3], "control": PUSH})
    optimizer.add_param_group({"params": parameters[3:]})
    optimizer.param_groups[0]["control"] = pull
    pairs = zip(parameters, (pull, pull, PUSH, Control.none()), strict=True)
    expected = [SGDReference(array(p), control, lr=1e-2) for p, control in pairs]
    for gradients in make_gradients(6):
        advance(optimizer, parameters, [gradients])
        for reference, p in zip(expected, parameters, strict=True):
            reference.momentum = 0.0
            reference.step(array(p.grad))
    assert max(distances(optimizer, parameters, expected).values()) < 1e-14


# --- What is refused --------------------------------------------------------------------------------------


def sgd(parameters=None):
    return optim.SGD(make_parameters() if parameters is None else parameters)


def in_a_step(act):
    optimizer = attach(sgd())
    optimizer.register_step_pre_hook(lambda *_: act(optimizer))
    optimizer.step()


LATE = {"a": PowerLaw(1)}
REFUSED = {
    "twice": (lambda: attach(attach(sgd())), "keeps averages already"),
    "PACE": (lambda: attach(PACE(make_parameters())), "keeps averages already"),
    "paper": (lambda: attach(sgd(), control=Control.paper()), "use PACE"),
    "name": (lambda: attach(sgd(), averages={"live": PowerLaw(1)}), "Invalid name"),
    "average": (lambda: attach(sgd(), averages={"a": 0.9}), "average 'a' is 0.9"),
    "dtype": (lambda: attach(sgd(), averages=LATE, average_dtype="int8"), "for the averages of a control"),
    "none": (lambda: attach(None), r"torch\.optim\.Optimizer"),
    "saved in a step": (lambda: in_a_step(optim.SGD.state_dict), "in the middle of step"),
    "loaded in a step": (lambda: in_a_step(lambda o: o.load_state_dict({})), "in the middle of step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    act, message = REFUSED[case]
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        act()
