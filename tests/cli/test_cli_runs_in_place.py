"""A run that exists: it is never continued, overwritten or changed by accident."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from tests.conftest import words

from bessemer.cli import main
from bessemer.job import RunDirectory, RunLock
from bessemer.training import launch


@pytest.fixture(scope="module")
def finished(tiny: dict[str, object], home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from bessemer.topology import make_topology

    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        patch.setattr(launch, "make_topology", lambda settings: make_topology(settings, devices=jax.devices()[:1]))
        launch.build_trainer("quickstart", {**tiny, "training.steps": 3}, name="mine", root=root).run()
    return root / "mine"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    from bessemer.topology import make_topology

    monkeypatch.setattr(launch, "make_topology", lambda settings: make_topology(settings, devices=jax.devices()[:1]))

    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        text = capsys.readouterr().err.strip()
        assert caught.value.code == 2, text
        return text.splitlines()[-1]

    return call


def before_and_after(path: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file() and p.name not in ("lock",)}


@pytest.mark.slow
def test_train_onto_an_existing_run(finished: Path, tiny: dict[str, object], refused: Callable[..., str]) -> None:
    kept = before_and_after(finished)
    text = refused("train", "quickstart", *words(tiny), "--runs", str(finished.parent), "--name", "mine")
    assert "bessemer resume" in text
    assert before_and_after(finished) == kept


def test_resume_of_a_finished_run_says_so(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["resume", str(finished)])
    assert caught.value.code == 0 and "finished" in capsys.readouterr().out


def test_settings_for_a_finished_run_are_judged_all_the_same(finished: Path, refused: Callable[..., str]) -> None:
    assert "did you mean 'training.steps'" in refused("resume", str(finished), "trainin.steps=20")
    assert "init=RUN" in refused("resume", str(finished), "training.steps=20")


def test_resume_refuses_what_would_change_the_run(finished: Path, refused: Callable[..., str]) -> None:
    text = refused("resume", str(finished), "--step", "3", "training.batch_size=16")
    assert "training.batch_size" in text and "init=RUN" in text


def test_resume_of_nothing_names_what_is_there(finished: Path, refused: Callable[..., str]) -> None:
    assert "mine" in refused("resume", "mien", "--runs", str(finished.parent))


def test_run_directory_in_use(finished: Path, refused: Callable[..., str]) -> None:
    """The lock of a living process in the same directory."""
    with RunLock(RunDirectory(finished)):
        assert "in use by pid" in refused("resume", str(finished), "--step", "3")


def test_checkpoint_of_another_tokenizer(
    finished: Path, corpus: Path, tiny: dict[str, object], tmp_path: Path, refused: Callable[..., str]
) -> None:
    """Weights trained with other ids are not taken, neither by init nor by resume."""
    changed = {**tiny, "data.tokenizer": "train:320", "init": str(finished)}
    text = refused("train", "quickstart", *words(changed), "--runs", str(tmp_path), "--name", "other")
    assert "another tokenizer" in text and "data.tokenizer=" in text


@pytest.mark.slow
def test_changed_data_is_refused_on_resume(
    tiny: dict[str, object], tmp_path: Path, refused: Callable[..., str]
) -> None:
    source = tmp_path / "own.jsonl"
    text = Path(str(tiny["training.dataset"])).read_text()
    source.write_text(text)
    tokenizer = tmp_path / "tokenizer"
    from bessemer.data import Tokenizer

    Tokenizer.train([text] * 3, 300).save(tokenizer)
    settings = {**tiny, "training.dataset": str(source), "data.tokenizer": str(tokenizer), "training.steps": 4}
    trainer = launch.build_trainer("quickstart", settings, name="own", root=tmp_path / "runs")
    trainer.run()
    source.write_text(text + json.dumps({"text": "one more document " * 20}) + "\n")
    message = refused("resume", str(tmp_path / "runs" / "own"), "--step", "3")
    assert "another training data" in message and "init=" in message
