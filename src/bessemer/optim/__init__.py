"""Optimizers and schedules: optax transformations and pure functions of the optimizer step, found by name."""

from bessemer.optim.build import Optimizer, build_optimizer, build_schedule, default_schedule, settings_classes
from bessemer.optim.schedules import Schedule
from bessemer.optim.state import mesh_spread, state_shardings
from bessemer.optim.transform import Group, apply_rate, wrap_optax

__all__ = [
    "Group",
    "Optimizer",
    "Schedule",
    "apply_rate",
    "build_optimizer",
    "build_schedule",
    "default_schedule",
    "mesh_spread",
    "settings_classes",
    "state_shardings",
    "wrap_optax",
]
