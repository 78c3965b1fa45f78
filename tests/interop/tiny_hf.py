"""Hugging Face folders made without transformers: the weights of tests/reference/huggingface.py, real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.reference.huggingface import CASES, OUT, SIZES, drawn

from bessemer.data import Tokenizer
from bessemer.generate.load import abstract_params
from bessemer.interop.config import HFConfig, tensors_of
from bessemer.interop.folder import INDEX, Folder, shards_of
from bessemer.models.llama import Llama
from bessemer.registry import models
from bessemer.storage.weights import flatten, place, signature, write_file
from bessemer.topology import unbox

STORED: dict[str, Any] = json.loads(OUT.read_text())
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SFT: dict[str, Any] = {
    "objective": "sft",
    "sft.neftune_alpha": 5.0,
    "architecture.block_size": 48,
    "training.batch_size": 8,
    "training.per_device_batch_size": 1,
    "training.steps": 2,
    "training.validation": False,
    "optimization.name": "adamw",
    "logging.report_interval": 1,
    "logging.checkpoint_interval": 1,
    "logging.progress": "none",
}
"""Two steps of fine-tuning on eight devices, noise on the embeddings, with `init` and `training.dataset` to come."""


def make_talks(folder: Path) -> Path:
    """Short conversations."""
    path = folder / "talks.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chatty_folder(path: Path, dtype: str = "bfloat16", case: str = "qwen2") -> Path:
    """A model whose tokenizer has a chat template."""
    config = {**config_of_case(case), "vocab_size": 262, "eos_token_id": 0}
    return make_folder(path, config, dtype=dtype, tokenizer=True)


def config_of_case(name: str) -> dict[str, Any]:
    return {**SIZES, **CASES[name]}


def their_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Their name → their shape, of every tensor of a configuration."""
    settings = HFConfig(config, "config.json").settings()
    from bessemer.config import declared

    family = models.get(settings["model/family"])
    model = family(**{name: settings[s.key] for name, s in declared(family).items() if s.key in settings})
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = unbox(jax.eval_shape(model.init, jax.random.key(0), ids)["params"])
    tensors = tensors_of(signature(flatten(shapes)), model)
    return {name: tensor.their_shape for name, tensor in tensors.items()}


def make_folder(
    path: Path, config: dict[str, Any], *, dtype: str = "float32", shard: int = 10**9, tokenizer: bool = False
) -> Path:
    """config.json and weights (in several files when they pass `shard` bytes), and a tokenizer with a template."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    entries = {name: (dtype, shape) for name, shape in their_shapes(config).items()}
    parts = shards_of(entries, shard)
    for part, held in parts.items():
        write_file(path / part, held, lambda name: drawn(name, entries[name][1]), {"format": "pt"})
    if len(parts) > 1:
        places = {name: part for part, held in parts.items() for name in held}
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    if tokenizer:
        foreign_tokenizer(path)
    return path


def foreign_tokenizer(path: Path) -> None:
    """Bytes and the tokens of another family's conversations: 259 tokens, files as transformers writes them."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=259, show_progress=False, initial_alphabet=alphabet, special_tokens=SPECIALS
    )
    backend.train_from_iterator(["a"], trainer)
    (path / "tokenizer.json").write_text(backend.to_str())
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": TEMPLATE}))
    assert Tokenizer.load(path).vocab_size == 259


def load_folder(path: Path) -> tuple[Llama, Any]:
    folder = Folder(path)
    model = folder.model.clone(precision="float32")
    return model, place(folder, abstract_params(model), str(path))


def raw(path: Path) -> dict[str, bytes]:
    """Their name → dtype, shape and bytes of every tensor of a folder."""
    folder = Folder(path)
    found = {}
    for name, file in folder.files.items():
        array = np.ascontiguousarray(file.read(name))
        found[name] = f"{array.dtype} {array.shape}".encode() + array.reshape(-1).view(np.uint8).tobytes()
    return found
