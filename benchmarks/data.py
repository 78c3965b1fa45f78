"""How fast data is prepared and served, on this machine. One JSON line a case.

    python benchmarks/data.py --workers 1 --block-size 256 --batch-size 256

`prepare`: text to store, tokens/s over all workers. `serve`: `DataPlan.batch`, rows, tokens and batches a
second on one core, for each style. `plan`: packing the rows of many documents, documents/s.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.data import DataPlan, DatasetStyle, Sampling, Tokenizer, TokenStore, make_rows, prepare
from bessemer.data.rows.build import crop, pack
from bessemer.data.stores.catalog import find_source, sample_texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="python-stdlib", help="files, a directory or a dataset name")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="numbers of processes to prepare with")
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=200, help="batches served a style")
    parser.add_argument("--documents", type=int, default=1_000_000, help="documents in the packing case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for workers in options.workers:
            store = bench_prepare(options, workers, Path(folder) / str(workers))
        for style in (DatasetStyle.PMD, DatasetStyle.PACKED, DatasetStyle.CROPPED, DatasetStyle.PADDED):
            bench_serve(options, store, style)
    bench_plans(options)


def bench_prepare(options: argparse.Namespace, workers: int, out: Path) -> TokenStore:
    source = find_source(options.source)
    tokenizer = Tokenizer.train(sample_texts([source], limit=4 << 20), options.vocab_size)
    begun = time.perf_counter()
    info = prepare(source, out, tokenizer, workers=workers)
    seconds = time.perf_counter() - begun
    split = info.splits["train"]
    report(
        "prepare",
        workers=workers,
        seconds=seconds,
        tokens_per_s=split["tokens"] / seconds,
        bytes_per_s=split["bytes"] / seconds,
        documents_per_s=split["documents"] / seconds,
    )
    return TokenStore(out)


def bench_serve(options: argparse.Namespace, store: TokenStore, style: DatasetStyle) -> None:
    rows = make_rows(store, style, options.block_size, on_empty="skip")
    plan = DataPlan([[(Sampling("bench", style=style), rows)]], options.batch_size, seed=0)
    plan.batch(0)
    begun = time.perf_counter()
    for step in range(options.batches):
        plan.batch(step)
    each = (time.perf_counter() - begun) / options.batches
    report(
        "serve",
        style=style.name,
        block_size=options.block_size,
        batch_size=options.batch_size,
        batches_per_s=1 / each,
        rows_per_s=options.batch_size / each,
        tokens_per_s=options.batch_size * options.block_size / each,
    )


def bench_plans(options: argparse.Namespace) -> None:
    lengths = np.random.default_rng(0).geometric(1 / 600, options.documents) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for style, build in (("PACKED", pack), ("CROPPED", crop)):
        begun = time.perf_counter()
        plan = build(offsets, 2048)
        seconds = time.perf_counter() - begun
        report(
            "plan",
            style=style,
            documents=options.documents,
            seconds=seconds,
            documents_per_s=options.documents / seconds,
            filled=float(plan.lengths.sum() / (len(plan) * (2048 + (style == "CROPPED")))),
            kept=float(plan.lengths.sum() / (lengths.sum() - (len(lengths) if style == "PACKED" else 0))),
        )


def report(case: str, **values: Any) -> None:
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps({"case": case, **rounded}), flush=True)


if __name__ == "__main__":
    main()
