"""Names and defaults that people bring from other systems are here, where docs/coming-from.md says."""

from __future__ import annotations

import inspect

import pytest

import bessemer as bm
from bessemer import registry
from bessemer.config import resolve
from bessemer.config.aliases import ALIASES
from bessemer.generate.results import GenerationResults
from bessemer.training.schema import schema_of

EXPORTED = """BaseTrainer RestoreableJob ExecutionSpec Evaluator Sampling DatasetStyle KLDivergenceTrainer
KLDivergenceTrainerConfig KLConfig KLDivergenceTrainState BasicJob CheckpointedJob TrainState field configure
configuration train resume Run Callback"""

MEMBERS = """done sharded_init evaluator optimizer schedule batch train_step val_step save load run compile_aot
count_model_parameters calculate_number_total_flops configure_dataloaders configure_model configure_functions
create_collect_function generate create_generate_function maybe_generate on_step_start on_step_end log_metrics
log_weight_distribution create_progress_bar save_information save_pretrained mesh model model_state
checkpoint_manager training_batch_size evaluation_batch_size is_process_zero is_enable finish"""

REGISTERED = {
    "objectives": "pretrain seq sft kl dpo grpo distill reward",
    "optimizers": "adamw muon adafactor lion sgd",
    "schedules": "constant wsd cosine sgdr trapezoid rewarm",
    "callbacks": "checkpoint metric_logger progress_bar gradient_clipping validation preview weight_distribution "
    "watchers time_limit early_stopping best_checkpoint profiler garbage_collector",
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
    "logging.report_interval": 32,
    "logging.checkpoint_interval": 1024,
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
    assert {"PMD", "PACKED", "CROPPED", "PADDED", "CONTRASTIVE"} <= set(bm.DatasetStyle.__members__)
    assert [*inspect.signature(bm.Sampling).parameters] == ["name", "rate", "style", "suffix"]
    assert {"name", "project", "group", "root", "topology"} <= set(
        inspect.signature(bm.ExecutionSpec).parameters
    )
    from bessemer.models.allocation import allocation_to_bounds, compute_lzw_allocation
    from bessemer.topology import shardings

    assert callable(allocation_to_bounds) and callable(compute_lzw_allocation) and callable(shardings)


def test_members_of_the_trainer() -> None:
    missing = [name for name in MEMBERS.split() if not hasattr(bm.BaseTrainer, name)]
    own = set(inspect.signature(bm.BaseTrainer.__init__).parameters)
    assert [name for name in missing if name not in own | {"mesh", "model", "model_state"}] == []
    keywords = "model model_state dataset_train dataset_eval data_collator tokenizer callbacks arguments"
    assert set(keywords.split()) <= own
    fields = (
        "generation_results prompt_ids prompt_mask sequences completion_ids completion_mask decoded_prompts"
    )
    assert {*fields.split(), "completion_prompts"} <= set(GenerationResults.__dataclass_fields__)
    collect = inspect.signature(bm.BaseTrainer.create_collect_function).parameters
    assert collect["truncation_mode"].default == "keep_end"


@pytest.mark.parametrize("kind", REGISTERED)
def test_registered_names(kind: str) -> None:
    known = getattr(registry, kind)
    assert [name for name in REGISTERED[kind].split() if name not in known] == []


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
