"""Telemetry of the pull: what a step did to the weights, looked at every so often and not in between."""

import math
import statistics
from collections import deque
from numbers import Integral
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from paceline.optim.checks import require, warn
from paceline.optim.measures import (
    Before,
    Slope,
    Watched,
    has_moved,
    look,
    measure,
    members,
    scale_of,
    slopes_of,
)
from paceline.optim.pace import PACE
from paceline.optim.pullback import Pullback
from paceline.optim.readings import Reading, Record

# --- The probe ------------------------------------------------------------------------------------


def probe(optimizer: Optimizer, every: int = 100, keep: int = 1000) -> "Probe":
    """Look at what PACE or Pullback does to the weights, at every n-th step.

    Steps are counted as the optimizer's state counts them (that of the parameter with most steps), so a
    resumed run is probed at the same steps. With `update_every` above 1, let `every` be a multiple of it:
    in between nothing is pulled, and the reading says so.

    A probed step computes the figures on the device and waits for nothing; they come to the host when you
    read them. A probed step holds a copy of the weights and of their average while it runs, and some
    temporaries of the size of the largest tensor.
    Training is the same to the bit. Steps that are not probed cost two calls of Python functions and no
    operation on any tensor.

    A warning is given, one probe late, when the gap between average and live is beyond 10 times its
    median over the last 1,000 steps (20 readings at least), once until it is back below 5 times.

    Of sharded parameters (DTensor) the figures are of this rank's part. Steps that torch.compile has
    traced or a CUDA graph replays are not probed.

    Arguments:
        optimizer: a `PACE` or a `Pullback`.
        every: probe the steps whose number is a multiple of this.
        keep: how many of the newest readings `history` has.

    Returns:
        A `Probe`, at work until it is closed.

    >>> import torch, paceline
    >>> from paceline.optim.probes import probe
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.named_parameters(), lr=0.1)
    >>> telemetry = probe(optimizer, every=5)
    >>> for _ in range(10):
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> [reading.t for reading in telemetry.history]
    [5, 10]
    >>> telemetry.last.overall.saturated, list(telemetry.last.tensors)
    (0.0, ['weight', 'bias'])
    >>> list(telemetry.last.flat())[:3]
    ['saturated', 'gain/mean', 'gain/q10']
    >>> telemetry.close()
    """
    if not isinstance(optimizer, PACE | Pullback):
        raise TypeError(
            "probe looks at the pull of PACE or Pullback; pass the paceline optimizer itself (of a wrapper, "
            f"usually its .optimizer). Got {type(optimizer).__name__}, which pulls nothing"
        )
    for name, value in (("every", every), ("keep", keep)):
        ok = isinstance(value, Integral) and not isinstance(value, bool) and value >= 1
        require(ok, f"{name} value", value, "an integer >= 1")
    return Probe(optimizer, int(every), int(keep))


@final
class Probe:
    """Telemetry at work, made by `probe`. As a context manager it closes itself."""

    def __init__(self, optimizer: PACE | Pullback, every: int, keep: int) -> None:
        self.every = every
        self._taken = steps_taken(optimizer)
        self._before: dict[Tensor, Before] = {}
        self._slopes: dict[Tensor, Slope] = {}
        self._records: deque[Record] = deque(maxlen=keep)
        self._unheard: deque[Record] = deque()
        self._alarm = _Alarm(every)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    @property
    def last(self) -> Reading | None:
        """The newest reading; None before the first."""
        return self._records[-1].reading if self._records else None

    @property
    def history(self) -> list[Reading]:
        """The newest readings, at most `keep`, oldest first."""
        return [record.reading for record in self._records]

    def close(self) -> None:
        """Leave the optimizer; the readings stay."""
        for handle in self._handles:
            handle.remove()
        self._before.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- Hooks ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before.clear()  # of a step that failed
        if not self._is_due():
            return
        assert isinstance(optimizer, PACE | Pullback)
        # What step() itself does first: live weights are put back after a forgotten eval().
        optimizer.make_ready_to_step()
        has_closure = (*args, kwargs.get("closure"), None)[1] is not None
        found = [
            member
            for member in members(optimizer)
            if (member.parameter.requires_grad if has_closure else member.parameter.grad is not None)
        ]
        # Ranks that add it up together must all do so, also if one of them copies nothing.
        scale = scale_of(found)
        watched = [Watched(member, look(member, scale)) for member in found]
        self._before = {member.parameter: before for member, before in watched}
        # Now, if the gradients are here: some optimizers write their own update over them.
        self._slopes = {} if has_closure else slopes_of(watched)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        assert isinstance(optimizer, PACE | Pullback)
        taken = self._taken
        self._taken = taken + 1
        before, self._before = self._before, {}
        if not before:
            return
        there = list(members(optimizer))
        watched = [
            Watched(member, before[member.parameter])
            for member in there
            if member.parameter in before and has_moved(member, before[member.parameter])
        ]
        measured = measure(watched, self._slopes or slopes_of(watched))
        found = {entry.name: entry for entry in measured}
        if found:
            record = Record(self._taken, [found[member.name] for member in there if member.name in found])
            self._records.append(record)
            self._listen(record)

    def _after_load(self, optimizer: Optimizer) -> None:
        self._taken = steps_taken(optimizer)

    def _is_due(self) -> bool:
        if torch.compiler.is_compiling() or (self._taken + 1) % self.every:
            return False
        # A graph that is being captured would hold the probe for ever.
        return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]

    def _listen(self, record: Record) -> None:
        """Let the alarm hear the readings before this one, as far as they have come from the device."""
        while self._unheard and self._unheard[0].has_arrived():
            heard = self._unheard.popleft()
            self._alarm.hear(heard.t, heard.reading.overall.gap_rms)
        self._unheard.append(record)


def steps_taken(optimizer: Optimizer) -> int:
    """The count of the parameter that has taken most steps."""
    assert isinstance(optimizer, PACE | Pullback)
    counts = [count for member in members(optimizer) if (count := member.own("step")) is not None]
    # tolist reads a tensor on the host without an operation.
    taken: list[Any] = [count.tolist() for count in counts]
    return int(max(taken, default=0))


class _Alarm:
    """Warns when the gap runs away."""

    ratio = 10.0
    fewest = 20  # readings before it may warn
    steps = 1000

    def __init__(self, every: int) -> None:
        self._gaps: deque[float] = deque(maxlen=max(self.fewest, self.steps // every))
        self._is_raised = False

    def hear(self, t: int, gap: float) -> None:
        median = statistics.median(self._gaps) if len(self._gaps) >= self.fewest else 0.0
        if median > 0:
            # Written so that a NaN is beyond the limit.
            if not self._is_raised and not gap <= self.ratio * median:
                self._is_raised = True
                self._warn(t, gap, median)
            elif gap < self.ratio / 2 * median:
                self._is_raised = False
        if math.isfinite(gap):
            self._gaps.append(gap)

    def _warn(self, t: int, gap: float, median: float) -> None:
        warn(
            f"at step {t} the live weights were {gap:.3g} (RMS) away from their average, more than "
            f"{self.ratio:g} times the median of the last {len(self._gaps)} readings, {median:.3g}: the run "
            "may be diverging. Lower the learning rate, and check for a flipped sign in the loss or the "
            "gradients"
        )
