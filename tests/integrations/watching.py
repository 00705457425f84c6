"""What the trainers of the battery train, and a `Watch` that notes which weights are where."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import PACE, Control, attach, averaged_state_dict
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
        parts = ((torch.optim.Muon, matrices), (torch.optim.AdamW, others))
        self.parts = [kind(own, lr) for kind, own in parts if own]
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
    "no average": lambda params: torch.optim.AdamW(params, LR),
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
        return self.run.resume + len(self.live) - 1

    def _note_forward(self, model: nn.Module, inputs: Any) -> None:
        if not self.run.format:
            self.forwards.append(
                (self.steps, "training" if model.training else self.asked, weights_of(model))
            )
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
    resume: int = 0
    """The step from whose checkpoint it resumes."""
    saves: bool = True
    every: int = SAVED
    """How often it saves."""
    fail: str = ""
    """Where a forward pass after step 8 raises: "training" or "evaluation"."""
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
    last_written: tuple[str, ...]
    """Patterns of a file that appears last in a checkpoint."""

    def newest(self, folder: Path) -> int:
        """Return the step of the newest whole checkpoint; 0 if there is none."""
        paths = [path for pattern in self.last_written for path in folder.glob(pattern) if path.is_file()]
        steps = [re.findall(r"\d+", path.relative_to(folder).parts[0])[0] for path in paths]
        return max(map(int, steps), default=0)

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
