"""What protects the server: a bounded queue, a time limit, slots freed by clients that leave, a token."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys

import openai
import pytest
from click.testing import CliRunner
from tests.serve.conftest import QUEUE, Gate, Live, make_service, until

from bessemer.cli.serve import command
from bessemer.errors import InputError
from bessemer.generate import Engine, LoadedModel
from bessemer.serve import net
from bessemer.serve.app import ServerOptions
from bessemer.serve.net import listen, read_token

PROMPT = "The 3 grey cats"


@pytest.fixture(autouse=True)
def idle(engine: Engine, gate: Gate) -> None:
    until(lambda: engine.active == engine.waiting == 0)


def open_stream(live: Live, **ask: object) -> http.client.HTTPConnection:
    """A request whose answer nobody has read yet."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=300)
    body = json.dumps({"prompt": PROMPT, "stream": True, "max_tokens": 100, "temperature": 0, **ask})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection


@pytest.mark.slow
def test_a_full_queue_is_429_and_is_served_later(live: Live) -> None:
    with live.gate.closed():
        waiting = open_stream(live, n=QUEUE, max_tokens=4)
        until(lambda: live.engine.waiting == QUEUE)
        with pytest.raises(openai.RateLimitError, match="try again later") as caught:
            live.client.completions.create(model="tiny", prompt=PROMPT)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "queue_full"
    text = waiting.getresponse().read().decode()
    waiting.close()
    assert text.count('"finish_reason": "length"') == QUEUE and text.endswith("data: [DONE]\n\n")
    assert live.client.completions.create(model="tiny", prompt=PROMPT).choices[0].text


def test_a_late_answer_is_an_error_and_its_row_is_dropped(impatient: Live) -> None:
    late = impatient.service.metrics.late
    with impatient.gate.closed():
        with pytest.raises(openai.InternalServerError, match=r"not complete within 0\.05 seconds") as caught:
            impatient.client.completions.create(model="tiny", prompt=PROMPT)
        assert caught.value.status_code == 504
        with pytest.raises(openai.APIError, match=r"not complete within 0\.05 seconds"):
            list(impatient.client.completions.create(model="tiny", prompt=PROMPT, stream=True))
    until(lambda: impatient.engine.active == impatient.engine.waiting == 0)
    assert impatient.service.metrics.late == late + 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(live: Live, stream: bool) -> None:
    gone, tokens = live.service.metrics.gone, live.engine.tokens
    with live.gate.closed():
        connection = open_stream(live, stream=stream)

        def writing() -> bool:
            live.gate.allow()
            return live.engine.active == 1 and live.engine.tokens > tokens

        until(writing)
        if stream:
            assert connection.getresponse().read(1)
        connection.close()
        until(lambda: live.service.metrics.gone == gone + 1)
    until(lambda: live.engine.active == live.engine.waiting == 0)
    assert live.engine.tokens - tokens < 100, "it was not written to its end"


def test_a_client_that_leaves_the_queue_is_forgotten(live: Live) -> None:
    gone, tokens = live.service.metrics.gone, live.engine.tokens
    with live.gate.closed():
        connection = open_stream(live, n=8)
        until(lambda: live.engine.waiting == 8)
        connection.close()
        until(lambda: live.service.metrics.gone == gone + 1)
    until(lambda: live.engine.active == live.engine.waiting == 0)
    assert live.engine.tokens == tokens


def test_a_body_that_is_too_long_or_too_slow(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = live.service.body_limit
    status, document, _ = live.post("/v1/completions", b" " * (limit + 1))
    assert (status, document["error"]["code"]) == (413, "body_too_long")
    chunked = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    chunked.request("POST", "/v1/completions", iter([b" " * (limit // 4)] * 5), headers, encode_chunked=True)
    assert chunked.getresponse().status == 413
    chunked.close()
    monkeypatch.setattr(net, "BODY_SECONDS", 0.05)
    slow = socket.create_connection(("127.0.0.1", live.port), 60)
    slow.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    assert slow.recv(100).startswith(b"HTTP/1.1 408")
    slow.close()


def test_a_failed_round_is_an_error_and_the_next_one_is_served(
    live: Live, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the device runs out of memory."""

    def broken(output: object) -> object:
        raise MemoryError("the device is full")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "fetch", broken)
        with pytest.raises(openai.InternalServerError, match="the engine failed while generating this answer"):
            live.client.completions.create(model="tiny", prompt=PROMPT)
        assert live.call("GET", "/health")[0] == 503
    assert live.client.completions.create(model="tiny", prompt=PROMPT).choices[0].text
    assert live.call("GET", "/health")[0] == 200


def test_the_server_stops_though_an_answer_does_not(loaded: LoadedModel, engine: Engine, gate: Gate) -> None:
    with gate.closed():
        with Live(make_service(loaded, engine), gate, grace=0) as server:
            connection = open_stream(server)
            until(lambda: engine.waiting == 1)
        with pytest.raises((http.client.HTTPException, OSError)):
            connection.getresponse().read()
        connection.close()
    until(lambda: engine.active == engine.waiting == 0)


def test_without_the_extra_the_command_says_what_to_install() -> None:
    """In a process that cannot import uvicorn."""
    code = "import sys; sys.modules['uvicorn'] = None; from bessemer.cli import main; main(['serve', 'none'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2, result.stderr
    assert "needs uvicorn, which is not installed: " in result.stderr
    assert re.search(r"pip install .*\[dash\]'", result.stderr)


def test_a_token_is_asked_for_where_one_is_set(loaded: LoadedModel, engine: Engine, gate: Gate) -> None:
    with Live(make_service(loaded, engine, token="secret"), gate) as server:
        for key in ("wrong", "secre", "sécret"):
            assert server.call("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 401, key
        status, document, headers = server.post("/v1/completions", {"prompt": "x"})
        assert (status, document["error"]["code"]) == (401, "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
        assert server.call("GET", "/metrics")[0] == 401
        assert server.call("GET", "/health")[0] == 200
        client = server.client.with_options(api_key="secret")
        assert client.completions.create(model="tiny", prompt=PROMPT).choices[0].text


def test_without_a_token_only_names_of_this_machine_are_answered(live: Live) -> None:
    for host, status in (("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 421)):
        assert live.call("GET", "/v1/models", headers={"Host": host})[0] == status, host
    form = {"Content-Type": "text/plain"}  # what a web page may send to others without being asked
    assert live.post("/v1/completions", {"prompt": "x"}, form)[0] == 415


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_another_host_needs_a_token(host: str) -> None:
    with pytest.raises(InputError, match="needs a token: set BESSEMER_API_TOKEN or pass --token-file"):
        ServerOptions(host=host)
    assert ServerOptions(host=host, token="secret").host == host


def test_the_command_refuses_before_it_listens(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BESSEMER_API_TOKEN", raising=False)
    with pytest.raises(InputError, match="is open to other machines"):
        CliRunner().invoke(command, ["none", "--host", "0.0.0.0"], catch_exceptions=False)
    monkeypatch.setenv("BESSEMER_API_TOKEN", "secret")
    with pytest.raises(InputError, match="no run 'none'"):
        CliRunner().invoke(command, ["none", "--host", "0.0.0.0", "--runs", str(tmp_path)], catch_exceptions=False)


def test_tokens_come_from_a_file_or_the_environment(tmp_path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert read_token(str(file), "from-environment") == "from-file"
    assert read_token(None, "from-environment") == "from-environment"
    assert read_token(None, "") is read_token(None, None) is None
    file.write_text("\n")
    for problem, name, variable in (("is empty", file, None), ("cannot be read", tmp_path / "no", None)):
        with pytest.raises(InputError, match=problem):
            read_token(str(name), variable)
    with pytest.raises(InputError, match="one word"):
        read_token(None, "two words")


def test_a_port_in_use_and_wrong_numbers_are_said() -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(InputError, match=r"cannot listen on 127\.0\.0\.1.* Choose another --port"):
            listen("127.0.0.1", taken.getsockname()[1])
    for wrong in ({"port": -1}, {"port": 70000}, {"slots": 0}, {"queue": 0}, {"timeout": 0.0}):
        with pytest.raises(InputError, match=f"--{next(iter(wrong))} must be"):
            ServerOptions(**wrong)
