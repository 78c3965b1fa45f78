"""Processes that the page starts or stops: runs that are resumed, and models behind `bessemer serve` for the chat."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.dash.files import Folder
from bessemer.dash.runs import short
from bessemer.errors import InputError, Stopped
from bessemer.job import RunDirectory, RunLock
from bessemer.job.process import module_command, module_environment
from bessemer.serve.net import TOKEN_VARIABLE, ApiError

MODELS = 2  # loaded at once; one more replaces the least recently used
START_SECONDS = 300  # for loading and compiling a large model
ANSWER_SECONDS = 300
_ADDRESS = re.compile(r"at http://127\.0\.0\.1:(\d+)/v1 ")


@dataclass
class Resumed:
    """A resumed run; its process outlives the page's server."""

    process: subprocess.Popen[bytes]
    output: Path
    begun: float = field(default_factory=time.time)

    def document(self) -> dict[str, Any]:
        code = self.process.poll()
        try:
            said = self.output.read_bytes()[-2000:].decode("utf-8", errors="replace")
        except OSError:
            said = ""
        failed = code not in (None, 0, Stopped.exit_code)  # a stopped run has saved
        return {"pid": self.process.pid, "exit_code": code, "failed": failed, "said": said.strip(), "begun": self.begun}


class Actions:
    """Stop and resume; `logs` is the folder for the output of resumed runs."""

    def __init__(self, folder: Folder, logs: Path):
        self.folder, self.logs = folder, logs
        self._resumed: dict[str, Resumed] = {}
        self._lock = threading.Lock()

    def stop(self, name: str) -> dict[str, Any]:
        """Send SIGTERM to the run, which stops after its step with a checkpoint."""
        pid = self._owner(self.folder.run(name))
        try:
            os.kill(pid, signal.SIGTERM)
        except OSError as error:
            raise InputError(f"pid {pid} cannot be stopped ({error.strerror}).") from error
        return {"pid": pid, "message": f"SIGTERM sent to pid {pid}: it stops after its step and saves."}

    def _owner(self, run: RunDirectory) -> int:
        """Return the process on this host that really has the run's lock file open; a file may claim anything."""
        owner = self._holder(run)
        if owner is None:
            raise InputError(f"no process is running in '{run.name}'.")
        if owner.get("host") != socket.gethostname():
            raise InputError(f"'{run.name}' runs on host {short(owner.get('host'), 100)}; stop it there.")
        pid = owner.get("pid")
        if not isinstance(pid, int) or pid <= 1 or not _has_open(pid, run.lock):
            raise InputError(f"the process that trains '{run.name}' cannot be identified. Stop it in its terminal.")
        return pid

    def _holder(self, run: RunDirectory) -> dict[str, Any] | None:
        """Return the holder that the lock file names; None if the file makes no sense."""
        try:
            return RunLock.owner(run) if self.folder.signature(run.lock) else None
        except (ValueError, TypeError, OverflowError):
            return None

    def resume(self, name: str) -> dict[str, Any]:
        """Start `bessemer resume`. It does not import code that a foreign configuration names."""
        run = self.folder.run(name)
        if "/" in name:
            raise InputError("a phase is resumed with the run it belongs to; resume that run.")
        with self._lock:
            before = self._resumed.get(name)
            if before is not None and before.process.poll() is None:
                raise InputError(f"'{name}' is being resumed by pid {before.process.pid}.")
            if (owner := self._holder(run)) is not None:
                who = f"pid {short(owner.get('pid'), 20)} on host {short(owner.get('host'), 100)}"
                raise InputError(f"'{name}' is in use by {who}; it cannot be resumed now.")
            self.logs.mkdir(parents=True, exist_ok=True)
            output = self._log_of(run)
            with open(output, "wb") as file:
                process = subprocess.Popen(
                    module_command("bessemer", "resume", str(run.path), "logging.progress=none"),
                    env=module_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._resumed[name] = Resumed(process, output)
            return self._resumed[name].document()

    def _log_of(self, run: RunDirectory) -> Path:
        """Return the file for a resumed run's output, named by its whole path: run names repeat across directories."""
        return self.logs / f"{run.name}-{hashlib.sha256(bytes(run.path)).hexdigest()[:16]}.txt"

    def known(self, name: str) -> dict[str, Any] | None:
        """Return how the last resume from here went."""
        found = self._resumed.get(name)
        return None if found is None else found.document()


def _has_open(pid: int, path: Path) -> bool:
    """Return whether a process has this file open."""
    wanted = os.stat(path)
    try:
        handles = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for handle in handles:
        try:
            found = os.stat(f"/proc/{pid}/fd/{handle}")
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False


class Model:
    """One checkpoint behind a `bessemer serve` process on 127.0.0.1; `ready` waits for it."""

    def __init__(self, path: str, step: int | None, platform: str | None):
        self.token = secrets.token_urlsafe(24)
        self.users = 0
        self.port: int | None = None
        self._said: deque[str] = deque(maxlen=20)
        self._news = threading.Event()
        words = module_command("bessemer.job.process", "serve", path, "--port", "0", "--slots", "4")
        words += ["--queue", "16", "--timeout", str(ANSWER_SECONDS)]
        words += [] if step is None else ["--step", str(step)]
        variables = module_environment(XLA_PYTHON_CLIENT_PREALLOCATE="false")
        variables[TOKEN_VARIABLE] = self.token  # other users can read command lines, not environments
        if platform is not None:
            variables["JAX_PLATFORMS"] = platform
        self.process = subprocess.Popen(
            words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        threading.Thread(target=self._listen, name="bessemer-dash-chat", daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.decode("utf-8", errors="replace").rstrip()
            self._said.append(line)
            if found := _ADDRESS.search(line):
                self.port = int(found.group(1))
                self._news.set()
        self._news.set()

    def ready(self) -> int:
        """Return the port. Raise ApiError with the last output if the process ended or takes too long."""
        self._news.wait(START_SECONDS)
        if self.port is None or self.process.poll() is not None:
            words = " ".join(self._said)[-1000:] or f"it was not ready after {START_SECONDS} seconds."
            raise ApiError(502, f"the model could not be loaded: {words}", code="model")
        return self.port

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Close its standard input, on which it stops itself; kill it if it does not."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Models:
    """The loaded models, by (run, step). `platform`: JAX's platform, if it should not choose."""

    def __init__(self, folder: Folder, most: int = MODELS, platform: str | None = None):
        self.folder, self.most, self.platform = folder, most, platform
        self._known: OrderedDict[tuple[str, int | None], Model] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def use(self, name: str, step: int | None) -> Iterator[Model]:
        """Yield the model, loaded if need be; it stays loaded during the block."""
        run, key, leaving = self.folder.run(name), (name, step), []
        with self._lock:
            model = self._known.get(key)
            if model is None or not model.alive:
                self._known.pop(key, None)
                leaving = self._make_room()
                model = self._known[key] = Model(str(run.path), step, self.platform)
            self._known.move_to_end(key)
            model.users += 1
        for other in leaving:
            other.end()
        try:
            yield model
        finally:
            with self._lock:
                model.users -= 1

    def _make_room(self) -> list[Model]:
        leaving = []
        while len(self._known) >= self.most:
            idle = next((key for key, model in self._known.items() if model.users == 0), None)
            if idle is None:
                message = f"{self.most} models are answering already. Wait until one is done."
                raise ApiError(429, message, code="models", headers={"Retry-After": "5"})
            leaving.append(self._known.pop(idle))
        return leaving

    def states(self) -> list[dict[str, Any]]:
        with self._lock:
            return [
                {"run": name, "step": step, "ready": model.port is not None and model.alive}
                for (name, step), model in self._known.items()
            ]

    def close(self) -> None:
        with self._lock:
            models, self._known = list(self._known.values()), OrderedDict()
        for model in models:
            model.end()

    def answer(self, name: str, step: int | None, body: dict[str, Any]) -> Iterator[bytes]:
        """Yield the server-sent events of an answer; an error is one event."""
        try:
            with self.use(name, step) as model:
                yield b": loading\n\n"
                yield from _stream(model.ready(), model.token, body)
        except (ApiError, OSError, http.client.HTTPException) as error:
            if not isinstance(error, ApiError):
                error = ApiError(502, f"the model's server did not answer ({type(error).__name__}).", code="model")
            yield f"data: {json.dumps(error.document())}\n\n".encode()


def _stream(port: int, token: str, body: dict[str, Any]) -> Iterator[bytes]:
    deadline = time.monotonic() + ANSWER_SECONDS
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), headers)
        response = connection.getresponse()
        if response.status != 200:
            yield b"data: " + response.read(1 << 20).replace(b"\n", b" ") + b"\n\n"
            return
        while time.monotonic() < deadline and (line := response.readline(1 << 20)):
            yield line
