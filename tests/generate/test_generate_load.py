"""Loading a run for inference: the right weights, whole or not at all, and never code that the run names."""

import json

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from bessemer.checkpoint import Checkpoints
from bessemer.cli import main
from bessemer.errors import InputError, StorageError, TrainingError, printable
from bessemer.generate import Engine, Request, SamplingOptions, load_model, sample
from bessemer.generate.load import build_model
from tiny_run import make_run, tiny_model, tiny_params, tiny_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("load"))


def assert_params(loaded, step):
    jax.tree.map(np.testing.assert_array_equal, loaded.params, tiny_params(step))


def test_the_newest_checkpoint_or_the_one_named(run):
    loaded = load_model(run)
    assert loaded.step == 20 and loaded.model == tiny_model()
    assert loaded.tokenizer.hash == tiny_tokenizer().hash
    assert loaded.config["training"]["steps"] == 20
    assert_params(loaded, 20)
    assert_params(load_model(run, 10), 10)
    with pytest.raises(InputError, match="no checkpoint at step 11; it holds 10, 20"):
        load_model(run, 11)


def test_a_damaged_checkpoint_is_passed_over_with_a_note(tmp_path):
    run = make_run(tmp_path)
    config = run.checkpoints / "step_00000020" / "config.yaml"
    config.write_text(config.read_text().replace("depth: 2", "depth: 3"))
    loaded = load_model(run)
    assert loaded.step == 10 and "step_00000020" in loaded.notes[0]
    with pytest.raises(StorageError, match="damaged"):
        load_model(run, 20)


def test_plain_files_serve_when_there_are_no_checkpoints(tmp_path):
    from flax.traverse_util import flatten_dict
    from safetensors.numpy import save_file

    run = make_run(tmp_path, steps=())
    with pytest.raises(InputError, match="no model to load"):
        load_model(run)
    run.model.mkdir()
    flat = {"/".join(path): np.asarray(leaf) for path, leaf in flatten_dict(tiny_params(3)).items()}
    save_file(flat, run.model / "model.safetensors", metadata={"step": "7"})
    sections = {"family": "gpt", "depth": 2, "width": 32, "head_dim": 16, "vocab_size": 300, "window": "L"}
    shape = {"model": sections, "architecture": {"block_size": 32, "precision": "float32"}}
    (run.model / "config.json").write_text(json.dumps(shape))
    tiny_tokenizer().save(run.model)
    loaded = load_model(run)
    assert loaded.step == 7 and loaded.model == tiny_model()
    assert_params(loaded, 3)
    save_file({**flat, "extra": np.zeros(1, np.float32)}, run.model / "model.safetensors")
    with pytest.raises(StorageError, match="extra"):
        load_model(run)


def run_with(folder, value):
    """A run whose newest checkpoint has one weight of this value."""
    run = make_run(folder, steps=(10,))
    params = tiny_params(20)
    params["embedding"] = params["embedding"].at[3, 4].set(value)
    files = {"config.yaml": run.config.read_text(), "tokenizer.json": tiny_tokenizer().to_json()}
    checkpoints = Checkpoints(run.checkpoints)
    checkpoints.save(20, {"params": params}, files=files, wait=True)
    checkpoints.close()
    return run


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_an_error_that_names_them(tmp_path, value):
    run = run_with(tmp_path, value)
    with pytest.raises(TrainingError, match=r"step_00000020 .* embedding\. .*--step: the run holds 10"):
        load_model(run)
    assert load_model(run, 10).step == 10


@pytest.mark.parametrize(
    "words",
    [
        ("sample", "RUN", "--prompt", "a"),
        ("chat", "RUN"),
        ("serve", "RUN", "--port", "0"),
        ("eval", "RUN", "--tasks", "bpb"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_that_loads_nan_weights_ends_with_exit_3(words, tmp_path, capsys):
    run = run_with(tmp_path, np.nan)
    with pytest.raises(SystemExit) as left:
        main([str(run.path) if word == "RUN" else word for word in words])
    assert left.value.code == 3
    assert "embedding" in (said := capsys.readouterr().err) and "--step: the run holds 10" in said


def test_output_that_is_no_number_is_an_error(run):
    loaded = load_model(run)
    loaded.params = jax.tree.map(lambda leaf: leaf * np.nan, loaded.params)
    with pytest.raises(TrainingError, match="not a number"):
        sample(loaded, ["The cat"], max_tokens=4)
    with pytest.raises(TrainingError, match="not a number"):
        Engine.of(loaded, slots=1).generate([Request((1, 2, 3), 4)])


def test_code_named_by_a_run_is_never_imported(tmp_path, monkeypatch):
    (tmp_path / "evil_family.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for family in ("evil_family:Model", "unheard_of"):
        with pytest.raises(InputError, match="not registered here"):
            build_model({"model": {"family": family}, "plugins": ["evil_family"]}, "run")


def test_settings_the_family_does_not_know_are_noted_and_wrong_values_are_errors():
    shape = {"family": "gpt", "depth": 2, "vocab_size": 300, "colour": "red"}
    _, notes = build_model({"model": shape}, "here")
    assert "model.colour" in notes[0]
    with pytest.raises(InputError, match="depth"):
        build_model({"model": {**shape, "depth": "deep"}}, "here")


def test_sampling_text(run):
    loaded = load_model(run)
    options = SamplingOptions(temperature=1.0, seed=2)
    found, notices = sample(loaded, ["The cat", "dogs"], max_tokens=8, sampling=options)
    again, _ = sample(loaded, ["The cat", "dogs"], max_tokens=8, sampling=options)
    assert found == again and not notices
    assert loaded.decoder.end_ids == (loaded.tokenizer.bos_id,), "a text ends where the next document would begin"
    assert found[0].text == loaded.tokenizer.decode(found[0].tokens) and len(found[0].logprobs) == len(found[0].tokens)


def test_the_sample_command(run):
    from bessemer.cli.sample import command

    words = [str(run.path), "--prompt", "The cat", "--max-tokens", "100", "--seed", "1"]
    shown = CliRunner().invoke(command, words, catch_exceptions=False)
    assert shown.exit_code == 0
    assert "--- prompt (step 20)\nThe cat\n--- continuation\n" in shown.stdout
    result = CliRunner().invoke(command, [*words, "--json"], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert document["step"] == 20 and document["prompt"] == "The cat" and printable(document["text"]) in shown.stdout
    assert document["finish"] == "stop" or "context of 32 tokens" in document["notices"][0]
    zero = CliRunner().invoke(command, [*words, "--json", "--temperature", "0", "--top-k", "3"])
    other = CliRunner().invoke(command, [*words[:-1], "9", "--json", "--temperature", "0"])
    assert json.loads(zero.stdout)["tokens"] == json.loads(other.stdout)["tokens"]
