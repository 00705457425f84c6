"""The optimizers that `paceline bench` times, and the tensors that they step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline.optim import PACE, Control, attach

Shapes = list[tuple[int, ...]]
Step = Callable[[], Any]
SEED = 0
"""The seed of weights and gradients."""


# --- Tensors ----------------------------------------------------------------------------------------


def gpt_shapes(layers: int, width: int, vocabulary: int, context: int) -> Shapes:
    """Return the tensors of a GPT-2 with tied embeddings."""
    block: Shapes = [(width,)] * 4 + [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


def llama_shapes(layers: int, width: int, inner: int, vocabulary: int) -> Shapes:
    """Return the tensors of a Llama with tied embeddings and as many keys as queries."""
    block: Shapes = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner), (width,), (width,)]
    return [(vocabulary, width), *block * layers, (width,)]


MODELS: dict[str, Callable[[], Shapes]] = {
    "gpt-6m": lambda: gpt_shapes(6, 256, 4096, 256),
    "gpt2": lambda: gpt_shapes(12, 768, 50257, 1024),
    "llama-1.7b": lambda: llama_shapes(24, 2048, 8192, 49152),
    "small": lambda: [(1000,)] * 320,
}
USUAL = {"cpu": ("gpt-6m", "small"), "cuda": ("gpt2", "llama-1.7b", "small")}


def make_parameters(shapes: Shapes, device: str) -> list[nn.Parameter]:
    """Return random weights with random gradients, the same at every call."""
    generator = torch.Generator(device).manual_seed(SEED)
    parameters = []
    for shape in shapes:
        weights, gradient = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
        parameters.append(nn.Parameter(weights))
        parameters[-1].grad = gradient
    return parameters


# --- Optimizers -------------------------------------------------------------------------------------

Made = tuple[Step, tuple[Any, ...]]
"""What takes a step, and what holds the state: optimizers and tensors."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One optimizer to be timed."""

    make: Callable[[list[nn.Parameter]], Made]
    can_be_captured: bool = True
    """Whether a CUDA graph may hold its step: nothing in it is computed on the host."""


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    """Return torch's AdamW: fused on a GPU, and as it comes on a CPU."""
    on_gpu = parameters[0].is_cuda
    return AdamW(parameters, fused=on_gpu or None, capturable=on_gpu)


def _plain(optimizer: Optimizer) -> Made:
    return optimizer.step, (optimizer,)


def _pace(parameters: list[nn.Parameter], **settings: Any) -> Made:
    return _plain(PACE(parameters, **settings))


def _attached(parameters: list[nn.Parameter], control: Control) -> Made:
    return _plain(attach(adamw(parameters), control=control))


def _with_torch_ema(parameters: list[nn.Parameter]) -> Made:
    optimizer, model = adamw(parameters), nn.ParameterList(parameters)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))  # type: ignore[no-untyped-call]

    def step() -> None:
        optimizer.step()
        averaged.update_parameters(model)

    return step, (optimizer, *(average.detach() for average in averaged.module.parameters()))


BASE = "AdamW"
PAPER, PUSH, NONE = Control.paper(), Control.push(), Control.none()
SUBJECTS: dict[str, Subject] = {
    BASE: Subject(make=lambda parameters: _plain(adamw(parameters))),
    "AdamW and torch's EMA": Subject(make=_with_torch_ema, can_be_captured=False),
    "attach(AdamW), none": Subject(make=partial(_attached, control=NONE), can_be_captured=False),
    "attach(AdamW), push": Subject(make=partial(_attached, control=PUSH), can_be_captured=False),
    "PACE, none": Subject(make=partial(_pace, control=NONE)),
    "PACE, paper": Subject(make=partial(_pace, control=PAPER)),
    "PACE, paper, bfloat16": Subject(make=partial(_pace, control=PAPER, average_dtype="bfloat16")),
    "PACE, paper, int8": Subject(make=partial(_pace, control=PAPER, average_dtype="int8")),
    "PACE, push": Subject(make=partial(_pace, control=PUSH)),
    "PACE, push, bfloat16": Subject(make=partial(_pace, control=PUSH, average_dtype="bfloat16")),
    "PACE, push, int8": Subject(make=partial(_pace, control=PUSH, average_dtype="int8")),
}
"""All of them; paper and none keep one average, push keeps two."""


def state_bytes(holders: tuple[Any, ...]) -> int:
    """Return the bytes of all tensors that are kept next to the weights."""
    found = 0
    for holder in holders:
        if isinstance(holder, Tensor):
            found += holder.nbytes
        else:
            # A state dict has what `attach` keeps, too.
            entries = (entry for state in holder.state_dict()["state"].values() for entry in state.values())
            found += sum(entry.nbytes for entry in entries if isinstance(entry, Tensor))
    return found
