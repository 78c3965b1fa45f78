"""Time our generation engine beside transformers' generate with a static cache, in one run on one machine.

    python benchmarks/generate.py --depth 4 --vocab 4096 --batch 1,8 --prompt 128 --new 64
    python benchmarks/generate.py --depth 12 --vocab 32768 --batch 32,128 --prompt 1024 --new 256 --bandwidth 4.3
    python benchmarks/generate.py --model models/llama --prompts text.txt --speculate none,ngram --weights auto,fp8

Each case, a system and a batch, runs in a process of its own, one after the other, so that memories do not mix. Alike
in both: depth, width, heads, vocabulary, full attention in every layer (--window gives ours another), greedy choice,
prompts of random tokens continued by exactly --new, bf16 on a GPU and float32 on a CPU. The Llama's feed-forward (three
matrices) is as wide as makes it as large as ours (two). On a GPU transformers compiles its decode step by itself;
--eager keeps it from that.

One JSON line a case: prefill and decode tokens/s; time to the first token (ours: of requests that are read along, with
their tokens/s after it; all else is measured without readers, in whole rounds of --steps); and the share of the limit:
what a step must read, the weights of its products and the keys and values so far, over the memory bandwidth, which is
measured in the same process unless --bandwidth says it. (A toy that fits into a CPU's caches beats that limit.) Then a
line a batch with the ratios of ours over transformers.

--model times a run or a Hugging Face folder in place of random weights, without the peer. --speculate and --weights
give ours further cases, and a line each with the ratios of the case over the first one. With drafts a step is a token
of a row, however many a pass makes, and the limit is still a plain step's, so the share of it may exceed 1.
tokens_per_pass depends on the text, so prompts should be real (--prompts), with a model that continues them.

On a CPU that others use too, pin the run to one core (taskset -c 0) and read the processor times: of the prefill, and
of a decode step.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from beside import PEER, add_shape, facts_of, fill_width, in_process, in_products, make_llama, missing

OURS = "ours"
SHAPE = ("depth", "width", "head_dim", "vocab", "batch", "prompt", "new")
CASES = ("speculate", "weights")
RATIOS = ("prefill_tokens_per_s", "decode_tokens_per_s", "first_token_ms", "prefill_processor_ms", "processor_ms")


class Pass(NamedTuple):
    """One batch written to its end: seconds to the first token, of the prefill, and of `steps` decode steps after."""

    first: float
    prefill: float
    decode: float
    steps: float  # tokens of a row
    prefill_processor: float  # processor time of the prefill and of those steps, all threads
    processor: float


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser)
    parser.add_argument("--batch", default="1,8", help="rows, comma-separated: a case each")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens made after it")
    parser.add_argument(
        "--steps", type=int, default=0, help="ours: decode steps a round, of which --new is a multiple; 0: its own"
    )
    parser.add_argument("--window", default="L", help="ours: attention pattern; the peer's layers see everything")
    parser.add_argument("--window_short", type=float, default=0.5, help="ours: S as a share of the block")
    parser.add_argument("--block", type=int, default=0, help="ours: context of the model; 0: prompt + new")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes, after one that compiles")
    parser.add_argument("--bandwidth", type=float, default=0.0, help="TB/s of the memory; 0: measured")
    parser.add_argument("--model", default="", help="ours: a run, or a Hugging Face folder; no peer then")
    parser.add_argument("--prompts", default="", help="with --model: a text file; each prompt is a piece of it")
    parser.add_argument("--speculate", default="none", help="ours: none, ngram, comma-separated: a case each")
    parser.add_argument("--draft", type=int, default=4, help="ours: tokens of a draft")
    parser.add_argument("--ngram", type=int, default=3, help="ours: the most tokens that a draft's place has in common")
    parser.add_argument("--weights", default="auto", help="ours: auto, fp8, int8, comma-separated: a case each")
    parser.add_argument("--peer", default=PEER, choices=(PEER, "none"), help="what stands beside ours")
    parser.add_argument("--eager", action="store_true", help="transformers: no torch.compile")
    parser.add_argument("--alone", choices=(OURS, PEER), help=argparse.SUPPRESS)  # this process is that system
    args = parser.parse_args(given)
    fill_width(args)
    if args.prompts and not args.model:
        parser.error("--prompts needs --model, whose tokenizer reads them")
    return args


def best_bandwidth(read: Callable[[], None], size: int) -> float:
    """Bytes/s of the fastest of ten reads of `size` bytes."""
    read()
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - start)
    return size / min(seconds)


def line(args: argparse.Namespace, passes: Sequence[Pass], facts: dict[str, Any]) -> dict[str, Any]:
    """What every system reports, in the same words."""
    batch = int(args.batch)
    first, prefill, decode, steps, prefill_processor, processor = (
        statistics.median(values) for values in zip(*passes, strict=True)
    )
    seconds = decode / steps
    held = args.prompt + args.new - steps / 2  # tokens of a row in the cache, on average of those steps
    seen = sum(min(window or held, held) for window in facts.pop("windows"))
    size = facts["weight_bytes"] + batch * seen * facts.pop("token_bytes")
    limit = size / facts["bandwidth"]
    bandwidth = facts.pop("bandwidth") / 1e12
    return {
        "system": args.alone,
        **{name: getattr(args, name) for name in SHAPE},
        "batch": batch,
        "decode_tokens_per_s": round(batch / seconds, 1),
        "prefill_tokens_per_s": round(batch * args.prompt / prefill, 1) if prefill > 0 else None,  # lost in noise
        "first_token_ms": round(first * 1e3, 2),
        "step_ms": round(seconds * 1e3, 3),
        "prefill_processor_ms": round(prefill_processor * 1e3, 3),
        "processor_ms": round(processor / steps * 1e3, 3),
        "limit_ms": round(limit * 1e3, 4),
        "share_of_limit": round(limit / seconds, 4),
        "bandwidth_tb_s": round(bandwidth, 4),
        **facts,
        "python": platform.python_version(),
    }


def make_model(args: argparse.Namespace, capacity: int) -> tuple[Any, Any, Any]:
    """(model, parameters, tokenizer or None): random, or those of --model."""
    import jax
    import jax.numpy as jnp

    from bessemer.generate.load import abstract_params, load_model, tokenizer_in
    from bessemer.interop.folder import Folder, is_folder
    from bessemer.job import find_run
    from bessemer.models.gpt import GPT
    from bessemer.storage.weights import place
    from bessemer.topology import unbox

    if args.model:
        path = Path(args.model)
        if is_folder(path):
            folder = Folder(path)
            model = folder.model
            params, tokenizer = place(folder, abstract_params(model), str(path)), tokenizer_in(path, model)
        else:
            loaded = load_model(find_run(args.model, "runs"))
            model, params, tokenizer = loaded.model, loaded.params, loaded.tokenizer
        sizes = model.sizes()
        args.depth, args.width, args.head_dim, args.vocab = (
            model.depth,
            sizes["width"],
            model.head_dim,
            model.vocab_size,
        )
        if capacity > model.block_size:
            raise SystemExit(f"--prompt and --new are {capacity} tokens; the context of {path} is {model.block_size}")
        return model, params, tokenizer
    shape = {"depth": args.depth, "width": args.width, "head_dim": args.head_dim, "vocab_size": args.vocab}
    windows = {"window": args.window, "window_short": args.window_short}
    model = GPT(**shape, **windows, block_size=args.block or capacity)
    model.check()
    params = jax.jit(lambda key: unbox(model.init(key, jnp.zeros((1, 8), jnp.int32)))["params"])(jax.random.key(0))
    return model, params, None


def make_prompts(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Prompts of exactly --prompt tokens: random ones, or pieces of the text --prompts, evenly spread."""
    import numpy as np

    batch = int(args.batch)
    if not args.prompts:
        return np.random.default_rng(0).integers(0, args.vocab, (batch, args.prompt)).tolist()
    if tokenizer is None:
        raise SystemExit(f"{args.model} has no tokenizer for --prompts")
    ids = tokenizer.encode(Path(args.prompts).read_text(encoding="utf-8"))
    room = len(ids) - args.prompt
    if room < 0:
        raise SystemExit(f"{args.prompts} has {len(ids)} tokens; a prompt has {args.prompt}")
    return [ids[start : start + args.prompt] for start in (n * room // max(batch - 1, 1) for n in range(batch))]


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """The engine, with as many slots as rows."""
    import jax
    import jax.numpy as jnp

    from bessemer.generate import Engine, Request, Speculation
    from bessemer.generate.engine import round_of
    from bessemer.generate.weights import Quantizer
    from bessemer.kernels.quantized import Quantized, size_of

    batch, capacity = int(args.batch), args.prompt + args.new
    args.steps = args.steps or round_of()
    if args.new % args.steps or args.new < 2 * args.steps:
        raise SystemExit(f"--new is a multiple of --steps ({args.steps}), and more than one of them")
    model, params, tokenizer = make_model(args, capacity)
    drafts = Speculation.of(args.speculate, args.draft, args.ngram)
    counts, width = model.count_parameters(), jnp.dtype(model.compute_dtype).itemsize
    weight_bytes = (counts["matrix"] + counts["head"]) * width
    if args.weights != "auto":
        params = Quantizer(model, args.weights).release_each(params)
        leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
        nodes = [leaf for leaf in leaves if isinstance(leaf, Quantized)]
        weight_bytes += sum(size_of(node) - math.prod(node.shape) * width for node in nodes)
    options: dict[str, Any] = {"slots": batch, "capacity": capacity, "steps": args.steps, "end_ids": ()}
    engine = Engine(model, params, **options, speculate=drafts)
    prompts = make_prompts(args, tokenizer)
    requests = [Request(prompt, args.new) for prompt in prompts]

    def once() -> Pass:
        marks = [(time.perf_counter(), time.process_time())]
        handles, before, made = [engine.submit(request) for request in requests], engine.tokens, []
        while not all(handle.done for handle in handles):
            engine.step()  # the first one prefills; each reads its tokens
            marks.append((time.perf_counter(), time.process_time()))
            made.append(engine.tokens)
        rounds = len(marks) - 2
        if not rounds:
            raise SystemExit(f"all {args.new} tokens were made in one round: use a larger --new, or a smaller --steps")
        first, first_processor = (marks[1][i] - marks[0][i] for i in (0, 1))
        decode, processor = (marks[-1][i] - marks[1][i] for i in (0, 1))
        # the first round writes tokens too, in the time of any other
        prefill, prefill_processor = first - decode / rounds, first_processor - processor / rounds
        assert made[-1] - before == batch * args.new, "rows stopped early"
        return Pass(first, prefill, decode, (made[-1] - made[0]) / batch, prefill_processor, processor)

    def read_along() -> tuple[float, float]:
        """Seconds to the first token of each row, and tokens/s after it, of requests that stream."""
        begun = time.perf_counter()
        handles = [engine.submit(dataclasses.replace(request, stream=True)) for request in requests]
        engine.step()
        first = time.perf_counter()
        tokens = sum(len(event.ids) for handle in handles if (event := handle.next_event(timeout=0)))
        engine.run_until_idle()
        return first - begun, (batch * args.new - tokens) / (time.perf_counter() - first)

    start = time.perf_counter()
    once()
    first_pass = time.perf_counter() - start
    pairs = [(once(), read_along()) for _ in range(args.repeats)]
    passes = [whole._replace(first=first) for whole, (first, _) in pairs]
    data = jnp.ones((2**29 if jax.default_backend() == "gpu" else 2**25) // 4096 * 4096, jnp.float32)
    total = jax.jit(lambda x: jnp.sum(x.reshape(-1, 4096), axis=1))
    measured = best_bandwidth(lambda: total(data).block_until_ready(), data.nbytes)
    memory = jax.local_devices()[0].memory_stats()
    facts = {
        "weight_bytes": weight_bytes,
        "token_bytes": 2 * model.shape.kv_width * width,
        "windows": model.shape.windows,
        "window": "" if args.model else args.window,
        "model": Path(args.model).name,
        "speculate": args.speculate,
        "weights": args.weights,
        "tokens_per_pass": None if engine.acceptance is None else engine.acceptance["tokens_per_pass"],
        "bandwidth": args.bandwidth * 1e12 or measured,
        "parameters": counts["total"],
        "precision": model.compute_dtype.__name__,
        "steps_a_round": args.steps,
        "streamed_tokens_per_s": round(statistics.median(rate for _, (_, rate) in pairs), 1),
        "programs": engine.compilations,
        "first_pass_s": round(first_pass, 1),
        "peak_gib": round(memory["peak_bytes_in_use"] / 2**30, 2) if memory else None,
        "device": jax.local_devices()[0].device_kind,
        "versions": {"jax": jax.__version__},
    }
    return line(args, passes, facts)


def transformers_llama(args: argparse.Namespace) -> dict[str, Any]:
    """transformers' Llama and its generate, as its users call it for speed: static cache, half precision."""
    import torch
    import transformers

    cuda, dtype = torch.cuda.is_available(), torch.bfloat16 if torch.cuda.is_available() else torch.float32
    batch = int(args.batch)
    model = make_llama(args, args.prompt + args.new, eos_token_id=None, pad_token_id=0).to(dtype=dtype).eval()
    device = model.device
    shape = (batch, args.prompt)
    ids = torch.randint(0, args.vocab, shape, generator=torch.Generator().manual_seed(0)).to(device)
    marks: list[tuple[float, float]] = []

    def mark() -> None:
        if cuda:
            torch.cuda.synchronize()
        marks.append((time.perf_counter(), time.process_time()))

    def going_on(ids: Any, scores: Any, **_: Any) -> Any:
        """A stopping criterion that stops nothing and notes when the first token was there."""
        if len(marks) == 1:
            mark()
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

    options = {"max_new_tokens": args.new, "min_new_tokens": args.new, "do_sample": False}
    options |= {"cache_implementation": "static", "disable_compile": args.eager}
    criteria = transformers.StoppingCriteriaList([going_on])

    def once() -> Pass:
        marks.clear()
        mark()
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=criteria, **options)
        mark()
        assert made.shape == (batch, args.prompt + args.new), "it stopped early"
        first, before = (marks[1][i] - marks[0][i] for i in (0, 1))
        decode, processor = (marks[2][i] - marks[1][i] for i in (0, 1))
        return Pass(first, first, decode, args.new - 1, before, processor)

    start = time.perf_counter()
    once()
    first_pass = time.perf_counter() - start
    once()  # what is compiled may be recorded at its second use
    passes = [once() for _ in range(args.repeats)]
    data = torch.ones(2**29 if cuda else 2**25, dtype=torch.float32, device=device)

    def read() -> None:
        data.sum()
        if cuda:
            torch.cuda.synchronize()

    measured = best_bandwidth(read, data.numel() * 4)
    facts = {
        "weight_bytes": in_products(model) * dtype.itemsize,
        "token_bytes": 2 * args.width * dtype.itemsize,
        "windows": [None] * args.depth,
        "bandwidth": args.bandwidth * 1e12 or measured,
        "precision": str(dtype).removeprefix("torch."),
        "compiled": cuda and not args.eager,
        "first_pass_s": round(first_pass, 1),
        **facts_of(model),
    }
    return line(args, passes, facts)


def alone(args: argparse.Namespace) -> dict[str, Any]:
    """This process is one system at one batch."""
    if args.alone == OURS:
        return ours(args)
    if (skipped := missing()) is not None:
        return {"system": PEER, "batch": int(args.batch), "skipped": skipped}
    return transformers_llama(args)


def ratios(mine: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any] | None:
    """Ours over the peer's, for what both measured."""
    if not all("decode_tokens_per_s" in row for row in (mine, peer)):
        return None
    both = [name for name in RATIOS if mine[name] and peer[name]]
    return {"batch": mine["batch"], "ratios": {name: round(mine[name] / peer[name], 3) for name in both}}


def main(given: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if given is None else given)
    args = arguments(given)
    if args.alone:
        print(json.dumps(alone(args)))
        return 0
    failed = False
    peers = [] if args.peer == "none" or args.model else [PEER]
    cases = list(itertools.product(args.speculate.split(","), args.weights.split(",")))
    for batch in args.batch.split(","):

        def run(system: str, case: tuple[str, ...], batch: str = batch) -> dict[str, Any]:
            words = [word for name, value in zip(CASES, case, strict=True) for word in (f"--{name}", value)]
            row = {
                "batch": int(batch),
                **in_process(__file__, system, [*given, "--batch", batch, *words], args.peer_path),
            }
            print(json.dumps(row), flush=True)
            return row

        first, *others = [run(OURS, case) for case in cases]
        compared = [*others, *(run(peer, cases[0]) for peer in peers)]
        failed |= any("failed" in row for row in (first, *compared))
        for row in compared:
            pair = (first, row) if row["system"] == PEER else (row, first)
            if (found := ratios(*pair)) is not None:
                about = {} if row["system"] == PEER else {name: row[name] for name in CASES}
                print(json.dumps(found | about), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
