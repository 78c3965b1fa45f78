"""The compiled decoder: equal to the full forward, deterministic, bounded by the context, compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.errors import InputError
from bessemer.generate.decoder import Decoder, bucket, crop
from bessemer.generate.engine import Engine
from bessemer.generate.sampling import SamplingOptions
from bessemer.models.gpt import GPT
from bessemer.models.protocol import LanguageModel
from tiny_run import random_params

BLOCK = 32
PROMPTS = [[1, 5, 9, 2], [1, 7], [1, 3, 3, 8, 20, 41, 66]]


@pytest.fixture(scope="module")
def model():
    return GPT(depth=2, width=32, head_dim=16, vocab_size=97, block_size=BLOCK, window="SL", precision="float32")


@pytest.fixture(scope="module")
def params(model):
    return random_params(model, 1)


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder(model, pad_id=96)


@pytest.fixture(scope="module")
def forward(model, params):
    """(B, BLOCK) ids → log-probabilities of the full forward."""
    call = jax.jit(lambda ids: jax.nn.log_softmax(model.apply({"params": params}, ids)))

    def run(ids):
        padded = np.zeros((1, BLOCK), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(call(padded))[0, : len(ids)]

    return run


@pytest.mark.slow
def test_greedy_equals_the_argmax_of_the_full_forward(decoder, params, forward):
    result = decoder(params, PROMPTS, max_tokens=10)
    assert result.lengths.tolist() == [10, 10, 10] and set(result.reasons) == {"length"}
    for index, prompt in enumerate(PROMPTS):
        row = result.row(index)
        logprobs = forward([*prompt, *row])[len(prompt) - 1 : -1]
        assert logprobs.argmax(axis=-1).tolist() == row
        chosen = logprobs[np.arange(len(row)), row]
        np.testing.assert_allclose(result.logprobs[index, : len(row)], chosen, atol=2e-4)
    assert len({tuple(result.row(index)) for index in range(3)}) == 3  # the prompts matter


def test_drawn_tokens_carry_the_log_probabilities_of_the_full_forward(decoder, params, forward):
    result = decoder(params, PROMPTS, max_tokens=10, sampling=SamplingOptions(temperature=1.5, seed=3))
    for index, prompt in enumerate(PROMPTS):
        row = result.row(index)
        logprobs = forward([*prompt, *row])[len(prompt) - 1 : -1]
        np.testing.assert_allclose(result.logprobs[index, : len(row)], logprobs[np.arange(len(row)), row], atol=2e-4)


def test_temperature_zero_and_top_k_one_are_greedy_whatever_the_seed(decoder, params):
    greedy = decoder(params, PROMPTS, max_tokens=10).ids
    for options in (
        SamplingOptions(temperature=0.0, top_p=0.5, seed=5),
        SamplingOptions(temperature=2.0, top_k=1, seed=6),
        SamplingOptions(temperature=2.0, top_p=1e-6, seed=7),
        SamplingOptions(temperature=2.0, min_p=1.0, seed=8),
    ):
        np.testing.assert_array_equal(decoder(params, PROMPTS, max_tokens=10, sampling=options).ids, greedy)


def test_a_seed_gives_the_same_text_again_and_in_any_company(decoder, params):
    options = SamplingOptions(temperature=1.5, seed=11)
    first = decoder(params, PROMPTS, max_tokens=10, sampling=options)
    again = decoder(params, PROMPTS, max_tokens=10, sampling=options)
    np.testing.assert_array_equal(first.ids, again.ids)
    other = decoder(params, PROMPTS, max_tokens=10, sampling=SamplingOptions(temperature=1.5, seed=12))
    assert (first.ids != other.ids).any()
    seeds = SamplingOptions(temperature=1.5, seed=[11, 5, 6])
    mixed = decoder(params, [PROMPTS[0], [1, 90], [1, 91]], max_tokens=10, sampling=seeds)
    np.testing.assert_array_equal(mixed.ids[0], first.ids[0])  # seed 11 is the first row of seed=11


def test_rows_end_at_stop_tokens_and_emit_padding_after(decoder, params):
    free = decoder(params, PROMPTS, max_tokens=10)
    stop = int(free.ids[0, 4])
    result = decoder(params, PROMPTS, max_tokens=10, stop_ids=[stop])
    for index in range(len(PROMPTS)):
        row = free.ids[index].tolist()
        end = row.index(stop) + 1 if stop in row else len(row)
        assert result.lengths[index] == end
        assert result.ids[index, :end].tolist() == row[:end]
        assert (result.ids[index, end:] == 96).all() and (result.logprobs[index, end:] == 0).all()
    assert result.reasons[0] == "stop" and result.row(0) == free.ids[0].tolist()[: result.lengths[0] - 1]


def test_the_models_own_end_token_needs_no_asking(model, decoder, params):
    end = int(decoder(params, PROMPTS, max_tokens=10).ids[0, 4])
    named = decoder(params, PROMPTS, max_tokens=10, stop_ids=[end])
    another = Decoder(model, pad_id=96, end_ids=(end,))
    another._run = decoder._run  # compiled already
    own = another(params, PROMPTS, max_tokens=10)
    np.testing.assert_array_equal(own.ids, named.ids)
    assert own.reasons == named.reasons and own.reasons[0] == "stop"


def test_calls_of_similar_size_share_one_compilation(decoder, params):
    """The one that all tests above share."""
    decoder(params, PROMPTS, max_tokens=10)
    decoder(params, PROMPTS[:3], max_tokens=16, sampling=SamplingOptions(0.7, top_k=5), stop_ids=[4])
    decoder(params, [*PROMPTS, [1, 2, 3]], max_tokens=3)
    assert decoder.compilations == 1


def test_the_context_ends_a_row_with_a_notice(decoder, params, forward):
    prompt = [1, *range(2, 27)]
    result = decoder(params, [prompt, [1, 2], [1, 3]], max_tokens=10)
    assert result.lengths.tolist() == [BLOCK - len(prompt) + 1, 10, 10]
    assert result.reasons == ("context", "length", "length")
    assert "1 of 3 rows" in result.notices[0]
    row = result.row(0)
    assert forward([*prompt, *row[:-1]]).argmax(axis=-1)[len(prompt) - 1 :].tolist() == row


def test_long_prompts_are_cropped_from_the_left_and_say_so(decoder, params):
    long = [1, *range(2, 60)]
    result = decoder(params, [long, [1], [2]], max_tokens=10)
    assert "cropped" in result.notices[0] and "36 in all" in result.notices[0]
    np.testing.assert_array_equal(result.ids, decoder(params, [long[-23:], [1], [2]], max_tokens=10).ids)
    rows, notices = crop([long], 1000, BLOCK)
    assert len(rows[0]) == BLOCK // 2 and notices


def test_bad_requests_are_input_errors(decoder, params):
    for prompts, tokens in (([], 1), ([[]], 1), ([[97]], 1), ([[1]], 0)):
        with pytest.raises(InputError):
            decoder(params, prompts, max_tokens=tokens)
    with pytest.raises(InputError):
        decoder(params, [[1]], max_tokens=1, stop_ids=[97])


def test_a_sharded_model_gives_the_same_tokens(model, params, decoder):
    from bessemer.topology import TopologySettings, make_topology, shardings

    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=2))
    with topology.scope():
        boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
        placed = jax.device_put(params, shardings(boxed, topology.mesh, topology.rest_rules))
        result = Decoder(model, pad_id=96)(placed, PROMPTS, max_tokens=10)
    np.testing.assert_array_equal(result.ids, decoder(params, PROMPTS, max_tokens=10).ids)


def test_buckets():
    assert [bucket(n, 512) for n in (1, 16, 17, 100, 512)] == [16, 16, 32, 128, 512]
    assert bucket(30, 24) == 24


def test_a_model_that_cannot_decode_is_refused_by_name():
    """As a model of one's own is, before anything is compiled."""
    with pytest.raises(InputError, match="class LanguageModel cannot write text: it has no `decode` and `init_cache`"):
        Decoder(LanguageModel(vocab_size=97, block_size=BLOCK))
    with pytest.raises(InputError, match="cannot write text"):
        Engine(LanguageModel(vocab_size=97, block_size=BLOCK), {})
