"""The reward model: its loss against TRL's numbers, and the reward of a packed answer against the answer alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.tiny_run import random_params, tiny_tokenizer

from bessemer.data import DatasetStyle, make_rows
from bessemer.models.value import RewardGPT
from bessemer.objectives.preference import RewardSettings, reward

TRL = json.loads((Path(__file__).parent.parent / "reference" / "preference_trl.json").read_text())
ROWS = [{"prompt": f"Cat {n}?", "chosen": "Yes!" * (1 + n % 2), "rejected": "No." * (1 + n % 3)} for n in range(5)]
END = "<|assistant_end|>"


def test_equals_trl() -> None:
    """Each answer is one token, and its value is given: what remains is the loss."""
    want, rewards = TRL["reward"], np.sum(TRL["policy"], -1).T.ravel()  # chosen, rejected, chosen, …
    pairs = len(rewards) // 2
    batch = {"segment_ids": jnp.arange(1, 2 * pairs + 1)[None], "pair_ids": jnp.arange(pairs)[None]}
    settings = RewardSettings(want["margin"], want["center"])

    def loss(values: jax.Array) -> jax.Array:
        return reward(lambda *_, **__: values[None], None, batch, None, settings)[0] / pairs

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(rewards, jnp.float32))
    np.testing.assert_allclose(value, want["loss"], rtol=1e-6)
    np.testing.assert_allclose(gradient.reshape(pairs, 2).T, want["gradient"], rtol=1e-5, atol=1e-8)


@pytest.fixture(scope="module")
def parts() -> Any:
    model = RewardGPT(
        depth=1,
        width=32,
        head_dim=16,
        vocab_size=300,
        window="L",
        block_size=96,
        precision="float32",
        document_mask=True,
    )
    params = random_params(model)
    rows = make_rows(ROWS, DatasetStyle.CONTRASTIVE, 96, tokenizer=tiny_tokenizer())
    batch = {name: jnp.asarray(values) for name, values in rows.get(np.arange(len(rows))).items()}

    @jax.jit
    def values(params: Any, batch: Any) -> jax.Array:
        return model.apply({"params": params}, batch, method="values")

    def apply(params: Any, batch: Any, deterministic: bool, method: str, rngs: Any) -> Any:
        assert method == "values"
        return values(params, batch)

    return model, apply, params, batch


def test_reward_is_read_at_the_last_token_of_the_answer_alone(parts: Any) -> None:
    model, apply, params, batch = parts
    loss, weight, metrics = reward(apply, params, batch, None, RewardSettings(margin=0.3))
    tokenizer, found = tiny_tokenizer(), []
    mark = tokenizer.specials
    hidden = jax.jit(lambda ids: model.apply({"params": params}, ids, method="hidden"))
    for row in ROWS:
        for side in ("chosen", "rejected"):
            ids = [tokenizer.bos_id, mark["<|user_start|>"], *tokenizer.encode(row["prompt"]), mark["<|user_end|>"]]
            ids += [mark["<|assistant_start|>"], *tokenizer.encode(row[side]), mark[END]]
            padded = np.array([ids + [0] * (96 - len(ids))], np.int32)  # what comes later is not seen
            last = np.asarray(hidden(padded)[0, len(ids) - 1], np.float64)
            found.append(last @ np.asarray(params["value_head"], np.float64))
    chosen, rejected = np.array(found).reshape(-1, 2).T
    want = np.log1p(np.exp(-(chosen - rejected - 0.3)))
    assert weight == len(ROWS)
    np.testing.assert_allclose(loss, want.sum(), rtol=1e-4)
    np.testing.assert_allclose(metrics["reward/chosen"], chosen.sum(), rtol=1e-4, atol=1e-4)
    assert metrics["pref_acc"] == (chosen > rejected).sum()


def test_the_model_is_a_gpt_and_one_vector(parts: Any) -> None:
    model, _, params, _ = parts
    assert params["value_head"].shape == (32,) and "head" in params
    assert model.count_parameters()["total"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert model.group_of(("value_head",)) == "scalar" and model.group_of(("head",)) == "head"
