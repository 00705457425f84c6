"""What comes from others is data: rows X1 to X8 of the reliability matrix."""

import ast
import dataclasses
import json
import os
import pickle
import re
import shutil
import stat
import struct
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import trials
from test_checkpoint import LISTED, forge
from tiny import write_chats, write_model, write_text
from trials import Trial, command, words_of

import paceline
from paceline.cli import main
from paceline.lm import checkpoint, files
from paceline.lm.files import Damaged
from paceline.runs.config import Run
from paceline.runs.doctor import examine
from paceline.runs.terminal import printable

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("security")
        patch.setenv("PACELINE_CACHE", str(folder / "cache"))
        write_text(folder / "text.txt", paragraphs=120)
        write_chats(folder / "chats.jsonl", count=40)
        write_model(folder / "model")
        yield folder


@pytest.fixture(scope="module")
def runs(room):
    common = {"batch_size": 2, "steps": 4, "checkpoint_every": 2, "held_out_samples": 2, "device": "cpu"}
    pretrain = Run(data=(str(room / "text.txt"),), model="gpt:0.3m", tokenizer="bpe:300", length=16, **common)
    chats, model = str(room / "chats.jsonl"), str(room / "model")
    return {"pretrain": pretrain, "sft": Run(task="sft", data=(chats,), model=model, length=64, **common)}


@pytest.fixture(scope="module")
def trained(room, runs):
    assert main(words_of(runs["pretrain"], room / "run")) == 0
    return room / "run"


# --- X1: nothing that runs what it reads ----------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve"}
FORBIDDEN_MODULES |= {"marshal", "yaml"}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_CALLS = {"os.system", "os.popen", "numpy.load", "np.load", "runpy.run_path", "tempfile.mktemp"}


def is_fixed(argument):
    """A text, or one out of a table of the module."""
    match argument:
        case ast.Constant() | ast.Subscript(value=ast.Name(id=str())):
            return True
    return False


def findings(source):
    """What a file must not do, as lines of text."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=module):
                modules = [module or ""]
            case _:
                modules = []
        for module in modules:
            if module.partition(".")[0] in FORBIDDEN_MODULES:
                yield f"{node.lineno}: import {module}"
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if (
                name in FORBIDDEN_NAMES | FORBIDDEN_CALLS
                or (name.endswith("torch.load") and given.get("weights_only") != "True")
                or given.get("shell", "False") != "False"
                or given.get("trust_remote_code", "False") != "False"
                or given.get("allow_pickle", "False") != "False"
                or (name.endswith("import_module") and not is_fixed(node.args[0]))
            ):
                yield f"{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if (
                    key is not None
                    and ast.unparse(key) == "'trust_remote_code'"
                    and ast.unparse(value) != "False"
                ):
                    yield f"{node.lineno}: trust_remote_code"


def test_no_code_is_read_from_data():
    root = Path(paceline.__file__).parent
    found = [
        f"{path.relative_to(root)}:{line}"
        for path in root.rglob("*.py")
        for line in findings(path.read_text())
    ]
    assert found == []
    assert len(list(root.rglob("*.py"))) > 40


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import numpy as np; np.load('x')",
        "import torch; torch.load('x')",
        "import torch; torch.load('x', weights_only=False)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "options = {'trust_remote_code': trusted}",
        "importlib.import_module(config.name)",
        "import yaml",
        "os.system(text)",
    ],
)
def test_the_scan_sees_what_it_looks_for(source):
    assert len(list(findings(source))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pretrain", "sft"])
def test_nothing_is_unpickled_and_no_network_is_asked(runs, tmp_path, name):
    """X1 and X6, seen by the interpreter's own audit: training, going on, evaluating, exporting."""
    run, folder = runs[name], tmp_path / "run"
    watch = partial(trials.audit, tmp_path / "seen")
    for words in (
        words_of(run, folder),
        words_of(run, folder),
        ["eval", str(folder)],
        ["export", str(folder), str(tmp_path / "model")],
        ["doctor", str(folder)],
    ):
        trial = Trial(tmp_path / "said", command, words, watch)
        assert trial.wait() == 0, trial.text()
    assert (tmp_path / "seen").read_text() == ""
    control = Trial(tmp_path / "said", trials.misbehave, watch)
    assert control.wait() == 0, control.text()
    assert set((tmp_path / "seen").read_text().split()) == {"pickle.find_class", "socket.connect"}


# --- X2 and X3: files that are not what their names say -----------------------------------------------------


class Payload:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_in_a_checkpoint_is_not_opened(tmp_path, name, protocol):
    mark = tmp_path / "mark"
    state = {"live": {"w": torch.ones(2)}, "optimizer": {}, "state": {}}
    folder = checkpoint.save(tmp_path, 1, state, {})
    for other in ("optimizer.pt", "rng_state.pth", ".metadata", "pytorch_model.bin"):
        (folder / other).write_bytes(pickle.dumps(Payload(mark), protocol))
    checkpoint.load(folder)  # what is not in the manifest is not looked at
    (folder / name).write_bytes(pickle.dumps(Payload(mark), protocol))
    for _ in range(2):
        with pytest.raises(Damaged):
            checkpoint.load(folder)
        forge(folder)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark), protocol))
    assert mark.exists()


def header(text, tail=b""):
    data = text.encode() if isinstance(text, str) else json.dumps(text).encode()
    return struct.pack("<Q", len(data)) + data + tail


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 200_000_000) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        header("[" * 50_000),
        header("{"),
        header("null"),
        header({"w": ONE}, b"\0" * 7),
        header({"w": ONE}, b"\0" * 9),
        header({"w": ONE | {"data_offsets": [0, 2**62]}}, b"\0" * 8),
        header({"w": ONE | {"data_offsets": [8, 0]}}, b"\0" * 8),
        header({"w": ONE | {"data_offsets": [-8, 0]}}, b"\0" * 8),
        header({"w": ONE, "v": ONE}, b"\0" * 8),
        header({"w": ONE | {"shape": [2**62, 2**62]}}, b"\0" * 8),
        header({"w": ONE | {"shape": [3]}}, b"\0" * 8),
        header({"w": ONE | {"dtype": "PICKLE"}}, b"\0" * 8),
        header(f'{{"w": {json.dumps(ONE)}, "w": {json.dumps(ONE | {"data_offsets": [8, 16]})}}}', b"\0" * 16),
        header({"v": ONE}, b"\0" * 8),
    ],
    ids=range(19),
)
def test_tensors_that_lie_about_themselves(tmp_path, content):
    state = {"live": {"w": torch.ones(2)}, "optimizer": {}, "state": {}}
    folder = checkpoint.save(tmp_path, 3, state, {})
    (folder / "live.safetensors").write_bytes(content)
    forge(folder)
    began = time.monotonic()
    with pytest.raises(Damaged, match="cannot be read"):
        checkpoint.load(folder)
    assert time.monotonic() - began < 5


def test_a_file_of_a_terabyte_of_nothing_is_not_read(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"live": {}, "optimizer": {}, "state": {}}, {})
    os.truncate(folder / "live.safetensors", 2**40)
    began = time.monotonic()
    with pytest.raises(Damaged, match="has 1099511627776 bytes"):
        checkpoint.load(folder)
    assert time.monotonic() - began < 5


# --- X4: names --------------------------------------------------------------------------------------------

NAMES = ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\0b", "..\\x", "a\\b", "x" * 300, "~/../x/"]
NAMES += ["./x", "x/"]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_name_in_a_manifest_stays_in_its_folder(tmp_path, name):
    (tmp_path / "inside").mkdir()
    (tmp_path / "x").write_bytes(b"outside")
    with pytest.raises(ValueError, match=r"is not the name of a file in|is missing"):
        files.plain_file(tmp_path / "inside", name)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "file"
    (tmp_path / "target").write_bytes(b"outside")
    match kind:
        case "link":
            path.symlink_to(tmp_path / "target")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    with pytest.raises(ValueError, match="is not a regular file"):
        files.plain_file(tmp_path, "file")


@pytest.mark.parametrize("name", [*LISTED, "manifest.json"])
def test_a_checkpoint_with_a_link_in_it_is_damaged(tmp_path, name):
    folder = checkpoint.save(tmp_path, 1, {"live": {}, "optimizer": {}, "state": {}}, {})
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Damaged, match="is not a regular file"):
        checkpoint.load(folder)


@pytest.mark.parametrize("name", ["lock", "records.jsonl", "timing.jsonl"])
def test_a_link_in_a_run_is_not_written_through(runs, tmp_path, name, capsys):
    folder, target = tmp_path / "run", tmp_path / "target"
    folder.mkdir()
    target.write_text("mine\n")
    (folder / name).symlink_to(target)
    assert main(words_of(runs["pretrain"], folder)) == 1
    assert str(folder / name) in capsys.readouterr().err and target.read_text() == "mine\n"


def test_what_is_cleared_away_lies_in_the_folder(tmp_path):
    """Links among temporary files and old checkpoints go; what they point to stays."""
    outside, root = tmp_path / "outside", tmp_path / "checkpoints"
    checkpoint.save(root, 9, {"live": {}, "optimizer": {}, "state": {}}, {})
    checkpoint.save(outside, 1, {"live": {}, "optimizer": {}, "state": {}}, {})
    (root / ".tmp-link").symlink_to(outside)
    (root / ".tmp-file").write_text("x")
    (root / "step-00000001").symlink_to(outside / "step-00000001")
    files.remove_temporary(root)
    checkpoint.prune(root, up_to=9, keep=1)
    checkpoint.load(outside / "step-00000001")
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "step-00000009"]


# --- X5: settings that look like code -----------------------------------------------------------------------

CODE = [
    "!!python/object/apply:os.mkdir ['{}']",
    "${{HOME}}",
    "$(mkdir {})",
    "`mkdir {}`",
    "__import__('os').mkdir('{}')",
    "{{{{ ''.__class__ }}}}",
    "pace:lr=__import__('os').mkdir('{}')",
    "pace:betas=[open('{}', 'w') for _ in (1,)]",
    "pace:" + "(" * 10_000,
    "pace:betas=" + "-" * 10_000 + "1",
    "pace:betas=" + "9" * 10_000,
    "pace:betas=9**9**9**9",
    "pace:betas='x' * 10**10",
]


PLACES = [("optimizer", text) for text in CODE]
PLACES += [
    (name, text)
    for name in ("schedule", "averages", "model", "tokenizer", "data", "device")
    for text in CODE[::3]
]


@pytest.mark.parametrize(("setting", "text"), PLACES, ids=range(len(PLACES)))
def test_settings_are_never_run(room, tmp_path, monkeypatch, setting, text, capsys):
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / "mark"
    words = ["train", "pretrain", "--out", "run", "--steps", "1", "--data", str(room / "text.txt")]
    began = time.monotonic()
    assert main([*words, f"--{setting}", text.format(mark)]) in (1, 2)
    assert time.monotonic() - began < 10
    assert len(capsys.readouterr().err.splitlines()) == 1 and not mark.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{{{{ cycler.__init__.__globals__.os.mkdir('{}') }}}}",
        "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}",
        "{{% for m in messages %}}{{{{ m.__class__.__base__ }}}}{{% endfor %}}",
        "{{% include '/etc/passwd' %}}",
    ],
)
def test_a_chat_template_cannot_leave_its_sandbox(room, runs, tmp_path, template, capsys):
    mark = tmp_path / "mark"
    folder = shutil.copytree(room / "model", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template.format(mark))
    run = dataclasses.replace(runs["sft"], model=str(folder))
    assert main(words_of(run, tmp_path / "run")) == 2
    assert "the chat template" in capsys.readouterr().err and not mark.exists()


# --- X6: models of others ---------------------------------------------------------------------------------

EVIL = "import os\nos.mkdir({!r})\nclass Evil: pass\n"


def with_code(folder, mark):
    (folder / "evil.py").write_text(EVIL.format(str(mark)))
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(settings))


def with_unknown_code(folder, mark):
    with_code(folder, mark)
    settings = json.loads((folder / "config.json").read_text()) | {"model_type": "evil"}
    (folder / "config.json").write_text(json.dumps(settings))


def with_tokenizer_code(folder, mark):
    (folder / "evil.py").write_text(EVIL.format(str(mark)))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def with_pickled_weights(folder, mark):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))


def with_a_pickle_called_safetensors(folder, mark):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Payload(mark)))


def with_an_index_of_pickles(folder, mark):
    (folder / "model.safetensors").unlink()
    (folder / "a.safetensors").write_bytes(pickle.dumps(Payload(mark)))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_a_pickled_tokenizer(folder, mark):
    (folder / "tokenizer.json").write_bytes(pickle.dumps(Payload(mark)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    [
        with_code,
        with_unknown_code,
        with_tokenizer_code,
        with_pickled_weights,
        with_a_pickle_called_safetensors,
        with_an_index_of_pickles,
        with_a_pickled_tokenizer,
    ],
)
@pytest.mark.parametrize("task", ["pretrain", "sft"])
def test_a_model_that_would_run_code_is_refused(room, runs, tmp_path, harm, task, capsys):
    mark = tmp_path / "mark"
    folder = shutil.copytree(room / "model", tmp_path / "model")
    harm(folder, mark)
    run = dataclasses.replace(runs[task], model=str(folder), tokenizer="auto")
    assert main(words_of(run, tmp_path / "run")) in (1, 2)
    assert len(capsys.readouterr().err.splitlines()) == 1 and not mark.exists()


# --- X7: words on a terminal --------------------------------------------------------------------------------

WORDS = ["\x1b[2J\x1b[31mred", "two\nlines", "bell\a", "back\b\b\b", "\x9b31m", "\u202egnirts", "\r over"]
WORDS += ["\x1b]0;title\x07", "half \udc80", "nul\x7f"]


def is_plain(text):
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("word", WORDS, ids=range(len(WORDS)))
def test_nothing_unseen_reaches_the_terminal(trained, runs, tmp_path, monkeypatch, word, capsys):
    """In names of runs, in settings, in checkpoints, in errors."""
    monkeypatch.chdir(tmp_path)
    name = word.replace("\0", "")
    folder = tmp_path / name
    for words in (
        ["train", "pretrain", "--out", "x", f"--{word}", "1"],
        ["train", "pretrain", "--out", "x", "--steps", word],
        ["train", "pretrain", "--out", "x", "--steps", "1", "--method", word],
        ["train", "pretrain", "--out", "x", "--steps", "1", "--data", word],
        ["train", "pretrain", "--out", "x", "--steps", "1", "--model", word],
        ["eval", str(folder)],
        ["doctor", str(folder)],
        [word],
    ):
        assert main(words) in (1, 2)
        out, err = capsys.readouterr()
        assert out == "" and is_plain(err) and err.count("\n") == 1
    newest = folder / "checkpoints" / "step-00000004"
    shutil.copytree(trained / "checkpoints" / "step-00000004", newest)
    described = json.loads((newest / "state.json").read_text())
    described["facts"]["config"]["model"] = described["facts"]["returned"] = word
    (newest / "state.json").write_text(json.dumps(described))
    forge(newest)
    assert main(["doctor", str(folder)]) == 1  # a checkpoint without the records of its run
    assert main(["eval", str(folder)]) in (1, 2)
    (newest / "state.json").write_text(word, errors="surrogateescape")
    assert main(["doctor", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert is_plain(out) and is_plain(err) and printable(word) in out


def test_a_run_of_any_name_says_nothing_unseen(trained, runs, tmp_path, capsys):
    """What is damaged, and where it is done."""
    folder = shutil.copytree(trained, tmp_path / "".join(WORDS).replace("\udc80", ""))
    (folder / "checkpoints" / "step-00000004" / "state.json").write_text("x")
    assert main(words_of(runs["pretrain"], folder)) == 0
    out, err = capsys.readouterr()
    assert "is damaged" in out and "done: " in out and is_plain(out) and err == ""


def test_what_doctor_says_of_a_forged_checkpoint(trained, tmp_path):
    """Facts that are none do not end in a traceback."""
    newest = shutil.copytree(trained / "checkpoints" / "step-00000004", tmp_path / "step-00000004")
    described = json.loads((newest / "state.json").read_text())
    for facts in (None, [], {}, {"progress": 5, "config": {}}, {"progress": {"step": 1}, "config": 5}):
        (newest / "state.json").write_text(json.dumps(described | {"facts": facts}))
        forge(newest)
        lines, whole = examine(newest)
        assert not whole and "NOT whole" in lines[0]


# --- X8: who may read, and what is written ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o027])
def test_files_have_the_modes_that_the_user_asked_for(room, runs, tmp_path, mask):
    folder = tmp_path / "run"
    trial = Trial(tmp_path / "said", command, words_of(runs["pretrain"], folder), partial(os.umask, mask))
    assert trial.wait() == 0, trial.text()
    words = ["export", str(folder), str(tmp_path / "model")]
    assert Trial(tmp_path / "said", command, words, partial(os.umask, mask)).wait() == 0
    for path in (folder, *folder.rglob("*"), *(tmp_path / "model").iterdir()):
        mode = stat.S_IMODE(path.stat().st_mode)
        allowed = (0o777 if path.is_dir() else 0o666) & ~mask
        assert mode == allowed or (path.name == "lock" and mode == 0o600), (path, oct(mode))


def test_an_export_to_a_folder_for_all_is_not_for_all(trained, tmp_path):
    (tmp_path / "public").mkdir()
    (tmp_path / "public").chmod(0o1777)
    assert main(["export", str(trained), str(tmp_path / "public" / "model")]) == 0
    for path in (tmp_path / "public" / "model", *(tmp_path / "public" / "model").iterdir()):
        assert not path.stat().st_mode & 0o022


@pytest.mark.slow
def test_the_environment_is_not_written_down(room, runs, tmp_path, monkeypatch):
    secret = "hf_" + "s3cr3t" * 6
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    assert main(words_of(runs["pretrain"], tmp_path / "run")) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert secret.encode() not in content and len(content) > 10**6
    assert not re.search(rb"HOSTNAME|PATH=|/home/", content)
