"""Sharded means sharded: what each device holds, at rest and while it is born."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
from tests.mesh.harness import mesh_of

from bessemer.models.gpt import GPT
from bessemer.optim import build_optimizer, state_shardings
from bessemer.topology import placement, shardings, unbox
from bessemer.training import launch
from bessemer.training.setup.compiled import jit_init

ALL = 1 / 8 + 0.05
"""Share of the bytes that one of eight devices may hold: its own, and small things that everyone has."""


def bytes_of(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """On one device, and in all."""
    return sum(row["bytes_per_device"] for row in rows), sum(row["bytes"] for row in rows)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"fsdp": 2, "pipeline": 4}], ids=["fsdp", "fsdp x pipeline"])
def test_a_device_of_eight_holds_an_eighth(name: str, axes: dict[str, int]) -> None:
    """Depth 12 with lookup layers, from shapes alone."""
    topology = mesh_of(axes)
    model = GPT(depth=12, vocab_size=32_768, block_size=2048, lookup_after_layers=[3, 8])
    boxed = jax.eval_shape(model.init, jax.random.key(0), jax.numpy.zeros((1, 8), int))["params"]
    params, places = unbox(boxed), shardings(boxed, topology.mesh)
    tx = build_optimizer(name, lambda cls: cls(), 10, model.group_of, width=768).tx
    state, state_places = (jax.eval_shape(tx.init, params), state_shardings(tx, params, places, topology.replicated))
    for tree, where in ((params, places), (state, state_places)):
        held, total = bytes_of(placement(tree, where))
        assert total / 8 <= held <= ALL * total


def test_the_state_is_born_in_pieces(tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and optimizer state: neither results nor temporaries of the compiled init hold an array whole."""
    topology = mesh_of({"fsdp": 8})
    monkeypatch.setattr(launch, "make_topology", lambda settings: topology)
    wide = {"model.width": 256, "model.head_dim": 32, "training.per_device_batch_size": 1}
    trainer = launch.build_trainer("quickstart", {**tiny, **wide}, name="born", root=tmp_path)
    abstract, places = trainer.functions.abstract_state, trainer.functions.state_shardings
    with topology.scope():
        init = jit_init(trainer.plan, trainer.hooks, trainer.functions).lower(jax.random.key(0), {}).compile()
    memory, rows = init.memory_analysis(), placement(abstract, places)
    total = bytes_of(rows)[1]
    assert memory.output_size_in_bytes <= ALL * total
    own = bytes_of(placement(abstract.params, places.params))[0]
    assert memory.temp_size_in_bytes <= 1.05 * own  # the random bits of its own pieces
    split = [row for row in rows if row["bytes_per_device"] * 8 == row["bytes"]]
    matrices = {tuple(row["shape"]) for row in split if min(row["shape"]) >= 64}
    assert (256, 1024) in matrices
    for shape in matrices:  # the program of one device knows no array of that size
        assert f"[{','.join(map(str, shape))}]" not in init.as_text()


def test_rows_of_the_table() -> None:
    topology = mesh_of({"fsdp": 4, "tensor": 2})
    model = GPT(depth=1, width=64, head_dim=16, vocab_size=100, block_size=16)
    boxed = jax.eval_shape(model.init, jax.random.key(0), jax.numpy.zeros((1, 8), int))["params"]
    rows = {row["name"]: row for row in placement(unbox(boxed), shardings(boxed, topology.mesh))}
    up = rows["blocks_0/up"]
    assert (up["shape"], up["spec"], up["bytes"], up["bytes_per_device"]) == (
        [64, 256],
        [["fsdp", "pipeline"], "tensor"],
        65_536,
        8192,
    )
    assert rows["rho"]["spec"] == [None] and rows["rho"]["bytes"] == rows["rho"]["bytes_per_device"]
