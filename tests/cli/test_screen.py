"""Output whose reader has gone; whole runs in tests/training/test_training_signals.py."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from bessemer.cli.options import Lasting, outlive_readers


def test_a_pipe_without_a_reader_leads_nowhere_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with os.fdopen(writer, "w") as pipe:
        lasting = Lasting(pipe)
        for _ in range(3):
            print("nobody reads this", file=lasting, flush=True)  # type: ignore[call-overload]
        assert os.fstat(pipe.fileno()).st_rdev == os.stat(os.devnull).st_rdev
    assert said.getvalue().count("the output was closed") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_no_reader_that_has_gone() -> None:
    with open("/dev/full", "w") as full:
        lasting = Lasting(full)
        lasting.write("lost")
        with pytest.raises(OSError, match="No space left"):
            lasting.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # so that it can be closed


def test_a_stream_that_was_closed_before_stays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    outlive_readers()
    assert sys.stdout is None and isinstance(sys.stderr, Lasting)
