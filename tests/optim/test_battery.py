"""What every optimizer must do, written once and run over every row of the table."""

import copy
import io
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from battery import ROWS, Problem, averaging_rows, rows
from problems import assert_same_bits, copies, everything, same
from safetensors.torch import load, save
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import lr_scheduler

from paceline import averaged_state_dict, averaged_weights, reset_average
from paceline.optim.weights import keeper_of

# --- It optimizes -----------------------------------------------------------------------------------------


@rows
def test_it_descends_the_same_way_every_time(name):
    problem, again = Problem(name), Problem(name)
    start = problem.loss()
    problem.run(50)
    live = problem.loss()
    assert live < 0.8 * start
    if ROWS[name].keeps_average:
        with averaged_weights(problem.optimizer):
            assert problem.loss() < 0.9 * start
        assert problem.loss() == live
    assert_same_bits(everything(again.run(50).optimizer), everything(problem.optimizer))


@rows
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_are_kept(name, dtype):
    row = ROWS[name]
    if dtype not in row.dtypes:
        with pytest.raises((RuntimeError, ValueError), match="is for float32"):
            Problem(name, dtype).run(1)
        return
    problem = Problem(name, dtype).run(5)
    assert all(parameter.dtype == dtype for parameter in problem.parameters)
    if row.keeps_average and not row.computes_average:
        wide = torch.promote_types(dtype, torch.float32)
        assert {average.dtype for _, average in keeper_of(problem.optimizer).averages()} == {wide}
        live = copies(problem.parameters)
        with averaged_weights(problem.optimizer):
            assert all(parameter.dtype == dtype for parameter in problem.parameters)
        assert same(problem.parameters, live)


# --- State ------------------------------------------------------------------------------------------------


def by_torch_save(old, folder):
    file = io.BytesIO()
    torch.save({"weights": copies(old.parameters), "optimizer": old.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = old.like(saved["weights"])
    fresh.optimizer.load_state_dict(saved["optimizer"])
    return fresh


def by_safetensors(old, folder):
    """Tensors on one side, and everything else as JSON."""
    state_dict = old.optimizer.state_dict()
    tensors, others = {}, {"groups": state_dict["param_groups"], "state": {}}
    for i, entries in state_dict["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{i}/{key}"] = value.contiguous()
            else:
                others["state"][f"{i}/{key}"] = value
    content, others = load(save(tensors)), json.loads(json.dumps(others))
    state = {i: {} for i in state_dict["state"]}
    for path, value in [*content.items(), *others["state"].items()]:
        i, key = path.split("/")
        state[int(i)][key] = value
    fresh = old.like(copies(old.parameters))
    fresh.optimizer.load_state_dict({"state": state, "param_groups": others["groups"]})
    return fresh


def by_distributed_checkpoint(old, folder):
    old.optimizer.zero_grad()  # torch leaves out the state where gradients are present
    weights, state = get_state_dict(old.model, old.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=True)
    fresh = old.like(copies(old.parameters))
    weights, state = get_state_dict(fresh.model, fresh.optimizer)
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=folder, no_dist=True)
    set_state_dict(fresh.model, fresh.optimizer, model_state_dict=weights, optim_state_dict=read["optimizer"])
    return fresh


# The beginning, and where a row of the table changes what it does: warm-ups end after 5 and 20 steps, and
# EMA-Nesterov stops after 30.
SAVED_AFTER = {by_torch_save: (1, 2, 3, 4, 5, 6, 20, 21, 30, 31)}


@rows
@pytest.mark.parametrize("way", [by_torch_save, by_safetensors, by_distributed_checkpoint])
@pytest.mark.filterwarnings("ignore:.*torch.distributed.*:UserWarning")
def test_resumes_to_the_bit_after_any_step(name, way, tmp_path):
    """Saved and loaded into a fresh optimizer, by torch.save several times in one run of 33 steps."""
    if name.startswith("Schedule-Free") and way is by_distributed_checkpoint:
        pytest.skip("the package divides by its rate, which is 0 in the dummy step of torch")
    uninterrupted, problem = Problem(name), Problem(name)
    for k in range(SAVED_AFTER.get(way, (4,))[-1] + 2):
        uninterrupted.step(k)
        problem.step(k)
        if k + 1 in SAVED_AFTER.get(way, (4,)):
            problem = way(problem, tmp_path / str(k))
        assert_same_bits(everything(problem.optimizer), everything(uninterrupted.optimizer))


@rows
@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_train_alike_and_share_nothing(name, how):
    if name == "Lion pushed":
        pytest.skip("the package's own optimizer cannot be copied")
    problem, other = Problem(name).run(6), Problem(name)
    problem.optimizer.zero_grad()
    before = everything(problem.optimizer)
    other.model, other.optimizer = how((problem.model, problem.optimizer))
    other.parameters = list(other.model)
    if ROWS[name].is_attached:
        with pytest.raises(RuntimeError, match="copy of an attached optimizer"):
            other.step(6)
    else:
        other.run(4, start=6)
    assert_same_bits(everything(problem.optimizer), before)
    problem.run(4, start=6)
    if not ROWS[name].is_attached:
        assert_same_bits(everything(other.optimizer), everything(problem.optimizer))


@averaging_rows
def test_a_loaded_optimizer_shares_no_average_with_the_saved(name):
    problem, other = Problem(name).run(3), Problem(name)
    other.optimizer.load_state_dict(problem.optimizer.state_dict())
    before = [average.clone() for _, average in keeper_of(problem.optimizer).averages()]
    live = copies(problem.parameters)
    other.run(3, start=3)
    if not ROWS[name].computes_average:  # torch's way of loading keeps the very tensors that it is given
        assert same([average for _, average in keeper_of(problem.optimizer).averages()], before)
    assert same(problem.parameters, live)


@averaging_rows
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_state_saved_while_the_average_is_shown_continues_from_live(name, order):
    problem = Problem(name).run(5)
    with averaged_weights(problem.optimizer):
        saved = copy.deepcopy((problem.model.state_dict(), problem.optimizer.state_dict()))
    fresh = problem.like(problem.parameters)
    if order == "model first":
        fresh.model.load_state_dict(saved[0])  # the average
    fresh.optimizer.load_state_dict(saved[1])
    if order == "optimizer first":  # the order of torch's set_state_dict
        fresh.model.load_state_dict(saved[0])
        keeper_of(fresh.optimizer).hide()
    assert_same_bits(everything(fresh.optimizer), everything(problem.optimizer))
    fresh.run(3, start=5)
    assert_same_bits(everything(fresh.optimizer), everything(problem.run(3, start=5).optimizer))


# --- Parameters and gradients -----------------------------------------------------------------------------


@rows
def test_groups_are_as_good_as_separate_optimizers(name):
    row = ROWS[name]
    together, first, second = Problem(name), Problem(name), Problem(name)
    a, b = slice(0, 1), slice(1, None)
    groups = [{"params": together.parameters[a]}, {"params": together.parameters[b], "lr": row.lr / 3}]
    together.optimizer = row.make(groups, row.lr)
    first.optimizer = row.make(first.parameters[a], row.lr)
    second.optimizer = row.make(second.parameters[b], row.lr / 3)
    for problem, mine in ((together, slice(None)), (first, a), (second, b)):
        for parameter in set(problem.parameters) - set(problem.parameters[mine]):
            parameter.requires_grad_(False)
        problem.run(12)
    found = everything(together.optimizer)
    expected = everything(first.optimizer)
    for key, value in everything(second.optimizer).items():
        place, entry = key.split("/")
        expected[f"{int(place) + 1}/{entry}"] = value
    assert_same_bits(found, expected)


@rows
def test_a_group_added_later_starts_there(name):
    row = ROWS[name]
    late, alone = Problem(name), Problem(name)
    late.optimizer = row.make(late.parameters[:1], row.lr)
    alone.optimizer = row.make(alone.parameters[1:], row.lr)
    for parameter in late.parameters[1:]:
        parameter.requires_grad_(False)
    late.run(5)
    for parameter in late.parameters[1:]:
        parameter.requires_grad_(True)
    late.optimizer.add_param_group({"params": late.parameters[1:]})
    late.run(5, start=5)
    alone.parameters[0].requires_grad_(False)
    alone.run(5, start=5)
    assert same(late.parameters[1:], alone.parameters[1:])
    if row.keeps_average:
        with averaged_weights(late.optimizer), averaged_weights(alone.optimizer):
            assert same(late.parameters[1:], alone.parameters[1:])


@rows
def test_a_frozen_parameter_stands_still_and_counts_from_its_thaw(name):
    row = ROWS[name]
    problem, alone = Problem(name), Problem(name)
    frozen = problem.parameters[0]
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    problem.run(5)
    assert torch.equal(frozen, before)
    if row.keeps_average:
        with averaged_weights(problem.optimizer):
            assert torch.equal(frozen, before)
    frozen.requires_grad_(True)
    problem.run(5, start=5)
    assert not torch.equal(frozen, before)
    if row.own_clock:
        mine, other = everything(problem.optimizer), everything(alone.run(5, start=5).optimizer)
        assert_same_bits(*({k: v for k, v in all_.items() if k[:2] == "0/"} for all_ in (mine, other)))


@rows
def test_a_parameter_without_a_gradient_is_left_out_whole(name):
    problem = Problem(name).run(4)
    before = everything(problem.optimizer)
    problem.set_gradients(4)
    problem.parameters[0].grad = None
    problem.optimizer.step()
    after = everything(problem.optimizer)
    mine = [key for key in before if key.startswith("0/")]
    assert_same_bits({key: after[key] for key in mine}, {key: before[key] for key in mine})
    assert not torch.equal(after["1/weights"], before["1/weights"])
    problem.optimizer.zero_grad()
    problem.optimizer.step()
    assert_same_bits(everything(problem.optimizer), after)


@rows
def test_gradients_are_not_changed(name):
    problem = Problem(name).run(3)
    problem.set_gradients(3)
    before = [(p.grad.clone(), p.grad._version) for p in problem.parameters]
    problem.optimizer.step()
    pairs = zip(problem.parameters, before, strict=True)
    kept = all(torch.equal(p.grad, grad) and p.grad._version == n for p, (grad, n) in pairs)
    assert kept == ROWS[name].keeps_grad


@rows
def test_accumulated_gradients_are_one_step(name):
    once, accumulated = Problem(name), Problem(name)
    for k in range(4):
        for problem, parts in ((once, 1), (accumulated, 4)):
            gradients = problem.gradients(k)
            problem.optimizer.zero_grad()
            for _ in range(parts):  # powers of two, so that the sum is exact
                products = [(p * g / parts).sum() for p, g in zip(problem.parameters, gradients)]
                torch.stack(products).sum().backward()
            problem.optimizer.step()
    assert_same_bits(everything(accumulated.optimizer), everything(once.optimizer))


@rows
def test_a_closure_is_evaluated_once_with_gradients_and_may_end_in_eval(name):
    plain, closed, calls = Problem(name), Problem(name), []
    for k in range(6):

        def evaluate(k=k):
            calls.append(torch.is_grad_enabled())
            loss = closed.closure(k)()
            if closed.row.keeps_average:
                keeper_of(closed.optimizer).show()
            return loss

        plain.step(k)
        expected = closed.loss()
        assert closed.optimizer.step(evaluate).item() == pytest.approx(expected)
        assert calls == [True] * (k + 1)
        if closed.row.is_attached and closed.row.make is ROWS["GPA"].make:
            assert torch.allclose(closed.parameters[0], plain.parameters[0], rtol=1e-5)
        else:
            assert_same_bits(everything(closed.optimizer), everything(plain.optimizer))


# --- Rates, hooks -----------------------------------------------------------------------------------------


@rows
def test_schedulers_set_the_rate_of_the_step(name):
    row = ROWS[name]
    scheduled, by_hand = Problem(name), Problem(name)
    factors = [1.0, 0.5, 2.0, 0.25, 1.0]
    scheduler = lr_scheduler.LambdaLR(scheduled.optimizer, lambda k: factors[min(k, 4)])
    for k, factor in enumerate(factors):
        by_hand.optimizer.param_groups[0]["lr"] = row.lr * factor
        scheduled.step(k)
        by_hand.step(k)
        assert_same_bits(everything(scheduled.optimizer), everything(by_hand.optimizer))
        scheduler.step()
        assert scheduled.optimizer.param_groups[0]["lr"] == row.lr * factors[min(k + 1, 4)]


@rows
def test_a_rate_of_0_moves_nothing(name):
    problem = Problem(name).run(5)
    before = copies(problem.parameters)
    problem.optimizer.param_groups[0]["lr"] = 0.0
    problem.run(3, start=5)
    assert same(problem.parameters, before) == ROWS[name].rests_at_0


@rows
def test_hooks_fire_once_a_step_and_repr_names_the_settings(name):
    problem, fired = Problem(name), []
    problem.optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    problem.optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    problem.run(3)
    assert fired == ["pre", "post"] * 3
    assert "lr" in repr(problem.optimizer) and problem.optimizer.defaults


# --- Tensors of every kind --------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
    "channels last": lambda x: x.view(1, *x.shape).to(memory_format=torch.channels_last),
}


@rows
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts_make_no_difference(name, layout):
    """Or are refused by name. What is rounded at random depends on the order in memory."""
    shape = (3, 3) if name.startswith("Muon") else (2, 3, 4) if layout == "channels last" else (4, 3)
    if name.startswith("Muon") and layout == "channels last":
        pytest.skip("for matrices")
    plain, other = Problem(name, shapes=[shape]), Problem(name, shapes=[shape])
    start = LAYOUTS[layout](other.parameters[0].detach()).clone(memory_format=torch.preserve_format)
    other.parameters = [nn.Parameter(start)]
    other.targets = [target.view(start.shape) for target in other.targets]
    other.optimizer = other.row.make(other.parameters, other.row.lr)
    strides = start.stride()
    for problem in (plain, other):
        problem.run(6)
        if problem.row.keeps_average:
            with averaged_weights(problem.optimizer):
                problem.shown = copies(problem.parameters)
    tolerance = 5e-3 if "int8" in name or "bfloat16" in name else 1e-5
    assert other.parameters[0].stride() == strides
    assert torch.allclose(other.parameters[0].view(shape), plain.parameters[0], rtol=tolerance, atol=1e-5)
    if plain.row.keeps_average:
        assert torch.allclose(other.shown[0].view(shape), plain.shown[0], rtol=tolerance, atol=tolerance)


@rows
def test_empty_tensors_are_carried_along(name):
    if name.startswith(("Muon", "Adafactor")):
        pytest.skip("torch's own divides by the size")
    problem = Problem(name, shapes=[(0, 3), (2, 2)]).run(5)
    assert problem.parameters[0].shape == (0, 3) and problem.parameters[1].isfinite().all()
    if problem.row.keeps_average:
        with averaged_weights(problem.optimizer):
            assert problem.parameters[1].isfinite().all()


@rows
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_is_cast_in_mid_run_trains_on(name, dtype):
    row = ROWS[name]
    if not row.casts or dtype not in row.dtypes:
        pytest.skip("its base does not follow, or refused")
    problem = Problem(name).run(4)
    expected = (
        [average.clone() for _, average in keeper_of(problem.optimizer).averages()]
        if row.keeps_average
        else []
    )
    problem.model.to(dtype)
    for value, parameter in zip(expected, problem.parameters, strict=False):
        average = dict(keeper_of(problem.optimizer).averages())[parameter]
        assert torch.allclose(average.double(), value.double(), atol=0.02)
    problem.run(3, start=4)
    for key, value in everything(problem.optimizer).items():
        if key.endswith(("exp_avg", "exp_avg_sq", "weights")):
            assert value.dtype == dtype
        if key.endswith(("average", "returned")):
            assert value.dtype == torch.promote_types(dtype, torch.float32)
        assert not key.endswith("/step") or value == 7


@averaging_rows
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cast_while_shown_is_a_cast_of_live(name, dtype):
    problem = Problem(name).run(4)
    live = copies(problem.parameters)
    with averaged_weights(problem.optimizer):
        problem.model.to(dtype)
    assert same(problem.parameters, [value.to(dtype) for value in live])


# --- The average ------------------------------------------------------------------------------------------


@averaging_rows
def test_the_average_is_shown_and_taken_back(name):
    problem = Problem(name).run(7)
    before = everything(problem.optimizer)
    expected = {p: average.clone() for p, average in keeper_of(problem.optimizer).averages()}
    exported = averaged_state_dict(problem.model, problem.optimizer)
    with pytest.raises(KeyError), averaged_weights(problem.optimizer):
        for i, parameter in enumerate(problem.parameters):
            assert torch.equal(parameter, expected[parameter])
            assert torch.equal(parameter, exported[str(i)])
            assert not torch.equal(parameter, before[f"{i}/weights"])
        with pytest.raises(RuntimeError, match="step outside"):
            problem.step(7)
        with pytest.raises(RuntimeError, match="do not nest"), averaged_weights(problem.optimizer):
            pass
        inside = problem.optimizer.state_dict()
        raise KeyError
    assert_same_bits(everything(problem.optimizer), before)
    for i, state in inside["state"].items():  # as outside, and live comes along
        live = [key for key in state if key.endswith("live")]
        assert torch.equal(state.pop(*live), before[f"{i}/weights"])
        own = {key: torch.as_tensor(value) for key, value in state.items()}
        assert_same_bits(
            own, {k.split("/")[1]: v for k, v in before.items() if k[:2] == f"{i}/" and "weights" not in k}
        )


@averaging_rows
def test_a_forgotten_eval_costs_nothing(name):
    forgetful, careful = Problem(name).run(5), Problem(name).run(5)
    gradients = forgetful.gradients(5)
    for _ in range(2):
        keeper_of(forgetful.optimizer).show()
    for parameter, gradient in zip(forgetful.parameters, gradients, strict=True):
        parameter.grad = gradient
    forgetful.optimizer.step()
    careful.step(5)
    assert_same_bits(everything(forgetful.optimizer), everything(careful.optimizer))


@averaging_rows
def test_until_the_first_step_the_average_is_live(name):
    problem, late = Problem(name), Problem(name)
    for each in (problem, late):
        with torch.no_grad():
            for parameter in each.parameters:
                parameter.fill_(3.0)  # weights loaded after construction count
    with averaged_weights(problem.optimizer):
        assert all((parameter == 3.0).all() for parameter in problem.parameters)
    exported = averaged_state_dict(problem.model, problem.optimizer)
    assert all((value == 3.0).all() for value in exported.values())
    early = Problem(name).like(late.parameters, seed=0)
    for each in (problem, late, early):
        each.run(4)
    if not ROWS[name].computes_average:  # the package's own average begins when the optimizer is made
        assert_same_bits(everything(late.optimizer), everything(early.optimizer))
    assert_same_bits(everything(problem.optimizer), everything(late.optimizer))


@averaging_rows
def test_a_reset_average_is_live_again(name):
    problem = Problem(name).run(5)
    if ROWS[name].computes_average:
        with pytest.raises(TypeError, match="from its own state"):
            reset_average(problem.optimizer)
        return
    reset_average(problem.optimizer)
    for is_live in (True, False):
        live = copies(problem.parameters)
        with averaged_weights(problem.optimizer):
            assert same(problem.parameters, live) == is_live
        problem.run(3, start=5)


@averaging_rows
def test_an_evaluation_in_inference_mode_leaves_tensors_that_train(name):
    problem, other = Problem(name).run(3), Problem(name).run(3)
    with torch.inference_mode(), averaged_weights(problem.optimizer):
        problem.loss()
    assert_same_bits(
        everything(problem.run(3, start=3).optimizer), everything(other.run(3, start=3).optimizer)
    )


@averaging_rows
def test_a_failing_step_leaves_live_as_it_was(name):
    problem = Problem(name).run(3)
    before = everything(problem.optimizer)

    def fail(*_):
        raise MemoryError("no room")

    handle = problem.optimizer.register_step_pre_hook(fail)
    problem.set_gradients(3)
    with pytest.raises(MemoryError):
        problem.optimizer.step()
    handle.remove()
    problem.optimizer.state_dict()  # a broken step is undone before anything else happens
    if name == "GPA":  # by arithmetic
        assert torch.allclose(problem.parameters[0], before["0/weights"], rtol=1e-5)
        return
    assert_same_bits(everything(problem.optimizer), before)
    problem.step(3)
    assert_same_bits(everything(problem.optimizer), everything(Problem(name).run(4).optimizer))
