"""Time the grouped products of experts, by implementation, forward and with both gradients.

    python benchmarks/grouped.py
    python benchmarks/grouped.py --rows 1024 --width 128 --hidden 128 --experts 4 --implementations tiles,batched

Prints one JSON line per implementation: milliseconds, TFLOP/s of the rows without padding, and the largest difference
from float32 products of some rows. `dense` is one plain product of as many FLOPs; `layer` a whole layer of experts,
routing included, beside `dense_layer` of as many FLOPs. What fails prints its error, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bessemer.kernels.grouped import ALIGNMENT, Order, choose_padded, dispatch, grouped_linear
from bessemer.kernels.ops import relu_squared
from bessemer.models.moe import Routing, Watch, routed_feed_forward

DEFAULT = "dense,batched,mosaic,dense_layer,layer,tiles,ragged"


def seconds(function: Callable[..., Any], repeats: int, *args: Any) -> float:
    """Return the median of `repeats` timings; a slow function has fewer."""
    run = jax.jit(function)
    jax.block_until_ready(run(*args))
    times: list[float] = []
    while len(times) < repeats and sum(times) < 2:
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def with_gradients(function: Callable[..., Array]) -> Callable[..., Any]:
    """Return a function of (upstream, *inputs) that makes the values and all gradients."""

    def run(upstream: Array, *inputs: Array) -> Any:
        y, pull = jax.vjp(function, *inputs)
        return y, pull(upstream.astype(y.dtype))

    return run


def products(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One grouped product of tokens that are already routed."""
    rng = np.random.default_rng(0)
    chosen = jnp.asarray(rng.integers(0, args.experts, (args.rows // args.active, args.active)), jnp.int32)
    order = jax.jit(lambda c: Order.of(c, args.experts, ALIGNMENT.get(name, 1)))(chosen)
    tokens, w = (normal(i, *shape) for i, shape in enumerate([(chosen.shape[0], args.width), weight_shape(args)]))
    x = jax.jit(dispatch)(tokens.astype(jnp.bfloat16), order.order, order.inverse)
    if name == "dense":
        w = w[0]

    def product(x: Array, w: Array) -> Array:
        if name == "dense":
            return x @ w.astype(jnp.bfloat16)
        return grouped_linear(x, w, order.sizes, jnp.bfloat16, name)

    g = normal(2, x.shape[0], args.hidden).astype(jnp.bfloat16)
    flops = 2 * args.rows * args.width * args.hidden
    forward, both = seconds(product, args.repeats, x, w), seconds(with_gradients(product), args.repeats, g, x, w)
    rows = np.linspace(0, args.rows - 1, 64, dtype=np.int32)
    owner = chosen.reshape(-1)[rows]
    got = jax.jit(product)(x, w)[order.inverse[rows]].astype(jnp.float32)
    stack = w[None] if name == "dense" else w
    near = stack.astype(jnp.bfloat16).astype(jnp.float32)[0 if name == "dense" else owner]
    near = jnp.broadcast_to(near, (64, *near.shape[-2:]))
    wanted = jnp.einsum("nd,ndf->nf", x[order.inverse[rows]].astype(jnp.float32), near, precision="highest")
    return timing(flops, forward, both) | {"difference": round(float(jnp.abs(got - wanted).max()), 4)}


def layer(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A feed-forward layer of experts with relu², routing included, or a dense one of as many FLOPs."""
    h = normal(0, 1, args.rows // args.active, args.width).astype(jnp.bfloat16)
    flops = 4 * args.rows * args.width * args.hidden
    if name == "dense_layer":
        weights = (normal(1, args.width, args.hidden * args.active), normal(2, args.hidden * args.active, args.width))

        def run(h: Array, up: Array, down: Array) -> Array:
            return relu_squared(h @ up.astype(h.dtype), "mlp_hidden") @ down.astype(h.dtype)

    else:
        weights = (normal(1, *weight_shape(args)), normal(2, args.experts, args.hidden, args.width))
        router = normal(3, args.width, args.experts)
        routing = Routing(args.experts, args.active, "sigmoid", True, 0.0, 0.0)

        def run(h: Array, up: Array, down: Array) -> Array:
            stacks = {"router": router, "expert_up": up, "expert_down": down}
            return routed_feed_forward(routing, stacks, h, Watch(), jax.nn.silu, jnp.bfloat16)[0]

    chosen = choose_padded(args.rows, args.experts, jnp.bfloat16, args.width, args.hidden)
    took = seconds(run, args.repeats, h, *weights), seconds(with_gradients(run), args.repeats, h, h, *weights)
    return timing(flops, *took) | ({"chosen": chosen} if name == "layer" else {})


def weight_shape(args: argparse.Namespace) -> tuple[int, int, int]:
    return args.experts, args.width, args.hidden


def normal(seed: int, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape) / shape[-2] ** (0.5 if seed else 0.0)


def timing(flops: float, forward: float, both: float) -> dict[str, Any]:
    return {
        "forward_ms": round(forward * 1e3, 3),
        "both_ms": round(both * 1e3, 3),
        "forward_tflops": round(flops / forward / 1e12, 3),
        "both_tflops": round(3 * flops / both / 1e12, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4 * 32 * 2048, help="tokens × active")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--hidden", type=int, default=768, help="width of an expert")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--active", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--implementations", default=DEFAULT, help=f"of {DEFAULT}")
    args = parser.parse_args()
    for name in args.implementations.split(","):
        try:
            result = layer(name, args) if name.endswith("layer") else products(name, args)
        except Exception as error:  # noqa: BLE001  (out of memory, or no such kernel here: the others still run)
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({"implementation": name, **result}), flush=True)


if __name__ == "__main__":
    main()
