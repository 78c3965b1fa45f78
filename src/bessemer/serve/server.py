"""`bessemer serve`: the socket, the engine's thread, and a stop that lets answers finish."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from bessemer.data.tokenize.templates import stop_rendering
from bessemer.errors import InputError
from bessemer.generate import Engine, EngineThread, LoadedModel, Request, SamplingOptions
from bessemer.serve.app import make_app
from bessemer.serve.conversation import PREPARING, template_of
from bessemer.serve.net import (
    BACKLOG,
    CONNECTIONS,
    GRACE,
    TOKEN_VARIABLE,
    Server,
    address_of,
    check_port,
    is_loopback,
    listen,
    server_of,
)
from bessemer.serve.service import Service


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
        check_port(self.port)
        for holds, problem in (
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


def make_server(service: Service, grace: int = GRACE) -> Server:
    """A server of the service; `run(sockets=[…])` it. Whoever waits in the queue keeps a connection open."""
    rows = service.engine.slots + (service.engine.queue or 0)
    return server_of(make_app(service), grace, CONNECTIONS + rows)


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
        say(PREPARING)
        warm_up(engine)
        bound.listen(BACKLOG)  # whoever comes after the line below waits in the queue, and is not refused
        where = address_of(bound)
        guard = "a token is required" if options.token else "this machine only"
        say(
            f"serving {service.model}, step {service.step}, at http://{where}/v1 ({guard}; conversations: "
            f"{template.name}; Ctrl-C stops)"
        )
        with EngineThread(engine):
            make_server(service).run(sockets=[bound])
        service.renders.shutdown(wait=False, cancel_futures=True)
        stop_rendering()
        say("stopped.")
