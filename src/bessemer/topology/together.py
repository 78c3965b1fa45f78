"""Programs that are compiled at their first call, run by several processes.

Between processes on CPUs a collective waits for half a minute at most when it is the first of its group (gloo's
handshake; later ones have no such limit). A process that found its program in the cache would stand there while
another compiles for minutes. So all compile first, wait for each other without a collective, and then run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from bessemer.topology.distributed import barrier, process_count

SECONDS = 3600.0
"""The most that processes wait for each other's compilers."""


class CompiledTogether:
    """`program` (of `jax.jit`) as it is, except that all processes have compiled it for new shapes before one runs it.

    With arrays over several processes, all of them must call it in the same order, from one thread. `static`: its
    static arguments, given by name.
    """

    def __init__(self, program: Any, name: str, static: tuple[str, ...] = ()):
        self.program, self.name, self.static = program, name, static
        self._made: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        if process_count() == 1:
            return self.program(*args, **named)
        leaves, form = jax.tree.flatten((args, named))
        if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
            return self.program(*args, **named)  # a model of this process alone, such as a judge in a reward
        key = (form, *map(_kind, leaves))
        if key not in self._made:
            self._made[key] = self.program.lower(*args, **named).compile()
            barrier(f"every process has compiled {self.name}", SECONDS)
        return self._made[key](
            *args, **{name: value for name, value in named.items() if name not in self.static}
        )

    @property
    def compilations(self) -> int:
        """For how many shapes it has been compiled."""
        return len(self._made) + int(self.program._cache_size())


def _kind(leaf: Any) -> Any:
    """What the compiler knows of an argument; of a static one, its value."""
    if not hasattr(leaf, "dtype"):
        return leaf
    return leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False), getattr(leaf, "sharding", None)
