"""Where things are kept that can be made again: prepared data."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """~/.cache/paceline; PACELINE_CACHE names another place."""
    return Path(os.environ.get("PACELINE_CACHE", "~/.cache/paceline")).expanduser()
