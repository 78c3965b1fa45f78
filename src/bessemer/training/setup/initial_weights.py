"""Where a run's first weights lie: a checkpoint, files (RUN/model, an export of ours), or a Hugging Face folder.

`init` names one, and so does `distill.teacher`. Everything is refused by names and shapes before an array is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint.manifest import COMMIT
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
    """The directory of the weights that are named, and lines to show.

    A run gives its newest valid checkpoint, or RUN/model when it has none (an imported one); a checkpoint directory
    and a folder with config.json, Hugging Face's or ours, are themselves.
    """
    if is_hub(named):
        return fetched(named), []
    path = Path(named)
    path = path.parent if path.name == CONFIG and path.is_file() else path
    if (path / CONFIG).is_file():
        check_folder(path)
        return path.absolute(), _unverified(path, setting)
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
            return run.model.absolute(), _unverified(run.model, setting)
        if step is None:
            raise InputError(f"{setting}={named}: the run has no checkpoint to take weights from.")
        return checkpoints.path(step), [f"{setting}: {message}" for message in messages]
    finally:
        checkpoints.close()


def _unverified(folder: Path, setting: str) -> list[str]:
    """A line for weights in our format that carry no checksums."""
    if is_folder(folder) or not (folder / WEIGHTS).is_file():
        return []
    return [f"{setting}: {note}" for note in WeightFile(folder / WEIGHTS).notes]


def tree_in(start: Path, needs_weights: bool = True) -> dict[str, Any]:
    """The configuration of what `find_start` found. needs_weights=False: a Hugging Face config.json alone will do."""
    if is_folder(start):
        return Folder(start, needs_weights).tree
    if not (start / CONFIG).is_file():
        return saved_tree(start / "config.yaml")
    tree = read_object(start / CONFIG)
    if "model" not in tree or not (start / WEIGHTS).is_file():
        raise InputError(
            f"{start / CONFIG} has neither a 'model_type', as Hugging Face's have, nor a 'model' with {WEIGHTS} beside "
            "it, as our exports have: these are no weights to start from."
        )
    return tree


def files_in(start: Path) -> Arrays | None:
    """The weights of a start that is no checkpoint; adapters merged into their base."""
    return open_arrays(start) if is_folder(start) or (start / WEIGHTS).is_file() else None


def weights_digest(start: Path) -> str:
    """Return the SHA-256 that names the weights: of a checkpoint's manifest, which lists its files' own, or of the
    files with their configuration."""
    if (start / COMMIT).is_file():
        return hashlib.sha256((start / COMMIT).read_bytes()).hexdigest()
    files = {file.path for file in Folder(start).files.values()} if is_folder(start) else {start / WEIGHTS}
    digest = hashlib.sha256()
    for path in [start / CONFIG, *sorted(files)]:
        with open(path, "rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def check_weights(start: Path, checkpoints: Checkpoints, model: Any, boxed: Any) -> None:
    """Raise the error that names what does not fit the model's parameters `boxed`; no array is read."""
    if (files := files_in(start)) is not None:
        check_fits(files, unbox(taken_over(model, boxed, files.signature())), str(start))
        return
    manager, step = checkpoints.at(start.parent), step_of(start.name)
    boxed = taken_over(model, boxed, _names(manager, step))
    check_whole(manager, step, tree_in(start), boxed, model)


def read_weights(
    start: Path, checkpoints: Checkpoints, model: Any, boxed: Any, topology: Topology, split: Split | None = None
) -> dict[str, Any]:
    """Return the parameters that are there, where `topology` rests them; adapters merged. split: of the run that takes
    them, in whose dtypes they come."""
    files, manager = files_in(start), checkpoints.at(start.parent)
    saved = _names(manager, step_of(start.name)) if files is None else files.signature()
    boxed = taken_over(model, boxed, saved)
    wanted = located(boxed if split is None else split.stored(boxed), topology)
    if files is not None:
        return place(files, wanted, str(start))
    theirs = split_of(flat(tree_in(start)), boxed, model).unquantized  # merged into the base as it is stored
    whole = read_whole(manager, step_of(start.name), theirs, boxed, topology)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), merge_adapters(whole), wanted)


def taken_over(model: Any, params: Any, saved: Iterable[str]) -> Any:
    """The parameters to take from weights with the arrays `saved`: all but those that the model declares as new
    (`new_parameters`) and that are not there."""
    there = {name.split("/")[0] for name in saved}
    new = set(new_parameters(model)) - there
    return {name: part for name, part in params.items() if name not in new}


def _names(manager: Checkpoints, step: int) -> Iterable[str]:
    return select(manager.leaves(step), "params")


# --- what a run takes from the one it starts from (`init`): the tokenizer, and what decides the shapes of its weights
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


def begun_from(resolve: Resolve, config: Config, root: str | Path, needs_weights: bool = True) -> Config:
    """`config`, or the one that `resolve` gives with what is inherited from its `init`, pinned to a checkpoint. From a
    teacher only the tokenizer is. needs_weights: see `tree_in`."""
    if FAMILY not in config:  # a job without a model hands it on to those that have one
        return config
    peft = peft_of(config)
    named = [(key, str(config[key])) for key in (TEACHER, INIT) if config.get(key) is not None]
    if peft is not None and not peft.is_over_given_base(config):
        remedy = f"Name the base yourself: init=BASE lora.adapters={peft.folder.path}"
        named = [(key, given) for key, given in named if key != INIT] + [(INIT, peft.folder.find_base(remedy))]
    layers: list[Layer] = []
    pinned: list[tuple[str, str, str | Origin]] = []
    notes: list[str] = []
    for key, given in named:
        if given.startswith("recipe:") and config.provenance[key].kind is OriginKind.UNTRAINED:
            continue
        if given.startswith("recipe:"):
            raise InputError(
                f"{dotted(key)}={given} is trained first by `bessemer train` and bm.train; here name a run."
            )
        start, said = find_start(given, root, dotted(key))
        tree = tree_in(start, needs_weights)
        values = {**inherited(tree, config), **its_code(start, tree, config)} if key == INIT else {}
        tokenizer = keep_tokenizer(start, config["data/root"])
        if tokenizer is not None:
            values["data/tokenizer"] = tokenizer
        layers.append(override_layer(values, Origin(OriginKind.INHERITED, str(start))))
        if key == INIT and peft is not None:
            wanted = peft.folder.settings(base_model(tree, start, peft.folder.path))
            wanted[ADAPTERS] = str(peft.folder.path)
            layers.append(override_layer(wanted, Origin(OriginKind.INHERITED, str(peft.folder.path))))
            own = keep_tokenizer(peft.folder.path, config["data/root"])  # it may have a chat template of its own
            if own is not None:
                layers.append(
                    override_layer({"data/tokenizer": own}, Origin(OriginKind.INHERITED, str(peft.folder.path)))
                )
        why: str | Origin = "as given" if Path(given) == start else f"the newest weights of {given}"
        if is_recipes_run(config, key):
            why = config.provenance[key]
        pinned.append((key, str(start), why))
        notes += said
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
    """Adapters of PEFT that a run continues, and the setting that names them: lora/adapters, or init."""

    folder: PeftFolder
    key: str

    def is_over_given_base(self, config: Config) -> bool:
        """Whether the base is named by `init`, not by the folder."""
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
    """True when `key` (init or a teacher) names the run of a recipe that was trained first."""
    return config.provenance[key].kind is OriginKind.BASE_RUN


def is_begun(config: Config) -> bool:
    """Whether what there is to inherit has been."""
    named = [key for key in (INIT, TEACHER) if config.get(key) is not None]
    return all(config.provenance[key].is_derived for key in named)


def inherited(tree: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The settings of a configuration `tree` that a run which starts from it takes over."""
    known = flat({section: tree.get(section) or {} for section in SECTIONS})
    if FAMILY in known:
        known[FAMILY] = family_for(str(config[FAMILY]), str(known[FAMILY]))
    return {
        key: value
        for key, value in known.items()
        if not is_own(key) and not (key in BELOW_RECIPE and key in config and config.is_set(key))
    }


def family_for(mine: str, theirs: str) -> str:
    """The family of a run of `mine` that starts from weights of `theirs`: that one, or what extends it as asked. So
    gpt-reward (a gpt and one head more) stays itself with a gpt's weights, and with a llama's becomes llama-reward.
    Only registered ones are looked at: what a directory names is not imported."""
    kind = mine.partition("-")[2]
    wanted = f"{theirs}-{kind}" if kind else mine
    for name in (mine, wanted):
        if name in models and theirs in models and issubclass(models.get(name), models.get(theirs)):
            return name
    return theirs


def its_code(start: Path, tree: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Where the model is code of the user's: its plugins, for a run that was started here. Otherwise it has to be named
    again, since no code is imported on the word of a directory."""
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


def keep_tokenizer(start: Path, root: str | None) -> str | None:
    """A copy of the starting run's tokenizer under the data root: the new run needs it when that checkpoint is gone."""
    if not (start / FILE).is_file():
        return None
    tokenizer = Tokenizer.load(start)
    folder = data_root(root) / "tokenizers" / f"kept-{tokenizer.hash[:16]}"
    if not (folder / FILE).is_file():
        with storage("cannot keep the tokenizer"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in reversed(tokenizer.files.items()):  # the one that is looked for comes last
            atomic_write(folder / name, text)
    return str(folder.absolute())


def describe(config: Config) -> str | None:
    """What was inherited, in one line; None for a run that starts afresh."""
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
    """Refuse weights whose ids mean other words here: those of `adapters` if a tokenizer is beside them, or `init`."""
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


def check_start(config: Config, checkpoints: Callable[[], Checkpoints], model: Any, boxed: Any) -> None:
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
    """Whether what `find_start` found holds weights; a Hugging Face config.json alone does not."""
    return not is_folder(start) or Folder(start).has_weights


def differences(start: Path, config: Config) -> list[str]:
    """Settings of the weights that are not as they were where the weights come from."""
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
