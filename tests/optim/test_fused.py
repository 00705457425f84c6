"""The kernel next to the float64 reference, in Triton's interpreter where there is no GPU.

Every control in float32 is in test_rule.py; here are precisions, storages, sizes, memory, and what changes
between steps.
"""

import copy

import numpy as np
import pytest
import torch
from problems import (
    BYTES,
    CONTROLS,
    advance,
    assert_same_bits,
    copies,
    everything,
    make_gradients,
    make_parameters,
    parameters_of,
    run,
    same,
    set_gradients,
)
from reference import Reference, array, averages_of, distances, references
from torch import nn

from paceline import PACE, Control, averaged_weights
from paceline.optim import fused as fused_path
from paceline.optim.storage import RESIDUALS, SALTS, encode_, scale_count

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy's, in the interpreter
PUSH = Control.push()
SIZES = [(1,), (127,), (3, 100), (0, 2)]  # less and more than a chunk, and than a block of a scale


def fused(device, dtype=torch.float32, shapes=SIZES, **settings):
    """Return parameters and their optimizer, which takes the fused path."""
    parameters = [p.to(device).detach().requires_grad_() for p in make_parameters(0, dtype, shapes)]
    return parameters, PACE(parameters, **{"lr": 1e-2, "control": PUSH, "fused": True, **settings})


def ulp(values, dtype):
    """Return the distance of neighbours at these values."""
    info = torch.finfo(dtype)
    sizes = np.maximum(np.abs(values), info.smallest_normal)
    return 2.0 ** np.floor(np.log2(sizes)) * info.eps


# --- Precisions and storages ------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", BYTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_is_the_references_and_rounds_once(dtype, storage, kernel):
    check_steps(kernel, dtype, storage, SIZES)


def check_steps(device, dtype, storage, shapes):
    """Compare two steps, each from the state before it, with the reference.

    Weights and moments are right to half a unit; averages are of the weights as they are stored.
    """
    parameters, optimizer = fused(device, dtype, shapes, average_dtype=storage, eps=1e-3)
    part = 1.0 if (device, dtype) == ("cpu", torch.bfloat16) else 0.5  # the interpreter cuts bits off
    for t, gradients in enumerate(make_gradients(2, shapes=shapes), 1):
        before = [references_at(optimizer, p, PUSH, eps=1e-3) for p in parameters]
        advance(optimizer, parameters, [gradients])
        for parameter, reference in zip(parameters, before, strict=True):
            state, limit = optimizer.state[parameter], 2e-6 * (1 + np.abs(reference.live))
            reference.step(array(parameter.grad))
            moved = {"m": state["exp_avg"], "v": state["exp_avg_sq"], "live": parameter}
            for name, tensor in moved.items():
                off = np.abs(array(tensor) - getattr(reference, name))
                assert (off <= part * ulp(getattr(reference, name), dtype) + limit).all(), name
            assert state["step"].item() == t
            for name, average in averages_of(optimizer, parameter).items():
                rate, old = reference.rate(PUSH.powers[SALTS[name]]), reference.kept[name]
                exact = (1 - rate) * old + rate * array(parameter)
                check_average(state, name, average, array(parameter), exact, storage, t)


def references_at(optimizer, parameter, control, **settings):
    """Return a reference at the present state of a parameter."""
    found, state = Reference(array(parameter), control, lr=1e-2, **settings), optimizer.state[parameter]
    found.kept = {"average": found.live, "returned": found.live}
    if state:
        found.m, found.v, found.t = array(state["exp_avg"]), array(state["exp_avg_sq"]), int(state["step"])
        found.kept = {name: array(value) for name, value in averages_of(optimizer, parameter).items()}
    found.average, found.returned = found.kept["average"], found.kept["returned"]
    return found


def check_average(state, name, average, live, exact, storage, t):
    """Compare an average, and its codes with those that storage.py makes of the exact residual."""
    if storage == "float32":
        assert np.abs(array(average) - exact).max(initial=0) <= 2e-6 * np.abs(exact).max(initial=1)
        return
    residual = torch.tensor(live - exact, dtype=torch.float32)
    codes = torch.empty_like(residual, dtype=RESIDUALS[storage].dtype)
    scale = torch.empty(scale_count(residual.numel())) if storage == "int8" else None
    unit = residual.abs().max().item() * {"bfloat16": 2**-7, "int8": 1 / 127}[storage] if live.size else 0
    encode_(codes, scale, residual, torch.tensor(float(t)), SALTS[name])
    if scale is not None:
        assert torch.allclose(state[f"{name}_scale"].cpu(), scale, rtol=2e-4)
    # A residual that another order of operations moves by its last bit may be rounded to the other side.
    alike = state[f"{name}_residual"].cpu() == codes
    assert np.abs(array(average) - exact).max(initial=0) <= 1.01 * unit + 2e-6
    assert alike.double().mean() > 0.95 or alike.numel() < 100


@pytest.mark.parametrize("storage", BYTES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_spoils_its_own_coordinate_or_block(storage, bad, kernel):
    """In what is kept as well, also where live is written over later."""
    parameters, optimizer = fused(kernel, shapes=[(300,)], average_dtype=storage, control=CONTROLS["paper"])
    (gradients,) = make_gradients(1, shapes=[(300,)])
    gradients[0][130] = bad
    advance(optimizer, parameters, [gradients])
    spoiled, (state,) = torch.arange(300) == 130, optimizer.state.values()
    assert torch.equal(~parameters[0].isfinite().cpu(), spoiled)
    if storage == "int8":
        assert state["average_scale"].isnan().tolist() == [False, True, False]
        spoiled[128:256] = True
    else:
        kept = state["average" if storage == "float32" else "average_residual"]
        assert torch.equal(~kept.isfinite().cpu(), spoiled)
    (average,) = averages_of(optimizer, parameters[0]).values()
    assert torch.equal(~average.isfinite().cpu(), spoiled)


def test_an_average_that_rests_is_not_spoiled(kernel):
    parameters, optimizer = fused(kernel, shapes=[(3,)], control=Control.push(every=3))
    start = copies(parameters)
    advance(optimizer, parameters, [[torch.tensor([0.1, float("inf"), 0.2])]])
    assert parameters[0].isfinite().tolist() == [True, False, True]
    assert torch.equal(optimizer.state[parameters[0]]["average"], start[0])


@pytest.mark.parametrize("storage", BYTES)
def test_nothing_is_written_next_to_what_is_kept(storage, kernel, monkeypatch):
    """Of a chunk that is larger than its tensor, with 0/0 and another block of scales behind its end."""
    from paceline.optim import triton_kernel  # not above: Triton may be missing

    monkeypatch.setattr(triton_kernel, "TILES", dict.fromkeys(triton_kernel.TILES, (256, 4)))
    parameters, optimizer = fused(kernel, shapes=[(100,)], average_dtype=storage, eps=0.0)
    advance(optimizer, parameters, make_gradients(1, shapes=[(100,)]))
    state, memory = optimizer.state[parameters[0]], {}
    for key in state.keys() - {"step"}:
        memory[key] = torch.full((state[key].numel() + 300,), 7, dtype=state[key].dtype, device=kernel)
        memory[key][: state[key].numel()] = state[key]
        state[key] = memory[key][: state[key].numel()]
    advance(optimizer, parameters, make_gradients(1, shapes=[(100,)]))
    for key, whole in memory.items():
        assert (whole[state[key].numel() :] == 7).all() and state[key].isfinite().all(), key


def test_averages_begin_as_live_whatever_their_memory_holds(kernel):
    """A step by which torch learns the names of a state leaves NaN in it."""
    parameters, optimizer = fused(kernel, shapes=[(5,)], lr=0.0)
    advance(optimizer, parameters, [[torch.zeros(5)]])
    assert optimizer.state[parameters[0]]["average"].isnan().all()
    optimizer.param_groups[0]["lr"] = 1e-2
    others, other = fused(kernel, shapes=[(5,)])
    for p, each in ((parameters, optimizer), (others, other)):
        advance(each, p, make_gradients(2, shapes=[(5,)]))
    assert_same_bits(everything(optimizer), everything(other))


# --- Memory -----------------------------------------------------------------------------------------------

LAYOUTS = {
    "aligned": lambda x: x.clone(),
    "behind one element": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "transposed": lambda x: x.t().contiguous().t(),
    "channels last": lambda x: x.clone().view(1, *x.shape, 1).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_how_weights_and_gradients_lie_makes_no_difference(storage, kernel):
    """Whether they are a multiple of 16 bytes away, or in another order; gradients may lie anew each time."""
    found = {}
    for name, lay in LAYOUTS.items():
        start = make_parameters(0, torch.float32, [(3, 5)])[0].detach().to(kernel)
        parameter = nn.Parameter(lay(start))
        optimizer, memory = PACE([parameter], 1e-2, control=PUSH, fused=True, average_dtype=storage), []
        for (gradient,) in make_gradients(2, shapes=[(3, 5)]):
            parameter.grad = lay(gradient.to(start))
            memory.append(parameter.grad)  # so that the next one lies elsewhere
            optimizer.step()
        assert parameter.stride() == memory[0].stride() and "path: fused" in repr(optimizer)
        found[name] = parameter.detach().view(3, 5)
    for name, value in found.items():
        order_counts = storage != "float32" and name in ("transposed", "channels last")  # what is random
        assert (
            torch.allclose(value, found["aligned"], rtol=1e-3)
            if order_counts
            else same([value], [found["aligned"]])
        )


@pytest.mark.parametrize("lr", [torch.tensor(0.01, dtype=torch.float64), torch.tensor([0.01])], ids=str)
def test_gradients_and_rates_that_move_are_followed(lr, kernel):
    """Gradients lie anew or where they were; the rate is changed in place, or in the group."""
    for anew in (False, True):
        parameters, optimizer = fused(kernel, shapes=[(3, 43), (5,)], lr=copy.deepcopy(lr))
        expected = references(parameters, PUSH)
        group, memory = optimizer.param_groups[0], []
        for k, gradients in enumerate(make_gradients(3, shapes=[(3, 43), (5,)])):
            if anew or k == 0:
                set_gradients(parameters, gradients)
                memory += [p.grad for p in parameters]  # so that the next ones lie elsewhere
            for parameter, gradient, reference in zip(parameters, gradients, expected, strict=True):
                parameter.grad.copy_(gradient)
                reference.lr = 0.01 / (1 + k)
                reference.step(array(parameter.grad))
            if anew:
                group["lr"] = 0.01 / (1 + k)
            else:
                group["lr"].fill_(0.01 / (1 + k))
            optimizer.step()
        found = distances(optimizer, parameters, expected)
        assert max(found.values()) < 2e-6, found


def test_many_tensors_of_unequal_age(kernel, monkeypatch):
    """Several programs count the steps, of which each tensor has its own number."""
    monkeypatch.setattr(fused_path, "_TENSORS", 4)
    shapes, control = [(i % 3 + 1,) for i in range(9)], CONTROLS["two averages"]
    parameters, optimizer = fused(kernel, shapes=shapes, control=control)
    expected = references(parameters, control, lr=1e-2)
    for t, gradients in enumerate(make_gradients(4, shapes=shapes)):
        gradients = [None if (i + t) % 4 == 0 else gradient for i, gradient in enumerate(gradients)]
        advance(optimizer, parameters, [gradients])
        for parameter, reference in zip(parameters, expected, strict=True):
            reference.step(None if parameter.grad is None else array(parameter.grad))
    assert [optimizer.state[p]["step"].item() for p in parameters] == [r.t for r in expected]
    found = distances(optimizer, parameters, expected)
    assert len(found) == 5 and max(found.values()) < 2e-6, found


# --- Between steps ----------------------------------------------------------------------------------------


def show(optimizer):
    with averaged_weights(optimizer):
        pass


def reload(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def replace(optimizer):
    for parameter in parameters_of(optimizer):
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("storage", ["float32", "int8"])
@pytest.mark.parametrize("change", [show, reload, replace])
def test_what_moves_weights_and_state_in_memory_changes_no_bit(change, storage, kernel):
    found = []
    for disturbed in (False, True):
        parameters, optimizer = fused(kernel, shapes=[(7,), (3,)], average_dtype=storage)
        for gradients in make_gradients(3, shapes=[(7,), (3,)]):
            advance(optimizer, parameters, [gradients])
            if disturbed:
                change(optimizer)
        found.append(everything(optimizer))
    assert_same_bits(*found)


def test_settings_that_change_are_followed_and_paths_continue_each_others_states(kernel):
    """Two steps on each of three paths, the control and betas changed on the way."""
    found, shapes = [], [(3, 3)]
    for paths in ([{"foreach": True}] * 3, [{"fused": True}, {"foreach": False}, {"fused": True}]):
        parameters, optimizer = fused(kernel, shapes=shapes)
        for k, path in enumerate(paths):
            optimizer.param_groups[0] |= {"foreach": None, "fused": None, **path}
            control = Control.push(power=0.3 + 0.2 * k)
            optimizer.param_groups[0] |= {"betas": (0.9, 0.99 - 0.01 * k), "control": control}
            advance(optimizer, parameters, make_gradients(2, seed=k, shapes=shapes))
        found.append(everything(optimizer))
    assert found[0].keys() == found[1].keys()
    assert all(
        torch.allclose(a.cpu(), found[1][key].cpu(), rtol=2e-6, atol=2e-6) for key, a in found[0].items()
    )


def test_it_is_taken_unless_another_path_is_asked_for(kernel):
    (parameter,) = make_parameters(0, torch.float32, [(3,)])
    for settings, path in (({}, "fused"), ({"foreach": True}, "foreach"), ({"fused": False}, "foreach")):
        moved = parameter.detach().to(kernel).requires_grad_()
        assert f"path: {path}" in repr(run([moved], make_gradients(1, shapes=[(3,)]), **settings))


REFUSED = {
    "float64": (lambda p: p.double(), torch.clone, "is torch.float64; fused=True is for float32"),
    "another order": (torch.clone, lambda g: g.t().contiguous().t(), "do not lie alike in memory"),
    "gaps": (lambda p: torch.stack([p, p], -1)[..., 0], torch.clone, "do not lie alike in memory"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_it_cannot_take_is_refused_by_name_or_goes_another_way(kind, kernel):
    make, lay, words = REFUSED[kind]
    start = make_parameters(0, torch.float32, [(4, 3)])[0].detach().to(kernel)
    for own in ({"fused": True}, {}):
        parameter = nn.Parameter(make(start))
        optimizer = PACE([("it", parameter)], **own)
        parameter.grad = lay(torch.ones_like(parameter))
        if own:
            with pytest.raises(RuntimeError, match=f"parameter 'it' .*{words}"):
                optimizer.step()
            assert same([parameter], [start.to(parameter)])
        else:
            optimizer.step()
            assert "path: foreach" in repr(optimizer)
