"""Time matrix products in bf16 and in several forms of float8, forward and backward together.

    python benchmarks/fp8.py                          # depth 12 and 20: every case, every form
    python benchmarks/fp8.py --width 768 --cases mlp,qkv --dump DIR

Prints one JSON line per case and form: milliseconds, TFLOP/s (6 · tokens · parameters), how many float8 and other
matrix products the compiled program calls, and the bytes it plans for temporaries.

Cases: `linear` (each shape of a layer and of the head), `qkv` (norm and three projections), `mlp` (norm, feed-forward,
residual), `cast` (bf16 to float8 alone: as is, transposed, both; with the amax pass or without).
Forms: bf16; fp8 (bounds where they are known); fast (gradients accumulated as fast as forward); measured (amax
always); direct (scales applied to the result); fixed (the gradient's scale given, what delayed scaling would cost);
bf16dw (dW in bf16); rowwise. Programs are compiled without the compiler's own Triton products, which hide the float8
pattern from cuBLASLt; FORM/triton is with them.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bessemer.models import blocks, fp8
from bessemer.models.fp8 import Rule

NO_AXES = (None, None)
RULES: dict[str, Rule | None] = {
    "bf16": None,
    "fp8": Rule(),
    "fast": Rule(fast=True),
    "measured": Rule(bounds=False),
    "direct": Rule(direct=True),
    "bf16dw": Rule(weight_gradient=False),
    "direct-bf16dw": Rule(direct=True, weight_gradient=False),
    "rowwise": Rule("rowwise"),
}
TRITON = ("bf16/triton", "fp8/triton", "direct/triton")
BF16 = jnp.bfloat16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", default="768,1280", help="widths of the model")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens in a micro-batch")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--cases", default="mlp,qkv,linear,cast")
    parser.add_argument("--forms", default=",".join([*RULES, "fixed", *TRITON]))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dump", default=None, help="directory for the compiled programs' text")
    return parser.parse_args()


def rule_of(form: str) -> Rule | None:
    return RULES[form.removesuffix("/triton")]


def linear_of(rule: Rule | None, bound: float | None = None) -> Callable[..., jax.Array]:
    if rule is None:
        return lambda x, w: blocks.linear(x, w, NO_AXES, BF16)
    return lambda x, w: fp8.linear(x, w, NO_AXES, BF16, rule, bound)


def both_ways(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """(arguments, gradient) → (result, gradients of all arguments)."""

    def run(inputs: tuple[jax.Array, ...], g: jax.Array) -> Any:
        y, back = jax.vjp(function, *inputs)
        return y, back(g)

    return run


def fixed_scale(inputs: tuple[jax.Array, ...], g: jax.Array, bound: float) -> Any:
    """fp8 with every activation's scale known beforehand."""
    x, w = inputs
    rule = Rule()
    x8 = fp8.quantise(x, fp8.FORWARD, bound=bound)
    y = fp8._times(x8, w, NO_AXES, BF16, rule)
    return y, fp8._gradients(x, x8, w, g, NO_AXES, rule, jnp.float32(1e-3))


def mlp_of(rule: Rule | None) -> Callable[..., jax.Array]:
    def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        h = blocks.rms_norm(x)
        if rule is None:
            u = blocks.linear(h, up, NO_AXES, BF16)
            return x + blocks.relu_squared_linear(u, down, NO_AXES, BF16)
        return x + fp8.feed_forward(h, up, down, (NO_AXES, NO_AXES), BF16, rule, "mlp_hidden")

    return mlp


def qkv_of(rule: Rule | None) -> Callable[..., jax.Array]:
    def qkv(x: jax.Array, *weights: jax.Array) -> jax.Array:
        h = blocks.rms_norm(x)
        return jnp.stack([linear_of(rule, h.shape[-1] ** 0.5)(h, w) for w in weights])

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
            run = (
                partial(fixed_scale, bound=bound)
                if form == "fixed"
                else both_ways(linear_of(rule_of(form), bound))
            )
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
        if form != "fixed":
            yield f"{case} {width}", form, both_ways(make(rule_of(form))), ((x, *weights), g), flops


def cast_cases(width: int, args: argparse.Namespace) -> Iterator[Case]:
    x = normal(0, (args.tokens, 4 * width), BF16)
    kind = fp8.FORWARD

    def plain(x: jax.Array, bound: float | None) -> Any:
        return fp8.quantise(x, kind, bound=bound)

    def turned(x: jax.Array, bound: float | None) -> Any:
        values, scale = fp8.quantise(x, kind, bound=bound)
        return values.T, scale

    def both(x: jax.Array, bound: float | None) -> Any:
        values, scale = fp8.quantise(x, kind, bound=bound)
        return values, values.T, scale

    for function in (plain, turned, both):
        for name, bound in (("fixed", 32.0), ("measured", None)):
            yield f"cast {4 * width} {function.__name__}", name, partial(function, bound=bound), (x,), 0.0
    yield f"cast {4 * width} copy", "bf16", lambda x: x * 2, (x,), 0.0


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for width in map(int, args.width.split(",")):
        for case in args.cases.split(","):
            if case == "linear":
                yield from linear_cases(width, args)
            elif case == "cast":
                yield from cast_cases(width, args)
            else:
                yield from layer_cases(width, args, case)


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    name, form, function, inputs, flops = case
    gpu = jax.default_backend() == "gpu"
    options = fp8.GPU_OPTIONS if gpu and not form.endswith("/triton") else None
    compiled = jax.jit(function).lower(*inputs).compile(compiler_options=options)
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
            print(
                json.dumps({"case": case[0], "form": case[1], "error": str(error).splitlines()[0][:200]}),
                flush=True,
            )


if __name__ == "__main__":
    main()
