"""The facts of a run, collected from its directory. What is missing or damaged is a gap, never a crash."""

from __future__ import annotations

import json
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
from bessemer.config.bounded import read_json
from bessemer.config.recipes import saved_tree
from bessemer.console import compact, counted, duration, size
from bessemer.errors import BessemerError, InputError
from bessemer.job import RunDirectory, RunLock
from bessemer.job.trust import check_links
from bessemer.report.metrics import MetricsFile

Row = dict[str, Any]
FACTS = "facts.json"
REFUSED = "refused"


RESULTS = (
    ("val_reward", "reward", "reward of greedy answers to held-out prompts"),
    ("val_pref_acc", "pref. acc.", "share of held-out pairs whose chosen answer scores higher"),
    ("val_bpb", "bpb", "bits per byte of held-out text"),
    ("val_loss", "val. loss", "loss on held-out data"),
    ("reward", "reward, train", "reward of sampled answers to training prompts; nothing was held out"),
    ("pref_acc", "pref. acc., train", "share of training pairs ranked right; nothing was held out"),
)
"""(metric, unit, what it is): the first that a run has is its headline. The training loss is never one."""


class Headline(NamedTuple):
    """The number a run is judged by."""

    metric: str
    value: float
    unit: str
    meaning: str
    error: float | None = None  # its standard error, where it was recorded


def headline(last: Callable[[str], Any]) -> Headline | None:
    """Return the headline of a run whose newest value of each metric `last` knows; None while there is none."""
    for metric, unit, meaning in RESULTS:
        if is_number(value := last(metric)):
            error = last(f"{metric}_se")
            return Headline(metric, value, unit, meaning, error if is_number(error) else None)
    return None


@dataclass
class Summary:
    """What the files of a run say. `problems` names files that could not be read."""

    run: RunDirectory
    status: Row = field(default_factory=dict)
    config: Row = field(default_factory=dict)  # flat: "training.steps" → value
    provenance: Row = field(default_factory=dict)  # the same keys → origin, where it is not the default
    derived: Row = field(default_factory=dict)
    facts: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)  # metrics.jsonl, in order
    samples: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    branches: list[Row] = field(default_factory=list)  # steps after which other settings hold
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """As in status.json, except that a running run whose lock nobody holds has crashed."""
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
        """The recipe the run was started with, from the origins of its settings; None where there was none."""
        return recipe_of(self.provenance)

    @property
    def loss_per_token(self) -> bool:
        """Whether the loss is in nats per token: not where pairs or rewards are what is learnt from."""
        return not self.rows_with("pref_acc") and not self.rows_with("reward")

    @property
    def age(self) -> float | None:
        """Seconds since the run's last sign of life."""
        beat = self.status.get("heartbeat")
        return max(0.0, time.time() - float(beat)) if is_number(beat) else None

    @property
    def training_seconds(self) -> float | None:
        return training_seconds(self.rows)

    def last(self, name: str) -> Any:
        """The newest recorded value of a metric."""
        return next((row[name] for row in reversed(self.rows_with(name))), None)

    def best(self, name: str) -> tuple[float, int] | None:
        """(smallest value, its step)."""
        found = [(row[name], int(row["step"])) for row in self.rows_with(name) if is_number(row.get("step"))]
        return min(found) if found else None

    def typical(self, name: str) -> float | None:
        """The median over all reports but the first, which holds compilation."""
        values = [row[name] for row in self.rows_with(name)]
        return statistics.median(values[1:] or values) if values else None

    def largest(self, name: str) -> float | None:
        return max((row[name] for row in self.rows_with(name)), default=None)

    def rows_with(self, name: str) -> list[Row]:
        """Rows in which `name` is a number."""
        return [row for row in self.rows if is_number(row.get(name))]

    @property
    def held_out(self) -> Row:
        """Fingerprint and size of the validation set, as the run recorded them."""
        found = self.facts.get("validation")
        return dict(found) if isinstance(found, Mapping) else {}

    def baselines(self) -> dict[str, float]:
        """Bits per byte of compressors on the validation text, where they were measured."""
        found = self.facts.get("baselines")
        return {k: v for k, v in found.items() if is_number(v)} if isinstance(found, Mapping) else {}


def summarise(run: RunDirectory) -> Summary:
    """Read everything once; of a run with links that leave it, nothing."""
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


def recipe_of(provenance: Mapping[str, Any]) -> str | None:
    """Return the recipe that settings with these origins came from. One that extends others leaves their names too."""
    origins = (Origin.parse(str(origin)) for origin in provenance.values())
    named = list(dict.fromkeys(origin.detail for origin in origins if origin.is_recipe))
    own = [name for name in named if name not in _shipped()]  # a shipped one extends shipped ones only
    inherited = {parent for name in named for parent in _parents(name)}
    return next((name for name in reversed(own or named) if name not in inherited), None)


@cache
def _shipped() -> frozenset[str]:
    return frozenset(recipe_names())


@cache
def _parents(name: str) -> frozenset[str]:
    """The recipes that a shipped one extends."""
    layers = read_recipe(name).layers[:-1] if name in _shipped() else []
    return frozenset(layer.origin.detail for layer in layers)


def training_seconds(rows: Sequence[Row]) -> float | None:
    """Return the seconds of all steps, warm-up included; None if no row is timed.

    A row's step time holds for the steps since the timed row before it. (`time/total` leaves the first ten steps of
    every process out, so it is 0 in a short run.)
    """
    timed = [row for row in rows if is_number(row.get("time/step_ms")) and is_number(row.get("step"))]
    steps = [0, *(row["step"] for row in timed)]
    return (
        sum(row["time/step_ms"] * (row["step"] - before) for row, before in zip(timed, steps, strict=False))
        / 1e3
        if timed
        else None
    )


def disk_size(path: Path) -> int:
    """Bytes of a file, or of all files below a directory; one that vanishes meanwhile counts 0."""
    total = 0
    for file in (path, *path.rglob("*")):
        try:
            total += file.lstat().st_size if not file.is_dir() else 0
        except OSError:
            continue
    return total


def is_number(value: Any) -> TypeGuard[float]:
    """A finite number that a float can hold; JSON's integers have no end."""
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


# Values as words for a report; what was never recorded says so.


MISSING = "not recorded"


def statistic(key: str, value: Any) -> str:
    if is_number(value) and key.endswith("_share"):
        return f"{value:.2%}"
    return count(value) if is_number(value) or value is None else show(value)


def show(value: Any) -> str:
    """As one would type it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def show_or_missing(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {show(inner)}" for key, inner in value.items())
    return MISSING if value is None else show(value)


def decimal(value: Any) -> str:
    return f"{value:.4f}" if is_number(value) else MISSING


def count(value: Any) -> str:
    if not is_number(value):
        return MISSING
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.4g}"


def short(value: Any) -> str:
    return compact(value) if is_number(value) else MISSING


def percent(value: Any) -> str:
    return f"{value:.1%}" if is_number(value) else MISSING


def share_of_100(value: Any) -> str:
    return percent(value / 100) if is_number(value) else MISSING


def clock(value: Any) -> str:
    return duration(value) if is_number(value) else MISSING


def gib(value: Any) -> str:
    return f"{value:.2f} GiB" if is_number(value) else MISSING


def longest_run(text: str) -> int:
    """Length of the longest run of backticks, so that a fence can be longer."""
    longest = current = 0
    for character in text:
        current = current + 1 if character == "`" else 0
        longest = max(longest, current)
    return longest


# What a run was judged on: whether it is enough, and whether it is the same for several runs.


FEW_BYTES, FEW_DOCUMENTS = 32_768, 10
"""Below either a held-out set says little: bits per byte differ by several percent between such sets."""


def too_small(facts: Mapping[str, Any], error: float | None = None) -> str | None:
    """A warning if the held-out set, as `a run's facts` has it, is too small to judge a model by."""
    size, documents = facts.get("bytes"), facts.get("documents")
    if size is None or documents is None or (size >= FEW_BYTES and documents >= FEW_DOCUMENTS):
        return None
    known = f" (standard error of bits per byte: {error:.3f})" if error is not None else ""
    return (
        f"the held-out set has only {counted(documents, 'document')} in {size / 1000:.1f} KB, too little to judge a "
        f"model by{known}; hold out more with data.val_fraction, or give more data"
    )


def held_out_remarks(summaries: Sequence[Summary], labels: Sequence[str]) -> list[str]:
    """Why bits per byte cannot be compared, where the runs were not judged on the same held-out set."""
    judged = [(label, s) for label, s in zip(labels, summaries, strict=True) if s.last("val_bpb") is not None]
    sets = {label: summary.held_out for label, summary in judged}
    prints = {found.get("fingerprint") for found in sets.values()}
    if len(judged) < 2 or (len(prints) == 1 and None not in prints):
        return []
    sizes = "; ".join(f"{label}: {_set_size(found)}" for label, found in sets.items())
    reason = "Some runs do not say on what they were judged" if None in prints else "The held-out sets differ"
    names = " ".join(str(summary.run.word) for _, summary in judged)
    return [
        "",
        f"{reason}, so validation loss and bits per byte above do not rank these runs ({sizes}).",
        f"To judge all on the same text: bessemer compare {names} --common",
    ]


def _set_size(found: Row) -> str:
    if "fingerprint" not in found:
        return "not recorded"
    text = f", {size(found['bytes'])}" if "bytes" in found else ""
    return f"{counted(int(found['sequences']), 'sequence')}{text}"


# What general compressors make of the same text: a model that needs more bits than xz has learnt little.
#
# bits per byte = 8 · compressed bytes / bytes


GZIP = 16 + zlib.MAX_WBITS  # the gzip container, as `gzip -9` writes it (without a file name)


def baselines(data: bytes | Iterable[bytes]) -> dict[str, float]:
    """Bits per byte of `gzip -9` ("gzip") and `xz -9e` ("xz") on bytes, or on pieces of them; {} for none."""
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
