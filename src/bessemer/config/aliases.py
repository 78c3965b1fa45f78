"""Names that people bring from other systems, and the settings that do the same here.

One table serves flags on the command line (`--max-lr 1e-3`) and unknown keys anywhere (`training.lr: 1e-3` in a
recipe). An answer consists of complete `key=value` words, so that a test can resolve each of them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

VALUE = "VALUE"
"""Stands for a value that was not given."""


@dataclass(frozen=True)
class Alias:
    """What one foreign name is called here.

    `settings` are alternatives (space-separated): the first that the run has takes the value. `select` is added when
    the run has none of them, `with_` always. `values` maps values of the other system (lowercase; numbers in their
    shortest form) to a value here, or to complete `key=value` words. `convert` rewrites all other values; None means
    that it cannot. `note` says what differs.
    """

    settings: str = ""
    note: str = ""
    select: str = ""
    with_: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    convert: Callable[[str], str | None] = str


class Answer(NamedTuple):
    """`words` are complete settings to write instead; `note` is a sentence or empty.

    `selects`: a word selects the part that brings another one's setting.
    """

    words: tuple[str, ...]
    note: str = ""
    selects: bool = False

    def __str__(self) -> str:
        write = f"write {shlex.join(self.words)}" if self.words else ""
        return ". ".join(part for part in (write, self.note.removesuffix(".")) if part)


def _as_list(value: str) -> str:
    """`1,2` as a list: [1,2]."""
    inner = value.strip().removeprefix("[").removesuffix("]")
    return f"[{','.join(part.strip() for part in inner.replace(' ', ',').split(',') if part.strip())}]"


def _count(value: str) -> str | None:
    """A whole number of at least 1; a share of the run, which Hugging Face also takes, is not one."""
    number = _number(value)
    return value if value == VALUE or (number is not None and number >= 1) else None


def _share(value: str) -> str | None:
    number = _number(value)
    return value if value == VALUE or (number is not None and 0 <= number <= 1) else None


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _listed(value: str) -> str | None:
    """Only values that `values` lists have an answer."""
    return value if value == VALUE else None


def _switch(on: str, off: str, note: str = "") -> Alias:
    """A foreign switch: given without a value, or as true or 1, it means `on`."""
    yes = dict.fromkeys(("value", "true", "1", "yes"), on)
    return Alias(note=note, values=yes | dict.fromkeys(("false", "0", "no", "none"), off))


_OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "optimization.name=adamw optimization.weight_decay=0",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adafactor": "adafactor",
    "lion": "lion",
    "lion_32bit": "lion",
    "sgd": "sgd",
    "muon": "muon",
}
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "optimization.schedule=wsd training.decay_pct=0",
    "linear": "optimization.schedule=wsd training.warmup_pct=0 training.decay_pct=1",
    "cosine": "cosine",
    "cosine_with_restarts": "sgdr",
    "warmup_stable_decay": "wsd",
    "wsd": "wsd",
    "trapezoid": "trapezoid",
}
_PRECISIONS = dict.fromkeys(("bf16", "bfloat16", "p=f32,c=bfloat16"), "bf16")
_PRECISIONS |= dict.fromkeys(("fp32", "float32", "no"), "float32") | {"fp8": "fp8"}
_REMAT = dict.fromkeys(("full", "block", "true", "1", "save_nothing", "value"), "architecture.remat=block")
_REMAT |= dict.fromkeys(("none", "false", "0", "minimal"), "architecture.remat=none")

_ADAMW, _MUON, _WSD = "optimization.name=adamw", "optimization.name=muon", "optimization.schedule=wsd"
_NO_VALIDATION = dict.fromkeys(("-1", "0"), "training.validation=false")

_LR = Alias(
    "optimization.lr", "With optimization.name=muon, optimization.lr_multiplier scales every rate", _ADAMW
)
_OPTIMIZER = Alias(
    "optimization.name", "Optimizers: adamw, muon, adafactor, lion, sgd", values=_OPTIMIZERS, convert=_listed
)
_SCHEDULE = Alias(
    "optimization.schedule",
    "Schedules: constant, cosine, sgdr, wsd, trapezoid, rewarm",
    values=_SCHEDULES,
    convert=_listed,
)
_BETA1 = Alias("optimization.beta1 optimization.adam_beta1", select=_ADAMW)
_BETA2 = Alias("optimization.beta2 optimization.adam_beta2", select=_ADAMW)
_WARMUP = Alias("training.warmup_pct", "It is a share of the horizon", _WSD, convert=_share)
_WARMUP_STEPS = Alias(
    "optimization.warmup_steps",
    "Other schedules than trapezoid take a share of the horizon: training.warmup_pct",
    "optimization.schedule=trapezoid",
)
_DECAY = Alias("training.decay_pct", "It is a share of the horizon", _WSD, convert=_share)
_FINAL_RATE = Alias(
    "optimization.min_rate optimization.final_lr_frac",
    "It is a share of the peak rate",
    "optimization.schedule=cosine",
    convert=_share,
)
_STEPS = Alias("training.steps", values={"-1": "none", "0": "none"})
_EPOCHS = Alias("training.epochs")
_CLIP = Alias("training.max_grad_norm", values={"none": "0"})
_LENGTH = Alias("architecture.block_size", convert=_count)
_DEPTH = Alias("model.depth")
_WIDTH = Alias("model.width", "It must be a multiple of model.head_dim")
_HEADS = Alias("model.heads", "It must be model.width / model.head_dim")
_KV_HEADS = Alias("model.kv_heads")
_MICRO_BATCH = Alias("training.per_device_batch_size", values={"auto": "-1"})
_BATCH = Alias("training.batch_size", "It counts sequences over all devices")
_ACCUMULATION = Alias(
    note="Gradient accumulation follows from two settings: training.batch_size (sequences per optimizer step, all "
    "devices together) and training.per_device_batch_size (sequences per forward pass on one device; -1 finds the "
    "largest that fits)"
)
_MESH = "The mesh has the axes topology.data, topology.fsdp, topology.tensor and topology.context; -1 fills an axis"
_REPORTS = Alias("logging.report_interval", convert=_count)
_CHECKPOINTS = Alias("logging.checkpoint_interval", convert=_count)
_VALIDATIONS = Alias("logging.validation_interval", values=_NO_VALIDATION, convert=_count)
_VALIDATION_ROWS = Alias(
    note="The size of a validation pass is training.validation_steps, in sequences: divide tokens by "
    "architecture.block_size, multiply batches by their size"
)
_KEEP = Alias("logging.keep_last", values={"none": "1000000", "0": "1000000"})
_WEIGHTS = Alias("init", "It takes a run, a checkpoint or a Hugging Face folder and loads the weights only")
_DATA = Alias(
    "training.dataset", "It takes a file, a glob, a prepared directory or the name of a registered dataset"
)
_TOKENIZER = Alias("data.tokenizer")
_SEED = Alias("seed")
_NAME = Alias(note="Use --name NAME")
_DIRECTORY = Alias(note="Use --runs DIR and --name NAME; checkpoints are written to DIR/NAME/checkpoints")
_RESUME = Alias(note="Use `bessemer resume RUN`, or `bessemer resume RUN --step N` for an earlier checkpoint")
_PRECISION = Alias(
    "architecture.precision",
    "It is auto, float32, bf16 or fp8; auto is bf16 on accelerators",
    values=_PRECISIONS,
    convert=_listed,
)
_REMATERIALIZE = Alias(
    note="architecture.remat is none, block or a list of tensor names", values=_REMAT, convert=_listed
)
_DROPOUT_OF_ADAPTERS = Alias(note="Adapters have no dropout of their own")
_QUANTIZED = Alias(
    note="Quantized base weights are not supported; lora.rank=N trains adapters on unquantized ones"
)
_TARGETS = Alias(
    note="lora.targets takes patterns over parameter paths; without it the matrices of attention and feed-forward are "
    "adapted",
    values={"all-linear": "lora.targets=[]"},
)
_GROUP = Alias("grpo.group_size")
_COMPLETION = Alias("grpo.max_completion_length")
_DPO_LOSS = Alias("dpo.loss grpo.normalisation")
_ALWAYS = Alias(note="The step is always compiled; there is nothing to switch on")
_TRACKERS = {
    "wandb": "logging.wandb=true",
    "tensorboard": "logging.tensorboard=true",
    "none": "logging.wandb=false logging.tensorboard=false",
    "all": "logging.wandb=true logging.tensorboard=true",
}

# Names are lowercase with underscores. A name with a section (validation.steps) wins over its last part.
ALIASES: dict[str, Alias] = {
    # model
    "depth": _DEPTH,
    "n_layer": _DEPTH,
    "n_layers": _DEPTH,
    "num_layers": _DEPTH,
    "num_hidden_layers": _DEPTH,
    "base_num_decoder_layers": _DEPTH,
    "aspect_ratio": Alias("model.aspect"),
    "n_embd": _WIDTH,
    "d_model": _WIDTH,
    "dim": _WIDTH,
    "hidden_dim": _WIDTH,
    "hidden_size": _WIDTH,
    "base_emb_dim": _WIDTH,
    "n_head": _HEADS,
    "n_heads": _HEADS,
    "num_heads": _HEADS,
    "num_attention_heads": _HEADS,
    "base_num_query_heads": _HEADS,
    "n_kv_head": _KV_HEADS,
    "n_kv_heads": _KV_HEADS,
    "num_kv_heads": _KV_HEADS,
    "num_key_value_heads": _KV_HEADS,
    "base_num_kv_heads": _KV_HEADS,
    "head_dim": Alias("model.head_dim"),
    "intermediate_size": Alias("model.mlp_width", select="model.family=llama"),
    "base_mlp_dim": Alias("model.mlp_width", select="model.family=llama"),
    "rope_theta": Alias("architecture.rotary_base"),
    "rope_base": Alias("architecture.rotary_base"),
    "rms_norm_eps": Alias("architecture.norm_epsilon", select="model.family=llama"),
    "tie_word_embeddings": Alias("model.tied_head", select="model.family=llama"),
    "tie_embeddings": Alias("model.tied_head", select="model.family=llama"),
    "model_type": Alias("model.family", "Families: gpt, llama", values={"gpt2": "gpt"}),
    "block_size": _LENGTH,
    "seq_len": _LENGTH,
    "seq_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "max_seq_length": _LENGTH,
    "max_sequence_length": _LENGTH,
    "max_length": _LENGTH,
    "max_target_length": _LENGTH,
    "context_length": _LENGTH,
    "window_size": _LENGTH,
    "max_position_embeddings": _LENGTH,
    "window_pattern": Alias("model.window"),
    "vocab_size": Alias("model.vocab_size"),
    "dropout": Alias("architecture.dropout"),
    "resid_pdrop": Alias("architecture.dropout"),
    "attention_dropout": Alias("architecture.dropout"),
    # lookup layers of nanochat's L3
    "l3_after_layers": Alias("architecture.lookup.after_layers", convert=_as_list),
    "l3_n_emb": Alias("architecture.lookup.rows"),
    "l3_d_up": Alias("architecture.lookup.d_up"),
    "l3_k_max": Alias("architecture.lookup.k_max"),
    # horizon
    "num_iterations": Alias(
        "training.steps", "TRL's num_iterations of GRPO is grpo.num_iterations", values=_STEPS.values
    ),
    "max_steps": _STEPS,
    "max_iters": _STEPS,
    "num_steps": _STEPS,
    "num_train_steps": _STEPS,
    "max_training_steps": _STEPS,
    "total_steps": _STEPS,
    "target_flops": Alias("training.flops", values={"-1": "none"}),
    "target_param_data_ratio": Alias("training.ratio", values={"-1": "none"}),
    "n_epoch": _EPOCHS,
    "n_epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    # batch
    "device_batch_size": _MICRO_BATCH,
    "batch_per_device": _MICRO_BATCH,
    "per_device_batch_size": _MICRO_BATCH,
    "per_device_train_batch_size": _MICRO_BATCH,
    "per_device_parallelism": _MICRO_BATCH,
    "micro_batch_size": _MICRO_BATCH,
    "local_batch_size": _MICRO_BATCH,
    "per_device_eval_batch_size": Alias(note="Validation uses training.per_device_batch_size too"),
    "batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "global_batch_size": Alias("training.batch_size", "It counts sequences over all devices", convert=_count),
    "total_batch_size": Alias(
        "training.batch_tokens", "It counts tokens; training.batch_size counts sequences"
    ),
    "grad_accum_steps": _ACCUMULATION,
    "gradient_accumulation_steps": _ACCUMULATION,
    # optimizer
    "optimizer": _OPTIMIZER,
    "optim": _OPTIMIZER,
    "opt_type": _OPTIMIZER,
    "optimizer.name": _OPTIMIZER,
    "optimizer.type": _OPTIMIZER,
    "lr": _LR,
    "max_lr": _LR,
    "peak_lr": _LR,
    "learning_rate": _LR,
    "embedding_lr": Alias("optimization.embedding_lr", select=_MUON),
    "unembedding_lr": Alias("optimization.unembedding_lr", select=_MUON),
    "matrix_lr": Alias("optimization.matrix_lr", select=_MUON),
    "scalar_lr": Alias("optimization.scalar_lr", select=_MUON),
    "weight_decay": Alias("optimization.weight_decay"),
    "adamw_weight_decay": Alias("optimization.weight_decay"),
    "adam_weight_decay": Alias("optimization.weight_decay"),
    "beta1": _BETA1,
    "adam_b1": _BETA1,
    "adam_beta1": _BETA1,
    "adamw_beta1": _BETA1,
    "beta2": _BETA2,
    "adam_b2": _BETA2,
    "adam_beta2": _BETA2,
    "adamw_beta2": _BETA2,
    "adam_eps": Alias("optimization.eps", select=_ADAMW),
    "adam_epsilon": Alias("optimization.eps", select=_ADAMW),
    "epsilon": Alias("grpo.clip_eps optimization.eps", select=_ADAMW),
    "warmup_ratio": _WARMUP,
    "warmup_fraction": _WARMUP,
    "warmup_steps_fraction": _WARMUP,
    "optimizer.warmup": _WARMUP,
    "warmup_steps": _WARMUP_STEPS,
    "warmup_iters": _WARMUP_STEPS,
    "num_warmup_steps": _WARMUP_STEPS,
    "warmdown_ratio": _DECAY,
    "decay_ratio": _DECAY,
    "optimizer.decay": _DECAY,
    "decay_type": Alias("optimization.decay_shape", select=_WSD),
    "final_lr_frac": Alias(
        "optimization.final_lr_frac optimization.min_rate", select="optimization.schedule=trapezoid"
    ),
    "min_lr_ratio": _FINAL_RATE,
    "min_lr_factor": _FINAL_RATE,
    "cosine_learning_rate_final_fraction": _FINAL_RATE,
    "min_lr": Alias(
        note="The last rate is a share of the peak rate: optimization.min_rate or optimization.final_lr_frac"
    ),
    "lr_schedule": _SCHEDULE,
    "lr_scheduler": _SCHEDULE,
    "lr_scheduler_type": _SCHEDULE,
    "scheduler": _SCHEDULE,
    "max_grad_norm": _CLIP,
    "max_norm": _CLIP,
    "grad_clip": _CLIP,
    "clip_grad_norm": _CLIP,
    "gradient_clipping": _CLIP,
    "gradient_clipping_threshold": _CLIP,
    "label_smoothing": Alias("training.label_smoothing"),
    "label_smoothing_factor": Alias("training.label_smoothing"),
    "ema_decay": Alias("training.ema"),
    # precision, memory, compilation
    "fp8": _switch("architecture.precision=fp8", "architecture.precision=auto"),
    "fp8_recipe": Alias("architecture.fp8.scaling", with_="architecture.precision=fp8"),
    "bf16": _switch("architecture.precision=bf16", "architecture.precision=float32"),
    "fp16": _switch(
        "architecture.precision=bf16", "architecture.precision=float32", "Half precision is bf16 here"
    ),
    "dtype": _PRECISION,
    "torch_dtype": _PRECISION,
    "mixed_precision": _PRECISION,
    "trainer.mp": _PRECISION,
    "gradient_checkpointing": _REMATERIALIZE,
    "activation_checkpointing": _REMATERIALIZE,
    "activation_checkpoint.mode": _REMATERIALIZE,
    "remat_policy": _REMATERIALIZE,
    "torch_compile": _ALWAYS,
    "compile": _ALWAYS,
    "compile.enable": _ALWAYS,
    # reporting, validation, checkpoints
    "logging_steps": _REPORTS,
    "log_interval": _REPORTS,
    "log_period": _REPORTS,
    "log_freq": _REPORTS,
    "log_every": _REPORTS,
    "eval_every": _VALIDATIONS,
    "eval_interval": _VALIDATIONS,
    "eval_steps": Alias(
        "logging.validation_interval",
        "MaxText's eval_steps is training.validation_steps, in sequences",
        values=_NO_VALIDATION,
        convert=_count,
    ),
    "steps_per_eval": _VALIDATIONS,
    "validation.freq": _VALIDATIONS,
    "eval_strategy": Alias(
        note="logging.validation_interval=N validates every N steps",
        values={"no": "training.validation=false", "steps": "training.validation=true"},
        convert=_listed,
    ),
    "eval_iters": _VALIDATION_ROWS,
    "eval_tokens": _VALIDATION_ROWS,
    "max_eval_batches": _VALIDATION_ROWS,
    "validation.steps": _VALIDATION_ROWS,
    "core_metric_every": Alias(
        "eval.core_interval",
        values={"-1": "eval.core_interval=0", "0": "eval.core_interval=0"},
        with_="eval.core_bundle=DIR",
    ),
    "core_metric_max_per_task": Alias("eval.limit", values={"-1": "1000000000", "0": "1000000000"}),
    "sample_every": Alias("logging.preview_interval", values={"-1": "0"}),
    "save_every": Alias("logging.checkpoint_interval"),
    "save_steps": _CHECKPOINTS,
    "ckpt_interval": _CHECKPOINTS,
    "checkpoint_interval": _CHECKPOINTS,
    "checkpoint_period": _CHECKPOINTS,
    "checkpoint.interval": _CHECKPOINTS,
    "save_total_limit": _KEEP,
    "keep_latest_k": _KEEP,
    "early_stopping_patience": Alias("training.patience", select="callbacks=[early_stopping]"),
    "report_to": Alias(
        note="Trackers: logging.wandb=true, logging.tensorboard=true", values=_TRACKERS, convert=_listed
    ),
    "wandb": Alias("logging.wandb"),
    "wandb_log": Alias("logging.wandb"),
    "enable_wandb": Alias("logging.wandb"),
    "enable_tensorboard": Alias("logging.tensorboard"),
    # runs and resuming
    "resume": _RESUME,
    "resume_dir": _RESUME,
    "resume_from_step": _RESUME,
    "resume_from_checkpoint": _RESUME,
    "name": _NAME,
    "run": Alias(note="Use --name NAME; logging.wandb=true also logs to Weights & Biases"),
    "run_name": _NAME,
    "model_tag": _NAME,
    "exp_name": _NAME,
    "out_dir": _DIRECTORY,
    "output_dir": _DIRECTORY,
    "ckpt_dir": _DIRECTORY,
    "checkpoint.folder": _DIRECTORY,
    "dump_folder": _DIRECTORY,
    "base_output_directory": _DIRECTORY,
    # data, start, seed
    "data": _DATA,
    "dataset": _DATA,
    "datasets": _DATA,
    "dataset_name": _DATA,
    "dataset_path": _DATA,
    "data_path": _DATA,
    "data_dir": _DATA,
    "data_root_path": _DATA,
    "train_file": _DATA,
    "train_data": _DATA,
    "dataset_text_field": Alias("data.text_key"),
    "dataset_num_proc": Alias("data.workers"),
    "dataloader_num_workers": Alias("data.prefetch", "Batches are prepared in a thread ahead of the step"),
    "tokenizer": _TOKENIZER,
    "tokenizer_path": _TOKENIZER,
    "tokenizer_name": _TOKENIZER,
    "model": Alias("init", "Settings of the model's shape are in the section model, as in model.depth"),
    "model_name": _WEIGHTS,
    "model_id": _WEIGHTS,
    "model_name_or_path": _WEIGHTS,
    "pretrained_model_name_or_path": _WEIGHTS,
    "param_path": _WEIGHTS,
    "init_from": Alias(
        "init",
        "It takes a run, a checkpoint or a Hugging Face folder and loads the weights only",
        values={"scratch": "none", "gpt2": "hf:openai-community/gpt2"},
    ),
    "initialize_from": _WEIGHTS,
    "initialize_from_hf": _WEIGHTS,
    "initial_load_path": _WEIGHTS,
    "load_parameters_path": _WEIGHTS,
    "load_from": _WEIGHTS,
    "train_type": Alias("objective"),
    "seed": _SEED,
    "random_seed": _SEED,
    "data_seed": _SEED,
    "data_shuffle_seed": _SEED,
    "init_weights_seed": _SEED,
    # devices
    "nprocs": Alias(note=_MESH),
    "parallel_mode": Alias(note=_MESH),
    "fsdp": Alias("topology.fsdp", _MESH, values={"true": "-1", "full_shard": "-1", "value": "-1"}),
    "data_parallel_replicate_degree": Alias("topology.data"),
    "ici_data_parallelism": Alias("topology.data"),
    "data_parallel_shard_degree": Alias("topology.fsdp"),
    "ici_fsdp_parallelism": Alias("topology.fsdp"),
    "tensor_parallel_degree": Alias("topology.tensor"),
    "tensor_parallel_size": Alias("topology.tensor"),
    "ici_tensor_parallelism": Alias("topology.tensor"),
    "model_axis_size": Alias("topology.tensor"),
    "context_parallel_degree": Alias("topology.context"),
    "ici_context_parallelism": Alias("topology.context"),
    "pipeline_parallel_degree": Alias(note=f"There is no pipeline parallelism. {_MESH}"),
    "device": Alias("topology.platform", values={"cuda": "gpu"}),
    "device_type": Alias("topology.platform", values={"cuda": "gpu"}),
    # adapters
    "r": Alias("lora.rank"),
    "lora.r": Alias("lora.rank"),
    "lora_r": Alias("lora.rank"),
    "lora_rank": Alias("lora.rank"),
    "lora_alpha": Alias("lora.alpha"),
    "lora_dropout": _DROPOUT_OF_ADAPTERS,
    "lora.dropout": _DROPOUT_OF_ADAPTERS,
    "target_modules": _TARGETS,
    "lora_target_modules": _TARGETS,
    "modules_to_save": Alias("lora.whole", "It takes patterns over parameter paths", convert=_as_list),
    "use_rslora": Alias("lora.rank_stabilised"),
    "init_lora_weights": Alias(
        "lora.init",
        "It is kaiming or gaussian",
        values={"true": "kaiming", "gaussian": "gaussian"},
        convert=_listed,
    ),
    "use_peft": _switch("lora.rank=16", "lora.rank=0"),
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "lora.bits": _QUANTIZED,
    "bits": _QUANTIZED,
    # fine-tuning, preferences, reinforcement
    "packing": Alias(
        note="Conversations are packed as the dataset's style says: training.dataset=FILE:PACKED or FILE:PADDED"
    ),
    "neftune_noise_alpha": Alias("sft.neftune_alpha", select="objective=sft", values={"none": "0"}),
    "beta": Alias("dpo.beta grpo.kl_coef optimization.kl.beta"),
    "loss_type": _DPO_LOSS,
    "simpo_gamma": Alias("dpo.gamma", select="objective=dpo"),
    "reference_free": Alias(note="dpo.loss=simpo, orpo and cpo need no reference"),
    "rpo_alpha": Alias("dpo.sft_alpha", select="objective=dpo"),
    "num_generations": _GROUP,
    "group_size": _GROUP,
    "max_completion_length": _COMPLETION,
    "max_new_tokens": _COMPLETION,
    "response_length": _COMPLETION,
    "max_prompt_length": Alias("grpo.max_prompt_length"),
    "epsilon_high": Alias("grpo.clip_eps_high"),
    "clip_range": Alias("grpo.clip_eps"),
    "cliprange": Alias("grpo.clip_eps"),
    "kl_coef": Alias("grpo.kl_coef"),
    "ref_model_sync_steps": Alias("grpo.sync_interval"),
    "reward_funcs": Alias("grpo.rewards", convert=_as_list),
    "scale_rewards": Alias(
        "grpo.scale",
        values={"group": "true", "none": "false", "true": "true", "false": "false"},
        convert=_listed,
    ),
    "num_ppo_epochs": Alias("grpo.num_iterations"),
    "num_mini_batches": Alias("grpo.mini_batches"),
    "teacher": Alias("distill.teacher", select="objective=distill"),
    "teacher_model_name_or_path": Alias("distill.teacher", select="objective=distill"),
}


# Words too general to mean the same below any section: data.name is not --name.
_BARE_ONLY = {
    "name",
    "run",
    "resume",
    "data",
    "model",
    "r",
    "bits",
    "device",
    "compile",
    "fsdp",
    "beta",
    "depth",
}


def answer(name: str, value: Any = VALUE, has: Callable[[str], bool] | None = None) -> Answer | None:
    """Return what to write instead of another system's `name`, or None for a name that is not in the table.

    `--grad-accum-steps`, `grad_accum_steps` and `training.grad_accum_steps` are the same name. `has` tells whether the
    run has a setting; without it the first alternative is taken. The words may name a setting that the run lacks, if
    there is only one alternative.
    """
    key = name.lstrip("-").replace("-", "_").replace("/", ".").lower()
    last = key.rpartition(".")[2]
    alias = ALIASES.get(key) or (ALIASES.get(last) if last not in _BARE_ONLY else None)
    if alias is None:
        return None
    choices = alias.settings.split()
    setting = next((choice for choice in choices if has is None or has(choice)), None)
    lacks = bool(choices) and setting is None
    if setting == key or (lacks and len(choices) > 1 and not alias.select):
        return None
    text = value if isinstance(value, str) else _as_text(value)
    words = _words(alias, setting or next(iter(choices), ""), text or VALUE)
    if words and lacks and alias.select:
        words = (*words, alias.select)
    return Answer(words, alias.note, len(words) > 1) if words or alias.note else None


def _words(alias: Alias, setting: str, text: str) -> tuple[str, ...]:
    mapped = alias.values.get(_normal(text))
    if mapped is not None and "=" in mapped:
        return tuple(mapped.split())
    converted = mapped if mapped is not None else alias.convert(text)
    if not setting or converted is None:
        return ()
    return (f"{setting}={converted}", *([alias.with_] if alias.with_ else []))


def _normal(text: str) -> str:
    """-1.0 and -1 are the same value, and so are True and true."""
    number = _number(text)
    return f"{number:g}" if number is not None else text.strip().lower()


def _as_text(value: Any) -> str:
    if value is None:
        return "none"
    return json.dumps(value, ensure_ascii=False, default=str)
