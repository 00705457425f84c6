"""The trainers of the battery: each trains 12 steps, evaluates the average every 2, and saves every 6.

All of them train one small language model under a `Watch`, which notes the weights of every forward pass.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from paceline import PACE, Control, attach, averaged_state_dict, averaged_weights, save_averaged
from paceline.optim.weights import has_keeper

STEPS, SAVED, FAILS = 12, 6, 8
LR = 3e-2
Weights = dict[str, torch.Tensor]


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as one optimizer, which is what trainers take."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        matrices = [p for p in params if p.ndim == 2]
        others = [p for p in params if p.ndim != 2]
        self.parts = [torch.optim.Muon(matrices, lr), torch.optim.AdamW(others, lr)]
        super().__init__([dict(part.param_groups[0]) for part in self.parts], {})

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups = [{key: group[key] for key in ("params", *part.defaults)}]
            part.state = self.state
            part.step()
        return loss


KINDS = {
    "paper": lambda params: PACE(params, LR),
    "push": lambda params: PACE(params, LR, control=Control.push()),
    "int8": lambda params: PACE(params, LR, control=Control.push(), average_dtype="int8"),
    "AdamW": lambda params: attach(torch.optim.AdamW(params, LR), control=Control.push()),
    "Muon": lambda params: attach(MuonAndAdamW(params, LR), control=Control.push()),
}


class Stop(Exception):
    """What ends a run early, with its watch."""


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def weights_of(model: nn.Module) -> Weights:
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters() if p.requires_grad}


class Watch:
    """The live weights and the average after every step, the weights of every forward pass, and losses.

    Of sharded models a forward pass sees gathered weights, so only its loss is noted.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, run: "Run") -> None:
        self.model, self.optimizer, self.run = model, optimizer, run
        self.live, self.average = [weights_of(model)], [weights_of(model)]
        self.forwards: list[tuple[int, str, Weights]] = []
        """The steps taken, what it is for ("training", "average", "live"), and the weights it saw."""
        self.asked = "average"
        self.losses: dict[str, float] = {}
        """Of evaluations, by step and weights."""
        model.register_forward_pre_hook(self._note_forward)
        optimizer.register_step_post_hook(self._note_step)

    @property
    def steps(self) -> int:
        return (SAVED if self.run.resume else 0) + len(self.live) - 1

    def _note_forward(self, model: nn.Module, inputs: Any) -> None:
        if not self.run.format:
            self.forwards.append(
                (self.steps, "training" if model.training else self.asked, weights_of(model))
            )
        if self.steps == FAILS and self.run.fail == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == FAILS and self.run.fail == ("training" if model.training else "evaluation"):
            raise Stop(self)

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if all(group["lr"] == 0 for group in optimizer.param_groups):
            return  # by which torch.distributed.checkpoint learns the entries of a state
        self.live.append(weights_of(self.model))
        if has_keeper(optimizer):
            state = averaged_state_dict(self.model, optimizer)
            self.average.append({name: whole(state[name]) for name in self.live[-1]})

    @contextmanager
    def asks_for_live(self) -> Iterator[None]:
        self.asked = "live"
        yield
        self.asked = "average"

    def note_loss(self, weights: str, loss: Any) -> None:
        """Note the mean loss of all ranks."""
        value = torch.as_tensor(float(loss))
        if dist.is_initialized():
            dist.all_reduce(value)
            value /= dist.get_world_size()
        self.losses[f"{weights} {self.steps}"] = value.item()

    def returned(self) -> Weights:
        """The trained weights that the model holds now."""
        return weights_of(self.model)


def same(a: Weights, b: Weights) -> bool:
    """Return whether weights are equal, of all those that `b` has."""
    return all(torch.equal(a[name].to(b[name].dtype), b[name]) for name in b)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a trainer is asked for."""

    folder: Path
    build: Callable[..., torch.optim.Optimizer]
    resume: bool = False
    """From the checkpoint of step 6."""
    saves: bool = True
    fail: str = ""
    """Where a forward pass after step 8 raises: "training" or "evaluation"; or "killed"."""
    averaged: bool = True
    """Whether our callback takes part."""
    best: bool = False
    """End with the best model: an early one, because here higher losses count as better."""
    scaler: Any = None
    accumulate: int = 1
    ranks: int = 1
    format: str = ""
    """Sharded by FSDP2, with checkpoints that are "full" or "sharded"; empty: not sharded."""
    reshard: bool = True
    tied: bool = False
    dtype: torch.dtype = torch.float32
    more: dict[str, Any] = field(default_factory=dict)
    """Settings of the trainer."""

    def model(self) -> nn.Module:
        return llama(tie_word_embeddings=self.tied).to(self.dtype)


@dataclass(frozen=True)
class Row:
    """A trainer, and how its checkpoint of a step is read: live weights and average."""

    loop: Callable[[Run], Watch]
    saved: Callable[[Watch, Path, int], tuple[Weights, Weights]]

    def train(self, folder: Path, build: Any, **settings: Any) -> Watch:
        return self.loop(Run(folder=folder, build=build, **settings))


# --- What is learned ------------------------------------------------------------------------------------

TOKENS = torch.randint(32, (40, 8), generator=torch.Generator().manual_seed(1))
TOKENS[:32] = (TOKENS[:32, :1] + torch.arange(8)) % 32  # what there is to learn


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, bos_token_id=1, eos_token_id=2, **sizes | changes))


def loss_of(model: nn.Module, tokens: torch.Tensor = TOKENS[:24]) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def loader_of(rows: torch.Tensor, size: int) -> Any:
    return torch.utils.data.DataLoader(rows, batch_size=size)


def share(rows: torch.Tensor, run: Run) -> torch.Tensor:
    """Return what this rank takes of some rows, by the environment of torchrun."""
    return rows[int(os.environ.get("RANK", "0")) :: run.ranks]


# --- transformers and TRL -------------------------------------------------------------------------------


def fsdp2_on_cpu() -> None:
    """Let Accelerate shard on a CPU, which it does on GPUs only."""
    from accelerate import state
    from accelerate.utils import DistributedType

    init = state.AcceleratorState.__init__

    def init_sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **settings: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **settings)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    state.AcceleratorState.__init__ = init_sharded


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


def arguments(run: Run, kind: type, **changes: Any) -> Any:
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4 // run.ranks,
        "per_device_eval_batch_size": 16 // run.ranks,
        "gradient_accumulation_steps": run.accumulate,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "steps" if run.saves else "no",
        "save_steps": SAVED,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    if run.best:
        settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
        settings |= {"greater_is_better": True, "save_steps": 2}
    if run.ranks > 1:
        settings["ddp_backend"] = "gloo"
    if run.format:
        sharding = {
            "state_dict_type": f"{run.format.upper()}_STATE_DICT",
            "reshard_after_forward": run.reshard,
        }
        settings |= {"fsdp": True, "fsdp_config": sharding}
    return kind(str(run.folder), **settings | changes | run.more)


def data_for_trl() -> dict[str, Any]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    rows = Dataset.from_dict({"input_ids": TOKENS.tolist()})
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(32)}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<2>")
    train, held_out = rows.select(range(24)), rows.select(range(24, 40))
    return {"train_dataset": train, "eval_dataset": held_out, "processing_class": tokenizer}


def with_transformers(run: Run, trl: str = "") -> Watch:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from paceline.integrations.huggingface import AveragedModelCallback, optimizer_for_trainer

    watches: list[Watch] = []
    ours = AveragedModelCallback()

    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = run.build([p for p in model.parameters() if p.requires_grad])
        watches.append(Watch(model, optimizer, run))
        return optimizer

    class NotesLosses(TrainerCallback):
        """Evaluates live weights at odd steps; the Trainer evaluates the average at even ones."""

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step % 4 == 1 and run.averaged and not run.fail:
                with ours.live_weights(), watches[0].asks_for_live():
                    watches[0].note_loss("live", trainer.evaluate(metric_key_prefix="live")["live_loss"])

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **rest: Any) -> None:
            if "eval_loss" in metrics:
                watches[0].note_loss("average", metrics["eval_loss"])

    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    kind, args = Trainer, TrainingArguments
    data: dict[str, Any] = {"train_dataset": rows[:24], "eval_dataset": rows[24:]}
    changes = {}
    if trl:
        from trl import SFTConfig, SFTTrainer

        kind, args, data = SFTTrainer, SFTConfig, data_for_trl()
        changes = {"bf16": False, "gradient_checkpointing": False}
    trainer = kind(
        lora() if trl == "lora" else run.model(),
        arguments(run, args, **changes),
        optimizer_cls_and_kwargs=optimizer_for_trainer(build) if run.averaged else (lambda: build, {}),
        callbacks=[NotesLosses(), *([ours] if run.averaged else [])],
        **data,
    )
    trainer.accelerator.scaler = run.scaler
    trainer.train(resume_from_checkpoint=str(run.folder / f"checkpoint-{SAVED}") if run.resume else None)
    (watch,) = watches
    watch.trainer, watch.callback = trainer, ours
    if run.best:
        watch.best = int(trainer.state.best_model_checkpoint.rpartition("-")[2])
    return watch


def saved_by_transformers(watch: Watch, folder: Path, step: int) -> tuple[Weights, Weights]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    checkpoint = folder / f"checkpoint-{step}"
    if isinstance(watch.model, PeftModel):
        folders = checkpoint, checkpoint / "averaged" / "default"
        loaded = [PeftModel.from_pretrained(llama(), f, is_trainable=True) for f in folders]
    else:
        folders = checkpoint, checkpoint / "averaged"
        # A sharded checkpoint has live weights in a format of torch's.
        loaded = [AutoModelForCausalLM.from_pretrained(f) for f in folders if (f / "config.json").is_file()]
    average = weights_of(loaded[-1])
    return weights_of(loaded[0]) if len(loaded) > 1 else watch.live[step], average


# --- Lightning ------------------------------------------------------------------------------------------


def shard(model: nn.Module, run: Run, mesh: Any = None) -> nn.Module:
    """Shard a Llama as people do: layers by themselves, embedding and head with the root."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=run.reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=run.reshard)


def with_lightning(run: Run) -> Watch:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import ModelParallelStrategy

    from paceline.integrations.lightning import AveragedModelCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = run.model()

        def configure_model(self):
            if run.format:
                shard(self.network, run, self.device_mesh["data_parallel"])

        def training_step(self, batch, batch_idx):
            return loss_of(self.network, batch)

        def validation_step(self, batch, batch_idx):
            loss = loss_of(self.network, batch)
            self.log("loss", loss, sync_dist=True)
            self.watch.note_loss("average", loss)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.watch.steps % 4 == 1 and run.averaged and not run.fail and run.accumulate == 1:
                self.network.eval()
                with torch.no_grad(), self.watch.asks_for_live():
                    self.watch.note_loss("live", loss_of(self.network, share(TOKENS[24:], run)))
                self.network.train()

        def configure_optimizers(self):
            optimizer = run.build(self.network.parameters())
            self.watch = Watch(self.network, optimizer, run)
            return optimizer

    saves = ModelCheckpoint(
        run.folder,
        "{step}",
        monitor="loss",
        mode="max",
        save_top_k=-1,
        every_n_train_steps=None if run.best else SAVED,
    )
    strategy: Any = "ddp" if run.ranks > 1 else "auto"
    if run.format:
        is_sharded = run.format == "sharded"
        strategy = ModelParallelStrategy(run.ranks, 1, is_sharded, process_group_backend="gloo")
    settings = {"max_steps": STEPS, "val_check_interval": 2, "accumulate_grad_batches": run.accumulate}
    settings |= {"accelerator": "cpu", "devices": run.ranks, "strategy": strategy, "num_sanity_val_steps": 0}
    settings["use_distributed_sampler"] = False  # which shuffles
    settings |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings |= {"plugins": [MixedPrecision("16-mixed", "cpu", run.scaler)] if run.scaler else [], **run.more}
    ours = [AveragedModelCallback()] if run.averaged else []
    settings["callbacks"] = [*([saves] if run.saves else []), *ours, *settings.get("callbacks", [])]
    trainer, module = pl.Trainer(default_root_dir=run.folder, **settings), Module()
    resumed = run.folder / f"step={SAVED}.ckpt" if run.resume else None
    rows, evaluated = (
        loader_of(share(part, run), size // run.ranks) for part, size in ((TOKENS[:24], 4), (TOKENS[24:], 16))
    )
    trainer.fit(module, rows, evaluated, ckpt_path=resumed)
    watch = module.watch
    watch.trainer, watch.module = trainer, module
    if run.best:
        trainer.validate(module, evaluated, ckpt_path="best", verbose=False)
        watch.best = int(Path(saves.best_model_path).stem.removeprefix("step="))
    return watch


def saved_by_lightning(watch: Watch, folder: Path, step: int) -> tuple[Weights, Weights]:
    path = folder / f"step={step}.ckpt"
    if path.is_dir():  # in torch's format, which a resume reads
        return watch.live[step], watch.average[step]
    file = torch.load(path, weights_only=True)
    live, average = (
        {name.removeprefix("network."): tensor for name, tensor in file.get(key, {}).items()}
        for key in ("current_model_state", "state_dict")
    )
    return live or watch.live[step], average


# --- Loops of one's own: plain torch, Accelerate, timm, torchtitan ----------------------------------------


def in_turns(run: Run, watch: Watch, model: Any, optimizer: Any, rows: Any, own: Any) -> Watch:
    """Train by a loop of one's own, in which `own` says how a trainer does a thing."""
    step = SAVED if run.resume else 0
    while step < STEPS:
        for tokens in rows:
            with own.accumulate(model):
                own.backward(loss_of(model, tokens) / own.divisor)
                if not own.is_step():
                    continue
                own.step(optimizer)
            step += 1
            model.eval()
            with torch.no_grad():
                if step % 4 == 1:
                    with watch.asks_for_live():
                        watch.note_loss("live", loss_of(model, share(TOKENS[24:], run)))
                if step % 2 == 0 and run.averaged:
                    with averaged_weights(watch.optimizer, model=model):
                        watch.note_loss("average", loss_of(model, share(TOKENS[24:], run)))
            model.train()
            if step % SAVED == 0 and run.saves and run.averaged and not run.resume:
                own.save(run.folder / str(step))
                save_averaged(model, watch.optimizer, run.folder / f"{step}-averaged")
    return watch


class Plain:
    """Plain torch: its own loop, torch.distributed.checkpoint where sharded, torch.save elsewhere."""

    def __init__(self, run: Run, model: nn.Module, optimizer: Any) -> None:
        self.run, self.model, self.optimizer, self.batches = run, model, optimizer, 0
        self.divisor = run.accumulate
        self.accumulate = lambda model: nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self.batches += 1
        (self.run.scaler.scale(loss) if self.run.scaler else loss).backward()

    def is_step(self) -> bool:
        return self.batches % self.run.accumulate == 0

    def step(self, optimizer: Any) -> None:
        if self.run.scaler:
            self.run.scaler.step(optimizer)
            self.run.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()

    def options(self) -> Any:
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        return StateDictOptions(full_state_dict=self.run.format == "full")

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        if not self.run.format:
            torch.save((self.model.state_dict(), self.optimizer.state_dict()), path)
            return
        states = get_state_dict(self.model, self.optimizer, options=self.options())
        if self.run.format == "full":
            torch.save(states, f"{path}-{dist.get_rank()}")
        else:
            dcp.save(dict(zip("ab", states, strict=True)), checkpoint_id=path)

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        if not self.run.format:
            for part, state in zip((self.model, self.optimizer), torch.load(path), strict=True):
                part.load_state_dict(state)
            return
        if self.run.format == "full":
            weights, state = torch.load(f"{path}-{dist.get_rank()}")
        else:
            states = dict(zip("ab", get_state_dict(self.model, self.optimizer), strict=True))
            dcp.load(states, checkpoint_id=path)
            weights, state = states.values()
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=weights,
            optim_state_dict=state,
            options=self.options(),
        )


def with_plain_torch(run: Run) -> Watch:
    model = run.model()
    run.folder.mkdir(parents=True, exist_ok=True)
    if run.ranks > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    if run.format:
        shard(model, run)
    optimizer = run.build(model.parameters())
    watch = Watch(model, optimizer, run)
    trained = nn.parallel.DistributedDataParallel(model) if run.ranks > 1 and not run.format else model
    own = Plain(run, model, optimizer)
    if run.resume:
        own.load(run.folder / str(SAVED))
    rows = loader_of(share(TOKENS[:24], run), 4 // run.ranks)
    return in_turns(run, watch, trained, optimizer, rows, own)


def accelerator_of(run: Run) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    more = dict(run.more)
    if run.format:
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=run.reshard,
            state_dict_type=f"{run.format.upper()}_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap="LlamaDecoderLayer",
        )
    AcceleratorState._reset_state(True)  # of another run of this process
    return Accelerator(cpu=True, gradient_accumulation_steps=run.accumulate, **more)


def with_accelerate(run: Run) -> Watch:
    accelerator = accelerator_of(run)
    accelerator.scaler = run.scaler
    model = run.model()
    optimizer = run.build(model.parameters())
    watch = Watch(model, optimizer, run)
    rows = loader_of(TOKENS[:24], 4 // run.ranks)
    model, wrapped, rows = accelerator.prepare(model, optimizer, rows)
    own = SimpleNamespace(
        divisor=1,
        accumulate=accelerator.accumulate,
        backward=accelerator.backward,
        is_step=lambda: accelerator.sync_gradients,
        step=lambda optimizer: (optimizer.step(), optimizer.zero_grad()),
        save=accelerator.save_state,
    )
    if run.resume:
        accelerator.load_state(run.folder / str(SAVED))
    return in_turns(run, watch, model, wrapped, rows, own)


def saved_by_loop(watch: Watch, folder: Path, step: int) -> tuple[Weights, Weights]:
    return watch.live[step], load_file(folder / f"{step}-averaged" / "model.safetensors")


ROWS = {
    "transformers": Row(with_transformers, saved_by_transformers),
    "trl": Row(lambda run: with_transformers(run, trl="full"), saved_by_transformers),
    "trl with LoRA": Row(lambda run: with_transformers(run, trl="lora"), saved_by_transformers),
    "lightning": Row(with_lightning, saved_by_lightning),
    "accelerate": Row(with_accelerate, saved_by_loop),
    "plain torch": Row(with_plain_torch, saved_by_loop),
}
PACKAGES = {
    "transformers": ("transformers", "accelerate"),
    "trl": ("trl",),
    "trl with LoRA": ("trl", "peft"),
    "plain torch": (),
}
FULL, SHARDED, DDP = {"format": "full"}, {"format": "sharded"}, {"format": ""}
GATHERED = {"format": "sharded", "reshard": False, "tied": True}
ON_TWO_RANKS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "transformers": {
        "DDP": ("push", DDP),
        "DDP, AdamW": ("AdamW", DDP),
        "DDP, Muon": ("Muon", DDP),
        "full": ("push", FULL),
        "sharded, tied, gathered": ("paper", GATHERED),
        "full, tied": ("push", FULL | {"tied": True}),
        "full, AdamW": ("AdamW", FULL),
        "sharded, Muon": ("Muon", SHARDED),
        "full, bfloat16": ("push", FULL | {"dtype": torch.bfloat16}),
    },
    "trl": {"DDP": ("push", DDP), "full": ("push", FULL), "sharded, tied, gathered": ("push", GATHERED)},
    "trl with LoRA": {"DDP": ("push", DDP), "full": ("push", FULL), "sharded": ("push", SHARDED)},
}
for _name in ("lightning", "accelerate", "plain torch"):
    ON_TWO_RANKS[_name] = {
        "DDP": ("push", DDP),
        "full": ("push", FULL),
        "sharded, tied, gathered": ("paper", GATHERED),
        "sharded, AdamW": ("AdamW", SHARDED),
    }
"""Row → case → the kind of optimizer, and how the model is spread over ranks and saved."""
