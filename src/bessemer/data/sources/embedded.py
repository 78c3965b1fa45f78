"""The embedded corpora: what comes with every Python, so that a first run needs no download."""

from __future__ import annotations

import ast
import os
import sysconfig
from pathlib import Path

from bessemer.data.sources.files import Files, file_of
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


@datasets.register("python-reference")
def python_reference() -> list[dict[str, str]]:
    """The language reference behind `help()`: about 80 topics, 450 KB of English. What to train on after code."""
    path = Path(sysconfig.get_paths()["stdlib"], "pydoc_data", "topics.py")
    try:
        (assigned,) = (
            node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.Assign)
        )
        topics = ast.literal_eval(assigned.value)
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(
            f"dataset 'python-reference' needs the topics of `help()`, but '{path}' cannot be read ({error}): this "
            f"Python comes without them. Use another Python, or name a text file: training.dataset=my.txt."
        ) from error
    return [{"text": topics[name]} for name in sorted(topics)]
