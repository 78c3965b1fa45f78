"""Which charts a run gets, from the names of its metrics: known groups first, then a chart for each other name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Group:
    """A chart: its title, the names (with *) drawn in it, and how its axis is read."""

    title: str
    names: tuple[str, ...]
    unit: str = ""
    log: bool = False
    smooth: bool = True  # the smoothing of the page applies
    fold: bool = False  # of several runs: one chart with a choice of the name, not a chart per name

    def document(self, names: list[str]) -> dict[str, Any]:
        return {
            "title": self.title,
            "names": names,
            "unit": self.unit,
            "log": self.log,
            "smooth": self.smooth,
            "fold": self.fold and len(names) > 1,
        }


GROUPS = (
    Group("Loss", ("loss", "loss_smooth", "val_loss"), "nats per token"),
    Group("Bits per byte", ("val_bpb",), "held-out text", smooth=False),
    Group("CORE", ("core_metric",), smooth=False),
    Group("Reward", ("reward", "val_reward", "reward/*", "val_reward/*")),
    Group("Reward spread", ("reward_std",), "standard deviation within a group"),
    Group("Pairs ranked right", ("pref_acc", "val_pref_acc"), "share of pairs"),
    Group("Margin", ("margin", "val_margin"), "chosen less rejected"),
    Group("KL to the reference", ("kl", "kl_nll", "val_kl"), "nats per token"),
    Group("Clipped ratios", ("clip_frac",), "share of tokens"),
    Group("Entropy", ("entropy",), "nats"),
    Group("Completion length", ("completion_len", "val_completion_len"), "tokens"),
    Group("Truncated completions", ("truncated",), "share of completions"),
    Group("Groups without signal", ("flat_groups",), "share of groups whose rewards are all equal"),
    Group("Learning rate", ("lr", "lr/*"), smooth=False, fold=True),
    Group("Gradient norm", ("grad_norm",), "before clipping", log=True),
    Group("Clipped gradients", ("clip_share",), "share of steps so far"),
    Group("Throughput", ("time/tok_per_s",), "tokens per second"),
    Group("MFU", ("time/mfu", "time/mfu_causal"), "share of the peak"),
    Group("Memory", ("mem/peak_gib",), "peak GiB of a device", smooth=False),
    Group("Step time", ("time/step_ms",), "milliseconds"),
    Group(
        "Parts of a step",
        ("time/rollout_s", "time/score_s", "time/reward_s", "time/train_s"),
        "seconds",
        fold=True,
    ),
    Group("Waiting for data", ("time/data_wait_pct",), "% of the time"),
    Group("Goodput", ("time/goodput",), "share of the wall clock spent training"),
    Group("Log-probabilities", ("logps/*", "val_logps/*"), "nats per answer", fold=True),
    Group("Sampler against trainer", ("logprob_gap", "logprob_gap_max"), "nats per token"),
    Group("Token loss", ("nll",), "nats per token, auxiliary losses left out"),
    Group("Skipped steps", ("skipped_steps",), smooth=False),
)
HIDDEN = (
    "step",
    "tokens",
    "target_tokens",
    "epoch",
    "total_training_flops",
    "time/total",
    "time/eta",
    "lrm",
    "min_val_bpb",
    "val_bpb_se",
)
"""Not drawn by themselves: they grow with the step, or say the same as another chart."""


def charts_of(names: Iterable[str]) -> list[dict[str, Any]]:
    """The charts of metrics with these names, in reading order."""
    left = [name for name in sorted(set(names)) if name not in HIDDEN]
    charts = []
    of_pairs = not {"pref_acc", "reward"}.isdisjoint(left)  # then the loss is not of tokens
    for group in GROUPS:
        if of_pairs and group.title == "Loss":
            group = replace(group, unit="of the objective")
        own = [name for form in group.names for name in left if fnmatchcase(name, form)]
        if own:
            charts.append(group.document(own))
            left = [name for name in left if name not in own]
    return [*charts, *(Group(name, (name,)).document([name]) for name in left)]
