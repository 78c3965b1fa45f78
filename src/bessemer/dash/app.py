"""`bessemer dash`: GET /api/… reads, POST /api/… acts, and everything else is one of our own static files.

Who may do what:
- Reading: on 127.0.0.1 anybody who can reach it, under this machine's own names only (or another site could point its
  name here). On any other address, and with `private`, only with the token.
- Acting (stop, resume, load a model): with the token, in a header that no other site's page can send, and same origin.
- The page itself holds no data, so it needs no token: it asks for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bessemer import __version__
from bessemer.dash.ahead import Ahead
from bessemer.dash.charts import (
    AXES,
    LONGEST_NAME,
    MOST_POINTS,
    MOST_SMOOTHING,
    Distributions,
    View,
    charts_of,
    curve,
    points_of,
)
from bessemer.dash.files import Folder, Gone, parsed
from bessemer.dash.metrics import Index
from bessemer.dash.processes import Actions, Models
from bessemer.dash.runs import Runs, plain
from bessemer.errors import BessemerError, InputError
from bessemer.job import RunDirectory
from bessemer.report.summary import judge_health
from bessemer.serve.net import (
    BACKLOG,
    ApiError,
    address_of,
    check_port,
    has_token,
    is_loopback,
    listen,
    read_body,
    refuse_other_names,
    refuse_without_token,
    server_of,
)
from bessemer.storage.files import home

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
    """Who may do what; with `closed`, reading needs the token too."""

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


def _refuse_other_sites(request: Request) -> None:
    """Raise ApiError if the browser says that another site's page sent the request."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "").lower()
    foreign = origin is not None and urlsplit(origin).netloc.lower() != host
    if foreign or request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise ApiError(403, "requests from other sites are refused.", code="origin")


STATIC = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
DEFAULT = "runs"  # need not exist yet: the page shows it once the first run creates it
FIRST = 2  # seconds before indexing starts, for the page's first requests
GRACE = 2  # seconds for open responses when the server stops
BODY = 1 << 20
MOST_RUNS, MOST_CURVES = 20, 128
ASKED = ("messages", "max_tokens", "temperature", "top_p", "top_k", "seed")
"""Fields of a chat request that are passed to the model's server, which checks the values."""


Versioned = tuple[str, Callable[[], dict[str, Any]]]
"""(version, function that makes the document): a browser that has this version is not sent it again."""


class Dash:
    """The page's state: what was read, loaded models, started processes."""

    def __init__(self, folder: Folder, guard: Guard, cache: Path | None, logs: Path, platform: str | None = None):
        self.folder, self.guard = folder, guard
        self.runs = Runs(folder)
        self.index = Index(folder, cache)
        self.ahead = Ahead(folder, cache)
        self.distributions = Distributions(folder)
        self.actions = Actions(folder, logs)
        self.models = Models(folder, platform=platform)

    def session(self, request: Request) -> dict[str, Any]:
        right = has_token(request, self.guard.token)
        return {"version": __version__, "may_read": right or not self.guard.closed, "may_act": right}

    def listed(self) -> dict[str, Any]:
        return {**self.runs.listed(), "indexing": self.ahead.state}

    def detail(self, name: str) -> dict[str, Any]:
        found = self.runs.detail(name)
        columns = self.index.columns(self.folder.run(name).metrics)
        found["problems"] += columns.notes
        health = judge_health(partial(points_of, columns))
        found["health"] = None if health is None else asdict(health)
        return {**found, "resumed": self.actions.known(name), "rows": columns.count}

    def charts(self, names: list[str]) -> dict[str, Any]:
        """Return the charts of several runs."""
        found = {name for run in names for name in self.index.columns(self.folder.run(run).metrics).names}
        return {"charts": charts_of(found)}

    def curves(self, request: Request) -> Versioned:
        """Return curves of several metrics and runs."""
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

    def weights(self, request: Request) -> Versioned:
        found = self.distributions.get(self.folder.run(_one(request)).weights)
        return found.shown(request.query_params.get("name", "")[:LONGEST_NAME])


def make_app(dash: Dash) -> Starlette:
    """Return the application over one directory of runs."""
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

    async def act(action: Callable[[str], dict[str, Any]], request: Request) -> Response:
        name, _ = await _asked(request)
        return JSONResponse(await asyncio.to_thread(action, name))

    async def chat(request: Request) -> Response:
        name, body = await _asked(request)
        step = body.get("step")
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
            raise ApiError(400, "step must be the number of a checkpoint, or null.", param="step")
        dash.folder.run(name)
        wanted = {key: body[key] for key in ASKED if body.get(key) is not None}
        events = dash.models.answer(name, step, wanted)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def session(request: Request) -> Response:
        return JSONResponse(dash.session(request))

    routes = [Route(path, _guarded(dash.guard.reading, partial(_read, make))) for path, make in reading.items()]
    acting: dict[str, Callable[[Request], Any]] = {
        "/api/stop": partial(act, dash.actions.stop),
        "/api/resume": partial(act, dash.actions.resume),
        "/api/chat": chat,
    }
    routes += [Route(path, _guarded(dash.guard.acting, answer), methods=["POST"]) for path, answer in acting.items()]
    routes += [
        Route("/api/session", _guarded(dash.guard.page, session)),
        Route("/{path:path}", _guarded(dash.guard.page, _static)),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _plain_error, Exception: _bug})


def _guarded(admit: Callable[[Request], None], endpoint: Callable[[Request], Any]) -> Any:
    """Return the endpoint behind its guard, with errors as JSON and our headers on every response."""

    async def call(request: Request) -> Response:
        try:
            admit(request)
            response = await endpoint(request)
        except Gone as error:
            response = ApiError(404, str(error)).response()
        except BessemerError as error:
            response = ApiError(409, str(error)).response()
        except ApiError as error:
            response = error.response()
        except ClientDisconnect:
            response = Response(status_code=499)  # nobody reads it
        response.headers.update(HEADERS)
        return response

    return call


async def _read(make: Callable[[Request], Any], request: Request) -> Response:
    """Answer with the document, or 304 if the browser has it. A thread reads files, so a slow disk blocks nobody."""

    def work() -> tuple[str, bytes | None]:
        known = request.headers.get("if-none-match")
        found = make(request)
        if isinstance(found, tuple):
            version, build = found
            tag = _tag(version.encode())
            return tag, None if tag == known else _json(build())  # our own numbers need no `plain`
        body = _json(plain(found))
        tag = _tag(body)
        return tag, None if tag == known else body

    return _unless_known(*await asyncio.to_thread(work), "application/json")


async def _static(request: Request) -> Response:
    """Answer with a file of the page. Names are looked up, never joined, so none leads outside."""
    name = request.path_params["path"] or "index.html"
    if name not in _files():
        raise ApiError(404, f"there is no {name[:100]} here.")
    data = _files()[name]
    tag = _tag(data)
    return _unless_known(tag, None if request.headers.get("if-none-match") == tag else data, KINDS[Path(name).suffix])


@cache
def _files() -> dict[str, bytes]:
    paths = [path for path in STATIC.rglob("*") if path.suffix in KINDS]
    return {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in paths}


def _unless_known(tag: str, body: bytes | None, media_type: str) -> Response:
    """Return the body, or 304 for None."""
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if body is None:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)


def _json(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def _tag(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:32]}"'


def _one(request: Request) -> str:
    return request.query_params.get("run", "")


def _several(names: list[str]) -> list[str]:
    if not 1 <= len(names) <= MOST_RUNS:
        raise ApiError(400, f"pass 1 to {MOST_RUNS} runs.", param="run")
    return list(dict.fromkeys(names))


async def _asked(request: Request) -> tuple[str, dict[str, Any]]:
    """Return run and body of an action."""
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
            raise ApiError(400, f"{name} must be a number.", param=name)
        return value

    axis = query.get("x", "step")
    if axis not in AXES:
        raise ApiError(400, f"x must be one of {', '.join(AXES)}.", param="x")
    points = min(max(number("points") or 800, 10), MOST_POINTS)
    smoothing = min(max(number("smooth") or 0.0, 0.0), MOST_SMOOTHING)
    return View(axis, number("from"), number("to"), int(points), smoothing)


async def _plain_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:100]}: {error.detail}."
    return ApiError(error.status_code, message, headers=HEADERS).response()


async def _bug(request: Request, error: Exception) -> Response:
    """Answer a bug; its traceback is in the server's own output."""
    return ApiError(500, "internal error; the server's terminal has the traceback.", headers=HEADERS).response()


@dataclass(frozen=True)
class DashOptions:
    """Where the page is served and who may see it; without a token one is generated."""

    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    private: bool = False
    chat_on: str | None = None  # JAX platform of chat models

    def __post_init__(self) -> None:
        check_port(self.port)

    @property
    def closed(self) -> bool:
        """Whether reading needs the token too."""
        return self.private or not is_loopback(self.host)


def open_folder(directory: str) -> Folder:
    """Return the directory of runs. Raise InputError if it is missing or is a run itself."""
    path = Path(directory)
    if not path.is_dir() and directory != DEFAULT:
        raise InputError(f"there is no directory {directory}. Pass the directory that holds the runs.")
    if RunDirectory(path).exists():
        parent = path.absolute().parent
        raise InputError(f"{directory} is a run. Pass the directory that holds it: bessemer dash {parent}")
    return Folder(path)


def dash(directory: str, options: DashOptions, say: Callable[[str], None], show: Callable[[str], None]) -> None:
    """Serve the page until SIGTERM or Ctrl-C. `say` prints lines; `show` gets the address once it answers."""
    folder = open_folder(directory)
    token = options.token or secrets.token_urlsafe(24)
    with contextlib.closing(listen(options.host, options.port)) as bound:
        cache = home() / "dash"
        state = Dash(folder, Guard(token, options.closed), cache, cache / "logs", options.chat_on)
        bound.listen(BACKLOG)
        address = f"http://{address_of(bound)}/"
        given = "" if options.token else f"#token={token}"  # the user's own token is not printed
        who = "only with the token" if options.closed else "this machine; stop, resume and chat need the token"
        say(f"runs of {folder.root}\nopen {address}{given}\n({who}; Ctrl-C stops)")
        show(f"{address}{given}")
        try:
            state.ahead.start(lambda: [row["id"] for row in state.runs.listed()["runs"]], FIRST)
            server_of(make_app(state), GRACE).run(sockets=[bound])
        finally:
            state.ahead.close()
            state.models.close()
    say("stopped.")
