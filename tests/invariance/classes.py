"""What must not change a run, as data: classes of configurations that give one trajectory.

A class is a baseline and its members; a member is one line. Every member is trained by the command line in fresh
processes and compared with the baseline: the batches that reached the step, the rows of metrics.jsonl, and every
array of the final checkpoint (compare.py has the measures). Members that come to the same settings share one run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

AXES = ("data", "pipeline", "fsdp", "expert", "tensor", "context")
Settings = dict[str, Any]


@dataclass(frozen=True)
class Bound:
    """How far a member may be from its baseline, and why that far. 0 means: bit for bit.

    Differences of arrays are shares of how far the array moved in the run; `most` holds for all but one element in a
    thousand, `mean` (signed) and `length` (of the way an array went) for arrays of 256 elements and more.
    """

    most: float
    largest: float
    mean: float
    length: float
    losses: float  # loss and gradient norm of any row, relative
    why: str


@dataclass(frozen=True)
class Member:
    settings: Settings = field(default_factory=dict)
    devices: int = 1  # virtual devices of each process
    processes: int = 1
    quick: bool = False  # part of the fast tests; the others are slow


@dataclass(frozen=True)
class Class:
    """shared: settings of all of them; data: the dataset they train on; same_rows: batches are equal row by row
    (packing makes other rows of the same documents); gpu: runs on a GPU only."""

    members: dict[str, Member]
    within: Bound
    baseline: Member = field(default_factory=Member)
    shared: Settings = field(default_factory=dict)
    data: str = "uneven"
    same_rows: bool = True
    gpu: bool = False


def member(devices: int = 1, processes: int = 1, quick: bool = False, **settings: Any) -> Member:
    """Keyword `a__b=c` is the setting a.b=c."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return Member(named, devices, processes, quick)


def accumulate(per_device: int, **more: Any) -> Member:
    return member(training__per_device_batch_size=per_device, **more)


def mesh(quick: bool = False, processes: int = 1, per_device: int = -1, **axes: int) -> Member:
    """A mesh of as many virtual devices as the sizes multiply to, in equal parts over the processes."""
    sizes = {f"topology__{axis}": size for axis, size in (dict.fromkeys(AXES, 1) | axes).items()}
    sizes["training__per_device_batch_size"] = per_device
    return member(math.prod(axes.values()) // processes, processes, quick, **sizes)


SCANNED: Settings = {"architecture.scan_layers": "true"}
MASKED: Settings = {"architecture.document_mask": "true"}
PACKED: Settings = {
    "training.dataset": "{documents}:PACKED",
    "training.batch_size": 6,
    "training.per_device_batch_size": 6,
}
BF16: Settings = {"architecture.precision": "bf16"}

SGD: Settings = {"optimization.name": "sgd", "optimization.lr": 0.1, "training.max_grad_norm": 0}
ADAMW: Settings = {"optimization.name": "adamw", "optimization.lr": 1e-3}
MUON: Settings = {"optimization.name": "muon"}
EXPERTS: Settings = {
    "model.depth": 4,
    "model.experts": 4,
    "model.experts_shared": 1,
    "architecture.experts.balance": "loss",
    "architecture.experts.aux_loss": 0.1,
    "architecture.experts.z_loss": 0.01,
}
ALONE: Settings = {**SGD, "training.batch_size": 12, "training.per_device_batch_size": 12}

EXACT = Bound(0, 0, 0, 0, 0, "the same program on the same numbers")
# Measured over all members: most 1.2e-5, largest 1.2e-5, mean 2e-8, length 2e-7, losses 2.4e-7.
ROUNDING = Bound(1e-4, 1e-4, 1e-6, 1e-5, 3e-6, "float32 sums in another order, six smooth updates")
# Measured: most 8.2e-6, largest 5.0e-4, mean 2.3e-8, length 1.2e-7, losses 1.1e-7. The largest are elements of rare
# tokens whose first gradients are near epsilon (√nu 8e-8): there g / (|g| + ε) makes rounding a share of a step.
NORMALIZED = Bound(1e-4, 3e-3, 1e-6, 1e-5, 3e-6, "AdamW's own epsilon, where a gradient is as small as it")
# Measured: most 1.3e-3, largest 4.7e-2, mean 7e-6, length 1e-4, losses 8.9e-5. The polar factor lifts small singular
# values to one, and with them the rounding in their directions. Cautious decay asks for the sign of an update: where
# that is about zero (at most 6 of 16,384 elements here), rounding decides whether lr·wd·p is taken off.
POLAR = Bound(1e-2, 0.5, 1e-4, 1e-3, 1e-3, "Muon's polar step and the sign in its decay")
# On an H200 at most .11 (backout_scale: one number, whose gradient is a sum over all tokens that cancels), mean 2e-4.
HALF = Bound(0.2, 0.5, 5e-3, 3e-2, 2e-2, "bf16 has 8 bits: a product is right to 0.4%")

CLASSES: dict[str, Class] = {
    "accumulation": Class(
        {"S=2": accumulate(4), "S=4": accumulate(2, quick=True), "S=8": accumulate(1)}, ROUNDING, shared=SGD
    ),
    "accumulation, adamw": Class({"S=4": accumulate(2)}, NORMALIZED, shared=ADAMW),
    "accumulation, muon": Class({"S=2": accumulate(4), "S=8": accumulate(1)}, POLAR, shared=MUON),
    "scan": Class({"scanned": Member(SCANNED)}, ROUNDING, shared={**SGD, "model.depth": 4}),
    # under a scan, where it is real: in unrolled layers on a CPU the compiler joins what is computed twice
    "remat": Class(
        {"block": member(architecture__remat="block"), "named": member(architecture__remat="[attention,mlp_hidden]")},
        ROUNDING,
        shared={**SGD, **SCANNED, "model.depth": 4},
    ),
    "loss chunks": Class(
        {
            "4": member(architecture__loss_chunks=4, quick=True),
            "5, not a divisor": member(architecture__loss_chunks=5),
            "32": member(architecture__loss_chunks=32),
        },
        ROUNDING,
        shared=SGD,
    ),
    # an epoch a step: the same documents, alone in their rows or packed with others
    "documents": Class(
        {"alone, mask": Member(MASKED), "packed, mask": Member({**PACKED, **MASKED})},
        ROUNDING,
        shared=ALONE,
        data="documents",
        same_rows=False,
    ),
    "prefetch": Class({"1": member(data__prefetch=1), "8": member(data__prefetch=8)}, EXACT, shared=MUON),
    "mesh": Class(
        {
            "data 2": mesh(data=2),
            "data 8": mesh(data=8),
            "fsdp 4": mesh(fsdp=4),
            "tensor 2": mesh(tensor=2),
            "tensor 4": mesh(tensor=4),
            "context 2": mesh(context=2),
            "context 4, S=2": mesh(context=4, per_device=4),
            "data 2 x tensor 2, S=4": mesh(data=2, tensor=2, per_device=1),
            "data 2 x fsdp 2 x tensor 2": mesh(data=2, fsdp=2, tensor=2),
            "fsdp 2 x tensor 2 x context 2": mesh(fsdp=2, tensor=2, context=2),
            "pipeline 2": mesh(pipeline=2),
            "data 2 x pipeline 2, S=2": mesh(data=2, pipeline=2, per_device=1),
        },
        ROUNDING,
        shared=SGD,
    ),
    "mesh, muon": Class(
        {"data 2 x fsdp 2 x tensor 2": mesh(data=2, fsdp=2, tensor=2), "pipeline 2 x fsdp 2": mesh(pipeline=2, fsdp=2)},
        POLAR,
        shared=MUON,
    ),
    # experts: choices are integers, so a sum in another order must never change one
    "experts": Class(
        {
            "S=4": accumulate(2),
            "scanned, recomputed": member(architecture__scan_layers="true", architecture__remat="block"),
            "fsdp 2 x tensor 2 x context 2": mesh(fsdp=2, tensor=2, context=2),
            "fsdp 2 x expert 2 x tensor 2": mesh(fsdp=2, expert=2, tensor=2),
            "pipeline 2 x expert 2": mesh(pipeline=2, expert=2),
        },
        ROUNDING,
        shared={**SGD, **EXPERTS},
    ),
    "processes": Class(
        {"two, data": mesh(data=2, processes=2), "two, fsdp": mesh(fsdp=2, processes=2)}, ROUNDING, shared=SGD
    ),
    "attention, gpu": Class(
        {"cudnn": member(architecture__attention="cudnn"), "auto": member(architecture__attention="auto")},
        HALF,
        baseline=member(architecture__attention="xla"),
        shared={**SGD, **BF16},
        gpu=True,
    ),
    "precision, gpu": Class(
        {
            "bf16, xla": member(architecture__precision="bf16", architecture__attention="xla"),
            "bf16, cudnn": member(architecture__precision="bf16", architecture__attention="cudnn"),
        },
        HALF,
        baseline=member(architecture__attention="xla"),
        shared=SGD,
        gpu=True,
    ),
    "accumulation, gpu": Class({"S=4": accumulate(2), "S=8": accumulate(1)}, HALF, shared={**SGD, **BF16}, gpu=True),
    "documents, gpu": Class(
        {"packed, mask": Member({**PACKED, **MASKED})},
        HALF,
        shared={**ALONE, **BF16},
        data="documents",
        same_rows=False,
        gpu=True,
    ),
}

CONTROLS: dict[str, tuple[str, Settings]] = {
    "the rate, a thousandth more": ("accumulation", {"optimization.lr": 0.1001}),
    "documents that see each other": ("documents", PACKED),
}
"""What changes a run a little, and must be seen: (class, settings on top of its baseline)."""

LONG = {
    "accumulation: S=2",
    "accumulation: S=8",
    "accumulation, adamw: S=4",
    "accumulation, muon: S=2",
    "loss chunks: 5, not a divisor",
    "loss chunks: 32",
    "prefetch: 1",
    "mesh: data 2",
    "mesh: data 8",
    "mesh: fsdp 4",
    "mesh: context 2",
    "mesh: data 2 x tensor 2, S=4",
    "mesh, muon: data 2 x fsdp 2 x tensor 2",
    "mesh, muon: pipeline 2 x fsdp 2",
    "experts: fsdp 2 x expert 2 x tensor 2",
    "experts: fsdp 2 x tensor 2 x context 2",
    "processes: two, fsdp",
}
"""Members beside others that show nearly the same: run by `make long`."""
