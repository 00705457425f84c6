"""What wrappers have in common, where it went wrong once: a hostile review found each of these."""

import copy

import pytest
import schedulefree
import torch
from problems import Net, advance, assert_same_bits, everything, make_gradients, make_parameters
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from paceline import (
    BEMA,
    PACE,
    Averages,
    Blend,
    Polynomial,
    PowerLaw,
    Pullback,
    averaged_state_dict,
    averaged_weights,
    reset_average,
)
from paceline.optim.baselines import GPA, EMANesterov, ScheduleFree, lookahead

WRAPPERS = {
    "Pullback": lambda base: Pullback(base, pullback_strength=0.3, return_power=0.8),
    "Averages": lambda base: Averages(base, {"b": PowerLaw(0.5), "a": PowerLaw(0.9)}),
    "GPA": lambda base: GPA(base, mu_x=0.9),
    "EMANesterov": lambda base: EMANesterov(base, push=0.5, decay=0.9),
    "lookahead": lambda base: lookahead(base, k=2),
}
wrappers = pytest.mark.parametrize("name", WRAPPERS)


def fill(parameters, value):
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(value)


@wrappers
def test_entries_come_in_the_same_order_on_every_rank(name):
    """A full state gathered over ranks is matched by place; an order by hash would differ between them."""
    parameters = make_parameters()
    optimizer = WRAPPERS[name](optim.SGD(parameters, lr=0.1))
    advance(optimizer, parameters, make_gradients(2))
    wanted = optimizer.format.wanted(optimizer.param_groups[0])
    assert isinstance(wanted, tuple)
    own = [key.removeprefix(optimizer.format.prefix) for key in optimizer.state[parameters[0]]]
    assert own[: 1 + len(wanted)] == ["step", *wanted]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    own = list(optimizer._memory[parameters[0]])
    assert own == sorted(own)


@wrappers
@pytest.mark.parametrize("base", [optim.AdamW, optim.SGD])
def test_weights_may_be_loaded_after_a_distributed_checkpoint_looked_at_a_fresh_optimizer(name, base):
    """torch takes a dummy step then; averages must not begin with it, nor GPA remember the old weights."""
    looked, plain = Net(), Net()
    one, two = (
        WRAPPERS[name](base(looked.parameters(), lr=0.1)),
        WRAPPERS[name](base(plain.parameters(), lr=0.1)),
    )
    get_state_dict(looked, one)
    for model in (looked, plain):
        fill(model.parameters(), 100.0)
    with averaged_weights(one):
        assert all((p == 100.0).all() for p in looked.parameters())
    advance(one, list(looked.parameters()), make_gradients(1))
    advance(two, list(plain.parameters()), make_gradients(1))
    for p, q in zip(looked.parameters(), plain.parameters(), strict=True):
        if base is optim.SGD:  # AdamW's own count is one ahead
            assert torch.equal(p, q)
        assert (p - 100.0).abs().max() < 1.0
    with averaged_weights(one):
        assert all((p - 100.0).abs().max() < 1.0 for p in looked.parameters())


@wrappers
def test_a_checkpoint_of_the_base_by_way_of_a_full_state_dict(name):
    """torch fills entries that it lacks with those of the template's dummy step."""
    options = StateDictOptions(full_state_dict=True)
    model, fresh = Net(), Net(seed=8)
    adamw = optim.AdamW(model.parameters(), lr=0.1)
    advance(adamw, list(model.parameters()), make_gradients(6))
    adamw.zero_grad()
    weights, state = copy.deepcopy(get_state_dict(model, adamw, options=options))
    optimizer = WRAPPERS[name](optim.AdamW(fresh.parameters(), lr=0.1))
    set_state_dict(fresh, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    with averaged_weights(optimizer):
        for p, q in zip(fresh.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)
    advance(optimizer, list(fresh.parameters()), make_gradients(1))
    for p, q in zip(fresh.parameters(), model.parameters(), strict=True):
        assert (p - q).abs().max() < 0.5


@wrappers
def test_a_base_that_clears_its_gradients(name):
    def run(clear):
        parameters = make_parameters()
        optimizer = WRAPPERS[name](optim.SGD(parameters, lr=0.1))
        if clear:
            optimizer.base.register_step_post_hook(lambda base, *_: base.zero_grad())
        advance(optimizer, parameters, make_gradients(5))
        return everything(optimizer)

    assert_same_bits(run(clear=True), run(clear=False))


def test_an_average_cannot_be_called_live():
    with pytest.raises(ValueError, match="other than live"):
        Averages(optim.SGD(make_parameters()), {"live": PowerLaw(0.5)})


# --- Averages around an optimizer that shows one itself -------------------------------------------


def nested():
    parameters = make_parameters()
    optimizer = Averages(PACE(parameters, lr=1e-2, gain="paper", pullback_strength=3.0), {"a": PowerLaw(0.9)})
    advance(optimizer, parameters, make_gradients(5))
    return parameters, optimizer


def test_a_state_saved_while_the_inner_average_is_shown_is_whole():
    _, optimizer = nested()
    before = everything(optimizer)
    with averaged_weights(optimizer.base):
        saved = optimizer.state_dict()
    others = make_parameters(seed=3)
    other = Averages(PACE(others), {"a": PowerLaw(0.9)})
    other.load_state_dict(saved)
    assert_same_bits(everything(other), before)
    assert_same_bits(everything(optimizer), before)


def test_a_state_saved_right_after_the_inner_average_was_loaded_last():
    """The optimizer first, the model, which has PACE's average, after it; then saved before any step."""
    parameters, optimizer = nested()
    before = everything(optimizer)
    with averaged_weights(optimizer.base):
        saved = copy.deepcopy(([p.detach() for p in parameters], optimizer.state_dict()))
    others, third = make_parameters(seed=3), make_parameters(seed=4)
    other, last = (Averages(PACE(p), {"a": PowerLaw(0.9)}) for p in (others, third))
    other.load_state_dict(saved[1])
    with torch.no_grad():
        for p, average in zip(others, saved[0], strict=True):
            p.copy_(average)
    last.load_state_dict(copy.deepcopy(other.state_dict()))
    assert_same_bits(everything(last), before)


def test_one_average_at_a_time():
    parameters, optimizer = nested()
    before = everything(optimizer)
    optimizer.eval()
    for forbidden in (optimizer.base.eval, optimizer.base.step):
        with pytest.raises(RuntimeError, match="hold an average of the Averages around this PACE"):
            forbidden()
    optimizer.train()
    assert_same_bits(everything(optimizer), before)
    optimizer.base.eval()
    optimizer.eval()  # puts live back first
    assert not optimizer.base.shows_average() and optimizer.shows_average()
    optimizer.train()
    assert_same_bits(everything(optimizer), before)
    with averaged_weights(optimizer.base), pytest.raises(RuntimeError, match="inside averaged_weights"):
        optimizer.step()
    _, clone = copy.deepcopy((parameters, optimizer))
    clone.eval()
    with pytest.raises(RuntimeError, match="around this PACE"):
        clone.base.eval()


def test_averages_begin_with_live_also_if_the_inner_average_was_shown():
    parameters, optimizer = nested()
    live = [p.detach().clone() for p in parameters]
    reset_average(optimizer)
    optimizer.base.eval()
    advance(optimizer, parameters, [[torch.zeros_like(p) for p in parameters]])
    for p, old in zip(parameters, live, strict=True):
        rate = 7**-0.9
        expected = (1 - rate) * old + rate * p
        assert torch.allclose(optimizer.state[p]["averages_a_average"], expected, rtol=1e-12)


# --- Groups and state -----------------------------------------------------------------------------


def test_what_is_done_to_the_base_behind_the_back():
    parameters = make_parameters()
    optimizer = Pullback(optim.AdamW(parameters, lr=1e-2), pullback_strength=3.0)
    advance(optimizer, parameters, make_gradients(3))
    plain = optim.AdamW(make_parameters(), lr=1e-2)
    optimizer.eval()
    optimizer.base.load_state_dict(plain.state_dict())  # groups without any setting of ours
    assert optimizer.shows_average()
    optimizer.train()
    assert optimizer.param_groups[0]["pullback_strength"] == 3.0
    advance(optimizer, parameters, make_gradients(1))
    optimizer.base.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert optimizer.state_dict()["param_groups"][1]["pullback_strength"] == 3.0


def test_a_first_step_at_rate_0_counts_if_it_has_gradients():
    """Only torch's dummy step, with gradients of 0, does not."""
    for gradient, counted in ((torch.ones(2), 1), (torch.zeros(2), 0)):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = Pullback(optim.SGD([parameter], lr=0.0))
        advance(optimizer, [parameter], [[gradient]])
        assert optimizer.state[parameter]["pullback_step"].item() == counted


def test_a_copy_gives_its_settings_to_new_groups():
    parameters = make_parameters()
    optimizer = Pullback(optim.SGD(parameters, lr=0.1), pullback_strength=7.0)
    _, clone = copy.deepcopy((parameters, optimizer))
    clone.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert clone.param_groups[1]["pullback_strength"] == 7.0


def test_a_base_is_wrapped_once():
    base = optim.SGD(make_parameters(), lr=0.1)
    Pullback(base, pullback_strength=0.1)
    with pytest.raises(ValueError, match="this SGD is wrapped already"):
        Pullback(base, pullback_strength=0.9)
    a, b = make_parameters(), make_parameters()
    base = optim.SGD([{"params": a}, {"params": b, "ema_power": 7}], lr=0.1)
    with pytest.raises(ValueError, match="ema_power value: 7"):
        Pullback(base)
    assert "pullback_strength" not in base.param_groups[0]  # nothing was written


def test_a_replaced_parameter_leaves_nothing_to_save():
    parameters = make_parameters()
    optimizer = Pullback(optim.SGD(parameters, lr=0.1), pullback_strength=0.3)
    advance(optimizer, parameters, make_gradients(2))
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(3))
    assert set(optimizer.state_dict()["state"]) == {1, 2, 3}


def test_looking_at_the_state_of_many_parameters_is_quick():
    """Each look is at one parameter, and copies the entries of no other."""
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(50)]
    optimizer = Pullback(optim.SGD(parameters, lr=0.1), pullback_strength=0.3)
    advance(optimizer, parameters, [[torch.ones(1)] * 50])
    looked = []

    class Spy(dict):
        def items(self):
            looked.append(self)
            return super().items()

    optimizer._memory = {p: Spy(entries) for p, entries in optimizer._memory.items()}
    assert "pullback_step" in optimizer.state[parameters[7]]
    assert len(looked) == 1


def test_averages_that_are_no_longer_kept():
    def make(names):
        parameters = make_parameters()
        model = nn.ParameterList(parameters)
        return model, Averages(optim.SGD(model.parameters(), lr=0.1), {n: PowerLaw(0.5) for n in names})

    model, both = make("ab")
    advance(both, list(model), make_gradients(3))
    with averaged_weights(both["b"]):
        saved = copy.deepcopy((model.state_dict(), both.state_dict()))
    other, one = make("a")
    one.load_state_dict(saved[1])
    advance(one, list(other), make_gradients(1))  # was KeyError: 'b'
    assert not any("b_average" in key for key in one.state[other[0]])


COMPUTED = [
    lambda base: EMANesterov(base, push=0.5, decay=0.5),
    lambda base: Averages(base, {"it": Blend(PowerLaw(0.5), 0.5)}),
]


@pytest.mark.parametrize("make", COMPUTED)
def test_an_export_right_after_loading_in_the_other_order(make):
    model, fresh = Net(), Net(seed=6)
    optimizer, other = (
        make(optim.SGD(model.parameters(), lr=0.1)),
        make(optim.SGD(fresh.parameters(), lr=0.1)),
    )
    advance(optimizer, list(model.parameters()), make_gradients(5))
    expected = averaged_state_dict(model, optimizer)
    with averaged_weights(optimizer):
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other.load_state_dict(saved[1])
    fresh.load_state_dict(saved[0])
    assert_same_bits(averaged_state_dict(fresh, other), expected)


def test_a_frozen_parameter_beside_a_base_with_state_from_the_start():
    def make():
        parameters = make_parameters()
        parameters[0].requires_grad_(False)
        return parameters, Pullback(optim.Adagrad(parameters, lr=0.1), pullback_strength=0.3)

    parameters, optimizer = make()
    advance(optimizer, parameters, [[None, *g[1:]] for g in make_gradients(3)])
    with averaged_weights(optimizer):
        saved = copy.deepcopy(optimizer.state_dict())
    _, other = make()
    other.load_state_dict(saved)
    assert_same_bits(everything(other), everything(optimizer))


# --- Values ---------------------------------------------------------------------------------------


def test_an_infinite_weight_is_averaged_as_what_it_is():
    """power 0: 0 · average would be NaN there."""
    for foreach in (False, True):
        parameter = torch.tensor([1.0, -torch.inf]).requires_grad_()
        optimizer = PACE([parameter], ema_power=0.0, pullback_strength=0.0, weight_decay=0.0, foreach=foreach)
        advance(optimizer, [parameter], [[torch.zeros(2)]] * 2)
        assert torch.equal(optimizer.state[parameter]["average"], parameter)


def test_polynomial_averages_of_parameters_of_two_ages():
    young, old = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    optimizer = Averages(optim.SGD([old, young], lr=1.0), {"it": Polynomial(2)})
    for k in range(30):
        old.grad = -torch.ones(())
        young.grad = -torch.ones(()) if k >= 20 else None
        optimizer.step()
    for parameter, n in ((old, 30), (young, 10)):
        expected = sum(t**3 for t in range(1, n + 1)) / sum(t**2 for t in range(1, n + 1))
        assert optimizer.state[parameter]["averages_it_average"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["SGDScheduleFreeClosure", "AdamWScheduleFreeClosure", "AdamWScheduleFree"])
@pytest.mark.parametrize(
    "wrap", [Pullback, EMANesterov, GPA, lookahead, lambda b: Averages(b, {"a": BEMA()})]
)
def test_every_schedule_free_optimizer_is_refused(kind, wrap):
    with pytest.raises(ValueError, match=r"Schedule-Free|ScheduleFree"):
        wrap(getattr(schedulefree, kind)(make_parameters(), lr=0.1))


def test_the_packages_own_eval_is_understood():
    parameters = make_parameters(dtype=torch.float32)
    optimizer = ScheduleFree(schedulefree.AdamWScheduleFree(parameters, lr=0.05))
    advance(optimizer, parameters, make_gradients(5))
    expected = {p: average.clone() for p, average in optimizer.returned_averages()}
    optimizer.base.eval()
    assert all(torch.equal(average, expected[p]) for p, average in optimizer.returned_averages())


def test_a_centered_second_moment():
    parameters = make_parameters()
    base = optim.RMSprop(parameters, lr=1e-2, centered=True)
    optimizer = Pullback(base, pullback_strength=0.0)
    advance(optimizer, parameters, make_gradients(5))
    from paceline.optim.moments import second_moment

    state = base.state[parameters[0]]
    value = second_moment(state, base.param_groups[0]).value
    assert torch.allclose(value, state["square_avg"] - state["grad_avg"] ** 2)


def test_a_pull_sized_by_a_moment_that_is_made_for_it():
    """That of a centered RMSprop, which the step may write over."""
    wrapped, raw = make_parameters(), make_parameters()
    optimizer = Pullback(optim.RMSprop(wrapped, lr=1e-2, centered=True), pullback_strength=0.5, gain="paper")
    base = optim.RMSprop(raw, lr=1e-2, centered=True)
    advance(optimizer, wrapped, make_gradients(5))
    base.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    with torch.no_grad():
        for p, q in zip(wrapped, raw, strict=True):
            q.copy_(p)
    gaps = [optimizer.state[p]["pullback_average"] - p.detach() for p in wrapped]
    (gradients,) = make_gradients(1, seed=4)
    advance(optimizer, wrapped, [gradients])
    advance(base, raw, [gradients])
    for p, q, gap in zip(wrapped, raw, gaps, strict=True):
        value = (base.state[q]["square_avg"] - base.state[q]["grad_avg"] ** 2).clamp(min=0)
        root = value.sqrt() + 1e-8
        pull = (0.5 * 7**-0.5 * 1e-2 / root).clamp(max=1) * gap
        assert torch.allclose(p, q + pull, rtol=1e-6, atol=1e-9)


def test_second_moments_of_two_ages_in_one_chunk():
    """The base may count otherwise than we do; its own bias correction counts."""
    parameters, alone = make_parameters(), make_parameters()
    base = optim.Adam(parameters, lr=1e-2)
    optimizer = Pullback(base, pullback_strength=0.5, gain="paper")
    advance(optimizer, parameters, make_gradients(3))
    base.state[parameters[-1]]["step"].fill_(50)
    single = Pullback(optim.Adam(alone[-1:], lr=1e-2), pullback_strength=0.5, gain="paper")
    advance(single, alone[-1:], [gradients[-1:] for gradients in make_gradients(3)])
    single.base.state[alone[-1]]["step"].fill_(50)
    (gradients,) = make_gradients(1, seed=4)
    advance(optimizer, parameters, [gradients])
    advance(single, alone[-1:], [gradients[-1:]])
    assert torch.equal(parameters[-1], alone[-1])
