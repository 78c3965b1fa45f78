"""The teacher of a distillation: another run's model, of its own shape, frozen and laid over the same mesh.

Its parameters are the state's `reference`: read once, written to RUN/reference/step_0 with their configuration, and
from then on the run needs the teacher's own directory no more. With `distill.top_k` it is not held at all (taught.py):
RUN/reference/teacher.json names its weights, so that a run whose teacher is gone finds what was stored of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bessemer.checkpoint import Checkpoints
from bessemer.config import configure
from bessemer.config.bounded import read_json
from bessemer.data.tokenizer import FILE as TOKENIZER
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import InputError, StorageError
from bessemer.generate import load
from bessemer.job import atomic_write
from bessemer.job.files import storage
from bessemer.models.allocation import FILE as ALLOCATION
from bessemer.registry import objectives
from bessemer.topology import share
from bessemer.training.first import PREFIX, planned_recipe
from bessemer.training.model_parts import make_apply
from bessemer.training.starts import read_weights, tree_in, weights_digest

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


RECORD = "teacher.json"


class Teacher(NamedTuple):
    """`apply(params, batch, method="projection")`; `place` is the directory the parameters are read from. The model is
    None if that is gone and the run trains on what was stored of it."""

    model: Any
    apply: Callable[..., Any]
    boxed: Any
    config: dict[str, Any]
    place: Path
    live: bool  # held during training, not only stored from


def find_teacher(trainer: BaseTrainer) -> Teacher | None:
    """The teacher of an objective that has one (trait `teacher`), checked against the student; no array is read."""
    entry = objectives.entry(trainer.settings.objective)
    if not entry.traits.get("teacher"):
        return None
    settings: Any = configure(entry.settings[0])
    if settings.teacher is None:
        raise InputError(f"objective={entry.name} learns from another run: give distill.teacher=RUN.")
    place = kept_place(trainer) or Path(settings.teacher)
    if settings.top_k and not place.is_dir() and recorded(trainer) is not None:
        return Teacher(None, _gone, None, {}, place, live=False)
    config = config_of(trainer, place)
    model, _ = load.build_model(config, str(place))
    tokenizer = Tokenizer.load(place) if (place / TOKENIZER).is_file() else None
    model = load.allocated(model, place, tokenizer)
    check_teacher(trainer, model, tokenizer, place)
    boxed = load.boxed_params(model, trainer.topology)
    trainer.note_derived(
        "distill.teacher",
        place.parent.parent.name if place.name.startswith("step_") else str(place),
        f"{model.count_parameters()['total']:,} parameters, frozen; {trainer.model_parts.counts['total']:,} here",
    )
    return Teacher(model, make_apply(model), boxed, config, place, settings.top_k == 0)


def _gone(*_: Any, **__: Any) -> Any:
    raise AssertionError("a teacher that is gone cannot be applied")


def identity(trainer: BaseTrainer) -> str:
    """Return the SHA-256 that names the teacher's weights. Raise InputError if the run was begun with others."""
    teacher, known = trainer.teacher, recorded(trainer)
    assert teacher is not None
    if teacher.model is None:
        assert known is not None
        return known
    found = share("the teacher's weights", lambda: weights_digest(teacher.place))
    if known is not None and known != found:
        raise InputError(
            f"distill.teacher={teacher.place} holds other weights ({found[:12]}) than those this run began with "
            f"({known[:12]}). Put those back, or start a new run."
        )
    return found


def recorded(trainer: BaseTrainer) -> str | None:
    """Return the SHA-256 of the stored teacher's weights that the run began with; None before its first step."""
    path = trainer.run_directory.path / "reference" / RECORD
    try:
        return str(read_json(path)["sha256"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is damaged ({error}): put it back from a copy.") from error


def record(trainer: BaseTrainer) -> None:
    """Before the first step: write which weights a stored teacher has."""
    teacher = trainer.teacher
    if teacher is None or teacher.live or recorded(trainer) is not None:
        return
    facts = {"teacher": str(teacher.place), "sha256": identity(trainer)}
    if trainer.is_process_zero:
        path = trainer.run_directory.path / "reference" / RECORD
        with storage("cannot record the teacher"):
            path.parent.mkdir(exist_ok=True)
        atomic_write(path, json.dumps(facts, indent=1))


def kept_place(trainer: BaseTrainer) -> Path | None:
    """The run's own copy of the teacher, once it is written."""
    store = Checkpoints(trainer.run_directory.path / "reference")
    return store.path(0) if 0 in store.committed() and (store.path(0) / "config.yaml").is_file() else None


def config_of(trainer: BaseTrainer, place: Path) -> dict[str, Any]:
    """The teacher's configuration; of one that a plan would train first, its recipe's."""
    if str(place).startswith(PREFIX):
        tree = planned_recipe(str(place).removeprefix(PREFIX)).tree()
        return {**tree, "model": {**tree["model"], "vocab_size": trainer.model.vocab_size}}
    if not place.is_dir():
        raise InputError(
            f"distill.teacher={place} is gone, and the run holds no copy of it yet. Put it back."
        )
    return tree_in(place)


def check_teacher(trainer: BaseTrainer, model: Any, tokenizer: Tokenizer | None, place: Path) -> None:
    """Both must mean the same by an id, and the teacher must be able to read the student's rows."""
    student, own = trainer.model, trainer.tokenizer
    if tokenizer is not None and own is not None and tokenizer.hash != own.hash:
        raise InputError(
            f"distill.teacher={place} was trained with another tokenizer, so its ids mean other words. Use that one: "
            f"data.tokenizer={place / TOKENIZER}"
        )
    if model.vocab_size != student.vocab_size:
        raise InputError(
            f"the teacher {place} has a vocabulary of {model.vocab_size} and this model one of {student.vocab_size}: "
            f"set model.vocab_size={model.vocab_size}."
        )
    if model.block_size < trainer.settings.block_size:
        raise InputError(
            f"the teacher {place} reads {model.block_size} tokens at most, and architecture.block_size is "
            f"{trainer.settings.block_size}. Use a shorter one here."
        )


def read_params(trainer: BaseTrainer, teacher: Teacher) -> Any:
    """The teacher's parameters where the mesh rests them; adapters merged."""
    manager = trainer.checkpoint_manager
    return read_weights(teacher.place, manager, teacher.model, teacher.boxed, trainer.topology)


def files_of(teacher: Teacher) -> dict[str, str]:
    """What is kept beside the parameters, so that they can be used without the teacher's run."""
    place, found = teacher.place, {}
    if (place / TOKENIZER).is_file():
        found = Tokenizer.load(place).files
    if (place / ALLOCATION).is_file():
        found = {**found, ALLOCATION: (place / ALLOCATION).read_text("utf-8")}
    return {**found, "config.yaml": whole_config(teacher.config)}


def whole_config(config: dict[str, Any]) -> str:
    """The teacher's configuration as that of a model whose parameters are all in one place."""
    from omegaconf import OmegaConf

    shape = {name: value for name, value in config.items() if name in load.SECTIONS}
    return OmegaConf.to_yaml(OmegaConf.create(shape))
