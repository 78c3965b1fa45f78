"""The endpoints of the page: GET /api/… reads, POST /api/… acts, and everything else is one of our own static files."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bessemer import __version__
from bessemer.dash.actions import Actions
from bessemer.dash.ahead import Ahead
from bessemer.dash.chat import Models
from bessemer.dash.files import Folder, Gone, parsed
from bessemer.dash.metrics import Index
from bessemer.dash.runs import Runs, plain
from bessemer.dash.series import AXES, MOST_POINTS, MOST_SMOOTHING, View, charts_of, curve
from bessemer.dash.weights import LONGEST_NAME, Distributions
from bessemer.errors import BessemerError
from bessemer.serve.errors import ApiError
from bessemer.serve.net import has_token, read_body, refuse_other_names, refuse_without_token

# Who may ask, and what a browser may do with the answer.
#
# - Reading: on 127.0.0.1 anybody who can reach it, under this machine's own names only (or a page elsewhere could make
#   its name point here). On any other address, and with `private`, who has the token.
# - Acting (stop, resume, load a model): the token, in a header that no other site's page can send, and the same origin.
# - The page itself holds no data, so it needs no token: it asks for one.


HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


@dataclass(frozen=True)
class Guard:
    """`closed`: reading needs the token too."""

    token: str
    closed: bool = False

    def page(self, request: Request) -> None:
        if not self.closed:
            refuse_other_names(request)

    def reading(self, request: Request) -> None:
        if self.closed:
            refuse_without_token(request, self.token)
        else:
            refuse_other_names(request)
        _refuse_other_sites(request)

    def acting(self, request: Request) -> None:
        self.reading(request)
        refuse_without_token(request, self.token)

    def allows(self, request: Request) -> bool:
        """Whether whoever asks may act."""
        return has_token(request, self.token)


def _refuse_other_sites(request: Request) -> None:
    """A browser says where a request comes from; only our own page asks here."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        raise ApiError(403, "requests of other sites are not answered.", code="origin")
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise ApiError(403, "requests of other sites are not answered.", code="origin")


STATIC = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
BODY = 1 << 20
MOST_RUNS, MOST_CURVES = 20, 128
ASKED = ("messages", "max_tokens", "temperature", "top_p", "top_k", "seed")
"""What of a conversation goes to the model's server; it checks the values."""


class Dash:
    """The page's state: what was read, the models that are loaded, the processes that were started."""

    def __init__(
        self, folder: Folder, guard: Guard, cache: Path | None, logs: Path, platform: str | None = None
    ):
        self.folder, self.guard = folder, guard
        self.runs = Runs(folder)
        self.index = Index(folder, cache)
        self.ahead = Ahead(folder, cache)
        self.distributions = Distributions(folder)
        self.actions = Actions(folder, logs)
        self.models = Models(folder, platform=platform)

    # Reading. Each takes the query and returns a document; a second value, where there is one, tells its version
    # without making it.

    def session(self, request: Request) -> dict[str, Any]:
        right = self.guard.allows(request)
        return {"version": __version__, "may_read": right or not self.guard.closed, "may_act": right}

    def listed(self) -> dict[str, Any]:
        return {**self.runs.listed(), "indexing": self.ahead.state}

    def detail(self, name: str) -> dict[str, Any]:
        found = self.runs.detail(name)
        columns = self.index.columns(self.folder.run(name).metrics)
        found["problems"] += columns.notes
        return {**found, "resumed": self.actions.known(name), "rows": columns.count}

    def charts(self, names: list[str]) -> dict[str, Any]:
        """The charts of runs together."""
        found = {name for run in names for name in self.index.columns(self.folder.run(run).metrics).names}
        return {"charts": charts_of(found)}

    def curves(self, request: Request) -> tuple[str, Callable[[], dict[str, Any]]]:
        query = request.query_params
        names, metrics = _several(query.getlist("run")), query.getlist("name")[:MOST_CURVES]
        view = _view(dict(query))
        parts = {name: self.index.get(self.folder.run(name).metrics) for name in names}
        columns = {name: part.refresh() for name, part in parts.items()}
        version = repr((str(query), [part.signature for part in parts.values()]))

        def make() -> dict[str, Any]:
            found = [
                {"run": name, "name": metric, **points}
                for name in names
                for metric in metrics
                if (points := curve(columns[name], metric, view)) is not None
            ]
            return {"x": view.axis, "curves": found}

        return version, make

    def weights(self, request: Request) -> tuple[str, Callable[[], dict[str, Any]]]:
        found = self.distributions.get(self.folder.run(_one(request)).weights)
        return found.shown(request.query_params.get("name", "")[:LONGEST_NAME])


def make_app(dash: Dash) -> Starlette:
    """The application over one directory of runs."""
    reading: dict[str, Callable[[Request], Any]] = {
        "/api/runs": lambda request: dash.listed(),
        "/api/run": lambda request: dash.detail(_one(request)),
        "/api/charts": lambda request: dash.charts(_several(request.query_params.getlist("run"))),
        "/api/samples": lambda request: {"samples": dash.runs.samples(_one(request))},
        "/api/report": lambda request: {"text": dash.runs.text(_one(request), "report")},
        "/api/log": lambda request: {"text": dash.runs.text(_one(request), "log")},
        "/api/diff": lambda request: dash.runs.difference(_several(request.query_params.getlist("run"))),
        "/api/models": lambda request: {"models": dash.models.states()},
        "/api/curves": dash.curves,
        "/api/weights": dash.weights,
    }

    async def stop(request: Request) -> Response:
        name, _ = await _asked(request)
        return JSONResponse(await asyncio.to_thread(dash.actions.stop, name))

    async def resume(request: Request) -> Response:
        name, _ = await _asked(request)
        return JSONResponse(await asyncio.to_thread(dash.actions.resume, name))

    async def chat(request: Request) -> Response:
        name, body = await _asked(request)
        step = body.get("step")
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
            raise ApiError(400, "step is the number of a checkpoint, or null.", param="step")
        dash.folder.run(name)
        wanted = {key: body[key] for key in ASKED if body.get(key) is not None}
        events = dash.models.answer(name, step, wanted)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    async def session(request: Request) -> Response:
        return JSONResponse(dash.session(request))

    routes = [
        Route(path, _guarded(dash.guard.reading, partial(_read, make))) for path, make in reading.items()
    ]
    routes += [
        Route(path, _guarded(dash.guard.acting, act), methods=["POST"])
        for path, act in (("/api/stop", stop), ("/api/resume", resume), ("/api/chat", chat))
    ]
    routes += [
        Route("/api/session", _guarded(dash.guard.page, session)),
        Route("/{path:path}", _guarded(dash.guard.page, _static)),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _plain_error, Exception: _bug})


def _guarded(admit: Callable[[Request], None], endpoint: Callable[[Request], Any]) -> Any:
    """The endpoint behind its guard; errors as JSON; what a browser may do with the answer said on all of them."""

    async def call(request: Request) -> Response:
        try:
            admit(request)
            response = await endpoint(request)
        except Gone as error:
            response = JSONResponse(ApiError(404, str(error)).document(), 404)
        except BessemerError as error:
            response = JSONResponse(ApiError(409, str(error)).document(), 409)
        except ApiError as error:
            response = JSONResponse(error.document(), error.status, error.headers)
        except ClientDisconnect:
            response = Response(status_code=499)  # nobody reads it
        response.headers.update(HEADERS)
        return response

    return call


async def _read(make: Callable[[Request], Any], request: Request) -> Response:
    """The document, or 304 when the browser has it. Files are read in a thread: one slow disk holds up nobody else."""

    def work() -> tuple[str, bytes | None]:
        known = request.headers.get("if-none-match")
        found = make(request)
        if isinstance(found, tuple):
            version, build = found
            tag = _tag(version.encode())
            return tag, None if tag == known else _json(
                build()
            )  # numbers that were made here: nothing to tame
        body = _json(plain(found))
        tag = _tag(body)
        return tag, None if tag == known else body

    tag, body = await asyncio.to_thread(work)
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if body is None:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


async def _static(request: Request) -> Response:
    """A file of the page. Names are looked up, never joined: there is no path to climb."""
    name = request.path_params["path"] or "index.html"
    if name not in _files():
        raise ApiError(404, f"there is no {name[:100]} here.")
    data, tag = _files()[name]
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=KINDS[Path(name).suffix], headers=headers)


_loaded: dict[str, tuple[bytes, str]] = {}


def _files() -> dict[str, tuple[bytes, str]]:
    if not _loaded:
        for path in STATIC.rglob("*"):
            if path.suffix in KINDS:
                data = path.read_bytes()
                _loaded[path.relative_to(STATIC).as_posix()] = (data, _tag(data))
    return _loaded


def _json(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def _tag(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:32]}"'


def _one(request: Request) -> str:
    return request.query_params.get("run", "")


def _several(names: list[str]) -> list[str]:
    if not 1 <= len(names) <= MOST_RUNS:
        raise ApiError(400, f"name 1 to {MOST_RUNS} runs.", param="run")
    return list(dict.fromkeys(names))


async def _asked(request: Request) -> tuple[str, dict[str, Any]]:
    """(run, body) of an action."""
    body = parsed(await read_body(request, BODY))
    if not isinstance(body, dict) or not isinstance(body.get("run"), str):
        raise ApiError(400, 'send a JSON object with "run".', param="run")
    return body["run"], body


def _view(query: dict[str, str]) -> View:
    def number(name: str) -> float | None:
        if not query.get(name):
            return None
        try:
            value = float(query[name])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ApiError(400, f"{name} is a number.", param=name)
        return value

    axis = query.get("x", "step")
    if axis not in AXES:
        raise ApiError(400, f"x is one of {', '.join(AXES)}.", param="x")
    points = min(max(number("points") or 800, 10), MOST_POINTS)
    smoothing = min(max(number("smooth") or 0.0, 0.0), MOST_SMOOTHING)
    return View(axis, number("from"), number("to"), int(points), smoothing)


async def _plain_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:100]}: {error.detail}."
    return JSONResponse(ApiError(error.status_code, message).document(), error.status_code, HEADERS)


async def _bug(request: Request, error: Exception) -> Response:
    """A bug here; the traceback is in the server's own output, not in the answer."""
    document = ApiError(500, "an error inside the server; its terminal says more.").document()
    return JSONResponse(document, 500, HEADERS)
