"""PACE in torchtitan: its Trainer with a small Llama, its checkpoints, its configuration.

The Trainer wants an accelerator; here it is told that the CPU is one. CI does not have torchtitan.
"""

import copy
import gc
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._utils
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


class Cpu:
    """What torchtitan asks of an accelerator and torch.cpu does not have."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def current_device(self):
        return 0

    def get_device_name(self, device=None):
        return "CPU"

    def get_device_properties(self, device=None):
        return SimpleNamespace(total_memory=1)

    def memory_stats(self, device=None):
        return {}

    def reset_peak_memory_stats(self):
        pass

    def empty_cache(self):
        pass


with pytest.MonkeyPatch.context() as patch:  # torchtitan asks once, when it is imported
    patch.setattr(torch._utils, "_get_available_device_type", lambda: "cpu")
    patch.setattr(torch._utils, "_get_device_module", lambda _: Cpu())
    pytest.importorskip("torchtitan.trainer", exc_type=ImportError)

from torchtitan.components.checkpointer.utils import canonical_fqn  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from paceline import PACE, averaged_state_dict, averaged_weights  # noqa: E402
from paceline.integrations.torchtitan import (  # noqa: E402
    AveragedValidator,
    PaceOptimizersContainer,
    default_pace,
    save_averaged_checkpoint,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # theirs, and torchdata's

STEPS = 20


# --- Their Trainer --------------------------------------------------------------------------------


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()

    def encode(self, *_, **__):
        raise NotImplementedError

    decode = encode

    def get_vocab_size(self):
        return 2048


class Counting(torch.utils.data.IterableDataset):
    """Rows that count up, with some noise; they know how many they have given."""

    def __init__(self, length, rank, ranks):
        self.length, self.rank, self.ranks, self.given = length, rank, ranks, 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.given * self.ranks + self.rank)
            self.given += 1
            first, noise = torch.randint(64, (2, self.length + 1), generator=generator)
            row = (first[0] + torch.arange(self.length + 1)) % 64
            row = torch.where(noise < 6, noise, row)
            yield {"input": row[:-1], "positions": torch.arange(self.length)}, row[1:]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class CountingLoader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        infinite: bool = True

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        rows = Counting(seq_len, dp_rank, dp_world_size)
        super().__init__(rows, dp_rank, dp_world_size, batch_size=local_batch_size)


def config_of(folder, validator=None, **changes):
    """torchtitan's debug model with two of its layers, and attention that a CPU has."""
    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), CountingLoader.Config()
    config.optimizer = default_pace(lr=3e-3)
    config.optimizer.implementation = "foreach"  # the usual one is for a GPU
    config.lr_scheduler.total_steps = STEPS
    config.validator = (validator or Validator).Config(
        enable=validator is not None, freq=10, steps=2, dataloader=CountingLoader.Config()
    )
    config.dump_folder = str(folder)
    config.checkpoint.enable = True
    config.debug.seed = 0
    training = config.training
    training.steps, training.seq_len, training.local_batch_size = STEPS, 16, 2
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    for name, value in changes.items():
        part, name = name.split("__")
        setattr(getattr(config, part), name, value)
    return config


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """As a launcher would start it; and what the Trainer switches off is switched on again."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LAUNCHED.items():
            patch.setenv(name, value)
        # torchtitan 0.3.0 calls it after the first step; torch 2.13 does not have it yet.
        patch.setattr(torch.distributed, "set_timeout", lambda *_: None, raising=False)
        patch.setattr("torchtitan.trainer.time.sleep", lambda _: None)  # for other ranks
        patch.setattr("torchtitan.components.metrics.MetricsProcessor.log_validation", log_validation)
        yield
    gc.enable()


LOSSES = {}


def log_validation(self, loss, step, extra_metrics=None):
    LOSSES[step] = loss


def run(config, then=lambda trainer: None):
    """Train; what a Trainer comes to: live, the optimizer's state, validation losses, and `then`."""
    LOSSES.clear()
    trainer = config.build()
    try:
        trainer.train()
        live = {name: p.full_tensor().clone() for name, p in parameters_of(trainer)}
        state = whole(trainer.optimizers.state_dict())
        return SimpleNamespace(
            live=live, state=copy.deepcopy(state), losses=dict(LOSSES), then=then(trainer), step=trainer.step
        )
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


def parameters_of(trainer):
    """By the names that they have in checkpoints of optimizers."""
    return [(canonical_fqn(n), p) for part in trainer.model_parts for n, p in part.named_parameters()]


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[key].dtype and torch.equal(value, b[key]), key
        else:
            assert value == b[key], key


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    changes = {"checkpoint__interval": 10, "checkpoint__last_save_model_only": False}

    def then(trainer):
        save_averaged_checkpoint(trainer.optimizers, folder / "average")
        with averaged_weights(trainer.optimizers, nn.ModuleList(trainer.model_parts)):
            average = {name: p.full_tensor().clone() for name, p in parameters_of(trainer)}
            Validator.validate(trainer.validator, trainer.model_parts, "average")
        Validator.validate(trainer.validator, trainer.model_parts, "live")
        return SimpleNamespace(average=average, losses=dict(LOSSES))

    return SimpleNamespace(folder=folder, **vars(run(config_of(folder, AveragedValidator, **changes), then)))


def test_trainer_steps_and_keeps_an_average(straight):
    assert straight.step == STEPS
    steps = {float(value) for key, value in straight.state.items() if key.endswith(".step")}
    assert steps == {STEPS}
    assert any(key.endswith(".feed_forward.w1.weight.returned") for key in straight.state)
    for name, live in straight.live.items():
        average = straight.then.average[name]
        assert torch.equal(average, straight.state[f"state.{name}.returned"])
        assert not torch.equal(average, live)


def test_validation_is_that_of_the_average(straight):
    losses = straight.then.losses
    assert straight.losses.keys() == {1, 10, 20}
    assert losses["average"] == losses[20] != losses["live"]
    assert all(math.isfinite(loss) for loss in losses.values())


@pytest.mark.parametrize("average_dtype", ["float32", "bfloat16"])
def test_resumed_run_ends_as_an_uninterrupted_one(average_dtype, straight, tmp_path):
    """The one that is resumed validates nothing: that has no part in training either."""
    changes = {"checkpoint__interval": 10, "checkpoint__last_save_model_only": False}
    optimizer = default_pace(lr=3e-3, average_dtype=average_dtype)
    optimizer.implementation = "foreach"
    folder = straight.folder
    if average_dtype != "float32":
        folder = tmp_path / "straight"
        config = config_of(folder, **changes)
        config.optimizer = optimizer
        straight = run(config)
    shutil.copytree(folder / "checkpoint" / "step-10", tmp_path / "checkpoint" / "step-10")
    config = config_of(tmp_path, **changes)
    config.optimizer = optimizer
    resumed = run(config)
    assert resumed.step == STEPS and not resumed.losses
    assert_same(straight.live, resumed.live)
    assert_same(straight.state, resumed.state)
    kept = {
        value.dtype
        for key, value in resumed.state.items()
        if key.startswith("state.") and key.split(".")[-1].startswith(("average", "returned"))
    }
    assert kept == {getattr(torch, average_dtype)}


def test_average_of_a_run_that_has_ended(straight):
    """Exported by the Trainer that is built once more and has no step to take."""

    def then(trainer):
        with pytest.raises(ValueError, match="a hook or an override of state_dict replaces them"):
            averaged_state_dict(trainer.model_parts[0], trainer.optimizers)  # queries, keys, values are fused
        save_averaged_checkpoint(trainer.optimizers, straight.folder / "again")
        with averaged_weights(trainer.optimizers, nn.ModuleList(trainer.model_parts)):
            loaded = {n: torch.zeros_like(p) for n, p in trainer.model_parts[0].state_dict().items()}
            dcp.load(loaded, checkpoint_id=straight.folder / "again")
            assert_same(whole(loaded), whole(trainer.model_parts[0].state_dict()))

    changes = {"checkpoint__interval": 10, "checkpoint__last_save_model_only": False}
    ended = run(config_of(straight.folder, **changes), then)
    assert ended.step == STEPS
    assert_same(straight.live, ended.live)
    assert_same(straight.state, ended.state)


def test_next_run_starts_from_the_average(straight, tmp_path):
    """Its own average too, which the optimizer allocated before the weights were loaded."""
    changes = {"checkpoint__initial_load_path": str(straight.folder / "average"), "training__steps": 1}
    config = config_of(tmp_path, **changes)
    config.optimizer = default_pace(lr=0.0)
    started = run(config)
    assert_same(straight.then.average, started.live)
    for name, average in straight.then.average.items():
        torch.testing.assert_close(started.state[f"state.{name}.returned"], average)


# --- The container --------------------------------------------------------------------------------


def parts():
    torch.manual_seed(0)
    return [
        nn.ModuleDict({"embed": nn.Linear(4, 8), "norm": nn.LayerNorm(8)}),
        nn.ModuleDict({"head": nn.Linear(8, 3, bias=False), "norm_out": nn.LayerNorm(3)}),
    ]


def group(pattern, **settings):
    return ParamGroupConfig(pattern=pattern, optimizer_name="PACE", optimizer_kwargs={"lr": 1e-2} | settings)


def container_of(model_parts, *groups, implementation="for-loop", **settings):
    groups = groups or (group("norm", weight_decay=0.0, **settings), group(".*", **settings))
    config = PaceOptimizersContainer.Config(param_groups=[*groups], implementation=implementation)
    return config.build(model_parts=model_parts)


def give_gradients(model_parts, seed):
    generator = torch.Generator().manual_seed(seed)
    for part in model_parts:
        for p in part.parameters():
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
            if isinstance(p, DTensor):
                gradient = distribute_tensor(gradient, p.device_mesh, p.placements)
            p.grad = gradient


def steps_of(container, seeds):
    for seed in seeds:
        give_gradients(container.model_parts, seed)
        container.step()
        container.zero_grad()


def weights_of(model_parts):
    return {
        f"{i}.{n}": p.detach().clone()
        for i, part in enumerate(model_parts)
        for n, p in part.named_parameters()
    }


def test_groups_by_pattern_and_parts_of_a_model():
    container = container_of(parts())
    assert isinstance(container, PaceOptimizersContainer) and isinstance(container, OptimizersContainer)
    assert [type(optimizer) for optimizer in container] == [PACE, PACE]
    found = {
        name: (number, settings["weight_decay"])
        for number, optimizer in enumerate(container)
        for settings in optimizer.param_groups
        for name in settings["param_names"]
    }
    assert found == {
        "norm.weight": (0, 0.0),
        "norm.bias": (0, 0.0),
        "embed.weight": (0, 0.01),
        "embed.bias": (0, 0.01),
        "norm_out.weight": (1, 0.0),
        "norm_out.bias": (1, 0.0),
        "head.weight": (1, 0.01),
    }
    with pytest.raises(ValueError, match="matched no parameters"):
        container_of(parts(), group("absent"), group(".*"))


@pytest.mark.parametrize("implementation", ["for-loop", "foreach"])
def test_each_part_is_trained_as_by_a_pace_of_its_own(implementation):
    model_parts, others = parts(), parts()
    container = container_of(model_parts, implementation=implementation)
    flags = {"fused": False, "foreach": implementation == "foreach"}
    optimizers = [
        PACE(
            [
                {"params": [p for n, p in part.named_parameters() if "norm" in n], "weight_decay": 0.0},
                {"params": [p for n, p in part.named_parameters() if "norm" not in n]},
            ],
            lr=1e-2,
            **flags,
        )
        for part in others
    ]
    steps_of(container, range(5))
    for seed in range(5):
        give_gradients(others, seed)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(weights_of(model_parts), weights_of(others))
    for part, other, optimizer in zip(model_parts, others, optimizers, strict=True):
        assert_same(averaged_state_dict(part, container), averaged_state_dict(other, optimizer))


def test_average_of_all_parts_is_shown_for_a_block():
    model_parts = parts()
    container = container_of(model_parts)
    steps_of(container, range(3))
    live = weights_of(model_parts)
    averages = {id(p): average.clone() for p, average in container.returned_averages()}
    expected = {
        f"{i}.{n}": averages[id(p)] for i, part in enumerate(model_parts) for n, p in part.named_parameters()
    }
    with pytest.raises(ZeroDivisionError), averaged_weights(container):
        assert container.shows_average()
        assert_same(weights_of(model_parts), expected)
        give_gradients(model_parts, 0)
        with pytest.raises(RuntimeError, match="inside `with averaged_weights"):
            container.step()
        assert_same(weights_of(model_parts), expected)
        raise ZeroDivisionError
    assert not container.shows_average()
    assert_same(weights_of(model_parts), live)
    steps_of(container, [3])


def test_average_that_cannot_be_shown_everywhere_is_shown_nowhere(monkeypatch):
    model_parts = parts()
    container = container_of(model_parts)
    steps_of(container, range(3))
    live = weights_of(model_parts)

    def interrupted(model):
        raise KeyboardInterrupt

    monkeypatch.setattr(container.optimizers[1], "eval", interrupted)
    with pytest.raises(KeyboardInterrupt), averaged_weights(container):
        pass
    assert not container.shows_average()
    assert_same(weights_of(model_parts), live)


def test_hooks_run_once_a_step():
    """Those of the container balance experts; AdamW, made before, patches the step that all share."""
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    container = container_of(parts())
    called = []
    container.register_step_pre_hook(lambda *_: called.append("before"))
    container.register_step_post_hook(lambda *_: called.append("after"))
    container.optimizers[0].register_step_pre_hook(lambda *_: called.append("before part 0"))
    steps_of(container, range(2))
    assert called == ["before", "before part 0", "after"] * 2


KINDS = [
    (torch.float32, {}),
    (torch.float32, {"average_dtype": "int8"}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"average_dtype": "bfloat16"}),
]


def check_resumed(folder, dtype, settings, mesh):
    """Three steps, a checkpoint, three more; and the same again from the checkpoint."""

    def fresh():
        model_parts = [part.to(dtype) for part in parts()]
        for part in model_parts if mesh else []:
            for module in part.values():
                fully_shard(module, mesh=mesh)
        return container_of(model_parts, **settings)

    def everything(container):
        weights = {n: p for part in container.model_parts for n, p in part.state_dict().items()}
        return {**weights, "optimizer": container.state_dict()}

    straight = fresh()
    steps_of(straight, range(3))
    saved = straight.state_dict()
    assert {key.split(".")[0] for key in saved} == {"state", "param_groups"}
    assert float(saved["state.embed.weight.step"]) == 3
    assert saved["param_groups.norm.weight.weight_decay"] == 0.0
    dcp.save(everything(straight), checkpoint_id=folder)
    steps_of(straight, range(3, 6))

    resumed = fresh()
    template = everything(resumed)
    # Taking the state of a fresh one is no step: nothing to count, nothing to forget.
    assert float(template["optimizer"]["state.embed.weight.step"]) == 0
    assert all(p.grad is None for part in resumed.model_parts for p in part.parameters())
    dcp.load(template, checkpoint_id=folder)
    for part in resumed.model_parts:
        part.load_state_dict(template, strict=False)
    resumed.load_state_dict(template["optimizer"])
    steps_of(resumed, range(3, 6))
    assert_same(*(whole(weights_of(container.model_parts)) for container in (straight, resumed)))
    assert_same(*(whole(container.state_dict()) for container in (straight, resumed)))
    return straight


def whole(values):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in values.items()}


# Sharded int8 averages and master weights are for a GPU.
@pytest.mark.parametrize(
    "dtype, settings, sharded",
    [*((*kind, False) for kind in KINDS), *((*KINDS[i], True) for i in (0, 2, 3))],
)
def test_flat_state_resumes_through_a_distributed_checkpoint(dtype, settings, sharded, tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        check_resumed(tmp_path, dtype, settings, init_device_mesh("cpu", (1,)) if sharded else None)
    finally:
        torch.distributed.destroy_process_group()


RANK = """
import sys, torch; torch.set_num_threads(1); import test_torchtitan as t
folder = t.Path(sys.argv[1])
torch.distributed.init_process_group("gloo")
mesh = t.init_device_mesh("cpu", (2,))
container = t.check_resumed(folder / "checkpoint", torch.float32, {}, mesh)
averages = {id(p): average.full_tensor() for p, average in container.returned_averages()}
assert container.model_parts[0]["embed"].weight.to_local().shape == (4, 4)
t.save_averaged_checkpoint(container, folder / "average")
alone = {name: torch.zeros(p.shape) for part in t.parts() for name, p in part.named_parameters()}
t.dcp.load(alone, checkpoint_id=folder / "average")
for part in container.model_parts:
    for name, p in part.named_parameters():
        assert torch.equal(alone[name], averages[id(p)]) and not torch.equal(alone[name], p.full_tensor())
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
def test_two_ranks(tmp_path):
    """Without the Trainer, whose reduction of gradients is not among those of gloo."""
    (tmp_path / "rank.py").write_text(RANK)
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHED} | {"PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-m", *command, tmp_path / "rank.py", tmp_path],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_state_of_a_shown_average_is_not_loaded_without_its_live_weights():
    container = container_of(parts())
    steps_of(container, range(2))
    with averaged_weights(container):
        saved = container.state_dict()
        fresh = container_of(parts())
        with pytest.raises(ValueError, match="live"):
            fresh.load_state_dict(saved)


def test_what_would_have_no_average_is_refused():
    adamw = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})
    with pytest.raises(ValueError, match="Invalid optimizer_name: 'AdamW'; allowed: 'PACE'"):
        container_of(parts(), group("norm"), adamw)
    with pytest.raises(ValueError, match="Invalid implementation: 'fused_opt_states_bf16'"):
        container_of(parts(), implementation="fused_opt_states_bf16")


def test_default_group_has_the_settings_of_theirs():
    (ours,), theirs = default_pace(lr=1e-3, return_power=0.8).param_groups, llama3_debugmodel().optimizer
    expected = theirs.param_groups[0].optimizer_kwargs | {"lr": 1e-3, "return_power": 0.8}
    assert (ours.pattern, ours.optimizer_name, ours.optimizer_kwargs) == (".*", "PACE", expected)
