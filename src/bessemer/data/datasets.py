"""The embedded corpus: the source code of Python's own standard library, so that a first run needs no
download."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from bessemer.data.sources import Files, file_of
from bessemer.errors import InputError
from bessemer.registry import datasets

# Tests are a third of the library and mostly tables of numbers; the rest is not the library's own.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}


@datasets.register("python-stdlib")
def python_stdlib() -> Files:
    """About 12 MB of Python, the same for one Python version; ordered by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in LEFT_OUT and not name.startswith("config-")]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if len(found) < 100:
        raise InputError(
            f"dataset 'python-stdlib' needs the standard library's source files, but '{root}' holds "
            f"{len(found)} of them: this Python keeps its library zipped or stripped. Use another Python, or "
            f"name a text file: training.dataset=my.txt."
        )
    ordered = sorted(found, key=lambda path: path.relative_to(root).as_posix())
    return Files(tuple(file_of(path, "txt") for path in ordered), label="python-stdlib")
