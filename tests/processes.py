"""Several real processes of one run, as a cluster would start them, here on one machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT = 900  # seconds: only a guard against hanging, for what takes two minutes on two idle cores at most
FIRST_PORT, PORTS = 20_000, 12_000  # below those that a system takes for connections and for port 0
_numbers = itertools.count(97 * os.getpid())  # processes that test at the same time begin apart


def free_port() -> int:
    """One that nobody has, and that nobody gets who does not ask for it by number before our process listens there."""
    for number in _numbers:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", FIRST_PORT + number % PORTS))
            return int(probe.getsockname()[1])
    raise AssertionError("endless")


def start(home: Path, count: int, *arguments: str, **variables: str) -> list[subprocess.Popen[str]]:
    """The command line in `count` processes of one device each; one is a run without peers."""
    shared = {**os.environ, "BESSEMER_HOME": str(home), "JAX_NUM_CPU_DEVICES": "1", **variables}
    if count > 1:
        shared |= {"BESSEMER_COORDINATOR": f"127.0.0.1:{free_port()}", "BESSEMER_PROCESSES": str(count)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "bessemer", *arguments],
            env={**shared, **({"BESSEMER_PROCESS_ID": str(number)} if count > 1 else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(count)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float = TIMEOUT) -> tuple[list[int], list[str]]:
    """Exit codes and outputs, in order. What has not ended by then is killed, and fails the test by its code."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        outputs = [process.communicate()[0] for process in processes]
    return [process.returncode for process in processes], outputs


def wait_until(processes: list[subprocess.Popen[str]], condition: Callable[[], bool]) -> None:
    """While all processes live."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        ended = [process for process in processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise AssertionError(f"it never came to that: {finish(processes, 30)}")
        time.sleep(0.02)
