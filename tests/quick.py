"""What `make test` and `make slow` ask of the compiler: less. Prints XLA_FLAGS for them.

Most of a test is compiling, most of that is XLA's newer way of writing fused loops, and the older one takes a quarter
of the time (a tiny `bessemer train`: 8.2 against 4.9 processor-seconds). Not every XLA still has it, and one that
does not know a flag aborts: so this asks first.
"""

from __future__ import annotations

import os
import subprocess
import sys

OLDER_LOOPS = "--xla_cpu_use_fusion_emitters=false"


def known(flag: str) -> bool:
    """Whether the installed XLA starts with it."""
    asked = [sys.executable, "-c", "import jax; jax.devices()"]
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
    return subprocess.run(asked, env=variables, capture_output=True, timeout=120).returncode == 0


if __name__ == "__main__":
    given = os.environ.get("XLA_FLAGS", "").split()
    print(*given, *([OLDER_LOOPS] if known(OLDER_LOOPS) else []))
