"""What every optimizer and wrapper must do, written once and run over every row of the table."""

import copy
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from battery import ROWS, Problem, averaging_rows, rows
from problems import assert_same_bits, everything
from safetensors.torch import load, save
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import lr_scheduler

from paceline import averaged_state_dict, averaged_weights, reset_average

pytestmark = pytest.mark.slow

# --- It optimizes ---------------------------------------------------------------------------------


@rows
def test_descends_a_quadratic(name):
    problem = Problem(name)
    start = problem.loss()
    problem.run(150)
    live = problem.loss()
    assert live < 0.5 * start
    if ROWS[name].keeps_average:
        with averaged_weights(problem.optimizer):
            assert problem.loss() < 0.5 * start
        assert problem.loss() == live


@rows
def test_descends_a_small_network(name):
    row = ROWS[name]
    torch.manual_seed(0)
    bias = len(row.shapes) > 2  # Muon takes matrices only
    model = nn.Sequential(nn.Linear(4, 16, bias=bias), nn.Tanh(), nn.Linear(16, 1, bias=bias))
    inputs = torch.randn(64, 4)
    targets = inputs[:, :1] * inputs[:, 1:2]
    optimizer = row.make(model.parameters(), row.lr)

    def evaluate():
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        return loss

    start = evaluate().item()
    for _ in range(100):
        optimizer.step(evaluate)
    assert evaluate().item() < 0.8 * start


@rows
def test_two_runs_are_the_same_bits(name):
    assert_same_bits(everything(Problem(name).run(25).optimizer), everything(Problem(name).run(25).optimizer))


# --- Precision ------------------------------------------------------------------------------------


@rows
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_are_kept(name, dtype):
    if dtype not in ROWS[name].dtypes:
        with pytest.raises((RuntimeError, ValueError), match="is for float32"):
            Problem(name, dtype).run(1)
        return
    problem = Problem(name, dtype).run(5)
    assert all(parameter.dtype == dtype for parameter in problem.parameters)
    if not ROWS[name].keeps_average:
        return
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    for parameter in problem.parameters:
        for key, value in problem.optimizer.state[parameter].items():
            if key.endswith(("average", "returned")):
                assert value.dtype == wide, key
    live = [parameter.detach().clone() for parameter in problem.parameters]
    with averaged_weights(problem.optimizer):
        assert all(parameter.dtype == dtype for parameter in problem.parameters)
    for parameter, before in zip(problem.parameters, live, strict=True):
        assert torch.equal(parameter, before)


# --- State ----------------------------------------------------------------------------------------


def by_torch_save(old, fresh, folder):
    file = folder / "state.pt"
    torch.save({"weights": old.parameters, "optimizer": old.optimizer.state_dict()}, file)
    saved = torch.load(file, weights_only=True)
    load_weights(fresh, saved["weights"])
    fresh.optimizer.load_state_dict(saved["optimizer"])


def by_safetensors(old, fresh, folder):
    state_dict = old.optimizer.state_dict()
    tensors = {f"weights/{i}": p.detach() for i, p in enumerate(old.parameters)}
    others = {"param_groups": state_dict["param_groups"], "state": {}}
    for i, entries in state_dict["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"state/{i}/{key}"] = value.contiguous()
            else:
                others["state"][f"{i}/{key}"] = value
    content = save(tensors, {"others": json.dumps(others)})

    tensors, others = load(content), json.loads(json.dumps(others))
    state = {i: {} for i in state_dict["state"]}
    for path, value in [*tensors.items(), *((f"state/{k}", v) for k, v in others["state"].items())]:
        kind, i, *key = path.split("/")
        if kind == "state":
            state[int(i)]["/".join(key)] = value
    load_weights(fresh, [tensors[f"weights/{i}"] for i in range(len(fresh.parameters))])
    fresh.optimizer.load_state_dict({"state": state, "param_groups": others["param_groups"]})


def by_distributed_checkpoint(old, fresh, folder):
    old.optimizer.zero_grad()  # torch leaves out the state where gradients are present
    weights, state = get_state_dict(old.model, old.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=True)
    weights, state = get_state_dict(fresh.model, fresh.optimizer)
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=folder, no_dist=True)
    set_state_dict(fresh.model, fresh.optimizer, model_state_dict=weights, optim_state_dict=read["optimizer"])


def load_weights(problem, weights):
    with torch.no_grad():
        for parameter, value in zip(problem.parameters, weights, strict=True):
            parameter.copy_(value)


# The beginning, and where a row of the table changes what it does: warm-ups end after 5 and 20 steps, and
# EMANesterov stops after 30.
SAVED_AFTER = (1, 2, 3, 4, 5, 6, 20, 21, 30, 31)


@rows
@pytest.mark.parametrize(
    "way",
    [
        by_torch_save,
        pytest.param(by_safetensors, marks=pytest.mark.long),
        pytest.param(by_distributed_checkpoint, marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.distributed.*:UserWarning")
def test_state_round_trip_in_a_run_of_34_steps(name, way, tmp_path):
    """S1: saved and loaded into a fresh optimizer, several times in one run, bit for bit."""
    if ROWS[name].needs_closure and way is by_distributed_checkpoint:
        pytest.skip("torch asks a fresh optimizer for a step without a closure")
    uninterrupted, problem = Problem(name), Problem(name)
    for k in range(34):
        uninterrupted.step(k)
        problem.step(k)
        assert_same_bits(everything(problem.optimizer), everything(uninterrupted.optimizer))
        # Other ways than torch's own take longer: three times will do.
        if k + 1 not in (SAVED_AFTER if way is by_torch_save else SAVED_AFTER[3::3]):
            continue
        fresh = Problem(name, seed=7)
        fresh.targets = problem.targets
        (tmp_path / str(k)).mkdir()
        way(problem, fresh, tmp_path / str(k))
        problem = fresh
        assert_same_bits(everything(problem.optimizer), everything(uninterrupted.optimizer))


@rows
def test_copies_go_on_alike_and_share_nothing(name):
    """S6: deepcopy and pickle."""
    if not ROWS[name].can_be_copied:
        pytest.skip("the package's own optimizer cannot")
    problem = Problem(name).run(6)
    problem.optimizer.zero_grad()
    copies = [copy.deepcopy(problem), pickle.loads(pickle.dumps((problem.model, problem.optimizer)))]
    pickled = Problem(name)
    pickled.model, pickled.optimizer = copies[1]
    pickled.parameters = list(pickled.model)
    before = everything(problem.optimizer)
    for other in (copies[0], pickled):
        other.run(4, start=6)
    assert_same_bits(everything(problem.optimizer), before)
    problem.run(4, start=6)
    assert_same_bits(everything(copies[0].optimizer), everything(problem.optimizer))
    assert_same_bits(everything(pickled.optimizer), everything(problem.optimizer))


@rows
def test_a_loaded_optimizer_shares_no_tensor_with_the_saved(name):
    if not ROWS[name].keeps_average:
        pytest.skip("torch's own way of loading keeps the very tensors it is given")
    problem, other = Problem(name).run(3), Problem(name)
    other.optimizer.load_state_dict(problem.optimizer.state_dict())
    before = everything(problem.optimizer)
    other.run(3, start=3)
    assert_same_bits(everything(problem.optimizer), before)


# --- Parameters and gradients ---------------------------------------------------------------------


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
    if not row.is_apart:
        pytest.skip("its step is sized by all parameters together")
    for i, parameter in enumerate(together.parameters):
        alone = first if i < 1 else second
        assert torch.equal(parameter, alone.parameters[i])
        ours, theirs = (p.optimizer.state[p.parameters[i]] for p in (together, alone))
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), key


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
    if not row.is_apart:
        pytest.skip("its step is sized by all parameters together")
    for mine, other in zip(late.parameters[1:], alone.parameters[1:], strict=True):
        assert torch.equal(mine, other)


@rows
def test_frozen_parameters_stand_still_and_thaw(name):
    """N15: without a gradient, weights, state and count stay; thawed, a parameter counts from there."""
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
    if row.own_clock and row.is_apart:
        alone.run(5, start=5)
        assert torch.equal(frozen, alone.parameters[0])
        ours, theirs = problem.optimizer.state[frozen], alone.optimizer.state[alone.parameters[0]]
        assert_same_bits(dict(ours), dict(theirs))


@rows
def test_parameters_without_gradient_are_skipped_whole(name):
    problem = Problem(name).run(4)
    if ROWS[name].needs_closure:
        pytest.skip("its closure makes all gradients")
    before = everything(problem.optimizer)
    problem.set_gradients(4)
    problem.parameters[0].grad = None
    problem.optimizer.step()
    after = everything(problem.optimizer)
    mine = [key for key in before if key.startswith("0/")]
    assert mine
    assert_same_bits({key: after[key] for key in mine}, {key: before[key] for key in mine})
    assert not torch.equal(after["1/weights"], before["1/weights"])
    problem.optimizer.zero_grad()
    problem.optimizer.step()
    assert_same_bits(everything(problem.optimizer), after)


@rows
def test_gradients_are_not_changed(name):
    problem = Problem(name).run(3)
    problem.set_gradients(3)
    before = [parameter.grad.clone() for parameter in problem.parameters]
    problem.optimizer.step(problem.closure(3) if ROWS[name].needs_closure else None)
    same = all(torch.equal(p.grad, g) for p, g in zip(problem.parameters, before, strict=True))
    assert same == ROWS[name].keeps_grad


@rows
def test_accumulated_gradients_are_one_step(name):
    at_once, accumulated = Problem(name), Problem(name)
    for k in range(6):
        for problem, parts in ((at_once, 1), (accumulated, 4)):
            gradients = problem.gradients(k)

            def evaluate(problem=problem, parts=parts, gradients=gradients):
                problem.optimizer.zero_grad()
                for _ in range(parts):  # powers of two, so that the sum is exact
                    products = [(p * g / parts).sum() for p, g in zip(problem.parameters, gradients)]
                    torch.stack(products).sum().backward()
                return torch.tensor(problem.loss())

            with torch.enable_grad():
                evaluate()
            problem.optimizer.step(evaluate if ROWS[name].needs_closure else None)
    assert_same_bits(everything(accumulated.optimizer), everything(at_once.optimizer))


@rows
def test_a_closure_is_evaluated_once_with_gradients_enabled(name):
    """And its loss comes back; a closure that evaluates the average in between does no harm."""
    plain, closed = Problem(name), Problem(name)
    for k in range(6):
        calls = []

        def evaluate(k=k, calls=calls):
            calls.append(torch.is_grad_enabled())
            return closed.closure(k)()

        plain.step(k)
        expected = closed.loss()
        assert closed.optimizer.step(evaluate).item() == pytest.approx(expected)
        assert calls == [True]
    assert_same_bits(everything(closed.optimizer), everything(plain.optimizer))


@averaging_rows
def test_a_closure_may_end_in_eval(name):
    """One that evaluates the average after its gradients: the step is taken on live all the same."""
    plain, evaluating = Problem(name).run(3), Problem(name).run(3)

    def evaluate():
        loss = evaluating.closure(3)()
        evaluating.optimizer.eval()
        return loss

    plain.step(3)
    evaluating.optimizer.step(evaluate)
    assert_same_bits(everything(evaluating.optimizer), everything(plain.optimizer))


# --- Rates and hooks ------------------------------------------------------------------------------


@rows
def test_schedulers_set_the_rate_of_the_step(name):
    row = ROWS[name]
    scheduled, by_hand = Problem(name), Problem(name)
    factors = [1.0, 0.5, 2.0, 0.25, 0.0, 1.0]
    scheduler = lr_scheduler.LambdaLR(scheduled.optimizer, lambda k: factors[min(k, 5)])
    for k, factor in enumerate(factors):
        by_hand.optimizer.param_groups[0]["lr"] = row.lr * factor
        by_hand.optimizer.param_groups[0]["initial_lr"] = row.lr
        scheduled.step(k)
        by_hand.step(k)
        assert_same_bits(everything(scheduled.optimizer), everything(by_hand.optimizer))
        scheduler.step()


@rows
def test_hooks_fire_once_a_step(name):
    problem = Problem(name)
    fired = []
    problem.optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    problem.optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    problem.run(3)
    assert fired == ["pre", "post"] * 3


@rows
def test_repr_and_defaults_are_there(name):
    problem = Problem(name)
    assert "lr" in repr(problem.optimizer) and problem.optimizer.defaults


@pytest.mark.parametrize(("name", "i"), [(n, i) for n, row in ROWS.items() for i in range(len(row.refused))])
def test_wrong_inputs_are_refused_in_the_users_words(name, i):
    call, error, words = ROWS[name].refused[i]
    with pytest.raises(error) as caught:
        call([torch.nn.Parameter(torch.ones(2, 2))])
    assert words in str(caught.value)


# --- The average ----------------------------------------------------------------------------------


@averaging_rows
def test_the_average_is_shown_and_taken_back(name):
    problem = Problem(name).run(7)
    before = everything(problem.optimizer)
    expected = dict(problem.optimizer.returned_averages())
    expected = {p: average.clone() for p, average in expected.items()}
    exported = averaged_state_dict(problem.model, problem.optimizer)
    with averaged_weights(problem.optimizer):
        for i, parameter in enumerate(problem.parameters):
            assert torch.equal(parameter, expected[parameter])
            assert torch.equal(parameter, exported[str(i)])
            assert not torch.equal(parameter, before[f"{i}/weights"])
        with pytest.raises(RuntimeError, match="step outside"):
            problem.step(7)
        with pytest.raises(RuntimeError, match="do not nest"), averaged_weights(problem.optimizer):
            pass
        with pytest.raises(RuntimeError, match="leave the block"):
            problem.optimizer.train()
    assert_same_bits(everything(problem.optimizer), before)


@averaging_rows
def test_a_forgotten_eval_costs_nothing(name):
    forgetful, careful = Problem(name).run(5), Problem(name).run(5)
    gradients = forgetful.gradients(5)
    forgetful.optimizer.eval()
    forgetful.optimizer.eval()  # idempotent
    if ROWS[name].needs_closure:
        pytest.skip("its closure takes the gradient inside the step")
    for parameter, gradient in zip(forgetful.parameters, gradients, strict=True):
        parameter.grad = gradient
    forgetful.optimizer.step()
    careful.step(5)
    assert_same_bits(everything(forgetful.optimizer), everything(careful.optimizer))


@averaging_rows
def test_a_state_saved_while_the_average_is_shown_goes_on_from_live(name):
    problem = Problem(name).run(5)
    with averaged_weights(problem.optimizer):
        saved = copy.deepcopy((problem.model.state_dict(), problem.optimizer.state_dict()))
    fresh = Problem(name, seed=7)
    fresh.targets = problem.targets
    fresh.model.load_state_dict(saved[0])  # the average
    fresh.optimizer.load_state_dict(saved[1])
    assert not fresh.optimizer.shows_average()
    assert_same_bits(everything(fresh.optimizer), everything(problem.optimizer))
    fresh.run(3, start=5)
    problem.run(3, start=5)
    assert_same_bits(everything(fresh.optimizer), everything(problem.optimizer))


@averaging_rows
def test_the_model_may_be_loaded_after_the_optimizer(name):
    """The order of torch's set_state_dict: the average arrives last, over live weights just put back."""
    problem = Problem(name).run(5)
    with averaged_weights(problem.optimizer):
        saved = copy.deepcopy((problem.model.state_dict(), problem.optimizer.state_dict()))
    fresh = Problem(name, seed=7)
    fresh.targets = problem.targets
    fresh.optimizer.load_state_dict(saved[1])
    fresh.model.load_state_dict(saved[0])
    fresh.optimizer.train()
    assert_same_bits(everything(fresh.optimizer), everything(problem.optimizer))


@averaging_rows
def test_an_exception_in_the_block_restores_live(name):
    problem = Problem(name).run(5)
    before = everything(problem.optimizer)
    with pytest.raises(KeyError), averaged_weights(problem.optimizer):
        raise KeyError
    assert_same_bits(everything(problem.optimizer), before)


@averaging_rows
def test_until_the_first_step_the_average_is_live(name):
    problem = Problem(name)
    with torch.no_grad():
        for parameter in problem.parameters:
            parameter.fill_(3.0)  # weights loaded after construction count
    with averaged_weights(problem.optimizer):
        assert all((parameter == 3.0).all() for parameter in problem.parameters)
    late = Problem(name)
    load_weights(late, problem.parameters)  # with nobody looking in between
    early = Problem(name)
    load_weights(early, problem.parameters)
    early.optimizer = ROWS[name].make(early.parameters, ROWS[name].lr)
    for each in (problem, late, early):
        each.run(4)
    assert_same_bits(everything(late.optimizer), everything(early.optimizer))
    assert_same_bits(everything(problem.optimizer), everything(early.optimizer))


@averaging_rows
def test_a_reset_average_is_live_again(name):
    problem = Problem(name).run(5)
    reset_average(problem.optimizer)
    live = [parameter.detach().clone() for parameter in problem.parameters]
    with averaged_weights(problem.optimizer):
        assert all(torch.equal(p, value) for p, value in zip(problem.parameters, live, strict=True))
    problem.run(3, start=5)
    live = [parameter.detach().clone() for parameter in problem.parameters]
    with averaged_weights(problem.optimizer):  # one of its own again
        assert not all(torch.equal(p, value) for p, value in zip(problem.parameters, live, strict=True))


@averaging_rows
def test_a_failing_step_of_the_base_leaves_live_as_it_was(name):
    problem = Problem(name).run(3)
    if ROWS[name].needs_closure or name.startswith("PACE"):
        pytest.skip("no base to fail")
    before = everything(problem.optimizer)

    def fail(*_):
        raise MemoryError("no room")

    handle = problem.optimizer.base.register_step_pre_hook(fail)
    problem.set_gradients(3)
    with pytest.raises(MemoryError):
        problem.optimizer.step()
    assert_same_bits(everything(problem.optimizer), before)
    handle.remove()
    problem.step(3)
    assert_same_bits(everything(problem.optimizer), everything(Problem(name).run(4).optimizer))
