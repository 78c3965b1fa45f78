"""Encode shards on worker processes or a Ray cluster; any failure of any worker fails the preparation."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

from bessemer.data.sources.files import Piece
from bessemer.data.stores.shards import Tally, read_counts
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError, StorageError, to_install
from bessemer.job.process import module_command, module_environment

Task = tuple[Path, list[Piece]]  # where the shard goes, what it holds


def message(task: Task) -> dict[str, Any]:
    """Return a shard as a worker gets it."""
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
        threads = [threading.Thread(target=self._drive, daemon=True) for _ in range(min(self.workers, len(tasks)))]
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
            module_command("bessemer.data.stores.worker"),
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
            f"a preparation worker ended with code {process.wait()} {where} (out of memory?). Nothing partial is "
            "used; run the same command again to continue, with fewer --workers if memory was short."
        )


# Ray (extra `ray`). A shard is a task without state, committed by one rename on a file system that all nodes share, so
# Ray runs it again if its worker or node died. An invalid line or a full disk is an answer, which ends everything.


RETRIES = 5  # of a shard whose worker died


class RayPool:
    """Runs on the cluster that RAY_ADDRESS names or that runs here; without one, on a Ray of `workers` processes."""

    def __init__(self, workers: int, settings: dict[str, Any], tally: Tally) -> None:
        self.workers, self.settings, self.tally = workers, settings, tally

    def run(self, tasks: Sequence[Task]) -> None:
        """Encode all shards; raises the first failure, after which nothing new is begun."""
        if not tasks:
            return
        with cluster(self.workers) as ray:
            encode = ray.remote(max_retries=RETRIES, num_cpus=1)(encode_shard)
            shards = [(out.absolute(), pieces) for out, pieces in tasks]
            settings = {**self.settings, "directory": os.getcwd()}
            waiting = {encode.remote(message(shard), settings): shard for shard in shards}
            try:
                while waiting:
                    (ready,), _ = ray.wait(list(waiting), num_returns=1)
                    self._finished(ray, ready, waiting.pop(ready))
            finally:
                for left in waiting:
                    ray.cancel(left)

    def _finished(self, ray: Any, ready: Any, task: Task) -> None:
        out, pieces = task
        try:
            reply = ray.get(ready)
        except ray.exceptions.RayError as error:
            raise StorageError(
                f"Ray lost {RETRIES + 1} workers at '{pieces[0].path}' ({str(error).strip().splitlines()[0]}). "
                "Nothing partial is used; run the same command again to continue."
            ) from error
        check(reply)
        if not out.is_dir():
            raise StorageError(
                f"node {reply['host']} wrote '{out}', which is not to be seen here: the directory of the store must be "
                "on a file system that all nodes of the Ray cluster share."
            )
        counts = read_counts(out)
        self.tally.add(counts["documents"], counts["tokens"], sum(piece.size for piece in pieces))


def encode_shard(shard: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Runs in a worker of Ray, which imports this module there: bessemer must be installed on every node."""
    import socket

    from bessemer.data.stores.worker import encode

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a task
    with contextlib.suppress(OSError):  # sources may be named relative to it
        os.chdir(settings["directory"])
    reply = encode(shard, settings, _load_tokenizer(settings["tokenizer"]), lambda documents, tokens: None)
    return {**reply, "host": socket.gethostname()}


_load_tokenizer = functools.cache(Tokenizer.load)


@contextmanager
def cluster(workers: int) -> Iterator[Any]:
    """Yield the connected module `ray`; shut down a cluster that was started here."""
    try:
        import ray
    except ImportError as error:
        raise InputError(f"--engine ray needs the extra: {to_install('ray')}") from error
    if ray.is_initialized():
        yield ray
        return
    here = {"include_dashboard": False, "log_to_driver": False, "logging_level": "warning"}
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError):
        if os.environ.get("RAY_ADDRESS"):
            raise StorageError(
                f"no Ray cluster answers at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: start it, or unset the variable "
                "to use this machine alone."
            ) from None
        ray.init(address="local", num_cpus=workers, **here)
    try:
        yield ray
    finally:
        ray.shutdown()
