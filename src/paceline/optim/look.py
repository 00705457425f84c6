"""look.cpp: what a step looks at in all of its tensors, in one call of C++ instead of one of Python each.

It is used by the paths that make one pass, and built when one of them is first taken, as native.c is, but
with the headers that come with torch. Where it cannot be (no compiler, no headers, a torch that is otherwise)
members.py looks by itself, with the same answers.
"""

import subprocess
import sys
import sysconfig
from array import array
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.optim.building import built

SOURCE = Path(__file__).with_name("look.cpp")
TORCH = Path(torch.__file__).parent
FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-shared")


@cache
def functions() -> Any:
    """The functions of look.cpp; None where there are none."""
    try:
        return _loaded(_built())
    except (RuntimeError, OSError, ImportError, AttributeError, subprocess.TimeoutExpired):
        return None


def _built() -> Path:
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise RuntimeError("look.cpp is for CPython with its lock")
    flags = [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    flags += ["-isystem", f"{TORCH / 'include'}", f"-I{sysconfig.get_path('include')}"]
    # Torch has loaded its library by the time that this one is.
    flags += [f"-L{TORCH / 'lib'}", "-Wl,--no-as-needed", "-lc10"] if sys.platform == "linux" else []
    if sys.platform == "darwin":  # functions of others are found when it is loaded
        flags += ["-undefined", "dynamic_lookup"]
    about = (torch.__version__, sys.version)
    return built(SOURCE, "look", tuple(flags), about, _trial)


def _loaded(path: Path) -> Any:
    loader = ExtensionFileLoader("look", str(path))
    module = module_from_spec(ModuleSpec("look", loader, origin=str(path)))
    loader.exec_module(module)
    tensor = torch.empty(0)
    module.use(Tensor, Parameter, tensor, tensor._cdata)
    return module


def _trial(path: Path) -> str | None:
    """Why it is of no use with this torch; None if it is. In another process, as it may well crash there."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from pathlib import Path; from paceline.optim import look; "
        f"look.try_out(look._loaded(Path({str(path)!r})))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    return (
        None if ran.returncode == 0 else f"look.cpp fails with torch {torch.__version__}: {ran.stderr[-500:]}"
    )


def try_out(module: Any) -> None:
    """Raise RuntimeError unless it sees what is the same, and what is not."""
    parameters = [
        Parameter(torch.ones(3, 2)),
        torch.ones(4).requires_grad_(),
        torch.ones(()).requires_grad_(),
    ]
    idle = [torch.ones(1).requires_grad_()]
    states: list[dict[str, Any]] = [{"a": torch.ones(2), "b": torch.ones(3)} for _ in parameters]
    states[2]["c"] = 0
    entries = [entry for state in states for entry in state.values()]
    grads = [torch.ones_like(parameter.detach()) for parameter in parameters]
    memory = module.remember(parameters, grads, states, entries, [*[False, True] * 3, False])
    addresses = array("q", bytes(8 * len(parameters)))

    def again() -> Any:
        lists = (parameters, list(parameters), parameters, idle, states)
        return module.again(memory, *lists, addresses)

    def expect(ok: bool) -> None:
        if not ok:
            raise RuntimeError("look.cpp does not see what is there")

    expect(memory is not None and again() is None)
    for backward in (False, True):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = None if backward else grad
        if backward:  # tensors that Python has not seen yet
            torch.autograd.backward([parameter.sum() for parameter in parameters])
        expect(again()[0] is True)
        held = [parameter.grad for parameter in parameters]
        expect(addresses.tolist() == [grad.data_ptr() for grad in held if grad is not None])
        expect(again()[0] is False)
    for other in (
        torch.ones(2, 3).t(),
        torch._neg_view(torch.ones(3, 2)),
        torch.ones(3, 2).to_sparse(),
        None,
    ):
        parameters[0].grad = other
        expect(again() is None)
    parameters[0].grad = torch.ones(3, 2)
    idle[0].grad = torch.ones(1)
    expect(again() is None)
    idle[0].grad = None
    for changed in (parameters[2], entries[0]):
        before = changed.data
        changed.data = before.clone()
        expect(again() is None)
        changed.data = before
        expect(again() is not None)
    for state, key, other in ((states[1], "a", torch.ones(2)), (states[2], "c", torch.ones(1))):
        before, state[key] = state[key], other
        expect(again() is None)
        state[key] = before
        expect(again() is not None)
    changes = again()[1]
    entries[0].add_(1)
    expect(again()[1] == changes)
    entries[3].add_(1)
    expect(again()[1] > changes)
    version = module.same(states[0], entries[:2], 0)
    expect(version >= 0 and module.same(states[0], entries[:2], version) == version)
    expect(module.same(states[0], entries[1:3], 0) == -1)
