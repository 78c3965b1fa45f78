"""`bessemer serve`: the socket, the engine's thread, and a stop that lets answers finish."""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.generate import Engine, EngineThread, LoadedModel, Request, SamplingOptions
from bessemer.serve.conversation import template_of
from bessemer.serve.service import Service

try:
    import uvicorn

    from bessemer.serve.app import is_loopback, make_app
except ModuleNotFoundError as error:
    raise InputError(
        f"the server needs {error.name}, which is not installed: pip install 'bessemer[dash]'."
    ) from error

TOKEN_VARIABLE = "BESSEMER_API_TOKEN"
GRACE = 10  # seconds for open answers after SIGTERM or Ctrl-C
BACKLOG = 1024


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens and what it takes at once."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    slots: int = 16
    queue: int = 256
    timeout: float = 300.0
    template: str = "auto"

    def __post_init__(self) -> None:
        for holds, problem in (
            (0 <= self.port < 2**16, f"--port is between 0 (any that is free) and 65535; got {self.port}"),
            (self.slots >= 1, f"--slots is at least 1; got {self.slots}"),
            (self.queue >= 1, f"--queue is at least 1; got {self.queue}"),
            (self.timeout > 0, f"--timeout is above 0; got {self.timeout:g}"),
        ):
            if not holds:
                raise InputError(f"{problem}.")
        if self.token is None and not is_loopback(self.host):
            raise InputError(
                f"--host {self.host} lets other machines in, so it needs a token: set {TOKEN_VARIABLE} or give "
                "--token-file FILE. Without one, serve on 127.0.0.1 only."
            )


def read_token(file: str | None, variable: str | None) -> str | None:
    """The token of a file, or of the environment; never of the command line, which everyone on a machine sees."""
    token = variable or None
    if file is not None:
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"the token file {file} cannot be read ({error}).") from error
        if not token:
            raise InputError(f"the token file {file} is empty.")
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise InputError("a token is one word of printable ASCII characters.")
    return token


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; who else uses the port is found out before the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port} ({error.strerror or error}). Choose another --port (0 takes any that "
            "is free)."
        ) from error
    return bound


class Server(uvicorn.Server):
    """uvicorn's server, except that a signal that was obeyed is not raised again: the exit code is 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        previous: dict[Any, Any] = {}
        with contextlib.suppress(ValueError):  # not the main thread: whoever runs us there sets should_exit
            for number in (signal.SIGINT, signal.SIGTERM):
                previous[number] = signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def make_server(service: Service, grace: int = GRACE) -> Server:
    """A server of the service; `run(sockets=[…])` it."""
    config = uvicorn.Config(
        make_app(service),
        http="h11",
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


def warm_up(engine: Engine) -> None:
    """Compile the programs of a short prompt, drawn as the protocol's default is: what cannot run is found out before
    the first client."""
    assert engine.tokenizer is not None
    engine.generate([Request([engine.tokenizer.bos_id], 1, SamplingOptions(temperature=1.0))])


def serve(load: Callable[[], LoadedModel], options: ServerOptions, say: Callable[[str], None]) -> None:
    """Serve a model until SIGTERM or Ctrl-C; `say` gets the lines to show."""
    bound = listen(options.host, options.port)
    with contextlib.closing(bound):
        loaded = load()
        template = template_of(loaded, options.template)
        engine = Engine.of(loaded, slots=options.slots, queue=options.queue, seed=secrets.randbits(32))
        service = Service(
            engine,
            template,
            model=loaded.run.name if loaded.run else "model",
            step=loaded.step,
            timeout=options.timeout,
            token=options.token,
        )
        warm_up(engine)
        bound.listen(BACKLOG)  # whoever comes after the line below waits in the queue, and is not refused
        host, port = bound.getsockname()[:2]
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        guard = "a token is required" if options.token else "this machine only"
        say(
            f"serving {service.model}, step {service.step}, at http://{where}/v1 ({guard}; conversations: "
            f"{template.name}; Ctrl-C stops)"
        )
        with EngineThread(engine):
            make_server(service).run(sockets=[bound])
        say("stopped.")
