"""Conversations in the template of another tokenizer, and where in them the assistant speaks.

A template gives text and does not say who spoke. So it is asked for prefixes: the messages before an answer with the
answer opened, and the messages up to the answer. What the second has more than the first is the answer:

    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎ │ Hello.<|im_end|> │ ⏎<|im_start|>user⏎…
                                        rendered, opened │    learnt       │ the rest

It ends with its last special token. Where a prefix of the messages does not give a prefix of the text (a template that
rewrites earlier turns), there is no such place, and that is an error. Text is encoded piece by piece between special
tokens and at these cuts, so that training sees the tokens that generation will be given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bessemer.data.tokenize.templates import ChatTemplate, Message
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError

PRIVATE = range(0xE000, 0xF8FF)  # characters that mean nothing, for the mark inside a name that is only text


def render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Ids of a conversation; with `generation_prompt` the assistant's turn is opened."""
    return _Writer(messages, tokenizer, tools).tokens(generation_prompt)[0]


def supervised(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(ids, mask) of a whole conversation; mask 1: what the assistant says, to its end of turn."""
    return _Writer(messages, tokenizer).tokens(False)


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token that ends a turn of the assistant, found in a trial conversation, and the tokenizer's eos."""
    trial = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids, mask = supervised(trial, tokenizer)
    last = max(place for place, learnt in enumerate(mask) if learnt)
    assert tokenizer.chat_template is not None
    eos = tokenizer.id_of(tokenizer.chat_template.tokens.get("eos_token", ""))
    return tuple(dict.fromkeys([ids[last], *([] if eos is None else [eos])]))


class _Writer:
    """One conversation under a template. Names of special tokens in its contents are marked, so that they stay text."""

    def __init__(
        self, messages: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        assert tokenizer.chat_template is not None
        self.template: ChatTemplate = tokenizer.chat_template
        self.tokenizer = tokenizer
        self.special = tokenizer.special_names
        plain = [_plain(message) for message in messages]
        written = repr((plain, tools))
        self.mark = next(chr(code) for code in PRIVATE if chr(code) not in written)
        self.messages: list[Message] = [_marked(message, self.special, self.mark) for message in plain]
        self.tools: list[Mapping[str, Any]] = [_marked(tool, self.special, self.mark) for tool in tools]

    def tokens(self, opened: bool) -> tuple[list[int], list[int]]:
        """(ids, mask) of the whole conversation, with the next answer opened or not."""
        ids: list[int] = []
        mask: list[int] = []
        written = ""
        for text, learnt in self.pieces(opened):
            ids += self.encode(text, written, ids)
            mask += [learnt] * (len(ids) - len(mask))
            written += text
        return ids, mask

    def pieces(self, opened: bool) -> Iterator[tuple[str, int]]:
        """(text, learnt) one after the other; together the whole conversation."""
        answers = [n for n, message in enumerate(self.messages) if message.get("role") == "assistant"]
        prefixes = [prefix for number in answers for prefix in ((number, True), (number + 1, False))]
        whole, *texts = self.template.render_prefixes(
            self.messages, [(len(self.messages), opened), *prefixes], self.tools
        )
        done = 0
        for number, before, after in zip(answers, texts[::2], texts[1::2], strict=True):
            if not (whole.startswith(after) and after.startswith(before) and done <= len(before)):
                raise self.no_prefix(number)
            ends = [found.end() for found in self.special.finditer(after, len(before))]
            if not ends or after[ends[-1] :].strip():
                raise InputError(
                    f"the chat template of {self.template.origin} does not end the assistant's turn with a special "
                    f"token, so a model could not learn to stop: {after[len(before) :]!r:.200}."
                )
            yield whole[done : len(before)], 0
            yield whole[len(before) : ends[-1]], 1
            done = ends[-1]
        yield whole[done:], 0

    def encode(self, text: str, written: str, before_ids: Sequence[int]) -> list[int]:
        """Special tokens by their ids, everything between them as plain text. `written`: what stands before, and
        `before_ids` its ids."""
        ids: list[int] = []
        names = self.special.findall(text)
        last = next((name for name in self.special.findall(written)[-1:] if written.endswith(name)), "")
        for number, between in enumerate(self.special.split(text)):
            ids += [self._id(names[number - 1])] if number else []
            before, after = [last, *names][number], [*names, ""][number]
            between = between.lstrip() if self.tokenizer.strips(before)[1] else between
            between = between.rstrip() if self.tokenizer.strips(after)[0] else between
            if between:
                ids += self.tokenizer.encode(between.replace(self.mark, ""), after=ids or before_ids)
        return ids

    def _id(self, name: str) -> int:
        found = self.tokenizer.id_of(name)
        if found is None:
            raise InputError(
                f"the chat template of {self.template.origin} writes {name}, which {self.tokenizer.origin} does not "
                f"know: the two files belong to different tokenizers."
            )
        return found

    def no_prefix(self, number: int) -> InputError:
        return InputError(
            f"the chat template of {self.template.origin} does not write message {number + 1} after those before it: "
            f"it changes earlier text, so what the assistant said cannot be told apart from the rest. Train on "
            f"conversations of one exchange, or give the tokenizer a template that writes message after message."
        )


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it: text parts are one text; our tool parts have no meaning in another template."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return dict(message)
    texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"a content with parts other than text cannot be written with a foreign chat template: {content!r:.200}. "
            f"Write tool calls as that template wants them."
        )
    return {**message, "content": "".join(map(str, texts))}


def _marked(value: Any, special: re.Pattern[str], mark: str) -> Any:
    """The value with a mark inside every name of a special token, wherever text is."""
    if isinstance(value, str):
        return special.sub(lambda found: found.group()[0] + mark + found.group()[1:], value)
    if isinstance(value, Mapping):
        return {key: _marked(item, special, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, special, mark) for item in value]
    return value
