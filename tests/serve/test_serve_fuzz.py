"""Seeded requests with one field that cannot be right: always a 400 that names it, never accepted, never a 5xx."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tests.serve.conftest import Live

RIGHT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The cats", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}
NUMBERS = ("max_tokens", "temperature", "top_p", "top_k", "n", "seed", "presence_penalty", "frequency_penalty")


def wrong_request(seed: int) -> tuple[str, bytes, str]:
    """(path, body, the field that is wrong); an empty field: the body as a whole."""
    draw = random.Random(f"requests {seed}")
    path = draw.choice(sorted(RIGHT))
    body = dict(RIGHT[path])
    kind = draw.randrange(5)
    if kind == 0:  # not JSON, or not an object
        whole = json.dumps(body).encode()
        cut = whole[: draw.randrange(len(whole))]
        return (
            path,
            draw.choice([cut, whole + draw.randbytes(3), b"[%s]" % whole, b"[" * 50_000, draw.randbytes(20)]),
            "",
        )
    if kind == 1:  # a name that nobody knows
        name = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz_", k=draw.randint(6, 12))) + "_x"
        return path, json.dumps({**body, name: 1}).encode(), name
    if kind == 2:  # a number of another type, or far outside
        name = draw.choice(NUMBERS)
        value = draw.choice(["1", [1], {"a": 1}, True, -(10**9), 10**30, "high"])
        return path, json.dumps({**body, name: value}).encode(), name
    if kind == 3:
        name = draw.choice(["prompt", "messages"] if path.endswith("/completions") else ["messages"])
        name = name if name in body else next(iter(body))
        value = draw.choice([3, {}, [], [[]], True, [{"role": 3, "content": "a"}], [None], [1.5]])
        return path, json.dumps({**body, name: value}).encode(), name
    value = draw.choice([3, [3], [""], {"a": 1}, ["x"] * 100])
    return path, json.dumps({**body, "stop": value}).encode(), "stop"


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(50), marks=pytest.mark.slow, id="50"),
        pytest.param(range(50, 550), marks=pytest.mark.long, id="500"),
    ],
)
def test_requests_that_are_wrong_are_refused(seeds: range, live: Live) -> None:
    failed = []
    for seed in seeds:
        path, body, field = wrong_request(seed)
        status, document, _ = live.post(path, body)
        named = isinstance(document, dict) and field in json.dumps(document.get("error", {}))
        if status != 400 or not named:
            failed.append((seed, path, body[:120], field, status, document))
    assert failed == []
