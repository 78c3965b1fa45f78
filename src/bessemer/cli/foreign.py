"""Flags that people bring from other training systems, and the setting that does the same here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bessemer.errors import InputError


class Here(NamedTuple):
    """`setting` takes the flag's value as it is (None: it does not); `note` says what differs."""

    setting: str | None
    note: str = ""


_STEPS = "Intervals count optimizer steps; -1 means only at the end."
_ACCUMULATION = (
    "Accumulation follows from two settings: training.batch_size (sequences in one optimizer step, all "
    "devices together) and training.per_device_batch_size (sequences in one forward pass on a device; -1 "
    "finds what fits)."
)
_MESH = "Devices form a mesh: topology.data, .fsdp, .tensor and .context are its sizes (-1 fills it)."

# One entry a flag, spelt with underscores; dashes, a leading -- and =value are taken off before the look-up.
FLAGS: dict[str, Here] = {
    # size of the model
    "depth": Here("model.depth"),
    "aspect_ratio": Here("model.aspect"),
    "head_dim": Here("model.head_dim"),
    "max_seq_len": Here("architecture.block_size"),
    "max_sequence_length": Here("architecture.block_size"),
    "max_length": Here("architecture.block_size"),
    "block_size": Here("architecture.block_size"),
    "window_pattern": Here("model.window"),
    "window_size": Here("architecture.block_size", "It is the length of a training sequence."),
    "vocab_size": Here("model.vocab_size"),
    # horizon
    "num_iterations": Here("training.steps"),
    "max_steps": Here("training.steps"),
    "max_training_steps": Here("training.steps"),
    "target_flops": Here("training.flops"),
    "target_param_data_ratio": Here("training.ratio"),
    "n_epoch": Here("training.epochs"),
    "num_train_epochs": Here("training.epochs"),
    # batch
    "device_batch_size": Here("training.per_device_batch_size"),
    "batch_per_device": Here("training.per_device_batch_size"),
    "per_device_train_batch_size": Here("training.per_device_batch_size"),
    "batch_size": Here("training.batch_size", "It counts sequences of all devices together."),
    "total_batch_size": Here(
        "training.batch_tokens", "It counts tokens; training.batch_size counts sequences. -1 derives it."
    ),
    "grad_accum_steps": Here(None, _ACCUMULATION),
    "gradient_accumulation_steps": Here(None, _ACCUMULATION),
    # optimizer
    "max_lr": Here("optimization.lr"),
    "learning_rate": Here("optimization.lr"),
    "lr": Here("optimization.lr"),
    "embedding_lr": Here("optimization.embedding_lr", "With optimization.name=muon."),
    "unembedding_lr": Here("optimization.unembedding_lr", "With optimization.name=muon."),
    "matrix_lr": Here("optimization.matrix_lr", "With optimization.name=muon."),
    "scalar_lr": Here("optimization.scalar_lr", "With optimization.name=muon."),
    "weight_decay": Here("optimization.weight_decay"),
    "adamw_weight_decay": Here("optimization.weight_decay"),
    "adam_beta1": Here("optimization.beta1", "With optimization.name=muon it is optimization.adam_beta1."),
    "adam_beta2": Here("optimization.beta2", "With optimization.name=muon it is optimization.adam_beta2."),
    "adamw_beta1": Here("optimization.beta1"),
    "adamw_beta2": Here("optimization.beta2"),
    "warmup_ratio": Here(
        "training.warmup_pct", "It is a share of the horizon, for every schedule that warms up."
    ),
    "warmdown_ratio": Here("training.decay_pct", "It is a share of the horizon."),
    "final_lr_frac": Here("optimization.final_lr_frac", "With optimization.schedule=trapezoid."),
    "lr_scheduler_type": Here("optimization.schedule"),
    "optim": Here("optimization.name"),
    "max_grad_norm": Here("training.max_grad_norm"),
    "label_smoothing": Here("training.label_smoothing"),
    # precision and memory
    "fp8": Here(None, "Write architecture.precision=fp8 (architecture.fp8.scaling, .head say how)."),
    "fp8_recipe": Here("architecture.fp8.scaling", "It is tensorwise or rowwise."),
    "bf16": Here(None, "Write architecture.precision=bf16; auto already uses it on accelerators."),
    "gradient_checkpointing": Here(
        None, "Write architecture.remat=block (or none, or a list of tensor names)."
    ),
    # lookup layers
    "l3_after_layers": Here("architecture.lookup.after_layers"),
    "l3_n_emb": Here("architecture.lookup.rows"),
    "l3_d_up": Here("architecture.lookup.d_up"),
    "l3_k_max": Here("architecture.lookup.k_max"),
    # measuring, writing
    "eval_every": Here("logging.validation_interval", _STEPS),
    "eval_steps": Here("logging.validation_interval", _STEPS),
    "eval_tokens": Here(
        None, "Write training.validation_steps=N: it counts sequences, so divide by architecture.block_size."
    ),
    "core_metric_every": Here("eval.core_interval", "And eval.core_bundle=DIR says where its tasks are."),
    "core_metric_max_per_task": Here("eval.limit"),
    "sample_every": Here("logging.preview_interval", _STEPS),
    "save_every": Here("logging.checkpoint_interval", _STEPS),
    "save_steps": Here("logging.checkpoint_interval", _STEPS),
    "ckpt_interval": Here("logging.checkpoint_interval", _STEPS),
    "logging_steps": Here("logging.report_interval", _STEPS),
    "resume_from_step": Here(None, "Write bessemer resume RUN --step N."),
    "resume_from_checkpoint": Here(None, "Write bessemer resume RUN (or --step N)."),
    "resume_dir": Here(None, "Write bessemer resume RUN."),
    "model_tag": Here(None, "Write --name NAME."),
    "run": Here(None, "Write --name NAME; logging.wandb=true also logs to Weights & Biases."),
    "run_name": Here(None, "Write --name NAME."),
    "ckpt_dir": Here(None, "Write --runs DIR; checkpoints lie in DIR/NAME/checkpoints."),
    "output_dir": Here(None, "Write --runs DIR and --name NAME."),
    # data, start, devices
    "data_root_path": Here(
        "training.dataset", "It takes a file, a glob, a prepared directory or a dataset's name."
    ),
    "dataset_name": Here("training.dataset"),
    "param_path": Here("init", "It takes a run, a checkpoint or a Hugging Face directory; weights only."),
    "model_name_or_path": Here(
        "init", "It takes a run, a checkpoint or a Hugging Face directory; weights only."
    ),
    "train_type": Here("objective", "seq, sft, dpo, grpo, … as `bessemer recipes` shows them."),
    "random_seed": Here("seed"),
    "seed": Here("seed"),
    "nprocs": Here(None, _MESH),
    "parallel_mode": Here(None, _MESH),
    "device_type": Here("topology.platform"),
}


def explain(flag: str) -> str | None:
    """What to write here instead of a flag of another system; None when the flag is known from nowhere, or ours.

    `--grad_accum_steps`, `--grad-accum-steps`, `--grad-accum-steps=4` and `grad_accum_steps=4` are the same flag.
    """
    name, _, value = flag.partition("=")
    here = FLAGS.get(name.lstrip("-").replace("-", "_").lower())
    if here is None or here.setting == name:
        return None
    words = []
    if here.setting is not None:
        dashes = ", without dashes" if name.startswith("-") else ""
        words.append(f"Write {here.setting}={value or 'VALUE'}{dashes}.")
    if here.note:
        words.append(here.note)
    return f"'{name}' is a name of another system. {' '.join(words)}"


def refuse_foreign(words: Iterable[str]) -> None:
    """Raise on the first word that is a flag, or a setting of another system: with the name of ours."""
    for word in words:
        if "=" in word and not word.startswith("-") and (instead := explain(word)):
            raise InputError(instead)
        if word.startswith("-") and len(word) > 1:
            name = word.partition("=")[0]
            unknown = f"unknown flag '{name}'. Settings are written key=value, without dashes; see --help."
            raise InputError(explain(word) or unknown)
