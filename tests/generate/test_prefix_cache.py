"""The prefix cache: a prompt that begins as a slot does is prefilled from there on, and its text is the same."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from bessemer.generate import Engine, Request, SamplingOptions
from bessemer.generate.request import Held, PrefixCache, continued_width
from bessemer.models.llama import Llama
from bessemer.models.qwennext import QwenNext
from compilations import counted_compilations
from tiny_run import random_params, tiny_model

BLOCK = 128
WHOLE = tiny_model().clone(block_size=BLOCK)
WINDOWED = WHOLE.clone(window="SL", window_short=0.25)  # a ring of 32 keys
# its cache also holds the last token, and what the next key takes from the last one
BIGRAMS = WINDOWED.clone(bigram_rows=256, key_offset=True)
SHAPE = {"depth": 2, "width": 32, "head_dim": 16, "vocab_size": 300, "block_size": BLOCK, "precision": "float32"}
LLAMA = Llama(**SHAPE, kv_heads=1)
QWENNEXT = QwenNext(**SHAPE, kv_heads=1, delta_layers="DF", rotary_share=0.5, delta_key_dim=6, delta_value_dim=8)


def engines_of(model, **options):
    """Return two engines of the same weights: with the prefix cache, and without."""
    params = random_params(model, 3)
    options = {"slots": 8, "steps": 4, "whole": True, **options}
    return Engine(model, params, reuse=True, **options), Engine(model, params, **options)


@pytest.fixture(scope="module")
def pair():
    return engines_of(WHOLE)


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(1, 300, count).tolist()


def same(cached, plain, requests):
    """Ask both; return the samples of the first, which are those of the second."""
    for one, other in zip(cached.generate(requests), plain.generate(requests), strict=True):
        assert [sample.ids for sample in one.samples] == [sample.ids for sample in other.samples]
        for a, b in zip(one.samples, other.samples, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
        yield one.samples[0]


def asked(prompt, seed, tokens=6):
    return Request(prompt, tokens, SamplingOptions(temperature=1.0), seed=seed, logprobs=True)


def test_conversations_of_several_turns_prefill_what_is_new(pair):
    """Six conversations of four turns in eight slots: after the first turn only observations are computed, several in
    one program; the programs are those of one width."""
    cached, plain = pair
    texts, observed = [tokens(5 + 3 * n, n) for n in range(6)], 0
    compiled = 0
    for turn in range(4):
        prompts, reused = sum(map(len, texts)), cached.reused_tokens
        asked_for = cached.prompt_tokens
        answers = list(same(cached, plain, [asked(text, 7 * turn + n) for n, text in enumerate(texts)]))
        computed = cached.prompt_tokens - asked_for - (cached.reused_tokens - reused)
        assert computed == (prompts if turn == 0 else observed + len(texts)), (
            "one token of each row is not in its cache"
        )
        said = [tokens(2 + n, 50 + turn) for n in range(6)]
        observed = sum(map(len, said))
        texts = [[*text, *answer.ids, *more] for text, answer, more in zip(texts, answers, said, strict=True)]
        compiled = cached.compilations if turn < 2 else compiled
        assert cached.compilations == compiled
    assert plain.reused_tokens == 0


def test_a_beginning_in_common_is_copied_and_stays(pair):
    """Three questions after one long introduction: the first computes it, the others copy it from a slot in use too."""
    cached, plain = pair
    cached.update_params(cached.params)  # forgets
    intro, reused = tokens(40, 1), cached.reused_tokens
    first = cached.submit(asked([*intro, 5], 1, 12))
    cached.step()
    assert cached.active == 1
    list(same(cached, plain, [asked([*intro, 6, 7], 2), asked([*intro, 8], 3)]))
    assert cached.reused_tokens - reused == 2 * 40
    (sample,) = first.result().samples
    (other,) = plain.generate([asked([*intro, 5], 1, 12)])[0].samples
    assert sample.ids == other.ids
    before = cached.reused_tokens
    list(same(cached, plain, [asked([*intro, 5, *sample.ids, 9], 4)]))
    assert cached.reused_tokens - before == 41 + 11, "it was copied, not taken"
    before = cached.reused_tokens
    list(same(cached, plain, [dataclasses.replace(asked([*intro, 8], 3), fresh=True)]))
    assert cached.reused_tokens == before


def test_no_cache_of_earlier_weights_is_continued(pair):
    """A row that is generating while the weights change has a cache of both: the prompt that continues it computes all
    of its tokens, as an engine does that knows the new weights only."""
    cached, plain = pair
    old, new = cached.params, random_params(WHOLE, 4)
    text = tokens(20, 8)
    ended = cached.generate([asked([*text, 1], 1, 4)])[0].samples[0]
    live = cached.submit(asked([*text, 2], 2, 12))
    cached.step()
    assert cached.active == 1
    cached.update_params(new)
    plain.update_params(new)
    try:
        (sample,) = live.result().samples
        before = cached.reused_tokens
        later = [asked([*text, 2, *sample.ids, 5], 3), asked([*text, 1, *ended.ids, 6], 4)]
        list(same(cached, plain, later))
        assert cached.reused_tokens == before
        (answer,) = cached.generate([asked([*text, 2, *sample.ids, 5], 3)])[0].samples
        before = cached.reused_tokens
        list(same(cached, plain, [asked([*text, 2, *sample.ids, 5, *answer.ids, 7], 5)]))
        assert cached.reused_tokens > before, "what the new weights computed is continued"
    finally:
        cached.update_params(old)
        plain.update_params(old)


def test_weights_are_not_replaced_within_a_round(pair, monkeypatch):
    """Another thread replaces them while a round runs, after the prefill and before its tokens are read."""
    cached, _ = pair
    old, new, text, ended, threads = cached.params, random_params(WHOLE, 4), tokens(20, 9), [], []
    before = cached.rounds

    def replace():
        cached.update_params(new)
        ended.append(cached.rounds - before)

    def fetch(arrays):
        if not threads:
            threads.append(threading.Thread(target=replace))
            threads[0].start()
            threads[0].join(0.5)  # it is left waiting: the round holds the lock
        return jax.device_get(arrays)

    monkeypatch.setattr(cached, "fetch", fetch)
    try:
        (sample,) = cached.generate([asked(text, 1, 4)])[0].samples
        threads[0].join()
        reused = cached.reused_tokens
        cached.generate([asked([*text, *sample.ids, 5], 2, 4)])
        assert ended == [1] and cached.reused_tokens == reused
    finally:
        cached.update_params(old)


@pytest.mark.slow
@pytest.mark.parametrize("model", [WINDOWED, BIGRAMS, LLAMA], ids=["windowed", "bigrams", "llama"])
def test_rows_are_cut_where_texts_part_unless_a_window_lost_what_is_needed(model):
    cached, plain = engines_of(model, slots=4)
    short, long = tokens(20, 1), tokens(90, 2)
    list(same(cached, plain, [asked(short, 1, 4), asked(long, 2, 4)]))
    for text, parts in ((short, 18), (long, 70)):
        before = cached.reused_tokens
        list(same(cached, plain, [asked([*text[:parts], 1, 2], 3, 4)]))
        fits = model is LLAMA or len(text) + 3 <= model.most_rewound
        assert cached.reused_tokens - before == (parts if fits else 0)


@pytest.mark.slow
def test_a_state_is_continued_and_copied_but_never_cut():
    """Recurrent layers: three turns of two conversations prefill what is new; a text that parts earlier begins anew."""
    cached, plain = engines_of(QWENNEXT, slots=4)
    texts = [tokens(5, 1), tokens(70, 2)]
    for turn in range(3):
        before, held = cached.reused_tokens, sum(len(text) for text in texts)
        answers = list(same(cached, plain, [asked(text, 7 * turn + n) for n, text in enumerate(texts)]))
        assert cached.reused_tokens - before == (0 if turn == 0 else held - len(texts) - 2 * 3)
        texts = [[*text, *answer.ids, *tokens(3, 50 + turn)] for text, answer in zip(texts, answers, strict=True)]
    before = cached.reused_tokens
    list(same(cached, plain, [asked([*texts[1][:40], 1, 2], 3)]))
    assert cached.reused_tokens == before


@pytest.mark.slow
def test_drafts_and_prefixes_together():
    from bessemer.generate import Speculation

    params = random_params(WHOLE, 3)
    options = {"slots": 4, "steps": 4, "whole": True, "params": params}
    cached = Engine(WHOLE, **options, reuse=True, speculate=Speculation(3, 2))
    plain = Engine(WHOLE, **options)
    text = tokens(6, 1) * 4
    for turn in range(3):
        (answer,) = same(cached, plain, [asked(text, turn)])
        text = [*text, *answer.ids, *text[:5]]
    assert cached.reused_tokens > 60 and cached.acceptance["drafted"] > 0


@pytest.mark.slow
def test_experts_of_reused_tokens_are_kept():
    mixture = Llama(**SHAPE, experts=6, experts_active=2, expert_width=8)
    cached, plain = engines_of(mixture, slots=2, routes=True)
    text = tokens(9, 1)
    for turn in range(3):
        before = cached.reused_tokens
        one, other = (engine.generate([asked(text, turn)])[0].samples[0] for engine in (cached, plain))
        assert one.ids == other.ids and len(one.routes) == len(text) + len(one.ids) - 1
        np.testing.assert_array_equal(one.routes, other.routes)
        assert (cached.reused_tokens > before) == (turn > 0)
        text = [*text, *one.ids, 5, 6]


@pytest.mark.slow
def test_a_prepared_engine_compiles_nothing_for_prompts_of_any_length():
    """One prompt, several, several samples, questions after answers, somebody who reads along."""
    model = WHOLE.clone(block_size=64)
    engine = Engine(model, random_params(model, 3), slots=2, steps=4, narrowest=32, reuse=True)
    engine.prepare()
    compiled = engine.compilations
    assert compiled == 10, "widths 32 and 64 in three shapes, 16 and 64 after a prefix, 1 and 2 rows"
    engine.generate([asked(tokens(3), 1, 2)])  # its rows are allocated again
    with counted_compilations() as found:
        for size in (1, 2, 16, 31, 33, 34, 47, 60):
            text = tokens(size, size)
            (sample,) = engine.generate([asked(text, 1, 2)])[0].samples
            engine.generate([asked([*text, *sample.ids, 5][:60], 2, 2), asked(tokens(size, 99), 3, 2)])
            engine.generate([dataclasses.replace(asked(text[: size // 2 + 1], 4, 2), n=2, stream=True)])
    assert engine.compilations == compiled and not found


def test_what_is_found():
    cache = PrefixCache(dataclasses.make_dataclass("Model", ())())  # its rows cannot be cut
    ids = np.arange(1, 21)
    cache.put(0, Held(ids[:10]))
    cache.put(1, Held(ids[:15]))
    cache.put(2, Held(ids, adapter=1))
    cache.put(3, Held(ids[:0]))
    assert len(cache) == 3

    def find(prompt, adapter=0, **lengths):
        found = cache.find(list(prompt), adapter, {int(slot[1:]): length for slot, length in lengths.items()})
        return found and (found.slot, found.length, found.whole)

    assert find(range(1, 21)) == (1, 15, True)
    assert find(range(1, 16)) == (0, 10, True), "the newest token is left to the first step"
    assert find(range(1, 31), adapter=1) == (2, 20, True), "a model with this adapter computed it"
    assert find(range(2, 30)) is None and find([1]) is None
    assert find(range(1, 21), s1=17) == (0, 10, True), "a row is in slot 1, two tokens further"
    cache.most_shortened = 16
    assert find(range(1, 8)) == (0, 6, False) and find(range(1, 21), s1=16) == (1, 15, False)
    assert find(range(1, 21), s1=17) == (0, 10, True)
    cache.drop(0)
    assert find(range(1, 8)) == (1, 6, False)
    assert [continued_width(size, 300) for size in (0, 16, 17, 65, 256, 257)] == [16, 16, 64, 256, 256, 300]
