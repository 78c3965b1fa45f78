"""Python processes of our own, isolated from the working directory, and ended with the process that started them.

`python -m` puts the working directory first on the import path: in a folder with a `json.py` it runs that file. `-P`
leaves it out, so a directory of runs from elsewhere cannot run code by being looked at.

`python -m bessemer.job.process COMMAND …` runs a `bessemer` command that ends with the process that started it. The
parent holds the other end of the child's standard input, and the kernel closes it however the parent ends.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
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


# --- children that end with their parent ---


GRACE_SECONDS = 600.0
"""A command that has not ended this long after SIGTERM is stuck; a step and a checkpoint take less."""


def when_input_ends(action: Callable[[], object]) -> None:
    """Call `action` in a thread once standard input closes, which it does however the parent process ends."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        action()

    threading.Thread(target=wait, name="bessemer-parent", daemon=True).start()


def end_with_parent(grace: float = GRACE_SECONDS) -> None:
    """Send this process SIGTERM once its parent has ended, and SIGKILL `grace` seconds later."""

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os.kill(os.getpid(), signal.SIGKILL)

    when_input_ends(end)


if __name__ == "__main__":
    end_with_parent()
    sys.argv = ["bessemer", *sys.argv[1:]]
    runpy.run_module("bessemer", run_name="__main__", alter_sys=True)
