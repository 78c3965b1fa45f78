"""Long runs are indexed before somebody looks at them: by one process of the lowest priority, one run after the other,
in the order of the list, until the cache is full. Who looks earlier has the run read at once, as without it.

    stdin:  a JSON list of paths; its end is ours     stdout: a line for each path that is done
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from bessemer.dash.files import Folder, Gone
from bessemer.dash.metrics import DISK, RunMetrics, cache_file, kept_bytes, used_bytes
from bessemer.job.process import module_command, module_environment

LONG = 4 << 20  # bytes of metrics.jsonl: less is read within a tenth of a second
BEHIND = 0.5  # share of a file from which reading it again is worth a process
PATIENCE = 10  # seconds for the run in hand when the page ends


class Ahead:
    """The process and how far it is; `start` returns at once."""

    def __init__(self, folder: Folder, cache: Path | None):
        self.folder, self.cache = folder, cache
        self.done, self.of = 0, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> dict[str, int] | None:
        """{"done", "of"} while there is something to do."""
        done, of = self.done, self.of  # once each: the thread counts on
        return {"done": done, "of": of} if done < of else None

    def start(self, names: Callable[[], list[str]], delay: float = 0.0) -> None:
        """Index those of these runs that are long; `delay` leaves the first seconds to the page's questions."""
        if self.cache is not None:
            self._thread = threading.Thread(
                target=self._work, args=(names, self.cache, delay), name="bessemer-dash-ahead", daemon=True
            )
            self._thread.start()

    def _work(self, names: Callable[[], list[str]], cache: Path, delay: float) -> None:
        if self._closed.wait(delay):
            return
        paths = [path for name in names() if (path := self._unread(name, cache)) is not None]
        if not paths:
            return
        try:
            process = subprocess.Popen(
                module_command("bessemer.dash.ahead", str(self.folder.root), str(cache)),
                env=module_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the page, which ends this with it
            )
        except OSError:
            return  # no process is to be had: each run is read when it is looked at
        self._process, self.of = process, len(paths)
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # the page ends meanwhile
            process.stdin.write(json.dumps(paths).encode() + b"\n")
            process.stdin.flush()
            if self._closed.is_set():
                process.stdin.close()
            for _ in process.stdout:
                self.done += 1
        process.wait()
        self.of = self.done

    def _unread(self, name: str, cache: Path) -> str | None:
        """The path of a run's metrics where most of a long file is in no cache."""
        try:
            path = self.folder.run(name).metrics
        except Gone:
            return None
        found = self.folder.signature(path)
        size = 0 if found is None else found[1]
        behind = size - kept_bytes(cache_file(cache, path), path)
        return str(path) if size >= LONG and behind > BEHIND * size else None

    def close(self) -> None:
        """The process ends by itself when its input does, after the run in hand; a deaf one is ended."""
        self._closed.set()
        process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread is not None:
            self._thread.join(PATIENCE)


def main(root: str, cache: str) -> None:
    """The process."""
    import pyarrow

    os.nice(19)
    pyarrow.set_cpu_count(1)
    paths = json.loads(sys.stdin.buffer.readline() or b"[]")
    ended = threading.Event()

    def wait() -> None:
        while os.read(0, 4096):
            pass
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    folder, kept = Folder(Path(root)), Path(cache)
    for path in map(Path, paths):
        if ended.is_set() or used_bytes(kept) > DISK:
            return
        RunMetrics(folder, path, kept).refresh()
        with contextlib.suppress(BrokenPipeError):
            print(path, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
