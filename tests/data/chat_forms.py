"""Three chat templates in the forms people know, and tokenizers that have their special tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from bessemer.data.tokenize.templates import ChatTemplate
from bessemer.data.tokenize.tokenizer import SPECIAL_TOKENS, Tokenizer

TEXTS = [f"The {n} grey cats and {n + 1} dogs were walking in the rain.\n\nuser assistant" for n in range(40)]

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}
"""

LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- set start = 1 if messages[0].role == 'system' else 0 %}
{{- bos_token }}
{%- for message in messages[start:] %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('after the system message, user and assistant take turns') }}
    {%- elif message.role == 'user' and loop.first and start %}
        {{- '[INST] ' + messages[0].content + '\n\n' + message.content + ' [/INST]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""


@dataclass(frozen=True)
class Form:
    """A tokenizer; how its template writes an answer (`said`), and the name of the token that ends it."""

    name: str
    tokenizer: Tokenizer
    end: str
    said: Callable[[str], str] = lambda text: text


def with_specials(*names: str) -> str:
    """The JSON of a small byte-level tokenizer whose special tokens are these (12 of them at most)."""
    text = _bytes().to_json()
    for ours, theirs in zip(SPECIAL_TOKENS, names, strict=False):
        text = text.replace(ours, theirs)
    return text


@functools.cache
def _bytes() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


@functools.cache
def forms() -> tuple[Form, ...]:
    """Ours and the three."""
    chatml = with_specials("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    llama = with_specials(
        "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"
    )
    mistral = with_specials("<s>", "</s>", "[INST]", "[/INST]")
    return (
        Form("ours", _bytes(), "<|assistant_end|>"),
        Form("chatml", Tokenizer(chatml, "chatml", ChatTemplate(CHATML, {"eos_token": "<|im_end|>"})), "<|im_end|>"),
        Form(
            "llama-3",
            Tokenizer(
                llama,
                "llama-3",
                ChatTemplate(LLAMA_3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}),
            ),
            "<|eot_id|>",
            str.strip,
        ),
        Form(
            "mistral",
            Tokenizer(mistral, "mistral", ChatTemplate(MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"})),
            "</s>",
            lambda text: f" {text}",
        ),
    )
