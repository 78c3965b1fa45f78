"""`bessemer data prepare`, `bessemer data inspect` and `bessemer data tasks`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from bessemer.cli.options import JSON, TEXT_KEY


@click.group("data")
def command() -> None:
    """Prepare text for training, look at what was prepared, and make synthetic task sets.

    \b
    Examples:
      bessemer data prepare texts/*.parquet -o data/mine --tokenizer tokenizer --val-fraction 0.01
      bessemer data inspect data/mine
      bessemer train pretrain training.dataset=data/mine data.tokenizer=auto
      bessemer data tasks toy-reverse -o reverse.jsonl
    """


@command.command("prepare", short_help="Encode text files into a store.")
@click.argument("files", nargs=-1, required=True)
@click.option("-o", "--out", required=True, metavar="DIR", help="Directory of the store.")
@click.option("--tokenizer", "tokenizer_path", required=True, metavar="DIR", help="A tokenizer.json or its directory.")
@click.option("--val", multiple=True, metavar="FILES", help="Validation files; repeatable.")
@click.option("--val-fraction", type=float, default=0.0, metavar="X", help="Share held out by content hash.")
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What to do with invalid lines.",
)
@click.option("--workers", type=int, default=None, metavar="N", help="Processes; default: one per core.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Run here, or on a Ray cluster (extra: ray).",
)
@TEXT_KEY
@click.option("--dedup", is_flag=True, help="Drop exact duplicate documents (counted).")
def prepare(files: tuple[str, ...], out: str, tokenizer_path: str, workers: int | None, **options: Any) -> None:
    """Encode FILES (parquet, JSON lines or any text, compressed or not; directories, globs, or one dataset name) into a
    store.

    If it is killed, run the same command again: it continues where it stopped.

    \b
    Examples:
      bessemer data prepare texts/*.parquet -o data/mine --tokenizer tokenizer --val-fraction 0.01
      bessemer data prepare train.jsonl --val held-out.jsonl -o data/mine --tokenizer tokenizer --on-error skip
    """
    from bessemer.data import show_progress
    from bessemer.data.stores.prepare import prepare as run
    from bessemer.data.tokenize.tokenizer import Tokenizer
    from bessemer.registry import datasets

    tokenizer = Tokenizer.load(tokenizer_path)
    sources = datasets.get(files[0])() if len(files) == 1 and files[0] in datasets else list(files)
    options["val"] = list(options["val"]) or None
    with show_progress() as progress:
        info = run(sources, out, tokenizer, workers=workers or os.cpu_count() or 1, progress=progress, **options)
    if info.reused:
        click.echo(f"{info.path} is already prepared from these sources")
    click.echo(_text(info.about))


@command.command("inspect", short_help="Show what a store holds.")
@click.argument("directory", metavar="DIR")
@JSON
@click.option("--verify", is_flag=True, help="Compare every byte with its checksum.")
def inspect(directory: str, as_json: bool, verify: bool) -> None:
    """Show what a store holds, with the beginning of a few documents.

    \b
    Examples:
      bessemer data inspect data/mine
      bessemer data inspect data/mine --json
      bessemer data inspect data/mine --verify
    """
    from bessemer.data.rows.rows import describe_store

    facts = describe_store(directory, verify)
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    click.echo(_text(facts))
    if not all(facts["checksums"].values()):
        click.echo("checksums: none, as this store was prepared before stores had them; prepare it again to add them")
    if verify:
        click.echo("verified: every byte is as it was prepared")
    for split, shown in facts["examples"].items():
        for text in shown:
            click.echo(f"  {split} | {text!r}")


@command.command("tasks", short_help="Write a synthetic task set; without NAME, list them.")
@click.argument("name", required=False)
@click.option("-o", "--out", metavar="FILE", help="A .jsonl file to write.")
@click.option("--count", type=int, metavar="N", help="Number of rows; default: as in the registered dataset.")
@click.option("--seed", type=int, default=1337, show_default=True, metavar="S", help="Seed of the rows.")
@click.option("--split", type=click.Choice(["train", "val"]), default="train", show_default=True, help="Which split.")
def tasks(name: str | None, out: str | None, count: int | None, seed: int, split: str) -> None:
    """Write a synthetic task set to a file; without NAME, list them. The two splits never share a question.

    \b
    Examples:
      bessemer data tasks
      bessemer data tasks toy-reverse -o reverse.jsonl
      bessemer data tasks toy-sort -o test.jsonl --split val --count 100
    """
    from bessemer.data.sources.datasets import TASKS, task_rows
    from bessemer.errors import InputError
    from bessemer.storage.files import atomic_write

    if name is None:
        for known, (about, _) in TASKS.items():
            click.echo(f"{known:<16} {about}")
        return
    rows = task_rows(name, split, count, seed)
    if out is None:
        raise InputError(f"-o is missing: pass the file for the rows of {name}, as -o FILE.jsonl.")
    atomic_write(Path(out), "".join(json.dumps(row) + "\n" for row in rows))
    click.echo(f"{out}: {len(rows):,} rows of {name}, {split} split, seed {seed}")


def _text(about: dict[str, Any]) -> str:
    """Return a store.json as a few lines, with counts of everything that was left out."""
    from bessemer.data.tokenize.documents import describe_turn_rows

    lines = [
        f"{name}: {split['documents']:,} {'pairs' if about['kind'] == 'pairs' else 'documents'}, "
        f"{split['tokens']:,} tokens, {split['bytes']:,} bytes of text{_supervised(split)}"
        for name, split in about["splits"].items()
    ]
    lines.append(f"split: {about['split']}")
    lines.append(f"tokenizer: {about['tokenizer'][:12]}, {about['vocab_size']:,} tokens")
    left_out = {name: about[name] for name in ("skipped", "empty", "duplicates")}
    lines.append("left out: " + ", ".join(f"{count:,} {name}" for name, count in left_out.items()))
    lines += [f"  skipped {where}" for where in about["skipped_where"]]
    if turns := about.get("turn_rows"):
        lines.append(describe_turn_rows(turns))
    lines += [f"files left out: {count:,} {why}" for why, count in about.get("files_left_out", {}).items()]
    return "\n".join(lines)


def _supervised(split: dict[str, Any]) -> str:
    """Return how much of supervised data is trained on; empty for plain text, where all of it is."""
    if "supervised" not in split:
        return ""
    share = split["supervised"] / max(1, split["tokens"])
    return f"; {split['supervised']:,} tokens ({share:.1%}) are trained on, {1 - share:.1%} are masked"
