"""What lies outside the run directory and resume needs: the tokenizer and the prepared data."""

from __future__ import annotations

from bessemer.config import Config, configuration, configure
from bessemer.data import DataSettings, Sampling, Tokenizer, find_source
from bessemer.data.catalog import store_directory, store_place
from bessemer.data.store import TokenStore, is_store
from bessemer.data.tokenizer import FILE
from bessemer.data.tokenizer_choice import tokenizer_place
from bessemer.doctor.findings import Diagnosis
from bessemer.errors import BessemerError, InputError
from bessemer.job import RunDirectory

NOT_NEEDED = {
    "model_state",
    "callbacks",
}  # the checkpoint holds the weights; a run goes on without its callbacks


def examine_material(run: RunDirectory, config: Config, found: Diagnosis) -> bool:
    """Whether all is there, so that the run can be rebuilt without preparing anything."""
    try:
        given = run.given_parts() - NOT_NEEDED
    except InputError as error:
        found.add("data", "error", str(error))
        return False
    if given:
        parts = ", ".join(f"{name}=…" for name in sorted(given))
        text = f"the run was started from Python with its own {', '.join(sorted(given))}, which cannot be checked here."
        found.add("data", "note", text, f"Give the same again: bm.resume('{run.name}', {parts}).")
        return False
    with configuration(config):
        settings = configure(DataSettings)
    samplings = [sampling for mixture in config["training/dataset"] or [] for sampling in mixture]
    if not samplings:
        found.add("data", "note", "the run names none: an imported model was not trained here.")
        return False
    sources = {(sampling.name, sampling.suffix): sampling for sampling in samplings}
    gone = [sampling for sampling in sources.values() if not _is_there(sampling, found)]
    if gone:
        return False
    try:
        tokenizer = _tokenizer(settings, samplings, found)
        if tokenizer is None:
            return False
        there = [_store(sampling, tokenizer, settings, found) for sampling in sources.values()]
        return all(there)
    except BessemerError as error:
        found.add("data", "error", str(error))
        return False


def _is_there(sampling: Sampling, found: Diagnosis) -> bool:
    """Whether a dataset can be found, be it a store or its source; one that is gone is named."""
    try:
        if store_directory(sampling) is None:
            find_source(sampling.name)
    except BessemerError as error:
        text = f"training.dataset names {sampling.name}{sampling.suffix}, which is gone: {error}"
        found.add(
            "data",
            "error",
            text,
            "Put it back where it was; a copy elsewhere below this directory is found too.",
        )
        return False
    return True


def _tokenizer(settings: DataSettings, samplings: list[Sampling], found: Diagnosis) -> Tokenizer | None:
    place = tokenizer_place(settings, samplings)
    if settings.tokenizer.startswith("train:") and not (place / FILE).is_file():
        found.add(
            "data",
            "warning",
            f"the tokenizer {settings.tokenizer} is not at {place}: it was deleted, or the text it was trained on "
            "has changed.",
            "Resume trains it again, and refuses unless it comes out the same. The checkpoint holds the original.",
        )
        return None
    tokenizer = Tokenizer.load(place)
    found.add("data", "ok", f"tokenizer {tokenizer.hash[:12]} at {place}.")
    return tokenizer


def _store(sampling: Sampling, tokenizer: Tokenizer, settings: DataSettings, found: Diagnosis) -> bool:
    place = store_directory(sampling)
    if place is None:
        place = store_place(sampling, find_source(sampling.name), tokenizer, settings=settings)
    if not is_store(place):
        found.add(
            "data",
            "warning",
            f"the prepared data of {sampling.name} is not at {place}: it was deleted, or its files have changed.",
            "Resume prepares it again, and refuses unless it comes out the same.",
        )
        return False
    parts = [TokenStore(place, split) for split in TokenStore(place).splits]
    for part in parts:
        part.verify()
    found.add("data", "ok", f"prepared data of {sampling.name} at {place}, every byte verified.")
    if not all(part.has_checksums for part in parts):
        found.add(
            "data",
            "note",
            f"{place} was prepared before stores had checksums, so damage during a run would go unnoticed.",
            "Prepare it again to have every chunk verified before it is used.",
        )
    return True
