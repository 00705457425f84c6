"""The folder of the cache, for prepared data."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder that PACELINE_CACHE names, or ~/.cache/paceline."""
    return Path(os.environ.get("PACELINE_CACHE", "~/.cache/paceline")).expanduser()
