"""What is refused, in whose words; what schedules, groups and closures do."""

import math
import warnings

import numpy as np
import pytest
import torch
from problems import (
    PATHS,
    VARIANTS,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    run,
    set_gradients,
)
from reference import Reference
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline import PACE

REFUSED = [
    ({"lr": -1e-3}, "learning rate", "-0.001", "0 <= lr"),
    ({"lr": math.nan}, "learning rate", "nan", "0 <= lr"),
    ({"lr": "fast"}, "learning rate", "'fast'", "a number"),
    ({"lr": torch.tensor([1e-3, 1e-3])}, "Tensor lr must be 1-element", "(2,)", ""),
    ({"lr": torch.tensor(-1.0)}, "learning rate", "-1", "0 <= lr"),
    ({"lr": torch.tensor(1e-3), "foreach": True}, "lr as a Tensor", "foreach=True", "use a float"),
    ({"betas": (1.0, 0.999)}, "beta parameter at index 0", "1.0", "0 <= beta < 1"),
    ({"betas": (0.9, -0.1)}, "beta parameter at index 1", "-0.1", "0 <= beta < 1"),
    ({"betas": (0.9,)}, "betas", "(0.9,)", "a pair"),
    ({"betas": (0.9, torch.tensor(0.99))}, "either both floats or both Tensors", "0.9", "floats"),
    ({"eps": -1.0}, "eps", "-1.0", ">= 0"),
    ({"weight_decay": -1}, "weight_decay", "-1", ">= 0"),
    ({"pullback_strength": -1e-3, "gain": "paper"}, "pullback_strength", "-0.001", '>= 0 for gain="paper"'),
    ({"pullback_strength": math.nan, "gain": "paper"}, "pullback_strength", "nan", ">= 0"),
    ({"pullback_strength": 3e-3}, "pullback_strength", "0.003", 'gain="paper" (c of the paper'),
    ({"pullback_strength": math.nan}, "pullback_strength", "nan", 'gain="scaled" (what PACE takes by itself'),
    ({"pullback_strength": -1.0, "gain": "uniform"}, "pullback_strength", "-1.0", "> -1"),
    ({"gain": "uniform"}, "pullback_strength", "None", '> -1 for gain="uniform"'),
    ({"pullback_strength": -2.0, "gain": "uniform"}, "pullback_strength", "-2.0", "> -1"),
    ({"gain": "papre"}, "gain", "'papre'", "'paper', 'uniform', 'scaled'"),
    ({"pullback_strength": -0.1, "gain": "scaled"}, "pullback_strength", "-0.1", ">= 0 and finite"),
    ({"pullback_strength": math.inf, "gain": "scaled"}, "pullback_strength", "inf", ">= 0 and finite"),
    ({"gap": "post"}, "gap", "'post'", "'pre', 'lookahead'"),
    ({"ema_power": -0.1}, "ema_power", "-0.1", "0 <= ema_power <= 1"),
    ({"ema_power": 1.1}, "ema_power", "1.1", "0 <= ema_power <= 1"),
    ({"return_power": 2.0}, "return_power", "2.0", "None, or 0 <= return_power <= 1"),
    ({"update_every": 0}, "update_every", "0", "an integer >= 1"),
    ({"update_every": 2.0}, "update_every", "2.0", "an integer >= 1"),
    ({"ema_offset": -1.0}, "ema_offset", "-1.0", ">= 0"),
    ({"ema_scale": -1.0}, "ema_scale", "-1.0", ">= 0"),
    ({"ema_offset": 0.0, "ema_scale": 0.5}, "ema_offset + ema_scale", "0.5", ">= 1"),
    ({"max_gain": 0.0}, "max_gain", "0.0", "> 0"),
    ({"max_gain": math.nan}, "max_gain", "nan", "> 0"),
    ({"maximize": 1}, "maximize", "1", "True or False"),
]


@pytest.mark.parametrize("settings, name, value, allowed", REFUSED)
def test_out_of_range_settings_are_refused_with_name_value_and_range(settings, name, value, allowed):
    parameter = torch.ones(2).requires_grad_()
    with pytest.raises(ValueError) as refusal:
        PACE([parameter], **settings)
    for part in (name, value, allowed):
        assert part in str(refusal.value)


@pytest.mark.parametrize("settings, name, value, allowed", REFUSED)
def test_a_groups_own_settings_are_checked_too(settings, name, value, allowed):
    optimizer = PACE([torch.ones(2).requires_grad_()])
    with pytest.raises(ValueError) as refusal:
        optimizer.add_param_group({"params": [torch.ones(2).requires_grad_()], **settings})
    assert name in str(refusal.value)
    assert len(optimizer.param_groups) == 1 and len(optimizer.state) == 1


def test_numbers_of_other_libraries_are_numbers():
    """A sweep hands over NumPy scalars."""
    ints, floats = np.int64(2), np.float32(0.5)
    optimizer = run(
        make_parameters(), make_gradients(2), update_every=ints, ema_power=floats, weight_decay=floats
    )
    assert optimizer.param_groups[0]["update_every"] == 2


def test_what_torch_says_of_parameters_we_say_too():
    """A parameter listed twice, an empty list, a single tensor, a parameter in two groups."""
    parameter = torch.ones(2).requires_grad_()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        PACE([parameter, parameter])
    with pytest.raises(ValueError, match="empty parameter list"):
        PACE([])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        PACE(parameter)
    with pytest.raises(ValueError, match="more than one parameter group"):
        PACE([{"params": [parameter]}, {"params": [parameter]}])


@pytest.mark.parametrize("foreach", PATHS)
def test_a_parameter_listed_twice_moves_as_in_adamw(foreach):
    ours, theirs = torch.ones(3).requires_grad_(), torch.ones(3).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pace = PACE([ours, ours], lr=1e-2, pullback_strength=0.0, foreach=foreach)
        adamw = torch.optim.AdamW([theirs, theirs], lr=1e-2, foreach=foreach)
    for _ in range(5):
        ours.grad, theirs.grad = torch.ones(3), torch.ones(3)
        pace.step()
        adamw.step()
    assert torch.equal(ours, theirs)
    live = ours.detach().clone()
    pace.eval()
    assert not torch.equal(ours, live)
    pace.train()
    assert torch.equal(ours, live)


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 5, 0.5),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [4, 9]),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=10),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.3, total_iters=5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 3e-2, total_steps=21),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 20),
}


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_pull_uses_the_learning_rate_in_force(name, foreach):
    """N12: nine schedulers, 20 steps, against the reference at the same rates."""
    parameters, gradients = make_parameters(), make_gradients(20)
    references = [Reference(p.detach().numpy(), pullback_strength=30.0) for p in parameters]
    optimizer = PACE(parameters, lr=1e-2, gain="paper", pullback_strength=30.0, foreach=foreach)
    scheduler = SCHEDULERS[name](optimizer)
    for step_gradients in gradients:
        for reference, gradient in zip(references, step_gradients, strict=True):
            reference.lr = optimizer.param_groups[0]["lr"]
            # OneCycleLR also turns beta1.
            reference.betas = optimizer.param_groups[0]["betas"]
            reference.step(gradient.numpy())
        advance(optimizer, parameters, [step_gradients])
        scheduler.step()
    for parameter, reference in zip(parameters, references, strict=True):
        assert torch.allclose(parameter, torch.tensor(reference.live), rtol=1e-12, atol=1e-12)
        average = optimizer.state[parameter]["average"]
        assert torch.allclose(average, torch.tensor(reference.average), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_learning_rate_pulls_like_a_float(shape):
    """N12: 0-, 1- and 2-dim."""
    gradients = make_gradients(15)
    parameters = make_parameters()
    lr = torch.tensor(1e-2, dtype=torch.float64).reshape(shape)
    tensor = run(parameters, gradients, lr=lr, pullback_strength=30.0)
    plain = run(make_parameters(), gradients, lr=1e-2, pullback_strength=30.0)
    for ours, theirs in zip(everything(tensor).values(), everything(plain).values(), strict=True):
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("foreach", PATHS)
def test_groups_are_as_many_optimizers(foreach):
    """N16: own strength, power, every, gain, gap, decay, betas, direction per group."""
    names = ["strong", "uniform", "lookahead", "every_3"]
    extra = [
        {"maximize": True},
        {"weight_decay": 0.3},
        {"return_power": 0.9},
        {"lr": 3e-3, "betas": (0.5, 0.9)},
    ]
    settings = [{**VARIANTS[n], **e} for n, e in zip(names, extra, strict=True)]
    gradients = make_gradients(25)
    together = make_parameters(dtype=torch.float32)
    groups = [{"params": [p], **s} for p, s in zip(together, settings, strict=True)]
    optimizer = PACE(groups, lr=1e-2, foreach=foreach)
    advance(optimizer, together, gradients)
    flat = everything(optimizer)
    for i, parameter in enumerate(make_parameters(dtype=torch.float32)):
        alone = run([parameter], [[step[i]] for step in gradients], foreach=foreach, **settings[i])
        expected = {k.replace("0/", f"{i}/", 1): v for k, v in everything(alone).items()}
        assert_same_bits(expected, {k: v for k, v in flat.items() if k.startswith(f"{i}/")})


def test_closure_is_evaluated_once_at_live_with_gradients():
    parameters = make_parameters()
    optimizer = run(parameters, make_gradients(3), pullback_strength=30.0)
    live = [p.detach().clone() for p in parameters]
    optimizer.eval()  # forgotten
    seen = []

    def closure():
        seen.append([p.detach().clone() for p in parameters])
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in parameters)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert len(seen) == 1 and all(torch.equal(a, b) for a, b in zip(seen[0], live, strict=True))
    assert loss.item() == pytest.approx(sum((p**2).sum().item() for p in live))


def test_a_closure_that_ends_in_eval_still_steps_live():
    parameters, twins = make_parameters(), make_parameters()
    optimizer = run(parameters, make_gradients(3), pullback_strength=30.0)
    twin = run(twins, make_gradients(3), pullback_strength=30.0)
    set_gradients(parameters, make_gradients(1, seed=5)[0])
    optimizer.step(optimizer.eval)
    advance(twin, twins, make_gradients(1, seed=5))
    assert_same_bits(everything(twin), everything(optimizer))


def test_step_hooks_fire_once_even_after_an_adamw():
    torch.optim.AdamW([torch.ones(1).requires_grad_()])
    parameter = torch.ones(1).requires_grad_()
    optimizer, fired = PACE([parameter]), []
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    set_gradients([parameter], [torch.ones(1)])
    optimizer.step()
    assert fired == ["pre", "post"]


@pytest.mark.parametrize("when", ["pre", "post"])
def test_step_hooks_of_all_optimizers_fire_once(when):
    """A hook that is the only one, of an optimizer or of all; and what it is given is what step() was."""
    parameter, given = torch.ones(1).requires_grad_(), []
    optimizer = PACE([parameter])
    of_all = register_optimizer_step_pre_hook if when == "pre" else register_optimizer_step_post_hook
    of_one = optimizer.register_step_pre_hook if when == "pre" else optimizer.register_step_post_hook
    for register in (of_all, of_one):
        handle = register(lambda *arguments: given.append(arguments))
        set_gradients([parameter], [torch.ones(1)])
        optimizer.step()
        handle.remove()
        assert given == [(optimizer, (optimizer,), {})]
        given.clear()
    optimizer.step()
    assert given == [] and optimizer.state[parameter]["step"] == 3


def test_a_profiler_sees_steps_under_torchs_name():
    parameter = torch.ones(1).requires_grad_()
    optimizer = PACE([parameter])
    set_gradients([parameter], [torch.ones(1)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        optimizer.step()
        optimizer.step()
    counts = {event.key: event.count for event in seen.key_averages()}
    assert counts["Optimizer.step#PACE.step"] == 2


def test_what_peers_call_is_there():
    """LR schedulers take it for an Optimizer; its repr names the settings; trainers patch step."""
    optimizer = PACE([torch.ones(1).requires_grad_()], lr=2e-3)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "pullback_strength: 15.0" in repr(optimizer) and "parameters_hold: live" in repr(optimizer)
    original = optimizer.step
    optimizer.step = lambda *a, **k: original(*a, **k)
    optimizer.step()


def test_capturable_needs_a_device_that_captures():
    optimizer = PACE([torch.ones(1).requires_grad_()], capturable=True)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"capturable=True needs parameters on one of .*cuda.*cpu"):
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("name", VARIANTS)
def test_device_scalars_give_the_same_trajectory(name, foreach, monkeypatch):
    """The arithmetic of capturable=True, run on the CPU: scalars that never leave their tensors."""
    monkeypatch.setattr("paceline.optim.work._get_capturable_supported_devices", lambda: ["cpu"])
    gradients = make_gradients(12)
    host = run(make_parameters(), gradients, foreach=foreach, **VARIANTS[name])
    device = run(make_parameters(), gradients, foreach=foreach, capturable=True, **VARIANTS[name])
    for ours, theirs in zip(everything(device).values(), everything(host).values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["strong", "uniform", "scaled", "every_3", "return_power"])
def test_a_compiled_step_is_the_same_and_settles(name, foreach):
    """7 steps with new gradient tensors, one graph for all of them."""
    from torch._dynamo import reset
    from torch._dynamo.testing import CompileCounter

    reset()
    shapes = [(4, 3), ()]
    parameters, twins = (make_parameters(dtype=torch.float32, shapes=shapes) for _ in range(2))
    optimizer = PACE(parameters, lr=1e-2, foreach=foreach, **VARIANTS[name])
    twin = PACE(twins, lr=1e-2, foreach=foreach, **VARIANTS[name])
    counter, counts = CompileCounter(), []
    compiled = torch.compile(optimizer.step, backend=counter)
    for step in make_gradients(7, shapes=shapes):
        set_gradients(parameters, step)
        compiled()
        advance(twin, twins, [step])
        counts.append(counter.frame_count)
    assert counts == [1] * 7
    for ours, theirs in zip(everything(optimizer).values(), everything(twin).values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch, in its own AdamW
@pytest.mark.parametrize("settings", [{}, {"gain": "paper"}, {"average_dtype": "bfloat16"}])
def test_a_compiled_training_step_has_as_many_graphs_as_with_adamw(settings):
    """Forward, backward and step in one function: no more, and none anew as t and learning rate change."""
    from torch._dynamo import reset
    from torch._dynamo.testing import CompileCounter

    graphs = []
    for make in (torch.optim.AdamW, lambda p, lr: PACE(p, lr, **settings)):
        reset()
        counter, counts = CompileCounter(), []
        model = torch.nn.Linear(3, 2)
        optimizer = make(model.parameters(), lr=torch.tensor(1e-2))

        @torch.compile(backend=counter)
        def train(x, model=model, optimizer=optimizer):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for t in range(12):
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (1 + t))
            train(torch.ones(4, 3))
            counts.append(counter.frame_count)
        assert counts[1] == counts[-1], counts
        graphs.append(counts[-1])
    assert graphs[0] == graphs[1]


@pytest.mark.slow
@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize(
    "name", ["strong", "saturated", "uniform", "scaled", "lookahead", "every_3", "return_power"]
)
def test_device_scalars_of_parameters_of_different_age_and_at_rate_0(name, foreach, monkeypatch):
    """Each parameter has its own count on the device; a rate of 0 switches the pull off there."""
    monkeypatch.setattr("paceline.optim.work._get_capturable_supported_devices", lambda: ["cpu"])
    runs = []
    for capturable in (False, True):
        parameters = make_parameters()
        with torch.no_grad():  # weights that come after construction count
            optimizer = PACE(parameters, lr=1e-2, foreach=foreach, capturable=capturable, **VARIANTS[name])
            for parameter in parameters:
                parameter.add_(1.0)
        for k, gradients in enumerate(make_gradients(12)):
            rate = 0.0 if k in (5, 6, 8) else 1e-2
            tensor = torch.tensor(rate, dtype=torch.float64)
            optimizer.param_groups[0]["lr"] = tensor if capturable else rate
            advance(optimizer, parameters, [[g if k >= i else None for i, g in enumerate(gradients)]])
        runs.append(everything(optimizer))
    for ours, theirs in zip(runs[1].values(), runs[0].values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


# --- What suits a gain --------------------------------------------------------------------------------

SUITED = ("gain", "pullback_strength", "ema_power", "return_power")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("scaled", 15.0, 0.2, 0.7)),
        ({"gain": "paper"}, ("paper", 3e-3, 0.5, None)),
        ({"gain": "scaled"}, ("scaled", 15.0, 0.2, 0.7)),
        ({"pullback_strength": 0.0}, ("scaled", 0.0, 0.7, None)),
        ({"pullback_strength": 0, "ema_power": 0.5}, ("scaled", 0, 0.5, None)),
        ({"pullback_strength": 0.0, "return_power": 0.9}, ("scaled", 0.0, 0.9, None)),
        ({"pullback_strength": 0.0, "return_power": 0.0}, ("scaled", 0.0, 0.0, None)),
        ({"pullback_strength": 0.0, "ema_power": 0.5, "return_power": 0.9}, ("scaled", 0.0, 0.5, 0.9)),
        ({"gain": "paper", "pullback_strength": 0.0}, ("paper", 0.0, 0.5, None)),
        ({"return_power": 0.2}, ("scaled", 15.0, 0.2, None)),
        ({"ema_power": 0.7}, ("scaled", 15.0, 0.7, None)),
        ({"gain": "uniform", "pullback_strength": 1.0}, ("uniform", 1.0, 0.5, None)),
        ({"gain": "paper", "ema_power": 0.7, "return_power": 0.7}, ("paper", 3e-3, 0.7, None)),
    ],
)
def test_what_is_not_said_suits_the_gain(settings, expected):
    for optimizer in (
        PACE([torch.ones(2).requires_grad_()], **settings),
        PACE([{"params": [torch.ones(2).requires_grad_()], **settings}]),
    ):
        (group,) = optimizer.param_groups
        assert tuple(group[name] for name in SUITED) == expected
        (state,) = optimizer.state.values()
        assert ("returned" in state) == (expected[3] is not None)


def test_a_group_with_a_gain_of_its_own_gets_what_suits_that():
    first, second = torch.ones(2).requires_grad_(), torch.ones(2).requires_grad_()
    added = {"params": [second], "gain": "paper"}
    optimizer = PACE([first])
    optimizer.add_param_group(added)
    assert optimizer.param_groups[1] is added  # as in torch: who keeps it can change it
    assert [[group[name] for name in SUITED] for group in optimizer.param_groups] == [
        ["scaled", 15.0, 0.2, 0.7],
        ["paper", 3e-3, 0.5, None],
    ]
    optimizer = PACE([first], gain="scaled", pullback_strength=7.0)
    optimizer.add_param_group({"params": [second], "gain": "paper"})
    assert optimizer.param_groups[1]["pullback_strength"] == 7.0  # said for all groups


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"foreach": True}, "foreach=True"),
        ({"fused": "yes"}, "'yes'"),
    ],
)
def test_settings_that_exclude_one_pass_are_refused_immediately(settings, words):
    with pytest.raises(ValueError, match=words):
        PACE(make_parameters(dtype=torch.float32), **{"fused": True, **settings})


def test_one_pass_is_refused_on_a_cpu():
    parameters = make_parameters(dtype=torch.float32)
    optimizer = PACE(parameters, lr=1e-2, fused=True)
    before = everything(optimizer)
    with pytest.raises(
        RuntimeError, match=r"parameter 0 of group 0 is on cpu: fused=True needs a GPU with CUDA"
    ):
        advance(optimizer, parameters, make_gradients(1))
    assert_same_bits(before, everything(optimizer))
