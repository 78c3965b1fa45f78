"""`module:name` and `file.py:name`: one resolver for all that a user can name, and nothing is imported by accident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

from bessemer import registry, user_code
from bessemer.cli import _report_bug
from bessemer.config import resolve
from bessemer.data.stores.catalog import find_source
from bessemer.data.tokenize.chat import ToolCall
from bessemer.errors import InputError, TrainingError
from bessemer.evaluate.evaluator import check_tasks, choose
from bessemer.job import RunDirectory
from bessemer.job.trust import check_trust, named_code
from bessemer.rl.environments.base import EnvironmentSpec
from bessemer.rl.environments.gymnasium import Gymnasium
from bessemer.rl.environments.tools import FunctionTools
from bessemer.rl.rewards import Rewards, RewardSpec
from bessemer.rl.workers import Workers
from bessemer.training.setup.schema import schema_of, with_full_paths
from bessemer.training.state import StepRules, TrainState
from bessemer.user_code import load_attribute

PARTS = """
import dataclasses
import bessemer as bm
from bessemer.rl.environments.base import Environment

@dataclasses.dataclass
class Told(bm.Callback):
    loud: bool = bm.field("logging/loud", default=True, help="say it")

class Mine(bm.BaseTrainer):
    pass

def longer(prompts, completions, **columns):
    return [float(len(text)) for text in completions]

def score(loaded, *, limit=None, batch_size=None):
    return {"metric": "answer", "value": 42.0}

def texts():
    return [{"text": "the red fox"}]

class World(Environment):
    def reset(self, row, seed):
        return "a maze"
    def step(self, completion):
        return None, 1.0, True

class Maze:
    def reset(self, seed=0):
        return "a maze", {}
    def step(self, action):
        return "", 0.0, True, False, {}

def twice(number: int) -> int:
    return 2 * number

TOOLS = [twice]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file of parts, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(user_code, "_by_path", {})
    for name in list(sys.modules):
        if name.startswith(("own_parts", "colorsys")):
            monkeypatch.delitem(sys.modules, name)
    (tmp_path / "own_parts.py").write_text(PARTS)
    yield tmp_path  # type: ignore[misc]
    for name in [name for name in sys.modules if name.startswith("own_parts")]:
        del sys.modules[name]


@pytest.mark.parametrize("word", ["own_parts", "own_parts.py", "./own_parts.py", "{here}/own_parts.py"])
@pytest.mark.parametrize(
    "kind", ["rewards", "callbacks", "evaluations", "datasets", "jobs", "plugins", "environments", "tools", "gymnasium"]
)
def test_a_file_in_the_working_directory_is_found_wherever_code_is_named(here: Path, word: str, kind: str) -> None:
    word = word.format(here=here)
    before = list(sys.path)
    if kind == "rewards":
        total, each = Rewards([RewardSpec(f"{word}:longer")])(["a"], ["four"], {})
        assert total.tolist() == [4.0] and list(each) == ["own_parts:longer"]
    elif kind == "callbacks":
        config = resolve(schema_of, {}, {"callbacks": [f"{word}:Told"], "logging.loud": False})
        assert config["logging.loud"] is False
    elif kind == "evaluations":
        (task,) = check_tasks([f"{word}:score"])
        chosen = choose(task)
        assert chosen.label == "own_parts:score" and chosen.run(None)["value"] == 42.0
    elif kind == "datasets":
        assert find_source(f"{word}:texts").items == [{"text": "the red fox"}]  # type: ignore[union-attr]
    elif kind == "jobs":
        assert registry.jobs.get(f"{word}:Mine").__name__ == "Mine"
    elif kind == "environments":
        workers = Workers(EnvironmentSpec(f"{word}:World"), [], 1, 60.0, 0)
        try:
            outcome = workers.submit(0, {"call": "reset", "row": {}, "seed": 1}).result()
        finally:
            workers.close()
        assert outcome.reply == {"prompt": "a maze", "tools": []}, outcome.failure
    elif kind == "tools":
        assert FunctionTools(f"{word}:TOOLS", match="none").call(ToolCall("twice", {"number": 4})) == "8"
    elif kind == "gymnasium":
        assert Gymnasium(f"{word}:Maze").reset({}, 0) == "a maze"
    else:
        registry.import_plugin(word)
        assert "own_parts" in sys.modules
    assert sys.path == before


def test_an_installed_module_wins_over_a_file_of_its_name(here: Path) -> None:
    """And a file by its path is itself, under another name: nobody else's `import colorsys` finds it."""
    (here / "colorsys.py").write_text("def rgb_to_hsv(*args):\n    return 'mine'\n")
    assert user_code.load_attribute("colorsys:rgb_to_hsv", "reward")(0, 0, 0) == (0.0, 0.0, 0)
    assert user_code.load_attribute("colorsys.py:rgb_to_hsv", "reward")() == "mine"
    assert "hls_to_rgb" in vars(sys.modules["colorsys"])


def test_other_files_of_the_directory_are_not_picked_up(here: Path) -> None:
    (here / "helper.py").write_text("value = 1\n")
    (here / "own_parts_two.py").write_text("import helper\n")
    with pytest.raises(InputError, match=r"own_parts_two.py' line 1 cannot be imported: ModuleNotFoundError"):
        user_code.load_attribute("own_parts_two:x", "reward")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nowhere:fn", r"reward 'nowhere:fn': there is no installed module 'nowhere' and no file 'nowhere.py' in "),
        ("nowhere.py:fn", r"reward 'nowhere.py:fn': there is no file '.*/nowhere.py'"),
        ("own_parts:nothing", "reward 'own_parts:nothing': 'own_parts' has no 'nothing'"),
        ("json:nothing", "'json' has no 'nothing'"),
    ],
)
def test_what_is_not_there_is_named(here: Path, word: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        registry.rewards.get(word)


def test_a_run_remembers_the_file(here: Path) -> None:
    """With its full path, so that it is resumed from any directory, and the mark holds for that file alone."""
    given = {"job": "GRPOTrainer", "objective": "grpo", "callbacks": ["own_parts:Told", "early_stopping"]}
    given |= {"grpo.rewards": ["own_parts.py:longer", "exact_match"], "plugins": ["own_parts"]}  # type: ignore[dict-item]
    given |= {"eval.evaluations": ["own_parts:score", "core:bundle", "bpb"], "training.dataset": "own_parts:texts"}  # type: ignore[dict-item]
    given |= {"grpo.environment": {"name": "own_parts:World", "options": {"target": "own_parts.py:Maze", "x": "a: b"}}}  # type: ignore[dict-item]
    config = with_full_paths(resolve(schema_of, {}, given))
    file = str(here.resolve() / "own_parts.py")
    played = config["grpo.environment"]
    assert played.name == f"{file}:World" and played.options == {"target": f"{file}:Maze", "x": "a: b"}
    assert config["callbacks"] == [f"{file}:Told", "early_stopping"]
    assert [spec.name for spec in config["grpo.rewards"]] == [f"{file}:longer", "exact_match"]
    assert config["plugins"] == [file]
    assert config["eval.evaluations"] == [f"{file}:score", "core:bundle", "bpb"]
    assert config["training.dataset"][0][0].name == f"{file}:texts"
    code = {
        file,
        f"{file}:World",
        f"{file}:Maze",
        "a: b",
        f"{file}:Told",
        f"{file}:longer",
        f"{file}:score",
        f"{file}:texts",
    }
    assert set(named_code(config.tree())) == code


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("grpo: {rewards: [WORD]}", "own_parts:longer"),
        ("grpo: {rewards: [{name: WORD, weight: 2.0}]}", "own_parts.py:longer"),
        ("grpo: {environment: 'WORD'}", "own_parts:World"),
        ("grpo: {environment: {name: guess, options: {target: 'WORD'}}}", "own_parts.py:World"),
        ("callbacks: [WORD]", "own_parts:Told"),
        ("eval: {evaluations: [WORD]}", "own_parts:score"),
        ("eval: {evaluations: [WORD]}", "own_parts.py:score"),
        ("plugins: [WORD]", "own_parts"),
        ("training: {dataset: [[{name: 'WORD'}]]}", "own_parts:texts"),
    ],
)
@pytest.mark.parametrize("decoy", [False, True])
def test_a_run_from_elsewhere_names_no_code_without_trust(here: Path, key: str, word: str, decoy: bool) -> None:
    """Nor with a file beside it that is called like the word, unless that file is what is read."""
    run = RunDirectory(here / "foreign").create()
    run.config.write_text(key.replace("WORD", word) + "\n")
    if decoy:
        (here / word).touch() if word != "own_parts" else None
        if "dataset" in key:
            return
    with pytest.raises(InputError, match="--trust"):
        check_trust(run)
    assert "own_parts" not in sys.modules


@pytest.mark.slow
def test_callbacks_named_by_file_take_part_in_a_run(here: Path) -> None:
    """Through the command line, in a process of its own, from the directory of the file."""
    (here / "corpus.txt").write_text("the red fox runs over the green hill.\n" * 400)
    (here / "own_parts.py").write_text(
        "import bessemer as bm\n\n\nclass Loud(bm.Callback):\n"
        "    def on_metrics(self, loop, row):\n        loop.trainer.say(f'heard {row[\"step\"]}')\n"
    )
    settings = "training.dataset=corpus.txt data.tokenizer=train:300 training.steps=2 training.batch_size=2"
    settings += " model.depth=1 model.width=16 model.head_dim=16 architecture.block_size=16 logging.preview_interval=0"
    settings += " training.validation=false logging.plots=false logging.report_interval=1 callbacks=[own_parts:Loud]"
    command = [sys.executable, "-c", "from bessemer.cli import main; main()", "train", "quickstart", *settings.split()]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}  # as the installed command: the directory is not on the path
    result = subprocess.run([*command, "--name", "a"], env=env, capture_output=True, text=True, cwd=here)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "heard 2" in result.stdout
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    resume = [*command[:3], "resume", str(here / "runs/a"), "--step", "2"]
    again = subprocess.run(resume, env=env, capture_output=True, text=True, cwd=elsewhere)
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads((here / "runs/a/status.json").read_text())["state"] == "done"


@pytest.mark.parametrize(
    ("body", "begins"),
    [
        ("return missing", "error: in {file} line 2: NameError: "),
        ("return jnp.zeros(3) @ jnp.zeros(2)", "error: in {file} line 2: TypeError: "),  # raised by a library
        ("return registry.rewards.entry(3)", "error: called by {file} line 2: TypeError: "),
    ],
)
def test_an_error_in_code_of_your_own_names_its_line(
    here: Path, capsys: pytest.CaptureFixture[str], body: str, begins: str
) -> None:
    (here / "own_parts_faulty.py").write_text(
        f"def score():\n    {body}\nimport jax.numpy as jnp\nfrom bessemer import registry\n"
    )
    score = load_attribute("own_parts_faulty.py:score", "reward")
    with pytest.raises((NameError, TypeError)) as caught:
        score()
    _report_bug(caught.value)
    *_, text = capsys.readouterr().err.splitlines()
    assert text.startswith(begins.format(file=here / "own_parts_faulty.py"))
    assert ("bug in bessemer" in text) == begins.startswith("error: called by")


def test_an_error_in_a_file_that_yours_imports_names_its_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module on Python's path is the user's code as well, and no bug of Bessemer."""
    monkeypatch.syspath_prepend(here)
    (here / "own_parts_help.py").write_text("def fall():\n    return missing\n")
    (here / "own_parts_four.py").write_text("import own_parts_help\n\n\ndef score():\n    own_parts_help.fall()\n")
    with pytest.raises(NameError) as caught:
        load_attribute("own_parts_four.py:score", "reward")()
    _report_bug(caught.value)
    *_, text = capsys.readouterr().err.splitlines()
    assert text.startswith(f"error: in {here / 'own_parts_help.py'} line 2: NameError: ") and "bug" not in text
    (here / "own_parts_five.py").write_text("import own_parts_help\nown_parts_help.fall()\n")
    for word in ("own_parts_five.py", "own_parts_five"):
        with pytest.raises(InputError, match=r"NameError: .*\(.*own_parts_help\.py line 2\)\.$"):
            registry.import_plugin(word)
    reward = Rewards([RewardSpec(f"{here}/own_parts_four.py:score")])
    (here / "own_parts_six.py").write_text("def score(**columns):\n    return missing\n")
    reward = Rewards([RewardSpec("own_parts_six.py:score")])
    with pytest.raises(TrainingError, match=r"NameError: .*\(.*own_parts_six\.py line 2\)\. It was called"):
        reward(["a"], ["four"], {})


def test_a_file_beside_a_plugin_is_imported_as_a_plugin_before_it(here: Path) -> None:
    (here / "own_parts_help.py").write_text("value = 1\n")
    (here / "own_parts_two.py").write_text("from own_parts_help import value\n")
    with pytest.raises(InputError) as caught:
        registry.import_plugin("own_parts_two.py")
    hint = "plugins=[own_parts_help.py,own_parts_two.py]"
    assert hint in str(caught.value) and f"PYTHONPATH={here}" in str(caught.value)
    resolve(schema_of, {}, [hint])
    assert sys.modules["own_parts_two"].value == 1
    (here / "own_parts_pack").mkdir()
    for number, line in enumerate(("import own_parts_pack.deep", "from . import own_parts_help")):
        (here / f"own_parts_three{number}.py").write_text(f"{line}\n")
        with pytest.raises(InputError, match=("PYTHONPATH=", "write `import helper`")[number]):
            registry.import_plugin(f"own_parts_three{number}.py")


STARTS = """
import bessemer as bm

class Mine(bm.BaseTrainer):
    pass

GUARD
    START
"""


@pytest.mark.parametrize(
    "start",
    ["bm.train('quickstart', plugins=[__file__])", "Mine(bm.ExecutionSpec.local('runs')).run()", "bm.resume('runs/a')"],
)
def test_a_script_that_starts_a_run_when_imported_is_refused(here: Path, start: str) -> None:
    """It would train once more inside the import, and again at every resume."""
    text = STARTS.replace("START", start)
    (here / "own_parts_script.py").write_text(text.replace("GUARD", "if True:"))
    with pytest.raises(InputError) as caught:
        resolve(schema_of, "quickstart", ["plugins=[own_parts_script.py]"])
    assert f"line 8 of {here / 'own_parts_script.py'} starts a run" in str(caught.value)
    assert "if __name__ == '__main__':" in str(caught.value) and not list(here.glob("runs/*"))
    (here / "own_parts_script.py").write_text(text.replace("GUARD", "if __name__ == '__main__':"))
    resolve(schema_of, "quickstart", ["plugins=[own_parts_script.py]"])


@pytest.mark.parametrize(("guard", "line"), [("if True:", 4), ("if __name__ == '__main__':", None)])
def test_a_script_without_a_guard_is_noticed_while_it_runs(here: Path, guard: str, line: int | None) -> None:
    script = here / "own_parts_main.py"
    asks = "print(unguarded_line(pathlib.Path(__file__).resolve()))"
    script.write_text(f"import pathlib\nfrom bessemer.user_code import unguarded_line\n{guard}\n    {asks}\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(line)


@pytest.mark.parametrize("returned", [jnp.ones(()), (jnp.ones(()), jnp.ones(())), (jnp.ones(()), 1, 2)])
def test_an_objective_that_returns_something_else_is_told_what_to_return(returned: Any) -> None:
    state = TrainState(
        step=0,
        apply_fn=lambda *arguments: None,
        params={},
        tx=optax.sgd(1.0),
        opt_state=(),
        loss_fn=lambda *arguments: returned,
        rules=StepRules(),
    )
    with pytest.raises(TrainingError, match=r"must return \(Σ loss, Σ weight, \{name: Σ\}\)"):
        state.objective({}, {}, None)
