"""grpo.exact: sampler, scoring and training step have the same bits, whatever the compiler is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.conftest import words
from tests.tiny_run import tiny_tokenizer
from tests.training.test_training_resume import one_device, rows

from bessemer.errors import InputError
from bessemer.generate.sampling import row_keys
from bessemer.rl.prompts import end_ids
from bessemer.training import launch

WORLDS = Path(__file__).with_name("worlds.py")
AGREES = {"logprob_gap": 0, "logprob_gap_max": 0, "ess": 1}
ONE = {"ratio_p01": 1, "ratio_p50": 1, "ratio_p99": 1}


def prompts(folder: Path) -> dict[str, Any]:
    """Two micro-batches a step, four steps a rollout, prompts of several lengths, a rate at which much is learned."""
    tiny_tokenizer().save(folder)
    lines = [json.dumps({"prompt": "cats and dogs " + "x" * (n % 5) + str(n), "answer": n}) for n in range(40)]
    (folder / "cats.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "job": "GRPOTrainer",
        "objective": "grpo",
        "training.dataset": str(folder / "cats.jsonl"),
        "training.batch_size": 8,
        "training.per_device_batch_size": 4,
        "training.steps": 5,
        "training.validation": False,
        "data.tokenizer": str(folder),
        "model.depth": 1,
        "model.width": 32,
        "model.head_dim": 16,
        "architecture.block_size": 40,
        "grpo.exact": True,
        "grpo.num_iterations": 2,
        "grpo.mini_batches": 2,
        "grpo.max_completion_length": 8,
        "grpo.rewards": f"['{WORLDS}:held_reward']",
        "optimization.name": "adamw",
        "optimization.lr": 0.03,
        "logging.report_interval": 1,
        "logging.checkpoint_interval": -1,
        "logging.progress": "none",
        "logging.preview_interval": 0,
        "logging.plots": False,
    }


def assert_exact(run: Path, wanted: dict[str, float]) -> None:
    """The first update of each rollout has ratios of exactly 1; the others are of a policy that has moved."""
    found = [row for row in rows(run) if "loss" in row]
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    for row in found:
        assert {name: row[name] for name in wanted} == wanted
    for row in (found[0], found[4]):
        assert row["off_policy"] == 0 and row["clip_frac"] == 0
    assert all(row["off_policy"] > 0.5 for row in found[2:4])
    assert found[3]["kl"] > 0 and found[0]["reward"] != found[4]["reward"]


@pytest.fixture(scope="module")
def whole(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("exact")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        patch.setattr(launch, "make_topology", lambda settings: one_device())
        given = prompts(folder) | {"grpo.temperature": 0.7, "grpo.rewards": [{"name": f"{WORLDS}:held_reward"}]}
        trainer = launch.build_trainer(None, given, name="whole", root=folder / "runs")
        trainer.run()
    return trainer


def test_the_first_update_of_a_rollout_has_ratios_of_exactly_one(whole: Any) -> None:
    assert_exact(whole.run_directory.path, AGREES | ONE)


def drafts_of(whole: Any) -> list[Any]:
    made = whole.sampler
    with whole.topology.scope():
        return made.drawn(made.plan.prompts(7), "rollout", 7, n=4, logprobs=True)


def test_wrong_drafts_become_what_the_training_pass_draws(whole: Any) -> None:
    """A draft of one wrong token, of another end, or of nothing right: what comes out does not depend on it."""
    exact, ends = whole.sampler.exact, set(end_ids(whole.tokenizer))
    results = drafts_of(whole)
    exact.report()

    def spoiled(number: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        if number % 4 == 0:
            return (*ids[:2], (ids[2] + 1) % 200, *ids[3:]) if len(ids) > 2 else ids
        if number % 4 == 1:
            return ids[: max(1, len(ids) - 3)]  # too short
        return (5,) * 8 if number % 4 == 2 else ids

    wrong = [
        replace(
            result, samples=tuple(replace(s, ids=spoiled(n, s.ids), text="?") for n, s in enumerate(result.samples))
        )
        for result in results
    ]
    with whole.topology.scope():
        found = exact.verified(whole.state.whole(), wrong)
    assert exact.report()["redrawn"] >= 0.5
    for right, mended, draft in zip(results, found, wrong, strict=True):
        for one, other, given in zip(right.samples, mended.samples, draft.samples, strict=True):
            assert (one.ids, one.logprobs, one.policy_logprobs) == (other.ids, other.logprobs, other.policy_logprobs)
            assert (one.finish, one.stop) == (other.finish, other.stop)
            assert other.text == (one.text if given.ids != one.ids else "?")
            assert (other.finish == "stop") == (other.ids[-1] in ends)


def test_completions_are_what_sampling_token_by_token_writes(whole: Any) -> None:
    """Each token from the whole row so far and the noise of its place, as a loop in plain words."""
    model = jax.jit(whole.model_parts.apply)
    params, block, size = whole.state.whole(), whole.settings.block_size, whole.model_parts.model.vocab_size
    for result in drafts_of(whole)[:2]:
        sample = result.samples[1]
        row = list(result.prompt_ids)
        for number in range(len(sample.ids)):
            ids = np.zeros((1, block), np.int32)
            ids[0, : len(row)] = row
            z = model(params, ids)[0, len(row) - 1] / 0.7
            key = row_keys(jnp.array([[result.seed, 1]], jnp.uint32), number)[0]
            row.append(int(jnp.argmax(z + jax.random.gumbel(key, (size,), jnp.float32))))
            assert sample.policy_logprobs[number] == pytest.approx(float(jax.nn.log_softmax(z)[row[-1]]), abs=1e-5)
        assert tuple(row[len(result.prompt_ids) :]) == sample.ids


def test_the_scoring_pass_can_be_left_out(whole: Any) -> None:
    """Its bits are the sampler's, so grpo.old_logprobs=sampler gives the same rows without it."""
    made = whole.sampler
    parts = {name: getattr(made, name) for name in made.__dataclass_fields__}
    parts["settings"] = replace(made.settings, old_logprobs="sampler")
    with whole.topology.scope():
        scored, given = made.rollout(9), type(made)(**parts).rollout(9)
    for name, array in scored.rows.items():
        np.testing.assert_array_equal(array, given.rows[name])
    assert scored.metrics["logprob_gap"] == 0 and "logprob_gap" not in given.metrics


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"grpo.environment": "calculator"}, "environments .grpo.environment.. Leave"),
        ({"grpo.offline": "reference"}, "grpo.offline=reference"),
        ({"architecture.precision": "bf16"}, "architecture.precision=float32"),
        ({"training.param_dtype": "bfloat16"}, "training.param_dtype=float32"),
        ({"lora.rank": 2, "lora.quantize": "int8"}, "lora.quantize=none"),
        ({"model.family": "llama", "model.experts": 4, "model.experts_active": 2}, "mixtures of experts"),
    ],
)
def test_what_it_does_not_support_is_refused_by_name(
    given: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "make_topology", lambda settings: one_device())
    with pytest.raises(InputError, match=f"grpo.exact=true does not support .*{says}.* or set grpo.exact=false"):
        launch.build_trainer(None, prompts(tmp_path) | given, name="refused", root=tmp_path).run()


CASES: dict[str, tuple[dict[str, Any], int, dict[str, float]]] = {
    "gpt": ({"model.depth": 2, "architecture.scan_layers": True}, 1, AGREES | ONE),
    "llama with adapters": ({"model.family": "llama", "lora.rank": 4, "grpo.temperature": 1.3}, 1, AGREES | ONE),
    "top-k and top-p": ({"model.family": "llama", "grpo.top_k": 40, "grpo.top_p": 0.9}, 1, {"logprob_gap_max": 0}),
    "two devices": ({"topology.fsdp": 2, "grpo.temperature": 0.7}, 2, AGREES | ONE),
    "two devices, tensor": ({"topology.tensor": 2, "model.family": "llama"}, 2, AGREES | ONE),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if n < 1 else pytest.mark.long) for n, case in enumerate(CASES)]
)
def test_programs_as_users_compile_them_agree(
    case: str, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process with the compiler's own flags, which fuse far more than those of the tests."""
    changed, devices, wanted = CASES[case]
    flags = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    given = prompts(tmp_path) | changed
    done = cli("train", "quickstart", *words(given), "--name", "run", devices=devices, env=flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_exact(tmp_path / "runs/run", wanted)
