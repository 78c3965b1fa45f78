"""The gated delta rule in chunks against its recurrence, token by token in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.kernels.delta_rule import gated_delta_rule, last_inputs, short_convolution

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def drawn(length: int, rows: int = 2, heads: int = 3, key: int = 5, value: int = 7) -> dict[str, np.ndarray]:
    random = np.random.default_rng(length)
    k = random.standard_normal((rows, length, heads, key))
    return {
        "q": random.standard_normal((rows, length, heads, key)),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": random.standard_normal((rows, length, heads, value)),
        "g": -random.exponential(0.3, (rows, length, heads)),
        "beta": random.uniform(size=(rows, length, heads)),
        "state": random.standard_normal((rows, heads, key, value)),
    }


def recurrence(given: dict[str, np.ndarray], begins: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """As the formula says, in float64."""
    q, k, v, g, beta, state = (given[name] for name in ("q", "k", "v", "g", "beta", "state"))
    out = np.zeros(v.shape)
    for t in range(q.shape[1]):
        if begins is not None:
            state = np.where(begins[:, t, None, None, None], 0, state)
        state = np.exp(g[:, t])[..., None, None] * state
        delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, ..., None] * delta[..., None, :]
        out[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t])
    return out, state


def close(found: Any, expected: Any, bound: float = 2e-6) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(a) - b).max() <= bound * max(np.abs(b).max(), 1), np.abs(np.asarray(a) - b).max()


@pytest.mark.parametrize("length", [1, 2, 13, 64, 150])
def test_chunks_are_the_recurrence(length: int) -> None:
    given = drawn(length)
    found = jax.jit(gated_delta_rule, compiler_options=QUICK)(**given)
    close(found, recurrence(given))


def test_documents_of_a_packed_row_are_documents_apart() -> None:
    """Borders at the beginning, next to each other, on the edge of a chunk and behind it; the state is dropped."""
    given = drawn(150)
    begins = np.zeros((2, 150), bool)
    begins[0, [0, 30, 31, 64, 129]] = begins[1, [63, 140]] = True
    found = jax.jit(gated_delta_rule, compiler_options=QUICK)(**given, begins=begins)
    close(found, recurrence(given, begins))


def test_a_token_with_zero_gates_leaves_no_trace() -> None:
    given = drawn(20)
    for name in ("g", "beta"):
        given[name][:, 13:] = 0
    found = jax.jit(gated_delta_rule, compiler_options=QUICK)(**given)
    short = {name: array if name == "state" else array[:, :13] for name, array in given.items()}
    out, state = recurrence(short)
    close((found[0][:, :13], found[1]), (out, state))


@pytest.mark.slow
def test_gradients_of_chunks_are_those_of_the_recurrence() -> None:
    """By every input, across borders of chunks and of documents; strong decay must give no NaN."""
    given = drawn(70, rows=1, heads=2)
    given["g"][:, 40:] = -60.0
    begins = np.zeros((1, 70), bool)
    begins[0, [9, 66]] = True
    random = np.random.default_rng(0)
    weights = (random.standard_normal(given["v"].shape), random.standard_normal(given["state"].shape))

    def total(made: Any) -> jax.Array:
        return sum(jnp.sum(a * b) for a, b in zip(made, weights, strict=True))

    def in_chunks(given: Any) -> jax.Array:
        return total(gated_delta_rule(**given, begins=begins))

    def one_by_one(given: Any) -> jax.Array:
        state, outs = given["state"], []
        for t in range(70):
            state = jnp.where(begins[:, t, None, None, None], 0, state)
            token = {name: given[name][:, t : t + 1] for name in ("q", "k", "v", "g", "beta")}
            out, state = gated_delta_rule(**token, state=state)
            outs.append(out)
        return total((jnp.concatenate(outs, axis=1), state))

    found, expected = (jax.jit(jax.grad(f), compiler_options=QUICK)(given) for f in (in_chunks, one_by_one))
    for name in given:
        assert np.isfinite(found[name]).all(), name
        close(found[name], np.asarray(expected[name]), 1e-5)


def test_the_convolution_reads_its_own_document_and_continues() -> None:
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((2, 11, 6)).astype(np.float32), random.standard_normal((4, 6)).astype(np.float32)
    begins = np.zeros((2, 11), bool)
    begins[0, [3, 4, 9]] = True
    whole, _ = short_convolution(x, weight, begins=begins)
    for first, end in ((0, 3), (3, 4), (4, 9), (9, 11)):
        alone, _ = short_convolution(x[:1, first:end], weight)
        np.testing.assert_allclose(whole[:1, first:end], alone, atol=1e-6)
    plain, _ = short_convolution(x, weight)
    added = np.array([7, 4])
    _, inputs = short_convolution(x[:, :7], weight)
    before = last_inputs(inputs, added, 4)
    for row, start in enumerate(added):
        further, _ = short_convolution(x[row : row + 1, start:], weight, before[row : row + 1])
        np.testing.assert_allclose(further[0], plain[row, start:], atol=1e-6)
