"""A program that one process has compiled and another has not: they run it together, however long that takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.processes import finish, free_port

from bessemer.topology import CompiledTogether

LATE = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from bessemer.topology import CompiledTogether, TopologySettings, start_distributed

me, port = int(sys.argv[1]), sys.argv[2]
start_distributed(TopologySettings(coordinator=f"127.0.0.1:{port}", processes=2, process_id=me))
mesh = Mesh(np.array(jax.devices()), ("data",))
rows = jax.make_array_from_callback(
    (2,), NamedSharding(mesh, PartitionSpec("data")), lambda _: np.full(1, me + 1, np.float32)
)

def total(rows, times):
    if me == 1:
        time.sleep(35)  # in the trace, as a compiler would: gloo gives up after 30
    return times * jnp.sum(rows)

if me == 0:  # nobody else calls it: it must not wait
    alone = CompiledTogether(jax.jit(lambda x: 2 * x), "what one process does alone")
    print("alone", float(alone(jnp.float32(4))))

program = jax.jit(total, static_argnames="times", out_shardings=NamedSharding(mesh, PartitionSpec()))
program = CompiledTogether(program, "the sum", ("times",))
print("total", float(program(rows, times=2)), float(program(rows, times=2)), program.compilations)
"""


def test_alone_it_is_the_program_itself() -> None:
    program = CompiledTogether(jax.jit(lambda x, n: n * x, static_argnames="n"), "a product", ("n",))
    np.testing.assert_array_equal(program(jnp.ones(2), n=3), [3, 3])
    program(jnp.ones(3), n=3)
    assert program.compilations == 2


@pytest.mark.long
def test_a_process_that_compiles_for_longer_than_collectives_wait(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "late.py"), str(number), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    codes, outputs = finish(processes)
    assert codes == [0, 0] and all("total 6.0 6.0 1" in output for output in outputs), outputs
    assert "alone 8.0" in outputs[0] and "alone" not in outputs[1], outputs
