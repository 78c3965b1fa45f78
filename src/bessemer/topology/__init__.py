"""Where a run computes: chips and their peaks, the mesh, axis rules, processes.

Model code knows nothing of devices: it names the axes of its arrays, and rule tables map each name to a mesh axis, for
storage (parameters, optimizer state) and for computing (weights in use, activations).
"""

from bessemer.topology.bootstrap import absent_processes, farewell, keep_stdout_clean, start_distributed
from bessemer.topology.chips import CHIPS, Chip, backend, chip_of, has_float8, planned_for, traced_device
from bessemer.topology.distributed import (
    CompiledTogether,
    StepAgreement,
    agree,
    barrier,
    broadcast,
    first_line,
    forget,
    process_count,
    process_index,
)
from bessemer.topology.mesh import AXES, Topology, TopologySettings, arrange, init_sharded, make_topology, placement
from bessemer.topology.rules import COMPUTE_RULES, REST_RULES, Rules, check_rules, shardings, unbox, validate_divisible
