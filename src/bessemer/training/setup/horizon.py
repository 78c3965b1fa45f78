"""Derive batch size, steps, rates and report interval from the settings, the model's counts and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from flax import linen as nn

from bessemer.config import Config, Origin, OriginKind, dotted
from bessemer.config.aliases import RENAMED_RECIPES
from bessemer.config.recipes import recipe_names
from bessemer.console import counted
from bessemer.errors import InputError
from bessemer.models.lookup import without_lookup
from bessemer.models.transformer import Transformer
from bessemer.optim.muon import preset
from bessemer.registry import objectives
from bessemer.scaling import (
    FLOOR_DEPTH,
    RATIO,
    REFERENCE_BATCH,
    REFERENCE_DEPTH,
    Derivation,
    Dial,
    Reference,
    Sizes,
    Target,
    dial,
    fine_tuning_rate,
    horizon,
)
from bessemer.training.settings import LoggingSettings, Notes, RunContext
from bessemer.training.setup.initial_weights import is_recipes_run
from bessemer.training.setup.microbatch import accumulation
from bessemer.training.setup.model import ModelParts

HORIZONS = {
    "training/steps": "steps",
    "training/flops": "flops",
    "training/tokens": "tokens",
    "training/epochs": "epochs",
    "training/ratio": "ratio",
}
MANY = 8  # epochs of one text; up to about four, repeating it is nearly as good as new text (arXiv:2305.16264)
REPORTS = "logging/report_interval"
FEWEST_ROWS = 50
SHIPPED = frozenset((*recipe_names(), *RENAMED_RECIPES))
OWN_TOKENS = 2**15  # of a step on the caller's own weights and data: as large a batch as fine-tuning usually needs
OWN_STEPS = 100  # smaller batches than that, rather than fewer steps
DIALED = Origin(OriginKind.DEPTH_DIAL)
MULTIPLIER, DECAY, RATE = "optimization/lr_multiplier", "optimization/weight_decay", "optimization/lr"


def target_of(config: Config) -> Target:
    """Return the horizon. One that the caller set wins over the recipe's; two from the caller are an InputError."""
    given = config.asked(*HORIZONS)
    if len(given) > 1:
        names = " and ".join(dotted(key) for key in given)
        raise InputError(f"{names} are both given, but a run has one horizon; leave out all but one.")
    chosen = given or [key for key in HORIZONS if config[key] is not None]
    values = {HORIZONS[key]: config[key] for key in chosen}
    return Target(**(values | {"ratio": ratio_of(config)} if "ratio" in values else values))


def ratio_of(config: Config) -> float:
    """Return tokens per scaling parameter: training.ratio, or if it is -1 or None the optimizer preset's."""
    if (ratio := config["training/ratio"]) not in (None, -1):
        return float(ratio)
    name = config.get("optimization/preset")
    return RATIO if name is None else preset(name).ratio


def decay_of(config: Config) -> float:
    """Return the weight decay that the dial scales: the setting, the preset's, or 0."""
    decay, name = config.get(DECAY), config.get("optimization/preset")
    return float(preset(name).weight_decay if decay is None and name is not None else decay or 0.0)


def repeats(config: Config, epochs: float) -> list[str]:
    """Return a warning if a recipe's horizon repeats the data many times and the caller set no horizon."""
    if epochs < MANY or config["objective"] not in ("pretrain", "sft") or config.asked(*HORIZONS):
        return []
    return [
        f"the data is repeated {epochs:.0f} times: if the validation loss rises, the model overfits. "
        f"Set training.epochs={MANY // 2}, or add data"
    ]


def check_batch_settings(config: Config) -> bool:
    """Return whether the batch is set in tokens; both forms from the same source are an InputError."""
    keys = ("training/batch_size", "training/batch_tokens")
    given = config.asked(*keys) or [key for key in keys if config.is_set(key) and config[key] is not None]
    if len(given) > 1:
        raise InputError(
            "training.batch_size and training.batch_tokens are both given; they are the same thing in sequences and "
            "in tokens. Leave one out."
        )
    return given == ["training/batch_tokens"]


def check_sizes(context: RunContext[Any]) -> None:
    """Raise InputError for a horizon or batch that no data could make valid, before minutes of preparation."""
    config, target = context.config, target_of(context.config)
    in_tokens = check_batch_settings(config)
    if in_tokens and config["training/batch_tokens"] == -1:
        return  # the dial derives both
    if target.given in (None, "steps"):
        horizon(target, 1)
    per_device = config["training/per_device_batch_size"]
    if not in_tokens and per_device != -1:
        requested = per_device if config.asked("training/per_device_batch_size") else min(1, per_device)
        accumulation(config["training/batch_size"], requested, context.topology.data_parallel)


@dataclass(frozen=True)
class Derived:
    """What the program chooses by the sizes of model and data: the configuration with these values, the batch size in
    sequences, the steps, and each derived number with its reason."""

    config: Config
    batch_size: int
    steps: int
    rows: tuple[Derivation, ...]


def plan_horizon(context: RunContext[Any], parts: ModelParts, epoch_rows: int) -> tuple[int, int]:
    """Return (batch size in sequences, steps); record what `derive` chose."""
    own_rows, parallel = context.given.dataset_train is not None, context.topology.data_parallel
    derived = derive(context.config, parts, epoch_rows, own_rows=own_rows, parallel=parallel)
    for key, value in derived.config.values.items():
        origin = derived.config.provenance[key]
        if (value, origin) != (context.config[key], context.config.provenance[key]):
            context.config.set(key, value, origin)
    for row in derived.rows:
        note(context.notes, row)
    return derived.batch_size, derived.steps


def derive(config: Config, parts: ModelParts, epoch_rows: int, own_rows: bool = False, parallel: int = 1) -> Derived:
    """Derive batch size, steps, rates and weight decay; `config` is not written to.

    epoch_rows: rows of one epoch. own_rows: the data was passed in Python. parallel: devices that split a batch.
    """
    own = sizes_for_own_data(config, epoch_rows, own_rows, parallel)
    for row in own:
        config = config.replace({row.name: row.value}, row.reason)
    rows = [row for row in own if row.value is not None]
    block, target, counts = config["architecture/block_size"], target_of(config), parts.counts
    dialed = config["training/ratio"] == -1 or target.given == "ratio"
    if config["training/ratio"] == -1:
        config = config.replace({"training/ratio": ratio_of(config)}, "the optimizer preset's")
    if (rate := rate_for_weights(config, counts["total"])) is not None:
        config = config.replace({rate.name: rate.value}, rate.reason)
        rows.append(rate)
    sizes = Sizes(counts.get("scaling"), parts.flops_per_token, epoch_rows * block)
    in_tokens = check_batch_settings(config)
    tokens = config["training/batch_tokens"] if in_tokens else config["training/batch_size"] * block
    if tokens != -1 and (tokens < block or tokens % block):
        raise InputError(
            f"training.batch_tokens={tokens} is not a whole number of sequences of {block} tokens; make it a multiple "
            "of architecture.block_size."
        )
    # On resume these hold what the dial chose at the start, so nothing is scaled twice.
    given_rates = [key for key in (MULTIPLIER, RATE) if key in config and config.is_set(key)]
    if tokens == -1 or (dialed and isinstance(parts.model, Transformer) and not given_rates):
        config, dial = turn_dial(config, parts.model, target, sizes, tokens)
        return Derived(config, dial.batch_tokens // block, dial.steps, (*rows, *dial.rows))
    steps = horizon(target, tokens, sizes)
    rows.append(steps)
    if dialed and given_rates and config.provenance[given_rates[0]] != DIALED:
        why = (
            f"given: rates and weight decay do not follow the batch (√(B/B_ref) is "
            f"{math.sqrt(tokens / REFERENCE_BATCH):.3g})"
        )
        rows.append(Derivation(given_rates[0], config[given_rates[0]], why))
    return Derived(config, tokens // block, steps.value, tuple(rows))


def turn_dial(config: Config, model: nn.Module, target: Target, sizes: Sizes, batch_tokens: int) -> tuple[Config, Dial]:
    """Return (the configuration with what the depth dial derives, the dial). batch_tokens: -1 derives it too."""
    if not isinstance(model, Transformer):
        raise InputError("training.batch_tokens=-1 derives the batch from model.depth, which this model does not have.")

    def count(depth: int) -> int:
        member = without_lookup(model).clone(depth=depth, width=-1, heads=-1, kv_heads=-1)
        return member.count_parameters()["scaling"]

    derived = dial(
        target,
        depth=model.depth,
        sizes=sizes,
        reference=Reference(count(REFERENCE_DEPTH), count(FLOOR_DEPTH), ratio_of(config)),
        block_size=config["architecture/block_size"],
        batch_tokens=batch_tokens,
        weight_decay=decay_of(config),
    )
    shown, chosen = scaled_rates(config, derived)
    if batch_tokens == -1:
        chosen |= {"training/batch_tokens": derived.batch_tokens, "training/steps": derived.steps}
    return config.replace(chosen, DIALED), replace(derived, rows=shown)


def scaled_rates(config: Config, derived: Dial) -> tuple[list[Derivation], dict[str, Any]]:
    """Return (the dial's rows as they hold for this optimizer, the settings among them that it changes).

    An optimizer with one rate has no multiplier: the rate itself is scaled. One brought by the caller has neither.
    A multiplier or a rate that the caller set stays as it is.
    """
    *rows, multiplier, decay = derived.rows
    scaled = []
    if MULTIPLIER in config and config.asked(MULTIPLIER):
        why = f"given, in place of {multiplier.value:.4g} = {multiplier.reason}"
        rows.append(Derivation(MULTIPLIER, config[MULTIPLIER], why))
    elif MULTIPLIER in config:
        scaled.append(multiplier)
    elif RATE in config and config.asked(RATE):
        rows.append(Derivation(RATE, config[RATE], f"given: not scaled by {multiplier.reason}"))
    elif config.get(RATE) is not None:
        rate = config[RATE]
        scaled.append(Derivation(RATE, rate * derived.lr_multiplier, f"{rate:g} · {multiplier.reason}"))
    if DECAY in config:
        scaled.append(decay)
    return [*rows, *scaled], {row.name: row.value for row in scaled}


def report_interval(steps: int) -> Derivation:
    """Return the steps between reports: 1 in a run of under 100 steps, 50 to 100 rows in a longer one.

    What ends a bad run does not wait for a report: every step is read within 34 (`StepLog`).
    """
    nice = (multiple * 10**power for power in range(9) for multiple in (1, 2, 4, 5))
    interval = max([1, *(number for number in nice if steps // number >= FEWEST_ROWS)])
    return Derivation(REPORTS, interval, f"{steps:,} steps: {counted(steps // interval, 'row')}")


def settle_reports(context: RunContext[Any], steps: int) -> LoggingSettings:
    """Return the logging settings with the report interval, derived from the horizon unless it is set."""
    if context.logging.report_interval is not None:
        return context.logging
    derived = report_interval(steps)
    context.config.set(REPORTS, derived.value, derived.reason)
    note(context.notes, derived)
    return replace(context.logging, report_interval=derived.value)


def is_shipped(config: Config, key: str) -> bool:
    """Return whether `key` has its default or a shipped recipe's value."""
    origin = config.provenance[key]
    return origin.is_default or (origin.is_recipe and origin.detail in SHIPPED)


def starts_from_own_weights(config: Config) -> bool:
    """Return whether the run starts from weights that the caller or a recipe of theirs names, unlike a demo."""
    return config["init"] is not None and not is_shipped(config, "init") and not is_recipes_run(config, "init")


def rate_for_weights(config: Config, parameters: int) -> Derivation | None:
    """Return AdamW's rate for the size of the weights that the caller starts from; None if another one holds.

    A recipe's own rate is for its demonstration with a tiny model and would destroy real weights, whatever the data.
    """
    share = objectives.entry(config["objective"]).traits.get("rate_share")
    if share is None or config.get("optimization/name") != "adamw" or not is_shipped(config, RATE):
        return None
    if not starts_from_own_weights(config):
        return None
    return fine_tuning_rate(parameters, share, adapters=config["lora/rank"] > 0)


def sizes_for_own_data(config: Config, epoch_rows: int, own_rows: bool, parallel: int) -> list[Derivation]:
    """Return passes over the data and batch size of a run on the caller's own weights and data, where a shipped recipe
    has the numbers of its demonstration. Empty if the caller gave them, or for objectives without `own_epochs`.

    own_rows: the data was passed in Python, not named by training.dataset.
    """
    epochs = objectives.entry(config["objective"]).traits.get("own_epochs")
    own_data = own_rows or not is_shipped(config, "training/dataset")
    if epochs is None or not own_data or not starts_from_own_weights(config):
        return []
    asked = config["training/epochs"] if config.asked("training/epochs") else None
    rows, seen = [], None if asked is None else asked * epoch_rows
    if not config.asked(*HORIZONS) and is_shipped(config, "training/steps"):
        rows += [Derivation(key, None, "your own data: training.epochs") for key in HORIZONS if config[key] is not None]
        rows.append(Derivation("training/epochs", epochs, "your own data: passes that rarely overfit"))
        asked, seen = epochs, epochs * epoch_rows
    keys = ("training/batch_size", "training/batch_tokens")
    if not config.asked(*keys) and all(is_shipped(config, key) for key in keys):
        block = config["architecture/block_size"]
        most, why = OWN_TOKENS // block, f"about {OWN_TOKENS:,} tokens per step"
        if seen is not None and seen // OWN_STEPS < most:
            most, why = seen // OWN_STEPS, f"so that {asked:g} epochs make about {OWN_STEPS} steps or more"
        elif epoch_rows < most:
            most, why = epoch_rows, "a step takes no row twice"
        batch = max(1, 2 ** int(math.log2(max(1, int(most) // parallel)))) * parallel
        rows.append(Derivation("training/batch_size", batch, f"your own data: {why}"))
    return rows


def note(notes: Notes, row: Derivation) -> None:
    notes.derive(dotted(row.name), row.value, row.reason, given=row.given)
