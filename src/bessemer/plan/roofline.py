"""From work to time and money: three rooflines of one step, days, dollars.

    compute = FLOPs / peak    memory = bytes / bandwidth    network = Σ collectives at full link speed
    at best = the largest of them;   likely = max(compute / .72 + memory / .9, network)

A large bf16 product reached 655–767 of an H200's 989 TFLOP/s, copies 4.3 of its 4.8 TB/s (benchmarks/LOG.md): that
is where .72 and .9 are from. Latency, validation, checkpoints and lost hosts are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bessemer.plan.collectives import Collective
from bessemer.plan.estimate import Estimate
from bessemer.plan.prices import Terms
from bessemer.plan.target import Target

MATRIX_SHARE = 0.72
BANDWIDTH_SHARE = 0.9
DAY = 86_400


def step_time(target: Target, terms: Terms, made: Estimate, found: Sequence[Collective]) -> dict[str, Any]:
    """Seconds of one step by each roofline, which of them binds, and the likely time."""
    chip = target.chip
    seconds = {
        "compute": (made.flops - made.float8_flops) / chip.bf16_flops
        + made.float8_flops / chip.peak_flops("fp8"),
        "memory": made.traffic / chip.hbm_bytes_s,
        "network": sum(one.seconds(chip.link_bytes_s, terms.outside_gb_s * 1e9) for one in found),
    }
    busy = seconds["compute"] / MATRIX_SHARE + seconds["memory"] / BANDWIDTH_SHARE
    return {
        **seconds,
        "best": max(seconds.values()),
        "bound_by": max(seconds, key=lambda name: seconds[name]),
        "likely": max(busy, seconds["network"]),
    }


def run_time(
    step: dict[str, Any], steps: int, tokens: int, flops_per_token: float, target: Target, precision: str
) -> dict[str, Any]:
    """The whole run at the likely step time; MFU by the causal FLOPs."""
    seconds = step["likely"] * steps
    speed = tokens / seconds
    return {
        "step_seconds": step["likely"],
        "step_seconds_at_best": step["best"],
        "roofline": {name: step[name] for name in ("compute", "memory", "network")},
        "bound_by": step["bound_by"],
        "seconds": seconds,
        "days": seconds / DAY,
        "tokens_per_s": speed,
        "mfu_causal": speed * flops_per_token / (target.chip.peak_flops(precision) * target.devices),
    }


def run_cost(seconds: float, target: Target, terms: Terms) -> dict[str, Any]:
    price = terms.dollars_hour
    return {
        "dollars_per_chip_hour": price,
        "chip_hours": seconds / 3600 * target.chips,
        "dollars": None if price is None else seconds / 3600 * target.chips * price,
        "source": terms.source,
    }
