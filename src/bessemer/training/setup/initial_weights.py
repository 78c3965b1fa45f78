"""The weights a run starts from: a checkpoint, files (RUN/model, an export of ours), or a Hugging Face folder.

`init` and `distill.teacher` name them. Names and shapes are checked before any array is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint.files import COMMIT
from bessemer.config import Config, Origin, OriginKind, dotted
from bessemer.config.recipes import Layer, override_layer, saved_tree
from bessemer.config.values import plain
from bessemer.data import data_root
from bessemer.data.tokenize.tokenizer import FILE, Tokenizer
from bessemer.errors import InputError, StorageError
from bessemer.generate.adapters import base_model
from bessemer.generate.load import FAMILY, OWN, SECTIONS, WEIGHTS, check_whole, flat, located, open_arrays, read_whole
from bessemer.interop.folder import CONFIG, Folder, fetched, is_folder, is_hub, read_object
from bessemer.interop.peft import PeftArrays, PeftFolder, is_peft
from bessemer.job import RunDirectory, find_run
from bessemer.job.jobs import step_of
from bessemer.job.trust import check_folder, names_own_code
from bessemer.models.lora import Split, merge_adapters, split_of
from bessemer.models.protocol import new_parameters
from bessemer.registry import models
from bessemer.report.summary import has_phases, phases_of
from bessemer.storage.files import atomic_write, storage
from bessemer.storage.weights import Arrays, DamagedFile, OtherModel, WeightFile, check_fits, place, select
from bessemer.topology import Topology, unbox

INIT = "init"


def find_start(named: str, root: str | Path, setting: str = INIT) -> tuple[Path, list[str]]:
    """Return the directory of the weights that `named` refers to, and lines to show.

    For a run: its newest valid checkpoint, or RUN/model if it has none (an imported run). A checkpoint directory, or a
    folder with a config.json (Hugging Face's or ours), is returned as it is.
    """
    if is_hub(named):
        place = fetched(named)
        return place, _notes(place, setting)
    path = Path(named)
    path = path.parent if path.name == CONFIG and path.is_file() else path
    if (path / CONFIG).is_file():
        check_folder(path)
        return path.absolute(), _notes(path, setting)
    is_step = re.fullmatch(r"step_\d+", path.name) is not None
    run = find_run(path.parent.parent if is_step else named, root)
    if has_phases(run) and (phases := phases_of(run)):
        run = phases[-1]
    checkpoints = Checkpoints(run.checkpoints)
    try:
        if is_step:
            if problems := checkpoints.verify(step_of(path.name)):
                raise InputError(f"{setting}={named} cannot be used: {'; '.join(problems)}.")
            return path.absolute(), []
        step, messages = checkpoints.newest_valid()
        if step is None and (run.model / WEIGHTS).is_file():
            return run.model.absolute(), _notes(run.model, setting)
        if step is None:
            raise InputError(f"{setting}={named}: the run has no checkpoint to take weights from.")
        return checkpoints.path(step), [f"{setting}: {message}" for message in messages]
    finally:
        checkpoints.close()


def _notes(folder: Path, setting: str) -> list[str]:
    """Return a line for weights in our format without checksums, and for what a Hugging Face folder has besides."""
    if is_folder(folder):
        found = Folder(folder)
        return [f"{setting}: {line}" for line in found.left_out_lines] if found.has_weights else []
    if not (folder / WEIGHTS).is_file():
        return []
    return [f"{setting}: {note}" for note in WeightFile(folder / WEIGHTS).notes]


def tree_in(start: Path, needs_weights: bool = True) -> dict[str, Any]:
    """Return the configuration beside the weights. needs_weights=False: accept a Hugging Face config.json alone."""
    if is_folder(start):
        return Folder(start, needs_weights).tree
    if not (start / CONFIG).is_file():
        return saved_tree(start / "config.yaml")
    tree = read_object(start / CONFIG)
    if "model" not in tree or not (start / WEIGHTS).is_file():
        raise InputError(
            f"{start / CONFIG} has neither a 'model_type', as Hugging Face's have, nor a 'model' with {WEIGHTS} beside "
            "it, as our exports have: a run cannot start from it."
        )
    return tree


def files_in(start: Path) -> Arrays | None:
    """Return the arrays of weight files, with adapters merged into their base; None for a checkpoint."""
    return open_arrays(start) if is_folder(start) or (start / WEIGHTS).is_file() else None


def weights_digest(start: Path) -> str:
    """Return a SHA-256 that identifies the weights: of a checkpoint's manifest, which lists a hash per file, or of the
    weight files and their configuration."""
    if (start / COMMIT).is_file():
        return hashlib.sha256((start / COMMIT).read_bytes()).hexdigest()
    files = {file.path for file in Folder(start).files.values()} if is_folder(start) else {start / WEIGHTS}
    digest = hashlib.sha256()
    for path in [start / CONFIG, *sorted(files)]:
        with open(path, "rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def check_weights(start: Path, checkpoints: Checkpoints, model: nn.Module, boxed: Any) -> None:
    """Raise an error that names what does not fit the model's parameters `boxed`, without reading an array."""
    if (files := files_in(start)) is not None:
        check_fits(files, unbox(loadable(model, boxed, files.signature())), str(start))
        return
    manager, step = checkpoints.at(start.parent), step_of(start.name)
    boxed = loadable(model, boxed, _names(manager, step))
    check_whole(manager, step, tree_in(start), boxed, model)


def read_weights(
    start: Path, checkpoints: Checkpoints, model: nn.Module, boxed: Any, topology: Topology, split: Split | None = None
) -> dict[str, Any]:
    """Return the saved parameters, sharded for `topology`, with adapters merged. split: that of the new run, which
    decides the dtypes."""
    files, manager = files_in(start), checkpoints.at(start.parent)
    saved = _names(manager, step_of(start.name)) if files is None else files.signature()
    boxed = loadable(model, boxed, saved)
    wanted = located(boxed if split is None else split.stored(boxed), topology)
    if files is not None:
        return place(files, wanted, str(start))
    theirs = split_of(flat(tree_in(start)), boxed, model).unquantized  # merged into the base as it is stored
    whole = read_whole(manager, step_of(start.name), theirs, boxed, topology)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), merge_adapters(whole), wanted)


def loadable(model: nn.Module, params: Any, saved: Iterable[str]) -> Any:
    """Return the parameters to load from weights with the arrays `saved`: all of them, except parameters that the
    model declares as new (`new_parameters`) and the weights lack."""
    new = set(new_parameters(model)) - {name.split("/")[0] for name in saved}
    return {name: part for name, part in params.items() if name not in new}


def _names(manager: Checkpoints, step: int) -> Iterable[str]:
    return select(manager.leaves(step), "params")


# --- settings that a run inherits from its `init`: the tokenizer, and whatever decides the shapes of its weights
#
#     defaults < recipe < inherited < command line
#
# So `init=RUN` alone is enough, with any recipe. Settings on the command line that contradict the weights are refused
# when the model is built (`check_start`). The result is written to config.yaml in full, so nothing is inherited twice.
ADAPTERS = "lora/adapters"
TEACHER = "distill/teacher"  # beside `init`, the setting that names another run
BELOW_RECIPE = ("architecture/block_size",)
"""Inherited only where neither recipe nor command line says anything."""

Resolve = Callable[[tuple[Layer, ...]], Config]


def is_own(key: str) -> bool:
    return any(key == own or (own.endswith("/") and key.startswith(own)) for own in OWN)


def inherit_settings(resolve: Resolve, config: Config, root: str | Path, needs_weights: bool = True) -> Config:
    """Return `config` with the settings inherited from its `init`, pinned to one checkpoint. Only the tokenizer
    is inherited from a teacher. resolve: resolves the run again with further layers. needs_weights: see `tree_in`."""
    if FAMILY not in config:  # a job of several phases passes `init` to those that have a model
        return config
    peft = peft_of(config)
    sources = {key: str(config[key]) for key in (TEACHER, INIT) if config.get(key) is not None}
    if peft is not None and not peft.is_over_given_base(config):
        remedy = f"Name the base yourself: init=BASE lora.adapters={peft.folder.path}"
        sources[INIT] = peft.folder.find_base(remedy)
    layers: list[Layer] = []
    pinned: list[tuple[str, str, str | Origin]] = []
    notes: list[str] = []
    for key, source in sources.items():
        if source.startswith("recipe:") and config.provenance[key].kind is OriginKind.UNTRAINED:
            continue
        if source.startswith("recipe:"):
            raise InputError(
                f"{dotted(key)}={source} is trained first by `bessemer train` and bm.train; here name a run."
            )
        start, lines = find_start(source, root, dotted(key))
        tree = tree_in(start, needs_weights)
        values = {**inherited(tree, config), **inherited_plugins(start, tree, config)} if key == INIT else {}
        tokenizer = copy_tokenizer(start, config["data/root"])
        if tokenizer is not None:
            values["data/tokenizer"] = tokenizer
        layers.append(override_layer(values, Origin(OriginKind.INHERITED, str(start))))
        if key == INIT and peft is not None:
            wanted = peft.folder.settings(base_model(tree, start, peft.folder.path))
            wanted[ADAPTERS] = str(peft.folder.path)
            layers.append(override_layer(wanted, Origin(OriginKind.INHERITED, str(peft.folder.path))))
            own = copy_tokenizer(peft.folder.path, config["data/root"])  # it may have a chat template of its own
            if own is not None:
                layers.append(
                    override_layer({"data/tokenizer": own}, Origin(OriginKind.INHERITED, str(peft.folder.path)))
                )
        why: str | Origin = "as given" if Path(source) == start else f"the newest weights of {source}"
        if is_recipes_run(config, key):
            why = config.provenance[key]
        pinned.append((key, str(start), why))
        notes += lines
    if not pinned:
        return config
    found = resolve(tuple(layers))
    for key, value, why in pinned:
        found.set(key, value, why)
    if peft is not None:
        found.set(ADAPTERS, str(peft.folder.path), "as given")
        check_adapter_settings(found, wanted, peft.folder)
    found.notes += notes
    return found


class PeftStart(NamedTuple):
    """Adapters saved by PEFT that a run continues, and the setting that names them: lora/adapters or init."""

    folder: PeftFolder
    key: str

    def is_over_given_base(self, config: Config) -> bool:
        """Return whether `init` names the base, rather than the folder itself."""
        return self.key == ADAPTERS and config.get(INIT) is not None


def peft_of(config: Config) -> PeftStart | None:
    """Return the adapters that `lora.adapters` or `init` names; None if the run starts without any."""
    for key in (ADAPTERS, INIT):
        given = config.get(key)
        if given is None or str(given).startswith("recipe:"):
            continue
        place = fetched(str(given)) if is_hub(str(given)) else Path(given)
        if is_peft(place):
            return PeftStart(PeftFolder(place), key)
        if key == ADAPTERS:
            raise InputError(
                f"lora.adapters={given} has no adapter_config.json: it names a folder that PEFT saved. Adapters of a "
                "run become one with: bessemer export RUN FOLDER --adapters"
            )
    return None


def check_adapter_settings(config: Config, wanted: Mapping[str, Any], folder: PeftFolder) -> None:
    """Raise InputError if a setting contradicts the adapters that are loaded; their dropout is the run's own."""
    for key, value in wanted.items():
        if key != "lora/dropout" and plain(config[key]) != value:
            raise InputError(
                f"{dotted(key)}={plain(config[key])} ({config.provenance[key]}) contradicts {folder.path}, whose "
                f"adapters have {value}. Leave the setting out."
            )


def adapter_arrays(config: Config, model: Any) -> PeftArrays | None:
    """Return the adapters that the run continues, as arrays over `model`; None if its adapters are new."""
    named = config.get(ADAPTERS)
    return None if named is None else PeftFolder(Path(named)).arrays(model)


def is_recipes_run(config: Config, key: str) -> bool:
    """Return whether `key` (init or a teacher) names the run of a recipe that was trained first."""
    return config.provenance[key].kind is OriginKind.BASE_RUN


def has_inherited(config: Config) -> bool:
    """Return whether the settings that `init` and a teacher provide are in `config` already."""
    named = [key for key in (INIT, TEACHER) if config.get(key) is not None]
    return all(config.provenance[key].is_derived for key in named)


def inherited(tree: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the settings that a run inherits from the configuration `tree` of its initial weights."""
    known = flat({section: tree.get(section) or {} for section in SECTIONS})
    if FAMILY in known:
        known[FAMILY] = family_for(str(config[FAMILY]), str(known[FAMILY]))
    return {
        key: value
        for key, value in known.items()
        if not is_own(key) and not (key in BELOW_RECIPE and key in config and config.is_set(key))
    }


def family_for(mine: str, theirs: str) -> str:
    """Return the family of a run configured as `mine` that starts from weights of `theirs`: `theirs`, or the registered
    extension of it that `mine` asks for. gpt-reward (a gpt with one more head) stays gpt-reward with weights of a gpt,
    and becomes llama-reward with those of a llama."""
    kind = mine.partition("-")[2]
    wanted = f"{theirs}-{kind}" if kind else mine
    for name in (mine, wanted):
        if name in models and theirs in models and issubclass(models.get(name), models.get(theirs)):
            return name
    return theirs


def inherited_plugins(start: Path, tree: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the plugins that define the model, if a run started on this machine names them. Raise InputError for
    another run's: a directory alone must not cause code to be imported."""
    family = str((tree.get("model") or {}).get("family", ""))
    if family in models or family == config[FAMILY]:
        return {}
    if names_own_code(RunDirectory(start.parent.parent), tree):
        return {"plugins": tree.get("plugins") or []}
    again = " ".join([f"model.family={family}", *(f"plugins=[{word}]" for word in tree.get("plugins") or ())])
    raise InputError(
        f"init={start}: its model family '{family}' is code that this user did not start that run with. Look at it; if "
        f"you trust it, name it: {again}"
    )


def copy_tokenizer(start: Path, root: str | None) -> str | None:
    """Copy the tokenizer to the data root, in case the checkpoint is deleted later, and return the copy's directory."""
    if not (start / FILE).is_file():
        return None
    tokenizer = Tokenizer.load(start)
    folder = data_root(root) / "tokenizers" / f"kept-{tokenizer.hash[:16]}"
    if not (folder / FILE).is_file():
        with storage("cannot keep the tokenizer"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in reversed(tokenizer.files.items()):  # tokenizer.json last: its presence marks a complete copy
            atomic_write(folder / name, text)
    return str(folder.absolute())


def describe(config: Config) -> str | None:
    """Return one line about the inherited settings; None if there are none."""
    keys = [key for key, origin in config.provenance.items() if origin.kind is OriginKind.INHERITED]
    if not keys:
        return None
    shown = [
        f"{dotted(key)}={config[key]}"
        for key in keys
        if key != "data/tokenizer" and config[key] != config.schema[key].default
    ]
    parts = (["the tokenizer"] if "data/tokenizer" in keys else []) + shown
    return f"inherited {', '.join(parts)}"


def check_tokenizer(init: str | None, adapters: str | None, tokenizer: Tokenizer | None) -> None:
    """Raise InputError if the weights were trained with another tokenizer than the run's: those of `adapters` if they
    come with a tokenizer, else those of `init`."""
    places = {"lora.adapters": adapters, "init": init}
    files = {name: Path(place) / FILE for name, place in places.items() if place and (Path(place) / FILE).is_file()}
    if tokenizer is None or not files:
        return
    name, file = next(iter(files.items()))
    if Tokenizer.load(file.parent).hash != tokenizer.hash:
        raise InputError(
            f"{name}={places[name]}: those weights were trained with another tokenizer, so ids would mean other words. "
            f"Leave data.tokenizer out, and it is taken over; or use data.tokenizer={file}"
        )


def check_start(config: Config, checkpoints: Callable[[], Checkpoints], model: nn.Module, boxed: Any) -> None:
    """Raise InputError if the weights of `init` do not fit the model, before anything is written.

    A continued run holds its own weights: the checkpoint it once started from may be gone.
    """
    if config[INIT] is None or not Path(config[INIT]).is_dir():
        return
    path = Path(config[INIT])
    try:
        check_weights(path, checkpoints(), model, boxed)
    except DamagedFile:
        raise
    except StorageError as error:
        problem = error.problem if isinstance(error, OtherModel) else str(error).rstrip(".")
        given = differences(path, config)
        remedy = f"Leave out {', '.join(given)}" if given else "Use the model they were trained with"
        raise InputError(f"init={path}: the weights do not fit this model: {problem}. {remedy}.") from error


def has_weights(start: Path) -> bool:
    """Return whether the directory holds weights, and not just a Hugging Face config.json."""
    return not is_folder(start) or Folder(start).has_weights


def differences(start: Path, config: Config) -> list[str]:
    """Return the model settings that differ from those the weights were trained with."""
    known = {key: plain(setting.default) for key, setting in config.schema.settings.items()}
    there = inherited(tree_in(start), config)
    return [
        f"{dotted(key)}={config[key]} (it was {there.get(key, known[key])})"
        for key in known
        if key.partition("/")[0] in SECTIONS
        and not is_own(key)
        and key not in BELOW_RECIPE
        and plain(config[key]) != there.get(key, known[key])
    ]
