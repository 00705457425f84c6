"""The update in plain NumPy float64, written from the paper and sharing no code with the library.

One object is one parameter tensor. It is what every path of the library is measured against. Another base
optimizer is another `base`.
"""

import numpy as np
import torch


class Reference:
    """AdamW under a control, whose fields are read and none of whose methods is called."""

    def __init__(
        self, start, control, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, maximize=False
    ):
        self.live = np.array(start, dtype=np.float64)
        self.m, self.v = np.zeros_like(self.live), np.zeros_like(self.live)
        self.average, self.returned = self.live.copy(), self.live.copy()
        self.raw, self.gain, self.root = self.live.copy(), np.zeros_like(self.live), np.ones_like(self.live)
        self.t, self.control = 0, control
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.sign = -1.0 if maximize else 1.0

    def step(self, grad):
        if grad is None:
            return
        self.t += 1
        old = self.live
        self.raw, self.root = self.base(old, self.sign * np.asarray(grad, dtype=np.float64))
        self.live = self.steer(old)

    def base(self, old, g):
        """Return AdamW's step from old, and √v̂."""
        t, (b1, b2), lr = self.t, self.betas, self.lr * self.control.step
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        root = np.sqrt(self.v / (1 - b2**t))
        raw = old - lr * self.weight_decay * old
        return raw - lr * (self.m / (1 - b1**t)) / (root + self.eps), root

    def rate(self, power):
        control = self.control
        late = max(0.0, self.t - control.delay)
        return max((1 + control.slope * late) ** -power, control.least_rate)

    def steer(self, old):
        """Return live after the control, and move the averages."""
        control, average = self.control, self.average
        averaging = self.t % control.every == 0
        pulling = self.t % (control.pull_every or control.every) == 0 and 0 not in (self.lr, control.strength)
        rate = self.rate(control.power)
        if averaging and control.order == "average, then pull":
            self.average = (1 - rate) * average + rate * self.raw
        gap = average - old if control.gap == "before" else self.average - self.raw
        size = self.lr / (self.root + self.eps) if control.sizing == "paper" else np.ones_like(self.root)
        ratio = self.strength * size if pulling else np.zeros_like(size)
        self.gain = np.minimum(rate * ratio, control.max_gain)
        live = self.raw + self.gain * gap
        if averaging and control.order == "pull, then average":
            self.average = (1 - rate) * average + rate * live
        if averaging and control.return_power is not None:
            rate = self.rate(control.return_power)
            self.returned = (1 - rate) * self.returned + rate * live
        return live

    @property
    def strength(self):
        """The strength of this step: where it grows, slow motion gains speed evenly, from 1 to 1/(1 + R)."""
        full, last = self.control.strength, self.control.grow
        if self.t >= last:
            return full
        speed = 1 + (1 / (1 + full) - 1) * self.t / last
        return 1 / speed - 1

    @property
    def evaluated(self):
        """The average that is returned."""
        return self.average if self.control.return_power is None else self.returned


class SGDReference(Reference):
    """Heavy-ball SGD under a control, in torch's form: the first gradient is the first buffer."""

    momentum = 0.9

    def base(self, old, g):
        self.m = g if self.t == 1 else self.momentum * self.m + g
        return old - self.lr * self.control.step * self.m, np.ones_like(old)


def references(parameters, control, kind=Reference, **settings):
    """Return a reference for each parameter, at its present weights."""
    return [kind(array(p), control, **settings) for p in parameters]


def array(tensor):
    return tensor.detach().cpu().double().numpy()


def distance(ours, theirs):
    """Return how far a tensor is from an array, as a share of the array's largest."""
    if not theirs.size:
        return 0.0
    return float(np.abs(array(ours) - theirs).max() / max(np.abs(theirs).max(), 1e-30))


def distances(optimizer, parameters, expected):
    """Return the largest distances of weights, moments and averages, by name."""
    found = {}
    for p, reference in zip(parameters, expected, strict=True):
        state = {key.removeprefix("paceline_"): value for key, value in optimizer.state[p].items()}
        state |= {key: value for key, value in averages_of(optimizer, p).items() if value is not None}
        steers = reference.control.strength != 0  # otherwise there is one average, which is returned
        names = {"exp_avg": "m", "exp_avg_sq": "v", "average": "average" if steers else "evaluated"}
        names["returned"] = "evaluated"
        found["live"] = max(found.get("live", 0.0), distance(p, reference.live))
        for name, attribute in names.items():
            if isinstance(state.get(name), torch.Tensor):
                apart = distance(state[name], getattr(reference, attribute))
                found[name] = max(found.get(name, 0.0), apart)
    return found


def averages_of(optimizer, parameter):
    """Return the averages of a parameter by name, however they are kept."""
    from paceline.optim.state import average_of, storage_of
    from paceline.optim.weights import keeper_of

    state = {id(p): state for _, p, state in keeper_of(optimizer).remembered()}.get(id(parameter), {})
    live = state.get("live", parameter.detach())
    names = [name for name in ("average", "returned") if state and storage_of(state, name) is not None]
    return {name: average_of(state, name, live) for name in names}
