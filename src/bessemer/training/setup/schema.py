"""The settings of a run: those of the trainer and of every part that it names."""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from bessemer.config import PYTHON, Config, Schema, current, dotted, gather, load_saved, resolve, slashed
from bessemer.config.recipes import Layer
from bessemer.config.values import plain
from bessemer.data import DatasetStyle, DataSettings, Sampling, check_mixture, shares_of
from bessemer.data.stores.catalog import Find, found_again, full_path, is_code, relocated, relocated_root
from bessemer.errors import InputError
from bessemer.evaluate.evaluator import names_code
from bessemer.models.lora import LoraSettings
from bessemer.optim import settings_classes
from bessemer.registry import SELECTORS, callbacks, explain_unselected, import_plugin, jobs, models, objectives
from bessemer.topology import TopologySettings
from bessemer.training.callbacks.base import Callback
from bessemer.training.settings import GuardSettings, LoggingSettings, Notes, RunContext
from bessemer.training.setup.initial_weights import has_inherited, inherit_settings
from bessemer.user_code import GUARD, located, unguarded_line

DEFAULT_JOB = "BaseTrainer"


class TrainerClass(Protocol):
    """What the settings of a run depend on in its trainer's class."""

    @property
    def default_callbacks(self) -> tuple[str, ...]: ...
    def config_class(self) -> type[Any]: ...
    def model_class(self) -> type[Any] | None: ...
    def optimizer(self) -> Any: ...
    def schedule(self) -> Any: ...


@runtime_checkable
class DeclaresSettings(Protocol):
    """A job that is not a trainer and declares its own settings."""

    def settings_schema(self, values: Mapping[str, Any]) -> Schema: ...


def schema_of(values: Mapping[str, Any]) -> Schema:
    """Return the schema of a run whose recipe and overrides set `values` (flat, unchecked)."""
    for plugin in _words(values.get("plugins")):
        import_plugin(plugin)
    job = jobs.get(str(values.get("job") or DEFAULT_JOB))
    return job.settings_schema(values) if isinstance(job, DeclaresSettings) else trainer_schema(job, values)


def trainer_schema(cls: TrainerClass, values: Mapping[str, Any]) -> Schema:
    """Return the settings of the trainer class and of the parts that `values` select."""
    defaults = gather(cls.config_class())
    chosen = {key: setting.default for key, setting in defaults.settings.items()} | dict(values)
    model = cls.model_class() or models.get(str(chosen["model/family"]))
    classes: list[type] = [
        cls.config_class(),
        LoggingSettings,
        GuardSettings,
        DataSettings,
        TopologySettings,
        LoraSettings,
        model,
    ]
    classes += settings_classes(*optimizer_names(cls, chosen))
    classes += objectives.entry(str(chosen["objective"])).settings
    for name in [*cls.default_callbacks, *_words(chosen.get("callbacks"))]:
        if _has_settings(name):
            classes.append(callbacks.get(name))
    return gather(*dict.fromkeys(classes), explain=explain_unselected)


def optimizer_names(cls: TrainerClass, values: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the registry names of (optimizer, schedule); None if the class returns an optax object."""
    optimizer = values.get("optimization/name") or cls.optimizer()
    schedule = values.get("optimization/schedule") or cls.schedule() or "constant"
    return (optimizer if isinstance(optimizer, str) else None), (schedule if isinstance(schedule, str) else None)


def config_for(cls: TrainerClass, arguments: Mapping[str, Any] | None, root: str | Path = "runs") -> Config:
    """Return the current configuration, or the class's defaults; `arguments` override both. root: where `init` is
    looked up."""
    ambient = current()
    if ambient is not None and not arguments and has_inherited(ambient):
        config = ambient.copy()
        record_class(config, cls)
        return config
    origins = {} if ambient is None else ambient.provenance
    given = {} if ambient is None else ambient.given()
    recipe = {key: given.pop(key) for key in list(given) if origins[key].is_recipe}
    given |= {slashed(key): value for key, value in (arguments or {}).items()}

    def resolved(between: tuple[Layer, ...] = ()) -> Config:
        schema = functools.partial(trainer_schema, cls)
        return resolve(schema, recipe, given, source=PYTHON, between=between)

    config = with_full_paths(inherit_settings(resolved, resolved(), root))
    record_class(config, cls)
    return config


def record_class(config: Config, cls: TrainerClass) -> None:
    """Record `job`, `plugins` and `model.family` if the caller used a class directly, so that `resume` finds it."""
    model, job = cls.model_class(), config["job"]
    if model is not None:
        name = next((entry.name for entry in models if entry.value is model), f"{model.__module__}:{model.__name__}")
        config.set("model/family", name, "the trainer's model class")
    if (":" in job or job in jobs) and jobs.get(job) is cls:
        return
    own = typing.cast(type[Any], cls)
    module = sys.modules[own.__module__]
    file, name = getattr(module, "__file__", None), module.__name__
    if file is not None and not own.__module__.startswith("bessemer."):
        why = "the file of the trainer's class"
        if own.__module__ == "__main__" and (line := unguarded_line(Path(file).resolve())) is not None:
            config.notes.append(
                f"{Path(file).name} line {line} starts this run, and `bessemer resume` imports that file for its "
                f"classes: put what starts a run under {GUARD}"
            )
        config.set("plugins", [*config["plugins"], str(Path(file).resolve())], why)
        name = Path(file).stem
    config.set("job", f"{name}:{own.__qualname__}", "the trainer's class")


def saved_config(path: Path) -> Config:
    """Return a run's config.yaml, whatever trainer it names."""
    return with_found_paths(load_saved(path, schema_of))


def make_callbacks(config: Config, names: Iterable[str]) -> list[Callback]:
    """Return the named callbacks, made with their settings if they declare some."""
    return [config.make(callbacks.get(name)) if _has_settings(name) else callbacks.get(name)() for name in names]


def _has_settings(name: str) -> bool:
    return dataclasses.is_dataclass(callbacks.get(name))


def generic_argument(cls: type, base: type, position: int) -> Any:
    """Return argument `position` of `base[...]`, or of a generic subclass, in the class statement of `cls` or of its
    nearest ancestor."""
    for ancestor in cls.__mro__:
        for generic in getattr(ancestor, "__orig_bases__", ()):
            origin = typing.get_origin(generic)
            if isinstance(origin, type) and issubclass(origin, base):
                argument = typing.get_args(generic)[position]
                if not isinstance(argument, typing.TypeVar):
                    return argument
    return None


def _words(value: Any) -> list[str]:
    """Return an unchecked setting as a list of names."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
        return list(value)
    raise InputError(f"expected a name or a list of names, got {value!r}.")


# --- defaults that an objective's traits `style` and `document_mask` set ---
MASK = "architecture/document_mask"
DATASET = "training/dataset"
PACK = "grpo/pack"


def usual_style(objective: str) -> DatasetStyle:
    """Return the style of rows of data that is named without one."""
    return objectives.entry(objective).traits.get("style", DatasetStyle.PMD)


def styled(datasets: list[list[Sampling]], style: DatasetStyle) -> list[list[Sampling]]:
    """Return the datasets with `style` for those that are named without one."""
    return [[replace(sampling, style=sampling.style or style) for sampling in mixture] for mixture in datasets]


def apply_objective_defaults(context: RunContext[Any]) -> RunContext[Any]:
    """Return the context with the objective's row style and document mask where the user set neither; record them."""
    config, settings, notes = context.config, context.settings, context.notes
    entry, style = objectives.entry(settings.objective), usual_style(settings.objective)
    for mixture in settings.datasets:
        check_mixture(mixture)
        note_shares(notes, mixture)
    if any(sampling.style is None for mixture in settings.datasets for sampling in mixture):
        settings = replace(settings, datasets=styled(settings.datasets, style))
        # the origin stays the user's, so that a resumed run finds the data as it was trained on
        config.set(DATASET, settings.datasets, config.provenance[DATASET])
        if style is not DatasetStyle.PMD:
            why = f"objective {entry.name}: windows of PMD would cut examples apart"
            notes.derive("training.dataset style", style.name, why)
    if entry.traits.get("document_mask") and MASK in config and not config.is_set(MASK):
        config.set(MASK, True, f"objective {entry.name}")
        why = f"objective {entry.name}: examples of one row do not see each other"
        notes.derive("architecture.document_mask", True, why)
    if entry.traits.get("rollouts") and config.get(PACK) and MASK in config and not config.is_set(MASK):
        config.set(MASK, True, dotted(PACK))
        notes.derive(
            "architecture.document_mask", True, f"{dotted(PACK)}: completions of one row do not see each other"
        )
    if style is DatasetStyle.CONTRASTIVE and MASK in config and not config[MASK]:
        raise InputError(
            "architecture.document_mask=false would let the answers of a row see each other, and objective "
            f"{entry.name} compares them: leave the setting out."
        )
    return replace(context, settings=settings)


def note_shares(notes: Notes, mixture: Sequence[Sampling]) -> None:
    """Record the shares of rates that do not sum to 1."""
    shares = shares_of(mixture)
    if shares == [sampling.rate for sampling in mixture] or len(mixture) == 1:
        return
    named = zip(mixture, shares, strict=True)
    value = ", ".join(f"{share:.1%} {sampling.name}" for sampling, share in named)
    rates = " : ".join(f"{sampling.rate:g}" for sampling in mixture)
    notes.derive("training.dataset shares", value, f"rates {rates}")


# --- settings that have no effect in this configuration ---
NEEDS = {  # prefix of settings -> the setting that must not be 0 or empty for them to have an effect
    "lora/": "lora/rank",
    "architecture/lookup/": "architecture/lookup/after_layers",
    "architecture/experts/": "model/experts",
    "model/experts_": "model/experts",
    "model/expert_": "model/experts",
    "architecture/experts/group_score": "model/expert_groups",
    "guard/spike_": "guard/spike_sigma",
    "guard/max_rollbacks": "guard/spike_sigma",
    "eval/core_bundle": "eval/core_interval",
    "grpo/environment_": "grpo/environment",
    "grpo/on_environment_error": "grpo/environment",
    "grpo/max_turns": "grpo/environment",
}
OF_CHOICE = {  # setting -> the setting that must have this value for it to have an effect
    "architecture/experts/bias_rate": ("architecture/experts/balance", "bias"),
    "architecture/experts/aux_loss": ("architecture/experts/balance", "loss"),
}
OF_STAGES = ("data/crossfade", "optimization/stage_reset")


def without_effect(config: Config, stages: int) -> Iterator[str]:
    """Yield a line for each setting that the caller set and that has no effect."""
    given = [key for key in config.asked(*config.values) if plain(config[key]) != plain(config.schema[key].default)]
    for key in given:
        for beginning, needed in NEEDS.items():
            if key.startswith(beginning) and not config[needed]:
                yield f"{dotted(key)} has no effect, as {dotted(needed)} is {config[needed]}"
        choice, value = OF_CHOICE.get(key, ("", None))
        if choice and config["model/experts"] and config[choice] != value:
            yield f"{dotted(key)} has no effect, as {dotted(choice)} is {config[choice]}"
        if key.startswith(OF_STAGES) and stages < 2:
            yield f"{dotted(key)} has no effect, as the run has one stage"


# --- settings that name local files or code ---
# Data in `eval.evaluations` (core:DIR) stays as written, since it names results; a resume may set it again.


def _dataset(value: list[list[Sampling]], find: Find) -> list[list[Sampling]]:
    def one(sampling: Sampling) -> Sampling:
        found = relocated(sampling, find)
        return replace(found, name=located(found.name)) if is_code(found.name) else found

    return [[one(sampling) for sampling in mixture] for mixture in value]


def _parts(value: str | list[str], find: Find) -> str | list[str]:
    """Locate `module:attribute` and `file.py:attribute`; names of registered parts stay."""
    if isinstance(value, str):
        return located(value) if ":" in value else value
    return [located(word) if ":" in word else word for word in value]


def _target(key: str, value: Any) -> Any:
    """Locate the code that an adapter's option `target` names."""
    return located(value) if key == "target" and isinstance(value, str) and ":" in value else value


def _tokenizer(value: str, find: Find) -> str:
    return value if value == "auto" or value.startswith("train:") else find(value)


PATHS: dict[str, Callable[[Any, Find], Any]] = {
    "training/dataset": _dataset,
    "data/tokenizer": _tokenizer,
    "data/root": relocated_root,
    "eval/core_bundle": lambda value, find: find(value),
    "init": lambda value, find: find(value),
    "distill/teacher": lambda value, find: find(value),
    "lora/adapters": lambda value, find: find(value),
    "plugins": lambda value, find: [located(word) for word in value],
    **dict.fromkeys(SELECTORS, _parts),
    "eval/evaluations": lambda value, find: [located(word) if names_code(word) else word for word in value],
    "grpo/rewards": lambda value, find: [replace(spec, name=_parts(spec.name, find)) for spec in value],
    "grpo/environment": lambda value, find: replace(
        value, name=_parts(value.name, find), options={key: _target(key, one) for key, one in value.options.items()}
    ),
}
# settings that name code, which is never searched for elsewhere: another file is other code
CODE = ("plugins", *SELECTORS, "eval/evaluations", "grpo/rewards", "grpo/environment")


def with_full_paths(config: Config) -> Config:
    """Return the configuration with full paths. Origins stay: the values are the caller's."""
    return config.replace({key: find(config[key], full_path) for key, find in PATHS.items() if config.get(key)})


def with_found_paths(config: Config, given: Collection[str] = ()) -> Config:
    """Return a saved configuration with missing paths replaced by where the files are now, each with a note. Keys in
    `given` keep their values, and code is never searched for."""
    found: dict[str, Any] = {}
    notes: list[str] = []
    for key, find in PATHS.items():
        if key not in (*CODE, *given) and config.get(key):
            found[key] = find(config[key], found_again)
            if found[key] != find(config[key], str):
                notes.append(f"{dotted(key)}: what it names is gone, and found again below {Path.cwd()}")
    changed = config.replace(found)
    changed.notes += notes
    return changed
