"""Saving, copying, casting: at every step, in every format, nothing is lost."""

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
    SETTINGS,
    Net,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    run,
)
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)

from paceline import PACE, averaged_weights, reset_average


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
def test_resumed_at_any_of_20_steps_is_bit_equal(save_and_load, foreach, tmp_path):
    """S1: saved and loaded after every k, the rest of the run ends in the same weights and state."""
    gradients = make_gradients(20)
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, foreach=foreach, **SETTINGS)
    advance(optimizer, list(model.parameters()), gradients)
    straight = everything(optimizer)

    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, foreach=foreach, **SETTINGS)
    for k in range(20):
        fresh_model = Net(seed=99)
        fresh = PACE(fresh_model.parameters(), lr=1e-2, foreach=foreach, **SETTINGS)
        folder = tmp_path / str(k)
        folder.mkdir()
        save_and_load(model, optimizer, folder, fresh_model, fresh)
        assert_same_bits(everything(optimizer), everything(fresh))
        advance(fresh, list(fresh_model.parameters()), gradients[k:])
        assert_same_bits(straight, everything(fresh))
        advance(optimizer, list(model.parameters()), gradients[k : k + 1])


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
    optimizer = PACE(model.parameters(), lr=1e-2, eps=1e-3, gain="paper", pullback_strength=30.0)
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


@pytest.mark.parametrize("foreach", PATHS)
def test_averages_are_seeded_by_the_first_step_itself(foreach):
    """With nobody looking in between: no state_dict, no evaluation."""
    parameters = make_parameters(dtype=torch.float32)
    settings = {"gain": "paper", "weight_decay": 0.0, "pullback_strength": 30.0, "return_power": 0.9}
    optimizer = PACE(parameters, lr=1e-2, foreach=foreach, **settings)
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(5.0)
    advance(optimizer, parameters, [[torch.zeros_like(p) for p in parameters]])
    for parameter in parameters:
        for key in ("average", "returned"):
            assert (optimizer.state[parameter][key] == 5.0).all()


def test_all_groups_say_what_the_parameters_hold():
    """Also one that is added while the average is shown."""
    parameters = make_parameters()
    optimizer = PACE([{"params": parameters[:2]}, {"params": parameters[2:3]}], lr=1e-2)
    advance(optimizer, parameters[:3], [g[:3] for g in make_gradients(3)])
    optimizer.eval()
    optimizer.add_param_group({"params": parameters[3:]})
    saved = optimizer.state_dict()
    assert [group["parameters_hold"] for group in saved["param_groups"]] == ["average"] * 3
    assert all("live" in entries for entries in saved["state"].values())  # the new one's too
    optimizer.train()
    saved = optimizer.state_dict()
    assert [group["parameters_hold"] for group in saved["param_groups"]] == ["live"] * 3
    assert not any("live" in entries for entries in saved["state"].values())


def test_a_copy_right_after_loading_knows_the_live_weights_that_came_along():
    """The model's part of such a checkpoint, the average, may be loaded into the copy still."""
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, **SETTINGS)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    with averaged_weights(optimizer):
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    fresh = Net(seed=4)
    loaded = PACE(fresh.parameters(), **SETTINGS)
    loaded.load_state_dict(saved[1])
    fresh, loaded = copy.deepcopy((fresh, loaded))
    fresh.load_state_dict(saved[0])
    loaded.train()
    assert_same_bits(everything(loaded), everything(optimizer))


def test_a_step_count_carried_over_by_hand_counts_on():
    """In float32, as AdamW keeps it, it would stand still at 2^24."""
    parameter = torch.ones(2).requires_grad_()
    optimizer = PACE([parameter])
    optimizer.state[parameter] = {
        "step": torch.tensor(2.0**24),
        "exp_avg": torch.zeros(2),
        "exp_avg_sq": torch.ones(2),
    }
    advance(optimizer, [parameter], [[torch.ones(2)]] * 2)
    assert optimizer.state[parameter]["step"].item() == 2**24 + 2


@pytest.mark.parametrize("first", ["step", "state_dict"])
def test_state_follows_parameters_that_replace_others_before_the_first_step(first):
    """As trainers do who shard a model after its optimizer was made. Of the others nothing is kept alive."""
    gone = make_parameters()
    optimizer = PACE(gone, lr=0.1)
    others = [weakref.ref(parameter) for parameter in gone]
    parameters = make_parameters()
    optimizer.param_groups[0]["params"] = parameters
    del gone
    same = make_parameters()
    plain = PACE(same, lr=0.1)
    if first == "state_dict":
        assert optimizer.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
    advance(optimizer, parameters, make_gradients(steps=3))
    advance(plain, same, make_gradients(steps=3))
    gc.collect()
    assert all(other() is None for other in others)
    assert set(optimizer.state) == set(parameters)
    assert_same_bits(everything(optimizer), everything(plain))


def test_what_steps_were_taken_with_stays_for_parameters_that_are_put_back():
    parameters, others = make_parameters(), make_parameters(seed=2)
    optimizer = PACE(parameters, lr=0.1)
    advance(optimizer, parameters, make_gradients(steps=2))
    before = everything(optimizer)
    optimizer.param_groups[0]["params"] = others
    advance(optimizer, others, make_gradients(steps=1))
    optimizer.param_groups[0]["params"] = parameters
    assert_same_bits(before, everything(optimizer))


def test_moments_stay_for_parameters_whose_average_begins_anew():
    parameters = make_parameters()
    optimizer = PACE([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
    advance(optimizer, parameters, make_gradients(steps=2))
    reset_average(optimizer)
    before = everything(optimizer)
    group = optimizer.param_groups.pop()
    with pytest.raises(RuntimeError, match="has taken steps with"):
        optimizer.state_dict()
    optimizer.param_groups.append(group)
    assert_same_bits(before, everything(optimizer))


@pytest.mark.parametrize("key", ["a parameter", "a name"])
def test_state_of_others_than_its_parameters_is_no_hindrance(key):
    """A look at the state of a parameter that has none leaves an empty one, and loading keeps any name."""
    parameters = make_parameters()
    optimizer = PACE(parameters, lr=0.1)
    other = "note" if key == "a name" else torch.ones(1)
    optimizer.state[other] = {"x": 1} if key == "a name" else {}
    assert set(optimizer.state_dict()["state"]) == {*range(len(parameters)), *({"note"} & {other})}


def test_a_frozen_first_parameter_costs_no_look_at_all_others(monkeypatch):
    parameters = make_parameters()
    parameters[0].requires_grad_(False)
    optimizer, looks = PACE(parameters, lr=0.1), []
    monkeypatch.setattr(PACE, "_follow_groups", lambda self: looks.append(self))
    advance(optimizer, parameters[1:], [gradients[1:] for gradients in make_gradients(steps=2)])
    assert not looks and parameters[0] not in optimizer.state
    parameters[0].requires_grad_(True)
    advance(optimizer, parameters, make_gradients(steps=1))
    assert looks  # it has a state from now on


def test_parameters_replaced_after_a_step_are_refused_in_words():
    """Their averages stayed behind. torch says KeyError and a number."""
    parameters = make_parameters()
    optimizer = PACE(parameters)
    advance(optimizer, parameters, make_gradients(steps=1))
    optimizer.param_groups[0]["params"] = make_parameters()
    with pytest.raises(RuntimeError, match=r"PACE has taken steps with \d+ parameter\(s\) that are in none"):
        optimizer.state_dict()
