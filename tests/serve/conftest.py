"""A tiny model behind a real socket of this machine, its engine's rounds under the test's control."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.tiny_run import random_params, tiny_model, tiny_tokenizer

from bessemer.generate import Engine, EngineThread, LoadedModel
from bessemer.serve.app import listen, make_server
from bessemer.serve.chat import template_of
from bessemer.serve.service import Service
from bessemer.training.setup.compiled import keep_compiled_programs

CONTEXT = 128
QUEUE = 64


def until(condition: Callable[[], Any], seconds: float = 300) -> None:
    """Wait for something another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


class Gate:
    """The engine's scope: open, or shut so that each round needs a permit."""

    def __init__(self) -> None:
        self.shut = self.permit = self.inside = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self.permit or not self.shut)
            self.permit, self.inside = False, True
        try:
            yield
        finally:
            self._set(inside=False)

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """From the end of the round that is in there on: it may be about to look at the queue."""
        self._set(shut=True, permit=False)
        with self._changed:
            assert self._changed.wait_for(lambda: not self.inside, 300)
        try:
            yield
        finally:
            self._set(shut=False)

    def allow(self) -> None:
        """The next round; permits that nobody has used yet do not add up."""
        self._set(permit=True)

    def _set(self, **states: bool) -> None:
        with self._changed:
            vars(self).update(states)
            self._changed.notify_all()


class Live:
    """A server of one service in a thread, and clients for it."""

    def __init__(self, service: Service, gate: Gate, grace: int = 10):
        self.service, self.engine, self.gate = service, service.engine, gate
        self.socket = listen("127.0.0.1", 0)
        self.port: int = self.socket.getsockname()[1]
        self.server = make_server(service, grace)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
        """(status, JSON, headers) of a raw request; `body` is sent as it is if it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.call("POST", path, data, {"Content-Type": "application/json", **(headers or {})})

    def call(self, method: str, path: str, data: bytes | None = None, headers: dict[str, str] | None = None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            text = response.read().decode()
            kind = response.headers.get_content_type()
            return response.status, json.loads(text) if kind == "application/json" else text, response.headers

    def __enter__(self) -> Live:
        self._thread.start()
        until(lambda: self.server.started)
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session", autouse=True)
def compiled(home: Path) -> None:
    """Programs of these tests are kept on disk for the session; the commands they start find them there too."""
    keep_compiled_programs(str(home))


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    model = tiny_model().clone(block_size=CONTEXT)
    return LoadedModel(model, random_params(model), tiny_tokenizer(), 20, {"objective": "pretrain"})


@pytest.fixture(scope="session")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="session")
def engine(loaded: LoadedModel, gate: Gate) -> Iterator[Engine]:
    engine = Engine.of(loaded, slots=4, queue=QUEUE, scope=gate)
    with EngineThread(engine):
        yield engine


def make_service(loaded: LoadedModel, engine: Engine, template: str = "auto", **options: Any) -> Service:
    return Service(engine, template_of(loaded, template), model="tiny", step=20, **options)


@pytest.fixture(scope="session")
def live(loaded: LoadedModel, engine: Engine, gate: Gate) -> Iterator[Live]:
    with Live(make_service(loaded, engine), gate) as server:
        yield server


@pytest.fixture(scope="session")
def impatient(loaded: LoadedModel, engine: Engine, gate: Gate) -> Iterator[Live]:
    """The same engine; requests may take a twentieth of a second."""
    with Live(make_service(loaded, engine, timeout=0.05), gate) as server:
        yield server
