"""`make soak N=50`: seeded kill -9 against real runs, each resumed until it ends and compared bit for bit.

A run is killed, resumed, killed again … until it is done; then the next one starts, until N kills have been tried.
A third of the kills is aimed at the writing of a checkpoint, a third at the moment between its data and its commit,
a third at any moment since the process began. What a process was doing is read off the directory after its death,
so the figures count what happened, not what was aimed at.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.harness import (
    COMMITTED,
    DATA,
    IDLE,
    SAVING,
    WRITTEN,
    assert_sound,
    differences,
    fault_settings,
    finish,
    save_phase,
    start,
    steps_saved,
    train,
    until,
    write_corpus,
)

ANY, INSIDE, BETWEEN = "any moment", "inside a save", "data to commit"
TEXT = {
    IDLE: "no save in progress",
    SAVING: "inside a save, before its data",
    DATA: "inside a save, writing data",
    WRITTEN: "inside a save, data written",
    COMMITTED: "inside a save, COMMIT written, not renamed",
}


@dataclass
class Soak:
    """What was found. `survived`: kills that harmed no committed checkpoint and after which the run went on."""

    kills: int = 0
    inside_a_save: int = 0
    between_data_and_commit: int = 0
    survived: int = 0
    runs: int = 0
    bit_identical: int = 0
    seconds: float = 0.0


def soak(
    folder: Path, home: Path, kills: int, seed: int = 0, steps: int = 60, say: Callable[[str], None] = print
) -> Soak:
    """Kill `kills` times; runs and the undisturbed one (`whole`) are made under `folder`."""
    begun, rng, found = time.monotonic(), random.Random(seed), Soak()
    settings = fault_settings(write_corpus(folder / "corpus.jsonl")) | {"training.steps": steps}
    whole = folder / "whole"
    _ends(start(home, *train(settings, whole)))
    typical = time.monotonic()
    _ends(start(home, *train(settings, folder / "typical")))  # now with compiled programs
    typical = time.monotonic() - typical
    if problems := differences(folder / "typical", whole):
        raise AssertionError(f"two undisturbed runs differ, so nothing can be compared: {problems}")
    aims = _aims(rng, kills)
    while aims:
        run = folder / f"run{found.runs:03d}"
        deaths = 0
        while aims:
            alive = start(home, *(["resume", str(run)] if begins(run) else train(settings, run)))
            if not _killed(alive, run, aims[-1], rng, typical):
                break
            aim = aims.pop()
            deaths += 1
            _count(found, run)
            say(
                f"kill {found.kills:3}/{kills}  {run.name}  aim: {aim:<14}  was: {TEXT[save_phase(run)]:<42}  "
                f"newest checkpoint {steps_saved(run)}"
            )
            if not begins(run):  # killed before its first line: there is nothing to resume
                shutil.rmtree(run, ignore_errors=True)
        else:
            alive = start(home, *(["resume", str(run)] if begins(run) else train(settings, run)))
        _ends(alive)
        found.runs += 1
        found.survived += deaths
        problems = differences(run, whole)
        found.bit_identical += not problems
        say(f"{run.name} ended after {deaths} kills: {'; '.join(problems) or 'bit-identical'}")
        shutil.rmtree(run)
    found.seconds = round(time.monotonic() - begun, 1)
    return found


def begins(run: Path) -> bool:
    return (run / "config.yaml").is_file()


def _aims(rng: random.Random, kills: int) -> list[str]:
    aims: list[str] = []
    while len(aims) < kills:
        block = [ANY, INSIDE, BETWEEN]
        rng.shuffle(block)
        aims += block
    return aims[:kills][::-1]


def _killed(process: subprocess.Popen[str], run: Path, aim: str, rng: random.Random, typical: float) -> bool:
    """Wait for the moment and kill -9; False when the run was done before."""
    saved, further = steps_saved(run), 3 * rng.randrange(1, 4)
    phases = {INSIDE: (SAVING, DATA), BETWEEN: (WRITTEN, COMMITTED)}

    def reached() -> bool:
        return save_phase(run) in phases[aim] and steps_saved(run) >= saved + further

    if aim == ANY:
        moment = time.monotonic() + rng.uniform(0, typical)
        there = until(process, lambda: time.monotonic() >= moment, poll=0.01)
    else:
        there = until(process, reached, poll=0.0002)
        while there:
            time.sleep(rng.uniform(0, 0.15 if aim == INSIDE else 0.004))
            if _frozen(process) and reached():
                break
            process.send_signal(signal.SIGCONT)  # the moment has passed: the next one
            there = until(process, reached, poll=0.0002)
    if not there or process.poll() is not None:
        return False
    process.kill()
    process.communicate()
    return process.returncode == -9


def _frozen(process: subprocess.Popen[str]) -> bool:
    """Stopped where it is, so that it can be looked at; False when it ended first."""
    process.send_signal(signal.SIGSTOP)
    if process.returncode is not None:
        return False
    happened = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    return happened is not None and happened.si_code == os.CLD_STOPPED


def _count(found: Soak, run: Path) -> None:
    phase = save_phase(run)
    found.kills += 1
    found.inside_a_save += phase != IDLE
    found.between_data_and_commit += phase in (WRITTEN, COMMITTED)
    assert_sound(run)


def _ends(process: subprocess.Popen[str]) -> None:
    output = finish(process)
    assert process.returncode == 0, f"exit {process.returncode}\n{output}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bessemer-soak-") as name:
        found = soak(
            Path(name), Path(name) / "home", options.kills, options.seed, say=lambda text: print(text, flush=True)
        )
    for key, value in asdict(found).items():
        print(f"  {key.replace('_', ' '):<26}{value:>8}")
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), "seed": options.seed, **asdict(found)}))
    good = found.survived == found.kills and found.bit_identical == found.runs
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
