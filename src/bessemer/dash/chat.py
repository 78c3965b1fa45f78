"""A word with any checkpoint: `bessemer serve` processes of our own on 127.0.0.1, few at once, ended with the page."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import secrets
import subprocess
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

from bessemer.dash.files import Folder
from bessemer.job.process import module_command, module_environment
from bessemer.serve.errors import ApiError
from bessemer.serve.net import TOKEN_VARIABLE

MODELS = 2  # loaded at once; one more takes the place of the one used least lately
START_SECONDS = 300  # loading and compiling a large model
ANSWER_SECONDS = 300
_ADDRESS = re.compile(r"at http://127\.0\.0\.1:(\d+)/v1 ")


class Model:
    """One checkpoint behind a server process; `ready` waits for it."""

    def __init__(self, path: str, step: int | None, platform: str | None):
        self.token = secrets.token_urlsafe(24)
        self.users = 0
        self.port: int | None = None
        self._said: deque[str] = deque(maxlen=20)
        self._news = threading.Event()
        words = module_command("bessemer.dash.child", "serve", path, "--port", "0", "--slots", "4")
        words += ["--queue", "16", "--timeout", str(ANSWER_SECONDS)]
        words += [] if step is None else ["--step", str(step)]
        variables = module_environment(XLA_PYTHON_CLIENT_PREALLOCATE="false")
        variables[TOKEN_VARIABLE] = self.token  # other users see command lines, not environments
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
        """The port; an error with the process's last words when it ended, or takes too long."""
        self._news.wait(START_SECONDS)
        if self.port is None or self.process.poll() is not None:
            words = " ".join(self._said)[-1000:] or f"it was not ready after {START_SECONDS} seconds."
            raise ApiError(502, f"the model could not be loaded: {words}", code="model")
        return self.port

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Close its standard input, on which it stops by itself; a deaf one is killed."""
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
    """The models that are loaded, by (run, step). `platform`: JAX's, where it is not to choose by itself."""

    def __init__(self, folder: Folder, most: int = MODELS, platform: str | None = None):
        self.folder, self.most, self.platform = folder, most, platform
        self._known: OrderedDict[tuple[str, int | None], Model] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def use(self, name: str, step: int | None) -> Iterator[Model]:
        """The model, loaded if need be; it is not taken away while the block lasts."""
        run, key, leaving = self.folder.run(name), (name, step), []
        with self._lock:
            model = self._known.get(key)
            if model is not None and not model.alive:
                del self._known[key]
                model = None
            if model is None:
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
                message = f"{self.most} models are answering already; wait until one is done."
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
        """The server-sent events of an answer; its errors as one event, as the server itself does."""
        try:
            with self.use(name, step) as model:
                yield b": loading\n\n"
                yield from _stream(model.ready(), model.token, body)
        except ApiError as error:
            yield f"data: {json.dumps(error.document())}\n\n".encode()
        except (OSError, http.client.HTTPException) as error:
            late = ApiError(502, f"the model's server did not answer ({type(error).__name__}).", code="model")
            yield f"data: {json.dumps(late.document())}\n\n".encode()


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
