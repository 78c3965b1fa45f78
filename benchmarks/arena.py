"""Train contenders on one stream with one budget and several seeds, and say which ends lower and how surely.

    python benchmarks/arena.py DIR --tokens 2e6 --seeds 0,1,2 --set training.dataset=texts model.depth=4 \\
        --contender base --contender warmer optimization.matrix_lr=0.04
    python benchmarks/arena.py DIR --tokens 39.3e6 --seeds 0,1,2 --stream DATA_DIR REFERENCE_DIR --depth 8 \\
        --contender ours --curve nanochat REFERENCE_DIR/nanochat_d8_s0_lr04.json

A contender is `NAME [RECIPE] [key=value …]`; what --recipe and --set give holds for all. --file reads more of them
from YAML: `NAME: {recipe: RECIPE, key: value, …}` or `NAME: {curve: [FILE, …]}`. The budget is the same for all:
--tokens, --flops, or --seconds of training, for which each contender's pace is measured first. Runs are those of
`bessemer train`, each in a process of its own, in DIR/runs. With the same command again, finished runs are read,
interrupted ones resume, and contenders and seeds may be added. --time-limit stops in time, with a checkpoint (exit 75).

With --stream, DATA_DIR (train-*.parquet, val-*.parquet) and REFERENCE_DIR (tokenizer.json) are those of parity.py, and
so are windows, their order, and the settings of nanochat's stored curves, which can then stand beside: --curve.

One JSON line per run, then a table: mean, spread, and the difference from the first contender with its confidence.
It is paired by seed where both share two seeds; otherwise every run is taken to have the deviation --noise. Curves of
another system are never paired: their seeds draw other weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import parity
from stream import FACTS, check, described

from bessemer.config.recipes import read_yaml
from bessemer.console import table
from bessemer.data.rows.rows import TokenStore
from bessemer.errors import BessemerError, InputError, Stopped, TrainingError
from bessemer.job import RunDirectory, check_run_name
from bessemer.report.summary import Summary, summarize, training_seconds
from bessemer.report.tables import NOISE, Results, judge, mean_and_spread
from bessemer.storage.files import atomic_write

FAILED, STOPPED = 3, 75  # exit codes of `bessemer train`
PACE_STEPS = 30
BUDGETS = ("tokens", "flops", "seconds")
SHARED = ("seed", "training.dataset", "training.validation", "training.validation_steps", "architecture.block_size")
HORIZONS = ("training.steps", "training.tokens", "training.flops", "training.epochs", "training.ratio")
DIAL = "training.ratio=-1"


@dataclass(frozen=True)
class Contender:
    """Something that is trained by a recipe and settings, or read from stored `curves`."""

    name: str
    recipe: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    curves: tuple[Path, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change under a name."""
        return {"recipe": self.recipe, "settings": dict(self.settings), "curves": [str(path) for path in self.curves]}


# -- reading the command line ------------------------------------------------------------------------------------


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="holds the runs and what was agreed")
    parser.add_argument(
        "--contender", nargs="+", action="append", default=[], metavar=("NAME", "RECIPE|key=value"), help="repeatable"
    )
    parser.add_argument(
        "--curve", nargs="+", action="append", default=[], metavar=("NAME", "FILE"), help="stored curves; repeatable"
    )
    parser.add_argument("--file", type=Path, help="YAML with contenders")
    parser.add_argument("--recipe", default="pretrain", help="recipe of contenders without their own")
    parser.add_argument("--set", nargs="+", default=[], action="extend", help="settings of all contenders, key=value")
    parser.add_argument("--tokens", type=float, help="budget of each run in tokens")
    parser.add_argument("--flops", type=float, help="budget of each run in training FLOPs")
    parser.add_argument("--seconds", type=float, help="budget of each run in seconds of steps, at its measured pace")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--stream", nargs=2, type=Path, metavar=("DATA", "REFERENCE"), help="the reference's windows")
    parser.add_argument("--depth", type=int, default=8, choices=tuple(parity.SEEDS), help="shape with --stream")
    parser.add_argument("--any-stream", action="store_true", help="with --stream: any parquet files and tokenizer")
    parser.add_argument("--noise", type=float, default=NOISE, help="assumed deviation between unpaired runs")
    parser.add_argument("--time-limit", type=float, help="stop all work after so many seconds, with a checkpoint")
    parser.add_argument("--json", action="store_true", help="no table: JSON lines alone on stdout")
    return parser.parse_args(given)


def settings_of(words: Sequence[str], where: str) -> dict[str, str]:
    """key=value words by dotted key."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"{where}: '{word}' is not a setting; write key=value.")
        found[key.strip().replace("/", ".")] = value
    return found


def contenders_of(args: argparse.Namespace) -> list[Contender]:
    """Return the contenders of the command line and of --file, checked."""
    found = []
    for name, *words in args.contender:
        recipes = [word for word in words if "=" not in word]
        if len(recipes) > 1:
            raise InputError(f"--contender {name}: two recipes ({', '.join(recipes)}); settings are key=value.")
        plain = settings_of([word for word in words if "=" in word], f"--contender {name}")
        found.append(Contender(name, recipes[0] if recipes else None, plain))
    if args.file is not None:
        found += _of_file(args.file)
    for name, *files in args.curve:
        if not files:
            raise InputError(f"--curve {name}: give at least one file of a stored curve.")
        found.append(Contender(name, curves=tuple(map(Path, files))))
    names = [one.name for one in found]
    if len(found) < 2 or not any(not one.curves for one in found):
        raise InputError("give at least two contenders, one of them to train: --contender NAME [key=value …].")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"two contenders are called {', '.join(twice)}; give each a name of its own.")
    for one in found:
        check_run_name(one.name)
        if len({path.resolve() for path in one.curves}) < len(one.curves):
            raise InputError(f"{one.name}: a stored curve is given twice, which would count as two runs.")
        _check_comparable(one, args)
    return found


def _of_file(path: Path) -> list[Contender]:
    found = []
    for name, given in read_yaml(path, "contenders").items():
        if not isinstance(given, Mapping) and given is not None:
            raise InputError(f"{path}: '{name}' must be a mapping of settings, such as {{model.depth: 8}}.")
        settings = {str(key): value for key, value in (given or {}).items()}
        recipe, curves = settings.pop("recipe", None), settings.pop("curve", None)
        files = [curves] if isinstance(curves, str) else list(curves or [])
        if files and (settings or recipe):
            raise InputError(f"{path}: '{name}' is a stored curve, which takes neither a recipe nor settings.")
        words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
        places = tuple(path.parent / file for file in files)
        found.append(Contender(str(name), recipe, settings_of(words, f"{path}: {name}"), places))
    return found


def _check_comparable(one: Contender, args: argparse.Namespace) -> None:
    for key in one.settings:
        if key in HORIZONS and f"{key}={one.settings[key]}" != DIAL:
            raise InputError(f"{one.name}: {key} is the budget, the same for all: --tokens, --flops or --seconds.")
        if key in SHARED or key.startswith("data."):
            raise InputError(f"{one.name}: {key} must be the same for all contenders; give it with --set.")
    if one.curves and (args.stream is None or args.tokens is None):
        raise InputError(f"{one.name}: a stored curve is of one stream and so many tokens; give --stream and --tokens.")
    if one.recipe is not None and args.stream is not None:
        raise InputError(f"{one.name}: with --stream all have the reference's settings; give settings, not a recipe.")


def budget_of(args: argparse.Namespace) -> tuple[str, float]:
    given = [(name, getattr(args, name)) for name in BUDGETS if getattr(args, name) is not None]
    if len(given) != 1 or given[0][1] <= 0:
        raise InputError("give one budget: --tokens N, --flops N or --seconds N, above 0.")
    return given[0]


def seeds_of(words: str) -> list[int]:
    try:
        seeds = [int(word) for word in words.split(",")]
    except ValueError as error:
        raise InputError(f"--seeds: '{words}' must be whole numbers, such as 0,1,2.") from error
    if len(set(seeds)) < len(seeds):
        raise InputError(f"--seeds: '{words}' names a seed twice; the same run would count twice.")
    return seeds


# -- what was agreed, kept beside the runs -----------------------------------------------------------------------


@dataclass
class Agreement:
    """DIR/arena.json: the budget, the shared settings, each contender's own, and measured paces. It only grows."""

    path: Path
    budget: dict[str, Any]
    shared: dict[str, Any]
    contenders: dict[str, Any] = field(default_factory=dict)
    paces: dict[str, float] = field(default_factory=dict)  # seconds per step

    def enter(self, contenders: Sequence[Contender]) -> None:
        """Raise InputError if anything differs from what the runs of this directory were made with; keep the rest."""
        try:
            saved = json.loads(self.path.read_text()) if self.path.exists() else {}
        except ValueError as error:
            raise InputError(f"{self.path} is damaged ({error}); use another directory, or delete this one.") from error
        for name in ("budget", "shared"):
            if saved and saved[name] != getattr(self, name):
                raise InputError(
                    f"the runs in {self.path.parent} were made with other settings ({name}: {saved[name]}, now "
                    f"{getattr(self, name)}). Use another directory, or the same command."
                )
        known = saved.get("contenders", {})
        for one in contenders:
            if known.get(one.name, one.identity) != one.identity:
                raise InputError(
                    f"contender '{one.name}' was {known[one.name]} in {self.path.parent} and is now {one.identity}. "
                    "Give it another name."
                )
        self.contenders = known | {one.name: one.identity for one in contenders}
        self.paces = saved.get("paces", {})
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = {name: getattr(self, name) for name in ("budget", "shared", "contenders", "paces")}
        atomic_write(self.path, json.dumps(kept, indent=1) + "\n")


# -- runs --------------------------------------------------------------------------------------------------------


class Deadline:
    def __init__(self, seconds: float | None) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        return None if self.end is None else self.end - time.monotonic()


@contextlib.contextmanager
def forwarded(process: subprocess.Popen[str]) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the run, which saves a checkpoint and ends with 75."""
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda number, _: process.send_signal(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def call(words: Sequence[str], log: Path) -> int:
    """Run `bessemer` with these words in a session of its own; what it prints is appended to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "bessemer", *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C reaches it once, through `forwarded`
        )
        with forwarded(process):
            return process.wait()


def train(directory: Path, name: str, recipe: str, settings: Mapping[str, Any], deadline: Deadline) -> Summary:
    """Return the finished (or failed) run `name`, trained now, resumed, or only read."""
    run = RunDirectory(directory / "runs" / name)
    log = directory / "logs" / f"{name}.txt"
    summary = summarize(run) if run.config.is_file() else None
    if summary is not None and summary.state in ("done", "failed") and summary.status.get("exit_code") in (0, FAILED):
        return summary
    if (left := deadline.left) is not None and left < 1:
        raise Stopped(f"the time limit ended before {name}; the same command goes on.")
    limit = [] if left is None else [f"training.time_limit={math.ceil(left)}"]
    if summary is None:
        shutil.rmtree(run.path, ignore_errors=True)  # killed before it wrote its settings
        words = [f"{key}={value}" for key, value in settings.items()]
        code = call(["train", recipe, *words, *limit, "--name", name, "--runs", str(run.path.parent)], log)
    else:
        again = limit or ["training.time_limit=null"]
        code = call(["resume", name, *again, "--runs", str(run.path.parent)], log)
    if code == STOPPED:
        raise Stopped(f"{name} stopped with a checkpoint; the same command goes on.")
    if code not in (0, FAILED):
        last = log.read_text().strip().splitlines()[-1:] or [f"exit code {code}"]
        raise InputError(f"{name} ended with exit code {code}: {last[0]} (all of it: {log})")
    return summarize(run)


def steps_in(seconds: float, pace: float) -> int:
    return max(1, int(seconds / pace))


def pace_of(summary: Summary, name: str) -> float:
    """Return the seconds of one step, from a short run: the mean after its first row, which includes compilation."""
    rows = summary.rows_with("time/step_ms")
    if summary.state != "done" or len(rows) < 2:
        raise TrainingError(f"the pace of {name} could not be measured: its run ended as '{summary.state}'.")
    first, whole = training_seconds(rows[:1]), training_seconds(rows)
    assert first is not None and whole is not None
    return (whole - first) / (rows[-1]["step"] - rows[0]["step"])


def prepare_stream(args: argparse.Namespace) -> Path:
    """Prepare the reference's parquet files as a store, once, and check that they are the reference's."""
    data, reference = args.stream
    store, log = args.directory / "stream", args.directory / "logs" / "stream.txt"
    files = {name: sorted(map(str, data.glob(f"{name}-*.parquet"))) for name in FACTS}
    for name, found in files.items():
        if not found:
            raise InputError(f"no {name}-*.parquet in '{data}'; give the directory of the reference's data.")
    held_out = [word for file in files["val"] for word in ("--val", file)]
    words = [*files["train"], *held_out, "--text-key", "text", "--tokenizer", str(reference)]
    if call(["data", "prepare", *words, "-o", str(store)], log):
        raise InputError(f"the stream could not be prepared: {log.read_text().strip().splitlines()[-1]}")
    if not args.any_stream:
        for name, expected in FACTS.items():
            part = TokenStore(store, name)
            facts = described(part.tokens, int(part.info["documents"]), int(part.info["bytes"])).facts
            check(name, facts, expected)
    return store


def empty_recipe(directory: Path) -> Path:
    """Return a recipe without settings: those of the reference are given as they are, none beside them."""
    path = directory / "reference.yaml"
    atomic_write(path, "title: The settings of the stored curves\n")
    return path


def base_settings(args: argparse.Namespace, own: Mapping[str, str], store: Path | None) -> dict[str, Any]:
    """Return the settings of a contender: what all have, then its own."""
    given = {**settings_of(args.set, "--set"), **own}
    quiet = {"logging.progress": "none", "logging.plots": False, "logging.preview_interval": 0}
    if store is None:
        return {**quiet, **given}
    recipe = parity.recipe_of(parity.shape_of(args.stream[1], args.depth), given)
    tokens = int(given.get("training.batch_size", recipe["training.batch_size"]))
    tokens *= int(given.get("architecture.block_size", recipe["architecture.block_size"]))
    if given.get("optimization.name", "muon") == "muon":
        multiplier = math.sqrt(tokens / parity.REFERENCE_BATCH)
        recipe |= {"optimization.lr_multiplier": multiplier, "optimization.smear_lr": 0.2 / multiplier}
    held_out = parity.VAL_BATCHES * int(given.get("training.batch_size", recipe["training.batch_size"]))
    stream = {"plugins": f"[{Path(__file__).resolve().parent / 'stream_order.py'}]", "job": "stream-order"}
    stream |= {"training.dataset": f"{store.resolve()}:PMD", "data.tokenizer": "auto"}
    stream |= {"training.validation_steps": held_out, "logging.validation_interval": parity.VAL_EVERY}
    return {**quiet, **recipe, **stream, **given}


def with_budget(
    settings: dict[str, Any], budget: tuple[str, float], one: Contender, agreed: Agreement, recipe: str, due: Deadline
) -> dict[str, Any]:
    """Return the settings with the horizon that the budget means for this contender."""
    settings = {key: value for key, value in settings.items() if key not in HORIZONS or f"{key}={value}" == DIAL}
    kind, amount = budget
    if kind != "seconds":
        return settings | {f"training.{kind}": int(amount) if kind == "tokens" else amount}
    if one.name not in agreed.paces:
        short = {**settings, "training.steps": PACE_STEPS, "seed": 0, "training.validation": False}
        short["logging.report_interval"] = 1
        directory = agreed.path.parent
        agreed.paces[one.name] = pace_of(train(directory, f"{one.name}.pace", recipe, short, due), one.name)
        agreed.write()
    return settings | {"training.steps": steps_in(amount, agreed.paces[one.name])}


# -- results -----------------------------------------------------------------------------------------------------


def line_of(one: Contender, seed: int, summary: Summary) -> dict[str, Any]:
    """Return the JSON line of a run."""
    line: dict[str, Any] = {"contender": one.name, "seed": seed, "settings": dict(one.settings)}
    line |= {"run": summary.run.name, "state": summary.state}
    if summary.state != "done":
        return line | {"message": summary.status.get("message", "")}
    if summary.last("val_loss") is None or not summary.held_out:
        raise InputError(f"{summary.run.name} has no validation loss; the contenders are judged by it.")
    seconds = training_seconds(summary.rows)
    tokens, steps = summary.last("tokens"), summary.last("step")
    return line | {
        "val_loss": round(summary.last("val_loss"), 5),
        "val_bpb": summary.last("val_bpb"),
        "steps": steps,
        "tokens": tokens,
        "flops": summary.last("total_training_flops"),
        "train_seconds": seconds and round(seconds, 1),
        "tokens_per_s": tokens and seconds and round(tokens / seconds),
        "held_out": str(summary.held_out.get("fingerprint"))[:16],
        "data": data_of(summary),
    }


def data_of(summary: Summary) -> str | None:
    """Return what names the batches of a run: equal for runs with one seed and batch size on one stream."""
    for path in sorted(summary.run.checkpoints.glob("step_*/meta.json"), reverse=True):
        found = json.loads(path.read_text()).get("data_fingerprint")
        return None if found is None else str(found)[:16]
    return None


def curve_lines(one: Contender, tokens: float) -> list[dict[str, Any]]:
    """Return a line per stored curve; its tokens must be the budget's, to within one step."""
    lines = []
    for path in one.curves:
        try:
            stored = json.loads(path.read_text())
            per_step = stored["batch"] * stored["block_size"]
            steps, final = stored["steps"], parity.curve(stored, "val_loss")[stored["steps"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{one.name}: {path} is not a stored curve ({error!r}).") from error
        if not steps * per_step <= tokens < (steps + 1) * per_step:
            raise InputError(
                f"{one.name}: {path} ends after {steps * per_step:,} tokens, the budget is {tokens:,.0f}. Compare at "
                f"equal tokens: --tokens {steps * per_step}."
            )
        place = {"contender": one.name, "seed": None, "curve": str(path), "state": "done"}
        lines.append(place | {"val_loss": final, "steps": steps, "tokens": steps * per_step})
    return lines


def check_same_data(lines: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError unless all runs were judged on one held-out set and those of a seed trained on one stream."""
    trained = [line for line in lines if line.get("held_out")]
    if len({line["held_out"] for line in trained}) > 1:
        raise InputError("the runs were judged on different held-out text; their tokenizers or data differ.")
    seen: dict[tuple[Any, ...], str] = {}
    for line in trained:
        key = (line["seed"], line["tokens"] // line["steps"])
        if line["data"] and seen.setdefault(key, line["data"]) != line["data"]:
            raise InputError(f"{line['contender']}, seed {line['seed']}: trained on other batches than its rivals.")


def results_of(lines: Sequence[Mapping[str, Any]]) -> Results:
    """Return the final losses by seed; those of curves by file, since their seeds draw other weights."""
    return {line.get("curve", line["seed"]): line["val_loss"] for line in lines}


def verdicts(groups: Mapping[str, Results], noise: float) -> str:
    """Return the table: best first, each against the first contender given."""
    base = next(iter(groups))
    rows = []
    for name in sorted(groups, key=lambda name: mean_and_spread(groups[name])[0]):
        mean, spread = mean_and_spread(groups[name])
        deviation = "" if spread is None else f"{spread:.4f}"
        row = [name, str(len(groups[name])), f"{mean:.4f}", deviation]
        if name != base:
            found = judge(name, groups[name], base, groups[base], noise)
            sure = f"{found.confidence:.1%}, " + ("decided" if found.decided else "undecided")
            row += [f"{found.difference:+.4f} ± {found.error:.4f}", sure, found.method]
        rows.append(row + [""] * (7 - len(row)))
    return table(("contender", "runs", "val. loss", "spread", f"against {base}", "confidence", "by"), rows)


# -- the whole ---------------------------------------------------------------------------------------------------


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    contenders, budget, due = contenders_of(args), budget_of(args), Deadline(args.time_limit)
    seeds = seeds_of(args.seeds)
    stream = None if args.stream is None else [*(str(path.resolve()) for path in args.stream), args.depth]
    shared = {"recipe": args.recipe, "set": settings_of(args.set, "--set"), "stream": stream}
    agreed = Agreement(args.directory / "arena.json", {budget[0]: budget[1]}, shared)
    agreed.enter(contenders)
    store = None if args.stream is None else prepare_stream(args)
    lines: list[dict[str, Any]] = []

    def add(line: dict[str, Any]) -> None:
        lines.append(line)
        check_same_data(lines)
        print(json.dumps(line), flush=True)

    for one in contenders:
        for line in curve_lines(one, budget[1]) if one.curves else ():
            add(line)
    for seed in seeds:  # seed by seed: what is there when it is stopped compares all
        for one in contenders:
            if one.curves:
                continue
            recipe = one.recipe or args.recipe if store is None else str(empty_recipe(args.directory))
            settings = base_settings(args, one.settings, store)
            settings = with_budget(settings, budget, one, agreed, recipe, due) | {"seed": seed}
            add(line_of(one, seed, train(args.directory, f"{one.name}.s{seed}", recipe, settings, due)))
    done = [line for line in lines if line["state"] == "done"]
    groups = {one.name: results_of([line for line in done if line["contender"] == one.name]) for one in contenders}
    if failed := [line["run"] for line in lines if line["state"] != "done"]:
        print(f"not judged, since training failed: {', '.join(failed)}", file=sys.stderr)
    groups = {name: results for name, results in groups.items() if results}
    if groups and not args.json:
        print(verdicts(groups, args.noise))


if __name__ == "__main__":
    try:
        main()
    except BessemerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
