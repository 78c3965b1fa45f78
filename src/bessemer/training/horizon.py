"""How long and how large: batch size and steps from the settings, the model's counts and the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bessemer.config import Config, dotted
from bessemer.errors import InputError
from bessemer.scaling import Derived, Dial, Reference, Sizes, Target, dial, horizon
from bessemer.training.microbatch import accumulation

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

HORIZONS = {
    "training/steps": "steps",
    "training/flops": "flops",
    "training/tokens": "tokens",
    "training/epochs": "epochs",
    "training/ratio": "ratio",
}
MANY = (
    8  # epochs of one text; up to about four, repeating it is nearly as good as new text (arXiv:2305.16264)
)
ASKED = ("command line", "python")


def asked(config: Config, keys: Any) -> list[str]:
    """Those of `keys` that the caller set, as opposed to a recipe or a default."""
    return [key for key in keys if config.provenance[key] in ASKED and config[key] is not None]


def target_of(config: Config) -> Target:
    """The horizon in force. One on the command line wins over any of the recipe's; two there contradict."""
    given = asked(config, HORIZONS)
    if len(given) > 1:
        names = " and ".join(dotted(key) for key in given)
        raise InputError(f"{names} are both given, but a run has one horizon; leave out all but one.")
    chosen = given or [key for key in HORIZONS if config[key] is not None]
    return Target(**{HORIZONS[key]: config[key] for key in chosen})


def repeats(config: Config, epochs: float) -> list[str]:
    """A word about data that a recipe's horizon repeats many times; who chose the horizon knows."""
    if epochs < MANY or config["objective"] not in ("pretrain", "sft") or asked(config, HORIZONS):
        return []
    return [
        f"the same data {epochs:.0f} times: when validation gets worse, it is being learnt by heart. "
        f"training.epochs={MANY // 2} is shorter; more data is better"
    ]


def check_batch_settings(config: Config) -> bool:
    """True when the batch is given in tokens. Both forms from the same hand contradict."""
    keys = ("training/batch_size", "training/batch_tokens")
    given = asked(config, keys) or [key for key in keys if config.is_set(key) and config[key] is not None]
    if len(given) > 1:
        raise InputError(
            "training.batch_size and training.batch_tokens are both given; they are the same thing in sequences and "
            "in tokens. Leave one out."
        )
    return given == ["training/batch_tokens"]


def check_sizes(trainer: BaseTrainer) -> None:
    """What is wrong with horizon and batch whatever the data is: said before minutes of preparation, not after."""
    config, target = trainer.config, target_of(trainer.config)
    in_tokens = check_batch_settings(config)
    if in_tokens and config["training/batch_tokens"] == -1:
        return  # the dial derives both
    if target.given in (None, "steps"):
        horizon(target, 1)
    per_device = trainer.settings.per_device_batch_size
    if not in_tokens and per_device != -1:
        wished = per_device if asked(config, ["training/per_device_batch_size"]) else min(1, per_device)
        accumulation(config["training/batch_size"], wished, trainer.topology.data_parallel)


def plan_horizon(trainer: BaseTrainer, epoch_rows: int) -> tuple[int, int]:
    """(batch size in sequences, steps), each noted with its reason."""
    config, block = trainer.config, trainer.settings.block_size
    target = target_of(config)
    counts = trainer.model_parts.counts
    sizes = Sizes(counts.get("scaling"), trainer.model_parts.flops_per_token, epoch_rows * block)
    in_tokens = check_batch_settings(config)
    tokens = config["training/batch_tokens"] if in_tokens else config["training/batch_size"] * block
    if tokens == -1:
        derived = turn_dial(trainer, target, sizes)
        for row in derived.rows:
            note(trainer, row)
        return derived.batch_tokens // block, derived.steps
    if tokens < block or tokens % block:
        raise InputError(
            f"training.batch_tokens={tokens} is not a whole number of sequences of {block} tokens; make it a multiple "
            "of architecture.block_size."
        )
    steps = horizon(target, tokens, sizes)
    note(trainer, steps)
    return tokens // block, steps.value


def turn_dial(trainer: BaseTrainer, target: Target, sizes: Sizes) -> Dial:
    """The depth dial: what it derives for the optimizer goes into the configuration as chosen."""
    model: Any = trainer.model
    if not hasattr(model, "depth"):
        raise InputError(
            "training.batch_tokens=-1 derives the batch from model.depth, which this model has not."
        )

    plain = {"lookup_after_layers": ()} if hasattr(model, "lookup_after_layers") else {}

    def count(depth: int) -> int:
        member = model.clone(depth=depth, width=-1, heads=-1, kv_heads=-1, **plain)
        return member.count_parameters()["scaling"]

    config = trainer.config
    ratio = {} if target.ratio is None else {"ratio": target.ratio}
    decay = config.get("optimization/weight_decay")
    base = {} if decay is None else {"weight_decay": decay}
    derived = dial(
        target,
        depth=model.depth,
        sizes=sizes,
        reference=Reference(count(12), count(8), **ratio),
        block_size=trainer.settings.block_size,
        **base,
    )
    if "optimization/lr_multiplier" in config and not asked(config, ["optimization/lr_multiplier"]):
        config.set("optimization/lr_multiplier", derived.lr_multiplier, "the depth dial")
        config.set("optimization/weight_decay", derived.weight_decay, "the depth dial")
    config.set("training/batch_tokens", derived.batch_tokens, "the depth dial")
    config.set("training/steps", derived.steps, "the depth dial")
    return derived


def note(trainer: BaseTrainer, row: Derived) -> None:
    trainer.note_derived(dotted(row.name), row.value, row.reason)
