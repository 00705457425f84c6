"""What only a GPU can show; skipped without one. The last run is in records/."""

import copy
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from battery import ROWS, Problem, averaging_rows, rows
from problems import (
    PATHS,
    VARIANTS,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    set_gradients,
)
from reference import Reference, step_model
from torch import optim

from paceline import PACE, Pullback, averaged_state_dict, averaged_weights, reset_average

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = [(64, 33), (129,), (), (5, 3, 7)]


def on_gpu(seed=0, dtype=torch.float32):
    return [p.detach().cuda().requires_grad_() for p in make_parameters(seed, dtype, SHAPES)]


def gradients_on_gpu(steps, seed=1):
    return [[g.cuda() for g in step] for step in make_gradients(steps, seed, SHAPES)]


def run(parameters, gradients, **settings):
    optimizer = PACE(parameters, **{"lr": 1e-2, "gain": "paper", **settings})
    advance(optimizer, parameters, gradients)
    return optimizer


def on_cpu(flat):
    return {k: v.cpu() for k, v in flat.items()}


def test_foreach_is_the_default():
    optimizer = PACE(on_gpu())
    from paceline.optim.work import _takes_foreach

    assert _takes_foreach(optimizer.param_groups[0], optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", VARIANTS)
def test_against_the_reference(name, dtype, tolerance, foreach, capturable):
    parameters, gradients = on_gpu(dtype=dtype), gradients_on_gpu(25)
    references = [Reference(p.detach().cpu().numpy(), **{"lr": 1e-2, **VARIANTS[name]}) for p in parameters]
    optimizer = run(parameters, gradients, foreach=foreach, capturable=capturable, **VARIANTS[name])
    for step in gradients:
        step_model(references, [gradient.to(dtype).cpu().double().numpy() for gradient in step])
    for p, reference in zip(parameters, references, strict=True):
        state = optimizer.state[p]
        assert state["step"].device.type == ("cuda" if capturable else "cpu")
        for ours, theirs in ((p, reference.live), (state["average"], reference.average)):
            error = np.abs(ours.detach().double().cpu().numpy() - theirs).max()
            assert error <= tolerance * np.abs(theirs).max()


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_strength_0_is_adamw(dtype, foreach):
    gradients = gradients_on_gpu(200)
    ours, theirs = on_gpu(dtype=dtype), on_gpu(dtype=dtype)
    run(ours, gradients, pullback_strength=0.0, foreach=foreach)
    advance(torch.optim.AdamW(theirs, lr=1e-2, foreach=foreach), theirs, gradients)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", VARIANTS)
def test_foreach_is_the_loop_to_rounding(name):
    gradients = gradients_on_gpu(25)
    loop, lists = (run(on_gpu(), gradients, foreach=f, **VARIANTS[name]) for f in PATHS)
    for a, b in zip(everything(loop).values(), everything(lists).values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


CAPTURED = [
    (name, path)
    for name in ("strong", "scaled", "lookahead", "every_3", "return_power")
    for path in ({"foreach": False}, {"foreach": True}, {"fused": True})
]


@pytest.mark.parametrize(("name", "path"), CAPTURED)
def test_a_captured_graph_replays_the_eager_steps(name, path):
    lr = torch.tensor(1e-2, device="cuda")
    static = [g.clone() for g in gradients_on_gpu(1)[0]]
    parameters = on_gpu()
    optimizer = PACE(parameters, capturable=True, **path, **{**VARIANTS[name], "lr": lr})
    gradients = gradients_on_gpu(20)
    for p, g in zip(parameters, static, strict=True):
        p.grad = g.float()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in gradients[:3]:
            for p, g in zip(parameters, step, strict=True):
                p.grad.copy_(g)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    before = copy.deepcopy(everything(optimizer))
    with torch.cuda.graph(graph):
        optimizer.step()
    assert_same_bits(on_cpu(before), on_cpu(everything(optimizer)))  # capturing runs nothing
    for i, step in enumerate(gradients[3:]):
        for p, g in zip(parameters, step, strict=True):
            p.grad.copy_(g)
        lr.fill_(1e-2 / (1 + i))
        graph.replay()
    torch.cuda.synchronize()

    eager = on_gpu()
    settings = {**VARIANTS[name], "lr": torch.tensor(1e-2, device="cuda")}
    twin = PACE(eager, capturable=True, **path, **settings)
    for i, step in enumerate(gradients):
        twin.param_groups[0]["lr"].fill_(1e-2 / max(1, i - 2))
        advance(twin, eager, [step])
    assert_same_bits(on_cpu(everything(twin)), on_cpu(everything(optimizer)))
    assert optimizer.state[parameters[0]]["step"].item() == 20


@pytest.mark.parametrize("foreach", PATHS)
def test_a_graph_captured_before_the_first_step_seeds_once(foreach):
    """The average is taken from live at the first replay, and not again at later ones."""
    gradients = gradients_on_gpu(6)
    parameters, eager = on_gpu(), on_gpu()
    optimizer = PACE(
        parameters, lr=1e-2, foreach=foreach, capturable=True, gain="paper", pullback_strength=30.0
    )
    for p, g in zip(parameters, gradients[0], strict=True):
        p.grad = g.float()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    with torch.no_grad():
        for p, q in zip(parameters, on_gpu(seed=3), strict=True):
            p.copy_(q)  # weights loaded after construction and capture count
        for p, q in zip(eager, on_gpu(seed=3), strict=True):
            p.copy_(q)
    for step in gradients:
        for p, g in zip(parameters, step, strict=True):
            p.grad.copy_(g)
        graph.replay()
    torch.cuda.synchronize()
    twin = run(eager, gradients, foreach=foreach, capturable=True, pullback_strength=30.0)
    assert_same_bits(on_cpu(everything(twin)), on_cpu(everything(optimizer)))


@pytest.mark.parametrize("between", ["nothing", "averages", "eager", "both"])
def test_a_captured_fused_step_among_others(between):
    """Averages shown, memory taken and steps with other gradients between replays change nothing."""
    static, others = gradients_on_gpu(2)
    runs = []
    for captured in (True, False):
        parameters = on_gpu()
        optimizer = run(parameters, [static], fused=True, capturable=True, pullback_strength=30.0)
        own = [p.grad for p in parameters]
        kept = [g.float() for g in others]
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for _ in range(4):
            if captured:
                graph.replay()
            else:
                set_gradients(parameters, own)
                optimizer.step()
            if between in ("averages", "both"):
                with averaged_weights(optimizer):
                    taken = [torch.full((1000,), 1e9, device="cuda") for _ in range(50)]
                del taken
            if between in ("eager", "both"):
                set_gradients(parameters, kept)
                optimizer.step()
        runs.append(on_cpu(everything(optimizer)))
    assert_same_bits(*runs)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_of_a_first_fused_step_is_refused():
    parameters = on_gpu()
    optimizer = PACE(parameters, fused=True, capturable=True)
    set_gradients(parameters, gradients_on_gpu(1)[0])
    with pytest.raises(RuntimeError, match="take one step before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_a_learning_rate_on_the_device_is_not_waited_for():
    settings = {"lr": torch.tensor(1e-2, device="cuda"), "gain": "paper", "pullback_strength": 30.0}
    ours, theirs = on_gpu(), on_gpu()
    run(ours, gradients_on_gpu(5), fused=True, **settings)
    run(theirs, gradients_on_gpu(5), fused=True, **{**settings, "lr": 1e-2})
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_right_after_a_reset_is_refused():
    parameters = on_gpu()
    optimizer = run(parameters, gradients_on_gpu(2), capturable=True)
    reset_average(optimizer)
    with pytest.raises(RuntimeError, match="take one step before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_without_capturable_is_refused():
    parameters = on_gpu()
    optimizer = run(parameters, gradients_on_gpu(2))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="needs capturable=True"), torch.cuda.graph(graph):
        optimizer.step()


def test_grad_scaler_skips_whole_steps():
    parameters = on_gpu()
    optimizer = run(parameters, gradients_on_gpu(2), pullback_strength=30.0)
    before = everything(optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(sum((p * float("inf")).sum() for p in parameters)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same_bits(on_cpu(before), on_cpu(everything(optimizer)))


def test_moved_between_construction_and_first_step_and_later():
    model = torch.nn.Linear(4, 3)
    optimizer = PACE(model.parameters(), lr=1e-2, return_power=0.9)
    model.cuda()
    for device in ("cuda", "cuda", "cpu", "cuda"):
        model.to(device)
        optimizer.zero_grad()
        model(torch.ones(2, 4, device=device)).sum().backward()
        optimizer.step()
        state = optimizer.state[model.weight]
        assert {state[k].device.type for k in state.keys() - {"step"}} == {device}
        with averaged_weights(optimizer):
            assert torch.equal(model.weight, state["returned"])
    assert optimizer.state[model.weight]["step"].item() == 4
    moved = torch.nn.Linear(4, 3)
    moved.load_state_dict(averaged_state_dict(model, optimizer))
    other = PACE(moved.parameters())
    other.load_state_dict(optimizer.state_dict())  # saved on the GPU, loaded on the CPU
    assert other.state[moved.weight]["average"].device.type == "cpu"


@pytest.mark.parametrize("settings", [{}, {"average_dtype": "int8"}, {"capturable": True}])
def test_a_state_that_is_replaced_makes_room_at_once(settings):
    """As where a trainer moves it to the host while a model generates."""
    parameter = torch.ones(2**20, device="cuda").requires_grad_()
    optimizer = PACE([parameter], **settings)
    parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        optimizer.step()
    state = optimizer.state[parameter]
    away = {key: value.cpu() for key, value in state.items() if value.numel() > 1 and value.is_cuda}
    size = sum(value.numel() * value.element_size() for value in away.values())
    before = torch.cuda.memory_allocated()
    state.update(away)
    assert before - torch.cuda.memory_allocated() == size
    state.update((key, value.cuda()) for key, value in away.items())
    optimizer.step()
    assert state["step"].item() == 4 and not torch.equal(state["exp_avg"].cpu(), away["exp_avg"])


@pytest.mark.parametrize(
    "settings, key",
    [
        ({}, "exp_avg"),
        ({"average_dtype": "int8"}, "average_scale"),
    ],
)
def test_a_graph_reads_on_what_was_replaced(settings, key):
    parameter = torch.ones(2**20, device="cuda").requires_grad_()
    optimizer = PACE([parameter], capturable=True, **settings)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    state = optimizer.state[parameter]
    there = weakref.ref(state[key])
    state[key] = state[key].clone()
    optimizer.step()
    assert there() is not None
    graph.replay()
    torch.cuda.synchronize()


def test_hooks_of_triton_are_called_by_launches_that_go_past_it():
    """As by a profiler of Triton's: from when they are there, until they are gone."""
    from triton import knobs

    parameters, seen = on_gpu(), []
    optimizer = run(parameters, gradients_on_gpu(3), fused=True)
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        advance(optimizer, parameters, gradients_on_gpu(2, seed=2))
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert [metadata.get()["name"] for metadata in seen] == ["step", "step"]
    advance(optimizer, parameters, gradients_on_gpu(1, seed=3))
    assert len(seen) == 2
    others = on_gpu()
    other = run(others, gradients_on_gpu(3), fused=True)
    advance(other, others, gradients_on_gpu(2, seed=2) + gradients_on_gpu(1, seed=3))
    assert_same_bits(everything(optimizer), everything(other))


def test_temporary_memory_of_a_foreach_step():
    shapes = [(1024, 1024)] * 8
    parameters = [torch.randn(s, device="cuda").requires_grad_() for s in shapes]
    optimizer = PACE(parameters, foreach=True)
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 2 * 8 * 4 * 2**20 + 2**16, f"{peak / (8 * 4 * 2**20):.3f} model sizes"


def test_golden_trajectories():
    data = np.load(Path(__file__).parents[1] / "golden" / "golden_pace.npz", allow_pickle=False)
    options = json.loads(str(data["meta"]))["partly_clipped"]
    parameter = torch.tensor(data["partly_clipped/p0/0"]).cuda().requires_grad_()
    optimizer = PACE(
        [parameter],
        lr=options["lr"],
        gain="paper",
        pullback_strength=options["c"],
        ema_power=options["kappa"],
    )
    for i, gradient in enumerate(data["partly_clipped/g/0"]):
        parameter.grad = torch.tensor(gradient).cuda()
        optimizer.step()
        golden = data["partly_clipped/p/0"][i]
        assert np.abs(parameter.detach().cpu().numpy() - golden).max() <= 1e-12 * np.abs(golden).max()


# --- Wrappers and baselines -----------------------------------------------------------------------


@rows
def test_every_row_is_the_same_on_both_devices(name):
    """float64, to rounding; Muon works in bfloat16 inside, where sums of other order round otherwise. Some
    are for float32 at most, and whether a residual is rounded up or down may hang by a hair."""
    narrow = any(word in name for word in ("fused", "bfloat16", "int8"))
    tolerance = 3e-2 if "Muon" in name else 1e-3 if narrow else 1e-9
    dtype = torch.float32 if narrow else torch.float64
    here, there = (Problem(name, dtype, device=device).run(20) for device in ("cpu", "cuda"))
    for p, q in zip(here.parameters, there.parameters, strict=True):
        assert (p - q.cpu()).abs().max() <= tolerance
        state, other = here.optimizer.state[p], there.optimizer.state[q]
        assert state.keys() == other.keys()
    if ROWS[name].keeps_average:
        with averaged_weights(here.optimizer), averaged_weights(there.optimizer):
            for p, q in zip(here.parameters, there.parameters, strict=True):
                assert (p - q.cpu()).abs().max() <= tolerance


@averaging_rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_shows_and_takes_back(name, dtype):
    if name == "Pullback NAdam" and dtype == torch.bfloat16:
        pytest.skip("torch's own loading rounds NAdam's mu_product to bfloat16")
    problem = Problem(name, dtype, device="cuda").run(8)
    before = on_cpu(everything(problem.optimizer))
    with averaged_weights(problem.optimizer):
        shown = [p.detach().clone() for p in problem.parameters]
    assert_same_bits(on_cpu(everything(problem.optimizer)), before)
    assert not all(torch.equal(p, s) for p, s in zip(problem.parameters, shown, strict=True))
    fresh = Problem(name, dtype, seed=3, device="cuda")
    with torch.no_grad():
        for p, q in zip(fresh.parameters, problem.parameters, strict=True):
            p.copy_(q)
    fresh.optimizer.load_state_dict(copy.deepcopy(problem.optimizer.state_dict()))
    assert_same_bits(on_cpu(everything(fresh.optimizer)), before)


@pytest.mark.parametrize("name", [n for n in ROWS if "Adafactor" not in n])  # torch's own reads on the host
def test_no_step_waits_for_the_device(name):
    problem = Problem(name, device="cuda").run(3)
    problem.set_gradients(3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "kind", [{"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True}]
)
@pytest.mark.parametrize("name", VARIANTS)
def test_pullback_of_adamw_is_pace(name, kind):
    """Bit for bit on the foreach path; a kernel of one tensor, or a fused one, rounds in its own way."""
    if {"maximize", "betas", "eps", "weight_decay"} & VARIANTS[name].keys():
        pytest.skip("AdamW's own settings")
    ours, theirs = on_gpu(), on_gpu()
    shared = {} if "fused" in kind else kind
    pace = PACE(ours, lr=1e-2, **shared, **VARIANTS[name])
    pullback = Pullback(optim.AdamW(theirs, lr=1e-2, **kind), **VARIANTS[name])
    for step in gradients_on_gpu(20):
        advance(pace, ours, [step])
        advance(pullback, theirs, [step])
    exact = kind.get("foreach", False)
    for p, q in zip(ours, theirs, strict=True):
        for a, b in ((p, q), (pace.state[p]["average"], pullback.state[q]["pullback_average"])):
            assert torch.equal(a, b) if exact else (a - b).abs().max() <= 1e-5


def test_a_captured_graph_of_pullback_replays_the_eager_steps():
    eager, captured = on_gpu(), on_gpu()
    gradients = gradients_on_gpu(12)
    settings = {"pullback_strength": 3.0, "update_every": 3, "return_power": 0.8}
    one, two = (Pullback(optim.AdamW(p, lr=1e-2, capturable=True), **settings) for p in (eager, captured))
    advance(one, eager, gradients)
    advance(two, captured, gradients[:2])
    static = [g.clone() for g in gradients[2]]
    for p, g in zip(captured, static, strict=True):
        p.grad = g.to(p.dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        two.step()
    for step in gradients[2:]:
        for p, g in zip(captured, step, strict=True):
            p.grad.copy_(g)
        graph.replay()
    torch.cuda.synchronize()
    for p, q in zip(eager, captured, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(one.state[p]["pullback_returned"], two.state[q]["pullback_returned"])
        assert two.state[q]["pullback_step"] == 12
