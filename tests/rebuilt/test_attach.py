"""`attach`: averages and a control beside any optimizer, and every point that its hooks must survive."""

import copy
import io
import pickle

import pytest
import torch

from paceline.rebuilt.attach import attach
from paceline.rebuilt.averages import BEMA, FixedDecay, HalfLife, PowerLaw
from paceline.rebuilt.pace import PACE
from paceline.rebuilt.settings import Control
from paceline.rebuilt.weights import averaged_state_dict, averaged_weights
from rebuilt.test_core import problem, train

BASES = {
    "adamw": lambda live: torch.optim.AdamW(live, 1e-2),
    "sgd": lambda live: torch.optim.SGD(live, 1e-2),
    "momentum": lambda live: torch.optim.SGD(live, 1e-2, momentum=0.9),
    "adafactor": lambda live: torch.optim.Adafactor(live, 1e-2),
    "nadam": lambda live: torch.optim.NAdam(live, 1e-2),
    "rmsprop": lambda live: torch.optim.RMSprop(live, 1e-2),
    "fused": lambda live: torch.optim.AdamW(live, 1e-2, fused=True),
}


def shown(optimizer, live, name=None):
    """Return what the parameters hold inside a block."""
    with averaged_weights(optimizer, name):
        return [parameter.detach().clone() for parameter in live]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", BASES)
def test_training_is_unchanged_to_the_bit_with_an_exact_average(base, dtype):
    (live, gradients), (other, others) = problem(dtype), problem(dtype)
    ours, theirs = attach(BASES[base](live), averages={"long": HalfLife(0.5)}), BASES[base](other)
    average = [parameter.detach().double() for parameter in live]
    for t in range(1, 21):
        train(ours, gradients, 1, t)
        train(theirs, others, 1, t)
        for value, parameter in zip(average, live, strict=True):
            value.lerp_(parameter.detach().double(), (1 + t) ** -0.7)
    assert same(live, other)
    for value, parameter in zip(average, averaged_values(ours, live), strict=True):
        assert torch.allclose(value, parameter.double(), atol=3e-6)
    assert same(live, other)


def averaged_values(optimizer, live):
    """Return the averages in full precision."""
    from paceline.rebuilt.weights import keeper_of

    found = dict(keeper_of(optimizer).averages())
    return [found[parameter] for parameter in live]


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("control", [Control.push(), Control.pull(), Control.push(gap="after")], ids=str)
def test_a_control_beside_adamw_is_that_of_pace(control, storage):
    (live, gradients), (other, others) = problem(), problem()
    ours = attach(torch.optim.AdamW(live, 1e-2), control=control, average_dtype=storage)
    theirs = PACE(other, 1e-2, control=control, average_dtype=storage)
    for optimizer, make in ((ours, gradients), (theirs, others)):
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 15)
        for t in range(1, 16):
            train(optimizer, make, 1, t)
            scheduler.step()
    for a, b in zip(live, other, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(shown(ours, live), shown(theirs, other), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6 if storage == "float32" else 2e-3)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_closure_that_raises_leaves_nothing_behind(as_tensor):
    live, gradients = problem()
    rate = torch.tensor(1e-2) if as_tensor else 1e-2
    optimizer = attach(torch.optim.AdamW(live, rate), control=Control.push())

    def bad():
        gradients(1)
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(bad)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2)
    other, others = problem()
    fresh = attach(
        torch.optim.AdamW(other, torch.tensor(1e-2) if as_tensor else 1e-2), control=Control.push()
    )
    for t in (1, 2, 3):
        optimizer.step(lambda t=t: gradients(t))
        fresh.step(lambda t=t: others(t))
    assert same(live, other) and same(shown(optimizer, live), shown(fresh, other))


def test_an_error_inside_the_base_leaves_nothing_behind():
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise MemoryError("full")
            return super().step(closure)

    live, gradients = problem()
    optimizer = attach(Failing(live, 1e-2), control=Control.push())
    train(optimizer, gradients, 2)
    optimizer.fails = True
    gradients(3)
    with pytest.raises(MemoryError):
        optimizer.step()
    optimizer.fails = False
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1e-2
    other, others = problem()
    fresh = attach(torch.optim.SGD(other, 1e-2), control=Control.push())
    train(fresh, others, 5)
    train(optimizer, gradients, 3, 3)
    assert same(live, other) and same(shown(optimizer, live), shown(fresh, other))


def test_a_step_that_calls_its_parent_is_one_step():
    class Loud(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    (live, gradients), (other, others) = problem(), problem()
    ours = attach(Loud(live, 1e-2), control=Control.push())
    theirs = attach(torch.optim.SGD(other, 1e-2), control=Control.push())
    train(ours, gradients, 4)
    train(theirs, others, 4)
    assert same(live, other) and same(shown(ours, live), shown(theirs, other))


def test_a_step_that_the_scaler_skips_moves_nothing():
    live, gradients = problem()
    optimizer = attach(torch.optim.AdamW(live, 1e-2, fused=True), control=Control.push())
    train(optimizer, gradients, 2)
    before, averages = [p.detach().clone() for p in live], shown(optimizer, live)
    scaler = torch.amp.GradScaler("cpu")
    loss = scaler.scale(sum((p * float("inf")).sum() for p in live))
    optimizer.zero_grad()
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert same(live, before) and same(shown(optimizer, live), averages)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_refused_at_its_next_step(copied):
    live, gradients = problem()
    optimizer = attach(torch.optim.AdamW(live, 1e-2))
    train(optimizer, gradients, 2)
    other = copied(optimizer)
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match="copy of an attached optimizer"):
        other.step()
    train(optimizer, gradients, 1, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("while_shown", [False, True])
@pytest.mark.parametrize("base", ["adamw", "sgd", "adafactor"])
def test_resumes_to_the_bit(base, while_shown, dtype):
    further = {"long": PowerLaw(0.9), "bema": BEMA(every=2), "ema": FixedDecay(0.9)}
    live, gradients = problem(dtype)
    optimizer = attach(BASES[base](live), control=Control.push(), averages=further)
    train(optimizer, gradients, 5)
    file = io.BytesIO()
    weights = [p.detach().clone() for p in live]
    if while_shown:
        with averaged_weights(optimizer):
            torch.save([optimizer.state_dict(), [p.detach() for p in live]], file)
    else:
        torch.save([optimizer.state_dict(), weights], file)
    file.seek(0)
    state, saved = torch.load(file, weights_only=True)
    again = [p.clone().requires_grad_() for p in saved]
    other = attach(BASES[base](again), control=Control.push(), averages=further)
    other.load_state_dict(state)
    assert same(again, weights)
    train(optimizer, gradients, 3, 6)
    for t in (6, 7, 8):
        own = torch.Generator().manual_seed(1000 + t)
        for p in again:
            p.grad = (0.3 * p.detach().float() + torch.randn(p.shape, generator=own)).to(dtype)
        other.step()
    assert same(live, again)
    for name in (None, *further):
        assert same(shown(optimizer, live, name), shown(other, again, name))


def test_a_group_that_is_added_later_has_averages_too():
    live, gradients = problem()
    optimizer = attach(torch.optim.AdamW(live[:2], 1e-2), control=Control.push())
    train(optimizer, gradients, 2)
    optimizer.add_param_group({"params": live[2:], "lr": 1e-3})
    train(optimizer, gradients, 3, 3)
    assert len(averaged_values(optimizer, live)) == 4
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]


def test_what_attach_refuses():
    live, gradients = problem()
    optimizer = attach(torch.optim.AdamW(live, 1e-2))
    with pytest.raises(ValueError, match="keeps averages already"):
        attach(optimizer)
    with pytest.raises(ValueError, match="keeps averages already"):
        attach(PACE(problem()[0], 1e-2))
    with pytest.raises(ValueError, match="use PACE"):
        attach(torch.optim.SGD(live, 1e-2), control=Control.paper())
    with pytest.raises(ValueError, match="Invalid name"):
        attach(torch.optim.SGD(live, 1e-2), averages={"live": PowerLaw(0.5)})
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        attach(None)
    train(optimizer, gradients, 1)
    with averaged_weights(optimizer), pytest.raises(RuntimeError, match="inside averaged_weights"):
        optimizer.step()
    plain = torch.optim.AdamW(live, 1e-2)
    with pytest.raises(TypeError, match="keeps no average"), averaged_weights(plain):
        pass


def test_muon_and_adamw_are_shown_and_exported_as_one():
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 6))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    both = [
        attach(torch.optim.Muon(matrices, lr=1e-2), control=Control.push()),
        PACE([p for p in model.parameters() if p.ndim != 2], 1e-2, control=Control.push()),
    ]
    for _ in range(4):
        model.zero_grad()
        model(torch.ones(3, 6)).square().mean().backward()
        for optimizer in both:
            optimizer.step()
    exported = averaged_state_dict(model, both)
    with averaged_weights(both):
        assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())
