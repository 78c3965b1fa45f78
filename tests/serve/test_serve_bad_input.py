"""Whatever a client sends, it gets JSON that says what is wrong: never a traceback, never silence."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serve.conftest import CONTEXT, Live, until

BODIES = [
    (b"", None, "not JSON"),
    (b"{", None, "not JSON"),
    (b"\xff\xfe", None, "not JSON"),
    (b'{"prompt": NaN}', None, "NaN is not a number in JSON"),
    (b'{"seed": ' + b"9" * 5000 + b"}", None, "not JSON"),
    (b"[" * 100_000, None, "nested too deeply"),
    (b'"text"', None, "a JSON object, not a string"),
    ({}, "prompt", "missing"),
    ({"prompt": 3}, "prompt", "a string or an array of token ids, not an integer"),
    ({"prompt": []}, "prompt", "an empty array"),
    ({"prompt": ["a", 3]}, "prompt", "not an integer"),
    ({"prompt": [1, -1]}, "prompt", "between 0 and 299"),
    ({"prompt": [300]}, "prompt", "between 0 and 299"),
    ({"prompt": ["a"] * 200}, "prompt", "at most 128 prompts"),
    (b'{"prompt": "\\ud800"}', "prompt", "half a surrogate pair"),
    ({"prompt": "xyz " * 100}, None, f"this model's context {CONTEXT}"),
    ({"prompt": "a" * 1_000_000}, None, f"cannot fit this model's context of {CONTEXT} tokens"),
    ({"prompt": [1] * 200_000}, None, f"this model's context {CONTEXT}"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "between 1 and"),
    ({"prompt": "a", "max_tokens": "8"}, "max_tokens", "an integer, not a string"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens", "an integer, not true or false"),
    ({"prompt": "a", "temperature": -1}, "temperature", "between 0 and 2"),
    ({"prompt": "a", "temperature": [1]}, "temperature", "a number, not an array"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature", "between 0 and 2; got inf"),
    ({"prompt": "a", "top_p": 0}, "top_p", "set temperature to 0"),
    ({"prompt": "a", "n": 0}, "n", "between 1 and 128"),
    ({"prompt": "a", "n": 65}, "n", "more than this server's queue of 64 takes"),
    ({"prompt": "a", "seed": -1}, "seed", "between 0 and 4294967295"),
    ({"prompt": "a", "stream": "yes"}, "stream", "true or false"),
    ({"prompt": "a", "stop": ["", "x"]}, "stop", "empty string"),
    ({"prompt": "a", "stop": list("123456789")}, "stop", "at most 8"),
    ({"prompt": "a", "stop": [3]}, "stop", "a string, not an integer"),
    ({"prompt": "a", "logprobs": 6}, "logprobs", "between 0 and 5"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty", "between -2 and 2"),
    ({"prompt": "a", "frequency_penalty": "high"}, "frequency_penalty", "must be a number"),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"prompt": "a", "echo": True, "logprobs": 0}, "echo", "not supported"),
    ({"prompt": "a", "stream_options": {}}, "stream_options", '"stream": true'),
    ({"prompt": "a", "best_of": 4}, "best_of", "not supported"),
    ({"prompt": "a", "max_token": 4}, "max_token", "Did you mean 'max_tokens'?"),
    ({"prompt": "a", "model": 3}, "model", "a string"),
]
CHATS = [
    ({}, "messages", "missing"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", "an array"),
    ({"messages": ["hi"]}, "messages[0]", "an object with role and content, not a string"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "a string, not null"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "one of system, user, assistant"),
    ({"messages": [{"role": {}, "content": "x"}]}, "messages[0].role", "one of system, user, assistant"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "text parts"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls", "tool_calls"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools", "not supported"),
    ({"messages": [{"role": "user", "content": "x"}], "logprobs": 1}, "logprobs", "true or false"),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "top_logprobs", '"logprobs": true'),
    (
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "between 0 and 20",
    ),
    (
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
        "response_format",
        "'response_format' is not supported by this server. Type 'json_object' cannot be enforced",
    ),
    ({"messages": [{"role": "user", "content": "x"}], "response_format": "json"}, "response_format", "an object"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": {}}, "tools", "must be an array"),
    ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice", "cannot be forced"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "system, user, assistant."),
]
CHATS.append(({"messages": [{"role": "user", "content": "a" * 1000}]}, None, "cannot fit"))
CASES = [("/v1/completions", *case) for case in BODIES] + [("/v1/chat/completions", *case) for case in CHATS]


@pytest.mark.parametrize(("path", "body", "param", "words"), CASES, ids=lambda value: str(value)[:40])
def test_a_wrong_body_is_400_and_says_what(live: Live, path: str, body, param: str | None, words: str) -> None:
    status, document, _ = live.post(path, body)
    error = document["error"]
    assert status == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and words in error["message"], error
    assert "Traceback" not in error["message"]


def test_wrong_paths_and_methods_are_json_too(live: Live) -> None:
    for method, path, wanted in (("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)):
        status, document, _ = live.call(method, path)
        assert status == wanted and path in document["error"]["message"]


def test_fields_that_ask_for_nothing_are_fine(live: Live) -> None:
    body = {"prompt": "a", "max_tokens": 1, "user": "me", "best_of": 1, "logit_bias": {}, "stop": None}
    body |= {
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "tools": [],
        "response_format": {"type": "text"},
        "suffix": None,
        "metadata": {"a": "b"},
        "seed": None,
    }
    assert live.post("/v1/completions", body)[0] == 200
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "top_logprobs": 0}
    chat |= {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"}}
    assert live.post("/v1/chat/completions", chat)[0] == 200


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = (
    "model prompt messages max_tokens temperature top_p top_k n stop seed stream logprobs echo stream_options min_p "
    "user tools tool_choice logit_bias repetition_penalty presence_penalty frequency_penalty top_logprobs "
    "response_format"
)
text = st.text(max_size=10)
messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": text})
right = {
    "/v1/completions": {"prompt": text | st.lists(st.integers(0, 299), min_size=1, max_size=5)},
    "/v1/chat/completions": {"messages": st.lists(messages, min_size=1, max_size=3)},
}
optional = {"n": st.integers(1, 4), "stream": st.booleans(), "temperature": st.floats(0, 2), "stop": text | junk}


def bodies(path: str) -> st.SearchStrategy[bytes]:
    """Bytes, JSON, and requests that are right but for a field or two."""
    request = st.fixed_dictionaries(right[path], optional=optional)
    changes = st.dictionaries(st.sampled_from(NAMES.split()) | text, junk, max_size=2)
    changed = st.builds(lambda good, change: json.dumps({**good, **change}).encode(), request, changes)
    return st.one_of(changed, changed, junk.map(lambda value: json.dumps(value).encode()), st.binary(max_size=40))


asks = st.sampled_from(sorted(right)).flatmap(lambda path: st.tuples(st.just(path), bodies(path)))


@pytest.mark.slow
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(ask=asks)
def test_anything_gets_an_answer(impatient: Live, ask: tuple[str, bytes]) -> None:
    """Rounds are held back, so what happens to be right ends as late: only the time limit may be a 5xx."""

    def forgotten() -> bool:
        impatient.gate.allow()
        return impatient.engine.waiting == 0

    with impatient.gate.closed():
        status, document, _ = impatient.post(*ask)
        if status == 200 and isinstance(document, str):  # a stream has begun: the error is its last event
            document = json.loads(document.strip().split("data: ")[-1])
        assert status in (200, 400, 404, 504), document
        assert document["error"]["message"]
        until(forgotten)
