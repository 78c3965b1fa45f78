"""A page's server in a thread of this process, and runs for it to show."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bessemer.dash.app import Dash, Guard, make_app
from bessemer.dash.files import Folder
from bessemer.job import RunDirectory
from bessemer.serve.net import listen, server_of

TOKEN = "the-token"


def until(condition: Callable[[], Any], seconds: float = 300) -> Any:
    """Wait for something another thread or process does."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)
    return found


class Live:
    """The server, at `address`; `get` and `post` are what a program would do."""

    def __init__(self, root: Path, cache: Path | None, closed: bool = False):
        self.dash = Dash(Folder(root), Guard(TOKEN, closed), cache, root.parent / "logs")
        self.socket = listen("127.0.0.1", 0)
        self.port: int = self.socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.server = server_of(make_app(self.dash), 1)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """(status, JSON or text, headers)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = headers or {}
        if body is not None:
            sent = {"Content-Type": "application/json", **sent}
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            response = connection.getresponse()
            text = response.read().decode()
            kind = response.headers.get_content_type()
            return response.status, json.loads(text) if kind == "application/json" else text, response.headers

    def get(self, path: str, token: str | None = None, **headers: str) -> Any:
        """The document; an error is a failure of the test."""
        if token:
            headers["Authorization"] = f"Bearer {token}"
        status, found, _ = self.call("GET", path, headers=headers)
        assert status == 200, (path, status, found)
        return found

    def post(self, path: str, body: Any, token: str | None = TOKEN, **headers: str) -> tuple[int, Any]:
        if token:
            headers["Authorization"] = f"Bearer {token}"
        status, found, _ = self.call("POST", path, body, headers)
        return status, found

    def __enter__(self) -> Live:
        self._thread.start()
        until(lambda: self.server.started)
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        self.dash.ahead.close()
        self.dash.models.close()
        assert not self._thread.is_alive()


@contextlib.contextmanager
def serving(root: Path, cache: Path | None = None, closed: bool = False) -> Iterator[Live]:
    with Live(root, cache, closed) as live:
        yield live


def row(step: int, rate: float = 0.02) -> dict[str, Any]:
    """A report as training writes it."""
    loss = 2 + 4 * math.exp(-step / 300) + 0.05 * math.sin(step / 3)
    return {
        "step": step,
        "tokens": step * 2048,
        "total_training_flops": step * 2048 * 3e7,
        "loss": loss,
        "loss_smooth": 2 + 4 * math.exp(-step / 300),
        "lr": rate,
        "grad_norm": 0.5 + 1 / (1 + step),
        "time/tok_per_s": 14_000 + 200 * math.sin(step),
        "time/mfu": 0.412,
        "time/total": max(0, step - 10) * 0.14,
        "time/all_steps": step * 0.14,
        "time/eta": (1000 - step) * 0.14,
    }


def histogram(step: int, name: str = "embedding") -> dict[str, Any]:
    """A row of weights.jsonl as training writes it."""
    counts = [round(1000 * math.exp(-(((place - 15.5) / 6) ** 2))) for place in range(32)]
    spread = {"mean": 0.001 * step, "std": 0.1 + 0.001 * step, "min": -0.5 - 0.001 * step, "max": 0.5}
    return {"step": step, "name": name, **spread, "counts": counts}


def make_run(root: Path, name: str = "mine", rows: int = 50, rate: float = 0.02, state: str = "done") -> RunDirectory:
    """A run directory with everything the page shows, written by hand."""
    run = RunDirectory(root / name).create()
    run.config.write_text(
        f"training: {{steps: 1000, batch_size: 8}}\noptimization: {{lr: {rate}}}\n"
        "provenance: {training.steps: command line, optimization.lr: recipe quickstart}\n"
    )
    run.derived.write_text(json.dumps({"training.batch_size": {"value": 8, "reason": "fits in memory"}}))
    facts = {"parameters": {"total": 12_345_678}, "steps": 1000, "versions": {"jax": "0.10.2"}}
    run.facts.write_text(json.dumps({**facts, "devices": {"platform": "cpu"}, "determinism": "bit-exact"}))
    lines = []
    for number in range(1, rows + 1):
        lines.append(row(number * 10, rate))
        if number % 5 == 0:
            lines.append({"step": number * 10, "val_loss": 2.5, "val_bpb": 1.2 + 1 / number, "val_bpb_se": 0.01})
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [
        {"step": step, "prompt": "def add(a, b):", "completion": f" return a + b  # {step}"}
        for step in (100, 200, 300, 400, 500)
    ]
    run.samples.write_text("".join(json.dumps(line) + "\n" for line in samples))
    result = {"task": "bpb", "step": 500, "metric": "bits per byte", "value": 1.2345}
    (run.eval / "bpb_step500.json").write_text(json.dumps(result))
    folder = run.checkpoints / "step_00000500"
    folder.mkdir()
    (folder / "state.bin").write_bytes(b"x" * 5000)
    (folder / "COMMIT").write_text("{}")
    run.log.write_text("a line of the log\n")
    run.report.write_text("# mine\n\n**1.2345 bits per byte**\n\n| a | b |\n|---|---|\n| 1 \\| 2 | <b>3</b> |\n")
    run.write_status(state=state, step=rows * 10, message="")
    return run
