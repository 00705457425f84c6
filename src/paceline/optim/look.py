"""look.c: what a step looks at in all of its tensors, in one call of C instead of one of Python each.

It is used by the paths that make one pass, and built when one of them is first taken, as native.c is. Where
it cannot be (no compiler, no headers of Python, a torch that has other functions) members.py looks by itself,
with the same answers.
"""

import ctypes
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

SOURCE = Path(__file__).with_name("look.c")
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared")

SYMBOLS = (
    *("aoti_torch_new_uninitialized_tensor", "aoti_torch_delete_tensor_object", "aoti_torch_assign_tensors"),
    *("aoti_torch_is_defined", "aoti_torch_get_data_ptr", "aoti_torch_get_layout", "aoti_torch_get_dtype"),
    *("aoti_torch_get_device_type", "aoti_torch_get_device_index", "aoti_torch_get_dim"),
    *("aoti_torch_get_sizes", "aoti_torch_get_strides"),
    "_ZN8pybind116detail11type_casterIN2at6TensorEvE4loadENS_6handleEb",  # at::Tensor from a Python tensor
    "_Z16THPVariable_WrapRKN2at10TensorBaseE",  # and back
    "_ZNK3c1010TensorImpl4gradEv",  # const at::Tensor &TensorImpl::grad() const
    "_ZN2at6native6is_negERKNS_6TensorE",
    "_ZNK2at10TensorBase8_versionEv",
)
"""Functions of torch: of its C interface, and five that have no other name than that of C++. A later torch
may have them under the same name and otherwise, for which there is `_trial`."""


@cache
def functions() -> Any:
    """The functions of look.c; None where there are none."""
    try:
        return _loaded(_built())
    except (RuntimeError, OSError, ImportError, AttributeError, subprocess.TimeoutExpired):
        return None


def _built() -> Path:
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise RuntimeError("look.c is for CPython with its lock")
    flags = (*FLAGS, f"-I{sysconfig.get_path('include')}")
    if sys.platform == "darwin":  # Python's own functions are found when it is loaded
        flags = (*flags, "-undefined", "dynamic_lookup")
    about = (torch.__version__, str(torch._C.__file__), sys.version)
    return built(SOURCE, "look", flags, about, _trial)


def _loaded(path: Path) -> Any:
    # Torch's module depends on all libraries that have them.
    library = ctypes.CDLL(str(torch._C.__file__))
    addresses = tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in SYMBOLS)
    loader = ExtensionFileLoader("look", str(path))
    module = module_from_spec(ModuleSpec("look", loader, origin=str(path)))
    loader.exec_module(module)
    module.use(addresses, Tensor, Parameter)
    return module


def _trial(path: Path) -> str | None:
    """Why it is of no use with this torch; None if it is. In another process, as it may well crash there."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from pathlib import Path; from paceline.optim import look; "
        f"look.try_out(look._loaded(Path({str(path)!r})))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    return (
        None if ran.returncode == 0 else f"look.c fails with torch {torch.__version__}: {ran.stderr[-500:]}"
    )


def try_out(module: Any) -> None:
    """Raise RuntimeError unless it sees what is the same, and what is not."""
    parameters = [
        Parameter(torch.ones(3, 2)),
        torch.ones(4).requires_grad_(),
        torch.ones(()).requires_grad_(),
    ]
    idle = [torch.ones(1).requires_grad_()]
    states = [{"a": torch.ones(2), "b": torch.ones(3)} for _ in parameters]
    entries = [entry for state in states for entry in state.values()]
    grads = [torch.ones_like(parameter.detach()) for parameter in parameters]
    memory = module.remember(parameters, grads, states, entries, [False, True] * len(parameters))
    addresses = array("q", bytes(8 * len(parameters)))

    def again() -> Any:
        lists = (parameters, list(parameters), parameters, idle, states, entries)
        return module.again(memory, *lists, addresses)

    def expect(ok: bool) -> None:
        if not ok:
            raise RuntimeError("look.c does not see what is there")

    expect(memory is not None and again() is None)
    for backward in (False, True):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = None if backward else grad
        if backward:  # tensors that Python has not seen yet
            torch.autograd.backward([parameter.sum() for parameter in parameters])
        found, moved, _ = again()
        held = [parameter.grad for parameter in parameters]
        expect(moved and all(map(lambda a, b: a is b, found, held)))
        expect(addresses.tolist() == [grad.data_ptr() for grad in held if grad is not None])
        expect(again()[1] is False)
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
    changes = again()[2]
    entries[0].add_(1)
    expect(again()[2] == changes)
    entries[3].add_(1)
    expect(again()[2] > changes)
    expect(module.same(states[0], entries[:2]) and not module.same(states[0], entries[1:3]))
