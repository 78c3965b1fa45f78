"""One optimizer step of a tiny model on any mesh of virtual devices, and how far it is from one device."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bessemer.models.lookup import Allocation
from bessemer.optim import build_optimizer, mesh_spread, state_shardings
from bessemer.registry import models
from bessemer.topology import Topology, TopologySettings, make_topology, shardings, unbox

VOCAB, ROWS, LENGTH = 100, 8, 256
SIZES = {"depth": 2, "width": 64, "heads": 8, "kv_heads": 2, "head_dim": 8, "vocab_size": VOCAB}
SHARED = {**SIZES, "block_size": LENGTH, "document_mask": True, "loss_chunks": 4, "precision": "float32"}
K = np.where(np.arange(VOCAB) % 10 == 0, 20, 1)  # rows of each token in a lookup table
LOOKUP = {"lookup_after_layers": [0], "lookup_path": "sorted", "allocation": Allocation.of(K)}
DELTA = {"delta_layers": "DF", "delta_key_heads": 4, "delta_key_dim": 6, "delta_value_dim": 8, "rotary_share": 0.5}
EXPERTS = {"experts": 6, "experts_active": 2, "experts_shared": 1, "expert_width": 48}
# LLVM's own optimisation is two fifths of the time to compile, and changes no result by more than rounding.
QUICKLY = {"xla_backend_optimization_level": 0}

# A family is one line: the name in the registry, and its settings. Layer 0 has a window of 128, the last none.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {"window": "SL", "backout": False}),  # which at two layers is a factor before a norm
    "gpt-frontier": ("gpt", {"window": "SL", "backout": False, "bigram_rows": 128, "key_offset": True}),
    "gpt-paired": ("gpt", {"window": "SL", "backout": False, "paired_heads": True}),
    # with residual_mix one of these gradients is as small as the epsilon of AdamW
    "gpt-dense": ("gpt", {"window": "SL", "backout": False, "residual_mix": False, "dense_connections": True}),
    "lookup": ("gpt", {**LOOKUP, "window": "L", "backout": False}),
    "llama": ("llama", {"mlp_width": 192, "sliding_window": 100, "sliding_layers": "SL"}),
    "olmo": ("olmo", {"mlp_width": 192, "sliding_window": 100, "sliding_layers": "SL"}),
    "gemma": ("gemma", {"mlp_width": 192, "sliding_window": 100, "sliding_layers": "SL"}),
    "gpt-experts": ("gpt", {**EXPERTS, "window": "SL", "backout": False}),
    "llama-experts": ("llama", {**EXPERTS, "sliding_window": 100}),
    # as qwen3-moe: of these weights some experts are never chosen, and most softmaxes are saturated
    "llama-experts-softmax": (
        "llama",
        {**EXPERTS, "sliding_window": 100, "expert_score": "softmax", "head_norm": True},
    ),
    "olmoe": ("olmoe", {**EXPERTS, "mlp_width": 192}),
    "gptoss": ("gptoss", {**EXPERTS, "experts_shared": 0, "sliding_window": 100}),
    "qwennext": ("qwennext", {**DELTA, "mlp_width": 192}),
    # with an epsilon of 1e-6 rounding alone would be 3e-4 of a gradient: DELTA_BOUNDS of test_mesh_equality.py
    "qwennext-experts": ("qwennext", {**DELTA, **EXPERTS, "delta_joint": True, "norm_epsilon": 0.01}),
}


FURTHER = {"gpt-frontier": (0.5, 0.25)}  # weights of the losses of further tokens


def batch_of() -> dict[str, np.ndarray]:
    """Documents that end anywhere, some targets without a loss, half of the tokens absent."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB // 2, (ROWS, LENGTH + 1)).astype(np.int32)
    targets = np.where(rng.uniform(size=(ROWS, LENGTH)) < 0.3, -1, ids[:, 1:]).astype(np.int32)
    segments = np.sort(rng.integers(1, 4, (ROWS, LENGTH)), axis=1).astype(np.int32)
    return {"input_ids": ids[:, :-1], "target_ids": targets, "segment_ids": segments}


@dataclass(frozen=True)
class Tiny:
    """A model and its step. Random weights, whose gradients are zero nowhere, or the model's own fresh ones."""

    model: Any
    boxed: Any
    params: Any
    tx: optax.GradientTransformationExtraArgs
    places: Any = None  # shardings of the parameters on a mesh
    further: tuple[float, ...] = ()

    def step(self, params: Any, state: Any, batch: Any, number: Any) -> dict[str, Any]:
        def loss_of(params: Any) -> tuple[jax.Array, jax.Array]:
            more = {"further": jnp.asarray(self.further)} if self.further else {}
            total, weight, metrics = self.model.apply({"params": params}, batch, **more, method="loss")
            return total / weight, metrics["nll"]

        (loss, nll), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        if self.places is not None:  # as the trainer's step does
            gradients = jax.lax.with_sharding_constraint(gradients, self.places)
        updates, state = self.tx.update(gradients, state, params, step=number)
        return {
            "loss": (loss, nll),
            "gradients": gradients,
            "updates": updates,
            "params": optax.apply_updates(params, updates),
            "state": state,
        }


def build(
    family: str, optimizer: str = "adamw", topology: Topology | None = None, *, fresh: bool = False, **more: Any
) -> Tiny:
    name, settings = FAMILIES[family]
    model = models.get(name)(**{**SHARED, **settings, **more})
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    rng = np.random.default_rng(1)
    if fresh:
        made = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
        params = jax.device_get(unbox(made)["params"])
    else:
        params = jax.tree.map(lambda x: 0.2 * rng.standard_normal(x.shape).astype(np.float32), unbox(boxed))
    spread = None if topology is None else mesh_spread(topology.mesh)
    silent = getattr(model, "silent_at_start", ()) if fresh else ()
    options: dict[str, Any] = {"width": 64, "spread": spread, "silent": silent}
    tx = build_optimizer(optimizer, lambda cls: cls(), 10, model.group_of, **options).tx
    places = None if topology is None else shardings(boxed, topology.mesh, topology.rest_rules)
    return Tiny(model, boxed, params, tx, places, FURTHER.get(family, ()))


@functools.cache
def one_device(family: str, optimizer: str = "adamw") -> dict[str, Any]:
    tiny = build(family, optimizer)
    arguments = (tiny.params, tiny.tx.init(tiny.params), batch_of(), np.int32(0))
    return jax.device_get(jax.jit(tiny.step, compiler_options=QUICKLY)(*arguments))


def take_steps(step: Any, arguments: tuple[Any, ...], count: int) -> list[dict[str, Any]]:
    """What each of the first steps returns, on the host."""
    params, state, batch, _ = arguments
    made = []
    for number in range(count):
        found = step(params, state, batch, np.int32(number))
        params, state = found["params"], found["state"]
        made.append(jax.device_get(found))
    return made


def mesh_of(sizes: dict[str, int]) -> Topology:
    settings = TopologySettings(**{"data": 1, **sizes})
    return make_topology(settings, jax.devices()[: math.prod(sizes.values())])


def compile_step(tiny: Tiny, topology: Topology) -> tuple[Any, tuple[Any, ...]]:
    """The compiled step, and its arguments where they belong."""
    places = tiny.places
    state_places = state_shardings(tiny.tx, unbox(tiny.boxed), places, topology.replicated)
    params = jax.device_put(tiny.params, places)
    with topology.scope():
        state = jax.jit(tiny.tx.init, out_shardings=state_places)(params)
        arguments = (params, state, jax.device_put(batch_of(), topology.batch_sharding()), np.int32(0))
        out = dict.fromkeys(("gradients", "updates", "params"), places)
        out |= {"loss": topology.replicated, "state": state_places}
        step = jax.jit(tiny.step, out_shardings=out, compiler_options=QUICKLY)
        return step.lower(*arguments).compile(), arguments


@dataclass(frozen=True)
class Difference:
    """Of arrays, as shares of the largest element of the array on one device; and which array it was."""

    largest: float = 0.0
    mean: float = 0.0
    where: str = ""


def difference(got: Any, wanted: Any, keep: Callable[[str], bool] = lambda name: True) -> Difference:
    """The largest difference of any element, and the largest mean signed difference of any array of 256 and more."""
    worst = Difference()
    leaves = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(leaves, jax.tree.leaves(wanted), strict=True):
        name = jax.tree_util.keystr(path)
        if not keep(name) or not np.issubdtype(b.dtype, np.floating):
            continue
        off = (np.asarray(a, np.float64) - b) / max(float(np.abs(b).max()), 1e-12)
        largest, mean = float(np.abs(off).max()), abs(float(off.mean())) if b.size >= 256 else 0.0
        where = name if largest > worst.largest else worst.where
        worst = Difference(max(largest, worst.largest), max(mean, worst.mean), where)
    return worst


LAST_RESORT = "Involuntary full rematerialization"
"""What the compiler writes when it finds no way from one layout to the next but to make the array whole."""

KINDS = "all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter"


def collectives(program: Any) -> Counter[str]:
    """How many of each kind a compiled program holds."""
    return Counter(re.findall(rf" = [^\n]*? ({KINDS})(?:-start)?\(", program.as_text()))
