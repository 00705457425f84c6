"""Every Python block of the README and of docs/, executed as a reader would."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
NEEDS = {
    "lightning.md": ("lightning",),
    "timm.md": ("timm",),
    "torchtitan.md": ("torchtitan.trainer",),
}
"""Pages about packages that need not be here."""
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks():
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        for i, match in enumerate(BLOCK.finditer(text)):
            line = text[: match.start()].count("\n") + 2
            yield pytest.param(path, line, match[1], id=f"{path.name}-{i}")


def what_a_reader_has():
    """The things a training script has before it reads our pages."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(5)]
    return {
        "model": model,
        "loader": data,
        "loss_of": lambda x, y: (model(x) - y).square().mean(),
        "evaluate": lambda m: sum((m(x) - y).square().mean().item() for x, y in data),
    }


@pytest.mark.slow
@pytest.mark.parametrize("path, line, code", list(blocks()))
def test_block_runs(path, line, code, tmp_path, monkeypatch):
    for package in NEEDS.get(path.name, ()):
        try:
            pytest.importorskip(package)
        except RuntimeError as error:  # torchvision's, where it was built for another torch
            pytest.skip(f"{package} cannot be imported: {error}")
    monkeypatch.chdir(tmp_path)
    padded = "\n" * (line - 1) + code  # so that a traceback shows the page's own line
    if path.name == "optax.md":  # a process that has imported JAX must not fork, which other tests do
        if find_spec("jax") is None:
            pytest.skip("jax is not installed")
        subprocess.run([sys.executable, "-c", padded], check=True)
        return
    exec(compile(padded, str(path), "exec"), what_a_reader_has())


def test_there_are_blocks_and_no_other_kind():
    assert len(list(blocks())) >= 25
    text = (ROOT / "README.md").read_text()
    assert len(BLOCK.findall(text)) >= 2
    assert set(re.findall(r"^```(\w+)$", text, re.MULTILINE)) == {"python"}


def test_commands_named_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)`", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_links_lead_to_files_of_the_repository(path):
    """As a reader of the repository meets them; tests/test_site.py follows them on the site."""
    for link in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        assert (path.parent / link).exists(), link
