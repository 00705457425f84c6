"""The rivals, next to the library's first versions of them, which were checked against their authors'
code."""

import pytest
import schedulefree
import torch

from paceline import averaged_weights as old_averaged_weights
from paceline.optim import baselines as old
from paceline.rebuilt import baselines
from paceline.rebuilt.weights import averaged_weights
from rebuilt.test_core import problem, train

PAIRS = {
    "lookahead": (
        lambda b: baselines.lookahead(b, k=3, alpha=0.4),
        lambda b: old.lookahead(b, k=3, alpha=0.4),
    ),
    "gpa": (lambda b: baselines.gpa(b, mu_x=0.8), lambda b: old.GPA(b, mu_x=0.8)),
    "ema_nesterov": (
        lambda b: baselines.ema_nesterov(b, push=0.6, decay=0.8, start=2, stop=9),
        lambda b: old.EMANesterov(b, push=0.6, decay=0.8, start=2, stop=9),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equals_the_first_version(name):
    found = []
    for make, show in zip(PAIRS[name], (averaged_weights, old_averaged_weights), strict=True):
        live, gradients = problem(torch.float64)
        optimizer = make(torch.optim.AdamW(live, 1e-2))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for t in range(1, 13):
            train(optimizer, gradients, 1, t)
            scheduler.step()
        now = [p.detach().clone() for p in live]
        with show(optimizer):
            found.append((now, [p.detach().clone() for p in live]))
        assert all(torch.equal(a, b) for a, b in zip(now, live, strict=True))
    for ours, theirs in zip(*found, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=1e-11, atol=1e-12)


def test_schedule_free_is_shown_and_goes_on():
    live, gradients = problem()
    optimizer = baselines.schedule_free(schedulefree.AdamWScheduleFree(live, 1e-2))
    train(optimizer, gradients, 5)
    y = [p.detach().clone() for p in live]
    with averaged_weights(optimizer):
        x = [p.detach().clone() for p in live]
    assert all(torch.equal(a, b) for a, b in zip(y, live, strict=True))
    optimizer.eval()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(x, live, strict=True))


def test_gpa_puts_live_back_after_a_closure_that_raises():
    live, gradients = problem()
    optimizer = baselines.gpa(torch.optim.SGD(live, 1e-2))
    train(optimizer, gradients, 3)
    before = [p.detach().clone() for p in live]

    def bad():
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(bad)
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(before, live, strict=True))
