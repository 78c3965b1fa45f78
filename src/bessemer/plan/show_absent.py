"""A plan for absent hardware as text."""

from __future__ import annotations

import re
from typing import Any

from bessemer.config import dotted
from bessemer.plan.show import gib
from bessemer.report.table import compact, counted, duration, figure, table

PARTS = {
    "parameters": "float32, as they rest",
    "optimizer": "moments",
    "other": "averages, frozen or reference weights, counters",
    "batch": "the rows of a step",
    "gradients": "float32, as they rest, when memory is fullest",
    "activations": "kept for the backward pass of a micro-batch",
    "workspace": "the largest results, gathered weights",
    "temporaries": "gradients, activations and workspace together",
}


def render_absent(plan: dict[str, Any], with_placement: bool = False) -> str:
    parts = [_head(plan), _derived(plan["derived"]), _memory(plan), _collectives(plan), _time(plan)]
    if with_placement:
        parts.append(_placement(plan["placement"]))
    if "sweep" in plan:
        parts += [_sweep(plan["sweep"]), f"best       {plan['command']}"]
    return "\n\n".join(part for part in parts if part)


def _head(plan: dict[str, Any]) -> str:
    model, devices, horizon = plan["model"], plan["devices"], plan["horizon"]
    sizes = [
        f"{name.replace('_', ' ')} {model[name]:,}"
        for name in ("depth", "width", "heads", "vocab_size", "block_size")
        if model.get(name) is not None
    ]
    mesh = " × ".join(f"{axis} {size}" for axis, size in devices["axes"].items())
    how = "the analytic model"
    if plan["method"] == "compiled":
        how = f"the step compiled with libtpu in {plan['compile_seconds']:.0f} s; time by the analytic model"
    lines = [
        f"plan       {plan['recipe']}, not run: {how}",
        f"model      {model['family']}: {', '.join(sizes)}; {compact(model['parameters']['total'])} parameters",
        f"devices    {devices['devices']:,} × {devices['chip']}" + _slices(devices) + f", mesh {mesh}",
        f"step       {horizon['batch_size']:,} sequences: {horizon['per_device_batch_size']:,} a device × "
        f"{counted(horizon['accumulate_steps'], 'pass')}; {horizon['steps']:,} steps, "
        f"{compact(horizon['tokens'])} tokens",
    ]
    return "\n".join([*lines, *(f"note       {note}" for note in plan["notes"])])


def _slices(devices: dict[str, Any]) -> str:
    return f" in {devices['slices']} slices" if devices["slices"] > 1 else ""


def _derived(derived: dict[str, Any]) -> str:
    rows = [(dotted(name), figure(entry["value"]), entry["reason"]) for name, entry in derived.items()]
    return table(("derived", "value", "why"), rows) if rows else ""


def _memory(plan: dict[str, Any]) -> str:
    memory = plan["memory"]
    rows = [(name, gib(memory[name]), words) for name, words in PARTS.items() if memory.get(name)]
    limit = gib(memory["limit"])
    verdict = f"fits into {limit}" if memory["fits"] else f"DOES NOT FIT into {limit}"
    peak = "-" if memory["peak"] is None else gib(memory["peak"])
    if plan["method"] == "compiled":
        verdict += f"; the analytic model said {gib(memory['estimated_peak'])}"
    lines = [table(("memory of a device", "size", "what"), [*rows, ("peak", peak, verdict)])]
    lines += [f"to fit     {' '.join(one['settings'])}   ({gib(one['peak'])})" for one in memory["remedies"]]
    if not memory["fits"] and not memory["remedies"]:
        lines.append(
            "to fit     no mesh, micro-batch or remat of this model suffices here: use more devices or a smaller model"
        )
    return "\n".join(lines)


def _collectives(plan: dict[str, Any]) -> str:
    rows = [
        (
            one["kind"],
            " × ".join(one["axes"]),
            f"{one['devices']:,}",
            f"{one['count']:,}",
            gib(one["bytes_sent"]),
        )
        for one in plan["collectives"]
    ]
    if not rows:
        return ""
    head = ("collectives of a step", "mesh axes", "devices", "times", "sent by a device")
    return table(head, [*rows, ("in all", "", "", "", gib(plan["bytes_sent_per_step"]))])


def _time(plan: dict[str, Any]) -> str:
    spent, cost = plan["time"], plan["cost"]
    roofline = spent["roofline"]
    rows = [
        (
            "compute",
            seconds(roofline["compute"]),
            f"{plan['flops']['per_device_step']:.4g} FLOPs a device at its peak",
        ),
        (
            "memory",
            seconds(roofline["memory"]),
            "elementwise work, weights, gradients, update at full bandwidth",
        ),
        ("network", seconds(roofline["network"]), "collectives at full link speed"),
        ("step at best", seconds(spent["step_seconds_at_best"]), f"bound by {spent['bound_by']}"),
        (
            "step, likely",
            seconds(spent["step_seconds"]),
            f"{compact(spent['tokens_per_s'])} tokens/s, MFU {spent['mfu_causal']:.1%} (causal)",
        ),
        (
            "run",
            duration(spent["seconds"]),
            f"{spent['days']:.3g} days, {cost['chip_hours']:,.0f} chip-hours",
        ),
        ("cost", _dollars(cost["dollars"]), _price(cost)),
    ]
    return table(("time", "value", "how"), rows)


def _dollars(value: float | None) -> str:
    return "unknown" if value is None else f"${value:,.0f}" if value >= 10 else f"${value:,.2f}"


def _price(cost: dict[str, Any]) -> str:
    if cost["dollars_per_chip_hour"] is None:
        return "no price for this chip: --prices FILE"
    return f"${cost['dollars_per_chip_hour']:,.2f} a chip and hour ({cost['source']})"


def seconds(value: float) -> str:
    return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value:,.3g} s"


def _placement(rows: list[dict[str, Any]]) -> str:
    """Alike parameters of all layers in one line."""
    lines: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        name = re.sub(r"\d+", "*", row["name"])
        axes = ", ".join("+".join(a) if isinstance(a, list) else a or "-" for a in row["spec"])
        shape = " × ".join(map(str, row["shape"])) or "1"
        count = lines.setdefault((name, shape, axes), [0, 0])
        count[0] += 1
        count[1] += row["bytes_per_device"]
    cells = [(*key, f"{count:,}", gib(size)) for key, (count, size) in lines.items()]
    return table(("parameter", "shape", "split over", "arrays", "bytes a device"), cells)


def _sweep(sweep: dict[str, Any]) -> str:
    rows = [
        (
            " × ".join(f"{axis} {size}" for axis, size in row["axes"].items() if size > 1) or "one device",
            f"{row['per_device_batch_size']:,}",
            row["remat"],
            gib(row["peak"]),
            seconds(row["step_seconds"]),
            row["bound_by"],
        )
        for row in sweep["best"]
    ]
    head = (
        f"{sweep['fit']:,} of {sweep['tried']:,} fit; the best",
        "a device",
        "remat",
        "peak",
        "step",
        "bound by",
    )
    return table(head, rows)
