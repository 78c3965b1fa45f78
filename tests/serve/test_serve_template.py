"""A model whose chat template loops for ever: conversations are refused, everything else is served as before."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.interop.tiny_hf import TEMPLATE, foreign_tokenizer
from tests.serve.conftest import Gate, Live, until
from tests.tiny_run import random_params, tiny_model

from bessemer.data import Tokenizer, templates
from bessemer.data.templates import Worker
from bessemer.generate import Engine, EngineThread, LoadedModel
from bessemer.serve.conversation import template_of
from bessemer.serve.service import Service

FOR, END = "{% for x in range(99999) %}", "{% endfor %}"
HOSTILE = "{% if messages[0]['content'] == 'go' %}" + FOR * 3 + END * 3 + "{% endif %}" + TEMPLATE


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(templates, "_shared", [Worker()])
    foreign_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": HOSTILE}))
    model = tiny_model().clone(vocab_size=262)
    tokenizer = Tokenizer.load(tmp_path)
    loaded = LoadedModel(model, random_params(model), tokenizer, 20, {"objective": "sft"})
    gate = Gate()
    engine = Engine.of(loaded, slots=4, queue=16, scope=gate)
    with EngineThread(engine), Live(Service(engine, template_of(loaded), "tiny", 20), gate) as server:
        yield server


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
