"""Saving, loading, copying: at every step, in every format, nothing is lost or cast."""

import copy
import gc
import io
import json
import multiprocessing
import pickle
import warnings
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from paceline import PACE, averaged_weights, reset_average

SETTINGS = {"pullback_strength": 30.0, "update_every": 2, "return_power": 0.9}


class Net(torch.nn.Module):
    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        for i, parameter in enumerate(make_parameters(seed=seed, dtype=dtype)):
            self.register_parameter(f"p{i}", torch.nn.Parameter(parameter.detach()))


def through_torch_save(model, optimizer, folder, fresh_model, fresh):
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    fresh_model.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])


def through_safetensors(model, optimizer, folder, fresh_model, fresh):
    packed = optimizer.state_dict()
    flat = {f"{i}/{k}": v.contiguous() for i, entry in packed["state"].items() for k, v in entry.items()}
    save_file(flat, folder / "optimizer.safetensors")
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "groups.json").write_text(json.dumps(packed["param_groups"]))
    state = {}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        i, name = key.split("/")
        state.setdefault(int(i), {})[name] = value
    fresh_model.load_state_dict(load_file(folder / "model.safetensors"))
    fresh.load_state_dict({"state": state, "param_groups": json.loads((folder / "groups.json").read_text())})


def through_dcp(model, optimizer, folder, fresh_model, fresh):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: no process group
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "dcp", no_dist=True)
        weights, state = get_state_dict(fresh_model, fresh)
        template = {"model": weights, "optimizer": state}
        dcp.load(template, checkpoint_id=folder / "dcp", no_dist=True)
        set_state_dict(
            fresh_model, fresh, model_state_dict=template["model"], optim_state_dict=template["optimizer"]
        )


FORMATS = [through_torch_save, through_safetensors, through_dcp]


@pytest.mark.slow
@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("save_and_load", FORMATS)
def test_resumed_at_any_of_40_steps_is_bit_equal(save_and_load, foreach, tmp_path):
    """S1: saved and loaded after every k, the rest of the run ends in the same weights and state."""
    gradients = make_gradients(40)
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, foreach=foreach, **SETTINGS)
    advance(optimizer, list(model.parameters()), gradients)
    straight = everything(optimizer)

    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, foreach=foreach, **SETTINGS)
    for k in range(40):
        fresh_model = Net(seed=99)
        fresh = PACE(fresh_model.parameters(), lr=1e-2, foreach=foreach, **SETTINGS)
        folder = tmp_path / str(k)
        folder.mkdir()
        save_and_load(model, optimizer, folder, fresh_model, fresh)
        assert_same_bits(everything(optimizer), everything(fresh))
        advance(fresh, list(fresh_model.parameters()), gradients[k:])
        assert_same_bits(straight, everything(fresh))
        advance(optimizer, list(model.parameters()), gradients[k : k + 1])


# --- Precision on load ----------------------------------------------------------------------------

PRECISIONS = [torch.float32, torch.bfloat16]


def loaded_average_precision(load, parameter_dtype, average_dtype):
    first = PACE([torch.ones(3, dtype=parameter_dtype).requires_grad_()])
    advance(first, first.param_groups[0]["params"], [[torch.ones(3)]])
    saved = copy.deepcopy(first.state_dict())
    saved["state"][0]["average"] = torch.tensor([1.001, 2.002, 3.003], dtype=average_dtype)
    second = PACE([torch.ones(3, dtype=parameter_dtype).requires_grad_()])
    load(second, saved)
    (state,) = second.state.values()
    entries = state.entries if hasattr(state, "entries") else state
    assert entries["step"].dtype == torch.float64
    return torch.equal(entries["average"], saved["state"][0]["average"]), entries["average"].dtype


@pytest.mark.parametrize("average_dtype", PRECISIONS)
@pytest.mark.parametrize("parameter_dtype", PRECISIONS)
def test_loading_keeps_the_precision_of_the_average(parameter_dtype, average_dtype):
    """S4: in all four combinations."""
    same, dtype = loaded_average_precision(PACE.load_state_dict, parameter_dtype, average_dtype)
    assert same and dtype == average_dtype


def test_stock_loading_would_fail_that():
    """S4, broken twin: torch's own load_state_dict rounds a float32 average to bfloat16."""

    class Stock(Optimizer):
        pass

    def stock_load(optimizer, saved):
        plain = Stock(optimizer.param_groups, {})
        plain.load_state_dict(saved)
        optimizer.state = plain.state

    same, dtype = loaded_average_precision(stock_load, torch.bfloat16, torch.float32)
    assert not same and dtype == torch.bfloat16


def test_a_low_precision_step_count_is_refused():
    optimizer = run(make_parameters(), make_gradients(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = torch.tensor(256.0, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"step of parameter 0 of group 0 is 256.0 in torch.bfloat16"):
        optimizer.load_state_dict(saved)


def test_two_optimizers_never_share_a_tensor_after_loading():
    first = run(make_parameters(), make_gradients(3), **SETTINGS)
    second = PACE(make_parameters(), **SETTINGS)
    second.load_state_dict(first.state_dict())
    before = everything(second)
    advance(first, first.param_groups[0]["params"], make_gradients(3, seed=4))
    assert_same_bits(before, everything(second))


# --- Other optimizers' states ---------------------------------------------------------------------


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("weights_after_state", [False, True])
def test_an_adamw_checkpoint_goes_on_with_averages_from_the_loaded_weights(foreach, weights_after_state):
    """S3: m, v, t kept; the average is seeded from the weights after load, and a warning says so."""
    gradients = make_gradients(20)
    theirs = make_parameters(dtype=torch.float32)
    adamw = torch.optim.AdamW(theirs, lr=1e-2, foreach=foreach)
    advance(adamw, theirs, gradients[:10])
    buffer = io.BytesIO()
    torch.save(adamw.state_dict(), buffer)  # what the Hugging Face Trainer calls optimizer.pt
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)

    ours = make_parameters(seed=50, dtype=torch.float32)
    pace = PACE(ours, lr=1e-3, foreach=foreach, pullback_strength=0.0, ema_power=0.7)

    def load_weights():
        with torch.no_grad():
            for p, q in zip(ours, theirs, strict=True):
                p.copy_(q)

    if not weights_after_state:
        load_weights()
    with pytest.warns(UserWarning, match=r"no 'average' for 4 parameter.*starts from the live") as caught:
        pace.load_state_dict(saved)
    assert caught[0].filename == __file__
    if weights_after_state:
        load_weights()
    group = pace.param_groups[0]
    assert group["lr"] == 1e-2 and group["ema_power"] == 0.7 and "amsgrad" not in group
    assert torch.equal(pace.state_dict()["state"][0]["average"], ours[0])
    start = [p.detach().clone() for p in ours]
    for t, step in enumerate(gradients[10:], 11):
        advance(adamw, theirs, [step])
        advance(pace, ours, [step])
        if t == 11:
            for p, s in zip(ours, start, strict=True):
                expected = s + 12**-0.7 * (p.detach() - s)
                assert torch.allclose(pace.state[p]["average"], expected, rtol=1e-6)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q) and torch.equal(pace.state[p]["exp_avg_sq"], adamw.state[q]["exp_avg_sq"])


@pytest.mark.parametrize("foreach", PATHS)
def test_a_pace_state_goes_on_in_adamw(foreach):
    """S3: m, v and t carry over; the average is ignored."""
    gradients = make_gradients(20)
    ours = make_parameters(dtype=torch.float32)
    pace = run(ours, gradients[:10], pullback_strength=0.0, foreach=foreach)
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    adamw = torch.optim.AdamW(theirs)
    adamw.load_state_dict(copy.deepcopy(pace.state_dict()))
    adamw.param_groups[0]["foreach"] = foreach
    advance(pace, ours, gradients[10:])
    advance(adamw, theirs, gradients[10:])
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_a_round_trip_before_the_first_step_does_not_fix_the_average():
    """Accelerate loads an optimizer's own state back into it when it takes it over."""
    for unseed in ("adamw", "reset"):
        model = Net()
        optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
        if unseed == "adamw":
            adamw = torch.optim.AdamW(model.parameters())
            advance(adamw, list(model.parameters()), make_gradients(3))
            with pytest.warns(UserWarning, match="no 'average'"):
                optimizer.load_state_dict(adamw.state_dict())
        else:
            advance(optimizer, list(model.parameters()), make_gradients(3))
            reset_average(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())  # no second warning
        model.load_state_dict(Net(seed=8).state_dict())
        with averaged_weights(optimizer):
            assert torch.equal(model.p0, Net(seed=8).p0)
        advance(optimizer, list(model.parameters()), make_gradients(1, seed=2))
        start, (p, *_) = Net(seed=8).p0.detach(), model.parameters()
        state = optimizer.state[p]
        assert "unseeded" not in state
        expected = start + 5**-0.5 * (p.detach() - start)  # t = 4, the first update after
        assert torch.allclose(state["average"], expected, rtol=1e-6)


def test_other_adams_are_named_in_a_warning():
    for other, message in (
        (torch.optim.AdamW(make_parameters(), amsgrad=True), "AMSGrad"),
        (torch.optim.Adam(make_parameters(), weight_decay=0.1), "weight decay in the gradient"),
    ):
        advance(other, other.param_groups[0]["params"], make_gradients(1))
        optimizer = PACE(make_parameters())
        with pytest.warns(UserWarning) as caught:
            optimizer.load_state_dict(other.state_dict())
        assert any(message in str(w.message) for w in caught)
        assert "max_exp_avg_sq" not in optimizer.state[optimizer.param_groups[0]["params"][0]]


def test_a_warning_turned_error_leaves_the_loaded_state_whole():
    adamw = torch.optim.AdamW(make_parameters(), lr=0.5)
    advance(adamw, adamw.param_groups[0]["params"], make_gradients(2))
    optimizer, fired = PACE(make_parameters()), []
    optimizer.register_load_state_dict_post_hook(lambda _: fired.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no 'average'"):
            optimizer.load_state_dict(adamw.state_dict())
    assert fired == [1] and optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item() == 2


def test_entries_of_others_in_the_state_are_left_alone():
    parameters = make_parameters()
    optimizer = run(parameters, make_gradients(2))
    optimizer.state[parameters[0]].update(tag="mine", rank=torch.tensor(3))
    advance(optimizer, parameters, make_gradients(1))
    twin = PACE(make_parameters())
    twin.load_state_dict(optimizer.state_dict())
    state = twin.state[twin.param_groups[0]["params"][0]]
    assert state["tag"] == "mine" and state["rank"].dtype == torch.int64


def test_a_missing_returned_average_starts_from_the_control_average():
    first = run(make_parameters(), make_gradients(5), pullback_strength=30.0)
    second = PACE(make_parameters(), return_power=0.9)
    with pytest.warns(UserWarning, match="no 'returned' for 4 parameter.*from the control average"):
        second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["return_power"] == 0.9
    for p in second.param_groups[0]["params"]:
        assert torch.equal(second.state[p]["returned"], second.state[p]["average"])


def test_a_return_power_set_or_unset_in_mid_run():
    parameters = make_parameters()
    optimizer = run(parameters, make_gradients(5), pullback_strength=30.0)
    optimizer.param_groups[0]["return_power"] = 1.0
    with averaged_weights(optimizer):
        assert torch.equal(parameters[0], optimizer.state[parameters[0]]["average"])
    advance(optimizer, parameters, make_gradients(3, seed=3))
    assert not torch.equal(
        optimizer.state[parameters[0]]["returned"], optimizer.state[parameters[0]]["average"]
    )
    optimizer.param_groups[0]["return_power"] = None
    advance(optimizer, parameters, make_gradients(1, seed=4))
    assert "returned" not in optimizer.state[parameters[0]]


def test_a_state_of_another_kind_of_optimizer_is_refused():
    parameters = make_parameters()
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    advance(sgd, parameters, make_gradients(1))
    with pytest.raises(ValueError, match="parameter 0 of group 0 lacks step, exp_avg, exp_avg_sq"):
        PACE(make_parameters()).load_state_dict(sgd.state_dict())


@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda s: s["state"][2].update(average=torch.ones(7)),
            r"average of parameter 'p2' has shape \(7,\).*\(\)",
        ),
        (lambda s: s["state"][3].update(exp_avg=torch.ones(7)), r"exp_avg of parameter 'p3'"),
        (lambda s: s["param_groups"][0].update(ema_power=3.0), "ema_power"),
        (lambda s: s["param_groups"][0]["params"].pop(), "size of optimizer's group"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "number of parameter groups"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil, message):
    """S5: all or nothing, naming parameter and both shapes."""
    model = Net()
    optimizer = PACE(model.named_parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(4))
    saved = copy.deepcopy(optimizer.state_dict())
    advance(optimizer, list(model.parameters()), make_gradients(2, seed=5))
    before, groups = everything(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same_bits(before, everything(optimizer))
    assert optimizer.state_dict()["param_groups"] == groups


def test_renamed_parameters_load_by_position():
    """S5: as in torch, names are labels; the saved ones come along."""
    first = PACE(Net().named_parameters(), lr=1e-2, **SETTINGS)
    advance(first, first.param_groups[0]["params"], make_gradients(3))
    renamed = [(f"layer.{name}", p) for name, p in Net().named_parameters()]
    second = PACE(renamed, **SETTINGS)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["param_names"] == ["p0", "p1", "p2", "p3"]
    for p, q in zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
        assert torch.equal(first.state[p]["average"], second.state[q]["average"])


def test_load_hooks_see_tensors_and_may_rename():
    """S5: a user's pre-hook reorders a state saved for other parameters; ours comes after it."""
    first = run(make_parameters(), make_gradients(4), **SETTINGS)
    second = PACE(list(reversed(make_parameters())), **SETTINGS)
    seen = []

    def reorder(optimizer, state_dict):
        seen.append(type(state_dict["state"][0]["average"]))
        return {**state_dict, "state": {3 - i: v for i, v in state_dict["state"].items()}}

    second.register_load_state_dict_pre_hook(reorder)
    second.load_state_dict(first.state_dict())
    assert seen == [torch.Tensor]
    ours, theirs = first.param_groups[0]["params"], second.param_groups[0]["params"]
    for p, q in zip(ours, reversed(theirs), strict=True):
        assert torch.equal(first.state[p]["average"], second.state[q]["average"])


# --- Groups, copies, other devices and precisions -------------------------------------------------


@pytest.mark.parametrize("foreach", PATHS)
def test_a_group_added_in_mid_run_starts_from_its_own_weights(foreach):
    """S5: its average is its weights at its birth, its t its own."""
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(
        parameters[:2], [g[:2] for g in make_gradients(7)], foreach=foreach, pullback_strength=30.0
    )
    optimizer.add_param_group({"params": parameters[2:], "ema_power": 0.9})
    assert {"step", "exp_avg", "exp_avg_sq", "average"} == optimizer.state[parameters[2]].keys()
    advance(optimizer, parameters, make_gradients(5, seed=8))
    alone = make_parameters(dtype=torch.float32)[2:]
    expected = run(
        alone,
        [g[2:] for g in make_gradients(5, seed=8)],
        foreach=foreach,
        pullback_strength=30.0,
        ema_power=0.9,
    )
    for p, q in zip(parameters[2:], alone, strict=True):
        assert torch.equal(p, q) and torch.equal(optimizer.state[p]["average"], expected.state[q]["average"])


def test_a_replaced_parameter_may_take_its_state_along():
    parameters = make_parameters()
    optimizer = run(parameters, make_gradients(3), pullback_strength=30.0)
    old, new = parameters[0], parameters[0].detach().clone().requires_grad_()
    average = optimizer.state[old]["average"].clone()
    optimizer.state[new] = optimizer.state.pop(old)
    optimizer.param_groups[0]["params"][0] = new
    with averaged_weights(optimizer):
        assert torch.equal(new, average)
    gone = weakref.ref(old)
    del old, parameters[0]
    gc.collect()
    assert gone() is None, "the optimizer keeps the old parameter alive"


def test_parameters_of_a_shape_known_later():
    """Lazy modules, and data replaced before the first step, as with AdamW."""
    lazy = torch.nn.LazyLinear(3)
    plain = torch.nn.Parameter(torch.ones(2))
    optimizer = PACE([*lazy.parameters(), plain], lr=1e-2)
    plain.data = torch.ones(5)
    optimizer.state_dict()
    (lazy(torch.ones(1, 4)).sum() + plain.sum()).backward()
    optimizer.step()
    assert optimizer.state[lazy.weight]["average"].shape == (3, 4)
    assert optimizer.state[plain]["average"].shape == (5,)


def test_a_replaced_parameter_gets_a_state_of_its_own():
    parameters = make_parameters()
    optimizer = run(parameters, make_gradients(3))
    new = torch.ones(4, 3, dtype=torch.float64).requires_grad_()
    optimizer.param_groups[0]["params"][0] = new
    advance(optimizer, [new, *parameters[1:]], make_gradients(1))
    assert optimizer.state[new]["step"].item() == 1


def pickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


def sent_to_a_process(optimizer):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send_bytes(pickle.dumps(optimizer)))
    process.start()
    result = pickle.loads(ours.recv_bytes())
    process.join()
    return result


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, sent_to_a_process])
@pytest.mark.parametrize("when", ["fresh", "mid-run", "shown"])
def test_copies_go_on_alike_and_share_nothing(duplicate, when):
    """S6: deepcopy, pickle, another process; also while the average is shown."""
    optimizer = run(
        make_parameters(dtype=torch.float32), make_gradients(0 if when == "fresh" else 6), **SETTINGS
    )
    if when == "shown":
        optimizer.eval()
    twin = duplicate(optimizer)
    assert_same_bits(everything(optimizer), everything(twin))
    before = everything(optimizer)
    advance(twin, twin.param_groups[0]["params"], make_gradients(10, seed=2))
    assert_same_bits(before, everything(optimizer))
    advance(optimizer, optimizer.param_groups[0]["params"], make_gradients(10, seed=2))
    assert_same_bits(everything(optimizer), everything(twin))


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float64])
def test_state_follows_a_model_that_is_cast(target, foreach):
    """S6: model.half() and the like in mid-run."""
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, eps=1e-3, foreach=foreach, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    averages = [optimizer.state[p]["average"].clone() for p in model.parameters()]
    model.to(target)
    with averaged_weights(optimizer):
        for p, a in zip(model.parameters(), averages, strict=True):
            key = "returned"
            assert torch.equal(p, optimizer.state[p][key].to(target)) and a.dtype == torch.float32
    advance(optimizer, list(model.parameters()), make_gradients(1, seed=3))
    for p in model.parameters():
        state = optimizer.state[p]
        assert p.dtype == target == state["exp_avg"].dtype
        assert state["average"].dtype == (torch.float64 if target == torch.float64 else torch.float32)
        assert p.isfinite().all()


@pytest.mark.parametrize("there, back", [(torch.float32, torch.float16), (torch.bfloat16, torch.float32)])
def test_a_cast_while_shown_does_not_touch_the_average(there, back):
    model = Net(there)
    optimizer = PACE(model.parameters(), lr=1e-2, eps=1e-3, pullback_strength=30.0)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    before = everything(optimizer)
    optimizer.eval()
    model.to(back)
    optimizer.train()
    after = everything(optimizer)
    for key in before:
        expected = before[key].to(back) if key.endswith("weights") else before[key]
        assert torch.equal(after[key], expected) and after[key].dtype == expected.dtype, key


def test_state_follows_a_model_from_the_meta_device():
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    optimizer = PACE(model.parameters(), lr=1e-2)
    assert optimizer.state[model.weight]["average"].is_meta
    real = torch.nn.Parameter(torch.ones(2, 2))
    torch.utils.swap_tensors(model.weight, real)
    real_bias = torch.nn.Parameter(torch.ones(2))
    torch.utils.swap_tensors(model.bias, real_bias)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["average"].device.type == "cpu"
    assert optimizer.state[model.weight]["step"].item() == 1


# --- Seeding --------------------------------------------------------------------------------------


def load_weights(model):
    model.load_state_dict(Net(seed=77).state_dict())


def cast_there_and_back(model):
    load_weights(model)
    model.double().float()


def set_data(model):
    for p, q in zip(model.parameters(), Net(seed=77).parameters(), strict=True):
        p.data = q.data.clone()


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("change", [load_weights, cast_there_and_back, set_data])
@pytest.mark.parametrize("shown_before", [False, True])
def test_weights_changed_before_the_first_step_count(change, shown_before, foreach):
    """Until the first step the average is live, whatever happens to live."""
    gradients = make_gradients(3)
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, foreach=foreach, **SETTINGS)
    if shown_before:
        optimizer.eval()
    change(model)
    expected = Net(seed=77)
    with averaged_weights(optimizer):
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p, q)
    for i, q in enumerate(expected.parameters()):
        assert torch.equal(optimizer.state_dict()["state"][i]["average"], q)
    optimizer.train()
    twin = PACE(expected.parameters(), lr=1e-2, foreach=foreach, **SETTINGS)
    advance(optimizer, list(model.parameters()), gradients)
    advance(twin, list(expected.parameters()), gradients)
    assert_same_bits(everything(optimizer), everything(twin))


def test_reset_average_starts_again_from_live():
    parameters = make_parameters()
    optimizer = run(parameters, make_gradients(6), **SETTINGS)
    optimizer.eval()
    reset_average(optimizer)
    with averaged_weights(optimizer):
        shown = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        parameters[0].add_(1.0)  # new weights for a second phase
    assert all(torch.equal(s, p) for s, p in zip(shown[1:], parameters[1:], strict=True))
    start = [p.detach().clone() for p in parameters]
    advance(optimizer, parameters, make_gradients(2, seed=3))
    for p, s in zip(parameters, start, strict=True):
        state = optimizer.state[p]
        assert state["step"].item() == 8
        expected = s + 9**-0.5 * (p.detach() - s)  # the first update after the reset, at t = 8
        assert torch.allclose(state["average"], expected, rtol=1e-12)


# --- torch.distributed.checkpoint -----------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("when", ["fresh", "mid-run", "shown"])
def test_dcp_get_and_set_change_nothing(when, flat):
    """A dummy step, a lost state or a swapped average would show in the steps that follow."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def trained(disturb):
        model = Net()
        optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
        fired = []
        optimizer.register_step_post_hook(lambda *_: fired.append(1))
        advance(optimizer, list(model.parameters()), make_gradients(0 if when == "fresh" else 5))
        steps = len(fired)
        optimizer.zero_grad()
        if when == "shown":
            optimizer.eval()
        held = [p.detach().clone() for p in model.parameters()]
        if disturb:
            state = get_optimizer_state_dict(model, optimizer, options=options)
            set_optimizer_state_dict(model, optimizer, state, options=options)
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=options)
        assert all(torch.equal(p, h) for p, h in zip(model.parameters(), held, strict=True))
        assert len(fired) == steps and optimizer.shows_average() == (when == "shown")
        advance(optimizer, list(model.parameters()), make_gradients(5, seed=6))
        return everything(optimizer)

    assert_same_bits(trained(False), trained(True))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("template", ["live", "average"])
def test_dcp_of_a_shown_average_resumes_from_live_or_refuses(flat, template, tmp_path):
    """Saved between eval() and train(): never go on from the average by accident."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    optimizer.zero_grad()
    live = everything(optimizer)
    optimizer.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, state = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)

    fresh_model = Net(seed=5)
    fresh = PACE(fresh_model.parameters(), **SETTINGS)
    if template == "average":
        advance(fresh, list(fresh_model.parameters()), make_gradients(1))
        fresh.zero_grad()
        fresh.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, state = get_state_dict(fresh_model, fresh, options=options)
        loaded = {"model": weights, "optimizer": state}
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)

    def put():
        set_state_dict(
            fresh_model,
            fresh,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
            options=options,
        )

    if template == "live":
        with pytest.raises(ValueError, match="held the average, and the live weights of parameter 0"):
            put()
    else:
        put()
        fresh.train()
        assert_same_bits(live, everything(fresh))


def test_a_plain_state_is_not_loaded_while_the_average_is_shown():
    """It has no live weights, and the parameters have none either: which ones should training go on from?"""
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(5), **SETTINGS)
    saved = copy.deepcopy(optimizer.state_dict())
    advance(optimizer, parameters, make_gradients(5, seed=2))
    with averaged_weights(optimizer):
        before = everything(optimizer)
        with pytest.raises(ValueError, match=r"hold the average now .*Call train"):
            optimizer.load_state_dict(saved)
        assert_same_bits(before, everything(optimizer))
    optimizer.load_state_dict(saved)
    set_gradients(parameters, make_gradients(1)[0])
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("then", ["step", "eval", "save"])
def test_saved_while_shown_resumes_from_live_in_either_order(model_first, then, dtype):
    """The model's part of such a checkpoint is the average; torch's set_state_dict loads it last."""
    model = Net(dtype)
    optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    with averaged_weights(optimizer):
        saved = {k: copy.deepcopy(v.state_dict()) for k, v in (("model", model), ("optimizer", optimizer))}
    again = Net(dtype, seed=5)
    resumed = PACE(again.parameters(), **SETTINGS)
    if model_first:
        again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert_same_bits(everything(optimizer), everything(resumed))
    if not model_first:
        again.load_state_dict(saved["model"])
    if then == "save":  # before anything else: the saved state must know that the average is shown
        weights, state = copy.deepcopy(again.state_dict()), copy.deepcopy(resumed.state_dict())
        again = Net(dtype, seed=6)
        resumed = PACE(again.parameters(), **SETTINGS)
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
    if then == "eval":
        resumed.eval()
        resumed.train()
        assert_same_bits(everything(optimizer), everything(resumed))
    advance(optimizer, list(model.parameters()), make_gradients(3, seed=2))
    if then == "step" and not model_first:
        set_gradients(list(again.parameters()), make_gradients(3, seed=2)[0])
        with pytest.warns(UserWarning, match="loaded after the optimizer"):
            resumed.step()
        advance(resumed, list(again.parameters()), make_gradients(3, seed=2)[1:])
    else:
        advance(resumed, list(again.parameters()), make_gradients(3, seed=2))
    assert_same_bits(everything(optimizer), everything(resumed))


def test_saved_while_shown_and_other_weights_loaded_after_it_count():
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    with averaged_weights(optimizer):
        saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    model.load_state_dict(Net(seed=8).state_dict())
    optimizer.train()
    for p, q in zip(model.parameters(), Net(seed=8).parameters(), strict=True):
        assert torch.equal(p, q)


OPTIONS = [
    StateDictOptions(),
    StateDictOptions(flatten_optimizer_state_dict=True),
    StateDictOptions(full_state_dict=True),
    StateDictOptions(cpu_offload=True),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_fresh_optimizer_in_eval_mode_takes_a_checkpoint(options):
    """Trainers call eval() early; what is loaded then is live, in either order."""
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    optimizer.zero_grad()
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    again = Net(seed=5)
    resumed = PACE(again.parameters(), **SETTINGS)
    resumed.eval()
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=state, options=options)
    resumed.train()
    assert_same_bits(everything(optimizer), everything(resumed))


@pytest.mark.parametrize("options", OPTIONS)
def test_dcp_does_not_mix_our_own_entries_into_a_checkpoint(options):
    """full_state_dict fills what a checkpoint lacks with the values at hand, a flat one with {}."""
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, pullback_strength=30.0)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    optimizer.zero_grad()
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    again = Net(seed=5)
    wider = PACE(again.parameters(), return_power=0.9)
    with pytest.warns(UserWarning, match="no 'returned' for 4"):
        set_optimizer_state_dict(again, wider, state, options=options)
    for p in again.parameters():
        assert torch.equal(wider.state[p]["returned"], wider.state[p]["average"])
    optimizer.eval()
    before = everything(optimizer)
    with pytest.raises(ValueError, match="hold the average now"):
        set_optimizer_state_dict(model, optimizer, state, options=options)
    assert_same_bits(before, everything(optimizer))


def test_a_load_in_inference_mode_and_a_state_carried_from_adamw():
    optimizer = run(make_parameters(), make_gradients(2))
    with torch.inference_mode():
        optimizer.load_state_dict(optimizer.state_dict())
    advance(optimizer, optimizer.param_groups[0]["params"], make_gradients(1))
    parameters = make_parameters()
    adamw = torch.optim.AdamW(parameters)
    advance(adamw, parameters, make_gradients(2))
    pace = PACE(parameters)
    for p in parameters:
        pace.state[p] = dict(adamw.state[p])
    reset_average(pace)
    advance(pace, parameters, make_gradients(1))
    assert pace.state[parameters[0]]["step"].item() == 3


def test_dcp_set_state_dict_of_a_shown_state_resumes_from_live():
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    optimizer.zero_grad()
    with averaged_weights(optimizer):
        weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    again = Net(seed=5)
    resumed = PACE(again.parameters(), **SETTINGS)
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=state)
    resumed.train()
    assert_same_bits(everything(optimizer), everything(resumed))
    advance(optimizer, list(model.parameters()), make_gradients(3, seed=2))
    advance(resumed, list(again.parameters()), make_gradients(3, seed=2))
    assert_same_bits(everything(optimizer), everything(resumed))


@pytest.mark.parametrize("name", VARIANTS)
def test_load_nontensor_step_and_older_groups(name):
    """A state from before an option existed, or with a plain number for t."""
    optimizer = run(make_parameters(), make_gradients(3), **VARIANTS[name])
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["step"] = int(entry["step"])
    for group in saved["param_groups"]:
        for key in ("skip_nonfinite", "parameters_hold", "gap", "foreach"):
            del group[key]
    twin = PACE(
        [p.detach().clone().requires_grad_() for p in optimizer.param_groups[0]["params"]],
        **{"lr": 1e-2, **VARIANTS[name]},
    )
    twin.load_state_dict(saved)
    advance(optimizer, optimizer.param_groups[0]["params"], make_gradients(3, seed=2))
    advance(twin, twin.param_groups[0]["params"], make_gradients(3, seed=2))
    assert_same_bits(everything(optimizer), everything(twin))
