"""Render chat templates in a process of its own, with limits on processor time, memory, output, files and processes.

A template is a program that came with a download. jinja2's sandbox keeps it from reaching anything but its arguments,
but not from looping for hours or building a string of gigabytes. So it runs here, where the kernel ends it.

Run as a file, not as a module: only the standard library and jinja2 are imported, which takes 0.1 s. Each message is a
line with its length, then that many bytes of JSON; the first says {"ready": true}. The other end is
data/tokenize/templates.py.

request   source, values, messages, prefixes: [[how many of the messages, whether the answer is opened], …]
replies   {"text": …} for each prefix in order, up to the first {"problem": …}
request   source, wanted: "names"
reply     {"names": [variables that the template reads]}, or {"problem": …}

`{% generation %} … {% endgeneration %}` writes the values BEGIN and END around its body, nothing where they are not
given. The date is the same on every day: see DATE.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

CPU_SECONDS = 2.0
MEMORY = 512 << 20
MOST_OUTPUT = 16 << 20  # characters; a conversation of a million tokens has about 4 million
CACHED = 16
HELD = 0.1  # seconds for which replies are held back, to be sent together
HEAD = 12  # bytes of the line with the length
BEGIN, END = "generation_begin", "generation_end"  # values that `{% generation %}` and `{% endgeneration %}` write
DATE = datetime.datetime(2024, 7, 26)
"""The date that `strftime_now` formats, so that tokens do not depend on the day; Llama's templates default to it. A
template that works without a date (`strftime_now is defined`) gets none."""


def limit() -> None:
    """Set the limits that hold for the life of the process; a platform without one of them goes without."""
    for kind, value in (
        ("RLIMIT_AS", MEMORY),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_NOFILE", 16),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_CORE", 0),
    ):
        try:
            resource.setrlimit(getattr(resource, kind), (value, value))
        except (AttributeError, ValueError, OSError):
            continue


def environment() -> Any:
    """As templates are written for: blocks leave no line behind, `break` and `{% generation %}` are known."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}`, which some templates put around the assistant's words."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in (BEGIN, END))
            return [begin, *body, end]

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
        """Return JSON without HTML escapes. options: separators, sort_keys."""
        separators = tuple(options.pop("separators", None) or ()) or None
        sort_keys = bool(options.pop("sort_keys", False))
        if options:
            raise TemplateError(f"tojson has no option {', '.join(options)}")
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    made.globals["raise_exception"] = raise_exception
    made.filters["tojson"] = tojson
    return made


def date_now(form: str) -> str:
    return DATE.strftime(form)


def needs_date(tree: Any) -> bool:
    """Return whether the template asks for the date without a way to do without."""
    from jinja2 import nodes

    named = any(name.name == "strftime_now" for name in tree.find_all(nodes.Name))
    tested = (test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined"))
    return named and not any(isinstance(node, nodes.Name) and node.name == "strftime_now" for node in tested)


class Renderer:
    """Renders templates, and keeps the last few compiled."""

    def __init__(self) -> None:
        self.environment = environment()
        self.compiled: dict[str, Any] = {}  # source → template, its arguments besides the caller's

    def reply(self, source: str, values: dict[str, Any] | None) -> dict[str, Any]:
        """{"text": …} with these values, or {"names": …} without; {"line": …, "problem": …} for a mistake in the
        template, {"problem": …} for anything else."""
        from jinja2 import TemplateSyntaxError
        from jinja2.meta import find_undeclared_variables

        try:
            if values is None:
                return {"names": sorted(find_undeclared_variables(self.environment.parse(source)))}
            return {"text": self.render(source, values)}
        except TemplateSyntaxError as error:
            return {"line": error.lineno, "problem": str(error.message)}
        except MemoryError:
            self.compiled.clear()
            return {"problem": f"it needs more than {MEMORY >> 20} MiB", "exceeded": True}
        except RecursionError:
            return {"problem": "it is nested too deeply", "exceeded": True}
        except Exception as error:  # noqa: BLE001 -- whatever the template raises is its answer
            return {"problem": str(error)[:2000] or type(error).__name__}

    def render(self, source: str, values: dict[str, Any]) -> str:
        if source not in self.compiled:
            while len(self.compiled) >= CACHED:
                del self.compiled[next(iter(self.compiled))]
            date = {"strftime_now": date_now} if needs_date(self.environment.parse(source)) else {}
            self.compiled[source] = self.environment.from_string(source), date
        template, date = self.compiled[source]
        parts, size = [], 0
        for part in template.generate(**date, **values):
            size += len(part)
            if size > MOST_OUTPUT:
                raise MemoryError
            parts.append(part)
        return "".join(parts)


def receive(stream: IO[bytes]) -> dict[str, Any] | None:
    """Return the next message; None at the end of the stream."""
    head = stream.read(HEAD)
    data = stream.read(int(head)) if len(head) == HEAD else b""
    return json.loads(data) if data else None


def send(stream: IO[bytes], message: dict[str, Any]) -> None:
    stream.write(packed(message))
    stream.flush()


def packed(message: Mapping[str, Any]) -> bytes:
    """A message as bytes. JSON in ASCII: half a surrogate pair stays what it is. Other objects are their text."""
    data = json.dumps(message, default=str).encode("ascii")
    return b"%0*d\n" % (HEAD - 1, len(data)) + data


def serve() -> None:
    renderer = Renderer()
    limit()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, in the midst of one long operation, too
    send(sys.stdout.buffer, {"ready": True})
    while (request := receive(sys.stdin.buffer)) is not None:
        sent = time.monotonic()
        for values in values_of(request):
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            reply = renderer.reply(request["source"], values)
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout.buffer.write(packed(reply))
            if time.monotonic() - sent > HELD:
                sys.stdout.buffer.flush()
                sent = time.monotonic()
            if "problem" in reply:
                break
        sys.stdout.buffer.flush()


def values_of(request: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """What the template is given, for each reply that is asked for."""
    if request.get("wanted") == "names":
        yield None
        return
    for count, opened in request["prefixes"]:
        messages = request["messages"][:count]
        yield {**request["values"], "messages": messages, "add_generation_prompt": opened}


if __name__ == "__main__":
    serve()
