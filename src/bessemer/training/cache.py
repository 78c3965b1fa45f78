"""Compiled programs are kept on disk, so that the second start of a run skips the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from bessemer.data import data_root

REQUESTED, FOUND = (
    "/jax/compilation_cache/compile_requests_use_cache",
    "/jax/compilation_cache/cache_hits",
)


@dataclass(frozen=True)
class Programs:
    """How many programs were asked of the compiler with the cache in use, and how many the cache had."""

    requested: int = 0
    found: int = 0

    def __sub__(self, earlier: Programs) -> Programs:
        return Programs(self.requested - earlier.requested, self.found - earlier.found)

    @property
    def all_found(self) -> bool:
        return 0 < self.requested == self.found

    @property
    def words(self) -> str:
        if self.requested == 0:
            return "no cache"
        if self.found in (0, self.requested):
            return "cache hit" if self.found else "cache miss"
        return f"cache had {self.found} of {self.requested}"


_seen: dict[str, int] = {}


def _count(event: str, **_: Any) -> None:
    if event in _seen:
        _seen[event] += 1


def programs_so_far() -> Programs:
    """Of this process, since the cache was first asked for."""
    return Programs(_seen.get(REQUESTED, 0), _seen.get(FOUND, 0))


def keep_compiled_programs(root: str | None) -> None:
    """Point JAX at a cache beside the prepared data, unless the user has chosen one. Bits do not depend on it."""
    if not _seen:
        _seen.update({REQUESTED: 0, FOUND: 0})
        jax.monitoring.register_event_listener(_count)
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", str(data_root(root) / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
