"""Checkpoints: what goes in comes out, to the bit; what is damaged, foreign or half there is told."""

import dataclasses
import json
import math
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loop import PLAN, SHAPE
from tiny import RandomTokens
from torch import nn

from paceline.lm import checkpoint, files, packed
from paceline.lm.evaluate import NotFiniteError
from paceline.lm.files import Damaged
from paceline.lm.gpt import GPT
from paceline.lm.loop import Progress, Trainee, train
from paceline.lm.manifest import sealed
from paceline.runs import methods, names
from paceline.runs.config import Run

pytestmark = pytest.mark.slow

# --- What goes in comes out ---------------------------------------------------------------------------

NAMES = st.text(min_size=1, max_size=8).filter(lambda name: not name.startswith("$"))
NUMBERS = st.integers() | st.floats() | st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 5e-324, 2**70])
PLAIN = st.none() | st.booleans() | NUMBERS | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(NAMES, inner, max_size=3)
    ),
    max_leaves=12,
)


def same(a, b):
    """Equal in value and kind all the way down; NaN equals itself and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    match a:
        case torch.Tensor():
            bits = [
                x.contiguous().view(torch.uint8) if x.numel() else x for x in (a.reshape(-1), b.reshape(-1))
            ]
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
        case dict():
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case float():
            return repr(a) == repr(b)
    return a == b


def saved(root, *, step=3, facts=None, **parts):
    empty = {"live": {}, "optimizer": {}, "state": {}}
    return checkpoint.save(root, step, empty | parts, facts or {})


@settings(max_examples=40, deadline=None, derandomize=True)
@given(value=VALUES)
def test_plain_values_come_back_as_they_were(value):
    written = json.loads(json.dumps(packed.pack({"value": value}, "", {}), allow_nan=False))
    assert same(packed.unpack(written, {}), {"value": value})


def test_facts_and_tensors_come_back_from_the_disk(tmp_path):
    facts = {"betas": (0.9, (0.95, [math.inf, -0.0])), "none": None, "nested": {"a.b": {"c": [1, True, "ß"]}}}
    noise = torch.Generator().manual_seed(0)
    tensors = {
        "float": torch.randn(3, 4, generator=noise),
        "turned": torch.randn(3, 4, generator=noise).T,
        "part": torch.randn(8, generator=noise)[::2],
        "bfloat16": torch.randn(5, generator=noise).bfloat16(),
        "half": torch.tensor([1.0, math.inf, -math.nan]).half(),
        "double": torch.tensor(0.1, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "large": torch.tensor([2**53 + 1, -1]),
        "bits": torch.tensor([True, False]),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "step": torch.tensor(7.0),
    }
    shared = torch.arange(6.0)
    state = {"deep": [{"er": (tensors["half"], shared[:3])}, shared[3:]], "a.b": {"c.d": tensors["float"]}}
    folder = saved(tmp_path, live={"w.x.y": tensors["turned"]}, optimizer=tensors, state=state, facts=facts)
    found = checkpoint.load(folder)
    assert same(found["facts"], facts) and same(checkpoint.load_facts(folder), facts)
    assert same(found["optimizer"], tensors) and same(found["state"], state)
    assert same(found["live"], {"w.x.y": tensors["turned"]})
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, ValueError, "two tensors under one name, a.b"),
        ({"a": object()}, TypeError, "cannot save a: a object"),
        ({1: 2}, TypeError, "keys that are not names"),
        ({"a": {"$tensor": "b"}}, TypeError, "a has keys that are not names"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, state, error, words):
    with pytest.raises(error, match=words):
        saved(tmp_path, state=state)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    with pytest.raises(NotFiniteError, match="w has values that are not finite at step 3; nothing was saved"):
        saved(tmp_path, live={"w": torch.tensor([1.0, math.nan])})
    assert list(tmp_path.iterdir()) == []


# --- Models and optimizers ----------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.tensor(5))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    model, other = Tied(), Tied()
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad]) for m in (model, other)]
    model.last(model.first(torch.ones(1, 3))).sum().backward()
    optimizers[0].step()
    model.count += 1
    state = checkpoint.collect(model, optimizers[0])
    assert list(state["live"]) == ["frozen", "count", "first.weight", "first.bias"]
    found = checkpoint.load(checkpoint.save(tmp_path, 1, state, {}))
    checkpoint.restore(other, optimizers[1], found)
    assert other.last.weight is other.first.weight and other.count == 6
    assert same(checkpoint.collect(other, optimizers[1])["optimizer"], state["optimizer"])
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


SPECS = [
    "adamw",
    "adamw:amsgrad=true,foreach=true",
    "pace",
    "pace:every=3,return_power=0.8",
    "pace:c=inf",
    "pace:average_dtype=bfloat16",
    "pace+none",
    "pace+push",
    "pace+push:average_dtype=int8",
    "adamw+push",
    "adamw+pull:strength=inf,average_dtype=bfloat16",
    "ademamix",
    "sgd",
    "sgd:momentum=0.9",
    "lookahead",
    "gpa",
    "ema_nesterov",
    "schedule_free",
]
AVERAGES = (
    "power:0.7",
    "half_life:0.1",
    "bema:0.5",
    "ema",
    "short_ema",
)


def trainee_of(spec, averages, seed):
    torch.manual_seed(seed)
    run = Run(method=spec, averages=averages, steps=20, lr=1e-2, schedule="wsd", data=("x",))
    model = GPT(SHAPE)
    optimizer = methods.make_optimizer(run, model, 20)
    views, _ = methods.make_views(run, optimizer, model)
    return Trainee(
        model=model,
        optimizer=optimizer,
        scheduler=methods.make_schedule(run, optimizer, 20),
        samples=RandomTokens(40),
        held_out={"held-out": RandomTokens(4, seed=9)},
        views=views,
    )


def test_all_optimizers_are_tried():
    assert {names.parse(spec).optimizer.word for spec in SPECS} == set(names.BASES)
    assert {names.parse(spec).control for spec in SPECS} == {*names.CONTROLS, None}
    assert {spec.word for spec in names.averages_of(AVERAGES).values()} == set(names.AVERAGES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "averages"),
    [(spec, ()) for spec in SPECS] + [("adamw", AVERAGES), ("adamw+push", AVERAGES), ("sgd", AVERAGES[1:])],
)
def test_every_optimizer_goes_on_to_the_bit(tmp_path, spec, averages):
    plan = dataclasses.replace(PLAN, steps=6, evaluate_every=3)
    whole = trainee_of(spec, averages, seed=0)
    expected = list(train(whole, plan, Progress()))

    first, progress = trainee_of(spec, averages, seed=0), Progress()
    found = list(train(first, plan, progress, lambda: progress.step == 4))
    state = checkpoint.collect(first.model, first.optimizer)
    facts = {"schedule": first.scheduler.state_dict()}
    loaded = checkpoint.load(checkpoint.save(tmp_path, progress.step, state, facts))

    second = trainee_of(spec, averages, seed=1)
    checkpoint.restore(second.model, second.optimizer, loaded)
    second.scheduler.load_state_dict(loaded["facts"]["schedule"])
    assert same(checkpoint.collect(second.model, second.optimizer)["optimizer"], state["optimizer"])
    found += train(second, plan, progress)
    assert found == expected
    for part in ("live", "optimizer"):
        ours, theirs = (checkpoint.collect(t.model, t.optimizer)[part] for t in (second, whole))
        assert same(ours, theirs)


def test_random_generators_go_on_where_they_were(tmp_path):
    model = Tied()
    torch.manual_seed(3)
    torch.rand(5)
    folder = checkpoint.save(tmp_path, 1, checkpoint.collect(model, torch.optim.SGD(model.parameters())), {})
    expected = torch.rand(5)
    checkpoint.restore_random(checkpoint.load(folder))
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first.bias": None}, "the checkpoint has no 'first.bias'"),
        ({"more": torch.ones(1)}, "this model has no 'more'"),
        (
            {"first.bias": torch.ones(4)},
            r"first.bias has shape \(4,\) in the checkpoint and \(3,\) in this model",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(change, words):
    model = Tied()
    optimizer = torch.optim.SGD([model.first.weight])
    state = checkpoint.collect(model, optimizer)
    live = {name: tensor.clone() for name, tensor in state["live"].items()} | change
    state["live"] = {name: tensor for name, tensor in live.items() if tensor is not None}
    with pytest.raises(ValueError, match=words):
        checkpoint.restore(model, optimizer, state)


def test_a_checkpoint_of_another_optimizer_is_refused():
    model = Tied()
    optimizer = torch.optim.AdamW([model.first.weight])
    state = checkpoint.collect(model, optimizer)
    for entries in ({"first.weight": {"z": torch.ones(3, 3)}}, {"first.weight": 5}):
        state["optimizer"] = entries
        with pytest.raises(ValueError, match="the checkpoint is of another optimizer than this one"):
            checkpoint.restore(model, optimizer, state)


# --- Which ones there are -----------------------------------------------------------------------------


def steps_in(root):
    return [step for step, _ in checkpoint.all_of(root)]


@pytest.mark.parametrize(
    ("keep", "others", "up_to", "left"),
    [
        (1, (), 9, [9]),
        (2, (), 9, [7, 9]),
        (2, (3, 9), 9, [3, 7, 9]),
        (0, (1, 4), 9, [1]),
        (9, (), 9, [1, 3, 5, 7, 9]),
        (1, (), 5, [5, 7, 9]),
    ],
)
def test_the_newest_and_those_that_are_named_are_kept(tmp_path, keep, others, up_to, left):
    for step in (1, 3, 5, 7, 9):
        saved(tmp_path, step=step)
    checkpoint.prune(tmp_path, up_to=up_to, keep=keep, others=others)
    assert steps_in(tmp_path) == left
    assert len(list(tmp_path.iterdir())) == len(left)


def test_the_newest_that_is_whole_is_found_and_the_damaged_are_named(tmp_path):
    for step in (2, 4, 6, 8):
        saved(tmp_path, step=step, facts={"step": step}, live={"w": torch.ones(3)})
    (tmp_path / "step-00000008" / "manifest.json").unlink()
    data = bytearray((tmp_path / "step-00000006" / "live.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "step-00000006" / "live.safetensors").write_bytes(data)
    found, problems = checkpoint.newest(tmp_path)
    assert checkpoint.load_facts(found) == {"step": 4}
    found = [problem.partition(" is damaged: ")[::2] for problem in problems]
    assert [place for place, _ in found] == [f"{tmp_path}/step-00000008", f"{tmp_path}/step-00000006"]
    assert "manifest.json is missing" in found[0][1] and "live.safetensors is not what" in found[1][1]
    with pytest.raises(Damaged, match="step-00000008 is damaged"):
        checkpoint.load(tmp_path / "step-00000008")


def test_what_is_no_checkpoint_is_not_looked_at(tmp_path):
    assert checkpoint.newest(tmp_path / "nothing") == (None, [])
    real = saved(tmp_path, step=5)
    shutil.copytree(real, tmp_path / ".tmp-abc")
    shutil.copytree(real, tmp_path / "step-00000007-old")
    assert steps_in(tmp_path) == [5]


def test_a_link_to_a_checkpoint_is_named_and_not_read(tmp_path):
    real = saved(tmp_path, step=5)
    (tmp_path / "step-00000009").symlink_to(real)
    found, (problem,) = checkpoint.newest(tmp_path)
    assert found == real and "step-00000009 is damaged: it is a link" in problem


def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path):
    for value in (1, 2):
        saved(tmp_path, facts={"value": value})
    assert checkpoint.load(tmp_path / "step-00000003")["facts"] == {"value": 2}
    assert steps_in(tmp_path) == [3] and len(list(tmp_path.iterdir())) == 1


def test_what_was_being_replaced_comes_back(tmp_path, monkeypatch):
    """The process ended, or the disk failed, between the two renames."""
    saved(tmp_path, facts={"value": 1})
    replace, calls = os.replace, []

    def fails_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(5, "Input/output error")
        replace(*args)

    monkeypatch.setattr(files.os, "replace", fails_third)
    with pytest.raises(OSError, match="Input/output"):
        saved(tmp_path, facts={"value": 2})
    assert steps_in(tmp_path) == []
    files.remove_temporary(tmp_path)
    assert checkpoint.load(tmp_path / "step-00000003")["facts"] == {"value": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """So that a power cut leaves no checkpoint that is one by name only."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor):
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))  # noqa: PTH115, PTH119
        fsync(descriptor)

    def watched_replace(source, target):
        calls.append("renamed")
        replace(source, target)

    monkeypatch.setattr(files.os, "fsync", watched_fsync)
    monkeypatch.setattr(files.os, "replace", watched_replace)
    folder = saved(tmp_path / "root", live={"w": torch.ones(1)})
    at = calls.index("renamed")
    assert set(calls[: at - 1]) == {path.name for path in folder.iterdir()}
    assert calls[at - 1].startswith(".tmp-") and calls[at + 1 :] == ["root"]


# --- Manifests that lie -------------------------------------------------------------------------------

LISTED = ["live.safetensors", "optimizer.safetensors", "state.json", "state.safetensors"]


def forge(folder):
    """A manifest that agrees with whatever the files hold now."""
    known = files.describe(folder / name for name in LISTED)
    (folder / "manifest.json").write_text(json.dumps(sealed({"step": 3, "files": known})))


@pytest.mark.parametrize(
    "described",
    [
        "{",
        "[]",
        "7",
        "[" * 100_000,
        '{"live": {}}',
        '{"live": {"$tensor": "w"}, "optimizer": {}, "state": {}, "facts": {}}',
        '{"live": {"$tensor": ["w"]}, "optimizer": {}, "state": {}, "facts": {}}',
        '{"live": {}, "optimizer": {}, "state": {"$float": "x"}, "facts": {}}',
        '{"live": {}, "optimizer": {}, "state": {"$float": {}}, "facts": {}}',
        '{"live": {}, "optimizer": {}, "state": {"$tuple": 5}, "facts": {}}',
        '{"live": {}, "optimizer": {}, "state": {}, "facts": {"$tensor": "w"}}',
    ],
)
def test_a_state_that_is_none_is_damage_even_if_its_manifest_agrees(tmp_path, described):
    folder = saved(tmp_path)
    (folder / "state.json").write_text(described)
    forge(folder)
    with pytest.raises(Damaged, match=f"{folder.name}(/state.json|.* cannot be read)"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    "facts",
    ['{"$tensor": "w"}', '{"$float": "x"}', '{"$tuple": 5}', '{"a": {"$": 1}}', "5", "[" * 900 + "]" * 900],
)
def test_facts_that_are_none_are_damage(tmp_path, facts):
    folder = saved(tmp_path)
    (folder / "state.json").write_text(
        f'{{"live": {{}}, "optimizer": {{}}, "state": {{}}, "facts": {facts}}}'
    )
    with pytest.raises(Damaged, match=r"state\.json"):
        checkpoint.load_facts(folder)


def test_a_step_of_more_digits_sorts_by_number(tmp_path):
    for step in (99_999_999, 100_000_000):
        saved(tmp_path, step=step)
    assert steps_in(tmp_path) == [99_999_999, 100_000_000]
