"""Attacks: each gave wrong weights, averages or states without a word, or was tried and gave none."""

import contextlib
import copy
import io
import pickle
import sys
import warnings

import pytest
import torch
from problems import (
    advance,
    assert_same_bits,
    copies,
    everything,
    make_gradients,
    make_parameters,
    parameters_of,
    same,
)
from reference import array, averages_of, distance
from torch import nn, optim
from torch.nn.utils import parametrizations

from paceline import (
    BEMA,
    PACE,
    Blend,
    Control,
    HalfLife,
    PowerLaw,
    attach,
    averaged_state_dict,
    averaged_tensors,
    averaged_weights,
    reset_average,
)
from paceline.optim import weights
from paceline.optim.weights import keeper_of

PUSH = Control.push()
FURTHER = {"long": PowerLaw(0.9), "blend": Blend(HalfLife(0.3), 0.5), "bema": BEMA(every=2)}
SHAPES = [(4, 3), (150,)]  # the second is of two blocks in int8


def beside(parameters, **own):
    return attach(optim.SGD(parameters, 1e-2, momentum=0.9), **{"control": PUSH, **own})


KINDS = {
    "PACE": lambda p: PACE(p, 1e-2, control=PUSH),
    "PACE bfloat16": lambda p: PACE(p, 1e-2, control=Control.paper(0.3), average_dtype="bfloat16"),
    "PACE int8": lambda p: PACE(p, 1e-2, control=PUSH, average_dtype="int8"),
    "beside": beside,
    "beside int8": lambda p: beside(p, average_dtype="int8"),
    "beside, many": lambda p: beside(p, averages=FURTHER),
}
kinds = pytest.mark.parametrize("kind", KINDS)
two_kinds = pytest.mark.parametrize("kind", ["PACE", "beside"])


def make(kind="PACE", steps=4, dtype=torch.float32):
    parameters = [nn.Parameter(p.detach()) for p in make_parameters(dtype=dtype, shapes=SHAPES)]
    return go_on(KINDS[kind](parameters), steps)


def go_on(optimizer, steps=3, seed=1):
    gradients = make_gradients(steps, seed, shapes=SHAPES)
    return advance(optimizer, parameters_of(optimizer), gradients)


def contents(optimizer):
    """Return live weights and all averages, wherever they are."""
    keeper = keeper_of(optimizer)
    found = {"live": keeper.live_weights()}
    for name in keeper.rule.names(optimizer.param_groups[0]):
        found[name] = keeper.averages(name)
    return {f"{name}/{i}": value.clone() for name, own in found.items() for i, (_, value) in enumerate(own)}


# --- Ctrl-C -----------------------------------------------------------------------------------------------

FILES = (weights.__file__, contextlib.__file__)


def is_interrupted(action, line):
    """Raise KeyboardInterrupt at the n-th line of these files that an action runs, if there is one."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename not in FILES:
            return None
        count += event == "line"
        if event == "line" and count == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def block(optimizer):
    with averaged_weights(optimizer):
        pass


def evaluate(optimizer):
    keeper_of(optimizer).show()  # eval() and train() of PACE
    keeper_of(optimizer).hide()


@pytest.mark.parametrize("kind", ["PACE", "PACE int8", "beside, many"])
@pytest.mark.parametrize(("action", "then"), [(block, None), (evaluate, "hide"), (evaluate, "block")])
def test_an_interrupt_at_any_line_of_an_exchange_loses_nothing(kind, action, then):
    """A block puts live back; what a broken eval() or train() has left, a block or another one ends."""
    optimizer, other = make(kind), make(kind)
    keeper, right, before = keeper_of(optimizer), contents(optimizer), everything(optimizer)
    shown = [right[f"returned/{i}" if "returned/0" in right else f"average/{i}"] for i in range(2)]
    line = 1
    while is_interrupted(lambda: action(optimizer), line):
        assert_same_bits(contents(optimizer), right)
        if then == "block":
            with averaged_weights(optimizer):
                assert same(parameters_of(optimizer), shown)
        if then is not None:
            keeper.hide()
        assert_same_bits(everything(optimizer), before)
        line += 1
    assert line > 100
    assert_same_bits(everything(go_on(optimizer)), everything(go_on(other)))


# --- Checkpoints ------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("taken", ["outside", "inside"])
def test_a_state_taken_on_one_side_of_a_block_and_written_on_the_other_is_of_its_time(kind, taken):
    """As a background save does it; the tensors of a state dict are not written to by an exchange."""
    optimizer, file, nothing = make(kind), io.BytesIO(), contextlib.nullcontext()
    with averaged_weights(optimizer) if taken == "inside" else nothing:
        state = optimizer.state_dict()
        right = copy.deepcopy(state)
    with averaged_weights(optimizer) if taken == "outside" else nothing:
        torch.save(state, file)
    file.seek(0)
    written = torch.load(file, weights_only=True)
    assert written["param_groups"] == right["param_groups"]
    for i, entries in right["state"].items():
        tensors = {key: torch.as_tensor(v) for key, v in entries.items() if v is not None}
        assert_same_bits({key: written["state"][i][key] for key in tensors}, tensors)


@two_kinds
def test_a_state_of_another_order_is_refused_by_the_first_name_that_differs(kind):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    named = list(model.named_parameters())
    first, second = KINDS[kind](named), KINDS[kind]([named[i] for i in (2, 1, 0, 3)])
    for optimizer in (first, second):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    before = everything(second)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' in the place of '1\.weight'.*nothing was"):
        second.load_state_dict(first.state_dict())
    assert_same_bits(before, everything(second))


def zero_step(optimizer):
    optimizer.param_groups[0]["lr"] = 0.0
    advance(optimizer, parameters_of(optimizer), [[torch.zeros(shape) for shape in SHAPES]])


ACTS = {"step": zero_step, "reset": reset_average, "block": block, "save": lambda o: o.state_dict()}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("name", [None, "long", "blend"])
def test_a_model_of_the_average_that_is_loaded_last_is_noticed(name, dtypes, act):
    """Whatever comes next: a checkpoint made in a block never continues, or resets, from the average."""
    old, new = (getattr(torch, dtype) for dtype in dtypes)
    kind = "PACE" if name is None else "beside, many"
    optimizer, resumed = make(kind, dtype=old), make(kind, steps=0, dtype=new)
    live = [p.to(new) for p in copies(parameters_of(optimizer))]
    with averaged_weights(optimizer, name):
        state, held = copy.deepcopy(optimizer.state_dict()), copies(parameters_of(optimizer))
    resumed.load_state_dict(state)
    with torch.no_grad():
        torch._foreach_copy_(parameters_of(resumed), held)
    is_said = act in ("step", "reset")
    with pytest.warns(UserWarning, match="loaded after the opt") if is_said else contextlib.nullcontext():
        ACTS[act](resumed)
    keeper_of(resumed).hide()
    assert same(parameters_of(resumed), live)


@pytest.mark.parametrize("kept", [(), (0,), (0, 1)])
def test_no_state_is_loaded_over_weights_that_are_shown_without_live(kept):
    optimizer = make()
    before, saved = everything(optimizer), copy.deepcopy(optimizer.state_dict())
    with averaged_weights(optimizer):
        inside = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match="inside averaged_weights"):
            optimizer.load_state_dict(saved)
    optimizer.eval()
    state = {**inside, "state": {i: inside["state"][i] for i in kept}}
    refused = pytest.raises(ValueError, match="hold the average now")
    with refused if len(kept) < 2 else contextlib.nullcontext():
        optimizer.load_state_dict(state)  # a whole one brings live along
    optimizer.train()
    assert_same_bits(everything(optimizer), before)


def test_a_shown_state_of_pace_is_refused_by_other_optimizers():
    optimizer = make()
    with averaged_weights(optimizer):
        state, held = copy.deepcopy(optimizer.state_dict()), copies(parameters_of(optimizer))
    with pytest.raises(ValueError, match="state of PACE, saved while"):
        beside([p.requires_grad_() for p in held]).load_state_dict(state)
    plain = optim.AdamW(held)
    plain.load_state_dict(state)
    with pytest.raises(RuntimeError, match="saved while the parameters held the average"):
        plain.step()


@pytest.mark.parametrize("other", [optim.Rprop, optim.Adafactor, optim.RMSprop, optim.Adagrad])
def test_a_state_of_an_optimizer_of_another_kind_changes_nothing(other):
    """PACE refuses it; a base fails as it does alone, at the load or the next step, and moves nothing."""
    theirs = make_parameters(dtype=torch.float32, shapes=SHAPES)
    state = copy.deepcopy(go_on(other(theirs)).state_dict())
    optimizer, others = make(), make_parameters(dtype=torch.float32, shapes=SHAPES)
    attached = go_on(attach(optim.AdamW(others, 1e-2), control=PUSH))
    before, live = everything(optimizer), copies(parameters_of(attached))
    with pytest.raises(ValueError, match=r"lacks .*exp_avg, exp_avg_sq"):
        optimizer.load_state_dict(state)
    assert_same_bits(everything(optimizer), before)
    with warnings.catch_warnings(), pytest.raises(KeyError):
        warnings.simplefilter("ignore")
        attached.load_state_dict(state)
        go_on(attached)
    block(attached)
    assert same(parameters_of(attached), live)


# --- Whose parameters they are ----------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_two_averages_of_the_same_parameters_never_meet(storage):
    first = make()
    second = go_on(beside(parameters_of(first), average_dtype=storage))
    model, live = nn.ParameterList(parameters_of(first)), copies(parameters_of(first))
    with averaged_weights(first):
        for act in (second.step, lambda: block(second), lambda: averaged_state_dict(model, second)):
            with pytest.raises(RuntimeError, match="the average of another optimizer"):
                act()
    assert same(parameters_of(first), live)
    block(second)
    assert same(parameters_of(first), live)
    go_on(second)


# --- What happens inside a block --------------------------------------------------------------------------


def change_group(**settings):
    return lambda o: o.param_groups[0].update(settings)


INSIDE = {
    "freeze": lambda o: parameters_of(o)[0].requires_grad_(False),
    "thaw": lambda o: parameters_of(o)[1].requires_grad_(True),
    "add": lambda o: o.add_param_group({"params": [torch.ones(3, requires_grad=True)]}),
    "no gradients": lambda o: o.zero_grad(),
    "take out": lambda o: o.param_groups[0]["params"].pop(),
    "rate": change_group(lr=0.3),
    "control": change_group(control=Control.pull(2.0)),
    "storage": change_group(average_dtype="bfloat16"),
}


@two_kinds
@pytest.mark.parametrize("act", INSIDE)
def test_what_is_changed_inside_a_block_is_as_if_changed_outside(act, kind):
    found = []
    for is_inside in (True, False):
        optimizer = make(kind)
        parameters = parameters_of(optimizer)
        parameters[1].requires_grad_(act != "thaw")
        before = everything(optimizer)
        with averaged_weights(optimizer) if is_inside else contextlib.nullcontext():
            INSIDE[act](optimizer)
        for p, value in zip(parameters, (before[f"{i}/weights"] for i in range(2)), strict=True):
            assert torch.equal(p, value)
        for gradients in make_gradients(3, shapes=SHAPES):
            given = [g if p.requires_grad else None for p, g in zip(parameters, gradients, strict=True)]
            advance(optimizer, parameters, [given])
        found.append(contents(optimizer) | {"last": parameters[1].detach()})
    assert_same_bits(*found)


def by_torch_save(both):
    file = io.BytesIO()
    torch.save(both, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both)), by_torch_save])
@pytest.mark.parametrize("where", ["inside", "in eval"])
@pytest.mark.parametrize("kind", ["PACE", "PACE bfloat16", "PACE int8"])
def test_a_copy_of_what_is_shown_trains_on_from_live(kind, where, how):
    optimizer = make(kind)
    optimizer.zero_grad()
    right = everything(optimizer)
    if where == "in eval":
        optimizer.eval()
    with averaged_weights(optimizer) if where == "inside" else contextlib.nullcontext():
        parameters, other = how((parameters_of(optimizer), optimizer))
    optimizer.train()
    assert [id(p) for p in parameters] == [id(p) for p in parameters_of(other)]
    block(other)
    other.train()
    assert_same_bits(everything(other), right)
    assert_same_bits(everything(go_on(other)), everything(go_on(optimizer)))


CHANGES = {
    "load": (True, lambda m: m.load_state_dict({"weight": torch.zeros(5, 3)})),
    "max_norm": (True, lambda m: m(torch.arange(5))),
    "merge": (True, lambda m: m.weight.data.add_(1.0)),
    "undone": (False, lambda m: m.weight.data.mul_(2.0).mul_(0.5)),
    "cast": (False, lambda m: m.double()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_are_changed_while_shown_are_named_and_live_is_put_back(change, dtype):
    is_said, act = CHANGES[change]
    model = nn.Embedding(5, 3, max_norm=1e-3 if change == "max_norm" else None).to(dtype)
    optimizer = PACE(model.parameters(), 1.0)
    advance(optimizer, [model.weight], [[torch.ones(5, 3)]])
    right = model.weight.detach().clone()
    with warnings.catch_warnings(record=True) as said, averaged_weights(optimizer):
        warnings.simplefilter("always")
        act(model)
    assert torch.equal(model.weight, right.to(model.weight.dtype))
    assert [str(each.message)[:28] for each in said] == ["1 parameter(s) were changed "] * is_said


@two_kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cast_inside_a_block_leaves_the_averages_and_the_states_as_they_are(kind, dtype):
    optimizer = make(kind)
    right, model = contents(optimizer), nn.ParameterList(parameters_of(optimizer))
    with averaged_weights(optimizer):
        model.to(dtype)
    for key, value in contents(optimizer).items():
        assert torch.equal(value, right[key].to(dtype) if key.startswith("live") else right[key])


@kinds
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e38, 1e-45, -0.0])
def test_numbers_of_any_kind_come_back_to_the_bit(kind, bad):
    """In live weights, in averages and in both; also through a state that is saved and loaded."""
    optimizer, resumed = make(kind), make(kind, steps=0)
    for p in parameters_of(optimizer):
        p.detach().view(-1)[:2] = bad
    for _, _, state in keeper_of(optimizer).remembered():
        for key, value in state.items():
            if key.startswith(("average", "returned")) and value.is_floating_point() and value.numel() > 2:
                value.view(-1)[1:3] = bad
    before, right = everything(optimizer), contents(optimizer)
    block(optimizer)
    assert_same_bits(everything(optimizer), before)
    with averaged_weights(optimizer):
        state = copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict(state)
    assert_same_bits(contents(resumed), right)


@pytest.mark.parametrize("kind", ["PACE int8", "beside", "beside, many"])
def test_what_cannot_be_shown_shows_nothing(kind):
    optimizer = make(kind)
    last = parameters_of(optimizer)[1]
    right, last.data = last.detach(), torch.zeros(7)
    before = copies(parameters_of(optimizer))
    with pytest.raises(RuntimeError, match=r"has shape \(7,\) and its average \(150,\); it was resized"):
        block(optimizer)
    assert same(parameters_of(optimizer), before)
    last.data = right
    keeper_of(optimizer).show()
    with pytest.raises(RuntimeError, match="hold 'returned' at present; call train"):
        keeper_of(optimizer).show("average")


@kinds
def test_a_reset_is_of_all_averages_which_begin_again_as_live(kind):
    optimizer = make(kind)
    live, names = copies(parameters_of(optimizer)), keeper_of(optimizer).rule.names(optimizer.param_groups[0])
    reset_average(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(2):
        for name in names:
            with averaged_weights(optimizer, name):
                assert same(parameters_of(optimizer), live)
        go_on(optimizer, 1)


# --- Memory, models, precision ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["outside", "inside", "loaded"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_a_state_follows_the_order_of_its_parameter_in_memory(storage, where):
    p, q = (nn.Parameter(torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0))) for _ in "pq")
    both = [PACE([each], 1e-2, control=PUSH, average_dtype=storage) for each in (p, q)]
    gradients = make_gradients(5, shapes=[p.shape])
    for each, optimizer in zip((p, q), both, strict=True):
        advance(optimizer, [each], gradients[:3])
    with averaged_weights(both[0]) if where == "inside" else contextlib.nullcontext():
        p.data = p.detach().contiguous(memory_format=torch.channels_last)
    if where == "loaded":
        state = copy.deepcopy(both[0].state_dict())
        both[0] = PACE([p], 1e-2, control=PUSH, average_dtype=storage)
        both[0].load_state_dict(state)
    for each, optimizer in zip((p, q), both, strict=True):
        advance(optimizer, [each], gradients[3:])
    assert p.stride() != q.stride()
    assert {value.stride() for value in both[0].state[p].values() if value.shape == p.shape} == {p.stride()}
    tolerance = 1e-7 if storage == "float32" else 1e-3  # what is rounded at random depends on the order
    assert distance(p, array(q)) < tolerance
    for name, average in averages_of(both[0], p).items():
        assert distance(average, array(averages_of(both[1], q)[name])) < tolerance


@two_kinds
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_model_computes_with_the_average_however_its_weights_are_made(norm, kind):
    build = lambda: norm(nn.Linear(4, 4))  # noqa: E731
    torch.manual_seed(0)
    model, x = build(), torch.randn(5, 4)
    optimizer = KINDS[kind](list(model.parameters()))
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    model.eval()
    fresh, live = build().eval(), model(x)
    fresh.load_state_dict(averaged_state_dict(model, optimizer))
    with averaged_weights(optimizer):
        assert torch.equal(model(x), fresh(x))
    assert torch.equal(model(x), live) and not torch.equal(live, fresh(x))
    teacher = torch.func.functional_call(model, averaged_tensors(model, optimizer), x)
    assert torch.equal(teacher, fresh(x)) and torch.equal(model(x), live)


@two_kinds
def test_autocast_keeps_no_weights_of_before_an_exchange(kind):
    """One context over live, average and a training step: its cache would be of the wrong ones."""
    found = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        model, x = nn.Linear(16, 16), torch.randn(4, 16)
        optimizer = KINDS[kind](list(model.parameters()))
        for _ in range(3):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                model(x)
                if evaluates:
                    expected = torch.func.functional_call(model, averaged_state_dict(model, optimizer), x)
                    with averaged_weights(optimizer):
                        assert torch.equal(model(x), expected)
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
        found.append(everything(optimizer))
    assert_same_bits(*found)
