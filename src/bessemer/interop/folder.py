"""A folder with a Hugging Face model: config.json and safetensors files, read as a model of ours, and written.

What is read is checked from the headers before the first array is read: names, shapes, lengths of files. `bessemer
export` writes a model of the llama family as transformers loads it, and any other in our own format.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bessemer.config import declared
from bessemer.config.bounded import read_json
from bessemer.console import Advance, ShowBytes, no_progress
from bessemer.console import size as byte_size
from bessemer.data.tokenize.chat import TURN_TOKENS, can_chat, stop_ids
from bessemer.data.tokenize.templates import CONFIG as TOKENIZER_CONFIG
from bessemer.data.tokenize.templates import OUR_TEMPLATE
from bessemer.data.tokenize.tokenizer import FILE, Tokenizer
from bessemer.errors import InputError, StorageError, to_install
from bessemer.interop.config import BUFFERS, HEAD, HFConfig, Tensor, config_of, positions_of, tensors_of
from bessemer.interop.four_bit import BLOCKS, STATE, Mxfp4Tensor, QuantizedTensor, is_mxfp4_part, is_part
from bessemer.job import RunDirectory, check_run_name
from bessemer.job.trust import check_folder
from bessemer.models.llama import Llama
from bessemer.registry import hf_types, models
from bessemer.storage.files import atomic_directory, storage
from bessemer.storage.weights import OURS, Arrays, Entry, Signature, WeightFile, flatten, signature, total, write_file
from bessemer.topology import unbox

# --- reading ---


CONFIG, GENERATION = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("float32", "float16", "bfloat16")


def is_folder(path: Path) -> bool:
    """Return whether a directory holds a Hugging Face model: its config.json names a model_type."""
    try:
        return "model_type" in read_json(path / CONFIG)
    except (OSError, ValueError, TypeError):
        return False


def read_object(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise InputError(f"{path.parent} has no {path.name}: it is not a Hugging Face model.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}).") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds {type(found).__name__}, not an object.")
    return found


class Folder:
    """The model in a folder. As named arrays (`signature`, `read`) it speaks our names and our layout.

    needs_weights=False: config.json alone will do for `settings`, as a plan needs no weights.
    """

    def __init__(self, path: Path, needs_weights: bool = True):
        check_folder(path)
        self.path, self.needs_weights = path, needs_weights
        self.left_out: list[str] = []  # names of tensors that are not read, once `files` is known

    @property
    def has_weights(self) -> bool:
        return (self.path / SINGLE).is_file() or (self.path / INDEX).is_file()

    @cached_property
    def settings(self) -> dict[str, Any]:
        """section/name → value, as a configuration of ours would hold them."""
        config = HFConfig(read_object(self.path / CONFIG), str(self.path / CONFIG))
        values = config.settings()
        if (self.path / GENERATION).is_file():
            ends = HFConfig(read_object(self.path / GENERATION), str(self.path / GENERATION)).end_tokens()
            values["model/end_tokens"] = ends or values["model/end_tokens"]
        if not self.needs_weights and not self.has_weights:
            named = str(config.values.get("torch_dtype") or config.values.get("dtype") or FLOATS[0])
            return values | {"model/weights_dtype": named if named in FLOATS else FLOATS[0]}
        if config.values.get("tie_word_embeddings") is None and HEAD not in self.files:
            values["model/tied_head"] = True  # the key was left out, as its default was; the weights tell
        kinds = {str(file.entries[name].dtype) for name, file in self.files.items() if not self._is_part(name)}
        kinds |= {str(packed.dtype) for packed in self.quantized.values()}
        floats = [kind for kind in FLOATS if kind in kinds]
        values["model/weights_dtype"] = floats[0] if floats else "float32"
        return values

    @property
    def tree(self) -> dict[str, Any]:
        """The settings nested, as in config.yaml."""
        nested: dict[str, Any] = {}
        for key, value in self.settings.items():
            *sections, name = key.split("/")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        return nested

    @cached_property
    def model(self) -> Llama:
        where = str(self.path / CONFIG)
        family: type[Llama] = models.get(self.settings["model/family"])
        given = {
            name: setting.check(self.settings[setting.key], where)
            for name, setting in declared(family).items()
            if setting.key in self.settings
        }
        model = family(**given)
        try:
            model.check()
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        return model

    @cached_property
    def files(self) -> dict[str, WeightFile]:
        """Their name of a tensor → the file it should lie in."""
        index = self.path / INDEX
        if not index.is_file():
            if not (self.path / SINGLE).is_file():
                raise self._without_weights()
            return self._of_text([WeightFile(self.path / SINGLE)])
        listed = read_object(index).get("weight_map")
        if not isinstance(listed, Mapping):
            raise InputError(f"{index} has no 'weight_map'.")
        opened: dict[str, WeightFile] = {}
        for name, part in listed.items():
            if not isinstance(part, str) or not part or Path(part).name != part or "\0" in part:
                raise InputError(
                    f"{index}: weight_map gives {part!r} for '{name}'; it must be the name of a file in {self.path}."
                )
            if part not in opened:
                if not (self.path / part).is_file():
                    raise StorageError(f"{index} says that '{name}' is in '{part}', which is not there.")
                opened[part] = WeightFile(self.path / part)
            if name not in opened[part].entries:
                raise StorageError(f"{index} says that '{name}' is in {part}, which does not hold it.")
        unlisted = [name for file in opened.values() for name in file.entries if name not in listed]
        if unlisted:
            raise StorageError(f"{index} does not list '{unlisted[0]}', which its files hold.")
        return self._of_text(list(opened.values()))

    def _of_text(self, files: list[WeightFile]) -> dict[str, WeightFile]:
        """Return their name of every tensor of the text model → its file, whose entries are those from now on."""
        kind = hf_types.get(HFConfig(read_object(self.path / CONFIG), str(self.path / CONFIG)).known_kind())
        for file in files:
            if file.checksums is not None or not kind.left_out:
                continue  # written here, and so with the names of a text model
            for name in list(file.entries):
                entry = file.entries.pop(name)
                if any(name.startswith(beginning) for beginning in kind.left_out):
                    self.left_out.append(name)
                else:
                    file.entries |= text_entries(name, entry)
        return {name: file for file in files for name in file.entries}

    @property
    def left_out_lines(self) -> list[str]:
        """Return a line for each kind of tensors that were not read."""
        kind = hf_types.get(self.settings["model/hf_type"])  # which reads the headers
        counts = {
            what: sum(name.startswith(beginning) for name in self.left_out) for beginning, what in kind.left_out.items()
        }
        return [f"left out   {count} {what}: they have no place here" for what, count in counts.items() if count]

    @cached_property
    def quantization(self) -> str:
        return HFConfig(read_object(self.path / CONFIG), str(self.path / CONFIG)).quantization()

    def _is_part(self, name: str) -> bool:
        return is_mxfp4_part(name) if self.quantization == "mxfp4" else is_part(name)

    @cached_property
    def quantized(self) -> dict[str, QuantizedTensor | Mxfp4Tensor]:
        """Their name → a tensor that is stored in 4 bits."""
        if self.quantization == "none":
            return {}
        if self.quantization == "mxfp4":
            packed = [name.removesuffix(BLOCKS) for name in self.files if name.endswith(BLOCKS)]
            return {name: Mxfp4Tensor.of(name, self.files) for name in packed}
        names = [name.removesuffix(STATE) for name in self.files if name.endswith(STATE)]
        for name in names:
            if name not in self.files:
                raise InputError(f"{self.files[name + STATE].path} has '{name + STATE}' and no '{name}'.")
        return {name: QuantizedTensor.of(name, self.files) for name in names}

    def entry(self, theirs: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor as it is read."""
        if (packed := self.quantized.get(theirs)) is not None:
            return str(packed.dtype), packed.shape
        found = self.files[theirs].entries[theirs]
        return str(found.dtype), found.shape

    def _without_weights(self) -> InputError:
        others = [path.name for form in ("*.bin", "*.pt", "*.pth") for path in self.path.glob(form)]
        pickled = f" {others[0]} is a pickle, which is never opened: convert it to safetensors first." if others else ""
        return InputError(f"{self.path} has neither {SINGLE} nor {INDEX}.{pickled}")

    @cached_property
    def tensors(self) -> dict[str, tuple[Tensor, ...]]:
        """Our name → the tensors it is stored in: one, or one per expert of a stack.

        Every one is in the files in the right shape, and nothing else is.
        """
        self._check_depth()
        wanted = tensors_of(parameter_signature(self.model), self.model)
        for name, tensor in wanted.items():
            packed = self.quantized.get(name)
            if name not in self.files and packed is None:
                place = INDEX if (self.path / INDEX).is_file() else SINGLE
                raise StorageError(f"{self.path / place} has no '{name}', which {CONFIG} calls for.")
            (dtype, shape), file = self.entry(name), self.files[name if packed is None else packed.parts[0]].path
            if shape != tensor.their_shape:
                raise StorageError(f"{file}: '{name}' has shape {shape}; {CONFIG} calls for {tensor.their_shape}.")
            if dtype not in FLOATS:
                raise StorageError(f"{file}: '{name}' is {dtype}; weights are {', '.join(FLOATS)}.")
        parts = {part for packed in self.quantized.values() for part in packed.parts}
        for name in set(self.files) - set(wanted) - parts:
            repeated = name == HEAD and self.model.tied_head
            if not repeated and not BUFFERS.fullmatch(name):
                raise StorageError(
                    f"{self.files[name].path} holds '{name}', which a {self.settings['model/hf_type']} of this "
                    f"{CONFIG} does not have; leaving it out would make another model."
                )
        found: dict[str, tuple[Tensor, ...]] = {}
        for tensor in sorted(wanted.values(), key=lambda tensor: tensor.expert or 0):
            found[tensor.ours] = (*found.get(tensor.ours, ()), tensor)
        return {tensor.ours: found[tensor.ours] for tensor in wanted.values()}

    def _check_depth(self) -> None:
        """Raise InputError if config.json asks for more layers than the files hold, before they are traced."""
        held = len({name.split(".")[2] for name in self.files if re.match(r"model\.layers\.\d+\.", name)})
        if self.model.depth > held:
            raise InputError(
                f"{self.path / CONFIG}: num_hidden_layers is {self.model.depth}; the weights beside it have {held} "
                "layers."
            )

    def signature(self) -> Signature:
        return {name: (self.entry(parts[0].theirs)[0], parts[0].shape) for name, parts in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        return self.read_parts(name, lambda theirs: self.files[theirs].read(theirs))

    def read_parts(self, name: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Return an array in our layout from the tensors it is stored in, each of which is taken from `read`."""
        made = []
        for tensor in self.tensors[name]:
            packed = self.quantized.get(tensor.theirs)
            made.append(tensor.to_ours(read(tensor.theirs) if packed is None else packed.read(read)))
        return made[0] if self.tensors[name][0].expert is None else np.stack(made)


TEXT = "model.language_model."
"""What names of the text model begin with in a multi-modal checkpoint, in place of `model.`."""
STACKS = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<part>gate_up_proj|down_proj)")


def text_entries(name: str, entry: Entry) -> dict[str, Entry]:
    """Return the entries, by the names that a text model's files have, of a tensor of a multi-modal one.

    Stacks of experts become one tensor per expert: gate and up (E, 2F, D), one after the other, and down (E, D, F).
    """
    name = "model." + name.removeprefix(TEXT) if name.startswith(TEXT) else name
    stack = STACKS.fullmatch(name)
    if stack is None or len(entry.shape) != 3:
        return {name: entry}
    parts = ("gate_proj", "up_proj") if stack["part"] == "gate_up_proj" else ("down_proj",)
    count, rows, columns = entry.shape
    shape = (rows // len(parts), columns)
    size = shape[0] * shape[1] * entry.dtype.itemsize
    return {
        f"{stack['experts']}.{expert}.{part}.weight": Entry(
            entry.dtype, shape, entry.start + (expert * len(parts) + place) * size
        )
        for expert in range(count)
        for place, part in enumerate(parts)
    }


@lru_cache(maxsize=4)
def parameter_signature(model: Llama) -> Signature:
    """Name, dtype and shape of every parameter. A run asks before it starts and again when it reads the weights, and a
    trace of 16 layers takes a quarter of a second."""
    ids = jax.ShapeDtypeStruct((1, 1), np.int32)
    return signature(flatten(unbox(jax.eval_shape(model.init, jax.random.key(0), ids)["params"])))


# `bessemer import`: the model becomes a run, with weights in RUN/model in the dtype they came in.


def import_folder(
    source: Path, out: Path, show: ShowBytes = no_progress, context: int | None = None
) -> tuple[RunDirectory, list[str]]:
    """Return the run, and lines to show. Memory: one tensor. Everything is checked before anything is written."""
    check_run_name(out.name)
    if out.exists():
        raise InputError(f"{out} already exists; an import makes a new run. Choose another name, or delete it.")
    folder = Folder(source)
    if context is not None:
        folder.settings["architecture/block_size"] = context
    entries = folder.signature()
    tokenizer = Tokenizer.load(source) if (source / FILE).is_file() else None
    lines = facts(folder, tokenizer, total(entries.values()))
    with storage("cannot write the imported model"), atomic_directory(out) as partial:
        (partial / "model").mkdir()
        with show(f"importing {source.name}", total(entries.values())) as progress:
            write_model(folder, tokenizer, partial, progress)
        RunDirectory(partial).write_status(
            state="done", step=0, exit_code=0, message=f"imported from {source.absolute()}"
        )
    return RunDirectory(out), lines


def write_model(folder: Folder, tokenizer: Tokenizer | None, run: Path, progress: Advance) -> None:
    import yaml

    texts = {CONFIG: json.dumps(folder.tree, indent=1) + "\n"} | (tokenizer.files if tokenizer is not None else {})
    for name, text in texts.items():
        (run / "model" / name).write_text(text, encoding="utf-8")
    write_file(
        run / "model" / SINGLE, folder.signature(), folder.read, {"format": OURS, "step": "0"}, progress, beside=texts
    )
    (run / "config.yaml").write_text(yaml.safe_dump(folder.tree, sort_keys=False), encoding="utf-8")


def facts(folder: Folder, tokenizer: Tokenizer | None, size: int) -> list[str]:
    """Return what was found, and what a user should know about it."""
    model, counts = folder.model, folder.model.count_parameters()
    context, positions = folder.settings["architecture/block_size"], model.max_positions
    lines = [
        f"model      {model.hf_type}, {counts['total']:,} parameters, {byte_size(size)} of {model.weights_dtype}",
        f"context    {context:,} of the model's {positions:,} tokens"
        + (" (--context gives more)" if context < positions else ""),
    ]
    lines += folder.left_out_lines
    if tokenizer is None:
        return [*lines, f"tokenizer  none: {folder.path} has no {FILE}, so this run takes token ids, not text"]
    if tokenizer.vocab_size > model.vocab_size:
        raise InputError(
            f"{folder.path / FILE} has {tokenizer.vocab_size} tokens and config.json a vocab_size of "
            f"{model.vocab_size}: ids would fall outside the embedding."
        )
    chat = "with its chat template" if tokenizer.chat_template else "without a chat template"
    return [*lines, f"tokenizer  {tokenizer.vocab_size:,} tokens, {chat}"]


# `hf:OWNER/NAME[@REVISION]`: a model of the Hugging Face hub, downloaded once into that program's own cache.


PREFIX = "hf:"
NEEDED = ("*.json", "*.safetensors", "*.jinja")
"""Configuration, tokenizer, template and weights; nothing that is code or a pickle."""


def is_hub(source: str) -> bool:
    return source.startswith(PREFIX)


def fetched(source: str) -> Path:
    """The local folder of a model on the hub. HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN mean what they mean there."""
    named = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", source)
    if named is None or ".." in (named[2] or "").split("/"):  # adapters name a revision, which is part of a path
        raise InputError(f"'{source}' is not hf:OWNER/NAME or hf:OWNER/NAME@REVISION.")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise InputError(
            f"{source} needs the extra `hf`: {to_install('hf')}. Or download the folder yourself."
        ) from error
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    try:
        return Path(
            snapshot_download(
                named[1],
                revision=named[2],
                allow_patterns=list(NEEDED),
                cache_dir=os.environ.get("HF_HUB_CACHE"),
                local_files_only=offline,
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise StorageError(
            f"{source} cannot be fetched: {reason}. Check the name, the network, HF_HUB_OFFLINE, and HF_TOKEN for a "
            "model behind a license; or download the folder yourself and name that."
        ) from error


# --- writing ---


SHARD = 5 * 10**9
"""Bytes of a weight file before another is begun."""


def export_folder(
    arrays: Arrays,
    model: Llama,
    tokenizer: Tokenizer | None,
    out: Path,
    show: ShowBytes = no_progress,
    *,
    dtype: str | None = None,
    shard: int = SHARD,
) -> list[str]:
    """Write the folder and return lines to show. Memory: one tensor beside `arrays`. dtype None: each as it is."""
    ids = token_ids(model, tokenizer)
    stored = arrays.signature()
    tensors = tensors_of(stored, model)
    entries: Signature = {
        name: (dtype or stored[tensor.ours][0], tensor.their_shape) for name, tensor in tensors.items()
    }
    kinds = sorted({kind for kind, _ in entries.values()})
    config = config_of(model, kinds[0] if len(kinds) == 1 else "float32", ids)
    texts = {CONFIG: _json(config), GENERATION: _json({"_from_model_config": True, **ids})}
    if tokenizer is not None:
        texts |= tokenizer_files(tokenizer, ids, positions_of(model))

    @lru_cache(1)  # the experts of a stack are written one after the other
    def read_ours(name: str) -> np.ndarray:
        return arrays.read(name)

    def read(name: str) -> np.ndarray:
        return tensors[name].to_theirs(read_ours(tensors[name].ours))

    with storage("cannot write the export"):
        make_empty(out)
        size = total(entries.values())
        with show(f"exporting {out.name}", size) as progress:
            parts = shards_of(entries, shard)
            for part, held in parts.items():
                write_file(out / part, held, read, {"format": "pt"}, progress)
        if len(parts) > 1:
            places = {name: part for part, held in parts.items() for name in held}
            texts[INDEX] = _json({"metadata": {"total_size": size}, "weight_map": places})
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    files = f"{len(parts)} files" if len(parts) > 1 else SINGLE
    lines = [f"model      {config['model_type']}, {byte_size(size)} of {', '.join(kinds)} in {files}"]
    return lines if tokenizer is not None else [*lines, "tokenizer  none: this run has none to export"]


def make_empty(out: Path) -> None:
    """The directory of an export: new, or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty directory; choose another, or empty it.")
    out.mkdir(parents=True, exist_ok=True)


def shards_of(entries: Signature, limit: int) -> dict[str, Signature]:
    """File name → its tensors, in order; a file ends before it would pass `limit` bytes."""
    parts: list[Signature] = [{}]
    for name, entry in entries.items():
        if parts[-1] and total(parts[-1].values()) + total([entry]) > limit:
            parts.append({})
        parts[-1][name] = entry
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


# A tokenizer as transformers wants it: tokenizer.json, and tokenizer_config.json with names and the chat
# template.


def token_ids(model: Llama, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """bos_token_id, eos_token_id and pad_token_id, as config.json and generation_config.json hold them."""
    ends = list(model.end_tokens)
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": _one(ends), "pad_token_id": None}
    if not ends:
        turn = stop_ids(tokenizer) if can_chat(tokenizer) else ()
        ends = list(dict.fromkeys([tokenizer.bos_id, *turn]))
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": _one(ends), "pad_token_id": tokenizer.pad_id}


def _one(ids: list[int]) -> int | list[int] | None:
    return ids if len(ids) > 1 else ids[0] if ids else None


def tokenizer_files(tokenizer: Tokenizer, ids: dict[str, Any], positions: int) -> dict[str, str]:
    """File name → text. A tokenizer that came with a template keeps the names that came with it, and only those: a bos
    that it did not have would be put before every text."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.chat_template is not None:
        config |= {**tokenizer.chat_template.tokens, "chat_template": tokenizer.chat_template.as_configured}
    else:
        config |= _names(tokenizer, ids)
        if all(name in tokenizer.specials for name in TURN_TOKENS):
            config["chat_template"] = OUR_TEMPLATE
    return {FILE: tokenizer.to_json(), TOKENIZER_CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n"}


def _names(tokenizer: Tokenizer, ids: dict[str, Any]) -> dict[str, str]:
    names = {index: name for name, index in tokenizer.specials.items()}
    ends = ids["eos_token_id"]
    wanted = {
        "bos_token": ids["bos_token_id"],
        "eos_token": ends[0] if isinstance(ends, list) else ends,
        "pad_token": ids["pad_token_id"],
    }
    return {name: names[index] for name, index in wanted.items() if index in names}
