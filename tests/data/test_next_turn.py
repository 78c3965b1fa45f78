"""What follows an answer that the model has written: the template's own continuation, with nothing written again; and
tool calls, read in the format in which the template writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.data.stock_templates import FAMILIES, Family
from tests.tiny_run import tiny_tokenizer

from bessemer.data.tokenize.chat import CallParser, ToolCall, render, render_next, stop_ids, supervised_rows, tools_of
from bessemer.errors import InputError
from bessemer.rl.environments.calculator import Calculator

USER = {"role": "user", "content": "One and one?"}
NEXT = {"role": "user", "content": "And <|im_end|> more?"}
TOOLS = list(Calculator.tools)
BY_NAME = {family.name: family for family in FAMILIES}


CLOSED = "ours/gpt_oss"
"""Harmony ends the last answer with <|return|> and earlier ones with <|end|>."""
OPEN = [one for one in FAMILIES if not one.name.startswith("trl/") and one.name != CLOSED]


@pytest.fixture(params=OPEN, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def test_the_next_turn_is_what_the_template_writes_after_an_answer(family: Family) -> None:
    """Of templates that keep earlier turns as they were: the whole conversation, id by id."""
    tokenizer = family.tokenizer
    first = render([USER], tokenizer)
    answer = {"role": "assistant", "content": "Two."}
    text = family.written("", "Two.")
    written = tokenizer.encode(text[: text.index("Two.") + 4], after=first)
    for ended in (True, False):
        said = [*written, stop_ids(tokenizer)[0]] if ended else written
        between = render_next([NEXT], tokenizer, before=[*first, *said], ended=ended)
        text = tokenizer.decode(between)
        assert "more?" in text and tokenizer.decode([between[-1]]) not in text.partition("more?")[0][-1:]
        if family.rows == (1, 1) and not family.thinks:
            assert tokenizer.decode([*first, *said, *between]) == tokenizer.decode(
                render([USER, answer, NEXT], tokenizer)
            )
    # the content is text, whatever names of special tokens it holds
    ends = [place for place, token in enumerate(between) if token in stop_ids(tokenizer)]
    assert len(ends) <= 2


def test_a_template_that_rewrites_the_end_of_an_answer_is_refused() -> None:
    tokenizer = BY_NAME[CLOSED].tokenizer
    first = render([USER], tokenizer)
    with pytest.raises(InputError, match=r"ends an answer with <\|end\|> once others follow.*Environments"):
        render_next([NEXT], tokenizer, before=[*first, stop_ids(tokenizer)[0]], ended=True)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "ours/llama3_2", "ours/mistral_nemo"])
def test_calls_are_read_as_the_template_writes_them_and_answered_as_a_tool(name: str) -> None:
    tokenizer = BY_NAME[name].tokenizer
    parser = CallParser(tokenizer, TOOLS)
    arguments: dict[str, Any] = {"expression": "2*(3+4)"}
    call = {"type": "function", "id": "call00001", "function": {"name": "calculate", "arguments": arguments}}
    ((ids, mask), *_) = supervised_rows(
        [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], tokenizer, TOOLS
    )
    first = mask.index(1)
    text = tokenizer.decode([token for token, learnt in zip(ids, mask, strict=True) if learnt][:-1])
    assert parser.parse(text, None) == (ToolCall("calculate", arguments),)
    assert parser.parse("The answer is 14.", None) == ()
    result = {"role": "tool", "content": "14", "name": "calculate"}
    written = ids[: max(place for place, learnt in enumerate(mask) if learnt) + 1]
    between = render_next([result], tokenizer, before=written, ended=True, called=True, tools=TOOLS)
    assert "14" in tokenizer.decode(between) and "One and one" not in tokenizer.decode(between)
    if name == "qwen2_5":
        assert "<tool_response>" in tokenizer.decode(between)
        assert tokenizer.decode(between).endswith("<|im_start|>assistant\n")
    assert first > 0


def test_calls_that_cannot_be_read_are_said_so() -> None:
    parser = CallParser(BY_NAME["qwen2_5"].tokenizer, TOOLS)
    broken = '<tool_call>\n{"name": "calculate", "argum\n</tool_call><tool_call>{"name": "f", "arguments": "[1]"}'
    assert [bool(call.error) for call in parser.parse(broken, None)] == [True, True]
    two = "".join(f"<tool_call>{json.dumps({'name': name, 'arguments': {'x': 1}})}</tool_call>" for name in "ab")
    assert parser.parse(f"first {two}", None) == (ToolCall("a", {"x": 1}), ToolCall("b", {"x": 1}))
    assert CallParser(BY_NAME["ours/smollm2"].tokenizer, ()).parse(two, None) == ()  # no tools, no calls
    with pytest.raises(InputError, match="does not write tool calls as JSON"):
        CallParser(BY_NAME["ours/smollm2"].tokenizer, TOOLS)


def test_calls_and_tools_that_are_nested_without_end_are_refused() -> None:
    """Both are data: a model writes the one, a dataset holds the other."""
    parser = CallParser(BY_NAME["qwen2_5"].tokenizer, TOOLS)
    for depth in (70, 500, 200_000):
        nested = "[" * depth + "]" * depth
        for arguments in (f'{{"x": {nested}}}', json.dumps(f'{{"x": {nested}}}')):
            (call,) = parser.parse(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>', None)
            assert call.error and not call.arguments
    with pytest.raises(InputError, match="not JSON"):
        tools_of({"tools": "[" * 200_000})


def test_with_our_tokens_a_result_is_written_into_the_open_turn() -> None:
    tokenizer = tiny_tokenizer()
    special = tokenizer.specials
    parser = CallParser(tokenizer, TOOLS)
    assert parser.end_id == special["<|python_end|>"] and CallParser(tokenizer, ()).end_id is None
    first = render([USER], tokenizer)
    written = [special["<|python_start|>"], *tokenizer.encode("1+1"), special["<|python_end|>"]]
    assert parser.parse("so <|python_start|>1+1", parser.end_id) == (ToolCall("python", {"expression": "1+1"}),)
    assert parser.parse("1+1", parser.end_id)[0].error and parser.parse("2", special["<|assistant_end|>"]) == ()
    result = {"role": "tool", "content": "2", "name": "python"}
    between = render_next([result], tokenizer, before=[*first, *written], ended=False, called=True, tools=TOOLS)
    rest = [*tokenizer.encode("2"), special["<|assistant_end|>"]]
    parts = [{"type": kind, "text": text} for kind, text in (("python", "1+1"), ("python_output", "2"), ("text", "2"))]
    ((ids, mask),) = supervised_rows([USER, {"role": "assistant", "content": parts}], tokenizer)
    assert [*first, *written, *between, *rest] == ids  # as such conversations are trained
    assert mask == [0] * len(first) + [1] * len(written) + [0] * len(between) + [1] * len(rest)
    with pytest.raises(InputError, match="follows a call"):
        render_next([result], tokenizer, before=[*first, *rest], ended=True)
