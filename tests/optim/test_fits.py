"""Whatever is changed between two steps has to be noticed, also where addresses are kept."""

import copy
import gc
import weakref

import pytest
import torch
from problems import assert_same_bits, everything

from paceline import PACE
from paceline.optim import fused, reset_average

pytest.importorskip("triton")

KINDS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """On a CPU the kernel runs in Triton's interpreter."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(fused, "TILES", dict.fromkeys(fused.TILES, (256, 4)))
        monkeypatch.setattr(fused, "DEVICES", ("cuda", "cpu"))


def _swap_memory(optimizer, parameter):
    parameter.data = parameter.data.clone()


def _transpose(optimizer, parameter):
    parameter.data = parameter.data.t()  # same shape, same memory, other strides
    for key in ("exp_avg", "exp_avg_sq", "average"):
        optimizer.state[parameter][key] = optimizer.state[parameter][key].t()


def _replace_moment(optimizer, parameter):
    optimizer.state[parameter]["exp_avg"] = torch.full_like(parameter, 0.5)


def _replace_moment_that_somebody_keeps(optimizer, parameter):
    """So that it has its memory all the same."""
    parameter.kept = optimizer.state[parameter]["exp_avg"]
    _replace_moment(optimizer, parameter)


def _replace_memory_of_moment(optimizer, parameter):
    optimizer.state[parameter]["exp_avg_sq"].data = torch.full_like(parameter, 0.5)


def _widen_memory_of_average(optimizer, parameter):
    average = optimizer.state[parameter]["average"]
    average.data = average.data.double()


def _replace_state(optimizer, parameter):
    state = optimizer.state[parameter]
    optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}


def _drop_state(optimizer, parameter):
    del optimizer.state[parameter]


def _ask_for_a_second_average(optimizer, parameter):
    optimizer.param_groups[0]["return_power"] = 0.9


def _reset_count(optimizer, parameter):
    optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.float64)


def _replace_memory_of_count(optimizer, parameter):
    optimizer.state[parameter]["step"].data = torch.tensor(10.0, dtype=torch.float64)


def _reverse_parameters(optimizer, parameter):
    optimizer.param_groups[0]["params"].reverse()


def _make_parameters_a_tuple(optimizer, parameter):
    optimizer.param_groups[0]["params"] = tuple(optimizer.param_groups[0]["params"])


def _add_group(optimizer, parameter):
    added = torch.ones(4, 4).requires_grad_()
    optimizer.add_param_group({"params": [added], "gain": "uniform", "pullback_strength": 0.5})


def _show_the_average(optimizer, parameter):
    optimizer.eval()
    optimizer.train()


def _load(optimizer, parameter):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _swap_tensors(optimizer, parameter):
    """Another tensor behind the same Python object; the one that was behind it is freed."""
    torch.utils.swap_tensors(parameter, torch.ones(4, 4).requires_grad_())


def _reset(optimizer, parameter):
    reset_average(optimizer)


def _replace_moment_twice(optimizer, parameter):
    state = optimizer.state[parameter]
    before = state["exp_avg"]
    state["exp_avg"] = torch.full_like(parameter, 0.5)
    state["exp_avg"] = before


def _move_entry_to_the_end(optimizer, parameter):
    state = optimizer.state[parameter]
    state["exp_avg"] = state.pop("exp_avg")


def _nothing(optimizer, parameter):
    pass


CHANGES = [
    *(_nothing, _swap_memory, _transpose, _replace_moment, _replace_moment_that_somebody_keeps),
    _replace_memory_of_moment,
    *(_widen_memory_of_average, _replace_state),
    *(_drop_state, _ask_for_a_second_average, _reset_count, _replace_memory_of_count),
    *(_reverse_parameters, _make_parameters_a_tuple, _add_group),
    *(_show_the_average, _load, _swap_tensors, _reset, _replace_moment_twice, _move_entry_to_the_end),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_is_noticed(change, kind):
    """Beside an optimizer that is made to forget before every step."""
    results = []
    for forgets in (False, True):
        generator = torch.Generator().manual_seed(0)
        shapes = [(4, 4), (7,), (4, 4)]
        parameters = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        optimizer = PACE(parameters, lr=0.1, gain="paper", pullback_strength=3.0, **KINDS[kind])
        for t in range(6):
            if t == 3:
                change(optimizer, parameters[0])
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    grad = torch.randn(parameter.shape, generator=generator)
                    # As backward makes it: it lies like the parameter.
                    parameter.grad = torch.empty_like(parameter).copy_(grad)
            if forgets:
                optimizer._tables.clear()
            optimizer.step()
        results.append(everything(optimizer))
    assert_same_bits(*results)


def stepped(kind, shape=(4, 4)):
    """A parameter after two steps, and its optimizer."""
    parameter = torch.ones(shape).requires_grad_()
    optimizer = PACE([parameter], **KINDS[kind])
    for _ in range(2):
        parameter.grad = torch.ones(shape)
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_another_kind_is_noticed(kind):
    parameter, optimizer = stepped(kind)
    parameter.grad = None
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 2
    parameter.grad = torch.arange(16.0).reshape(4, 4).t()  # lies otherwise
    if kind == "fused":
        with pytest.raises(RuntimeError, match="do not lie alike"):
            optimizer.step()
    else:
        before = parameter.detach().clone()
        optimizer.step()
        assert not torch.equal(before, parameter)


@pytest.mark.parametrize("shape", [(4, 4), ()])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_gradient_is_noticed(kind, shape):
    parameter, optimizer = stepped(kind, shape)
    parameter.grad = torch.ones(shape).to_sparse()
    with pytest.raises(RuntimeError, match="PACE does not support sparse gradients"):
        optimizer.step()


def test_a_parameter_that_lies_otherwise_is_noticed():
    """Of the same shape, at the same address, with a gradient that lies like it."""
    parameter, optimizer = stepped("fused")
    parameter.data = parameter.data.t()
    parameter.grad = torch.ones(4, 4).t()
    with pytest.raises(RuntimeError, match="do not lie alike"):
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_shrank_in_place_is_noticed(kind):
    """It is where it was, and so are its moments, which are larger."""
    parameter, optimizer = stepped(kind)
    parameter.data = parameter.data[:2]
    parameter.grad = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=r"has shape \(2, 4\) but its optimizer state has shape \(4, 4\)"):
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_comes_later_is_noticed(kind):
    early, late = (torch.ones(4).requires_grad_() for _ in range(2))
    optimizer = PACE([early, late], **KINDS[kind])
    for step in range(4):
        early.grad, late.grad = torch.ones(4), torch.ones(4) if step > 1 else None
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in (early, late)] == [4, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_change_groups_are_noticed(kind):
    fast, slow = (torch.ones(4).requires_grad_() for _ in range(2))
    optimizer = PACE([{"params": [fast], "lr": 0.1}, {"params": [slow], "lr": 0.0}], **KINDS[kind])
    for step in range(4):
        if step == 2:
            first, second = optimizer.param_groups
            first["params"], second["params"] = second["params"], first["params"]
            kept = fast.detach().clone()
        fast.grad, slow.grad = torch.ones(4), torch.ones(4)
        optimizer.step()
    assert torch.equal(fast, kept) and (slow < 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_moment_that_lies_otherwise_in_the_same_memory_is_noticed(kind):
    ended = []
    for forgets in (False, True):
        parameter = torch.ones(4, 4).requires_grad_()
        optimizer = PACE([parameter], lr=0.1, gain="paper", **KINDS[kind])
        for t in range(4):
            parameter.grad = torch.arange(16.0).reshape(4, 4)
            if t == 3:
                optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"].t()
            if forgets:
                optimizer._tables.clear()
            if t == 3 and kind == "fused":
                with pytest.raises(RuntimeError, match="do not lie alike"):
                    optimizer.step()
            else:
                optimizer.step()
        ended.append(everything(optimizer))
    assert_same_bits(*ended)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_not_kept_alive(kind):
    parameter = torch.ones(4, 4).requires_grad_()
    optimizer = PACE([parameter], **KINDS[kind])
    for _ in range(3):
        parameter.grad = torch.ones(4, 4)
        kept = weakref.ref(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert kept() is None


def test_a_state_that_is_replaced_makes_room_at_once():
    """As where a trainer moves it elsewhere until the next step; which goes on as if it had not."""
    ended = []
    for moves in (False, True):
        parameters = [torch.full((40, 4), float(i)).requires_grad_() for i in range(3)]
        optimizer = PACE(parameters, lr=1e-2, fused=True)
        for t in range(6):
            for i, parameter in enumerate(parameters):
                parameter.grad = torch.full((40, 4), float(t + i))
            optimizer.step()
            if not moves or t % 2:
                continue
            for parameter in parameters:
                state = optimizer.state[parameter]
                for key in ("exp_avg", "exp_avg_sq", "average", "returned"):
                    there = weakref.ref(state[key])
                    state[key] = state[key].clone()
                    assert there() is None
        ended.append(everything(optimizer))
    assert_same_bits(*ended)


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_of_somebody_else_may_become_none(kind):
    parameter, optimizer = stepped(kind)
    optimizer.state[parameter]["theirs"] = torch.ones(3)
    parameter.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.state[parameter]["theirs"] = None
    optimizer.step()
    assert optimizer.state[parameter]["step"].item() == 4


def test_one_pass_refuses_a_gradient_whose_memory_is_gone():
    parameter = torch.ones(4).requires_grad_()
    optimizer = PACE([parameter], lr=1e-2, fused=True)
    for _ in range(2):
        parameter.grad = torch.ones(4)
        optimizer.step()
    parameter.grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 has a gradient that is not plain"):
        optimizer.step()


class Wrapped(torch.Tensor):
    """As torch's own of a collective that is under way: what it stands for is not where it says."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return super().__torch_dispatch__(function, types, args, kwargs or {})


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    "make",
    [lambda g: g.as_subclass(Wrapped), torch._neg_view, lambda g: torch._efficientzerotensor(g.shape)],
)
def test_one_pass_refuses_gradients_that_are_not_what_lies_at_their_address(make, steps_before):
    """The paths of torch's own operations take them."""
    for kind in KINDS:
        parameter = torch.ones(4).requires_grad_()
        optimizer = PACE([parameter], lr=1e-2, **KINDS[kind])
        for _ in range(steps_before):
            parameter.grad = torch.ones(4)
            optimizer.step()
        parameter.grad = make(torch.ones(4))
        if kind == "fused":
            with pytest.raises(RuntimeError, match="parameter 0 of group 0 has a gradient that is not plain"):
                optimizer.step()
            assert optimizer.state[parameter]["step"] == steps_before
        else:
            optimizer.step()


def test_a_gradient_of_integers_is_refused_also_later():
    parameter, optimizer = stepped("fused")
    parameter.grad_dtype = None
    parameter.grad = torch.ones(4, 4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"the gradient of parameter 0 of group 0 is torch\.int32"):
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_inference_mode_and_out_of_it(kind):
    parameter = torch.ones(4).requires_grad_()
    optimizer = PACE([parameter], lr=1e-2, **KINDS[kind])
    for _ in range(2):
        with torch.inference_mode():
            parameter.grad = torch.ones(4)
            optimizer.step()
        parameter.grad = torch.ones(4)
        optimizer.step()
    assert optimizer.state[parameter]["step"] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_counts_of_another_shape(kind):
    parameter, optimizer = stepped(kind)
    optimizer.state[parameter]["step"] = optimizer.state[parameter]["step"].reshape(1).clone()
    parameter.grad = torch.ones(4, 4)
    optimizer.step()
    assert optimizer.state[parameter]["step"].item() == 3


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_one_pass_refuses_a_parameter_that_is_in_its_group_twice():
    parameter = torch.ones(4).requires_grad_()
    optimizer = PACE([parameter, parameter], fused=True)
    parameter.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="parameter 1 of group 0 is in its group twice"):
        optimizer.step()


def test_a_parameter_turned_in_place_is_noticed():
    """The same memory, size and shape, in another order: its gradient and state no longer lie like it."""
    parameter = torch.arange(16.0).view(4, 4).requires_grad_()
    optimizer = PACE([parameter], lr=1e-1, fused=True)
    parameter.grad = torch.ones(4, 4)
    optimizer.step()
    parameter.data = parameter.data.t()
    parameter.grad_dtype, parameter.grad = torch.float32, torch.arange(16.0).view(4, 4)
    with pytest.raises(RuntimeError, match="do not lie alike"):
        optimizer.step()


@pytest.mark.slow
def test_nothing_is_kept_alive_by_what_was_remembered():
    """Also where parameters and optimizer keep each other, which only a collector of cycles can see."""
    parameters = [torch.ones(4).requires_grad_() for _ in range(3)]
    optimizer = PACE(parameters, fused=True)
    parameters[1].owner = optimizer
    replaced = []
    for _ in range(20):
        for parameter in parameters:
            parameter.grad = torch.ones(4)
        optimizer.step()
        moment = optimizer.state[parameters[0]]["exp_avg"]
        replaced.append(weakref.ref(moment))
        optimizer.state[parameters[0]]["exp_avg"] = moment.clone()  # a new fit at the next step
        del moment
    optimizer.step()
    gc.collect()
    assert [there() for there in replaced] == [None] * len(replaced)
    kept = [entry for parameter in parameters for entry in optimizer.state[parameter].values()]
    left = [weakref.ref(tensor) for tensor in (*parameters, *kept)]
    optimizer.step()
    del optimizer, parameters, parameter, kept
    gc.collect()
    assert [there() for there in left] == [None] * len(left)


def test_a_copy_remembers_nothing():
    _, optimizer = stepped("fused")
    assert optimizer._tables and not copy.deepcopy(optimizer)._tables


def test_addresses_are_sent_again_only_after_a_change():
    parameter, optimizer = stepped("fused")
    before = optimizer._tables[0]._launches
    optimizer.step()
    assert optimizer._tables[0]._launches is before
    optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"].clone()
    optimizer.step()
    assert optimizer._tables[0]._launches is not before


def test_one_pass_refuses_a_parameter_that_became_a_negative_view():
    """At the same address, of the same size and strides."""
    parameter, optimizer = stepped("fused")
    parameter.data = torch._neg_view(parameter.data)
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is not plain memory"):
        optimizer.step()
