"""Bits per byte: the formula, over every batch size and mesh, from a run directory."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from bessemer.errors import InputError
from bessemer.evaluate import Evaluator, check_tasks
from bessemer.evaluate.bpb import bpb, held_out, last_mixture
from bessemer.generate import load_model
from bessemer.topology import TopologySettings, make_topology
from tiny_run import TEXTS, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("bpb"))


@pytest.fixture(scope="module")
def loaded(run):
    return load_model(run)


def by_hand(loaded):
    """nats and bytes, one target at a time, from the logits of the full forward."""
    rows = held_out(loaded)
    batch = rows.batch(0, len(rows))
    logits = loaded.model.apply({"params": loaded.params}, batch["input_ids"], batch["positions"], batch["segment_ids"])
    logprobs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    nats = count = 0.0
    for row, position in np.argwhere(batch["target_ids"] >= 0):
        target = batch["target_ids"][row, position]
        size = loaded.tokenizer.token_bytes[target]
        if size > 0:
            nats -= logprobs[row, position, target]
            count += size
    return nats / (math.log(2) * count), count


def test_it_is_the_formula_and_independent_of_the_batch(loaded):
    expected, count = by_hand(loaded)
    for batch_size in (3, 8):
        result = bpb(loaded, batch_size=batch_size)
        assert result["value"] == pytest.approx(expected, rel=1e-6)
        assert result["bytes"] == count and result["sequences"] == 8
    assert result["targets"] > 0 and result["loss"] > 0


def test_on_a_mesh_the_result_is_the_same(run, loaded):
    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=2))
    sharded = load_model(run, topology=topology)
    assert bpb(sharded, batch_size=3)["value"] == pytest.approx(bpb(loaded, batch_size=3)["value"], rel=1e-5)


def test_special_tokens_do_not_count(loaded):
    """Bytes are those of the text: of all held-out documents when every row is taken."""
    rows = held_out(loaded, 10_000)
    result = bpb(loaded, limit=10_000, batch_size=8)
    assert result["sequences"] == len(rows) > 8
    lengths = {len(text.encode()) for text in TEXTS}
    assert result["bytes"] >= min(lengths) and result["bytes"] < sum(len(text.encode()) for text in TEXTS)


def test_the_job_writes_its_result(run, loaded):
    evaluator = Evaluator.from_run(run, tasks=["bpb"], limit=2)
    assert not evaluator.done
    results = evaluator.run()
    assert evaluator.done
    saved = json.loads((run.eval / "bpb_step20.json").read_text())
    assert saved == results["bpb"] and saved["sequences"] == 2


def test_held_out_rows_are_opened_once(loaded):
    """With the parameters of a later step as well: a source that changes meanwhile changes no result."""
    newer = dataclasses.replace(loaded, params=None)
    assert held_out(loaded, 3) is held_out(newer, 3) is not held_out(loaded, 4)


def test_the_eval_command(run):
    from bessemer.cli.eval import command

    result = CliRunner().invoke(
        command, [str(run.path), "--tasks", "bpb", "--step", "10", "--limit", "4", "--json"], catch_exceptions=False
    )
    document = json.loads(result.stdout)
    assert document["step"] == 10 and document["results"]["bpb"]["metric"] == "bits per byte"
    shown = CliRunner().invoke(command, [str(run.path), "--tasks", "bpb", "--limit", "4", "--batch", "2"])
    assert "bits per byte" in shown.stdout and max(map(len, shown.stdout.splitlines())) <= 80


def test_wrong_requests_say_what_there_is(loaded):
    with pytest.raises(InputError, match=r"Did you mean 'bpb'.*Known: .*bpb"):
        check_tasks(["bpp"])
    with pytest.raises(InputError, match="Known"):
        check_tasks(["os:system"])
    with pytest.raises(InputError, match="imported, or its data given from Python"):
        last_mixture([], "run")
    with pytest.raises(InputError, match="at least 1"):
        bpb(loaded, limit=0)


def test_a_dataset_that_is_code_is_not_imported(loaded):
    import dataclasses

    config = {**loaded.config, "training": {"dataset": "some_module:make"}}
    with pytest.raises(InputError, match="never imports"):
        held_out(dataclasses.replace(loaded, config=config))
