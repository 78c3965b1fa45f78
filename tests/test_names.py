"""Names and defaults that people bring from other systems do here what docs/coming-from.md says. The members of a
trainer are in training/test_trainer_surface.py."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bessemer as bm
from bessemer import registry
from bessemer.checkpoint import Checkpoints
from bessemer.config import gather, resolve
from bessemer.config.aliases import ALIASES
from bessemer.evaluate import check_tasks
from bessemer.job import Snapshot
from bessemer.optim import build_optimizer, build_schedule
from bessemer.training.setup.schema import schema_of

EXPORTED = """BaseTrainer RestoreableJob ExecutionSpec Evaluator Sampling DatasetStyle KLDivergenceTrainer
KLDivergenceTrainerConfig KLConfig KLDivergenceTrainState BasicJob CheckpointedJob TrainState field configure
configuration train resume Run Callback"""

REGISTERED = {
    "objectives": "pretrain seq sft kl dpo grpo distill reward",
    "optimizers": "adamw muon adafactor lion sgd",
    "schedules": "constant wsd cosine sgdr trapezoid rewarm",
    "callbacks": "checkpoint metric_logger progress_bar gradient_clipping validation preview weight_distribution "
    "watchers time_limit early_stopping best_checkpoint profiler garbage_collector gradient_checkpointing",
    "evaluations": "bpb loss core gsm8k arithmetic harness",
    "models": "gpt llama",
    "rewards": "exact_match gsm8k regex length_penalty",
    "jobs": "BaseTrainer KLDivergenceTrainer",
}

FOREIGN = """nprocs train_type data_root_path param_path batch_per_device grad_accum_steps warmup_ratio max_lr
max_grad_norm adamw_beta1 adamw_beta2 adamw_weight_decay window_size ckpt_interval ckpt_dir random_seed label_smoothing
n_epoch depth aspect_ratio head_dim max_seq_len window_pattern num_iterations target_flops target_param_data_ratio
device_batch_size total_batch_size embedding_lr unembedding_lr matrix_lr scalar_lr weight_decay adam_beta1 adam_beta2
warmdown_ratio final_lr_frac fp8 fp8_recipe l3_after_layers l3_n_emb l3_d_up l3_k_max eval_every eval_tokens
core_metric_every core_metric_max_per_task sample_every save_every resume_from_step model_tag run"""

DEFAULTS = {
    "init": None,
    "seed": 1337,
    "training.batch_size": 512,
    "training.per_device_batch_size": -1,
    "training.warmup_pct": 0.01,
    "training.decay_pct": 0.1,
    "training.validation": True,
    "training.evaluate": True,
    "training.validation_steps": 2048,
    "training.time_limit": None,
    "training.max_grad_norm": 1.0,
    "training.label_smoothing": 0.0,
    "training.z_loss": 0.0,
    "optimization.lr": 3e-4,
    "optimization.weight_decay": 0.01,
    "optimization.beta1": 0.9,
    "optimization.beta2": 0.95,
    "optimization.eps": 1e-8,
    "optimization.kl.beta": (0.1,),
    "optimization.kl.estimator": "nll",
    "architecture.block_size": 512,
    "architecture.precision": "auto",
    "architecture.remat": ["none"],
    "architecture.scan_layers": False,
    "architecture.dropout": 0.0,
    "model.family": "gpt",
    "model.depth": 12,
    "model.aspect": 64,
    "model.head_dim": 128,
    "model.window": "SSSL",
    "model.window_short": 0.5,
    "topology.platform": "auto",
    "topology.data": -1,
    "topology.fsdp": 1,
    "topology.tensor": 1,
    "topology.context": 1,
    "topology.deterministic": False,
    "guard.max_bad_steps": 3,
    "guard.spike_sigma": 0.0,
    "guard.spike_action": "warn",
    "eval.evaluations": [],
    "eval.limit": 500,
    "eval.core_interval": 0,
    "logging.report_interval": None,  # derived from the horizon
    "logging.checkpoint_interval": 1024,
    "logging.checkpoint_minutes": 0.0,
    "logging.validation_interval": 512,
    "logging.preview_interval": 512,
    "logging.keep_last": 3,
    "logging.wandb": False,
    "logging.tensorboard": False,
    "callbacks": [],
    "grpo.group_size": 4,
    "grpo.clip_eps": 0.2,
    "grpo.kl_coef": 0.01,
    "grpo.sync_interval": 200,
    "dpo.beta": 0.1,
}


def test_exported_names() -> None:
    assert set(EXPORTED.split()) <= set(bm.__all__)
    assert all(getattr(bm, name).__module__.startswith("bessemer.") for name in EXPORTED.split())


def test_a_setting_is_declared_and_configured_by_its_name() -> None:
    @dataclass
    class Mine:
        rate: float = bm.field("mine/rate", default=0.5, minimum=0, help="of mine")

    config = resolve(lambda values: gather(Mine), {}, {"mine.rate": 0.25})
    with bm.configuration(config):
        assert bm.configure(Mine) == Mine(0.25)
    assert Mine().rate == 0.5


def test_a_dataset_is_named_with_its_rate_and_style() -> None:
    sampling = bm.Sampling.from_string("data/web:PADDED")
    assert sampling == bm.Sampling("data/web", 1.0, bm.DatasetStyle.PADDED, "")
    assert {"PMD", "PACKED", "CROPPED", "PADDED", "CONTRASTIVE"} <= set(bm.DatasetStyle.__members__)


def test_a_spec_makes_its_root_and_finds_the_devices(tmp_path: Path) -> None:
    spec = bm.ExecutionSpec.local(tmp_path / "runs", name="mine", project="p", group="g")
    assert (tmp_path / "runs").is_dir() and spec.run_directory.path == tmp_path / "runs" / "mine"
    assert spec.topology is not None and spec.topology.device_count == len(jax.devices())
    assert (spec.project, spec.group) == ("p", "g")


def test_a_job_saves_itself_and_comes_back(tmp_path: Path) -> None:
    """RestoreableJob with nothing but a number for its state."""

    class Count(bm.RestoreableJob[Any]):
        value = 0

        def __init__(self, spec: bm.ExecutionSpec):
            super().__init__(spec)
            self.manager = Checkpoints(spec.run_directory.create(exist_ok=True).checkpoints)

        checkpoint_manager = property(lambda self: self.manager)  # type: ignore[assignment]
        done = property(lambda self: self.value == 3)  # type: ignore[assignment]

        def run(self) -> int:
            self.value += 1
            self.save()
            return self.value

        def snapshot(self) -> Snapshot:
            return Snapshot(self.value, {"value": jnp.int32(self.value)})

        def abstract_state(self) -> Any:
            return {"value": jax.ShapeDtypeStruct((), jnp.int32)}

        def accept(self, tree: Any, step: int, files: Any) -> None:
            self.value = int(tree["value"])

    spec = bm.ExecutionSpec("count", root=tmp_path)
    job = Count(spec)
    assert [job(), job(), job(), job()] == [1, 2, 3, None]
    job.manager.wait()
    again = Count(spec)
    assert again.load() and again.value == 3 and again.checkpoints() == [1, 2, 3] and again.latest() == 3
    assert again.load(1) and again.value == 1 and not again.load(9)


def test_functions_of_other_systems_do_the_same_here() -> None:
    from bessemer.models.allocation import allocation_to_bounds, compute_lzw_allocation
    from bessemer.topology import make_topology, shardings

    texts = [np.array([1, 2, 1, 2, 1, 2, 3]), np.array([1, 2, 3, 1, 2, 3])]
    rows = compute_lzw_allocation(texts, vocab_size=8, rows=16, k_max=4)
    bounds = allocation_to_bounds(rows)
    assert int(bounds[-1]) == 16 and (np.diff(bounds) == rows).all()
    mesh = make_topology(devices=jax.devices()[:1]).mesh
    placed = shardings({"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}, mesh)
    assert placed["w"].mesh == mesh


@pytest.mark.parametrize("name", REGISTERED["schedules"].split())
def test_schedules_give_a_multiplier(name: str) -> None:
    config = resolve(schema_of, {}, {"optimization.schedule": name, "optimization.name": "adamw"})
    with bm.configuration(config):
        curve = build_schedule(name, bm.configure, 100)
    values = [float(curve(step)) for step in (0, 1, 50, 99)]
    assert all(0 <= value <= 1 for value in values) and max(values) > 0


@pytest.mark.parametrize("name", REGISTERED["optimizers"].split())
def test_optimizers_take_a_step_against_the_gradient(name: str) -> None:
    config = resolve(schema_of, {}, {"optimization.name": name, "optimization.schedule": "constant"})
    params = {"w": jnp.ones((4, 4))}
    with bm.configuration(config):
        made = build_optimizer(name, bm.configure, 10, schedule="constant")
    gradient = {"w": jnp.ones((4, 4))}
    updates, _ = made.tx.update(gradient, made.tx.init(params), params, step=jnp.int32(1))
    assert float(updates["w"].sum()) < 0


@pytest.mark.parametrize("name", REGISTERED["callbacks"].split())
def test_callbacks_are_made_by_their_names(name: str) -> None:
    config = resolve(schema_of, {}, {"callbacks": [name]})
    kind = registry.callbacks.get(name)
    with bm.configuration(config):
        made = bm.configure(kind) if is_dataclass(kind) else kind()
    hooks = [hook for hook in vars(bm.Callback) if hook.startswith("on_")]
    assert isinstance(made, bm.Callback)
    assert any(getattr(type(made), hook) is not getattr(bm.Callback, hook) for hook in hooks)


def test_rewards_score_completions() -> None:
    found = {
        "exact_match": registry.rewards.get("exact_match")(["1+1"], ["2"], answer=["2"]),
        "gsm8k": registry.rewards.get("gsm8k")(["1+1"], ["so #### 2"], answer=["#### 2"]),
        "regex": registry.rewards.get("regex")(["1+1"], ["2"], pattern=r"\d"),
    }
    assert {name: list(values) for name, values in found.items()} == {
        "exact_match": [1.0],
        "gsm8k": [1.0],
        "regex": [1.0],
    }


@pytest.mark.parametrize("kind", ["objectives", "evaluations", "models", "jobs"])
def test_registered_names_can_be_selected(kind: str) -> None:
    """By the setting that selects one; what each does is tested where it lives."""
    for name in REGISTERED[kind].split():
        if kind == "evaluations":
            assert check_tasks([name]) == [name]
        else:
            key = {"objectives": "objective", "models": "model.family", "jobs": "job"}[kind]
            chosen = {key: name} | ({"job": "GRPOTrainer"} if name == "grpo" else {})
            assert resolve(schema_of, {}, chosen)[key] == name


def test_foreign_flags() -> None:
    assert [flag for flag in FOREIGN.split() if flag not in ALIASES] == []


def test_defaults() -> None:
    """Without a recipe."""
    found: dict[str, object] = {}
    for objective, job in (("grpo", "GRPOTrainer"), ("dpo", ""), ("kl", ""), ("pretrain", "")):
        chosen = {"optimization.name": "adamw", "objective": objective, "job": job or "BaseTrainer"}
        found |= resolve(schema_of, {}, chosen).values
    wrong = {
        key: found.get(key.replace(".", "/"), "not there")
        for key, want in DEFAULTS.items()
        if key.replace(".", "/") not in found or found[key.replace(".", "/")] != want
    }
    assert wrong == {}
