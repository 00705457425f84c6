"""The loop against a plain one, and what must hold whatever is trained."""

import dataclasses
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from tiny import RandomTokens
from torch import nn
from torch.nn import functional as F

from paceline import PACE, Control, PowerLaw, attach, averaged_weights, schedules
from paceline.lm.batch import IGNORED, Batch, numbers_at
from paceline.lm.evaluate import NotFiniteError, held_out_loss
from paceline.lm.gpt import GPT, GPTShape
from paceline.lm.loop import Evaluation, Plan, Progress, Step, Trainee, train
from paceline.lm.parallel import ALONE

SHAPE = GPTShape(vocabulary=50, length=16, width=32, layers=2, heads=2)
PLAN = Plan(steps=12, batch_size=6, micro_batch_size=6, seed=3, evaluate_every=5)


ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def trainee_of(make=ADAMW, *, shape=SHAPE, samples=None, warmup=4, averages=(), **more):
    torch.manual_seed(0)
    model = GPT(shape)
    optimizer = make(model.parameters())
    views = {"live": nullcontext} | {name: partial(averaged_weights, optimizer, name) for name in averages}
    return Trainee(
        model=model,
        optimizer=optimizer,
        scheduler=schedules.constant(optimizer, warmup=warmup),
        samples=samples or RandomTokens(40),
        held_out={"held-out": RandomTokens(10, seed=9)},
        views=views,
        **more,
    )


def records_of(trainee, plan=PLAN, progress=None, **more):
    return list(train(trainee, plan, progress or Progress(), **more))


def weights_of(trainee):
    return {name: parameter.detach().clone() for name, parameter in trainee.model.named_parameters()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def plain_loop():
    """The same training written out with torch alone."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 4))
    samples, losses = RandomTokens(40), []
    for step in range(12):
        numbers = numbers_at(step, batch_size=6, samples=40, seed=3)
        batch = samples.batch(numbers)
        logits = model(batch.tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return model, losses


def test_adamw_is_a_plain_torch_loop_to_the_bit():
    trainee = trainee_of()
    steps = [record for record in records_of(trainee) if isinstance(record, Step)]
    model, losses = plain_loop()
    assert_same(weights_of(trainee), dict(model.named_parameters()))
    assert [step.loss for step in steps] == losses
    assert [step.lr for step in steps[:5]] == [0.0025, 0.005, 0.0075, 0.01, 0.01]
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.slow
def test_averages_of_any_kind_leave_the_live_weights_alone():
    """AdamW, AdamW with averages beside it, and PACE without a control."""
    adamw = trainee_of()
    beside = trainee_of(
        lambda p: attach(ADAMW(p), averages={"short": PowerLaw(0.3), "long": PowerLaw(0.9)}),
        averages=("short", "long"),
    )
    none = partial(PACE, lr=1e-2, control=Control.none(power=0.3), foreach=False)
    passive = trainee_of(none, averages=("average",))
    found = [records_of(trainee)[-1].losses["held-out"] for trainee in (adamw, beside, passive)]
    assert_same(weights_of(adamw), weights_of(beside))
    assert_same(weights_of(adamw), weights_of(passive))
    assert found[0]["live"] == found[1]["live"] == found[2]["live"]
    assert found[1]["short"] == pytest.approx(found[2]["average"], rel=1e-6)
    assert len({found[1]["live"], found[1]["short"], found[1]["long"]}) == 3


def test_two_runs_of_one_seed_are_one():
    runs = [trainee_of(shape=dataclasses.replace(SHAPE, dropout=0.2)) for _ in range(2)]
    both = []
    for run in runs:
        torch.manual_seed(7)
        both.append(records_of(run))
    assert both[0] == both[1]
    assert_same(*map(weights_of, runs))


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_micro_batches_add_up_to_the_batch(size):
    """Also where masked targets make their means weigh unequally."""
    samples = RandomTokens(40, masked=0.4)
    whole, parts = trainee_of(samples=samples), trainee_of(samples=samples)
    plan = dataclasses.replace(PLAN, steps=2)
    a = records_of(whole, plan)
    b = records_of(parts, dataclasses.replace(plan, micro_batch_size=size))
    for one, other in zip(a, b, strict=True):
        if isinstance(one, Step):
            assert one.loss == pytest.approx(other.loss, rel=1e-5) and one.targets == other.targets
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


def test_it_evaluates_when_due_and_at_the_end():
    records = records_of(trainee_of())
    assert [r.step for r in records if isinstance(r, Evaluation)] == [5, 10, 12]
    assert [r.step for r in records if isinstance(r, Step)] == list(range(1, 13))


def test_an_evaluation_is_the_mean_over_all_targets():
    trainee = trainee_of(samples=RandomTokens(40, masked=0.5))
    samples = RandomTokens(7, seed=5, masked=0.5)
    loss = held_out_loss(
        trainee.model, samples, device=torch.device("cpu"), batch_size=3, precision=torch.float32
    )
    batch = samples.batch(range(7))
    logits = trainee.model(batch.tokens).flatten(0, 1).double()
    expected = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert trainee.model.training


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", range(1, 16))
def test_it_goes_on_from_wherever_it_stopped(stop_at):
    """Stopped after that many questions; some of them are asked inside evaluations."""
    whole = trainee_of(partial(PACE, lr=1e-2), averages=("average",))
    expected = records_of(whole)
    parts, progress = trainee_of(partial(PACE, lr=1e-2), averages=("average",)), Progress()
    asked = itertools.count(1)
    found = records_of(parts, progress=progress, stop=lambda: next(asked) == stop_at)
    assert len(found) < len(expected)
    found += records_of(parts, progress=progress)
    assert found == expected
    assert_same(weights_of(whole), weights_of(parts))


class Spoils(nn.Module):
    """A model whose loss or gradient is not finite whenever asked."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.how, self.bad = GPT(SHAPE), how, False

    def forward(self, tokens, positions=None):
        logits = self.inner(tokens, positions)
        if self.training and self.bad:
            if self.how == "loss":
                return logits * float("nan")
            logits.register_hook(lambda g: g * float("inf"))
        return logits


def spoiled(how):
    torch.manual_seed(0)
    model = Spoils(how)
    optimizer = PACE(model.parameters(), lr=1e-2)
    scheduler = schedules.constant(optimizer)
    samples = RandomTokens(40)
    return Trainee(
        model=model, optimizer=optimizer, scheduler=scheduler, samples=samples, held_out={}, views={}
    )


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_what_is_not_finite_ends_the_run_before_the_update(how):
    trainee = spoiled(how)
    events = train(trainee, PLAN, Progress())
    for _ in range(4):
        next(events)
    before, state = weights_of(trainee), trainee.optimizer.state_dict()["state"]
    before_state = {i: {k: v.clone() for k, v in entry.items()} for i, entry in state.items()}
    trainee.model.bad = True
    numbers = numbers_at(4, batch_size=6, samples=40, seed=3)
    with pytest.raises(NotFiniteError, match=f"at step 5, on samples {', '.join(map(str, numbers))}.*inner"):
        next(events)
    assert_same(before, weights_of(trainee))
    for i, entry in trainee.optimizer.state_dict()["state"].items():
        assert_same(before_state[i], entry)


def test_a_few_steps_may_be_skipped_and_no_more():
    trainee = spoiled("gradient")
    events = train(trainee, dataclasses.replace(PLAN, max_skips=2, evaluate_every=99), Progress())
    next(events)
    before = weights_of(trainee)
    trainee.model.bad = True
    assert [next(events).skipped, next(events).skipped] == [True, True]
    assert_same(before, weights_of(trainee))
    trainee.model.bad = False
    assert not next(events).skipped  # the count begins anew
    trainee.model.bad = True
    assert [next(events).skipped, next(events).skipped] == [True, True]
    with pytest.raises(NotFiniteError, match="after 2 skipped in a row"):
        next(events)


def test_nothing_of_a_step_is_left_in_the_gradients():
    trainee = trainee_of()
    for record in train(trainee, PLAN, Progress()):
        if isinstance(record, Step):
            assert all(p.grad is None for p in trainee.model.parameters())


def test_the_norm_is_that_before_clipping_and_the_limit_holds():
    huge = trainee_of(partial(torch.optim.SGD, lr=1.0), warmup=0)
    before = weights_of(huge)
    plan = dataclasses.replace(PLAN, steps=1, clip_norm=0.01)
    step = records_of(huge, plan)[0]
    moved = torch.stack([(before[n] - w).norm() for n, w in weights_of(huge).items()]).norm().item()
    assert step.grad_norm > 0.1 and moved == pytest.approx(0.01, rel=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch, on processors without bfloat16
def test_bfloat16_is_close_and_weights_stay_float32():
    exact, rough = trainee_of(), trainee_of()
    a = records_of(exact)[-1].losses["held-out"]["live"]
    b = records_of(rough, dataclasses.replace(PLAN, precision=torch.bfloat16))[-1].losses["held-out"]["live"]
    assert a != b and a == pytest.approx(b, rel=0.01)
    assert all(p.dtype == torch.float32 for p in rough.model.parameters())


def test_a_batch_splits_and_counts():
    batch = Batch(
        torch.arange(10).view(5, 2), torch.full((5, 2), IGNORED), torch.zeros(5, 2, dtype=torch.long)
    )
    batch.targets[3, 1] = 1
    parts = ALONE.parts(batch, 2)
    assert [len(part.tokens) for part in parts] == [2, 2, 1]
    assert [part.target_count() for part in parts] == [0, 1, 0] and batch.target_count() == 1
    assert torch.equal(torch.cat([part.positions for part in parts]), batch.positions)


def test_a_step_is_told_the_loss_of_its_batch():
    told = []

    class Told(torch.optim.SGD):
        def step(self, closure=None):
            told.append(closure())
            return super().step()

    records = records_of(trainee_of(partial(Told, lr=1e-2)))
    assert told == [record.loss for record in records if isinstance(record, Step)]
