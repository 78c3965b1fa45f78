"""Adapters without their base, of a run or in a folder of PEFT's: imported as a run, or several held over one base."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from bessemer.checkpoint import Checkpoints
from bessemer.config import declared, dotted
from bessemer.config.bounded import read_json
from bessemer.config.recipes import parse_saved
from bessemer.console import ShowBytes, no_progress
from bessemer.data.tokenize.tokenizer import FILE, Tokenizer
from bessemer.errors import InputError, StorageError
from bessemer.generate.base import (
    RECORD,
    BaseRecord,
    CheckpointArrays,
    VerifiedArrays,
    hub_name,
    joined_hash,
    read_hashed,
    read_record,
)
from bessemer.generate.load import (
    OWN,
    SECTIONS,
    WEIGHTS,
    LoadedModel,
    ModelFiles,
    base_arrays,
    boxed_params,
    build_model,
    check_finite,
    choose,
    flat,
    located,
    open_arrays,
    tokenizer_in,
)
from bessemer.interop.config import tensors_of
from bessemer.interop.folder import CONFIG, Folder, fetched, is_hub
from bessemer.interop.peft import PeftFolder, is_peft
from bessemer.job import RunDirectory, check_run_name, find_run
from bessemer.job.trust import mark_origin
from bessemer.models.llama import Llama
from bessemer.models.lookup import has_lookup
from bessemer.models.lora import A, Adapted, B, LoraSettings, M, make_split, saved_settings, split_of, stack_adapters
from bessemer.storage.files import atomic_directory, storage
from bessemer.storage.weights import OURS, Arrays, WeightFile, check_fits, digest, flatten_names, total, write_file
from bessemer.storage.weights import place as place_arrays
from bessemer.topology import unbox


@dataclass(frozen=True)
class Adapters:
    """The trained parameters of a run that trains adapters, by our names, read when they are asked for.

    config: the saved tree, with the model's settings; record: what names the base, None where the run keeps it.
    """

    where: str
    arrays: Arrays
    config: dict[str, Any]
    record: BaseRecord | None
    step: int
    tokenizer: Tokenizer | None
    notes: list[str]

    @property
    def lora(self) -> LoraSettings:
        return saved_settings(flat(self.config))


def run_adapters(run: RunDirectory, step: int | str | None = None) -> Adapters:
    """Return the adapters of a checkpoint (default: the newest valid one), or of RUN/model where there is none."""
    checkpoints = Checkpoints(run.checkpoints)
    chosen, notes = choose(checkpoints, run, run.step_of_stage(step) if isinstance(step, str) else step)
    if chosen is not None:
        place = checkpoints.path(chosen)
        config = parse_saved(checkpoints.read(chosen, "config.yaml"), str(place))
        arrays: Arrays = CheckpointArrays(checkpoints, chosen)
        tokenizer = tokenizer_in(place, build_model(config, str(place))[0])
        return Adapters(str(place), arrays, config, read_record(run), chosen, tokenizer, notes)
    place = run.model
    try:
        config = read_json(place / CONFIG) if (place / WEIGHTS).is_file() else {}
    except (OSError, ValueError) as error:
        raise StorageError(f"{place} cannot be read ({error}).") from error
    if not isinstance(config, dict) or "base" not in config:
        raise InputError(f"{run.path} has no checkpoint and no adapters in {place.name}, so it holds no adapters.")
    file, record = WeightFile(place / WEIGHTS), BaseRecord.from_json(config["base"], str(place / CONFIG))
    tokenizer = tokenizer_in(place, build_model(config, str(place))[0])
    return Adapters(
        str(place), file, config, record, int(file.metadata.get("step", 0)), tokenizer, [*notes, *file.notes]
    )


def base_model(tree: Mapping[str, Any], base: Path, source: Path) -> Llama:
    """Return the model of a base's configuration; raise InputError if PEFT's names mean nothing in its family."""
    model, _ = build_model(tree, str(base))
    if not isinstance(model, Llama):
        family = (tree.get("model") or {}).get("family")
        raise InputError(f"{source}: adapters of PEFT need a base of the llama family; {base} is of '{family}'.")
    return model


def adapted_tree(peft: PeftFolder, tree: Mapping[str, Any], base: Path) -> tuple[dict[str, Any], Llama]:
    """Return a configuration of a base with the adapters of a folder over it, and its model."""
    model = base_model(tree, base, peft.path)
    lora = {key.removeprefix("lora/"): value for key, value in peft.settings(model).items()}
    return {**{section: tree.get(section, {}) for section in SECTIONS}, "lora": lora}, model


def import_adapters(
    source: Path,
    out: Path,
    base: Path,
    tree: Mapping[str, Any],
    show: ShowBytes = no_progress,
    context: int | None = None,
) -> tuple[RunDirectory, list[str]]:
    """Make the run `out` of PEFT's adapters over the weights in `base`, which stay there; return it and lines to show.

    tree: the configuration of the base. It is read once, for the hashes that name it; memory holds one tensor.
    """
    import yaml

    check_run_name(out.name)
    if out.exists():
        raise InputError(f"{out} already exists; an import makes a new run. Choose another name, or delete it.")
    peft, base, run = PeftFolder(source), base.absolute(), RunDirectory(out)
    config, model = adapted_tree(peft, tree, base)
    if context is not None:
        config["architecture"] = {**config["architecture"], "block_size": context}
    boxed = boxed_params(model)
    split, arrays = split_of(flat(config), boxed, model), peft.arrays(model)
    check_fits(arrays, unbox(split.shapes(boxed)[0]), str(source))
    tokenizer = next((Tokenizer.load(place) for place in (source, base) if (place / FILE).is_file()), None)
    names = ["/".join(path) for path in (*split.frozen, *split.adapted)]
    held = open_arrays(base)
    verified = VerifiedArrays(held, names, base, None, run)
    with show(f"hashing {base.name}", total(verified.signature().values())) as progress:
        for name in names:
            progress(verified.read(name).nbytes)
    record = BaseRecord.of(base, verified.hashes, run)
    texts = {CONFIG: json.dumps({**config, "base": record.as_json()}, indent=1) + "\n"}
    texts |= tokenizer.files if tokenizer is not None else {}
    saved = {**config, "init": str(base)}
    with storage("cannot write the imported adapters"), atomic_directory(out) as partial:
        for folder in ("model", "reference"):
            (partial / folder).mkdir()
        for name, text in texts.items():
            (partial / "model" / name).write_text(text, encoding="utf-8")
        about = {"format": OURS, "step": "0"}
        write_file(partial / "model" / WEIGHTS, arrays.signature(), arrays.read, about, beside=texts)
        (partial / "reference" / RECORD).write_text(json.dumps(record.as_json(), indent=1) + "\n", encoding="utf-8")
        (partial / "config.yaml").write_text(yaml.safe_dump(saved, sort_keys=False), encoding="utf-8")
        RunDirectory(partial).write_status(
            state="done", step=0, exit_code=0, message=f"imported from {source.absolute()}"
        )
    note = mark_origin(run, saved)  # the base was named by this user, or lies where any run may read
    lora = config["lora"]
    kind = "DoRA" if lora["dora"] else "LoRA"
    lines = [
        f"adapters   {kind} of rank {lora['rank']} on {len(split.adapted)} matrices",
        f"base       {base} stays where it is; sha256 {record.sha256[:16]}…",
    ]
    return run, [*lines, *([f"note: {note}"] if note else [])]


# --- several adapters over one base, for a server -----------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """One name of a server. about: the model as if loaded alone, without parameters; adapter: `Request.adapter`."""

    name: str
    about: LoadedModel
    adapter: int


def load_several(
    run: RunDirectory,
    named: Mapping[str, str],
    step: int | str | None = None,
    base: str | Path | None = None,
    root: str | Path = "runs",
) -> tuple[LoadedModel, list[Served]]:
    """Return a run's model with further adapters over the same base, and all names it answers to.

    The base is in memory once. A run that trained adapters is served under its own name, and its base under that of
    the base. named: name → a run, or a folder of PEFT's. Adapters of another base, by the hashes of its tensors, are
    an InputError.
    """
    whole, own = _opened(run, step, base)
    model, tokenizer = whole.model, whole.about.tokenizer
    if has_lookup(model):
        raise InputError(f"{run.path} has lookup layers, which take no second adapter: serve it alone.")
    boxed = boxed_params(model)
    clash = own is not None and whole.name == run.name
    served = [Served(f"{whole.name}-base" if clash else whole.name, whole.about, 0)]
    nodes = []
    if own is not None:
        nodes.append(_nodes(own, model, boxed))
        served.append(Served(run.name, LoadedModel(model, None, tokenizer, own.step, own.config, run), 1))
    # a split with adapters says in which dtypes a frozen base is kept
    frozen = make_split(boxed, lora=LoraSettings(rank=1), model=model).stored(boxed)
    params = place_arrays(whole.arrays, located(frozen, None), str(whole.arrays.where))
    check_finite(params, str(whole.arrays.where), "Copy or download the base again.")
    notes = [*whole.about.notes]
    for name, source in named.items():
        if name in {one.name for one in served}:
            raise InputError(f"--adapter {name}={source}: the name '{name}' is taken. Choose another.")
        adapters = _find_adapters(source, whole, root)
        whole.check(adapters)
        if adapters.tokenizer is not None and tokenizer is not None and adapters.tokenizer.hash != tokenizer.hash:
            raise InputError(f"--adapter {name}={source}: its tokenizer is not that of {run.path}, so ids differ.")
        nodes.append(_nodes(adapters, model, boxed))
        about = LoadedModel(model, None, adapters.tokenizer or tokenizer, adapters.step, adapters.config, run)
        served.append(Served(name, about, len(nodes)))
        notes += adapters.notes
    about = served[0 if own is None else 1].about
    return dataclasses.replace(about, params=stack_adapters(params, nodes), notes=notes), served


def base_name(record: BaseRecord) -> str:
    """Return what a base is called: OWNER/NAME of the hub, the run that it belongs to, else its folder."""
    if record.source is not None:
        return record.source.removeprefix("hf:").partition("@")[0]
    place = Path(record.path)
    for depth, holds in ((2, "checkpoints"), (1, "model"), (2, "reference")):
        if place.parts[-depth:][:1] == (holds,):
            return place.parts[-depth - 1]
    return place.name


@dataclass(frozen=True)
class _Base:
    """The base that is served. record: what names it, for the base of a run with adapters."""

    name: str
    about: LoadedModel
    arrays: VerifiedArrays  # once they are read, `hashes` has every tensor
    record: BaseRecord | None

    @property
    def model(self) -> Any:
        return self.about.model

    def check(self, adapters: Adapters) -> None:
        """Raise InputError if adapters were trained over other weights, tensor by tensor."""
        if adapters.record is None:
            raise InputError(f"{adapters.where} keeps the base of its adapters itself, so nothing else shares it.")
        tensors = adapters.record.tensors
        differs = f"{adapters.where} was trained over another base than {self.arrays.where}: "
        if unlike := other_settings(self.model, build_model(adapters.config, adapters.where)[0]):
            raise InputError(f"{differs}{unlike[0]}.")
        if odd := sorted(set(tensors) ^ set(self.arrays.hashes)):
            raise InputError(f"{differs}only one of them has '{odd[0]}'.")
        for name, wanted in tensors.items():
            if not self.holds(name, wanted):
                here = self.arrays.hashes[name]
                raise InputError(f"{differs}'{name}' has the sha256 {here[:12]}… here and had {wanted[:12]}….")

    def holds(self, name: str, wanted: str) -> bool:
        """Whether a tensor has this sha256, in the layout it is stored in or in the other one: an import of a Hugging
        Face folder holds the transposed matrix."""
        if self.arrays.hashes[name] == wanted:
            return True
        if not isinstance(self.model, Llama):
            return False
        array = self.arrays.arrays.read(name)
        if isinstance(self.arrays.arrays, Folder):
            return digest(array) == wanted
        tensors = tensors_of({name: (array.dtype.name, array.shape)}, self.model)
        hashes = {theirs: digest(tensor.to_theirs(array)) for theirs, tensor in tensors.items()}
        return (joined_hash(hashes) if len(hashes) > 1 else next(iter(hashes.values()))) == wanted

    def is_at(self, named: str) -> bool:
        """Return whether a base that a file names is this one by its path or its name on the hub."""
        if is_hub(named):
            source = self.record.source if self.record is not None else hub_name(self.arrays.where)
            return source is not None and named in (source, source.partition("@")[0])
        return Path(named).resolve() == self.arrays.where.resolve()


def other_settings(one: Any, other: Any) -> list[str]:
    """Return the settings in which two models compute something else with the same weights."""
    if type(one) is not type(other):
        return [f"one is a {type(one).__name__}, the other a {type(other).__name__}"]
    free = (*OWN, "architecture/block_size", "model/max_positions", "model/weights_dtype", "model/hf_type")
    return [
        f"{dotted(setting.key)} is {getattr(one, name)} and {getattr(other, name)}"
        for name, setting in declared(type(one)).items()
        if getattr(one, name) != getattr(other, name)
        and not any(setting.key == key or (key.endswith("/") and setting.key.startswith(key)) for key in free)
    ]


def _opened(run: RunDirectory, step: int | str | None, base: str | Path | None) -> tuple[_Base, Adapters | None]:
    """Return the base that a run is, or has, and the adapters that it trained over it."""
    checkpoints = Checkpoints(run.checkpoints)
    chosen, notes = choose(checkpoints, run, run.step_of_stage(step) if isinstance(step, str) else step)
    if chosen is not None:
        place, number = checkpoints.path(chosen), chosen
        config = parse_saved(checkpoints.read(chosen, "config.yaml"), str(place))
    else:
        files = ModelFiles.of(run, base)
        place, number, config, notes = run.model, files.step, files.config, [*notes, *files.notes]
    model, unknown = build_model(config, str(place))
    tokenizer, notes = tokenizer_in(place, model), [*notes, *unknown]
    if not saved_settings(flat(config)).rank:
        about = LoadedModel(model, None, tokenizer, number, config, run, notes=notes)
        names = flatten_names(unbox(boxed_params(model)))
        return _Base(run.name, about, VerifiedArrays(open_arrays(place), names, place, None, run), None), None
    own = run_adapters(run, step)
    if own.record is None:
        raise InputError(
            f"{run.path} keeps the base of its adapters itself, so nothing else shares it: serve it alone."
        )
    shape = {section: config.get(section, {}) for section in SECTIONS}
    about = LoadedModel(model, None, tokenizer, 0, shape, run, notes=notes)
    return _Base(base_name(own.record), about, base_arrays(run, own.record, base), own.record), own


def _find_adapters(source: str, base: _Base, root: str | Path) -> Adapters:
    """Return the adapters that --adapter names: a run's, or those of a folder of PEFT's over the served base."""
    place = fetched(source) if is_hub(source) else Path(source)
    if not is_peft(place):
        found = run_adapters(find_run(source, root))
        if not found.lora.rank:
            raise InputError(f"{source} holds no adapters: it is a whole model.")
        return found
    peft = PeftFolder(place)
    named = peft.find_base(f"Import it with its base, and serve the run: bessemer import {source} OUT --base PATH")
    tree, _ = adapted_tree(peft, base.about.config, base.arrays.where)
    hashes = base.arrays.hashes
    if not base.is_at(named):
        other = open_arrays(fetched(named) if is_hub(named) else Path(named))
        hashes = {name: read_hashed(other, name)[1] for name in hashes if name in other.signature()}
    record = BaseRecord(named, dict(hashes))
    return Adapters(str(place), peft.arrays(base.model), tree, record, 0, tokenizer_in(place, base.model), [])


def _nodes(adapters: Adapters, model: Any, boxed: Any) -> dict[tuple[str, ...], Adapted]:
    """Return path → adapter, without the matrix, of everything that was trained."""
    split = split_of(flat(adapters.config), boxed, model)
    if split.trained or split.tables:
        name = "/".join(min((*split.trained, *split.tables)))
        raise InputError(
            f"{adapters.where} also changes '{name}', which is not a matrix with an adapter beside it: serve it alone."
        )
    trained = located(split.shapes(boxed)[0], None)
    given = flatten_dict(place_arrays(adapters.arrays, trained, adapters.where))
    check_finite(given, adapters.where, "Copy or download the adapters again.")
    none = jnp.zeros(())
    return {
        path: Adapted(none, given[(*path, A)], given[(*path, B)], split.lora.scale_of(path), given.get((*path, M)))
        for path in split.adapted
    }
