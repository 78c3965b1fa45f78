"""`bessemer tokenizer train`: train a byte-level BPE on text files."""

from __future__ import annotations

import click

from bessemer.cli.options import TEXT_KEY, say


@click.group("tokenizer")
def command() -> None:
    """Train a tokenizer.

    \b
    Examples:
      bessemer tokenizer train texts/ -o tokenizer --vocab-size 8192
      bessemer tokenizer train python-stdlib -o tokenizer --vocab-size 4096
    """


@command.command("train", short_help="Train a byte-level BPE on text files.")
@click.argument("files", nargs=-1, required=True)
@click.option("-o", "--out", required=True, metavar="DIR", help="Directory for tokenizer.json.")
@click.option("--vocab-size", required=True, type=int, metavar="N", help="Vocabulary size, special tokens included.")
@TEXT_KEY
def train(files: tuple[str, ...], out: str, vocab_size: int, text_key: str | None) -> None:
    """Train a byte-level BPE on FILES: parquet, JSON lines, any text; directories, globs, dataset names.

    A corpus larger than 32 MiB is sampled evenly.

    \b
    Examples:
      bessemer tokenizer train texts/ -o tokenizer --vocab-size 8192
      bessemer tokenizer train one.jsonl two.parquet -o tokenizer --vocab-size 8192 --text-key content
    """
    from bessemer.data.stores.catalog import find_source, sample_texts
    from bessemer.data.tokenize.tokenizer import Tokenizer

    tokenizer = Tokenizer.train(sample_texts([find_source(name) for name in files], text_key), vocab_size)
    path = tokenizer.save(out)
    click.echo(f"{path}: {tokenizer.vocab_size} tokens, hash {tokenizer.hash[:12]}")
    if tokenizer.vocab_size < vocab_size:
        say(f"the text has no more pairs to merge, so the vocabulary is smaller than the requested {vocab_size}")
