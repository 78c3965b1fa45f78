"""A model whose chat template loops for ever: conversations are refused, everything else is served as before."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.interop.tiny_hf import TEMPLATE, chatty_folder, foreign_tokenizer
from tests.processes import TIMEOUT
from tests.serve.conftest import Gate, Live, until
from tests.tiny_run import random_params, tiny_model

from bessemer.data import Tokenizer
from bessemer.data.tokenize import templates
from bessemer.data.tokenize.templates import Worker
from bessemer.generate import Engine, EngineThread, LoadedModel
from bessemer.interop.folder import import_folder
from bessemer.serve.chat import template_of
from bessemer.serve.service import Service

FOR, END = "{% for x in range(99999) %}", "{% endfor %}"
HOSTILE = "{% if messages[0]['content'] == 'go' %}" + FOR * 3 + END * 3 + "{% endif %}" + TEMPLATE


def set_template(folder: Path) -> Path:
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": HOSTILE}))
    return folder


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(templates, "_shared", [Worker()])
    foreign_tokenizer(tmp_path)
    set_template(tmp_path)
    model = tiny_model().clone(vocab_size=262)
    tokenizer = Tokenizer.load(tmp_path)
    loaded = LoadedModel(model, random_params(model), tokenizer, 20, {"objective": "sft"})
    gate = Gate()
    engine = Engine.of(loaded, slots=4, queue=16, scope=gate)
    with EngineThread(engine), Live(Service(engine, template_of(loaded), "tiny", 20), gate) as server:
        yield server


@pytest.mark.slow
def test_completions_are_answered_while_a_template_loops(hostile: Live) -> None:
    hostile_body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 2}
    friendly_body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    plain_body = {"prompt": "a", "max_tokens": 2}
    assert hostile.post("/v1/chat/completions", friendly_body)[0] == 200
    answers: list[tuple[int, str]] = []

    def ask() -> None:
        status, answer, _ = hostile.post("/v1/chat/completions", hostile_body)
        answers.append((status, answer["error"]["message"]))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    with templates._shared[0]._turn:  # more conversations wait to be rendered than the server has threads
        for thread in threads:
            thread.start()
        until(lambda: hostile.service.renders._work_queue.qsize() == 6)
        assert hostile.post("/v1/completions", plain_body)[0] == 200
        assert not answers
    for thread in threads:
        thread.join()
    assert {status for status, _ in answers} == {400}
    assert sum("took more than" in message for _, message in answers) == 2
    assert hostile.post("/v1/completions", plain_body)[0] == 200
    status, answer, _ = hostile.post("/v1/chat/completions", friendly_body)
    assert status == 400 and "not tried again" in answer["error"]["message"]


PATIENT = """
from bessemer.data.tokenize import templates
templates.WALL_SECONDS = 7200  # a server that waited for the template would wait past the end of this test
from bessemer.cli import main
main()
"""


def template_process(server: int) -> int | None:
    """The process that renders for a server."""
    for children in Path(f"/proc/{server}/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(OSError):
                if b"template_worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    return None


@pytest.mark.slow
def test_sigterm_ends_a_server_whose_template_loops(tmp_path: Path, home: Path) -> None:
    """Three conversations, of which one is being rendered without an end: the renderer is frozen in the midst of it, so
    that no limit of processor time helps. The server leaves after its grace, with exit code 0, and takes it along."""
    run, _ = import_folder(set_template(chatty_folder(tmp_path / "hub")), tmp_path / "run", context=64)
    words = [sys.executable, "-c", PATIENT, "serve", str(run.path), "--port", "0"]
    variables = {**os.environ, "BESSEMER_HOME": str(home), "JAX_NUM_CPU_DEVICES": "1"}
    server = subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True)
    clients: list[http.client.HTTPConnection] = []
    try:
        assert server.stderr is not None
        found = (re.search(r"at http://127\.0\.0\.1:(\d+)/v1 ", line) for line in server.stderr)
        port = int(next(match for match in found if match).group(1))
        body = json.dumps({"messages": [{"role": "user", "content": "go"}], "max_tokens": 2})
        for _ in range(3):
            clients.append(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT))
            clients[-1].request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        until(lambda: template_process(server.pid))
        renderer = template_process(server.pid)
        assert renderer is not None
        os.kill(renderer, signal.SIGSTOP)
        server.send_signal(signal.SIGTERM)
        assert server.wait(TIMEOUT) == 0
        assert server.stderr.read().strip().endswith("stopped.")
        assert not Path(f"/proc/{renderer}").exists()
    finally:
        server.kill()
        server.wait()
        for client in clients:
            client.close()
