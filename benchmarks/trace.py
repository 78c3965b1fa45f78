"""Where the time of a training step goes: device kernels by kind and by HLO instruction.

    python benchmarks/trace.py --depth 12 --batch 32 --sequence 2048 --accumulation 4 --vocab 32768 --window L

    python benchmarks/trace.py --run runs/NAME     # a run with callbacks=[profiler] (logging.profile_steps=3)

Takes the arguments of step.py (one case), or a run that traced itself. Prints the longest instructions with the JAX
operation they come from; the milliseconds per step by kind of kernel in one JSON line last.
"""

from __future__ import annotations

import argparse
import collections
import glob
import json
import pathlib
import re
import sys
import tempfile
from typing import Any

import jax
from step import SWEPT, arguments, build

STEPS = 3
KINDS = (
    ("attention", r"cudnn|sdpa|flash|fmha"),
    ("matmul", r"gemm|nvjet|cutlass|cublas|wgrad|sm90_xmma|relu_squared"),
    ("copy", r"memcpy|memset|copy|transpose"),
    ("scatter", r"scatter|sort"),
    ("reduce", r"reduce"),
    ("loop", r"fusion|loop|wrapped|concatenate|dynamic|convert|slice|select|broadcast"),
)


def kind_of(kernel: str, operation: str) -> str:
    text = f"{kernel} {operation}".lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, text)), "other")


def sources(hlo: str) -> dict[str, tuple[str, str]]:
    """instruction → (result shape, JAX operation) of a compiled module's text."""
    found = {}
    for line in hlo.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (.*?) [\w-]+\(", line)
        if match:
            name = re.search(r'op_name="([^"]*)"', line)
            found[match[1]] = (match[2][:60], name[1] if name else "")
    return found


def device_events(directory: str, known: dict[str, tuple[str, str]] | None = None) -> list[tuple[str, str, float]]:
    """Return (kernel, instruction, ms) of every device event in a profile; add their JAX operations to `known`."""
    path = glob.glob(f"{directory}/**/*.xplane.pb", recursive=True)[0]
    events = []
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats: dict[str, Any] = {key: value for key, value in event.stats if key}
                operation = str(stats.get("hlo_op", ""))
                if known is not None:
                    known[operation] = (operation, str(stats.get("tf_op", stats.get("name", ""))))
                events.append((event.name, operation, event.duration_ns / 1e6))
    return events


def trace_of_run(given: list[str]) -> None:
    """Report the profile that a run made of itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS, help="logging.profile_steps of the run")
    parser.add_argument("--top", type=int, default=30)
    args = parser.parse_args(given)
    known: dict[str, tuple[str, str]] = {}
    events = device_events(str(args.run / "profile"), known)
    report(events, known, {"run": args.run.name}, args.top, args.steps)


def main() -> None:
    if "--run" in sys.argv:
        return trace_of_run(sys.argv[1:])
    args = arguments()
    case = {name: str(getattr(args, name)) for name in SWEPT}
    step, state, batch, _ = build(case, args)
    key = jax.random.key(1)
    compiled = step.lower(state, batch, key).compile()
    for _ in range(2):
        state, loss, _ = compiled(state, batch, key)
    loss.block_until_ready()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(STEPS):
                state, loss, _ = compiled(state, batch, key)
            loss.block_until_ready()
        events = device_events(directory)
    if args.hlo:
        pathlib.Path(args.hlo).write_text(compiled.as_text())
    report(events, sources(compiled.as_text()), case, args.top)


def report(
    events: list[tuple[str, str, float]],
    known: dict[str, tuple[str, str]],
    case: dict[str, str],
    top: int,
    steps: int = STEPS,
) -> None:
    kinds: dict[str, float] = collections.defaultdict(float)
    operations: dict[tuple[str, str, str], list[float]] = collections.defaultdict(list)
    for kernel, operation, ms in events:
        kinds[kind_of(kernel, operation)] += ms / steps
        shape, source = known.get(operation, ("", ""))
        operations[re.sub(r"_\d+$", "", kernel), re.sub(r"\.\d+$", "", shape), source[-80:]].append(
            ms
        )  # layers together
    for (kernel, shape, source), times in sorted(operations.items(), key=lambda item: -sum(item[1]))[:top]:
        total, count = sum(times) / steps, len(times) / steps
        print(f"{total:8.2f} ms {count:6.1f}×  {kernel[:44]:44} {shape:60} {source}")
    ordered = {kind: round(ms, 2) for kind, ms in sorted(kinds.items(), key=lambda item: -item[1])}
    print(json.dumps({**case, "device_ms": round(sum(kinds.values()), 2), **ordered}))


if __name__ == "__main__":
    main()
