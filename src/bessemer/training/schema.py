"""Which settings a run has: those of the trainer and of every part it names."""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer import config as config_room
from bessemer.config import Config, Schema, gather, slashed
from bessemer.config.layers import Layer
from bessemer.data import DataSettings
from bessemer.errors import InputError
from bessemer.models.lora import LoraSettings
from bessemer.optim import settings_classes
from bessemer.registry import callbacks, import_plugin, jobs, models, objectives
from bessemer.selectors import explain_unselected
from bessemer.topology import TopologySettings
from bessemer.training.callback import Callback
from bessemer.training.inherit import begun_from, is_begun
from bessemer.training.pinning import pinned, refound
from bessemer.training.settings import GuardSettings, LoggingSettings

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

DEFAULT_JOB = "BaseTrainer"


def schema_of(values: Mapping[str, Any]) -> Schema:
    """The schema of a run whose recipe and overrides gave `values` (flat, unchecked)."""
    for plugin in _words(values.get("plugins")):
        import_plugin(plugin)
    job = jobs.get(str(values.get("job") or DEFAULT_JOB))
    own = getattr(job, "settings_schema", None)  # of a job that is no trainer
    return trainer_schema(job, values) if own is None else own(values)


def trainer_schema(trainer: type[BaseTrainer], values: Mapping[str, Any]) -> Schema:
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


def optimizer_names(trainer: type[BaseTrainer], values: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(optimizer, schedule) as registry names for their settings; None where the class gives an optax object."""
    optimizer = values.get("optimization/name") or trainer.optimizer()
    schedule = values.get("optimization/schedule") or trainer.schedule() or "constant"
    return (optimizer if isinstance(optimizer, str) else None), (
        schedule if isinstance(schedule, str) else None
    )


def config_for(
    trainer: type[BaseTrainer], arguments: Mapping[str, Any] | None, root: str | Path = "runs"
) -> Config:
    """The configuration in force, or the class's defaults; `arguments` override either. `root`: where `init` is."""
    ambient = config_room.current()
    if ambient is not None and not arguments and is_begun(ambient):
        record_class(ambient, trainer)
        return ambient
    origins = {} if ambient is None else ambient.provenance
    given = {} if ambient is None else ambient.given()
    recipe = {key: given.pop(key) for key in list(given) if origins[key].startswith("recipe")}
    given |= {slashed(key): value for key, value in (arguments or {}).items()}

    def resolved(between: tuple[Layer, ...] = ()) -> Config:
        schema = functools.partial(trainer_schema, trainer)
        return config_room.resolve(schema, recipe, given, source="python", between=between)

    config = pinned(begun_from(resolved, resolved(), root))
    record_class(config, trainer)
    return config


def record_class(config: Config, trainer: type[BaseTrainer]) -> None:
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
    module = sys.modules[trainer.__module__]
    file, name = getattr(module, "__file__", None), module.__name__
    if file is not None and not trainer.__module__.startswith("bessemer."):
        why = "the file of the trainer's class"
        config.set("plugins", [*config["plugins"], str(Path(file).resolve())], why)
        name = Path(file).stem
    config.set("job", f"{name}:{trainer.__qualname__}", "the trainer's class")


def saved_config(path: Path) -> Config:
    """A run's config.yaml, whatever trainer it names."""
    return refound(config_room.load_saved(path, schema_of))


def make_callbacks(trainer: BaseTrainer) -> list[Callback]:
    """Those given in code, those of the setting, then the default ones: what the first add to a row is logged."""
    names = [*trainer.settings.callbacks, *trainer.default_callbacks]
    with config_room.configuration(trainer.config):
        made = [
            config_room.configure(callbacks.get(name)) if _has_settings(name) else callbacks.get(name)()
            for name in names
        ]
    return [*trainer.given_callbacks, *made]


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
