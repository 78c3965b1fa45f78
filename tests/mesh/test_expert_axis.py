"""Tokens travel to the devices of their experts and back: every row arrives, whatever the routers choose."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tests.mesh.harness import mesh_of

from bessemer.kernels.exchange import exchange_sizes, give_back, send

DEVICES, ROWS, WIDTH = 4, 6, 3
SENT = {
    "mixed": [[1, 2, 0, 3], [0, 0, 6, 0], [2, 1, 2, 1], [3, 3, 0, 0]],
    "all to one device": [[0, 6, 0, 0]] * DEVICES,
    "nothing to the first and last": [[0, 3, 3, 0]] * DEVICES,
}


def emulated(operand: Any, output: Any, starts: Any, sizes: Any, offsets: Any, received: Any, *, axis_name: str) -> Any:
    """`jax.lax.ragged_all_to_all` by its documentation, of which the CPU has none: slice j of `operand` goes to device
    j, into its output at `offsets[j]`."""
    everything = [jax.lax.all_gather(x, axis_name) for x in (operand, starts, sizes, offsets)]
    me = jax.lax.axis_index(axis_name)
    place = jnp.arange(output.shape[0])
    for source in range(len(starts)):
        rows, start, size, offset = (x[source] for x in everything)
        inside = (place >= offset[me]) & (place < offset[me] + size[me])
        taken = rows[jnp.clip(place - offset[me] + start[me], 0, len(rows) - 1)]
        output = jnp.where(inside[:, None], taken, output)
    return output


@pytest.mark.parametrize("implementation", ["padded", "ragged"])
@pytest.mark.parametrize("name", list(SENT))
def test_every_row_arrives_and_comes_back(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    sent = np.array(SENT[name], np.int32)
    x = np.arange(DEVICES * ROWS * WIDTH, dtype=np.float32).reshape(DEVICES, ROWS, WIDTH) + 1
    wanted = np.zeros((DEVICES, DEVICES, ROWS, WIDTH), np.float32)
    for source in range(DEVICES):
        for target in range(DEVICES):
            start, count = sent[source, :target].sum(), sent[source, target]
            wanted[target, source, :count] = x[source, start : start + count]

    def local(x: Any, sent: Any) -> Any:
        sizes = exchange_sizes(sent[0], "expert")
        there = partial(send, sizes=sizes, axis="expert", capacity=ROWS, implementation=implementation)
        received, back = jax.vjp(lambda rows: there(rows), x[0])
        home = give_back(received, sizes, "expert", ROWS, ROWS, implementation)
        return received[None], home[None], back(3 * received)[0][None]

    spec = PartitionSpec("expert")
    with mesh_of({"expert": DEVICES}).scope():
        run = jax.shard_map(local, in_specs=(spec, spec), out_specs=(spec, spec, spec), check_vma=False)
        received, home, gradient = jax.jit(run)(x, sent)
    np.testing.assert_array_equal(received.reshape(wanted.shape), wanted)
    np.testing.assert_array_equal(home, x)
    np.testing.assert_array_equal(gradient, 3 * x)
