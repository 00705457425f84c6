"""The update on a GPU in one pass over memory: a table of addresses, and the launch of triton_kernel.py."""

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.rebuilt.settings import Settings
from paceline.rebuilt.sharding import local
from paceline.rebuilt.state import State, storage_of

TILES = {
    (torch.float32, 1): (1024, 4),
    (torch.float32, 2): (1024, 4),
    (torch.bfloat16, 1): (256, 2),
    (torch.bfloat16, 2): (512, 4),
    (torch.int8, 1): (256, 2),
    (torch.int8, 2): (512, 2),
}
"""Storage of averages and how many there are → elements and warps of a program, as measured on an H200."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cuda",)
_TENSORS = 64
"""Tensors that one program of `advance` takes."""
_LARGEST = torch.finfo(torch.float32).max


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def missing(kind: str) -> str | None:
    """Return what the fused path lacks on this kind of device, or None."""
    if kind not in DEVICES:
        return "needs a GPU with CUDA"
    return None if _has_triton() else "needs Triton, which is not installed"


def unsupported_reason(live: Tensor) -> str | None:
    """Return why this path cannot step a parameter, or None."""
    part, grad = local(live.detach()), local(live.grad) if live.grad is not None else None
    assert grad is not None
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


class Member(NamedTuple):
    """A parameter with its gradient and state."""

    live: Tensor
    state: State


class _Kind(NamedTuple):
    """What all tensors of a launch have in common."""

    device: torch.device
    dtype: torch.dtype
    grad: torch.dtype
    storage: torch.dtype
    averages: int
    aligned: bool


def _row(member: Member, names: tuple[str, ...]) -> tuple[tuple[int, ...], _Kind]:
    """Return a row of the table, and the kind of a parameter."""
    live, state = local(member.live.detach()), member.state
    storage = storage_of(state, names[0])
    keys = [name if storage == "float32" else f"{name}_residual" for name in names]
    kept = [local(state[key]) for key in keys]
    scales = [local(state[f"{name}_scale"]) for name in names] if storage == "int8" else []
    moments = local(state["exp_avg"]), local(state["exp_avg_sq"])
    addresses = [tensor.data_ptr() for tensor in (live, *moments, *kept)]
    row = [*addresses[:4], addresses[-1], *(tensor.data_ptr() for tensor in scales)]
    row += [0] * (7 - len(row))
    aligned = all(address % 16 == 0 for address in row)
    assert member.live.grad is not None
    kind = _Kind(live.device, live.dtype, member.live.grad.dtype, kept[0].dtype, len(names), aligned)
    return (*row, state["step"].data_ptr(), live.numel()), kind


@final
class Table:
    """The launches of one parameter group, kept while its tensors are at the same addresses."""

    def __init__(self) -> None:
        self._rows: list[tuple[tuple[int, ...], _Kind]] = []
        self._launches: list[_Launch] = []

    def step_(self, members: list[Member], settings: Settings, lr: float | Tensor) -> None:
        """Take the step of all members, and count it."""
        names = settings.control.averages
        rows = [_row(member, names) for member in members]
        if rows != self._rows:
            if _is_capturing():
                raise RuntimeError(
                    "take one step before you capture a graph: the first step, and the first after a change "
                    "of "
                    "parameters or state, tells the device where they are"
                )
            alike: dict[_Kind, list[int]] = {}
            for i, (row, kind) in enumerate(rows):
                if row[-1]:
                    alike.setdefault(kind, []).append(i)
            self._launches = [_Launch(kind, places, rows) for kind, places in alike.items()]
            self._rows = rows
        for launch in self._launches:
            launch.step_([members[i].live.grad for i in launch.places], settings, lr)


def _is_capturing() -> bool:
    # No stream captures before CUDA is initialized, and asking would initialize it.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


@final
class _Launch:
    """Tensors that one launch advances, and where they are."""

    def __init__(self, kind: _Kind, places: list[int], rows: list[tuple[tuple[int, ...], _Kind]]) -> None:
        self.places, self._kind = places, kind
        own = [rows[i][0] for i in places]
        self._block, self._warps = TILES[kind.storage, kind.averages]
        starts = [(i, first) for i, row in enumerate(own) for first in range(0, row[-1], self._block)]
        self._table = self._sent(own, torch.int64)
        self._chunks = self._sent(starts, torch.int64)
        self._numbers = torch.zeros((len(own), 12), dtype=torch.float32, device=kind.device)
        self._settings = torch.zeros(20, dtype=torch.float64, device=kind.device)
        self._settings_sent: list[float] = []
        self._grads = torch.zeros(len(own), dtype=torch.int64, device=kind.device)
        self._grads_sent: list[int] = []
        self._spare: Tensor | None = None  # pinned memory for a capture, which must stay for its replays
        self._captured: list[Tensor] = []

    def _sent(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._kind.device)

    def step_(self, gradients: list[Any], settings: Settings, lr: float | Tensor) -> None:
        """Take one step, in place."""
        from paceline.rebuilt import triton_kernel as kernel

        self._send_settings(settings, lr)
        addresses = [local(gradient).data_ptr() for gradient in gradients]
        self._send_gradients(addresses)
        control, count = settings.control, len(self.places)
        pull = "none" if control.strength == 0 else "over" if control.sizing == "paper" else "uniform"
        with torch.cuda.device(self._kind.device if self._kind.device.type == "cuda" else -1):
            kernel.advance[(-(-count // _TENSORS),)](
                self._table, self._settings, self._numbers, count, PROGRAM=_TENSORS, enable_fp_fusion=False
            )
            kernel.step[(len(self._chunks),)](
                self._table, self._grads, self._chunks, self._settings, self._numbers,
                OF=_type(self._kind.dtype), GRAD=_type(self._kind.grad), STORAGE=_type(self._kind.storage),
                AVERAGES=self._kind.averages, PULL=pull, GAP_BEFORE=control.gap == "before",
                AVERAGE_FIRST=control.order == "average, then pull", ALIGNED=self._kind.aligned,
                GRAD_ALIGNED=all(address % 16 == 0 for address in addresses), BLOCK=self._block,
                num_warps=self._warps, enable_fp_fusion=False,
            )  # fmt: skip

    def _send_settings(self, settings: Settings, lr: float | Tensor) -> None:
        """Tell the device the settings, in the order of SETTINGS; a rate that is a tensor there stays
        there."""
        control, (beta1, beta2) = settings.control, settings.betas
        second = control.power if control.return_power is None else control.return_power
        pull_every = control.every if control.pull_every is None else control.pull_every
        on_device = isinstance(lr, Tensor) and lr.is_cuda
        values = [
            0.0 if on_device else float(lr), control.step, settings.weight_decay, beta1, beta2, settings.eps,
            min(control.strength, _LARGEST), float(control.sizing == "paper"), control.power, second,
            min(control.slope, _LARGEST), control.delay, control.least_rate, control.every, pull_every,
            min(control.max_gain, _LARGEST), -1.0 if settings.maximize else 1.0, 0.0, 0.0, 0.0,
        ]  # fmt: skip
        if values != self._settings_sent:
            if _is_capturing():
                raise RuntimeError(
                    "settings changed since the last step; take one step before you capture a graph"
                )
            self._settings.copy_(torch.tensor(values, dtype=torch.float64), non_blocking=True)
            self._settings_sent = values
        if on_device:
            assert isinstance(lr, Tensor)
            self._settings[0].copy_(lr.reshape(()))

    def _send_gradients(self, addresses: list[int]) -> None:
        """Tell the device where gradients are. They often come back to where they were, with nothing to
        send."""
        if _is_capturing():
            if self._spare is None:
                raise RuntimeError("take one step between two captures of a graph")
            pinned, self._spare = self._spare.copy_(torch.tensor(addresses)), None
            self._captured.append(pinned)  # what is replayed is this copy
            self._grads.copy_(pinned, non_blocking=True)
            self._grads_sent = []
            return
        if self._kind.device.type == "cuda" and self._spare is None:
            self._spare = torch.zeros(len(addresses), dtype=torch.int64, pin_memory=True)
        if addresses != self._grads_sent or self._captured:
            self._grads.copy_(torch.tensor(addresses), non_blocking=True)
            self._grads_sent = addresses


def _type(dtype: torch.dtype) -> Any:
    """Return Triton's name of a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))
