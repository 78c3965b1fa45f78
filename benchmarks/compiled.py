"""What a program compiled for a GPU that is not here reads and writes, kernel by kernel. No time is measured.

    python benchmarks/compiled.py step --model 1b --mode lora
    python benchmarks/compiled.py decode --model 8b --rows 64 --lora 16
    python benchmarks/compiled.py decode --model 1b --rows 1 --weights int8 --topology h100:1

Needs the extra `gpu-plan`, no GPU. `step` is the step of `bessemer train sft` on rows of 2,048 tokens, `decode`
one step of the sampling engine; the models are those of plan_memory.py, by their configuration alone. The most costly
kinds of instruction are listed with the bytes of their operands and results (an operand that is read in part counts
whole), then one JSON line: kernels, bytes moved by kind of kernel, and the memory that the compiler planned.
This is the program before autotuning, which chooses tiles and libraries but not which instructions are joined.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plan_memory

BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4,
         "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")
LINEAR = ("q", "k", "v", "out", "gate", "up", "down")


class Kind(NamedTuple):
    """Instructions alike but for their layer: what they are, their result, and their operands."""

    name: str
    result: str
    operands: tuple[str, ...]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=("step", "decode"))
    parser.add_argument("--model", default="1b", choices=sorted(plan_memory.MODELS))
    parser.add_argument("--topology", default="h200:1", help="the chip, as of bessemer plan")
    parser.add_argument("--mode", default="lora", choices=sorted(plan_memory.MODES), help="step: what is trained")
    parser.add_argument("--rows", type=int, default=8, help="rows per step")
    parser.add_argument("--capacity", type=int, default=512, help="decode: tokens of a row's cache")
    parser.add_argument("--lora", type=int, default=0, help="decode: rank of adapters on all linear layers")
    parser.add_argument("--weights", default="auto", help="decode: auto, fp8, int8, nf4")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="step: a further setting")
    parser.add_argument("--top", type=int, default=25, help="kinds of instruction that are listed")
    parser.add_argument("--hlo", type=Path, help="file for the program's text")
    return parser.parse_args(given)


def compiled_step(args: argparse.Namespace) -> Any:
    """Return the executable of the training step."""
    from bessemer.plan.absent_plan import estimated
    from bessemer.plan.compiled import compile_mesh, compile_program
    from bessemer.plan.trainer import parse_target

    with tempfile.TemporaryDirectory() as folder:
        words = argparse.Namespace(sequence=2048, set=args.set)
        recipe, *settings = plan_memory.words_of(words, Path(folder), args.model, args.mode, args.rows)
        planned = estimated(recipe, settings, parse_target(args.topology))
    step = planned.facts.step
    return compile_program(step, compile_mesh(step.plan.context.topology, None)[0])


def compiled_decode(args: argparse.Namespace) -> Any:
    """Return the executable of a block of decode steps."""
    import jax
    import jax.numpy as jnp
    from flax.traverse_util import flatten_dict, unflatten_dict
    from jax.sharding import NamedSharding, PartitionSpec

    from bessemer.generate.rows import Slots
    from bessemer.generate.sampling import Way
    from bessemer.interop.folder import Folder
    from bessemer.kernels.quantized import KINDS, SAMPLING_KINDS
    from bessemer.models.lora import Adapted
    from bessemer.plan.compiled import compile_mesh
    from bessemer.plan.trainer import absent_topology, parse_target
    from bessemer.topology import TopologySettings, planned_for, unbox

    mesh, _ = compile_mesh(absent_topology(TopologySettings(), parse_target(args.topology)), None)
    whole = NamedSharding(mesh, PartitionSpec())

    def abstract(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    with tempfile.TemporaryDirectory() as folder, planned_for("gpu", mesh.devices.flat[0]):
        model = Folder(plan_memory.write_config(Path(folder), args.model, args.capacity), needs_weights=False).model
        ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        shapes = flatten_dict(unbox(jax.eval_shape(model.init, jax.random.key(0), ids)["params"]))
        params: dict[Any, Any] = {
            path: abstract(leaf.shape, jnp.bfloat16 if leaf.ndim > 1 else leaf.dtype) for path, leaf in shapes.items()
        }
        for path, w in params.items():
            if path[-1] not in LINEAR:
                continue
            if args.weights != "auto":
                made = jax.eval_shape({**KINDS, **SAMPLING_KINDS}[args.weights].of, w)
                w = jax.tree.map(lambda leaf: abstract(leaf.shape, leaf.dtype), made)
            if args.lora:
                fan_in, fan_out = w.shape
                a, b = ((fan_in, args.lora), (args.lora, fan_out))
                w = Adapted(w, abstract(a, jnp.float32), abstract(b, jnp.float32), 2.0)
            params[path] = w
        with jax.set_mesh(mesh):  # its devices cannot compute: nothing may run eagerly from here on
            slots = Slots(model, args.rows, args.capacity, 32, 0, whole=True)
            return slots.lower_ahead(unflatten_dict(params), [], Way.DRAWN)[-1].compile()


def size_of(shape: str) -> int:
    """Return the bytes of all arrays in a shape's text."""
    total = 0
    for kind, sides in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        count = 1
        for side in filter(None, sides.split(",")):
            count *= int(side)
        total += count * BYTES.get(kind, 0)
    return total


def computation(text: str) -> str:
    """Return the text of the computation with the most kernels: of a step, or of the body of a loop of steps."""
    parts = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \([^\n]*\{\n)", text)
    return max(parts, key=lambda part: part.count(" fusion(") + part.count(" custom-call("))


def kinds_of(text: str) -> dict[Kind, tuple[int, int]]:
    """Return kind → (how many, bytes in all) of the kernels of a computation."""
    shapes: dict[str, str] = {}
    found: dict[Kind, tuple[int, int]] = {}
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", line)
        if not match:
            continue
        name, result, operation, rest = match.groups()
        shapes[name] = result = re.sub(r"\{[^}]*\}|/\*[^*]*\*/", "", result)
        if operation in FREE:
            continue
        operands = tuple(shapes.get(one, "") for one in re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
        target = re.search(r'custom_call_target="([^"]*)"', line)
        kind = Kind(target[1] if target else re.sub(r"[.\d]+$", "", name), result, operands)
        count, moved = found.get(kind, (0, 0))
        found[kind] = count + 1, moved + size_of(result) + sum(map(size_of, operands))
    return found


def main() -> None:
    args = arguments()
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    import jax

    jax.config.update("jax_platforms", "cpu")
    program = (compiled_step if args.program == "step" else compiled_decode)(args)
    text = program.as_text()
    if args.hlo:
        args.hlo.write_text(text)
    found = kinds_of(computation(text))
    moved: dict[str, int] = collections.Counter()
    for kind, (_, total) in found.items():
        moved[kind.name] += total
    for kind, (count, total) in sorted(found.items(), key=lambda item: -item[1][1])[: args.top]:
        operands = " ".join(kind.operands)
        print(f"{total / 2**20:10.1f} MiB {count:5d}×  {kind.name[:36]:36} {kind.result[:60]:60} ← {operands[:120]}")
    memory = program.memory_analysis()
    largest = dict(sorted(moved.items(), key=lambda item: -item[1])[:8])
    print(
        json.dumps(
            {
                "program": args.program,
                "model": args.model,
                "case": args.mode if args.program == "step" else f"lora {args.lora}, weights {args.weights}",
                "rows": args.rows,
                "topology": args.topology,
                "kernels": sum(count for count, _ in found.values()),
                "gib_moved": round(sum(moved.values()) / 2**30, 3),
                "mib_by_kind": {name: round(total / 2**20, 1) for name, total in largest.items()},
                "peak_gib": round(memory.peak_memory_in_bytes / 2**30, 2),
                "jax": jax.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
