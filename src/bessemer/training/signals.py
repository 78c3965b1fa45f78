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

from bessemer.errors import Stopped, runnable

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATIENCE = 10.0
"""Seconds that a signal waits for the run directory to be set up: half of it could not be resumed."""

Leave = Callable[[str], tuple[int, str]]
"""What a signal does outside the loop: (reason) -> exit code and last words."""


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
            _say(
                f"\n{number.name}: stopping after this step, with a checkpoint (Ctrl-C again: leave at once)"
            )
        elif self.leave is not None:
            try:
                code, words = self.leave(f"received {number.name}")
                if self.afterwards is not None:
                    words = self.afterwards(code, words)
            except BaseException as error:  # noqa: BLE001 -- leaving is what was asked for, whatever the disk says
                code, words = (
                    128 + number,
                    f"received {number.name}; its record could not be written: {error}",
                )
            _end(code, words)
        if waited:
            self.set_up.release()


_watch: Watch | None = None


def _say(words: str) -> None:
    """A terminal that is gone keeps nobody from stopping."""
    with contextlib.suppress(OSError, ValueError):
        print(words, file=sys.stderr, flush=True)


def _end(code: int, words: str) -> None:
    _say(runnable(words))
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


@contextlib.contextmanager
def watched(leave: Leave | None) -> Iterator[None]:
    """Watch for signals; outside the main thread, or when somebody watches already, they are his affair."""
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
def stop_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """For the time of the loop, signals ask it to stop."""
    with watched(None):
        if _watch is None:
            yield
            return
        _watch.request_stop = request_stop
        try:
            yield
        finally:
            _watch.request_stop = None


@contextlib.contextmanager
def setting_up() -> Iterator[None]:
    """A signal waits until this is over: a run directory is there as a whole or not at all."""
    with _watch.set_up if _watch is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def leaving(leave: Leave) -> Iterator[None]:
    """What a signal outside the loop does from here on, where a command watches for signals."""
    if _watch is None:
        yield
        return
    before, _watch.leave = _watch.leave, leave
    try:
        yield
    finally:
        _watch.leave = before


@contextlib.contextmanager
def afterwards(record: Callable[[int, str], str]) -> Iterator[None]:
    """Around several runs: `record(exit code, last words)` is called after a run was left by a signal, and gives the
    words that are said."""
    if _watch is None:
        yield
        return
    _watch.afterwards = record
    try:
        yield
    finally:
        _watch.afterwards = None


def before_a_run(reason: str) -> tuple[int, str]:
    """There is no run directory yet, so nothing to resume: the shell's own code for a signal."""
    number = signal.Signals[reason.split()[-1]]
    return 128 + number, (
        f"{reason} before the run began: there is nothing to resume. Start it again with the same command; data "
        "that is already prepared is not prepared again."
    )


def before_resuming(run: str, reason: str) -> tuple[int, str]:
    """The run is as it was."""
    return (
        Stopped.exit_code,
        f"{reason} before the run went on: it is as it was. Continue with: bessemer resume {shlex.quote(run)}",
    )
