"""How the process ends after its work is done."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import words

BUSY_AT_EXIT = '''
import sys
import threading
import time

import jax
import jax.numpy as jnp


class SlowToDie:
    """Keeps the interpreter in finalization while the threads below return from native code."""

    def __del__(self):
        for _ in range(100):
            time.sleep(0.005)


def compute():
    product = jax.jit(lambda x: (x @ x).sum())
    x = jnp.ones((200, 200))
    while True:
        product(x).block_until_ready()


sys.modules["slow_to_die"] = SlowToDie()
for _ in range(3):
    threading.Thread(target=compute, daemon=True).start()
'''


@pytest.mark.slow
def test_threads_in_native_code_do_not_crash_a_finished_run(
    tiny: dict[str, object], tmp_path: Path, cli: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    plugin = tmp_path / "busy_at_exit.py"
    plugin.write_text(BUSY_AT_EXIT)
    settings = {**tiny, "training.steps": 1, "plugins": f"[{plugin}]"}
    done = cli("train", "quickstart", *words(settings), "--runs", str(tmp_path), "--name", "busy")
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr
