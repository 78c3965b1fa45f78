"""Time `bessemer train sft` on a Llama of true size beside transformers + PEFT + torch.compile, in one call.

    python benchmarks/finetune.py --sizes 1b --modes lora,full --folder /dev/shm/finetune
    python benchmarks/finetune.py --sizes 1b,8b --modes lora --repeats 3 --folder /dev/shm/finetune
    python benchmarks/finetune.py --sizes 8b --modes lora,qlora --folder /dev/shm/finetune
    python benchmarks/finetune.py --sizes 8b --modes qlora --batch 1 --remat --folder /dev/shm/finetune
    python benchmarks/finetune.py --sizes tiny --sequence 128 --steps 4      # does it run? (CPU, seconds)

The weights are random, in bf16, with the sizes of Llama-3.2-1B and Llama-3.1-8B (vocabulary 128,256); the rows are
conversations that fill `--sequence` tokens each. Alike in both systems: weights, batch, row length, bf16 compute,
LoRA rank 16 on all linear layers (α 32, no dropout), AdamW, gradient norm clipped at 1, no rematerialization, one
process per case and system. The peer gets random ids that are on the GPU already, scaled-dot-product attention,
fused AdamW, autocast to bf16, and float32 adapters (PEFT's default); for `full`, float32 parameters and autocast.
`qlora` is `lora` over a base in NF4 with double quantization: ours with lora.quantize=nf4, the peer's through
bitsandbytes, if that is installed. With `--remat` both recompute each block in the backward pass.
Ours is the command itself: it reads, tokenizes and packs the rows, checks them, and writes its run directory.

One JSON line per case and system: tokens/s (ours: from the run's own clock after the first ten steps; the peer's:
median of timed steps), peak memory, seconds from the start of the process to the end of the first step, and the bytes
the run left on disk. Then one line per case with the ratio of ours to the peer, and one per size with that of our
`qlora` to our `lora`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loop import watch

OURS, PEER = "bessemer", "peft"
RANK, ALPHA = 16, 32
ADAPTERS = ("lora", "qlora")
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
}  # fmt: skip
BATCH = {"tiny": 2, "1b": 8, "8b": 4}
TEMPLATE = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1b", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--modes", default="lora", help="comma-separated: lora, qlora, full")
    parser.add_argument("--systems", default=f"{OURS},{PEER}", help="which, in this order")
    parser.add_argument("--batch", type=int, default=0, help="rows per step; 0: 8 for 1b, 4 for 8b")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens per row")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps, the first ten of them not timed")
    parser.add_argument("--remat", action="store_true", help="recompute each block in the backward pass, in both")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each case")
    parser.add_argument("--folder", type=Path, default=Path("finetune"), help="models, data and runs; 8b needs 20 GiB")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further setting of ours")
    parser.add_argument("--alone", nargs=2, metavar=("SIZE", "MODE"), help=argparse.SUPPRESS)  # the peer's process
    return parser.parse_args(given)


def conversations(size: int) -> Iterator[dict[str, Any]]:
    """Yield conversations of about `size` characters from the source files of Python's standard library."""
    texts = (path.read_text("utf-8", "replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    whole = "\n".join(texts).replace("<|", "< |")
    for start in range(0, len(whole) - size, size):
        question, answer = whole[start : start + 200], whole[start + 200 : start + size]
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def make_tokenizer(folder: Path, vocab: int) -> None:
    """Train a BPE on the same text; its ids are a part of the model's vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=min(4096, vocab),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row["messages"][1]["content"] for row in conversations(4000)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_model(folder: Path, size: str, positions: int) -> None:
    """Write random bf16 weights as transformers does, with a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        config = transformers.LlamaConfig(
            **SHAPES[size], max_position_embeddings=max(8192, positions), dtype="bfloat16", eos_token_id=1
        )
        model = transformers.LlamaForCausalLM(config)
    partial = folder.with_name(f"{folder.name}.partial")
    model.save_pretrained(partial)
    make_tokenizer(partial, SHAPES[size]["vocab_size"])
    partial.rename(folder)


def prepare(args: argparse.Namespace, size: str) -> tuple[Path, Path]:
    """Return the folder of the model and the file of conversations, made where they are missing."""
    model, data = args.folder / f"llama-{size}", args.folder / f"chats-{args.sequence}.jsonl"
    args.folder.mkdir(parents=True, exist_ok=True)
    if not model.exists():  # in a process of its own: it leaves the GPU empty
        code = f"import finetune, pathlib; finetune.make_model(pathlib.Path({str(model)!r}), {size!r}, {args.sequence})"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
    if not data.exists():
        # longer than a row: what is packed is cropped, so that each row holds one conversation and no padding
        lines = [json.dumps(row) for row in conversations(args.sequence * 8)]
        data.write_text("\n".join(lines * (1 + 400 // len(lines))) + "\n")
    return model, data


def run_ours(args: argparse.Namespace, size: str, mode: str) -> dict[str, Any]:
    """Train with the command; its speed, memory, start and what it left on disk."""
    model, data = prepare(args, size)
    batch = args.batch or BATCH[size]
    runs = args.folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    settings = {
        "init": model,
        "training.dataset": data,
        "training.batch_size": batch,
        "training.per_device_batch_size": batch,
        "training.steps": args.steps,
        "training.validation": "false",
        "architecture.block_size": args.sequence,
        "eval.evaluations": "[]",
        "data.root": args.folder / "stores",
        "logging.report_interval": 1 if args.steps < 20 else 5,
        "logging.checkpoint_interval": -1,
        "logging.preview_interval": 0,
        "logging.plots": "false",
    }
    if mode in ADAPTERS:
        settings |= {"lora.rank": RANK, "lora.alpha": ALPHA}
    if mode == "qlora":
        settings["lora.quantize"] = "nf4"
    if args.remat:
        settings["architecture.remat"] = "block"
    words = [f"{key}={value}" for key, value in settings.items()] + args.set
    command = [sys.executable, "-m", "bessemer", "train", "sft", *words, "--name", "tuned", "--runs", str(runs)]
    started = time.monotonic()
    with open(args.folder / "log.txt", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        rows = watch(process, runs / "tuned" / "metrics.jsonl")
    if process.returncode:
        tail = (args.folder / "log.txt").read_text()[-600:]
        return {"system": OURS, "failed": f"exit code {process.returncode}: {tail}"}
    timed = [row for row in rows if row.get("time/total") and row["step"] >= 10] or rows[-2:]
    seconds = timed[-1]["time/total"] - timed[0]["time/total"]
    tokens = (timed[-1]["step"] - timed[0]["step"]) * batch * args.sequence
    files = [path for path in runs.rglob("*") if path.is_file() and not path.is_symlink()]
    return {
        "system": OURS,
        "tokens_per_s": round(tokens / seconds) if seconds else None,
        "peak_gib": rows[-1].get("mem/peak_gib"),
        # the first row comes with step 1 or with the first report: its own steps are taken off
        "first_step_s": round(
            rows[0]["seen"] - started - rows[0].get("time/step_ms", 0) * (rows[0]["step"] - 1) / 1e3, 1
        ),
        "command_s": round(time.monotonic() - started, 1),
        "disk_gib": round(sum(path.stat().st_size for path in files) / 2**30, 3),
        "loss": round(rows[-1]["loss"], 4),
    }


def run_peer(args: argparse.Namespace, size: str, mode: str) -> dict[str, Any]:
    """The peer, in this process, which does nothing else."""
    started = time.monotonic() - time.process_time()
    import peft
    import torch
    import transformers

    model_folder, _ = prepare(args, size)
    batch, cuda = args.batch or BATCH[size], torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    stored = torch.bfloat16 if mode in ADAPTERS else torch.float32
    more: dict[str, Any] = {}
    if mode == "qlora":
        more["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        more["device_map"] = {"": 0}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=stored, attn_implementation="sdpa", **more
    )
    if mode != "qlora":  # placed as it was quantized
        model.to(device)
    model.train()
    if args.remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if mode in ADAPTERS:
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear")
        )
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.01, fused=cuda)
    compiled = torch.compile(model) if cuda else model
    ids = torch.randint(0, min(4096, SHAPES[size]["vocab_size"]), (args.steps, batch, args.sequence), device=device)

    def step(row: Any) -> float:
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(input_ids=row, labels=row, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    step(ids[0])
    first = time.monotonic() - started
    seconds = []
    for row in ids[1:]:
        begun = time.perf_counter()
        loss = step(row)
        seconds.append(time.perf_counter() - begun)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    return {
        "system": PEER,
        "tokens_per_s": round(batch * args.sequence / statistics.median(seconds[9:] or seconds)),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
        "first_step_s": round(first, 1),
        "loss": round(loss, 4),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": versions,
    }


def peer_process(args: argparse.Namespace, given: Sequence[str], size: str, mode: str) -> dict[str, Any]:
    needed = ["torch", "transformers", "peft", *(["bitsandbytes"] if mode == "qlora" else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return {"system": PEER, "failed": f"not installed: {', '.join(missing)}"}
    prepare(args, size)
    command = [sys.executable, __file__, *given, "--alone", size, mode]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        return {"system": PEER, "failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    given = sys.argv[1:]
    args = arguments(given)
    if args.alone:
        print(json.dumps(run_peer(args, *args.alone)))
        return
    for size in args.sizes.split(","):
        speeds: dict[str, float] = {}
        for mode in args.modes.split(","):
            found: dict[str, list[float]] = {}
            for _ in range(args.repeats):
                for system in args.systems.split(","):
                    line = run_ours(args, size, mode) if system == OURS else peer_process(args, given, size, mode)
                    print(json.dumps({"size": size, "mode": mode, **line}), flush=True)
                    if line.get("tokens_per_s"):
                        found.setdefault(system, []).append(line["tokens_per_s"])
            if OURS in found and PEER in found:
                ratio = statistics.median(found[OURS]) / statistics.median(found[PEER])
                print(json.dumps({"size": size, "mode": mode, "ours_over_peft": round(ratio, 3)}), flush=True)
            if OURS in found:
                speeds[mode] = statistics.median(found[OURS])
        if speeds.keys() >= set(ADAPTERS):
            print(json.dumps({"size": size, "qlora_over_lora": round(speeds["qlora"] / speeds["lora"], 3)}), flush=True)


if __name__ == "__main__":
    main()
