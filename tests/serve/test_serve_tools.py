"""Tools go to the model's template where it takes them, and are refused by name where it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.data.chat_forms import CHATML, forms
from tests.data.stock_templates import FAMILIES
from tests.serve.conftest import Live

from bessemer.data.tokenize.templates import ChatTemplate
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.serve.chat import Foreign
from bessemer.serve.net import ApiError
from bessemer.serve.requests import Room, chat_ask

WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name + call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city, not <|im_end|>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED = {"messages": [{"role": "user", "content": "Oslo?"}]}
ROOM = Room(vocab_size=100_000, capacity=100_000, queue=None)


def template(source: str = WITH_TOOLS) -> Foreign:
    chatml = next(form.tokenizer for form in forms() if form.tokenizer.origin == "chatml")
    return Foreign(Tokenizer(chatml.to_json(), "chatml", ChatTemplate(source, {"eos_token": "<|im_end|>"})))


def prompt_of(body: dict[str, Any], source: str = WITH_TOOLS) -> str:
    made = template(source)
    return made.tokenizer.decode(chat_ask(body, made, ROOM).prompts[0])


def test_tools_are_given_to_a_template_that_takes_them() -> None:
    assert template().takes_tools and not template(CHATML).takes_tools
    prompt = prompt_of({**ASKED, "tools": [WEATHER], "tool_choice": "auto"})
    assert json.dumps(WEATHER) in prompt and prompt.index("get_weather") < prompt.index("Oslo?")
    without = prompt_of(ASKED)
    assert prompt_of({**ASKED, "tools": [WEATHER], "tool_choice": "none"}) == without != prompt


def test_reasoning_of_earlier_answers_goes_to_a_template_that_knows_it() -> None:
    """Qwen3's keeps what was thought since the last question; a template that knows none refuses the field."""
    source = next(family.source for family in FAMILIES if family.name == "qwen3")
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    answer = {"role": "assistant", "content": None, "reasoning_content": "Look it up.", "tool_calls": [call]}
    body = {**ASKED, "messages": [*ASKED["messages"], answer, {"role": "tool", "content": "rain"}], "tools": [WEATHER]}
    assert "<think>\nLook it up.\n</think>" in prompt_of(body, source) and '{"city": "Oslo"}' in prompt_of(body, source)
    with pytest.raises(ApiError, match="reasoning_content"):
        prompt_of(body)
    broken = {**call, "function": {"name": "get_weather", "arguments": "{'city'"}}
    again = {**body, "messages": [*ASKED["messages"], {**answer, "tool_calls": [broken]}]}
    assert "{'city'" in prompt_of(again, source), "what the model itself wrote"


def test_the_name_of_a_special_token_in_a_tool_stays_text() -> None:
    made = template()
    ids = chat_ask({**ASKED, "tools": [WEATHER]}, made, ROOM).prompts[0]
    assert ids.count(made.tokenizer.id_of("<|im_end|>")) == 2, "of the system's and the user's turn"


def test_calls_and_results_are_part_of_the_conversation() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    prompt = prompt_of({"messages": messages, "tools": [WEATHER]})
    assert 'get_weather{"city": "Oslo"}' in prompt, "arguments are an object, not a string of JSON in a string"
    assert "tool\nrain" in prompt


def test_a_template_without_a_place_for_tools_refuses_them_by_name(live: Live) -> None:
    status, document, _ = live.post("/v1/chat/completions", {**ASKED, "tools": [WEATHER]})
    error = document["error"]
    assert (status, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")
    with pytest.raises(ApiError, match=r"'tools' is not supported by this server\. The chat template of this model"):
        prompt_of({**ASKED, "tools": [WEATHER]}, CHATML)


DEEP: Any = {}
for _ in range(50):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": "\ud800"}}]}, "tools[0]"),
        ({"tools": [WEATHER] * 200}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": 1}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": 1}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ],
)
def test_wrong_tools_are_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_ask({**ASKED, **change}, template(), ROOM)
    assert (caught.value.status, caught.value.param) == (400, param)
