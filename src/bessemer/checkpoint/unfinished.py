"""The directory of a save in progress: made on a disk with room, watched while others write in it, given back."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

from bessemer.errors import StorageError
from bessemer.job.files import discard, storage

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
