"""On a CPU, give XLA's temporaries back to XLA instead of to the kernel.

XLA allocates and frees its temporary buffers every step; glibc maps and unmaps them each time, and the page faults
of the fresh pages took a fifth of the quickstart's time (13.3k → 16.2k tokens/s on two cores). glibc reads these
settings only when a process starts, so the command line starts itself once more, in the same process.
"""

from __future__ import annotations

import glob
import os
import sys

SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
}
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd")


def keep_memory() -> None:
    """Start this process again with the settings, unless it has them, has an accelerator, or is not glibc."""
    if any(name in os.environ for name in SETTINGS) or not sys.platform.startswith("linux"):
        return
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names or any(glob.glob(path) for path in ACCELERATORS):
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **SETTINGS})
