"""`bessemer completion`: a real bash with the script loaded, and what the scripts of zsh and fish are answered."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bessemer.cli import COMMANDS
from bessemer.config import recipe_names

PROGRAMS = str(Path(sys.executable).parent)
PROMPT = b"ready> "


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with two runs, another directory, and the script of bash."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("first", "second"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "status.json").write_text("{}")
    (folder / "runs" / "no-run").mkdir()
    (folder / "elsewhere" / "third" / "checkpoints").mkdir(parents=True)
    (folder / "chats.jsonl").write_text("")
    script = subprocess.run([f"{PROGRAMS}/bessemer", "completion", "bash"], capture_output=True, text=True, check=True)
    (folder / "script.bash").write_text(script.stdout)
    return folder


@pytest.fixture(scope="module")
def press_tab(place: Path) -> Iterator[Callable[[str], str]]:
    """Type a line and a tab in an interactive bash; return the line with all completions inserted."""
    variables = {**os.environ, "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "TERM": "dumb", "COLUMNS": "9999"}
    terminal, theirs = pty.openpty()
    bash = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        cwd=place,
        env=variables,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)

    def type_in(text: str) -> str:
        """Return what is printed until the next prompt. What is typed is not echoed."""
        os.write(terminal, text.encode())
        seen = b""
        while not seen.endswith(PROMPT):
            assert select.select([terminal], [], [], 60)[0], f"no prompt after {text!r}: {seen!r}"
            seen += os.read(terminal, 65536)
        return seen.decode()

    def press(line: str) -> str:
        """Once the line is complete, `echo` is written before it, so that bash prints what stands there."""
        return type_in(f"{line}\t\x01echo '<<' \x05 '>>'\n").partition("<< ")[2].partition(" >>")[0]

    settings = "bind 'set enable-bracketed-paste off'; bind '\"\\t\": insert-completions'"
    type_in(f"stty -echo; source script.bash; {settings}; PS1='ready''> '\n")
    yield press
    bash.kill()
    bash.wait()
    os.close(terminal)


def test_bash_completes_commands(press_tab: Callable[[str], str]) -> None:
    assert press_tab("bessemer re") == "bessemer resume report recipes"
    assert press_tab("bessemer launch ") == "bessemer launch k8s local slurm"


def test_bash_completes_recipes_and_sections(press_tab: Callable[[str], str]) -> None:
    assert press_tab("bessemer train qui") == "bessemer train quickstart"
    assert press_tab("bessemer launch slurm grpo-") == "bessemer launch slurm grpo-multiturn grpo-tools"
    assert press_tab("bessemer config quickstart topo") == "bessemer config quickstart topology."


def test_bash_completes_settings_and_their_values(press_tab: Callable[[str], str]) -> None:
    assert press_tab("bessemer train training.warm") == "bessemer train training.warmup_pct="
    assert press_tab("bessemer train optimization.name=ad") == "bessemer train optimization.name=adafactor adamw"
    assert press_tab("bessemer train logging.wandb=") == "bessemer train logging.wandb=true false"
    assert press_tab("bessemer train init=recipe:toy-start-") == (
        "bessemer train init=recipe:toy-start-guess toy-start-tools"
    )


def test_bash_completes_files_where_a_setting_is_text(press_tab: Callable[[str], str]) -> None:
    assert press_tab("bessemer train training.dataset=cha") == "bessemer train training.dataset=chats.jsonl"
    assert press_tab("bessemer train training.steps=cha") == "bessemer train training.steps=cha"


def test_bash_completes_options(press_tab: Callable[[str], str]) -> None:
    assert press_tab("bessemer sample first --temp") == "bessemer sample first --temperature"
    assert press_tab("bessemer compare --against f") == "bessemer compare --against flops"


def test_bash_completes_runs_of_the_directory_that_is_named(press_tab: Callable[[str], str]) -> None:
    assert press_tab("bessemer resume ") == "bessemer resume first second"
    assert press_tab("bessemer compare first runs/s") == "bessemer compare first runs/second"
    assert press_tab("bessemer sample --runs elsewhere ") == "bessemer sample --runs elsewhere third"


def ask(shell: str, line: str, place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What a script of the shell asks for the line up to the cursor."""
    variables = {**os.environ, "COMPLETED_LINE": line, "_BESSEMER_COMPLETE": f"{shell}_complete"}
    command = [sys.executable, *options, "-m", "bessemer"]
    return subprocess.run(command, env=variables, cwd=place, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_get_whole_words_with_help(shell: str, place: Path) -> None:
    found = ask(shell, "bessemer train training.batch_s", place).stdout.splitlines()
    assert len(found) == 1 and found[0].startswith("plain\ttraining.batch_size=\tsequences per optimizer step")
    found = ask(shell, "bessemer train init=recipe:toy-start-t", place).stdout.splitlines()
    assert [line.split("\t")[:2] for line in found] == [["plain", "init=recipe:toy-start-tools"]]
    names = [line.split("\t")[1] for line in ask(shell, "bessemer ", place).stdout.splitlines()]
    assert names == list(COMMANDS)


def test_completing_a_setting_does_not_import_jax(place: Path) -> None:
    """A completion must come at once: what takes seconds to import stays out of it."""
    lines = ["bessemer train optimization.name=", "bessemer resume ", "bessemer launch slurm pre", "bessemer "]
    for line in lines:
        result = ask("bash", line, place, "-X", "importtime")
        assert result.stdout.strip(), line
        imported = {found.rpartition("|")[2].strip().split(".")[0] for found in result.stderr.splitlines()}
        assert "click" in imported and not imported & {"jax", "flax", "orbax", "pyarrow", "matplotlib"}, line


def test_a_wrong_command_or_a_hostile_name_completes_to_nothing(place: Path) -> None:
    (place / "runs" / "bad\nplain\tname").mkdir()
    (place / "runs" / "bad\nplain\tname" / "status.json").write_text("{}")
    assert ask("bash", "bessemer trian qui", place).returncode == 0
    assert ask("zsh", "bessemer resume ", place).stdout.split() == ["plain", "first", "plain", "second"]


def test_every_recipe_is_offered(place: Path) -> None:
    found = {line.split("\t")[1] for line in ask("zsh", "bessemer train ", place).stdout.splitlines()}
    assert set(recipe_names()) <= found
