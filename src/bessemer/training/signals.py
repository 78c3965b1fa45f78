"""SIGTERM, SIGINT and SIGHUP (the terminal was closed), from the first moment of a command to its last.

In the loop they ask for a stop after the step, with a checkpoint. Outside it (data is prepared, the program compiles,
the report is written) there is nothing to save and the process leaves at once. A second SIGINT always does.

Python runs a handler between two bytecodes of the main thread, which may be inside a compilation for minutes; so
the signal goes through a pipe to a thread, and the handler itself does nothing.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from bessemer.errors import Stopped, runnable

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATIENCE = 10.0
"""Seconds a signal waits while the run directory is set up, since half of one could not be resumed."""

Leave = Callable[[str], tuple[int, str]]
"""Handles a signal outside the loop: (reason) -> exit code and last message."""


class Watch:
    """Receives the signals of this process while it is started. Only the main thread may start it."""

    def __init__(self, leave: Leave | None):
        self.leave = leave
        self.request_stop: Callable[[str], None] | None = None
        self.afterwards: Callable[[int, str], str] | None = None
        self.set_up = threading.Lock()
        self._interrupts = 0

    def start(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # under nohup a closed terminal means nothing
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in heard}
        self._descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._read, name="bessemer-signals", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._writer)  # the thread reads the end of the pipe
        self._thread.join()
        os.close(self._reader)

    def _read(self) -> None:
        while numbers := os.read(self._reader, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._received(signal.Signals(number))

    def _received(self, number: signal.Signals) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            _end(130, "\ninterrupted twice: leaving at once; resume continues from the last checkpoint")
        waited = self.request_stop is None and self.set_up.acquire(timeout=PATIENCE)
        request_stop = self.request_stop  # once: the loop may end meanwhile
        if request_stop is not None:
            request_stop(f"received {number.name}")
            _say(f"\n{number.name}: stopping after this step, with a checkpoint (Ctrl-C again: leave at once)")
        elif self.leave is not None:
            try:
                code, words = self.leave(f"received {number.name}")
                if self.afterwards is not None:
                    words = self.afterwards(code, words)
            except BaseException as error:  # noqa: BLE001 -- leave even if the disk fails
                code, words = (128 + number, f"received {number.name}; its record could not be written: {error}")
            _end(code, words)
        if waited:
            self.set_up.release()


_watch: Watch | None = None


def _say(words: str) -> None:
    """Print to stderr, unless the terminal is gone."""
    with contextlib.suppress(OSError, ValueError):
        print(words, file=sys.stderr, flush=True)


def _end(code: int, words: str) -> None:
    _say(runnable(words))
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


@contextlib.contextmanager
def watched(leave: Leave | None) -> Iterator[None]:
    """Watch for signals, unless this is not the main thread or a watch is running already."""
    global _watch
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _watch = Watch(leave)
    _watch.start()
    try:
        yield
    finally:
        _watch.stop()
        _watch = None


@contextlib.contextmanager
def _replaced(attribute: str, value: Callable[..., Any]) -> Iterator[None]:
    """Give the watch, if there is one, another handler for the time inside."""
    if (watch := _watch) is None:
        yield
        return
    before = getattr(watch, attribute)
    setattr(watch, attribute, value)
    try:
        yield
    finally:
        setattr(watch, attribute, before)


@contextlib.contextmanager
def stop_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Make signals ask the loop to stop, while the context is active."""
    with watched(None), _replaced("request_stop", request_stop):
        yield


@contextlib.contextmanager
def signals_delayed() -> Iterator[None]:
    """Delay signals until the context ends, so that a run directory exists as a whole or not at all."""
    with _watch.set_up if _watch is not None else contextlib.nullcontext():
        yield


def handle_signals_with(leave: Leave) -> contextlib.AbstractContextManager[None]:
    """Set how signals outside the loop are handled from now on, if a command watches for them."""
    return _replaced("leave", leave)


def after_signal(record: Callable[[int, str], str]) -> contextlib.AbstractContextManager[None]:
    """Call `record(exit code, message)` after a signal ended a run, and print the message that it returns."""
    return _replaced("afterwards", record)


def stopped_before_run(reason: str) -> tuple[int, str]:
    """Return exit code and message for a signal before there is a run directory: nothing can be resumed, so the code is
    the shell's for that signal."""
    number = signal.Signals[reason.split()[-1]]
    return 128 + number, (
        f"{reason} before the run began: there is nothing to resume. Start it again with the same command; data "
        "that is already prepared is not prepared again."
    )


def stopped_before_resume(run: str, reason: str) -> tuple[int, str]:
    """Return exit code and message for a signal before a run continues."""
    return (
        Stopped.exit_code,
        f"{reason} before the run continued; nothing has changed. Continue with: bessemer resume {shlex.quote(run)}",
    )
