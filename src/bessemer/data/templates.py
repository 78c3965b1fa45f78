"""Chat templates of other tokenizers: the jinja text in a Hugging Face `tokenizer_config.json`, in jinja2's sandbox.

A template turns messages into text. It is code that came with a download, so it runs where it can reach nothing but
its arguments. It is told no date: with one, tomorrow's tokens would not be today's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from bessemer.errors import InputError

CONFIG = "tokenizer_config.json"
ALONE = "chat_template.jinja"  # where newer exports keep the template
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

# What data/chat.py writes with our own tokens, for programs that know only templates: exports carry it.
OUR_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
  {{- '<|' + message['role'] + '_start|>' }}
  {%- if message['content'] is string %}
    {{- message['content'] }}
  {%- else %}
    {%- for part in message['content'] %}
      {%- if part['type'] == 'python' %}
        {{- '<|python_start|>' + part['text'] + '<|python_end|>' }}
      {%- elif part['type'] == 'python_output' %}
        {{- '<|output_start|>' + part['text'] + '<|output_end|>' }}
      {%- else %}
        {{- part['text'] }}
      {%- endif %}
    {%- endfor %}
  {%- endif %}
  {{- '<|' + message['role'] + '_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|assistant_start|>' }}
{%- endif %}"""

Message = Mapping[str, Any]


class ChatTemplate:
    """A template and the names of the tokens it may ask for."""

    def __init__(self, source: str, tokens: Mapping[str, str], origin: str = CONFIG) -> None:
        self.source, self.tokens, self.origin = source, dict(tokens), origin

    @classmethod
    def beside(cls, tokenizer: Path) -> ChatTemplate | None:
        """The template that lies beside a tokenizer.json; None where there is none."""
        path, alone = tokenizer.with_name(CONFIG), tokenizer.with_name(ALONE)
        config: Any = {}
        try:
            if path.is_file():
                config = json.loads(path.read_text(encoding="utf-8"))
            source = alone.read_text(encoding="utf-8") if alone.is_file() else _default(config)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise InputError(
                f"'{path}' is not a readable tokenizer configuration: {error}. Mend it, or remove it to use the "
                f"tokenizer without a chat template."
            ) from error
        if source is None or source == OUR_TEMPLATE:
            return None  # our turns: data/chat.py writes them, and knows which of their tokens are learnt
        named = {name: _text_of(config.get(name)) for name in TOKENS}
        return cls(source, {name: text for name, text in named.items() if text}, str(path))

    def to_json(self) -> str:
        """As tokenizer_config.json: what other programs read too, and the same text for the same template."""
        return json.dumps({**self.tokens, "chat_template": self.source}, indent=1, sort_keys=True) + "\n"

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template has a place for descriptions of tools."""
        from jinja2.meta import find_undeclared_variables

        _ = self._compiled  # a mistake in it is an error that names the file
        return "tools" in find_undeclared_variables(_environment().parse(self.source))

    def render(
        self, messages: Sequence[Message], generation_prompt: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The text of the conversation; with `generation_prompt` the assistant's turn is opened."""
        from jinja2 import TemplateError

        try:
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=generation_prompt,
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                **self.tokens,
            )
        except (TemplateError, TypeError, LookupError, ValueError, ArithmeticError, AttributeError) as error:
            raise InputError(
                f"the chat template of {self.origin} refuses the conversation: {error}"
            ) from error

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateSyntaxError

        try:
            return _environment().from_string(self.source)
        except TemplateSyntaxError as error:
            raise InputError(
                f"the chat template of {self.origin} has a mistake in line {error.lineno}: {error.message}."
            ) from error


def _default(config: Mapping[str, Any]) -> str | None:
    """The template of a configuration; of several the one called default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, Mapping):
        found = found.get("default")
    if found is not None and not isinstance(found, str):
        raise TypeError(f"chat_template is {type(found).__name__}, not text")
    return found


def _text_of(token: Any) -> str | None:
    """A token is written as text or as {"content": text, …}."""
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


def _environment() -> Any:
    """As templates are written for: blocks leave no line behind, `break` and `{% generation %}` are known."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}`, which some templates put around the assistant's words."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    return environment
