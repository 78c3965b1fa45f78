"""Time `bessemer train grpo` on a Llama of true size, beside the bare engine and transformers' generate, in one call.

    python benchmarks/rl.py --sizes 1b --folder /dev/shm/rl
    python benchmarks/rl.py --sizes 1b --completions 128 --group 8 --new 256 --repeats 3 --folder /dev/shm/rl
    python benchmarks/rl.py --sizes tiny --completions 16 --new 32 --steps 4      # does it run? (CPU, a minute)

The weights are those of finetune.py: random, in bf16, with the sizes of Llama-3.2-1B and Llama-3.1-8B. Prompts are
passages of source text of many lengths, up to `--prompt` tokens. A random model almost never writes an end token, so
completions have all of their `--new` tokens. Three systems, one process each, in this order:

    bessemer      the command itself, with a KL reference: rollouts, rewards, scoring, optimizer steps, run directory
    engine        its sampler alone on the weights that the command saved: the same prompts, groups and slots
    transformers  generate on the imported weights: the same prompts, left-padded, drawn at temperature 1

One JSON line per size and repeat. Of `bessemer`, medians over the steps from the third on, all from the run's metrics:
completion tokens/s of the rollout (sampling and text, without rewards); real tokens/s (prompt and completion, without
padding) of scoring and optimizer step together; what share of a step each part takes, and their sum; seconds from the
start of the command to the end of its first optimizer step; peak memory; the gap between the sampler's
log-probabilities and the trainer's; and programs compiled after the second step. Of `engine`, tokens/s of a whole batch
and of its rounds after the first, and the rounds of one prompt of 128 tokens alone, with the prefill by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from beside import PEER, missing
from finetune import SHAPES, conversations
from finetune import prepare as prepare_model
from loop import watch

OURS, ENGINE = "bessemer", "engine"
PARTS = ("time/rollout_s", "time/reward_s", "time/score_s", "time/train_s")
COMPILED = "/jax/core/compile/backend_compile_duration"
REWARDS = "[{name: gsm8k}, {name: regex, options: {pattern: '.*q.*'}}]"
LONE = 128  # tokens of the prompt that is sampled alone


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1b", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--systems", default=f"{OURS},{ENGINE},{PEER}", help="which; the engine needs bessemer's run")
    parser.add_argument("--completions", type=int, default=128, help="completions of a rollout, all in slots at once")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt at most")
    parser.add_argument("--new", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--micro", type=int, default=32, help="rows of a micro-batch of the optimizer step")
    parser.add_argument("--steps", type=int, default=8, help="rollouts, each with one optimizer step")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each size")
    parser.add_argument("--folder", type=Path, default=Path("rl"), help="models, data and runs; 1b needs 25 GiB")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further setting of ours")
    parser.add_argument("--eager", action="store_true", help="transformers: a growing cache, no torch.compile")
    parser.add_argument("--alone", nargs=2, metavar=("SYSTEM", "SIZE"), help=argparse.SUPPRESS)  # this is its process
    args = parser.parse_args(given)
    if args.completions % args.group or args.steps < 4:
        parser.error("--completions is a multiple of --group, and --steps at least 4: two of them are not timed")
    args.sequence = args.prompt + args.new
    return args


def prepare(args: argparse.Namespace, size: str) -> tuple[Path, Path]:
    """Return the model's folder and the file of prompts, made where they are missing."""
    model, _ = prepare_model(args, size)
    data = args.folder / f"prompts-{args.prompt}.jsonl"
    if not data.exists():
        draw, lines = random.Random(0), []
        for row in conversations(4 * args.prompt):  # characters: more than a prompt has in tokens
            whole = row["messages"][0]["content"] + row["messages"][1]["content"]
            text = whole[: draw.randint(args.prompt // 4, 2 * args.prompt)]
            lines.append(json.dumps({"prompt": f"{text}\nHow many words is that?", "answer": str(len(text.split()))}))
        data.write_text("\n".join(lines) + "\n")
    return model, data


def prompts_of(data: Path, model: Path, longest: int) -> list[list[int]]:
    """Return the prompts that the run keeps, as its tokens. No device is used: the process may not be alone."""
    from bessemer.data import Tokenizer
    from bessemer.generate.text import prompt_ids

    tokenizer = Tokenizer.load(model).as_published()
    ids = [prompt_ids(json.loads(line)["prompt"], tokenizer) for line in data.read_text().splitlines()]
    return [one for one in ids if len(one) <= longest]


# --- the command ---


def run_ours(args: argparse.Namespace, given: Sequence[str], size: str) -> dict[str, Any]:
    """Train with the command, and read what its metrics say."""
    runs, log, compiled = args.folder / "runs", args.folder / "log.txt", args.folder / "compiled.txt"
    shutil.rmtree(runs, ignore_errors=True)
    compiled.unlink(missing_ok=True)
    command = [sys.executable, __file__, *given, "--alone", OURS, size]
    started = time.monotonic()
    with open(log, "w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        rows = [row for row in watch(process, runs / "rl" / "metrics.jsonl") if "loss" in row]
    if process.returncode:
        return {"failed": f"exit code {process.returncode}: {log.read_text()[-600:]}"}
    made = [float(line) for line in compiled.read_text().splitlines()]  # seconds of the same clock as `seen`
    model, data = prepare(args, size)
    lengths = [len(ids) for ids in prompts_of(data, model, args.prompt)]
    return summary(args, rows, made, started, statistics.mean(lengths))


def summary(
    args: argparse.Namespace, rows: Sequence[dict[str, Any]], made: Sequence[float], started: float, prompt: float
) -> dict[str, Any]:
    """Return the figures of the command. made: when programs were compiled; prompt: mean tokens of a prompt."""
    timed = [row for row in rows if row["step"] > 2]

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    def rate(tokens: Any, *parts: str) -> int:
        return round(median([args.completions * tokens(row) / sum(row[part] for part in parts) for row in timed]))

    seconds = [row["time/step_ms"] / 1e3 for row in timed]
    return {
        "rollout_tokens_per_s": rate(lambda row: row["completion_len"], "time/rollout_s"),
        "trained_tokens_per_s": rate(lambda row: prompt + row["completion_len"], "time/score_s", "time/train_s"),
        "rollout_s": [round(row["time/rollout_s"], 3) for row in rows],
        "step_s": round(median(seconds), 3),
        "shares": {
            part.removeprefix("time/").removesuffix("_s"): round(median([row[part] / s for row, s in both]), 4)
            for part in PARTS
            if (both := list(zip(timed, seconds, strict=True)))
        },
        "accounted": round(median([sum(row[part] for part in PARTS) / s for row, s in both]), 4),
        "first_step_s": round(rows[0]["seen"] - started, 1),
        "programs": len(made),
        "programs_after_step_2": sum(when > rows[1]["seen"] for when in made),
        "peak_gib": rows[-1].get("mem/peak_gib"),
        "logprob_gap": rows[-1]["logprob_gap"],
        "logprob_gap_max": rows[-1]["logprob_gap_max"],
        "completion_len": rows[-1]["completion_len"],
        "prompt_len": round(prompt, 1),
    }


def command_of(args: argparse.Namespace, size: str) -> list[str]:
    """Return the words of `bessemer train` for this case."""
    model, data = prepare(args, size)
    settings = {
        "init": model,
        "training.dataset": data,
        "training.batch_size": args.completions,
        "training.per_device_batch_size": min(args.micro, args.completions),
        "training.steps": args.steps,
        "training.validation": "false",
        "architecture.block_size": args.sequence,
        "grpo.group_size": args.group,
        "grpo.num_iterations": 1,
        "grpo.mini_batches": 1,
        "grpo.max_completion_length": args.new,
        "grpo.max_prompt_length": args.prompt,
        "grpo.slots": args.completions,
        "grpo.rewards": REWARDS,
        "optimization.lr": 1e-6,
        "eval.evaluations": "[]",
        "logging.report_interval": 1,
        "logging.checkpoint_interval": -1,
        "logging.preview_interval": 0,
        "logging.plots": "false",
        "logging.progress": "none",
    }
    words = [f"{key}={value}" for key, value in settings.items()] + args.set
    return ["train", "grpo", *words, "--name", "rl", "--runs", str(args.folder / "runs")]


def train_alone(args: argparse.Namespace, size: str) -> None:
    """This process is the command; it notes when each program is compiled. Written at once: the command may leave
    without finalizing the interpreter."""
    import jax

    from bessemer.cli import main

    file = open(args.folder / "compiled.txt", "a", buffering=1)  # noqa: SIM115 - open for the life of the process

    def note(event: str, seconds: float, **_: Any) -> None:
        if event == COMPILED:
            file.write(f"{time.monotonic()}\n")

    words = command_of(args, size)
    jax.monitoring.register_event_duration_secs_listener(note)
    main(words)


# --- the engine alone ---


def run_engine(args: argparse.Namespace, size: str) -> dict[str, Any]:
    """The sampler as a rollout sets it up, without the trainer: whole batches, and one prompt alone."""
    import jax

    from bessemer.generate import Engine, Request, SamplingOptions
    from bessemer.generate.decoder import bucket
    from bessemer.generate.load import load_model
    from bessemer.generate.sampling import Way
    from bessemer.job import RunDirectory

    loaded = load_model(RunDirectory(args.folder / "runs" / "rl"))
    model, data = prepare(args, size)
    known = prompts_of(data, model, args.prompt)
    draw = random.Random(1)
    chosen = [draw.choice(known) for _ in range(args.completions // args.group)]
    sampling = SamplingOptions(1.0)
    fast = jax.default_backend() != "cpu"
    engine = Engine.of(
        loaded,
        slots=args.completions,
        capacity=args.sequence,
        narrowest=bucket(args.prompt, args.sequence) // 2,
        whole=fast,
        least=Way.DRAWN,
    )
    requests = [
        Request(tuple(ids), args.new, sampling, seed=seed, n=args.group, logprobs=True)
        for seed, ids in enumerate(chosen)
    ]

    def once(requests: Sequence[Request], engine: Engine) -> tuple[list[float], int]:
        """Return the seconds of each round and the tokens made."""
        before, marks = engine.tokens, [time.perf_counter()]
        handles = [engine.submit(request) for request in requests]
        while not all(handle.done for handle in handles):
            engine.step()
            marks.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks)], engine.tokens - before

    start = time.perf_counter()
    once(requests, engine)
    first = time.perf_counter() - start
    passes = [once(requests, engine) for _ in range(3)]
    whole = statistics.median(made / sum(rounds) for rounds, made in passes)
    rounds = [seconds for each, _ in passes for seconds in each[1:-1]]
    lone_engine = Engine.of(loaded, slots=1, capacity=args.sequence)
    lone = [Request((known[0] * LONE)[: min(LONE, args.prompt)], args.new, sampling, seed=1)]
    once(lone, lone_engine)
    with prefills_timed(lone_engine) as prefills:
        alone, _ = once(lone, lone_engine)
    unbroken, _ = once(lone, lone_engine)
    steps = lone_engine._slots.steps
    return {
        "tokens_per_s": round(whole),
        "decode_tokens_per_s": round(args.completions * engine._slots.steps / statistics.median(rounds))
        if rounds
        else None,
        "first_pass_s": round(first, 1),
        "programs": engine.compilations,
        "alone": {
            "rounds_ms": [round(1e3 * seconds, 2) for seconds in unbroken],
            "rounds_with_prefill_waited_for_ms": [round(1e3 * seconds, 2) for seconds in alone],
            "prefill_ms": [round(1e3 * seconds, 2) for seconds in prefills],
            "tokens_per_s": round(steps / statistics.median(unbroken[1:-1] or unbroken)),
        },
        "device": jax.local_devices()[0].device_kind,
        "jax": jax.__version__,
    }


@contextlib.contextmanager
def prefills_timed(engine: Any) -> Any:
    """Yield a list of the seconds of each prefill, which is waited for: what else the first round takes is decoding."""
    import jax

    slots, admit, found = engine._slots, engine._slots.admit, []

    def timed(*args: Any, **named: Any) -> None:
        start = time.perf_counter()
        admit(*args, **named)
        jax.block_until_ready(slots.rows)
        found.append(time.perf_counter() - start)

    slots.admit = timed
    try:
        yield found
    finally:
        slots.admit = admit


# --- the peer ---


def run_peer(args: argparse.Namespace, size: str) -> dict[str, Any]:
    """transformers' generate: the prompts left-padded, `--group` samples of each, temperature 1."""
    if (skipped := missing()) is not None:
        return {"skipped": skipped}
    import torch
    import transformers

    model_folder, data = prepare(args, size)
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype, attn_implementation="sdpa")
    model = model.to("cuda" if cuda else "cpu").eval()
    known = prompts_of(data, model_folder, args.prompt)
    draw = random.Random(1)
    chosen = [draw.choice(known) for _ in range(args.completions // args.group)]
    width = args.prompt  # one shape, as a static cache wants it
    ids = torch.tensor([[0] * (width - len(one)) + one for one in chosen], device=model.device)
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in chosen], device=model.device)
    options: dict[str, Any] = {"max_new_tokens": args.new, "min_new_tokens": args.new, "do_sample": True}
    options |= {"num_return_sequences": args.group, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    if not args.eager and cuda:
        options["cache_implementation"] = "static"
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask, **options)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        assert made.shape == (args.completions, width + args.new), "it stopped early"
    return {
        "tokens_per_s": round(args.completions * args.new / statistics.median(seconds[2:])),
        "first_pass_s": round(seconds[0], 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def in_process(args: argparse.Namespace, given: Sequence[str], system: str, size: str) -> dict[str, Any]:
    """Return what one system alone measured, in a process of its own."""
    if system == OURS:
        return run_ours(args, given, size)
    command = [sys.executable, __file__, *given, "--alone", system, size]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    given = sys.argv[1:]
    args = arguments(given)
    if args.alone:
        system, size = args.alone
        if system == OURS:
            train_alone(args, size)
        else:
            print(json.dumps((run_engine if system == ENGINE else run_peer)(args, size)))
        return 0
    failed = False
    shape = {name: getattr(args, name) for name in ("completions", "group", "prompt", "new", "micro", "steps")}
    for size in args.sizes.split(","):
        for _ in range(args.repeats):
            prepare(args, size)
            line = {system: in_process(args, given, system, size) for system in args.systems.split(",")}
            if (rate := line.get(ENGINE, {}).get("tokens_per_s")) and "failed" not in line.get(OURS, {"failed": ""}):
                line["rollout_over_engine"] = round(line[OURS]["rollout_tokens_per_s"] / rate, 3)
            failed |= any("failed" in part for part in line.values() if isinstance(part, dict))
            print(json.dumps({"size": size, **shape, **line}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
