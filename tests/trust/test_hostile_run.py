"""Hostile runs against every command, page and route. A new command or route is covered, or fails here until it is."""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from tests.dash.live import serving
from tests.serve.conftest import Gate
from tests.serve.conftest import Live as ServeLive
from tests.tiny_run import random_params, tiny_model
from tests.trust.hostile import KINDS, PROOF, SECRET, make_hostile, make_sound

from bessemer.cli import COMMANDS, main
from bessemer.dash.app import make_app
from bessemer.data import Tokenizer
from bessemer.generate import Engine, EngineThread, LoadedModel
from bessemer.job import RunDirectory
from bessemer.serve.app import make_app as serve_app
from bessemer.serve.chat import template_of
from bessemer.serve.service import Service

EXPECTED_ENDS = (0, 2, 3, 4)
TINY = ["training.dataset=cats.jsonl", "training.steps=1", "training.batch_size=1", "training.validation=false"]
TINY += ["optimization.name=sgd", "logging.plots=false", "logging.preview_interval=0", "logging.progress=none"]
READS: dict[str, list[list[str]]] = {
    "train": [["quickstart", "init={run}", *TINY, "--name", "new"]],
    "resume": [["{run}"], ["{run}", "logging.progress=none"]],
    "runs": [["runs"], ["runs", "--json"]],
    "doctor": [["{run}"], ["{run}", "--json"]],
    "rm": [["{copy}", "--yes"]],
    "report": [["{run}", "--html"]],
    "compare": [["{run}", "{run}", "--out", "curves.png"]],
    "sample": [["{run}", "--prompt", "a", "--max-tokens", "2"]],
    "chat": [["{run}", "--max-tokens", "2"], ["{run}", "--template", "chat", "--max-tokens", "2"]],
    "serve": [
        ["{run}", "--port", "0"],
        ["{run}", "--port", "0", "--template", "chat"],
        ["{run}", "--port", "0", "--adapter", "x={run}"],
        ["{sound}", "--port", "0", "--adapter", "x={run}"],
    ],
    "dash": [["{run}", "--port", "0"]],
    "eval": [["{run}", "--tasks", "bpb", "--limit", "1"]],
    "import": [["{run}", "runs/imported"], ["{run}/model", "runs/imported"], ["{run}", "runs/x", "--base", "{run}"]],
    "export": [["{run}", "exported"]],
    "recipes": [[]],
    "plan": [["quickstart", "init={run}"]],
    "launch": [["slurm", "quickstart", "init={run}", "-o", "job.sh"]],
    "config": [["quickstart", "init={run}"]],
    "tokenizer": [["train", "{run}/config.yaml", "-o", "tokenizer", "--vocab-size", "300"]],
    "data": [["inspect", "{run}"]],
    "completion": [["bash"]],
}
"""Command → its words, with a run in every place where one can be named."""


def test_every_command_is_tried() -> None:
    assert set(READS) == set(COMMANDS), "say in READS how the new command reads a run"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_sound(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("HOME", str(tmp_path / SECRET))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    return folder


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """Four GiB more than now: what takes more is a MemoryError, which no command may end with."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def called(words: list[str]) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main(words)
        except SystemExit as end:
            return int(end.code or 0), output.getvalue()
    raise AssertionError("a command always exits")


def check_untouched(place: Path, output: str) -> None:
    """Nothing was executed, nothing private was shown or written, and no terminal was told anything."""
    assert not (place / PROOF).exists(), "code of the run was executed"
    assert SECRET not in output
    control = re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", output.replace("\r\n", "\n"))
    assert not control, f"control characters: {control[:3]} in {output[:2000]!r}"
    for path in place.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 24:
            assert SECRET.encode() not in path.read_bytes(), f"{path} holds the secret"


LOADING = ("train", "plan", "sample", "chat", "serve", "eval", "export")
"""Commands that load a model or compile one."""


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.slow] if name in LOADING else []) for name in READS]
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_command_is_harmed(
    kind: str, command: str, sound: RunDirectory, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_hostile(sound, place, kind)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets=None: None)  # what is served is asked below
    for words in READS[command]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))  # a question, in `chat`
        filled = [word.format(run=run.path, copy=run.path, sound=sound.path) for word in words]
        code, output = called([command, *filled])
        assert code in EXPECTED_ENDS, f"{command} {filled}: exit {code}\n{output[-3000:]}"
        assert "Traceback" not in output and "a bug in bessemer" not in output, output[-3000:]
        check_untouched(place, output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["code", "escapes", "exploding", "links", "root"]
)  # its processes are `train` and `resume`, as above
def test_the_local_launcher_is_not_harmed(
    kind: str, sound: RunDirectory, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the run before its processes do, prints what they print, and counts starts in the run directory."""
    run = make_hostile(sound, place, kind)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    resume = ["--resume", str(run.path), "--restarts", "0"]
    fresh = ["quickstart", f"init={run.path}", *TINY, "--name", "new", "--restarts", "0"]
    for words in (resume, fresh):
        code, output = called(["launch", "local", "--processes", "1", *words])
        output += "".join(capfd.readouterr())
        logs = place.glob("runs/*/logs/*")
        output += "".join(path.read_text(errors="replace") for path in logs if path.is_file())
        assert code in EXPECTED_ENDS, f"{words}: exit {code}\n{output[-3000:]}"
        assert "Traceback" not in output and "a bug in bessemer" not in output, output[-3000:]
        check_untouched(place, output)


# -- pages and routes ------------------------------------------------------------------------------------------------


@pytest.fixture
def all_hostile(sound: RunDirectory, place: Path) -> Path:
    """A directory with a run of every kind."""
    for kind in KINDS:
        make_hostile(sound, place, kind)
    return place / "runs"


REFUSED = ("links", "pipe", "exploding")
ACTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "/api/stop": (tuple(KINDS), {}),
    "/api/resume": (("code", "resolver", "paths", "links"), {}),
    "/api/chat": (REFUSED, {"messages": [{"role": "user", "content": "a"}]}),
}
"""Routes of the dash that act on a run: which runs (each starts a process), and what is posted beside their name."""


@pytest.mark.slow
def test_no_page_or_route_of_the_dash_is_harmed(all_hostile: Path, place: Path) -> None:
    """Every registered route with every run: never a failure of ours, and what is shown holds nothing private."""
    with serving(all_hostile, place / "cache") as live:
        routes = [route for route in make_app(live.dash).routes if isinstance(route, Route)]
        posted = {route.path for route in routes if "POST" in (route.methods or ())}
        assert posted == set(ACTIONS), "say in ACTIONS what is posted to the new route"
        for route in routes:
            kinds, body = ACTIONS.get(route.path, (tuple(KINDS), {}))
            for kind in kinds:
                if route.path in posted:
                    status, found = live.post(route.path, {"run": kind, **body})
                else:
                    path = route.path.replace("{path:path}", "index.html")
                    status, found, _ = live.call("GET", f"{path}?run={kind}&run={kind}&name=loss&name=x")
                assert status < 500, (route.path, kind, status, found)
                text = json.dumps(found)
                assert SECRET not in text, (route.path, kind)
        resumed = live.dash.actions._resumed
        assert resumed, "some of them could be asked to resume"
        assert {one.process.wait() for one in resumed.values()} == {2}
        texts = [path.read_text(errors="replace") for path in (place / "logs").rglob("*.txt")]
        check_untouched(place, "")
        assert not any("Traceback" in text or SECRET in text for text in texts)


BODIES: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        {"messages": [{"role": "user", "content": "\x1b]0;owned\x07"}], "max_tokens": 1},
    ],
    "/v1/completions": [{"prompt": "a", "max_tokens": 1}],
}
"""Routes of the server that take a body."""


@pytest.mark.slow
def test_no_route_of_the_server_is_harmed(sound: RunDirectory, place: Path) -> None:
    """A model whose tokenizer has a template that never ends, behind every registered route."""
    run = make_hostile(sound, place, "template")
    tokenizer = Tokenizer.load(run.checkpoints / "step_00000010")
    model = tiny_model().clone(vocab_size=262)
    loaded = LoadedModel(model, random_params(model), tokenizer, 10, {"objective": "sft"})
    engine = Engine.of(loaded, slots=2, queue=4)
    service = Service(engine, template_of(loaded), "tiny", 10)
    routes = [route for route in serve_app(service).routes if isinstance(route, Route)]
    posted = {route.path for route in routes if "POST" in (route.methods or ())}
    assert posted == set(BODIES), "say in BODIES what is posted to the new route"
    with EngineThread(engine), ServeLive(service, Gate()) as live:
        for route in routes:
            path = route.path.replace("{name:path}", "tiny")
            for body in BODIES.get(route.path, [None]):
                method = "POST" if route.path in posted else "GET"
                data = None if body is None else json.dumps(body).encode()
                status, found, _ = live.call(method, path, data, {"Content-Type": "application/json"})
                assert status == (400 if route.path == "/v1/chat/completions" else 200), (path, status, found)
                check_untouched(place, json.dumps(found))
