"""Who is still there: asked by a process whose collective has failed, answered by a thread of every other.

Of a collective between many, only the neighbours of a lost process hear at once; the others wait for those, and would
be taken for lost themselves. So a thread answers, whatever the main thread waits in. Process 0, where the service
lives, is the last to leave: it says who is lost, waits until the others have read it, and its own end ends the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from bessemer.topology.distributed import client, process_count, process_index

ASKED, ALIVE, LOST = "bessemer/roll-call", "bessemer/alive", "bessemer/lost"
SECONDS = 2.0
"""Between two looks of the thread at whether somebody asks."""

_known: list[int] = []


def absent_processes(patience: float = 4 * SECONDS) -> list[int]:
    """Who gives no sign of life within `patience` seconds; without the service, who was said to be, or process 0."""
    service = client()
    if service is None:
        return []
    everyone = set(range(process_count()))
    absent = everyone - {process_index()}
    deadline = time.monotonic() + patience
    try:
        service.key_value_set(ASKED, "who is there?", allow_overwrite=True)
        service.key_value_set(f"{ALIVE}/{process_index()}", "here", allow_overwrite=True)
        while absent and time.monotonic() < deadline:
            time.sleep(0.1)
            absent = everyone - {int(name.rpartition("/")[2]) for name, _ in service.key_value_dir_get(ALIVE)}
        if process_index() == 0 and 0 < len(absent) < len(everyone) - 1:
            service.key_value_set(LOST, ",".join(map(str, sorted(absent))), allow_overwrite=True)
            time.sleep(6 * SECONDS)  # the others read it, say so and leave
    except (RuntimeError, ValueError):
        return known_lost() or [0]
    return sorted(absent)


def known_lost() -> list[int]:
    """Whom process 0 has said to be lost."""
    return list(_known)


def answer_roll_calls(leave: Callable[[list[int]], None]) -> None:
    """Begin to answer, for the life of the process. `leave(absent)` is called on process 0 when somebody is missing."""
    service: Any = client()

    def answer() -> None:
        try:
            while _read(service, ASKED) is None:
                time.sleep(SECONDS)
            service.key_value_set(f"{ALIVE}/{process_index()}", "here", allow_overwrite=True)
            if process_index() == 0:
                if absent := absent_processes():
                    leave(absent)
                return
            while (said := _read(service, LOST)) is None:
                time.sleep(SECONDS / 4)
            _known.extend(int(number) for number in said.split(","))
        except (
            RuntimeError,
            ValueError,
            AttributeError,
        ):  # the service has ended, with the run or with process 0
            return

    threading.Thread(target=answer, name="bessemer-roll-call", daemon=True).start()


def _read(service: Any, key: str) -> str | None:
    try:
        return str(service.key_value_try_get(key))
    except (RuntimeError, ValueError) as error:
        if "NOT_FOUND" in str(error):
            return None
        raise
