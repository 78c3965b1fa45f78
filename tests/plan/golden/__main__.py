"""`python -m tests.plan.golden`: write the snapshots again, after a change that is meant to move data differently."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
import jax

jax.config.update("jax_num_cpu_devices", 8)

from tests.plan.golden.snapshots import CASES, place, snapshot, write  # noqa: E402

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        os.environ["BESSEMER_HOME"] = home
        for name in CASES:
            write(name, snapshot(name))
            print(place(name))
