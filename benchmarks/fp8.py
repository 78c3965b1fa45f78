"""Time matrix products in bf16 and in float8, forward and backward together.

    python benchmarks/fp8.py                          # depth 12 and 20: every case, every form
    python benchmarks/fp8.py --width 768 --cases mlp,qkv --dump DIR

Prints one JSON line per case and form: milliseconds, TFLOP/s (6 · tokens · parameters), how many float8 and other
matrix products the compiled program calls, and the bytes it plans for temporaries.

Cases: `linear` (each shape of a layer and of the head), `qkv` (norm and three projections), `mlp` (norm, feed-forward,
residual). Forms: bf16, tensorwise, rowwise, compiled as a training step is; tensorwise/known, where each scale is there
before its tensor, the most that delayed scaling (scales of earlier steps) could gain; FORM/triton with the compiler's
defaults, whose own Triton products hide the float8 pattern from cuBLASLt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bessemer.kernels import fp8, ops
from bessemer.kernels.feed_forward import can_join, feed_forward
from bessemer.topology import make_topology

NO_AXES = (None, None)
SCALINGS: dict[str, str | None] = {"bf16": None, **{scaling: scaling for scaling in fp8.SCALINGS}}
KNOWN = "tensorwise/known"
CONTROLS = (KNOWN, "bf16/triton", "tensorwise/triton")
BF16 = jnp.bfloat16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", default="768,1280", help="widths of the model")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens in a micro-batch")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--cases", default="mlp,qkv,linear")
    parser.add_argument("--forms", default=",".join([*SCALINGS, *CONTROLS]))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dump", default=None, help="directory for the compiled programs' text")
    return parser.parse_args()


def scaling_of(form: str) -> str | None:
    return SCALINGS[form.partition("/")[0]]


def compiler_options(form: str) -> dict[str, Any] | None:
    options = None if form.endswith("/triton") else make_topology().compiler_options
    return {**options, **fp8.GPU_OPTIONS} if options and scaling_of(form) else options


@contextlib.contextmanager
def scales_of(form: str) -> Iterator[None]:
    """While a form is traced: `KNOWN` measures no tensor."""
    quantize = fp8.quantize
    if form == KNOWN:
        fp8.quantize = lambda x, kind, axis=None, bound=None: quantize(x, kind, axis, 1.0 if bound is None else bound)
    try:
        yield
    finally:
        fp8.quantize = quantize


def linear_of(scaling: str | None, bound: float | None = None) -> Callable[..., jax.Array]:
    if scaling is None:
        return lambda x, w: ops.linear(x, w, NO_AXES, BF16)
    return lambda x, w: fp8.linear(x, w, NO_AXES, BF16, scaling, bound)


def both_ways(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """(arguments, gradient) → (result, gradients of all arguments)."""

    def run(inputs: tuple[jax.Array, ...], g: jax.Array) -> Any:
        y, back = jax.vjp(function, *inputs)
        return y, back(g)

    return run


def mlp_of(scaling: str | None) -> Callable[..., jax.Array]:
    def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        h = ops.rms_norm(x)
        if scaling is None:
            if can_join(h, up, "pallas"):
                return x + feed_forward(h, up, down, (NO_AXES, NO_AXES), BF16, "mlp_hidden")
            squared = ops.relu_squared(ops.linear(h, up, NO_AXES, BF16), "mlp_hidden")
            return x + ops.linear(squared, down, NO_AXES, BF16)
        return x + fp8.feed_forward(h, up, down, (NO_AXES, NO_AXES), BF16, scaling, "mlp_hidden")

    return mlp


def qkv_of(scaling: str | None) -> Callable[..., jax.Array]:
    def qkv(x: jax.Array, *weights: jax.Array) -> jax.Array:
        h = ops.rms_norm(x)
        return jnp.stack([linear_of(scaling, h.shape[-1] ** 0.5)(h, w) for w in weights])

    return qkv


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    return jax.jit(lambda k: (scale * jax.random.normal(k, shape)).astype(dtype))(jax.random.key(seed))


Case = tuple[str, str, Callable[..., Any], tuple[Any, ...], float]  # case, form, function, arguments, FLOPs


def linear_cases(width: int, args: argparse.Namespace) -> Iterator[Case]:
    sizes = [(width, width), (width, 4 * width), (4 * width, width), (width, args.vocab)]
    for d, f in sizes:
        lead = (args.tokens // args.sequence, args.sequence)
        x, g = normal(0, (*lead, d), BF16), normal(1, (*lead, f), BF16, 1e-5)
        w = normal(2, (d, f), jnp.float32, d**-0.5)
        bound = 32.0  # stands for √D of a norm's output
        for form in args.forms.split(","):
            run = both_ways(linear_of(scaling_of(form), bound))
            yield f"linear {d}x{f}", form, run, ((x, w), g), 6.0 * args.tokens * d * f


def layer_cases(width: int, args: argparse.Namespace, case: str) -> Iterator[Case]:
    lead = (args.tokens // args.sequence, args.sequence)
    x, g = normal(0, (*lead, width), BF16), normal(1, (*lead, width), BF16, 1e-5)
    sizes = [(width, 4 * width), (4 * width, width)] if case == "mlp" else [(width, width)] * 3
    weights = tuple(normal(2 + i, size, jnp.float32, size[0] ** -0.5) for i, size in enumerate(sizes))
    if case == "qkv":
        g = jnp.stack([g, g, g])
    make = mlp_of if case == "mlp" else qkv_of
    flops = 6.0 * args.tokens * sum(d * f for d, f in sizes)
    for form in args.forms.split(","):
        yield f"{case} {width}", form, both_ways(make(scaling_of(form))), ((x, *weights), g), flops


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for width in map(int, args.width.split(",")):
        for case in args.cases.split(","):
            if case == "linear":
                yield from linear_cases(width, args)
            else:
                yield from layer_cases(width, args, case)


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    name, form, function, inputs, flops = case
    with scales_of(form):
        lowered = jax.jit(function).lower(*inputs)
    compiled = lowered.compile(compiler_options=compiler_options(form))
    text = compiled.as_text()
    if args.dump:
        Path(args.dump).mkdir(parents=True, exist_ok=True)
        (Path(args.dump) / f"{name} {form}.txt".replace(" ", "_").replace("/", "-")).write_text(text)
    for _ in range(3):
        jax.block_until_ready(compiled(*inputs))
    start = time.perf_counter()
    for _ in range(args.repeats):
        result = compiled(*inputs)
    jax.block_until_ready(result)
    seconds = (time.perf_counter() - start) / args.repeats
    return {
        "case": name,
        "form": form,
        "ms": round(seconds * 1e3, 4),
        "tflops": round(flops / seconds / 1e12, 1),
        "f8_calls": len(re.findall(r'custom_call_target="__cublas\$lt\$matmul\$f8"', text)),
        "other_gemms": len(re.findall(r'custom_call_target="__cublas\$(?:gemm|lt\$matmul)"', text)),
        "triton": len(re.findall(r"__triton_gemm|__triton_nested_gemm", text)),
        "fusions": len(re.findall(r" fusion\(", text)),
        "temp_mib": compiled.memory_analysis().temp_size_in_bytes >> 20,
        "device": jax.local_devices()[0].device_kind,
        "jax": jax.__version__,
    }


def main() -> None:
    args = arguments()
    for case in cases(args):
        try:
            print(json.dumps(measure(case, args)), flush=True)
        except jax.errors.JaxRuntimeError as error:
            print(json.dumps({"case": case[0], "form": case[1], "error": str(error).splitlines()[0][:200]}), flush=True)


if __name__ == "__main__":
    main()
