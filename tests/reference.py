"""Algorithm 1 in plain NumPy float64, written from the paper and sharing no code with the library.

One object is one parameter tensor. It is what every path of the library is measured against.
"""

import numpy as np


class Reference:
    def __init__(
        self,
        start,
        *,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        pullback_strength=3e-3,
        gain="paper",
        ema_power=0.5,
        update_every=1,
        ema_offset=1.0,
        ema_scale=1.0,
        max_gain=1.0,
        gap="pre",
        return_power=None,
        maximize=False,
    ):
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
        self.raw = self.live.copy()

    def step(self, grad):
        if grad is None:
            return
        self.t += 1
        t, (b1, b2) = self.t, self.betas
        g = self.sign * np.asarray(grad, dtype=np.float64)
        old = self.live.copy()
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        root = np.sqrt(self.v / (1 - b2**t))
        self.raw = old - self.lr * self.weight_decay * old
        self.raw = self.raw - self.lr * (self.m / (1 - b1**t)) / (root + self.eps)
        self.live = self.raw.copy()
        if t % self.every:
            return
        rate = (self.offset + self.scale * t) ** -self.power
        self.gain = np.zeros_like(root)
        if self.lr != 0 and self.strength != 0:
            if self.gain_name == "paper":
                ratio = self.lr * self.strength / (root + self.eps)
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
