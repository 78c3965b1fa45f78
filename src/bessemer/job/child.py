"""`python -m bessemer.job.child COMMAND …` runs a `bessemer` command that ends with the process that started it.

The parent holds the other end of the child's standard input, and the kernel closes it however the parent ends.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable

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
