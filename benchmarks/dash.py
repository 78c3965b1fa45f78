"""The dash over many long runs: how fast the list, a run and an overlay open, how soon a new row shows, and whether its
memory stays flat.

    python benchmarks/dash.py                       # 100 runs of 100,000 rows, in a temporary directory (3 GB)
    python benchmarks/dash.py --runs 10 --rows 10000 --updates 300

A real `bessemer dash` process with an empty cache is asked what its page asks. "Indexed": the second process, which
finds the first one's cache. Files were written just before, so the disk is not part of it. One JSON line per case.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ["loss", "loss_smooth", "val_loss", "val_bpb", "lr", "grad_norm", "time/tok_per_s", "time/mfu"]
VALIDATE = 200  # rows between validations
POLL = 1.0  # seconds: the page's own


def row(step: int, rng: random.Random) -> dict[str, Any]:
    smooth = 2 + 8 / math.sqrt(1 + step)
    return {
        "step": step,
        "tokens": step * 524_288,
        "epoch": 0,
        "total_training_flops": step * 5.24e17,
        "loss": smooth + rng.gauss(0, 0.1),
        "lr": 0.02,
        "grad_norm": math.exp(rng.gauss(0, 0.2)),
        "loss_smooth": smooth,
        "target_tokens": step * 524_288,
        "skipped_steps": 0,
        "clip_share": 0.1,
        "time/step_ms": 880 + rng.gauss(0, 5),
        "time/tok_per_s": 590_000 + rng.gauss(0, 4000),
        "time/mfu": 0.46,
        "time/total": step * 0.88,
        "time/eta": 1.0,
    }


def body(rows: int, seed: int) -> bytes:
    rng = random.Random(seed)
    lines = []
    for step in range(1, rows + 1):
        lines.append(json.dumps(row(step, rng)))
        if step % VALIDATE == 0:
            lines.append(json.dumps({"step": step, "val_loss": 2.5, "val_bpb": 0.8}))
    return ("\n".join(lines) + "\n").encode()


def make_runs(root: Path, runs: int, rows: int) -> None:
    """Five different metrics files, shared out; each run has a status, settings and facts of its own."""
    bodies = [body(rows, seed) for seed in range(min(5, runs))]
    for number in range(runs):
        run = root / f"run-{number:03d}"
        (run / "checkpoints").mkdir(parents=True)
        (run / "metrics.jsonl").write_bytes(bodies[number % len(bodies)])
        settings = "\n".join(f"  key_{n}: {n}" for n in range(150))
        (run / "config.yaml").write_text(f"training:\n  steps: {rows}\n  seed: {number}\n{settings}\n")
        (run / "facts.json").write_text(json.dumps({"steps": rows, "parameters": {"total": 10**9}}))
        status = {"state": "done", "step": rows, "heartbeat": time.time() - number}
        (run / "status.json").write_text(json.dumps(status))


class Page:
    """What the page asks, over one connection."""

    def __init__(self, port: int):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self.tags: dict[str, str] = {}

    def get(self, path: str) -> Any:
        """The document; None when the server says that it has not changed."""
        known = {"If-None-Match": self.tags[path]} if path in self.tags else {}
        self.connection.request("GET", path, headers=known)
        response = self.connection.getresponse()
        data = response.read()
        if response.status == 304:
            return None
        assert response.status == 200, (path, response.status, data[:300])
        self.tags[path] = response.headers["ETag"]
        return json.loads(data)

    def curves(self, runs: list[str]) -> str:
        words = [*(f"run={run}" for run in runs), *(f"name={name}" for name in NAMES)]
        return f"/api/curves?{'&'.join(words)}&x=step&smooth=0.9&points=1400"

    def open_runs(self, runs: list[str]) -> float:
        """Seconds until every document of these runs' page is there."""
        begun = time.monotonic()
        if len(runs) == 1:
            self.get(f"/api/run?run={runs[0]}")
        self.get("/api/charts?" + "&".join(f"run={run}" for run in runs))
        found = self.get(self.curves(runs))
        assert len(found["curves"]) == len(runs) * len(NAMES)
        return time.monotonic() - begun


@contextlib.contextmanager
def dash(root: Path, home: Path) -> Iterator[tuple[Page, int, float]]:
    """(page, pid, seconds to its start) of `bessemer dash ROOT`."""
    begun = time.monotonic()
    words = [sys.executable, "-m", "bessemer", "dash", str(root), "--port", "0", "--no-browser"]
    environment = {**os.environ, "BESSEMER_HOME": str(home)}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/", line):
                yield Page(int(found.group(1))), process.pid, time.monotonic() - begun
                break
        else:
            raise SystemExit("bessemer dash ended before it served")
    finally:
        process.terminate()
        process.wait()


def resident(pid: int) -> float:
    """MiB of memory of a process that is its own: not the cache files it maps."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]


def say(case: str, **values: Any) -> None:
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
    print(json.dumps({"case": case, **rounded, "load": round(os.getloadavg()[0], 1)}), flush=True)


def opening(root: Path, home: Path, names: list[str]) -> None:
    for label in ("cold", "indexed"):
        with dash(root, home) as (page, pid, started):
            begun = time.monotonic()
            count = len(page.get("/api/runs")["runs"])
            say(f"list, {label}", seconds=time.monotonic() - begun, process_start=started, runs=count)
            say(f"one run, {label}", seconds=page.open_runs(names[-1:]))
            say(f"overlay of {len(names[:10])}, {label}", seconds=page.open_runs(names[:10]), mib=resident(pid))


def ahead(root: Path, home: Path, names: list[str]) -> None:
    """Nobody asks until every long run is indexed; then ten of them are laid over each other."""
    with dash(root, home) as (page, pid, _):
        begun, most, of = time.monotonic(), 0.0, 0
        while (found := page.get("/api/runs")) is None or found["indexing"] or not of:
            of = max(of, found["indexing"]["of"] if found and found["indexing"] else 0)
            most = max(most, resident(pid))
            time.sleep(POLL / 2)
            if time.monotonic() - begun > 600:
                raise SystemExit("the runs were not indexed in ten minutes")
        say("indexed ahead", seconds=time.monotonic() - begun, runs=of, mib=most)
        say(f"overlay of {len(names[:10])}, indexed ahead", seconds=page.open_runs(names[:10]))


def freshness(root: Path, home: Path, name: str, trials: int = 20) -> None:
    """From the moment a row is in the file to the answer in which a page that asks once a second sees it."""
    rng, waits = random.Random(0), []
    with dash(root, home) as (page, _, _):
        path = page.curves([name])
        last = page.get(path)["curves"][0]["x"][-1]
        for _ in range(trials):
            last += 1
            next_poll = time.monotonic() + POLL
            time.sleep(rng.uniform(0, POLL))
            append(root / name, int(last), rng)
            written = time.monotonic()
            while True:
                time.sleep(max(0.0, next_poll - time.monotonic()))
                found = page.get(path)
                if found and found["curves"][0]["x"][-1] == last:
                    break
                next_poll += POLL
            waits.append(time.monotonic() - written)
    say("a new row shows", median=sorted(waits)[len(waits) // 2], most=max(waits), trials=trials)


def append(run: Path, step: int, rng: random.Random) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row(step, rng)) + "\n")


def memory(root: Path, home: Path, name: str, updates: int) -> None:
    """As many new rows, each followed by all that the page of that run asks, as fast as the server answers."""
    rng = random.Random(1)
    with dash(root, home) as (page, pid, _):
        page.open_runs([name])
        first = page.get(f"{page.curves([name])}&from=0")["curves"][0]["x"][-1]
        seen, begun = [], time.monotonic()
        for number in range(1, updates + 1):
            append(root / name, int(first) + number, rng)
            page.get("/api/runs")
            page.get(f"/api/run?run={name}")
            found = page.get(page.curves([name]))
            assert found["curves"][0]["x"][-1] == first + number
            if number % max(1, updates // 6) == 0:
                seen.append(round(resident(pid), 1))
        say("memory over updates", updates=updates, mib=seen, seconds=time.monotonic() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--updates", type=int, default=3600)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bessemer-dash-"))
    root, home = folder / "runs", folder / "home"
    try:
        make_runs(root, options.runs, options.rows)
        names = sorted(path.name for path in root.iterdir())
        size = sum((root / name / "metrics.jsonl").stat().st_size for name in names)
        say("made", runs=options.runs, rows=options.rows, gib=size / 2**30)
        opening(root, home, names)
        ahead(root, folder / "other-home", names)
        freshness(root, home, names[0])
        memory(root, home, names[1], options.updates)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
