"""Fine-tuning on conversations as a run: what the objective asks for is granted and said; the template stays."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.data.chat_forms import forms
from tests.data.stock_templates import FAMILIES
from tests.training.stops import StopAt

import bessemer as bm
from bessemer.data import DatasetStyle
from bessemer.data.rows.rows import PmdRows
from bessemer.data.tokenize import chat
from bessemer.errors import Stopped
from bessemer.generate import load_model
from bessemer.report.metrics import MetricsFile
from bessemer.serve.chat import Exchange, Foreign, template_of
from bessemer.topology import TopologySettings, make_topology
from bessemer.training import launch
from bessemer.training.display import supervision
from bessemer.training.validation import _documents

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A file, and a tokenizer with the template of another family."""
    folder = tmp_path_factory.mktemp("sft")
    rows = [{"instruction": f"Say {word}.", "output": f"The {word}."} for word in ("cats", "dogs", "rain") * 12]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    forms()[1].tokenizer.save(folder / "tokenizer")
    return {
        "objective": "sft",
        "training.dataset": str(folder / "chats.jsonl"),
        "data.tokenizer": str(folder / "tokenizer"),
        "architecture.block_size": 48,
        "model.depth": 1,
        "training.per_device_batch_size": 8,
        "sft.neftune_alpha": 1.0,
        "optimization.name": "adamw",
        "optimization.lr": 0.02,
    }


def test_what_is_learned_otherwise_than_expected_is_said(
    tiny: dict[str, object], conversations: dict[str, object], tmp_path: Path
) -> None:
    def remarks(name: str, **changes: object) -> str:
        given = {**tiny, **conversations, **{key.replace("__", "."): value for key, value in changes.items()}}
        trainer = launch.build_trainer("quickstart", given, name=name, root=tmp_path)
        return " ".join(
            remark for stats in trainer.data.plan.stats.values() for remark in supervision(trainer.settings, stats)
        )

    assert remarks("whole") == ""
    assert "24 of 24 conversations are longer than architecture.block_size=8" in remarks(
        "pieces", architecture__block_size=8, training__validation=False
    )
    qwen, turns = next(family for family in FAMILIES if family.name == "qwen3"), tmp_path / "turns.jsonl"
    qwen.tokenizer.save(tmp_path / "qwen")
    said = [[{"role": role, "content": f"{n} {role}"} for role in ("user", "assistant") * 2] for n in range(9)]
    turns.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))
    given = {"training__dataset": str(turns), "data__tokenizer": str(tmp_path / "qwen")}
    assert "9 conversations take 18 rows" in remarks("turns", training__validation=False, **given)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"The cats and {n} dogs."}) + "\n" for n in range(40)))
    assert "every token is learned" in remarks("texts", training__dataset=str(texts))


def test_held_out_conversations_are_counted_although_their_first_token_is_no_target() -> None:
    begins = np.array([[1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0]], bool)
    counts = np.array([[0, 0, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1]], bool)
    assert _documents(begins, counts) == 2  # the second of row 0 has no target; row 1 begins inside a document
    assert _documents(begins, np.ones_like(counts)) == 3


def test_a_run_on_conversations(tiny: dict[str, object], conversations: dict[str, object], tmp_path: Path) -> None:
    previews = {"logging.preview_interval": -1}
    run = bm.train("quickstart", **{**tiny, **conversations, **previews}, name="sft", runs=tmp_path)
    derived = json.loads((run.path / "derived.json").read_text())
    assert derived["training.dataset style"]["value"] == "PACKED"
    assert derived["architecture.document_mask"]["value"] is True
    losses = [row["loss"] for row in run.metrics() if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    samples = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert samples and all("<|im_end|>" not in sample["completion"] for sample in samples)
    assert any("Say " in sample["prompt"] for sample in samples), "held-out questions"
    for folder in (run.path / "model", next((run.path / "checkpoints").iterdir())):
        assert (folder / "tokenizer_config.json").is_file()
    loaded = load_model(run.directory)
    template = template_of(loaded)
    assert isinstance(template, Foreign) and template.stop_ids == (loaded.tokenizer.id_of("<|im_end|>"),)
    messages = [{"role": "user", "content": "Say cats."}, {"role": "assistant", "content": "The cats."}]
    last = {"role": "user", "content": "Say dogs."}
    system = {"role": "system", "content": "Be short."}
    talked = template.conversation("Be short.", [Exchange("Say cats.", "The cats.", [])], "Say dogs.")
    assert talked == chat.render([system, *messages, last], loaded.tokenizer)


def test_what_is_given_wins_over_what_the_objective_asks_for(
    tiny: dict[str, object], conversations: dict[str, object], tmp_path: Path
) -> None:
    own = {"training.dataset": f"{conversations['training.dataset']}:PADDED", "architecture.document_mask": False}
    trainer = launch.build_trainer("quickstart", {**tiny, **conversations, **own}, name="own", root=tmp_path)
    assert trainer.settings.datasets[0][0].style is DatasetStyle.PADDED
    assert trainer.model.document_mask is False
    windows = own | {"training.dataset": f"{conversations['training.dataset']}:PMD"}  # PMD is a style like the others
    kept = launch.build_trainer("quickstart", {**tiny, **conversations, **windows}, name="pmd", root=tmp_path)
    assert kept.settings.datasets[0][0].style is DatasetStyle.PMD
    assert isinstance(kept.data.plan.sources[0], PmdRows)
    asked = launch.build_trainer("quickstart", {**tiny, **conversations}, name="asked", root=tmp_path)
    assert asked.settings.datasets[0][0].style is DatasetStyle.PACKED and asked.model.document_mask is True
    assert asked.config["training/dataset"] == asked.settings.datasets


SMOOTH = {"optimization.lr": 0.01, "optimization.eps": 1e-2}  # AdamW with a small eps magnifies rounding


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("gpt", marks=pytest.mark.long), "llama"])
def test_dropout_and_noise_follow_the_row_not_the_micro_batch(
    family: str,
    tiny: dict[str, object],
    conversations: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Micro-batch, accumulation, mesh, and a resume that changes them: the same masks, the same losses."""
    random = {"architecture.dropout": 0.2, "sft.neftune_alpha": 5.0, "training.validation": False}
    settings = {**tiny, **conversations, **SMOOTH, **random, "model.family": family, "training.steps": 4}

    def losses(name: str) -> list[float]:
        return [row["loss"] for row in MetricsFile(tmp_path / name / "metrics.jsonl").rows() if "loss" in row]

    def run(name: str, **changes: object) -> list[float]:
        given = {**settings, **{key.replace("__", "."): value for key, value in changes.items()}}
        launch.build_trainer("quickstart", given, name=name, root=tmp_path).run()
        return losses(name)

    whole = run("whole", training__per_device_batch_size=8)
    assert whole == run("again", training__per_device_batch_size=8)
    assert run("fours", training__per_device_batch_size=4) == pytest.approx(whole, abs=2e-6)
    assert run("otherwise", seed=7)[0] != pytest.approx(whole[0], abs=1e-3)

    stop = {**settings, "training.per_device_batch_size": 8}
    part = launch.build_trainer("quickstart", stop, name="part", root=tmp_path, callbacks=[StopAt(2)])
    with pytest.raises(Stopped):
        part.run()
    two = make_topology(TopologySettings(data=2), devices=jax.devices()[:2])
    monkeypatch.setattr(launch, "make_topology", lambda settings: two)
    launch.reopen(tmp_path / "part", {"training.per_device_batch_size": 2, "topology.data": 2}).run()
    assert losses("part") == pytest.approx(whole, abs=2e-6)
