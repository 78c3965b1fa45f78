"""What verifying a token store costs: time of the first reads of all rows with and without checksums, beside training.

    python benchmarks/store_checksums.py [--tokens 20000000] [--block 2048] [--train-tokens-per-second 65000 1000000]

Prints one JSON line. Every chunk is verified once, before its first use, in the thread that prefetches batches. `share`
is its CPU time over the time of training on those tokens: `epoch` where all rows are used, `sparse` for the first rows
of a store so large that no two of them share a chunk.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from bessemer.data import DatasetStyle, Tokenizer, TokenStore, make_rows, prepare
from bessemer.storage.checksums import CHUNK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--block", type=int, default=2048)
    parser.add_argument("--train-tokens-per-second", type=float, nargs="+", default=[65_000, 1_000_000])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        store = make_store(Path(root), options.tokens)
        opened = [timed(lambda: TokenStore(store)) for _ in range(5)]
        epoch, sparse = seconds_per_token(store, options.block)
    shares = {
        f"{speed:g}": {"epoch": epoch * speed, "sparse": sparse * speed} for speed in options.train_tokens_per_second
    }
    print(
        json.dumps(
            {
                "tokens": options.tokens,
                "block": options.block,
                "chunk_bytes": CHUNK,
                "open_ms": 1e3 * min(opened),
                "ns_per_token": {"epoch": 1e9 * epoch, "sparse": 1e9 * sparse},
                "share_of_training_at_tokens_per_second": shares,
            }
        )
    )


def make_store(root: Path, tokens: int) -> Path:
    """Random ids: what they say does not matter."""
    tokenizer = Tokenizer.train(["some words to learn from"], 300)
    ids = np.random.default_rng(0).integers(20, 280, tokens)
    documents = [{"input_ids": part} for part in np.array_split(ids, max(1, tokens // 1000))]
    return prepare(documents, root / "store", tokenizer).path


def seconds_per_token(path: Path, block: int) -> tuple[float, float]:
    """(all rows in a random order, rows that share no chunk): time with checksums less the time without."""
    rows = make_rows(TokenStore(path), DatasetStyle.PMD, block)
    order = np.random.default_rng(1).permutation(len(rows))
    apart = np.arange(0, len(rows), max(1, -(-2 * CHUNK // (2 * block))))
    found = []
    for chosen in (order, apart):
        batches = np.array_split(chosen, max(1, len(chosen) // 32))
        times = []
        for checked in (False, True):
            best = []
            for _ in range(3):
                store = TokenStore(path)
                fresh = make_rows(store, DatasetStyle.PMD, block)
                store.verified = store.verified if checked else {}
                best.append(timed(lambda rows=fresh, parts=batches: [rows.get(part) for part in parts]))
            times.append(min(best))
        found.append((times[1] - times[0]) / (len(chosen) * block))
    return found[0], found[1]


def timed(call) -> float:  # type: ignore[no-untyped-def]
    begun = time.process_time()  # of this process, whatever else runs
    call()
    return time.process_time() - begun


if __name__ == "__main__":
    main()
