"""The process of the command `paceline`."""

import os
import signal
import sys
from types import FrameType


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End the process silently inside an import, which may swallow an exception; else raise one."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> int:
    """Run the command, and return its exit code."""
    signal.signal(signal.SIGINT, _interrupted)
    from paceline import cli  # may be interrupted too

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
