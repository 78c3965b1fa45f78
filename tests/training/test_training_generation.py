"""BaseTrainer.generate: text from the live state, under the trainer's mesh, in the shapes it promises."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from bessemer.data.tokenize.chat import render
from bessemer.errors import InputError
from bessemer.generate import Decoder, SamplingOptions
from bessemer.topology import TopologySettings, make_topology
from bessemer.training import feed, launch
from bessemer.training.callbacks.preview import held_out_prompts
from tiny_run import random_params

PROMPTS = ["the red fox", "a", "blue dog runs over the"]


@pytest.fixture(scope="module")
def trainer(tiny, home, tmp_path_factory):
    """On a mesh of four; parameters large enough that the text depends on the prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        mesh = TopologySettings(data=2, fsdp=2)
        patch.setattr(launch, "make_topology", lambda settings: make_topology(mesh, devices=jax.devices()[:4]))
        settings = {**tiny, "logging.preview_interval": 5, "architecture.block_size": 64}
        settings["training.per_device_batch_size"] = 2
        made = launch.build_trainer("quickstart", settings, name="g", root=tmp_path_factory.mktemp("runs"))
    with made.topology.scope():
        params = jax.device_put(
            random_params(made.model, 2), jax.tree.map(lambda leaf: leaf.sharding, made.state.params)
        )
    made.state = made.state.replace(params=params)
    return made


@pytest.fixture(scope="module")
def greedy(trainer):
    return trainer.generate(prompts=PROMPTS, max_tokens=8, return_metadata=True, all_gather=True)


@pytest.mark.slow
def test_generate_equals_the_decoder_and_its_arrays_are_padded_as_promised(trainer, greedy):
    tokenizer = trainer.tokenizer
    rows = [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in PROMPTS]
    ends = (tokenizer.bos_id, tokenizer.specials["<|assistant_end|>"])
    local = jax.device_put(feed.fetch(trainer.state.params))
    expected = Decoder(trainer.model, pad_id=tokenizer.pad_id, end_ids=ends)(local, rows, max_tokens=8)
    for index, row in enumerate(rows):
        assert greedy.prompt_ids[index, -len(row) :].tolist() == row
        assert greedy.prompt_mask[index].tolist() == [0] * (16 - len(row)) + [1] * len(row)
        made = expected.lengths[index]
        assert greedy.completion_ids[index, :made].tolist() == expected.ids[index, :made].tolist()
        assert greedy.completion_mask[index].tolist() == [1] * made + [0] * (8 - made)
        assert greedy.generation_results[index] == tokenizer.decode(expected.row(index))
        np.testing.assert_allclose(greedy.metadata["logprobs"][index], expected.logprobs[index], atol=1e-4)
    np.testing.assert_array_equal(greedy.sequences, np.hstack([greedy.prompt_ids, greedy.completion_ids]))
    assert tuple(greedy.metadata["finish"]) == expected.reasons
    assert greedy.decoded_prompts == ["<|bos|>" + prompt for prompt in PROMPTS]
    assert greedy.completion_prompts == PROMPTS
    assert len({tuple(row) for row in greedy.completion_ids.tolist()}) == 3


def test_ids_and_the_compiled_function_give_the_same_and_compile_once(trainer, greedy):
    before = trainer.generator.program.compilations
    again = trainer.generate(greedy.prompt_ids, greedy.prompt_mask, max_tokens=8)
    assert isinstance(again.sequences, jax.Array) and again.metadata is None
    np.testing.assert_array_equal(again.sequences, greedy.sequences)
    bare = trainer.generate(greedy.prompt_ids, generation_config={"max_tokens": 8}, config_overrides={"top_k": 3})
    np.testing.assert_array_equal(bare.completion_ids, greedy.completion_ids)
    assert trainer.generator.program.compilations == before
    call = trainer.create_generate_function(max_tokens=8)
    sequences, ids, mask = call(trainer.state, greedy.prompt_ids, greedy.prompt_mask)
    np.testing.assert_array_equal(sequences, greedy.sequences)
    np.testing.assert_array_equal(ids, greedy.prompt_ids)
    np.testing.assert_array_equal(mask, greedy.prompt_mask)
    compiled = trainer.generator.program.compilations
    call(trainer.state, greedy.prompt_ids, greedy.prompt_mask)
    assert trainer.generator.program.compilations == compiled


def test_samples_of_a_prompt_differ_and_another_step_draws_otherwise(trainer):
    options = {"max_tokens": 8, "n": 2, "temperature": 1.5, "seed": 4}
    first = trainer.generate(prompts=PROMPTS[:2], **options)
    assert first.completion_prompts == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2 and len(first.generation_results) == 4
    assert first.completion_ids.shape == (4, 8) and first.sequences.shape == (4, 24)
    assert len({tuple(row) for row in first.completion_ids.tolist()}) == 4
    again = trainer.generate(prompts=PROMPTS[:2], **options)
    np.testing.assert_array_equal(first.completion_ids, again.completion_ids)
    later = trainer.generate(prompts=PROMPTS[:2], state=trainer.state.replace(step=trainer.state.step + 1), **options)
    assert (later.completion_ids != first.completion_ids).any()


def test_chat_messages_and_a_template_for_texts(trainer):
    messages = [{"role": "user", "content": "the red fox"}]
    asked = trainer.generate(prompts=messages, max_tokens=8)
    as_text = trainer.generate(prompts="the red fox", apply_chat_template=True, max_tokens=8)
    assert asked.generation_results == as_text.generation_results and asked.completion_prompts == [messages]
    ids = render(messages, trainer.tokenizer)
    assert asked.prompt_ids[0, -len(ids) :].tolist() == ids
    names = trainer.tokenizer.specials
    assert [ids[1], ids[-2], ids[-1]] == [
        names[f"<|{name}|>"] for name in ("user_start", "user_end", "assistant_start")
    ]
    with pytest.raises(InputError, match="role"):
        trainer.generate(prompts=[{"role": "judge", "content": "x"}])


def test_what_cannot_be_generated_is_said(trainer):
    with pytest.raises(ValueError, match="prompts"):
        trainer.generate()
    with pytest.raises(ValueError, match="not both"):
        trainer.generate(np.ones((1, 2), np.int32), prompts="a")
    with pytest.raises(InputError, match="Did you mean 'max_tokens'"):
        trainer.generate(prompts="a", max_token=3)
    with pytest.raises(InputError, match="left"):
        trainer.generate(np.array([[1, 2, 3]]), np.array([[1, 1, 0]]))
    with pytest.raises(InputError, match="vocabulary"):
        trainer.generate(np.array([[1, 2, 300_000]]))
    with pytest.raises(InputError, match="temperature"):
        trainer.create_generate_function(temperature=-1.0)
    assert SamplingOptions().seed is None


def test_maybe_generate_previews_when_due(trainer):
    trainer.run_directory.create()
    metrics: dict[str, object] = {}
    trainer.maybe_generate(trainer.state, 4, metrics)
    assert not metrics and not trainer.run_directory.samples.exists()
    trainer.maybe_generate(trainer.state, 5, metrics)
    rows = [json.loads(line) for line in trainer.run_directory.samples.read_text().splitlines()]
    prompts = held_out_prompts(trainer.data.validation, trainer.tokenizer)
    assert prompts and [row["prompt"] for row in rows] == prompts and len(metrics["samples"]) == len(prompts)
    assert {row["step"] for row in rows} == {5}
