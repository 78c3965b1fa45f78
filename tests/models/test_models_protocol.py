"""What a model must provide and what it may: a model of one's own is recognized by its methods, not by its bases."""

import ast
import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest

import bessemer as bm
from bessemer.models.gpt import GPT
from bessemer.models.llama import Llama
from bessemer.models.protocol import (
    Decoding,
    Grouped,
    KernelChoice,
    Model,
    SilentAtStart,
    ValueModel,
    group_of,
    new_parameters,
)
from bessemer.models.value import RewardGPT

TINY = {"depth": 1, "head_dim": 8, "width": 8, "vocab_size": 11, "block_size": 8}


class Writer(bm.LanguageModel):
    """Optional features as docs/extending.md describes them, without a base class for any."""

    silent_at_start = ("gain",)

    def __call__(self, input_ids, positions=None, segment_ids=None, deterministic=True):
        return jnp.zeros((*input_ids.shape, self.vocab_size))

    def group_of(self, path):
        return "scalar"

    def init_cache(self, batch, length):
        return jnp.zeros((batch,))

    def decode(self, input_ids, cache, lengths=None, last_only=False):
        return jnp.zeros((len(input_ids), 1, self.vocab_size)), cache


def test_capabilities_follow_from_methods():
    writer, plain = Writer(vocab_size=5), bm.LanguageModel(vocab_size=5)
    assert isinstance(writer, Decoding) and isinstance(writer, Grouped) and isinstance(writer, SilentAtStart)
    assert not isinstance(plain, Decoding | Grouped | SilentAtStart | ValueModel | KernelChoice)
    assert group_of(writer)(("any",)) == "scalar" and group_of(plain) is None


@pytest.mark.parametrize("family", [GPT, Llama, RewardGPT])
def test_families_are_models_with_every_capability_of_a_transformer(family):
    model = family(**TINY)
    assert isinstance(model, Model) and isinstance(model, Decoding) and isinstance(model, KernelChoice)
    assert isinstance(model, ValueModel) == (family is RewardGPT) == bool(new_parameters(model))


def test_a_model_that_lacks_a_required_method_cannot_be_made():
    class Partial(Model):
        vocab_size: int = 3
        block_size: int = 4

    with pytest.raises(TypeError, match=r"abstract methods?.*projection"):
        Partial()


def test_the_base_adds_no_fields_before_those_of_a_family():
    """Saved configurations list settings in field order."""
    assert {field.name for field in dataclasses.fields(Model)} <= {"parent", "name"}, "those of linen alone"


@pytest.mark.slow
def test_no_module_asks_a_model_for_an_attribute_by_name():
    found = []
    for path in sorted(Path(bm.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1):
                continue
            asked = ast.unparse(node.args[0]).rpartition(".")[2]
            optional = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
            if optional and asked == "model":
                found.append(f"{path.name}:{node.lineno}")
    assert not found, f"use a protocol of models/protocol.py: {found}"
