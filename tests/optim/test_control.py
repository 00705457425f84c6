"""What a user may set: defaults, what is refused and in whose words, groups, and settings changed later."""

import copy
import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from problems import (
    CONTROLS,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    run,
    same,
    set_gradients,
)
from torch import nn

from paceline import PACE, Control, attach, averaged_weights

INF, NAN = math.inf, math.nan
NO_SECOND = {"every": 1, "pull_every": None, "slope": 1.0, "delay": 0.0, "least_rate": 0.0, "max_gain": 1.0}
USUAL = {**NO_SECOND, "grow": 0, "gap": "before", "order": "pull, then average"}
DEFAULTS = {
    "push": {"strength": -0.5, "sizing": "uniform", "power": 0.6, "return_power": 0.7, "step": 0.5},
    "pull": {"strength": 1.0, "sizing": "uniform", "power": 0.2, "return_power": 0.7, "step": 2.0},
    "paper": {"strength": 3e-3, "sizing": "paper", "power": 0.5, "return_power": None, "step": 1.0},
    "none": {"strength": 0.0, "sizing": "uniform", "power": 0.7, "return_power": None, "step": 1.0},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_are_frozen(name):
    """What these mean is in the records and in papers: a change makes another method of the same name."""
    control = getattr(Control, name)()
    found = {field.name: getattr(control, field.name) for field in fields(Control)}
    assert found == {**USUAL, **DEFAULTS[name]}
    with pytest.raises(FrozenInstanceError):
        control.strength = 1.0


def test_the_defaults_of_pace_are_algorithm_1_and_adamws():
    (group,) = PACE([torch.ones(1, requires_grad=True)]).param_groups
    assert group["control"] == Control.paper()
    adamw = torch.optim.AdamW([torch.ones(1, requires_grad=True)]).param_groups[0]
    shared = ("lr", "betas", "eps", "weight_decay", "maximize", "foreach", "fused")
    assert {name: group[name] for name in shared} == {name: adamw[name] for name in shared}


def test_what_averages_there_are():
    assert Control.push().averages == ("average", "returned")
    assert Control.push(return_power=0.6).averages == ("average",) == Control.paper().averages
    assert Control.push(0.0).averages == Control.none(return_power=0.9).averages == ("average",)
    assert Control.push(0.0).powers == (0.7, 0.7) and Control.push().powers == (0.6, 0.7)
    assert Control.push(strength=0.25).step == 0.75 and Control.pull(3.0).step == 4.0
    assert Control.pull(INF).step == 1.0 and Control.push(step=1.0).step == 1.0


def test_rates_are_the_papers():
    assert Control.paper().rate(3, 0.5) == 0.5 == Control.paper(delay=1.0).rate(4, 0.5)
    assert Control.paper(slope=2.0, delay=5.0).rate(5, 1.0) == 1.0
    assert Control.paper(least_rate=0.2).rate(10**6, 0.5) == 0.2
    assert Control.paper().rate(10**9, 0.0) == 1.0 and Control.paper().rate(9, 1.0) == 0.1


UNIFORM = {"sizing": "uniform", "power": 0.5}
REFUSED_CONTROLS = [
    (lambda: Control(strength=-1.0, **UNIFORM), "strength", "-1.0", '> -1 with sizing="uniform"'),
    (lambda: Control(strength=-2.0, **UNIFORM), "strength", "-2.0", "> -1"),
    (lambda: Control(strength=NAN, **UNIFORM), "strength", "nan", "> -1"),
    (lambda: Control(strength="strong", **UNIFORM), "strength", "'strong'", "> -1"),
    (lambda: Control(strength=True, **UNIFORM), "strength", "True", "> -1"),
    (lambda: Control.paper(-1e-3), "strength", "-0.001", '>= 0 with sizing="paper"'),
    (lambda: Control.paper(NAN), "strength", "nan", ">= 0"),
    (lambda: Control.push(1.0), "strength", "1.0", "0 <= strength < 1 of a push"),
    (lambda: Control.push(-0.5), "strength", "-0.5", "0 <= strength < 1"),
    (lambda: Control.pull(-0.5), "strength", "-0.5", ">= 0"),
    (lambda: Control(strength=1.0, sizing="scaled", power=0.5), "sizing", "'scaled'", "'paper', 'uniform'"),
    (lambda: Control.paper(power=-0.1), "power", "-0.1", "between 0 and 1"),
    (lambda: Control.paper(power=1.1), "power", "1.1", "between 0 and 1"),
    (lambda: Control.paper(power=None), "power", "None", "between 0 and 1"),
    (lambda: Control.paper(return_power=2.0), "return_power", "2.0", "None, or between 0 and 1"),
    (lambda: Control.push(step=0.0), "step", "0.0", "> 0 and finite"),
    (lambda: Control.push(step=INF), "step", "inf", "> 0 and finite"),
    (lambda: Control.push(grow=-1), "grow", "-1", "an integer >= 0"),
    (lambda: Control.push(grow=1e3), "grow", "1000.0", "an integer >= 0"),
    (lambda: Control.pull(INF, grow=9), "strength", "inf", "finite, to grow"),
    (lambda: Control.push(every=0), "every", "0", "an integer >= 1"),
    (lambda: Control.push(every=2.0), "every", "2.0", "an integer >= 1"),
    (lambda: Control.push(every=True), "every", "True", "an integer >= 1"),
    (lambda: Control.push(pull_every=-1), "pull_every", "-1", "None, or an integer >= 1"),
    (lambda: Control.push(slope=-1.0), "slope", "-1.0", ">= 0 and finite"),
    (lambda: Control.push(delay=INF), "delay", "inf", ">= 0 and finite"),
    (lambda: Control.push(least_rate=1.5), "least_rate", "1.5", "between 0 and 1"),
    (lambda: Control.push(max_gain=0.0), "max_gain", "0.0", "> 0 (inf: unclipped)"),
    (lambda: Control.push(max_gain=NAN), "max_gain", "nan", "> 0"),
    (lambda: Control.push(gap="pre"), "gap", "'pre'", "'before', 'after'"),
    (lambda: Control.push(order="both"), "order", "'both'", "'pull, then average', 'average, then pull'"),
]
REFUSED = [
    ({"lr": -1e-3}, "lr", "-0.001", ">= 0 and finite"),
    ({"lr": NAN}, "lr", "nan", ">= 0 and finite"),
    ({"lr": INF}, "lr", "inf", ">= 0 and finite"),
    ({"lr": "fast"}, "lr", "'fast'", "a number or a 1-element Tensor"),
    ({"lr": torch.tensor([1e-3, 1e-3])}, "lr", "tensor", "1-element Tensor"),
    ({"lr": torch.tensor(-1.0)}, "lr", "tensor(-1.)", ">= 0 and finite"),
    ({"betas": (1.0, 0.999)}, "betas", "(1.0, 0.999)", "two numbers, each >= 0 and < 1"),
    ({"betas": (0.9, -0.1)}, "betas", "(0.9, -0.1)", "two numbers"),
    ({"betas": (0.9,)}, "betas", "(0.9,)", "two numbers"),
    ({"eps": -1.0}, "eps", "-1.0", ">= 0"),
    ({"weight_decay": -1}, "weight_decay", "-1", ">= 0"),
    ({"maximize": 2}, "maximize", "2", "True, False"),
    ({"foreach": "yes"}, "foreach", "'yes'", "None, True, False"),
    ({"fused": 2}, "fused", "2", "None, True, False"),
    ({"average_dtype": "fp8"}, "average_dtype", "'fp8'", "'float32', 'bfloat16', 'int8'"),
    ({"control": "push"}, "control", "'push'", "a Control, such as Control.push()"),
]


@pytest.mark.parametrize(("make", "name", "value", "allowed"), REFUSED_CONTROLS)
def test_a_control_out_of_range_is_refused_with_name_value_and_range(make, name, value, allowed):
    with pytest.raises(ValueError) as refusal:
        make()
    message = str(refusal.value)
    assert message.startswith(f"Invalid {name} value: {value}; allowed: ") and allowed in message


@pytest.mark.parametrize(("settings", "name", "value", "allowed"), REFUSED)
def test_settings_out_of_range_are_refused_also_those_of_a_group(settings, name, value, allowed):
    optimizer = PACE([torch.ones(2).requires_grad_()])
    for attempt in (
        lambda: PACE([torch.ones(2).requires_grad_()], **settings),
        lambda: PACE([{"params": [torch.ones(2).requires_grad_()], **settings}]),
        lambda: optimizer.add_param_group({"params": [torch.ones(2).requires_grad_()], **settings}),
    ):
        with pytest.raises(ValueError) as refusal:
            attempt()
        assert f"Invalid {name} value: {value}" in str(refusal.value) and allowed in str(refusal.value)
    assert len(optimizer.param_groups) == 1


# --- Groups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
def test_groups_are_as_many_optimizers(foreach):
    """Each with a control, a storage, a rate, betas and a direction of its own."""
    own = [
        {"control": CONTROLS["paper"], "maximize": True},
        {"control": CONTROLS["push"], "weight_decay": 0.3, "average_dtype": "int8"},
        {"control": CONTROLS["lookahead"], "lr": 3e-3},
        {"control": CONTROLS["none"], "betas": (0.5, 0.9), "average_dtype": "bfloat16"},
    ]
    gradients, together = make_gradients(12), make_parameters(dtype=torch.float32)
    groups = [{"params": [p], **settings} for p, settings in zip(together, own, strict=True)]
    optimizer = advance(PACE(groups, lr=1e-2, foreach=foreach), together, gradients)
    found = everything(optimizer)
    for i, parameter in enumerate(make_parameters(dtype=torch.float32)):
        alone = PACE([parameter], **{"lr": 1e-2, "foreach": foreach, **own[i]})
        advance(alone, [parameter], [[step[i]] for step in gradients])
        expected = {k.replace("0/", f"{i}/", 1): v for k, v in everything(alone).items()}
        assert_same_bits(expected, {k: v for k, v in found.items() if k.startswith(f"{i}/")})


def test_a_control_is_plain_values_in_a_state_dict():
    control = Control.push(every=2, pull_every=3)
    optimizer = PACE([torch.ones(1, requires_grad=True)], control=control)
    for each in (optimizer, attach(torch.optim.SGD([torch.ones(1, requires_grad=True)]), control=control)):
        stored = each.state_dict()["param_groups"][0]["control"]
        assert each.param_groups[0]["control"] is control and Control(**stored) == control
        assert type(stored) is dict
        assert {type(value) for value in stored.values()} <= {float, int, str, type(None)}


def test_controls_that_are_changed_in_mid_run_count_from_the_next_step():
    """Averages come and go."""
    parameters, others = make_parameters(), make_parameters()
    gradients = make_gradients(9)
    optimizer = run(parameters, gradients[:3], Control.push())
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["control"] |= {"strength": -0.25, "step": 0.75}
    other = PACE(others)
    other.load_state_dict(state)
    with torch.no_grad():
        torch._foreach_copy_(others, parameters)
    advance(other, others, gradients[3:6])
    optimizer.param_groups[0]["control"] = replace(Control.push(), strength=-0.25, step=0.75)
    advance(optimizer, parameters, gradients[3:6])
    assert_same_bits(everything(optimizer), everything(other))
    optimizer.param_groups[0]["control"] = Control.none()
    advance(optimizer, parameters, gradients[6:])
    assert {"average", "returned"} & optimizer.state[parameters[0]].keys() == {"average"}
    optimizer.param_groups[0]["control"] = Control.push()
    before = optimizer.state[parameters[0]]["average"].clone()
    advance(optimizer, parameters, gradients[:1])
    returned = optimizer.state[parameters[0]]["returned"]  # which goes on from what was returned before
    assert torch.allclose(returned, before + 11**-0.7 * (parameters[0] - before), rtol=1e-12)


@pytest.mark.parametrize("make", [PACE, lambda groups, lr: attach(torch.optim.SGD(groups, lr))])
def test_a_setting_that_is_not_allowed_is_refused_at_the_next_step_before_anything_moves(make):
    first, second = make_parameters(shapes=[(3,), (2,)])
    optimizer = make([{"params": [first]}, {"params": [second]}], lr=1e-2)
    optimizer.param_groups[1]["control"] = "push"
    set_gradients([first, second], make_gradients(1, shapes=[(3,), (2,)])[0])
    before = first.detach().clone()
    with pytest.raises(ValueError, match=r"Invalid control value: 'push'; allowed: a Control, such as"):
        optimizer.step()
    assert torch.equal(first, before)


# --- Parameters and gradients -----------------------------------------------------------------------------


def test_what_torch_says_of_parameters_is_said():
    parameter = torch.ones(2).requires_grad_()
    with pytest.raises(ValueError, match="empty parameter list"):
        PACE([])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        PACE(parameter)
    with pytest.raises(ValueError, match="more than one parameter group"):
        PACE([{"params": [parameter]}, {"params": [parameter]}])


OVERLAPPING = {
    "the same": lambda whole: (whole[:], whole[:]),
    "a part": lambda whole: (whole[:8], whole[7:]),
    "another shape": lambda whole: (whole.view(3, 4), whole.view(4, 3)),
}
APART = {
    "neighbours": lambda whole: (whole[:6], whole[6:]),
    "empty": lambda whole: (whole, whole[:0]),
    "other memory": lambda whole: (whole, whole.clone()),
}


@pytest.mark.parametrize("make", [PACE, lambda named: attach(torch.optim.SGD(named))])
@pytest.mark.parametrize("kind", [*OVERLAPPING, *APART])
def test_parameters_that_share_memory_are_refused_with_both_names(kind, make):
    """Shown one after the other, the second would keep the first's average as its live weights."""
    first, second = (nn.Parameter(part) for part in {**OVERLAPPING, **APART}[kind](torch.randn(12)))
    optimizer = make([("first", first)])
    if kind in APART:
        make([("first", first), ("second", second)])
        return
    with pytest.raises(ValueError, match=r"'first' and parameter 'second' share memory"):
        make([("first", first), ("second", second)])
    with pytest.raises(ValueError, match="share memory"):
        optimizer.add_param_group({"params": [("second", second)]})
        optimizer.step()  # where a base is asked
    assert len(optimizer.param_groups) == (1 if make is PACE else 2)


UNSUPPORTED = {
    "complex": (torch.ones(3, dtype=torch.complex64), {}, "is complex; train its real view"),
    "expanded": (torch.ones(1, 3).expand(4, 3), {}, "is an expanded tensor"),
    "double in int8": (
        torch.ones(3).double(),
        {"average_dtype": "int8"},
        "is torch.float64; average_dtype=.int8. is for",
    ),
    "double in bfloat16": (torch.ones(3).double(), {"average_dtype": "bfloat16"}, "is torch.float64"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_parameters_that_cannot_be_trained_are_refused_by_name(kind):
    tensor, settings, words = UNSUPPORTED[kind]
    with pytest.raises(ValueError, match=rf"parameter 'it' {words}"):
        PACE([("it", nn.Parameter(tensor))], **settings)


def test_gradients_that_cannot_be_used_are_refused_by_name_and_change_nothing():
    embedding, linear = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1)
    model = nn.Sequential(linear, embedding)
    optimizer = PACE(model.named_parameters())
    linear(embedding(torch.tensor([1, 2]))).sum().backward()
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"parameter '1\.weight' has a gradient of layout.*sparse=False"):
        optimizer.step()
    assert_same_bits(before, everything(optimizer))
    optimizer.zero_grad()
    model.bfloat16()
    linear.weight.grad_dtype = torch.float32
    linear.weight.grad = torch.ones(1, 2)
    with pytest.raises(
        RuntimeError, match=r"'0\.weight' is torch\.bfloat16 of .* and its gradient torch\.float32"
    ):
        optimizer.step()


def test_one_pass_is_refused_on_a_cpu():
    parameters = make_parameters(dtype=torch.float32)
    optimizer = PACE(parameters, fused=True)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 is on cpu: fused=True needs a GPU"):
        advance(optimizer, parameters, make_gradients(1))
    assert_same_bits(before, everything(optimizer))


def test_parameters_without_values_are_taken():
    lazy, meta = nn.LazyLinear(3), nn.Linear(2, 2, device="meta")
    optimizer = PACE([*lazy.parameters(), *meta.parameters()], lr=0.1)
    lazy(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert optimizer.state[lazy.weight]["step"] == 1 and meta.weight not in optimizer.state
    live = [lazy.weight.detach().clone()]
    with averaged_weights(optimizer):
        assert not same([lazy.weight], live)


def test_a_parameter_that_was_resized_is_refused_after_its_first_step():
    parameters = make_parameters()
    optimizer = PACE(parameters, lr=0.0)
    set_gradients(parameters, [torch.zeros_like(parameter) for parameter in parameters])
    optimizer.step()  # by which torch.distributed.checkpoint learns the names of a state
    parameters[1].grad, parameters[1].data = None, torch.ones(7, dtype=torch.float64)
    advance(optimizer, parameters[1:2], [[torch.ones(7)]] * 2)
    parameters[0].data = torch.ones(6, 3, dtype=torch.float64)
    parameters[0].grad = torch.ones_like(parameters[0])
    with pytest.raises(RuntimeError, match=r"has shape \(6, 3\) but its .* has shape \(4, 3\)"):
        optimizer.step()


def test_repr_says_control_and_path():
    parameters = make_parameters()
    optimizer = PACE([{"params": parameters[:1]}, {"params": parameters[1:], "foreach": False}])
    assert "path: chosen at the first step" in repr(optimizer)
    advance(optimizer, parameters, make_gradients(1))
    assert "Control.paper(), path: foreach" in repr(optimizer)
    assert "path: loop" in repr(optimizer)
