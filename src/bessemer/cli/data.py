"""`bessemer data prepare` and `bessemer data inspect`."""

from __future__ import annotations

import json
import os
from typing import Any

import click


@click.group("data")
def command() -> None:
    """Prepare text for training, and look at what was prepared.

    \b
    Examples:
      bessemer data prepare texts/*.parquet -o data/mine --tokenizer tokenizer --val-fraction 0.01
      bessemer data inspect data/mine
      bessemer train pretrain training.dataset=data/mine data.tokenizer=auto
    """


@command.command("prepare")
@click.argument("files", nargs=-1, required=True)
@click.option("-o", "--out", required=True, metavar="DIR", help="Directory of the store.")
@click.option(
    "--tokenizer", "tokenizer_path", required=True, metavar="DIR", help="A tokenizer.json or its directory."
)
@click.option("--val", multiple=True, metavar="FILES", help="Validation files; may be given several times.")
@click.option("--val-fraction", type=float, default=0.0, metavar="X", help="Share set apart by content hash.")
@click.option(
    "--on-error", type=click.Choice(["fail", "skip"]), default="fail", show_default=True, help="Bad lines."
)
@click.option("--workers", type=int, default=None, metavar="N", help="Processes; default one a core.")
@click.option("--text-key", metavar="COLUMN", help="Column with the text; default 'text'.")
@click.option("--dedup", is_flag=True, help="Drop exact duplicate documents (counted).")
def prepare(
    files: tuple[str, ...], out: str, tokenizer_path: str, workers: int | None, **options: Any
) -> None:
    """Encode FILES (.parquet, .jsonl[.gz|.zst], .txt, directories, globs, or one dataset name) into a store.

    A killed preparation continues where it stopped when the same command is run again.
    """
    from bessemer.data.prepare import prepare as run
    from bessemer.data.progress import show_progress
    from bessemer.data.tokenizer import Tokenizer
    from bessemer.registry import datasets

    tokenizer = Tokenizer.load(tokenizer_path)
    sources = datasets.get(files[0])() if len(files) == 1 and files[0] in datasets else list(files)
    options["val"] = list(options["val"]) or None
    with show_progress() as progress:
        info = run(
            sources, out, tokenizer, workers=workers or os.cpu_count() or 1, progress=progress, **options
        )
    if info.reused:
        click.echo(f"{info.path} is already prepared from these sources")
    click.echo(_text(info.about))


@command.command("inspect")
@click.argument("directory", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def inspect(directory: str, as_json: bool) -> None:
    """Show what a store holds, with the beginning of a few documents."""
    from bessemer.data.inspect import describe_store

    facts = describe_store(directory)
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    click.echo(_text(facts))
    for split, shown in facts["examples"].items():
        for text in shown:
            click.echo(f"  {split} | {text!r}")


def _text(about: dict[str, Any]) -> str:
    """A store.json in a few lines; everything left out is counted."""
    lines = [
        f"{name}: {split['documents']:,} {'pairs' if about['kind'] == 'pairs' else 'documents'}, "
        f"{split['tokens']:,} tokens, {split['bytes']:,} bytes of text"
        for name, split in about["splits"].items()
    ]
    lines.append(f"split: {about['split']}")
    lines.append(f"tokenizer: {about['tokenizer'][:12]}, {about['vocab_size']:,} tokens")
    left_out = {name: about[name] for name in ("skipped", "empty", "duplicates")}
    lines.append("left out: " + ", ".join(f"{count:,} {name}" for name, count in left_out.items()))
    lines += [f"  skipped {where}" for where in about["skipped_where"]]
    return "\n".join(lines)
