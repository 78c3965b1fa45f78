"""`init=recipe:NAME`: train that recipe first, once, and start from its weights.

It is an ordinary run, RUNS/NAME-base: later runs find it finished, and one that was stopped is continued. Recipes may
start from each other (dpo from sft, sft from a tiny pretrained model).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bessemer.config import Config, Origin, OriginKind, dotted, resolve
from bessemer.config.recipes import Layer, override_layer, saved_tree
from bessemer.config.values import plain
from bessemer.data.sources.hub import is_hub_dataset
from bessemer.data.stores.catalog import find_source, is_code, store_directory
from bessemer.errors import InputError, Stopped
from bessemer.generate.load import FAMILY, flat
from bessemer.job import RunDirectory
from bessemer.registry import datasets
from bessemer.storage.remote import is_remote
from bessemer.topology import broadcast, process_index
from bessemer.training.setup.initial_weights import INIT, TEACHER, Resolve, inherited
from bessemer.training.setup.schema import schema_of, with_full_paths

PREFIX = "recipe:"
PASSED = ("topology/", "data/root", "logging/progress", "plugins")  # passed on, since they do not change the weights


TrainBase = Callable[[str, RunDirectory, dict[str, Any], bool], None]
"""Trains a recipe in a run directory, with settings that are passed on; the bool: it was started before."""


class StoppedFirst(Stopped):
    """A run was stopped that another one starts from."""


def trained_first(config: Config, root: str | Path, train: TrainBase) -> Config:
    """Return `config` with finished runs in place of the recipes that `init` and a teacher name."""
    if FAMILY not in config:  # a job of several phases passes `init` to those that have a model
        return config
    for key in (INIT, TEACHER):
        if str(config.get(key)).startswith(PREFIX):
            origin = Origin(OriginKind.BASE_RUN, config[key].removeprefix(PREFIX))
            config = config.replace({key: str(_train_first(config, key, root, train))}, origin)
    return config


def _train_first(config: Config, key: str, root: str | Path, train: TrainBase) -> Path:
    """Train the recipe that `key` names unless that is done, and return its run."""
    init = config[key]
    recipe = init.removeprefix(PREFIX)
    check_circle(recipe)
    directory = RunDirectory(Path(root) / f"{Path(recipe).stem}-base")
    passed = {key: config[key] for key in config.given() if key.startswith(PASSED)}
    state = broadcast(f"the run of {init}", lambda: state_of(directory, recipe))
    if state != "done":
        check_files(config)
        word = "continued" if state == "started" else "trained"
        what = "teacher" if key == TEACHER else "init"
        say(f"{what:<10} {init} is {word} first, once: {directory.path}")
        if key == INIT and config.asked("training/dataset") and not config.asked(INIT):
            say(
                "warning    no init is given, so your data trains the tiny model of the recipe's demonstration; for "
                "a model of your own add init=RUN, init=FOLDER or init=hf:OWNER/NAME"
            )
        try:
            train(recipe, directory, passed, state == "started")
        except StoppedFirst:
            raise  # the run that this one starts from starts from another
        except Stopped as error:
            raise StoppedFirst(
                f"{error}, or run the same command again: it continues there, then with its own run."
            ) from None
        say(f"{what:<10} {init} is done; now the run itself")
    return directory.path


def check_files(config: Config) -> None:
    """Raise InputError if a file that the caller names as data is missing: not after the minutes of another run."""
    if not config.asked("training/dataset"):
        return
    for sampling in (sampling for mixture in config["training/dataset"] for sampling in mixture):
        name = sampling.name
        is_elsewhere = is_hub_dataset(name) or is_remote(name) or name in datasets or is_code(name)
        if not is_elsewhere and store_directory(sampling) is None:
            find_source(name)


def check_circle(recipe: str, seen: tuple[str, ...] = ()) -> None:
    """Raise InputError for a recipe that starts from or learns from itself, directly or through other recipes."""
    if recipe in seen:
        way = " from ".join([*seen, recipe])
        raise InputError(f"recipes start from each other in a cycle: {way}. Change one `init`, or teacher.")
    config = resolve(schema_of, recipe)
    for key in (INIT, TEACHER):
        if str(config.get(key)).startswith(PREFIX):
            check_circle(config[key].removeprefix(PREFIX), (*seen, recipe))


def planned_from(resolved: Resolve, config: Config) -> Config:
    """Return `config` as it would be once the recipes it starts from were trained; nothing is trained."""
    layers: list[Layer] = []
    named = {key: str(config.get(key)) for key in (TEACHER, INIT)}
    planned = {key: word for key, word in named.items() if word.startswith(PREFIX)}
    for key, word in planned.items():
        base = planned_recipe(word.removeprefix(PREFIX))
        values = inherited(base.tree(), config) if key == INIT else {}
        values = {**values, "data/tokenizer": base["data/tokenizer"]}
        layers.append(override_layer(values, Origin(OriginKind.INHERITED, word)))
    if not planned:
        return config
    found = resolved(tuple(layers))
    if TEACHER in planned:
        found = found.replace({TEACHER: planned[TEACHER]}, Origin(OriginKind.UNTRAINED))
    if INIT in planned:
        found = found.replace({INIT: None}, f"{planned[INIT]} is not trained for a plan")
    return found


def planned_recipe(recipe: str) -> Config:
    """Return the configuration of a recipe's run, with what it would inherit."""
    check_circle(recipe)

    def of_recipe(between: tuple[Layer, ...] = ()) -> Config:
        return resolve(schema_of, recipe, between=between)

    return planned_from(of_recipe, of_recipe())


def state_of(directory: RunDirectory, recipe: str) -> str:
    """Return "new", "started" or "done"; raise InputError if the run there is not of this recipe."""
    if not directory.config.is_file():
        return "new"
    wanted, tree = with_full_paths(resolve(schema_of, recipe)), saved_tree(directory.config)
    origins, saved = tree.pop("provenance", {}), flat(tree)
    compared = [
        key
        for key, origin in wanted.provenance.items()
        if origin.is_recipe and Origin.parse(str(origins.get(dotted(key)))).is_recipe
    ]
    changed = [
        f"{dotted(key)} {saved.get(key)} there, {plain(wanted[key])} in the recipe"
        for key in compared
        if not key.startswith(("logging/", "eval/", *PASSED))
        and _unstyled(saved.get(key), plain(wanted[key])) != plain(wanted[key])
    ]
    if changed:
        raise InputError(
            f"{directory.path} is not what recipe {recipe} would train: {'; '.join(changed[:3])}. Delete it to have it "
            f"trained again, or start from it as it is: init={directory.path}"
        )
    status = directory.read_status()
    return "done" if status.get("state") == "done" and status.get("exit_code") == 0 else "started"


def _unstyled(saved: Any, wanted: Any) -> Any:
    """Return `saved` without the styles that the objective chose for data which `wanted` names without one."""
    if isinstance(saved, list) and isinstance(wanted, list) and len(saved) == len(wanted):
        return [_unstyled(*both) for both in zip(saved, wanted, strict=True)]
    if isinstance(saved, dict) and isinstance(wanted, dict) and wanted.get("style") is None:
        return saved | {"style": None}
    return saved


def say(text: str) -> None:
    if process_index() == 0:
        print(text, flush=True)
