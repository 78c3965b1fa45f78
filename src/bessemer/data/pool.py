"""Running shards on worker processes: any failure of any of them fails the preparation."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from bessemer.data.progress import Tally
from bessemer.data.sources import Piece
from bessemer.errors import InputError, StorageError
from bessemer.job.process import module_command, module_environment

Task = tuple[Path, list[Piece]]  # where the shard goes, what it holds


def message(task: Task) -> dict[str, Any]:
    """A shard as a worker is told of it."""
    out, pieces = task
    return {"out": str(out), "pieces": [astuple(piece) for piece in pieces]}


def check(reply: dict[str, Any]) -> None:
    """Raise the error a worker answered with."""
    if "error" in reply:
        raise (InputError if reply["kind"] == "input" else StorageError)(reply["error"])


class Pool:
    """`workers` processes, each with a thread here that hands it shards and reads its answers."""

    def __init__(self, workers: int, settings: dict[str, Any], tally: Tally) -> None:
        self.workers, self.settings, self.tally = workers, settings, tally
        self.tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self.failures: list[Exception] = []
        self.processes: list[subprocess.Popen[str]] = []
        self.lock = threading.Lock()

    def run(self, tasks: Sequence[Task]) -> None:
        """Encode all shards; raises the first failure after stopping the other workers."""
        for task in tasks:
            self.tasks.put(task)
        threads = [
            threading.Thread(target=self._drive, daemon=True) for _ in range(min(self.workers, len(tasks)))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        if self.failures:
            raise self.failures[0]

    def _drive(self) -> None:
        try:
            process = self._start()
            while not self.failures:
                try:
                    task = self.tasks.get_nowait()
                except queue.Empty:
                    return
                self._encode(process, task)
        except (InputError, StorageError, OSError) as error:
            with self.lock:
                self.failures.append(error)
                for other in self.processes:
                    other.kill()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            module_command("bessemer.data.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # One core per worker: the tokenizer's own threads would only compete with the other workers.
            env=module_environment(TOKENIZERS_PARALLELISM="false"),
        )
        with self.lock:
            self.processes.append(process)
            if self.failures:
                process.kill()
        self._send(process, self.settings)
        return process

    def _send(self, process: subprocess.Popen[str], message: dict[str, Any]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._died(process, "before it began") from None

    def _encode(self, process: subprocess.Popen[str], task: Task) -> None:
        pieces = task[1]
        self._send(process, message(task))
        assert process.stdout is not None
        for line in process.stdout:
            reply = json.loads(line)
            check(reply)
            with self.lock:
                if reply.get("done"):
                    self.tally.add(done=sum(piece.size for piece in pieces))
                    return
                self.tally.add(reply["documents"], reply["tokens"])
        raise self._died(process, f"at '{pieces[0].path}'")

    def _died(self, process: subprocess.Popen[str], where: str) -> StorageError:
        return StorageError(
            f"a preparation worker ended with code {process.wait()} {where} (out of memory?). Nothing "
            f"partial is used; run the same command again to continue, with fewer --workers if memory was "
            f"short."
        )
