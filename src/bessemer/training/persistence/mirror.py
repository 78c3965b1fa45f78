"""Copy every committed checkpoint and the run's files to an object store (logging.mirror=s3://bucket/runs).

    URL/NAME/config.yaml, metrics.jsonl, …              the run's files, before the checkpoint they belong to
    URL/NAME/checkpoints/step_N/…, COMMIT last          complete or absent, as on a disk

The run itself stays on a local disk, where it can be locked, renamed and appended to. On another machine,
`bessemer resume URL/NAME` downloads the newest valid checkpoint and continues bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint.files import COMMIT, content_problems
from bessemer.errors import BessemerError, InputError, StorageError
from bessemer.job import RunDirectory, check_run_name
from bessemer.job.directory import step_name, step_of_name
from bessemer.storage.files import atomic_directory, discard, exclusive, storage
from bessemer.storage.remote import check_writable, download, find, is_remote, read_bytes, remove, upload
from bessemer.training.settings import RunContext

FOLDER = "checkpoints"
LEFT = ("lock",)
"""Files that say who writes on one machine; they are not copied."""


class Mirror:
    """The copy of one run. Only process 0 uses it, in the thread that commits checkpoints."""

    def __init__(self, directory: RunDirectory, url: str, say: Callable[[str], None]):
        if not is_remote(url):
            raise InputError(f"logging.mirror={url}: give an object store, as s3://bucket/runs.")
        self.directory, self.say = directory, say
        self.name = f"{url.rstrip('/')}/{directory.name}"
        self.behind = ""  # why the copy is not complete
        self._sent: dict[str, tuple[int, int]] = {}  # files of the run: size and time
        self._commits: dict[str, bytes] = {}  # checkpoints: what their COMMIT held
        self._links: set[str] = set()  # that the user was warned about

    def check(self, continues: bool) -> None:
        """Raise an error, before anything is computed, if the store does not answer or the name is taken there."""
        if mirrored_steps(self.name) and not continues:
            raise InputError(
                f"a run is already mirrored at {self.name}. Continue it with `bessemer resume {self.name}`, or choose "
                "another --name."
            )
        check_writable(self.name)

    def push(self, manager: Checkpoints, step: int) -> None:
        """Copy what is not there yet. If the store fails, warn and try again with the next checkpoint."""
        try:
            self._push(manager, step)
            self.behind = ""
        except BessemerError as error:
            self.behind = str(error)
            self.say(f"warning: checkpoint {step} is not mirrored yet, the run continues: {error}")

    def _push(self, manager: Checkpoints, newest: int) -> None:
        self.send_files()
        there = mirrored_steps(self.name)
        for step in manager.committed():
            self._send_checkpoint(manager.path(step), f"{self.name}/{FOLDER}/{step_name(step)}", there=step in there)
        known = sorted({*there, newest})
        later = {step for step in known if step > newest}  # of an abandoned branch of the run
        doomed = manager.superfluous([step for step in known if step <= newest], newest)
        for step in sorted(later.union(doomed)):
            remove_checkpoint(f"{self.name}/{FOLDER}/{step_name(step)}")

    def send_files(self) -> None:
        """Copy the run's files that changed since this process last sent them."""
        root = self.directory.path
        for path in self._own_files(root):
            name = path.relative_to(root).as_posix()
            if name.startswith((f"{FOLDER}/", ".")) or name in LEFT or path.name.endswith(".tmp"):
                continue
            about = path.stat()
            if self._sent.get(name) != (about.st_size, about.st_mtime_ns):
                upload(path, f"{self.name}/{name}")
                self._sent[name] = (about.st_size, about.st_mtime_ns)

    def _own_files(self, root: Path) -> list[Path]:
        """Return the regular files below `root`, without links that lead out of it."""
        real, found = root.resolve(), []
        for path in sorted(root.rglob("*")):
            if path.is_symlink() and not path.resolve().is_relative_to(real):
                if str(path) not in self._links:
                    self.say(f"warning: {path} links out of the run and is not mirrored")
                self._links.add(str(path))
            elif path.is_file() and path.resolve().is_relative_to(real):
                found.append(path)
        return found

    def _send_checkpoint(self, local: Path, name: str, there: bool) -> None:
        """Copy one checkpoint. COMMIT holds a checksum of every file, so an equal COMMIT means equal files; after a
        rollback another checkpoint may have the name of one already sent."""
        commit = (local / COMMIT).read_bytes()
        if there and self._commits.get(name) == commit:
            return
        found = read_bytes(f"{name}/{COMMIT}")
        if found != commit:
            if found is not None:
                remove(f"{name}/{COMMIT}")
            files = [path for path in self._own_files(local) if path.name != COMMIT]
            for path in (*files, local / COMMIT):
                upload(path, f"{name}/{path.relative_to(local).as_posix()}")
        self._commits[name] = commit


def make_mirror(context: RunContext) -> Mirror | None:
    """Return the mirror that logging.mirror names; None without one, and on processes other than 0."""
    url = context.logging.mirror
    if url is None or not context.topology.is_process_zero:
        return None
    return Mirror(context.directory, url, context.notes.say)


@contextlib.contextmanager
def mirrored(mirror: Mirror | None, continues: bool) -> Iterator[None]:
    """Send the run's last files when the context ends, however it ended."""
    if mirror is None:
        yield
        return
    mirror.check(continues)
    try:
        yield
    except BaseException:
        try:
            mirror.send_files()
        except (BessemerError, OSError) as error:  # the first error is the one to raise
            mirror.say(f"warning: the run's last files were not copied to {mirror.name}: {error}")
        raise
    mirror.send_files()
    if mirror.behind:
        raise StorageError(
            f"the run is done, but its copy at {mirror.name} is not complete: {mirror.behind} The run here is whole: "
            f"{mirror.directory.path}"
        )


def mirrored_steps(name: str) -> list[int]:
    """Return the steps of the complete checkpoints at URL/NAME, ascending."""
    commits = [entry.name for entry in find(f"{name}/{FOLDER}") if entry.name.endswith(f"/{COMMIT}")]
    steps = (step_of_name(commit.split("/")[-2]) for commit in commits)
    return sorted(step for step in steps if step is not None)


def remove_checkpoint(name: str) -> None:
    """Remove COMMIT first: whatever remains after an interruption is then not taken for a checkpoint."""
    remove(f"{name}/{COMMIT}")
    for entry in find(name):
        remove(entry.name)


def fetched(run: str | Path, root: str | Path) -> str | Path:
    """Return `run`, or its local path if it is a URL: downloaded first if the mirror is ahead of the local copy.

    Every process of a run may call it; one downloads, the others wait.
    """
    if not is_remote(run):
        return run
    url = str(run).rstrip("/")
    directory = RunDirectory(Path(root) / check_run_name(url.rpartition("/")[2]))
    steps = mirrored_steps(url)
    if not steps:
        raise InputError(f"there is no mirrored run at {url}: no complete checkpoint is below {url}/{FOLDER}.")
    with exclusive(Path(root), "downloading into", name=f".{directory.name}.fetch", wait=True):
        if (Checkpoints(directory.checkpoints).latest() or -1) < steps[-1]:
            _fetch(url, steps, directory)
    return directory.path


def _fetch(url: str, steps: list[int], directory: RunDirectory) -> None:
    directory.create(exist_ok=True)
    for step in reversed(steps):
        problems = _fetch_checkpoint(f"{url}/{FOLDER}/{step_name(step)}", directory.checkpoints / step_name(step))
        if not problems:
            break
        print(f"warning: {url}: checkpoint {step} is damaged and not used: {'; '.join(problems[:3])}")
    else:
        raise StorageError(f"no checkpoint at {url} can be used: all are damaged. Restore them from a copy.")
    print(f"downloaded checkpoint {step} and the run's files from {url}")
    for entry in find(url):
        name = inner_name(entry.name, url)
        if not name.startswith(f"{FOLDER}/") and name not in LEFT:
            download(entry.name, directory.path / name)


def inner_name(key: str, url: str) -> str:
    """Return the local relative path of an object below `url`.

    Anyone who can write to a bucket chooses its keys. Raise InputError for one that leads out of the target (`../`), or
    that no mirror writes.
    """
    name = key.removeprefix(f"{url}/")
    parts = name.split("/")
    if name == key or any(part in ("", ".", "..") or "\\" in part or not part.isprintable() for part in parts):
        raise InputError(
            f"{url} holds an object that no run of ours writes, with the key {key!r}. Nothing further is fetched: "
            "look at the bucket, and delete the object if it is not yours."
        )
    return name


def _fetch_checkpoint(name: str, path: Path) -> list[str]:
    """Download one checkpoint; return its problems, or none if it is in place."""
    with storage("cannot write a checkpoint"), atomic_directory(path) as temporary:
        for entry in find(name):
            download(entry.name, temporary / inner_name(entry.name, name))
        problems = content_problems(temporary)
        discard(temporary if problems else path)  # the one in place is damaged, or it would be ahead of the mirror
    return problems
