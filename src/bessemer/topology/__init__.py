"""Where a run computes: chips and their peaks, the mesh, the rule tables, the processes.

Model code knows nothing of devices: it names the axes of its arrays, and the tables here say on which mesh
axis each named axis rests (parameters, optimizer state) and computes (weights in use, activations).
"""

from bessemer.topology.bootstrap import keep_stdout_clean, start_distributed
from bessemer.topology.chips import CHIPS, Chip, backend, chip_of, has_float8, planned_for
from bessemer.topology.distributed import (
    CompiledTogether,
    StepAgreement,
    agree,
    barrier,
    first_line,
    forget,
    process_count,
    process_index,
    share,
)
from bessemer.topology.lost_peer import absent_processes, farewell
from bessemer.topology.mesh import Topology, arrange, init_sharded, make_topology, placement
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
