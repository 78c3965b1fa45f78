"""Checks of a run directory and the verdict on resuming it; nothing is changed."""

from bessemer.doctor.checks import Diagnosis, remove_stale
from bessemer.doctor.diagnose import diagnose, examine

__all__ = ["Diagnosis", "diagnose", "examine", "remove_stale"]
