"""Curves: every row is read once, whatever the file holds; thinning loses no spike; smoothing is the formula."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.dash import metrics as growing_module
from bessemer.dash.charts import View, charts_of, curve, smoothed, thinned
from bessemer.dash.files import Folder
from bessemer.dash.metrics import MOST_NAMES, Block, Columns, Index, RunMetrics, blocks


def lines(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def reader(root: Path, cache: Path | None = None) -> RunMetrics:
    return RunMetrics(Folder(root), root.resolve() / "metrics.jsonl", cache)


def test_rows_arrive_as_they_are_written_and_a_torn_one_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    found = reader(tmp_path)
    assert found.refresh().count == 0, "no file yet"
    path.write_text(lines({"step": 1, "loss": 3.0}) + '{"step": 2, "lo')
    assert found.refresh()["step"].tolist() == [1]
    with open(path, "a") as file:
        file.write('ss": 2.0}\n' + lines({"step": 3, "val_loss": 2.5}))
    columns = found.refresh()
    assert columns["step"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(columns["loss"], [3.0, 2.0, math.nan])
    np.testing.assert_array_equal(columns["val_loss"], [math.nan, math.nan, 2.5])


def test_a_resumed_run_that_rewrote_its_rows_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    found = reader(tmp_path)
    path.write_text(lines(*({"step": step, "loss": 1.0} for step in range(10))))
    assert found.refresh().count == 10
    shorter = tmp_path / "other"
    shorter.write_text(lines(*({"step": step, "loss": 2.0} for step in range(20))))
    os.replace(shorter, path)  # longer than what was read, and other rows
    assert found.refresh()["loss"].tolist() == [2.0] * 20
    path.unlink()
    assert found.refresh().count == 0


def test_hostile_lines_are_counted_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_module, "CHUNK", 1 << 21)
    odd = [
        "not json",
        "[1, 2]",
        "[" * 200_000,
        '{"step": 3, "loss": NaN, "a": Infinity, "b": 1e999, "c": ' + "9" * 400 + "}",
        json.dumps({"step": 4, "text": "x" * 500_000, "flag": True, "list": [1], "n" * 200: 1}),
        '{"step": 5, "text": "' + "y" * (5 << 20) + '"}',  # longer than a chunk
        '{"step": ' + "8" * 5000 + "}",
        "\x00\xff",
    ]
    (tmp_path / "metrics.jsonl").write_text(lines({"step": 1, "loss": 1.0}, *odd, {"step": 6, "loss": 2.0}))
    columns = reader(tmp_path).refresh()
    assert columns["step"].tolist() == [1, 3, 4, 6] and columns.bad == 6
    assert set(columns.names) == {"step", "loss", "a", "b", "c"}
    drawn = curve(columns, "loss", View())
    assert drawn == {"x": [1.0, 6.0], "y": [1.0, 2.0]}
    assert curve(columns, "a", View()) == {"x": [], "y": []}
    assert curve(columns, "nothing", View()) is None


def test_names_without_end_are_bounded(tmp_path: Path) -> None:
    rows = [{"step": step, **{f"m{step}_{n}": 1.0 for n in range(200)}} for step in range(10)]
    (tmp_path / "metrics.jsonl").write_text(lines(*rows))
    columns = reader(tmp_path).refresh()
    assert len(columns.names) == MOST_NAMES and columns["step"].tolist() == list(range(10))
    assert columns.notes == [
        f"metrics.jsonl has more than {MOST_NAMES} metrics: only the first {MOST_NAMES} are shown."
    ]


MEASURED = """
import sys
from pathlib import Path
from bessemer.dash.files import Folder
from bessemer.dash.metrics import RunMetrics
path = Path(sys.argv[1])
columns = RunMetrics(Folder(path.parent), path, None).refresh()
assert columns.count == int(sys.argv[2]) and columns.extra_names, (columns.count, columns.notes)
status = Path("/proc/self/status").read_text()  # not ru_maxrss, which keeps that of the process before exec
print(int(status.split("VmHWM:")[1].split()[0]) >> 10)
"""


@pytest.mark.parametrize("escaped", [False, True])
def test_a_hundred_thousand_names_take_bounded_memory(tmp_path: Path, escaped: bool) -> None:
    """Rows of equal length, each with names of its own: 3.2 GB when a columnar parser read them."""
    a = "\\u0061" if escaped else "a"

    def names(row: int) -> list[str]:
        return [f'"{a}{row:04}_{n:03}": 1' for n in range(100)]

    path = tmp_path.resolve() / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {row}, {", ".join(names(row))}}}\n' for row in range(1000)))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(path), "1000"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300, "MiB"


def test_the_cache_remembers_that_names_were_dropped(tmp_path: Path) -> None:
    rows = [{"step": step, **{f"m{step % 8}_{n}": 1.0 for n in range(100)}} for step in range(2500)]
    (tmp_path / "metrics.jsonl").write_text(lines(*rows))
    cache = tmp_path / "cache"
    notes = reader(tmp_path, cache).refresh().notes
    assert len(notes) == 1 and len(list(cache.iterdir())) == 1
    assert reader(tmp_path, cache).refresh().notes == notes


def test_a_small_file_that_describes_a_huge_table_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_module, "MOST_CELLS", 1_000_000)
    wide = {f"m{n}": 1.0 for n in range(500)}
    (tmp_path / "metrics.jsonl").write_text(lines({"step": 0, **wide}) + '{"a":1}\n' * 200_000)
    columns = reader(tmp_path).refresh()
    assert columns.nbytes < 20_000_000
    assert columns.notes == [
        f"metrics.jsonl holds more than 1,000,000 values: only its first {columns.count:,} rows are shown."
    ]


@settings(max_examples=25)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["step", "loss", "x/y"]), st.floats(width=32) | st.integers(-9, 9)), min_size=1
    )
)
def test_the_fast_parser_reads_what_the_plain_one_reads(rows: list[dict[str, float]]) -> None:
    """Long files go through pyarrow; 700 copies make it long."""
    data = lines(*[{**row, "step": n} for n, row in enumerate(rows * 700)]).encode()
    found = Columns()
    for block in blocks(data):
        found.add(block)
    assert found.bad == 0
    fast = {name: found[name] for name in found.names}
    slow = [next(blocks(line + b"\n")).columns for line in data.splitlines()]
    assert found.count == len(slow)
    for name, column in fast.items():
        wanted = [part[name][0] if name in part else math.nan for part in slow]
        np.testing.assert_array_equal(column, np.array(wanted, column.dtype))


def test_the_next_process_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "metrics.jsonl", tmp_path / "cache"
    path.write_text(lines(*({"step": step, "loss": step / 7} for step in range(5000))))
    first = reader(tmp_path, cache).refresh()
    with open(path, "a") as file:
        file.write(lines({"step": 5000, "val_loss": 1.5}))
    read: list[int] = []
    monkeypatch.setattr(growing_module, "blocks", lambda data: (read.append(len(data)), blocks(data))[1])
    second = reader(tmp_path, cache).refresh()
    assert read and sum(read) < 100, "the first 5,000 rows come from the cache"
    np.testing.assert_array_equal(second["loss"][:5000], first["loss"])
    assert second["step"][-1] == 5000 and second["val_loss"][-1] == 1.5
    [file] = cache.glob("*.columns")
    file.write_bytes(file.read_bytes()[:100])
    assert reader(tmp_path, cache).refresh().count == 5001, "a damaged cache is not believed"


def test_memory_is_bounded(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    index = Index(folder, None, limit=200_000)
    for number in range(8):
        (tmp_path / f"{number}.jsonl").write_text(lines(*({"step": n, "loss": 1.0} for n in range(3000))))
        assert index.columns(tmp_path.resolve() / f"{number}.jsonl").count == 3000
    index.columns(tmp_path.resolve() / "7.jsonl")
    assert index.nbytes <= 200_000 + 3000 * 16


def test_a_spike_stays_visible_and_a_range_is_seen_in_full() -> None:
    y = np.ones(100_000)
    y[54_321], y[77_777] = 9.0, -3.0
    x = np.arange(100_000.0)
    thin_x, thin_y = thinned(x, y, 800)
    assert len(thin_y) <= 800 and thin_y.max() == 9 and thin_y.min() == -3
    assert thin_x[0] == 0 and thin_x[-1] == 99_999 and (np.diff(thin_x) > 0).all()
    columns = Columns()
    columns.add(Block({"step": x, "loss": y.astype(np.float32)}, len(x)))
    near = curve(columns, "loss", View(low=54_300, high=54_340))
    assert near is not None and near["x"] == list(range(54_299, 54_342)) and max(near["y"]) == 9


@given(share=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.99, 0.999]), count=st.integers(1, 700))
def test_smoothing_is_the_formula(share: float, count: int) -> None:
    y = np.random.default_rng(count).normal(3, 1, count)
    mean, wanted = 0.0, []
    for t, value in enumerate(y, start=1):
        mean = share * mean + (1 - share) * value
        wanted.append(mean / (1 - share**t))
    np.testing.assert_allclose(smoothed(y, share), wanted, rtol=1e-9)


def test_validation_rows_take_the_place_of_the_report_before_them(tmp_path: Path) -> None:
    rows = [{"step": 10, "tokens": 100, "loss": 1.0}, {"step": 10, "val_bpb": 2.0}, {"step": 20, "tokens": 200}]
    (tmp_path / "metrics.jsonl").write_text(lines({"step": 0, "val_bpb": 3.0}, *rows))
    columns = reader(tmp_path).refresh()
    assert curve(columns, "val_bpb", View(axis="tokens")) == {"x": [100.0], "y": [2.0]}
    assert curve(columns, "val_bpb", View(axis="step")) == {"x": [0.0, 10.0], "y": [3.0, 2.0]}
    assert curve(columns, "val_bpb", View(axis="flops")) is None


def test_the_time_axis_is_that_of_all_steps_and_older_rows_have_their_own(tmp_path: Path) -> None:
    old = [{"step": step, "loss": 1.0, "time/total": 2.0 * step} for step in (1, 2)]
    new = [{"step": step, "loss": 1.0, "time/total": 0.5, "time/all_steps": 3.0 * step} for step in (3, 4)]
    for rows, wanted in ((old, [2.0, 4.0]), (new, [9.0, 12.0]), (old + new, [2.0, 4.0, 9.0, 12.0])):
        (tmp_path / "metrics.jsonl").write_text(lines(*rows))
        found = curve(reader(tmp_path).refresh(), "loss", View(axis="time"))
        assert found is not None and found["x"] == wanted


def test_charts_come_from_the_names_that_are_there() -> None:
    names = [
        "step",
        "tokens",
        "lr",
        "lr/matrix",
        "loss",
        "val_loss",
        "reward",
        "reward/exact",
        "margin",
        "kl",
        "my_own",
    ]
    charts = {chart["title"]: chart["names"] for chart in charts_of(names)}
    assert charts == {
        "Loss": ["loss", "val_loss"],
        "Reward": ["reward", "reward/exact"],
        "Margin": ["margin"],
        "KL to the reference": ["kl"],
        "Learning rate": ["lr", "lr/matrix"],
        "my_own": ["my_own"],
    }
    assert charts_of(names)[0]["unit"] == "of the objective" and charts_of(["loss"])[0]["unit"] == "nats per token"
