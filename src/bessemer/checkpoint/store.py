"""`Checkpoints`: the one place that saves, finds, verifies, restores and retires checkpoints of a run.

    step_00000512.tmp/state      Orbax, asynchronously, every process its shards
    step_00000512.tmp/…          loop.json, meta.json, config.yaml, tokenizer.json, then COMMIT; all synced
    step_00000512                one rename, then the parent is synced

Whatever is killed, whenever: a directory with a final name is complete, and nothing else is looked at.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bessemer.checkpoint.arrays import SILENCE, STORAGE_FAILURES, ArrayWriter, explain, quiet, read_arrays
from bessemer.checkpoint.manifest import (
    COMMIT,
    META,
    Progress,
    content_problems,
    read_manifest,
    structure_problems,
    write_manifest,
)
from bessemer.errors import InputError, StorageError
from bessemer.job import sync_directory
from bessemer.job.directory import step_name, step_of_name
from bessemer.storage.files import discard, storage, storage_error
from bessemer.storage.weights import Leaves, Signature, check_same, flatten, rebuild, select, signature
from bessemer.topology import barrier, share

STATE = "state"


class Checkpoints:
    """The checkpoints of one run.

    With many processes each calls `save`, `wait`, `restore`, `newest_valid`, `clean` and `set_aside_after`
    in the same order; process 0 writes and commits.

    `on_commit(self, step)` is called on process 0, in the background, once a step is committed.

    `keep_last` 0 keeps all. `protect(step)` exempts the best one; it is not persisted, the loop state knows
    it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        process_zero: bool = True,
        timeout: int = 1800,
        on_commit: Callable[[Checkpoints, int], None] | None = None,
    ):
        self.root = Path(path).absolute()
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.process_zero = process_zero
        self.timeout = timeout
        self.on_commit = on_commit
        self._seen = self.root.is_dir()
        self._writer = ArrayWriter(timeout)
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bessemer-commit")
        self._pending: Future[None] | None = None
        self._protected: dict[str, int] = {}
        self._damaged: set[int] = set()

    def at(self, path: str | Path) -> Checkpoints:
        """The same kind of store over another directory."""
        return Checkpoints(path, process_zero=self.process_zero, timeout=self.timeout)

    def path(self, step: int) -> Path:
        return self.root / step_name(step)

    # Saving

    def save(
        self,
        step: int,
        state: Any,
        *,
        files: Mapping[str, str | bytes] | None = None,
        meta: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> None:
        """Save `state` as `step`; returns once the arrays are off the devices, so they may be donated.

        A step that is committed and sound is left as it is. An error of the previous save is raised here.
        """
        self.wait()
        beside = _siblings(step, files or {}, meta or {})
        leaves = flatten(state)
        unfinished = Unfinished(self.root / f"{step_name(step)}.tmp")
        # Process 0 decides for all: one that skipped or failed here alone would leave the others waiting.
        if share(f"prepare {self.root}", lambda: self._prepare(step, unfinished, leaves)) == "committed":
            return
        SILENCE.enter()
        try:
            self._writer.start(unfinished.path / STATE, leaves)
        except STORAGE_FAILURES as error:
            SILENCE.leave()
            cause = self._abandon(unfinished, error)
            raise explain(f"cannot save checkpoint {step} in {self.root}", cause) from error
        self._pending = self._background.submit(self._finish, step, unfinished, beside, signature(leaves))
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until the save in progress is committed on every process; raises its StorageError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, then end the background threads; the object cannot save again."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._writer.close()

    def protect(self, step: int | None, label: str = "best") -> None:
        """Exempt `step` from retention in place of the label's former one; None exempts nothing."""
        if step is None:
            self._protected.pop(label, None)
        else:
            self._protected[label] = step

    # Finding

    def committed(self) -> list[int]:
        """Steps of complete checkpoints, ascending. Sizes are checked; contents only by `verify`."""
        return [step for step in final_steps(self.root) if not self._problems(step)]

    def latest(self) -> int | None:
        """The highest committed step: never a time stamp."""
        return max(self.committed(), default=None)

    def verify(self, step: int, progress: Progress | None = None) -> list[str]:
        """Re-hash every file; each problem names its file. Empty: every byte is as it was saved.

        `progress` is told the bytes of each block read, from several threads.
        """
        return content_problems(self.path(step), progress)

    def size(self, step: int) -> int:
        """Bytes of a committed checkpoint."""
        return sum(size for size, _ in read_manifest(self.path(step)).files.values())

    def newest_valid(self) -> tuple[int | None, list[str]]:
        """The highest step whose every byte verifies, and a message for each newer one that was passed over.

        (None, []) when nothing was ever saved. Checkpoints that are all damaged are a StorageError, since
        starting afresh would silently lose the run. Process 0 reads; the others take its word.
        """
        found = json.loads(share(f"verify {self.root}", self._search, self.timeout))
        self._damaged.update(found["damaged"])
        if found["step"] is None and found["damaged"]:
            raise StorageError(
                f"no checkpoint in {self.root} can be used: {' '.join(found['messages'])} "
                "Restore the directory from a copy, or start a new run."
            )
        return found["step"], found["messages"]

    # Reading

    def restore(self, step: int, abstract: Any, *, only: str | None = None) -> Any:
        """The state of `step` in the structure, shapes, dtypes and shardings of `abstract`.

        Any mesh will do, but every name, shape and dtype must be the same: nothing is cast or filled in.
        Leaves without a sharding come back as numpy. `only="params"` reads that part alone; `abstract` is
        then the part.
        """
        self.check_fits(step, abstract, only=only)
        wanted = flatten(abstract)
        names = {name: name if only is None else f"{only}/{name}" for name in wanted}
        try:
            with quiet():
                values = read_arrays(self.path(step) / STATE, wanted, names)
        except STORAGE_FAILURES as error:
            raise explain(f"cannot restore checkpoint {self.path(step)}", error) from error
        return rebuild(abstract, values)

    def check_fits(self, step: int, abstract: Any, *, only: str | None = None) -> None:
        """Raise the error that names the arrays which `restore` would refuse; reads none of them."""
        saved = select(read_manifest(self.path(step)).tree, only)
        check_same(saved, signature(flatten(abstract)), str(self.path(step)))

    def leaves(self, step: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every saved array, without reading any."""
        return read_manifest(self.path(step)).tree

    def read(self, step: int, name: str) -> str:
        """The text of a file beside the state, e.g. "loop.json"."""
        path = self.path(step) / name
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise StorageError(f"checkpoint {self.path(step)} has no file '{name}'.") from error
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{path} cannot be read ({error}).") from error

    # Keeping order

    def clean(self) -> list[str]:
        """Delete what killed saves and deletions left; returns the names. For the lock's holder alone."""
        self.wait()
        return remove_leftovers(self.root) if self.process_zero else []

    def set_aside_after(self, step: int) -> list[int]:
        """Take all checkpoints beyond `step` out of the list, because the run goes on from `step`.

        They belong to another future of it and stay as step_N.aside until the run has saved as far again.
        """
        later = [other for other in final_steps(self.root) if other > step]
        barrier(f"set aside {self.root}", self.timeout)
        if self.process_zero:
            with storage("cannot set newer checkpoints aside"):
                for other in later:
                    set_aside(self.root, other)
        self._damaged.difference_update(later)
        barrier(f"set aside {self.root}", self.timeout)
        return later

    # Inside

    def _problems(self, step: int) -> list[str]:
        return structure_problems(self.path(step))

    def _search(self) -> str:
        damaged: list[int] = []
        messages: list[str] = []
        for step in reversed(final_steps(self.root)):
            problems = self.verify(step)
            if not problems:
                if messages:
                    messages[-1] += f" {step_name(step)} is used instead."
                return json.dumps({"step": step, "damaged": damaged, "messages": messages})
            damaged.append(step)
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            messages.append(
                f"checkpoint {step_name(step)} is damaged and not used: {'; '.join(problems[:3])}{more}."
            )
        return json.dumps({"step": None, "damaged": damaged, "messages": messages})

    def _prepare(self, step: int, unfinished: Unfinished, leaves: Leaves) -> str:
        """What is to be done: "save", or nothing ("committed")."""
        if step not in self._damaged and not self._problems(step):
            with storage("cannot delete old checkpoints"):
                self._retire(step)  # a kill may have come between the commit and this
            return "committed"
        if not self._seen:
            with storage("cannot save a checkpoint"):
                self.root.mkdir(exist_ok=True)
            self._seen = True
        unfinished.make(sum(int(leaf.size) * leaf.dtype.itemsize for leaf in leaves.values()))
        return "save"

    def _finish(self, step: int, unfinished: Unfinished, beside: dict[str, bytes], tree: Signature) -> None:
        """In the background: wait for Orbax on all processes, commit, tell the others, retire old ones."""
        try:
            self._writer.finish()
            share(f"commit {self.root}", lambda: self._commit(step, unfinished, beside, tree), self.timeout)
        except (*STORAGE_FAILURES, StorageError) as error:
            cause = self._abandon(unfinished, error)
            raise explain(f"cannot save checkpoint {step} in {self.root}", cause) from error
        finally:
            SILENCE.leave()
        self._damaged.discard(step)
        if self.on_commit is not None and self.process_zero:
            self.on_commit(self, step)

    def _commit(self, step: int, unfinished: Unfinished, beside: dict[str, bytes], tree: Signature) -> str:
        unfinished.written()
        temporary = unfinished.path
        for name, data in beside.items():
            (temporary / name).write_bytes(data)
        write_manifest(temporary, step, tree)
        if self.path(step).exists():  # damaged, or never committed: `save` has looked
            delete(self.root, step)
        os.rename(temporary, self.path(step))
        sync_directory(self.root)
        self._retire(step)
        return "committed"

    def _retire(self, newest: int) -> None:
        known = [step for step in self.committed() if step not in self._damaged or step == newest]
        for step in self.superfluous(known, newest):
            delete(self.root, step)
        drop_superseded(self.root, newest)

    def superfluous(self, steps: Collection[int], newest: int) -> list[int]:
        """Which of `steps` the rules of this run do not keep, after `newest` was committed."""
        return superfluous(
            steps,
            newest=newest,
            keep_last=self.keep_last,
            keep_every=self.keep_every,
            protected=list(self._protected.values()),
        )

    def _abandon(self, unfinished: Unfinished, error: BaseException) -> BaseException:
        """Why a save failed, and its space given back; the last committed checkpoint is untouched."""
        cause = unfinished.cause(error)
        if self.process_zero:
            unfinished.abandon()
        return cause


def _siblings(step: int, files: Mapping[str, str | bytes], meta: Mapping[str, Any]) -> dict[str, bytes]:
    """The files beside the state, as bytes; meta.json always says which step it is."""
    for name in files:
        if name in (STATE, META, COMMIT) or Path(name).name != name or name.startswith("."):
            raise InputError(f"a checkpoint cannot hold a file named '{name}'.")
    texts = {**files, META: json.dumps({**meta, "step": step}, indent=1) + "\n"}
    return {name: text.encode() if isinstance(text, str) else text for name, text in texts.items()}


# Which checkpoints stay. Deletion renames first: half a directory is never taken for a checkpoint.


_LEFTOVER = re.compile(r"step_\d{8,}\.(tmp|deleted)")
_ASIDE = re.compile(r"(step_\d{8,})\.aside")


def superfluous(
    steps: Collection[int], *, newest: int, keep_last: int, keep_every: int, protected: Collection[int]
) -> list[int]:
    """Steps to delete after `newest` was committed.

    Kept: the last `keep_last` (all, when it is 0), every multiple of `keep_every`, the protected ones (the
    best), and always `newest` itself, even where older futures of the run bear higher numbers.
    """
    if keep_last <= 0:
        return []
    kept = set(sorted(steps)[-keep_last:]) | set(protected) | {newest}
    if keep_every > 0:
        kept |= {step for step in steps if step % keep_every == 0}
    return sorted(set(steps) - kept)


def delete(root: Path, step: int) -> None:
    """Out of the list by one rename; what cannot be removed now is a leftover for `remove_leftovers`."""
    doomed = root / f"{step_name(step)}.deleted"
    discard(doomed)
    os.rename(root / step_name(step), doomed)
    sync_directory(root)
    discard(doomed)


def leftovers(root: Path) -> list[str]:
    """Names of unfinished saves and half-finished deletions."""
    return sorted(entry.name for entry in _entries(root) if _LEFTOVER.fullmatch(entry.name))


def set_aside_names(root: Path) -> list[str]:
    """Names of checkpoints that belong to another future of the run."""
    return sorted(entry.name for entry in _entries(root) if _ASIDE.fullmatch(entry.name))


def remove_leftovers(root: Path) -> list[str]:
    """Delete unfinished saves and half-finished deletions; returns their names."""
    names = leftovers(root)
    for name in names:
        discard(root / name)
    return names


def set_aside(root: Path, step: int) -> None:
    """Take a checkpoint out of the list without losing it: another future of the run will replace it."""
    target = root / f"{step_name(step)}.aside"
    discard(target)
    os.rename(root / step_name(step), target)
    sync_directory(root)


def drop_superseded(root: Path, newest: int) -> None:
    """Delete what was set aside, once the run has saved a step at least as far."""
    for entry in _entries(root):
        match = _ASIDE.fullmatch(entry.name)
        if match and (step_of_name(match.group(1)) or 0) <= newest:
            discard(entry)


def final_steps(root: Path) -> list[int]:
    """Steps of all directories with a final name, committed or not, ascending."""
    found = (step_of_name(entry.name) for entry in _entries(root) if entry.is_dir())
    return sorted(step for step in found if step is not None)


def _entries(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("cannot list the checkpoints", error) from error


# The directory of a save in progress: made on a disk with room, watched while others write in it, given back.


PAUSE, AWAY, PATIENCE = 0.02, 1.0, 30.0
"""Seconds between two looks at a directory that was deleted; for which it must stay away; after which nobody waits."""


class Unfinished:
    """`step_N.tmp`. Process 0 makes it and holds it open until the arrays are written: TensorStore silently makes a
    deleted directory again, and what it had written before would be missing."""

    def __init__(self, path: Path):
        self.path = path
        self._made: int | None = None

    def make(self, needed: int) -> None:
        """Empty, on a disk with `needed` bytes free, since Orbax's own failure on a full one is late and long."""
        with storage("cannot save a checkpoint"):
            discard(self.path)
            self.path.mkdir()
            self._made = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            free = shutil.disk_usage(self.path.parent).free
        if free < needed:
            self._let_go()
            self.path.rmdir()
            raise StorageError(
                f"cannot save a checkpoint in {self.path.parent}: it needs up to {needed / 2**30:.3f} GiB and "
                f"{free / 2**30:.3f} GiB are free. Free space, then continue with `bessemer resume`."
            )

    def written(self) -> None:
        """The arrays are there; raises if the directory is not the one that was made."""
        self._check_still_there()
        self._let_go()

    def cause(self, error: BaseException) -> BaseException:
        """TensorStore has many words for a directory deleted under its hands; the cause is that one."""
        try:
            self._check_still_there()
        except OSError as gone:
            return gone
        return error

    def abandon(self) -> None:
        """Give back the space of a failed save. For process 0.

        When one write has failed, TensorStore's others are still under way and make the directory again: it has to
        stay away for a while. What comes later still is a leftover that the next owner deletes.
        """
        self._let_go()
        end, away = time.monotonic() + PATIENCE, 0
        while away * PAUSE < AWAY and time.monotonic() < end:
            discard(self.path)
            time.sleep(PAUSE)
            away = 0 if self.path.exists() else away + 1

    def _check_still_there(self) -> None:
        if self._made is None:  # not process 0, or the files are written
            return
        if not os.path.samestat(os.fstat(self._made), os.stat(self.path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))

    def _let_go(self) -> None:
        if self._made is not None:
            os.close(self._made)
            self._made = None
