"""Counters of the server, as the text that Prometheus reads."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bessemer.generate import Engine


class Metrics:
    """Counted by the server itself; the engine's own numbers are read when they are asked for."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # (endpoint, status)
        self.gone = 0  # clients that left before their answer was whole
        self.late = 0  # requests that ran out of time
        self.seconds = Timer()
        self.first_token = Timer()

    def render(self, engine: Engine) -> str:
        lines: list[str] = []

        def add(name: str, kind: str, about: str, values: list[tuple[str, Any]]) -> None:
            name = f"bessemer_{name}"
            lines.extend([f"# HELP {name} {about}", f"# TYPE {name} {kind}"])
            lines.extend(f"{name}{suffix} {value}" for suffix, value in values)

        served = [
            (f'{{endpoint="{endpoint}",status="{status}"}}', count)
            for (endpoint, status), count in sorted(self.requests.items())
        ]
        add("requests_total", "counter", "Requests answered.", served)
        add(
            "disconnects_total",
            "counter",
            "Clients that left before their answer was whole.",
            [("", self.gone)],
        )
        add("timeouts_total", "counter", "Requests that ran out of time.", [("", self.late)])
        add("request_seconds", "summary", "Time of a generation request.", self.seconds.values())
        add("first_token_seconds", "summary", "Time to the first token.", self.first_token.values())
        add("rows_active", "gauge", "Continuations being written.", [("", engine.active)])
        add("rows_waiting", "gauge", "Continuations in the queue.", [("", engine.waiting)])
        add("slots", "gauge", "Continuations that can be written at once.", [("", engine.slots)])
        add("prompt_tokens_total", "counter", "Tokens read.", [("", engine.prompt_tokens)])
        add("tokens_total", "counter", "Tokens written.", [("", engine.tokens)])
        add("rounds_total", "counter", "Rounds of the engine.", [("", engine.rounds)])
        add("compilations_total", "counter", "Programs compiled.", [("", engine.compilations)])
        return "\n".join(lines) + "\n"


class Timer:
    """Sum and number of durations."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def add(self, seconds: float) -> None:
        self.total += seconds
        self.count += 1

    def values(self) -> list[tuple[str, Any]]:
        return [("_sum", f"{self.total:.6f}"), ("_count", self.count)]
