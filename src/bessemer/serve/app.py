"""`bessemer serve`: the server and its endpoints, /v1/chat/completions and /v1/completions above all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from bessemer.console import markdown_table
from bessemer.data.tokenize.templates import stop_rendering
from bessemer.errors import BessemerError, InputError
from bessemer.generate import Engine, EngineThread, LoadedModel, QueueFull, SamplingOptions, Speculation
from bessemer.generate import Request as Generation
from bessemer.generate.adapters import Served
from bessemer.report.pages import page, to_html
from bessemer.serve.chat import PREPARING, template_of
from bessemer.serve.net import (
    BACKLOG,
    CONNECTIONS,
    GRACE,
    TOKEN_VARIABLE,
    ApiError,
    Server,
    address_of,
    check_port,
    is_loopback,
    listen,
    read_body,
    refuse_other_names,
    refuse_without_token,
    server_of,
    wrong,
)
from bessemer.serve.requests import Ask, parse
from bessemer.serve.service import Entry, Reply, Service

LAST_SECONDS = 5  # beyond the request's time, for a slow client to read the rest
OPEN = ("/", "/health")  # without a token: usage, and what supervisors of servers ask

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


def make_app(service: Service) -> Starlette:
    """Return the application of one model."""

    async def chat(request: Request) -> Response:
        return await generation(service, request, chat=True)

    async def completions(request: Request) -> Response:
        return await generation(service, request, chat=False)

    async def models(request: Request) -> Response:
        known = [{"id": one, "object": "model", "created": 0, "owned_by": "bessemer"} for one in service.entries]
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": known})
        if name not in service.entries:
            raise service.unknown_model(name)
        return JSONResponse(next(one for one in known if one["id"] == name))

    async def health(request: Request) -> Response:
        state = "ok" if service.failure is None else "the engine failed on its last request"
        document = {"status": state, "model": service.model, "step": service.step}
        return JSONResponse(document, 200 if service.failure is None else 503)

    async def usage(request: Request) -> Response:
        known = service.token is None  # the page is public, the model's name is not
        return usage_page(request, service.model if known else None, service.step if known else None)

    async def metrics(request: Request) -> Response:
        text = service.metrics.render(service.engine)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def route(path: str, endpoint: Endpoint, method: str = "GET") -> Route:
        return Route(path, _guarded(service, path, endpoint), methods=[method])

    routes = [
        route("/", usage),
        route("/v1/chat/completions", chat, "POST"),
        route("/v1/completions", completions, "POST"),
        route("/v1/models", models),
        route("/v1/models/{name:path}", models),
        route("/health", health),
        route("/metrics", metrics),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _plain_error, Exception: _bug})


def _guarded(service: Service, path: str, endpoint: Endpoint) -> Endpoint:
    """Return the endpoint behind the token, with errors as JSON and every response counted."""

    async def call(request: Request) -> Response:
        try:
            admit(service, request)
            response = await endpoint(request)
        except ApiError as error:
            response = error.response()
        except QueueFull as error:
            response = ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"}).response()
        except BessemerError as error:  # refused by the engine or the template
            response = wrong(None, str(error)).response()
        except ClientDisconnect:
            service.metrics.gone += 1
            response = Response(status_code=499)  # nobody reads it
        service.metrics.requests[path, response.status_code] += 1
        return response

    return call


def admit(service: Service, request: Request) -> None:
    """Raise ApiError without the token; if none is set, unless the request names this machine."""
    if service.token is None:
        refuse_other_names(request)
    elif request.url.path not in OPEN:
        refuse_without_token(request, service.token)


async def generation(service: Service, request: Request, chat: bool) -> Response:
    """Answer both generating endpoints, as one document or a stream of server-sent events."""
    tree = parse(await read_body(request, service.body_limit))
    try:
        ask = await service.ask(tree, chat)
    except TimeoutError:
        raise _late(service) from None
    reply = service.reply(ask, chat)
    if not ask.options.stream:
        return await or_disconnect(request.receive, _whole(service, ask, reply))
    pieces = _pieces(service, ask, reply)
    first = await anext(pieces)  # so that a full queue or a refused prompt has its own status
    return EventStream(service, first, pieces)


async def _whole(service: Service, ask: Ask, reply: Reply) -> Response:
    with service.submitted(ask) as handles:
        try:
            async for index, event in service.events(handles, ask.options.n):
                reply.add(index, event)
        except TimeoutError:
            raise _late(service) from None
    if any(choice.finish == "cancelled" for choice in reply.choices):
        raise _going_down()
    return JSONResponse(reply.document(sum(map(len, ask.prompts)), ask.options.logprobs))


def _going_down() -> ApiError:
    return ApiError(503, "the server is shutting down.", code="shutdown")


def _late(service: Service) -> ApiError:
    service.metrics.late += 1
    message = f"the answer was not complete within {service.timeout:g} seconds and was dropped."
    return ApiError(504, message, code="timeout")


async def _pieces(service: Service, ask: Ask, reply: Reply) -> AsyncIterator[str]:
    """Yield the answer as server-sent events. The first piece comes once the request is in the queue."""
    options = ask.options
    with service.submitted(ask) as handles:
        yield "".join(_sse(reply.chunk([choice])) for choice in reply.opening())
        try:
            async for index, event in service.events(handles, options.n):
                new = reply.add(index, event)
                if event.finish == "cancelled":
                    raise _going_down()
                if new.finish or "".join(new.text) or new.logprobs:
                    yield _sse(reply.chunk([reply.delta(new, options.logprobs)]))
        except (TimeoutError, ApiError) as error:
            yield _sse((error if isinstance(error, ApiError) else _late(service)).document())
            return
    if options.usage:
        yield _sse(reply.chunk([], reply.usage(sum(map(len, ask.prompts)))))
    yield "data: [DONE]\n\n"


def _sse(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"


class EventStream(Response):
    """Sends pieces as they come. If the client disconnects or does not read, closing the generator frees its slots."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, first: str, pieces: AsyncIterator[str]):
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self.service, self.first, self.pieces = service, first, pieces

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            async with asyncio.timeout(self.service.timeout + LAST_SECONDS):
                await or_disconnect(receive, self._send(send))
        except (ClientDisconnect, TimeoutError, OSError):
            self.service.metrics.gone += 1
        finally:
            await self.pieces.aclose()  # type: ignore[attr-defined]

    async def _send(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.first.encode(), "more_body": True})
        async for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def or_disconnect(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, Any]) -> Any:
    """Return the work's result. If the client disconnects first, cancel the work and raise ClientDisconnect."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _plain_error(request: Request, error: Exception) -> Response:
    """Answer 404 and 405 in the protocol's format."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:100]}: {error.detail}."
    if error.status_code == 404:
        message += (
            " The endpoints are /v1/chat/completions and /v1/completions, see GET /. For a web page: bessemer dash"
        )
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _bug(request: Request, error: Exception) -> Response:
    """Answer a bug; its traceback is in the server's own output."""
    return ApiError(500, "internal error; the server's log has the traceback.").response()


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens and how much it takes at once."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    slots: int = 16
    queue: int = 256
    timeout: float = 300.0
    template: str = "auto"
    speculate: Speculation | None = None

    def __post_init__(self) -> None:
        check_port(self.port)
        for name, value in (("slots", self.slots), ("queue", self.queue)):
            if value < 1:
                raise InputError(f"--{name} must be at least 1; got {value}.")
        if self.timeout <= 0:
            raise InputError(f"--timeout must be above 0; got {self.timeout:g}.")
        if self.token is None and not is_loopback(self.host):
            raise InputError(
                f"--host {self.host} is open to other machines, so it needs a token: set {TOKEN_VARIABLE} or pass "
                "--token-file FILE. Without one, serve on 127.0.0.1 only."
            )


def make_server(service: Service, grace: int = GRACE) -> Server:
    """Return a server; `run(sockets=[…])` it. A request waiting in the queue keeps its connection open."""
    rows = service.engine.slots + (service.engine.queue or 0)
    return server_of(make_app(service), grace, CONNECTIONS + rows)


def warm_up(engine: Engine) -> None:
    """Compile what prompts of all lengths need, and answer one, to fail before the first client."""
    assert engine.tokenizer is not None
    engine.prepare()
    engine.generate([Generation([engine.tokenizer.bos_id], 1, SamplingOptions(temperature=1.0))])


def entries_of(served: Sequence[Served], template: str) -> dict[str, Entry]:
    """Return the names of several adapters over one base, each with its own template."""
    return {one.name: Entry(template_of(one.about, template), one.about.step, one.adapter) for one in served}


def serve(
    load: Callable[[], tuple[LoadedModel, Sequence[Served]]], options: ServerOptions, say: Callable[[str], None]
) -> None:
    """Serve a model until SIGTERM or Ctrl-C; `say` prints lines. load: returns it, and all names of one that holds
    several adapters."""
    with contextlib.closing(listen(options.host, options.port)) as bound:
        loaded, served = load()
        template = template_of(loaded, options.template)
        name = loaded.run.name if loaded.run else "model"
        others = entries_of(served, options.template)
        own = others.pop(name, Entry(template, loaded.step))
        limits: dict[str, Any] = {"slots": options.slots, "queue": options.queue, "reuse": True}
        engine = Engine.of(loaded, **limits, speculate=options.speculate, seed=secrets.randbits(32))
        service = Service(
            engine,
            template,
            model=name,
            step=loaded.step,
            adapter=own.adapter,
            others=others,
            timeout=options.timeout,
            token=options.token,
        )
        say(PREPARING)
        warm_up(engine)
        bound.listen(BACKLOG)  # clients that connect after the line below wait instead of being refused
        guard = "a token is required" if options.token else "this machine only"
        names = f"{service.model}, step {service.step}," + f" and {', '.join(others)}," * bool(others)
        say(f"serving {names} at http://{address_of(bound)}/v1 ({guard}; conversations: {template.name}; Ctrl-C stops)")
        with EngineThread(engine):
            make_server(service).run(sockets=[bound])
        service.renders.shutdown(wait=False, cancel_futures=True)
        stop_rendering()
        say("stopped.")


# `GET /`: how to use this server, as HTML for browsers and as Markdown for everyone else


USAGE = """\
# {title}

{about}

## Try it

```
curl {address}/chat/completions -H 'Content-Type: application/json'{header} \\
  -d '{{"messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 50}}'
```

## From Python

```
from openai import OpenAI

client = OpenAI(base_url="{address}", api_key="{key}")
messages = [{{"role": "user", "content": "Hello"}}]
for chunk in client.chat.completions.create(model="{model}", messages=messages, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
```

## Endpoints

{endpoints}

To chat in a browser, run `bessemer dash`.
"""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
}
ENDPOINTS = (
    ("POST /v1/chat/completions", "messages in, an answer out; stream, n, logprobs, penalties, tools"),
    ("POST /v1/completions", "a text to continue"),
    ("GET /v1/models", "the served models"),
    ("GET /health", "200 while it works, 503 after a failure"),
    ("GET /metrics", "counters for Prometheus"),
)


def usage_page(request: Request, model: str | None, step: int | None) -> Response:
    """Return how to use the server, as HTML or Markdown. `model` is None if only clients with the token may know it."""
    address = f"{str(request.base_url).rstrip('/')}/v1"
    title, need, header, key = f"{model}, step {step}", "", "", "none"
    if model is None:
        title, key = "Bessemer server", "TOKEN"
        need = " Requests need a token: Authorization: Bearer TOKEN."
        header = ' -H "Authorization: Bearer $BESSEMER_API_TOKEN"'
    text = USAGE.format(
        title=title,
        about=f"This server speaks OpenAI's protocol at {address}.{need}",
        address=address,
        header=header,
        key=key,
        model=model or "MODEL",
        endpoints="\n".join(markdown_table(("endpoint", "what it does"), ENDPOINTS)),
    )
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(page(f"{title} · Bessemer", to_html(text)), headers=HEADERS)
    return PlainTextResponse(text, headers=HEADERS)
