"""The curves of a run as PNG files. Matplotlib is imported when the first one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.report.summary import ALL_STEPS, OLDER_NAMES, Summary, is_number
from bessemer.storage.files import storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE, ACCENT, GREY = "#1f3b57", "#a9bccf", "#c8553d", "#777777"
TRAINING: dict[str, Any] = {"color": PALE, "linewidth": 1}
HELD_OUT: dict[str, Any] = {"color": ACCENT, "marker": "o", "markersize": 3.5}
COLORS = ("#1f3b57", "#c8553d", "#4c8c4a", "#8a5fa8", "#c99700", "#3a9fbf", "#7f4f24", "#e07aa8")


def write_plots(summary: Summary) -> list[Path]:
    """Write RUN/plots/*.png, one for each curve that has points; return the files."""
    drawn = []
    for name, draw in (
        ("loss", _loss),
        ("bits_per_byte", _bits_per_byte),
        ("reward", _reward),
        ("preference", _preference),
        ("margin", _margin),
        ("learning_rate", _learning_rate),
        ("grad_norm", _grad_norm),
        ("kl", _divergence),
        ("throughput", _throughput),
    ):
        figure, axes = new_figure()
        if draw(axes, summary):
            drawn.append(save(figure, summary.run.plots / f"{name}.png"))
    return drawn


OVERLAID = (
    ("loss_smooth", "training loss, smoothed"),
    ("val_bpb", "validation bits per byte"),
    ("val_loss", "validation loss"),
    ("val_reward", "reward of greedy answers to held-out prompts"),
    ("val_pref_acc", "share of held-out pairs ranked correctly"),
    ("kl", "KL to the reference (nats per token)"),
)
AGAINST = {
    "step": ("step", "step"),
    "tokens": ("tokens", "tokens"),
    "time": (ALL_STEPS, "training time, seconds"),
    "flops": ("total_training_flops", "FLOPs"),
}


def write_overlay(
    summaries: Sequence[Summary], labels: Sequence[str], path: Path, against: str = "step"
) -> Path | None:
    """Plot several runs in one picture, one panel per metric that any of them has; return None if there is none."""
    axis, title = AGAINST[against]
    known = {name: text for name, text in OVERLAID if any(summary.rows_with(name) for summary in summaries)}
    if "val_bpb" in known:
        known.pop("val_loss", None)  # the same curve, in other units
    if not known:
        return None
    figure, axes = new_figure(panels=len(known))
    some = False
    for panel, (name, text) in zip([axes] if len(known) == 1 else axes, known.items(), strict=True):
        style: dict[str, Any] = {"marker": "o", "markersize": 3} if name.startswith("val_") else {}
        for place, (summary, label) in enumerate(zip(summaries, labels, strict=True)):
            some |= line(panel, summary, name, label, axis, color=COLORS[place % len(COLORS)], **style)
        finish(panel, text, title)
    return save(figure, path) if some else None


def _loss(axes: Axes, summary: Summary) -> bool:
    some = line(axes, summary, "loss", "training, one batch", **TRAINING)
    some |= line(axes, summary, "loss_smooth", "training, smoothed", color=INK)
    some |= line(axes, summary, "val_loss", "validation", **HELD_OUT)
    finish(axes, "loss (nats per token)" if summary.loss_per_token else "loss of the objective")
    return some


def _bits_per_byte(axes: Axes, summary: Summary) -> bool:
    some = line(axes, summary, "val_bpb", "model", **HELD_OUT)
    styles = ("--", ":", "-.")
    for place, (name, value) in enumerate(sorted(summary.baselines().items()) if some else ()):
        # in the legend: labels on the lines overlap if two compressors are equally good
        axes.axhline(value, color=GREY, linewidth=1, linestyle=styles[place % 3], label=f"{name} {value:.3f}")
    finish(axes, "validation bits per byte")
    return some


def _reward(axes: Axes, summary: Summary) -> bool:
    some = line(axes, summary, "reward", "sampled, training prompts", **TRAINING)
    some |= line(axes, summary, "val_reward", "greedy, held-out prompts", **HELD_OUT)
    finish(axes, "reward")
    return some


def _preference(axes: Axes, summary: Summary) -> bool:
    axes.set_ylim(0, 1.05)
    return _pairs(axes, summary, "pref_acc", "share of pairs whose chosen answer gets the larger reward")


def _margin(axes: Axes, summary: Summary) -> bool:
    return _pairs(axes, summary, "margin", "margin: reward of the chosen answer minus that of the rejected one")


def _pairs(axes: Axes, summary: Summary, name: str, title: str) -> bool:
    some = line(axes, summary, name, "training", color=PALE)
    some |= line(axes, summary, f"val_{name}", "held out", **HELD_OUT)
    finish(axes, title)
    return some


def _learning_rate(axes: Axes, summary: Summary) -> bool:
    """One line per parameter group; on a log axis if the smaller would otherwise be flat."""
    found = {name for row in summary.rows for name in row if name.startswith("lr/")}
    names = sorted(found, key=lambda name: -(summary.largest(name) or 0)) or ["lr"]
    some = False
    for place, name in enumerate(names):
        some |= line(axes, summary, name, name.removeprefix("lr/"), color=COLORS[place % len(COLORS)])
    peaks = [peak for name in names if (peak := summary.largest(name))]
    if peaks and max(peaks) > 20 * min(peaks):
        axes.set_yscale("log")
    finish(axes, "learning rate")
    return some


def _grad_norm(axes: Axes, summary: Summary) -> bool:
    some = line(axes, summary, "grad_norm", "gradient norm", color=INK)
    values = [row["grad_norm"] for row in summary.rows_with("grad_norm")]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    finish(axes, "gradient norm, before clipping")
    return some


def _divergence(axes: Axes, summary: Summary) -> bool:
    some = line(axes, summary, "kl", "exact", color=INK)
    some |= line(axes, summary, "kl_nll", "difference of the losses", color=ACCENT)
    finish(axes, "KL to the reference (nats per token)")
    return some


def _throughput(axes: Axes, summary: Summary) -> bool:
    some = line(axes, summary, "time/tok_per_s", "tokens per second", color=INK)
    axes.set_ylim(bottom=0)
    finish(axes, "tokens per second")
    return some


def line(axes: Axes, summary: Summary, name: str, label: str, axis: str = "step", **style: Any) -> bool:
    """Plot one metric against an axis; return False if it was never recorded.

    A row without the axis (a validation's) has the position of the row before it.
    """
    xs, ys, last = [], [], None
    for row in summary.rows:
        place = row.get(axis, row.get(OLDER_NAMES.get(axis, axis)))
        last = place if is_number(place) else last
        if last is not None and is_number(row.get(name)):
            xs.append(last)
            ys.append(row[name])
    if not xs:
        return False
    if len(xs) == 1:
        style.setdefault("marker", "o")
    axes.plot(xs, ys, label=label, **{"linewidth": 1.6, **style})
    return True


def new_figure(panels: int = 1) -> tuple[Figure, Any]:
    """Return a figure without pyplot, so that there is no global state and nothing to close."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.4 * panels), dpi=120, layout="constrained")
    return figure, figure.subplots(panels)


def finish(axes: Axes, title: str, axis: str = "step") -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(axis, fontsize=9)
    axes.tick_params(labelsize=8)
    if axes.get_yscale() == "linear" and max(map(abs, axes.get_ylim())) >= 1e4:
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(True, linewidth=0.5, color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(frameon=False, fontsize=8)


def save(figure: Figure, path: Path) -> Path:
    with storage(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    return path
