"""What one trainer has and others do not: refusals, second runs, formats."""

import pytest
import torch
from torch import nn
from trainers import KINDS, LR, ROWS, STEPS, arguments, llama, loader_of, network, same, weights_of

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


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP"])
def test_transformers_refuses_sharded_trainers(kind, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from paceline.integrations.huggingface import AveragedModelCallback

    watch = ROWS["transformers"].train(tmp_path, KINDS["push"], more={"max_steps": 1})
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType[kind])
    with pytest.raises(ValueError, match=f"{kind} is not supported in the Trainer yet; use DDP"):
        AveragedModelCallback().on_train_begin(
            watch.trainer.args, None, None, model=watch.model, optimizer=watch.optimizer
        )


def test_settings_are_those_of_the_training_arguments(tmp_path):
    transformers = pytest.importorskip("transformers")
    from paceline.integrations.huggingface import pace_for_trainer

    args = arguments(tmp_path, transformers.TrainingArguments, adam_beta2=0.95, eval_strategy="no")
    found = pace_for_trainer(args, control=Control.push())
    optimizer = transformers.Trainer(llama(), args, optimizer_cls_and_kwargs=found).create_optimizer()
    assert type(optimizer) is PACE
    for group, decay in zip(optimizer.param_groups, (0.01, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"]) == (LR, (0.9, 0.95), 1e-8)
        assert (group["weight_decay"], group["control"]) == (decay, Control.push())
    with pytest.raises(ValueError, match=r"Invalid weight_decay value: .* give it to TrainingArguments"):
        pace_for_trainer(args, weight_decay=0.2)


# --- Lightning and Fabric -------------------------------------------------------------------------------


def test_lightning_refuses(tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

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
    for strategy in (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy):
        watch.trainer.strategy.__class__ = strategy  # they are only made where there are GPUs
        with pytest.raises(ValueError, match=f"{strategy.__name__} is not supported in Lightning yet"):
            AveragedModelCallback().setup(watch.trainer, watch.module, "fit")


@pytest.mark.parametrize("loaded", [False, True])
def test_another_fit_continues_from_live_or_from_what_was_loaded(loaded, tmp_path):
    pytest.importorskip("lightning")
    first = ROWS["lightning"].train(tmp_path, KINDS["push"], more={"max_steps": 4})
    expected = first.live[4]
    if loaded:
        first.trainer.validate(first.module, loader_of(), ckpt_path=tmp_path / "step=2.ckpt", verbose=False)
        expected = first.average[2]
    first.trainer.fit_loop.epoch_loop.max_steps = STEPS
    first.trainer.fit(first.module, loader_of(), loader_of())
    assert same(first.module.watch.live[0], expected)
    assert same(first.returned(), first.module.watch.average[-1])


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path")
def test_lightning_without_the_callback_resumes_from_live_and_warns(tmp_path):
    pytest.importorskip("lightning")
    straight = ROWS["lightning"].train(tmp_path, KINDS["attached"])
    with pytest.warns(UserWarning, match="need to be provided .*AveragedModelCallback"):
        resumed = ROWS["lightning"].train(tmp_path, KINDS["attached"], resume=True, averaged=False)
    assert same(resumed.live[-1], straight.live[-1])


def test_fabric_needs_nothing(tmp_path):
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    net = network()
    model, optimizer = fabric.setup(net, KINDS["push"](net.parameters()))
    for x, y in loader_of():
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    live, average = weights_of(net), averaged_state_dict(model, optimizer)
    with averaged_weights(optimizer):
        assert same(average, weights_of(net)) and not same(live, weights_of(net))
        fabric.save(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer})
    other = network()
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
