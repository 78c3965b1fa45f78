"""A `bessemer` command that ends with whoever started it: however that ends, the pipe to our standard input closes."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def end_with_parent() -> None:
    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="bessemer-parent", daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    sys.argv = ["bessemer", *sys.argv[1:]]
    runpy.run_module("bessemer", run_name="__main__", alter_sys=True)
