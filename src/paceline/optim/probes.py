"""Telemetry of the pull: what a step did to the weights, looked at every so often and not in between."""

import math
import statistics
import warnings
from collections import deque
from collections.abc import Iterator
from numbers import Integral
from types import TracebackType
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from paceline.optim.checks import require
from paceline.optim.moments import second_moment
from paceline.optim.pace import PACE
from paceline.optim.pullback import Pullback
from paceline.optim.pullback import _recipe as pullback_recipe
from paceline.optim.readings import Found, Reading, Record, Sums, sample_stride
from paceline.optim.recipe import Recipe
from paceline.optim.rule import RATIOS, At, Scalar, Terms, at_step, averaging_rate, gain_limit
from paceline.optim.sharded import _local as local
from paceline.optim.state import average_dtype, real

HISTORY = 1000

# --- The probe ------------------------------------------------------------------------------------


def probe(optimizer: Optimizer, every: int = 100) -> "Probe":
    """Look at what PACE or Pullback does to the weights, at every n-th step.

    Steps are counted as the optimizer's state counts them (that of the parameter with most steps), so a
    resumed run is probed at the same steps. With `update_every` above 1, let `every` be a multiple of it:
    in between nothing is pulled, and the reading says so.

    A probed step computes the figures on the device and waits for nothing; they come to the host when you
    read them. It holds two more copies of the weights while it runs. Training is the same to the bit.
    Steps that are not probed cost a call of two Python functions and no operation on any tensor.

    A warning is given, one probe late, when the gap between average and live is beyond 10 times its
    median over the last 1,000 steps (20 readings at least), once until it is back below 5 times.

    Of sharded parameters (DTensor) the figures are of this rank's part. Steps that torch.compile traces
    or a CUDA graph replays call no hooks and are not probed.

    Arguments:
        optimizer: a `PACE` or a `Pullback`.
        every: probe the steps whose number is a multiple of this.

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
    ok = isinstance(every, Integral) and not isinstance(every, bool) and every >= 1
    require(ok, "every value", every, "an integer >= 1")
    return Probe(optimizer, int(every))


@final
class Probe:
    """Telemetry at work, made by `probe`. As a context manager it closes itself."""

    def __init__(self, optimizer: PACE | Pullback, every: int) -> None:
        self.every = every
        self._taken = steps_taken(optimizer)
        self._before: dict[Tensor, _Before] = {}
        self._records: deque[Record] = deque(maxlen=HISTORY)
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
        """The last 1,000 readings, oldest first."""
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
        assert isinstance(optimizer, PACE | Pullback)
        if self._is_due():
            # What step() itself does first: live weights are put back after a forgotten eval().
            optimizer._make_ready_to_step()
            has_closure = (*args, kwargs.get("closure"), None)[1] is not None
            for member in _members(optimizer):
                parameter = member.parameter
                if parameter.requires_grad if has_closure else parameter.grad is not None:
                    self._before[parameter] = _look(member, has_closure)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        assert isinstance(optimizer, PACE | Pullback)
        may_skip = any(group.get("skip_nonfinite") for group in optimizer.param_groups)
        self._taken = steps_taken(optimizer) if may_skip else self._taken + 1
        if not self._before:
            return
        found = []
        for member in _members(optimizer):
            # One tensor's copies are let go before the next one's figures are made.
            before = self._before.pop(member.parameter, None)
            if before is not None and _has_moved(member, before):
                found.append(_measure(member, before))
        found = [entry for entry in found if entry.elements]
        if found:
            record = Record(self._taken, found)
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
    own = optimizer.format.prefix + "step"
    # Without a memory of ours the count will go on from that of the optimizer underneath.
    counts = [member.state.get(own, member.state.get("step", 0)) for member in _members(optimizer)]
    # tolist reads a tensor on the host without an operation.
    taken: list[Any] = [count.tolist() if isinstance(count, Tensor) else count for count in counts]
    return int(max(taken))


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
        warnings.warn(
            f"at step {t} the live weights were {gap:.3g} (RMS) away from their average, more than "
            f"{self.ratio:g} times the median of the last {len(self._gaps)} readings, {median:.3g}: the run "
            "may be diverging. Lower the learning rate, and check for a flipped sign in the loss or the "
            "gradients",
            stacklevel=7,
        )


# --- Before the step ------------------------------------------------------------------------------


class _Member(NamedTuple):
    """A parameter and all that is known of it."""

    optimizer: PACE | Pullback
    name: str
    parameter: Tensor
    group: dict[str, Any]
    state: dict[str, Any]

    def own(self, key: str) -> Tensor | None:
        """What the averaging keeps of it under that key."""
        return self.state.get(self.optimizer.format.prefix + key)

    def live(self) -> Tensor:
        return real(local(self.parameter.detach()))


class _Before(NamedTuple):
    """A parameter before the step; copies."""

    live: Tensor
    average: Tensor  # at least float32
    taken: float | None  # steps; None where only the device knows
    slope: "_Slope | None"  # None where a closure is still to make the gradient


class _Slope(NamedTuple):
    product: Tensor  # gradient · gap
    gradient: Tensor  # squared length


def _members(optimizer: PACE | Pullback) -> Iterator[_Member]:
    state, names = optimizer.state, set()
    for number, group in enumerate(optimizer.param_groups):
        known = group.get("param_names")
        for i, parameter in enumerate(group["params"]):
            name = known[i] if known and known[i] not in names else f"{number}.{known[i] if known else i}"
            names.add(name)
            yield _Member(optimizer, name, parameter, group, state.get(parameter, {}))


def _look(member: _Member, has_closure: bool) -> _Before:
    live, step = member.live().clone(), member.own("step")
    taken = 0.0 if step is None else step.item() if step.device.type == "cpu" else None
    average = live if taken == 0 else _average(member, live)
    if step is not None and taken is None:
        average = torch.where(step == 0, live, average)
    before = _Before(live, average.to(average_dtype(live)), taken, slope=None)
    return before if has_closure else before._replace(slope=_slope(member, before))


def _average(member: _Member, live: Tensor) -> Tensor:
    """A copy of the average that the step will start from."""
    average = member.own("average")
    # The step will make an average that does not fit anew, or refuse it.
    if average is None or average.shape != member.parameter.shape or average.is_meta:
        return live
    if member.own("unseeded") is not None:
        return live
    return real(local(average)).to(live.device, copy=True)


def _slope(member: _Member, before: _Before) -> _Slope:
    # Taken before the step where it can be: some optimizers write their own update over the gradient.
    assert member.parameter.grad is not None
    gradient = local(member.parameter.grad)
    gradient = real(gradient if gradient.layout == torch.strided else gradient.to_dense())
    gradient = gradient.to(before.average.dtype)
    return _Slope((gradient * (before.average - before.live)).sum(), _squares(gradient))


def _squares(tensor: Tensor) -> Tensor:
    # Not vector_norm, which adds up in sequence: on a CPU its float32 is off by 0.5 % after 40M elements.
    return tensor.square().sum()


# --- After the step -------------------------------------------------------------------------------


class _Pull(NamedTuple):
    """What the control did to one tensor, coordinate by coordinate."""

    ratio: Tensor
    gain: Tensor
    limit: float  # of the gain
    moved: Tensor  # gain · gap: what was added to live


def _has_moved(member: _Member, before: _Before) -> bool:
    step = member.own("step")
    if member.parameter.grad is None or step is None:
        return False
    return before.taken is None or step.item() != before.taken  # equal where skip_nonfinite skipped


def _measure(member: _Member, before: _Before) -> Found:
    recipe = Recipe.of(member.group) if isinstance(member.optimizer, PACE) else pullback_recipe(member.group)
    step = member.own("step")
    assert step is not None
    at = at_step(step, recipe)
    power = recipe.ema_power
    # Not at.rate, which is 0 where the device knows that no average moves.
    rate = averaging_rate(at.t, power, recipe.ema_offset, recipe.ema_scale) if power else 1.0
    gap = before.average - before.live
    moved = member.live().to(gap.dtype) - before.live
    slope = before.slope or _slope(member, before)
    scalars, elements = (at.t, at.lr, rate), gap.numel()
    if at.pulling is False:
        none = gap.new_zeros(())
        sums = Sums(none, none, none, none, _squares(moved), _squares(gap), *slope)
        return Found(member.name, elements, sums, none.view(1), none.view(1), elements, scalars)

    pull = _pull(member, before, gap, at, recipe)
    sums = Sums(
        (pull.gain >= pull.limit).sum(),
        pull.gain.sum(),
        pull.ratio.sum(),
        _squares(pull.moved),
        _squares(moved.sub_(pull.moved)),
        _squares(gap),
        *slope,
    )
    stride = sample_stride(elements)
    gains, ratios = (values.flatten()[::stride].clone() for values in (pull.gain, pull.ratio))
    return Found(member.name, elements, sums, gains, ratios, stride, scalars)


def _pull(member: _Member, before: _Before, gap: Tensor, at: At, recipe: Recipe) -> _Pull:
    """Ratio and gain as the step computed them: second moment and learning rate are still there."""
    average = member.own("average")
    assert average is not None
    ratio = _ratio(member, real(average), at, recipe)
    if isinstance(at.pulling, Tensor):
        ratio = torch.where(at.pulling, ratio, 0.0)
    limit = gain_limit(recipe, ratio.dtype)
    gain = (ratio * at.rate).clamp(max=limit)
    if recipe.gap == "pre":
        return _Pull(ratio, gain, limit, gain * gap)
    new = real(local(average))
    return _Pull(ratio, gain, limit, _lookahead(gain, before.average, new, member.live(), at.rate))


def _ratio(member: _Member, average: Tensor, at: At, recipe: Recipe) -> Tensor:
    value, root, denominator = average, at.root_correction, torch.empty_like(average)
    if recipe.gain != "uniform":
        moment = second_moment(member.state, member.group)
        assert moment is not None  # the step would have raised
        value, root = moment.value, moment.root_correction
        denominator = (value.sqrt() / root + moment.eps).to(average.dtype)
    terms = Terms(denominator, value, root, at.lr, recipe.pullback_strength, out=None)
    # Cut to this rank's part last: gain="relative" compares with the RMS of the whole tensor.
    return local(RATIOS[recipe.gain](terms))


def _lookahead(gain: Tensor, old: Tensor, new: Tensor, live: Tensor, rate: Scalar) -> Tensor:
    """gain · (new average − raw), where raw, the step without the pull, is no longer to be had.

    From live = raw + gain · (new − raw) follows new − live = (1 − gain)(new − raw), which says nothing
    at gain 1. From new = (1 − rate) · old + rate · raw follows new − raw = (1/rate − 1)(old − new), but
    with a rounding error that grows as 1/rate.
    """
    return torch.where(gain < 0.5, gain / (1 - gain) * (new - live), gain * (1 / rate - 1) * (old - new))
