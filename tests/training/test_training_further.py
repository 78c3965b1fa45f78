"""A run with multi-token prediction and all switches like it: logged, counted, resumed, sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bessemer.console import no_progress
from bessemer.errors import Stopped
from bessemer.generate import load_model
from bessemer.generate.export import export_run
from bessemer.topology import make_topology
from bessemer.training import launch
from bessemer.training.callbacks.base import Callback
from bessemer.training.persistence.checkpoints import saved_tree

STEPS = 4


class StopAt(Callback):
    def on_batch_end(self, loop: Any) -> None:
        if loop.step == 2:
            loop.request_stop("test")


@pytest.mark.slow
def test_a_run_with_both_resumes_bit_for_bit_and_writes_text(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "make_topology", lambda settings: make_topology(devices=jax.devices()[:1]))
    settings = {
        **tiny,
        "training.steps": STEPS,
        "training.mtp": [0.5],
        "training.mtp_decay": 0.75,
        "architecture.bigram_rows": 640,
        "architecture.key_offset": True,
        "architecture.dense_connections": True,
        "architecture.paired_heads": True,
        "training.tied_head": 0.75,
        "architecture.document_mask": True,
    }
    whole = launch.build_trainer("quickstart", settings, name="whole", root=tmp_path)
    whole.run()
    part = launch.build_trainer("quickstart", settings, name="part", root=tmp_path, callbacks=[StopAt()])
    with pytest.raises(Stopped):
        part.run()
    part = launch.reopen(tmp_path / "part")
    part.run()
    for a, b in zip(jax.tree.leaves(saved_tree(part.state)), jax.tree.leaves(saved_tree(whole.state)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert np.any(np.asarray(whole.state.params["bigram_table"]))
    assert int(whole.state.tied) == 0 and "tied" in saved_tree(whole.state)  # tied until step 3

    rows = [json.loads(line) for line in whole.run_directory.metrics.read_text().splitlines()]
    rows = [row for row in rows if "further_nll" in row]
    assert len(rows) == STEPS
    for step, row in enumerate(rows):  # the row of step 1 is about the update made at step 0
        share = max(0.0, 1 - step / STEPS / 0.75)
        assert row["loss"] == pytest.approx(row["nll"] + 0.5 * share * row["further_nll"], rel=1e-5)

    assert whole.model_parts.flops_per_token == whole.model.flops_per_token(16)  # all targets share the logits

    loaded = load_model(whole.run_directory)
    assert loaded.model.bigram_rows == 640 and loaded.model.key_offset and loaded.model.dense_connections
    generation = loaded.decoder(loaded.params, [[5, 6, 7]], max_tokens=4)
    ids = np.asarray([[5, 6, 7, *generation.ids[0]]])
    logits = loaded.model.apply({"params": loaded.params}, ids)
    assert generation.ids.shape == (1, 4) and np.isfinite(logits).all()

    export_run(whole.run_directory, tmp_path / "out", "hf", no_progress)
    exported = json.loads((tmp_path / "out" / "config.json").read_text())["architecture"]
    assert exported["key_offset"] is exported["dense_connections"] is True and exported["bigram_rows"] == 640
