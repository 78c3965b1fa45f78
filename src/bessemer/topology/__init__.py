"""Where a run computes: chips and their peaks, the mesh, the rule tables, the processes.

Model code knows nothing of devices: it names the axes of its arrays, and the tables here say on which mesh
axis each named axis rests (parameters, optimizer state) and computes (weights in use, activations).
"""

from bessemer.topology.arrange import arrange
from bessemer.topology.backend import backend, planned_for
from bessemer.topology.chips import CHIPS, Chip, chip_of, has_float8
from bessemer.topology.distributed import (
    StepAgreement,
    agree,
    barrier,
    first_line,
    forget,
    process_count,
    process_index,
    share,
)
from bessemer.topology.loss import farewell
from bessemer.topology.mesh import Topology, init_sharded, make_topology
from bessemer.topology.placement import placement
from bessemer.topology.roll_call import absent_processes
from bessemer.topology.rules import (
    COMPUTE_RULES,
    REST_RULES,
    Rules,
    check_rules,
    shardings,
    unbox,
    validate_divisible,
)
from bessemer.topology.settings import AXES, TopologySettings
from bessemer.topology.start import keep_stdout_clean, start_distributed
from bessemer.topology.together import CompiledTogether

__all__ = [
    "AXES",
    "CHIPS",
    "COMPUTE_RULES",
    "REST_RULES",
    "Chip",
    "CompiledTogether",
    "Rules",
    "StepAgreement",
    "Topology",
    "TopologySettings",
    "absent_processes",
    "agree",
    "arrange",
    "backend",
    "barrier",
    "check_rules",
    "chip_of",
    "farewell",
    "first_line",
    "forget",
    "has_float8",
    "init_sharded",
    "keep_stdout_clean",
    "make_topology",
    "placement",
    "planned_for",
    "process_count",
    "process_index",
    "shardings",
    "share",
    "start_distributed",
    "unbox",
    "validate_divisible",
]
