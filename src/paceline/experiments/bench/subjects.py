"""What is timed: optimizers, and the tensors that they step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.optim import PACE, Pullback

Shapes = list[tuple[int, ...]]
Step = Callable[[], Any]


# --- Tensors ----------------------------------------------------------------------------------------


def gpt_shapes(layers: int, width: int, vocabulary: int, context: int) -> Shapes:
    """The tensors of a GPT-2 with tied embeddings."""
    block: Shapes = [(width,)] * 4 + [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


def llama_shapes(layers: int, width: int, inner: int, vocabulary: int) -> Shapes:
    """The tensors of a Llama with tied embeddings and as many keys as queries."""
    block: Shapes = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner), (width,), (width,)]
    return [(vocabulary, width), *block * layers, (width,)]


MODELS: dict[str, Callable[[], Shapes]] = {
    "gpt-18m": lambda: gpt_shapes(8, 384, 9600, 256),
    "gpt2": lambda: gpt_shapes(12, 768, 50257, 1024),
    "llama-1.7b": lambda: llama_shapes(24, 2048, 8192, 49152),
    "flat": lambda: [(18_000_000,)],
    "flat-124m": lambda: [(124_000_000,)],
    "small": lambda: [(1000,)] * 320,
}
USUAL = {"cpu": ("gpt-18m", "flat", "small"), "cuda": ("gpt2", "llama-1.7b", "flat-124m", "small")}


# --- Optimizers -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """An optimizer, and the least that it has to read and write."""

    make: Callable[[list[nn.Parameter]], tuple[Step, Any]]
    """Of parameters: what takes a step, and what holds the state."""
    traffic: float
    """Bytes of a float32 parameter that go through memory in one pass."""
    devices: tuple[str, ...] = ("cpu", "cuda")


def _plain(optimizer: Any) -> tuple[Step, Any]:
    return optimizer.step, optimizer


def _pace(parameters: list[nn.Parameter], **settings: Any) -> tuple[Step, Any]:
    return _plain(PACE(parameters, fused=True, **settings))


def _with_ema(parameters: list[nn.Parameter]) -> tuple[Step, Any]:
    """The least that an EMA costs: one foreach call after the step."""
    optimizer = AdamW(parameters, fused=True)
    live = [parameter.detach() for parameter in parameters]
    averages = [tensor.clone() for tensor in live]

    def step() -> None:
        optimizer.step()
        torch._foreach_lerp_(averages, live, 0.001)

    return step, (optimizer, averages)


def _with_foreach_emas(parameters: list[nn.Parameter], count: int) -> tuple[Step, Any]:
    """What one writes by hand without a compiler: averages of the weights after the step."""
    optimizer = AdamW(parameters, foreach=True)
    live = [parameter.detach() for parameter in parameters]
    averages = [[tensor.clone() for tensor in live] for _ in range(count)]

    def step() -> None:
        optimizer.step()
        for average in averages:
            torch._foreach_mul_(average, 0.999)
            torch._foreach_add_(average, live, alpha=0.001)

    return step, (optimizer, averages)


def _with_averaged_model(parameters: list[nn.Parameter]) -> tuple[Step, Any]:
    optimizer, model = AdamW(parameters, fused=True), nn.ParameterList(parameters)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))  # type: ignore[no-untyped-call]

    def step() -> None:
        optimizer.step()
        averaged.update_parameters(model)

    return step, (optimizer, [p.detach() for p in averaged.module.parameters()])


_NORM = 1.0
"""Far below the norm of random gradients. (AdamW's are changed in place, and of this norm from then on.)"""


def _with_clipping(make: Callable[[list[nn.Parameter]], tuple[Step, Any]]) -> Any:
    def made(parameters: list[nn.Parameter]) -> tuple[Step, Any]:
        inner, holder = make(parameters)

        def step() -> None:
            nn.utils.clip_grad_norm_(parameters, _NORM)
            inner()

        return step, holder

    return made


def _captured(make: Callable[[list[nn.Parameter]], tuple[Step, Any]]) -> Any:
    """The same, recorded once as a CUDA graph: what is left of a step is what the device does."""

    def made(parameters: list[nn.Parameter]) -> tuple[Step, Any]:
        step, holder = make(parameters)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as torch asks for before it records
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay, holder

    return made


def _schedule_free(parameters: list[nn.Parameter]) -> tuple[Step, Any]:
    from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]

    optimizer = AdamWScheduleFree(parameters, foreach=True)
    optimizer.train()
    return _plain(optimizer)


def _on_a_gpu(traffic: float, **settings: Any) -> Rival:
    return Rival(make=lambda p: _pace(p, **settings), traffic=traffic, devices=("cuda",))


BASE = "AdamW, fused"
RIVALS: dict[str, Rival] = {
    BASE: Rival(make=lambda p: _plain(AdamW(p, fused=True)), traffic=28),
    "AdamW, foreach": Rival(make=lambda p: _plain(AdamW(p, foreach=True)), traffic=28),
    # The measure of PACE on a CPU: of gain="paper" the first, of the default, which keeps two
    # averages, the second.
    "AdamW, foreach, and an EMA": Rival(make=lambda p: _with_foreach_emas(p, 1), traffic=36),
    "AdamW, foreach, and two EMAs": Rival(make=lambda p: _with_foreach_emas(p, 2), traffic=44),
    "AdamW, fused, and an EMA": Rival(make=_with_ema, traffic=36),
    "AdamW, fused, and torch's AveragedModel": Rival(make=_with_averaged_model, traffic=36),
    "AdamW, fused, clipped": Rival(make=_with_clipping(lambda p: _plain(AdamW(p, fused=True))), traffic=32),
    "Schedule-Free AdamW": Rival(make=_schedule_free, traffic=28),
    # At all but every millionth step it touches no average: AdamW alone, by our kernel.
    "PACE, fused, no average": _on_a_gpu(28, gain="paper", update_every=10**6),
    "PACE, fused, strength 0": _on_a_gpu(36, pullback_strength=0.0),
    "PACE, fused": _on_a_gpu(44),
    "PACE, fused, bfloat16": _on_a_gpu(36, average_dtype="bfloat16"),
    "PACE, fused, int8": _on_a_gpu(32.125, average_dtype="int8"),
    "PACE, fused, one average": _on_a_gpu(36, return_power=0.2),
    "PACE, fused, one average, bfloat16": _on_a_gpu(32, return_power=0.2, average_dtype="bfloat16"),
    "PACE, fused, one average, int8": _on_a_gpu(30.0625, return_power=0.2, average_dtype="int8"),
    "PACE, fused, paper": _on_a_gpu(36, gain="paper"),
    "PACE, fused, paper, bfloat16": _on_a_gpu(32, gain="paper", average_dtype="bfloat16"),
    "PACE, fused, paper, int8": _on_a_gpu(30.0625, gain="paper", average_dtype="int8"),
    "PACE, fused, paper, no momentum": _on_a_gpu(28, gain="paper", betas=(0.0, 0.999)),
    "PACE, fused, paper, two averages": _on_a_gpu(44, gain="paper", return_power=0.8),
    "AdamW, fused, in a CUDA graph": Rival(
        make=_captured(lambda p: _plain(AdamW(p, fused=True, capturable=True))),
        traffic=28,
        devices=("cuda",),
    ),
    "PACE, fused, in a CUDA graph": Rival(
        make=_captured(lambda p: _pace(p, capturable=True)), traffic=44, devices=("cuda",)
    ),
    "PACE, fused, paper, in a CUDA graph": Rival(
        make=_captured(lambda p: _pace(p, gain="paper", capturable=True)), traffic=36, devices=("cuda",)
    ),
    "PACE, foreach": Rival(make=lambda p: _plain(PACE(p, foreach=True)), traffic=44),
    "PACE, foreach, paper": Rival(make=lambda p: _plain(PACE(p, foreach=True, gain="paper")), traffic=36),
    "PACE, per tensor, paper": Rival(make=lambda p: _plain(PACE(p, foreach=False, gain="paper")), traffic=36),
    "Pullback of AdamW, fused": Rival(
        make=lambda p: _plain(Pullback(AdamW(p, fused=True), pullback_strength=3e-3)), traffic=36
    ),
}


def make_parameters(shapes: Shapes, device: str) -> list[nn.Parameter]:
    """Random weights with random gradients."""
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for shape in shapes:
        weights, gradient = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
        parameters.append(nn.Parameter(weights))
        parameters[-1].grad = gradient
    return parameters


def move_on_(parameters: list[nn.Parameter]) -> None:
    """Other gradients, as in training, where no weight has next to none for ever."""
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.copy_(parameter.grad.flatten().roll(1).view_as(parameter.grad))


def state_bytes(holder: Any, device: str) -> int:
    """Of everything that is kept on the device beside the weights, but the weights themselves."""
    if is_traceable_wrapper_subclass(holder):  # of 8-bit codes and their scales, with the dtype of a float
        return sum(state_bytes(getattr(holder, name), device) for name in holder.__tensor_flatten__()[0])
    if isinstance(holder, Tensor):
        return holder.nbytes if holder.device.type == device else 0
    if isinstance(holder, dict):
        return sum(state_bytes(entry, device) for entry in holder.values())
    if isinstance(holder, list | tuple):
        return sum(state_bytes(entry, device) for entry in holder)
    return state_bytes(dict(getattr(holder, "state", {})), device)
