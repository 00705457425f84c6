"""The update on a GPU in one pass over memory: a table of addresses, and the launch of triton_kernel.py."""

from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.optim.settings import Settings
from paceline.optim.sharding import local
from paceline.optim.state import State

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cuda",)
_TENSORS = 64
"""Tensors that one program of `advance` takes."""
_LARGEST = torch.finfo(torch.float32).max


def missing(kind: str) -> str | None:
    """Return what the fused path lacks on this kind of device, or None."""
    if kind not in DEVICES:
        return "needs a GPU with CUDA"
    return None if find_spec("triton") is not None else "needs Triton, which is not installed"


def unsupported_reason(live: Tensor) -> str | None:
    """Return why this path cannot step a parameter, or None."""
    assert live.grad is not None
    part, grad = local(live.detach()), local(live.grad)
    lacking = missing(part.device.type)
    if lacking is not None:
        return f"is on {part.device.type}: fused=True {lacking}; leave it out"
    for name, tensor in (("", part), ("has a gradient that ", grad)):
        if tensor.dtype not in DTYPES:
            return f"{name}is {tensor.dtype}; fused=True is for float32, bfloat16 and float16"
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_neg():
            return f"{name}is not plain memory (a wrapper, a negative view); clone it"
    dense = torch.ops.aten.is_non_overlapping_and_dense(part)
    if not dense or grad.stride() != part.stride():
        return "and its gradient do not lie alike in memory, without gaps; make them contiguous"
    return None


class _Kind(NamedTuple):
    """The properties that all tensors of a launch share."""

    device: torch.device
    dtype: torch.dtype
    grad: torch.dtype
    storage: torch.dtype
    averages: int
    aligned: bool


def _row(parameter: Tensor, state: State, names: tuple[str, ...]) -> tuple[tuple[int, ...], _Kind]:
    """Return a row of the table, and the kind of a parameter."""
    assert parameter.grad is not None
    live = local(parameter.detach())
    kept = [local(state[name if name in state else f"{name}_residual"]) for name in names]
    scales = [state[f"{name}_scale"] for name in names if f"{name}_scale" in state]
    row = [tensor.data_ptr() for tensor in (live, local(state["exp_avg"]), local(state["exp_avg_sq"]))]
    for two in (kept, scales):
        row += [tensor.data_ptr() for tensor in two] + [0] * (2 - len(two))
    aligned = all(address % 16 == 0 for address in row)
    kind = _Kind(live.device, live.dtype, parameter.grad.dtype, kept[0].dtype, len(names), aligned)
    return (*row, state["step"].data_ptr(), live.numel()), kind


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured."""
    # No stream captures before CUDA is initialized, and asking would initialize it.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def launches_of(lives: list[Tensor], states: list[State], settings: Settings) -> "list[Launch]":
    """Return the launches that step these parameters, as long as they and their states lie where they do."""
    names = settings.control.averages
    alike: dict[_Kind, list[tuple[Tensor, tuple[int, ...]]]] = {}
    for live, state in zip(lives, states, strict=True):
        row, kind = _row(live, state, names)
        alike.setdefault(kind, []).append((live, row))
    return [Launch(kind, members, settings) for kind, members in alike.items()]


@final
class Launch:
    """Parameters that are stepped together, and where they and their states are."""

    def __init__(
        self, kind: _Kind, members: list[tuple[Tensor, tuple[int, ...]]], settings: Settings
    ) -> None:
        from paceline.optim import triton_kernel as kernel

        self._lives, rows = [live for live, _ in members], [row for _, row in members]
        block, warps = kernel.TILES[kind.storage, kind.averages]
        starts = [(i, first) for i, row in enumerate(rows) for first in range(0, row[-1], block)]
        table, chunks = (torch.tensor(v, dtype=torch.int64, device=kind.device) for v in (rows, starts))
        self._is_empty = not starts  # as a rank's part may be; its steps are counted all the same
        numbers = torch.zeros((len(rows), kernel.NUMBERS.value), dtype=torch.float32, device=kind.device)
        values = torch.tensor(_values(settings), dtype=torch.float64, device=kind.device)
        self._lr, self._lr_sent = values[0], 0.0
        self._grads = torch.zeros(len(rows), dtype=torch.int64, device=kind.device)
        self._grads_sent: list[int] = []
        self._spare: Tensor | None = None  # pinned memory for a capture, which must stay for its replays
        self.captured: list[Tensor] = []
        """What captured graphs read; they read all that is kept here, too."""
        self._advance = partial(
            kernel.advance[(-(-len(rows) // _TENSORS),)], table, values, numbers, len(rows),
            PROGRAM=_TENSORS, enable_fp_fusion=False,
        )  # fmt: skip
        control = settings.control
        pull = "none" if control.strength == 0 else "over" if control.sizing == "paper" else "uniform"
        self._step = partial(
            kernel.step[(len(starts),)], table, self._grads, chunks, values, numbers,
            OF=_type(kind.dtype), GRAD=_type(kind.grad), STORAGE=_type(kind.storage), AVERAGES=kind.averages,
            PULL=pull, GAP_BEFORE=control.gap == "before", ALIGNED=kind.aligned,
            AVERAGE_FIRST=control.order == "average, then pull", BLOCK=block, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip

    def step_(self, lr: float | Tensor) -> None:
        """Take one step, in place, and count it."""
        addresses = [local(live.grad).data_ptr() for live in self._lives]  # type: ignore[arg-type]
        with torch.cuda.device(self._grads.device if self._grads.is_cuda else -1):
            self._send_rate(lr)
            self._send_gradients(addresses)
            self._advance()
            if not self._is_empty:
                self._step(GRAD_ALIGNED=not any(address % 16 for address in addresses))

    def _send_rate(self, lr: float | Tensor) -> None:
        """Tell the device the learning rate; one that is a tensor there is not read on the host."""
        if isinstance(lr, Tensor) and lr.is_cuda:
            self._lr.copy_(lr.reshape(()))
            self._lr_sent = float("nan")
        elif float(lr) != self._lr_sent or is_capturing():
            self._lr.fill_(float(lr))
            self._lr_sent = float(lr)

    def _send_gradients(self, addresses: list[int]) -> None:
        """Tell the device where gradients are, unless they are where they were."""
        if is_capturing():
            if self._spare is None:
                raise RuntimeError("take one step between two captures of a graph")
            pinned, self._spare = self._spare.copy_(torch.tensor(addresses)), None
            self.captured.append(pinned)  # what is replayed is this copy
            self._grads.copy_(pinned, non_blocking=True)
            self._grads_sent = []
            return
        if self._grads.is_cuda and self._spare is None:
            self._spare = torch.zeros(len(addresses), dtype=torch.int64, pin_memory=True)
        if addresses != self._grads_sent or self.captured:
            self._grads.copy_(torch.tensor(addresses), non_blocking=True)
            self._grads_sent = addresses


def _values(settings: Settings) -> list[float]:
    """Return the settings in the order of the kernel; the learning rate follows at each step."""
    control, (beta1, beta2) = settings.control, settings.betas
    power, return_power = control.powers
    pull_every = control.every if control.pull_every is None else control.pull_every
    return [
        0.0, control.step, settings.weight_decay, beta1, beta2, settings.eps,
        min(control.strength, _LARGEST), float(control.sizing == "paper"), power, return_power,
        min(control.slope, _LARGEST), control.delay, control.least_rate, control.every, pull_every,
        min(control.max_gain, _LARGEST), -1.0 if settings.maximize else 1.0, control.grow,
    ]  # fmt: skip


def _type(dtype: torch.dtype) -> Any:
    """Return Triton's name of a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))
