"""Index long runs before somebody opens them, in one process of the lowest priority, until the cache is full.

The process reads a JSON list of paths from stdin, stops when stdin closes, and prints one line per finished path.
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
from bessemer.job.process import module_command, module_environment, when_input_ends

LONG = 4 << 20  # bytes of metrics.jsonl: less takes under 0.1 seconds to read
BEHIND = 0.5  # unread share of a file from which a process pays off
PATIENCE = 10  # seconds to finish the current run when the page ends


class Ahead:
    """The indexing process and its progress."""

    def __init__(self, folder: Folder, cache: Path | None):
        self.folder, self.cache = folder, cache
        self.done, self.of = 0, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> dict[str, int] | None:
        """{"done", "of"} while there is something to do."""
        done, of = self.done, self.of  # read once: the thread keeps counting
        return {"done": done, "of": of} if done < of else None

    def start(self, names: Callable[[], list[str]], delay: float = 0.0) -> None:
        """Index the long ones of these runs; `delay` leaves the first seconds to the page's own requests."""
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
                start_new_session=True,  # Ctrl-C is for the page, which then ends this process
            )
        except OSError:
            return  # each run is then read when it is opened
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
        """Return the path of a run's metrics if the file is long and most of it is not cached."""
        try:
            path = self.folder.run(name).metrics
        except Gone:
            return None
        found = self.folder.signature(path)
        size = 0 if found is None else found[1]
        behind = size - kept_bytes(cache_file(cache, path), path)
        return str(path) if size >= LONG and behind > BEHIND * size else None

    def close(self) -> None:
        """Close the process's input, on which it ends after its current run; kill it if it does not."""
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
    """Run the indexing process."""
    import pyarrow

    os.nice(19)
    pyarrow.set_cpu_count(1)
    paths = json.loads(sys.stdin.buffer.readline() or b"[]")
    ended = threading.Event()
    when_input_ends(ended.set)
    folder, kept = Folder(Path(root)), Path(cache)
    for path in map(Path, paths):
        if ended.is_set() or used_bytes(kept) > DISK:
            return
        RunMetrics(folder, path, kept).refresh()
        with contextlib.suppress(BrokenPipeError):
            print(path, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
