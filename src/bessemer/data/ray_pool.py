"""Running shards on a Ray cluster (extra `ray`): the same shards, so the same store, whoever encodes them.

A shard is a task without state, committed by one rename on a file system that all nodes share. So a task whose worker
or node died is simply run again, by Ray; a bad line or a full disk is an answer, not a failure, and ends everything.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bessemer.data.merge import read_counts
from bessemer.data.pool import Task, check, message
from bessemer.data.progress import Tally
from bessemer.errors import InputError, StorageError, to_install

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

    from bessemer.data.worker import encode

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a task
    with contextlib.suppress(OSError):  # sources may be named relative to it
        os.chdir(settings["directory"])
    reply = encode(shard, settings, _tokenizer(settings["tokenizer"]), lambda documents, tokens: None)
    return {**reply, "host": socket.gethostname()}


@functools.cache
def _tokenizer(path: str) -> Any:
    from bessemer.data.tokenizer import Tokenizer

    return Tokenizer.load(path)


@contextmanager
def cluster(workers: int) -> Iterator[Any]:
    """The module `ray`, connected. A cluster that was started here is ended here."""
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
