"""The endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, and / for people."""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from bessemer.errors import BessemerError
from bessemer.serve.errors import ApiError, refusal
from bessemer.serve.net import read_body, refuse_other_names, refuse_without_token
from bessemer.serve.replies import Reply
from bessemer.serve.requests import Ask, parse
from bessemer.serve.service import Service

LAST_SECONDS = 5  # beyond the request's time, for a slow reader to take what is there
OPEN = ("/", "/health")  # no token: how to use the server, and what whoever restarts servers asks

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


def make_app(service: Service) -> Starlette:
    """The application of one model."""

    async def chat(request: Request) -> Response:
        return await generation(service, request, chat=True)

    async def completions(request: Request) -> Response:
        return await generation(service, request, chat=False)

    async def models(request: Request) -> Response:
        entry = {"id": service.model, "object": "model", "created": 0, "owned_by": "bessemer"}
        name = request.path_params.get("name")
        if name not in (None, service.model):
            message = f"the model '{name[:100]}' is not served here; '{service.model}' is."
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(entry if name else {"object": "list", "data": [entry]})

    async def health(request: Request) -> Response:
        state = "ok" if service.failure is None else "the engine failed at its last request"
        document = {"status": state, "model": service.model, "step": service.step}
        return JSONResponse(document, 200 if service.failure is None else 503)

    async def usage(request: Request) -> Response:
        known = service.token is None  # the page is open to all, the model's name is not
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
    return Starlette(
        routes=routes,
        exception_handlers={HTTPException: _plain_error, Exception: _bug},
    )


def _guarded(service: Service, path: str, endpoint: Endpoint) -> Endpoint:
    """The endpoint behind the token, its errors as JSON, every answer counted."""

    async def call(request: Request) -> Response:
        try:
            admit(service, request)
            response = await endpoint(request)
        except (ApiError, BessemerError) as error:
            said = error if isinstance(error, ApiError) else refusal(error)
            response = JSONResponse(said.document(), said.status, said.headers)
        except ClientDisconnect:
            service.metrics.gone += 1
            response = Response(status_code=499)  # nobody reads it
        service.metrics.requests[path, response.status_code] += 1
        return response

    return call


def admit(service: Service, request: Request) -> None:
    """The token where one is set; without one only names of this machine are answered."""
    if service.token is None:
        refuse_other_names(request)
    elif request.url.path not in OPEN:
        refuse_without_token(request, service.token)


async def generation(service: Service, request: Request, chat: bool) -> Response:
    """Both generating endpoints: whole, or as a stream of server-sent events."""
    tree = parse(await read_body(request, service.body_limit))
    try:
        ask = await service.ask(tree, chat)
    except TimeoutError:
        raise _late(service) from None
    reply = service.reply(ask, chat)
    if not ask.options.stream:
        return await or_disconnect(request.receive, _whole(service, ask, reply))
    pieces = _pieces(service, ask, reply)
    first = await anext(
        pieces
    )  # a full queue or a refused prompt is a status of its own, not a broken stream
    return EventStream(service, first, pieces)


async def _whole(service: Service, ask: Ask, reply: Reply) -> Response:
    with service.submitted(ask) as handles:
        try:
            async for index, event in service.events(handles, ask.options.n):
                reply.add(index, event)
        except TimeoutError:
            raise _late(service) from None
    _check_whole(reply)
    return JSONResponse(reply.document(sum(map(len, ask.prompts)), ask.options.logprobs))


def _check_whole(reply: Reply) -> None:
    if any(choice.finish == "cancelled" for choice in reply.choices):
        raise ApiError(503, "the server is going down.", code="shutdown")


def _late(service: Service) -> ApiError:
    service.metrics.late += 1
    message = (
        f"the answer was not ready within {service.timeout:g} seconds; what was being written is dropped."
    )
    return ApiError(504, message, code="timeout")


async def _pieces(service: Service, ask: Ask, reply: Reply) -> AsyncIterator[str]:
    """The answer as the data of server-sent events. The first piece comes when the request is in the queue."""
    options = ask.options
    with service.submitted(ask) as handles:
        yield "".join(_sse(reply.chunk([choice])) for choice in reply.opening())
        try:
            async for index, event in service.events(handles, options.n):
                new = reply.add(index, event)
                if event.finish == "cancelled":
                    raise ApiError(503, "the server is going down.", code="shutdown")
                if new.finish or "".join(new.text) or new.logprobs:
                    yield _sse(reply.chunk([reply.delta(new, options.logprobs)]))
        except TimeoutError:
            yield _sse(_late(service).document())
            return
        except ApiError as error:
            yield _sse(error.document())
            return
    if options.usage:
        yield _sse(reply.chunk([], reply.usage(sum(map(len, ask.prompts)))))
    yield "data: [DONE]\n\n"


def _sse(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"


class EventStream(Response):
    """Pieces sent as they come. When the client leaves, or does not read, the generator is closed: that frees its
    slots."""

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
    """The work's result; ClientDisconnect, and the work is cancelled, when the client leaves first."""

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
    """404 and 405 in the protocol's shape."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:100]}: {error.detail}."
    if error.status_code == 404:
        message += (
            " Programs talk to /v1/chat/completions and /v1/completions, see GET /. For a page: bessemer dash"
        )
    return JSONResponse(ApiError(error.status_code, message).document(), error.status_code, error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    """A bug here; the traceback is in the server's own output, not in the answer."""
    return JSONResponse(ApiError(500, "an error inside the server; its log says more.").document(), 500)


# `GET /`: how to use this server, as a page for browsers and as text for everyone else.


HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
}
STYLE = """
:root { color-scheme: light dark; --back: light-dark(#f6f7f9, #0e141b); --card: light-dark(#fff, #161e28);
  --ink: light-dark(#17212d, #e8eef5); --muted: light-dark(#566373, #9fb0c2); --line: light-dark(#dde3ea, #2a3645); }
body { margin: 0 auto; max-width: 52rem; padding: 2rem 1rem 3rem; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; }
p { margin: .3rem 0; } .muted { color: var(--muted); }
pre { margin: 0; padding: .8rem 1rem; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; } td { padding: .35rem .8rem .35rem 0; vertical-align: top; }
tr + tr { border-top: 1px solid var(--line); } code { font: 13px ui-monospace, Menlo, Consolas, monospace; }
@media (max-width: 560px) { td { display: block; padding: .1rem 0; } tr { display: block; padding: .4rem 0; } }
"""
ENDPOINTS = (
    ("POST /v1/chat/completions", "messages in, an answer out; stream, n, logprobs, penalties, tools"),
    ("POST /v1/completions", "a text to continue"),
    ("GET /v1/models", "the model that is served"),
    ("GET /health", "200 while it answers, 503 after a failure"),
    ("GET /metrics", "counters for Prometheus"),
)


@dataclass(frozen=True)
class Usage:
    """What the page says. `model` is None where only who has the token may know it."""

    address: str  # http://host:port
    model: str | None
    step: int | None

    @property
    def title(self) -> str:
        return "Bessemer server" if self.model is None else f"{self.model}, step {self.step}"

    @property
    def about(self) -> str:
        token = "" if self.model is not None else " Requests need a token: Authorization: Bearer TOKEN."
        return f"This server speaks OpenAI's protocol at {self.address}/v1.{token}"

    @property
    def curl(self) -> str:
        token = "" if self.model is not None else ' -H "Authorization: Bearer $BESSEMER_API_TOKEN"'
        body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}'
        return f"curl {self.address}/v1/chat/completions -H 'Content-Type: application/json'{token} \\\n  -d '{body}'"

    @property
    def python(self) -> str:
        key, model = ("none", self.model) if self.model is not None else ("TOKEN", "MODEL")
        return (
            "from openai import OpenAI\n\n"
            f'client = OpenAI(base_url="{self.address}/v1", api_key="{key}")\n'
            'messages = [{"role": "user", "content": "Hello"}]\n'
            f'for chunk in client.chat.completions.create(model="{model}", messages=messages, stream=True):\n'
            '    print(chunk.choices[0].delta.content or "", end="", flush=True)'
        )

    def text(self) -> str:
        width = max(len(name) for name, _ in ENDPOINTS)
        listed = "\n".join(f"  {name:<{width}}  {what}" for name, what in ENDPOINTS)
        head, chat = f"{self.title}\n{self.about}", "To chat on a page: bessemer dash"
        return "\n\n".join((head, self.curl, self.python, listed, chat)) + "\n"

    def html(self) -> str:
        escape = html.escape
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(what)}</td></tr>"
            for name, what in ENDPOINTS
        )
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)} · Bessemer</title><style>{STYLE}</style></head><body>"
            f'<h1>{escape(self.title)}</h1><p class="muted">{escape(self.about)}</p>'
            f"<h2>Try it</h2><pre>{escape(self.curl)}</pre><h2>From Python</h2><pre>{escape(self.python)}</pre>"
            f"<h2>Endpoints</h2><table>{rows}</table>"
            "<h2>In a browser</h2><p>To chat with a model on a page, run <code>bessemer dash</code>.</p></body></html>"
        )


def usage_page(request: Request, model: str | None, step: int | None) -> Response:
    """The page, in the form that the client asks for."""
    usage = Usage(str(request.base_url).rstrip("/"), model, step)
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(usage.html(), headers=HEADERS)
    return PlainTextResponse(usage.text(), headers=HEADERS)
