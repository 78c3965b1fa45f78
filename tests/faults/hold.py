"""A plugin of the fault suite: the run waits where a test wants to meet it, until it is let go.

HOLD_AT="step 7": after step 7, before its checkpoint; "data 9": the arrays of checkpoint 9 are written, its COMMIT is
not; "commit 9": that is too, not yet the final name. HOLD is the folder of the files by which test and run speak.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bessemer as bm
from bessemer.checkpoint import store
from bessemer.registry import callbacks

AT = os.environ.get("HOLD_AT", "")
write_manifest = store.write_manifest


def hold(over: Callable[[], bool] = lambda: False) -> None:
    folder = Path(os.environ["HOLD"])
    (folder / "here").touch()
    for _ in range(60_000):
        if (folder / "go").exists() or over():
            break
        time.sleep(0.01)


@callbacks.register("hold")
class Hold(bm.Callback):
    def on_batch_end(self, loop: Any) -> None:
        if f"step {loop.step}" == AT:
            hold(lambda: loop._stop_reason is not None)  # a signal has arrived


def held(directory: Path, step: int, tree: Any) -> None:
    if f"data {step}" == AT:
        hold()
    write_manifest(directory, step, tree)
    if f"commit {step}" == AT:
        hold()


store.write_manifest = held
