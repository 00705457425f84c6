"""What one trainer has and others do not: refusals, second runs, formats."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainers import ROWS, arguments
from watching import (
    FAILS,
    KINDS,
    LR,
    SAVED,
    STEPS,
    TOKENS,
    Run,
    Stop,
    llama,
    loader_of,
    loss_of,
    same,
    weights_of,
)

from paceline import PACE, Control, averaged_state_dict, averaged_weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # torch's, on CPUs without bfloat16
]


def half(params):
    return KINDS["push"](list(params)[:1])


def elsewhere(params):
    return KINDS["push"](nn.Linear(2, 1).parameters())


def adamw(params):
    return torch.optim.AdamW(params, LR)


# --- transformers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build, changes, reason",
    [
        (half, {}, r"PACE does not train \d+ trainable parameter\(s\) of the model"),
        (elsewhere, {}, "PACE trains parameters that are not the model's own"),
        (KINDS["push"], {"best": True, "more": {"save_only_model": True}}, "save_only_model=True leaves out"),
        (adamw, {}, "AdamW keeps no average"),
    ],
)
def test_transformers_refuses(build, changes, reason, tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises((ValueError, TypeError), match=reason):
        ROWS["transformers"].train(tmp_path, build, **changes)
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize(
    "kind, plugin, changes, reason",
    [
        ("DEEPSPEED", {}, {}, r"in ZeRO-1, 2 and 3, .* use fsdp=True \(FSDP2\), or DDP"),
        ("FSDP", {"fsdp_version": 1}, {}, 'FSDP1 is not supported; use FSDP2, by fsdp_config={"version": 2}'),
        (
            "FSDP",
            {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
            {"load_best_model_at_end": True, "save_steps": 2},
            'set fsdp_config={"state_dict_type": "FULL_STATE_DICT"}',
        ),
    ],
)
def test_transformers_refuses_what_hides_the_average(kind, plugin, changes, reason, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from paceline.integrations.huggingface import AveragedModelCallback

    watch = ROWS["transformers"].train(tmp_path, KINDS["push"], more={"max_steps": 1})
    args = arguments(Run(folder=tmp_path, build=None), transformers.TrainingArguments, **changes)
    transformers.Trainer(llama(), args, eval_dataset=[])  # which makes the state of Accelerate
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType[kind])
    monkeypatch.setitem(AcceleratorState._shared_state, "distributed_type", DistributedType[kind])
    monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", SimpleNamespace(**plugin))
    with pytest.raises(ValueError, match=reason):
        AveragedModelCallback().on_train_begin(args, None, None, model=watch.model, optimizer=watch.optimizer)


def test_live_weights_can_be_evaluated_after_training(tmp_path):
    pytest.importorskip("transformers")
    watch = ROWS["transformers"].train(tmp_path, KINDS["AdamW"], saves=False)
    for shown, expected in ((watch.callback.live_weights(), watch.live), (nullcontext(), watch.average)):
        with shown:
            watch.trainer.evaluate(metric_key_prefix="again")
        assert same(watch.forwards[-1][2], expected[-1])
    with watch.callback.live_weights():
        assert same(watch.returned(), watch.live[-1])
    assert same(watch.returned(), watch.average[-1])


def test_after_an_interrupt_the_average_is_evaluated_and_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    with pytest.raises(Stop) as raised:
        ROWS["transformers"].train(tmp_path, KINDS["push"], fail="training")
    (watch,) = raised.value.args
    watch.trainer.evaluate()
    assert same(watch.forwards[-1][2], watch.average[FAILS])
    watch.trainer.save_model(tmp_path / "returned")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "returned")
    assert same(weights_of(saved), watch.average[FAILS])


def test_a_callback_belongs_to_one_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    from paceline.integrations.huggingface import AveragedModelCallback

    callback, args = AveragedModelCallback(), transformers.TrainingArguments(tmp_path, use_cpu=True)
    transformers.Trainer(llama(), args, callbacks=[callback])
    with pytest.raises(ValueError, match="one AveragedModelCallback was given to two Trainers"):
        transformers.Trainer(llama(), args, callbacks=[callback])
    with pytest.raises(RuntimeError, match="has not trained"), callback.live_weights():
        pass


# --- Lightning and Fabric -------------------------------------------------------------------------------


def test_lightning_refuses(tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

    from paceline.integrations.lightning import AveragedModelCallback

    for build, changes, reason in (
        (adamw, {}, r"no optimizer of configure_optimizers keeps an average \(it returned: AdamW\)"),
        (elsewhere, {}, "PACE trains parameters that are not the module's own"),
        (
            KINDS["push"],
            {"more": {"callbacks": [EMAWeightAveraging()]}},
            "EMAWeightAveraging averages weights too",
        ),
    ):
        with pytest.raises(ValueError, match=f"AveragedModelCallback: {reason}"):
            ROWS["lightning"].train(tmp_path, build, **changes)
    watch = ROWS["lightning"].train(tmp_path, KINDS["push"], more={"max_steps": 1})
    for strategy in (DeepSpeedStrategy, FSDPStrategy):
        watch.trainer.strategy.__class__ = strategy  # they are only made where there are GPUs
        with pytest.raises(
            ValueError, match=f"{strategy.__name__} trains flat copies .* ModelParallelStrategy"
        ):
            AveragedModelCallback().setup(watch.trainer, watch.module, "fit")


@pytest.mark.parametrize("between", ["nothing", "a checkpoint", "data", "eval"])
def test_another_fit_continues_from_live_or_from_what_was_loaded(between, tmp_path):
    pytest.importorskip("lightning")
    first = ROWS["lightning"].train(tmp_path, KINDS["push"])
    trainer, module, expected = first.trainer, first.module, first.live[STEPS]
    if between == "a checkpoint":
        path, expected = tmp_path / f"step={SAVED}.ckpt", first.average[SAVED]
        trainer.validate(module, loader_of(TOKENS, 8), ckpt_path=path, verbose=False)
        assert same(first.returned(), expected)
    elif between == "data":
        for parameter in module.parameters():
            parameter.data.fill_(0.1)
        expected = first.returned()
    elif between == "eval":
        first.optimizer.train()
        trainer.validate(module, loader_of(TOKENS, 8), verbose=False)
        assert same(first.returned(), expected)
        first.optimizer.eval()
    if between != "data":  # which has overwritten the average
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
        assert same({k.removeprefix("network."): v for k, v in saved.items()}, first.average[STEPS])
    trainer.fit_loop.epoch_loop.max_steps = STEPS + 2
    trainer.fit(module, loader_of(TOKENS, 8), loader_of(TOKENS, 8))
    assert same(module.watch.live[0], expected)
    assert same(first.returned(), module.watch.average[-1])


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path")
def test_lightning_without_the_callback_resumes_from_live_and_warns(tmp_path):
    pytest.importorskip("lightning")
    straight = ROWS["lightning"].train(tmp_path, KINDS["AdamW"])
    with pytest.warns(UserWarning, match="need to be provided .*AveragedModelCallback"):
        resumed = ROWS["lightning"].train(tmp_path, KINDS["AdamW"], resume=SAVED, averaged=False)
    assert same(resumed.live[-1], straight.live[-1])


def test_fabric_needs_nothing(tmp_path):
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    net = llama()
    model, optimizer = fabric.setup(net, KINDS["push"](net.parameters()))
    for tokens in loader_of(TOKENS, 8):
        fabric.backward(loss_of(model, tokens))
        optimizer.step()
        optimizer.zero_grad()
    live, average = weights_of(net), averaged_state_dict(model, optimizer)
    with averaged_weights(optimizer):
        assert same(average, weights_of(net)) and not same(live, weights_of(net))
        fabric.save(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer})
    other = llama()
    model, optimizer = fabric.setup(other, KINDS["push"](other.parameters()))
    fabric.load(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer})
    assert same(weights_of(other), live) and same(averaged_state_dict(model, optimizer), average)


# --- timm, torchtitan, DeepSpeed ------------------------------------------------------------------------


def test_timm_saves_the_average_where_its_loaders_look_first(tmp_path):
    try:
        timm = pytest.importorskip("timm")
    except RuntimeError as error:  # a torchvision that was built for another torch
        pytest.skip(f"timm cannot be imported: {error}")
    from paceline.integrations.timm import PaceModelEma

    model = timm.create_model("test_resnet", num_classes=5)
    optimizer = KINDS["push"](model.parameters())
    model(torch.randn(4, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    ema, live = PaceModelEma(model, optimizer), weights_of(model)
    saver = timm.utils.CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=1.0)
    average = averaged_state_dict(model, optimizer)
    assert same(timm.models.load_state_dict(str(tmp_path / "last.pth.tar")), average)
    images = torch.randn(2, 3, 32, 32)
    with averaged_weights(optimizer):
        expected = model.eval()(images)
    assert torch.equal(ema.eval()(images), expected) and same(weights_of(model), live)


def network():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def test_torchtitan_container(tmp_path):
    pytest.importorskip("torchtitan.components.optimizer", exc_type=ImportError)
    from paceline.integrations.torchtitan import default_pace

    config = default_pace(lr=LR, control=Control.push())
    config.implementation = "foreach"
    parts, twin = [network()], network()
    container, optimizer = (
        config.build(model_parts=parts),
        PACE(twin.parameters(), LR, (0.9, 0.95), weight_decay=0.1, control=Control.push()),
    )
    for model, step in ((parts[0], container.step), (twin, optimizer.step)):
        nn.functional.mse_loss(model(torch.ones(8, 4)), torch.arange(8.0)[:, None]).backward()
        step()
    with averaged_weights(container.optimizers, model=nn.ModuleList(parts)), averaged_weights(optimizer):
        assert same(weights_of(parts[0]), weights_of(twin))
    fresh = config.build(model_parts=[network()])
    fresh.load_state_dict(container.state_dict())
    state = container.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in fresh.state_dict().items() if torch.is_tensor(v))


def test_deepspeed_is_refused(tmp_path):
    pytest.importorskip("deepspeed")
    from accelerate.utils import DeepSpeedPlugin

    plain = {"train_micro_batch_size_per_gpu": 8, "zero_allow_untested_optimizer": True}
    plugin = DeepSpeedPlugin(hf_ds_config=plain | {"zero_optimization": {"stage": 2}})
    with pytest.raises(RuntimeError, match="trains flat copies"):
        ROWS["accelerate"].train(tmp_path, KINDS["push"], more={"deepspeed_plugin": plugin})
