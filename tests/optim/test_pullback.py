"""The pull around any optimizer: equal to PACE around AdamW, to a float64 reference around others."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from lion_pytorch import Lion
from problems import (
    PATHS,
    VARIANTS,
    Net,
    Tied,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    peak_bytes,
    set_gradients,
    train,
)
from reference import LionReference, SGDReference, TwinReference, step_model
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from paceline import PACE, Pullback, averaged_state_dict, averaged_weights

pytestmark = pytest.mark.slow

# What AdamW decides, and what the control does; the rest of a variant's settings.
ADAMW = ("lr", "betas", "eps", "weight_decay", "maximize")
MATRICES = [(4, 3), (3, 5)]


def twins(dtype, foreach, lr=1e-2, **settings):
    """A PACE and a Pullback(AdamW) of the same settings over equal parameters."""
    ours, theirs = make_parameters(dtype=dtype), make_parameters(dtype=dtype)
    pace = PACE(ours, lr=lr, foreach=foreach, **settings)
    adamw = {key: settings.pop(key) for key in ADAMW if key in settings}
    pullback = Pullback(optim.AdamW(theirs, lr=lr, foreach=foreach, **adamw), **settings)
    return ours, pace, theirs, pullback


def assert_twins_are_equal(ours, pace, theirs, pullback):
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        state, other = pace.state[p], pullback.state[q]
        assert state["step"] == other["pullback_step"]
        assert torch.equal(state["average"], other["pullback_average"])
        assert torch.equal(state["exp_avg_sq"], other["exp_avg_sq"])
        assert ("returned" in state) == ("pullback_returned" in other)
        if "returned" in state:
            assert torch.equal(state["returned"], other["pullback_returned"])


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_pullback_of_adamw_is_pace(name, dtype, foreach):
    """N18, bit for bit: live, averages, moments; some gradients None, the rate changes in between."""
    ours, pace, theirs, pullback = twins(dtype, foreach, **VARIANTS[name])
    for k, gradients in enumerate(make_gradients(10)):
        for optimizer in (pace, pullback):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + k % 3) if k != 7 else 0.0
        mine = [None if (i + k) % 7 == 0 else g for i, g in enumerate(gradients)]
        advance(pace, ours, [mine])
        advance(pullback, theirs, [mine])
    assert_twins_are_equal(ours, pace, theirs, pullback)


def test_pullback_of_adamw_is_pace_on_a_network():
    """The gradients depend on the weights, so that a difference would grow."""
    runs = []
    for make in (
        lambda p: PACE(p, lr=3e-2, gain="paper", pullback_strength=0.3, weight_decay=0.1, foreach=True),
        lambda p: Pullback(optim.AdamW(p, lr=3e-2, weight_decay=0.1), pullback_strength=0.3),
    ):
        torch.manual_seed(0)
        model = Tied()
        optimizer = make(model.parameters())
        train(model, optimizer, steps=200)
        runs.append(averaged_state_dict(model, optimizer))
    assert_same_bits(*runs)


def test_pullback_goes_on_from_an_adamw_checkpoint_as_pace_does():
    gradients = make_gradients(12)
    parameters = make_parameters()
    adamw = optim.AdamW(parameters, lr=1e-2, foreach=True)  # which is loaded too
    advance(adamw, parameters, gradients[:6])
    ours, pace, theirs, pullback = twins(torch.float64, True, gain="paper", pullback_strength=3.0)
    for mine, optimizer in ((ours, pace), (theirs, pullback)):
        with torch.no_grad():
            for p, q in zip(mine, parameters, strict=True):
                p.copy_(q)
        with pytest.warns(UserWarning, match="no 'average' for 4 parameter"):
            optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
        assert optimizer.param_groups[0]["pullback_strength"] == 3.0
        own = optimizer.format.prefix  # there for a distributed checkpoint that is loaded next
        assert all(own + "average" in optimizer.state[p] for p in mine)
        advance(optimizer, mine, gradients[6:])
    assert_twins_are_equal(ours, pace, theirs, pullback)


def test_a_base_in_use_is_wrapped_with_its_state():
    """Its moments are untouched, and the averages begin with the live weights of that moment."""
    parameters = make_parameters()
    base = optim.AdamW(parameters, lr=1e-2)
    advance(base, parameters, make_gradients(6))
    before = copy.deepcopy(base.state_dict()["state"])
    optimizer = Pullback(base, pullback_strength=3.0)
    assert_same_bits_of_states(base.state_dict()["state"], before)
    live = [p.detach().clone() for p in parameters]
    advance(optimizer, parameters, make_gradients(1, seed=5))
    for p, old in zip(parameters, live, strict=True):
        rate = 8**-0.5  # the seventh step of the run
        expected = (1 - rate) * old + rate * p
        assert torch.allclose(optimizer.state[p]["pullback_average"], expected, rtol=1e-12)


def test_weights_loaded_between_wrapping_and_the_next_step_count():
    parameters = make_parameters()
    base = optim.AdamW(parameters, lr=1e-2)
    advance(base, parameters, make_gradients(6))
    optimizer = Pullback(base, pullback_strength=0.0)
    with torch.no_grad():
        for p in parameters:
            p.fill_(5.0)
    with averaged_weights(optimizer):
        assert all((p == 5.0).all() for p in parameters)
    advance(optimizer, parameters, make_gradients(1))
    for p in parameters:
        assert torch.allclose(optimizer.state[p]["pullback_average"], torch.tensor(5.0).double(), atol=0.05)


def assert_same_bits_of_states(a, b):
    flat = lambda s: {f"{i}/{k}": v for i, entries in s.items() for k, v in entries.items()}  # noqa: E731
    assert_same_bits(flat(a), flat(b))


# --- Other bases ----------------------------------------------------------------------------------

UNIFORM = {"gain": "uniform", "pullback_strength": 0.8}
CONTROLS = {
    "pull": UNIFORM,
    "push": {"gain": "uniform", "pullback_strength": -0.4},
    "saturated": {"gain": "uniform", "pullback_strength": math.inf},
    "lookahead_every_3": {**UNIFORM, "gap": "lookahead", "update_every": 3},
    "returned": {**UNIFORM, "return_power": 0.9, "ema_power": 0.3},
    "passive": {"pullback_strength": 0.0},
}


def muon(parameters):
    return optim.Muon(parameters, lr=1e-2)


def compare(parameters, optimizer, references, steps=40):
    for gradients in make_gradients(steps, shapes=[p.shape for p in parameters]):
        advance(optimizer, parameters, [gradients])
        step_model(references, [gradient.numpy() for gradient in gradients])
    for parameter, reference in zip(parameters, references, strict=True):
        state = optimizer.state[parameter]
        pairs = [(parameter.detach(), reference.live), (state["pullback_average"], reference.average)]
        if "pullback_returned" in state:
            pairs.append((state["pullback_returned"], reference.returned))
        for ours, theirs in pairs:
            assert np.abs(ours.numpy() - theirs).max() <= 1e-12 * (1 + np.abs(theirs).max())
        assert state["pullback_step"].item() == reference.t


@pytest.mark.parametrize("control", CONTROLS)
def test_around_sgd(control):
    parameters = make_parameters()
    optimizer = Pullback(optim.SGD(parameters, lr=0.03, momentum=0.9), **CONTROLS[control])
    references = [SGDReference(p.detach().numpy(), lr=0.03, **CONTROLS[control]) for p in parameters]
    compare(parameters, optimizer, references)


@pytest.mark.parametrize("control", CONTROLS)
def test_around_lion(control):
    parameters = make_parameters()
    settings = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    optimizer = Pullback(Lion(parameters, **settings), **CONTROLS[control])
    references = [LionReference(p.detach().numpy(), **settings, **CONTROLS[control]) for p in parameters]
    compare(parameters, optimizer, references)


@pytest.mark.parametrize("control", CONTROLS)
def test_around_muon(control):
    parameters = make_parameters(shapes=MATRICES)
    optimizer = Pullback(muon(parameters), **CONTROLS[control])
    flat = lambda state, t: np.ones(1)  # noqa: E731
    references = [
        TwinReference(p.detach().numpy(), muon, flat, lr=1e-2, **CONTROLS[control]) for p in parameters
    ]
    compare(parameters, optimizer, references)


def adam_root(state, t):
    return np.sqrt(state["exp_avg_sq"].numpy() / (1 - 0.999**t))


def amsgrad_root(state, t):
    return np.sqrt(state["max_exp_avg_sq"].numpy() / (1 - 0.999**t))


def adafactor_root(state, t):
    if "variance" in state:
        return np.sqrt(state["variance"].numpy())
    rows, columns = state["row_var"].numpy(), state["col_var"].numpy()
    return np.sqrt(rows * columns / rows.mean(axis=-2, keepdims=True))


WITH_MOMENT = {
    "Adam": (lambda p: optim.Adam(p, lr=1e-2), adam_root, 1e-8),
    "AMSGrad": (lambda p: optim.Adam(p, lr=1e-2, amsgrad=True), amsgrad_root, 1e-8),
    "NAdam": (lambda p: optim.NAdam(p, lr=1e-2), adam_root, 1e-8),
    "RAdam": (lambda p: optim.RAdam(p, lr=1e-2), adam_root, 1e-8),
    "RMSprop": (lambda p: optim.RMSprop(p, lr=1e-2), lambda s, t: np.sqrt(s["square_avg"].numpy()), 1e-8),
    "Adadelta": (lambda p: optim.Adadelta(p, lr=1e-2), lambda s, t: np.sqrt(s["square_avg"].numpy()), 1e-6),
    "Adagrad": (lambda p: optim.Adagrad(p, lr=1e-2), lambda s, t: np.sqrt(s["sum"].numpy()), 1e-10),
    "Adafactor": (lambda p: optim.Adafactor(p, lr=1e-2), adafactor_root, np.finfo(np.float64).eps),
}


@pytest.mark.parametrize("gain", ["paper", "scaled"])
@pytest.mark.parametrize("base", WITH_MOMENT)
def test_around_bases_with_a_second_moment(base, gain):
    """The gain is sized by what the base itself divides by, in its own bias correction."""
    make, root, eps = WITH_MOMENT[base]
    settings = {"gain": gain, "pullback_strength": 3.0}
    parameters = make_parameters()
    optimizer = Pullback(make(parameters), **settings)
    references = [
        TwinReference(p.detach().numpy(), make, root, lr=1e-2, eps=eps, **settings) for p in parameters
    ]
    compare(parameters, optimizer, references)


@pytest.mark.parametrize(
    ("make", "gain"),
    [
        *((make, "paper") for make, _, _ in WITH_MOMENT.values()),
        (lambda p: optim.SGD(p, lr=1e-2, momentum=0.9), "uniform"),
        (lambda p: optim.ASGD(p, lr=1e-2), "uniform"),
        (lambda p: Lion(p, lr=1e-2), "uniform"),
    ],
)
def test_the_gain_is_chosen_by_what_the_base_keeps(make, gain):
    parameters = make_parameters()
    optimizer = Pullback(make(parameters))
    assert optimizer.param_groups[0]["gain"] is None
    advance(optimizer, parameters, make_gradients(1))
    assert optimizer.param_groups[0]["gain"] == gain


@pytest.mark.parametrize("gain", ["paper", "scaled"])
def test_a_gain_that_the_base_cannot_size_is_refused(gain):
    parameters = make_parameters()
    optimizer = Pullback(optim.SGD(parameters, lr=1e-2), gain=gain, pullback_strength=0.5)
    with pytest.raises(RuntimeError, match=r'SGD keeps none; use gain="uniform"'):
        advance(optimizer, parameters, make_gradients(1))


def test_strength_0_is_a_passive_average_of_any_optimizer():
    for make in (lambda p: optim.SGD(p, lr=0.1), lambda p: optim.Adam(p), lambda p: Lion(p), optim.Rprop):
        alone, wrapped = make_parameters(dtype=torch.float32), make_parameters(dtype=torch.float32)
        base, optimizer = make(alone), Pullback(make(wrapped), pullback_strength=0.0, ema_power=1.0)
        iterates = [[p.detach().clone() for p in alone]]
        for gradients in make_gradients(20):
            advance(base, alone, [gradients])
            advance(optimizer, wrapped, [gradients])
            iterates.append([p.detach().clone() for p in alone])
        for i, (p, q) in enumerate(zip(alone, wrapped, strict=True)):
            assert torch.equal(p, q)
            mean = torch.stack([w[i].double() for w in iterates]).mean(0)  # rate 1/(1+t): uniform, with θ₀
            assert torch.allclose(optimizer.state[q]["pullback_average"].double(), mean, rtol=1e-5, atol=1e-6)


def test_a_base_that_needs_a_closure_gets_it():
    """LBFGS evaluates the closure itself, several times a step."""

    def run(wrap):
        parameter = nn.Parameter(torch.tensor([2.0, -3.0], dtype=torch.float64))
        optimizer = wrap(optim.LBFGS([parameter], lr=0.1, max_iter=3))

        def evaluate():
            optimizer.zero_grad()
            loss = (parameter - 1).square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(evaluate).item() for _ in range(5)]
        return parameter, optimizer, losses

    alone, _, losses = run(lambda base: base)
    wrapped, optimizer, same = run(lambda base: Pullback(base, pullback_strength=0.0))
    assert losses == same and torch.equal(alone, wrapped)
    pulled, optimizer, _ = run(lambda base: Pullback(base, pullback_strength=0.5))
    assert not torch.equal(alone, pulled)
    assert optimizer.state[pulled]["pullback_step"] == 5


def test_what_the_closure_gave_no_gradient_is_not_counted():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Pullback(optim.LBFGS([used, unused], lr=0.1, max_iter=2), pullback_strength=0.5)

    def evaluate():
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(evaluate)
    assert [optimizer.state[p]["pullback_step"].item() for p in (used, unused)] == [3, 0]
    assert (unused == 1).all()


class AdamOrSGD(optim.Optimizer):
    """Adam for matrices, SGD for the rest, as Muon is often packaged."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.ndim == 2:
                    state = self.state[p]
                    state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad.square(), 1e-3)
                    state["step"] = state.get("step", 0) + 1
                p.sub_(p.grad, alpha=group["lr"])


def test_the_gain_is_decided_by_all_parameters_of_a_group():
    """One without a second moment makes it uniform; and nothing is decided before there is a gradient."""
    parameters = make_parameters()
    optimizer = Pullback(AdamOrSGD(parameters))
    optimizer.step()
    assert optimizer.param_groups[0]["gain"] is None
    advance(optimizer, parameters, make_gradients(2))
    assert optimizer.param_groups[0]["gain"] == "uniform"
    matrices = make_parameters(shapes=MATRICES)
    optimizer = Pullback(AdamOrSGD(matrices))
    advance(optimizer, matrices, make_gradients(1, shapes=MATRICES))
    assert optimizer.param_groups[0]["gain"] == "paper"


# --- What wrappers get wrong (spec: pitfalls; N18) ------------------------------------------------


def test_the_base_state_is_as_if_it_were_alone():
    """AdamW initialises under `if len(state) == 0`: an entry of ours there would break its first step."""
    alone, wrapped = make_parameters(), make_parameters()
    base, optimizer = optim.AdamW(alone), Pullback(optim.AdamW(wrapped), pullback_strength=0.0)
    for gradients in make_gradients(3):
        advance(base, alone, [gradients])
        advance(optimizer, wrapped, [gradients])
    for p, q in zip(alone, wrapped, strict=True):
        assert set(optimizer.base.state[q]) == {"step", "exp_avg", "exp_avg_sq"}
        assert_same_bits(base.state[p], optimizer.base.state[q])


def test_the_average_starts_at_the_weights_before_the_first_step():
    parameter = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = Pullback(optim.SGD([parameter], lr=1.0), pullback_strength=0.0, ema_power=0.5)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["pullback_average"].item() == pytest.approx(1.0 - 2**-0.5)


@pytest.mark.parametrize("plain_first", [False, True])
def test_step_hooks_fire_once_whatever_was_made_before(plain_first):
    """torch patches `step` by class: a subclass that calls super().step() fires twice in one order."""
    if plain_first:
        optim.AdamW(make_parameters())
    parameters = make_parameters()
    optimizer = Pullback(optim.AdamW(parameters))
    fired = []
    optimizer.register_step_post_hook(lambda *_: fired.append("wrapper"))
    optimizer.base.register_step_post_hook(lambda *_: fired.append("base"))
    advance(optimizer, parameters, make_gradients(2))
    assert fired == ["base", "wrapper"] * 2


def test_loading_keeps_a_float32_average_beside_bfloat16_weights():
    parameters = make_parameters(dtype=torch.bfloat16)
    optimizer = Pullback(optim.AdamW(parameters, lr=1e-2), pullback_strength=3.0, return_power=0.8)
    advance(optimizer, parameters, make_gradients(5))
    fresh = make_parameters(dtype=torch.bfloat16)
    other = Pullback(optim.AdamW(fresh), return_power=0.8)
    with torch.no_grad():
        for p, q in zip(fresh, parameters, strict=True):
            p.copy_(q)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_bits(everything(other), everything(optimizer))
    assert other.state[fresh[0]]["pullback_average"].dtype == torch.float32


def test_a_bfloat16_run_moves_its_average_late():
    """At t = 4,700 the rate is 1/70: an average kept in bfloat16 would stand still."""
    parameter = nn.Parameter(torch.tensor([1.1], dtype=torch.bfloat16))
    optimizer = Pullback(optim.SGD([parameter], lr=0.0), pullback_strength=0.0)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    memory = optimizer._memory[parameter]
    memory["step"].fill_(4700)
    memory["average"].fill_(1.0)
    for _ in range(60):
        optimizer.step()
    assert 1.05 < memory["average"].item() < 1.1


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "base", [optim.AdamW, optim.SGD, optim.Adagrad, lambda p: optim.SGD(p, momentum=0.9)]
)
def test_a_distributed_checkpoint_of_a_run_is_whole(base, flat):
    """An entry of ours beside an empty base state would pass for a whole template, and the rest be lost."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, fresh = Net(), Net(seed=9)
    optimizer = Pullback(base(model.parameters()), pullback_strength=0.5, return_power=0.9)
    other = Pullback(base(fresh.parameters()), return_power=0.9)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    optimizer.zero_grad()
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    set_state_dict(fresh, other, model_state_dict=weights, optim_state_dict=state, options=options)
    assert_same_bits(everything(other), everything(optimizer))
    for m, o in ((model, optimizer), (fresh, other)):
        advance(o, list(m.parameters()), make_gradients(3, seed=4))
    assert_same_bits(everything(other), everything(optimizer))


def test_it_costs_one_copy_of_live_for_the_length_of_a_step(monkeypatch):
    """And the temporaries of one chunk."""
    monkeypatch.setattr("paceline.optim.foreach.CHUNK_ELEMENTS", 2**16)
    parameters = [torch.randn(2**16).requires_grad_() for _ in range(8)]
    gradients = [[torch.randn(2**16) for _ in parameters]]
    one = 4 * 2**16 * 8
    for gap, copies in (("pre", 1), ("lookahead", 0)):
        base = optim.SGD(parameters, lr=1e-2, foreach=False)
        optimizer = Pullback(base, pullback_strength=0.5, gap=gap)
        advance(optimizer, parameters, gradients)
        set_gradients(parameters, gradients[0])
        peak = peak_bytes(optimizer.step)
        assert copies * one <= peak <= copies * one + 2 * 4 * 2**16 + 2**12, gap


# --- At home where optimizers are expected --------------------------------------------------------


def test_the_groups_are_the_bases_own():
    parameters = make_parameters()
    base = optim.AdamW([{"params": parameters[:2], "pullback_strength": 0.0}, {"params": parameters[2:]}])
    optimizer = Pullback(base, pullback_strength=7.0)
    assert [g["pullback_strength"] for g in optimizer.param_groups] == [0.0, 7.0]
    optimizer.param_groups[1]["lr"] = 0.5
    assert base.param_groups[1]["lr"] == 0.5
    base.load_state_dict(base.state_dict())  # replaces its list of groups
    assert optimizer.param_groups is base.param_groups
    base.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})  # behind our back
    every = [p for group in optimizer.param_groups for p in group["params"]]
    advance(optimizer, every, [[torch.ones_like(p) for p in every]])
    assert optimizer.param_groups[2]["pullback_strength"] == 7.0
    with pytest.raises(ValueError, match="ema_power value: 2"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "ema_power": 2})
    assert len(base.param_groups) == 3


def test_a_scaler_skips_the_whole_step():
    parameters = make_parameters(dtype=torch.float32)
    optimizer = Pullback(optim.AdamW(parameters, lr=1e-2), pullback_strength=3.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    advance(optimizer, parameters, make_gradients(3))
    before = everything(optimizer)
    for value, moves in ((math.inf, False), (1.0, True)):
        loss = sum((p * value).sum() for p in parameters)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (everything(optimizer)["0/pullback_step"] == before["0/pullback_step"] + 1) == moves
        if not moves:
            assert_same_bits(everything(optimizer), before)


def test_casting_and_moving_the_model_takes_the_averages_along():
    model = Net(dtype=torch.float64)
    optimizer = Pullback(optim.SGD(model.parameters(), lr=0.1), pullback_strength=0.5)
    advance(optimizer, list(model.parameters()), make_gradients(3))
    model.to(torch.bfloat16)
    advance(optimizer, list(model.parameters()), make_gradients(2))
    assert all(optimizer.state[p]["pullback_average"].dtype == torch.float32 for p in model.parameters())
    model.p0.data = torch.zeros(7, 7, dtype=torch.bfloat16)
    set_gradients([model.p0], [torch.ones(7, 7)])
    with pytest.raises(RuntimeError, match=r"shape \(7, 7\) but its optimizer state has shape \(4, 3\)"):
        optimizer.step()


def test_a_state_that_does_not_fit_changes_nothing():
    def make(shapes):
        parameters = make_parameters(shapes=shapes)
        optimizer = Pullback(optim.AdamW(parameters, lr=1e-2), pullback_strength=3.0)
        advance(optimizer, parameters, make_gradients(3, shapes=shapes))
        return optimizer

    optimizer, other = make([(4, 3), (5,)]), make([(4, 3), (6,)])
    before = everything(optimizer)
    with pytest.raises(ValueError, match=r"saved average of parameter 1 of group 0 has shape \(6,\)"):
        optimizer.load_state_dict(other.state_dict())
    broken = copy.deepcopy(optimizer.state_dict())
    del broken["state"][0]["pullback_step"]
    with pytest.raises(ValueError, match="lacks step"):
        optimizer.load_state_dict(broken)
    assert_same_bits(everything(optimizer), before)


def test_a_base_that_refuses_a_state_leaves_the_average_shown():
    parameters = make_parameters()
    optimizer = Pullback(optim.AdamW(parameters, lr=1e-2), pullback_strength=3.0)
    advance(optimizer, parameters, make_gradients(3))
    saved = copy.deepcopy(optimizer.state_dict())

    def refuse(*_):
        raise ValueError("not mine")

    optimizer.base.register_load_state_dict_pre_hook(refuse)
    live = [p.detach().clone() for p in parameters]
    optimizer.eval()
    shown = [p.detach().clone() for p in parameters]
    saved["state"] = {i: {**e, "pullback_live": live[i]} for i, e in saved["state"].items()}
    saved["param_groups"][0]["pullback_parameters_hold"] = "average"
    with pytest.raises(ValueError, match="not mine"):
        optimizer.load_state_dict(saved)
    assert optimizer.shows_average()
    assert all(torch.equal(p, s) for p, s in zip(parameters, shown, strict=True))
    optimizer.train()
    assert all(torch.equal(p, w) for p, w in zip(parameters, live, strict=True))


def test_no_warning_in_an_ordinary_loop():
    model = Tied()
    optimizer = Pullback(optim.NAdam(model.parameters()))
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            train(model, optimizer, steps=1)
            scheduler.step()
            with averaged_weights(optimizer):
                model(torch.arange(7))
