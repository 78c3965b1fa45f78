"""Long runs are indexed before somebody looks: only those, in the order of the list, which says how far it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.dash.live import make_run, serving, until

from bessemer.dash import ahead as ahead_module
from bessemer.dash import metrics as metrics_module
from bessemer.dash.ahead import Ahead
from bessemer.dash.files import Folder
from bessemer.dash.metrics import cache_file, kept_bytes


def test_long_runs_are_read_ahead_once_and_the_list_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cache = tmp_path / "runs", tmp_path / "cache"
    long = [make_run(root, name, rows=3000).metrics.resolve() for name in ("older", "newer")]
    make_run(root, "short")
    monkeypatch.setattr(ahead_module, "LONG", 1 << 18)
    with serving(root, cache) as live:
        dash = live.dash
        assert live.get("/api/runs")["indexing"] is None
        dash.ahead.start(lambda: ["newer", "older", "short", "gone"])
        until(lambda: dash.ahead.of == 2)
        state = live.get("/api/runs")["indexing"]
        assert state is None or (state["of"] == 2 and state["done"] < 2)
        until(lambda: dash.ahead.state is None)
        assert [kept_bytes(cache_file(cache, path), path) for path in long] == [path.stat().st_size for path in long]
        assert len(list(cache.iterdir())) == 2, "a short run is read faster than found, and nothing is left over"
        monkeypatch.setattr(metrics_module, "blocks", lambda data: pytest.fail("it is read from the cache"))
        assert live.get("/api/run?run=older")["rows"] == 3600
    again = Ahead(Folder(root), cache)
    again.start(lambda: ["newer", "older", "short"])
    assert again._thread is not None
    again._thread.join(300)
    assert again.of == 0, "the next start has nothing to do, and starts nothing"


def test_the_process_ends_with_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cache = tmp_path / "runs", tmp_path / "cache"
    for number in range(20):
        make_run(root, f"run-{number}", rows=2500)
    monkeypatch.setattr(ahead_module, "LONG", 1 << 18)
    monkeypatch.setattr(ahead_module, "PATIENCE", 300)  # of the lowest priority, it may get no turn for long
    ahead = Ahead(Folder(root), cache)
    ahead.start(lambda: [f"run-{number}" for number in range(20)])
    process = until(lambda: ahead._process)
    assert os.getpgid(process.pid) == process.pid, "Ctrl-C in the terminal is the page's alone"
    ahead.close()
    assert process.poll() == 0 and ahead.state is None
