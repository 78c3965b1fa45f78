"""The recipe gpt2: planned without the network, and the same recipe at a small size trains with CORE on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tests.evaluate.bundles import json_bundle

from bessemer.config import resolve
from bessemer.errors import InputError
from bessemer.models.gpt import GPT
from bessemer.plan.absent_plan import make_absent_plan
from bessemer.topology import make_topology
from bessemer.training import launch
from bessemer.training.setup.model import choose_float8
from bessemer.training.setup.schema import schema_of

SIZE = ("model.depth", "model.width", "model.head_dim", "architecture.block_size", "training.batch_size")
LOCAL = ("training.dataset", "data.tokenizer", "data.val_fraction", "training.validation_steps", "training.steps")


def test_a_plan_fetches_nothing_and_needs_no_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    plan = make_absent_plan("gpt2", [], topology="h200:8", compiles=False)
    assert plan["derived"]["architecture.precision"]["value"] == "fp8" and plan["memory"]["fits"]
    assert "not trained yet" in plan["derived"]["model.vocab_size"]["reason"]
    assert plan["model"]["depth"] == 24 and plan["cost"]["dollars"] > 0


def test_training_asks_for_the_tasks_of_core() -> None:
    with pytest.raises(InputError, match=r"eval\.core_bundle"):
        resolve(schema_of, "gpt2")


@pytest.mark.parametrize(("units", "expected"), [(True, "fp8"), (False, "auto")])
def test_float8_is_used_where_the_chip_has_it(units: bool, expected: str) -> None:
    config = resolve(schema_of, "gpt2", ["eval.core_bundle=x"])
    topology: Any = SimpleNamespace(float8=units, device_kind="chip")
    choose_float8(config, topology)
    assert config["architecture/precision"] == expected
    assert config.provenance["architecture/precision"].is_derived
    choose_float8(config, SimpleNamespace(float8=not units, device_kind="chip"))  # type: ignore[arg-type]
    assert config["architecture/precision"] == expected  # chosen once


def test_a_model_never_sees_the_open_choice() -> None:
    with pytest.raises(InputError, match="fp8-if-supported"):
        GPT(vocab_size=300, precision="fp8-if-supported").check()


@pytest.mark.slow
def test_a_small_one_trains_with_core(tmp_path: Path, tiny: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe as it is, with a smaller model, local text and fewer steps."""
    monkeypatch.setattr(launch, "make_topology", lambda settings: make_topology(devices=jax.devices()[:1]))
    bundle = tmp_path / "core"
    bundle.mkdir()
    settings = {key: tiny[key] for key in (*SIZE, *LOCAL)} | {"logging.plots": False, "logging.preview_interval": 0}
    settings |= {"eval.core_bundle": str(json_bundle(bundle)), "eval.core_interval": 6, "architecture.block_size": 64}
    trainer = launch.build_trainer("gpt2", settings, name="small", root=tmp_path)
    trainer.run()
    run = tmp_path / "small"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "core_metric" in row] == [6, 10]
    assert trainer.model.precision == "auto" and trainer.model.window == "SSSL"
    assert rows[-1]["step"] == 10 and "core" in (run / "report.md").read_text().lower()
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    assert losses and losses[-1] < 5.7
