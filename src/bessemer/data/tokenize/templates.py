"""Chat templates of other tokenizers: the jinja text in a Hugging Face `tokenizer_config.json`, in jinja2's sandbox.

A template turns messages into text. It is code that came with a download, so it runs where it can reach nothing but its
arguments, in a process with limits (template_worker.py). It gets no date, or always the same one: otherwise
tokens would depend on the day.

| file | template |
|---|---|
| tokenizer_config.json, `chat_template` | text; or a list of {"name", "template"}; default and tool_use count |
| chat_template.jinja | the default one, before that of the configuration |
| additional_chat_templates/tool_use.jinja | the one for conversations with tools |
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from bessemer.config.bounded import read_json, read_text
from bessemer.data.tokenize import template_worker
from bessemer.data.tokenize.template_worker import BEGIN, CPU_SECONDS, END, HEAD, packed
from bessemer.errors import InputError
from bessemer.job.process import script_command

CONFIG = "tokenizer_config.json"
ALONE = "chat_template.jinja"  # where newer exports keep the template
FURTHER = "additional_chat_templates"  # … and others, each in a file of its name
DEFAULT, TOOL_USE = "default", "tool_use"
WALL_SECONDS = 20.0
AT_ONCE = 1 << 16  # bytes of replies asked for at a time
MOST_EXCEEDED = 2  # then a template is not tried again by this process: a server has others to answer
INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "HOME")
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

# What data/tokenize/chat.py writes with our own tokens, for programs that know only templates: exports carry it.
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


class TemplateUnavailable(InputError):
    """The template gave no answer: it exceeded its limits, or the worker was busy. That says nothing about the
    conversation."""


class ChatTemplate:
    """A template and the names of the tokens it may ask for. `tool_source`: the one for conversations with tools, where
    that is another."""

    def __init__(
        self, source: str, tokens: Mapping[str, str], origin: str = CONFIG, tool_source: str | None = None
    ) -> None:
        self.source, self.tokens, self.origin, self.tool_source = source, dict(tokens), origin, tool_source

    @classmethod
    def beside(cls, tokenizer: Path) -> ChatTemplate | None:
        """Return the template beside a tokenizer.json; None if there is none."""
        config = read_config(tokenizer)
        alone, tool_use = tokenizer.with_name(ALONE), tokenizer.parent / FURTHER / f"{TOOL_USE}.jinja"
        with _readable(alone):
            found = _named(config)
            files = {DEFAULT: alone, TOOL_USE: tool_use}
            found |= {name: read_text(file) for name, file in files.items() if file.is_file()}
        source = found.get(DEFAULT)
        if source is None or source == OUR_TEMPLATE:
            return None  # our turns: data/tokenize/chat.py writes them, and knows which of their tokens are learned
        return cls(source, token_names(config), str(tokenizer.with_name(CONFIG)), found.get(TOOL_USE))

    @property
    def as_configured(self) -> str | list[dict[str, str]]:
        """Return the value of `chat_template` in a tokenizer_config.json."""
        if self.tool_source is None:
            return self.source
        pairs = ((DEFAULT, self.source), (TOOL_USE, self.tool_source))
        return [{"name": name, "template": source} for name, source in pairs]

    def to_json(self) -> str:
        """As tokenizer_config.json: what other programs read too, and the same text for the same template."""
        return json.dumps({**self.tokens, "chat_template": self.as_configured}, indent=1, sort_keys=True) + "\n"

    def source_for(self, tools: Sequence[Any]) -> str:
        return self.tool_source if tools and self.tool_source is not None else self.source

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template has a place for descriptions of tools."""
        return self.tool_source is not None or "tools" in self._names

    @cached_property
    def marks_answers(self) -> bool:
        """Whether the template says what of an answer is learned: `{% generation %}`."""
        return BEGIN in self._names

    @cached_property
    def _names(self) -> set[str]:
        """Return the variables that the templates read."""
        sources = (source for source in (self.source, self.tool_source) if source is not None)
        return {name for source in sources for name in self._ask({"source": source, "wanted": "names"}, 1)[0]["names"]}

    def render(
        self, messages: Sequence[Message], generation_prompt: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the text of the conversation; with `generation_prompt` the assistant's turn is opened."""
        return self.render_prefixes(messages, [(len(messages), generation_prompt)], tools)[0]

    def render_prefixes(
        self,
        messages: Sequence[Message],
        prefixes: Sequence[tuple[int, bool]],
        tools: Sequence[Mapping[str, Any]] = (),
        marks: tuple[str, str] | None = None,
    ) -> list[str]:
        """The texts of beginnings of the conversation: (how many messages, whether the answer is opened) each. `marks`:
        what to write where `{% generation %}` begins and ends."""
        values = {"tools": [dict(tool) for tool in tools] or None, "documents": None, **self.tokens}
        if marks is not None:
            values |= dict(zip((BEGIN, END), marks, strict=True))
        request = {
            "source": self.source_for(tools),
            "values": values,
            "messages": [dict(message) for message in messages],
            "prefixes": prefixes,
        }
        return [str(reply["text"]) for reply in self._ask(request, len(prefixes))]

    def _ask(self, request: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """`count` replies of the worker; a problem is an InputError."""
        replies = _worker().ask(request, count)
        reply = replies[-1]
        if "problem" not in reply:
            return replies
        if "line" in reply:
            raise InputError(
                f"the chat template of {self.origin} has a mistake in line {reply['line']}: {reply['problem']}."
            )
        kind = TemplateUnavailable if "exceeded" in reply or "unavailable" in reply else InputError
        raise kind(f"the chat template of {self.origin} refuses the conversation: {reply['problem']}")


def read_config(tokenizer: Path) -> dict[str, Any]:
    """Return the tokenizer_config.json beside a tokenizer.json; empty where there is none."""
    path = tokenizer.with_name(CONFIG)
    with _readable(path):
        config = read_json(path) if path.is_file() else {}
        if not isinstance(config, dict):
            raise TypeError("it is not a JSON object")
    return config


def token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json names: bos_token, eos_token and so on."""
    named = {name: _text_of(config.get(name)) for name in TOKENS}
    return {name: text for name, text in named.items() if text}


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise InputError for a configuration that cannot be read."""
    try:
        yield
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise InputError(
            f"'{path}' is not a readable tokenizer configuration: {error}. Fix it, or remove it to use the "
            f"tokenizer without a chat template."
        ) from error


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """Name → template, of a configuration; a single one is called default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    named = dict(found) if isinstance(found, Mapping) else {} if found is None else {DEFAULT: found}
    for name, source in named.items():
        if not isinstance(source, str):
            raise TypeError(f"chat_template '{name}' is {type(source).__name__}, not text")
    return named


def _text_of(token: Any) -> str | None:
    """A token is written as text or as {"content": text, …}."""
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


class Worker:
    """The process that renders (template_worker.py), one at a time; started, and restarted, when it is needed.

    A request costs about 0.1 ms more than in this process. `ask` waits for its turn at most WALL_SECONDS, and so for
    each reply; a process that exceeds its limits is ended, and the next request starts another.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = bytearray()  # replies that came together with an earlier one
        self._closed = False
        self._exceeded: dict[str, int] = {}  # templates that exceeded their limits, and how often

    def ask(self, request: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """`count` replies, or those up to the first problem; to die of a request, or not to answer, is one."""
        try:
            data = packed(request)
        except (ValueError, RecursionError) as error:
            return [{"problem": f"a message cannot be written as JSON ({error})"}]
        if not self._turn.acquire(timeout=WALL_SECONDS):
            return [{"problem": f"it waited {WALL_SECONDS:.0f} s for others to be rendered", "unavailable": True}]
        try:
            return self._bounded(str(request["source"]), data, count)
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the process, also in the midst of a request, and start no other: whoever waits is answered at once."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def _bounded(self, source: str, data: bytes, count: int) -> list[dict[str, Any]]:
        if self._closed:
            return [{"problem": "it is not rendered while the server stops", "unavailable": True}]
        if self._exceeded.get(source, 0) >= MOST_EXCEEDED:
            return [{"problem": "it exceeded its limits before, and is not tried again", "unavailable": True}]
        process = self._running()
        try:
            replies = self._exchange(process, data, count)
        except (OSError, ValueError, EOFError):
            self._end()
            replies = [{"problem": f"it took more than {CPU_SECONDS:.0f} s, or too much memory", "exceeded": True}]
        if "exceeded" in replies[-1]:
            self._exceeded[source] = self._exceeded.get(source, 0) + 1
        return replies

    def _exchange(self, process: subprocess.Popen[bytes], data: bytes, count: int) -> list[dict[str, Any]]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(data)  # it is read at once: nothing else is going on there
        process.stdin.flush()
        replies: list[dict[str, Any]] = []
        while len(replies) < count and (not replies or "problem" not in replies[-1]):
            replies.append(json.loads(self._read(process.stdout.fileno())))
        return replies

    def _read(self, handle: int) -> bytearray:
        """One reply, however slowly it comes."""
        return self._exactly(handle, int(self._exactly(handle, HEAD)))

    def _exactly(self, handle: int, size: int) -> bytearray:
        if len(self._unread) < size:
            waiting = select.poll()  # unlike select it takes any number, and a server has many connections
            waiting.register(handle, select.POLLIN)
        while len(self._unread) < size:
            wanted = max(size - len(self._unread), AT_ONCE)
            part = os.read(handle, wanted) if waiting.poll(WALL_SECONDS * 1000) else b""
            if not part:
                raise EOFError
            self._unread += part
        found = self._unread[:size]
        del self._unread[:size]
        return found

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = script_command(Path(template_worker.__file__))
            kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
            try:
                self._process = subprocess.Popen(
                    command,
                    env=kept,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the one who asks
                )
                atexit.register(self._end)
                assert self._process.stdout is not None
                self._read(self._process.stdout.fileno())
            except (OSError, ValueError, EOFError) as error:
                self._end()
                raise InputError(
                    f"the process that renders chat templates does not start ({error or 'it ended'}): "
                    f"{' '.join(command)}"
                ) from error
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        self._unread.clear()
        if process is not None:
            atexit.unregister(self._end)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()


_shared: list[Worker] = []
_sharing = threading.Lock()


def stop_rendering() -> None:
    """End the worker of this process for good: a server that stops waits for no template."""
    with _sharing:
        for worker in _shared:
            worker.close()


def _worker() -> Worker:
    """Return the worker of this process; a fork of it has another."""
    with _sharing:
        if not _shared or _shared[0].owner != os.getpid():
            _shared[:] = [Worker()]
        return _shared[0]
