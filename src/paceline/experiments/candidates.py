"""Gains that were tried on the way to a default: research, written to be short and fast to run.

`Candidate` is AdamW with a pull, over all weights as one flat vector, so that a gain may look at the gap, at
gradients and at sums over a tensor. With the gains of the library it is PACE. docs/defaults.md says what
became of the others.

.. code-block:: text

    gap = live − average
    live' = base(live) − gain · gap
    average' = average + rate · (live' − average)
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT

from paceline.optim.checks import require


class Tensors:
    """Which part of the flat vector is which tensor."""

    def __init__(self, parameters: list[Tensor]) -> None:
        device = parameters[0].device
        sizes = [parameter.numel() for parameter in parameters]
        self.sizes = sizes
        self.counts = torch.tensor(sizes, device=device, dtype=parameters[0].dtype)
        self.vectors = torch.tensor([p.ndim < 2 for p in parameters], device=device)
        largest = [size == max(sizes) for size in sizes]
        self.largest = torch.tensor(largest, device=device)
        self._number = torch.repeat_interleave(
            torch.arange(len(sizes), device=device), torch.tensor(sizes, device=device)
        )

    def norms(self, flat: Tensor) -> Tensor:
        """Of each tensor: (tensors,)."""
        return torch.stack(torch._foreach_norm(list(torch.split(flat, self.sizes))))

    def sizes_of(self, flat: Tensor, floor: float, vector_floor: float) -> Tensor:
        """Root mean square of each tensor, at least a floor: (tensors,)."""
        floors = torch.where(self.vectors, vector_floor, floor)
        return torch.maximum(self.norms(flat) / self.counts.sqrt(), floors)

    def cosine(self, left: Tensor, right: Tensor) -> Tensor:
        """Of each tensor's parts: (tensors,)."""
        pairs = zip(torch.split(left, self.sizes), torch.split(right, self.sizes), strict=True)
        dots = torch.stack([torch.dot(a, b) for a, b in pairs])
        return dots / (self.norms(left) * self.norms(right)).clamp(min=1e-30)

    def spread(self, each: Tensor) -> Tensor:
        """A number a tensor, to all its coordinates."""
        return each[self._number]


class Scene(NamedTuple):
    """What a gain may look at, before the step; flat vectors, unless said otherwise."""

    gap: Tensor  # live − average
    average: Tensor
    slow: Tensor  # a second, slower average
    gradient: Tensor
    step: Tensor  # the base's: live after it − live before it
    root: Tensor  # √v̂ + ε
    cosine: Callable[[], Tensor]  # (tensors,): of the gradient and the gap
    tuned: Tensor  # (tensors,): a memory of the gain's own, kept between steps, 0 at first
    lr: float
    rate: float  # of the average at this step
    slow_rate: float
    noise: float  # variance of the gap if all steps were noise of variance η²
    t: int
    tensors: Tensors


Pull = tuple[Tensor | float, Tensor | float]
"""What is subtracted from live, and a factor of the base's step."""


# --- The gains of the library -----------------------------------------------------------------------


def paper(s: Scene, strength: float, part: str = "all") -> Pull:
    """λ = min(β η c/√v̂, 1); `part="largest"`: only in the largest tensor, the embedding, or in the "rest"."""
    gain = (s.rate * s.lr * strength / s.root).clamp(max=1)
    if part != "all":
        gain = gain * s.tensors.spread(s.tensors.largest if part == "largest" else ~s.tensors.largest)
    return gain * s.gap, 1.0


def uniform(s: Scene, strength: float) -> Pull:
    """λ = β R."""
    return min(s.rate * strength, 1.0) * s.gap, 1.0


def relative(s: Scene, strength: float) -> Pull:
    """λ = β R · clip(rms √v̂/√v̂, ¼, 4)."""
    rms = s.tensors.norms(s.root) / s.tensors.counts.sqrt()
    share = (s.tensors.spread(rms) / s.root).clamp(0.25, 4)
    return (s.rate * strength * share).clamp(max=1) * s.gap, 1.0


# --- H2 to H5 of the plan ---------------------------------------------------------------------------


def hypergradient(
    s: Scene,
    speed: float = 0.01,
    low: float = -1.0,
    high: float = 3.0,
    target: float = 0.0,
    acts: str = "pull",
) -> Pull:
    """H2: λ = β(e^u − 1); u follows the cosine of gradient and gap, tensor by tensor.

    ∂loss/∂R at the next step is −β⟨gradient, gap⟩. `acts="scale"` divides the step by e^u instead, and
    "both" pulls where u is positive and lengthens the step where it is negative.
    """
    evidence = (s.cosine() - target) * s.tensors.counts.sqrt()
    s.tuned.add_(speed * evidence.clamp(-1, 1)).clamp_(low, high)
    u = s.tuned
    pulling = u if acts == "pull" else u.clamp(min=0) if acts == "both" else torch.zeros_like(u)
    scaling = -u if acts == "scale" else -u.clamp(max=0) if acts == "both" else torch.zeros_like(u)
    gain = (s.rate * pulling.expm1()).clamp(max=1)
    return s.tensors.spread(gain) * s.gap, s.tensors.spread(scaling.exp())


def without_drift(s: Scene, strength: float) -> Pull:
    """H3: the gap less what a steady drift would make of it, as seen by two averages."""
    drift = (s.average - s.slow) * (s.slow_rate / max(s.rate - s.slow_rate, 1e-9))
    limit = s.gap.abs()
    return min(s.rate * strength, 1.0) * (s.gap - drift.clamp(-limit, limit)), 1.0


def gated(s: Scene, strength: float, threshold: float = 3.0, push: float = 0.5) -> Pull:
    """H4: pull coordinates whose gap is as small as noise makes it, push those that drift.

    q = gap²/noise is about χ²₁ if the steps are noise, and larger where they agree.
    """
    q = s.gap.square() / max(s.noise, 1e-30)
    ratio = (strength * (1 - q / threshold)).clamp(-push, strength)
    return (s.rate * ratio).clamp(max=1) * s.gap, 1.0


def push_then_pull(
    s: Scene, strength: float, steps: int, push: float = 0.3, turn: float = 0.65, width: float = 0.1
) -> Pull:
    """H5: R = −push until `turn` of the run, then growing toward its end."""
    left, scale = (steps - s.t) / steps, width
    ratio = -push if s.t < turn * steps else strength * scale / (left + scale)
    return min(s.rate * ratio, 1.0) * s.gap, 1.0


# --- Ours -------------------------------------------------------------------------------------------


def leash(
    s: Scene, length: float, after: bool = True, floor: float = 0.02, vector_floor: float = 0.2
) -> Pull:
    """The gap of a tensor may be at most `length` of the tensor; nothing is pulled while it is shorter.

    The size of a tensor is its root mean square, at least `floor`: what begins at 0 must be free to grow.
    `after`: the gap with the new step in it.
    """
    gap = s.gap + s.step if after else s.gap
    size = s.tensors.sizes_of(s.average, floor, vector_floor)
    excess = s.tensors.norms(gap) / s.tensors.counts.sqrt() / (length * size)  # > 1: too long
    return s.tensors.spread(1 - 1 / excess.clamp(min=1)) * gap, 1.0


def scaled(s: Scene, strength: float, push: float = 0.0) -> Pull:
    """The paper's with c = strength · rms √v̂ of the whole model, blind to loss scale; less a push.

    R = η/η* − push: below a learning rate of its own, every coordinate is pushed along.
    """
    rms = s.root.norm() / math.sqrt(s.root.numel())
    ratio = s.lr * strength * rms / s.root - push
    return (s.rate * ratio).clamp(max=1) * s.gap, 1.0


def signal(s: Scene, strength: float) -> Pull:
    """`scaled` by the rms of m̂ in place of √v̂: of the noise in gradients, which a larger batch has less of,
    a quarter is left in it."""
    rms = (s.step * s.root).norm() / math.sqrt(s.root.numel())  # η times that of m̂, but for the decay
    return (s.rate * strength * rms / s.root).clamp(max=1) * s.gap, 1.0


def softened(s: Scene, strength: float, push: float = 0.0) -> Pull:
    """`scaled` without a pull: what it does to steady motion, done to the step. AdamW with a larger ε."""
    rms = s.root.norm() / math.sqrt(s.root.numel())
    return -s.rate * push * s.gap, s.root / (s.root + s.lr * strength * rms)


def split(s: Scene, strength: float, push: float) -> Pull:
    """`scaled`, pulling toward one average and pushing away from a slower one."""
    pull, _ = scaled(s, strength)
    return pull - s.slow_rate * push * (s.gap + s.average - s.slow), 1.0


def tensorwise(s: Scene, strength: float) -> Pull:
    """`scaled`, with the root mean square of each tensor instead of the model's."""
    rms = s.tensors.spread(s.tensors.norms(s.root) / s.tensors.counts.sqrt())
    return (s.rate * s.lr * strength * rms / s.root).clamp(max=1) * s.gap, 1.0


def sized(
    s: Scene, strength: float, power: float = 1.0, floor: float = 0.02, vector_floor: float = 0.2
) -> Pull:
    """λ = β · strength · (η/size of the tensor)^power: stronger where steps are long beside the weights."""
    share = s.lr / s.tensors.sizes_of(s.average, floor, vector_floor)
    return s.tensors.spread((s.rate * strength * share**power).clamp(max=1)) * s.gap, 1.0


def stable(s: Scene, limit: float = 1.0) -> Pull:
    """No pull: a tensor's step is divided by the root mean square of g/√v̂ where that is over `limit`."""
    surprise = s.tensors.norms(s.gradient / s.root) / s.tensors.counts.sqrt()
    return 0.0, s.tensors.spread(1 / (surprise / limit).clamp(min=1))


def clipped(s: Scene, limit: float = 1.0) -> Pull:
    """No pull: no coordinate steps farther than `limit` times η."""
    longest = limit * s.lr
    return s.step - s.step.clamp(-longest, longest), 1.0


def capped(
    s: Scene,
    length: float,
    strength: float = 0.0,
    of: str = "step",
    frozen: bool = False,
    floor: float = 0.02,
    vector_floor: float = 0.2,
) -> Pull:
    """No step of a tensor is longer than `length` of it; the pull is as strong as the step was cut.

    R = strength · (1 − factor). `of="lr"` limits the learning rate instead, to `length` of the tensor's rms.
    `frozen`: the size is that of the tensor as it began.
    """
    if s.t == 1:
        s.tuned.copy_(s.tensors.sizes_of(s.average, floor, vector_floor))
    size = s.tuned if frozen else s.tensors.sizes_of(s.average, floor, vector_floor)
    asked = s.tensors.norms(s.step) / s.tensors.counts.sqrt() if of == "step" else max(s.lr, 1e-30)
    factor = (length * size / asked).clamp(max=1)
    gain = (s.rate * strength * (1 - factor)).clamp(max=1)
    return s.tensors.spread(gain) * s.gap, s.tensors.spread(factor)


GAINS: dict[str, Callable[..., Pull]] = {
    "paper": paper,
    "uniform": uniform,
    "relative": relative,
    "hypergradient": hypergradient,
    "without_drift": without_drift,
    "gated": gated,
    "push_then_pull": push_then_pull,
    "leash": leash,
    "scaled": scaled,
    "signal": signal,
    "softened": softened,
    "split": split,
    "tensorwise": tensorwise,
    "sized": sized,
    "stable": stable,
    "clipped": clipped,
    "capped": capped,
}


@final
class Candidate(AdamW):
    """AdamW with one of `GAINS`; further settings are those of the gain.

    It keeps no average to return: put it into `Averages`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        gain: str = "uniform",
        ema_power: float = 0.5,
        slow_power: float = 0.8,
        **settings: Any,
    ) -> None:
        require(gain in GAINS, "gain", gain, ", ".join(GAINS))
        self._pull = partial(GAINS[gain], **settings)
        self._powers = ema_power, slow_power
        groups: list[Any] = list(params)
        super().__init__(groups, lr, betas, eps, weight_decay, fused=_first(groups).is_cuda or None)
        self._tensors: Tensors | None = None
        self._t: int | None = None  # of the last step; asked from the device once
        self._noise = 0.0

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over a state; the step is looked at anew."""
        super().load_state_dict(state_dict)
        self._t = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; every weight needs a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self._tensors is None:
            self._tensors = Tensors(parameters)
        tensors, memory = self._tensors, self.state[parameters[0]]
        before = _flat(parameters)
        gradient = torch.cat([p.grad.flatten() for p in parameters])
        super().step()
        if "flat_average" not in memory:
            memory["flat_average"], memory["flat_slow"] = before.clone(), before.clone()
            memory["flat_tuned"] = torch.zeros_like(tensors.counts)
            memory["flat_noise"] = torch.zeros((), dtype=torch.float32)
        average, slow = memory["flat_average"], memory["flat_slow"]
        if self._t is None:
            self._t, self._noise = int(memory["step"].item()) - 1, float(memory["flat_noise"].item())
        t = self._t = self._t + 1
        gap = before - average
        cosine = partial(tensors.cosine, gradient, gap)
        after = _flat(parameters)
        group = self.param_groups[0]
        lr, beta2 = float(group["lr"]), group["betas"][1]
        root = torch.cat([self.state[p]["exp_avg_sq"].flatten() for p in parameters])
        root.sqrt_().div_(math.sqrt(1 - beta2**t)).add_(group["eps"])
        rate, slow_rate = ((1 + t) ** -power for power in self._powers)
        scene = Scene(
            gap=gap, average=average, slow=slow, gradient=gradient, step=after - before, root=root,
            cosine=cosine, tuned=memory["flat_tuned"], lr=lr, rate=rate, slow_rate=slow_rate,
            noise=self._noise, t=t, tensors=tensors,
        )  # fmt: skip
        memory["flat_noise"] = torch.tensor((1 - rate) ** 2 * (self._noise + lr**2), dtype=torch.float32)
        self._noise = memory["flat_noise"].item()  # as a state keeps it, so that resuming changes nothing
        pull, factor = self._pull(scene)
        live = before + scene.step * factor - pull
        average.lerp_(live, rate)
        slow.lerp_(live, slow_rate)
        parts = torch.split(live, tensors.sizes)
        torch._foreach_copy_(parameters, [x.view_as(p) for x, p in zip(parts, parameters, strict=True)])
        return loss


def _first(params: list[Any]) -> Tensor:
    item = params[0]
    while not isinstance(item, Tensor):
        item = item["params"] if isinstance(item, dict) else item[-1] if isinstance(item, tuple) else item[0]
    return item


def _flat(parameters: list[Tensor]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])
