"""benchmarks/fp8.py at a toy size, in this process: layers are built, compiled and timed in each kind of form."""

from __future__ import annotations

import json
import sys

import fp8 as benchmark
import pytest


def test_each_case_and_form_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--width", "128", "--tokens", "32", "--sequence", "16", "--repeats", "1", "--cases", "mlp,qkv"]
    forms = ("bf16", "tensorwise/known", "tensorwise/triton")
    monkeypatch.setattr(sys, "argv", ["fp8.py", *words, "--forms", ",".join(forms)])
    benchmark.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = [(case, form) for case in ("mlp 128", "qkv 128") for form in forms]
    assert [(line["case"], line["form"]) for line in lines] == wanted
    assert all(line["ms"] > 0 for line in lines)
