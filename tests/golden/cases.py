"""The golden runs, as data: tiny runs that between them use every registered part.

Each case is one `bessemer train` of a few steps, in a folder that holds the files of data.py, with what may follow it
(a kill and a resume). Settings of COMMON come first. A case that starts from another one's weights names it under
`needs`. test_golden.py checks that every registered objective, optimizer, model, schedule, row style, job and reward is
written in some case's settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]


@dataclass(frozen=True)
class Interruption:
    """The process sends itself `signal` after `step`; the step's checkpoint before it is then on disk."""

    signal: str
    step: int
    exit_code: int


@dataclass(frozen=True)
class Resume:
    """`bessemer resume` with further words, on `devices` virtual devices."""

    words: tuple[str, ...] = ()
    devices: int = 1


@dataclass(frozen=True)
class Case:
    """recipe: a shipped recipe; devices: virtual devices of each process; replayed: part of the slow test."""

    recipe: str
    settings: Settings = field(default_factory=dict)
    devices: int = 1
    processes: int = 1
    needs: tuple[str, ...] = ()
    interrupted: Interruption | None = None
    resumed: tuple[Resume, ...] = ()
    common: bool = True
    replayed: bool = False


COMMON: Settings = {
    "training.batch_size": 8,
    "training.steps": 4,
    "training.validation_steps": 8,
    "data.val_fraction": 0.2,
    "logging.report_interval": 1,
    "logging.validation_interval": 2,
    "logging.checkpoint_interval": 2,
    "logging.progress": "none",
    "logging.plots": "false",
    "logging.preview_interval": 0,
    "eval.evaluations": "[]",
}
SHAPE: Settings = {"model.depth": 2, "model.width": 32, "model.head_dim": 16, "architecture.block_size": 32}
GPT: Settings = {
    **SHAPE,
    "model.family": "gpt",
    "model.window": "SL",
    "objective": "pretrain",
    "training.dataset": "corpus.jsonl:PMD",
    "training.per_device_batch_size": 4,
    "data.tokenizer": "train:268",
}
LLAMA: Settings = {
    **SHAPE,
    "model.family": "llama",
    "objective": "pretrain",
    "training.dataset": "corpus.jsonl:PACKED",
    "training.per_device_batch_size": 8,
    "data.tokenizer": "train:300",
}
ADAMW: Settings = {"optimization.name": "adamw", "optimization.lr": 0.01}
CHAT: Settings = {"training.dataset": "chats.jsonl", "architecture.block_size": 64}
PAIRS: Settings = {"training.dataset": "pairs.jsonl", "architecture.block_size": 96}
ONLINE: Settings = {
    "training.dataset": "prompts.jsonl",
    "architecture.block_size": 32,
    "training.per_device_batch_size": 8,
    "grpo.group_size": 4,
    "grpo.mini_batches": 1,
    "grpo.num_iterations": 1,
    "grpo.max_completion_length": 6,
    "grpo.slots": 8,
    "logging.validation_interval": -1,
}
STORED: Settings = {
    **ONLINE,
    "training.dataset": "completions.jsonl",
    "training.validation": "false",
    "architecture.block_size": 64,
    "grpo.max_completion_length": 12,
    "training.steps": 3,
}
REWARDS = (
    "[{name: regex, options: {pattern: '.*[a-e].*'}}, {name: length_penalty, weight: 0.5, options: {scale: 6}},"
    " {name: exact_match, weight: 2}, {name: gsm8k}]"
)


CASES: dict[str, Case] = {
    # ---- pretraining: models, optimizers, schedules, row styles, meshes
    "gpt": Case("quickstart", {**GPT, "optimization.name": "muon"}, replayed=True),
    "gpt-switches-off": Case(
        "quickstart",
        {
            **GPT,
            **ADAMW,
            "optimization.schedule": "cosine",
            "training.dataset": "corpus.jsonl:PACKED",
            "training.label_smoothing": 0.1,
            "training.z_loss": 1e-4,
            "training.warmup_pct": 0.3,
            "model.depth": 4,
            "model.window": "L",
            "model.kv_heads": 1,
            "architecture.document_mask": "true",
            "architecture.smear": "false",
            "architecture.residual_mix": "false",
            "architecture.value_embeddings": "false",
            "architecture.backout": "false",
            "architecture.qk_norm": "false",
            "architecture.softcap": 0,
            "architecture.dropout": 0.1,
            "architecture.scan_layers": "true",
            "architecture.remat": "block",
            "architecture.loss_chunks": 3,
        },
        replayed=True,
    ),
    "gpt-fsdp-tensor-ema": Case(
        "quickstart",
        {
            **GPT,
            "optimization.name": "muon",
            "optimization.preset": "july2026",
            "optimization.schedule": "trapezoid",
            "training.dataset": "corpus.jsonl:CROPPED",
            "training.per_device_batch_size": 1,
            "training.ema": 0.9,
            "training.freeze": "[embedding]",
            "topology.fsdp": 4,
            "topology.tensor": 2,
        },
        devices=8,
    ),
    "gpt-data-context-lion": Case(
        "quickstart",
        {
            **GPT,
            "optimization.name": "lion",
            "optimization.lr": 0.001,
            "optimization.schedule": "sgdr",
            "training.dataset": "corpus.jsonl:PADDED",
            "training.per_device_batch_size": 2,
            "topology.data": 4,
            "topology.context": 2,
        },
        devices=8,
    ),
    "gpt-lookup": Case(
        "quickstart",
        {
            **GPT,
            **ADAMW,
            "optimization.schedule": "wsd",
            "architecture.lookup.after_layers": "[0]",
            "architecture.lookup.rows": 448,
            "architecture.lookup.k_max": 12,
            "training.validation": "false",
        },
    ),
    "gpt-fp8": Case(
        "quickstart",
        {
            **GPT,
            "optimization.name": "muon",
            "architecture.precision": "fp8",
            "architecture.fp8.emulate": "true",
            "architecture.fp8.head": "true",
            "training.validation": "false",
        },
    ),
    "gpt-bf16-mixture": Case(
        "quickstart",
        {
            **GPT,
            **ADAMW,
            "architecture.precision": "bf16",
            "training.dataset": "[{name: corpus.jsonl, rate: 0.75}, {name: notes.txt, rate: 0.25}]",
            "guard.spike_sigma": 6,
            "seed": 7,
        },
    ),
    "llama": Case(
        "quickstart",
        {**LLAMA, "optimization.name": "adafactor", "optimization.lr": 0.01, "optimization.schedule": "constant"},
        replayed=True,
    ),
    "llama-qwen": Case(
        "quickstart",
        {
            **LLAMA,
            "optimization.name": "sgd",
            "optimization.lr": 0.1,
            "model.kv_heads": 1,
            "model.tied_head": "true",
            "model.sliding_window": 16,
            "model.sliding_layers": "SL",
            "architecture.attention_bias": "qkv",
            "architecture.head_norm": "true",
            "architecture.rope.type": "llama3",
            "architecture.rope.factor": 4,
            "architecture.rope.original_length": 16,
            "training.per_device_batch_size": 2,
            "topology.fsdp": 2,
        },
        devices=4,
    ),
    "olmo": Case(
        "quickstart",
        {
            **LLAMA,
            **ADAMW,
            "model.family": "olmo",
            "model.kv_heads": 1,
            "model.sliding_window": 16,
            "model.sliding_layers": "SL",
            "architecture.rope.local_base": 500,
        },
    ),
    "gemma": Case(
        "quickstart",
        {
            **LLAMA,
            **ADAMW,
            "model.family": "gemma",
            "model.kv_heads": 1,
            "model.sliding_window": 16,
            "model.sliding_layers": "SL",
            "architecture.rope.local_base": 500,
            "architecture.query_scalar": 24,
            "architecture.attention_cap": 50,
            "architecture.softcap": 30,
        },
    ),
    "gpt-experts": Case(  # biases are part of a checkpoint: killed and resumed, the run is the same
        "quickstart",
        {
            **GPT,
            "optimization.name": "muon",
            "model.experts": 4,
            "model.experts_active": 2,
            "model.experts_shared": 1,
            "architecture.experts.bias_rate": 0.01,
        },
        interrupted=Interruption("SIGKILL", 3, -9),
        resumed=(Resume(),),
    ),
    "llama-experts": Case(
        "quickstart",
        {
            **LLAMA,
            **ADAMW,
            "model.experts": 4,
            "model.expert_width": 16,
            "architecture.experts.balance": "loss",
            "architecture.experts.score": "softmax",
            "architecture.experts.z_loss": 0.001,
            "architecture.scan_layers": "true",
            "training.per_device_batch_size": 1,
            "topology.fsdp": 2,
            "topology.tensor": 2,
        },
        devices=4,
    ),
    "gpt-experts-mesh": Case(
        "quickstart",
        {
            **GPT,
            "optimization.name": "muon",
            "model.experts": 4,
            "model.experts_active": 2,
            "training.per_device_batch_size": 1,
            "topology.fsdp": 2,
            "topology.expert": 2,
        },
        devices=4,
    ),
    "gpt-pipeline": Case(
        "quickstart",
        {
            **GPT,
            "optimization.name": "muon",
            "optimization.cautious": "all",
            "training.per_device_batch_size": 2,
            "topology.data": 2,
            "topology.pipeline": 2,
        },
        devices=4,
    ),
    "olmoe": Case(
        "quickstart", {**LLAMA, **ADAMW, "model.family": "olmoe", "model.experts": 9, "model.expert_width": 8}
    ),
    "gptoss": Case(
        "quickstart",
        {
            **LLAMA,
            **ADAMW,
            "model.family": "gptoss",
            "model.experts": 5,
            "model.experts_active": 2,
            "model.expert_width": 8,
            "model.sliding_window": 16,
        },
    ),
    "qwennext": Case(
        "quickstart",
        {
            **LLAMA,
            **ADAMW,
            "model.family": "qwennext",
            "model.delta_layers": "DF",
            "model.delta_key_heads": 1,
            "model.delta_value_heads": 2,
            "model.delta_key_dim": 8,
            "model.delta_value_dim": 8,
            "architecture.rotary_share": 0.5,
            "architecture.document_mask": True,
        },
    ),
    # ---- processes, kills, stops, branches
    "two-processes": Case(
        "quickstart",
        {
            **GPT,
            "optimization.name": "muon",
            "training.per_device_batch_size": 2,
            "topology.fsdp": 2,
            "topology.data": 2,
        },
        devices=2,
        processes=2,
    ),
    "killed-and-resumed": Case(
        "quickstart",
        {**GPT, "optimization.name": "muon", "training.steps": 5},
        interrupted=Interruption("SIGKILL", 3, -9),
        resumed=(Resume(),),
    ),
    "stopped-and-resumed-on-another-mesh": Case(
        "quickstart",
        {
            **GPT,
            **ADAMW,
            "training.steps": 5,
            "training.ema": 0.5,
            "topology.fsdp": 4,
            "training.per_device_batch_size": 2,
        },
        devices=4,
        interrupted=Interruption("SIGTERM", 3, 75),
        resumed=(Resume(("topology.fsdp=1", "topology.tensor=2"), devices=2),),
    ),
    "branched": Case(
        "quickstart",
        {**GPT, **ADAMW, "training.validation": "false"},
        resumed=(Resume(("--step", "2", "--change", "training.steps=6", "optimization.lr=0.003")),),
    ),
    # ---- stages and the KL to an earlier stage
    "stages-kl": Case(
        "kl",
        {
            **GPT,
            "job": "KLDivergenceTrainer",
            "objective": "kl",
            "training.steps": None,
            "training.dataset": "[[{name: corpus.jsonl}], [{name: notes.txt}],"
            " [{name: corpus.jsonl, rate: 0.5}, {name: notes.txt, rate: 0.5}]]",
            "training.tokens": "[512, 512, 512]",
            "optimization.name": "muon",
            "optimization.schedule": "rewarm",
            "optimization.stage_reset": "true",
            "optimization.stage_peaks": "[1.0, 0.5, 0.3]",
            "optimization.kl.beta": "[0, 1.0, 0.3]",
            "optimization.kl.refresh": "true",
            "data.crossfade": "cosine",
            "data.crossfade_share": 0.5,
        },
    ),
    # ---- post-training, from the weights of a case above
    "sft": Case(
        "sft", {**CHAT, "objective": "sft", "init": "runs/gpt", "sft.neftune_alpha": 5}, needs=("gpt",), replayed=True
    ),
    "sft-lora-llama": Case(
        "sft",
        {**CHAT, "objective": "sft", "init": "runs/llama", "lora.rank": 4, "training.dataset": "chats.jsonl:PADDED"},
        needs=("llama",),
    ),
    "dpo": Case(
        "dpo",
        {**PAIRS, "objective": "dpo", "training.dataset": "pairs.jsonl:CONTRASTIVE", "init": "runs/gpt"},
        needs=("gpt",),
        replayed=True,
    ),
    "dpo-live-lora-mesh": Case(
        "dpo",
        {
            **PAIRS,
            "objective": "dpo",
            "init": "runs/gpt",
            "dpo.loss": "ipo",
            "dpo.reference": "live",
            "lora.rank": 2,
            "training.per_device_batch_size": 4,
            "topology.data": 2,
            "topology.tensor": 2,
        },
        devices=4,
        needs=("gpt",),
    ),
    "orpo": Case("dpo", {**PAIRS, "objective": "dpo", "init": "runs/gpt", "dpo.loss": "orpo"}, needs=("gpt",)),
    "reward": Case(
        "reward",
        {**PAIRS, "objective": "reward", "init": "runs/gpt", "model.family": "gpt-reward", "reward.center": 0.01},
        needs=("gpt",),
    ),
    "reward-llama": Case(
        "reward",
        {**PAIRS, "objective": "reward", "init": "runs/llama", "model.family": "llama-reward"},
        needs=("llama",),
    ),
    **{
        f"reward-{family}": Case(
            "reward",
            {**PAIRS, "objective": "reward", "init": f"runs/{family}", "model.family": f"{family}-reward"},
            needs=(family,),
        )
        for family in ("olmo", "gemma", "olmoe", "gptoss", "qwennext")
    },
    "distill": Case(
        "distill",
        {
            "objective": "distill",
            "distill.teacher": "runs/gpt",
            "training.dataset": "corpus.jsonl",
            "architecture.block_size": 32,
            "model.head_dim": 16,
        },
        needs=("gpt",),
    ),
    "distill-stored": Case(
        "distill",
        {
            "objective": "distill",
            "distill.teacher": "runs/gpt",
            "distill.top_k": 8,
            "training.dataset": "corpus.jsonl",
            "architecture.block_size": 32,
            "model.head_dim": 16,
            "optimization.name": "adamw",
            "training.per_device_batch_size": 4,
            "topology.data": 2,
        },
        devices=2,
        needs=("gpt",),
    ),
    "on-policy-distill": Case(
        "distill-online",
        {
            **ONLINE,
            "objective": "on-policy-distill",
            "distill.teacher": "runs/gpt",
            "init": "runs/sft",
            "grpo.group_size": 1,
        },
        needs=("gpt", "sft"),
    ),
    # ---- reinforcement
    "grpo-killed-in-a-rollout": Case(
        "grpo",
        {
            **ONLINE,
            "job": "GRPOTrainer",
            "objective": "grpo",
            "init": "runs/sft",
            "grpo.rewards": REWARDS,
            "grpo.num_iterations": 2,
            "grpo.mini_batches": 2,
            "grpo.sync_interval": 3,
            "training.steps": 6,
        },
        needs=("gpt", "sft"),
        interrupted=Interruption("SIGKILL", 3, -9),
        resumed=(Resume(),),
    ),
    "grpo-exact": Case(
        "grpo",
        {
            **ONLINE,
            "objective": "grpo",
            "init": "runs/sft",
            "grpo.rewards": REWARDS,
            "grpo.exact": "true",
            "grpo.temperature": 0.8,
            "grpo.entropy_target": 2.0,
            "grpo.resample": 1,
            "grpo.overlong_penalty": 0.5,
            "training.steps": 3,
        },
        needs=("gpt", "sft"),
    ),
    "grpo-packed": Case(
        "grpo",
        {
            **ONLINE,
            "objective": "gspo",
            "init": "runs/sft",
            "grpo.rewards": REWARDS,
            "grpo.pack": "true",
            "training.per_device_batch_size": 2,
            "training.steps": 3,
        },
        needs=("gpt", "sft"),
    ),
    "grpo-drafts-in-8-bits": Case(
        "grpo",
        {
            **ONLINE,
            "objective": "grpo",
            "init": "runs/sft",
            "grpo.rewards": REWARDS,
            "generate.speculate": "ngram",
            "generate.weights": "fp8",
            "training.steps": 3,
        },
        needs=("gpt", "sft"),
    ),
    "dapo-mesh": Case(
        "grpo",
        {
            **ONLINE,
            "objective": "dapo",
            "init": "runs/sft",
            "grpo.rewards": REWARDS,
            "training.per_device_batch_size": 2,
            "topology.data": 2,
            "topology.fsdp": 2,
        },
        devices=4,
        needs=("gpt", "sft"),
    ),
    **{
        f"episodes-{name}": Case(
            "grpo",
            {
                **ONLINE,
                "objective": "grpo",
                "init": "runs/sft",
                "architecture.block_size": 128,
                "grpo.environment": environment,
                "grpo.max_turns": 3,
                "training.steps": 3,
            },
            needs=("gpt", "sft"),
        )
        for name, environment in {
            "calculator": "calculator",
            "python": "{name: python, options: {match: number}}",
            "guess": "{name: guess, options: {low: 1, high: 9}}",
            "treasure": "{name: treasure, options: {cost: 0.1}}",
            "tools": "{name: tools, options: {target: own_env.py:TOOLS}}",
            "gymnasium": "{name: gymnasium, options: {target: own_env.py:Corridor, actions: [left, right]}}",
        }.items()
    },
    "gspo-stored-logprobs": Case(
        "grpo",
        {**STORED, "objective": "gspo", "init": "runs/gpt", "grpo.offline": "logprobs"},
        needs=("gpt",),
        replayed=True,
    ),
    "dr-grpo-stored": Case(
        "grpo", {**STORED, "objective": "dr_grpo", "init": "runs/gpt", "grpo.offline": "reference"}, needs=("gpt",)
    ),
    "reinforce-stored": Case(
        "grpo", {**STORED, "objective": "reinforce", "init": "runs/gpt", "grpo.offline": "logprobs"}, needs=("gpt",)
    ),
    "rloo-stored": Case(
        "grpo", {**STORED, "objective": "rloo", "init": "runs/gpt", "grpo.offline": "reference"}, needs=("gpt",)
    ),
    # ---- a job of phases
    "phases": Case(
        "speedrun",
        {
            "job": "phases",
            **{f"phases.pretrain.{key}": value for key, value in {**COMMON, **SHAPE}.items()},
            **{f"phases.sft.{key}": value for key, value in {**COMMON, "architecture.block_size": 32}.items()},
            "phases.grpo": "null",
            "eval.evaluations": "[bpb]",
            "eval.limit": 8,
            "logging.progress": "none",
        },
        common=False,
    ),
}


def with_needs(names: Iterable[str]) -> list[str]:
    """Return the cases and those they start from, in the order of the list. An unknown name is a KeyError."""
    wanted: set[str] = set()
    for name in names:
        wanted |= {name, *with_needs(CASES[name].needs)}
    return [name for name in CASES if name in wanted]


def replayed() -> list[str]:
    """Return the cases that the slow test replays, and those they need."""
    return with_needs(name for name, case in CASES.items() if case.replayed)


def settings_of(name: str) -> Settings:
    """Return the settings of a case as they are passed; None takes one of COMMON away."""
    case = CASES[name]
    settings = {**(COMMON if case.common else {}), **case.settings}
    return {key: value for key, value in settings.items() if value is not None}
