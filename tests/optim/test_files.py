"""How many files a stranger opens to follow one step, or the showing of an average."""

import sys
from pathlib import Path

import pytest
import torch
from problems import advance, make_gradients, make_parameters

import paceline.optim
from paceline import PACE, Control, averaged_weights

FOLDER = Path(paceline.optim.__file__).parent


def files_entered(action):
    """Return the files of the package in which an action calls a function."""
    found, before = set(), sys.getprofile()
    sys.setprofile(lambda frame, event, _: found.add(Path(frame.f_code.co_filename)))
    try:
        action()
    finally:
        sys.setprofile(before)
    return {path.name for path in found if FOLDER in path.parents}


@pytest.mark.parametrize("control", [Control.paper(), Control.push()], ids=str)
@pytest.mark.parametrize("path", ["foreach", "loop", "fused"])
def test_a_steady_step_and_a_shown_average_are_in_few_files(path, control):
    if path == "fused" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device, limit, entered = ("cuda", 6, "fused.py") if path == "fused" else ("cpu", 5, "rule.py")
    parameters = [p.detach().to(device).requires_grad_() for p in make_parameters(dtype=torch.float32)]
    optimizer = PACE(parameters, control=control, foreach={"foreach": True, "loop": False}.get(path))
    advance(optimizer, parameters, make_gradients(1))
    files = files_entered(lambda: advance(optimizer, parameters, make_gradients(2)))
    assert {"pace.py", entered} <= files and len(files) <= limit, files
    shown = averaged_weights(optimizer)
    files = files_entered(lambda: (shown.__enter__(), shown.__exit__(None, None, None)))
    assert "weights.py" in files and len(files) <= 4, files
