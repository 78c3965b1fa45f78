"""`python -m tests.golden`: record golden runs, compare two revisions, check the working tree against a record."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.golden.cases import CASES, replayed, with_needs
from tests.golden.compare import PARTS, compare, table
from tests.golden.record import ROOT, Record, RunFailed, environment, hashes, record, stored_file


def write(path: Path, found: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def export(revision: str, folder: Path) -> Path:
    """Unpack a revision's files into `folder`; WORKTREE is this checkout as it is."""
    if revision == "WORKTREE":
        return ROOT
    done = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{revision}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def recorded(revision: str, options: argparse.Namespace) -> Record:
    with tempfile.TemporaryDirectory(prefix="golden-code-") as folder:
        return record(export(revision, Path(folder).resolve()), options.cases, options.cache)


def show(a: Record, b: Record, options: argparse.Namespace) -> int:
    outcomes = compare(a, b, options.renamed, options.ignore)
    print(table(outcomes))
    return int(any(one.difference for one in outcomes))


def record_command(options: argparse.Namespace) -> int:
    found = recorded(options.revision, options)
    write(options.out, found)
    print(options.out)
    return 0


def store_command(options: argparse.Namespace) -> int:
    options.cases = replayed()
    write(stored_file(), hashes(recorded("WORKTREE", options)))
    print(stored_file())
    return 0


def compare_command(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="golden-compiled-") as folder:
        options.cache = options.cache or Path(folder)  # programs that did not change are compiled once
        a, b = (recorded(revision, options) for revision in (options.a, options.b))
    return show(a, b, options)


def check_command(options: argparse.Namespace) -> int:
    stored = json.loads(options.file.read_text(encoding="utf-8"))
    here = environment()
    if stored["environment"] != here:
        print(
            f"{options.file} was recorded elsewhere, and bits depend on it:\n"
            f"  recorded: {stored['environment']}\n  here:     {here}\n"
            "Compare two revisions on this machine instead: python -m tests.golden compare REV_A REV_B",
            file=sys.stderr,
        )
        return 2
    options.cases = with_needs(options.cases or stored["cases"])
    if missing := [name for name in options.cases if name not in stored["cases"]]:
        print(f"{options.file} does not hold {', '.join(missing)}. Record it again.", file=sys.stderr)
        return 2
    stored["cases"] = {name: stored["cases"][name] for name in options.cases}
    return show(stored, recorded("WORKTREE", options), options)


def names(text: str) -> list[str]:
    if unknown := [name for name in text.split(",") if name not in CASES]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}. Known: {', '.join(CASES)}")
    return text.split(",")


def parts(text: str) -> list[str]:
    if unknown := [part for part in text.split(",") if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}. Known: {', '.join(PARTS)}")
    return text.split(",")


def mapping(text: str) -> dict[str, Any]:
    return json.loads(Path(text).read_text(encoding="utf-8"))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    commands = top.add_subparsers(required=True)
    running = argparse.ArgumentParser(add_help=False)
    running.add_argument("--cases", type=names, help="names with commas; default: all (needed ones are added)")
    running.add_argument("--cache", type=Path, help="folder of compiled programs, reused by the next call")
    comparing = argparse.ArgumentParser(add_help=False)
    comparing.add_argument(
        "--renamed", type=mapping, help='JSON file {"old.setting": "new.setting"}, applied to the first record'
    )
    comparing.add_argument("--ignore", type=parts, default=[], help=f"parts not compared, of {','.join(PARTS)}")

    one = commands.add_parser("record", parents=[running], help="run the cases and write what came out as JSON")
    one.add_argument("out", type=Path)
    one.add_argument("--revision", default="WORKTREE", help="code of this git revision; default: the working tree")
    one.set_defaults(call=record_command)
    one = commands.add_parser("store", parents=[running], help="record what the slow test replays on this machine type")
    one.set_defaults(call=store_command)
    one = commands.add_parser("compare", parents=[running, comparing], help="run two revisions and compare them")
    one.add_argument("a", metavar="REV_A")
    one.add_argument("b", metavar="REV_B", help="a git revision, or WORKTREE")
    one.set_defaults(call=compare_command)
    one = commands.add_parser("check", parents=[running, comparing], help="compare the working tree with a record")
    one.add_argument("file", type=Path)
    one.set_defaults(call=check_command)
    return top


if __name__ == "__main__":
    options = parser().parse_args()
    try:
        sys.exit(options.call(options))
    except RunFailed as error:
        sys.exit(str(error))
