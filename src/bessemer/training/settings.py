"""Settings of a training run, and what a run knows before anything is built.

Settings are those of the trainer, of logging and checkpoints, and of the guard. Setup functions take `RunContext` in
place of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import Any, Generic, NamedTuple, TypeVar

from bessemer.config import Config, field, parse_duration
from bessemer.data import Tokenizer
from bessemer.data.plan.mixture import Sampling
from bessemer.errors import InputError
from bessemer.job import RunDirectory
from bessemer.models.lora import PARAM_DTYPES, LoraSettings
from bessemer.scaling import MOST_STEPS
from bessemer.topology import Topology


@dataclass
class BaseTrainerConfig:
    """Settings of every trainer. Subclass it to add or to change a default."""

    job: str = field(
        "job", default="BaseTrainer", help="trainer class: a registered name, file.py:Class or module:Class of your own"
    )
    plugins: list[str] = field(
        "plugins", default_factory=list, help="modules or .py files imported first; they register your own parts"
    )
    objective: str = field("objective", default="pretrain", help="which loss: a name from the objectives registry")
    allow_data_change: bool = field(
        "training/allow_data_change",
        default=False,
        help="let resume continue with other data or another tokenizer; it is then another run from there on",
    )
    init: str | None = field(
        "init",
        default=None,
        help="start from the weights of a run or checkpoint, whose tokenizer and shapes it takes over; recipe:NAME "
        "trains that recipe first, once",
    )
    adapters: str | None = field(
        "lora/adapters",
        default=None,
        help="PEFT folder whose adapters the run continues, over `init` or the base it names; init=FOLDER sets it",
    )
    seed: int = field("seed", default=1337, minimum=0, maximum=2**32 - 1, help="the only source of randomness")
    family: str = field("model/family", default="gpt", help="model family: a name from the models registry")
    block_size: int = field("architecture/block_size", default=512, minimum=2, help="sequence length in tokens")

    batch_size: int = field(
        "training/batch_size",
        default=512,
        minimum=1,
        help="sequences per optimizer step, all devices together; accumulation never changes it",
    )
    batch_tokens: int | None = field(
        "training/batch_tokens",
        default=None,
        minimum=1,
        also=(-1,),
        help="batch size in tokens (a multiple of architecture.block_size); -1 derives it from the model's size",
    )
    per_device_batch_size: int = field(
        "training/per_device_batch_size",
        default=-1,
        minimum=1,
        also=(-1,),
        help="sequences in one forward pass per data-parallel device; -1: the largest that fits in memory",
    )
    steps: int | None = field(
        "training/steps", default=None, minimum=1, maximum=MOST_STEPS, help="horizon: optimizer steps"
    )
    flops: float | None = field("training/flops", default=None, above=0, help="horizon: training FLOPs")
    total_tokens: list[int] | None = field(
        "training/tokens", default=None, minimum=1, help="horizon: tokens; a list gives one horizon per stage"
    )
    epochs: float | None = field("training/epochs", default=None, above=0, help="horizon: passes over the data")
    ratio: float | None = field(
        "training/ratio",
        default=None,
        above=0,
        also=(-1,),
        help="horizon: tokens per scaling parameter; -1: the optimizer preset's (10.5; july2026: 12)",
    )

    datasets: list[list[Sampling]] = field(
        "training/dataset",
        default_factory=list,
        help="what to train on: a file, glob, store directory or registered name; or a list of samplings",
    )
    validate: bool = field("training/validation", default=True, help="measure the loss on held-out sequences")
    validation_steps: int = field(
        "training/validation_steps",
        default=2048,
        minimum=1,
        help="sequences in one validation pass (the same ones each time; fewer when the data holds fewer)",
    )
    time_limit: str | float | None = field(
        "training/time_limit", default=None, help="stop with a checkpoint after 2h30m, 1d, 90 (seconds), ..."
    )
    max_grad_norm: float = field(
        "training/max_grad_norm", default=1.0, minimum=0, help="clip the global gradient norm; 0 = off"
    )
    ema: float = field("training/ema", default=0.0, minimum=0, below=1, help="decay of a weight average; 0 = off")
    tied_head: float = field(
        "training/tied_head",
        default=0.0,
        minimum=0,
        maximum=1,
        help="share of the steps in which the head of a fresh gpt is tied to its embedding; 0 = never",
    )
    param_dtype: str = field(
        "training/param_dtype",
        default="float32",
        choices=PARAM_DTYPES,
        help="dtype of the parameters at rest; bfloat16 halves them and rounds each update stochastically, norms and "
        "scalars stay float32",
    )
    optimizer: str | None = field(
        "optimization/name", default=None, help="a name from the optimizers registry; none: the trainer's (adamw)"
    )
    schedule: str | None = field(
        "optimization/schedule", default=None, help="a name from the schedules registry; none: the optimizer's own"
    )
    stage_reset: bool = field(
        "optimization/stage_reset", default=False, help="begin every stage after the first with fresh optimizer moments"
    )
    freeze: list[str] = field(
        "training/freeze",
        default_factory=list,
        help="patterns (* and ?) over parameter paths that are not trained, such as embedding or blocks_0/*",
    )
    callbacks: list[str] = field(
        "callbacks", default_factory=list, help="extra callbacks: registered names, file.py:Class or module:Class"
    )


def seconds_of(time_limit: str | float | None) -> float | None:
    """training/time_limit in seconds."""
    if time_limit is None:
        return None
    try:
        return parse_duration(time_limit)
    except InputError as error:
        raise InputError(f"training.time_limit: {error}") from error


@dataclass
class LoggingSettings:
    """What is logged, saved and validated, and when. All intervals are optimizer steps."""

    report_interval: int | None = field(
        "logging/report_interval",
        default=None,
        minimum=-1,
        help="steps between rows of metrics.jsonl; 0 or -1: at the end only; none: for 50 to 100 rows, but every step "
        "of a short run",
    )
    validation_interval: int = field(
        "logging/validation_interval",
        default=512,
        minimum=-1,
        help="steps between validations; 0 or -1: at the end only",
    )
    checkpoint_interval: int = field(
        "logging/checkpoint_interval",
        default=1024,
        minimum=-1,
        help="steps between checkpoints; 0 or -1: at the end only",
    )
    keep_last: int = field("logging/keep_last", default=3, minimum=1, help="number of newest checkpoints to keep")
    keep_every: int = field(
        "logging/keep_every", default=0, minimum=0, help="also keep checkpoints at multiples of this step; 0 = none"
    )
    progress: str = field(
        "logging/progress",
        default="auto",
        choices=("auto", "rich", "tqdm", "json", "plain", "none"),
        help="how progress is shown; auto: rich on a terminal, plain lines otherwise",
    )
    plots: bool = field(
        "logging/plots", default=True, help="draw the curves when the run ends; `bessemer report` does at any time"
    )
    mirror: str | None = field(
        "logging/mirror",
        default=None,
        help="s3://bucket/runs or gs://…: checkpoints and files of the run are copied there as they are committed",
    )
    wandb: bool = field("logging/wandb", default=False, help="also log to Weights & Biases (extra: track)")
    tensorboard: bool = field("logging/tensorboard", default=False, help="also log to TensorBoard (extra: track)")


@dataclass
class GuardSettings:
    """What to do about non-finite steps and loss spikes."""

    max_bad_steps: int = field(
        "guard/max_bad_steps",
        default=3,
        minimum=1,
        help="steps in a row without an update (non-finite, or skipped spikes) that end the run (exit 3)",
    )
    spike_sigma: float = field(
        "guard/spike_sigma",
        default=0.0,
        minimum=0,
        help="a loss this many standard deviations above the running mean is a spike; 0 = off",
    )
    spike_action: str = field(
        "guard/spike_action",
        default="warn",
        choices=("warn", "skip", "rollback"),
        help="on a spike: warn; skip the update; or roll back to a checkpoint and skip that data",
    )
    spike_window: int = field(
        "guard/spike_window",
        default=64,
        minimum=2,
        help="window of the mean and deviation, in steps; no spike is detected before it is full",
    )
    max_rollbacks: int = field(
        "guard/max_rollbacks", default=3, minimum=0, help="rollbacks after which the run ends (exit 3)"
    )

    @property
    def rolls_back(self) -> bool:
        return self.spike_sigma > 0 and self.spike_action == "rollback"


# --- what a run knows before anything is built ---


C = TypeVar("C", bound=BaseTrainerConfig)


class GivenParts(NamedTuple):
    """What the caller passes to a trainer instead of naming it in the configuration."""

    model: Any = None
    model_state: Any = None
    dataset_train: Any = None
    dataset_eval: Any = None
    data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None
    tokenizer: Tokenizer | None = None


@dataclass
class Notes:
    """How setup reports: `say` prints a line, `derive` records a derived number with its reason (derived.json).

    given: the names in `derived` that the caller set, which are not worth a line at the start.
    """

    say: Callable[[str], None]
    derived: dict[str, Any] = plain_field(default_factory=dict)
    given: set[str] = plain_field(default_factory=set)

    def derive(self, name: str, value: Any, reason: str, given: bool = False) -> None:
        self.derived[name] = {"value": value, "reason": reason}
        (self.given.add if given else self.given.discard)(name)


@dataclass(frozen=True)
class RunContext(Generic[C]):
    """The resolved settings, the mesh, the run directory and what the caller passed."""

    config: Config
    settings: C
    logging: LoggingSettings
    guard: GuardSettings
    lora: LoraSettings
    topology: Topology
    directory: RunDirectory
    given: GivenParts
    notes: Notes

    @property
    def has_recipe_data(self) -> bool:
        """Whether it trains on data that a recipe names, as opposed to the caller's."""
        return self.given.dataset_train is None and self.config.provenance["training/dataset"].is_recipe
