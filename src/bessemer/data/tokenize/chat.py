"""Chat messages as tokens, and which of them are learnt: what the assistant says, its tool calls, its end of turn.

With our tokens: `<|bos|>`, then each message between the start and end tokens of its role. An assistant's content is
text, or a list of parts in the order they were written:

    {"type": "text", "text": …}            learnt
    {"type": "python", "text": …}          learnt, between <|python_start|> and <|python_end|>
    {"type": "python_output", "text": …}   never learnt: the tool wrote it; between <|output_start|> and <|output_end|>

A tokenizer with a chat template of its own is written with that. A template gives text and does not say who spoke, so
it renders prefixes: the messages before an answer with the answer opened, and the messages up to the answer. What the
second has more than the first is the answer, which ends with its last special token:

    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎ │ Hello.<|im_end|> │ ⏎<|im_start|>user⏎…
                                        rendered, opened │    learnt       │ the rest

Text is encoded piece by piece between special tokens and at these cuts, so training sees the tokens that generation
gets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bessemer.data.tokenize.templates import ChatTemplate, Message
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError

ROLES = ("system", "user", "assistant")
TOOL_TOKENS = {
    "python": ("<|python_start|>", "<|python_end|>"),
    "python_output": ("<|output_start|>", "<|output_end|>"),
}
TURN_TOKENS = tuple(f"<|{role}_{end}|>" for role in ROLES for end in ("start", "end"))

PRIVATE = range(0xE000, 0xF8FF)  # characters that mean nothing, for the mark inside a name that is only text
Part = tuple[str, str]  # type, text


def is_messages(value: Any) -> bool:
    """A conversation: a non-empty list of mappings."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def can_chat(tokenizer: Tokenizer) -> bool:
    """Whether it has a way to write conversations: a template, or our tokens."""
    return tokenizer.chat_template is not None or all(name in tokenizer.specials for name in TURN_TOKENS)


def render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Ids of a conversation; with `generation_prompt` the assistant's turn is opened. Content is text: the name of a
    special token in it stays text. `tools`: descriptions of functions, for a template that takes them."""
    if tokenizer.chat_template is not None:
        return _Writer(messages, tokenizer, tools).tokens(generation_prompt)[0]
    if tools:
        raise InputError(f"{tokenizer.origin} has no chat template that takes tools: leave them out.")
    ids, _ = _with_our_tokens(messages, tokenizer)
    return [*ids, role_token(tokenizer, "assistant", "start")] if generation_prompt else ids


def supervised(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(ids, mask) of a whole conversation; mask 1: a token to learn. A conversation with nothing to learn is an
    error."""
    if tokenizer.chat_template is not None:
        ids, mask = _Writer(messages, tokenizer).tokens(False)
    else:
        ids, mask = _with_our_tokens(messages, tokenizer)
    if not any(mask):
        raise InputError("the conversation has no message of the assistant, so there is nothing to learn.")
    return ids, mask


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return what ends the assistant's turn: of a template, what ends it in a trial conversation, and the eos."""
    if tokenizer.chat_template is None:
        return (role_token(tokenizer, "assistant", "end"),)
    trial = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids, mask = supervised(trial, tokenizer)
    last = max(place for place, learnt in enumerate(mask) if learnt)
    eos = tokenizer.id_of(tokenizer.chat_template.tokens.get("eos_token", ""))
    return tuple(dict.fromkeys([ids[last], *([] if eos is None else [eos])]))


SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


def conversation_of(row: Mapping[str, Any]) -> list[Message] | None:
    """Return the messages of a row; None if it has none of the columns that make a conversation.

    `messages`; `conversations` (ShareGPT's from and value); `prompt` and `completion`; `instruction`, `input` and
    `output`; `question` and `answer`.
    """
    if "messages" in row:
        return _listed(row["messages"], "messages")
    if "conversations" in row:
        return _from_sharegpt(row["conversations"])
    if "prompt" in row and "completion" in row:
        return [*_turn(row["prompt"], "user", "prompt"), *_turn(row["completion"], "assistant", "completion")]
    if "instruction" in row and "output" in row:
        asked = [_text(row["instruction"], "instruction"), _text(row.get("input") or "", "input")]
        return [
            {"role": "user", "content": "\n\n".join(filter(None, asked))},
            {"role": "assistant", "content": _text(row["output"], "output")},
        ]
    if "question" in row and "answer" in row:
        return [*_turn(row["question"], "user", "question"), *_turn(row["answer"], "assistant", "answer")]
    return None


def _from_sharegpt(turns: Any) -> list[Message]:
    """Return ShareGPT's turns, {"from": …, "value": …}, as messages."""
    if not isinstance(turns, list) or not turns:
        raise InputError("'conversations' is not a list of turns {'from': 'human' or 'gpt', 'value': text}.")
    if all(isinstance(turn, Mapping) and "role" in turn for turn in turns):
        return _listed(turns, "conversations")
    messages: list[Message] = []
    for turn in turns:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("from"), str) or "value" not in turn:
            raise InputError(f"'conversations' holds a turn without 'from' and 'value': {turn!r:.100}.")
        role = SHAREGPT_ROLES.get(turn["from"], turn["from"])
        messages.append({"role": role, "content": _text(turn["value"], "value")})
    return messages


def spoken(messages: Sequence[Message]) -> str:
    """Everything that is said in a conversation, as one text: what a tokenizer is trained on."""
    contents = [message.get("content") or "" for message in messages]
    listed = [[{"text": content}] if isinstance(content, str) else content for content in contents]
    texts = [part.get("text") for parts in listed for part in parts if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))


def role_token(tokenizer: Tokenizer, role: str, end: str) -> int:
    """The id of `<|role_start|>` or `<|role_end|>`."""
    return _token(tokenizer, f"<|{role}_{end}|>")


def _with_our_tokens(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    ids, mask = [tokenizer.bos_id], [0]
    for message in messages:
        role = message.get("role")
        if role not in ROLES or message.get("tool_calls"):
            raise InputError(
                f"a chat message is {{'role': one of {', '.join(ROLES)}, 'content': text or a list of parts}}, and a "
                f"tool call is a part of type python; got {dict(message)!r:.200}."
            )
        learnt = int(role == "assistant")
        ids.append(role_token(tokenizer, role, "start"))
        mask.append(0)
        for kind, text in _parts(message):
            if kind in TOOL_TOKENS:
                before, after = (_token(tokenizer, name) for name in TOOL_TOKENS[kind])
                said = [before, *tokenizer.encode(text, after=[before]), after]
            else:
                said = tokenizer.encode(text, after=ids)
            ids += said
            mask += [learnt if kind != "python_output" else 0] * len(said)
        ids.append(role_token(tokenizer, role, "end"))
        mask.append(learnt)
    return ids, mask


def _parts(message: Message) -> Iterator[Part]:
    """(type, text) of each part of a message; a plain text is one part."""
    content = message.get("content")
    if isinstance(content, str):
        yield "text", _text(content, "content")
        return
    allowed = ("text", *TOOL_TOKENS) if message.get("role") == "assistant" else ("text",)
    if not isinstance(content, Sequence):
        raise InputError(f"the content of a message is text or a list of parts; got {content!r:.200}.")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in allowed:
            raise InputError(
                f"a part of the {message.get('role')}'s content is {{'type': one of {', '.join(allowed)}, 'text': "
                f"text}}; got {part!r:.200}."
            )
        yield kind, _text(part.get("text"), f"text of a {kind} part")


def _listed(value: Any, column: str) -> list[Message]:
    if not is_messages(value):
        raise InputError(f"'{column}' is a list of messages {{'role': …, 'content': …}}; got {value!r:.200}.")
    return list(value)


def _turn(value: Any, role: str, column: str) -> list[Message]:
    """A text is one message of the role; messages are themselves."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _listed(value, column)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"'{what}' is {type(value).__name__}, not text.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InputError(f"'{what}' holds half of a surrogate pair, which is no valid Unicode.") from None
    return value


def _token(tokenizer: Tokenizer, name: str) -> int:
    if name not in tokenizer.specials:
        raise InputError(
            f"{tokenizer.origin} has no special token {name}, so it cannot write a conversation: give prompts as "
            "text, or use a tokenizer with the chat tokens (`bessemer tokenizer train` makes one) or with a chat "
            "template."
        )
    return tokenizer.specials[name]


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
