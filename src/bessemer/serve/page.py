"""`GET /`: how to use this server, as a page for browsers and as text for everyone else."""

from __future__ import annotations

import html
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
}
STYLE = """
:root { color-scheme: light dark; --back: light-dark(#f6f7f9, #0e141b); --card: light-dark(#fff, #161e28);
  --ink: light-dark(#17212d, #e8eef5); --muted: light-dark(#566373, #9fb0c2); --line: light-dark(#dde3ea, #2a3645); }
body { margin: 0 auto; max-width: 52rem; padding: 2rem 1rem 3rem; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; }
p { margin: .3rem 0; } .muted { color: var(--muted); }
pre { margin: 0; padding: .8rem 1rem; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; } td { padding: .35rem .8rem .35rem 0; vertical-align: top; }
tr + tr { border-top: 1px solid var(--line); } code { font: 13px ui-monospace, Menlo, Consolas, monospace; }
@media (max-width: 560px) { td { display: block; padding: .1rem 0; } tr { display: block; padding: .4rem 0; } }
"""
ENDPOINTS = (
    ("POST /v1/chat/completions", "messages in, an answer out; stream, n, logprobs, penalties, tools"),
    ("POST /v1/completions", "a text to continue"),
    ("GET /v1/models", "the model that is served"),
    ("GET /health", "200 while it answers, 503 after a failure"),
    ("GET /metrics", "counters for Prometheus"),
)


@dataclass(frozen=True)
class Usage:
    """What the page says. `model` is None where only who has the token may know it."""

    address: str  # http://host:port
    model: str | None
    step: int | None

    @property
    def title(self) -> str:
        return "Bessemer server" if self.model is None else f"{self.model}, step {self.step}"

    @property
    def about(self) -> str:
        token = "" if self.model is not None else " Requests need a token: Authorization: Bearer TOKEN."
        return f"This server speaks OpenAI's protocol at {self.address}/v1.{token}"

    @property
    def curl(self) -> str:
        token = "" if self.model is not None else ' -H "Authorization: Bearer $BESSEMER_API_TOKEN"'
        body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}'
        return f"curl {self.address}/v1/chat/completions -H 'Content-Type: application/json'{token} \\\n  -d '{body}'"

    @property
    def python(self) -> str:
        key, model = ("none", self.model) if self.model is not None else ("TOKEN", "MODEL")
        return (
            "from openai import OpenAI\n\n"
            f'client = OpenAI(base_url="{self.address}/v1", api_key="{key}")\n'
            'messages = [{"role": "user", "content": "Hello"}]\n'
            f'for chunk in client.chat.completions.create(model="{model}", messages=messages, stream=True):\n'
            '    print(chunk.choices[0].delta.content or "", end="", flush=True)'
        )

    def text(self) -> str:
        width = max(len(name) for name, _ in ENDPOINTS)
        listed = "\n".join(f"  {name:<{width}}  {what}" for name, what in ENDPOINTS)
        head, chat = f"{self.title}\n{self.about}", "To chat on a page: bessemer dash"
        return "\n\n".join((head, self.curl, self.python, listed, chat)) + "\n"

    def html(self) -> str:
        escape = html.escape
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(what)}</td></tr>"
            for name, what in ENDPOINTS
        )
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)} · Bessemer</title><style>{STYLE}</style></head><body>"
            f'<h1>{escape(self.title)}</h1><p class="muted">{escape(self.about)}</p>'
            f"<h2>Try it</h2><pre>{escape(self.curl)}</pre><h2>From Python</h2><pre>{escape(self.python)}</pre>"
            f"<h2>Endpoints</h2><table>{rows}</table>"
            "<h2>In a browser</h2><p>To chat with a model on a page, run <code>bessemer dash</code>.</p></body></html>"
        )


def usage_page(request: Request, model: str | None, step: int | None) -> Response:
    """The page, in the form that the client asks for."""
    usage = Usage(str(request.base_url).rstrip("/"), model, step)
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(usage.html(), headers=HEADERS)
    return PlainTextResponse(usage.text(), headers=HEADERS)
