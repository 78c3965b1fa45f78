"""Peak memory that `bessemer plan` predicts for fine-tuning beside what a GPU measures, and what fits on which card.

    python benchmarks/plan_memory.py                                   # predicted, and measured where there is a GPU
    python benchmarks/plan_memory.py --sizes 1b,8b --modes lora,full
    python benchmarks/plan_memory.py --table                           # the table of docs/planning.md, no GPU needed

Models are Qwen2.5-0.5B and 32B and Llama 3 1B, 3B and 8B by their configuration alone: weights are random, drawn on the
device. One JSON line per case: `predicted` is the peak of `bessemer plan --topology` in a process of its own, compiled
where the extra `gpu-plan` is installed (`method`), and `estimated` that of the analytic model;
`measured` is the allocator's peak over three steps (for grpo-lora also over one round of sampling) in another;
`compiled` is the step's memory by the compiler's own analysis. Each is in bytes; null without a GPU. `ratio` is
predicted / measured. --batch 0: 8 rows of a model up to 3B and 4 of a larger one. qlora is predicted alone: a base that
is drawn here would be in memory before it is quantized; `benchmarks/finetune.py --modes qlora` measures it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LLAMA = {"model_type": "llama", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 128256}
QWEN = {"model_type": "qwen2"}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {**LLAMA, "head_dim": 16, "num_key_value_heads": 2, "vocab_size": 512, "hidden_size": 64,
             "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True},
    "0.5b": {**QWEN, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "1b": {**LLAMA, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "tie_word_embeddings": True},
    "3b": {**LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
           "num_attention_heads": 24, "tie_word_embeddings": True},
    "8b": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "tie_word_embeddings": False},
    "32b": {**QWEN, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
NARROW = ["training.param_dtype=bfloat16", "optimization.state_dtype=int8"]
MODES = {
    "lora": ["sft", "lora.rank=16"],
    "qlora": ["sft", "lora.rank=16", "lora.quantize=nf4"],
    "full": ["sft"],
    "full-bf16-int8": ["sft", *NARROW],
    "grpo-lora": ["grpo", "lora.rank=16", "grpo.slots=64", "grpo.max_completion_length=512"],
}
CARDS = (8, 16, 24, 48, 80, 141)
ROWS = (1, 2, 4, 8, 16, 32, 64)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.5b,1b,3b,8b", help=f"comma-separated: {', '.join(MODELS)}")
    parser.add_argument("--modes", default=",".join(MODES), help=f"comma-separated: {', '.join(MODES)}")
    parser.add_argument("--batch", type=int, default=0, help="rows per step, in one pass; 0: by the model's size")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens per row")
    parser.add_argument("--topology", default="h200:1", help="the chip that is planned for")
    parser.add_argument("--table", action="store_true", help="print the table of what fits where, as Markdown")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further setting")
    parser.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # the process of a measurement
    return parser.parse_args(given)


def write_config(folder: Path, size: str, sequence: int) -> Path:
    """Write the configuration of a model, without weights."""
    place = folder / size
    place.mkdir(exist_ok=True)
    shared = {"max_position_embeddings": max(32768, sequence), "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5}
    (place / "config.json").write_text(json.dumps({**MODELS[size], **shared, "rope_theta": 500000.0}))
    return place


def words_of(args: argparse.Namespace, folder: Path, size: str, mode: str, rows: int) -> list[str]:
    """Return recipe and settings of a case: one pass of `rows` sequences per step."""
    recipe, *settings = MODES[mode]
    shape = [f"init={write_config(folder, size, args.sequence)}", f"architecture.block_size={args.sequence}"]
    batch = [f"training.batch_size={rows}", f"training.per_device_batch_size={rows}", "training.steps=16"]
    passes = ["grpo.num_iterations=1", "grpo.mini_batches=1"] if recipe == "grpo" else []
    return [recipe, *shape, *batch, *passes, *settings, *args.set]


def predicted(words: Sequence[str], topology: str) -> dict[str, Any]:
    """Return the peaks of `bessemer plan`."""
    command = [sys.executable, "-m", "bessemer", "plan", *words, "--topology", topology, "--json"]
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    plan = json.loads(found.stdout)
    memory = plan["memory"]
    return {"predicted": memory["peak"], "estimated": memory["estimated_peak"], "method": plan["method"]}


def measured(words: Sequence[str]) -> dict[str, Any]:
    """Return what a process of its own measures; nulls where it sees no GPU or runs out of memory."""
    command = [sys.executable, __file__, "--measure", *words]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    if found.returncode:
        return {"measured": None, "compiled": None, "problem": f"exit code {found.returncode}"}
    return json.loads(found.stdout.splitlines()[-1])


def measure(words: Sequence[str]) -> dict[str, Any]:
    """Compile and run three steps on the first device, and for GRPO one round of sampling."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu" or not device.memory_stats():
        return {"measured": None, "compiled": None}
    from bessemer.plan.document import some_rows
    from bessemer.plan.trainer import planned_trainer
    from bessemer.training.setup.compiled import initial_state
    from bessemer.training.setup.microbatch import step_bytes

    trainer = planned_trainer(words[0], words[1:])
    plan, hooks, functions = trainer.plan, trainer.hooks, trainer.functions
    state = initial_state(plan, hooks, functions, {})
    if functions.abstract_state.reference is not None:
        state = state.replace(reference=jax.tree.map(lambda leaf: leaf.copy(), state.params))
    batch = jax.tree.map(lambda leaf: leaf[None], some_rows(plan, functions.micro))
    with plan.context.topology.scope():
        step = functions.train_step.lower(state, batch, functions.key).compile()
        for _ in range(3):
            state, loss, _ = step(state, batch, functions.key)
    result = {"loss": float(loss), "compiled": step_bytes(step).total}
    result["step_peak"] = device.memory_stats()["peak_bytes_in_use"]
    if hooks.rolls_out:
        sample(trainer, state, int(trainer.config["grpo/slots"]))
    return {**result, "measured": device.memory_stats()["peak_bytes_in_use"], "chip": device.device_kind}


def sample(trainer: Any, state: Any, slots: int) -> None:
    """Write one round of completions to random prompts, with every slot in use."""
    import numpy as np

    from bessemer.generate import Engine, Request

    model = trainer.plan.model.model
    engine = Engine(model, state.whole(), slots=slots, scope=trainer.plan.context.topology.scope)
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (slots, model.block_size // 4))
    engine.generate([Request(tuple(map(int, row)), 64, seed=number) for number, row in enumerate(ids)])


def cases(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes.split(","):
            for mode in args.modes.split(","):
                rows = args.batch or (4 if size in ("8b", "32b") else 8)
                words = words_of(args, Path(folder), size, mode, rows)
                line: dict[str, Any] = {"model": size, "mode": mode, "rows": rows, "tokens": args.sequence}
                found = {"measured": None, "compiled": None} if mode == "qlora" else measured(words)
                line |= {**predicted(words, args.topology), **found}
                line["ratio"] = round(line["predicted"] / line["measured"], 3) if line["measured"] else None
                print(json.dumps(line), flush=True)


# --- what fits where: the most rows in one pass, by the estimate alone ---
def most_rows(args: argparse.Namespace, folder: Path, size: str, mode: str) -> tuple[float, dict[int, int]]:
    """Return the predicted peak of one row, and the most rows in one pass by card; 0: not even one."""
    from bessemer.plan.absent_plan import estimated
    from bessemer.plan.estimate import Choice, peak_memory
    from bessemer.plan.trainer import parse_target
    from bessemer.training.setup.microbatch import SPARE

    recipe, *words = words_of(args, folder, size, mode, 1)
    planned = estimated(recipe, words, parse_target(args.topology))
    axes = planned.estimate.choice.axes
    peaks = {rows: peak_memory(planned.facts, Choice(axes, rows, ("block",)), 1).peak for rows in ROWS}
    fitting = {card: max((rows for rows in ROWS if peaks[rows] <= SPARE * card * 2**30), default=0) for card in CARDS}
    return peaks[1], fitting


def table(args: argparse.Namespace) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")  # as `bessemer plan --topology` does: nothing is computed
    sizes = [size for size in MODELS if size != "tiny"] if args.sizes == "0.5b,1b,3b,8b" else args.sizes.split(",")
    modes = [mode for mode in args.modes.split(",") if mode != "grpo-lora"]
    print("| model | mode | one row, GiB | " + " | ".join(f"{card} GB" for card in CARDS) + " |")
    print("|---|---|---|" + "---|" * len(CARDS))
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            for mode in modes:
                peak, fitting = most_rows(args, Path(folder), size, mode)
                cells = " | ".join(str(fitting[card] or "–") for card in CARDS)
                print(f"| {size.upper()} | {mode} | {peak / 2**30:.1f} | {cells} |", flush=True)


if __name__ == "__main__":
    chosen = arguments()
    if chosen.measure:
        print(json.dumps(measure(chosen.measure)))
    elif chosen.table:
        table(chosen)
    else:
        cases(chosen)
