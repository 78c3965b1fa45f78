"""report.md: what a run was told, what it decided, what it did, and how good the result is, on one page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bessemer.console import markdown_table, with_error
from bessemer.job import RunDirectory, atomic_write
from bessemer.report.environment import machine, peak_memory, utilisation
from bessemer.report.phases import has_phases, write_phases_report
from bessemer.report.plots import write_plots
from bessemer.report.summary import (
    MISSING,
    Row,
    Summary,
    clock,
    count,
    decimal,
    is_number,
    longest_run,
    percent,
    share_of_100,
    short,
    show,
    statistic,
    summarise,
    too_small,
)

TITLES = {
    "loss": "Loss",
    "bits_per_byte": "Bits per byte",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "throughput": "Throughput",
}
DETAILS = ("<details><summary>All settings</summary>", "</details>")


def write_report(run: RunDirectory, curves: bool = True) -> Path:
    """(Re)write RUN/report.md and, with `curves`, RUN/plots; returns the report's path."""
    if has_phases(run):
        return write_phases_report(run)
    summary = summarise(run)
    plots = write_plots(summary) if curves else None
    atomic_write(run.report, render(summary, plots))
    return run.report


def render(summary: Summary, plots: list[Path] | None) -> str:
    parts = [
        _headline(summary),
        _numbers(summary),
        _curves(summary, plots),
        _samples(summary),
        _evaluations(summary),
        _configuration(summary),
        _branches(summary),
        _decisions(summary),
        _data(summary),
        _parameters(summary),
        machine(summary),
        _problems(summary),
    ]
    return "\n".join(line for part in parts if part for line in [*part, ""])


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
        lines.append(
            f"**Reward {reward:.4f}** of greedy answers to held-out prompts after {done} (first {first:.4f})."
        )
    elif is_number(right := summary.last("val_pref_acc")):
        lines.append(f"**{right:.1%} of held-out pairs ranked right** after {done}.")
    elif (loss := summary.last("val_loss") or summary.last("loss")) is not None:
        lines.append(f"**Loss {loss:.4f}** after {done}; bits per byte: {MISSING}.")
    else:
        lines.append(f"No result yet after {done}.")
    compressors = ", ".join(f"{name} {value:.4f}" for name, value in sorted(summary.baselines().items()))
    if compressors:
        lines.append(f"On the same text general compressors need: {compressors} bits per byte.")
    message = str(summary.status.get("message") or "")
    lines.append(f"State: {summary.state}{f' ({message})' if message else ''}.")
    return lines


def _trained(facts: Mapping[str, Any], parameters: Any) -> list[tuple[str, str]]:
    """Only where a part of the parameters is frozen."""
    trained = facts.get("trained_parameters")
    return [] if trained is None or trained == parameters else [("trained parameters", count(trained))]


def _final_bpb(summary: Summary) -> str:
    final = summary.last("val_bpb")
    return MISSING if final is None else with_error(final, summary.last("val_bpb_se"))


def _numbers(summary: Summary) -> list[str]:
    facts, best = summary.facts, summary.best("val_bpb")
    tokens = summary.last("tokens") or facts.get("tokens")
    parameters = _total(facts.get("parameters"))
    ratio = f"{tokens / parameters:.2f}" if is_number(tokens) and parameters else MISSING
    rewards = summary.last("val_reward")
    unit = ", nats per token" if summary.loss_per_token else ""
    rows = [
        *([] if rewards is None else [("final reward on held-out prompts", decimal(rewards))]),
        ("final bits per byte (± standard error)", _final_bpb(summary)),
        ("minimum bits per byte", MISSING if best is None else f"{best[0]:.4f} (step {best[1]})"),
        (f"final validation loss{unit}", decimal(summary.last("val_loss"))),
        (f"final training loss, smoothed{unit}", decimal(summary.last("loss_smooth"))),
        ("steps", count(summary.step)),
        ("skipped steps", count(summary.last("skipped_steps"))),
        *_guard(summary),
        *_pairs(summary),
        ("tokens", count(tokens)),
        ("parameters", count(parameters)),
        *_trained(facts, parameters),
        ("tokens : parameters", ratio),
        ("FLOPs per token", short(facts.get("flops_per_token")) + _formula(facts)),
        ("FLOPs per token, causal attention only", short(facts.get("flops_per_token_causal"))),
        ("FLOPs in all", short(summary.last("total_training_flops") or facts.get("total_flops"))),
        ("tokens per second (median)", short(summary.typical("time/tok_per_s"))),
        *utilisation(summary),
        ("waiting for data", share_of_100(summary.typical("time/data_wait_pct"))),
        ("training time of all steps", clock(summary.training_seconds)),
        (
            f"goodput: share of wall time in steps that count{_starts(summary)}",
            percent(summary.last("time/goodput")),
        ),
        ("peak memory of a device", peak_memory(summary)),
    ]
    return ["## Numbers", "", *markdown_table(("", ""), rows)]


def _formula(facts: Mapping[str, Any]) -> str:
    """What FLOPs, and with them MFU, are made of; reports of older runs have none."""
    return f" = {facts['flops_formula']}" if facts.get("flops_formula") else ""


def _starts(summary: Summary) -> str:
    starts = summary.status.get("starts")
    return f", over {starts} starts" if is_number(starts) and starts > 1 else ""


def _guard(summary: Summary) -> list[tuple[str, str]]:
    """Spikes and rollbacks, of a run that looked for them (guard.spike_sigma)."""
    if summary.last("spikes") is None:
        return []
    return [
        ("loss spikes", count(summary.last("spikes"))),
        ("rollbacks", count(summary.last("rollbacks"))),
    ]


def _pairs(summary: Summary) -> list[tuple[str, str]]:
    """Of a run that compares answers."""
    if summary.last("val_pref_acc") is None:
        return []
    return [
        ("held-out pairs ranked right", percent(summary.last("val_pref_acc"))),
        ("margin of held-out pairs", decimal(summary.last("val_margin"))),
    ]


def _curves(summary: Summary, plots: list[Path] | None) -> list[str]:
    if plots is None:
        return [
            "## Curves",
            "",
            "Not drawn, as logging.plots=false: `bessemer report` on this run draws them.",
        ]
    if not plots:
        return ["## Curves", "", f"Metrics: {MISSING}."]
    return [
        "## Curves",
        "",
        *(f"![{TITLES.get(plot.stem, plot.stem)}]({plot.relative_to(summary.run.path)})" for plot in plots),
    ]


def _samples(summary: Summary) -> list[str]:
    """The newest previews, prompt and continuation divided by a mark."""
    steps = [row["step"] for row in summary.samples if is_number(row.get("step"))]
    if not steps:
        return ["## Samples", "", f"Samples: {MISSING}."]
    newest = [row for row in summary.samples if row.get("step") == max(steps)]
    lines = ["## Samples", "", f"At step {max(steps)}, temperature 0; the model begins at ▸."]
    for row in newest:
        text = f"{row.get('prompt', '')}▸{row.get('completion') or ' (end of document)'}"
        fence = "`" * max(3, 1 + longest_run(text))
        lines += ["", f"{fence}text", *text.splitlines(), fence]
    return lines


def _evaluations(summary: Summary) -> list[str]:
    if not summary.evaluations:
        return []
    rows = [
        (
            found.get("task", "?"),
            count(found.get("step")),
            found.get("metric", ""),
            decimal(found.get("value")),
        )
        for found in summary.evaluations
    ]
    return ["## Evaluations", "", *markdown_table(("task", "step", "metric", "value"), rows)]


def _configuration(summary: Summary) -> list[str]:
    if not summary.config:
        return ["## Configuration", "", f"config.yaml: {MISSING}."]
    changed = [(key, show(summary.config.get(key)), origin) for key, origin in summary.provenance.items()]
    full = [(key, show(value)) for key, value in summary.config.items()]
    head = (
        markdown_table(("setting", "value", "from"), changed) if changed else ["All settings are defaults."]
    )
    details = [
        DETAILS[0],
        "",
        *markdown_table(("setting", "value"), full),
        "",
        DETAILS[1],
    ]
    return ["## Configuration", "", "Settings that are not defaults:", "", *head, "", *details]


def _branches(summary: Summary) -> list[str]:
    """Where settings or data were changed on the way (`resume --change`): steps before and after do not compare."""
    rows: list[tuple[str, ...]] = []
    for branch in summary.branches:
        changes = branch.get("changes")
        for name, values in changes.items() if isinstance(changes, Mapping) else ():
            known = values if isinstance(values, Mapping) else {}
            rows.append((show(branch.get("step")), name, show(known.get("from")), show(known.get("to"))))
        if isinstance(data := branch.get("data"), Mapping):
            rows.append(
                (
                    show(branch.get("step")),
                    "training data",
                    str(data.get("from"))[:12],
                    str(data.get("to"))[:12],
                )
            )
    return (
        ["## Branch points", "", *markdown_table(("from step", "what", "before", "after"), rows)]
        if rows
        else []
    )


def _decisions(summary: Summary) -> list[str]:
    rows = []
    for name, entry in summary.derived.items():
        known = entry if isinstance(entry, Mapping) else {"value": entry}
        rows.append((name, show(known.get("value")), known.get("reason") or MISSING))
    if not rows:
        return ["## Decisions", "", f"derived.json: {MISSING}."]
    return ["## Decisions", "", *markdown_table(("what", "value", "why"), rows)]


def _data(summary: Summary) -> list[str]:
    data = summary.facts.get("data")
    if not isinstance(data, Mapping) or not data:
        return ["## Data", "", f"Counts of the data: {MISSING}."]
    nested = all(isinstance(value, Mapping) for value in data.values())
    sources: dict[str, Row] = {str(k): dict(v) for k, v in data.items()} if nested else {"all": dict(data)}
    first = ["documents", "tokens", "target_tokens", "dropped", "truncated", "cropped_share", "padding_share"]
    others = sorted({key for stats in sources.values() for key in stats} - set(first))
    rows = [
        (key.replace("_", " "), *(statistic(key, stats.get(key)) for stats in sources.values()))
        for key in [*first, *others]
    ]
    return ["## Data", "", *markdown_table(("", *sources), rows)]


def _parameters(summary: Summary) -> list[str]:
    groups = summary.facts.get("parameters")
    if not isinstance(groups, Mapping):
        return ["## Parameters", "", f"Parameters by group: {MISSING}."]
    return [
        "## Parameters",
        "",
        *markdown_table(("group", "parameters"), [(name, count(size)) for name, size in groups.items()]),
    ]


def _problems(summary: Summary) -> list[str]:
    return ["## Notes", "", *(f"- {problem}" for problem in summary.problems)] if summary.problems else []


def _total(groups: Any) -> float | None:
    if not isinstance(groups, Mapping):
        return groups if is_number(groups) else None
    total = groups.get("total")
    return total if is_number(total) else None
