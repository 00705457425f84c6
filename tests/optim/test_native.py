"""fused=True on a CPU: one pass over memory, in C, against the reference and against the other paths."""

import ctypes
import os
import shutil
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import (
    CHANGES_OF_MOMENTS,
    VARIANTS,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    needs_compiler,
    run,
    set_gradients,
    with_and_without_memory,
)
from reference import distances, of_the_same_state, step_model

from paceline import PACE, averaged_weights
from paceline.optim import look, native

pytestmark = needs_compiler

OFFERED = {name: v for name, v in VARIANTS.items() if v.get("gain") != "relative"}
OFFERED["no_momentum_scaled"] = {"gain": "scaled", "betas": (0.0, 0.95), "pullback_strength": 30.0}
SHAPES = [(33, 7), (16,), (), (15,), (17,), (64, 33), (0, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFERED)
def test_against_the_reference(name):
    """Weights, moments and averages to 1e-6 of the largest, at every one of 25 steps from equal inputs."""
    settings = {"lr": 1e-2, **OFFERED[name]}
    parameters = make_parameters(dtype=torch.float32, shapes=SHAPES)
    optimizer = PACE(parameters, fused=True, **settings)
    for t, gradients in enumerate(make_gradients(25, shapes=SHAPES)):
        references = of_the_same_state(optimizer, parameters, t, settings)
        advance(optimizer, parameters, [gradients])
        step_model(references, [g.float().double().numpy() for g in gradients])
        assert max(distances(optimizer, parameters, references).values()) <= 1e-6
        assert all(optimizer.state[p]["step"].item() == t + 1 for p in parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFERED)
def test_a_run_ends_where_the_loop_ends(name):
    ours, theirs = (make_parameters(dtype=torch.float32, shapes=SHAPES) for _ in range(2))
    steps = make_gradients(50, shapes=SHAPES)
    for step in steps[10:20]:
        step[1] = None  # a parameter that stands still for a while, and is younger than the others then
    run(ours, steps, fused=True, **OFFERED[name])
    run(theirs, steps, foreach=False, **OFFERED[name])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.999)])
@pytest.mark.parametrize("name", OFFERED)
def test_clipping_is_the_same_as_smaller_gradients(name, betas):
    """To the bit: what is built for clipped steps does what the others do."""
    settings = {"lr": 1e-2, "fused": True, **OFFERED[name], "betas": betas}
    ours, theirs = (make_parameters(dtype=torch.float32, shapes=SHAPES) for _ in range(2))
    own, other = PACE(ours, max_grad_norm=0.1, **settings), PACE(theirs, **settings)
    for gradients in make_gradients(4, shapes=SHAPES):
        advance(own, ours, [gradients])
        factor = np.float32(0.1 / (own.grad_norm.item() + 1e-6))
        assert factor < 0.5
        advance(other, theirs, [[gradient.float() * factor for gradient in gradients]])
    assert_same_bits(everything(own), everything(other))


def test_strength_0_is_torchs_fused_adamw_to_a_few_ulp_a_step():
    ours, theirs = (make_parameters(dtype=torch.float32, shapes=[(4000,)]) for _ in range(2))
    own = PACE(ours, lr=1e-3, fused=True, pullback_strength=0.0)
    other = torch.optim.AdamW(theirs, lr=1e-3, fused=True)
    for gradients in make_gradients(20, shapes=[(4000,)]):
        with torch.no_grad():
            ours[0].copy_(theirs[0])
            for key in ("exp_avg", "exp_avg_sq") if other.state[theirs[0]] else ():
                own.state[ours[0]][key].copy_(other.state[theirs[0]][key])
        advance(own, ours, [gradients])
        advance(other, theirs, [gradients])
        a, b = ours[0].detach().numpy(), theirs[0].detach().numpy()
        assert (np.abs(a - b) <= 2 * np.spacing(np.maximum(np.abs(a), np.float32(1e-3)))).all()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_number_of_threads_makes_no_difference(threads, monkeypatch):
    """To the bit: parts that begin anywhere in a tensor."""
    monkeypatch.setattr(native, "FEWEST", 10)
    results = []
    for count in (1, 2, 3, 7):
        threads(count)
        parameters = make_parameters(dtype=torch.float32, shapes=SHAPES)
        steps = make_gradients(10, shapes=SHAPES)
        results.append(everything(run(parameters, steps, gain="scaled", fused=True)))
    for other in results[1:]:
        assert_same_bits(results[0], other)


def test_views_at_odd_places_and_other_orders_of_memory():
    steps = make_gradients(10, shapes=[(6, 5, 4, 3)])
    plain = make_parameters(dtype=torch.float32, shapes=[(6, 5, 4, 3)])
    run(plain, steps, fused=True)
    room = torch.zeros(1 + plain[0].numel())
    odd = room[1:].view(6, 5, 4, 3)
    odd.copy_(make_parameters(dtype=torch.float32, shapes=[(6, 5, 4, 3)])[0].detach())
    odd.requires_grad_()
    run([odd], steps, fused=True)
    assert torch.equal(odd, plain[0]) and room[0] == 0
    last = make_parameters(dtype=torch.float32, shapes=[(6, 5, 4, 3)])[0].detach()
    last = last.to(memory_format=torch.channels_last).requires_grad_()
    optimizer = PACE([last], lr=1e-2, gain="paper", fused=True)
    for step in steps:
        last.grad = step[0].float().to(memory_format=torch.channels_last)
        optimizer.step()
    assert torch.equal(last, plain[0])


def test_what_averages_held_before_the_first_step_makes_no_difference():
    parameters = make_parameters(dtype=torch.float32)
    optimizer = PACE(parameters, lr=1e-2, fused=True, return_power=0.9)
    for p in parameters:
        optimizer.state[p]["average"].fill_(torch.nan)
        optimizer.state[p]["returned"].fill_(torch.inf)
    advance(optimizer, parameters, make_gradients(3))
    assert all(value.isfinite().all() for value in everything(optimizer).values())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("average", {"pullback_strength": 0.0, "ema_power": 0.0}),
        ("average", {"gap": "lookahead", "ema_power": 0.0}),
        ("returned", {"ema_power": 0.5, "return_power": 0.0}),
    ],
)
def test_averages_go_all_the_way_from_what_is_infinite(name, settings):
    (parameter,) = parameters = make_parameters(dtype=torch.float32, shapes=[(35,)])
    optimizer = run(parameters, make_gradients(2, shapes=[(35,)]), fused=True, **settings)
    optimizer.state[parameter][name].fill_(torch.inf)
    advance(optimizer, parameters, make_gradients(1, shapes=[(35,)]))
    assert torch.equal(optimizer.state[parameter][name], parameter.detach())


@pytest.mark.parametrize("gap", ["pre", "lookahead"])
@pytest.mark.parametrize("powers", [(1.0, 0.5), (0.5, 1.0)])
def test_averages_that_hardly_move_rest_beside_what_is_infinite(powers, gap):
    """A rate below half an ulp of 1 moves nothing; 0 times infinity would."""
    (parameter,) = parameters = make_parameters(dtype=torch.float32, shapes=[(35,)])
    settings = {"ema_power": powers[0], "return_power": powers[1], "gap": gap, "fused": True}
    optimizer = run(parameters, make_gradients(2, shapes=[(35,)]), **settings)
    state = optimizer.state[parameter]
    state["step"].fill_(2.0**31)
    state["average"].copy_(parameter.detach())  # no gap, no pull
    rests, moves = ("average", "returned") if powers[0] == 1.0 else ("returned", "average")
    before = {name: state[name].clone() for name in (rests, moves)}
    with torch.no_grad():
        parameter[[0, 20, 34]] = torch.inf
    advance(optimizer, parameters, make_gradients(1, shapes=[(35,)]))
    assert torch.equal(state[rests], before[rests])
    assert not torch.equal(state[moves], before[moves])


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("clang")), reason="needs gcc and clang")
def test_gcc_and_clang_make_the_same_of_it_to_the_bit(tmp_path):
    code = """
import sys
from problems import *
found = []
for name in ("default", "lookahead", "uniform"):
    for storage in ("float32", "bfloat16", "int8"):
        parameters = make_parameters(dtype=torch.float32, shapes=[(300,), (5, 7)])
        gradients = make_gradients(4, shapes=[(300,), (5, 7)])
        settings = {**VARIANTS[name], "average_dtype": storage, "return_power": 0.7}
        found.append(everything(run(parameters, gradients, fused=True, **settings)))
torch.save(found, sys.argv[1])
"""
    runs = []
    for compiler in ("gcc", "clang"):
        new = {"CC": compiler, "PACELINE_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-c", code, str(tmp_path / compiler)]
        subprocess.run(command, env={**os.environ, **new}, check=True)
        runs.append(torch.load(tmp_path / compiler))
    for ours, theirs in zip(*runs, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_gradient_spoils_its_own_coordinate_and_no_other(bad):
    parameters, steps = (
        make_parameters(dtype=torch.float32, shapes=[(40,)]),
        make_gradients(4, shapes=[(40,)]),
    )
    steps[2][0][7] = bad
    run(parameters, steps, fused=True)
    assert (~parameters[0].isfinite()).nonzero().tolist() == [[7]]


def test_states_go_from_any_path_to_any_other():
    """A state saved by one goes on in the other; the path is the optimizer's own, not the state's."""
    parameters, steps = make_parameters(dtype=torch.float32), make_gradients(12)
    fused = run(parameters, steps[:6], fused=True)
    state = fused.state_dict()
    again = [p.detach().clone().requires_grad_() for p in parameters]
    other = PACE(again, lr=1e-2, foreach=True)
    other.load_state_dict(state)
    assert other.param_groups[0]["fused"] is None
    back = [p.detach().clone().requires_grad_() for p in parameters]
    same = PACE(back, lr=1e-2, fused=True)
    same.load_state_dict(other.state_dict())
    assert same.param_groups[0]["fused"] is True
    for optimizer, own in ((fused, parameters), (other, again), (same, back)):
        advance(optimizer, own, steps[6:])
    assert_same_bits(everything(fused), everything(same))
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(parameters, again, strict=True))


@pytest.mark.parametrize("looks", ["in C", "in Python"])
@pytest.mark.parametrize("change", CHANGES_OF_MOMENTS)
def test_sums_of_second_moments_are_of_the_moments_as_they_are(change, looks, monkeypatch):
    """A step leaves them for the next. Who changes a moment in between changes its sum, by whatever way."""
    if looks == "in Python":
        monkeypatch.setattr(look, "functions", lambda: None)
    assert_same_bits(*with_and_without_memory(change, [(40, 40), (2000,), (5,)]))


def test_sums_of_second_moments_of_which_torch_counts_no_changes():
    """Tensors of inference mode have no versions."""
    found = []
    for inference in (False, True):
        parameters, steps = make_parameters(dtype=torch.float32), make_gradients(5)
        optimizer = PACE(parameters, lr=1e-2, fused=True)
        advance(optimizer, parameters, steps[:2])
        with torch.inference_mode(inference):
            for state in optimizer.state.values():
                state["exp_avg_sq"] = state["exp_avg_sq"].clone()
            advance(optimizer, parameters, steps[2:4])
            for state in optimizer.state.values():
                state["exp_avg_sq"].mul_(9.0)
            advance(optimizer, parameters, steps[4:])
        found.append(everything(optimizer))
    assert_same_bits(*found)


def test_the_average_is_shown_and_hidden_as_on_any_path():
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(5), fused=True)
    live = [p.detach().clone() for p in parameters]
    with averaged_weights(optimizer):
        assert not torch.equal(parameters[0], live[0])
    assert all(torch.equal(p, before) for p, before in zip(parameters, live, strict=True))
    advance(optimizer, parameters, make_gradients(2))


def test_a_learning_rate_as_a_tensor():
    ours, theirs = (make_parameters(dtype=torch.float32) for _ in range(2))
    steps = make_gradients(5)
    run(ours, steps, fused=True, lr=torch.tensor(1e-2))
    run(theirs, steps, fused=True, lr=1e-2)
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"foreach": True}, "foreach=True"),
        ({"differentiable": True}, "differentiable=True"),
        ({"gain": "relative", "pullback_strength": 0.5}, 'gain="relative"'),
        ({"fused": "yes"}, "'yes'"),
    ],
)
def test_settings_that_exclude_it_are_refused_at_once(settings, words):
    with pytest.raises(ValueError, match=words):
        PACE(make_parameters(dtype=torch.float32), **{"fused": True, **settings})


def test_parameters_that_cannot_take_it_are_named():
    double = PACE(make_parameters(), fused=True)
    set_gradients(double.param_groups[0]["params"], make_gradients(1)[0])
    with pytest.raises(
        RuntimeError, match=r"parameter 0 of group 0 is torch.float64; fused=True on a CPU is for float32"
    ):
        double.step()
    gaps = torch.zeros(4, 6)[:, ::2].requires_grad_()
    optimizer = PACE([gaps], fused=True)
    gaps.grad = torch.ones(4, 3)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="without gaps"):
        optimizer.step()
    assert_same_bits(before, everything(optimizer))


def test_without_a_compiler_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no compiler to build it"):
        native._built()
    monkeypatch.setenv("CC", sys.executable + " -c raise(SystemExit(3))")
    with pytest.raises(RuntimeError, match=r"needs native\.c, which .* could not build"):
        native._built()
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.long
def test_processes_that_build_it_at_once_all_get_it(tmp_path):
    code = "from paceline.optim import native; print(native._built())"
    environment = {**os.environ, "PACELINE_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=120)[0].strip() for process in both}
    assert len(paths) == 1 and all(process.returncode == 0 for process in both)
    assert ctypes.CDLL(paths.pop()).paceline_step
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own(threads, monkeypatch):
    """A pool of threads does not survive a fork; the child must not wait for it."""
    monkeypatch.setattr(native, "FEWEST", 10)
    threads(2)
    parameters, steps = make_parameters(dtype=torch.float32), make_gradients(4)
    optimizer = run(parameters, steps[:2], fused=True)
    child = os.fork()
    if child == 0:
        advance(optimizer, parameters, steps[2:])
        os._exit(0)
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        pytest.fail("the child hangs")
    assert status == 0


@pytest.mark.parametrize("called", ["paceline_step", "paceline_sums"])
def test_what_c_works_on_is_held_while_it_does(called, monkeypatch):
    """Other threads go on meanwhile, and may replace a state."""
    parameter = torch.ones(10).requires_grad_()
    optimizer = PACE([parameter], lr=1e-2, fused=True)
    real, seen = native._Arrays.call, []

    def call(arrays, function, *more):
        if optimizer.state[parameter]["step"].item() > 1 and function is getattr(native._library(), called):
            there = weakref.ref(optimizer.state[parameter]["exp_avg_sq"])
            optimizer.state[parameter]["exp_avg_sq"] = torch.ones(10)
            seen.append(there() is not None)
        real(arrays, function, *more)

    monkeypatch.setattr(native._Arrays, "call", call)
    for _ in range(3):
        parameter.grad = torch.ones(10)
        optimizer.step()
        optimizer.state[parameter]["exp_avg_sq"].add_(1)  # so that they are added up anew
    assert seen and all(seen)
