"""What a mesh does not divide: padded where that changes nothing, refused with the setting to change otherwise."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.mesh.harness import SHARED, batch_of, build, mesh_of

from bessemer.errors import InputError
from bessemer.models.gpt import GPT
from bessemer.topology import validate_divisible
from bessemer.training.feed import device_batch
from bessemer.training.setup.compiled import check_sequence
from bessemer.training.setup.microbatch import accumulation

REFUSED: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "heads": ({"tensor": 8}, {"heads": 4, "kv_heads": 4, "head_dim": 16}, "topology.tensor=8.*4 heads.*model.heads"),
    "vocabulary": (
        {"tensor": 3},
        {"heads": 6, "kv_heads": 6, "width": 48},
        "'vocab' has 128 entries.*topology.tensor=3",
    ),
    "experts": ({"expert": 4}, {"experts": 6}, "'expert' has 6 entries.*topology.expert=4.*model.experts"),
    "no experts": ({"expert": 2}, {}, "topology.expert=2.*no experts.*model.experts"),
    "layers": ({"pipeline": 4}, {"depth": 3}, "topology.pipeline=4.*model.depth=3"),
    "width by stages": (
        {"pipeline": 3},
        {"depth": 3},
        "'embed' has 64 entries, which topology.pipeline=3.*model.width",
    ),
    "width": ({"fsdp": 3}, {}, "'embed' has 64 entries.*topology.fsdp=3.*model.width"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_model_that_the_mesh_cannot_split_is_refused(name: str) -> None:
    sizes, settings, message = REFUSED[name]
    topology = mesh_of(sizes)
    model = GPT(**{**SHARED, "window": "L", **settings})
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    with topology.scope(), pytest.raises(InputError) as caught:
        model.check()
        validate_divisible(boxed, topology)
    assert re.search(message, str(caught.value), re.DOTALL)


def test_attention_sinks_need_whole_sequences() -> None:
    tiny = build("gptoss")
    with mesh_of({"context": 2}).scope(), pytest.raises(InputError, match=r"attention sinks.*topology.context=1"):
        jax.eval_shape(tiny.step, tiny.params, tiny.tx.init(tiny.params), batch_of(), np.int32(0))


def test_a_batch_and_a_sequence_that_the_mesh_cannot_split_are_refused() -> None:
    with pytest.raises(InputError, match="multiple of 8"):
        accumulation(12, 1, 8)
    with pytest.raises(InputError, match=r"topology.context=3.*architecture.block_size=512"):
        check_sequence(512, 3)


def test_a_field_of_a_few_numbers_a_row_is_whole_where_context_does_not_divide_it() -> None:
    topology = mesh_of({"data": 2, "context": 4})
    shapes = {"input_ids": (4, 8), "pair_ids": (4, 3), "row": (4,)}
    rows = {name: np.arange(math.prod(shape), dtype=np.int32).reshape(shape) for name, shape in shapes.items()}
    fields = {name: (array.shape[1:], array.dtype) for name, array in rows.items()}

    def read(first: int, end: int) -> dict[str, np.ndarray]:
        return {name: array[first:end] for name, array in rows.items()}

    batch = device_batch(read, fields, 2, 2, topology.batch_sharding(1))
    pieces = {name: array.addressable_shards[0].data.shape for name, array in batch.items()}
    assert pieces == {"input_ids": (2, 1, 2), "pair_ids": (2, 1, 3), "row": (2, 1)}
    for name, array in batch.items():
        np.testing.assert_array_equal(np.asarray(array).reshape(rows[name].shape), rows[name])
