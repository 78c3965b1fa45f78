"""Text in, text out: prompts are begun like documents, continuations end at the document token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.generate.decoder import Decoder
from bessemer.generate.finite import check_scores
from bessemer.generate.load import LoadedModel
from bessemer.generate.sampling import SamplingOptions


@dataclass(frozen=True)
class Completion:
    """One prompt and what the model made of it. `finish`: "stop", "length" or "context"."""

    prompt: str
    text: str
    tokens: list[int]
    logprobs: list[float]
    finish: str


def complete(
    decoder: Decoder,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    sampling: SamplingOptions | None = None,
    stop_ids: Sequence[int] = (),
    ids: Sequence[Sequence[int]] | None = None,
) -> tuple[list[Completion], list[str]]:
    """(continuations, notices). A prompt is the beginning of a document (`Tokenizer.prompt`), or its `ids`.

    What looks like a special token in a prompt is text. Bytes of a character that was cut off show as U+FFFD.
    """
    ids = ids or [tokenizer.prompt(prompt) for prompt in prompts]
    result = decoder(params, ids, max_tokens=max_tokens, sampling=sampling, stop_ids=stop_ids)
    check_scores(result.logprobs)  # 0 where no token is
    completions = []
    for index, prompt in enumerate(prompts):
        tokens = result.row(index)
        logprobs = [float(value) for value in result.logprobs[index, : len(tokens)]]
        completions.append(
            Completion(prompt, tokenizer.decode(tokens), tokens, logprobs, result.reasons[index])
        )
    return completions, result.notices


def sample(
    loaded: LoadedModel,
    prompts: Sequence[str],
    *,
    max_tokens: int = 100,
    sampling: SamplingOptions | None = None,
    stop_ids: Sequence[int] = (),
) -> tuple[list[Completion], list[str]]:
    """Continue texts with a loaded model; greedy without `sampling`."""
    if loaded.tokenizer is None:
        raise InputError(
            "this model was trained on token ids without a tokenizer, so it cannot read a text prompt."
        )
    with loaded.scope():
        return complete(
            loaded.decoder,
            loaded.params,
            loaded.tokenizer,
            prompts,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=stop_ids,
        )
