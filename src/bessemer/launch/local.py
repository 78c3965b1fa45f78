"""One process per GPU on this machine: starts the processes of a run, watches them, and restarts them as a group.

The parent never imports jax, which would take a GPU's memory. How a group ends:

    0, 75           done, or stopped with a checkpoint: that is the launcher's exit code
    2, 3            bad input, failed training: another start would end the same
    anything else   a lost process: the others are stopped and all resume from the last checkpoint, --restarts times

Children have sessions of their own, so Ctrl-C in the terminal reaches the launcher alone, which forwards it once. Their
standard input is a pipe from the launcher: when that closes, they stop by themselves (job/process.py).
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bessemer.config.recipes import read_yaml
from bessemer.console import counted, shown
from bessemer.errors import InputError, Stopped, printable, runnable
from bessemer.job import RunDirectory, RunLock, check_run_name, find_run
from bessemer.job.directory import new_run
from bessemer.job.process import module_command, module_environment
from bessemer.storage.files import discard, storage
from bessemer.storage.remote import is_remote

STOPPED = Stopped.exit_code
HOPELESS = (2, 3)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOGS, STARTS = "logs", "starts"  # in the run directory

POLL_SECONDS = 0.1
NOTICE_SECONDS = 90.0
"""The others of a lost process notice by themselves, report and leave: topology.peer_timeout (45 s) and a roll call."""
TERMINATE_SECONDS = 10.0  # then SIGTERM, and this much later SIGKILL: nothing more is saved without the lost one
TAIL_LINES, TAIL_BYTES = 15, 16384
PORTS = range(20_000, 32_000)  # below those that Linux takes for outgoing connections (32768 on)

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHOW_CURSOR = "\x1b[?25h"  # DECTCEM


# Devices


@dataclass(frozen=True)
class Machine:
    """The accelerators of this machine: `gpus` NVIDIA GPUs; whether it has a TPU."""

    gpus: int = 0
    tpu: bool = False


def this_machine() -> Machine:
    """Return what this machine has, by its device files; without them (WSL) by nvidia-smi."""
    gpus = len([path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)])
    if gpus == 0 and (program := shutil.which("nvidia-smi")):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
            gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    return Machine(gpus, bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")))


def visible_gpus(environ: Mapping[str, str], installed: int) -> list[str]:
    """Return the GPUs that a CUDA program would see, as CUDA_VISIBLE_DEVICES writes them: numbers or UUIDs.

    As in CUDA, the list ends at the first entry that names no GPU, such as -1.
    """
    if VISIBLE not in environ or installed == 0:
        return [str(number) for number in range(installed)]

    def exists(entry: str) -> bool:
        return int(entry) < installed if entry.isdigit() else entry.startswith(("GPU-", "MIG-"))

    return list(itertools.takewhile(exists, (entry.strip() for entry in environ[VISIBLE].split(","))))


def device_environments(
    processes: int | None, environ: Mapping[str, str], machine: Machine, platform: str | None = None
) -> list[dict[str, str]]:
    """Return the variables that give each process its own device: one GPU, or one CPU device where there is none.

    processes: None takes every visible GPU. platform: topology.platform; by default JAX_PLATFORMS decides.
    """
    chosen = platform if platform not in (None, "auto") else environ.get("JAX_PLATFORMS", "").partition(",")[0]
    gpus = [] if chosen == "cpu" else visible_gpus(environ, machine.gpus)
    shown = f" ({VISIBLE}={environ[VISIBLE]})" if VISIBLE in environ and machine.gpus else ""
    if len(set(gpus)) < len(gpus):
        raise InputError(f"{VISIBLE}={environ[VISIBLE]} names a GPU twice; each process needs one of its own.")
    if processes is not None and processes < 1:
        raise InputError(f"--processes must be at least 1; got {processes}.")
    if chosen == "tpu" or (machine.tpu and not gpus and chosen != "cpu"):
        raise InputError(
            "one process drives all TPU chips of a host: run `bessemer train` without `launch local`. "
            "To use this machine's CPU instead, set JAX_PLATFORMS=cpu."
        )
    if not gpus:
        if chosen in ("gpu", "cuda"):
            raise InputError(
                f"no NVIDIA GPU is visible here{shown}, and {chosen} was asked for. Use topology.platform=cpu."
            )
        if processes is None:
            raise InputError(
                f"no NVIDIA GPU is visible here{shown}, so the number of processes must be given: --processes 2 starts "
                "two with one CPU device each. On one device `bessemer train` is all you need."
            )
        return [{"JAX_NUM_CPU_DEVICES": "1"} for _ in range(processes)]
    if processes is not None and processes > len(gpus):
        raise InputError(
            f"--processes {processes}: {len(gpus)} GPU(s) are visible here{shown}, and each process needs one of its "
            f"own. Pass --processes {len(gpus)}; to use the CPU instead, set JAX_PLATFORMS=cpu."
        )
    return [{VISIBLE: gpu, "JAX_NUM_CPU_DEVICES": "1"} for gpu in gpus[:processes]]


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise InputError(f"no port of 127.0.0.1 from {PORTS[0]} to {PORTS[-1]} is free.")


def peer_environments(devices: Sequence[Mapping[str, str]], port: int) -> list[dict[str, str]]:
    """Return the variables of each process: its device, and how it finds its peers on this machine.

    Process 0 listens on 127.0.0.1 alone; JAX would open the port to the network, and asks nobody for a password.
    """
    if len(devices) == 1:
        return [dict(devices[0])]
    address = f"127.0.0.1:{port}"
    shared = {"BESSEMER_COORDINATOR": address, "BESSEMER_PROCESSES": str(len(devices))}
    found = [{**own, **shared, "BESSEMER_PROCESS_ID": str(number)} for number, own in enumerate(devices)]
    found[0]["JAX_COORDINATOR_BIND_ADDRESS"] = address
    return found


# One start of all processes


@dataclass
class Child:
    """One process. Process 0 writes to our own stdout and stderr; the others have a log."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path | None
    begun_at: int = 0  # where this start begins in the log
    code: int | None = None  # as Popen has it: negative for a signal

    def poll(self) -> bool:
        """Return whether it has just ended."""
        before, self.code = self.code, self.process.poll()
        return before is None and self.code is not None

    @property
    def final(self) -> int:
        """Its code, once it has ended."""
        assert self.code is not None
        return self.code

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self.process.send_signal(number)

    def tail(self) -> list[str]:
        """Return the last lines that it wrote to its log in this start."""
        if self.log is None or not self.log.is_file():
            return []
        with open(self.log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.begun_at, size - TAIL_BYTES))
            return printable(file.read().decode("utf-8", errors="replace")).splitlines()[-TAIL_LINES:]


class Signals:
    """Collects the signals to the launcher while it is entered. Under nohup a closed terminal means nothing."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, lambda got, _: self.received.append(signal.Signals(got)))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Ended:
    """How a start ended: the exit code of the group, the process that it comes from, and each process's own code."""

    code: int
    culprit: Child | None = None
    codes: tuple[int, ...] = ()


def exit_code(code: int) -> int:
    """Return a process's exit code as a shell shows it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def described(code: int) -> str:
    """Say how a process ended, by its code as Popen has it."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"was killed by {name}" + (
            " (by hand, or by the kernel's OOM killer)" if code == -signal.SIGKILL else ""
        )
    meanings = {1: "a bug", 2: "bad input", 3: "training failed", 4: "a lost process, disk or checkpoint"}
    return f"exited with code {code}" + (f" ({meanings[code]})" if code in meanings else "")


def group_code(ended: Sequence[int], stopped_by: int | None, can_resume: bool) -> int:
    """Return the exit code of a group from its processes' codes, in the order in which they ended.

    stopped_by: the signal that was forwarded to them. One that arrives before training begins ends a process at once.
    """
    if hopeless := [code for code in ended if code in HOPELESS]:
        return hopeless[0]
    failures = [exit_code(code) for code in ended if code not in (0, STOPPED)]
    if not failures:
        return STOPPED if STOPPED in ended else 0
    if stopped_by is not None and set(failures) == {128 + stopped_by} and (can_resume or STOPPED in ended):
        return STOPPED
    return failures[0]


@dataclass
class Group:
    """The processes of one run on this machine.

    train: the command of the first start, until the run is there; None if it is there already. resume: of the others.
    """

    run: RunDirectory
    train: Sequence[str] | None
    resume: Sequence[str]
    devices: Sequence[Mapping[str, str]]
    restarts: int
    say: Callable[[str], None]
    signals: Signals = field(default_factory=Signals)

    def launch(self) -> int:
        """Run to the end, with restarts, and return the exit code."""
        starts = Starts(self.run)
        self._say(f"launch     {self._summary()}")
        with self.signals:
            for number in itertools.count():
                starts.begin(number)
                ended = self._start(number)
                if ended.code in (0, STOPPED):
                    starts.ended_in_order(number)
                    if ended.code == STOPPED:
                        self._say(f"With all processes, {self._continuation()}")
                    return ended.code
                self._report(ended)
                if self.signals.received or ended.code in HOPELESS:
                    self._discard_traces(ended)
                    return ended.code
                if not starts.has(number):
                    self._say(f"error: {shown(self.run.path)} was deleted or moved, so there is nothing to restart.")
                    return ended.code
                failures = starts.failures(besides=number)
                if failures >= self.restarts:
                    used = f"after {counted(failures, 'restart')}" if failures else "(--restarts 0)"
                    self._say(
                        f"error: the processes are not restarted again {used}. Fix the cause, then "
                        f"{self._continuation()}"
                    )
                    return ended.code
                self._say(f"launch     restart {failures + 1} of {self.restarts}: all processes {self._next()}")
        raise AssertionError("endless")

    def _start(self, number: int) -> Ended:
        """Run all processes once."""
        words = self.resume if self.train is None or self.run.config.is_file() else self.train
        children: list[Child] = []
        try:
            for own in peer_environments(self.devices, free_port()):
                children.append(self._spawn(len(children), words, own, number))
            return self._watch(children)
        finally:
            for child in children:
                child.send(signal.SIGKILL)
                child.process.wait()
                assert child.process.stdin is not None
                child.process.stdin.close()
            if sys.stderr.isatty():  # process 0 hides the cursor beside its progress bar, and may have been killed
                print(SHOW_CURSOR, end="", file=sys.stderr, flush=True)

    def _spawn(self, number: int, words: Sequence[str], own: Mapping[str, str], start: int) -> Child:
        inherited = ("BESSEMER_COORDINATOR", "BESSEMER_PROCESSES", "BESSEMER_PROCESS_ID")
        environment = {key: value for key, value in module_environment().items() if key not in inherited}
        with contextlib.ExitStack() as stack:
            output: IO[bytes] | None = None
            log: Path | None = None
            begun_at = 0
            if number > 0:
                log = self.run.path / LOGS / f"process-{number}.log"
                output = stack.enter_context(_open_log(log, truncate=start == 0 and self.train is not None))
                device = f", GPU {own[VISIBLE]}" if VISIBLE in own else ""
                begun = time.strftime("%Y-%m-%d %H:%M:%S")
                output.write(
                    f"=== start {start} of process {number} of {len(self.devices)}{device}, {begun}\n".encode()
                )
                output.flush()
                begun_at = output.tell()
            process = subprocess.Popen(
                module_command("bessemer.job.process", *words),
                env={**environment, "PYTHONUNBUFFERED": "1", **own},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            return Child(number, process, log, begun_at)

    def _watch(self, children: list[Child]) -> Ended:
        """Wait for all to end. Forward the first signal; on the second, or once one is lost for long, kill them."""
        ended: list[Child] = []
        forwarded: int | None = None
        lost_at: float | None = None
        escalation = _escalation()
        while len(ended) < len(children):
            # Of those that end together, the ones that lost a peer (4) come after the peer.
            ended += sorted((child for child in children if child.poll()), key=lambda child: child.code == 4)
            received = self.signals.received
            if received and forwarded is None:
                forwarded = received[0]
                for child in children:
                    child.send(forwarded)
            if len(received) > 1 and received[-1] != signal.SIGHUP:  # a closing terminal may send that twice
                self._say(f"{received[-1].name} again: all processes are killed; {self._continuation()}")
                return Ended(128 + received[-1])
            if lost_at is None and any(child.code not in (0, STOPPED) for child in ended):
                lost_at = time.monotonic()
            if lost_at is not None and len(ended) < len(children):
                for due in escalation(time.monotonic() - lost_at):
                    left = [child for child in children if child.code is None]
                    numbers = ", ".join(str(child.number) for child in left)
                    self._say(f"launch     a process was lost and process {numbers} is still there: {due.name}")
                    for child in left:
                        child.send(due)
            if len(ended) < len(children):
                time.sleep(POLL_SECONDS)
        code = group_code([child.final for child in ended], forwarded, self.run.config.is_file())
        culprit = next((child for child in ended if exit_code(child.final) == code), None)
        return Ended(code, culprit, tuple(child.final for child in children))

    def _report(self, ended: Ended) -> None:
        """Print how the process that failed first ended, and its last lines."""
        child = ended.culprit
        if child is None or (ended.code in HOPELESS and ended.codes[0] == ended.code):
            return  # killed by hand; or process 0 has just printed the reason
        how = f"process {child.number} {described(child.final)}"
        lines = child.tail()
        if child.log is None:
            log = f" and in {shown(self.run.log)}" if self.run.log.is_file() else ""
            self._say(f"error: {how}; its output is above{log}")
        elif not lines:
            self._say(f"error: {how}; it wrote nothing to {shown(child.log)}")
        else:
            self._say(
                "\n".join([f"error: {how}. The last lines of {shown(child.log)}:", *(f"  {line}" for line in lines)])
            )

    def _summary(self) -> str:
        gpus = [own[VISIBLE] for own in self.devices if VISIBLE in own]
        devices = f"one GPU each ({', '.join(gpus)})" if gpus else "one CPU device each"
        others = f"; all but process 0 write to {shown(self.run.path / LOGS)}" if len(self.devices) > 1 else ""
        return f"{counted(len(self.devices), 'process')} for the run {self.run.name}, {devices}{others}"

    def _next(self) -> str:
        if self._has_begun():
            return f"resume {shown(self.run.path)} from its last checkpoint"
        return "start again; the run had not begun"

    def _has_begun(self) -> bool:
        return self.train is None or self.run.config.is_file()

    def _continuation(self) -> str:
        if not self._has_begun():
            return "start it again with the same command: the run had not begun."
        run = shlex.quote(shown(self.run.path))
        return f"continue with: bessemer launch local --resume {run} --processes {len(self.devices)}"

    def _discard_traces(self, ended: Ended) -> None:
        """Delete our folders of a run that never began: it was stopped, or process 0 has shown what was wrong."""
        if not self.run.exists() and (self.signals.received or set(ended.codes) == {InputError.exit_code}):
            for name in (LOGS, STARTS):
                discard(self.run.path / name)
            with contextlib.suppress(OSError):  # somebody's own files
                self.run.path.rmdir()

    def _say(self, text: str) -> None:
        self.say(runnable(text))


def _escalation() -> Callable[[float], Iterator[signal.Signals]]:
    """Return a function of the seconds since a process was lost that yields each signal that has become due, once."""
    due = [(NOTICE_SECONDS, signal.SIGTERM), (NOTICE_SECONDS + TERMINATE_SECONDS, signal.SIGKILL)]

    def signals(seconds: float) -> Iterator[signal.Signals]:
        while due and seconds >= due[0][0]:
            yield due.pop(0)[1]

    return signals


def _open_log(log: Path, truncate: bool) -> IO[bytes]:
    with storage("cannot write the log of a process"):
        log.parent.mkdir(parents=True, exist_ok=True)
        return open(log, "wb" if truncate else "ab")


class Starts:
    """Failed starts, counted as job files count them: RUN/starts has a file for each start that did not end in order.

    A start that is killed together with the launcher leaves its file behind; a new launch starts counting from 0.
    """

    def __init__(self, run: RunDirectory):
        self.folder = run.path / STARTS

    def begin(self, number: int) -> None:
        with storage(f"cannot write {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            if number == 0:
                for path in self.folder.glob("local.*"):
                    path.unlink()
            self._file(number).touch()

    def ended_in_order(self, number: int) -> None:
        self._file(number).unlink(missing_ok=True)

    def has(self, number: int) -> bool:
        return self._file(number).is_file()

    def failures(self, besides: int) -> int:
        return sum(path != self._file(besides) for path in self.folder.glob("local.*"))

    def _file(self, number: int) -> Path:
        return self.folder / f"local.{number}"


# From a command to a group

RENDEZVOUS = ("topology.coordinator", "topology.processes", "topology.process_id")


def local_group(
    recipe: str | None,
    overrides: Sequence[str],
    *,
    processes: int | None,
    name: str | None,
    root: str,
    resume: str | None,
    restarts: int,
    say: Callable[[str], None],
) -> Group:
    """Return the group that starts `recipe` as a new run, or continues the run `resume`, on this machine."""
    settings = dict(word.split("=", 1) for word in overrides)
    for key in RENDEZVOUS:
        if key in settings:
            raise InputError(f"{key} cannot be set here: `launch local` tells each process where its peers are.")
    if restarts < 0:
        raise InputError(f"--restarts must be at least 0; got {restarts}.")
    devices = device_environments(processes, os.environ, this_machine(), settings.get("topology.platform"))
    if resume is None:
        assert recipe is not None
        run = new_run(recipe, name, root, "bessemer launch local --resume")
        train = ["train", recipe, *overrides, "--name", run.name, "--runs", root]
        return Group(run, train, ["resume", str(run.path)], devices, restarts, say)
    if is_remote(resume):
        run, word = RunDirectory(Path(root) / check_run_name(resume.rstrip("/").rpartition("/")[2])), resume
    else:
        run = find_run(resume, root)
        RunLock.check_free(run)
        word = str(run.path)
    words = ["resume", word, *overrides, *_cleared(run), "--runs", root]
    return Group(run, None, words, devices, restarts, say)


def _cleared(run: RunDirectory) -> list[str]:
    """Return settings that clear the run's own rendezvous, if it was started by hand with one."""
    saved = read_yaml(run.config, "saved configuration").get("topology") if run.config.is_file() else None
    own = saved if isinstance(saved, dict) else {}
    return [f"{key}=null" for key in RENDEZVOUS if own.get(key.partition(".")[2]) is not None]
