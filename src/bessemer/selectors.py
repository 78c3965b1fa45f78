"""Settings that select a registered part, and with it the settings which that part brings.

`optimization.name=muon` puts Muon's settings into the schema. A setting of a part that was not selected is
unknown to the run, and `explain_unselected` says which selection would make it known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass

from bessemer import registry
from bessemer.config import declared, dotted
from bessemer.registry import Entry, Registry

SELECTORS: dict[str, Registry] = {
    "job": registry.jobs,
    "objective": registry.objectives,
    "model/family": registry.models,
    "optimization/name": registry.optimizers,
    "optimization/schedule": registry.schedules,
    "callbacks": registry.callbacks,
}


def settings_classes(entry: Entry) -> tuple[type, ...]:
    """Classes whose fields are settings when `entry` is selected; a model's are on the module itself."""
    if hasattr(entry.value, "config_class"):
        return (entry.value.config_class(), *entry.settings)
    if isinstance(entry.value, type) and is_dataclass(entry.value):
        return (entry.value, *entry.settings)
    return entry.settings


def explain_unselected(key: str, selectors: Mapping[str, Registry] = SELECTORS) -> str | None:
    """`is a setting of optimizer 'muon'; add optimization.name=muon`, or None for a key nobody declares."""
    for selector, table in selectors.items():
        owners = [entry.name for entry in table if key in _keys(entry)]
        if owners:
            choice = owners[0] if len(owners) == 1 else "|".join(owners)
            parts = " and ".join(f"'{name}'" for name in owners)
            return f"is a setting of {table.kind} {parts}; add {dotted(selector)}={choice}"
    return None


def _keys(entry: Entry) -> set[str]:
    return {setting.key for cls in settings_classes(entry) for setting in declared(cls).values()}
