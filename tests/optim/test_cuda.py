"""What only a GPU can show: real sizes, graphs, waiting for the device, memory, and torch's own kernels.

    pytest tests/optim/test_cuda.py tests/optim/test_fused.py

The second file is run by the kernel instead of its interpreter then.
"""

import copy
import io
import sys
from pathlib import Path

import pytest
import torch
from battery import ROWS, Problem, rows
from problems import (
    BYTES,
    CONTROLS,
    advance,
    assert_same_bits,
    copies,
    everything,
    make_gradients,
    make_parameters,
    same,
    set_gradients,
)
from reference import array, distances, references
from test_fused import check_steps

import paceline
from paceline import PACE, Control, attach, averaged_weights

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PUSH = Control.push()
LARGE = [(1_000_003,), (1024, 1024), (777, 333), ()]
SMALL = [(64, 33), (129,), (), (5, 3, 7)]
NAMES = ("push", "clipped at half", "every 3, pulled at every 2", "lookahead", "none")
names = pytest.mark.parametrize("name", NAMES)


def on_device(dtype=torch.float32, shapes=SMALL):
    return [p.detach().to(DEVICE).requires_grad_() for p in make_parameters(0, dtype, shapes)]


def gradients_on_device(steps, seed=1, shapes=SMALL):
    return [
        [gradient.to(DEVICE).float() for gradient in step] for step in make_gradients(steps, seed, shapes)
    ]


def pace(parameters, control=PUSH, **settings):
    return PACE(parameters, **{"lr": 1e-2, "control": control, "fused": True, **settings})


def on_host(optimizer):
    return {key: value.cpu() for key, value in everything(optimizer).items()}


# --- The update -------------------------------------------------------------------------------------------


@names
def test_the_kernel_is_the_reference_at_real_sizes(name):
    parameters = on_device(shapes=LARGE)
    expected, optimizer = references(parameters, CONTROLS[name], lr=1e-2), pace(parameters, CONTROLS[name])
    for gradients in make_gradients(4, shapes=LARGE):
        advance(optimizer, parameters, [gradients])
        for parameter, reference in zip(parameters, expected, strict=True):
            reference.step(array(parameter.grad))
    found = distances(optimizer, parameters, expected)
    assert len(found) >= 4 and max(found.values()) <= 2e-6, found


@pytest.mark.parametrize("storage", BYTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precisions_and_storages_at_real_sizes(dtype, storage):
    check_steps(DEVICE, dtype, storage, LARGE[:1] + LARGE[2:])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_a_control_foreach_and_loop_are_adamw_to_the_bit(dtype, foreach):
    gradients, ours, theirs = gradients_on_device(50), on_device(dtype), on_device(dtype)
    advance(pace(ours, Control.none(), fused=False, foreach=foreach), ours, gradients)
    advance(torch.optim.AdamW(theirs, lr=1e-2, foreach=foreach), theirs, gradients)
    assert same(ours, theirs)


def test_without_a_control_the_kernel_is_fused_adamw_to_a_unit():
    """From equal states at every step; both round once or twice where they add up."""
    ours, theirs = on_device(shapes=LARGE[:1]), on_device(shapes=LARGE[:1])
    optimizer, adamw = pace(ours, Control.none()), torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for gradients in gradients_on_device(20, shapes=LARGE[:1]):
        advance(optimizer, ours, [gradients])
        advance(adamw, theirs, [gradients])
        units = (ours[0].detach().view(torch.int32) - theirs[0].detach().view(torch.int32)).abs()
        near_0 = theirs[0].detach().abs() < 0.25  # a number close to 0 is the difference of larger ones
        # Four: a weight that falls below a power of 2 was rounded in units twice as large.
        assert units[~near_0].max() <= 4 and (units[~near_0] <= 1).double().mean() > 0.999
        assert (ours[0] - theirs[0])[near_0].abs().max() < 3e-8
        with torch.no_grad():
            ours[0].copy_(theirs[0])
            for key in ("exp_avg", "exp_avg_sq"):
                mine, its = optimizer.state[ours[0]][key], adamw.state[theirs[0]][key]
                assert torch.allclose(mine, its, rtol=1e-6, atol=1e-6)
                mine.copy_(its)


@rows
def test_every_row_is_the_same_on_both_devices(name):
    """To rounding, of which Muon does much in bfloat16; what is rounded at random may hang by a hair."""
    is_narrow = any(word in name for word in ("fused", "bfloat16", "int8"))
    dtype = torch.float32 if is_narrow else torch.float64
    tolerance = 3e-2 if "Muon" in name else 2e-3 if is_narrow else 1e-9
    here, there = (Problem(name, dtype, device=device).run(20) for device in ("cpu", DEVICE))
    for parameter, other in zip(here.parameters, there.parameters, strict=True):
        assert (parameter - other.cpu()).abs().max() <= tolerance
    if ROWS[name].keeps_average:
        with averaged_weights(here.optimizer), averaged_weights(there.optimizer):
            for parameter, other in zip(here.parameters, there.parameters, strict=True):
                assert (parameter - other.cpu()).abs().max() <= tolerance


def test_more_elements_than_an_int32_counts():
    """The end of a tensor of 8 GiB moves as it would alone."""
    size = 2**31 + 1000
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of memory")
    found = []
    for count in (size, 1000):
        parameter = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE)
        parameter[-1000:] = torch.linspace(-1, 1, 1000)
        parameter.requires_grad_().grad = torch.zeros_like(parameter)
        parameter.grad[-1000:] = torch.linspace(2, -1, 1000)
        optimizer = pace([parameter], CONTROLS["two averages"])
        for _ in range(2):
            optimizer.step()
        kept = {key: value[-1000:].clone() for key, value in optimizer.state[parameter].items() if value.ndim}
        found.append({"live": parameter.detach()[-1000:].clone(), **kept})
        del parameter, optimizer, kept
        torch.cuda.empty_cache()
    assert_same_bits(*found)


# --- Graphs -----------------------------------------------------------------------------------------------


def captured(optimizer):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


def fill(parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad.copy_(gradient)


@pytest.mark.parametrize("storage", ["float32", "int8"])
@names
def test_a_captured_graph_replays_the_eager_steps(name, storage):
    """At rates that change on the device, with averages shown and other steps between replays."""
    steps, others = gradients_on_device(12), gradients_on_device(4, seed=5)
    found = []
    for is_captured in (False, True):
        parameters, lr = on_device(), torch.tensor(1e-2, device=DEVICE)
        optimizer = pace(parameters, CONTROLS[name], lr=lr, average_dtype=storage)
        set_gradients(parameters, [gradient.clone() for gradient in steps[0]])
        own = [parameter.grad for parameter in parameters]
        optimizer.step()
        if is_captured:
            before = on_host(optimizer)
            graph = captured(optimizer)
            assert_same_bits(before, on_host(optimizer))  # capturing runs nothing
        for k, gradients in enumerate(steps[1:]):
            fill(parameters, gradients)
            lr.fill_(1e-2 / (1 + k))
            if is_captured:
                graph.replay()
            else:
                optimizer.step()
            if k % 3 == 1:  # whatever a graph should still read, and does not own, would be overwritten
                with averaged_weights(optimizer):
                    taken = [torch.full((1000,), 1e9, device=DEVICE) for _ in range(50)]
                del taken
            if k % 4 == 2:  # an eager step, whose gradients lie elsewhere
                set_gradients(parameters, others[k // 4])
                optimizer.step()
                set_gradients(parameters, own)
        torch.cuda.synchronize()
        found.append(on_host(optimizer))
    assert_same_bits(*found)


def test_averages_stay_where_a_graph_reads_them():
    parameters = on_device()
    optimizer = pace(parameters)
    set_gradients(parameters, gradients_on_device(1)[0])
    optimizer.step()
    graph = captured(optimizer)
    places = lambda: [v.data_ptr() for p in parameters for v in optimizer.state[p].values()]  # noqa: E731
    before = places()
    with averaged_weights(optimizer):
        pass
    assert places() == before
    graph.replay()
    torch.cuda.synchronize()
    assert optimizer.state[parameters[0]]["step"].item() == 2


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_that_cannot_be_replayed_is_refused_and_changes_nothing():
    gradients, found = gradients_on_device(1)[0], []
    for captures in (False, True):
        parameters = on_device()
        optimizer = pace(parameters)
        set_gradients(parameters, gradients)
        if captures:
            with pytest.raises(RuntimeError, match="take one step before you capture"):
                captured(optimizer)
        optimizer.step()
        if captures:
            captured(optimizer)
            with pytest.raises(RuntimeError, match="between two captures"):
                captured(optimizer)
        optimizer.step()
        if captures:
            captured(optimizer).replay()
            torch.cuda.synchronize()
        else:
            optimizer.step()
        found.append(on_host(optimizer))
    assert_same_bits(*found)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("name", ["PACE foreach", "AdamW pushed"])
def test_steps_that_are_counted_on_the_host_cannot_be_captured(name):
    parameters = on_device()
    optimizer = advance(OPTIMIZERS[name](parameters), parameters, gradients_on_device(1))
    before = on_host(optimizer)
    with pytest.raises(RuntimeError, match="on the host"):
        captured(optimizer)
    assert_same_bits(before, on_host(optimizer))


# --- What a step costs ------------------------------------------------------------------------------------


def beside(base):
    return lambda parameters: attach(base(parameters), control=PUSH, average_dtype="int8")


OPTIMIZERS = {
    **{f"PACE {storage}": lambda p, s=storage: pace(p, average_dtype=s) for storage in BYTES},
    "PACE, rate on the device": lambda p: pace(p, lr=torch.tensor(1e-2, device=DEVICE)),
    "PACE foreach": lambda p: pace(p, CONTROLS["paper"], fused=False, foreach=True),
    "AdamW pushed": beside(lambda p: torch.optim.AdamW(p, fused=True)),
    "SGD pushed": beside(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_steady_step_waits_for_the_device(name):
    """Also where gradients lie elsewhere and the rate has changed."""
    parameters, memory = on_device(), gradients_on_device(4)
    optimizer = advance(OPTIMIZERS[name](parameters), parameters, memory[:2])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        set_gradients(parameters, memory[2])
        if not isinstance(optimizer.param_groups[0]["lr"], torch.Tensor):
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_steady_step_enters_six_of_our_files():
    parameters, entered = on_device(), set()
    optimizer = advance(pace(parameters), parameters, gradients_on_device(2))

    def note(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(Path(paceline.__file__).parent):
            entered.add(file)

    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    assert 0 < len(entered) <= 6, entered


@pytest.mark.parametrize("storage", BYTES)
def test_memory_is_the_state_and_no_more(storage):
    """Moments, two averages, and a list of chunks; a step makes nothing of the size of the weights."""
    size = 2**24
    parameter = torch.ones(size, device=DEVICE).requires_grad_()
    parameter.grad = torch.ones_like(parameter)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer = pace([parameter], average_dtype=storage)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    kept = sum(value.nbytes for value in optimizer.state[parameter].values())
    assert abs(kept - size * (8 + 2 * BYTES[storage])) <= 64
    assert torch.cuda.memory_allocated() - before <= kept * 1.01 + 2**20
    torch.cuda.reset_peak_memory_stats()
    steady = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - steady <= 2**16


def test_foreach_needs_two_temporaries():
    parameters = [torch.randn(1024, 1024, device=DEVICE).requires_grad_() for _ in range(8)]
    optimizer = pace(parameters, fused=False, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 2 * 8 * 4 * 2**20 + 2**16


# --- States and trainers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", BYTES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_run_resumes_to_the_bit_and_on_a_cpu(storage, inside):
    """Saved outside, or while the average is shown."""
    steps, parameters = gradients_on_device(8), on_device()
    optimizer = advance(pace(parameters, average_dtype=storage), parameters, steps[:4])
    file = io.BytesIO()
    if inside:
        with averaged_weights(optimizer):
            torch.save([copies(parameters), optimizer.state_dict()], file)
    else:
        torch.save([copies(parameters), optimizer.state_dict()], file)
    advance(optimizer, parameters, steps[4:])
    for device in (DEVICE, "cpu"):
        file.seek(0)
        weights, state = torch.load(file, weights_only=True, map_location=device)
        resumed = [weight.requires_grad_() for weight in weights]
        other = pace(resumed, average_dtype=storage, fused=None)
        other.load_state_dict(state)
        advance(other, resumed, steps[4:])
        if device == DEVICE:
            assert "path: fused" in repr(other)
            assert_same_bits(on_host(optimizer), on_host(other))
        for parameter, again in zip(parameters, resumed, strict=True):
            assert torch.allclose(
                parameter.cpu(), again.cpu(), rtol=1e-5, atol=1e-2 if storage != "float32" else 1e-6
            )


def test_a_model_moves_between_devices():
    model = torch.nn.Linear(4, 3)
    optimizer = PACE(model.parameters(), lr=1e-2, control=PUSH)
    for k, device in enumerate((DEVICE, "cpu", DEVICE), 1):
        model.to(device)
        optimizer.zero_grad()
        model(torch.ones(2, 4, device=device)).sum().backward()
        optimizer.step()
        state = optimizer.state[model.weight]
        assert {state[key].device.type for key in ("exp_avg", "average", "returned")} == {device}
        assert state["step"].item() == k and state["step"].device.type == device
        with averaged_weights(optimizer):
            assert torch.equal(model.weight, state["returned"])


SCALED = {
    "PACE": lambda p: pace(p),
    "AdamW": lambda p: attach(torch.optim.AdamW(p, 1e-2), control=PUSH),
    "fused AdamW": lambda p: attach(torch.optim.AdamW(p, 1e-2, fused=True), control=PUSH),
}


@pytest.mark.parametrize("name", SCALED)
def test_grad_scaler_skips_whole_steps(name):
    """Steps 0 to 4, of which the third overflows: as without it."""
    scaler, found = torch.amp.GradScaler(DEVICE, init_scale=1024.0), []
    for skips in (False, True):
        parameters = on_device()
        optimizer = SCALED[name](parameters)
        for k, gradients in enumerate(gradients_on_device(5)):
            if skips and k == 2:
                set_gradients(parameters, [torch.full_like(p, float("inf")) for p in parameters])
                before = on_host(optimizer)
                scaler.scale(torch.ones((), device=DEVICE))
                scaler.step(optimizer)
                scaler.update()
                assert_same_bits(before, on_host(optimizer))
            set_gradients(parameters, [scaler.scale(gradient) for gradient in gradients])
            scaler.step(optimizer)
            scaler.update()
        found.append(on_host(optimizer))
    for key, value in found[0].items():
        assert torch.allclose(value, found[1][key], rtol=1e-6, atol=1e-7), key


def test_a_graph_reads_on_what_was_replaced():
    """A state that is moved away and back leaves a graph with its own memory; both can be used."""
    parameters = on_device()
    optimizer = pace(parameters)
    set_gradients(parameters, gradients_on_device(1)[0])
    optimizer.step()
    graph, state = captured(optimizer), optimizer.state[parameters[0]]
    kept = [copy.copy(optimizer.state[p]) for p in parameters]
    for entries in map(optimizer.state.get, parameters):
        entries.update({key: value.clone() for key, value in entries.items()})
    optimizer.step()
    places = [[value.data_ptr() for value in entries.values()] for entries in (kept[0], state)]
    assert all(a != b for a, b in zip(*places, strict=True))
    graph.replay()
    torch.cuda.synchronize()
    assert [entries["step"].item() for entries in (kept[0], state)] == [2, 2]
