"""The facts of a run, read from its directory, and whether it is going well, in one sentence.

Missing or damaged files are gaps, never a crash.
"""

from __future__ import annotations

import lzma
import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from bessemer.config import Origin, read_recipe, recipe_names
from bessemer.config.aliases import current_recipe
from bessemer.config.bounded import read_json
from bessemer.config.recipes import saved_tree
from bessemer.console import counted, size
from bessemer.errors import BessemerError, InputError
from bessemer.job import RunDirectory, RunLock
from bessemer.job.trust import check_links
from bessemer.report.metrics import MetricsFile

Row = dict[str, Any]
FACTS = "facts.json"
ALL_STEPS = "time/all_steps"
OLDER_NAMES = {ALL_STEPS: "time/total"}  # in rows from before ALL_STEPS; without the first ten steps of each process
PHASES = "phases"  # folder of the runs of a job of phases
REFUSED = "refused"
RESULTS = (
    ("val_reward", "reward", "reward of greedy answers to held-out prompts"),
    ("val_pref_acc", "pref. acc.", "share of held-out pairs whose chosen answer scores higher"),
    ("val_bpb", "bpb", "bits per byte of held-out text"),
    ("val_loss", "val. loss", "loss on held-out data"),
    ("reward", "reward, train", "reward of sampled answers to training prompts; nothing was held out"),
    ("pref_acc", "pref. acc., train", "share of training pairs ranked correctly; nothing was held out"),
)
"""(metric, unit, meaning): the first that a run has is its headline. The training loss never is."""


class Headline(NamedTuple):
    """The main result of a run."""

    metric: str
    value: float
    unit: str
    meaning: str
    error: float | None = None  # standard error, if recorded


def headline(last: Callable[[str], Any]) -> Headline | None:
    """Return the headline of a run, or None. `last` returns the newest value of a metric."""
    for metric, unit, meaning in RESULTS:
        if is_number(value := last(metric)):
            error = last(f"{metric}_se")
            return Headline(metric, value, unit, meaning, error if is_number(error) else None)
    return None


@dataclass
class Summary:
    """The contents of a run directory. `problems` names files that could not be read."""

    run: RunDirectory
    status: Row = field(default_factory=dict)
    config: Row = field(default_factory=dict)  # flat: "training.steps" → value
    provenance: Row = field(default_factory=dict)  # the same keys → origin, where it is not the default
    derived: Row = field(default_factory=dict)
    facts: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)  # metrics.jsonl, in order
    samples: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    branches: list[Row] = field(default_factory=list)  # steps at which settings changed
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """The state in status.json; a running run whose lock nobody holds has crashed."""
        state = str(self.status.get("state", "unknown"))
        return "crashed" if state == "running" and RunLock.owner(self.run) is None else state

    @property
    def step(self) -> int | None:
        known = [step for step in (self.status.get("step"), self.last("step")) if is_number(step)]
        return int(max(known)) if known else None

    @property
    def total_steps(self) -> int | None:
        total = self.facts.get("steps", self.config.get("training.steps"))
        return int(total) if is_number(total) else None

    @property
    def recipe(self) -> str | None:
        """The recipe the run was started with, from the origins of its settings; None if there was none."""
        return recipe_of(self.provenance)

    @property
    def loss_per_token(self) -> bool:
        """Whether the loss is in nats per token: not when training on pairs or rewards."""
        return not self.rows_with("pref_acc") and not self.rows_with("reward")

    @property
    def age(self) -> float | None:
        """Seconds since the last heartbeat."""
        beat = self.status.get("heartbeat")
        return max(0.0, time.time() - float(beat)) if is_number(beat) else None

    def last(self, name: str) -> Any:
        """Return the newest recorded value of a metric."""
        return next((row[name] for row in reversed(self.rows_with(name))), None)

    def best(self, name: str) -> tuple[float, int] | None:
        """Return the smallest value and its step."""
        found = [(row[name], int(row["step"])) for row in self.rows_with(name) if is_number(row.get("step"))]
        return min(found) if found else None

    def typical(self, name: str) -> float | None:
        """Return the median of all rows but the first, which includes compilation."""
        values = [row[name] for row in self.rows_with(name)]
        return statistics.median(values[1:] or values) if values else None

    def largest(self, name: str) -> float | None:
        return max((row[name] for row in self.rows_with(name)), default=None)

    def rows_with(self, name: str) -> list[Row]:
        """Return the rows in which `name` is a number."""
        return [row for row in self.rows if is_number(row.get(name))]

    @property
    def held_out(self) -> Row:
        """The recorded fingerprint and size of the validation set."""
        found = self.facts.get("validation")
        return dict(found) if isinstance(found, Mapping) else {}

    def baselines(self) -> dict[str, float]:
        """Return bits per byte of compressors on the validation text, if measured."""
        found = self.facts.get("baselines")
        return {k: v for k, v in found.items() if is_number(v)} if isinstance(found, Mapping) else {}


def summarize(run: RunDirectory) -> Summary:
    """Read a run directory. If it has links that lead outside, nothing is read."""
    summary = Summary(run)
    try:
        check_links(run.path, run=run)
    except InputError as error:
        summary.status = {"state": REFUSED}
        summary.problems.append(str(error))
        return summary
    summary.status = _read(run.status, summary.problems)
    summary.derived = _read(run.derived, summary.problems)
    summary.facts = _read(run.path / FACTS, summary.problems)
    _read_config(summary)
    summary.branches = _read_list(run.branches, summary.problems)
    summary.rows = _read_rows(run.metrics, summary.problems)
    summary.samples = _read_rows(run.samples, summary.problems)
    files = sorted(run.eval.glob("*.json")) if run.eval.is_dir() else []
    summary.evaluations = [found for file in files if (found := _read(file, summary.problems))]
    return summary


def has_phases(run: RunDirectory) -> bool:
    return (run.path / PHASES).is_dir()


def phases_of(run: RunDirectory) -> list[RunDirectory]:
    """Return the runs of the phases that were started, in order."""
    there = {path for path in (run.path / PHASES).iterdir() if (path / "config.yaml").is_file()}
    named = list(saved_tree(run.config).get("phases") or {}) if run.config.is_file() else []
    return [RunDirectory(path) for name in named if (path := run.path / PHASES / name) in there]


def recipe_of(provenance: Mapping[str, Any]) -> str | None:
    """Return the recipe that settings with these origins came from, not those that it extends."""
    origins = (Origin.parse(str(origin)) for origin in provenance.values())
    named = list(dict.fromkeys(current_recipe(origin.detail) for origin in origins if origin.is_recipe))
    own = [name for name in named if name not in _shipped()]  # a shipped one extends shipped ones only
    inherited = {parent for name in named for parent in _parents(name)}
    return next((name for name in reversed(own or named) if name not in inherited), None)


@cache
def _shipped() -> frozenset[str]:
    return frozenset(recipe_names())


@cache
def _parents(name: str) -> frozenset[str]:
    """Return the recipes that a shipped one extends."""
    layers = read_recipe(name).layers[:-1] if name in _shipped() else []
    return frozenset(layer.origin.detail for layer in layers)


def training_seconds(rows: Sequence[Row]) -> float | None:
    """Return the seconds of all steps, warm-up included; None if no row is timed.

    Runs from before `time/all_steps`: a row's step time holds for the steps since the timed row before it.
    """
    recorded = next((row[ALL_STEPS] for row in reversed(rows) if is_number(row.get(ALL_STEPS))), None)
    if recorded is not None:
        return float(recorded)
    timed = [row for row in rows if is_number(row.get("time/step_ms")) and is_number(row.get("step"))]
    if not timed:
        return None
    steps = [0, *(row["step"] for row in timed)]
    return sum(row["time/step_ms"] * (row["step"] - before) for row, before in zip(timed, steps, strict=False)) / 1e3


def disk_size(path: Path) -> int:
    """Return the bytes of a file or of all files below a directory; one that vanishes meanwhile counts 0."""
    total = 0
    for file in (path, *path.rglob("*")):
        try:
            total += file.lstat().st_size if not file.is_dir() else 0
        except OSError:
            continue
    return total


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number that fits a float; JSON integers can be arbitrarily large."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _read(path: Path, problems: list[str]) -> Row:
    found = _read_json(path, problems)
    return found if isinstance(found, dict) else {}


def _read_list(path: Path, problems: list[str]) -> list[Row]:
    found = _read_json(path, problems)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _read_json(path: Path, problems: list[str]) -> Any:
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} could not be read ({error}).")
        return None


def _read_rows(path: Path, problems: list[str]) -> list[Row]:
    file = MetricsFile(path)
    try:
        return file.rows()
    except BessemerError as error:
        problems.append(str(error))
        return []
    finally:
        problems.extend(file.notes)


def _read_config(summary: Summary) -> None:
    path = summary.run.config
    if not path.is_file():
        return
    try:
        tree = saved_tree(path)
    except InputError as error:
        summary.problems.append(f"{path.name} could not be read ({error}).")
        return
    origins = tree.pop("provenance", None)
    summary.provenance = dict(origins) if isinstance(origins, dict) else {}
    summary.config = flatten_settings(tree)


def flatten_settings(tree: Mapping[Any, Any], prefix: str = "") -> Row:
    """{"training": {"steps": 10}} → {"training.steps": 10}."""
    flat: Row = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


# The held-out set


FEW_BYTES, FEW_DOCUMENTS = 32_768, 10
"""Below either, bits per byte differ by several percent between held-out sets."""


def too_small(facts: Mapping[str, Any], error: float | None = None) -> str | None:
    """Return a warning if the held-out set, as in a run's facts, is too small to judge a model by."""
    size, documents = facts.get("bytes"), facts.get("documents")
    if size is None or documents is None or (size >= FEW_BYTES and documents >= FEW_DOCUMENTS):
        return None
    known = f" (standard error of bits per byte: {error:.3f})" if error is not None else ""
    return (
        f"the held-out set has only {counted(documents, 'document')} in {size / 1000:.1f} KB, too little to judge a "
        f"model by{known}; hold out more with data.val_fraction, or use more data"
    )


def held_out_remarks(summaries: Sequence[Summary], labels: Sequence[str]) -> list[str]:
    """Return lines that say why bits per byte do not compare, if the runs have different held-out sets."""
    judged = [(label, s) for label, s in zip(labels, summaries, strict=True) if s.last("val_bpb") is not None]
    sets = {label: summary.held_out for label, summary in judged}
    prints = {found.get("fingerprint") for found in sets.values()}
    if len(judged) < 2 or (len(prints) == 1 and None not in prints):
        return []
    sizes = "; ".join(f"{label}: {_set_size(found)}" for label, found in sets.items())
    reason = "Some runs did not record their held-out set" if None in prints else "The held-out sets differ"
    names = " ".join(str(summary.run.word) for _, summary in judged)
    return [
        "",
        f"{reason}, so validation loss and bits per byte above do not rank these runs ({sizes}).",
        f"To evaluate all on the same text: bessemer compare {names} --common",
    ]


def _set_size(found: Row) -> str:
    if "fingerprint" not in found:
        return "not recorded"
    text = f", {size(found['bytes'])}" if "bytes" in found else ""
    return f"{counted(int(found['sequences']), 'sequence')}{text}"


GZIP = 16 + zlib.MAX_WBITS  # the gzip container, as `gzip -9` writes it (without a file name)


def baselines(data: bytes | Iterable[bytes]) -> dict[str, float]:
    """Return bits per byte of `gzip -9` ("gzip") and `xz -9e` ("xz") on bytes or pieces of them; {} if there are none.

    A model that needs more bits than xz has learned little.
    """
    deflate = zlib.compressobj(9, zlib.DEFLATED, GZIP, 9)
    xz = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
    total = gzip_size = xz_size = 0
    for piece in [data] if isinstance(data, bytes) else data:
        total += len(piece)
        gzip_size += len(deflate.compress(piece))
        xz_size += len(xz.compress(piece))
    if total == 0:
        return {}
    gzip_size += len(deflate.flush())
    xz_size += len(xz.flush())
    return {"gzip": 8 * gzip_size / total, "xz": 8 * xz_size / total}


# --- whether a run is going well ---


Points = Sequence[tuple[float, float]]
"""(step, value) of one metric, oldest first."""

JUDGED = (
    ("val_reward", "held-out reward", True),
    ("val_pref_acc", "held-out accuracy", True),
    ("val_bpb", "bits per byte", False),
    ("val_loss", "validation loss", False),
)
"""(metric, its name in a sentence, whether higher is better): the first that a run has is judged."""

LOST = 0.1  # share of the whole improvement that may be lost again
WORSE = 0.02  # share by which a loss may be above its lowest value
WAITING = 20.0  # percent of the time

NOTHING_TO_LEARN = (
    "In every group all answers had the same reward, so there was nothing to learn: compare answers of the model with "
    "what grpo.rewards expects."
)


def nothing_to_learn(flat_groups: Sequence[float]) -> bool:
    """Return whether no group of a run ever had two rewards. flat_groups: the metric of that name."""
    return bool(flat_groups) and min(flat_groups) >= 1


@dataclass(frozen=True)
class Health:
    """`good` is False if something should be looked at; `words` are sentences."""

    good: bool
    words: str


def judge_health(points: Callable[[str], Points]) -> Health | None:
    """Judge a run by its metrics; None if it has reported nothing yet. `points` returns those of one metric."""
    trend = _trend(points)
    troubles = _troubles(points)
    if trend is None:
        return Health(False, " ".join(troubles)) if troubles else None
    good, words = trend
    return Health(good and not troubles, " ".join([words, *troubles]))


def _trend(points: Callable[[str], Points]) -> tuple[bool, str] | None:
    for metric, name, higher in JUDGED:
        found = points(metric)
        if len(found) > 1:
            return _held_out(name, found, higher)
    sampled = points("reward")
    if len(sampled) > 1:
        first, last = sampled[0][1], sampled[-1][1]
        words = (
            f"The reward of sampled answers was {first:.3g} at the start and is {last:.3g}; nothing is validated yet."
        )
        return last > first, words
    losses = points("loss_smooth")
    if len(losses) < 2:
        return None
    first, last = losses[0][1], losses[-1][1]
    if last > first:
        return False, f"The training loss has risen from {first:.4g} to {last:.4g}."
    return True, f"The training loss fell from {first:.4g} to {last:.4g}; nothing is validated yet."


def _held_out(name: str, found: Points, higher: bool) -> tuple[bool, str]:
    sign = -1.0 if higher else 1.0
    first, (step, last) = found[0][1], found[-1]
    at, best = min(found, key=lambda point: sign * point[1])
    gained, lost = sign * (first - best), sign * (last - best)
    extreme = "highest" if higher else "lowest"
    if gained <= 0:
        return False, f"No improvement yet: {name} was {first:.4g} at the start and is {last:.4g}."
    if lost > LOST * gained or (not higher and lost > WORSE * abs(best)):
        return False, f"Worse since step {at:.0f}: {name} is {last:.4g}, {extreme} {best:.4g}. The model may overfit."
    if lost > 0:
        return True, f"Level: {name} is {last:.4g}, {extreme} {best:.4g} at step {at:.0f}."
    return True, f"Improving: {name} went from {first:.4g} to {last:.4g}, its {extreme} value, at step {step:.0f}."


def _troubles(points: Callable[[str], Points]) -> list[str]:
    found = []
    if skipped := _newest(points("skipped_steps")):
        found.append(f"{counted(skipped, 'step')} skipped: the gradient was NaN or infinite.")
    if rollbacks := _newest(points("rollbacks")):
        found.append(f"Rolled back to a checkpoint {counted(rollbacks, 'time')}.")
    if nothing_to_learn([value for _, value in points("flat_groups")]):
        found.append(NOTHING_TO_LEARN)
    waits = [value for _, value in points("time/data_wait_pct")]
    if len(waits) > 1 and (typical := statistics.median(waits)) > WAITING:
        found.append(f"{typical:.0f}% of the time is spent waiting for data.")
    return found


def _newest(found: Points) -> int:
    return int(found[-1][1]) if found else 0
