"""A loaded model for lm-evaluation-harness: likelihoods of continuations and of texts, and generation."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM

from bessemer.errors import InputError
from bessemer.evaluate.scoring import Row, Score, score
from bessemer.generate import LoadedModel, SamplingOptions

NEW_TOKENS = 256
ROWS = 16


class HarnessModel(TemplateLM):
    """`simple_evaluate(HarnessModel(load_model(run)), tasks=[...])`. `cropped` counts texts cut to the context."""

    def __init__(self, loaded: LoadedModel, batch_size: int | None = None):
        super().__init__()
        if loaded.tokenizer is None:
            raise InputError("this model has no tokenizer, so lm-evaluation-harness cannot drive it.")
        self.loaded = loaded
        self.tokenizer_of_run = loaded.tokenizer
        self.batch_size = batch_size
        self.cropped = 0

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer_of_run.bos_id

    @property
    def max_length(self) -> int:
        return int(self.loaded.model.block_size)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer_of_run.hash[:12]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode a text as the beginning of a document, unless add_special_tokens is False."""
        tokenizer = self.tokenizer_of_run
        return tokenizer.encode(string) if add_special_tokens is False else tokenizer.prompt(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [Row([*context, *continuation], len(context)) for _, context, continuation in requests]
        found = []
        for (pair, _, _), one in zip(requests, self._score(rows), strict=True):
            found.append((-one.nats, one.greedy and one.whole))
            self.cache_hook.add_partial("loglikelihood", pair, found[-1])
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score each token once, in windows of the whole context."""
        found = []
        for request in requests:
            (text,) = request.args
            ids = self.tok_encode(text)
            scores = self._score(windows(ids, self.max_length))
            found.append(-sum(one.nats for one in scores))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate greedily, or sampled if the task asks for it, up to the first stop string."""
        found: list[str] = []
        while len(found) < len(requests):
            options = dict(requests[len(found)].args[1])
            ahead = requests[len(found) :][: self.batch_size or ROWS]
            alike = [request.args[1] == options for request in ahead]
            group = list(itertools.compress(ahead, itertools.accumulate(alike, operator.and_)))
            for request, text in zip(group, self._write([r.args[0] for r in group], options), strict=True):
                found.append(text)
                self.cache_hook.add_partial("generate_until", request.args, text)
        return found

    def _write(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        drawn = bool(options.get("do_sample")) and float(options.get("temperature", 1.0)) > 0
        sampling = SamplingOptions(temperature=float(options.get("temperature", 1.0)) if drawn else 0.0)
        loaded, limit = self.loaded, int(options.get("max_gen_toks", NEW_TOKENS))
        prompts = [self.tok_encode(context) for context in contexts]
        room = max(1, self.max_length - limit + 1)
        self.cropped += sum(len(prompt) > room for prompt in prompts)
        cut = [prompt[-room:] for prompt in prompts]
        with loaded.scope():
            made = loaded.decoder(loaded.params, cut, max_tokens=limit, sampling=sampling)
        texts = [self.tokenizer_of_run.decode(made.row(number)) for number in range(len(cut))]
        return [before_any(text, options.get("until") or []) for text in texts]

    def _score(self, rows: Sequence[Row]) -> list[Score]:
        scores = score(self.loaded, rows, self.batch_size)
        self.cropped += sum(one.cropped > 0 for one in scores)
        return scores


def before_any(text: str, stops: str | Sequence[str]) -> str:
    """Return the text up to the first stop string."""
    places = [text.find(stop) for stop in ([stops] if isinstance(stops, str) else stops)]
    return text[: min((place for place in places if place >= 0), default=len(text))]


def windows(ids: Sequence[int], block: int) -> list[Row]:
    """Return rows of at most `block` inputs that score each of ids[1:] once."""
    rows, done = [], 1
    while done < len(ids):
        end = min(len(ids), done + block)
        begin = max(0, end - block - 1)
        rows.append(Row(ids[begin:end], done - begin))
        done = end
    return rows
