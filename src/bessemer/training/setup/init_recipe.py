"""`init=recipe:NAME`: the run to start from is that recipe's own, trained first and once, beside this run.

It is an ordinary run, RUNS/NAME-base: the next that asks for it finds it finished, and one that was stopped is
continued. Recipes may begin from each other in a row (dpo from sft, sft from a tiny pretrained model).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bessemer.config import Config, Origin, OriginKind, dotted, resolve
from bessemer.config.recipes import Layer, override_layer, saved_tree
from bessemer.config.values import plain
from bessemer.errors import InputError, Stopped
from bessemer.generate.load import FAMILY, flat
from bessemer.job import RunDirectory
from bessemer.topology import process_index, share
from bessemer.training.setup.initial_weights import (
    INIT,
    TEACHER,
    Resolve,
    inherited,
)
from bessemer.training.setup.schema import pinned, schema_of

PREFIX = "recipe:"
PASSED = ("topology/", "data/root", "logging/progress", "plugins")
"""What that run takes from the one that asks for it, since it cannot change its weights."""


def trained_first(config: Config, root: str | Path) -> Config:
    """`config` with `init` (and a teacher) naming a finished run where it named a recipe."""
    if FAMILY not in config:  # a job without a model hands it on to those that have one
        return config
    for key in (INIT, TEACHER):
        if str(config.get(key)).startswith(PREFIX):
            _train_first(config, key, root)
    return config


def _train_first(config: Config, key: str, root: str | Path) -> None:
    init = config[key]
    recipe = init.removeprefix(PREFIX)
    check_circle(recipe)
    directory = RunDirectory(Path(root) / f"{Path(recipe).stem}-base")
    passed = {key: config[key] for key in config.given() if key.startswith(PASSED)}
    state = share(f"the run of {init}", lambda: state_of(directory, recipe))
    if state != "done":
        word = "continued" if state == "begun" else "trained"
        what = "teacher" if key == TEACHER else "init"
        say(f"{what:<10} {init} is {word} first, once: {directory.path}")
        try:
            _train(recipe, directory, passed, state, root)
        except Stopped as error:
            raise Stopped(
                f"{error} Or run the same command again: it goes on there, then with its own run."
            ) from None
        say(f"{what:<10} {init} is done; now the run itself")
    config.set(key, str(directory.path), Origin(OriginKind.BASE_RUN, recipe))


def check_circle(recipe: str, seen: tuple[str, ...] = ()) -> None:
    """A recipe that begins from itself (or learns from itself), by way of others or not, could never begin."""
    if recipe in seen:
        way = " from ".join([*seen, recipe])
        raise InputError(f"recipes begin from each other in a circle: {way}. Change one `init`, or teacher.")
    config = resolve(schema_of, recipe)
    for key in (INIT, TEACHER):
        if str(config.get(key)).startswith(PREFIX):
            check_circle(config[key].removeprefix(PREFIX), (*seen, recipe))


def planned_from(resolved: Resolve, config: Config) -> Config:
    """`config` as it would be once the recipes it begins from were trained; nothing is trained."""
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
        found.set(TEACHER, planned[TEACHER], Origin(OriginKind.UNTRAINED))
    if INIT in planned:
        found.set(INIT, None, f"{planned[INIT]} is not trained for a plan")
    return found


def planned_recipe(recipe: str) -> Config:
    """The configuration of a recipe's run, with what it would inherit."""
    check_circle(recipe)

    def of_recipe(between: tuple[Layer, ...] = ()) -> Config:
        return resolve(schema_of, recipe, between=between)

    return planned_from(of_recipe, of_recipe())


def state_of(directory: RunDirectory, recipe: str) -> str:
    """ "new", "begun" or "done"; a run there that is not of this recipe is refused."""
    if not directory.config.is_file():
        return "new"
    wanted, tree = pinned(resolve(schema_of, recipe)), saved_tree(directory.config)
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
    return "done" if status.get("state") == "done" and status.get("exit_code") == 0 else "begun"


def _unstyled(saved: Any, wanted: Any) -> Any:
    """`saved` without the styles that the objective chose (wishes.py) for data which `wanted` names without one."""
    if isinstance(saved, list) and isinstance(wanted, list) and len(saved) == len(wanted):
        return [_unstyled(*both) for both in zip(saved, wanted, strict=True)]
    if isinstance(saved, dict) and isinstance(wanted, dict) and wanted.get("style") is None:
        return saved | {"style": None}
    return saved


def _train(
    recipe: str, directory: RunDirectory, passed: dict[str, Any], state: str, root: str | Path
) -> None:
    from bessemer.training import launch  # which begins every run, this one too

    if state == "begun":
        kept = {key: value for key, value in passed.items() if key.startswith(launch.RESUMABLE)}
        launch.reopen(directory.path, kept, root=root).run()
    else:
        launch.build_trainer(recipe, passed, name=directory.name, root=root).run()


def say(text: str) -> None:
    if process_index() == 0:
        print(text, flush=True)
