"""Attacks: each of these once gave wrong weights, wrong averages or wrong state without a word."""

import copy
import warnings

import pytest
import torch

from paceline.rebuilt.attach import attach
from paceline.rebuilt.averages import BEMA, PowerLaw
from paceline.rebuilt.baselines import gpa
from paceline.rebuilt.pace import PACE
from paceline.rebuilt.settings import Control
from paceline.rebuilt.state import average_of
from paceline.rebuilt.weights import averaged_tensors, averaged_weights, keeper_of, reset_average
from rebuilt.test_attach import same
from rebuilt.test_core import problem, train


def values(live):
    return [p.detach().clone() for p in live]


def averages(optimizer, live, name=None):
    found = dict(keeper_of(optimizer).averages(name))
    return [found[p].clone() for p in live]


def pace(live):
    return PACE(live, 1e-2, control=Control.push())


def trained(make=pace):
    live, gradients = problem()
    optimizer = make(live)
    train(optimizer, gradients, 4)
    return live, optimizer


def pushed(live, lr=1e-2):
    return attach(torch.optim.AdamW(live, lr), control=Control.push())


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_state_follows_the_order_of_its_parameter_in_memory(loaded, storage):
    p = torch.randn(3, 4, 5, 6).requires_grad_()
    optimizer, new = (PACE([p], 1e-2, control=Control.push(), average_dtype=storage) for _ in range(2))
    train(optimizer, lambda t: setattr(p, "grad", torch.randn(p.shape)), 3)
    before = copy.deepcopy(optimizer.state[p])
    p.data = p.detach().contiguous(memory_format=torch.channels_last)
    p.grad = torch.zeros_like(p)
    if loaded:
        new.load_state_dict(optimizer.state_dict())
        optimizer = new
    optimizer._plan(optimizer.param_groups[0], 0)
    kept = optimizer.state[p]
    assert all(value.stride() == p.stride() for value in kept.values() if value.shape == p.shape)
    assert torch.equal(kept["exp_avg"], before["exp_avg"])
    for name in ("average", "returned"):
        assert torch.allclose(average_of(kept, name, p), average_of(before, name, p), atol=1e-3)


def test_groups_that_share_a_tensor_of_lr_have_it_scaled_once():
    (live, gradients), (other, others) = problem(), problem()
    rate = torch.tensor(1e-2, dtype=torch.float64)
    ours, theirs = pushed([{"params": live[:2]}, {"params": live[2:]}], rate), pushed(other)
    train(ours, gradients, 3)
    train(theirs, others, 3)
    assert rate.item() == 1e-2 and all(group["lr"] is rate for group in ours.param_groups)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(live, other, strict=True))


@pytest.mark.parametrize("what", ["zero_grad", "schedule", "save"])
@pytest.mark.parametrize("where", ["post-hook", "closure"])
def test_what_a_user_does_around_a_step_leaves_it_whole(where, what):
    (live, gradients), (other, others) = problem(), problem()
    base, theirs = torch.optim.AdamW(live, 1e-2), pushed(other)
    ours_lr, theirs_lr = (torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (base, theirs))
    do = {"zero_grad": base.zero_grad, "schedule": ours_lr.step, "save": base.state_dict}[what]
    if where == "post-hook":
        base.register_step_post_hook(lambda *_: do())
    ours = attach(base, control=Control.push())
    for t in range(1, 5):
        if where == "closure":
            ours.step(lambda t=t: (do() if t > 1 else None, gradients(t)))
        else:
            train(ours, gradients, 1, t)
        train(theirs, others, 1, t)
        if what == "schedule" and (where == "post-hook" or t < 4):
            theirs_lr.step()
    assert same(live, other) and same(averages(ours, live), averages(theirs, other))
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_a_rate_that_is_scheduled_after_a_broken_step_is_named():
    _, optimizer = trained(pushed)
    optimizer._optimizer_step_pre_hooks[-1] = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    del optimizer._optimizer_step_pre_hooks[-1]
    optimizer.param_groups[0]["lr"] *= 0.9
    with pytest.warns(UserWarning, match=r"lr was changed from 0\.01 to 0\.0045"):
        optimizer.step()


def test_a_frozen_parameter_with_an_old_gradient_moves_with_its_average():
    live, optimizer = trained(pushed)
    live[0].requires_grad_(False)
    optimizer.step(lambda: None)
    assert {state["step"].item() for _, _, state in keeper_of(optimizer).remembered()} == {5.0}


@pytest.mark.parametrize("make", [lambda p: PACE(p, 1e-2), lambda p: attach(torch.optim.SGD(p, 1e-2))])
def test_a_control_that_is_set_later_steers(make):
    live, gradients = problem()
    optimizer = make(live[:2])
    optimizer.add_param_group({"params": live[2:], "control": Control.push()})
    optimizer.param_groups[0]["control"] = Control.push(0.25)
    train(optimizer, gradients, 1)
    assert [group["control_strength"] for group in optimizer.param_groups] == [-0.25, -0.5]


def test_gpa_takes_the_gradient_of_a_closure_at_live():
    (live, gradients), (other, others) = problem(), problem()
    ours, theirs = (gpa(torch.optim.SGD(p, 1e-2), mu_x=0.9) for p in (live, other))
    for t in range(1, 6):
        ours.step(lambda t=t: gradients(t))
        train(theirs, others, 1, t)
    assert same(live, other)


def test_schedule_free_is_evaluated_from_the_state_that_was_loaded():
    schedulefree = pytest.importorskip("schedulefree")
    from paceline.rebuilt.baselines import schedule_free

    live, gradients = problem()
    optimizer = schedule_free(schedulefree.AdamWScheduleFree(live, lr=1e-2))
    train(optimizer, gradients, 5)
    state, right, weights = copy.deepcopy(optimizer.state_dict()), averages(optimizer, live), values(live)
    train(optimizer, gradients, 5, 6)
    optimizer.load_state_dict(state)
    with torch.no_grad():
        torch._foreach_copy_(live, weights)
    assert same(averages(optimizer, live), right)


@pytest.mark.parametrize("make", [pace, pushed])
def test_a_model_of_the_returned_average_loaded_last_is_noticed(make):
    live, optimizer = trained(make)
    right = values(live)
    with averaged_weights(optimizer):
        state, model = copy.deepcopy(optimizer.state_dict()), values(live)
    again = [torch.zeros_like(p).requires_grad_() for p in live]
    other = make(again)
    other.load_state_dict(state)
    with torch.no_grad():
        torch._foreach_copy_(again, model)
    other.param_groups[0]["lr"] = 0.0
    for p in again:
        p.grad = torch.zeros_like(p)
    with pytest.warns(UserWarning, match="loaded after the optimizer"):
        other.step()
    assert same(again, right)


@pytest.mark.parametrize("kept", [(), (0,), (0, 1, 2, 3)])
def test_no_load_over_weights_that_are_shown(kept):
    live, optimizer = trained()
    right, saved = values(live), copy.deepcopy(optimizer.state_dict())
    with averaged_weights(optimizer):
        shown = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match="inside averaged_weights"):
            optimizer.load_state_dict(saved)
    with averaged_weights(optimizer):  # of weights that are shown, live comes along
        optimizer.load_state_dict(shown)
    assert same(live, right)
    optimizer.eval()
    if len(kept) < 4:
        with pytest.raises(ValueError, match="parameters hold the average now"):
            optimizer.load_state_dict({**shown, "state": {i: shown["state"][i] for i in kept}})
    else:
        optimizer.load_state_dict(shown)
    optimizer.train()
    assert same(live, right) and len(optimizer.state) == 4


def test_a_shown_state_of_pace_is_refused_by_other_optimizers():
    live, optimizer = trained()
    with averaged_weights(optimizer):
        state, weights = copy.deepcopy(optimizer.state_dict()), values(live)
    with pytest.raises(ValueError, match="state of PACE"):
        pushed([p.requires_grad_() for p in weights]).load_state_dict(state)
    plain = torch.optim.AdamW(weights, 1e-2)
    plain.load_state_dict(state)
    with pytest.raises(RuntimeError, match="parameters held the average"):
        plain.step()


@pytest.mark.parametrize("kind", ["load", "max_norm", "merge", "undone", "cast"])
def test_weights_that_are_changed_while_shown_are_named(kind):
    model = torch.nn.Embedding(5, 3, max_norm=1e-3 if kind == "max_norm" else None)
    optimizer = PACE(model.parameters(), 1.0)
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    right = values(model.parameters())
    changes = {
        "load": lambda: model.load_state_dict({"weight": torch.zeros(5, 3)}),
        "max_norm": lambda: model(torch.arange(5)),
        "merge": lambda: model.weight.data.add_(1.0),
        "undone": lambda: model.weight.data.mul_(2.0).mul_(0.5),
        "cast": lambda: model.double(),
    }
    with warnings.catch_warnings(record=True) as words, averaged_weights(optimizer):
        warnings.simplefilter("always")
        changes[kind]()
    assert len(words) == (kind not in ("undone", "cast")) and same(
        [p.float() for p in model.parameters()], right
    )


def test_two_averages_of_the_same_parameters_are_never_shown_at_once():
    live, first = trained()
    second = pushed(live)
    first.eval()
    for act in (second.step, lambda: show(second)):
        with pytest.raises(RuntimeError, match="of another optimizer"):
            act()
    first.train()
    second.step()
    right = values(live)
    with averaged_weights(first):  # also where a parameter leaves its group
        first.param_groups[0]["params"].pop(0)
    assert same(live, right)


def test_reset_takes_further_averages_too_and_none_in_a_block():
    further = {"long": PowerLaw(0.9), "bema": BEMA(every=2)}
    live, optimizer = trained(lambda live: attach(torch.optim.SGD(live, 1e-2), averages=further))
    with averaged_weights(optimizer), pytest.raises(RuntimeError, match="inside averaged_weights"):
        reset_average(optimizer)
    reset_average(optimizer)
    right = values(live)
    for name in (None, *further):
        show(optimizer, name)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert all(same(averages(optimizer, live, name), right) for name in (None, *further))


def in_a_step(optimizer, act, *args):
    optimizer.register_step_pre_hook(lambda *_: getattr(optimizer, act)(*args) and None)
    optimizer.step()


def show(optimizer, name=None, shape=None, first=lambda _: None):
    first(optimizer)
    if shape is not None:
        optimizer.param_groups[0]["params"][3].data = torch.zeros(shape)
    with averaged_weights(optimizer, name):
        pass


REFUSED = {
    "no returned": (Control.paper(), lambda o: show(o, "returned"), "no average is called"),
    "no average": (Control.paper(), lambda o: show(o, "exp_avg"), "no average is called"),
    "other shown": (Control.push(), lambda o: show(o, "average", first=PACE.eval), "hold 'returned'"),
    "before a step": (None, lambda o: averaged_tensors(o, pace(problem()[0])), "no average has begun"),
    "resized": (Control.paper(), lambda o: show(o, shape=5), "was resized"),
    "saved in a step": (None, lambda o: in_a_step(o, "state_dict"), "in the middle of step"),
    "loaded in a step": (None, lambda o: in_a_step(o, "load_state_dict", {}), "in the middle of step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    control, act, message = REFUSED[case]
    _, optimizer = trained(pushed if control is None else lambda live: PACE(live, 1e-2, control=control))
    with pytest.raises((KeyError, RuntimeError), match=message):
        act(optimizer)


@pytest.mark.parametrize("make", [pushed, lambda live: torch.optim.AdamW(live, 1e-2)])
def test_averages_that_a_state_lacks_are_named(make):
    other = attach(torch.optim.AdamW(problem()[0], 1e-2), averages={"long": PowerLaw(0.9)})
    with pytest.warns(UserWarning, match="no average, or not all"):
        other.load_state_dict(trained(make)[1].state_dict())
