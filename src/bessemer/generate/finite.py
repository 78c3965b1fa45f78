"""A model whose numbers are not numbers says so: its text would be noise that looks like an answer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.errors import TrainingError

NAMED = 3
"""Parameters that an error names; the rest are counted."""


@jax.jit
def _all_finite(leaf: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(leaf))


def _is_finite(leaf: jax.Array) -> Any:
    """By numpy, which reads a CPU's array where it lies, or by its devices: that compiles once a shape."""
    if len(leaf.devices()) == 1 and next(iter(leaf.devices())).platform == "cpu":
        return np.isfinite(np.asarray(leaf)).all()
    return _all_finite(leaf)


def check_finite(params: Any, where: str, advice: str) -> None:
    """TrainingError that names the parameters which hold NaN or infinity; each is read once, on its device."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    floating = [(path, leaf) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    fine = jax.device_get([_is_finite(leaf) for _, leaf in floating])
    bad = [
        "/".join(str(getattr(key, "key", key)) for key in path)
        for (path, _), good in zip(floating, fine, strict=True)
        if not good
    ]
    if bad:
        named = ", ".join(bad[:NAMED]) + (", …" if len(bad) > NAMED else "")
        raise TrainingError(
            f"{len(bad)} of the {len(leaves)} parameters of {where} hold values that are not finite (NaN or "
            f"infinity): {named}. What this model says means nothing. {advice}"
        )


def check_scores(logprobs: Any) -> None:
    """TrainingError where the log-probability of a real token is NaN."""
    if np.isnan(logprobs).any():
        raise TrainingError(
            "the model's output is not a number (NaN): its parameters are not finite, or so large that computing with "
            "them overflows. What it says means nothing; use an earlier checkpoint."
        )
