"""Tools of the fault suite: a tiny run in real processes, faults aimed from outside, and the two questions asked
after each fault: is every committed checkpoint sound, and is the finished run the undisturbed one?

Nothing in the package helps to aim: what a process is doing is read off the names in its checkpoint directory,
and, once it is dead, so is what it was doing when it died. Where a moment must not be missed, a plugin waits there
(hold.py).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tests.processes import TIMEOUT

from bessemer.checkpoint import Checkpoints

HOLD = Path(__file__).with_name("hold.py")
WORDS = ["the", "a", "red", "blue", "green", "fox", "dog", "cat", "runs", "jumps", "over", "hill", "tree"]

SAVING, DATA, WRITTEN, COMMITTED, IDLE = "saving", "data", "written", "committed", "idle"
"""Nothing of the arrays yet; Orbax is writing them; they are written; COMMIT is there too, not yet the final name."""


def write_corpus(path: Path) -> Path:
    """Twenty small documents, so that a run passes through several epochs."""
    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(10, 30))) + "." for _ in range(20)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def fault_settings(corpus: Path) -> dict[str, object]:
    """Thirty steps in seconds, with a checkpoint every third: most moments of it lie inside a save."""
    return {
        "training.dataset": str(corpus),
        "training.batch_size": 4,
        "training.per_device_batch_size": 2,
        "training.steps": 30,
        "training.validation_steps": 8,
        "data.tokenizer": "train:300",
        "data.val_fraction": 0.2,
        "model.depth": 1,
        "model.width": 32,
        "model.head_dim": 16,
        "architecture.block_size": 16,
        "optimization.name": "adamw",
        "logging.report_interval": 1,
        "logging.validation_interval": 10,
        "logging.checkpoint_interval": 3,
        "logging.preview_prompts": "[the]",
        "logging.progress": "none",
        "logging.plots": False,
    }


HOLDING = {"plugins": f"[{HOLD}]", "callbacks": "[hold]"}


def environment(home: Path, **variables: str) -> dict[str, str]:
    known = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "MPLBACKEND": "Agg"}
    return {**os.environ, **known, "BESSEMER_HOME": str(home), **variables}


def start(home: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """The real command line; its output, both streams, is read by `finish`."""
    return subprocess.Popen(
        [sys.executable, "-m", "bessemer", *arguments],
        env=environment(home, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end. A process that hangs is killed and fails the test."""
    try:
        return process.communicate(timeout=TIMEOUT)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"hangs: {process.args}\n{process.communicate()[0]}") from None


def call(home: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit code and output of one command."""
    process = start(home, *arguments, **variables)
    output = finish(process)
    return process.returncode, output


def words(settings: Mapping[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def train(settings: Mapping[str, object], run: Path) -> list[str]:
    """The words of `bessemer train` that make `run`."""
    return ["train", "quickstart", *words(settings), "--runs", str(run.parent), "--name", run.name]


def until(
    process: subprocess.Popen[str], condition: Callable[[], bool], poll: float = 0.0003, limit: float = TIMEOUT
) -> bool:
    """Wait until the condition holds; False when the process ended first."""
    deadline = time.monotonic() + limit
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(poll)
    return True


def hold(home: Path, moment: str, folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """A run with `HOLDING` that has come to `moment` (see hold.py), where it waits for a signal or `let_go(folder)`."""
    folder.mkdir()
    process = start(home, *arguments, HOLD=str(folder), HOLD_AT=moment, **variables)
    assert until(process, (folder / "here").exists, poll=0.01), finish(process)
    return process


def let_go(folder: Path) -> None:
    (folder / "go").touch()


# --- what a process is doing, seen from outside ---


def save_phase(run: Path) -> str:
    """What the checkpoint directory says about the save in progress, or about the one that was cut off."""
    try:
        temporary = [name for name in os.listdir(run / "checkpoints") if name.endswith(".tmp")]
        if not temporary:
            return IDLE
        inside = os.listdir(run / "checkpoints" / temporary[0])
    except OSError:  # renamed between the two looks, or not made yet
        return IDLE
    if "COMMIT" in inside:
        return COMMITTED
    if "state" in inside:
        return WRITTEN
    return DATA if inside else SAVING


def steps_saved(run: Path) -> int:
    """The highest step with a final name; 0 for none."""
    try:
        names = os.listdir(run / "checkpoints")
    except OSError:
        return 0
    return max((int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdigit()), default=0)


# --- the two questions ---


def assert_sound(run: Path) -> list[int]:
    """Every committed checkpoint has the bytes that were saved; returns their steps."""
    store = Checkpoints(run / "checkpoints")
    steps = store.committed()
    for step in steps:
        assert store.verify(step) == [], f"{run}: checkpoint {step} was harmed"
    return steps


def metrics(run: Path, but_for: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Complete rows without what the bit-for-bit promise leaves out (and other columns a test leaves out)."""
    try:
        lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "mem/", *but_for))} for row in rows]


def final_state(run: Path) -> tuple[int, dict[str, np.ndarray], dict[str, Any]]:
    """Step, every array, and the loop state (but for its clock) of the newest checkpoint."""
    import jax

    store = Checkpoints(run / "checkpoints")
    step = store.latest()
    assert step is not None
    leaves = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (dtype, shape) in store.leaves(step).items()}
    loop = json.loads(store.read(step, "loop.json"))
    for name in ("training_seconds", "all_seconds", "useful_seconds"):
        del loop[name]
    return step, store.restore(step, leaves), loop


def differences(run: Path, whole: Path, but_for: tuple[str, ...] = ()) -> list[str]:
    """Everything in which a finished run is not the undisturbed one; empty: bit for bit the same."""
    (step, arrays, loop), (whole_step, whole_arrays, whole_loop) = final_state(run), final_state(whole)
    found = [] if step == whole_step else [f"ends at step {step}, not {whole_step}"]
    found += [] if loop == whole_loop else [f"loop state: {loop} != {whole_loop}"]
    found += [] if arrays.keys() == whole_arrays.keys() else ["other arrays"]
    found += [
        f"array {name}"
        for name, array in arrays.items()
        if name in whole_arrays and array.tobytes() != whole_arrays[name].tobytes()
    ]
    rows, whole_rows = metrics(run, but_for), metrics(whole)
    if rows != whole_rows:
        unlike = [(a, b) for a, b in zip(rows, whole_rows, strict=False) if a != b]
        found.append(f"metrics: {len(rows)} rows for {len(whole_rows)}; {unlike[:1]}")
    if (run / "samples.jsonl").read_bytes() != (whole / "samples.jsonl").read_bytes():
        found.append("samples.jsonl")
    weights, whole_weights = (load_file(path / "model/model.safetensors") for path in (run, whole))
    if {k: v.tobytes() for k, v in weights.items()} != {k: v.tobytes() for k, v in whole_weights.items()}:
        found.append("final weights")
    if not (run / "report.md").is_file():
        found.append("no report.md")
    return found


def assert_same_run(run: Path, whole: Path, but_for: tuple[str, ...] = ()) -> None:
    assert_sound(run)
    assert differences(run, whole, but_for) == []
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == [
        p.name for p in sorted((whole / "checkpoints").iterdir())
    ], "retention is exact, and nothing is left over"
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "done" and status["exit_code"] == 0


def assert_resumes(run: Path, whole: Path, home: Path, *arguments: str, says: str = "") -> str:
    """`bessemer resume` ends the run as if nothing had happened; its output must contain `says`."""
    code, output = call(home, "resume", str(run), *arguments)
    assert code == 0 and says in output, output
    assert_same_run(run, whole)
    return output
