"""Python processes of our own, isolated from the working directory.

`python -m` puts the working directory first on the import path: in a folder with a `json.py` it runs that file. `-P`
leaves it out, so a directory of runs from elsewhere cannot run code by being looked at.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).parents[2]
"""The directory that holds the package: site-packages, or `src` of a checkout."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of this package with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def script_command(path: Path) -> list[str]:
    """Return the command line that runs a file of this package that imports nothing else of it."""
    return [sys.executable, "-P", str(path)]


def module_environment(**variables: str) -> dict[str, str]:
    """Return our environment with `variables`, in which a child imports the same package that we did."""
    installed = str(SOURCE) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    source = "" if installed else str(SOURCE)  # site-packages named here would come before the standard library
    paths = (source, os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}
