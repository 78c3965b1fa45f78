"""The `topology/*` settings: mesh sizes, platform, and how processes find each other."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.config import field

# Outermost first: neighbours in the device order end up in the same tensor/context group, where links are
# fastest.
AXES: tuple[str, ...] = ("data", "fsdp", "tensor", "context")


@dataclass(frozen=True)
class TopologySettings:
    """Mesh sizes multiply to the device count; one of them may be -1 and fills what is left."""

    platform: str = field(
        "topology/platform",
        default="auto",
        choices=("auto", "cpu", "gpu", "tpu"),
        help="which devices to use; auto takes JAX's default",
    )
    data: int = field(
        "topology/data",
        default=-1,
        minimum=1,
        also=(-1,),
        help="replicas of the model; -1 fills what is left",
    )
    fsdp: int = field(
        "topology/fsdp",
        default=1,
        minimum=1,
        also=(-1,),
        help="shards of parameters and optimizer state; -1 fills",
    )
    tensor: int = field(
        "topology/tensor",
        default=1,
        minimum=1,
        also=(-1,),
        help="shards of heads, mlp and vocabulary; -1 fills",
    )
    context: int = field(
        "topology/context", default=1, minimum=1, also=(-1,), help="shards of the sequence; -1 fills"
    )
    deterministic: bool = field(
        "topology/deterministic",
        default=False,
        help="bit-exact kernels on a GPU, at a cost in speed (a CPU is always exact)",
    )
    coordinator: str | None = field(
        "topology/coordinator",
        default=None,
        help="host:port of process 0; also BESSEMER_COORDINATOR. SLURM, Kubernetes and TPU pods need none",
    )
    processes: int | None = field(
        "topology/processes", default=None, minimum=1, help="number of processes; also BESSEMER_PROCESSES"
    )
    process_id: int | None = field(
        "topology/process_id",
        default=None,
        minimum=0,
        help="number of this process from 0; also BESSEMER_PROCESS_ID",
    )
    start_timeout: int = field(
        "topology/start_timeout", default=300, minimum=1, help="seconds to wait for all processes to connect"
    )
    peer_timeout: int = field(
        "topology/peer_timeout",
        default=45,
        minimum=5,
        help="seconds without a sign of life after which a process counts as lost and the others leave (exit 4)",
    )

    def sizes(self) -> dict[str, int]:
        """Axis name to requested size, in mesh order."""
        return {axis: getattr(self, axis) for axis in AXES}
