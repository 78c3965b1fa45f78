"""The user's own directory: prepared data, compiled programs, the secret that marks runs as started here."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """BESSEMER_HOME, or the user's cache directory; the environment is read now, not at import."""
    given = os.environ.get("BESSEMER_HOME")
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "bessemer"
