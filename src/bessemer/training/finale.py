"""The end of a run on the screen: what it reached, against what, a sample, and what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.errors import runnable
from bessemer.registry import objectives
from bessemer.report.held_out import too_small
from bessemer.report.metrics import MetricsFile
from bessemer.report.summary import training_seconds
from bessemer.report.table import duration, fit, wrapped
from bessemer.training.progress import compact

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


BAR = "  | "
SAMPLE_LINES = 8
WATCH = "  bessemer dash                              # all runs in a browser"
OWN_TEXT = "  bessemer train training.dataset=my.txt     # the same on your own text"
TEACH = "  bessemer train sft init={} training.dataset=chats.jsonl"


def final_lines(trainer: BaseTrainer, compressors: dict[str, float]) -> list[str]:
    rows = list(MetricsFile(trainer.run_directory.metrics).rows())
    validations = [row for row in rows if row.get("val_loss") is not None]
    before = "untrained" if trainer.settings.init is None else "before"
    table = result_table(validations, compressors, before)
    held_out = trainer.data.validation
    error = validations[-1].get("val_bpb_se") if validations else None
    small = None if held_out is None else too_small(held_out.description, error)
    table += [f"warning: {small}"] if small else []
    results = [*reward_line(rows), *table, *evaluated(validations)]
    lines = ["", *results, *rates(rows), ""]
    lines += sample_lines(trainer)
    path = shown(trainer.run_directory.path)
    curves = f", curves in {path}/plots" if trainer.logging.plots else ""
    return [
        *lines,
        f"run     {path}",
        f"report  {path}/report.md{curves}",
        "",
        "next",
        *map(runnable, next_commands(trainer, shlex.quote(path))),
    ]


def next_commands(trainer: BaseTrainer, path: str) -> list[str]:
    if teaches_chat(trainer):
        return [f"  bessemer chat {path}", f"  bessemer serve {path}", WATCH]
    if hasattr(trainer.model, "values"):  # it judges answers and was not taught to write them
        return [f"  bessemer report {path} --html", WATCH]
    can_sample = trainer.tokenizer is not None and hasattr(trainer.model, "decode")
    return [
        *([f"  bessemer sample {path} --prompt {shlex.quote(a_prompt(trainer))}"] if can_sample else []),
        f"  bessemer eval {path} --tasks bpb",
        WATCH,
        OWN_TEXT if trainer.has_recipe_data else f"{TEACH.format(path)}     # teach it to answer",
    ]


def reward_line(rows: list[dict[str, Any]]) -> list[str]:
    """From the first to the last greedy reward on held-out prompts, of a run that has rewards."""
    found = [row for row in rows if row.get("val_reward") is not None]
    if not found:
        return []
    first, last = found[0], found[-1]
    return [
        f"reward on held-out prompts, greedy: {first['val_reward']:.3f} at step {first['step']}, "
        f"{last['val_reward']:.3f} at step {last['step']}"
    ]


def teaches_chat(trainer: BaseTrainer) -> bool:
    """Whether the objective teaches conversations, so that compressing text is not what it is about."""
    return "chat" in objectives.entry(trainer.settings.objective).traits


def shown(path: str | Path) -> str:
    """A path as the user would type it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else str(path)


def result_table(
    validations: list[dict[str, Any]], compressors: dict[str, float], before: str = "untrained"
) -> list[str]:
    """Bits per byte of the held-out text, worst first, with a bar each: shorter is better."""
    known = [row for row in validations if row.get("val_bpb") is not None]
    if not known:
        return [
            f"validation loss {row['val_loss']:.4f} at step {row['step']}{ranked(row)}"
            for row in validations[-1:]
        ]
    values = {f"this model, {before}": known[0]["val_bpb"]} if known[0]["step"] == 0 else {}
    values |= {{"gzip": "gzip -9", "xz": "xz -9e"}[name]: value for name, value in compressors.items()}
    values["this model, trained"] = known[-1]["val_bpb"]
    errors = {"this model, trained": known[-1].get("val_bpb_se")}
    if known[0]["step"] == 0:
        errors[f"this model, {before}"] = known[0].get("val_bpb_se")
    width = 24 / max(values.values())
    known_error = ", ± standard error" if any(errors.values()) else ""
    lines = [f"bits per byte of held-out {'text' if compressors else 'data'} (lower is better{known_error})"]
    for name, value in sorted(values.items(), key=lambda item: -item[1]):
        error = f" ± {errors[name]:.3f}" if errors.get(name) is not None else ""
        lines.append(f"  {name:<22} {value:6.3f}{error:<8}  {'█' * max(1, round(value * width))}")
    if "gzip" in compressors:
        gain = 1 - known[-1]["val_bpb"] / compressors["gzip"]
        word = "fewer" if gain >= 0 else "more"
        lines.append(f"  {abs(gain):.1%} {word} bits than gzip -9")
    return lines


def evaluated(validations: list[dict[str, Any]]) -> list[str]:
    """Each evaluation before the first step and after the last."""
    if not validations:
        return []
    first, last = validations[0], validations[-1]
    return [
        f"  {key.removeprefix('eval/')}: {first[key]:.4f} before, {last[key]:.4f} after"
        for key in last
        if key.startswith("eval/") and key in first and first["step"] == 0 < last["step"]
    ]


def ranked(row: dict[str, Any]) -> str:
    """Of a run that compares answers."""
    if "val_pref_acc" not in row:
        return ""
    return f"; {row['val_pref_acc']:.1%} of held-out pairs ranked right, margin {row['val_margin']:.3f}"


def rates(rows: list[dict[str, Any]]) -> list[str]:
    timed = [row for row in rows if row.get("time/tok_per_s")]
    if not timed:
        return []
    speed = sorted(row["time/tok_per_s"] for row in timed)[len(timed) // 2]
    spent = duration(training_seconds(timed))
    return [f"  {compact(timed[-1]['tokens'])} tokens in {spent} of training, {compact(speed)} tokens/s"]


def a_prompt(trainer: BaseTrainer) -> str:
    """Something to try: the first line of the last preview's prompt, cut to fit the screen."""
    samples = list(MetricsFile(trainer.run_directory.samples).rows())
    lines = samples[-1]["prompt"].strip().splitlines() if samples else []
    return lines[0][:32].strip() if lines else "Once upon a time"


def sample_lines(trainer: BaseTrainer) -> list[str]:
    samples = list(MetricsFile(trainer.run_directory.samples).rows())
    if not samples:
        return []
    last, width = samples[-1], trainer.output.console.width - len(BAR)
    between = "▸" if teaches_chat(trainer) else ""
    text = fit(last["prompt"], 3 * width) + between + last["completion"]
    lines = [part for line in text.splitlines() for part in wrapped(line, width)]
    return ["sample", *(f"{BAR}{line}" for line in lines[:SAMPLE_LINES]), ""]
