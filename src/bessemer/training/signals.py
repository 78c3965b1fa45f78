"""SIGTERM and SIGINT ask the loop to stop at the next step; a second SIGINT ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from bessemer.errors import Stopped


@contextlib.contextmanager
def stop_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Install the handlers for the time of the loop. Outside the main thread signals are the caller's affair."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        if number == signal.SIGINT:
            interrupts += 1
            if interrupts > 1:
                os.write(
                    2, b"\ninterrupted twice: leaving at once; resume continues from the last checkpoint\n"
                )
                os._exit(Stopped.exit_code)
            print(
                "\nstopping after this step, with a checkpoint (Ctrl-C again: leave at once)", file=sys.stderr
            )
        request_stop(f"received {signal.Signals(number).name}")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
