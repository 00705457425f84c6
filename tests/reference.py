"""Algorithm 1 in plain NumPy float64, written from the paper and sharing no code with the library.

One object is one parameter tensor. It is what every path of the library is measured against. Another
base optimizer is another `base`. Several tensors of a model step together by `step_model`,
for gain="scaled", whose scale is theirs together.
"""

import numpy as np
import torch


class Reference:
    def __init__(
        self,
        start,
        *,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        pullback_strength=None,
        gain="paper",
        ema_power=None,
        update_every=1,
        ema_offset=1.0,
        ema_scale=1.0,
        max_gain=1.0,
        gap="pre",
        return_power=None,
        maximize=False,
    ):
        if gain == "scaled":
            ema_power = 0.2 if ema_power is None else ema_power
            return_power = 0.7 if return_power is None else return_power
            pullback_strength = 15.0 if pullback_strength is None else pullback_strength
        ema_power = 0.5 if ema_power is None else ema_power
        pullback_strength = 3e-3 if pullback_strength is None else pullback_strength
        self.live = np.array(start, dtype=np.float64)
        self.m = np.zeros_like(self.live)
        self.v = np.zeros_like(self.live)
        self.average = self.live.copy()
        self.returned = self.live.copy()
        self.t = 0
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.strength, self.gain_name, self.power = pullback_strength, gain, ema_power
        self.every, self.offset, self.scale = update_every, ema_offset, ema_scale
        self.max_gain, self.gap, self.return_power = max_gain, gap, return_power
        self.sign = -1.0 if maximize else 1.0
        self.gain = np.zeros_like(self.live)
        self.raw, self.root = self.live.copy(), np.zeros_like(self.live)

    def step(self, grad, scale=None):
        if grad is None:
            return
        self.scale_before = rms_of([self]) if scale is None else scale
        self.t += 1
        old = self.live.copy()
        self.raw, self.root = self.base(old, self.sign * np.asarray(grad, dtype=np.float64))
        self.live = self.raw.copy()
        self.control(old, self.root)

    def base(self, old, g):
        """The step of AdamW from old, and √v̂."""
        t, (b1, b2) = self.t, self.betas
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        root = np.sqrt(self.v / (1 - b2**t))
        raw = old - self.lr * self.weight_decay * old
        return raw - self.lr * (self.m / (1 - b1**t)) / (root + self.eps), root

    def control(self, old, root):
        """The pull and the averages, after any base."""
        t = self.t
        if t % self.every:
            return
        rate = (self.offset + self.scale * t) ** -self.power
        self.gain = np.zeros_like(root)
        if self.lr != 0 and self.strength != 0:
            if self.gain_name == "paper":
                ratio = self.lr * self.strength / (root + self.eps)
            elif self.gain_name == "scaled":
                ratio = self.lr * self.strength * self.scale_before / (root + self.eps)
            elif self.gain_name == "uniform":
                ratio = np.full_like(root, self.strength)
            else:
                rms = np.sqrt(np.mean(root**2))
                ratio = self.strength * np.clip(rms / (root + self.eps), 0.25, 4.0)
            self.gain = np.minimum(rate * ratio, self.max_gain)
        if self.gap == "pre":
            self.live = self.raw + self.gain * (self.average - old)
            self.average = (1 - rate) * self.average + rate * self.live
        else:
            self.average = (1 - rate) * self.average + rate * self.raw
            self.live = self.raw + self.gain * (self.average - self.raw)
        if self.return_power is not None:
            rate = (self.offset + self.scale * t) ** -self.return_power
            self.returned = (1 - rate) * self.returned + rate * self.live


def rms_of(references):
    """Root mean square of √v̂ over several tensors, as their last steps left it."""
    return np.sqrt(sum(np.sum(r.root**2) for r in references) / max(1, sum(r.root.size for r in references)))


def step_model(references, gradients):
    """One step of all tensors of a model."""
    scale = rms_of([r for r, g in zip(references, gradients, strict=True) if g is not None])
    for reference, gradient in zip(references, gradients, strict=True):
        reference.step(gradient, scale)


def of_the_same_state(optimizer, parameters, t, settings):
    """A reference for each parameter, with the weights and the state that a PACE has after t steps."""
    references = []
    for p in parameters:
        r, state = Reference(_numpy(p), **settings), optimizer.state[p]
        r.v, r.average, r.t = *(_numpy(state[k]) for k in ("exp_avg_sq", "average")), t
        if "exp_avg" in state:  # without momentum there is none
            r.m = _numpy(state["exp_avg"])
        r.returned = _numpy(state.get("returned", state["average"]))
        r.root = np.sqrt(r.v / (1 - r.betas[1] ** t)) if t else np.zeros_like(r.v)
        references.append(r)
    return references


def distances(optimizer, parameters, references):
    """How far weights, moments and averages are from their references, as shares of each tensor's largest."""
    found = {}
    for p, r in zip(parameters, references, strict=True):
        state = optimizer.state[p]
        pairs = {"live": (p, r.live), "exp_avg_sq": (state["exp_avg_sq"], r.v)}
        pairs["average"] = state["average"], r.average
        if "exp_avg" in state:
            pairs["exp_avg"] = state["exp_avg"], r.m
        if "returned" in state:
            pairs["returned"] = state["returned"], r.returned
        for name, (ours, theirs) in pairs.items():
            if theirs.size:
                size = max(np.abs(theirs).max(), 1e-30)
                found[name] = max(found.get(name, 0.0), np.abs(_numpy(ours) - theirs).max() / size)
    return found


def _numpy(tensor):
    return tensor.detach().cpu().double().numpy()


class SGDReference(Reference):
    """Heavy-ball SGD under the control: torch's form, the first gradient is the first buffer."""

    momentum = 0.9

    def base(self, old, g):
        self.m = g if self.t == 1 else self.momentum * self.m + g
        return old - self.lr * self.m, np.ones_like(old)


class LionReference(Reference):
    """Lion (arXiv 2302.06675) under the control: the sign of an interpolation, decoupled decay."""

    def base(self, old, g):
        b1, b2 = self.betas
        raw = old - self.lr * self.weight_decay * old - self.lr * np.sign(b1 * self.m + (1 - b1) * g)
        self.m = b2 * self.m + (1 - b2) * g
        return raw, np.ones_like(old)


class TwinReference(Reference):
    """Any torch optimizer under the control: a second one steps from the reference's own weights."""

    def __init__(self, start, make, root, **settings):
        super().__init__(start, **settings)
        self.twin = torch.tensor(self.live).requires_grad_()
        self.optimizer, self.root_of = make([self.twin]), root

    def base(self, old, g):
        with torch.no_grad():
            self.twin.copy_(torch.tensor(old))
        self.twin.grad = torch.tensor(g)
        self.optimizer.step()
        return self.twin.detach().numpy().copy(), self.root_of(self.optimizer.state[self.twin], self.t)
