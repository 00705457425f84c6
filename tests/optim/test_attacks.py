"""Attacks that once got wrong weights without a word: each is mended, or refused with a clear line.

Gathered copies of FSDP2 need several ranks: `fsdp2_evaluations` in ranks_training.py.
"""

import contextlib
import copy
import io
import random
import signal
import warnings

import pytest
import torch
from problems import Net, assert_same_bits, everything, train, trained
from torch import nn

from paceline import (
    PACE,
    Averages,
    PowerLaw,
    Pullback,
    averaged_state_dict,
    averaged_weights,
    reset_average,
    save_averaged,
)


def linear_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def step(model, *optimizers, number=0):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
    model.zero_grad()
    model(x.to(next(model.parameters()))).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def stepped(model, *optimizers, steps=4):
    for number in range(steps):
        step(model, *optimizers, number=number)


# --- Autocast keeps low-precision copies of weights -------------------------------------------------


def _autocast_losses(model, optimizer, contexts, exchanges):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(9))
    found = []

    def loss():
        value = model(x).float().square().mean()
        found.append(value.item())
        return value

    with contexts():
        for show, hide in exchanges(model, optimizer):
            loss()  # of live, with gradients: autocast remembers what it casts then
            show()
            loss()
            hide()
        model.zero_grad()
        loss().backward()
    return [*found, *(p.grad.norm().item() for p in model.parameters())]


def _block(model, optimizer):
    block = averaged_weights(optimizer)
    return [(block.__enter__, lambda: block.__exit__(None, None, None))]


@pytest.mark.parametrize(
    "exchanges",
    [_block, lambda model, optimizer: [(optimizer.eval, optimizer.train)] * 2],
    ids=["block", "modes"],
)
def test_autocast_forgets_its_copies_at_every_exchange(exchanges):
    results = []
    for remembers in (True, False):
        model = linear_model()
        optimizer = PACE(model.parameters(), lr=0.1)
        stepped(model, optimizer)

        def contexts(remembers=remembers):
            return torch.autocast("cpu", torch.bfloat16, cache_enabled=remembers)

        results.append(_autocast_losses(model, optimizer, contexts, exchanges))
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


# --- Models that several optimizers train -----------------------------------------------------------


def two_optimizers():
    model = linear_model()
    first, second = (PACE(part.parameters(), lr=lr) for part, lr in ((model[0], 0.1), (model[2], 0.05)))
    stepped(model, first, second)
    return model, first, second


def whole(model, *optimizers):
    averages = {p: a for optimizer in optimizers for p, a in optimizer.returned_averages()}
    return {name: averages[p].clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("export", ["state dict", "file", "block"])
def test_what_no_optimizer_knows_is_refused_by_name(export, tmp_path):
    model, first, second = two_optimizers()
    live = {name: p.detach().clone() for name, p in model.named_parameters()}

    def exported(optimizers, **how):
        if export == "state dict":
            return averaged_state_dict(model, optimizers, **how)
        if export == "file":
            from safetensors.torch import load_file

            return load_file(save_averaged(model, optimizers, tmp_path, **how))
        with averaged_weights(optimizers, model, **how):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    with pytest.raises(ValueError, match=r"2 trainable parameter.*'2\.weight'.*others=\"live\""):
        exported(first)
    assert not first.shows_average()
    expected = whole(model, first, second)
    assert_same_bits(exported([first, second]), expected)
    assert_same_bits(exported((second, first)), expected)
    assert_same_bits(
        exported(first, others="live"), {**expected, **{n: live[n] for n in live if n[0] == "2"}}
    )
    model[2].requires_grad_(False)
    exported(first)  # frozen parameters have no average to miss
    with pytest.raises(ValueError, match="others"):
        exported(first, others="average")
    assert_same_bits({name: p.detach() for name, p in model.named_parameters()}, live)


def test_an_embedding_that_was_resized_is_refused():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2))
    optimizer = PACE(model.parameters(), lr=0.1)
    model(torch.arange(7)).square().mean().backward()
    optimizer.step()
    model[0] = nn.Embedding(9, 4)
    with pytest.raises(ValueError, match=r"'0\.weight'"):
        averaged_state_dict(model, optimizer)


def test_a_block_of_several_optimizers_is_left_as_a_whole():
    model, first, second = two_optimizers()
    before = everything(first), everything(second)
    with pytest.raises(ZeroDivisionError), averaged_weights([first, second]):
        for optimizer in (first, second):
            assert optimizer.shows_average()
            with pytest.raises(RuntimeError, match="inside"):
                optimizer.step()
        raise ZeroDivisionError
    first.eval()
    with averaged_weights([first, second]):
        pass
    assert first.shows_average()
    first.train()
    assert_same_bits(before[0], everything(first))
    assert_same_bits(before[1], everything(second))
    for given in ([first, first], [first, PACE(model.parameters())], []):
        with pytest.raises(ValueError, match=r"once|at least one"), averaged_weights(given):
            pass
    assert not first.shows_average()


def test_one_of_several_averages_knows_its_parameters_before_the_first_step():
    model = linear_model()
    optimizer = KINDS["averages"](model.parameters())
    assert_same_bits(averaged_state_dict(model, optimizer["long"]), dict(model.state_dict()))


# --- Interrupts -------------------------------------------------------------------------------------


class Interrupt(Exception):
    """What the handler of a real signal raises."""


@contextlib.contextmanager
def alarms():
    def interrupt(number, frame):
        raise Interrupt

    earlier = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def values(optimizer):
    """Live and average of each parameter, wherever they are."""
    live = {f"{i} live": v.detach().clone() for i, (_, v) in enumerate(optimizer.live_weights())}
    averages = enumerate(optimizer.returned_averages())
    return live | {f"{i} average": v.detach().clone() for i, (_, (_, v)) in enumerate(averages)}


KINDS = {
    "float32": lambda parameters: PACE(parameters, lr=0.1),
    "one average": lambda parameters: PACE(parameters, lr=0.1, gain="paper"),
    "residuals": lambda parameters: PACE(parameters, lr=0.1, average_dtype="bfloat16"),
    "pullback": lambda parameters: Pullback(torch.optim.SGD(parameters, lr=0.1), pullback_strength=0.3),
    "averages": lambda parameters: Averages(torch.optim.AdamW(parameters), {"long": PowerLaw(0.7)}),
}


def many(kind, count=40):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(5)) for _ in range(count)]
    optimizer = KINDS[kind](parameters)
    for _ in range(3):
        for p in parameters:
            p.grad = torch.randn(5)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers of that kind")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["block", "modes"])
def test_interrupts_at_random_moments(kind, way):
    """SIGALRM while the average is shown and hidden: neither live nor average is ever wrong or lost."""
    parameters, optimizer = many(kind)
    expected = values(optimizer)
    live = [p.detach().clone() for p in parameters]
    rng, came = random.Random(0), 0
    with alarms():
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 3e-3))
                for _ in range(50):
                    if way == "block":
                        with averaged_weights(optimizer):
                            pass
                    else:
                        optimizer.eval()
                        optimizer.train()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                came += 1
            torch.set_grad_enabled(True)  # torch's own contexts may have been left half way
            if way == "block":
                assert not optimizer.shows_average()
            assert_same_bits(values(optimizer), expected)
            optimizer.train()
            assert_same_bits(values(optimizer), expected)
            assert all(torch.equal(p, q) for p, q in zip(parameters, live, strict=True))
    assert came > 50
    for p in parameters:
        p.grad = torch.randn(5)
    optimizer.step()  # nothing is stuck


class Fails:
    """Raises when it is called for the n-th time."""

    def __init__(self, at):
        self.at, self.seen = at, 0

    def __call__(self):
        self.seen += 1
        if self.seen == self.at:
            raise Interrupt


@pytest.mark.parametrize("kind", ["float32", "one average", "pullback"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_around_every_copy(kind, when, monkeypatch):
    parameters, optimizer = many(kind, count=2)
    expected, copies, genuine = values(optimizer), 0, torch.Tensor.copy_
    live = [p.detach().clone() for p in parameters]
    for at in range(1, 20):
        fails = Fails(at)

        def copy_(self, *args, fails=fails, **kwargs):
            if when == "before":
                fails()
            result = genuine(self, *args, **kwargs)
            if when == "after":
                fails()
            return result

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        with contextlib.suppress(Interrupt), averaged_weights(optimizer):
            monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        copies = fails.seen
        monkeypatch.setattr(torch.Tensor, "copy_", genuine)
        assert_same_bits(values(optimizer), expected)
        assert all(torch.equal(p, q) for p, q in zip(parameters, live, strict=True))
    assert 4 <= copies < 19


def test_live_is_back_after_an_interrupt_of_train(monkeypatch):
    """Without a block too: half of the parameters would show the average."""
    parameters, optimizer = many("float32", count=4)
    expected, live = values(optimizer), [p.detach().clone() for p in parameters]
    optimizer.eval()
    genuine, fails = torch.Tensor.copy_, Fails(3)

    def copy_(self, *args, **kwargs):
        fails()
        return genuine(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    with pytest.raises(Interrupt):
        optimizer.train()
    assert not optimizer.shows_average()
    assert_same_bits(values(optimizer), expected)
    assert all(torch.equal(p, q) for p, q in zip(parameters, live, strict=True))


def test_not_a_number_is_no_obstacle():
    """Weights with NaN are put back as they were, also after an interrupt."""
    parameters, optimizer = many("float32", count=3)
    with torch.no_grad():
        parameters[1][2] = torch.nan
        optimizer.state[parameters[2]]["returned"][0] = torch.nan
    before = everything(optimizer)
    with averaged_weights(optimizer):
        pass
    assert_same_bits(before, everything(optimizer))


def test_a_block_that_was_left_open_has_a_way_out():
    model, optimizer = trained()
    before = everything(optimizer)
    stuck = averaged_weights(optimizer)
    stuck.__enter__()  # and an interrupt before its __exit__
    with pytest.raises(RuntimeError, match=r"train\(force=True\)"):
        optimizer.train()
    optimizer.train(force=True)
    assert_same_bits(before, everything(optimizer))
    train(model, optimizer, 1)
    with averaged_weights(optimizer):
        stuck.__exit__(None, None, None)  # which ends nothing now
        assert optimizer.shows_average()
    assert not optimizer.shows_average()
    optimizer.train(force=True)  # nothing happens without a block


# --- States -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_taken_outside_a_block_may_be_written_inside(kind, dtype):
    """As by a thread that writes checkpoints in the background."""
    model = linear_model(dtype)
    optimizer = KINDS[kind](list(model.parameters()))
    stepped(model, optimizer)
    addresses = {
        k: v.data_ptr() for state in optimizer.state.values() for k, v in state.items() if k != "step"
    }
    before = values(optimizer)
    for _ in range(2):
        taken, again = optimizer.state_dict(), optimizer.state_dict()
        meant = copy.deepcopy(taken)
        del again
        with averaged_weights(optimizer):
            file = io.BytesIO()
            torch.save(taken, file)
        file.seek(0)
        written = torch.load(file)
        for place, state in meant["state"].items():
            assert_same_bits(written["state"][place], state)
            assert_same_bits(taken["state"][place], state)
        assert_same_bits(values(optimizer), before)
    del taken
    with averaged_weights(optimizer):  # nobody has one: the tensors change places again
        pass
    found = {k: v.data_ptr() for state in optimizer.state.values() for k, v in state.items() if k != "step"}
    assert found == addresses
    step(model, optimizer)


def test_a_state_dict_keeps_no_memory():
    model, optimizer = trained()
    key = "average"
    state = optimizer.state[model.embed.weight]
    assert optimizer.state_dict()["state"][0][key].data_ptr() == state[key].data_ptr()
    first = state[key]
    with averaged_weights(optimizer):
        assert state["live"] is first  # as it was before anybody took a state dict


NAMES = (["a", "b", "c"], ["b", "a", "c"])


def named(names, start=0):
    torch.manual_seed(start)
    own = {name: nn.Parameter(torch.randn(3)) for name in names}
    return own, PACE(own.items(), lr=0.1)


def moved(parameters, optimizer):
    for p in parameters.values():
        p.grad = torch.randn(3)
    optimizer.step()


@pytest.mark.parametrize("form", ["one group", "two groups"])
def test_a_state_of_another_order_is_refused(form):
    first, optimizer = named(NAMES[0])
    second, other = named(NAMES[1], start=1)
    if form == "two groups":
        optimizer, other = (
            PACE([{"params": [pair]} for pair in own.items()], lr=0.1) for own in (first, second)
        )
    moved(first, optimizer)
    moved(second, other)
    before = everything(other)
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0 is 'b', and in the saved state 'a'.*nothing"
    ):
        other.load_state_dict(optimizer.state_dict())
    assert_same_bits(before, everything(other))
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["param_names"]
    other.load_state_dict(state)  # asked for: by place


@pytest.mark.parametrize("wrap", ["_orig_mod.{}", "module.{}", "module._orig_mod.{}", "new.{}"])
def test_names_of_wrappers_and_new_names_make_no_difference(wrap):
    first, optimizer = named(["x.a", "x.b"])
    moved(first, optimizer)
    second, other = named([wrap.format(name) for name in first], start=1)
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(first.values(), second.values(), strict=True):
        assert torch.equal(optimizer.state[p]["average"], other.state[q]["average"])


def test_reset_average_says_that_live_comes_back():
    model, optimizer = trained()
    with averaged_weights(optimizer):
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    live = {name: p.detach().clone() for name, p in model.named_parameters()}
    other, resumed = trained(return_power=0.9)
    resumed = PACE(other.parameters(), gain="paper")
    resumed.load_state_dict(saved[1])
    other.load_state_dict(saved[0])  # the average
    with pytest.warns(UserWarning, match="loaded after the optimizer.*live weights come back"):
        reset_average(resumed)
    assert_same_bits({name: p.detach() for name, p in other.named_parameters()}, live)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reset_average(resumed)
        train(other, resumed, 1)


# --- Parameters in one memory -----------------------------------------------------------------------


OVERLAPPING = {
    "the same": lambda flat: (flat[:], flat[:]),
    "a part": lambda flat: (flat[:8], flat[7:]),
    "another shape": lambda flat: (flat.view(3, 4), flat.view(4, 3)),
    "transposed": lambda flat: (flat.view(3, 4)[:, :2].t(), flat.view(3, 4)[:, 1:]),
    "another precision": lambda flat: (flat[4:], flat.view(torch.bfloat16)[8:10]),
}
APART = {
    "neighbours": lambda flat: (flat[:6], flat[6:]),
    "columns": lambda flat: (flat.view(3, 4)[:, :2], flat.view(3, 4)[:, 2:]),
    "every other": lambda flat: (flat[::2], flat[1::2]),
    "empty": lambda flat: (flat, flat[:0]),
    "other memory": lambda flat: (flat, flat.clone()),
}


@pytest.mark.parametrize("kind", OVERLAPPING)
def test_parameters_in_one_memory_are_refused_by_name(kind):
    parameters = [nn.Parameter(part) for part in OVERLAPPING[kind](torch.randn(12))]
    pairs = list(zip(("first", "second"), parameters, strict=True))
    with pytest.raises(ValueError, match=r"'(first|second)' and parameter '(first|second)' lie in the same"):
        PACE(pairs)
    optimizer = PACE([pairs[0]])
    with pytest.raises(ValueError, match="lie in the same memory"):
        optimizer.add_param_group({"params": [pairs[1]]})
    assert len(optimizer.param_groups) == len(optimizer.state) == 1


@pytest.mark.parametrize("kind", APART)
def test_views_that_share_nothing_are_taken(kind):
    PACE([nn.Parameter(part) for part in APART[kind](torch.randn(12))])


def test_parameters_of_all_kinds_are_looked_at():
    lazy, meta = nn.LazyLinear(3), nn.Linear(2, 2, device="meta")
    net = Net()
    PACE([*net.parameters(), *lazy.parameters(), *meta.parameters(), nn.Parameter(torch.zeros(()))])
