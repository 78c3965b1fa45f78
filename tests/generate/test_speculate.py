"""Speculative decoding: the text, its scores and its distribution are those of plain decoding, in fewer passes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from tests.tiny_run import make_run, random_params, tiny_model, tiny_tokenizer

from bessemer.cli import cli
from bessemer.cli.options import DECODING
from bessemer.config import declared
from bessemer.errors import InputError
from bessemer.generate import Decoder, Engine, LoadedModel, Request, SamplingOptions, Speculation
from bessemer.generate.rows import Text
from bessemer.generate.speculate import find_draft
from bessemer.models.gpt import GPT
from bessemer.models.llama import Llama
from bessemer.models.protocol import LanguageModel
from bessemer.rl.rollout import DecodingSettings
from bessemer.serve.service import Metrics
from bessemer.topology import TopologySettings, make_topology, shardings

SHAPE: dict[str, Any] = {"depth": 2, "width": 32, "head_dim": 16, "precision": "float32", "block_size": 48}
MODELS = {
    # a ring of 12 keys, smear, value embeddings, bigrams, shifted keys of paired heads
    "gpt": GPT(
        **SHAPE, vocab_size=40, window="SL", window_short=0.25, bigram_rows=64, key_offset=True, paired_heads=True
    ),
    "llama": Llama(**SHAPE, vocab_size=40, kv_heads=1, sliding_window=7, sliding_layers="SL", tied_head=True),
}
PATTERN = (1, 5, 9, 2, 5, 9, 2, 5, 9)
ENGINE: dict[str, Any] = {"slots": 4, "steps": 4, "whole": True, "end_ids": (), "seed": 3, "policy_logprobs": True}


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    return {name: random_params(model, seed) for seed, (name, model) in zip((2, 1), MODELS.items(), strict=True)}


@pytest.fixture(scope="module")
def engines(params: dict[str, Any]) -> Any:
    """family → (plain, speculating), made once."""
    made: dict[str, tuple[Engine, Engine]] = {}

    def of(family: str) -> tuple[Engine, Engine]:
        if family not in made:
            model, weights = MODELS[family], params[family]
            drafts = Speculation(draft=3, ngram=2)
            made[family] = Engine(model, weights, **ENGINE), Engine(model, weights, **ENGINE, speculate=drafts)
        return made[family]

    return of


def both(plain: Engine, fast: Engine, requests: list[Request]) -> list[tuple[Any, Any]]:
    """Return each sample of both engines, and check that they are the same text with the same scores."""
    found = [engine.generate(requests) for engine in (plain, fast)]
    pairs = [pair for two in zip(*found, strict=True) for pair in zip(*(one.samples for one in two), strict=True)]
    for one, other in pairs:
        assert (one.ids, one.finish, one.stop) == (other.ids, other.finish, other.stop)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
        np.testing.assert_allclose(one.policy_logprobs, other.policy_logprobs, atol=2e-4)
        assert [[token for token, _ in ranking] for ranking in one.top] == [[t for t, _ in r] for r in other.top]
    return pairs


FAMILIES = [pytest.param("gpt", marks=pytest.mark.slow), "llama"]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_scores_are_those_of_plain_decoding_in_fewer_passes(family: str, engines: Any) -> None:
    """More requests than slots, greedy and drawn, with every filter and penalty, up to a full context: rows accept
    different numbers of tokens in a pass, finish at different times, and their windows wrap around."""
    plain, fast = engines(family)
    drawn, flat = SamplingOptions(temperature=0.7), SamplingOptions(temperature=0.05)
    asked = [
        Request(PATTERN, 30, logprobs=True, top_logprobs=3),
        Request((7,), None, logprobs=True),
        Request((1, 3, 3, 8, 20), 25, drawn, n=2, seed=5, logprobs=True),
        Request(PATTERN, 30, replace(drawn, top_k=4, top_p=0.9), seed=6),
        Request(PATTERN, 30, replace(flat, repetition_penalty=1.2), seed=7, logprobs=True),
        Request(PATTERN, 30, replace(flat, presence_penalty=0.5, frequency_penalty=0.3), n=2, seed=8, logprobs=True),
        Request(PATTERN, 1, flat, seed=9),
        Request(PATTERN, 2),
    ]
    tokens, passes, drafted = fast.tokens, fast.passes, fast.drafted
    pairs = both(plain, fast, asked)
    assert {one.finish for one, _ in pairs} == {"length", "context"}
    tokens, passes, drafted = fast.tokens - tokens, fast.passes - passes, fast.drafted - drafted
    assert tokens == sum(one.length for one, _ in pairs)
    assert passes < 0.9 * tokens, "some drafts are accepted"
    assert drafted > tokens - passes, "and some are not"
    assert fast.acceptance["accepted"] == fast.tokens - fast.passes and plain.acceptance is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stop_token_inside_a_draft_ends_the_row(family: str, engines: Any) -> None:
    """Every token of a greedy text in turn stops it; the row's later tokens are never seen."""
    plain, fast = engines(family)
    [[whole, _]] = both(plain, fast, [Request(PATTERN, 30)])
    tokens, passes = fast.tokens, fast.passes
    pairs = both(plain, fast, [Request(PATTERN, 30, stop_ids=[stop]) for stop in dict.fromkeys(whole.ids)])
    assert all(one.finish == "stop" and one.stop == one.ids[-1] for one, _ in pairs)
    assert {len(one.ids) for one, _ in pairs} == {whole.ids.index(stop) + 1 for stop in whole.ids}
    assert fast.passes - passes < fast.tokens - tokens


def test_a_conversation_goes_on_from_the_cache_that_a_speculating_row_left(engines: Any) -> None:
    plain, fast = engines("llama")
    plain.reuse = fast.reuse = True
    try:
        [[first, _]] = both(plain, fast, [Request(PATTERN, 9)])
        longer = (*PATTERN, *first.ids, 4, 5, 9)
        before = fast.reused_tokens
        both(plain, fast, [Request(longer, 12, logprobs=True)])
        assert fast.reused_tokens - before == len(PATTERN) + 8
    finally:
        plain.reuse = fast.reuse = False


def test_streamed_tokens_are_those_of_whole_rounds(engines: Any) -> None:
    _, fast = engines("llama")
    whole = fast.generate([Request(PATTERN, 20)])[0].samples[0]
    events = list(fast.submit(Request(PATTERN, 20, stream=True)))
    assert tuple(token for event in events for token in event.ids) == whole.ids
    assert 1 <= len(events[0].ids) <= 4, "the first round is one pass"


def test_the_sampled_distribution_is_exactly_the_models() -> None:
    """All 4³ continuations of a prompt: their counts in 4096 samples against their probabilities from full forward
    passes (chi-square, 63 degrees of freedom; 1 in 10⁵ correct samplers would exceed the bound)."""
    model = Llama(**{**SHAPE, "depth": 1}, vocab_size=4)
    params, prompt, heat, rows = random_params(model, 2), (1, 2, 3, 1, 2, 3, 1), 0.8, 4096
    texts = np.array(list(itertools.product(range(4), repeat=3)))
    ids = np.concatenate([np.tile(prompt, (64, 1)), texts], axis=1)
    logits = np.asarray(model.apply({"params": params}, jnp.asarray(ids)), np.float64)[:, len(prompt) - 1 : -1] / heat
    each = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = np.exp(np.take_along_axis(each, texts[..., None], -1).sum((1, 2)))
    assert wanted.sum() == pytest.approx(1)

    def samples(speculate: Speculation | None) -> Any:
        options = SamplingOptions(temperature=heat, seed=11)
        return Decoder(model, speculate=speculate)(params, [prompt] * rows, max_tokens=3, sampling=options)

    found, plain = samples(Speculation(draft=2)), samples(None)
    np.testing.assert_array_equal(found.ids, plain.ids)
    np.testing.assert_allclose(found.logprobs, plain.logprobs, atol=1e-5)
    counts = np.bincount(found.ids @ np.array([16, 4, 1]), minlength=64)
    assert ((counts - rows * wanted) ** 2 / (rows * wanted)).sum() < 121
    assert found.passes is not None and found.drafted is not None
    accepted = found.lengths - found.passes
    assert set(accepted) == {0, 1, 2}, "drafts of every length are accepted somewhere"


def draft_of(text: list[int], draft: int, ngram: int) -> list[int]:
    """The definition, in plain Python."""
    best, place = 0, -1
    for end in range(len(text) - 1):
        common = 0
        while common < min(ngram, end + 1) and text[end - common] == text[len(text) - 1 - common]:
            common += 1
        if common >= max(best, 1):
            best, place = common, end
    period = len(text) - 1 - place
    return [text[place + 1 + i % period] for i in range(draft)] if best else []


def test_a_draft_follows_the_latest_place_most_like_the_end() -> None:
    random, call = np.random.default_rng(0), jax.jit(find_draft, static_argnums=(1, 2))
    texts = [random.integers(0, 4, length).tolist() for length in range(1, 25) for _ in range(4)]
    texts += [[5, 1, 2, 3, 9, 1, 2, 3], [7, 7, 7], [1, 2, 3]]
    ids = np.full((len(texts), 30), 3, np.int32)  # what lies behind a text is not part of it
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    tokens, found = call(Text(jnp.asarray(ids), jnp.array([len(text) for text in texts])), 4, 3)
    for text, row, has in zip(texts, np.asarray(tokens), np.asarray(found), strict=True):
        wanted = draft_of(text, 4, 3)
        assert has == bool(wanted) and (not wanted or row.tolist() == wanted), text
    assert draft_of(texts[-3], 4, 3) == [9, 1, 2, 3]


@pytest.mark.parametrize("family", MODELS)
def test_a_rewound_cache_is_the_one_of_the_kept_tokens_alone(family: str, params: dict[str, Any]) -> None:
    """In rings that have wrapped around too; another token then gets the same logits."""
    model, weights = MODELS[family], {"params": params[family]}
    random = np.random.default_rng(1)
    decode = jax.jit(lambda ids, cache, lengths: model.apply(weights, ids, cache, lengths, method="decode"))
    cache = model.init_cache(3, 40)
    _, cache = decode(random.integers(0, 40, (3, 20)), cache, jnp.array([20, 9, 3]))
    ids, kept = jnp.asarray(random.integers(0, 40, (3, 4))), jnp.array([1, 3, 0])
    _, after = decode(ids, cache, jnp.array([4, 4, 0]))
    rewound = model.apply(weights, after, cache, ids, kept, method="rewind")
    _, wanted = decode(ids, cache, kept)
    np.testing.assert_array_equal(rewound.lengths, wanted.lengths)
    np.testing.assert_array_equal(rewound.previous, wanted.previous)
    one = jnp.array([[3], [4], [5]])
    logits = [np.asarray(decode(one, made, jnp.ones(3, jnp.int32))[0]) for made in (rewound, wanted)]
    np.testing.assert_allclose(*logits, atol=2e-5)
    assert np.abs(logits[0] - np.asarray(decode(one, after, jnp.ones(3, jnp.int32))[0]))[:2].max() > 1e-3


class Plain(LanguageModel):
    """Has `decode` and `init_cache` at most, and nothing to take back."""


def test_what_cannot_speculate_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"generate\.speculate=ngram needs .*rewind.*Plain has none"):
        Decoder(Plain(vocab_size=8, block_size=8), speculate=Speculation())
    with pytest.raises(InputError, match=r"generate\.draft is 7.* window holds 7 .*generate\.draft=6 or less"):
        Engine(MODELS["llama"], None, speculate=Speculation(draft=7))
    with pytest.raises(InputError, match=r"generate\.ngram is 0"):
        Speculation(ngram=0)
    assert Speculation.of("none", 4, 3) is None


def test_the_command_lines_options_are_the_settings() -> None:
    @DECODING
    def command() -> None: ...

    options = {option.name: option for option in command.__click_params__}  # type: ignore[attr-defined]
    settings = {setting.key.removeprefix("generate/"): setting for setting in declared(DecodingSettings).values()}
    assert set(options) == set(settings)
    for name, option in options.items():
        assert option.default == settings[name].default and option.help
        if settings[name].choices:
            assert tuple(option.type.choices) == settings[name].choices
        else:
            assert (option.type.min, option.type.max) == (settings[name].range.minimum, settings[name].range.maximum)


@pytest.mark.slow
def test_commands_speculate_and_quantize(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sample` reports what drafts saved, beside the same text; `chat` and `serve` pass both on."""
    run = str(make_run(tmp_path, steps=(20,)).path)

    def sampled(*words: str) -> dict[str, Any]:
        shown = CliRunner().invoke(
            cli, ["sample", run, "--prompt", "The", "--max-tokens", "20", "--temperature", "0", "--json", *words]
        )
        assert shown.exit_code == 0, shown.output
        return json.loads(shown.stdout)

    refused = CliRunner().invoke(cli, ["sample", run, "--prompt", "The", "--draft", "3"])
    assert isinstance(refused.exception, InputError) and "--draft is for drafts" in str(refused.exception)
    plain, fast = sampled(), sampled("--speculate", "ngram", "--draft", "3", "--weights", "auto")
    assert plain["speculation"] is None and plain["tokens"] == fast["tokens"]
    saved = fast["speculation"]
    assert saved["passes"] + saved["accepted"] == 20 and saved["drafted"] >= saved["accepted"]
    assert sampled("--weights", "int8")["logprobs"] != plain["logprobs"]
    asked: list[Any] = []
    monkeypatch.setattr("bessemer.serve.app.serve", lambda load, options, say: asked.append((load()[0], options)))
    shown = CliRunner().invoke(cli, ["serve", run, "--speculate", "ngram", "--ngram", "2", "--weights", "fp8"])
    assert shown.exit_code == 0, shown.output
    [(loaded, options)] = asked
    assert isinstance(loaded, LoadedModel) and options.speculate == Speculation(4, 2)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params["blocks_0"]["q"])} == {"float8_e4m3fn", "float32"}
    shown = CliRunner().invoke(
        cli, ["chat", run, "--speculate", "ngram", "--weights", "int8", "--max-tokens", "3"], input="cats?\n"
    )
    assert shown.exit_code == 0, shown.output


def test_the_server_counts_passes_and_accepted_tokens(engines: Any) -> None:
    plain, fast = engines("llama")
    fast.generate([Request(PATTERN, 10)])
    text = Metrics().render(fast)
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert int(values["bessemer_passes_total"]) == fast.passes > 0
    assert int(values["bessemer_accepted_tokens_total"]) == fast.tokens - fast.passes
    assert int(values["bessemer_draft_tokens_total"]) == fast.drafted
    assert "bessemer_passes_total" not in Metrics().render(plain)


@pytest.mark.slow
def test_programs_are_lowered_ahead_with_drafts_and_quantized_weights() -> None:
    """What a trainer on an accelerator compiles beside its step; the engine then runs these programs."""
    model = tiny_model()
    params = random_params(model, 1)
    engine = Engine(
        model, None, slots=2, steps=4, whole=True, tokenizer=tiny_tokenizer(), speculate=Speculation(), weights="fp8"
    )
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), params)
    lowered = engine.lower_ahead(abstract, 9)
    assert all("f8E4M3FN" in program.as_text() for program in lowered)
    engine.update_params(params)
    assert engine.generate([Request(PATTERN, 6)])[0].samples[0].length == 6


@pytest.mark.slow
def test_a_mesh_of_eight_speculates_with_quantized_weights_as_one_device_does() -> None:
    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=2))
    model = tiny_model()
    params = random_params(model, 1)
    with topology.scope():
        boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
        placed = jax.device_put(params, shardings(boxed, topology.mesh, topology.rest_rules))
    options: dict[str, Any] = {"steps": 4, "end_ids": (), "weights": "int8"}
    meshed = Engine(model, placed, slots=3, **options, speculate=Speculation(), scope=topology.scope)
    plain = Engine(model, params, slots=4, **options)
    heat = SamplingOptions(temperature=0.3)
    requests = [Request(PATTERN, 20), Request((1, 7), 9, heat, seed=2), Request((1, 3, 3, 8), 12, heat, n=2, seed=4)]
    wanted = [[sample.ids for sample in result.samples] for result in plain.generate(requests)]
    for _ in range(2):
        assert [[sample.ids for sample in result.samples] for result in meshed.generate(requests)] == wanted
        before = meshed.compilations
    assert meshed.compilations == before and meshed.passes < meshed.tokens
