"""Runs side by side: the list of a directory, a comparison of a few, and whether one group ends lower than another.

`bessemer compare --noise` prints the last: mean, spread, and the confidence of the difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.console import NOTHING, compact, duration, number, show, size, table, with_error
from bessemer.errors import InputError
from bessemer.job import RunDirectory
from bessemer.job.directory import STALE_SECONDS
from bessemer.job.runs import list_runs
from bessemer.report.summary import (
    REFUSED,
    Row,
    Summary,
    disk_size,
    headline,
    held_out_remarks,
    summarize,
    training_seconds,
)

# --- tables of runs ---


def run_rows(root: str | Path) -> list[Row]:
    """Return one row per run under `root`, the most recently active first."""
    rows = []
    for name in list_runs(root):
        summary = summarize(RunDirectory(Path(root) / name))
        rows.append(
            {
                "name": name,
                "path": str(summary.run.path),
                "state": summary.state,
                "step": summary.step,
                "steps": summary.total_steps,
                "loss": summary.last("loss_smooth"),
                "val_bpb": summary.last("val_bpb"),
                "result": found._asdict() if (found := headline(summary.last)) else None,
                "tok_per_s": summary.typical("time/tok_per_s"),
                "age_seconds": summary.age,
                "size_bytes": disk_size(summary.run.path),
                **({"problem": summary.problems[0]} if summary.state == REFUSED else {}),
            }
        )
    return sorted(rows, key=lambda row: (row["age_seconds"] is None, row["age_seconds"] or 0.0))


def runs_table(rows: Sequence[Row], width: int | None = None) -> str:
    """Return the rows as text; `age` is the time since the last heartbeat."""
    cells = [
        (
            row["name"],
            row["state"],
            _progress(row["step"], row["steps"]),
            number(row["loss"], 3),
            _result(row["result"]),
            compact(row["tok_per_s"]),
            duration(row["age_seconds"]),
            size(row["size_bytes"]),
        )
        for row in rows
    ]
    return table(("name", "state", "step", "loss", "result", "tok/s", "age", "size"), cells, width)


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return lines that explain unusual states, for below the table."""
    lines = [f"{row['name']} was not read: {row['problem']}" for row in rows if "problem" in row]
    if crashed := ", ".join(row["name"] for row in rows if row["state"] == "crashed"):
        lines.append(f"crashed (resume continues): {crashed}. The status says running, but no process holds the lock.")
    for row in rows:
        if row["state"] == "running" and (age := row["age_seconds"] or 0.0) > STALE_SECONDS:
            lines.append(f"{row['name']} has had no heartbeat for {duration(age)}, though its process holds the lock.")
    return lines


def labels_of(summaries: Sequence[Summary]) -> list[str]:
    """Return the names of the runs; whole paths if two have the same name."""
    names = [summary.run.name for summary in summaries]
    return names if len(set(names)) == len(names) else [str(summary.run.path) for summary in summaries]


def comparison(summaries: Sequence[Summary]) -> str:
    """Return tables of final numbers and of settings that differ, one column per run."""
    labels = labels_of(summaries)
    rows = [(title, *(cell(summary) for summary in summaries)) for title, cell in _NUMBERS]
    lines = [table(("", *labels), rows), *held_out_remarks(summaries, labels), ""]
    different = differing_settings(summaries)
    if not different:
        return "\n".join([*lines, "The settings are the same."])
    shared = {key: row for key, row in different.items() if all(known for known, _ in row)}
    if shared:
        cells = [(key, *(show(value) for _, value in row)) for key, row in shared.items()]
        lines += [table(("setting that differs", *labels), cells), ""]
    partial = {key: row for key, row in different.items() if key not in shared}  # another objective, optimizer or model
    for column, label in enumerate(labels):
        own = [f"{key}={show(row[column][1])}" for key, row in partial.items() if row[column][0]]
        lines += [f"Only in some runs, {label} among them: {', '.join(own)}."] if own else []
    return "\n".join(lines).rstrip()


def differing_settings(summaries: Sequence[Summary]) -> dict[str, list[tuple[bool, Any]]]:
    """Return key → (known, value) of each run, for settings that are not the same in all."""
    keys = dict.fromkeys(key for summary in summaries for key in summary.config)
    rows = {key: [(key in summary.config, summary.config.get(key)) for summary in summaries] for key in keys}
    return {key: row for key, row in rows.items() if any(entry != row[0] for entry in row)}


def _result(found: Mapping[str, Any] | None) -> str:
    """Return a headline with its unit: 1.3142 bpb, 96.1% pref. acc."""
    if found is None:
        return NOTHING
    share = str(found["metric"]).endswith("pref_acc")
    return f"{format(found['value'], '.1%') if share else number(found['value'])} {found['unit']}"


def _progress(step: int | None, steps: int | None) -> str:
    if step is None:
        return NOTHING
    return f"{step}/{steps}" if steps is not None else str(step)


def _least_bpb(summary: Summary) -> str:
    best = summary.best("val_bpb")
    return NOTHING if best is None else number(best[0])


def _parameters(summary: Summary) -> str:
    groups = summary.facts.get("parameters")
    return compact(groups.get("total")) if isinstance(groups, dict) else NOTHING


_NUMBERS = (
    ("state", lambda s: s.state),
    ("step", lambda s: _progress(s.step, s.total_steps)),
    ("training loss, smoothed", lambda s: number(s.last("loss_smooth"))),
    ("validation loss", lambda s: number(s.last("val_loss"))),
    ("bits per byte", lambda s: with_error(s.last("val_bpb"), s.last("val_bpb_se"))),
    ("lowest bits per byte", _least_bpb),
    ("parameters", _parameters),
    ("tokens", lambda s: compact(s.last("tokens"))),
    ("FLOPs", lambda s: compact(s.last("total_training_flops"))),
    ("tokens per second", lambda s: compact(s.typical("time/tok_per_s"))),
    ("training time", lambda s: duration(training_seconds(s.rows))),
)


# --- two groups of runs ---


NOISE = 0.02
"""Standard deviation between seeds that is assumed where it cannot be measured: nats per token, final validation
loss of short runs at depth 8 and 12."""

CONFIDENT = 0.95

Results = Mapping[int | str | None, float]
"""Seed → final loss. A run whose seed is None (unknown) or a name (of another system) has no partner."""


@dataclass(frozen=True)
class Verdict:
    """`first` against `second`: difference = mean(first) − mean(second), so below 0 the first is better."""

    first: str
    second: str
    difference: float
    error: float  # standard error of the difference
    confidence: float  # probability that the sign of the difference is right, .5 to 1
    method: str

    @property
    def decided(self) -> bool:
        return self.confidence >= CONFIDENT

    def __str__(self) -> str:
        """a is .0150 below b ± .0040 (98% confident; paired by 3 seeds)"""
        where = "below" if self.difference < 0 else "above"
        end = "" if self.decided else "; undecided"
        return (
            f"{self.first} is {abs(self.difference):.4f} {where} {self.second} ± {self.error:.4f} "
            f"({self.confidence:.1%} confident; {self.method}{end})"
        )


def mean_and_spread(results: Results) -> tuple[float, float | None]:
    """Return the mean and the standard deviation between seeds; of one run the latter is None."""
    values = list(results.values())
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def describe(groups: Mapping[str, Results], noise: float = NOISE) -> list[str]:
    """Return one line per group, best first, then the best against each of the others."""
    order = sorted(groups, key=lambda name: mean_and_spread(groups[name])[0])
    lines = []
    for name in order:
        mean, spread = mean_and_spread(groups[name])
        deviation = "one run, spread unknown" if spread is None else f"spread {spread:.4f}, {len(groups[name])} runs"
        lines.append(f"{name}: {mean:.4f} ({deviation})")
    return lines + [str(judge(order[0], groups[order[0]], name, groups[name], noise)) for name in order[1:]]


SAME_RUN = ("seed", "training.per_device_batch_size", "training.time_limit")
"""Settings, with logging.* and topology.*, that do not make a run another contender."""


BUDGETS: Mapping[str, Callable[[float], str]] = {
    "tokens": lambda amount: f"{amount:,.0f} tokens",
    "total_training_flops": lambda amount: f"{amount:.3g} FLOPs",
    "seconds": lambda amount: f"{duration(amount)} of training",
}
"""What a run can spend, and how it is shown."""

SAME_SECONDS = 0.05
"""Largest relative difference of equal budgets in seconds; the same program on the same machine differs by less."""


def spent_by(summary: Summary) -> dict[str, float]:
    """Return what a run spent of each budget it recorded."""
    found = {name: summary.last(name) for name in ("tokens", "total_training_flops")}
    found["seconds"] = training_seconds(summary.rows)
    return {name: amount for name, amount in found.items() if amount}


def common_budget(summaries: Sequence[Summary], labels: Sequence[str]) -> str:
    """Return the budget that all runs spent: tokens or FLOPs, equal to within a step, or seconds of training.

    Raise InputError if they have none in common, or if a run was last validated before its last step.
    """
    slack = dict.fromkeys(BUDGETS, 0.0)
    for label, summary in zip(labels, summaries, strict=True):
        step, judged = summary.last("step"), summary.rows_with("val_loss")[-1].get("step")
        if judged != step or not step:
            raise InputError(f"--noise needs the validation loss of the last step; {label} has it of {judged}/{step}.")
        for name, amount in spent_by(summary).items():
            slack[name] = max(slack[name], amount * (SAME_SECONDS if name == "seconds" else 1 / step))
    spent = [spent_by(summary) for summary in summaries]
    for name, as_text in BUDGETS.items():
        amounts = [found[name] for found in spent if name in found]
        if len(amounts) == len(spent) and max(amounts) - min(amounts) < slack[name]:
            return as_text(statistics.fmean(amounts))
    each = (
        f"{label} had {', '.join(BUDGETS[name](amount) for name, amount in found.items()) or 'nothing recorded'}"
        for label, found in zip(labels, spent, strict=True)
    )
    raise InputError(f"--noise needs equal tokens, FLOPs or seconds of training; {'; '.join(each)}.")


def compare_seeds(summaries: Sequence[Summary], labels: Sequence[str]) -> list[str]:
    """Group runs whose settings differ only in the seed and compare their final validation losses with `describe`.

    The first line is the budget that all of them spent.
    """
    unfinished = [label for label, s in zip(labels, summaries, strict=True) if s.state != "done"]
    if unfinished:
        raise InputError(f"--noise compares finished runs; not done: {', '.join(unfinished)}.")
    if any(s.last("val_loss") is None for s in summaries):
        raise InputError("--noise needs a validation loss in every run; see training.validation.")
    prints = {s.held_out.get("fingerprint") for s in summaries}
    if len(prints) > 1 or None in prints:
        raise InputError("--noise needs runs judged on the same recorded held-out set; try --common.")
    budget = common_budget(summaries, labels)
    groups: dict[str, dict[int | str | None, float]] = {}
    names: dict[str, str] = {}
    for label, summary in zip(labels, summaries, strict=True):
        settings = sorted(
            (key, repr(value))
            for key, value in summary.config.items()
            if key not in SAME_RUN and not key.startswith(("logging.", "topology."))
        )
        name = names.setdefault(repr(settings), label)
        seed = summary.config.get("seed")
        if seed in groups.setdefault(name, {}):
            raise InputError(f"{label} and another run have the same settings and seed {seed}; pass one of them.")
        groups[name][seed] = float(summary.last("val_loss"))
    if len(groups) < 2:
        raise InputError("--noise: all runs have the same settings but for the seed; nothing to compare.")
    return [f"Validation loss after {budget}:", *describe(groups)]


def judge(first: str, one: Results, second: str, two: Results, noise: float = NOISE) -> Verdict:
    """Compare two groups of final losses.

    With at least two seeds in common: a paired t-test over them. The standard error is s/√n, where s is the deviation
    of the differences. Otherwise each run is taken to have the standard deviation `noise`, so that the error is
    noise·√(1/n₁ + 1/n₂), and the normal distribution gives the confidence.
    """
    shared = sorted(seed for seed in one.keys() & two.keys() if isinstance(seed, int))
    if len(shared) > 1:
        gaps = [one[seed] - two[seed] for seed in shared]
        difference, error = statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
        method = f"paired by {len(shared)} seeds"
        left_out = len(one) + len(two) - 2 * len(shared)
        method += f", {left_out} unpaired left out" if left_out else ""
        return Verdict(first, second, difference, error, _sign_confidence(difference, error, len(gaps) - 1), method)
    difference = statistics.fmean(one.values()) - statistics.fmean(two.values())
    error = noise * math.sqrt(1 / len(one) + 1 / len(two))
    method = f"{len(one)} against {len(two)}, assumed noise {noise:g}"
    return Verdict(first, second, difference, error, _sign_confidence(difference, error, None), method)


def _sign_confidence(difference: float, error: float, freedom: int | None) -> float:
    """P(T ≤ |difference| / error), T of Student's t with `freedom` degrees, or normal when None."""
    if error == 0:
        return 0.5 if difference == 0 else 1.0
    t = abs(difference) / error
    return 0.5 * (1 + math.erf(t / math.sqrt(2))) if freedom is None else student_cdf(t, freedom)


def student_cdf(t: float, freedom: int) -> float:
    """Return P(T ≤ t) for t ≥ 0 and an integer number of degrees of freedom, exactly.

    With θ = atan(t/√ν), the two-sided probability is a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    theta = math.atan2(t, math.sqrt(freedom))
    cos2 = math.cos(theta) ** 2
    if freedom % 2:
        total, term = 0.0, math.cos(theta)
        for k in range(1, (freedom - 1) // 2 + 1):
            total += term
            term *= cos2 * (2 * k) / (2 * k + 1)
        two_sided = 2 / math.pi * (theta + math.sin(theta) * total)
    else:
        total, term = 0.0, 1.0
        for k in range(1, freedom // 2 + 1):
            total += term
            term *= cos2 * (2 * k - 1) / (2 * k)
        two_sided = math.sin(theta) * total
    return 0.5 * (1 + two_sided)
