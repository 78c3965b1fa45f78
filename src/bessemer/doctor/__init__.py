"""What a run directory can still be used for: every part of it is checked, and nothing is changed."""

from bessemer.doctor.diagnose import diagnose
from bessemer.doctor.findings import Diagnosis, Finding
from bessemer.doctor.leftovers import remove_stale
from bessemer.doctor.phases import examine

__all__ = ["Diagnosis", "Finding", "diagnose", "examine", "remove_stale"]
