"""The package as a stranger meets it: imports, version, wheel."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["paceline", "paceline.control"])
def test_importing_leaves_torch_alone(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    assert run(sys.executable, "-c", code).strip() == "False"


def test_every_public_name_resolves_and_is_listed():
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
        assert name in dir(paceline)
    with pytest.raises(AttributeError, match="no attribute 'Pace'"):
        _ = paceline.Pace


@pytest.mark.slow
def test_only_public_names_are_importable_from_the_top():
    code = "from paceline import *; print(sorted(n for n in dir() if not n.startswith('_')))"
    names = sorted(n for n in paceline.__all__ if not n.startswith("_"))
    assert run(sys.executable, "-c", code).strip() == str(names)


OPTIONAL = ("numpy", "scipy", "matplotlib", "safetensors", "tokenizers", "transformers")
USE = """
import torch, paceline
from importlib.metadata import requires, version
assert version("paceline") == paceline.__version__
assert [r for r in requires("paceline") if "extra" not in r] == ["torch>=2.10"]
model = torch.nn.Linear(2, 1)
optimizer = paceline.PACE(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
with paceline.averaged_weights(optimizer):
    pass
try:
    paceline.save_averaged(model, optimizer, "out")
except ImportError as error:
    assert "pip install safetensors" in str(error), error
else:
    raise AssertionError("safetensors is not to be here")
print(paceline.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("paceline-*.whl")
    return wheel


@pytest.mark.long
def test_wheel_without_the_packages_that_are_optional(wheel, tmp_path):
    """Unpacked, and used where no package that is optional can be imported."""
    listing = run(sys.executable, "-m", "zipfile", "--list", wheel)
    assert all(name in listing for name in ("paceline/py.typed", "LICENSE"))
    assert "tests/" not in listing
    run(sys.executable, "-m", "zipfile", "--extract", wheel, tmp_path / "site")
    hide = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL}))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    where = run(sys.executable, "-W", "ignore", "-c", hide + USE, cwd=tmp_path, env=environment)
    assert str(tmp_path / "site") in where


@pytest.mark.long
def test_wheel_in_a_clean_environment(wheel, tmp_path):
    """Installed with its one dependency into an empty environment, and used there."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--constraint", ROOT / "constraints.txt", wheel)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    # numpy is no dependency, and torch warns of its absence.
    where = run(python, "-W", "ignore", "-c", USE, cwd=tmp_path, env=environment)
    assert str(tmp_path / "env") in where
