"""The first lines of a run: what is about to run, with which rates, kernels and derived numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bessemer.config import Config
from bessemer.console import counted, figure, in_parts
from bessemer.report.summary import too_small
from bessemer.scaling import fine_tuning_rate
from bessemer.training.console.output import optimizer_groups, shown
from bessemer.training.console.progress import compact
from bessemer.training.persistence import frozen
from bessemer.training.setup.horizon import MULTIPLIER, is_shipped, repeats, starts_from_real_weights
from bessemer.training.setup.model import flops_formula
from bessemer.training.setup.schema import without_effect

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


def header(trainer: BaseTrainer) -> None:
    """The few lines that say what is about to run, and each derived number with its reason."""
    counts, data, topology = trainer.model_parts.counts, trainer.data, trainer.topology
    trainer.say(f"run        {shown(trainer.run_directory.path)}")
    trainer.say(
        f"model      {trainer.settings.family}, {counts['total']:,} parameters ({counts['scaling']:,} scaling)"
    )
    if (trained := frozen.describe(trainer.model_parts)) is not None:
        trainer.say(f"trains     {trained}")
    for name, stats in data.plan.stats.items():
        known = [f"{stats[key]:,} {key}" for key in ("documents", "prompts", "tokens") if key in stats]
        if "pairs" in stats:
            known = [f"{stats['pairs']:,} pairs in {stats['rows']:,} rows", *known[1:]]
            known += [f"{stats['padding_share']:.1%} padding", f"{stats['truncated']:,} prompts truncated"]
            known += [f"{stats['without_targets']:,} left out"]
        trainer.say(
            f"data       {shown(name)}: {', '.join(known)}; {counted(data.validation_count, 'row')} held out"
        )
        if stats.get("unverified"):
            trainer.say(
                f"note       {shown(name)}: prepared before stores had checksums, so damage would go unnoticed; "
                "prepare it again to have every chunk verified"
            )
        for why, count in stats.get("files_left_out", {}).items():
            trainer.say(f"note       {shown(name)}: {counted(count, 'file')} left out: {why}")
        for remark in supervision(trainer, stats):
            trainer.say(f"note       {shown(name)}: {remark}")
    epochs = data.plan.epoch(data.steps)
    trainer.say(
        f"batch      {data.batch_size} × {trainer.settings.block_size} tokens"
        f"{in_parts(trainer.functions.accumulate_steps)}; {data.steps:,} steps, "
        f"{compact(data.steps * trainer.tokens_per_step)} tokens, {epochs:.2f} epochs"
    )
    trainer.say(f"rates      {'; '.join(rate_lines(trainer))}")
    formula = flops_formula(trainer.model_parts, trainer.settings.block_size)
    trainer.say(
        f"FLOPs      {compact(trainer.model_parts.flops_per_token)} a token = {formula}; "
        f"{compact(trainer.model_parts.flops_per_token_causal)} with causal attention counted once"
    )
    axes = " × ".join(f"{axis} {size}" for axis, size in topology.mesh.shape.items() if size > 1)
    trainer.say(
        f"devices    {topology.device_count} {topology.platform}{f' ({axes})' if axes else ''}{kernels(trainer)}"
    )
    config = trainer.config
    notes = (
        *topology.notes,
        *config.notes,
        *without_effect(trainer.config, len(trainer.stages)),
        *repeats(config, epochs),
        *shipped_rates(config, counts["total"]),
    )
    for note in notes:
        trainer.say(f"note       {note}")
    if data.validation is not None and (small := too_small(data.validation.description)):
        trainer.say(f"warning    {small}")
    for name, entry in trainer.derived.items():
        if not entry["reason"].endswith("given"):
            trainer.say(f"{name:<30} {figure(entry['value']):<12} {entry['reason']}")


def kernels(trainer: BaseTrainer) -> str:
    """Which ones were chosen, where that is no derived number with a reason: on a CPU."""
    if "architecture.attention" in trainer.derived or not hasattr(trainer.model, "chosen_kernels"):
        return ""
    chosen = trainer.model.chosen_kernels().items()
    return "; " + ", ".join(f"{name}: {kernel}" for name, (kernel, _) in chosen)


def rate_lines(trainer: BaseTrainer) -> list[str]:
    """Peak rate and decay of each group: which parameters decay is decided by rule, so it is said."""
    words = []
    for row in optimizer_groups(trainer.functions):
        rate = "rate of its own" if row["lr"] is None else f"{row['lr']:.4g}"
        decay = f", decay {row['weight_decay']:.4g}" if row["weight_decay"] else ""
        many = f"{row['tensors']} tensor{'s' if row['tensors'] > 1 else ''}"
        words.append(f"{row['group']} {rate}{decay} ({many})")
    return words


def shipped_rates(config: Config, parameters: int) -> list[str]:
    """A note where weights and data are the caller's but the optimizer's rates are a small demonstration's.

    AdamW's rate is derived from the model (`rate_for_weights`); this is for the others, such as Muon.
    """
    rates = [key for key in config.provenance if key.startswith("optimization/") and "lr" in key]
    if MULTIPLIER not in rates or not all(is_shipped(config, key) for key in rates):
        return []
    if not starts_from_real_weights(config):
        return []
    rate = fine_tuning_rate(parameters, adapters=config["lora/rank"] > 0).value
    return [
        "these rates are the recipe's, for its own small demonstration; on pretrained weights they can undo what was "
        f"learned. Try optimization.name=adamw optimization.lr={rate:g}"
    ]


def supervision(trainer: BaseTrainer, stats: dict[str, Any]) -> list[str]:
    """What is unusual about which tokens of conversations are learnt, and with what before them."""
    if trainer.settings.objective != "sft" or "documents" not in stats:
        return []
    remarks = []
    if stats["target_tokens"] >= stats["tokens"] - stats["documents"]:
        remarks.append("texts without turns; every token is learnt, not only those of an assistant")
    if split := stats.get("split_documents"):
        remarks.append(
            f"{split:,} of {stats['documents']:,} conversations are longer than "
            f"architecture.block_size={trainer.settings.block_size} and learnt in pieces, of which only the first sees "
            "the beginning; a larger block keeps them whole, the style PADDED truncates them"
        )
    return remarks
