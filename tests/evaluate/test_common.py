"""The error of bits per byte, and models on the same text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from tests.tiny_run import TEXTS, make_run, tiny_params

from bessemer.checkpoint import Checkpoints
from bessemer.cli.compare import command
from bessemer.data import Tokenizer
from bessemer.errors import InputError
from bessemer.evaluate.bpb import Measured, bpb, held_out_documents, measure_on, standard_error
from bessemer.generate import LoadedModel, load_model
from bessemer.job import RunDirectory
from bessemer.report.summary import too_small
from bessemer.training import launch

random = np.random.default_rng(0)


def test_the_standard_error_is_that_of_many_samples() -> None:
    """Sets drawn from one population: the deviation of their ratios is what each of them estimates."""
    sizes = random.integers(20, 60, (4000, 50)).astype(float)
    nats = sizes * (1.0 + 0.2 * random.standard_normal(sizes.shape)) + 3 * random.standard_normal(sizes.shape)
    values = nats.sum(1) / (math.log(2) * sizes.sum(1))
    estimates = [
        standard_error(
            {
                "rows": 50,
                "nats": n.sum(),
                "bytes": b.sum(),
                "nats_nats": (n * n).sum(),
                "nats_bytes": (n * b).sum(),
                "bytes_bytes": (b * b).sum(),
            }
        )
        for n, b in zip(nats, sizes, strict=True)
    ]
    assert np.mean(np.array(estimates, float)) == pytest.approx(values.std(), rel=0.05)
    assert standard_error({"rows": 1, "nats": 3.0, "bytes": 2.0}) is None


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_run(tmp_path_factory.mktemp("common")))


@pytest.mark.slow
def test_every_byte_of_the_text_is_scored_once(loaded: LoadedModel) -> None:
    """Against the full forward, a window at a time."""
    assert loaded.tokenizer is not None
    texts = ["The 3 grey cats", "and 4 dogs were walking in the rain, and then in the sun again. " * 3]
    found = measure_on(loaded, texts, batch_size=2)
    block, expected = loaded.model.block_size, []
    for text in texts:
        ids, nats = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode(text)], 0.0
        for start in range(0, len(ids) - 1, block):
            inputs, targets = ids[start : start + block], ids[start + 1 : start + block + 1]
            logits = loaded.model.apply({"params": loaded.params}, np.array([inputs[: len(targets)]]))
            scores = np.asarray(jax.nn.log_softmax(logits[0]), np.float64)
            nats -= scores[np.arange(len(targets)), targets].sum()
        expected.append(nats)
    assert found.nats == pytest.approx(expected, rel=1e-5)
    assert found.sizes.tolist() == [len(text) for text in texts]
    assert found.bpb == pytest.approx(sum(expected) / (math.log(2) * sum(map(len, texts))), rel=1e-5)


def test_held_out_documents_are_those_of_the_data(loaded: LoadedModel) -> None:
    documents = held_out_documents(loaded, 10_000)
    assert len(documents) > 3 and set(documents) <= set(TEXTS)


def test_a_difference_is_paired_by_document() -> None:
    hard = random.uniform(50, 500, 200)  # documents differ far more than models
    sizes = np.full(200, 100.0)
    one, other = Measured(hard, sizes), Measured(hard * 1.01 + random.standard_normal(200), sizes)
    gap, error = other.above(one)
    assert gap == pytest.approx(other.bpb - one.bpb) and error is not None and one.error is not None
    assert error < one.error / 10 and gap / error > 5
    assert one.above(one) == (0.0, 0.0) and Measured(hard[:1], sizes[:1]).error is None


def made(path: Path) -> Path:
    path.mkdir()
    return path


def with_tokenizer(run: RunDirectory, tokenizer: Tokenizer) -> None:
    """The last checkpoint again, with other weights and another tokenizer."""
    files = {"config.yaml": run.config.read_text(), "tokenizer.json": tokenizer.to_json()}
    checkpoints = Checkpoints(run.checkpoints)
    checkpoints.save(30, {"step": np.int32(30), "params": tiny_params(7), "opt_state": {}}, files=files, wait=True)
    checkpoints.close()


def facts(run: RunDirectory, fingerprint: str | None) -> None:
    run.metrics.write_text(json.dumps({"step": 20, "val_bpb": 2.5, "val_bpb_se": 0.25, "val_loss": 3.0}) + "\n")
    if fingerprint:
        found = {"fingerprint": fingerprint, "sequences": 8, "bytes": 2048, "documents": 4}
        run.facts.write_text(json.dumps({"validation": found}))


def compare(*words: Any) -> str:
    result = CliRunner().invoke(command, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_compare_says_when_held_out_sets_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [make_run(made(tmp_path / name), name) for name in ("one", "two")]
    paths = [run.path for run in runs]
    for run in runs:
        facts(run, "same")
    said = compare(*paths)
    assert "2.5000 ± 0.2500" in said and "do not rank" not in said
    facts(runs[1], "another")
    said = compare(*paths)
    assert "held-out sets differ" in said and "8 sequences, 2.0K" in said and "--common" in said
    runs[1].facts.unlink()
    assert "did not record their held-out set" in compare(*paths)


@pytest.mark.slow
def test_common_judges_runs_with_different_tokenizers_on_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = (make_run(made(tmp_path / name), name) for name in ("one", "two"))
    with_tokenizer(two, Tokenizer.train(["The rain and the dogs, walking. " * 9], 290))
    said = compare(one.path, two.path, "--common", "--limit", 1000)
    assert "bits per byte of text held out by" in said and "paired by document" in said
    models = [load_model(run) for run in (one, two)]
    texts = held_out_documents(models[0], 1000)
    for model in models:
        assert f"{measure_on(model, texts).bpb:.4f} ±" in said
    with pytest.raises(InputError, match="--limit needs --common"):
        compare(one.path, two.path, "--limit", 3)


@pytest.mark.parametrize(
    ("found", "small"),
    [
        ({"documents": 3, "bytes": 5000}, True),
        ({"documents": 3, "bytes": 5_000_000}, True),
        ({"documents": 500, "bytes": 5000}, True),
        ({"documents": 500, "bytes": 5_000_000}, False),
        ({}, False),
    ],
)
def test_a_small_held_out_set_is_a_warning(found: dict[str, int], small: bool) -> None:
    said = too_small(found, 0.123)
    assert (said is not None) == small
    if said is not None:
        assert "standard error of bits per byte: 0.123" in said and "data.val_fraction" in said


@pytest.mark.slow
def test_training_records_error_and_fingerprint(tiny: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    """The same held-out set for another seed and other weights; another one for another share."""
    short = {**tiny, "training.steps": 1, "optimization.name": "adamw", "training.per_device_batch_size": 1}
    runs = {}
    for name, change in (("a", {}), ("b", {"seed": 7}), ("c", {"data.val_fraction": 0.4})):
        trainer = launch.build_trainer("quickstart", {**short, **change}, name=name, root=tmp_path)
        trainer.run()
        runs[name] = (trainer, json.loads(trainer.run_directory.facts.read_text())["validation"])
    assert runs["a"][1] == runs["b"][1] and runs["a"][1]["fingerprint"] != runs["c"][1]["fingerprint"]
    trainer, described = runs["a"]
    row = [json.loads(line) for line in trainer.run_directory.metrics.read_text().splitlines()][-1]
    result = bpb(load_model(trainer.run_directory))
    assert row["val_bpb_se"] == pytest.approx(result["standard_error"], rel=1e-3) and row["val_bpb_se"] > 0
    assert described["bytes"] == result["bytes"] and described["sequences"] == result["sequences"]
    log = trainer.run_directory.log.read_text()
    assert f"{row['val_bpb']:.4f} ± {row['val_bpb_se']:.4f}" in log
    assert "warning    the held-out set has only" in log and "standard error of bits per byte" in log
    assert "± " in trainer.run_directory.report.read_text()
