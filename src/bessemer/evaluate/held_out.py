"""The held-out sequences of a run, from its saved configuration.

The same fixed set that training validates on, so evaluating the last checkpoint repeats the last val_bpb.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bessemer.config import declared
from bessemer.config.values import Mismatch, convert
from bessemer.data import DataSettings, Sampling, Tokenizer, Validation, open_dataset
from bessemer.data.settings import found_again, relocated, relocated_root
from bessemer.data.stores.catalog import is_code
from bessemer.errors import InputError
from bessemer.generate import LoadedModel


def held_out(loaded: LoadedModel, limit: int | None = None) -> Validation:
    """`limit` validation sequences of the run's (last stage's) data; default: as many as in training.

    Opened once and kept with the model's programs: a run that evaluates while it trains reads the same set each time,
    whatever has become of the files it was made from.
    """
    asked = [loaded.config.get(name) for name in ("training", "data")]
    rows: Validation = loaded.program(f"held-out rows {limit} {asked}", lambda: _opened(loaded, limit))
    return rows


def _opened(loaded: LoadedModel, limit: int | None) -> Validation:
    training = section(loaded.config, "training")
    count = limit if limit is not None else int(training.get("validation_steps") or 2048)
    if count < 1:
        raise InputError(f"the limit is {count} sequences; give at least 1.")
    if loaded.held_out is not None:
        return Validation([(Sampling("given"), loaded.held_out)], count)
    if loaded.run is not None and "dataset_train" in loaded.run.given_parts():
        raise InputError(
            f"{where(loaded)} was trained on data given from Python, which is not in its configuration, so there are "
            "no held-out sequences to evaluate on. Evaluate while it trains (eval.evaluations with dataset_eval=…)."
        )
    named = last_mixture(training.get("dataset"), where(loaded))
    mixture = [relocated(sampling, found_again) for sampling in named]
    for before, now in zip(named, mixture, strict=True):
        if before != now:
            loaded.notes.append(f"the data {before.name} is gone; held-out sequences are those of {now.name}")
    if loaded.tokenizer is None:
        raise InputError(f"{where(loaded)} has no tokenizer, so its data cannot be opened again.")
    settings = data_settings(section(loaded.config, "data"), where(loaded))
    sources = [
        (sampling, _open(sampling, loaded.tokenizer, settings, loaded.model.block_size))
        for sampling in mixture
    ]
    return Validation(sources, count)


def _open(sampling: Sampling, tokenizer: Tokenizer, settings: DataSettings, block_size: int) -> Any:
    if is_code(sampling.name):
        raise InputError(
            f"the dataset '{sampling.name}' is code named by the run, which an evaluation never imports. "
            "Register it first, from Python, under a plain name."
        )
    return open_dataset(sampling, tokenizer, split="val", block_size=block_size, settings=settings)


def last_mixture(saved: Any, where: str) -> list[Sampling]:
    """The samplings of the last stage, from the saved value of training/dataset."""
    try:
        stages = convert(saved or [], list[list[Sampling]])
    except Mismatch as error:
        raise InputError(f"{where}: training.dataset cannot be read ({error.problem}).") from error
    if not stages or not stages[-1]:
        raise InputError(
            f"{where} does not say what data it was trained on (training.dataset is empty: the model was "
            "imported, or its data given from Python), so there are no held-out sequences to evaluate on."
        )
    return list(stages[-1])


def data_settings(saved: Mapping[str, Any], where: str) -> DataSettings:
    """DataSettings from the section `data` of a saved configuration."""
    values = {f"data/{name}": value for name, value in saved.items()}
    given = {
        name: setting.check(values[setting.key], where)
        for name, setting in declared(DataSettings).items()
        if setting.key in values
    }
    if given.get("root"):
        given["root"] = relocated_root(given["root"], found_again)
    return DataSettings(**given)


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def where(loaded: LoadedModel) -> str:
    return str(loaded.run.path) if loaded.run is not None else "this model"
