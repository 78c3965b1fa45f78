"""report.html: the report as one file that needs nothing beside it, to be mailed or kept.

It is report.md in HTML: the same lines, every one escaped, the curves inside as images, and a box that says how to make
the run again.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from bessemer.job import RunDirectory, atomic_write
from bessemer.report.environment import reproduction
from bessemer.report.markdown import DETAILS, TITLES, render
from bessemer.report.phases import has_phases, write_phases_report
from bessemer.report.plots import write_plots
from bessemer.report.summary import Summary, summarise

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#17212d, #e8eef5); --muted: light-dark(#566373, #9fb0c2);
  --line: light-dark(#dde3ea, #2a3645); --soft: light-dark(#f3f5f8, #1d2733); --back: light-dark(#fff, #10161d); }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 58rem;
  margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { letter-spacing: -.02em; margin: 0 0 .5rem; overflow-wrap: anywhere; } h2 { margin: 2.2rem 0 .6rem; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
td:first-child { min-width: 11rem; overflow-wrap: normal; }
th { color: var(--muted); font-weight: 550; } .scroll { overflow-x: auto; }
pre { background: var(--soft); border-radius: 8px; padding: .7rem .9rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: .8rem; }
figure { margin: 0; } img { width: 100%; border-radius: 8px; background: #fff; }
.box { margin-top: 2.5rem; border: 1px solid var(--line); border-radius: 12px; padding: .4rem 1.2rem 1rem;
  background: var(--soft); }
summary { cursor: pointer; color: var(--muted); }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_html(run: RunDirectory) -> Path:
    """(Re)write RUN/report.html; returns its path."""
    path = run.path / "report.html"
    if has_phases(run):
        atomic_write(path, page(run.name, to_html(write_phases_report(run).read_text(encoding="utf-8"))))
        return path
    summary = summarise(run)
    plots = write_plots(summary)
    body = [*to_html(render(summary, plots), dict.fromkeys(plots)), *_box(summary)]
    atomic_write(path, page(run.name, body))
    return path


def page(title: str, body: list[str]) -> str:
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{STYLE}</style></head><body>'
    )
    return "\n".join([head, *body, "</body></html>\n"])


def _box(summary: Summary) -> list[str]:
    rows = [f"| {what} | {_cell(value)} |" for what, value in reproduction(summary)]
    return [
        '<section class="box">',
        "<h2>How to reproduce it</h2>",
        *to_html("\n".join(["| | |", "|---|---|", *rows])),
        "</section>",
    ]


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def to_html(text: str, images: dict[Path, None] | None = None) -> list[str]:
    """The markdown that our reports are written in; `images` are the files that may be put inside."""
    lines = iter(text.splitlines())
    found: list[str] = []
    known = {plot.name: plot for plot in images or ()}
    table: list[str] = []
    curves = False  # inside the grid of them
    for line in lines:
        if line.startswith("|"):
            table.append(line)
            continue
        if table:
            found += _table(table)
            table = []
        is_image = line.startswith("![")
        if is_image != curves:
            found.append('<div class="curves">' if is_image else "</div>")
            curves = is_image
        if head := re.match(r"(#{1,3}) (.*)", line):
            found.append(f"<h{len(head[1])}>{_inline(head[2])}</h{len(head[1])}>")
        elif fence := re.match(r"(`{3,})", line):
            found.append(f"<pre>{escape(chr(10).join(_until(lines, fence[1])))}</pre>")
        elif image := re.fullmatch(r"!\[(.*)\]\(plots/([\w.-]+)\)", line):
            found += _image(image[1], known.get(image[2]))
        elif line == DETAILS[0]:
            found.append("<details><summary>All settings</summary>")
        elif line == DETAILS[1]:
            found.append("</details>")
        elif line.strip():
            found.append(f"<p>{_inline(line)}</p>")
    return [*found, *(_table(table) if table else []), *(["</div>"] if curves else [])]


def _until(lines: Iterator[str], fence: str) -> Iterator[str]:
    for line in lines:
        if line == fence:
            return
        yield line


def _image(title: str, path: Path | None) -> list[str]:
    if path is None:
        return []
    data = base64.b64encode(path.read_bytes()).decode()
    name = escape(TITLES.get(path.stem, title))
    return [f'<figure><img alt="{name}" src="data:image/png;base64,{data}"></figure>']


def _table(lines: list[str]) -> list[str]:
    rows = [[_plain(cell) for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in rows[0]) if any(rows[0]) else ""
    body = ["<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in rows[2:]]
    return ['<div class="scroll"><table>', f"<tr>{head}</tr>" if head else "", *body, "</table></div>"]


def _plain(cell: str) -> str:
    """A cell without the marks that kept it one."""
    return re.sub(r"\\([\\|])", r"\1", cell.strip())


def _inline(text: str) -> str:
    """Bold and code; links of a report lead to files beside it, which this page does not need."""
    safe = escape(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    safe = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", safe)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
