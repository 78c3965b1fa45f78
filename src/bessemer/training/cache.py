"""Compiled programs are kept on disk, so that the second start of a run skips the compiler."""

from __future__ import annotations

import jax

from bessemer.data import data_root


def keep_compiled_programs(root: str | None) -> None:
    """Point JAX at a cache beside the prepared data, unless the user has chosen one. Bits do not depend on it."""
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", str(data_root(root) / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
