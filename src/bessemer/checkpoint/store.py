"""`Checkpoints`: the one place that saves, finds, verifies, restores and retires checkpoints of a run.

    step_00000512.tmp/state      Orbax, asynchronously, every process its shards
    step_00000512.tmp/…          loop.json, meta.json, config.yaml, tokenizer.json, then COMMIT; all synced
    step_00000512                one rename, then the parent is synced

A directory with its final name is complete, no matter when a process was killed; any other name is ignored.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bessemer.checkpoint.files import (
    COMMIT,
    META,
    SILENCE,
    STORAGE_FAILURES,
    ArrayWriter,
    content_problems,
    explain,
    quiet,
    read_arrays,
    read_manifest,
    structure_problems,
    write_manifest,
)
from bessemer.console import Advance
from bessemer.errors import InputError, StorageError
from bessemer.job.directory import step_name, step_of_name
from bessemer.storage.files import commit_directory, discard, storage, storage_error
from bessemer.storage.weights import Leaves, Signature, check_same, flatten, rebuild, select, signature
from bessemer.topology import barrier, broadcast

STATE = "state"


class Checkpoints:
    """The checkpoints of one run.

    With many processes each calls `save`, `wait`, `restore`, `newest_valid`, `clean` and `set_aside_after` in the same
    order; process 0 writes and commits, and calls `on_commit(self, step)` in the background. `keep_last` 0 keeps all.
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
        """Return the same kind of store over another directory."""
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
        """Save `state` as `step`; return once the arrays are off the devices, so they may be donated.

        A step that is committed and sound is left as it is. An error of the previous save is raised here.
        """
        self.wait()
        beside = _siblings(step, files or {}, meta or {})
        leaves = flatten(state)
        unfinished = Unfinished(self.root / f"{step_name(step)}.tmp")
        # Process 0 decides for all: one that skipped or failed here alone would leave the others waiting.
        if broadcast(f"prepare {self.root}", lambda: self._prepare(step, unfinished, leaves)) == "committed":
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
        """Wait until the save in progress is committed on every process. Raise its StorageError if it failed."""
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
        """Exempt `step` from retention in place of the label's former one; None exempts nothing. Not persisted."""
        if step is None:
            self._protected.pop(label, None)
        else:
            self._protected[label] = step

    # Finding

    def committed(self) -> list[int]:
        """Return the steps of complete checkpoints, ascending. Sizes are checked; contents only by `verify`."""
        return [step for step in final_steps(self.root) if not structure_problems(self.path(step))]

    def latest(self) -> int | None:
        """Return the highest committed step, whatever the time stamps."""
        return max(self.committed(), default=None)

    def verify(self, step: int, progress: Advance | None = None) -> list[str]:
        """Re-hash every file and return the problems; none: every byte is as it was saved.

        `progress` gets the bytes of each block read, from several threads.
        """
        return content_problems(self.path(step), progress)

    def size(self, step: int) -> int:
        """Return the bytes of a committed checkpoint."""
        return sum(size for size, _ in read_manifest(self.path(step)).files.values())

    def newest_valid(self) -> tuple[int | None, list[str]]:
        """Return the highest step whose every byte verifies, and a message for each newer one that was skipped;
        (None, []) if nothing was ever saved. Process 0 reads for all.

        Raise StorageError if all are damaged, since starting afresh would silently lose the run.
        """
        found = json.loads(broadcast(f"verify {self.root}", self._search, self.timeout))
        self._damaged.update(found["damaged"])
        if found["step"] is None and found["damaged"]:
            raise StorageError(
                f"no checkpoint in {self.root} can be used: {' '.join(found['messages'])} "
                "Restore the directory from a copy, or start a new run."
            )
        return found["step"], found["messages"]

    # Reading

    def restore(self, step: int, abstract: Any, *, only: str | None = None) -> Any:
        """Return the state of `step` in the structure, shapes, dtypes and shardings of `abstract`, on any mesh.

        Every name, shape and dtype must be the same: nothing is cast or filled in. Leaves without a sharding come back
        as numpy. `only="params"` reads that part alone; `abstract` is then the part.
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
        """Raise the error that `restore` would, which names the arrays that differ, without reading them."""
        saved = select(read_manifest(self.path(step)).tree, only)
        check_same(saved, signature(flatten(abstract)), str(self.path(step)))

    def leaves(self, step: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return name -> (dtype, shape) of every saved array, without reading any."""
        return read_manifest(self.path(step)).tree

    def identity(self, step: int) -> str:
        """Return the sha256 of the COMMIT file, which lists the hash of every other: equal for equal checkpoints."""
        return hashlib.sha256((self.path(step) / COMMIT).read_bytes()).hexdigest()

    def read(self, step: int, name: str) -> str:
        """Return the text of a file beside the state, such as loop.json."""
        path = self.path(step) / name
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise StorageError(f"checkpoint {self.path(step)} has no file '{name}'.") from error
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{path} cannot be read ({error}).") from error

    # Keeping order

    def clean(self) -> list[str]:
        """Delete what killed saves and deletions left; return the names. Only the run's lock holder may call it."""
        self.wait()
        return remove_leftovers(self.root) if self.process_zero else []

    def set_aside_after(self, step: int) -> list[int]:
        """Take all checkpoints after `step` out of the list, because the run continues from `step`.

        They are from an abandoned branch and stay as step_N.aside until the run has saved as far again.
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
            messages.append(f"checkpoint {step_name(step)} is damaged and not used: {'; '.join(problems[:3])}{more}.")
        return json.dumps({"step": None, "damaged": damaged, "messages": messages})

    def _prepare(self, step: int, unfinished: Unfinished, leaves: Leaves) -> str:
        """Return what to do: "save", or nothing ("committed")."""
        if step not in self._damaged and not structure_problems(self.path(step)):
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
        """Wait for Orbax on all processes, commit, and delete old checkpoints; runs in a background thread."""
        try:
            self._writer.finish()
            broadcast(f"commit {self.root}", lambda: self._commit(step, unfinished, beside, tree), self.timeout)
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
        commit_directory(temporary, self.path(step))
        self._retire(step)
        return "committed"

    def _retire(self, newest: int) -> None:
        known = [step for step in self.committed() if step not in self._damaged or step == newest]
        for step in self.superfluous(known, newest):
            delete(self.root, step)
        drop_superseded(self.root, newest)

    def superfluous(self, steps: Collection[int], newest: int) -> list[int]:
        """Return which of `steps` the rules of this run do not keep, after `newest` was committed."""
        return superfluous(
            steps,
            newest=newest,
            keep_last=self.keep_last,
            keep_every=self.keep_every,
            protected=list(self._protected.values()),
        )

    def _abandon(self, unfinished: Unfinished, error: BaseException) -> BaseException:
        """Return why a save failed and free its space; the last committed checkpoint is untouched."""
        cause = unfinished.cause(error)
        if self.process_zero:
            unfinished.abandon()
        return cause


def _siblings(step: int, files: Mapping[str, str | bytes], meta: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files beside the state as bytes, with meta.json, which holds the step."""
    for name in files:
        if name in (STATE, META, COMMIT) or Path(name).name != name or name.startswith("."):
            raise InputError(f"a checkpoint cannot hold a file named '{name}'.")
    texts = {**files, META: json.dumps({**meta, "step": step}, indent=1) + "\n"}
    return {name: text.encode() if isinstance(text, str) else text for name, text in texts.items()}


# Retention. Deletion renames first, so half a directory is never taken for a checkpoint.


_LEFTOVER = re.compile(r"\.?step_\d{8,}(\.\w+)*\.(tmp|deleted)")
_ASIDE = re.compile(r"(step_\d{8,})\.aside")


def superfluous(
    steps: Collection[int], *, newest: int, keep_last: int, keep_every: int, protected: Collection[int]
) -> list[int]:
    """Return the steps to delete after `newest` was committed.

    Kept: the last `keep_last` (all, if it is 0), every multiple of `keep_every`, the protected ones, and always
    `newest`, even where abandoned branches of the run have higher numbers.
    """
    if keep_last <= 0:
        return []
    kept = set(sorted(steps)[-keep_last:]) | set(protected) | {newest}
    if keep_every > 0:
        kept |= {step for step in steps if step % keep_every == 0}
    return sorted(set(steps) - kept)


def delete(root: Path, step: int) -> None:
    """Take a step out of the list by one rename and delete it; what remains is left to `remove_leftovers`."""
    discard(_take_out(root, step, "deleted"))


def leftovers(root: Path) -> list[str]:
    """Return the names of unfinished saves, downloads and deletions."""
    return sorted(entry.name for entry in _entries(root) if _LEFTOVER.fullmatch(entry.name))


def set_aside_names(root: Path) -> list[str]:
    """Return the names of checkpoints from abandoned branches of the run."""
    return sorted(entry.name for entry in _entries(root) if _ASIDE.fullmatch(entry.name))


def remove_leftovers(root: Path) -> list[str]:
    """Delete the leftovers; return their names."""
    names = leftovers(root)
    for name in names:
        discard(root / name)
    return names


def set_aside(root: Path, step: int) -> None:
    """Take a checkpoint out of the list without losing it: another branch of the run will replace it."""
    _take_out(root, step, "aside")


def _take_out(root: Path, step: int, ending: str) -> Path:
    target = root / f"{step_name(step)}.{ending}"
    discard(target)
    commit_directory(root / step_name(step), target)
    return target


def drop_superseded(root: Path, newest: int) -> None:
    """Delete what was set aside, once the run has saved a step at least as far."""
    for entry in _entries(root):
        match = _ASIDE.fullmatch(entry.name)
        if match and (step_of_name(match.group(1)) or 0) <= newest:
            discard(entry)


def final_steps(root: Path) -> list[int]:
    """Return the steps of all directories with a final name, committed or not, ascending."""
    found = (step_of_name(entry.name) for entry in _entries(root) if entry.is_dir())
    return sorted(step for step in found if step is not None)


def _entries(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("cannot list the checkpoints", error) from error


# The directory of a save in progress


# `Unfinished.abandon` deletes a directory that pending writes may recreate. In seconds:
PAUSE = 0.02  # between two deletions
AWAY = 1.0  # how long the directory must stay deleted
PATIENCE = 30.0  # after which it gives up


class Unfinished:
    """`step_N.tmp`. Process 0 makes it and holds it open until the arrays are written: TensorStore silently recreates a
    deleted directory, without what it had written before."""

    def __init__(self, path: Path):
        self.path = path
        self._made: int | None = None

    def make(self, needed: int) -> None:
        """Make it, empty, on a disk with `needed` bytes free: Orbax itself fails late on a full one."""
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
        """Close it after the arrays are written. Raise OSError if the directory is not the one that was made."""
        self._check_still_there()
        self._let_go()

    def cause(self, error: BaseException) -> BaseException:
        """Return the cause of TensorStore's error: that the directory was deleted, or the error itself."""
        try:
            self._check_still_there()
        except OSError as gone:
            return gone
        return error

    def abandon(self) -> None:
        """Free the space of a failed save, on process 0.

        TensorStore's other writes are still under way and recreate the directory, so it is deleted until it stays away
        for a while.
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
