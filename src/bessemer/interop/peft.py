"""Low-rank adapters in the layout of PEFT, written and read: adapter_config.json and adapter_model.safetensors.

Ours: W' = W + s·A·B with A (fan_in, r), B (r, fan_out), s = α/r or α/√r. Theirs are the transposes, under the names of
the matrices they adapt. The lengths of DoRA are a vector there and here. Ranks and α by pattern become PEFT's
`rank_pattern` and `alpha_pattern`, by the full name of each matrix. An embedding or head trained whole is one of
`modules_to_save`. Merged weights need nothing of this: a plain export has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bessemer.errors import InputError, StorageError
from bessemer.interop.config import MATRICES, HFConfig, Tensor, their_name, type_of
from bessemer.interop.folder import FLOATS, make_empty, read_object
from bessemer.job import RunDirectory
from bessemer.job.trust import FILE, Request, check_folder, is_harmful
from bessemer.models.llama import Llama
from bessemer.models.lora import ALL_LINEAR, LoraSettings
from bessemer.registry import hf_types
from bessemer.storage.files import storage
from bessemer.storage.weights import Arrays, Signature, WeightFile, write_file

T = TypeVar("T")
PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_m": "lora_magnitude_vector"}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ROOT = "base_model.model."
WHOLE = {"embedding": "embed_tokens", "head": "lm_head"}
"""What can be trained whole beside adapters, and the name it has in `modules_to_save`."""


def export_adapters(arrays: Arrays, lora: LoraSettings, model: Llama, out: Path, base: str | None = None) -> list[str]:
    """Write the trained part of a run's parameters and return lines to show. lora: the run's settings."""
    entries: Signature = {}
    sources: dict[str, Callable[[], np.ndarray]] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    whole: list[str] = []
    kind = hf_types.get(type_of(model))
    known = {**MATRICES, **kind.matrices}
    for name, (dtype, shape) in arrays.signature().items():
        matrix, _, part = name.rpartition("/")
        if name in WHOLE and not model.tied_head:
            tensor = Tensor(name, their_name(name), shape, model.vocab_size)
            theirs = ROOT + tensor.theirs
            entries[theirs], sources[theirs] = (dtype, tensor.their_shape), partial(_turned, arrays, name, tensor)
            whole.append(WHOLE[name])
            continue
        if part not in PARTS or matrix.rpartition("/")[2] not in known:
            raise InputError(
                f"'{name}' is trained but is not an adapter of an attention or feed-forward matrix, so PEFT's "
                "layout has no place for it. Export the merged model instead, without --adapters."
            )
        module = their_name(matrix, kind).removesuffix(".weight")
        theirs = f"{ROOT}{module}.{PARTS[part]}"
        entries[theirs], sources[theirs] = (dtype, shape[::-1]), partial(_transposed, arrays, name)
        if part == "lora_a":
            ranks[module] = shape[-1]
            alphas[module] = lora.alpha_of(tuple(matrix.split("/")))
    modules = sorted({module.split(".")[-1] for module in ranks})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "rank_pattern": {module: rank for module, rank in sorted(ranks.items()) if rank != lora.rank},
        "alpha_pattern": {module: alpha for module, alpha in sorted(alphas.items()) if alpha != lora.alpha},
        "use_dora": lora.dora,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules if _in_every_layer(ranks, lora, model.depth) else sorted(ranks),
        "modules_to_save": sorted(whole) or None,
    }
    with storage("cannot write the adapters"):
        make_empty(out)
        write_file(out / WEIGHTS, entries, lambda name: sources[name](), {"format": "pt"})
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [f"adapters   rank {config['r']} on {', '.join(modules)}: {len(ranks)} matrices"]


def _transposed(arrays: Arrays, name: str) -> np.ndarray:
    return arrays.read(name).T


def _turned(arrays: Arrays, name: str, tensor: Tensor) -> np.ndarray:
    return tensor.to_theirs(arrays.read(name))


def _in_every_layer(ranks: Mapping[str, int], lora: LoraSettings, depth: int) -> bool:
    """Return whether the last part of a name says which matrices are adapted: those of all layers."""
    kinds = [module.split(".")[-1] for module in ranks]
    return lora.targets in ((), ALL_LINEAR) or all(kinds.count(kind) == depth for kind in set(kinds))


# --- reading ---
#
# The files may come from anybody: every value is checked with its key before it is used, nothing in them is run, and
# a pattern of theirs is compared as a name, never as a regular expression.

KINDS = {theirs.rpartition(".")[2]: ours for ours, theirs in MATRICES.items()}  # q_proj → q
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>model\.layers\.(?P<block>\d{1,6})\.(?:self_attn|mlp)\.(?P<kind>\w+))"
    r"\.(?P<part>lora_A\.weight|lora_B\.weight|lora_magnitude_vector(?:\.weight)?)"
)
_NAME = re.compile(r"\^?[\w.]+")  # a pattern that is a name; PEFT also takes regular expressions
MOST = 2**31  # of a rank or α
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
USED = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "lora_dropout", "rank_pattern", "alpha_pattern"),
    *("target_modules", "modules_to_save", "bias", "init_lora_weights", "base_model_name_or_path", "revision"),
}
IGNORED = {
    *("task_type", "auto_mapping", "inference_mode", "peft_version", "runtime_config", "megatron_core"),
    *("qalora_group_size", "loftq_config", "eva_config", "exclude_modules"),
}
"""Keys without effect on saved adapters: how they were trained, or settings of features that other keys switch on.
`exclude_modules` only decides which matrices have adapters, and the file shows that."""
KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is. PiSSA, OLoRA, CorDA, LoftQ and others change it."""


def is_peft(path: Path) -> bool:
    """Return whether a directory holds adapters as PEFT saves them."""
    return (path / CONFIG).is_file()


class _Part(NamedTuple):
    theirs: str
    block: int
    kind: str
    name: str  # lora_a, lora_b or lora_m


class PeftFolder:
    """The adapters in a folder. As named arrays (`signature`, `read`) they have our names and our layout.

    What Bessemer does not support is an InputError that names the file and the key; nothing is read until asked for.
    """

    def __init__(self, path: Path):
        check_folder(path)
        self.path = path.absolute()
        self.config = HFConfig(read_object(path / CONFIG), str(path / CONFIG))
        self._check()

    def _check(self) -> None:
        config = self.config
        kind = config.text("peft_type", "")
        if kind != "LORA":
            raise config.refuse("peft_type", "only LORA is supported (with use_dora and use_rslora).")
        if config.text("bias", "none") != "none":
            raise config.refuse("bias", "trained biases are not supported; only 'none' is.")
        start = config.values.get("init_lora_weights")
        if start is not None and start not in KEEPS_BASE:
            raise config.refuse(
                "init_lora_weights",
                "such adapters fit a base that was changed when training began. Convert them with PEFT first "
                "(save_pretrained with path_initial_model_for_weight_conversion).",
            )
        for key, value in config.values.items():
            if key not in USED | IGNORED and value not in (None, False, 0, "", [], {}):
                raise config.refuse(key, "Bessemer does not support this feature of PEFT.")

    @property
    def base(self) -> tuple[str | None, str | None]:
        """(base_model_name_or_path, revision)."""
        named = self.config.text("base_model_name_or_path", "") or None
        return named, self.config.text("revision", "") or None

    def find_base(self, remedy: str) -> str:
        """Return the base that the folder names: a local path, or hf:OWNER/NAME[@REVISION].

        A path is opened only where any file of a run from elsewhere would be (job/trust.py). remedy: how the user
        names the base.
        """
        named, revision = self.base
        where = self.path / CONFIG
        if named is None:
            raise InputError(f"{where}: base_model_name_or_path is missing. {remedy}")
        try:
            is_there = Path(named).is_dir()
        except (OSError, ValueError):
            is_there = False
        if is_there:
            if is_harmful(Request(FILE, "base_model_name_or_path", named), RunDirectory(self.path)):
                raise InputError(
                    f"{where}: base_model_name_or_path is {named}, outside the working directory, and is not opened on "
                    f"the word of a file. {remedy}"
                )
            return named
        if _HUB_ID.fullmatch(named):
            return f"hf:{named}" + (f"@{revision}" if revision else "")
        raise InputError(
            f"{where}: base_model_name_or_path is {named[:200]!r}, which is neither a directory here nor OWNER/NAME of "
            f"the hub. {remedy}"
        )

    @cached_property
    def file(self) -> WeightFile:
        path = self.path / WEIGHTS
        if not path.is_file():
            pickled = (self.path / "adapter_model.bin").is_file()
            why = " adapter_model.bin is a pickle, which is never opened: save it as safetensors." if pickled else ""
            raise InputError(f"{self.path} has no {WEIGHTS}.{why}")
        return WeightFile(path)

    @cached_property
    def whole(self) -> dict[str, str]:
        """Return our name → theirs, for what `modules_to_save` trained whole."""
        saved = self.config.values.get("modules_to_save") or []
        known = {theirs: ours for ours, theirs in WHOLE.items()}
        if not isinstance(saved, list) or not all(isinstance(name, str) and name in known for name in saved):
            raise self.config.refuse(
                "modules_to_save", f"only {' and '.join(known)} can be trained whole (lora.whole)."
            )
        return {known[name]: ROOT + their_name(known[name]) for name in sorted(set(saved))}

    @cached_property
    def parts(self) -> dict[str, _Part]:
        """Return our name → the tensor of every adapter, after checking names, dtypes and shapes."""
        found: dict[str, _Part] = {}
        turned = {theirs: ours for ours, theirs in PARTS.items()}
        for theirs, entry in self.file.entries.items():
            if theirs in self.whole.values():
                continue
            named = _TENSOR.fullmatch(theirs)
            if named is None or named["kind"] not in KINDS or their_name_of(named) != named["module"]:
                raise InputError(
                    f"{self.file.path}: '{theirs[:200]}' is not an adapter of an attention or feed-forward matrix of a "
                    "llama, mistral, qwen2 or qwen3, nor named by modules_to_save: nothing here can use it."
                )
            if str(entry.dtype) not in FLOATS:
                raise InputError(f"{self.file.path}: '{theirs}' is {entry.dtype}; adapters are {', '.join(FLOATS)}.")
            part = turned[named["part"].removesuffix(".weight") if "vector" in theirs else named["part"]]
            block, kind = int(named["block"]), KINDS[named["kind"]]
            found[f"blocks_{block}/{kind}/{part}"] = _Part(theirs, block, kind, part)
        self._check_parts(found)
        return found

    def _check_parts(self, found: Mapping[str, _Part]) -> None:
        wanted = [name for name in PARTS if name != "lora_m" or self.config.flag("use_dora")]
        matrices = {(part.block, part.kind): part.theirs.partition(".lora_")[0] for part in found.values()}
        if not matrices:
            raise InputError(f"{self.file.path} holds no adapters.")
        for (block, kind), module in matrices.items():
            held = [name for name in PARTS if f"blocks_{block}/{kind}/{name}" in found]
            if held != wanted:
                odd = next(name for name in PARTS if (name in held) != (name in wanted))
                hint = f" (use_dora is {str('lora_m' in wanted).lower()} in {CONFIG})" if odd == "lora_m" else ""
                problem = "is missing" if odd in wanted else "has no use"
                raise InputError(f"{self.file.path}: '{module}.{PARTS[odd]}' {problem}{hint}.")
            a, b = (self.file.entries[f"{module}.{PARTS[name]}"].shape for name in ("lora_a", "lora_b"))
            if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
                raise InputError(
                    f"{self.file.path}: '{module}' has lora_A {a} and lora_B {b}; (r, in) and (out, r) fit."
                )
        for ours, theirs in self.whole.items():
            if theirs not in self.file.entries:
                raise InputError(
                    f"{self.file.path} has no '{theirs}', which modules_to_save names ({WHOLE[ours]} in {CONFIG})."
                )

    def settings(self, model: Llama) -> dict[str, Any]:
        """Return section/name → value of the settings that these adapters have over the base `model`."""
        config, depth = self.config, model.depth
        rank, alpha = config.whole("r", 8), float(config.real("lora_alpha", 8))
        if not 0 < alpha < MOST:
            raise config.refuse("lora_alpha", f"it must be above 0 and below {MOST:,}.")
        dropout = float(config.real("lora_dropout", 0.0))
        if dropout >= 1:
            raise config.refuse("lora_dropout", "it must be below 1.")
        modules = {
            (part.block, part.kind): part.theirs.removeprefix(ROOT).partition(".lora_")[0]
            for part in self.parts.values()
        }
        if beyond := [module for (block, _), module in modules.items() if block >= depth]:
            raise InputError(f"{self.file.path}: '{beyond[0]}' is beyond the {depth} layers of the base model.")
        if self.whole and model.tied_head:
            raise config.refuse("modules_to_save", "the base ties its head to its embedding, so neither can be alone.")
        ranks = {at: self.file.entries[f"{ROOT}{module}.lora_A.weight"].shape[0] for at, module in modules.items()}
        self._check_ranks(ranks, modules, rank)
        alphas = self._by_name("alpha_pattern", modules, alpha)
        self._check_targets(modules)
        return {
            "lora/rank": rank,
            "lora/alpha": alpha,
            "lora/rank_stabilized": config.flag("use_rslora"),
            "lora/dora": config.flag("use_dora"),
            "lora/dropout": dropout,
            "lora/targets": _targets(modules, depth),
            "lora/rank_pattern": _patterns(ranks, rank, depth),
            "lora/alpha_pattern": _patterns(alphas, alpha, depth),
            "lora/whole": sorted(self.whole),
        }

    def _by_name(self, key: str, modules: Mapping[T, str], default: float) -> dict[T, float]:
        """Return the value that a pattern of `key` gives each module: the first that is its name, or the end of it."""
        table = self.config.section(key)
        for pattern, value in table.items():
            if not _NAME.fullmatch(pattern):
                raise self.config.refuse(key, f"'{pattern[:80]}' is a regular expression; write the names of modules.")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST:
                raise self.config.refuse(key, f"the value of '{pattern[:80]}' must be a number above 0.")

        def fits(pattern: str, module: str) -> bool:
            bare = pattern.removeprefix("^")
            return module == bare or (bare == pattern and module.endswith(f".{bare}"))

        return {
            at: next((float(value) for pattern, value in table.items() if fits(pattern, module)), default)
            for at, module in modules.items()
        }

    def _check_ranks(self, ranks: Mapping[T, int], modules: Mapping[T, str], rank: int) -> None:
        """Raise InputError if a matrix has another rank than the configuration says: its scale would be wrong."""
        declared = self._by_name("rank_pattern", modules, rank)
        for at, found in ranks.items():
            if declared[at] != found:
                raise InputError(
                    f"{self.file.path}: '{modules[at]}' has rank {found}, and r with rank_pattern in {CONFIG} give "
                    f"{declared[at]:g}."
                )

    def _check_targets(self, modules: Mapping[Any, str]) -> None:
        targets = self.config.values.get("target_modules")
        if isinstance(targets, str) or targets is None:
            return  # all-linear or a regular expression: the file shows which matrices have adapters
        if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
            raise self.config.refuse("target_modules", "it must be a list of names, or a string.")
        for module in modules.values():
            if not any(module == name or module.endswith(f".{name}") for name in targets):
                raise self.config.refuse(
                    "target_modules", f"{WEIGHTS} holds adapters of '{module}', which it leaves out."
                )

    def arrays(self, model: Llama) -> PeftArrays:
        """Return the adapters, and what was trained whole, as arrays of our names and layout over the base `model`."""
        return PeftArrays(self, model)


def their_name_of(named: re.Match[str]) -> str:
    return their_name(f"blocks_{int(named['block'])}/{KINDS[named['kind']]}").removesuffix(".weight")


class PeftArrays:
    """The arrays of a `PeftFolder`; float32, as adapters are kept here."""

    def __init__(self, folder: PeftFolder, model: Llama):
        self.folder = folder
        shape = model.shape
        sizes = {"embedding": (shape.padded_vocab, shape.width), "head": (shape.width, shape.padded_vocab)}
        self.tensors = {name: Tensor(name, their_name(name), sizes[name], model.vocab_size) for name in folder.whole}
        for name, tensor in self.tensors.items():
            found = folder.file.entries[folder.whole[name]].shape
            if found != tensor.their_shape:
                raise StorageError(
                    f"{folder.file.path}: '{folder.whole[name]}' has shape {found}; the base model has "
                    f"{tensor.their_shape}."
                )

    def signature(self) -> Signature:
        entries = self.folder.file.entries
        found = {name: ("float32", entries[part.theirs].shape[::-1]) for name, part in self.folder.parts.items()}
        return found | {name: ("float32", tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        if name in self.tensors:
            array = self.tensors[name].to_ours(self.folder.file.read(self.folder.whole[name]))
        else:
            array = self.folder.file.read(self.folder.parts[name].theirs).T
        array = array.astype(np.float32)
        if not np.isfinite(array).all():
            theirs = self.folder.whole[name] if name in self.tensors else self.folder.parts[name].theirs
            raise InputError(f"{self.folder.file.path}: '{theirs}' holds NaN or infinite values.")
        return array


def _targets(modules: Iterable[tuple[int, str]], depth: int) -> list[str]:
    """Return the fewest patterns that match the matrices (block, kind)."""
    blocks = {kind: sorted(block for block, other in modules if other == kind) for kind in MATRICES}
    whole = {kind for kind, held in blocks.items() if len(held) == depth}
    exact = [f"blocks_{block}/{kind}" for kind, held in blocks.items() if kind not in whole for block in held]
    return [*(f"*/{kind}" for kind in MATRICES if kind in whole), *exact]


def _patterns(values: Mapping[tuple[int, str], T], default: T, depth: int) -> dict[str, T]:
    """Return the fewest patterns that give each matrix (block, kind) its value where it is not the default."""
    found: dict[str, T] = {}
    for kind in MATRICES:
        of_kind = {block: value for (block, other), value in values.items() if other == kind}
        alike = len(set(of_kind.values())) == 1 and len(of_kind) == depth
        for block, value in sorted(of_kind.items()):
            if value != default:
                found[f"*/{kind}" if alike else f"blocks_{block}/{kind}"] = value
    return found
