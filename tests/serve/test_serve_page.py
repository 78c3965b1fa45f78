"""`GET /` says how to use the server: a page in a browser, text in a terminal, and no secrets to strangers."""

from __future__ import annotations

from tests.serve.conftest import Gate, Live, make_service

from bessemer.generate import Engine, LoadedModel

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def test_the_page_shows_commands_that_work(live: Live) -> None:
    status, page, headers = live.call("GET", "/", headers=HTML)
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    address = f"http://127.0.0.1:{live.port}/v1"
    assert address in page and "tiny, step 20" in page and "/v1/chat/completions" in page
    assert "default-src 'none'" in headers["Content-Security-Policy"] and "<script" not in page
    status, text, headers = live.call("GET", "/")
    assert status == 200 and headers["Content-Type"].startswith("text/plain") and "<" not in text
    start = text.index("from openai")
    code = text[start : text.index("\n```", start)]
    exec(compile(code.replace("stream=True", "stream=True, max_tokens=2"), "page", "exec"), {})
    body = text.split("-d '")[1].split("'")[0].encode()
    assert live.post("/v1/chat/completions", body.replace(b"50", b"2"))[0] == 200


def test_a_guarded_server_names_no_model_to_strangers(loaded: LoadedModel, engine: Engine, gate: Gate) -> None:
    with Live(make_service(loaded, engine, token="secret"), gate) as live:
        for headers in ({}, HTML):
            status, text, _ = live.call("GET", "/", headers=headers)
            assert status == 200 and "Bearer" in text and "tiny" not in text and "secret" not in text


def test_a_foreign_host_cannot_write_into_the_page(loaded: LoadedModel, engine: Engine, gate: Gate) -> None:
    with Live(make_service(loaded, engine, token="secret"), gate) as live:
        _, page, _ = live.call("GET", "/", headers={**HTML, "Host": "x/<b>evil</b>"})
        assert "<b>" not in page
