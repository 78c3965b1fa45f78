"""Run golden cases with the code of one checkout, through its command line, and write down what came out."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from tests.golden.cases import CASES, Case, settings_of, with_needs
from tests.golden.data import write_data
from tests.processes import free_port
from tests.quick import OLDER_LOOPS, known

ROOT = Path(__file__).parents[2]
TIMEOUT = 900  # seconds per command: a guard against hanging
FORMAT = 1
UNSTABLE = ("time/", "mem/")
REPRODUCIBLE = ("model.safetensors", "ema.safetensors")
OURS = ("BESSEMER_", "JAX_", "XLA_", "GOLDEN_", "PYTHONPATH")
Record = dict[str, Any]


class RunFailed(Exception):
    """A command of a case did not exit as it should."""


@functools.cache
def environment() -> dict[str, str]:
    """Return what bits depend on besides the code: jaxlib, the CPU model, its instruction sets, and the cores that a
    sum may be divided among."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields = dict(re.findall(r"^(model name|flags)\s*: (.*)$", text, re.MULTILINE))
    flags = hashlib.sha256(" ".join(sorted(fields.get("flags", "").split())).encode()).hexdigest()[:8]
    return {
        "jaxlib": version("jaxlib"),
        "cpu": fields.get("model name", "unknown"),
        "cpu_flags": flags,
        "cores": str(len(os.sched_getaffinity(0))),
    }


def key_of(facts: dict[str, str]) -> str:
    """Return the name under which hashes of an environment are stored."""
    text = "jaxlib-{jaxlib}-{cpu}-{cpu_flags}-{cores}-cores".format_map(facts)
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)


def stored_file() -> Path:
    """Return where the hashes of this machine type are stored, whether or not they are."""
    return Path(__file__).with_name("recorded") / f"{key_of(environment())}.json"


@functools.cache
def compiler_flags() -> str:
    """Return the flags of `make test`, whatever this process was started with."""
    return OLDER_LOOPS if known(OLDER_LOOPS) else ""


def variables(checkout: Path, folder: Path, cache: Path, devices: int) -> dict[str, str]:
    """Return the environment of a command: the checkout's code, one device count, nothing of the caller's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return kept | {
        "PYTHONPATH": str(checkout / "src"),
        "BESSEMER_HOME": str(folder / "home"),
        "MPLBACKEND": "Agg",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "XLA_FLAGS": compiler_flags(),
    }


def record(
    checkout: Path, names: Iterable[str] | None = None, cache: Path | None = None, quiet: bool = False
) -> Record:
    """Run the cases (default: all) with the code under `checkout`/src and return the record.

    cache: a folder for compiled programs, reused between recordings; default: one that goes with the runs.
    """
    chosen = with_needs(CASES if names is None else names)
    found: Record = {"format": FORMAT, "environment": environment(), "cases": {}}
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        folder = Path(temporary).resolve()
        write_data(folder)
        cache = (cache or folder / "compiled").resolve()
        check_code(checkout, variables(checkout, folder, cache, 1), folder)
        for name in chosen:
            began = time.monotonic()
            run_case(name, checkout, folder, cache)
            found["cases"][name] = results(folder / "runs" / name, folder)
            if not quiet:
                print(f"{name:<40} {time.monotonic() - began:6.1f} s", flush=True)
    return found


def check_code(checkout: Path, environ: dict[str, str], folder: Path) -> None:
    """Raise RunFailed unless the commands import the checkout's own code."""
    command = [sys.executable, "-c", "import bessemer; print(bessemer.__file__)"]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    if not Path(done.stdout.strip() or "/").is_relative_to(checkout.resolve() / "src"):
        raise RunFailed(f"{checkout}: commands import {done.stdout.strip() or done.stderr.strip()} instead.")


def run_case(name: str, checkout: Path, folder: Path, cache: Path) -> None:
    """Run every command of a case; its run is then under folder/runs/NAME."""
    case = CASES[name]
    words = [f"{key}={value}" for key, value in settings_of(name).items()]
    environ = variables(checkout, folder, cache, case.devices)
    code = 0
    if stop := case.interrupted:
        interval = int(settings_of(name)["logging.checkpoint_interval"])
        saved = stop.step // interval * interval
        words.append("callbacks=[stop.py:Stop]")
        environ["GOLDEN_STEP"], environ["GOLDEN_SIGNAL"] = str(stop.step), stop.signal
        environ["GOLDEN_CHECKPOINT"] = f"runs/{name}/checkpoints/step_{saved:08d}"
        code = stop.exit_code
    command(name, ["train", case.recipe, *words, "--name", name], environ, folder, case, code)
    for resume in case.resumed:
        environ = variables(checkout, folder, cache, resume.devices)
        command(name, ["resume", f"runs/{name}", *resume.words], environ, folder)


def command(
    name: str, words: list[str], environ: dict[str, str], folder: Path, case: Case | None = None, code: int = 0
) -> None:
    """Run `bessemer WORDS` in the processes of the case; raise RunFailed unless each exits with `code`."""
    count = case.processes if case else 1
    if count > 1:
        environ = environ | {"BESSEMER_COORDINATOR": f"127.0.0.1:{free_port()}", "BESSEMER_PROCESSES": str(count)}
    processes = []
    try:
        for number in range(count):
            own = {"BESSEMER_PROCESS_ID": str(number)} if count > 1 else {}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "bessemer", *words],
                    env=environ | own,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # nothing to a process that has ended
    if wrong := [number for number, process in enumerate(processes) if process.returncode != code]:
        process, output = processes[wrong[0]], outputs[wrong[0]]
        raise RunFailed(
            f"{name}: bessemer {' '.join(words)}\nexited with {process.returncode}, not {code}:\n{output[-3000:]}"
        )


def results(run: Path, folder: Path) -> Record:
    """Return what a finished run left: hashes of weights, metrics rows, and settings, of itself and its phases."""
    files = [path for path in sorted(run.rglob("*")) if "checkpoints" not in path.relative_to(run).parts]

    def named(pattern: str) -> dict[str, Path]:
        return {path.relative_to(run).as_posix(): path for path in files if path.match(pattern)}

    configs = {name: settings_in(path, folder) for name, path in named("config.yaml").items()}
    return {
        "weights": {name: tensors_in(path) for name, path in named("*.safetensors").items()},
        "tokenizer": {name: digest(path.read_bytes()) for name, path in named("tokenizer.json").items()},
        "metrics": {name: rows_in(path) for name, path in named("metrics.jsonl").items()},
        "config": {name: found for name, (found, _) in configs.items()},
        "provenance": {name: found for name, (_, found) in configs.items()},
    }


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tensors_in(path: Path) -> dict[str, str]:
    """Return a hash of each tensor of a safetensors file (dtype, shape and bytes), and one of the file: of its bytes,
    or of its tensors where the metadata name the checkpoint that it was made from, whose bytes are not reproducible,
    or have the checksum of a config.json that names the path of a base."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    found = {}
    for name in sorted(header.keys() - {"__metadata__"}):
        about = header[name]
        first, last = about["data_offsets"]
        kind = f"{about['dtype']} {about['shape']} ".encode()
        found[name] = digest(kind + data[8 + length + first : 8 + length + last])
    config = path.with_name("config.json")
    names_base = config.is_file() and "base" in json.loads(config.read_text(encoding="utf-8"))
    whole = path.name in REPRODUCIBLE and not names_base
    return found | {"file": digest(data) if whole else digest(json.dumps(found, sort_keys=True).encode())}


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without what a clock or an allocator decides."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(UNSTABLE)} for row in rows]


def settings_in(path: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a config.yaml by their dotted names, paths relative to the folder of the runs, and
    separately where each came from."""
    text = path.read_text(encoding="utf-8").replace(f"{folder}/", "")
    tree = yaml.safe_load(text)
    provenance = tree.pop("provenance", {})
    return flat(tree), provenance


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def hashes(found: Record) -> Record:
    """Return a record shortened to one hash per file, of what a new setting does not change: to be stored."""

    def short(case: Record) -> Record:
        return {
            "weights": {file: tensors["file"] for file, tensors in case["weights"].items()},
            "tokenizer": case["tokenizer"],
            "metrics": {
                file: digest(json.dumps(rows, sort_keys=True).encode()) for file, rows in case["metrics"].items()
            },
        }

    return {**found, "cases": {name: short(case) for name, case in found["cases"].items()}}
