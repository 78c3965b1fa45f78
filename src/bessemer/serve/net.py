"""What the servers share: errors, sockets, tokens, allowed host names, request bodies, time limits, shutdown.

Nothing here needs a model, so `bessemer dash` starts without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import logging
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.errors import InputError, to_install

try:
    import h11
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    raise InputError(f"the server needs {error.name}, which is not installed: {to_install('dash')}") from error

if TYPE_CHECKING:
    from starlette.applications import Starlette

TOKEN_VARIABLE = "BESSEMER_API_TOKEN"
GRACE = 10  # seconds for open responses after SIGTERM or Ctrl-C
BACKLOG = 1024
HEADER_SECONDS = 10  # for a request's headers to arrive, from the connection or the first byte after a reply
BODY_SECONDS = 30  # for a body to arrive
READ_SECONDS = 60  # for a client to read anything of what waits for it
CONNECTIONS = 256  # open at once
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
"""The reply to a connection beyond the limit, if every other one has a request in progress."""

Headers = Mapping[str, str] | None


class ApiError(Exception):
    """An error response, as OpenAI's clients read it: {"error": {message, type, param, code}}."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Headers = None
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def document(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.document(), self.status, self.headers)


def wrong(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Return status 400 for a field of the body."""
    return ApiError(400, message, param=param, code=code)


def read_token(file: str | None, variable: str | None) -> str | None:
    """Return the token of a file or an environment variable; every user of the machine can read command lines."""
    token = variable or None
    if file is not None:
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"the token file {file} cannot be read ({error}).") from error
        if not token:
            raise InputError(f"the token file {file} is empty.")
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise InputError("a token must be one word of printable ASCII characters.")
    return token


def has_token(request: Request, token: str) -> bool:
    """Return whether the request has the header Authorization: Bearer TOKEN; compared in constant time."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), token.encode())
    return kind.lower() == "bearer" and right


def refuse_without_token(request: Request, token: str) -> None:
    if not has_token(request, token):
        message = "a token is needed: send the header Authorization: Bearer TOKEN."
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def refuse_other_names(request: Request) -> None:
    """Raise ApiError unless the request names this machine: another site could point its own name here."""
    if not is_loopback(host_name(request.headers.get("host", ""))):
        raise ApiError(421, "without a token this server answers to localhost and 127.0.0.1 only.")


def host_name(header: str) -> str:
    """Return a Host header without its port."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body. Raise ApiError if it is longer than `limit` bytes or does not arrive in time."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json":
        raise ApiError(415, "send JSON with the header Content-Type: application/json.")
    too_long = ApiError(413, f"the body is longer than {limit} bytes.", code="body_too_long")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_long
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                data += piece
                if len(data) > limit:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS} seconds.") from None
    return bytes(data)


def check_port(port: int) -> None:
    if not 0 <= port < 2**16:
        raise InputError(f"--port must be between 0 (any free one) and 65535; got {port}.")


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket, before anything is loaded: a port in use is an error at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port} ({error.strerror or error}). Choose another --port (0 picks a free one)."
        ) from error
    return bound


def address_of(bound: socket.socket) -> str:
    """Return host:port, as a browser takes it."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Connection(H11Protocol):
    """A connection that is closed if headers do not arrive in time or the client does not read its response.

    Beyond `most` connections, the one that has been idle longest is closed for a new one.
    """

    def __init__(self, *arguments: Any, most: int = CONNECTIONS, **options: Any):
        super().__init__(*arguments, **options)
        self.most = most
        self._header_timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0

    @property
    def idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._watch_headers()
        if len(self.connections) > self.most:
            others = (one for one in self.connections if isinstance(one, Connection) and one is not self and one.idle)
            oldest = min(others, key=lambda one: one._idle_since, default=None)
            if oldest is not None:
                oldest._drop()
            else:
                transport.write(FULL)
                transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_timer = self.loop.call_later(READ_SECONDS, self._drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_headers()
        self._cancel_reading()
        super().connection_lost(exc)

    def _watch_headers(self) -> None:
        """Time the headers while they are incomplete; uvicorn times idle keep-alive connections."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._cancel_headers()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._drop)

    def _cancel_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cancel_reading(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _drop(self) -> None:
        self._cancel_headers()
        self._cancel_reading()
        self.connections.discard(self)
        self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server, except that it does not raise a handled signal again: the exit code is 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        previous: dict[Any, Any] = {}
        with contextlib.suppress(ValueError):  # not the main thread, whose caller sets should_exit
            for number in (signal.SIGINT, signal.SIGTERM):
                previous[number] = signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def server_of(app: Starlette, grace: int = GRACE, connections: int = CONNECTIONS) -> Server:
    """Return a server of the application; `run(sockets=[…])` it."""
    config = uvicorn.Config(
        app,
        http=functools.partial(Connection, most=connections),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=grace,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return Server(config)
