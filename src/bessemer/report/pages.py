"""report.md and report.html: results, curves, settings, decisions, data and machine of a run on one page.

report.html is report.md as one self-contained file, with the curves as images and how to reproduce the run.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bessemer.config import Origin, OriginKind
from bessemer.config.bounded import read_json
from bessemer.console import compact, counted, duration, markdown_table, show, shown, with_error
from bessemer.job import RunDirectory
from bessemer.job.directory import step_name, step_of_name
from bessemer.report.plots import write_plots
from bessemer.report.summary import (
    PHASES,
    Row,
    Summary,
    has_phases,
    is_number,
    judge_health,
    phases_of,
    summarize,
    too_small,
    training_seconds,
)
from bessemer.storage.files import atomic_write

# --- report.md ---


MISSING = "not recorded"
TITLES = {
    "loss": "Loss",
    "bits_per_byte": "Bits per byte",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "throughput": "Throughput",
}
DETAILS = ("<details><summary>All settings</summary>", "</details>")


def write_report(run: RunDirectory, curves: bool = True) -> Path:
    """Rewrite RUN/report.md and, with `curves`, RUN/plots; return the path of the report."""
    if has_phases(run):
        return write_phases_report(run)
    summary = summarize(run)
    plots = write_plots(summary) if curves else None
    atomic_write(run.report, render(summary, plots))
    return run.report


def render(summary: Summary, plots: list[Path] | None) -> str:
    """Return the report of a run; None for `plots` that were not drawn."""
    parts = [
        _headline(summary),
        _use(summary),
        _curves(summary, plots),
        _samples(summary),
        _evaluations(summary),
        _numbers(summary),
        _configuration(summary),
        _branches(summary),
        _decisions(summary),
        _data(summary),
        _parameters(summary),
        _machine(summary),
        _problems(summary),
    ]
    return "\n".join(line for part in parts if part for line in [*part, ""])


def _section(title: str, *lines: str) -> list[str]:
    return [f"## {title}", "", *lines]


def _table_section(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return _section(title, *markdown_table(head, rows))


def _headline(summary: Summary) -> list[str]:
    done = f"{summary.step if summary.step is not None else '?'} of {summary.total_steps or '?'} steps"
    lines = [f"# {summary.run.name}", ""]
    final, best = summary.last("val_bpb"), summary.best("val_bpb")
    if best is not None and is_number(final):
        lowest = f"lowest {best[0]:.4f} at step {best[1]}"
        final_words = with_error(final, summary.last("val_bpb_se"))
        lines.append(f"**{final_words} bits per byte** on held-out text after {done} ({lowest}).")
        small = too_small(summary.held_out, summary.last("val_bpb_se"))
        lines += [f"Warning: {small}."] if small else []
    elif is_number(reward := summary.last("val_reward")):
        first = next(row["val_reward"] for row in summary.rows_with("val_reward"))
        lines.append(f"**Reward {reward:.4f}** of greedy answers to held-out prompts after {done} (first {first:.4f}).")
    elif is_number(right := summary.last("val_pref_acc")):
        lines.append(f"**{right:.1%} of held-out pairs ranked correctly** after {done}.")
    elif (loss := summary.last("val_loss") or summary.last("loss")) is not None:
        lines.append(f"**Loss {loss:.4f}** after {done}; bits per byte: {MISSING}.")
    else:
        lines.append(f"No result yet after {done}.")
    compressors = ", ".join(f"{name} {value:.4f}" for name, value in sorted(summary.baselines().items()))
    if compressors:
        lines.append(f"General compressors on the same text: {compressors} bits per byte.")
    numbered = summary.rows_with("step")
    health = judge_health(lambda name: [(row["step"], row[name]) for row in numbered if is_number(row.get(name))])
    trained = _trained(summary)
    paragraphs = [*([trained] if trained else []), *lines[2:], *([health.words] if health else []), _state(summary)]
    return [*lines[:2], *"\n\n".join(paragraphs).split("\n")]


def _trained(summary: Summary) -> str:
    """Return what was trained, on what: A gpt model of 2.69M parameters, trained on python-stdlib: 819k tokens."""
    parameters, config = summary.facts.get("parameters"), summary.config
    size = parameters.get("total") if isinstance(parameters, Mapping) else None
    if not is_number(size):
        return ""
    family, start, adapters = config.get("model.family"), config.get("init"), summary.facts.get("trained_parameters")
    words = f"A {family} model of {compact(size)} parameters" if family else f"A model of {compact(size)} parameters"
    if start:
        words += f", starting from {show(start)}"
    if is_number(adapters) and adapters != size:
        words += f", {compact(adapters)} of them trained"
    data, tokens = summary.facts.get("data"), summary.last("tokens")
    if isinstance(data, Mapping) and data and all(isinstance(value, Mapping) for value in data.values()):
        words += f". Data: {', '.join(re.sub('/[A-Z]+$', '', str(name)) for name in data)}"
    if is_number(tokens):
        words += f" ({compact(tokens)} tokens)" if "Data:" in words else f", trained on {compact(tokens)} tokens"
    objective = config.get("objective")
    return f"{words}. Objective: {objective}." if objective else f"{words}."


def _use(summary: Summary) -> list[str]:
    """Return the commands that use the model of a run that is done."""
    if summary.state != "done" or summary.config.get("objective") == "reward":
        return []
    run = shlex.quote(shown(summary.run.path))
    rows = [
        f'bessemer sample {run} --prompt "…"',
        f"bessemer chat {run}",
        f"bessemer serve {run}",
        f"bessemer train sft init={run} training.dataset=chats.jsonl",
    ]
    return _section("Use it", "```bash", *rows, "```")


def _state(summary: Summary) -> str:
    message = summary.status.get("message")
    return f"State: {summary.state}{f' ({message})' if message else ''}."


def _numbers(summary: Summary) -> list[str]:
    facts, last, best = summary.facts, summary.last, summary.best("val_bpb")
    tokens = last("tokens") or facts.get("tokens")
    parameters, trained = facts.get("parameters"), facts.get("trained_parameters")
    if isinstance(parameters, Mapping):
        parameters = parameters.get("total")
    ratio = tokens / parameters if is_number(tokens) and is_number(parameters) and parameters else None
    final = last("val_bpb")
    unit = ", nats per token" if summary.loss_per_token else ""
    starts = summary.status.get("starts")
    over = f", over {starts} starts" if is_number(starts) and starts > 1 else ""
    formula = f" = {facts['flops_formula']}" if facts.get("flops_formula") else ""  # older runs have none
    waiting = summary.typical("time/data_wait_pct")
    rows = [
        ("final reward on held-out prompts", _if_recorded(last("val_reward"), ".4f")),
        ("final bits per byte (± standard error)", MISSING if final is None else with_error(final, last("val_bpb_se"))),
        ("minimum bits per byte", MISSING if best is None else f"{best[0]:.4f} (step {best[1]})"),
        (f"final validation loss{unit}", recorded(last("val_loss"), ".4f")),
        (f"final training loss, smoothed{unit}", recorded(last("loss_smooth"), ".4f")),
        ("steps", count(summary.step)),
        ("skipped steps", count(last("skipped_steps"))),
        ("loss spikes", _if_recorded(last("spikes"), count)),
        ("rollbacks", _if_recorded(last("rollbacks"), count)),
        ("held-out pairs ranked correctly", _if_recorded(last("val_pref_acc"), ".1%")),
        ("margin of held-out pairs", _if_recorded(last("val_margin"), ".4f")),
        ("tokens", count(tokens)),
        ("parameters", count(parameters)),
        ("trained parameters", _if_recorded(None if trained == parameters else trained, count)),
        ("base model of the adapters", _base(facts.get("base"))),
        ("tokens : parameters", recorded(ratio, ".2f")),
        ("FLOPs per token", recorded(facts.get("flops_per_token"), compact) + formula),
        ("FLOPs per token, causal attention only", recorded(facts.get("flops_per_token_causal"), compact)),
        ("total FLOPs", recorded(last("total_training_flops") or facts.get("total_flops"), compact)),
        ("tokens per second (median)", recorded(summary.typical("time/tok_per_s"), compact)),
        *_utilization(summary),
        ("waiting for data", recorded(waiting / 100 if is_number(waiting) else None, ".1%")),
        ("training time of all steps", recorded(training_seconds(summary.rows), duration)),
        (f"goodput: share of wall time in steps that count{over}", recorded(last("time/goodput"), ".1%")),
        ("peak memory of a device", _peak_memory(summary)),
    ]
    rows = [(name, text) for name, text in rows if text is not None]
    return _table_section("Numbers", ("", ""), rows)


def _base(base: Any) -> str | None:
    """Return the path or hub name of the base that adapters belong to, with its hash; None without one."""
    return f"{base.get('path')}, sha256 {str(base.get('sha256'))[:16]}…" if isinstance(base, Mapping) else None


def _device(summary: Summary, name: str) -> Any:
    """Return a fact about the devices; None if they were not recorded."""
    devices = summary.facts.get("devices")
    return devices.get(name) if isinstance(devices, Mapping) else None


def _utilization(summary: Summary) -> list[tuple[str, str]]:
    """Return the rows about MFU, or why there is none."""
    peak, full = summary.facts.get("mfu_peak"), summary.typical("time/mfu")
    kind = _device(summary, "device_kind")
    if peak is None and full is None and kind is not None:
        return [("MFU", f"unknown: the peak of a {kind} is not in the table of chips")]
    return [
        ("MFU (attention counted in full)", recorded(full, ".1%")),
        ("MFU (causal attention only)", recorded(summary.typical("time/mfu_causal"), ".1%")),
        ("MFU is a share of", peak or MISSING),
    ]


def _peak_memory(summary: Summary) -> str:
    largest = summary.largest("mem/peak_gib")
    if largest is None and _device(summary, "platform") == "cpu":
        return "not reported by a CPU; `bessemer plan` shows what the step needs"
    return recorded(largest, ".2f") + (" GiB" if largest is not None else "")


def _curves(summary: Summary, plots: list[Path] | None) -> list[str]:
    if plots is None:
        return _section("Curves", "Not drawn, as logging.plots=false: `bessemer report` on this run draws them.")
    images = [f"![{TITLES.get(plot.stem, plot.stem)}]({plot.relative_to(summary.run.path)})" for plot in plots]
    return _section("Curves", *(images or [f"Metrics: {MISSING}."]))


def _samples(summary: Summary) -> list[str]:
    """Return the newest previews, with a mark between prompt and continuation."""
    steps = [row["step"] for row in summary.samples if is_number(row.get("step"))]
    if not steps:
        return _section("Samples", f"Samples: {MISSING}.")
    newest = [row for row in summary.samples if row.get("step") == max(steps)]
    lines = _section("Samples", f"At step {max(steps)}, temperature 0; the model starts at ▸.")
    for row in newest:
        text = f"{row.get('prompt', '')}▸{row.get('completion') or ' (end of document)'}"
        fence = "`" * max([3, *(1 + len(ticks) for ticks in re.findall("`+", text))])  # longer than any in the text
        lines += ["", f"{fence}text", *text.splitlines(), fence]
    return lines


def _evaluations(summary: Summary) -> list[str]:
    if not summary.evaluations:
        return []
    rows = [
        (found.get("task", "?"), count(found.get("step")), found.get("metric", ""), recorded(found.get("value"), ".4f"))
        for found in summary.evaluations
    ]
    return _table_section("Evaluations", ("task", "step", "metric", "value"), rows)


def _configuration(summary: Summary) -> list[str]:
    if not summary.config:
        return _section("Configuration", f"config.yaml: {MISSING}.")
    changed = [(key, show(summary.config.get(key)), origin) for key, origin in summary.provenance.items()]
    full = [(key, show(value)) for key, value in summary.config.items()]
    head = markdown_table(("setting", "value", "from"), changed) if changed else ["All settings are defaults."]
    details = [DETAILS[0], "", *markdown_table(("setting", "value"), full), "", DETAILS[1]]
    return _section("Configuration", "Settings that are not defaults:", "", *head, "", *details)


def _branches(summary: Summary) -> list[str]:
    """Return where `resume --change` changed settings or data: steps before and after do not compare."""
    rows: list[tuple[str, ...]] = []
    for branch in summary.branches:
        step, changes, data = show(branch.get("step")), branch.get("changes"), branch.get("data")
        for name, values in changes.items() if isinstance(changes, Mapping) else ():
            known = values if isinstance(values, Mapping) else {}
            rows.append((step, name, show(known.get("from")), show(known.get("to"))))
        if isinstance(data, Mapping):
            rows.append((step, "training data", str(data.get("from"))[:12], str(data.get("to"))[:12]))
    return _table_section("Branch points", ("from step", "what", "before", "after"), rows) if rows else []


def _decisions(summary: Summary) -> list[str]:
    rows = []
    for name, entry in summary.derived.items():
        known = entry if isinstance(entry, Mapping) else {"value": entry}
        rows.append((name, show(known.get("value")), known.get("reason") or MISSING))
    if not rows:
        return _section("Decisions", f"derived.json: {MISSING}.")
    return _table_section("Decisions", ("what", "value", "why"), rows)


def _data(summary: Summary) -> list[str]:
    data = summary.facts.get("data")
    if not isinstance(data, Mapping) or not data:
        return _section("Data", f"Counts of the data: {MISSING}.")
    nested = all(isinstance(value, Mapping) for value in data.values())
    sources: dict[str, Row] = {str(k): dict(v) for k, v in data.items()} if nested else {"all": dict(data)}
    first = ["documents", "tokens", "target_tokens", "dropped", "truncated", "cropped_share", "padding_share"]
    others = sorted({key for stats in sources.values() for key in stats} - set(first))
    rows = [
        (key.replace("_", " "), *(_statistic(key, stats.get(key)) for stats in sources.values()))
        for key in [*first, *others]
    ]
    return _table_section("Data", ("", *sources), rows)


def _statistic(key: str, value: Any) -> str:
    if is_number(value) and key.endswith("_share"):
        return f"{value:.2%}"
    return count(value) if is_number(value) or value is None else show(value)


def _parameters(summary: Summary) -> list[str]:
    groups = summary.facts.get("parameters")
    if not isinstance(groups, Mapping):
        return _section("Parameters", f"Parameters by group: {MISSING}.")
    return _table_section("Parameters", ("group", "parameters"), [(name, count(size)) for name, size in groups.items()])


def _machine(summary: Summary) -> list[str]:
    facts = summary.facts
    versions = facts.get("versions")
    names = versions if isinstance(versions, Mapping) and versions else {}
    rows = [
        ("devices", _devices(facts.get("devices"))),
        ("determinism", show_or_missing(facts.get("determinism"))),
        ("first step after", _start_up(facts.get("start_up"))),
        ("host", show_or_missing(summary.status.get("host"))),
        ("report written", time.strftime("%Y-%m-%d %H:%M:%S")),
        *((f"version of {name}", str(version)) for name, version in names.items()),
        *([] if names else [("versions", MISSING)]),
    ]
    return _table_section("Machine", ("", ""), rows)


def _devices(facts: Any) -> str:
    """8 × NVIDIA H200, mesh data 8 × fsdp 1 × …, 1 process; then anything else that was recorded about them."""
    if not isinstance(facts, Mapping):
        return show_or_missing(facts)
    axes, kind = facts.get("axes"), facts.get("device_kind") or facts.get("platform")
    words = [f"{count(facts.get('devices'))} × {kind}"] if kind else []
    if isinstance(axes, Mapping):
        words.append(f"mesh {' × '.join(f'{axis} {size}' for axis, size in axes.items())}")
    if is_number(number := facts.get("processes")):
        words.append(counted(int(number), "process"))
    known = ("axes", "device_kind", "platform", "chip", "devices", "processes", "jax", "jaxlib")
    words += [f"{key} {show(value)}" for key, value in facts.items() if key not in known]
    return ", ".join(words) or MISSING


def _start_up(facts: Any) -> str:
    """21.3 s: imports and devices 4.1, …; of the run's last start."""
    parts = facts.get("parts") if isinstance(facts, Mapping) else None
    if not isinstance(parts, Mapping) or not is_number(facts.get("seconds")):
        return MISSING
    words = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
    return f"{facts['seconds']:.1f} s: {words} ({facts.get('cache')})"


def _problems(summary: Summary) -> list[str]:
    return _section("Notes", *(f"- {problem}" for problem in summary.problems)) if summary.problems else []


# A job of phases


def write_phases_report(run: RunDirectory) -> Path:
    """Rewrite RUN/report.md of a job of phases: each phase's results, their evaluations, and links to their reports."""
    phases = phases_of(run)
    head = ("phase", "state", "steps", "tokens", "training time", "validation loss", "report")
    table = _table_section("Phases", head, [_phase_row(summarize(phase)) for phase in phases])
    lines = [f"# {run.name}", "", _state(summarize(run)), "", *table, "", *_phase_evaluations(run, phases)]
    atomic_write(run.report, "\n".join(lines).rstrip() + "\n")
    return run.report


def _phase_row(phase: Summary) -> tuple[str, ...]:
    return (
        phase.run.name,
        phase.state,
        count(phase.step),
        count(phase.last("tokens")),
        recorded(training_seconds(phase.rows), duration),
        recorded(phase.last("val_loss"), ".4f"),
        f"[{phase.run.name}]({PHASES}/{phase.run.name}/report.md)",
    )


def _phase_evaluations(run: RunDirectory, phases: Sequence[RunDirectory]) -> list[str]:
    """One row per evaluation, one column per phase."""
    names = [phase.name for phase in phases]
    values: dict[tuple[str, str], dict[str, Any]] = {}
    for name in names:
        try:
            found = read_json(run.eval / f"{name}.json")
        except (OSError, ValueError):
            continue
        for result in found if isinstance(found, list) else ():
            if isinstance(result, dict):
                values.setdefault((str(result.get("task")), str(result.get("metric"))), {})[name] = result.get("value")
    rows = [(*judged, *(recorded(known.get(name), ".4f") for name in names)) for judged, known in values.items()]
    return _table_section("Evaluations", ("task", "metric", *names), rows) if rows else []


# Values as text


def recorded(value: Any, form: str | Callable[[Any], str]) -> str:
    """Return a number in a format, such as ".4f", or by a function; anything else is `MISSING`."""
    if not is_number(value):
        return MISSING
    return format(value, form) if isinstance(form, str) else form(value)


def _if_recorded(value: Any, form: str | Callable[[Any], str]) -> str | None:
    return None if value is None else recorded(value, form)


def count(value: Any) -> str:
    """33816576 → 33,816,576."""
    if not is_number(value):
        return MISSING
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.4g}"


def show_or_missing(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {show(inner)}" for key, inner in value.items())
    return MISSING if value is None else show(value)


# --- report.html ---


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
