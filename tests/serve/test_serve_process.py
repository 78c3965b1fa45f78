"""The command itself: it says where it listens, serves, and on SIGTERM lets answers finish. Many clients at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.documented import ROOT, blocks
from tests.serve.conftest import Live, make_service
from tests.tiny_run import make_run

from bessemer.generate import Engine, EngineThread, LoadedModel, Request, SamplingOptions

CLIENTS = 200


@contextlib.contextmanager
def serving(run: Path, home: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, base address) of `bessemer serve RUN --port 0`."""
    variables = {**os.environ, "BESSEMER_HOME": str(home), "JAX_NUM_CPU_DEVICES": "1"}
    words = [sys.executable, "-m", "bessemer", "serve", str(run), "--port", "0", *arguments]
    process = subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"at (http://127\.0\.0\.1:\d+/v1) ", line):
                assert any("preparing the model; the first start also compiles" in line for line in said[:-1]), said
                yield process, found.group(1)
                break
        else:
            raise AssertionError("it ended before it served")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_lets_the_answer_finish(tmp_path: Path, home: Path, number: signal.Signals) -> None:
    run = make_run(tmp_path, steps=(20,))
    with serving(run.path, home) as (process, address):
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
        ask = {"model": "tiny", "prompt": "The", "max_tokens": 24, "temperature": 0}
        whole = client.completions.create(**ask).choices[0].text
        stream = client.completions.create(stream=True, **ask)
        process.send_signal(number)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole
        assert process.wait(120) == 0
        assert process.stderr.read().strip() == "stopped."
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


@pytest.mark.slow
def test_many_streams_at_once_none_lost_none_mixed(loaded: LoadedModel) -> None:
    """200 clients on 16 slots: each gets, to its end, the text that its prompt and seed have alone."""
    engine = Engine.of(loaded, slots=16, queue=CLIENTS)

    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, list[str | None]]:
        stream = await client.completions.create(
            model="tiny", prompt=f"cat {number}", seed=number, temperature=1, max_tokens=20, stream=True
        )
        pieces, ends = "", []
        async for chunk in stream:
            pieces += chunk.choices[0].text
            ends.append(chunk.choices[0].finish_reason)
        return pieces, ends

    async def every(port: int) -> list[tuple[str, list[str | None]]]:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300)
        async with client:
            return await asyncio.gather(*(one(client, number) for number in range(CLIENTS)))

    with EngineThread(engine):
        with Live(make_service(loaded, engine), contextlib.nullcontext) as live:
            given = asyncio.run(every(live.port))
        assert engine.active == engine.waiting == 0
        tokenizer = loaded.tokenizer
        for number, (text, ends) in enumerate(given):
            prompt = [tokenizer.bos_id, *tokenizer.encode(f"cat {number}")]
            request = Request(prompt, 20, SamplingOptions(temperature=1.0), seed=number)
            wanted = engine.submit(request).result(300).samples[0]
            assert text == wanted.text, number
            assert ends[-1] in ("stop", "length") and set(ends[:-1]) <= {None}
    assert len({text for text, _ in given}) > CLIENTS * 0.9, "texts that are all alike would prove nothing"


def test_the_examples_of_the_page_work(live: Live) -> None:
    """The Python and curl lines of docs/serving.md, at this server's port and with its model."""
    page = ROOT / "docs" / "serving.md"
    here = [("127.0.0.1:8000", f"127.0.0.1:{live.port}"), ('"served"', '"tiny"')]
    [code] = blocks(page, "python")
    lines = [line for text in blocks(page, "bash") for line in text.splitlines() if line.startswith("curl ")]
    assert len(lines) == 4
    for old, new in here:
        code, lines = code.replace(old, new), [line.replace(old, new) for line in lines]
    for words in ([sys.executable, "-c", code], *(["bash", "-c", line] for line in lines)):
        result = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0 and result.stdout, (words, result.stderr)
        assert '"error"' not in result.stdout, result.stdout
