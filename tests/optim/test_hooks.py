"""What the hooks of `attach` must survive: steps that raise, are skipped, nest, or have a closure."""

import pytest
import torch
from problems import (
    advance,
    assert_same_bits,
    copies,
    everything,
    make_gradients,
    make_parameters,
    same,
    set_gradients,
)
from reference import array, distance
from torch import optim
from torch.optim import lr_scheduler

from paceline import PACE, Control, PowerLaw, attach, averaged_weights
from paceline.optim.baselines import gpa
from paceline.optim.weights import keeper_of

PUSH = Control.push()


def pushed(base, parameters, *lr):
    return attach(base(parameters, *lr), control=PUSH)


class Whole(optim.SGD):
    """A base that shrinks its weights after a step."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"]).mul_(0.9)
        return loss


class Nested(optim.SGD):
    """The same by a call of its parent's step, which has the hooks too; or it raises."""

    fails = False

    @torch.no_grad()
    def step(self, closure=None):
        if self.fails:
            raise MemoryError
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.9)
        return loss


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("what", ["closure", "base", "nothing"])
@pytest.mark.parametrize("when", [0, 2])
def test_a_step_that_raises_leaves_nothing_behind(what, when, as_tensor):
    found = []
    for kind in (Whole, Nested):
        parameters = make_parameters()
        rate = torch.tensor(1e-2, dtype=torch.float64) if as_tensor else 1e-2
        optimizer = pushed(kind, parameters, rate)
        for t, gradients in enumerate(make_gradients(5)):
            if (t, kind) == (when, Nested) and what != "nothing":
                set_gradients(parameters, gradients)
                optimizer.fails = what == "base"
                with pytest.raises((IndexError, MemoryError)):
                    optimizer.step(lambda: [][0])
                optimizer.fails = False
                assert optimizer.state_dict()["param_groups"][0]["lr"] == 1e-2
            advance(optimizer, parameters, [gradients])
        assert optimizer.param_groups[0]["lr"] is rate
        found.append(everything(optimizer))
    assert_same_bits(*found)


@pytest.mark.parametrize("skipped", [(0,), (0, 1), (2, 4)])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_no_step(fused, skipped):
    """A fused base is called on these too; before its first step it finds a state of ours alone."""
    found = []
    for leaves_out in (False, True):
        parameters = make_parameters(dtype=torch.float32)
        optimizer = attach(optim.AdamW(parameters, 1e-2, fused=fused), control=PUSH)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for t, gradients in enumerate(make_gradients(6)):
            if t in skipped and leaves_out:
                continue
            bad = float("inf") if t in skipped else 1.0
            products = [(p * g.float() * bad).sum() for p, g in zip(parameters, gradients, strict=True)]
            optimizer.zero_grad()
            scaler.scale(sum(products)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(everything(optimizer))
    assert_same_bits(*found)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a closure runs before the step
@pytest.mark.parametrize("what", ["zero_grad", "step", "state_dict"])
@pytest.mark.parametrize("where", ["post-hook", "closure"])
def test_gradients_schedules_and_states_around_a_step_leave_it_whole(where, what):
    found = []
    for how in ("plain", where):
        parameters = make_parameters()
        base = optim.AdamW(parameters, 1e-2)
        schedule = lr_scheduler.ExponentialLR(base, 0.9)
        act = getattr(schedule if what == "step" else base, what)
        if how == "post-hook":
            base.register_step_post_hook(lambda *_, act=act: act() and None)
        optimizer = attach(base, control=PUSH)
        for gradients in make_gradients(4):
            if how == "closure":
                optimizer.step(lambda act=act, g=gradients, p=parameters: (act(), set_gradients(p, g)))
                continue
            if (how, where) == ("plain", "closure"):
                act()
            advance(optimizer, parameters, [gradients])
            if (how, where) == ("plain", "post-hook"):
                act()
        found.append(everything(optimizer) | {"lr": torch.tensor(optimizer.param_groups[0]["lr"])})
    assert_same_bits(*found)


def test_a_rate_that_groups_share_is_scaled_once_and_stays_their_tensor():
    parameters, others = make_parameters(), make_parameters()
    rate = torch.tensor(1e-2, dtype=torch.float64)
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    ours, theirs = pushed(optim.AdamW, groups, rate), pushed(optim.AdamW, others, 1e-2)
    advance(ours, parameters, make_gradients(4))
    advance(theirs, others, make_gradients(4))
    assert rate.item() == 1e-2 and all(group["lr"] is rate for group in ours.param_groups)
    assert all(distance(p, array(q)) < 1e-14 for p, q in zip(parameters, others, strict=True))


def test_a_rate_that_is_changed_after_a_broken_step_is_named():
    optimizer = pushed(Nested, make_parameters(), 1e-2)
    optimizer.fails = True
    with pytest.raises(MemoryError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.9
    with pytest.warns(UserWarning, match=r"lr was changed from 0\.01 to 0\.0045"):
        optimizer.state_dict()


def test_a_base_that_calls_its_closure_often_trains_as_without():
    """Where live is moved for the gradient, it is refused."""
    parameters, others = make_parameters(), make_parameters()
    ours, theirs = (optim.LBFGS(each, 0.5, max_iter=4) for each in (parameters, others))
    attach(ours, averages={"all": PowerLaw(1)})

    def closure(own):
        loss = sum((p**4).sum() + (p - 1).square().sum() for p in own)
        set_gradients(own, torch.autograd.grad(loss, own))
        return loss

    lives = [array(parameters[0])]
    for _ in range(3):
        ours.step(lambda: closure(parameters))
        theirs.step(lambda: closure(others))
        lives.append(array(parameters[0]))
    assert same(parameters, others)
    with averaged_weights(ours):
        assert distance(parameters[0], sum(lives) / 4) < 1e-14
    with pytest.raises(RuntimeError, match="LBFGS calls its closure twice"):
        gpa(theirs).step(lambda: closure(others))


@pytest.mark.parametrize("make", [PACE, lambda *given: attach(optim.SGD(*given))], ids=["PACE", "attached"])
def test_a_first_step_at_rate_0_counts(make):
    """A warm-up begins with one; where all gradients are 0 too, torch asks for the form of a state."""
    parameters = make_parameters()
    start = copies(parameters)
    optimizer = advance(make(parameters, 0.0), parameters, make_gradients(1))
    assert [state["step"].item() for _, _, state in keeper_of(optimizer).remembered()] == [1.0] * 4
    assert same(parameters, start)
