"""timm with PACE: its own checkpoints, loaders and tasks, with a small model of its own."""

import copy

import pytest
import torch
from torch import nn

try:
    timm = pytest.importorskip("timm", minversion="1.0.30")
except RuntimeError as error:  # a torchvision that was built for another torch
    pytest.skip(f"timm cannot be imported: {error}", allow_module_level=True)

from timm.models import load_checkpoint, load_state_dict, resume_checkpoint
from timm.task import ClassificationTask
from timm.utils import CheckpointSaver, distribute_bn

from paceline import PACE, Averages, PowerLaw, averaged_state_dict, averaged_weights
from paceline.integrations.timm import PaceModelEma

# torch's, of what its compiler imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

GENERATOR = torch.Generator().manual_seed(1)
IMAGES = torch.randn(8, 4, 3, 32, 32, generator=GENERATOR)
LABELS = torch.randint(5, (8, 4), generator=GENERATOR)


def make_model(**settings):
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=5, **settings)


def train(model, optimizer, batches):
    model.train()
    for i in batches:
        nn.functional.cross_entropy(model(IMAGES[i]), LABELS[i]).backward()
        optimizer.step()
        optimizer.zero_grad()


def make_saver(model, optimizer, folder, **settings):
    folder.mkdir(exist_ok=True)
    return CheckpointSaver(
        model, optimizer, checkpoint_dir=str(folder), recovery_dir=str(folder), max_history=2, **settings
    )


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a)


def copied(state):
    return {key: value.clone() for key, value in state.items()}


@pytest.fixture(scope="module")
def trained():
    model = make_model()
    optimizer = PACE(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    return model, optimizer


@pytest.mark.parametrize("by", ["model_ema", "task", "compiled"])
def test_loaders_take_the_average(by, trained, tmp_path):
    model, optimizer = trained
    live, average = copied(model.state_dict()), averaged_state_dict(model, optimizer)
    assert all(not torch.equal(live[name], average[name]) for name, _ in model.named_parameters())
    if by == "task":
        task = ClassificationTask(model, nn.CrossEntropyLoss())
        task.trainable_module_ema = PaceModelEma(model, optimizer)
        assert task.has_ema()
        task.update_ema(step=3)
        saver = make_saver(model, optimizer, tmp_path, task=task)
    else:
        whole = torch.compile(model) if by == "compiled" else model
        saver = make_saver(whole, optimizer, tmp_path, model_ema=PaceModelEma(whole, optimizer))
    saver.save_checkpoint(0, metric=1.0)
    saver.save_recovery(0, batch_idx=3)
    for file in ("last.pth.tar", "model_best.pth.tar", "checkpoint-0.pth.tar", "recovery-0-3.pth.tar"):
        path = str(tmp_path / file)
        saved = torch.load(path, weights_only=True)
        assert_same(saved["state_dict"], live)
        assert_same(saved["state_dict_ema"], average)
        assert_same(load_state_dict(path), average)
    loaded = make_model()
    load_checkpoint(loaded, path)
    assert_same(loaded.state_dict(), average)
    load_checkpoint(loaded, path, use_ema=False)
    assert_same(loaded.state_dict(), live)
    assert_same(make_model(checkpoint_path=path).state_dict(), average)


@pytest.mark.parametrize("kind", ["PACE", "int8", "Averages"])
@pytest.mark.parametrize("shown", [False, True])
def test_resumed_run_ends_as_an_uninterrupted_one(kind, shown, tmp_path):
    def make():
        model = make_model()
        if kind == "Averages":
            base = torch.optim.AdamW(model.parameters(), lr=1e-2)
            return model, Averages(base, {"long": PowerLaw(0.7)})
        return model, PACE(model.parameters(), lr=1e-2, average_dtype="int8" if kind == "int8" else "float32")

    model, optimizer = make()
    train(model, optimizer, range(2))
    saver = make_saver(model, optimizer, tmp_path, model_ema=PaceModelEma(model, optimizer))
    average = averaged_state_dict(model, optimizer)
    if shown:
        with averaged_weights(optimizer):
            saver.save_checkpoint(0)
    else:
        saver.save_checkpoint(0)
    saved = torch.load(tmp_path / "last.pth.tar", weights_only=True)
    assert_same(saved["state_dict_ema"], average)
    train(model, optimizer, range(2, 4))
    resumed, other = make()
    assert resume_checkpoint(resumed, str(tmp_path / "last.pth.tar"), other) == 1
    train(resumed, other, range(2, 4))
    assert_same(model.state_dict(), resumed.state_dict())
    assert_same(averaged_state_dict(model, optimizer), averaged_state_dict(resumed, other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_called_it_computes_with_the_average(dtype):
    model = make_model().to(dtype)
    optimizer = PACE(model.parameters(), lr=1e-2)
    images = IMAGES.to(dtype)
    for i in range(3):
        model(images[i]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model_ema = PaceModelEma(model, optimizer)
    before = copied(model.state_dict())
    returned = make_model().to(dtype).eval()
    returned.load_state_dict(model_ema.state_dict())
    with torch.inference_mode():  # as timm's validation has it
        assert model_ema.eval() is model_ema and not model.training
        expected = returned(images[0])
        assert torch.equal(model_ema(images[0]), expected)
        assert not torch.equal(model(images[0]), expected)
    with torch.no_grad(), averaged_weights(optimizer):
        assert torch.equal(model_ema(images[0]), expected)
    with pytest.raises(RuntimeError):
        model_ema(images[0, 0, 0, 0])
    assert_same(model.state_dict(), before)

    twin = copy.deepcopy((model, optimizer))
    model_ema.update(model, step=3)
    assert_same(model_ema.state_dict(), averaged_state_dict(*twin))
    for m, o in ((model, optimizer), twin):  # and training goes on
        m.train()
        m(images[3]).square().mean().backward()
        o.step()
    assert_same(model.state_dict(), twin[0].state_dict())


def test_statistics_of_batches_are_distributed_once(monkeypatch):
    model = make_model()
    reduced = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda buffer, op: reduced.append(buffer))
    distribute_bn(model, 1, reduce=True)
    assert reduced
    reduced.clear()
    distribute_bn(PaceModelEma(model, PACE(model.parameters())), 1, reduce=True)
    assert not reduced


def test_optimizer_without_an_average_is_refused():
    model = make_model()
    with pytest.raises(TypeError, match="AdamW keeps no average"):
        PaceModelEma(model, torch.optim.AdamW(model.parameters()))
