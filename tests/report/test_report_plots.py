"""Pictures of a run: what is written in them can be read."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

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
