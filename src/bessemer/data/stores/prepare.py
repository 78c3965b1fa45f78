"""From sources to a store, shard by shard; a killed preparation continues where it stopped.

Finished shards are in `DIR/.work-KEY/`, where KEY names the sources, the tokenizer and the settings. When all are there
they are joined, and the store exists once its `store.json` is written.

Shards are encoded on worker processes or a Ray cluster; any failure of any worker fails the preparation.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.data.rows.rows import FORMAT, is_store, read_facts, write_facts
from bessemer.data.sources.files import SHARD_BYTES, Documents, Files, Piece, Source, Stream, plan_shards
from bessemer.data.sources.hub import find_named
from bessemer.data.stores import shards as merge
from bessemer.data.stores.shards import SHOWN, Callback, ShardWriter, Tally, read_counts
from bessemer.data.tokenize.documents import (
    Bad,
    Document,
    TurnRows,
    encoding_threads,
    finished,
    plan_document,
    read_piece,
)
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError, StorageError, to_install
from bessemer.job.process import module_command, module_environment
from bessemer.storage.checksums import json_digest
from bessemer.storage.files import exclusive
from bessemer.storage.remote import refuse_remote

SHARD_DOCUMENTS = 4096  # documents of one shard when they come from Python


@dataclass(frozen=True)
class Options:
    """Settings that decide the content of a store, besides the sources and the tokenizer."""

    val_fraction: float = 0.0
    on_error: str = "fail"
    text_key: str | None = None
    dedup: bool = False
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise InputError(f"the validation fraction is {self.val_fraction}; it must be at least 0 and below 1.")
        if self.on_error not in ("fail", "skip"):
            raise InputError(f"on_error is '{self.on_error}'; it must be 'fail' or 'skip'.")


@dataclass(frozen=True)
class StoreInfo:
    """A finished store: where it is, its root store.json, and whether it was there already."""

    path: Path
    about: dict[str, Any]
    reused: bool = False

    @property
    def splits(self) -> dict[str, dict[str, Any]]:
        return self.about["splits"]


def prepare(
    sources: Any,
    out: str | Path,
    tokenizer: Tokenizer,
    *,
    val: Any = None,
    val_fraction: float = 0.0,
    on_error: str = "fail",
    workers: int = 1,
    engine: str = "local",
    text_key: str | None = None,
    dedup: bool = False,
    progress: Callback | None = None,
    wait: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> StoreInfo:
    """Encode `sources` (files, globs, directories, `Files`, `Documents`, or an iterable of documents) into the store
    `out`. The bytes written do not depend on `workers` (1: in this process), `engine` (local, or ray: a Ray cluster
    whose nodes share `out`) or interruptions.

    Validation documents come from `val`, or are those whose content hash is below `val_fraction`. wait: wait for
    another preparation of the same directory instead of raising InputError.
    """
    options = Options(val_fraction, on_error, text_key, dedup, shard_bytes)
    if val is not None and val_fraction:
        raise InputError("both validation files and a validation fraction were given; give one of them.")
    if workers < 1:
        raise InputError(f"workers is {workers}; at least 1 is needed.")
    refuse_remote(out, "a store is mapped into memory, so its directory must be local", "prepare it here, then copy it")
    groups = {"train": as_source(sources)}
    if val is not None:
        groups["val"] = as_source(val)
    target = Path(out)
    key = content_key(groups, tokenizer, options)
    with exclusive(target, "a preparation of", wait=wait):
        if is_store(target):
            return _existing(target, key)
        try:
            return _Preparation(target, groups, tokenizer, options, key, engine).run(workers, progress)
        except OSError as error:
            raise StorageError(
                f"preparing '{target}' failed: {error}. Finished shards are kept; run the same command again "
                f"to continue."
            ) from error


def as_source(value: Any) -> Source:
    """Names become files; other sequences are documents; anything else iterable is read once."""
    if isinstance(value, (Files, Documents, Stream)):
        return value
    if isinstance(value, (str, Path)):
        return find_named(value)
    if isinstance(value, Sequence) and all(isinstance(item, (str, Path)) for item in value):
        return find_named(value)
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return Documents(value)
    if isinstance(value, Iterable):
        return Stream(iter(value), f"stream {id(value)} of process {os.getpid()}")
    raise InputError(f"cannot read documents from a {type(value).__name__}: give file names or a sequence.")


def content_key(groups: dict[str, Source], tokenizer: Tokenizer, options: Options) -> str:
    """Names a store by everything that decides its bytes. A stream read once has no key of its own."""
    facts = {
        "format": FORMAT,
        "tokenizer": tokenizer.hash,
        "options": asdict(options),
        "sources": {name: source_key(source) for name, source in groups.items()},
    }
    if tokenizer.prefix_space:  # answers that go on after a prompt got a space of their own before
        facts["continued"] = 1
    if tokenizer.chat_template is not None:  # conversations of several turns were refused, or skipped, before
        facts["turns"] = 1
    return json_digest(facts)


def source_key(source: Source) -> str:
    """Names the content of a source."""
    if not isinstance(source, Documents):
        return source.key
    digest = hashlib.blake2b(digest_size=16)
    for read in documents_of(source.items, None):
        digest.update(repr(read).encode(errors="replace"))
        if isinstance(read, Document) and read.tools:
            digest.update(repr(read.tools).encode(errors="replace"))
    return digest.hexdigest()


def documents_of(
    items: Any, text_key: str | None, tokenizer: Tokenizer | None = None, threads: int = 1
) -> Iterator[Document | Bad]:
    """Documents from Python, by index where there is one."""
    length = len(items) if hasattr(items, "__len__") else None
    values = items if length is None else (items[i] for i in range(length))
    planned = (plan_document(value, f"document {i}", text_key, tokenizer) for i, value in enumerate(values))
    return finished(planned, threads)


def _existing(target: Path, key: str) -> StoreInfo:
    about = read_facts(target / "store.json", target)
    if about.get("key") != key:
        raise InputError(
            f"'{target}' already holds a store made from other sources, another tokenizer or other settings: "
            f"choose another directory, or remove this one first."
        )
    return StoreInfo(target, about, reused=True)


class _Preparation:
    """One preparation in progress, which holds the lock."""

    def __init__(
        self, target: Path, groups: dict[str, Source], tokenizer: Tokenizer, options: Options, key: str, engine: str
    ) -> None:
        self.target, self.groups, self.tokenizer, self.options = target, groups, tokenizer, options
        self.key, self.engine = key, engine
        self.work = target / f".work-{key[:16]}"

    def run(self, workers: int, progress: Callback | None) -> StoreInfo:
        for stale in self.target.glob(".work-*"):
            if stale != self.work:
                shutil.rmtree(stale, ignore_errors=True)
        self.work.mkdir(exist_ok=True)
        self.tokenizer.save(self.work)
        shards = {name: self._encode(name, source, workers, progress) for name, source in self.groups.items()}
        about = self._join(shards)
        write_facts(self.target / "store.json", about)
        shutil.rmtree(self.work, ignore_errors=True)
        return StoreInfo(self.target, about)

    def _encode(self, name: str, source: Source, workers: int, progress: Callback | None) -> list[Path]:
        if isinstance(source, Files):
            return self._encode_files(name, source, workers, progress)
        if self.engine != "local":
            raise InputError(
                f"engine {self.engine} reads files, and {source.label} comes from Python: use --engine local."
            )
        tally = Tally(f"preparing {name}", 0, progress)
        items = documents_of(source.items, self.options.text_key, self.tokenizer, encoding_threads())
        shards: list[Path] = []
        while block := list(islice(items, SHARD_DOCUMENTS)):
            shards.append(self.work / f"{name}-{len(shards):06d}")
            if not shards[-1].is_dir():
                self._writer(shards[-1], tally).write(block)
        return shards

    def _encode_files(self, name: str, files: Files, workers: int, progress: Callback | None) -> list[Path]:
        plan = plan_shards(files, self.options.shard_bytes)
        tasks: list[Task] = [(self.work / f"{name}-{i:06d}", pieces) for i, pieces in enumerate(plan)]
        missing = [task for task in tasks if not task[0].is_dir()]
        tally = Tally(f"preparing {name}", sum(p.size for pieces in plan for p in pieces), progress)
        tally.add(done=tally.state.total - sum(p.size for _, pieces in missing for p in pieces))
        if self.engine == "ray" or (workers > 1 and len(missing) > 1):
            settings = {
                "tokenizer": str(self.work.absolute()),
                "text_key": self.options.text_key,
                "on_error": self.options.on_error,
            }
            pool = RayPool if self.engine == "ray" else Pool
            pool(workers, settings, tally).run(missing)
        else:
            for shard, pieces in missing:
                self._writer(shard, tally).write(self._read(pieces))
                tally.add(done=sum(p.size for p in pieces))
        return [shard for shard, _ in tasks]

    def _read(self, pieces: Iterable[Piece]) -> Iterator[Document | Bad]:
        for piece in pieces:
            yield from read_piece(piece, self.options.text_key, self.tokenizer, threads=encoding_threads())

    def _writer(self, shard: Path, tally: Tally) -> ShardWriter:
        return ShardWriter(shard, self.tokenizer, self.options.on_error, tally.add)

    def _join(self, shards: dict[str, list[Path]]) -> dict[str, Any]:
        hashes = {name: merge.hashes_of(listed) for name, listed in shards.items()}
        for name, found in hashes.items():
            if not len(found):
                raise InputError(f"the {name} sources hold no documents: {self.groups[name].label}.")
        held = hashes.get("val", np.empty((0, 2), np.uint64))
        keep = {name: np.ones(len(found), bool) for name, found in hashes.items()}
        if self.options.dedup:  # against the validation files too: a text in both would leak
            keep["train"] = merge.first_of_each(hashes["train"], held)
            if "val" in keep:
                keep["val"] = merge.first_of_each(held, held[:0])
        duplicates = sum(int((~chosen).sum()) for chosen in keep.values())
        if self.options.val_fraction:
            chosen = merge.choose_validation(hashes["train"], self.options.val_fraction)
            keep["train"], keep["val"] = keep["train"] & ~chosen, keep["train"] & chosen
            shards = {**shards, "val": shards["train"]}
        splits = {}
        for name, kept in keep.items():
            shutil.rmtree(self.target / name, ignore_errors=True)  # left by a join that was killed
            info = merge.write_split(shards[name], kept, self.target / name, self.tokenizer)
            kept_facts = ("documents", "tokens", "bytes", "sha256", "kind", "supervised")
            splits[name] = {k: info[k] for k in kept_facts if k in info}
        self.tokenizer.save(self.target)
        return self._about(shards, splits, duplicates)

    def _about(self, shards: dict[str, list[Path]], splits: dict[str, Any], duplicates: int) -> dict[str, Any]:
        counts = [merge.read_counts(path) for path in sorted({p for listed in shards.values() for p in listed})]
        where = [line for count in counts for line in count["where"]]
        turn_rows = [count.get("turn_rows", {}) for count in counts]
        return {
            "format": FORMAT,
            "key": self.key,
            "kind": splits["train"]["kind"],
            "tokenizer": self.tokenizer.hash,
            "vocab_size": self.tokenizer.vocab_size,
            "sources": {name: _described(source) for name, source in self.groups.items()},
            "split": self._rule(),
            "options": asdict(self.options),
            "splits": splits,
            "skipped": sum(count["skipped"] for count in counts),
            "skipped_where": where[:SHOWN],
            "empty": sum(count["empty"] for count in counts),
            "duplicates": duplicates,
            **_turn_rows(turn_rows),
            "files_left_out": {
                reason: count
                for source in self.groups.values()
                if isinstance(source, Files)
                for reason, count in source.left_out
            },
        }

    def _rule(self) -> str:
        if "val" in self.groups:
            return "validation files given"
        if self.options.val_fraction:
            return f"hash of the content below {self.options.val_fraction:g}, at least one document"
        return "none"


def _turn_rows(counts: Sequence[dict[str, int]]) -> dict[str, dict[str, int]]:
    """Conversations of several rows, in all shards; nothing if there are none."""
    found = {name: sum(count.get(name, 0) for count in counts) for name in asdict(TurnRows())}
    return {"turn_rows": found} if found["conversations"] else {}


def _described(source: Source) -> list[dict[str, Any]]:
    if isinstance(source, Files):
        return [{"path": f.path, "size": f.size} for f in source.files]
    return [{"path": "python", "size": len(source.items) if isinstance(source, Documents) else -1}]


# --- encoding on workers ---


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
