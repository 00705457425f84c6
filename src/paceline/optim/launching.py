"""How a kernel of Triton is launched, in less time than Triton takes for it."""

from collections.abc import Callable
from typing import Any, final

import torch

# Triton's own launch looks at every argument anew, which takes longer than all else that a small step does.
# Nothing here depends on what it looks for: arrays are as torch allocates them, and numbers of one type.
_compiled: dict[tuple[Any, ...], Any] = {}


@final
class Kernel:
    """What launches a kernel with some constants, in its order, dtypes as torch has them.

    Which of its arguments are None, and so no part of what is compiled, its constants must say.
    """

    def __init__(
        self, function: Any, programs: int, constants: dict[str, Any], warps: int, device: torch.device
    ) -> None:
        self._function, self._programs, self._constants, self._warps = function, programs, constants, warps
        self._device, self._key = device, (function, device, warps, *constants.values())
        self._launch: Callable[..., None] | None = None

    def __call__(self, arguments: tuple[Any, ...]) -> None:
        if self._launch is None and self._key in _compiled:
            self._launch = _launch_of(_compiled[self._key], self._programs, self._device)
        if self._launch is not None:
            # Of a tensor Triton would ask the driver whether the device can reach it, each time.
            plain = [a if a is None or isinstance(a, (float, int)) else a.data_ptr() for a in arguments]
            try:
                self._launch(*plain, *self._constants)  # whose places count, not their values
                return
            except TypeError:  # from a Triton that wants other arguments, before anything is launched
                pass
        named = {k: _type(v) if isinstance(v, torch.dtype) else v for k, v in self._constants.items()}
        made = self._function[(self._programs,)](
            *arguments, **named, num_warps=self._warps, enable_fp_fusion=False
        )
        if made is not None:  # which an interpreter does not make
            _compiled[self._key] = made


def _launch_of(compiled: Any, programs: int, device: torch.device) -> Callable[..., None]:
    """What launches a kernel, as `compiled[programs, 1, 1]` does; but without what that prepares for hooks of
    others on each launch, where there are none."""
    hooked: Callable[..., None] = compiled[(programs, 1, 1)]
    try:
        from triton import knobs
        from triton.runtime import driver

        run, runtime, stream = compiled.run, knobs.runtime, driver.active.get_current_stream
        own = compiled.function, compiled.packed_metadata, None, None, None
    except (ImportError, AttributeError):  # of a Triton that is otherwise
        return hooked

    def launch(*arguments: Any) -> None:
        if _has_calls(runtime.launch_enter_hook) or _has_calls(runtime.launch_exit_hook):
            hooked(*arguments)
        else:
            run(programs, 1, 1, stream(device.index), *own, *arguments)

    return launch


def _has_calls(hook: Any) -> bool:
    """Of Triton's: a chain of functions, of which there may be none."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _type(dtype: torch.dtype) -> Any:
    """A dtype as Triton calls it."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))
