"""Lightning's Trainer with PACE: real Trainers and files, beside a loop without Lightning for reference."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("lightning", minversion="2.6")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.tuner import Tuner

from paceline import PACE, Averages, PowerLaw, Pullback, averaged_state_dict, averaged_weights
from paceline.integrations.lightning import AveragedModelCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # torch's, on CPUs without bfloat16
    pytest.mark.filterwarnings(
        'ignore:Be aware that when using .ckpt_path.*following callbacks. ."ModelCheckpoint'
    ),
]

ROOT = Path(__file__).parents[2]
BATCHES = 4  # an epoch
EPOCHS = 2
STEPS = BATCHES * EPOCHS


class Batches:
    """The same batches in every epoch, in which it goes on where it was when saved."""

    def __init__(self, seed=1, batches=BATCHES):
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randn(batches, 8, 4, generator=generator)
        self.labels = torch.randn(batches, 8, 1, generator=generator)
        self.start = self.at = 0

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        start, self.start = self.start, 0
        for i in range(start, len(self)):
            self.at = i + 1
            yield self.rows[i], self.labels[i]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"] % len(self)


class Module(pl.LightningModule):
    """Four kinds of model, all with a buffer that training moves."""

    def __init__(self, kind="plain", settings=None):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1)]
        self.layers = nn.Sequential(*layers)
        if kind == "frozen":
            self.layers[0].requires_grad_(False)
        if kind == "tied":
            self.layers.insert(4, nn.Linear(8, 8))
            self.layers[4].weight = self.layers[3].weight
        if kind == "bfloat16":
            self.bfloat16()

    def loss_of(self, batch):
        x, y = (part.to(self.layers[0].weight.dtype) for part in batch)
        return F.mse_loss(self.layers(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss_of(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss_of(batch))

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss_of(batch))

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0].to(self.layers[0].weight.dtype))

    def configure_optimizers(self):
        return optimizer_for(self)


def optimizer_for(module):
    return PACE(module.parameters(), lr=3e-2, **module.hparams.settings or {})


def cloned(state):
    return {name: value.detach().clone() for name, value in state.items()}


def rounded(module, average):
    """As the module would hold it."""
    return {name: average[name].to(value.dtype) for name, value in module.state_dict().items()}


def reference(kind="plain", settings=None, steps=STEPS, accumulate=1, module=None):
    """Live and average after every step, of a loop without Lightning. [0] is before the first."""
    module = module or Module(kind, settings)
    module.train()
    optimizer, seen = optimizer_for(module), []

    def look():
        average = averaged_state_dict(module, optimizer)
        seen.append((cloned(module.state_dict()), rounded(module, average)))

    look()
    while len(seen) <= steps:
        for i, batch in enumerate(Batches(), 1):
            (module.loss_of(batch) / accumulate).backward()
            if i % accumulate == 0 and len(seen) <= steps:
                optimizer.step()
                optimizer.zero_grad()
                look()
    return seen


def trainer_of(folder, callbacks=(), **changes):
    settings = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, Checkpoint) for c in callbacks),
    }
    return pl.Trainer(
        default_root_dir=folder, callbacks=[AveragedModelCallback(), *callbacks], **settings | changes
    )


def fit(folder, module=None, callbacks=(), ckpt_path=None, **changes):
    trainer = trainer_of(folder, callbacks, **changes)
    trainer.fit(module or Module(), Batches(), Batches(2, 2), ckpt_path=ckpt_path)
    return trainer


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def ended(trainer):
    """Live and average of a Trainer that has fitted."""
    module, (optimizer, *_) = trainer.lightning_module, trainer.optimizers
    assert optimizer.shows_average()
    average = cloned(module.state_dict())
    optimizer.train()
    live = cloned(module.state_dict())
    optimizer.eval()
    return live, average


def assert_ended(trainer, expected):
    for mine, other in zip(ended(trainer), expected, strict=True):
        assert same(mine, other)


def load(path):
    return torch.load(path, weights_only=True)


def assert_checkpoint(path, expected):
    live, average = expected
    saved = load(path)
    assert same(saved["state_dict"], average)
    if "optimizer_states" in saved:
        assert same(saved["current_model_state"], live)
        assert saved["averaging_state"] == {}
    else:
        assert "current_model_state" not in saved


MODELS = {
    "plain": {},
    "frozen": {},
    "tied": {},
    "bfloat16": {},
    "int8": {"average_dtype": "int8"},
    "one average": {"gain": "paper"},
}


def model_of(name):
    return Module(name if name in ("frozen", "tied", "bfloat16") else "plain", MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_run_and_its_checkpoints_are_those_of_a_plain_loop(name, tmp_path):
    expected = reference(module=model_of(name))
    assert not same(*expected[STEPS])
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = fit(tmp_path, model_of(name), [saves], val_check_interval=2)
    assert_ended(trainer, expected[STEPS])
    for step in range(1, STEPS + 1):
        assert_checkpoint(tmp_path / f"step={step}.ckpt", expected[step])
    for step in (3, 4, 6):  # within an epoch, at its end, before a validation
        resumed = fit(tmp_path / "again", model_of(name), ckpt_path=tmp_path / f"step={step}.ckpt")
        assert_ended(resumed, expected[STEPS])
        loaded = Module.load_from_checkpoint(tmp_path / f"step={step}.ckpt")
        assert same(cloned(loaded.state_dict()), expected[step][1])


# --- Which weights are where, at every hook -------------------------------------------------------

TRAINS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
)
VALIDATES = (
    "on_sanity_check_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
)
ENDS = ("on_train_end", "on_fit_end", "teardown")


class Everywhere(Callback):
    """Looks at the weights and saves checkpoints in every hook."""

    def __init__(self, folder):
        self.folder = folder
        self.seen = []  # hook, step, what the module holds, checkpoints

    def look(self, hook, trainer, module):
        (optimizer,) = trainer.optimizers
        step = int(optimizer.state[module.layers[3].weight]["step"])
        saved = []
        for kind, weights_only in (("whole", False), ("weights", True)):
            saved.append(self.folder / f"{len(self.seen)}-{kind}.ckpt")
            trainer.save_checkpoint(saved[-1], weights_only=weights_only)
            if hook == "on_before_backward":
                continue  # needs the weights that the loss was computed with
            with averaged_weights(module.optimizers()):
                saved.append(self.folder / f"{len(self.seen)}-{kind}-block.ckpt")
                trainer.save_checkpoint(saved[-1], weights_only=weights_only)
        self.seen.append((hook, step, cloned(module.state_dict()), saved))


for hook in (*TRAINS, *VALIDATES, *ENDS):

    def called(self, trainer, module, *args, hook=hook, **kwargs):
        self.look(hook, trainer, module)

    setattr(Everywhere, hook, called)


def parameters_of(state):
    return {name: value for name, value in state.items() if "running" not in name and "num_" not in name}


def buffers_of(state):
    return {name: value for name, value in state.items() if name not in parameters_of(state)}


@pytest.mark.parametrize(
    "name, before",
    [
        ("plain", True),
        ("plain", False),
        pytest.param("bfloat16", False, marks=pytest.mark.long),
        pytest.param("int8", False, marks=pytest.mark.long),
    ],
)
def test_every_hook_sees_and_saves_the_right_weights(name, before, tmp_path):
    expected = reference(module=model_of(name))
    everywhere = Everywhere(tmp_path)
    trainer = trainer_of(tmp_path, [everywhere], max_epochs=1, val_check_interval=2)
    trainer.callbacks.sort(key=lambda callback: (callback is everywhere) != before)
    trainer.fit(model_of(name), Batches(), Batches(2, 2))
    assert_ended(trainer, expected[BATCHES])
    assert {hook for hook, *_ in everywhere.seen} == {*TRAINS, *VALIDATES, *ENDS}
    assert {step for _, step, *_ in everywhere.seen} == {*range(BATCHES + 1)}
    for hook, step, holds, checkpoints in everywhere.seen:
        live, average = map(parameters_of, expected[step])
        assert same(parameters_of(holds), live if hook in TRAINS else average), hook
        for path in checkpoints:
            saved = load(path)
            assert same(parameters_of(saved["state_dict"]), average), (hook, path)
            assert same(buffers_of(saved["state_dict"]), buffers_of(holds))
            if "weights" not in path.name:
                assert same(parameters_of(saved["current_model_state"]), live), (hook, path)
                assert same(buffers_of(saved["current_model_state"]), buffers_of(holds))
    # Those from which Lightning goes on where it was.
    whole = {(hook, step): paths for hook, step, _, paths in everywhere.seen}
    for key in (("on_train_batch_end", 3), ("on_validation_end", 2), ("on_train_epoch_end", 4)):
        for path in whole[key][:2]:
            assert_ended(fit(tmp_path, model_of(name), ckpt_path=path), expected[STEPS])


WAYS = {
    "validation end": {"monitor": "loss", "save_top_k": -1},
    "train epoch end": {"save_on_train_epoch_end": True, "save_top_k": -1},
    "every step": {"every_n_train_steps": 1, "save_top_k": -1},
    "last": {"save_last": True, "every_n_epochs": 1},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weights_only, before", [(False, True), (True, False)])
def test_model_checkpoint_keeps_the_average(way, weights_only, before, tmp_path):
    expected = reference()
    saves = ModelCheckpoint(tmp_path, "{step}", save_weights_only=weights_only, **WAYS[way])
    trainer = trainer_of(tmp_path, [saves])
    trainer.callbacks.sort(key=lambda callback: (callback is saves) != before)
    module = Module()
    trainer.fit(module, Batches(), Batches(2, 2))
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == {"every step": STEPS}.get(way, 2)
    for file in files:
        step = load(file)["global_step"]
        assert_checkpoint(file, expected[step])
    assert same(cloned(Module.load_from_checkpoint(file).state_dict()), expected[step][1])
    if way == "validation end":
        best = load(trainer.checkpoint_callback.best_model_path)["state_dict"]
        for evaluate in (trainer.validate, trainer.test):
            (metrics,) = evaluate(module, Batches(2, 2), ckpt_path="best", verbose=False)
            assert same(cloned(module.state_dict()), best)
            assert metrics["loss"] == trainer.checkpoint_callback.best_model_score
    if weights_only:
        with pytest.raises(KeyError, match="contains only the model"):
            fit(tmp_path, ckpt_path=files[0])


class Fails(Callback):
    def __init__(self, hook, step, error=ZeroDivisionError):
        self.step, self.error = step, error
        setattr(self, hook, self.fail)

    def fail(self, trainer, *args):
        if trainer.global_step == self.step and not trainer.sanity_checking:
            raise self.error


@pytest.mark.filterwarnings(r"ignore:.*was called without a model", "ignore:.*no last checkpoint available")
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end"])
@pytest.mark.parametrize("kind", ["ModelCheckpoint", "OnExceptionCheckpoint"])
@pytest.mark.parametrize("before", [True, False])
def test_a_run_that_failed_holds_and_saves_the_average_and_goes_on_from_live(hook, kind, before, tmp_path):
    expected = reference()
    saves = (
        ModelCheckpoint(tmp_path, "failed", save_on_exception=True, every_n_epochs=100)
        if kind == "ModelCheckpoint"
        else OnExceptionCheckpoint(tmp_path, "failed")
    )
    trainer = trainer_of(tmp_path, [Fails(hook, 6), saves], val_check_interval=2)
    trainer.callbacks.sort(key=lambda callback: isinstance(callback, AveragedModelCallback) == before)
    module = Module()
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, Batches(), Batches(2, 2))
    assert_ended(trainer, expected[6])
    (file,) = tmp_path.glob("failed*.ckpt")
    assert_checkpoint(file, expected[6])
    assert_ended(fit(tmp_path, ckpt_path=file), expected[STEPS])
    trainer.callbacks = trainer.callbacks[:1]
    module.train()  # Lightning would warn
    trainer.fit(module, Batches(), Batches(2, 2), ckpt_path=file)  # the one that failed
    assert_ended(trainer, expected[STEPS])


def test_interrupted_by_ctrl_c(tmp_path):
    trainer = trainer_of(tmp_path, [Fails("on_validation_batch_end", 4, KeyboardInterrupt)])
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            trainer.fit(Module(), Batches(), Batches(2, 2))
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning leaves it ignored
    assert_ended(trainer, reference()[4])


# --- After fit ------------------------------------------------------------------------------------


def mean_loss(state):
    module = Module()
    module.load_state_dict(state)
    module.eval()
    with torch.no_grad():
        return sum(module.loss_of(batch) for batch in Batches(2, 2)).item() / 2


def test_after_fit_the_module_holds_the_average_and_is_evaluated_on_it(tmp_path, caplog):
    live, average = reference()[STEPS]
    module = Module()
    with caplog.at_level(logging.INFO):
        trainer = trainer_of(tmp_path)
        trainer.fit(module, Batches(), Batches(2, 2))
    assert [r.message for r in caplog.records if "average" in r.message] == [
        "The module holds the average of its weights; test, predict and save_checkpoint use it. "
        "Live weights come back when this Trainer fits it again."
    ]
    assert mean_loss(average) != pytest.approx(mean_loss(live), rel=1e-5)
    for evaluate in (trainer.validate, trainer.test):
        (metrics,) = evaluate(module, Batches(2, 2), verbose=False)
        assert metrics["loss"] == pytest.approx(mean_loss(average), rel=1e-6)
    predicted = trainer.predict(module, Batches(2, 2))[0]
    loaded = Module()
    loaded.load_state_dict(average)
    torch.testing.assert_close(predicted, loaded.eval().layers(Batches(2, 2).rows[0]).detach())
    assert_ended(trainer, (live, average))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert_checkpoint(tmp_path / "after.ckpt", (live, average))
    for sanity in (0, 2):  # nothing left to do: no step is taken, and the average held
        again = fit(tmp_path, ckpt_path=tmp_path / "after.ckpt", num_sanity_val_steps=sanity)
        assert_ended(again, (live, average))


def test_another_fit_goes_on_from_live(tmp_path):
    module = Module()
    trainer = trainer_of(tmp_path, max_epochs=1)
    trainer.fit(module, Batches(), Batches(2, 2))
    live, _ = reference()[BATCHES]
    start = Module()
    start.load_state_dict(live)
    expected = reference(module=start, steps=BATCHES)
    trainer.validate(module, Batches(2, 2), verbose=False)
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(module, Batches(), Batches(2, 2))
    assert_ended(trainer, expected[BATCHES])


def test_another_fit_goes_on_from_live_that_was_moved(tmp_path):
    """From a GPU, Lightning moves module and state apart at the end, and back when it fits again."""
    module = Module()
    trainer = trainer_of(tmp_path, max_epochs=1)
    trainer.fit(module, Batches(), Batches(2, 2))
    live, average = reference()[BATCHES]
    module._apply(torch.clone)
    for state in trainer.optimizers[0].state.values():
        state.update({key: value.clone() for key, value in state.items()})
    assert same(cloned(module.state_dict()), average)
    trainer.callbacks.append(Starts())
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(module, Batches(), Batches(2, 2))
    assert same(trainer.callbacks[-1].seen[0], live)


class Keeps(Module):
    """Gives the same optimizer for every fit."""

    def configure_optimizers(self):
        self.kept = self.kept if hasattr(self, "kept") else optimizer_for(self)
        return self.kept


def test_another_fit_with_the_same_optimizer_is_one_run(tmp_path):
    module, trainer = Keeps(), trainer_of(tmp_path, [Starts()], max_epochs=1)
    for _ in range(2):
        trainer.fit(module, Batches(), Batches(2, 2))
        trainer.fit_loop.epoch_progress.reset()
    assert same(trainer.callbacks[1].seen[1], reference()[BATCHES][0])
    assert_ended(trainer, reference()[STEPS])


def test_checkpoint_for_an_optimizer_that_shows_its_average(tmp_path):
    """Left so by an earlier fit, after which other weights were loaded."""
    module, saves = Keeps(), ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = trainer_of(tmp_path, [saves])
    trainer.fit(module, Batches(), Batches(2, 2))
    trainer.test(module, Batches(2, 2), ckpt_path=tmp_path / "step=6.ckpt", verbose=False)
    assert same(cloned(module.state_dict()), reference()[6][1])
    trainer.fit(module, Batches(), Batches(2, 2), ckpt_path=tmp_path / "step=3.ckpt")
    assert_ended(trainer, reference()[STEPS])


class Starts(Callback):
    """What the module holds when training starts, after the sanity check."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, module):
        self.seen.append(cloned(module.state_dict()))


@pytest.mark.parametrize("by", ["hand", "ckpt_path"])
def test_another_fit_goes_on_from_what_was_loaded_since(by, tmp_path):
    module = Module()
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = trainer_of(tmp_path, [saves], max_epochs=1)
    trainer.fit(module, Batches(), Batches(2, 2))
    loaded = reference()[2][1]
    if by == "hand":
        module.load_state_dict(loaded)
    else:
        trainer.test(module, Batches(2, 2), ckpt_path=tmp_path / "step=2.ckpt", verbose=False)
    start = Module()
    start.load_state_dict(loaded)
    expected = reference(module=start, steps=BATCHES)
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(module, Batches(), Batches(2, 2))
    assert_ended(trainer, expected[BATCHES])


def test_a_fit_of_another_module_leaves_the_first_with_its_average(tmp_path):
    first, second = Module(), Module("frozen")
    trainer = trainer_of(tmp_path, max_epochs=1)
    trainer.fit(first, Batches(), Batches(2, 2))
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(second, Batches(), Batches(2, 2))
    assert same(cloned(first.state_dict()), reference()[BATCHES][1])
    assert_ended(trainer, reference("frozen")[BATCHES])


# --- Ways of training -----------------------------------------------------------------------------


def test_gradient_accumulation(tmp_path):
    expected = reference(steps=4, accumulate=2)
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = fit(tmp_path, callbacks=[saves], accumulate_grad_batches=2, val_check_interval=1)
    assert_ended(trainer, expected[4])
    for step in range(1, 5):
        assert_checkpoint(tmp_path / f"step={step}.ckpt", expected[step])


class Scheduled(Module):
    def configure_optimizers(self):
        optimizer = optimizer_for(self)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_learning_rate_scheduler_resumes(tmp_path):
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    straight = fit(tmp_path, Scheduled(), [saves])
    assert straight.optimizers[0].param_groups[0]["lr"] < 1e-6
    assert not same(ended(straight)[0], reference()[STEPS][0])
    assert_ended(fit(tmp_path, Scheduled(), ckpt_path=tmp_path / "step=3.ckpt"), ended(straight))


class Two(Module):
    """By hand: the first layers by one optimizer, the last by another."""

    automatic_optimization = False

    def __init__(self, kinds=("PACE", "AdamW")):
        super().__init__()
        self.kinds = kinds

    def configure_optimizers(self):
        parts = self.layers[:4].parameters(), self.layers[4].parameters()
        return [BUILDERS[kind](part) for kind, part in zip(self.kinds, parts)]

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss_of(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


BUILDERS = {
    "PACE": lambda part: PACE(part, lr=3e-2),
    "AdamW": lambda part: torch.optim.AdamW(part, lr=3e-2),
    "Pullback": lambda part: Pullback(torch.optim.AdamW(part, lr=3e-2), gain="scaled"),
    "Averages": lambda part: Averages(torch.optim.AdamW(part, lr=3e-2), {"a": PowerLaw(0.7)}),
}


def plain_two(kinds, steps):
    module = Two(kinds)
    optimizers = module.configure_optimizers()
    for i in range(steps):
        module.loss_of(list(Batches())[i % BATCHES]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    average = live = cloned(module.state_dict())
    for optimizer, kind in zip(optimizers, kinds):
        if kind != "AdamW":
            exported = averaged_state_dict(module, optimizer, others="live")
            average = {n: a if torch.equal(exported[n], live[n]) else exported[n] for n, a in average.items()}
    return live, average


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize(
    "kinds", [("PACE", "AdamW"), ("AdamW", "PACE"), ("Pullback", "PACE"), ("Averages", "AdamW")]
)
def test_several_optimizers_by_hand(kinds, tmp_path):
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    straight = fit(tmp_path, Two(kinds), [saves], val_check_interval=1)
    module = straight.lightning_module
    for step in (2, 4, 16):  # Lightning counts both
        assert_checkpoint(tmp_path / f"step={step}.ckpt", plain_two(kinds, step // 2))
    live, average = plain_two(kinds, STEPS)
    changed = {name.split(".")[1] for name in live if not torch.equal(live[name], average[name])}
    assert changed == {
        layer for layers, kind in zip(("013", "4"), kinds) if kind != "AdamW" for layer in layers
    }
    assert same(cloned(module.state_dict()), average)
    resumed = fit(tmp_path, Two(kinds), ckpt_path=tmp_path / "step=6.ckpt")
    assert same(cloned(resumed.lightning_module.state_dict()), average)
    for optimizer in (o for o in resumed.optimizers if not isinstance(o, torch.optim.AdamW)):
        optimizer.train()
    assert same(cloned(resumed.lightning_module.state_dict()), live)


def test_lightnings_wrapper_is_the_optimizer_inside(tmp_path):
    """It takes on its class; told of a block, it would not tell the optimizer that steps."""

    class Looks(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            (inside,) = trainer.optimizers
            wrapper = module.optimizers()
            assert wrapper is not inside and isinstance(wrapper, PACE)
            with averaged_weights(wrapper):
                assert inside.shows_average()
                with pytest.raises(RuntimeError, match="inside averaged_weights"):
                    inside.step()
            assert not inside.shows_average()

    assert_ended(fit(tmp_path, callbacks=[Looks()]), reference()[STEPS])


def test_half_precision_of_the_trainer(tmp_path):
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    straight = fit(tmp_path, callbacks=[saves], precision="bf16-true")
    live, average = ended(straight)
    assert live["layers.0.weight"].dtype == torch.bfloat16 and not same(live, average)
    resumed = fit(tmp_path, ckpt_path=tmp_path / "step=3.ckpt", precision="bf16-true")
    assert_ended(resumed, (live, average))
    kept = resumed.optimizers[0].state[resumed.lightning_module.layers[0].weight]
    assert kept["average"].dtype == torch.float32


# --- Checkpoints and others -----------------------------------------------------------------------


def test_resumed_without_the_callback_live_comes_back_and_lightning_warns(tmp_path):
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    fit(tmp_path, callbacks=[saves])
    trainer = trainer_of(tmp_path, [saves])
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, AveragedModelCallback)]
    with pytest.warns(UserWarning, match=r"need to be provided .*'AveragedModelCallback'"):
        trainer.fit(Module(), Batches(), Batches(2, 2), ckpt_path=tmp_path / "step=3.ckpt")
    assert same(cloned(trainer.lightning_module.state_dict()), reference()[STEPS][0])


def test_resumed_from_a_checkpoint_without_the_callback(tmp_path):
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = trainer_of(tmp_path, [saves])
    trainer.callbacks = [saves]
    trainer.fit(Module(), Batches(), Batches(2, 2))
    assert same(load(tmp_path / "step=3.ckpt")["state_dict"], reference()[3][0])
    assert_ended(fit(tmp_path, ckpt_path=tmp_path / "step=3.ckpt"), reference()[STEPS])


class WithAdamW(Module):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-2)


def test_resumed_from_a_checkpoint_of_lightnings_own_average(tmp_path):
    """It has live weights in the same place; PACE then averages from there."""
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = trainer_of(tmp_path, [EMAWeightAveraging(decay=0.5), saves])
    trainer.callbacks = trainer.callbacks[1:]
    trainer.fit(WithAdamW(), Batches(), Batches(2, 2))
    theirs = load(tmp_path / "step=3.ckpt")
    live = theirs["current_model_state"]
    assert not same(live, theirs["state_dict"])
    seen = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer, module, *_):
            seen.append(cloned(module.state_dict()))

    with pytest.warns(UserWarning, match="no 'average'|need to be provided"):
        fit(tmp_path, callbacks=[Looks()], ckpt_path=tmp_path / "step=3.ckpt")
    assert same(seen[0], live)


class Searches(Callback):
    """As Lightning's search for a learning rate: back to a checkpoint that is loaded without callbacks."""

    def __init__(self, folder):
        self.file = folder / "search.ckpt"

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.file)
            (optimizer,) = trainer.optimizers
            for _ in range(3):
                module.loss_of((torch.ones(8, 4), torch.ones(8, 1))).backward()
                optimizer.step()
            optimizer.zero_grad()
            saved = load(self.file)
            trainer.strategy.load_model_state_dict(saved)
            trainer.strategy.load_optimizer_state_dict(saved)


def test_checkpoint_loaded_within_a_run_without_callbacks(tmp_path):
    assert_ended(fit(tmp_path, callbacks=[Searches(tmp_path)]), reference()[STEPS])


def test_search_for_a_learning_rate_leaves_no_trace(tmp_path):
    trainer, module = trainer_of(tmp_path), Module()
    module.lr = 3e-2
    Tuner(trainer).lr_find(module, Batches(batches=20), Batches(2, 2), num_training=10, update_attr=False)
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(module, Batches(), Batches(2, 2))
    assert_ended(trainer, reference()[STEPS])


def test_file_has_no_weight_twice(tmp_path):
    """The average of `state_dict` is that of the optimizer, and live is kept once."""
    module = Module()
    module.layers[3] = nn.Linear(8, 4096)
    module.layers[4] = nn.Linear(4096, 1)
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.fit(module, Batches(), Batches(2, 2))
    trainer.optimizers[0].train()
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    weights = sum(p.numel() * 4 for p in module.parameters())
    # live, two moments, two averages
    assert 5 * weights < (tmp_path / "whole.ckpt").stat().st_size < 5.2 * weights
    # By these torch knows what to migrate in old files.
    versions = module.state_dict()._metadata
    saved = load(tmp_path / "whole.ckpt")
    assert saved["state_dict"]._metadata == saved["current_model_state"]._metadata == versions


# --- What is refused ------------------------------------------------------------------------------


class Copies(Module):
    def state_dict(self, *args, **kwargs):
        return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}


class Elsewhere(Module):
    def configure_optimizers(self):
        return PACE(nn.Linear(2, 1).parameters())


class Never(Module):
    def training_step(self, batch, batch_idx):
        raise AssertionError("a step was taken")


@pytest.mark.parametrize(
    "module, callbacks, reason",
    [
        (WithAdamW, [], r"no optimizer of configure_optimizers keeps an average \(it returned: AdamW\)"),
        (Copies, [], r"8 parameter\(s\) that PACE trains do not appear in the module's state_dict"),
        (Elsewhere, [], "PACE trains parameters that are not the module's own"),
        (Module, [EMAWeightAveraging()], "EMAWeightAveraging averages weights too"),
        (Module, [StochasticWeightAveraging(1e-2)], "StochasticWeightAveraging averages weights too"),
    ],
)
def test_what_would_not_end_with_the_average_is_refused(module, callbacks, reason, tmp_path):
    kind = type("Refused", (Never, module), {})
    with pytest.raises(ValueError, match=f"AveragedModelCallback: {reason}"):
        fit(tmp_path, kind(), callbacks)


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy])
def test_strategies_that_shard_are_refused(strategy, tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.strategy.__class__ = strategy  # as they are only made where there are GPUs
    with pytest.raises(ValueError, match=f"strategy {strategy.__name__} shards or hides"):
        AveragedModelCallback().setup(trainer, Module(), "fit")


# --- Processes ------------------------------------------------------------------------------------


class Slowly(Callback):
    def on_train_batch_end(self, *_):
        time.sleep(0.2)


KILLED = """
import torch; torch.set_num_threads(1); import test_lightning as t
from lightning.pytorch.callbacks import ModelCheckpoint
saves = ModelCheckpoint({folder!r}, "{{step}}", every_n_train_steps=1, save_top_k=-1)
t.fit({folder!r}, callbacks=[saves, t.Slowly()], max_epochs=4, val_check_interval=1)
"""


@pytest.mark.slow
@pytest.mark.long
def test_killed_run_ends_as_an_uninterrupted_one(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with (tmp_path / "log").open("w") as log:
        code = KILLED.format(folder=str(tmp_path))
        run = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=log, stderr=log)
    deadline = time.monotonic() + 300
    while not (tmp_path / "step=5.ckpt").exists():
        assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (tmp_path / f"step={4 * BATCHES}.ckpt").exists()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = reference(steps=4 * BATCHES)[-1]
        for step in (4, 5):  # the latest is whole: Lightning renames it when it is
            resumed = fit(tmp_path, ckpt_path=tmp_path / f"step={step}.ckpt", max_epochs=4)
            assert_ended(resumed, expected)
    finally:
        torch.set_num_threads(threads)


RANK = """
import sys, torch; torch.set_num_threads(1); import test_lightning as t
from lightning.pytorch.callbacks import ModelCheckpoint
folder = t.Path(sys.argv[1])
two = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
straight = t.fit(folder, callbacks=[saves], **two)
assert straight.world_size == 2
resumed = t.fit(folder, ckpt_path=folder / "step=3.ckpt", **two)
t.assert_ended(resumed, t.ended(straight))
if straight.is_global_zero:  # the same batches on both: as on one
    t.assert_ended(straight, t.reference()[t.STEPS])
    t.assert_checkpoint(folder / "step=3.ckpt", t.reference()[3])
print("done")
"""


@pytest.mark.long
def test_two_processes(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, tmp_path / "rank.py", tmp_path / "out"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr
