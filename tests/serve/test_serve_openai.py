"""The official client gets what the model says: whole or streamed, repeatable, cut where it was asked to stop."""

from __future__ import annotations

import math

import openai
import pytest
from tests.serve.conftest import Live, make_service

from bessemer.data.tokenize.chat import render
from bessemer.generate import LoadedModel, Request, SamplingOptions, sample

PROMPT = "The 3 grey cats"
ASK = {"model": "tiny", "max_tokens": 24, "temperature": 1.0, "seed": 5}


def chat_messages() -> list[dict]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "cats?"}]


def test_greedy_is_what_the_plain_decoder_writes(live: Live, loaded: LoadedModel) -> None:
    given = live.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    [wanted], _ = sample(loaded, [PROMPT], max_tokens=24)
    assert given.choices[0].text == wanted.text
    assert given.choices[0].finish_reason == "length"
    assert given.usage.completion_tokens == 24
    assert given.usage.prompt_tokens == 1 + len(loaded.tokenizer.encode(PROMPT))


def test_the_same_seed_repeats_and_another_does_not(live: Live) -> None:
    first, again, other = (
        live.client.completions.create(prompt=PROMPT, **{**ASK, "seed": seed}).choices[0].text for seed in (5, 5, 6)
    )
    assert first == again != other


def test_streamed_completions_are_the_whole_ones(live: Live) -> None:
    ask = {**ASK, "n": 3, "logprobs": 0}
    whole = live.client.completions.create(prompt=PROMPT, **ask)
    texts, tokens, finish = [""] * 3, [[] for _ in range(3)], [None] * 3
    sizes = []
    options = {"include_usage": True}
    usage = None
    for chunk in live.client.completions.create(prompt=PROMPT, stream=True, stream_options=options, **ask):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.token_logprobs
            sizes.append(len(choice.logprobs.token_logprobs))
            finish[choice.index] = choice.finish_reason or finish[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert finish == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert sizes[:3] == [1, 1, 1], "the first token of each waits for no other"
    assert len(set(texts)) == 3, "each sample has a random stream of its own"


def test_streamed_chat_is_the_whole_one(live: Live) -> None:
    ask = {**ASK, "messages": chat_messages(), "logprobs": True}
    whole = live.client.chat.completions.create(**ask).choices[0]
    pieces, logprobs, roles, finish = [], [], [], None
    for chunk in live.client.chat.completions.create(stream=True, **ask):
        [choice] = chunk.choices
        roles.append(choice.delta.role)
        pieces.append(choice.delta.content or "")
        logprobs += choice.logprobs.content if choice.logprobs else []
        finish = choice.finish_reason or finish
    assert "".join(pieces) == whole.message.content
    assert [row.logprob for row in logprobs] == [row.logprob for row in whole.logprobs.content]
    assert roles[0] == whole.message.role == "assistant" and set(roles[1:]) <= {None}
    assert finish == whole.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_a_stop_string(live: Live, stream: bool) -> None:
    text = live.client.completions.create(prompt=PROMPT, **ASK).choices[0].text
    stop = text[6:9]
    given = live.client.completions.create(prompt=PROMPT, stop=["never there", stop], stream=stream, **ASK)
    choices = [chunk.choices[0] for chunk in given] if stream else given.choices
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_logprobs_are_the_engines(live: Live, loaded: LoadedModel) -> None:
    given = live.client.completions.create(prompt=PROMPT, logprobs=0, **ASK).choices[0].logprobs
    prompt = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode(PROMPT)]
    request = Request(prompt, max_tokens=24, sampling=SamplingOptions(temperature=1.0), seed=5, logprobs=True)
    wanted = live.engine.submit(request).result(300).samples[0]
    assert given.token_logprobs == list(wanted.logprobs)
    assert given.tokens == [loaded.tokenizer.decode([token]) for token in wanted.ids]
    assert all(math.isfinite(value) and value <= 0 for value in given.token_logprobs)


def test_the_most_likely_tokens_are_the_engines_whole_or_streamed(live: Live, loaded: LoadedModel) -> None:
    ask = {**ASK, "messages": chat_messages(), "logprobs": True, "top_logprobs": 4}
    whole = live.client.chat.completions.create(**ask).choices[0].logprobs.content
    request = Request(
        live.service.template.prompt(chat_messages()),
        max_tokens=24,
        sampling=SamplingOptions(temperature=1.0),
        seed=5,
        stop_strings=live.service.template.stop_strings,
        logprobs=True,
        top_logprobs=4,
    )
    wanted = live.engine.submit(request).result(300).samples[0]
    assert [[(one.token, one.logprob) for one in place.top_logprobs] for place in whole] == [
        [(loaded.tokenizer.decode([token]), score) for token, score in ranking] for ranking in wanted.top[: len(whole)]
    ]
    assert all(place.logprob <= place.top_logprobs[0].logprob for place in whole)
    streamed = []
    for chunk in live.client.chat.completions.create(stream=True, **ask):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == whole


def test_completions_rank_tokens_by_text_with_the_chosen_one_among_them(live: Live) -> None:
    given = live.client.completions.create(prompt=PROMPT, logprobs=3, **ASK).choices[0].logprobs
    assert len(given.top_logprobs) == len(given.tokens) == 24
    for token, logprob, ranked in zip(given.tokens, given.token_logprobs, given.top_logprobs, strict=True):
        assert 1 <= len(ranked) <= 4 and ranked[token] >= logprob
    plain = live.client.completions.create(prompt=PROMPT, logprobs=0, **ASK).choices[0].logprobs
    assert plain.top_logprobs is None and plain.tokens == given.tokens
    assert plain.token_logprobs == pytest.approx(given.token_logprobs, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_penalties_reach_the_sampler(live: Live, loaded: LoadedModel, stream: bool) -> None:
    ask = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    given = live.client.completions.create(presence_penalty=1.0, frequency_penalty=0.5, stream=stream, **ask)
    text = "".join(chunk.choices[0].text for chunk in (given if stream else [given]))
    prompt = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode(PROMPT)]
    options = SamplingOptions(presence_penalty=1.0, frequency_penalty=0.5)
    assert text == live.engine.submit(Request(prompt, 40, options)).result(300).samples[0].text
    assert text != live.client.completions.create(**ask).choices[0].text


def test_several_prompts_text_or_ids_and_echo(live: Live, loaded: LoadedModel) -> None:
    ask = {**ASK, "temperature": 0, "max_tokens": 4}
    ids = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode("dogs")]
    alone = [live.client.completions.create(prompt=prompt, **ask).choices[0].text for prompt in (PROMPT, ids)]
    text, other = (
        live.client.completions.create(prompt=prompt, n=2, **ask).choices
        for prompt in ([PROMPT, "dogs"], [ids[:], ids[:]])
    )
    assert [choice.text for choice in text] == [alone[0], alone[0], alone[1], alone[1]]
    assert [choice.index for choice in text] == [0, 1, 2, 3]
    assert {choice.text for choice in other} == {alone[1]}
    echoed = live.client.completions.create(prompt=PROMPT, echo=True, **ask).choices[0].text
    assert echoed == PROMPT + alone[0]
    chunks = live.client.completions.create(prompt=PROMPT, echo=True, stream=True, **ask)
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed


def test_a_chat_model_gets_the_tokens_of_turns(live: Live, loaded: LoadedModel) -> None:
    service = make_service(loaded, live.engine, "chat")
    with Live(service, live.gate) as server:
        given = server.client.chat.completions.create(
            model="tiny", messages=chat_messages(), temperature=0, max_completion_tokens=8
        )
    prompt = render(chat_messages(), loaded.tokenizer)
    wanted = live.engine.submit(Request(prompt, max_tokens=8, stop_ids=service.template.stop_ids)).result(300)
    assert given.usage.prompt_tokens == len(prompt)
    assert given.choices[0].message.content == wanted.samples[0].text


def test_the_token_that_ends_an_answer_is_counted_but_not_shown(live: Live, loaded: LoadedModel) -> None:
    with Live(make_service(loaded, live.engine, "chat"), live.gate) as server:
        for seed in range(20):
            given = server.client.chat.completions.create(
                model="tiny", messages=chat_messages(), seed=seed, max_tokens=40, logprobs=True
            )
            if given.choices[0].finish_reason == "stop":
                break
    choice = given.choices[0]
    assert choice.finish_reason == "stop" and "<|assistant_end|>" not in choice.message.content
    assert len(choice.logprobs.content) == given.usage.completion_tokens - 1


def test_equal_prompts_of_one_request_get_different_samples(live: Live) -> None:
    alone = live.client.completions.create(prompt=PROMPT, **ASK).choices[0].text
    first, second = live.client.completions.create(prompt=[PROMPT, PROMPT], **ASK).choices
    assert first.text == alone != second.text


def test_models_health_and_metrics(live: Live) -> None:
    assert [model.id for model in live.client.models.list()] == ["tiny"]
    assert live.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; 'tiny' is"):
        live.client.completions.create(model="other", prompt="x")
    assert live.call("GET", "/health")[:2] == (200, {"status": "ok", "model": "tiny", "step": 20})
    status, text, headers = live.call("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values["bessemer_slots"] == "4"
    assert int(values['bessemer_requests_total{endpoint="/v1/completions",status="404"}']) >= 1
    assert float(values["bessemer_first_token_seconds_sum"]) > 0
