"""Pictures of a run: what is written in them can be read."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from bessemer.job import RunDirectory
from bessemer.report import plots
from bessemer.report.summary import Summary


def test_labels_of_equally_good_compressors_do_not_overlap(tmp_path: Path) -> None:
    rows = [{"step": 100 * number, "val_bpb": 8 / (1 + number)} for number in range(6)]
    facts = {"baselines": {"gzip": 1.951, "xz": 1.948}}
    figure, axes = plots.new_figure()
    assert plots._bits_per_byte(axes, Summary(RunDirectory(tmp_path), facts=facts, rows=rows))
    plots.save(figure, tmp_path / "picture.png")
    legend = axes.get_legend()
    texts = [text for text in (*axes.texts, *(legend.get_texts() if legend else ())) if text.get_text()]
    assert sorted(text.get_text() for text in texts) == ["gzip 1.951", "model", "xz 1.948"]
    boxes = [text.get_window_extent() for text in texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize("name", ["time/all_steps", "time/total"])
def test_curves_against_time_start_with_the_first_step(tmp_path: Path, name: str) -> None:
    """time/total is 0 for ten steps, so it places their points on top of each other; older runs have nothing else."""
    rows = [{"step": step, "loss_smooth": 9.0 - step, "time/total": 0.0, name: 2.0 * step} for step in (1, 2, 3)]
    _, axes = plots.new_figure()
    axis, _ = plots.AGAINST["time"]
    assert plots.line(axes, Summary(RunDirectory(tmp_path), rows=rows), "loss_smooth", "a", axis)
    assert list(axes.lines[0].get_xdata()) == [2.0, 4.0, 6.0]
