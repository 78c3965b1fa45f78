"""Promises 2 and 7: a mesh changes where things are computed, not what: loss, gradients, parameters, optimizer state."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from tests.mesh.harness import FAMILIES, build, compile_step, difference, mesh_of, one_device

from bessemer.registry import models

MESHES: dict[str, dict[str, int]] = {
    "data 8": {"data": 8},
    "fsdp 8": {"fsdp": 8},
    "tensor 2": {"tensor": 2},
    "tensor 4": {"tensor": 4},
    "tensor 8": {"tensor": 8},
    "context 2": {"context": 2},
    "context 4": {"context": 4},
    "data 2 x fsdp 2 x tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp 2 x tensor 2 x context 2": {"fsdp": 2, "tensor": 2, "context": 2},
    "data 2 x fsdp 4": {"data": 2, "fsdp": 4},
    "fsdp 2 x context 4": {"fsdp": 2, "context": 4},
    "fsdp 4 x tensor 2": {"fsdp": 4, "tensor": 2},
    "tensor 4 x context 2": {"tensor": 4, "context": 2},
}
FAST = {("gpt", "fsdp 2 x tensor 2 x context 2")}
SLOW = {("gpt", name) for name in MESHES}


def cases():
    for family, (name, _) in FAMILIES.items():
        for mesh in MESHES:
            marks = []
            if (family, mesh) not in FAST:
                marks.append(pytest.mark.slow if (family, mesh) in SLOW else pytest.mark.long)
            if name not in models.names():
                marks.append(pytest.mark.skip(reason=f"no family '{name}'"))
            yield pytest.param(family, mesh, marks=marks, id=f"{family}-{mesh}")


@pytest.mark.parametrize(("family", "mesh"), list(cases()))
def test_a_mesh_is_one_device(family: str, mesh: str) -> None:
    topology = mesh_of(MESHES[mesh])
    with topology.scope():
        tiny = build(family, topology=topology)
    step, arguments = compile_step(tiny, topology)
    got, wanted = jax.device_get(step(*arguments)), one_device(family)
    for part in wanted:
        print(part, difference(got[part], wanted[part]))
