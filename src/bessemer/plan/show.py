"""A plan as text: tables that fit a terminal, and the schedules as lines of blocks."""

from __future__ import annotations

from typing import Any

from bessemer.config import dotted
from bessemer.plan.curves import TITLES, sparkline
from bessemer.report.table import compact, duration, figure, in_parts, table


def render(plan: dict[str, Any]) -> str:
    parts = [
        _head(plan),
        _derived(plan["derived"]),
        _parameters(plan["model"]["parameters"]),
        _optimizer(plan["optimizer"]),
        _cost(plan),
        _schedules(plan["schedules"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _head(plan: dict[str, Any]) -> str:
    model, devices = plan["model"], plan["devices"]
    sizes = [
        f"{name.replace('_', ' ')} {model[name]:,}"
        for name in ("depth", "width", "heads", "kv_heads", "head_dim", "vocab_size", "block_size")
        if model.get(name) is not None
    ]
    kind = devices["chip"] or devices["device_kind"]
    lines = [
        f"plan       {plan['recipe']}",
        f"model      {model['family']}: {', '.join(sizes)}",
        f"devices    {devices['devices']} × {kind}",
    ]
    return "\n".join([*lines, *(f"note       {note}" for note in plan["notes"])])


def _derived(derived: dict[str, Any]) -> str:
    rows = [(dotted(name), figure(entry["value"]), entry["reason"]) for name, entry in derived.items()]
    return table(("derived", "value", "why"), rows) if rows else ""


def _parameters(counts: dict[str, int]) -> str:
    total = counts["total"]
    rows = [
        (name.replace("_", " "), f"{count:,}", f"{count / total:.1%}")
        for name, count in counts.items()
        if name not in ("total", "scaling") and count
    ]
    rows += [("in all", f"{total:,}", "")]
    if "scaling" in counts:
        rows.append(("scaling parameters N (matrices in blocks + head)", f"{counts['scaling']:,}", ""))
    return table(("parameters", "count", "share"), rows)


def _optimizer(optimizer: dict[str, Any]) -> str:
    rows = [
        (
            row["group"],
            str(row["tensors"]),
            f"{row['parameters']:,}",
            "-" if row["lr"] is None else f"{row['lr']:.4g}",
            f"{row['weight_decay']:.4g}",
            " ".join(f"{beta:g}" for beta in row["betas"]) or "-",
        )
        for row in optimizer["groups"]
    ]
    head = (f"groups of {optimizer['name']}", "tensors", "parameters", "peak rate", "decay", "betas")
    return table(head, rows)


def _cost(plan: dict[str, Any]) -> str:
    flops, horizon, spent = plan["flops"], plan["horizon"], plan["time"]
    ratio = horizon["tokens_per_scaling_parameter"]
    epochs = "" if horizon["epochs"] is None else f", {horizon['epochs']:.2f} epochs"
    rows = [
        (
            "batch",
            f"{horizon['batch_tokens']:,} tokens",
            f"{horizon['batch_size']:,} × {plan['model']['block_size']:,}{in_parts(horizon['accumulate_steps'])}",
        ),
        ("horizon", f"{horizon['steps']:,} steps", f"{horizon['tokens']:,} tokens{epochs}"),
        ("tokens : N", "-" if ratio is None else f"{ratio:.2f}", "tokens : scaling parameters"),
        ("FLOPs a token", f"{flops['per_token']:.4g}", flops["formula"]),
        (
            "",
            f"{flops['per_token_causal']:.4g}",
            "with the keys that causal attention really reads",
        ),
        ("FLOPs in all", f"{flops['total']:.4g}", "FLOPs a token · tokens"),
        _memory(plan["memory"]),
        _time(spent),
    ]
    return table(("", "value", "how"), [row for row in rows if row])


def _memory(memory: dict[str, Any] | None) -> tuple[str, str, str]:
    name = "memory a device"
    if memory is None:
        return name, "-", "not compiled (--no-compile)"
    if memory["total"] is None:
        return name, "too much", "the compiler found no room; lower training.per_device_batch_size"
    kept, passing = gib(memory["arguments"]), gib(memory["temporaries"])
    parts = f"compiled step: state and batch {kept}, temporaries {passing}"
    if memory["fits"] is None:
        return name, gib(memory["total"]), parts
    room, advice = gib(memory["limit"]), "lower training.per_device_batch_size"
    verdict = f"fits into {room}" if memory["fits"] else f"DOES NOT FIT into {room}, {advice}"
    return name, gib(memory["total"]), f"{verdict}: {parts}"


def _time(spent: dict[str, Any]) -> tuple[str, str, str]:
    rate = f"{spent['matrix_flops_per_s'] / 1e12:.3g} TFLOP/s ({spent['measured']})"
    if spent["bound"]:
        return "time", f"> {duration(spent['seconds'])}", f"if all ran at the matrix rate, {rate}"
    share = spent["share_of_matrix_rate"]
    words = f"{compact(spent['tokens_per_s'])} tokens/s: {share:.0%} of the matrix rate, {rate}"
    if spent["mfu"] is not None:
        words = f"MFU {spent['mfu']:.1%}, {words}"
    if spent["devices"] > 1:
        words += f"; {spent['devices']} devices, no communication counted"
    return "time", f"≈ {duration(spent['seconds'])}", words


def _schedules(curves: dict[str, list[float]]) -> str:
    names = [name for name in curves if name != "steps"]
    rows = []
    for name in names:
        values = curves[name]
        marks = f"{values[0]:.3g} → {max(values):.3g} → {values[-1]:.3g}"
        rows.append((TITLES.get(name, name), sparkline(curves["steps"], values), marks))
    return (
        table((f"schedules, {curves['steps'][-1] + 1:,} steps", "", "first, largest, last"), rows)
        if rows
        else ""
    )


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
