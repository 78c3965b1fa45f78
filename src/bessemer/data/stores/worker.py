"""`python -m bessemer.data.stores.worker`: encode the shards that standard input names, one JSON line each.

A plain child process, rather than `multiprocessing`, never re-imports the user's script (which may train at module
level) and never inherits JAX's threads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from bessemer.data.sources.files import Piece
from bessemer.data.stores.shards import Report, ShardWriter
from bessemer.data.tokenize.documents import read_piece
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError, StorageError


def serve(requests: TextIO, replies: TextIO) -> None:
    """Read the settings from the first line, then one shard per line; answer each with `done` or `error`."""

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    settings = json.loads(requests.readline())
    tokenizer = Tokenizer.load(settings["tokenizer"])
    for line in requests:
        shard = json.loads(line)
        reply(**encode(shard, settings, tokenizer, lambda d, t: reply(documents=d, tokens=t)))


def encode(shard: dict[str, Any], settings: dict[str, Any], tokenizer: Tokenizer, report: Report) -> dict[str, Any]:
    """Write one shard: {"out": directory, "pieces": [values of a Piece]}; `done`, or `error` and its kind."""
    pieces = [Piece(*values) for values in shard["pieces"]]
    documents = (read for piece in pieces for read in read_piece(piece, settings["text_key"], tokenizer))
    try:
        ShardWriter(Path(shard["out"]), tokenizer, settings["on_error"], report).write(documents)
    except InputError as error:
        return {"error": str(error), "kind": "input"}
    except (OSError, StorageError) as error:
        return {"error": str(error), "kind": "storage"}
    return {"done": True}


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
