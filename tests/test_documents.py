"""README and docs: every Python block runs, every link leads somewhere, and prose has no ±."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
OPTIONAL = ("jax", "lightning", "timm", "torchtitan")
"""Packages that need not be installed; a block that imports one is skipped without it."""


def blocks():
    for path in PAGES:
        text = path.read_text()
        for i, match in enumerate(BLOCK.finditer(text)):
            line = text[: match.start()].count("\n") + 1
            yield pytest.param(path, "\n" * line + match[1], id=f"{path.stem}-{i}")  # with the page's lines


def what_a_reader_has():
    """Return what a training script has before it meets our pages."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(5)]

    def loss_of(x, y):
        return (model(x) - y).square().mean()

    def train(model, optimizer):
        for x, y in data:
            optimizer.zero_grad()
            loss_of(x, y).backward()
            optimizer.step()

    def evaluate(model):
        return sum((model(x) - y).square().mean().item() for x, y in data)

    return {"model": model, "loader": data, "loss_of": loss_of, "train": train, "evaluate": evaluate}


@pytest.mark.slow
@pytest.mark.parametrize("path, code", list(blocks()))
def test_block_runs(path, code, tmp_path, monkeypatch):
    for package in OPTIONAL:
        if re.search(rf"^(import|from) .*\b{package}\b", code, re.MULTILINE):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    if re.search(r"\bjax\b", code):  # a process that has imported JAX must not fork, as other tests do
        subprocess.run([sys.executable, "-c", code], check=True)
    else:
        exec(compile(code, str(path), "exec"), what_a_reader_has())


def test_there_are_blocks():
    assert len(list(blocks())) >= 25
    assert BLOCK.search(README.read_text())


def test_commands_named_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`make ([\w-]+)`", README.read_text())
    assert {"demo", "test"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files_of_the_repository(path):
    for link in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        assert "//" in link or (path.parent / link).exists(), link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_measured_spreads_stand_in_tables(path):
    prose = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("|")]
    assert not [line for line in prose if "±" in line]


def sentences(page):
    """Yield the sentences of a page's prose; code in a line counts as one word."""
    text = re.sub(r"^```.*?^```|^(    |\s*\||#).*?$", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "code", text))
    for paragraph in re.split(r"\n\s*\n|\n\s*\* ", text):
        yield from re.split(r"(?<=[.!?:;])\**\s+", " ".join(paragraph.split()))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_sentences_are_short(path):
    assert not [one for one in sentences(path.read_text()) if len(one.split()) > 25]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_install_lines_work_in_a_clone(path):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [f"pip install {what}" for what in (".", *(f"'.[{extra}]'" for extra in extras))]
    for found in re.findall(r"pip install [^\s`)]+", path.read_text()):
        assert found in lines


def test_the_readme_fits_on_a_screen_or_two():
    text = README.read_text()
    assert text.count("\n") <= 80
    assert len(re.findall(r"(?<![\w.])\d+\.\d+(?!\w)", text)) <= 25
    assert sum(len(page.read_text().split()) for page in PAGES if page != README) <= 13_500


def test_the_gain_in_the_readme_is_what_the_study_found():
    """Every loss and difference of the README's first table stands in the study's tables."""
    study = (ROOT / "records" / "studies" / "sign" / "tables.md").read_text()
    numbers = re.findall(r"(?<!\d)[-+]?\d\.\d{4}\b", README.read_text())
    assert len(numbers) == 9
    assert not [number for number in numbers if number not in study]
