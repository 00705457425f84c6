"""Names of methods: read, printed back, refused; and what they stand for."""

import inspect
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.optim import Control
from paceline.runs import methods, names
from paceline.runs.config import Run, make
from paceline.runs.names import parse
from paceline.runs.terminal import ConfigError

# --- Reading and printing -------------------------------------------------------------------------------

NUMBERS = st.integers(-999, 999) | st.floats(allow_nan=False)
WORDS = st.sampled_from(["before", "half_life", "none", "inf", "pull, then average", "it's"])
VALUES = NUMBERS | WORDS | st.none() | st.booleans() | st.tuples(st.floats(0, 1), st.floats(0, 1))


@st.composite
def texts(draw):
    """A name of any parts; its values need not make sense."""
    base = draw(st.sampled_from(sorted(names.BASES)))
    known, control, averages = names.BASES[base], None, []
    if known.averages or known.control:
        control = draw(st.none() | st.sampled_from(sorted(names.CONTROLS)))
    if known.averages:
        kinds = draw(st.lists(st.sampled_from(sorted(names.AVERAGES)), unique=True, max_size=2))
        averages = [draw(spec(kind, names.AVERAGES)) for kind in kinds]
    steering = names.CONTROLS[control or known.control].settings if control or known.control else ()
    chosen = draw(st.lists(st.sampled_from((*known.settings, *steering)), unique=True, max_size=3))
    settings = {name: draw(VALUES) for name in chosen}
    schedule = draw(st.none() | st.sampled_from(sorted(names.SCHEDULES)))
    head = f"{base}+{control}" if control else base
    parts = [str(names.Spec(head, settings)), *(f"/{average}" for average in averages)]
    return "".join(parts) + (f"@{draw(spec(schedule, names.SCHEDULES))}" if schedule else "")


@st.composite
def spec(draw, word, table):
    chosen = (
        draw(st.lists(st.sampled_from(table[word].settings), unique=True)) if table[word].settings else []
    )
    return str(names.Spec(word, {name: draw(VALUES) for name in chosen}))


@given(text=texts())
def test_a_name_is_printed_as_it_is_read(text):
    try:
        name = parse(text)
    except ConfigError as error:  # ema and power are two averages of one title
        assert "averages need different names" in str(error)
    else:
        assert parse(str(name)) == name


@pytest.mark.parametrize(
    ("text", "shortest", "title"),
    [
        ("adamw", "adamw", "AdamW"),
        ("adamw@constant", "adamw", "AdamW"),
        ("adamw/ema", "adamw/ema", "AdamW · EMA"),
        ("adamw/short_ema/power:0.9", "adamw/short_ema/power:0.9", "AdamW · short EMA · EMA (0.9)"),
        ("adamw@wsd:decay=.1", "adamw@wsd:decay=0.1", "AdamW WSD (decay=0.1)"),
        ("pace+paper:c=1e-3", "pace:c=0.001", "PACE (c=0.001)"),
        ("pace+push", "pace+push", "PACE push"),
        ("adamw+paper@linear", "adamw+paper@linear", "AdamW with the paper's pull linear"),
        ("ema_nesterov:stop=50", "ema_nesterov:stop=50", "EMA-Nesterov (stop=50)"),
        ("adamw:betas=(0.9, 0.95)", "adamw:betas=(0.9,0.95)", "AdamW (betas=(0.9,0.95))"),
    ],
)  # fmt: skip
def test_the_shortest_form_and_the_name_for_people(text, shortest, title):
    assert str(parse(text)) == shortest
    assert parse(text).title == title


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("adm", "method 'adm' is unknown (did you mean adamw?); there are: adamw, pace"),
        ("push", "method 'push' is unknown; it is a control: pace+push"),
        ("bema", "it is an average: adamw/bema"),
        ("wsd:decay=.1", "it is a schedule: adamw@wsd"),
        ("muon", "method 'muon' is unknown"),
        ("schedule_free_plus", "did you mean schedule_free?"),
        ("adamw+psh", "adamw has no control 'psh' (did you mean push?)"),
        ("adamw:weight_deca=1", "adamw has no setting 'weight_deca' (did you mean weight_decay?)"),
        ("adamw+push:strenth=1", "adamw+push has no setting 'strenth' (did you mean strength?)"),
        ("adamw:strength=1", "adamw has no setting 'strength'; it goes with a control, as in adamw+push"),
        ("pace+push:c=1", "pace+push has no setting 'c'"),
        ("adamw:lr=1", "the learning rate is a setting of the run (lr)"),
        ("pace:0.7", "cannot read 'pace:0.7'; write NAME:setting=value"),
        ("adamw/ema:0.7,1", "cannot read 'ema:0.7,1'"),
        ("adamw/powr:0.7", "average 'powr' is unknown (did you mean power?)"),
        ("adamw/power:pwer=0.7", "average power has no setting 'pwer' (did you mean power?)"),
        ("adamw/ema/ema", "averages need different names"),
        ("pace/ema", "pace keeps an average of its own, and no others next to it"),
        ("gpa+push", "gpa keeps an average of its own, and no control"),
        ("adamw@wsdd", "schedule 'wsdd' is unknown (did you mean wsd?)"),
        ("adamw@wsd:decy=2", "schedule wsd has no setting 'decy' (did you mean decay?)"),
        ("adamw@wsd:0.2", "cannot read 'wsd:0.2'"),
        ("adamw@", "schedule '' is unknown"),
        ("adamw:betas=", "cannot read 'adamw:betas='"),
    ],
)
def test_an_unknown_part_is_named_with_the_nearest(text, said):
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert said in str(refused.value)


# --- What they stand for --------------------------------------------------------------------------------


def arguments_of(make, without):
    return {name for name in inspect.signature(make).parameters if name not in without}


def test_the_tables_have_the_settings_of_what_they_make():
    free = pytest.importorskip("schedulefree").AdamWScheduleFree
    adamw = arguments_of(torch.optim.AdamW, {"params", "lr"})
    for word, known in names.BASES.items():
        if word in methods.AROUND_ADAMW:
            expected = arguments_of(methods.AROUND_ADAMW[word], {"base"}) | adamw
        else:
            make = free if word == "schedule_free" else methods.BASES[word]
            expected = arguments_of(make, {"params", "lr", "control"})
        assert set(known.settings) == expected, word
    steered = {field.name for field in fields(Control)} - {"sizing", "strength"} | {"average_dtype"}
    for word, known in names.CONTROLS.items():
        own = arguments_of(getattr(Control, word), {"further"})
        assert set(known.settings) == own | steered, word
    for word, known in names.AVERAGES.items():
        assert set(known.settings) == arguments_of(methods.AVERAGES[word], ()), word
    for word, known in names.SCHEDULES.items():
        own = arguments_of(methods.SCHEDULES[word], {"optimizer", "steps", "warmup"})
        assert set(known.settings) == own, word


def group_of(method, **more):
    run = Run(method=method, steps=300, **more)
    return methods.make_optimizer(run, nn.Linear(1, 1), 300).param_groups[0]


def test_a_push_grows_over_the_run_in_its_records():
    assert methods.control_of(Run(method="pace+push", steps=300), 300) == Control.push(grow=300)
    assert methods.control_of(Run(method="adamw+push", steps=300, horizon=900), 300).grow == 900


@pytest.mark.parametrize(
    ("method", "more", "expected"),
    [
        ("ademamix", {}, {"alpha_warmup": 300, "beta3_warmup": 300, "betas": (0.9, 0.999, 0.999)}),
        ("ademamix", {"horizon": 900}, {"alpha_warmup": 900, "beta3_warmup": 900}),
        ("ademamix:alpha_warmup=none", {}, {"alpha_warmup": None, "beta3_warmup": 300}),
        ("ema_nesterov", {}, {"start": 48, "stop": 228}),
        ("ema_nesterov:stop=150,push=0.6", {}, {"start": 48, "stop": 150, "push": 0.6}),
        ("adamw+push:weight_decay=0.2", {}, {"weight_decay": 0.2, "control": Control.push(grow=300)}),
        ("pace+push:strength=0.7,grow=0", {}, {"control": Control.push(0.7)}),
        ("pace+push", {"horizon": 900}, {"control": Control.push(grow=900)}),
        ("pace:c=1e-2", {}, {"control": Control.paper(1e-2)}),
    ],
)
def test_rivals_have_the_settings_of_their_authors(method, more, expected):
    found = group_of(method, **more)
    assert {name: found[name] for name in expected} == expected


def test_bema_is_kept_at_every_step_after_a_burn_in():
    (bema,) = methods.make_averages(Run(method="adamw/bema", steps=300), 300).values()
    assert (bema.every, bema.burn_in) == (1, 30)


def test_schedule_free_is_not_clipped_unless_asked():
    assert make({"steps": 5, "method": "schedule_free"}).clip_norm is None
    assert make({"steps": 5, "method": "schedule_free", "clip_norm": 2}).clip_norm == 2
    assert make({"steps": 5, "method": "adamw"}).clip_norm == 1


def test_linear_goes_from_the_warmup_to_zero():
    run = Run(method="adamw@linear", steps=100, warmup=10, lr=1.0)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    factor = methods.make_schedule(run, optimizer, 100).lr_lambdas[0]
    assert [factor(k) for k in (0, 9, 10, 55, 99)] == pytest.approx([0.1, 1, 1, 0.5, 1 / 90])


def test_two_ways_to_write_a_run_are_one():
    whole = Run(method="adamw+push:power=0.5/ema@wsd", steps=9)
    assert whole == Run(method="adamw+push:power=.5", averages=("ema",), schedule="wsd", steps=9)
    assert str(whole.name) == "adamw+push:power=0.5/ema@wsd"


@pytest.mark.parametrize(("method", "schedule"), [("adamw@wsd", "constant"), ("adamw@constant", "cosine")])
def test_a_schedule_that_the_method_contradicts_is_refused_and_not_ignored(method, schedule):
    with pytest.raises(ConfigError, match="has another one"):
        make({"steps": 9, "method": method, "schedule": schedule})
    assert make({"steps": 9, "method": "adamw@wsd", "schedule": "wsd"}).schedule == "wsd"


def test_no_two_averages_of_a_run_have_one_title():
    for twice in ("power:0.7/power:0.70", "ema:0.5/power:0.5"):
        with pytest.raises(ConfigError, match="averages need different names"):
            parse(f"adamw/{twice}")


def test_no_means_no():
    assert group_of("adamw:amsgrad=no")["amsgrad"] is False
    assert str(parse("adamw:amsgrad=yes")) == "adamw:amsgrad=true"
