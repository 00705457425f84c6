"""Settings of a run: from files and flags, and refused at random."""

import io
import json
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import cli
from paceline.cli import main
from paceline.runs import build, config, names
from paceline.runs.command import run_of
from paceline.runs.config import Run

FIELDS = [name for name in Run.__dataclass_fields__ if name != "task"]  # which has no flag
NOT_FINITE = ("nan", "inf", "-inf", "1e400", "-1e400")
WRONG = {  # as TOML
    int: ("1.5", "'many'", "true", "[1]", "{a = 1}", "1979-05-27", "nan", "99999999999999999999", "''", "-3"),
    float: ("'fast'", "true", "[0.1]", "{a = 1}", "07:32:00", "''", "-0.5", *NOT_FINITE),
    bool: ("1", "'maybe'", "[true]", "0.0", "nan"),
    str: ("1", "true", "['a']", "{a = 'b'}", "''", "nan"),
    tuple: ("-1", "[-1]", "[['a']]", "true", "[true]", "{a = 'b'}", "['']"),
}
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)


def wrong_value(draw):
    name = draw(st.sampled_from(FIELDS))
    kind = config.kind_of(name)
    kind = (
        tuple
        if name in ("data", "held_out", "averages", "keep_steps")
        else str
        if kind not in (int, float, bool)
        else kind
    )
    return f"{name} = {draw(st.sampled_from(WRONG[kind]))}"


def unknown_key(draw):
    key = draw(TEXTS.filter(lambda key: key not in (*FIELDS, "task")))  # which the command line says
    return f"{json.dumps(key)} = {draw(st.sampled_from(['1', 'true', '[]', '{}', chr(34) * 2]))}"


def bad_spec(draw):
    name = draw(st.sampled_from(["method", "schedule", "averages"]))
    known = {*names.BASES, *names.SCHEDULES, *names.AVERAGES}
    spec = draw(
        TEXTS.filter(lambda text: text.partition(":")[0] not in known)  # which may need no settings
        | st.builds(
            "{}:{}={}".format,
            st.sampled_from(["adamw", "pace", "sgd", "power", "wsd", "gpa"]),
            st.sampled_from(["nothing", "betas", "decay", "lr", "steps", "__class__"]),
            st.sampled_from(["nan", "-1", "1e400", "()", "x", "[[]]", "__import__('os')", "1,1", "0)(0"]),
        )
    )
    return f"{name} = {json.dumps([spec] if name == 'averages' else spec)}"


def garbage(draw):
    return draw(TEXTS.filter(lambda text: text.strip() and not text.strip().startswith("#")))


FAULTS = (wrong_value, unknown_key, bad_spec, garbage)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_settings_at_random_are_refused_in_one_line(data, tmp_path_factory):
    fault = data.draw(st.sampled_from(FAULTS))
    text = fault(data.draw)
    if fault is not garbage and not re.match(r"(steps|tokens|epochs|chinchilla)\s*=", text):
        text = f"steps = 3\n{text}"
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "run.toml").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build", no_building)
        err = io.StringIO()
        patch.setattr(sys, "stderr", err)
        code = main(["train", "pretrain", "--out", str(folder / "run"), "--config", str(folder / "run.toml")])
    said = err.getvalue()
    assert code == 2, (text, said)
    assert len(said.splitlines()) == 1 and said.startswith("paceline: ") and said[:-1].isprintable(), said
    assert not (folder / "run").exists()


def no_building(*args):
    raise AssertionError("it went on to build a run")


@pytest.mark.parametrize(
    ("text", "value"),
    [("8.2M", 8_200_000), ("1.005k", 1005), ("2B", 2 * 10**9), ("1e3", 1000), ("1_000", 1000)],
)
def test_counts_may_be_short(text, value):
    assert config.make({"tokens": text}).tokens == value
    assert config.make({"steps": 1, "seed": "9007199254740993"}).seed == 9007199254740993


def test_flags_win_over_the_file(tmp_path):
    (tmp_path / "run.toml").write_text(
        'steps = 99\nlength = 16\nmethod = "adamw"\naverages = ["power:0.5"]\nclip_norm = "none"\n'
    )
    options = cli.parse(["train", "pretrain", "--out", "x", "--config", str(tmp_path / "run.toml")])
    assert run_of(options) == Run(steps=99, length=16, method="adamw/power:0.5", clip_norm=None)
    options.steps = "3"
    options.averages = []
    assert run_of(options) == Run(steps=3, length=16, method="adamw", clip_norm=None)
