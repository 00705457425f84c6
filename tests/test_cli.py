"""The command line: every command, as a user calls it. Faults are in lm/test_trainer_faults.py."""

import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny import TEMPLATE, write_chats, write_model, write_text
from torch.nn import functional as F

from paceline import cli
from paceline.cli import main
from paceline.lm import checkpoint
from paceline.lm.batch import IGNORED
from paceline.lm.loop import Step
from paceline.runs import build, config, display
from paceline.runs.command import run_of
from paceline.runs.records import read

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cli")
        patch.setenv("PACELINE_CACHE", str(folder / "cache"))
        write_text(folder / "text.txt", paragraphs=120)
        yield folder


COMMON = ["--batch-size", "2", "--steps", "6", "--evaluate-every", "3", "--held-out-samples", "3"]
COMMON += ["--warmup", "2", "--device", "cpu"]
METHOD = ("--method", "adamw+push:power=0.5/power:0.9")


def pretrain(room, out, *more):
    words = ["train", "pretrain", "--out", out, "--data", room / "text.txt", "--model", "gpt:0.3m"]
    words += ["--tokenizer", "bpe:300", "--length", 16, *COMMON, *more]
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def trained(room):
    """A run with AdamW and an average beside it."""
    assert pretrain(room, room / "run", *METHOD) == 0
    return room / "run"


def tune(room, out, *more):
    words = ["train", "sft", "--out", out, "--data", room / "chats.jsonl", "--model", room / "model"]
    return main([str(word) for word in (*words, *COMMON, *more)])


@pytest.fixture(scope="module")
def tuned(room):
    """A fine-tuned model."""
    write_model(room / "model")
    write_chats(room / "chats.jsonl", count=40)
    assert tune(room, room / "sft", "--length", 64) == 0
    return room / "sft"


def test_a_chat_template_of_the_own(room, tuned, tmp_path):
    template = TEMPLATE.replace("<|im_end|>", "!<|im_end|>")
    (tmp_path / "shout.jinja").write_text(template, encoding="utf-8")
    given = ("--length", 64, "--set", f"chat_template={tmp_path / 'shout.jinja'}")
    assert tune(room, tmp_path / "run", *given) == 0
    about, usual = (next(read(run / "records.jsonl"))["data"] for run in (tmp_path / "run", tuned))
    assert about["fingerprint"] != usual["fingerprint"]
    assert about["chat"]["tokens"] > usual["chat"]["tokens"]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "chat_template.jinja").read_text(encoding="utf-8") == template


def described(folder):
    return (config.make(r["config"]) for r in read(folder / "records.jsonl") if r["kind"] == "run")


def losses_of(folder):
    return [record for record in read(folder / "records.jsonl") if record["kind"] == "evaluation"]


# --- Help and mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_is_complete(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert (cli.COMMANDS[command].examples if command else "compare") in said
    if command == "train":
        squeezed = " ".join(said.split())
        for name, text in config.documentation().items():
            shown = f"--{name.replace('_', '-')}" in squeezed or f" {name} " in squeezed
            assert name == "task" or (shown and text[:30] in squeezed)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_examples_of_the_help_are_right(command):
    text = cli.COMMANDS[command].examples.replace("\\\n", " ")
    lines = re.findall(r"^  paceline (.*)$", text, re.MULTILINE)
    assert lines
    for line in lines:
        options = cli.parse(line.split())
        if command == "train":
            run_of(options)


RUN = "train pretrain --out x --steps 5"
MISTAKES = {
    "": "the following arguments are required: COMMAND",
    "trian": "invalid choice: 'trian'",
    "train": "the following arguments are required: task, --out",
    "train pretrain --out x": "give exactly one of steps, tokens, epochs, chinchilla; none given",
    "train pretrain --out x --steps -5": "steps is -5; allowed: above 0, and finite",
    "train pretrain --out x --steps five": "steps is 'five'; allowed: a whole number",
    f"{RUN} --stepz 5": "unknown argument '--stepz' (did you mean --steps?)",
    f"{RUN} --learning-rate 1": "unknown argument '--learning-rate' (did you mean --lr?)",
    f"{RUN} --optimizer adamw": "unknown argument '--optimizer' (did you mean --method?)",
    f"{RUN} --task sft": "unknown argument '--task'; it is a word: paceline train sft …",
    f"{RUN} --tokens 5": "steps and tokens given",
    f"{RUN} --keep-steps 2": "'--keep-steps'; it is a setting without a flag: --set keep_steps=VALUE",
    f"{RUN} --set keep_steps=2 keep_steps=x": "keep_steps is \"['2', 'x']\"; allowed: a list, each",
    f"{RUN} --set keep-steps=2": "--set: unknown setting 'keep-steps' (did you mean keep_steps?)",
    f"{RUN} --set keep_steps=0": "keep_steps is (0,); allowed: each at least 1",
    f"{RUN} --set dropout": "--set dropout: write --set NAME=VALUE",
    f"{RUN} --set drop=1": "--set: unknown setting 'drop' (did you mean dropout?)",
    f"{RUN} --set steps=6": "steps is given twice, as --steps and by --set",
    f"{RUN} --lr nan": "lr is nan; allowed: 0 or more, and finite",
    f"{RUN} --precision bf16": "precision is 'bf16' (did you mean bfloat16?)",
    f"{RUN} --method adam": "method 'adam' is unknown (did you mean adamw?)",
    f"{RUN} --method adamw@cosine --schedule wsd": "has another one",
    f"{RUN} --method adamw --set telemetry_every=2": "adamw has none, and pace and pace+push do",
    f"{RUN} --method adamw:betas=()": "adamw: tuple index out of range",
    f"{RUN} --method schedule_free:r=x": "unsupported operand",
    f"{RUN} --schedule cosin": "schedule 'cosin' is unknown (did you mean cosine?)",
    f"{RUN} --averages power:0.7": "pace keeps an average of its own",
    f"{RUN} --model gpt:2m": "unknown model 'gpt:2m'; did you mean gpt:1m?",
    f"{RUN} --device cuda:77": "device 'cuda:77' cannot be used",
    f"{RUN} --config nowhere.toml": "there is no file nowhere.toml",
    f"{RUN} --schedule wsd:decy=2": "schedule wsd has no setting 'decy' (did you mean decay?)",
    f"{RUN} --out=": "--out has an empty value",
    f"{RUN} --data=": "--data has an empty value",
    f"{RUN} --tokenizer no//where": "no vocabulary no//where",
    f"{RUN} --data caf\udce9.txt": "a list, each a text in UTF-8",
    f"{RUN} --batch-size 1T": "batch_size is 1,000,000,000,000; the data have",
    f"{RUN} --length 1B": "a window of length 1000000000 needs 1000000001",
    "train sft --out x --steps 5": "model 'gpt:1m' has no chat template to fine-tune with",
    "train sft --out x --steps 5 --model m --data nowhere.jsonl": "there is no file nowhere.jsonl",
    "eval nowhere": "nowhere holds no checkpoint",
    "eval nowhere --step x": "argument --step: invalid int value: 'x'",
    "export nowhere there": "nowhere holds no checkpoint",
    "doctor nowhere": "nowhere is not a folder",
    "data x": "the following arguments are required: --data",
    "data x --data nope.txt": "nope.txt does not exist",
}


@pytest.mark.parametrize(("words", "said"), MISTAKES.items())
def test_a_mistake_is_answered_in_one_line(words, said, capsys, tmp_path, monkeypatch, room):
    monkeypatch.chdir(tmp_path)
    line = words.split()
    if "1B" in line or "1T" in line:
        line += ["--data", str(room / "text.txt"), "--tokenizer", "bpe:300", "--model", "gpt:0.3m"]
    assert main(line) == 2
    out, err = capsys.readouterr()
    assert out.replace("training a vocabulary, bpe:300\n", "") == ""
    assert err.startswith("paceline: ") and len(err.splitlines()) == 1 and said in err
    assert not any(tmp_path.iterdir())


REFUSED = {
    "train --fork {run}@4 {here}": "has no checkpoint of step 4; there are: [3, 6]",
    "train --fork {run}@6 {here}": "is of step 6; this run ends at step 6",
    "train {here} --model {room}/model --tokenizer auto --data {room}/shards": "than the model's",
    "train {here} --data {room}/shards": "leave out tokenizer",
    "sft --tokenizer bpe:300 {here}": "has a tokenizer of its own",
    "sft --length 65536 {here}": "positions",
    "sft --length 1 {here}": "length of a sample: 1; allowed: 2 or more",
    "data {room}/shards --data {room}/text.txt --tokenizer bpe:310": "of another tokenizer than bpe:310",
    "eval {run} --weights avrage": "'avrage' (did you mean average?); it has: live, average, power_0_9",
    "eval {run} --step 4": "has no checkpoint of step 4; there are: [3, 6]",
    "eval {run} --data nope.txt": "nope.txt does not exist",
    "export {run} {room}": "exists already",
    "doctor {empty}": "holds nothing that paceline knows",
}


@pytest.mark.parametrize(("words", "said"), REFUSED.items())
def test_what_does_not_go_together_is_refused(words, said, room, trained, tuned, tmp_path, capsys):
    if not (room / "shards").exists():
        shards = ["data", str(room / "shards"), "--data", str(room / "text.txt"), "--tokenizer", "bpe:280"]
        assert main(shards) == 0
    (tmp_path / "empty").mkdir()
    out = tmp_path / "new" / "run"
    places = {"run": trained, "room": room, "here": f"--out {out}", "empty": tmp_path / "empty"}
    line = words.format(**places).split()
    start = {"train": partial(pretrain, room, out), "sft": partial(tune, room, out)}
    capsys.readouterr()
    assert (start[line[0]](*line[1:]) if line[0] in start else main(line)) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1
    assert not out.parent.exists()


def test_a_mistake_is_answered_before_torch_is_imported():
    code = (
        "import sys; from paceline.cli import main; "
        "code = main(['train', 'pretrain', '--out', 'x', '--steps', '0']); "
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 False\n"


# --- train ------------------------------------------------------------------------------------------


def test_a_run_says_what_it_does(room, trained, capsys):
    records = list(read(trained / "records.jsonl"))
    assert [record["kind"] for record in records] == ["run", *["step"] * 3, "evaluation"] * 1 + [
        *["step"] * 3,
        "evaluation",
    ]
    assert records[0]["config"]["method"] == "adamw+push:power=0.5"
    assert records[0]["name"] == "adamw+push:power=0.5/power:0.9"
    assert records[0]["methods"] == {
        "AdamW push (power=0.5)": "average",
        "AdamW push (power=0.5) · EMA (0.9)": "power_0_9",
    }
    assert records[0]["returned"] == "average"
    assert records[-1]["losses"]["held-out"].keys() == {"live", "average", "power_0_9"}
    assert {record["kind"] for record in read(trained / "timing.jsonl")} == {"begin", "speed", "save", "end"}


def test_a_finished_run_is_left_alone(room, trained, capsys):
    parts = [trained / "records.jsonl", *(trained / "checkpoints").glob("*/*")]
    before = {path: path.read_bytes() for path in parts}
    assert pretrain(room, trained, *METHOD) == 0
    said = capsys.readouterr().out
    assert "6 steps of 32 tokens from step 6" in said and "done: " in said and "step 6:" not in said
    assert all(path.read_bytes() == data for path, data in before.items())


def test_a_fork_goes_on_from_another_run_with_another_schedule(room, trained, tmp_path):
    """Also where the folder's name has an @ in it."""
    origin = shutil.copytree(trained, tmp_path / "me@work")
    where, more = f"{origin}@3", (*METHOD, "--schedule", "cosine")
    folder = tmp_path / "forked"
    assert (
        pretrain(room, folder, *more, "--steps", 9, "--fork", where, "--checkpoint-every", 1, "--keep", 9)
        == 0
    )
    steps = [record for record in read(folder / "records.jsonl") if record["kind"] == "step"]
    assert [step["step"] for step in steps] == [4, 5, 6, 7, 8, 9]
    rates = [1e-3 * (0.5 + 0.5 * math.cos(math.pi * k / 9)) for k in range(3, 9)]
    assert [step["lr"] for step in steps] == pytest.approx(rates)
    # The first step has the batch and the weights that the other run's had, and so its loss.
    theirs = next(r for r in read(origin / "records.jsonl") if r["kind"] == "step" and r["step"] == 4)
    assert steps[0]["loss"] == theirs["loss"] and steps[0]["grad_norm"] == theirs["grad_norm"]
    state = checkpoint.load(folder / "checkpoints" / "step-00000004")
    assert {entry["step"].item() for entry in state["optimizer"].values() if "step" in entry} == {4}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_there_is_a_bar(room, tmp_path, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert pretrain(room, tmp_path / "run", "--method", "adamw") == 0
    assert "6/6" in screen.getvalue() and "step 3: held-out: live " in screen.getvalue()


# --- eval -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "step"), [(None, 6), ("live", 3), ("power_0_9", 6)])
def test_eval_finds_the_losses_of_the_run(trained, weights, step, capsys):
    words = ["--weights", weights] if weights else []
    where = ["--step", "3"] if step == 3 else []
    assert main(["eval", str(trained), *where, *words]) == 0
    said = capsys.readouterr().out
    name, loss = re.fullmatch(r"held-out, (\w+): ([\d.]+) nats a token\n", said).groups()
    assert name == (weights or "average")
    recorded = next(record for record in losses_of(trained) if record["step"] == step)
    assert float(loss) == pytest.approx(recorded["losses"]["held-out"][name], abs=1e-6)


def test_eval_on_other_data_needs_none_of_the_run(room, trained, tmp_path, capsys):
    """Loss of the other text as held-out text of a run of the same model, tokenizer and weights."""
    other = write_text(tmp_path / "other.txt", paragraphs=30)
    folder = shutil.copytree(trained, tmp_path / "moved")
    text = room / "text.txt"
    text.rename(tmp_path / "gone.txt")
    try:
        assert main(["eval", str(folder), "--data", str(other)]) == 0
        loss = float(
            re.fullmatch(r".*other.txt, average: ([\d.]+) nats a token\n", capsys.readouterr().out)[1]
        )
        assert main(["eval", str(folder), "--data", "nope.txt"]) == 2
    finally:
        (tmp_path / "gone.txt").rename(text)
    run = dataclasses.replace(next(described(trained)), held_out=(str(other),), held_out_samples=None)
    assert main(["export", str(trained), str(tmp_path / "model")]) == 0
    samples = build.held_out_of(run, trained / "tokenizer", print)
    assert loss == pytest.approx(loss_of_transformers(tmp_path / "model", samples), abs=1e-5)


# --- export -----------------------------------------------------------------------------------------


def loss_of_transformers(folder, samples):
    """The mean loss of a folder in plain transformers, example by example."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for number in range(len(samples)):
        tokens, targets, positions = samples.batch([number])
        starts = [0] if positions is None else (positions[0] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], tokens.shape[1]], strict=True):
            with torch.no_grad():
                logits = model(tokens[:, start:end]).logits[0].double()
            total += F.cross_entropy(
                logits, targets[0, start:end], ignore_index=IGNORED, reduction="sum"
            ).item()
            count += (targets[0, start:end] != IGNORED).sum().item()
    return total / count


@pytest.mark.parametrize("weights", ["live", "average"])
@pytest.mark.parametrize("kind", ["trained", "tuned"])
def test_an_exported_model_has_the_loss_of_the_run(kind, weights, request, tmp_path, capsys):
    run = request.getfixturevalue(kind)
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "model"), "--weights", weights]) == 0
    assert f"wrote the {weights} weights of step 6 to" in capsys.readouterr().out
    samples = build.held_out_of(next(described(run)), run / "tokenizer", print)
    found = loss_of_transformers(tmp_path / "model", samples)
    assert found == pytest.approx(losses_of(run)[-1]["losses"]["held-out"][weights], abs=1e-5)
    assert json.loads((tmp_path / "model" / "paceline.json").read_text())["weights"] == weights


def test_an_exported_model_can_be_trained_on(room, trained, tmp_path):
    """A folder of transformers in, with its own tokenizer."""
    assert main(["export", str(trained), str(tmp_path / "model")]) == 0
    words = ["train", "pretrain", "--out", tmp_path / "run", "--data", room / "text.txt", "--length", 16]
    words += ["--model", tmp_path / "model", *COMMON]
    assert main([str(word) for word in words]) == 0
    first = losses_of(tmp_path / "run")[0]["losses"]["held-out"]["live"]
    assert first < losses_of(trained)[0]["losses"]["held-out"]["live"]


# --- doctor -----------------------------------------------------------------------------------------


def doctor(folder, capsys):
    capsys.readouterr()
    code = main(["doctor", str(folder)])
    return code, capsys.readouterr().out


def test_doctor_on_a_run(trained, capsys):
    code, said = doctor(trained, capsys)
    assert code == 0 and said.count("whole; step") == 2 and "NOT" not in said
    assert "step 6 of a pretrain run of gpt:0.3m with adamw+push:power=0.5" in said
    assert (
        "returned by this run: average" in said
        and "averages as NAME.paceline_average, NAME.paceline_power_0_9_average" in said
    )


def damaged(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


RUN_FILES = ["records.jsonl", "timing.jsonl", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
RUN_FILES += [f"checkpoints/step-00000006/{name}.safetensors" for name in ("live", "optimizer", "state")]
RUN_FILES += ["checkpoints/step-00000006/state.json"]


def test_doctor_names_every_damaged_file(room, trained, tmp_path, capsys):
    study, shards = tmp_path / "study", tmp_path / "shards"
    run = shutil.copytree(trained, study / "runs" / "first")
    shutil.copytree(trained, study / "runs" / "second")
    (study / "plan.json").write_text("{}")
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    text = ["--data", str(room / "text.txt"), "--tokenizer", "bpe:300"]
    assert main(["data", str(shards), *text]) == 0
    cache = shutil.copytree(room / "cache", tmp_path / "cache")
    folders = [run, study, tmp_path / "model", shards, shards / "train", cache]
    for folder in (*folders, run / "checkpoints" / "step-00000003"):
        code, said = doctor(folder, capsys)
        assert code == 0 and "NOT whole" not in said
    paths = [damaged(run / name) for name in RUN_FILES]
    paths += [damaged(study / "plan.json"), damaged(tmp_path / "model" / "tokenizer.json")]
    paths += [damaged(shards / part / "tokens-00000.bin") for part in ("train", "held-out")]
    paths += [damaged(next(cache.glob("tokens/*/*.bin")))]
    for folder in folders:
        code, said = doctor(folder, capsys)
        inside = {path for path in paths if path.is_relative_to(folder)}
        lines = [line for line in said.splitlines() if line.startswith("NOT whole: ")]
        assert code == 1 and {path for path in inside if any(str(path) in line for line in lines)} == inside
    damaged(tmp_path / "model" / "paceline.json").write_text("[]")
    (run / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    (study / "runs" / "second" / "records.jsonl").unlink()
    for folder in (tmp_path / "model", run / "checkpoints" / "step-00000006", study / "runs" / "second"):
        assert doctor(folder, capsys)[0] == 1


@pytest.mark.parametrize("name", ["records.jsonl", "timing.jsonl", "tokenizer/tokenizer.json"])
def test_what_is_damaged_is_not_read(name, room, trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    path = damaged(run / name)
    reading = [["train"]]
    if name.startswith("tokenizer"):
        reading += [["eval", run], ["export", run, tmp_path / "model"]]
    else:
        reading += [["report", run, "--out", tmp_path / "page"]]
    for words in reading:
        capsys.readouterr()
        code = main([str(word) for word in words]) if words != ["train"] else pretrain(room, run, *METHOD)
        assert code == 1 and str(path) in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [run]


# --- data -------------------------------------------------------------------------------------------


def test_data_are_prepared_once_and_trained_on(room, tmp_path, capsys):
    folder, text = tmp_path / "shards", str(room / "text.txt")
    assert main(["data", str(folder), "--data", text, "--tokenizer", "bpe:300"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"train: \d+ documents, [\d,]+ tokens of 300\nheld-out: \d+ documents", said)
    content = {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}
    assert main(["data", str(folder), "--data", text, "--tokenizer", "bpe:300"]) == 0
    assert content == {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}
    assert main(["data", str(folder), "--data", text, "--tokenizer", "bpe:310"]) == 2
    words = ["train", "pretrain", "--out", tmp_path / "run", "--data", folder, "--model", "gpt:0.3m"]
    words = [str(word) for word in (*words, "--length", 16, *COMMON)]
    assert main([*words, "--tokenizer", "bpe:300"]) == 2
    said = capsys.readouterr().err
    assert "tokens of another tokenizer than bpe:310" in said and "leave out tokenizer" in said
    assert main(words) == 0
    ours, theirs = (next(read(f / "records.jsonl"))["data"] for f in (tmp_path / "run", room / "run"))
    assert ours == theirs
    (folder / "train").rename(tmp_path / "kept")
    shutil.copytree(folder / "held-out", folder / "train")
    assert main([*words[:3], str(tmp_path / "other"), *words[4:]]) == 2
    assert f"{folder / 'train'} holds the part held-out of the text, not train" in capsys.readouterr().err


# --- As a process -------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_real_command_and_the_same_one_goes_on(room, tmp_path):
    words = [sys.executable, "-m", "paceline", "train", "pretrain", "--out", tmp_path / "run"]
    words += ["--data", room / "text.txt", "--model", "gpt:0.3m", "--tokenizer", "bpe:300", "--length", 16]
    words += [*COMMON, "--steps", "100000", "--checkpoint-every", "2"]
    command = [str(word) for word in words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not any(Path(tmp_path).glob("run/checkpoints/step-*")):
        assert time.monotonic() < end and process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(
        r"paceline: stopped by SIGINT after step \d+, and saved; the same command resumes\n", err
    )
    assert "129,312 parameters, 100000 steps of 32 tokens" in out


IMPORT = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *more):
        if name == NAME:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from paceline.__main__ import main
main()
"""


@pytest.mark.parametrize("name", ["paceline.cli", "numpy", "torch.optim"])
def test_ctrl_c_inside_an_import_is_silent(name, tmp_path):
    code = f"NAME = {name!r}\n{IMPORT}"
    words = ["train", "pretrain", "--out", str(tmp_path / "run"), "--steps", "1"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# --- Which tokenizer ------------------------------------------------------------------------------------


def change_words(path):
    path.write_text(path.read_text(encoding="utf-8").replace("average", "otherwise"), encoding="utf-8")


def test_an_export_has_the_tokenizer_of_its_run_whatever_became_of_the_data(room, tmp_path):
    text = write_text(tmp_path / "text.txt", paragraphs=120)
    assert pretrain(tmp_path, tmp_path / "run") == 0
    exported = []
    for change in (lambda path: None, change_words, Path.unlink):
        change(text)
        exported.append(tmp_path / f"model-{len(exported)}")
        assert main(["export", str(tmp_path / "run"), str(exported[-1])]) == 0
    contents = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in exported]
    assert contents[0] == contents[1] == contents[2]


def test_a_fork_to_another_tokenizer_is_refused(room, trained, tmp_path, capsys):
    change_words(write_text(tmp_path / "text.txt", paragraphs=120))
    other = ["--fork", str(trained), *METHOD]
    assert pretrain(tmp_path, tmp_path / "run", *other, "--steps", "9") == 2
    assert "another tokenizer" in capsys.readouterr().err
    kept = ["--tokenizer", str(trained / "tokenizer")]
    assert pretrain(tmp_path, tmp_path / "run", *other, *kept, "--steps", "9") == 0


def test_records_without_their_checkpoints_are_not_overwritten(room, tmp_path, capsys):
    assert pretrain(room, tmp_path / "run") == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = (tmp_path / "run" / "records.jsonl").read_bytes()
    assert pretrain(room, tmp_path / "run") == 2
    assert "records of a run without its checkpoints" in capsys.readouterr().err
    assert (tmp_path / "run" / "records.jsonl").read_bytes() == before


# --- Beside each other ----------------------------------------------------------------------------------


@pytest.mark.long
def test_runs_that_prepare_the_same_data_at_once_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path / "text.txt", paragraphs=4000)
    words = ["--data", tmp_path / "text.txt", "--model", "gpt:0.3m", "--tokenizer", "bpe:300", "--length", 16]
    command = [sys.executable, "-m", "paceline", "train", "pretrain", *words, *COMMON, "--out"]
    runs = [
        subprocess.Popen([str(w) for w in (*command, tmp_path / name)], stderr=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    for run in runs:
        _, said = run.communicate(timeout=300)
        assert run.returncode == 0, said
    assert losses_of(tmp_path / "a") == losses_of(tmp_path / "b")


def test_a_step_left_out_is_said_at_once():
    said = io.StringIO()
    screen = display.Screen(display.Display(Console(file=said)))
    for step in (1, 2):
        screen.take(Step(step=step, loss=math.nan, grad_norm=1.0, lr=0.1, targets=4, skipped=step == 2))
    assert said.getvalue() == "step 2 was left out: loss or gradient is not finite\n"
