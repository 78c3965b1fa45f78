"""Names that people bring from other systems, and the settings that do the same here.

One table serves flags on the command line (`--max-lr 1e-3`) and unknown keys anywhere (`training.lr: 1e-3` in a
recipe). An answer consists of complete `key=value` words, so that a test can resolve each of them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

VALUE = "VALUE"  # stands for a value that was not given

RENAMED = {"lora/rank_stabilised": "lora/rank_stabilized", "grpo/normalisation": "grpo/normalization"}
"""Settings that had another name. The old one works wherever settings are read; what is shown and saved is the new."""
RENAMED_VALUES = {"distill/tail": {"renormalise": "renormalize"}}
"""Values that had another name, by setting."""


RENAMED_RECIPES = {"speedrun": "demo"}
"""Shipped recipes that had another name. The old one is found wherever recipes are named, with a note. (`speedrun-gpu`
was what is now `demo-gpu`; it is another pipeline since.)"""


def current_recipe(name: str) -> str:
    """Return the present name of a shipped recipe that may be written with its old one."""
    return RENAMED_RECIPES.get(name, name)


def current_name(key: str) -> str:
    """Return the present name of a setting (section/name) that may be written with its old one."""
    return RENAMED.get(key, key)


def current_value(key: str, value: Any) -> Any:
    """Return the present form of a value that may be written in its old one. key: section/name, present."""
    return RENAMED_VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Alias:
    """Our settings for the foreign `names` (space-separated).

    `settings` are alternatives (space-separated): the first that the run has takes the value. `select` is added if the
    run has none of them, `with_` always. `values` maps values of the other system (lowercase; numbers in their shortest
    form) to a value here, or to complete `key=value` words. `convert` rewrites all other values; None: it cannot.
    """

    names: str
    settings: str = ""
    note: str = ""
    select: str = ""
    with_: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    convert: Callable[[str], str | None] = str


class Answer(NamedTuple):
    """Complete settings to write instead, and a sentence or "". selects: a word selects the part of another word.
    missing: how to select the part whose settings they are, if the run lacks it. typed: the value is as it was given,
    not one that stands for it."""

    words: tuple[str, ...]
    note: str = ""
    selects: bool = False
    missing: str = ""
    typed: bool = True

    def __str__(self) -> str:
        write = f"write {shlex.join(self.words)}" if self.words else ""
        text = ". ".join(part for part in (write, self.note.removesuffix(".")) if part)
        return f"{text}; it {self.missing}" if self.missing else text


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
    """Answer only for values that `values` lists."""
    return value if value == VALUE else None


_FOLDERS = ("data/", "datasets/", "runs/", "out/", "output/", "outputs/", "model/", "models/", "checkpoints/")
_FILES = (".jsonl", ".json", ".txt", ".parquet", ".csv", ".gz", ".zst", ".xz", ".safetensors")


def on_hub(value: str) -> str | None:
    """Return hf:OWNER/NAME for OWNER/NAME, as other programs name what is on the Hugging Face hub; None for the path of
    anything here, and for all other words."""
    named = re.fullmatch(r"\w[\w-]*/\w[\w.-]*", value) is not None and not value.startswith(_FOLDERS)
    is_file = value.endswith(_FILES)
    return f"hf:{value}" if named and not is_file and not Path(value).parent.exists() else None


def _on_hub(value: str) -> str:
    return on_hub(value) or value


def _switch(names: str, on: str, off: str, note: str = "") -> Alias:
    """A foreign switch: given without a value, or as true or 1, it means `on`."""
    yes = dict.fromkeys(("value", "true", "1", "yes"), on)
    return Alias(names, note=note, values=yes | dict.fromkeys(("false", "0", "no", "none"), off))


_OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "optimization.name=adamw optimization.weight_decay=0",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_8bit": "optimization.name=adamw optimization.state_dtype=int8",
    "adamw_bnb_8bit": "optimization.name=adamw optimization.state_dtype=int8",
    "adafactor": "adafactor",
    "lion": "lion",
    "lion_32bit": "lion",
    "lion_8bit": "optimization.name=lion optimization.state_dtype=int8",
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

_MESH = "The mesh has the axes topology.data, topology.fsdp, topology.tensor and topology.context; -1 fills an axis"
_TRACKERS = {
    "wandb": "logging.wandb=true",
    "tensorboard": "logging.tensorboard=true",
    "none": "logging.wandb=false logging.tensorboard=false",
    "all": "logging.wandb=true logging.tensorboard=true",
}

# Names are lowercase with underscores. A name with a section (validation.steps) wins over its last part.
_TABLE: list[Alias] = [
    # model
    Alias("depth n_layer n_layers num_layers num_hidden_layers base_num_decoder_layers", "model.depth"),
    Alias("aspect_ratio", "model.aspect"),
    Alias(
        "n_embd d_model dim hidden_dim hidden_size base_emb_dim",
        "model.width",
        "It must be a multiple of model.head_dim",
    ),
    Alias(
        "n_head n_heads num_heads num_attention_heads base_num_query_heads",
        "model.heads",
        "It must be model.width / model.head_dim",
    ),
    Alias("n_kv_head n_kv_heads num_kv_heads num_key_value_heads base_num_kv_heads", "model.kv_heads"),
    Alias("head_dim", "model.head_dim"),
    Alias("intermediate_size base_mlp_dim", "model.mlp_width", select="model.family=llama"),
    Alias("rope_theta rope_base", "architecture.rotary_base"),
    Alias("rms_norm_eps", "architecture.norm_epsilon", select="model.family=llama"),
    Alias("tie_word_embeddings tie_embeddings", "model.tied_head", select="model.family=llama"),
    Alias("model_type", "model.family", "Families: gpt, llama", values={"gpt2": "gpt"}),
    Alias(
        "block_size seq_len seq_length max_seq_len max_seq_length max_sequence_length max_length "
        "max_target_length context_length window_size max_position_embeddings",
        "architecture.block_size",
        convert=_count,
    ),
    Alias("window_pattern", "model.window"),
    Alias("vocab_size", "model.vocab_size"),
    Alias("dropout resid_pdrop attention_dropout", "architecture.dropout"),
    # lookup layers of nanochat's L3
    Alias("l3_after_layers", "architecture.lookup.after_layers", convert=_as_list),
    Alias("l3_n_emb", "architecture.lookup.rows"),
    Alias("l3_d_up", "architecture.lookup.d_up"),
    Alias("l3_k_max", "architecture.lookup.k_max"),
    # horizon
    Alias(
        "num_iterations",
        "training.steps",
        "TRL's num_iterations of GRPO is grpo.num_iterations",
        values={"-1": "none", "0": "none"},
    ),
    Alias(
        "max_steps max_iters num_steps num_train_steps max_training_steps total_steps",
        "training.steps",
        values={"-1": "none", "0": "none"},
    ),
    Alias("target_flops", "training.flops", values={"-1": "none"}),
    Alias("target_param_data_ratio", "training.ratio", values={"-1": "none"}),
    Alias("n_epoch n_epochs num_epochs num_train_epochs", "training.epochs"),
    # batch
    Alias(
        "device_batch_size batch_per_device per_device_batch_size per_device_train_batch_size "
        "per_device_parallelism micro_batch_size local_batch_size",
        "training.per_device_batch_size",
        values={"auto": "-1"},
    ),
    Alias("per_device_eval_batch_size", note="Validation uses training.per_device_batch_size too"),
    Alias("batch_size train_batch_size", "training.batch_size", "It counts sequences over all devices"),
    Alias("global_batch_size", "training.batch_size", "It counts sequences over all devices", convert=_count),
    Alias("total_batch_size", "training.batch_tokens", "It counts tokens; training.batch_size counts sequences"),
    Alias(
        "grad_accum_steps gradient_accumulation_steps",
        note="Gradient accumulation follows from two settings: training.batch_size (sequences per optimizer "
        "step, all devices together) and training.per_device_batch_size (sequences per forward pass on "
        "one device; -1 finds the largest that fits)",
    ),
    # optimizer
    Alias(
        "optimizer optim opt_type optimizer.name optimizer.type",
        "optimization.name",
        "Optimizers: adamw, muon, adafactor, lion, sgd",
        values=_OPTIMIZERS,
        convert=_listed,
    ),
    Alias(
        "lr max_lr peak_lr learning_rate",
        "optimization.lr",
        "With optimization.name=muon, optimization.lr_multiplier scales every rate",
        _ADAMW,
    ),
    Alias("embedding_lr", "optimization.embedding_lr", select=_MUON),
    Alias("unembedding_lr", "optimization.unembedding_lr", select=_MUON),
    Alias("matrix_lr", "optimization.matrix_lr", select=_MUON),
    Alias("scalar_lr", "optimization.scalar_lr", select=_MUON),
    Alias("weight_decay adamw_weight_decay adam_weight_decay", "optimization.weight_decay"),
    Alias("beta1 adam_b1 adam_beta1 adamw_beta1", "optimization.beta1 optimization.adam_beta1", select=_ADAMW),
    Alias("beta2 adam_b2 adam_beta2 adamw_beta2", "optimization.beta2 optimization.adam_beta2", select=_ADAMW),
    Alias("adam_eps adam_epsilon", "optimization.eps", select=_ADAMW),
    Alias("epsilon", "grpo.clip_eps optimization.eps", select=_ADAMW),
    Alias(
        "warmup_ratio warmup_fraction warmup_steps_fraction optimizer.warmup",
        "training.warmup_pct",
        "It is a share of the horizon",
        _WSD,
        convert=_share,
    ),
    Alias(
        "warmup_steps warmup_iters num_warmup_steps",
        "optimization.warmup_steps",
        "Other schedules than trapezoid take a share of the horizon: training.warmup_pct",
        "optimization.schedule=trapezoid",
    ),
    Alias(
        "warmdown_ratio decay_ratio optimizer.decay",
        "training.decay_pct",
        "It is a share of the horizon",
        _WSD,
        convert=_share,
    ),
    Alias("decay_type", "optimization.decay_shape", select=_WSD),
    Alias(
        "final_lr_frac", "optimization.final_lr_frac optimization.min_rate", select="optimization.schedule=trapezoid"
    ),
    Alias(
        "min_lr_ratio min_lr_factor cosine_learning_rate_final_fraction",
        "optimization.min_rate optimization.final_lr_frac",
        "It is a share of the peak rate",
        "optimization.schedule=cosine",
        convert=_share,
    ),
    Alias(
        "min_lr", note="The last rate is a share of the peak rate: optimization.min_rate or optimization.final_lr_frac"
    ),
    Alias(
        "lr_schedule lr_scheduler lr_scheduler_type scheduler",
        "optimization.schedule",
        "Schedules: constant, cosine, sgdr, wsd, trapezoid, rewarm",
        values=_SCHEDULES,
        convert=_listed,
    ),
    Alias(
        "max_grad_norm max_norm grad_clip clip_grad_norm gradient_clipping gradient_clipping_threshold",
        "training.max_grad_norm",
        values={"none": "0"},
    ),
    Alias("label_smoothing label_smoothing_factor", "training.label_smoothing"),
    Alias(
        "mtp_num_layers mtp_loss_scaling_factor num_nextn_predict_layers n_future_tokens",
        note="Multi-token prediction has no layers of its own here: training.mtp=[0.3,0.1] weights the losses of the "
        "second token ahead and the third",
    ),
    Alias("bigram_vocab_size", "architecture.bigram_rows", "A multiple of 64"),
    Alias("partial_key_offset key_shift", "architecture.key_offset"),
    Alias("ema_decay", "training.ema"),
    # precision, memory, compilation
    _switch("fp8", "architecture.precision=fp8", "architecture.precision=auto"),
    Alias("fp8_recipe", "architecture.fp8.scaling", with_="architecture.precision=fp8"),
    _switch("bf16", "architecture.precision=bf16", "architecture.precision=float32"),
    _switch("fp16", "architecture.precision=bf16", "architecture.precision=float32", "Half precision is bf16 here"),
    Alias(
        "dtype torch_dtype mixed_precision trainer.mp",
        "architecture.precision",
        "It is auto, float32, bf16 or fp8; auto is bf16 on accelerators",
        values=_PRECISIONS,
        convert=_listed,
    ),
    Alias(
        "gradient_checkpointing activation_checkpointing activation_checkpoint.mode remat_policy",
        note="architecture.remat is none, block, offload or a list of tensor names",
        values=_REMAT,
        convert=_listed,
    ),
    Alias("torch_compile compile compile.enable", note="The step is always compiled; there is nothing to switch on"),
    Alias(
        "attn_implementation flash_attn use_flash_attention_2 use_liger_kernel tf32",
        note="Kernels are chosen for the hardware, and the first lines of a run name them",
    ),
    Alias("trust_remote_code", note="No code that comes with a model is run: its family is one of `bessemer import`"),
    # reporting, validation, checkpoints
    Alias("logging_strategy", note="logging.report_interval=N writes a row every N steps"),
    Alias("save_strategy", note="logging.checkpoint_interval=N saves every N steps"),
    Alias(
        "push_to_hub hub_model_id",
        note="Nothing is uploaded: `bessemer export RUN OUT` writes a folder that transformers loads",
    ),
    Alias("logging_steps log_interval log_period log_freq log_every", "logging.report_interval", convert=_count),
    Alias(
        "eval_every eval_interval steps_per_eval validation.freq",
        "logging.validation_interval",
        values=_NO_VALIDATION,
        convert=_count,
    ),
    Alias(
        "eval_steps",
        "logging.validation_interval",
        "MaxText's eval_steps is training.validation_steps, in sequences",
        values=_NO_VALIDATION,
        convert=_count,
    ),
    Alias(
        "eval_strategy",
        note="logging.validation_interval=N validates every N steps",
        values={"no": "training.validation=false", "steps": "training.validation=true"},
        convert=_listed,
    ),
    Alias(
        "eval_iters eval_tokens max_eval_batches validation.steps",
        note="The size of a validation pass is training.validation_steps, in sequences: divide tokens by "
        "architecture.block_size, multiply batches by their size",
    ),
    Alias(
        "core_metric_every",
        "eval.core_interval",
        values={"-1": "eval.core_interval=0", "0": "eval.core_interval=0"},
        with_="eval.core_bundle=DIR",
    ),
    Alias("core_metric_max_per_task", "eval.limit", values={"-1": "1000000000", "0": "1000000000"}),
    Alias("sample_every", "logging.preview_interval", values={"-1": "0"}),
    Alias("save_every", "logging.checkpoint_interval"),
    Alias(
        "save_steps ckpt_interval checkpoint_interval checkpoint_period checkpoint.interval",
        "logging.checkpoint_interval",
        convert=_count,
    ),
    Alias("save_total_limit keep_latest_k", "logging.keep_last", values={"none": "1000000", "0": "1000000"}),
    Alias("early_stopping_patience", "training.patience", select="callbacks=[early_stopping]"),
    Alias(
        "report_to", note="Trackers: logging.wandb=true, logging.tensorboard=true", values=_TRACKERS, convert=_listed
    ),
    Alias("wandb wandb_log enable_wandb", "logging.wandb"),
    Alias("enable_tensorboard", "logging.tensorboard"),
    # runs and resuming
    Alias(
        "resume resume_dir resume_from_step resume_from_checkpoint",
        note="Use `bessemer resume RUN`, or `bessemer resume RUN --step N` for an earlier checkpoint",
    ),
    Alias("name run_name model_tag exp_name", note="Use --name NAME"),
    Alias("run", note="Use --name NAME; logging.wandb=true also logs to Weights & Biases"),
    Alias(
        "out_dir output_dir ckpt_dir checkpoint.folder dump_folder base_output_directory",
        note="Use --runs DIR and --name NAME; checkpoints are written to DIR/NAME/checkpoints",
    ),
    # data, start, seed
    Alias(
        "data dataset datasets dataset_path data_path data_dir data_root_path train_file train_data",
        "training.dataset",
        "It takes a file, a glob, a prepared directory or the name of a registered dataset",
    ),
    Alias(
        "dataset_name",
        "training.dataset",
        "It takes a file, a glob, a prepared directory, hf:OWNER/NAME or the name of a registered dataset",
        convert=_on_hub,
    ),
    Alias("dataset_text_field", "data.text_key"),
    Alias("dataset_num_proc", "data.workers"),
    Alias("dataloader_num_workers", "data.prefetch", "Batches are prepared in a thread ahead of the step"),
    Alias("tokenizer tokenizer_path tokenizer_name", "data.tokenizer"),
    Alias("model", "init", "Settings of the model's shape are in the section model, as in model.depth"),
    Alias(
        "model_name model_id model_name_or_path pretrained_model_name_or_path initialize_from_hf",
        "init",
        "It takes a run, a checkpoint, a Hugging Face folder or hf:OWNER/NAME and loads the weights only",
        convert=_on_hub,
    ),
    Alias(
        "param_path initialize_from initial_load_path load_parameters_path load_from",
        "init",
        "It takes a run, a checkpoint or a Hugging Face folder and loads the weights only",
    ),
    Alias(
        "init_from",
        "init",
        "It takes a run, a checkpoint or a Hugging Face folder and loads the weights only",
        values={"scratch": "none", "gpt2": "hf:openai-community/gpt2"},
    ),
    Alias("train_type", "objective"),
    Alias("seed random_seed data_seed data_shuffle_seed init_weights_seed", "seed"),
    # devices
    Alias("nprocs parallel_mode deepspeed fsdp_config", note=_MESH),
    Alias("fsdp", "topology.fsdp", _MESH, values={"true": "-1", "full_shard": "-1", "value": "-1"}),
    Alias("data_parallel_replicate_degree ici_data_parallelism", "topology.data"),
    Alias("data_parallel_shard_degree ici_fsdp_parallelism", "topology.fsdp"),
    Alias("tensor_parallel_degree tensor_parallel_size ici_tensor_parallelism model_axis_size", "topology.tensor"),
    Alias("context_parallel_degree ici_context_parallelism", "topology.context"),
    Alias("expert_parallel_degree expert_parallel_size ici_expert_parallelism", "topology.expert"),
    Alias(
        "pipeline_parallel_degree pipeline_parallel_size pipeline_model_parallel_size ici_pipeline_parallelism",
        "topology.pipeline",
    ),
    Alias("device device_type", "topology.platform", values={"cuda": "gpu"}),
    # adapters
    Alias("r lora.r lora_r lora_rank", "lora.rank"),
    Alias("lora_alpha", "lora.alpha"),
    Alias("lora_dropout", "lora.dropout"),
    Alias("use_dora", "lora.dora"),
    Alias(
        "target_modules lora_target_modules",
        note="lora.targets takes patterns over parameter paths; without it the matrices of attention and "
        "feed-forward are adapted",
        values={"all-linear": "lora.targets=all-linear"},
    ),
    Alias("modules_to_save", "lora.whole", "It takes patterns over parameter paths", convert=_as_list),
    Alias("use_rslora", "lora.rank_stabilized"),
    Alias(
        "init_lora_weights",
        "lora.init",
        "It is kaiming or gaussian",
        values={"true": "kaiming", "gaussian": "gaussian"},
        convert=_listed,
    ),
    _switch("use_peft", "lora.rank=16", "lora.rank=0"),
    _switch("load_in_4bit", "lora.quantize=nf4", "lora.quantize=none"),
    _switch("load_in_8bit", "lora.quantize=int8", "lora.quantize=none"),
    Alias("lora.bits bits", "lora.quantize", values={"4": "nf4", "8": "int8", "16": "none"}, convert=_listed),
    Alias("bnb_4bit_quant_type", "lora.quantize", values={"nf4": "nf4"}, convert=_listed),
    # fine-tuning, preferences, reinforcement
    Alias(
        "packing",
        note="Conversations are packed as the dataset's style says: training.dataset=FILE:PACKED or FILE:PADDED",
    ),
    Alias("neftune_noise_alpha", "sft.neftune_alpha", select="objective=sft", values={"none": "0"}),
    Alias("beta", "dpo.beta grpo.kl_coef optimization.kl.beta"),
    Alias("loss_type", "dpo.loss grpo.normalization"),
    Alias("simpo_gamma", "dpo.gamma", select="objective=dpo"),
    Alias("reference_free", note="dpo.loss=simpo, orpo and cpo need no reference"),
    Alias("rpo_alpha", "dpo.sft_alpha", select="objective=dpo"),
    Alias("num_generations group_size", "grpo.group_size"),
    Alias("max_completion_length max_new_tokens response_length", "grpo.max_completion_length"),
    Alias("max_prompt_length", "grpo.max_prompt_length"),
    Alias("epsilon_high", "grpo.clip_eps_high"),
    Alias("clip_range cliprange", "grpo.clip_eps"),
    Alias("kl_coef", "grpo.kl_coef"),
    Alias("ref_model_sync_steps reference_reset", "grpo.sync_interval"),
    Alias("reward_funcs", "grpo.rewards", convert=_as_list),
    Alias(
        "scale_rewards",
        "grpo.scale",
        values={"group": "true", "none": "false", "true": "true", "false": "false"},
        convert=_listed,
    ),
    Alias("use_vllm vllm_mode", note="Completions are sampled by the trainer itself, on the devices that train"),
    Alias("num_ppo_epochs", "grpo.num_iterations"),
    Alias("num_mini_batches", "grpo.mini_batches"),
    Alias("teacher", "distill.teacher", select="objective=distill"),
    Alias("teacher_model_name_or_path", "distill.teacher", select="objective=distill", convert=_on_hub),
]
ALIASES: dict[str, Alias] = {name: alias for alias in _TABLE for name in alias.names.split()}


# Words too general to mean the same below any section: data.name is not --name.
_BARE_ONLY = {"name", "run", "resume", "data", "model", "r", "bits", "device", "compile", "fsdp", "beta", "depth"}


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
    typed = _normal(text) not in alias.values
    return Answer(words, alias.note, len(words) > 1, typed=typed) if words or alias.note else None


def together(answers: Sequence[Answer]) -> str:
    """Return the settings of several answers as words for a shell, or "" for fewer than two answers with settings.

    Of two values the one that was typed (`--lora_r 32`) wins over one that a word stands for (`--use_peft`), and both
    over one that an answer adds to its own setting (`--fp8-recipe`: the precision); then the last one.
    """
    usable = [found for found in answers if found.words and not found.missing]
    best: dict[str, tuple[int, str]] = {}
    for found in usable:
        for number, word in enumerate(found.words):
            key, rank = word.partition("=")[0], (0 if number else 1 + found.typed)
            if key not in best or rank >= best[key][0]:
                best[key] = rank, word
    return shlex.join(word for _, word in best.values()) if len(usable) > 1 else ""


def choices(names: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return setting → value for foreign (name, value) pairs, as if every part were selected.

    These select parts: what `--lr` is answered with depends on `--optim`, wherever that stands.
    """
    found: dict[str, str] = {}
    for name, value in names:
        answered = answer(name, value, lambda key: True)
        for word in answered.words if answered else ():
            key, _, text = word.partition("=")
            found.setdefault(key, text)
    return found


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
