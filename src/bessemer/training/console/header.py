"""The first lines of a run: what is about to run, with which rates, kernels and derived numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bessemer.config import Config
from bessemer.console import compact, counted, figure, in_parts, shown
from bessemer.data.tokenize.chat import can_chat, stop_ids
from bessemer.data.tokenize.documents import describe_turn_rows
from bessemer.models.protocol import KernelChoice, group_of
from bessemer.registry import objectives
from bessemer.report.summary import too_small
from bessemer.scaling import fine_tuning_rate
from bessemer.training.console.output import optimizer_groups
from bessemer.training.persistence import frozen
from bessemer.training.settings import BaseTrainerConfig
from bessemer.training.setup.compiled import Functions, RunPlan
from bessemer.training.setup.horizon import is_shipped, repeats, starts_from_own_weights
from bessemer.training.setup.initial_weights import tree_in
from bessemer.training.setup.model import ModelParts, flops_formula
from bessemer.training.setup.schema import without_effect

TABLES = ("embedding", "head")  # groups of parameters with a row for each token


def header(plan: RunPlan, functions: Functions) -> Iterator[str]:
    """Yield the lines that state what is about to run, and each derived number with its reason."""
    context, parts, data = plan.context, plan.model, plan.data
    settings, topology, config = context.settings, context.topology, context.config
    yield f"run        {shown(context.directory.path)}"
    yield f"model      {settings.family}, {parts.counts['total']:,} parameters ({parts.counts['scaling']:,} scaling)"
    if (trained := frozen.describe(parts)) is not None:
        yield f"trains     {trained}"
    for name, stats in data.plan.stats.items():
        yield from data_lines(settings, shown(name), stats, data.validation_count)
    epochs = data.plan.epoch(data.steps)
    yield (
        f"batch      {data.batch_size} × {settings.block_size} tokens{in_parts(functions.accumulate_steps)}; "
        f"{data.steps:,} steps, {compact(plan.tokens)} tokens, {epochs:.2f} epochs"
    )
    yield f"rates      {'; '.join(rates(functions))}"
    yield (
        f"FLOPs      {compact(parts.flops_per_token)} per token = {flops_formula(parts, settings.block_size)}; "
        f"{compact(parts.flops_per_token_causal)} with causal attention counted once"
    )
    axes = " × ".join(f"{axis} {size}" for axis, size in topology.mesh.shape.items() if size > 1)
    yield f"devices    {topology.device_count} {topology.platform}{f' ({axes})' if axes else ''}{kernels(plan)}"
    notes = (
        *topology.notes,
        *config.notes,
        *without_effect(config, len(plan.stages)),
        *repeats(config, epochs),
        *shipped_rates(config, parts.counts["total"]),
    )
    for note in notes:
        yield f"note       {note}"
    for warning in untrained_end(settings, parts):
        yield f"warning    {warning}"
    if data.validation is not None and (small := too_small(data.validation.description)):
        yield f"warning    {small}"
    for name, entry in context.notes.derived.items():
        if name not in context.notes.given:
            yield f"{name:<30} {figure(entry['value']):<12} {entry['reason']}"


def data_lines(settings: BaseTrainerConfig, name: str, stats: dict[str, Any], held_out: int) -> Iterator[str]:
    known = [f"{stats[key]:,} {key}" for key in ("documents", "prompts", "tokens") if key in stats]
    if "pairs" in stats:
        known = [f"{stats['pairs']:,} pairs in {stats['rows']:,} rows", *known[1:]]
        known += [f"{stats['padding_share']:.1%} padding", f"{stats['truncated']:,} prompts truncated"]
        known += [f"{stats['without_targets']:,} left out"]
    yield f"data       {name}: {', '.join(known)}; {counted(held_out, 'row')} held out"
    if stats.get("unverified"):
        yield (
            f"note       {name}: prepared before stores had checksums, so damage would go unnoticed; prepare it again "
            "to have every chunk verified"
        )
    for why, count in stats.get("files_left_out", {}).items():
        yield f"note       {name}: {counted(count, 'file')} left out: {why}"
    for remark in supervision(settings, stats):
        yield f"note       {name}: {remark}"


def kernels(plan: RunPlan) -> str:
    """Return the chosen kernels, unless they are derived numbers with a reason: on a CPU."""
    model = plan.model.model
    if "architecture.attention" in plan.context.notes.derived or not isinstance(model, KernelChoice):
        return ""
    return "; " + ", ".join(f"{name}: {kernel}" for name, (kernel, _) in model.chosen_kernels().items())


def rates(functions: Functions) -> Iterator[str]:
    """Yield the peak rate and decay of each group of parameters."""
    for row in optimizer_groups(functions):
        rate = "rate of its own" if row["lr"] is None else f"{row['lr']:.4g}"
        decay = f", decay {row['weight_decay']:.4g}" if row["weight_decay"] else ""
        yield f"{row['group']} {rate}{decay} ({counted(row['tensors'], 'tensor')})"


def shipped_rates(config: Config, parameters: int) -> list[str]:
    """Return a note where the weights are the caller's but the rates are an optimizer's or a small demonstration's.

    Where a rate is derived from the model (`rate_for_weights`), there is none.
    """
    rates = [key for key in config.provenance if key.startswith("optimization/") and "lr" in key]
    if not rates or not all(is_shipped(config, key) for key in rates) or not starts_from_own_weights(config):
        return []
    share = objectives.entry(config["objective"]).traits.get("rate_share") or 1.0
    rate = fine_tuning_rate(parameters, share, adapters=config["lora/rank"] > 0).value
    name = "" if config["optimization/name"] == "adamw" else "optimization.name=adamw "
    return [
        f"these rates are not for pretrained weights and can undo what was learned. Try {name}optimization.lr={rate:g}"
    ]


def untrained_end(settings: BaseTrainerConfig, parts: ModelParts) -> list[str]:
    """Return a warning for adapters that cannot learn to end a turn: the base was trained on documents alone, so its
    rows for the tokens of turns are as they were drawn, and the head and the embedding are frozen."""
    start, tokenizer, group = settings.init, parts.tokenizer, group_of(parts.model)
    if not parts.split.lora.rank or start is None or tokenizer is None or group is None or not Path(start).exists():
        return []
    if tokenizer.chat_template is not None or not can_chat(tokenizer):
        return []
    before = str(tree_in(Path(start)).get("objective"))
    frozen = {kind: ["/".join(path) for path in parts.split.frozen if group(path) == kind] for kind in TABLES}
    if not frozen["head"] or before not in objectives or _trains_turns(before) or not _trains_turns(settings.objective):
        return []
    end = tokenizer.decode(stop_ids(tokenizer))
    whole = ",".join([*parts.split.lora.whole, *(name for names in frozen.values() for name in names)])
    return [
        f"the base (objective {before}) was never trained on {end}, and the head is frozen: adapters alone hardly "
        f"learn to end a turn. Train those tables whole beside them: 'lora.whole=[{whole}]'"
    ]


def _trains_turns(objective: str) -> bool:
    return bool(objectives.entry(objective).traits.get("chat"))


def supervision(settings: BaseTrainerConfig, stats: dict[str, Any]) -> list[str]:
    """Notes on conversations of which unusual tokens are learned, or without what comes before them."""
    if settings.objective != "sft" or "documents" not in stats:
        return []
    remarks = []
    if stats["target_tokens"] >= stats["tokens"] - stats["documents"]:
        remarks.append("texts without turns; every token is learned, not only those of an assistant")
    if turns := stats.get("turn_rows"):
        remarks.append(describe_turn_rows(turns))
    if split := stats.get("split_documents"):
        remarks.append(
            f"{split:,} of {stats['documents']:,} conversations are longer than "
            f"architecture.block_size={settings.block_size} and learned in pieces, of which only the first sees "
            "the beginning; a larger block keeps them whole, the style PADDED truncates them"
        )
    return remarks
