"""A run's model for inference: its shape from the saved configuration, its parameters from a checkpoint.

Only the sections `model`, `architecture` and `lora`, `training.freeze` and `training.param_dtype` are read, and only
names of the registry are followed: code that a configuration names (plugins, a trainer or callback of the user's) is
never imported here. A run that trained a part of its parameters gives the whole: adapters merged; frozen ones from the
base that the run names (base.py), or from the run's own copy, RUN/reference/frozen.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.checkpoint import Checkpoints
from bessemer.config import declared, dotted
from bessemer.config.bounded import parse_json, read_json
from bessemer.config.recipes import parse_saved, saved_tree
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError, StorageError, TrainingError
from bessemer.generate import base as bases
from bessemer.generate.base import BaseRecord, CheckpointArrays, MergedArrays, VerifiedArrays
from bessemer.generate.decoder import Decoder, end_tokens
from bessemer.generate.speculate import Speculation
from bessemer.generate.weights import Quantizer
from bessemer.interop.folder import Folder, is_folder
from bessemer.job import RunDirectory
from bessemer.job.jobs import step_of
from bessemer.job.trust import check_opened
from bessemer.models.allocation import Allocation
from bessemer.models.llama import Llama
from bessemer.models.lookup import has_lookup
from bessemer.models.lora import Split, split_of
from bessemer.models.protocol import Checked
from bessemer.registry import models
from bessemer.storage.weights import Arrays, WeightFile, flatten, flatten_names, place, rebuild, select
from bessemer.topology import Topology, shardings, unbox

SECTIONS = ("model", "architecture")
FAMILY = "model/family"
WEIGHTS = "model.safetensors"
OWN = (
    "architecture/precision",
    "architecture/fp8/",
    "architecture/attention",
    "architecture/kernels",
    "architecture/remat",
    "architecture/scan_layers",
    "architecture/dropout",
    "architecture/document_mask",
    "architecture/loss_chunks",
    "architecture/lookup/path",
    "architecture/lookup/sample_tokens",
)
"""How the same weights are computed and trained: a matter of each run, not of the weights."""


@dataclasses.dataclass
class LoadedModel:
    """A module, its parameters and its tokenizer. `config` is the saved tree; `notes` are lines to show.

    `fetch` reads device values. `programs` keeps what was compiled for this model and mesh; who loads the same
    model again, with newer parameters, hands it on.
    """

    model: Any
    params: Any
    tokenizer: Tokenizer | None
    step: int
    config: dict[str, Any]
    run: RunDirectory | None = None
    topology: Topology | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    fetch: Callable[[Any], Any] = jax.device_get
    programs: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    live: bool = False  # of a trainer, which may open what its own configuration names
    held_out: Any = None  # rows of a live run whose data was given from Python; None: those its configuration names

    @property
    def decoder(self) -> Decoder:
        """Ends rows at the document token and at those of the model."""
        return self.program("decoder", self._make_decoder)

    def decoder_with(self, speculate: Speculation | None) -> Decoder:
        """Return the decoder with or without drafts."""
        if speculate is None:
            return self.decoder
        return self.program(f"decoder {speculate}", lambda: self._make_decoder(speculate))

    def _make_decoder(self, speculate: Speculation | None = None) -> Decoder:
        options: dict[str, Any] = {"speculate": speculate, "fetch": self.fetch}
        if self.tokenizer is None:
            return Decoder(self.model, **options)
        ends = end_tokens(self.model, self.tokenizer)
        return Decoder(self.model, pad_id=self.tokenizer.pad_id, end_ids=ends, **options)

    def quantize(self, weights: str) -> None:
        """Keep the matrices in 8 bits from now on (`generate.weights`); auto: as they are."""
        if weights != "auto":
            with self.scope():
                self.params = Quantizer(self.model, weights).release_each(self.params)

    def check_opened(self, sections: Mapping[str, Any]) -> None:
        """Raise InputError if files that these parts of the saved configuration name may not be opened for its run."""
        if self.run is not None and not self.live:
            check_opened(self.run, sections)

    def program(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returned when `name` was first asked for."""
        if name not in self.programs:
            self.programs[name] = make()
        return self.programs[name]

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Mesh and axis rules of the parameters; needed around every call of the model."""
        with self.topology.scope() if self.topology is not None else contextlib.nullcontext():
            yield


def load_model(
    run: RunDirectory,
    step: int | str | None = None,
    *,
    topology: Topology | None = None,
    base: str | Path | None = None,
    weights: str = "auto",
) -> LoadedModel:
    """The model of checkpoint `step` (a number, or a stage's name for its end), or of the newest valid one, or of
    RUN/model when there is none.

    Parameters go to the first device, or where `topology` rests them. base: where the base of a run with adapters lies,
    in place of where the run says. weights: fp8 or int8 keeps the matrices in 8 bits (`generate.weights`); those of
    RUN/model are quantized as they are read, one at a time.
    """
    checkpoints = Checkpoints(run.checkpoints)
    step = run.step_of_stage(step) if isinstance(step, str) else step
    try:
        chosen, notes = choose(checkpoints, run, step)
        if chosen is None:
            return _from_files(run, topology, base, weights)
        config = parse_saved(checkpoints.read(chosen, "config.yaml"), str(checkpoints.path(chosen)))
        model, unknown = build_model(config, str(checkpoints.path(chosen)))
        tokenizer = tokenizer_in(checkpoints.path(chosen), model)
        model = allocated(model, checkpoints.path(chosen), tokenizer)
        boxed = boxed_params(model, topology)
        split = split_of(flat(config), boxed, model)
        params = read_whole(checkpoints, chosen, split, boxed, topology, base)
        check_finite(params, str(checkpoints.path(chosen)), _other_steps(checkpoints, chosen))
    finally:
        checkpoints.close()
    loaded = LoadedModel(model, params, tokenizer, chosen, config, run, topology, [*notes, *unknown])
    del params  # `quantize` frees them one by one
    loaded.quantize(weights)
    return loaded


def choose(checkpoints: Checkpoints, run: RunDirectory, step: int | None) -> tuple[int | None, list[str]]:
    if step is None:
        return checkpoints.newest_valid()
    known = checkpoints.committed()
    if step not in known:
        held = f"it holds {', '.join(map(str, known))}" if known else "it holds none"
        raise InputError(f"{run.path} has no checkpoint at step {step}; {held}.")
    problems = checkpoints.verify(step)
    if problems:
        raise StorageError(
            f"checkpoint {checkpoints.path(step)} is damaged: {'; '.join(problems[:3])}. Use another --step."
        )
    return step, []


def _other_steps(checkpoints: Checkpoints, step: int) -> str:
    others = [str(other) for other in checkpoints.committed() if other != step]
    if others:
        return f"Use another checkpoint with --step: the run holds {', '.join(others)}."
    return "The run holds no other checkpoint: train it again, with a lower learning rate."


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """RUN/model: model.safetensors, config.json, tokenizer.json. No weight has been read yet.

    `arrays` are the model's weights: those of the file, or, where it holds adapters, the base with them merged.
    """

    model: Any
    weights: WeightFile
    arrays: Arrays
    tokenizer: Tokenizer | None
    config: dict[str, Any]
    notes: list[str]

    @classmethod
    def of(cls, run: RunDirectory, base: str | Path | None = None) -> ModelFiles:
        path = run.model / WEIGHTS
        if not path.is_file():
            raise InputError(
                f"{run.path} has no checkpoint and no {path.relative_to(run.path)} yet, so there is no model "
                "to load. Train longer, or set logging.checkpoint_interval lower."
            )
        try:
            config = read_json(run.model / "config.json")
        except (OSError, ValueError) as error:
            raise StorageError(f"{run.model} cannot be read ({error}).") from error
        if not isinstance(config, dict):
            raise StorageError(f"{run.model / 'config.json'} holds no settings.")
        model, unknown = build_model(config, str(run.model))
        tokenizer = tokenizer_in(run.model, model)
        weights = WeightFile(path)
        notes = [*unknown, *weights.notes]
        model = allocated(model, run.model, tokenizer)
        return cls(model, weights, open_arrays(run.model, base), tokenizer, config, notes)

    @property
    def step(self) -> int:
        return int(self.weights.metadata.get("step", 0))


def _from_files(
    run: RunDirectory, topology: Topology | None, base: str | Path | None, weights: str = "auto"
) -> LoadedModel:
    files = ModelFiles.of(run, base)
    where, abstract = str(files.weights.path), abstract_params(files.model, topology)
    at_once = weights != "auto" and topology is None
    if at_once:
        abstract = Quantizer(files.model, weights).unread(abstract)
    params = place(files.arrays, abstract, where)
    check_finite(params, where, "Copy or download the model again, or retrain it.")
    about = (files.tokenizer, files.step, files.config, run, topology, files.notes)
    loaded = LoadedModel(files.model, params, *about)
    del params
    loaded.quantize("auto" if at_once else weights)
    return loaded


def tokenizer_in(directory: Path, model: Any) -> Tokenizer | None:
    file = directory / "tokenizer.json"
    return tokenizer_of(model, Tokenizer.load(file)) if file.is_file() else None


def tokenizer_of(model: Any, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer as the model reads it: published weights were trained on what their tokenizer writes, all
    others on documents that begin with bos."""
    return tokenizer.as_published() if isinstance(model, Llama) and model.hf_type != "auto" else tokenizer


def allocated(model: Any, directory: Path, tokenizer: Tokenizer | None) -> Any:
    """Return the model with the lookup rows saved beside its weights; one without lookup layers as it is."""
    if not has_lookup(model):
        return model
    allocation = Allocation.read(directory)
    allocation.check(model, tokenizer.hash if tokenizer is not None else None, str(directory))
    return model.clone(allocation=allocation)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as section/name → value."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{name}/")
        else:
            values[f"{prefix}{name}"] = value
    return values


def build_model(config: Mapping[str, Any], where: str) -> tuple[Any, list[str]]:
    """Return the module a saved configuration describes, and a note if it holds settings the family lacks."""
    saved = flat({section: config[section] for section in SECTIONS if isinstance(config.get(section), Mapping)})
    family = str(saved.pop(FAMILY, ""))
    if family not in models:
        named = ", ".join(map(str, config.get("plugins") or [])) or "a plugin"
        raise InputError(
            f"{where} is of the model family '{family}', which is not registered here (known: "
            f"{', '.join(models.names())}). Code named by a run ({named}) is never imported to load its "
            "model: import it yourself first, from Python; `bessemer resume` has --trust for that."
        )
    cls = models.get(family)
    settings = declared(cls)
    given = {name: s.check(saved[s.key], where) for name, s in settings.items() if s.key in saved}
    given.pop("max_documents", None)  # of the rows it was trained on; others may hold more
    model = cls(**given)
    if isinstance(model, Checked):
        model.check()
    unknown = sorted(dotted(key) for key in set(saved) - {setting.key for setting in settings.values()})
    notes = [f"{where}: not settings of {family}, so not used: {', '.join(unknown)}."] if unknown else []
    return model, notes


def frozen_store(run: RunDirectory, process_zero: bool = True) -> Checkpoints:
    """Return where a run keeps, once, the parameters that it does not train."""
    return Checkpoints(run.path / "reference" / "frozen", process_zero=process_zero)


def read_whole(
    checkpoints: Checkpoints,
    step: int,
    split: Split,
    boxed: Any,
    topology: Topology | None,
    base: str | Path | None = None,
) -> Any:
    """Return all parameters of a checkpoint: those it trained, completed by the run's frozen ones."""
    trained, kept = split.shapes(boxed)
    params = checkpoints.restore(step, located(trained, topology), only="params")
    if kept is None:
        return params
    run = RunDirectory(checkpoints.root.parent)
    record = bases.read_record(run)
    if record is not None:
        check_base(checkpoints, step, record)
        return split.complete(params, read_base(run, record, located(kept, topology), base))
    if split.quantized:
        raise StorageError(
            f"{bases.record_file(run)} is missing: it names the base model that {checkpoints.path(step)} was trained "
            "with. Put it back from a copy."
        )
    store = frozen_store(run)
    if problems := store.verify(0):
        raise StorageError(
            f"{checkpoints.path(step)} holds the trained part of its parameters only, and the frozen part "
            f"{store.path(0)} cannot be used: {'; '.join(problems[:3])}. Put that folder back from a copy."
        )
    return split.complete(params, read_frozen(store, located(kept, topology)))


def read_base(run: RunDirectory, record: BaseRecord, abstract: Any, base: str | Path | None = None) -> Any:
    """The frozen parameters of a run, from where its base lies, in the structure, dtypes and places of `abstract`; each
    is verified as it is read."""
    return place(base_arrays(run, record, base, flatten_names(abstract)), abstract, "the base model")


def base_arrays(
    run: RunDirectory, record: BaseRecord, base: str | Path | None = None, names: list[str] | None = None
) -> VerifiedArrays:
    """Return the frozen parameters of a run (or `names` of its base) as arrays that are verified as they are read."""
    where = bases.locate(run, record, base)
    return VerifiedArrays(open_arrays(where), names or list(record.tensors), where, record, run)


def check_base(checkpoints: Checkpoints, step: int, record: BaseRecord) -> None:
    """Raise StorageError if a checkpoint was trained with another base than the run records."""
    trained = parse_json(checkpoints.read(step, "meta.json")).get("frozen")
    if trained != record.sha256:
        raise StorageError(
            f"{bases.record_file(RunDirectory(checkpoints.root.parent))} does not describe the base model that "
            f"{checkpoints.path(step)} was trained with: it was changed. Put it back from a copy."
        )


def open_arrays(place: Path, base: str | Path | None = None) -> Arrays:
    """The weights in a directory as named arrays, read when they are asked for: a Hugging Face folder, files of ours or
    a checkpoint; adapters merged. base: where their base lies, in place of what is recorded."""
    if is_folder(place):
        return Folder(place)
    if (place / "config.json").is_file():
        config, file = read_json(place / "config.json"), WeightFile(place / WEIGHTS)
        if "base" not in config:
            return file
        run, record = RunDirectory(place.parent), BaseRecord.from_json(config["base"], str(place / "config.json"))
        return MergedArrays(base_arrays(run, record, base), file, saved_split(config, place))
    checkpoints, step = Checkpoints(place.parent), step_of(place.name)
    trained, split = CheckpointArrays(checkpoints, step), saved_split(saved_tree(place / "config.yaml"), place)
    if split.everything:
        return trained
    run = RunDirectory(place.parent.parent)
    if (known := bases.read_record(run)) is not None:
        check_base(checkpoints, step, known)
        return MergedArrays(base_arrays(run, known, base), trained, split)
    store = frozen_store(run)
    if problems := store.verify(0):
        raise StorageError(f"the frozen weights {store.path(0)} are damaged: {'; '.join(problems[:3])}.")
    return MergedArrays(CheckpointArrays(store, 0), trained, split)


def saved_split(config: Mapping[str, Any], place: Path) -> Split:
    """Which parameters the run of a saved configuration trained."""
    model = allocated(build_model(config, str(place))[0], place, None)
    return split_of(flat(config), boxed_params(model), model)


def read_frozen(store: Checkpoints, abstract: Any) -> Any:
    """Return the frozen parameters in the dtypes of `abstract`, whichever they were saved in: another platform may
    compute in another dtype."""
    kept = store.restore(0, as_saved(store, abstract), only="params")
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), kept, abstract)


def as_saved(store: Checkpoints, abstract: Any) -> Any:
    """Return `abstract` in the dtypes of the frozen parameters in `store`."""
    saved = select(store.leaves(0), "params")

    def kept(name: str, leaf: Any) -> Any:
        dtype = saved[name][0] if name in saved else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=leaf.sharding)

    return rebuild(abstract, {name: kept(name, leaf) for name, leaf in flatten(abstract).items()})


def check_whole(checkpoints: Checkpoints, step: int, config: Mapping[str, Any], boxed: Any, model: Any = None) -> None:
    """Raise the error that names the arrays which `read_whole` would refuse; none is read."""
    trained, kept = split_of(flat(config), boxed, model).shapes(boxed)
    checkpoints.check_fits(step, unbox(trained), only="params")
    run = RunDirectory(checkpoints.root.parent)
    if kept is not None and bases.read_record(run) is None:
        store = frozen_store(run)
        store.check_fits(0, as_saved(store, unbox(kept)), only="params")


def abstract_params(model: Any, topology: Topology | None = None) -> Any:
    """Shapes, dtypes and places of the parameters; no array is made."""
    return located(boxed_params(model, topology), topology)


def boxed_params(model: Any, topology: Topology | None = None) -> Any:
    """Shapes, dtypes and axes of the parameters; no array is made."""
    ids = jax.ShapeDtypeStruct((1, min(8, model.block_size)), jax.numpy.int32)
    with topology.scope() if topology is not None else contextlib.nullcontext():
        return jax.eval_shape(model.init, jax.random.key(0), ids)["params"]


def located(boxed: Any, topology: Topology | None) -> Any:
    """Abstract arrays on the first device, or where `topology` rests them."""
    if topology is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        places = jax.tree.map(lambda _: device, unbox(boxed))
    else:
        places = shardings(boxed, topology.mesh, topology.rest_rules)
    return jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), unbox(boxed), places
    )


# A model whose numbers are not numbers says so: its text would be noise that looks like an answer.


NAMED = 3
"""Parameters that an error names; the rest are counted."""


@jax.jit
def _all_finite(leaf: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(leaf))


def _is_finite(leaf: jax.Array) -> Any:
    """By numpy, which reads a CPU's array where it lies, or by its devices: that compiles once a shape."""
    if len(leaf.devices()) == 1 and next(iter(leaf.devices())).platform == "cpu":
        return np.isfinite(np.asarray(leaf)).all()
    return _all_finite(leaf)


def check_finite(params: Any, where: str, advice: str) -> None:
    """TrainingError that names the parameters which hold NaN or infinity; each is read once, on its device."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    floating = [(path, leaf) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    fine = jax.device_get([_is_finite(leaf) for _, leaf in floating])
    bad = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, _), good in zip(floating, fine, strict=True)
        if not good
    ]
    if bad:
        named = ", ".join(bad[:NAMED]) + (", …" if len(bad) > NAMED else "")
        raise TrainingError(
            f"{len(bad)} of the {len(leaves)} parameters of {where} hold values that are not finite (NaN or "
            f"infinity): {named}. Its output is meaningless. {advice}"
        )


def check_scores(logprobs: Any) -> None:
    """TrainingError where the log-probability of a real token is NaN."""
    if np.isnan(logprobs).any():
        raise TrainingError(
            "the model's output is not a number (NaN): its parameters are not finite, or so large that computing with "
            "them overflows. Its output is meaningless; use an earlier checkpoint."
        )
