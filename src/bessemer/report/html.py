"""report.html: report.md as one self-contained HTML file, with the curves as images and how to reproduce the run."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bessemer.config import Origin, OriginKind
from bessemer.config.bounded import read_json
from bessemer.console import markdown_table, show
from bessemer.job import RunDirectory
from bessemer.job.directory import step_name, step_of_name
from bessemer.report.markdown import DETAILS, MISSING, TITLES, render, show_or_missing, write_phases_report
from bessemer.report.plots import write_plots
from bessemer.report.summary import Summary, has_phases, summarize
from bessemer.storage.files import atomic_write

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
    """Rewrite RUN/report.html; return its path."""
    if has_phases(run):
        body = to_html(write_phases_report(run).read_text(encoding="utf-8"))
    else:
        summary = summarize(run)
        plots = write_plots(summary)
        box = to_html("\n".join(["## How to reproduce it", "", *markdown_table(("", ""), reproduction(summary))]))
        body = [*to_html(render(summary, plots), plots), '<section class="box">', *box, "</section>"]
    path = run.path / "report.html"
    atomic_write(path, page(run.name, body))
    return path


def page(title: str, body: Sequence[str]) -> str:
    """Return an HTML page that loads nothing."""
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{STYLE}</style></head><body>'
    )
    return "\n".join([head, *body, "</body></html>\n"])


def to_html(text: str, images: Sequence[Path] = ()) -> list[str]:
    """Return the Markdown of our reports as HTML, every text escaped; `images` are the files that may be embedded."""
    lines = iter(text.splitlines())
    found: list[str] = []
    known = {plot.name: plot for plot in images}
    table: list[str] = []
    curves = False  # whether we are inside their grid
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
            if (path := known.get(image[2])) is not None:
                data = base64.b64encode(path.read_bytes()).decode()
                title = escape(TITLES.get(path.stem, image[1]))
                found.append(f'<figure><img alt="{title}" src="data:image/png;base64,{data}"></figure>')
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


def _table(lines: list[str]) -> list[str]:
    rows = [[_unescape(cell) for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in rows[0]) if any(rows[0]) else ""
    body = ["<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in rows[2:]]
    return ['<div class="scroll"><table>', f"<tr>{head}</tr>" if head else "", *body, "</table></div>"]


def _unescape(cell: str) -> str:
    return re.sub(r"\\([\\|])", r"\1", cell.strip())


def _inline(text: str) -> str:
    """Return bold and code as HTML. Links lead to files beside the report, which this page does without."""
    safe = escape(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    safe = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", safe)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)


def reproduction(summary: Summary) -> list[tuple[str, str]]:
    """Return rows of what reproducing the run takes: the command, versions, and hashes to compare."""
    meta, saved = _newest_meta(summary.run)
    versions = summary.facts.get("versions")
    versions = versions if isinstance(versions, Mapping) else meta.get("versions")
    return [
        ("command", _command(summary)),
        ("seed", show(summary.config.get("seed", MISSING))),
        ("versions", show_or_missing(versions if isinstance(versions, Mapping) else None)),
        ("devices", show_or_missing(summary.facts.get("devices"))),
        ("determinism", show_or_missing(summary.facts.get("determinism"))),
        ("config.yaml, sha256", _file_hash(summary.run.config)),
        ("tokenizer", str(meta.get("tokenizer_hash") or MISSING)),
        ("data", str(meta.get("data_fingerprint") or MISSING)),
        ("newest checkpoint", saved or MISSING),
        ("its COMMIT, sha256", _file_hash(summary.run.checkpoints / saved / "COMMIT") if saved else MISSING),
    ]


def _command(summary: Summary) -> str:
    """Return a command that gives these settings, from their origins."""
    if not summary.config:
        return MISSING
    recipe = [] if summary.recipe is None else [summary.recipe]
    given = [
        f"{key}={show(summary.config.get(key))}"
        for key, origin in summary.provenance.items()
        if Origin.parse(str(origin)).kind is OriginKind.COMMAND_LINE
    ]
    return shlex.join(["bessemer", "train", *recipe, *given])


def _newest_meta(run: RunDirectory) -> tuple[dict[str, Any], str]:
    """Return meta.json and directory name of the newest checkpoint; ({}, "") if there is none."""
    found = run.checkpoints.iterdir() if run.checkpoints.is_dir() else []
    steps = sorted((step for path in found if (step := step_of_name(path.name)) is not None), reverse=True)
    for step in steps:
        try:
            meta = read_json(run.checkpoints / step_name(step) / "meta.json")
        except (OSError, ValueError):
            continue
        return (meta if isinstance(meta, dict) else {}), step_name(step)
    return {}, ""


def _file_hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return MISSING
