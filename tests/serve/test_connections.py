"""Connections cannot be held open for nothing: headers have a time limit, and the number of connections is bounded."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from tests.processes import TIMEOUT
from tests.serve.conftest import until

from bessemer.serve import net
from bessemer.serve.net import listen, server_of

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Site:
    """A server whose `/wait` answers only after `go`."""

    def __init__(self, connections: int):
        self.go, self.waiting, self.long_answers = threading.Event(), 0, 0
        self.bound = listen("127.0.0.1", 0)
        self.server = server_of(
            Starlette(routes=[Route("/", self.home), Route("/wait", self.wait), Route("/long", self.long)]),
            1,
            connections,
        )

    def home(self, request: Request) -> Response:
        return PlainTextResponse("hello")

    def long(self, request: Request) -> Response:
        self.long_answers += 1
        return PlainTextResponse("x" * (32 << 20))

    def wait(self, request: Request) -> Response:
        self.waiting += 1
        self.go.wait(60)
        return PlainTextResponse("done")

    def connect(self, first: bytes = b"") -> socket.socket:
        made = socket.create_connection(self.bound.getsockname(), 60)
        made.sendall(first)
        return made

    @property
    def open(self) -> int:
        return len(self.server.server_state.connections)


@contextlib.contextmanager
def site(connections: int = 256) -> Iterator[Site]:
    made = Site(connections)
    thread = threading.Thread(target=made.server.run, kwargs={"sockets": [made.bound]}, daemon=True)
    thread.start()
    try:
        until(lambda: made.server.started)
        yield made
    finally:
        made.go.set()
        made.server.should_exit = True
        thread.join(60)
        made.bound.close()


def ended(connection: socket.socket) -> bool:
    """Read until the server closes."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_headers_that_never_end_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "HEADER_SECONDS", 0.05)
    with site() as made:
        silent, half = made.connect(), made.connect(b"GET / HTTP/1.1\r\nHost: local")
        assert ended(silent) and ended(half)
        until(lambda: made.open == 0)


def test_headers_of_a_second_request_are_cut_off_and_a_slow_answer_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "HEADER_SECONDS", 0.05)
    with site() as made:
        slow = made.connect(GET.replace(b"/ ", b"/wait ", 1))
        again = made.connect(GET)
        assert again.recv(4096).startswith(b"HTTP/1.1 200")
        again.sendall(b"GET / HTTP/1.1\r\n")
        assert ended(again)
        until(lambda: made.waiting == 1)
        made.go.set()
        assert slow.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with site() as made:
        patient = made.connect(GET.replace(b"/ ", b"/long ", 1))
        received = 0
        while received < 32 << 20:
            received += len(patient.recv(1 << 20))
        patient.close()
        monkeypatch.setattr(net, "READ_SECONDS", 0.05)
        silent = made.connect(GET.replace(b"/ ", b"/long ", 1))
        until(lambda: made.long_answers == 2 and made.open == 0)
        assert silent.fileno() >= 0, "this end is still open"


def test_a_new_connection_takes_the_place_of_the_one_that_waited_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "HEADER_SECONDS", TIMEOUT)  # on a busy machine the test itself takes seconds
    with site(connections=3) as made:
        held = []
        for number in range(3):
            held.append(made.connect(b"GET / HT"))
            until(lambda number=number: made.open == number + 1)
        new = made.connect(GET)
        assert new.recv(4096).startswith(b"HTTP/1.1 200") and ended(held[0])
        held[1].sendall(b"TP/1.1\r\nHost: localhost\r\n\r\n")
        assert held[1].recv(4096).startswith(b"HTTP/1.1 200"), "the others go on"


def test_a_connection_beyond_the_limit_is_refused_while_all_others_are_answered() -> None:
    with site(connections=2) as made:
        busy = [made.connect(GET.replace(b"/ ", b"/wait ", 1)) for _ in range(2)]
        until(lambda: made.waiting == 2)
        refused = made.connect(GET)
        assert refused.recv(4096).startswith(b"HTTP/1.1 503") and ended(refused)
        made.go.set()
        assert all(one.recv(4096).startswith(b"HTTP/1.1 200") for one in busy)
