"""Which settings a run has: those of the trainer and of every part it names."""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from bessemer import config as config_room
from bessemer.config import PYTHON, Config, Schema, dotted, gather, slashed
from bessemer.config.recipes import Layer
from bessemer.config.values import plain
from bessemer.data import DatasetStyle, DataSettings, Sampling, check_mixture, shares_of
from bessemer.data.settings import Find, found_again, full_path, relocated, relocated_root
from bessemer.data.stores.catalog import is_code
from bessemer.errors import InputError
from bessemer.evaluate.evaluator import names_code
from bessemer.models.lora import LoraSettings
from bessemer.optim import settings_classes
from bessemer.registry import (
    SELECTORS,
    callbacks,
    explain_unselected,
    import_plugin,
    jobs,
    models,
    objectives,
)
from bessemer.topology import TopologySettings
from bessemer.training.callbacks.base import Callback
from bessemer.training.context import Notes, RunContext
from bessemer.training.settings import GuardSettings, LoggingSettings
from bessemer.training.setup.initial_weights import begun_from, is_begun
from bessemer.user_code import located

DEFAULT_JOB = "BaseTrainer"


class TrainerClass(Protocol):
    """What the settings of a run depend on in its trainer's class."""

    @property
    def default_callbacks(self) -> tuple[str, ...]: ...
    def config_class(self) -> type[Any]: ...
    def model_class(self) -> type[Any] | None: ...
    def optimizer(self) -> Any: ...
    def schedule(self) -> Any: ...


def schema_of(values: Mapping[str, Any]) -> Schema:
    """The schema of a run whose recipe and overrides gave `values` (flat, unchecked)."""
    for plugin in _words(values.get("plugins")):
        import_plugin(plugin)
    job = jobs.get(str(values.get("job") or DEFAULT_JOB))
    own = getattr(job, "settings_schema", None)  # of a job that is no trainer
    return trainer_schema(job, values) if own is None else own(values)


def trainer_schema(trainer: TrainerClass, values: Mapping[str, Any]) -> Schema:
    """Unite the settings of the trainer class with those of the parts that `values` select."""
    defaults = gather(trainer.config_class())
    chosen = {key: setting.default for key, setting in defaults.settings.items()} | dict(values)
    model = trainer.model_class() or models.get(str(chosen["model/family"]))
    classes: list[type] = [
        trainer.config_class(),
        LoggingSettings,
        GuardSettings,
        DataSettings,
        TopologySettings,
        LoraSettings,
        model,
    ]
    classes += settings_classes(*optimizer_names(trainer, chosen))
    classes += objectives.entry(str(chosen["objective"])).settings
    for name in [*trainer.default_callbacks, *_words(chosen.get("callbacks"))]:
        if _has_settings(name):
            classes.append(callbacks.get(name))
    return gather(*dict.fromkeys(classes), explain=explain_unselected)


def optimizer_names(trainer: TrainerClass, values: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(optimizer, schedule) as registry names for their settings; None where the class gives an optax object."""
    optimizer = values.get("optimization/name") or trainer.optimizer()
    schedule = values.get("optimization/schedule") or trainer.schedule() or "constant"
    return (optimizer if isinstance(optimizer, str) else None), (
        schedule if isinstance(schedule, str) else None
    )


def config_for(
    trainer: TrainerClass, arguments: Mapping[str, Any] | None, root: str | Path = "runs"
) -> Config:
    """The configuration in force, or the class's defaults; `arguments` override either. `root`: where `init` is."""
    ambient = config_room.current()
    if ambient is not None and not arguments and is_begun(ambient):
        record_class(ambient, trainer)
        return ambient
    origins = {} if ambient is None else ambient.provenance
    given = {} if ambient is None else ambient.given()
    recipe = {key: given.pop(key) for key in list(given) if origins[key].is_recipe}
    given |= {slashed(key): value for key, value in (arguments or {}).items()}

    def resolved(between: tuple[Layer, ...] = ()) -> Config:
        schema = functools.partial(trainer_schema, trainer)
        return config_room.resolve(schema, recipe, given, source=PYTHON, between=between)

    config = pinned(begun_from(resolved, resolved(), root))
    record_class(config, trainer)
    return config


def record_class(config: Config, trainer: TrainerClass) -> None:
    """Write `job`, `plugins` and `model.family` as they are when the caller used a class directly.

    So `resume` finds the trainer again, from its file, and nothing takes the model for one of another family.
    """
    model, job = trainer.model_class(), config["job"]
    if model is not None:
        name = next(
            (entry.name for entry in models if entry.value is model), f"{model.__module__}:{model.__name__}"
        )
        config.set("model/family", name, "the trainer's model class")
    if (":" in job or job in jobs) and jobs.get(job) is trainer:
        return
    cls = typing.cast(type[Any], trainer)
    module = sys.modules[cls.__module__]
    file, name = getattr(module, "__file__", None), module.__name__
    if file is not None and not cls.__module__.startswith("bessemer."):
        why = "the file of the trainer's class"
        config.set("plugins", [*config["plugins"], str(Path(file).resolve())], why)
        name = Path(file).stem
    config.set("job", f"{name}:{cls.__qualname__}", "the trainer's class")


def saved_config(path: Path) -> Config:
    """A run's config.yaml, whatever trainer it names."""
    return refound(config_room.load_saved(path, schema_of))


def make_callbacks(config: Config, names: Iterable[str]) -> list[Callback]:
    """Make the named callbacks, with their settings where they declare some."""
    return [
        config.make(callbacks.get(name)) if _has_settings(name) else callbacks.get(name)() for name in names
    ]


def _has_settings(name: str) -> bool:
    return dataclasses.is_dataclass(callbacks.get(name))


def generic_argument(cls: type, base: type, position: int) -> Any:
    """Argument number `position` of `base[...]` in the class statement of `cls` or the nearest ancestor; a generic
    subclass of `base` takes the same arguments."""
    for ancestor in cls.__mro__:
        for generic in getattr(ancestor, "__orig_bases__", ()):
            origin = typing.get_origin(generic)
            if isinstance(origin, type) and issubclass(origin, base):
                argument = typing.get_args(generic)[position]
                if not isinstance(argument, typing.TypeVar):
                    return argument
    return None


def _words(value: Any) -> list[str]:
    """A setting that is a list of names, before it has been checked."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
        return list(value)
    raise InputError(f"expected a name or a list of names, got {value!r}.")


# --- what an objective's registration asks of the rest of a run (traits `style` and `document_mask`) ---
MASK = "architecture/document_mask"
DATASET = "training/dataset"


def usual_style(objective: str) -> DatasetStyle:
    """Return the style of rows of data that is named without one."""
    return objectives.entry(objective).traits.get("style", DatasetStyle.PMD)


def styled(datasets: list[list[Sampling]], style: DatasetStyle) -> list[list[Sampling]]:
    """Return the datasets with `style` for those that are named without one."""
    return [
        [dataclasses.replace(sampling, style=sampling.style or style) for sampling in mixture]
        for mixture in datasets
    ]


def apply_objective_defaults(context: RunContext[Any]) -> None:
    """Apply the objective's row style and document mask where the user set neither, and record them."""
    config, settings, notes = context.config, context.settings, context.notes
    entry, style = objectives.entry(settings.objective), usual_style(settings.objective)
    for mixture in settings.datasets:
        check_mixture(mixture)
        note_shares(notes, mixture)
    if any(sampling.style is None for mixture in settings.datasets for sampling in mixture):
        settings.datasets = styled(settings.datasets, style)
        # The origin stays the user's: who reads the configuration again must find the data as it was trained on.
        config.values[DATASET] = settings.datasets
        if style is not DatasetStyle.PMD:
            why = f"objective {entry.name}: windows of PMD would cut examples apart"
            notes.derive("training.dataset style", style.name, why)
    if entry.traits.get("document_mask") and MASK in config and not config.is_set(MASK):
        config.set(MASK, True, f"objective {entry.name}")
        why = f"objective {entry.name}: examples of one row do not see each other"
        notes.derive("architecture.document_mask", True, why)
    if style is DatasetStyle.CONTRASTIVE and MASK in config and not config[MASK]:
        raise InputError(
            "architecture.document_mask=false would let the answers of a row see each other, and objective "
            f"{entry.name} compares them: leave the setting out."
        )


def note_shares(notes: Notes, mixture: Sequence[Sampling]) -> None:
    """Record the shares of rates that do not sum to 1."""
    shares = shares_of(mixture)
    if shares == [sampling.rate for sampling in mixture] or len(mixture) == 1:
        return
    named = zip(mixture, shares, strict=True)
    value = ", ".join(f"{share:.1%} {sampling.name}" for sampling, share in named)
    rates = " : ".join(f"{sampling.rate:g}" for sampling in mixture)
    notes.derive("training.dataset shares", value, f"rates {rates}")


# --- settings that the caller set and that have no effect in this configuration ---
NEEDS = {
    "lora/": "lora/rank",
    "architecture/lookup/": "architecture/lookup/after_layers",
    "guard/spike_": "guard/spike_sigma",
    "guard/max_rollbacks": "guard/spike_sigma",
    "eval/core_bundle": "eval/core_interval",
}
"""Prefix of settings -> the setting that must not be 0 or empty for them to have an effect."""

OF_STAGES = ("data/crossfade", "optimization/stage_reset")


def without_effect(config: Config, stages: int) -> Iterator[str]:
    """Yield a line for each setting that the caller set and that has no effect."""
    given = [
        key for key in config.asked(*config.values) if plain(config[key]) != plain(config.schema[key].default)
    ]
    for key in given:
        for beginning, needed in NEEDS.items():
            if key.startswith(beginning) and not config[needed]:
                yield f"{dotted(key)} has no effect, as {dotted(needed)} is {config[needed]}"
        if key.startswith(OF_STAGES) and stages < 2:
            yield f"{dotted(key)} has no effect, as the run has one stage"


# --- settings that name local files or code (see data/settings.py and user_code.py) ---
# Data in `eval.evaluations` (core:DIR) stays as written, since its words name results; a resume may set it again.


def _dataset(value: list[list[Sampling]], find: Find) -> list[list[Sampling]]:
    def one(sampling: Sampling) -> Sampling:
        found = relocated(sampling, find)
        return replace(found, name=located(found.name)) if is_code(found.name) else found

    return [[one(sampling) for sampling in mixture] for mixture in value]


def _parts(value: str | list[str], find: Find) -> str | list[str]:
    """Names of registered parts stay; `module:attribute` and `file.py:attribute` are located."""
    if isinstance(value, str):
        return located(value) if ":" in value else value
    return [located(word) if ":" in word else word for word in value]


def _tokenizer(value: str, find: Find) -> str:
    return value if value == "auto" or value.startswith("train:") else find(value)


PATHS: dict[str, Callable[[Any, Find], Any]] = {
    "training/dataset": _dataset,
    "data/tokenizer": _tokenizer,
    "data/root": relocated_root,
    "eval/core_bundle": lambda value, find: find(value),
    "init": lambda value, find: find(value),
    "distill/teacher": lambda value, find: find(value),
    "plugins": lambda value, find: [located(word) for word in value],
    **dict.fromkeys(SELECTORS, _parts),
    "eval/evaluations": lambda value, find: [located(word) if names_code(word) else word for word in value],
    "grpo/rewards": lambda value, find: [replace(spec, name=_parts(spec.name, find)) for spec in value],
}
CODE = ("plugins", *SELECTORS, "eval/evaluations", "grpo/rewards")
"""Settings that name code, which is never looked for elsewhere: another file is other code."""


def pinned(config: Config) -> Config:
    """The configuration of a new run, with full paths. Each origin stays: the values are the caller's."""
    for key in PATHS:
        if config.get(key):
            config.values[key] = PATHS[key](config[key], full_path)
    return config


def refound(config: Config, given: Collection[str] = ()) -> Config:
    """A saved configuration, with paths that are gone found again, each with a note; those `given` now are meant as
    they are, and code is never looked for."""
    for key in PATHS:
        if key not in (*CODE, *given) and config.get(key):
            as_saved, config.values[key] = (PATHS[key](config[key], find) for find in (str, found_again))
            if config[key] != as_saved:
                config.notes.append(
                    f"{dotted(key)}: what it names is gone, and found again below {Path.cwd()}"
                )
    return config
