"""CORE: both layouts of a bundle, the mean, what is missing; a trainer and its checkpoint score the same."""

import contextlib
import json
import random
import types

import jax
import pytest
from click.testing import CliRunner
from tests.evaluate.bundles import json_bundle, public_bundle, write_rows

from bessemer.errors import InputError
from bessemer.evaluate import Evaluator
from bessemer.evaluate.core import core
from bessemer.evaluate.tasks import read_bundle
from bessemer.generate import load_model
from bessemer.job.trust import mark_origin
from bessemer.topology import make_topology
from bessemer.training import launch
from bessemer.training.callbacks import evaluation
from bessemer.training.callbacks.base import Callback, Callbacks
from bessemer.training.callbacks.builtin import GradientClipping
from tiny_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def loaded(run):
    return load_model(run)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return json_bundle(tmp_path_factory.mktemp("bundle"))


def test_both_layouts_are_one_bundle(loaded, bundle, tmp_path):
    public = public_bundle(tmp_path / "public")
    ours, theirs = read_bundle(bundle), read_bundle(public)
    assert [task.name for task in ours] == ["pick", "who", "next", "lost"]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.kind, one.fewshot, one.delimiter) == (other.kind, other.fewshot, other.delimiter)
        assert one.baseline == pytest.approx(other.baseline)
        assert (one.path is None) == (other.path is None) == (one.name == "lost")
        assert one.path is None or list(one.read().examples) == list(other.read().examples)


def test_core_is_the_mean_of_the_centred_accuracies_and_names_what_is_missing(loaded, bundle):
    found = core(loaded, source=str(bundle), batch_size=16)
    assert found["missing"] == ["lost"] and found["metric"] == "CORE over 3 of 4"
    parts = found["tasks"]
    for name, baseline in (("pick", 1 / 3), ("who", 0.5), ("next", 0.0)):
        expected = (parts[name]["accuracy"] - baseline) / (1 - baseline)
        assert parts[name]["centred"] == pytest.approx(expected)
    assert found["value"] == pytest.approx(sum(part["centred"] for part in parts.values()) / 3)
    assert [parts[name]["examples"] for name in parts] == [12, 2, 4]
    one = core(loaded, source=str(bundle), batch_size=1)
    assert {n: p["centred"] for n, p in one["tasks"].items()} == {n: p["centred"] for n, p in parts.items()}
    assert core(loaded, source=str(bundle), limit=3, batch_size=16)["tasks"]["pick"]["examples"] == 3


def test_a_model_that_guesses_scores_about_0(loaded, tmp_path):
    """Answers drawn without looking at the question: 400 of two choices, 400 of four; σ of the mean is .035."""
    rng = random.Random(3)
    words = ["cats", "dogs", "rain", "walking", "grey", "were", "The", "in"]
    listed = []
    for name, options in (("two", 2), ("four", 4)):
        rows = [
            {"query": rng.choice(words), "choices": rng.sample(words, options), "gold": rng.randrange(options)}
            for _ in range(400)
        ]
        write_rows(tmp_path / f"{name}.jsonl", rows)
        listed.append({"task": name, "kind": "multiple_choice", "fewshot": 0, "delimiter": " "})
        listed[-1] |= {"random_baseline": 1 / options, "file": f"{name}.jsonl"}
    (tmp_path / "tasks.json").write_text(json.dumps({"tasks": listed}))
    found = core(loaded, source=str(tmp_path), batch_size=16)
    assert abs(found["value"]) < 0.15
    assert {name: part["baseline"] for name, part in found["tasks"].items()} == {"two": 0.5, "four": 0.25}


def test_a_whole_bundle_says_no_number_of_tasks(loaded, bundle, tmp_path):
    listed = json.loads((bundle / "tasks.json").read_text())
    listed["tasks"] = [task for task in listed["tasks"] if task["task"] == "who"]
    (tmp_path / "tasks.json").write_text(json.dumps(listed))
    (tmp_path / "schema.jsonl").write_bytes((bundle / "schema.jsonl").read_bytes())
    found = core(loaded, source=str(tmp_path), batch_size=16)
    assert found["metric"] == "CORE" and found["missing"] == []


@pytest.mark.slow
def test_the_command_prints_parts_and_one_json_document(run, bundle):
    from bessemer.cli.eval import command

    words = [str(run.path), "--tasks", f"core:{bundle}", "--limit", "3", "--batch", "16"]
    result = CliRunner().invoke(command, [*words, "--json"], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert document["results"]["core"]["missing"] == ["lost"]
    saved = json.loads((run.eval / "core_step20.json").read_text())
    assert saved == document["results"]["core"]
    shown = CliRunner().invoke(command, words, catch_exceptions=False).stdout
    assert "CORE over 3 of 4" in shown and "missing from the bundle: lost" in shown
    assert "pick" in shown and max(map(len, shown.splitlines())) <= 80


def test_the_bundle_can_stand_in_the_configuration(loaded, bundle):
    import dataclasses

    with pytest.raises(InputError, match="core:DIR"):
        core(loaded)
    config = {**loaded.config, "eval": {"core_bundle": str(bundle)}}
    mark_origin(loaded.run, config)  # as the run does when it starts
    configured = dataclasses.replace(loaded, config=config)
    assert core(configured, limit=1, batch_size=16)["bundle"] == str(bundle)


LISTED = "icl_tasks: [{label: a, icl_task_type: schema, "
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "no list of tasks"),
        ({"tasks.json": "{"}, "cannot be read"),
        ({"tasks.json": "{}"}, "no list"),
        ({"core.yaml": "icl_tasks: [3]"}, "not a mapping"),
        ({"tasks.json": '[{"task": "a", "kind": "schema", "file": "a.jsonl"}]'}, "how often guessing"),
        ({"tasks.json": '[{"task": "a", "kind": "schema", "random_baseline": 0}]'}, "none of them"),
        ({"tasks.json": "[" * 200_000}, "nested too deeply"),
        ({"core.yaml": "a: " + "[" * 5000}, "nested too deeply"),
        ({"core.yaml": BOMB}, "too large"),
        ({"core.yaml": LISTED + "num_fewshot: .inf, random_baseline: 0}]"}, "is not a number"),
        ({"core.yaml": LISTED + "random_baseline: 0, dataset_uri: [a]}]"}, "not a name"),
        ({"core.yaml": LISTED + f"random_baseline: 0, dataset_uri: {'a' * 5000}}}]"}, "not a name"),
        ({"core.yaml": LISTED + "random_baseline: 0}]", "b.csv": "Eval Task\n" + "a" * 200_000}, "field larger"),
        (
            {"core.yaml": LISTED + "random_baseline: 0}]", "b.csv": "Eval Task,Random baseline\na,x"},
            "could not convert",
        ),
    ],
    ids=range(14),
)
def test_bad_bundles_are_explained(files, problem, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=problem):
        read_bundle(tmp_path)


def test_a_file_outside_the_bundle_is_not_read(tmp_path):
    (tmp_path / "secret.jsonl").write_text("{}\n")
    (tmp_path / "b").mkdir()
    listed = '[{"task": "a", "kind": "schema", "random_baseline": 0, "file": "../secret.jsonl"}]'
    (tmp_path / "b" / "tasks.json").write_text(listed)
    with pytest.raises(InputError, match="none of them"):
        read_bundle(tmp_path / "b")


@pytest.mark.slow
def test_training_scores_core_and_the_checkpoint_gives_the_same(tiny, bundle, tmp_path, monkeypatch):
    """Rows at every interval and at the end; one compilation a bucket for the whole run."""
    monkeypatch.setattr(launch, "make_topology", lambda settings: make_topology(devices=jax.devices()[:1]))
    settings = {
        **tiny,
        "training.steps": 5,
        "training.per_device_batch_size": 8,
        "training.validation": False,
        "optimization.name": "adamw",
        "model.depth": 1,
        "eval.core_interval": 2,
        "eval.core_bundle": str(bundle),
        "eval.limit": 4,
    }
    seen = []
    made = evaluation.Evaluator.from_trainer

    def spy(trainer, **options):
        seen.append(made(trainer, **options))
        return seen[-1]

    monkeypatch.setattr(evaluation.Evaluator, "from_trainer", spy)
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path)
    trainer.run()
    scores = dict(core_rows(tmp_path / "a"))
    assert list(scores) == [2, 4, 5] and len(seen) == 3
    assert len({id(one.loaded.programs["token_scores"]) for one in seen}) == 1
    assert seen[0].loaded.programs["token_scores"]._cache_size() == 1, "all rows are of one bucket"
    saved = json.loads((tmp_path / "a/eval/core_step5.json").read_text())
    again = Evaluator.from_run(trainer.run_directory, 5, tasks=["core"], limit=4).run()["core"]
    assert again["value"] == scores[5] == saved["value"]
    assert {n: p["accuracy"] for n, p in again["tasks"].items()} == {
        n: p["accuracy"] for n, p in saved["tasks"].items()
    }

    launch.reopen(tmp_path / "a", {}, step=3).run()
    assert core_rows(tmp_path / "a") == list(scores.items()), "a resumed run has the same rows, each once"


def core_rows(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["core_metric"]) for row in rows if "core_metric" in row]


def test_an_interval_without_a_bundle_is_an_error():
    with pytest.raises(InputError, match=r"eval\.core_bundle"):
        evaluation.Evaluation(core_interval=2).on_check(types.SimpleNamespace())


def test_a_score_is_no_row_of_a_step(monkeypatch):
    """Callbacks read loss and clipping in the rows of steps; from step 200 on, one of ours does."""
    rows = []

    class Scores(Callback):
        def on_evaluation(self, loop, row):
            rows.append(row)

    trainer = types.SimpleNamespace(say=print, is_process_zero=True)
    loop = types.SimpleNamespace(step=200, trainer=trainer, flush=lambda: None, paused=contextlib.nullcontext)
    loop.callbacks = Callbacks([GradientClipping(), Scores()])
    core = evaluation.Evaluation(core_interval=-1)
    core.scored = set()
    monkeypatch.setattr(core, "evaluate", lambda *_: {"core": {"metric": "core_metric", "value": 0.5}})
    core.on_train_end(loop)
    assert rows == [{"step": 200, "core_metric": 0.5}]
