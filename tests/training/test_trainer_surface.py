"""What a subclass of BaseTrainer may override is what a run goes through; each member does what it documents."""

from __future__ import annotations

import collections
import functools
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

import bessemer as bm
from bessemer.errors import InputError
from bessemer.evaluate import Evaluator
from bessemer.generate.decoder import GenerationResults
from bessemer.objectives.kl import compares
from bessemer.registry import evaluations
from bessemer.topology import TopologySettings, make_topology
from bessemer.training import display, launch
from bessemer.training.callbacks.base import Callback
from bessemer.training.setup.data import CollectFunction

TEXTS = [f"the {n} red foxes and {n + 1} blue dogs run over the green hill near a river" for n in range(24)]

OVERRIDABLE = """evaluator optimizer schedule batch train_step val_step save run compile_aot count_model_parameters
calculate_number_total_flops configure_dataloaders configure_model configure_functions create_collect_function generate
create_generate_function maybe_generate on_step_start on_step_end log_metrics log_weight_distribution
create_progress_bar save_information save_pretrained finish validate snapshot prefetcher make_callbacks
sharded_init"""

CALLED: collections.Counter[str] = collections.Counter()


def counted(name: str) -> Any:
    """`name` of BaseTrainer, as an override that counts its calls."""
    original = bm.BaseTrainer.__dict__.get(name) or next(
        base.__dict__[name] for base in bm.BaseTrainer.__mro__ if name in base.__dict__
    )
    kind = type(original) if isinstance(original, (classmethod, staticmethod)) else None
    function = original.__func__ if kind else original

    @functools.wraps(function)
    def override(*args: Any, **options: Any) -> Any:
        CALLED[name] += 1
        return function(*args, **options)

    return kind(override) if kind else override


Counting = type("Counting", (bm.BaseTrainer,), {name: counted(name) for name in OVERRIDABLE.split()})


class Hooks(Callback):
    """Which hook fired at which step, and whether the trainer's step was that of the loop."""

    def __init__(self) -> None:
        self.fired: list[tuple[str, int]] = []

    def note(self, hook: str, loop: Any) -> None:
        assert loop.trainer.step == loop.step
        self.fired.append((hook, loop.step))

    def on_optimizer_step(self, loop: Any) -> None:
        self.note("step", loop)

    def on_validation_begin(self, loop: Any) -> None:
        self.note("validation begin", loop)

    def on_validation(self, loop: Any, row: dict[str, Any]) -> None:
        self.note("validation", loop)

    def on_epoch_begin(self, loop: Any) -> None:
        self.note("epoch begin", loop)

    def on_epoch_end(self, loop: Any) -> None:
        self.note("epoch end", loop)

    def on_checkpoint(self, loop: Any, step: int) -> None:
        self.note("checkpoint", loop)

    def steps(self, hook: str) -> list[int]:
        return [step for name, step in self.fired if name == hook]


def spec(root: Path, name: str) -> bm.ExecutionSpec:
    return bm.ExecutionSpec(name, root=root, topology=make_topology(devices=jax.devices()[:1]))


@pytest.fixture(scope="module", autouse=True)
def _shared_home(home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        yield


@pytest.fixture(scope="module")
def settings(tiny: dict[str, object]) -> dict[str, object]:
    changes: dict[str, object] = {"training.steps": 3, "logging.preview_interval": 2, "logging.report_interval": 1}
    changes |= {"logging.validation_interval": 2, "logging.checkpoint_interval": 2, "eval.evaluations": ["bpb"]}
    changes |= {"callbacks": ["weight_distribution"], "model.window": "L"}
    left_out = ("training.dataset", "optimization.name")  # given from Python, and the class's own
    return {**{key: value for key, value in tiny.items() if key not in left_out}, **changes}


@pytest.fixture(scope="module")
def ran(settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Hooks, Any]:
    """(trainer, hooks, calls) after a run of three steps on data given from Python."""
    CALLED.clear()
    hooks = Hooks()
    trainer = Counting(
        spec(tmp_path_factory.mktemp("runs"), "counting"),
        dataset_train=TEXTS,
        dataset_eval=TEXTS[:4],
        callbacks=[hooks],
        arguments=settings,
    )
    trainer.run()
    return trainer, hooks, collections.Counter(CALLED)


@pytest.mark.parametrize("name", OVERRIDABLE.split())
def test_a_run_calls_every_method_that_can_be_overridden(ran: tuple[Any, Hooks, Any], name: str) -> None:
    assert ran[2][name] > 0


def test_every_method_that_the_documentation_offers_is_counted() -> None:
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text(encoding="utf-8").split("\n## A trainer\n")[1]
    offered = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    names = {name for cell in offered for name in re.findall(r"`(\w+)", cell)}
    assert len(names) > 20 and names <= set(OVERRIDABLE.split())


def test_how_often_a_run_calls_them(ran: tuple[Any, Hooks, Any]) -> None:
    calls = ran[2]
    assert calls["on_step_start"] == calls["on_step_end"] == calls["log_metrics"] == 3
    assert calls["save"] == 2 and calls["finish"] == calls["save_pretrained"] == calls["save_information"] == 1
    assert calls["maybe_generate"] == calls["generate"] == calls["create_generate_function"] == 2  # steps 2 and 3
    assert calls["validate"] == calls["evaluator"] == calls["log_weight_distribution"] == 3  # steps 0, 2 and 3


def test_a_run_leaves_what_the_methods_made(ran: tuple[Any, Hooks, Any]) -> None:
    directory = ran[0].run_directory
    assert [row["step"] for row in rows(directory.samples)] == [2] * 7 + [3] * 7
    assert "| parameters | count |" in (directory.model / "information.md").read_text()
    validations = [row for row in rows(directory.metrics) if "val_bpb" in row]
    assert [row["eval/bpb"] for row in validations] == pytest.approx([row["val_bpb"] for row in validations])


def test_hooks_see_the_current_step_and_one_pass_has_an_end(ran: tuple[Any, Hooks, Any]) -> None:
    hooks = ran[1]
    assert hooks.steps("step") == [1, 2, 3] and hooks.steps("checkpoint") == [2, 3]
    assert hooks.steps("validation begin") == hooks.steps("validation") == [0, 2, 3]
    assert hooks.fired.index(("validation begin", 2)) < hooks.fired.index(("validation", 2))
    assert hooks.steps("epoch begin")[0] == 0 and hooks.steps("epoch end")[-1] == 3


@pytest.mark.slow
def test_an_epoch_ends_in_a_run_of_one_epoch(settings: dict[str, object], tmp_path: Path) -> None:
    hooks = Hooks()
    one = {**settings, "training.steps": None, "training.epochs": 1, "training.validation": False}
    one |= {"eval.evaluations": [], "callbacks": [], "logging.preview_interval": 0}
    trainer: Any = bm.BaseTrainer(spec(tmp_path, "a"), dataset_train=TEXTS, callbacks=[hooks], arguments=one)
    trainer.run()
    assert hooks.steps("epoch begin") == [0] and hooks.steps("epoch end") == [trainer.steps]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- batches ---------------------------------------------------------------------------------------------------


def test_batch_is_a_function_of_its_number(ran: tuple[Any, Hooks, Any]) -> None:
    trainer = ran[0]
    first, again = trainer.batch(step=0), trainer.batch(step=0)
    np.testing.assert_array_equal(first["input_ids"], again["input_ids"])
    assert (first["input_ids"] != trainer.batch(step=1)["input_ids"]).any()
    for _ in range(2):  # nothing advances
        np.testing.assert_array_equal(trainer.batch()["input_ids"], trainer.batch(step=trainer.step)["input_ids"])
    part = trainer.batch(step=0, rows=slice(2, 4))
    np.testing.assert_array_equal(part["input_ids"], first["input_ids"][2:4])
    held_out = trainer.batch("validation")
    np.testing.assert_array_equal(held_out["input_ids"], trainer.batch("val", step=0)["input_ids"])
    with pytest.raises(InputError, match=r"batch\('typo'\).*'train' or 'validation'"):
        trainer.batch("typo")


@pytest.mark.slow
def test_what_batch_returns_is_what_is_trained_on(settings: dict[str, object], tmp_path: Path) -> None:
    """A field that an override adds reaches the step, and rows that it changes are those that are learned."""

    class Marked(bm.BaseTrainer):
        def batch(self, slice: str = "train", *, step: int | None = None, rows: Any = None) -> Any:
            made = dict(super().batch(slice, step=step, rows=rows))
            made["mark"] = np.full(made["input_ids"].shape, 7.0, np.float32)
            made["loss_mask"] = np.zeros_like(made["loss_mask"])
            made["loss_mask"][:, 0] = 1
            return made

        @classmethod
        def train_step(cls, state: Any, batch: Any, key: Any, accumulate_steps: int) -> Any:
            state, loss, meta = super().train_step(state, batch, key, accumulate_steps)
            return state, loss, {**meta, "mark": batch["mark"].mean()}

    trainer: Any = Marked(
        spec(tmp_path, "a"),
        dataset_train=TEXTS,
        arguments={**settings, "training.validation": False, "eval.evaluations": []},
    )
    trainer.run()
    made = [row for row in rows(trainer.run_directory.metrics) if "loss" in row]
    assert [row["mark"] for row in made] == [7.0] * 3
    assert made[-1]["target_tokens"] == 3 * trainer.training_batch_size


def test_an_override_of_batch_that_cannot_be_asked_for_a_batch_is_refused_where_it_is_defined() -> None:
    with pytest.raises(TypeError, match="must accept the keywords step and rows"):

        class Short(bm.BaseTrainer):
            def batch(self, slice: str = "train") -> Any:  # type: ignore[override]
                return super().batch(slice)


def test_collect_functions(ran: tuple[Any, Hooks, Any], settings: dict[str, object], tmp_path: Path) -> None:
    trainer = ran[0]
    collect = trainer.create_collect_function(8)
    padded = collect(["the red fox", "a"])
    assert padded["input_ids"].shape == (2, 8) and padded["loss_mask"][1].sum() < padded["loss_mask"][0].sum()
    assert isinstance(trainer.data_collator, CollectFunction)

    def only_ids(examples: list[Any]) -> dict[str, Any]:
        """Sixteen tokens of each example, whatever it is."""
        ids = np.array([[300 % (len(text) + k) for k in range(1, 17)] for text in examples], np.int32)
        return {"input_ids": ids, "target_ids": ids, "loss_mask": np.ones(ids.shape, np.float32)}

    class Own(bm.BaseTrainer):
        def create_collect_function(self, max_sequence_length: int, truncation_mode: str = "keep_end") -> Any:
            assert (max_sequence_length, truncation_mode) == (16, "keep_end")
            return only_ids

    own: Any = Own(spec(tmp_path, "a"), dataset_train=TEXTS, arguments=settings)
    ids = own.batch(step=0)["input_ids"]
    assert {tuple(row) for row in ids} <= {tuple(row) for row in only_ids(TEXTS)["input_ids"]}
    given: Any = bm.BaseTrainer(spec(tmp_path, "b"), dataset_train=TEXTS, data_collator=only_ids, arguments=settings)
    assert given.data_collator is only_ids and given.dataset_train is TEXTS and given.dataset_eval is None


OWN_WORDS = [f"zyxwvut {n} zyxwvut qponmlk" for n in range(200)]
"""Words that no corpus of a recipe has."""


def made_by_recipe(settings: dict[str, object], root: Path, data: Any, **parts: Any) -> Any:
    quick = {**settings, "eval.evaluations": [], "callbacks": [], "model.depth": 1}
    quick["training.per_device_batch_size"] = 1  # on eight devices
    return launch.build_trainer("quickstart", quick, name="a", root=root, dataset_train=data, **parts)


def made_by_class(settings: dict[str, object], root: Path, data: Any, **parts: Any) -> Any:
    return bm.BaseTrainer(spec(root, "a"), dataset_train=data, arguments=settings, **parts)


@pytest.mark.parametrize("make", [made_by_recipe, made_by_class])
def test_a_tokenizer_is_trained_on_the_data_that_was_given(
    settings: dict[str, object], tmp_path: Path, make: Any
) -> None:
    """Not on the recipe's corpus. Documents may be texts, rows or conversations."""
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]} for text in OWN_WORDS
    ]
    for data in (OWN_WORDS, [{"text": text} for text in OWN_WORDS], chats):
        trainer = make(settings, tmp_path, data)
        assert trainer.tokenizer.vocab_size == 300
        assert len(trainer.tokenizer.encode(" zyxwvut qponmlk")) <= 4
    with pytest.raises(InputError, match=r"data.tokenizer=train:300 cannot train .* a generator can be read only once"):
        make(settings, tmp_path, (text for text in OWN_WORDS))
    with pytest.raises(InputError, match="there is no text to train a tokenizer on"):
        make(settings, tmp_path, [{"input_ids": [1, 2, 3]}] * 100)


@pytest.mark.slow
def test_a_finished_run_on_given_data_is_not_judged_on_the_recipes_corpus(
    settings: dict[str, object], tmp_path: Path
) -> None:
    small = {**settings, "logging.preview_interval": 0, "training.steps": 1}
    trainer = made_by_recipe(small, tmp_path, OWN_WORDS, dataset_eval=OWN_WORDS[:20])
    trainer.run()
    with pytest.raises(InputError, match="was trained on data given from Python"):
        bm.Run(tmp_path / "a").evaluate(["bpb"])


# --- building --------------------------------------------------------------------------------------------------


def test_the_build_steps_can_be_called_on_a_built_trainer(ran: tuple[Any, Hooks, Any]) -> None:
    trainer = ran[0]
    assert bm.BaseTrainer.configure_model(trainer).counts == trainer.model_parts.counts
    assert bm.BaseTrainer.configure_dataloaders(trainer).plan.fingerprint == trainer.data.plan.fingerprint
    assert bm.BaseTrainer.configure_functions(trainer).micro == trainer.functions.micro
    assert trainer.arguments["training.steps"] == trainer.arguments["training/steps"] == 3


@pytest.mark.slow
def test_a_run_starts_from_what_sharded_init_returns(settings: dict[str, object], tmp_path: Path) -> None:
    """Scaled by an override, on four devices; every other parameter keeps its bits."""

    class Start(bm.BaseTrainer):
        def on_step_start(self, state: Any, step: int) -> Any:
            if step == 0:
                self.first = jax.device_get(state.params)
            return state

    class Doubled(Start):
        @staticmethod
        def sharded_init(model: Any, key: Any, *args: Any, mesh: Any, **kwargs: Any) -> Any:
            variables, placed = bm.BaseTrainer.sharded_init(model, key, *args, mesh=mesh, **kwargs)
            params = variables["params"]
            return {"params": {**params, "head": 2 * params["head"]}}, placed

    short = {**settings, "training.steps": 1, "training.validation": False, "eval.evaluations": []}
    short |= {"callbacks": [], "logging.preview_interval": 0}
    started: list[Any] = []
    for kind in (Start, Doubled):
        topology = make_topology(TopologySettings(fsdp=2, tensor=2), devices=jax.devices()[:4])
        place = bm.ExecutionSpec(kind.__name__, root=tmp_path, topology=topology)
        trainer: Any = kind(place, dataset_train=TEXTS, arguments=short)
        trainer.run()
        started.append(trainer.first)
    plain, doubled = started
    np.testing.assert_array_equal(doubled.pop("head"), 2 * plain.pop("head"))
    jax.tree.map(np.testing.assert_array_equal, doubled, plain)


def test_sharded_init_must_return_the_parameters_of_the_model(settings: dict[str, object], tmp_path: Path) -> None:
    class Cut(bm.BaseTrainer):
        @staticmethod
        def sharded_init(model: Any, key: Any, *args: Any, mesh: Any, **kwargs: Any) -> Any:
            variables, placed = bm.BaseTrainer.sharded_init(model, key, *args, mesh=mesh, **kwargs)
            return {"params": {**variables["params"], "head": variables["params"]["head"][:7]}}, placed

    trainer: Any = Cut(spec(tmp_path, "a"), dataset_train=TEXTS, arguments=settings)
    with pytest.raises(InputError, match=r"Cut\.sharded_init: parameter head must be float32\[.*\] and is"):
        trainer.state  # noqa: B018


# --- checkpoints -----------------------------------------------------------------------------------------------


def same_state(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True)
    return all(bool((np.asarray(x) == np.asarray(y)).all()) for x, y in pairs)


def test_save_and_load_take_a_path(ran: tuple[Any, Hooks, Any], settings: dict[str, object], tmp_path: Path) -> None:
    trainer = ran[0]
    trainer.save(tmp_path / "copies" / "mine")
    assert (tmp_path / "copies/mine/step_00000003/COMMIT").is_file()
    for number, place in enumerate(
        (
            tmp_path / "copies/mine",
            tmp_path / "copies/mine/step_00000003",
            str(trainer.run_directory.path),
            f"{trainer.run_directory.path}/checkpoints/step_00000003",
        )
    ):
        other: Any = bm.BaseTrainer(
            spec(tmp_path, f"run{number}"), dataset_train=TEXTS, dataset_eval=TEXTS[:4], arguments=settings
        )
        assert other.load(place) and other.step == 3 and same_state(other, trainer)
        # the run's own checkpoint of the last step comes before the last validation
        assert other.loop_state.steps_counted == 3 and other.loop_state.last_validation == (3 if number < 2 else 2)
    with pytest.raises(InputError, match="no committed checkpoint"):
        other.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"write a step number, step_NNNNNNNN, or a path such as \./best"):
        other.save("best")
    with pytest.raises(InputError, match="cannot save step 3 under the name"):
        other.save(tmp_path / "step_00000009")
    assert not other.load(9), "a step that was never saved is not there"


# --- evaluation ------------------------------------------------------------------------------------------------


class Counter(Evaluator[Any]):
    """An evaluator of its own kind: it adds a result to those of the tasks."""

    def run(self) -> dict[str, dict[str, Any]]:
        return {**super().run(), "answer": {"metric": "answer", "value": 42.0}}


@pytest.mark.parametrize(("kind", "added"), [(Counter, {"eval/answer"}), (None, set())])
def test_the_trainers_evaluator_judges(settings: dict[str, object], tmp_path: Path, kind: Any, added: set[str]) -> None:
    class Judged(bm.BaseTrainer):
        def evaluator(self) -> Any:
            return kind

    change = {"eval.evaluations": [], "callbacks": [], "logging.preview_interval": 0, "training.steps": 2}
    trainer: Any = Judged(
        spec(tmp_path, "a"), dataset_train=TEXTS, dataset_eval=TEXTS[:4], arguments={**settings, **change}
    )
    trainer.run()
    validations = [row for row in rows(trainer.run_directory.metrics) if "val_loss" in row]
    assert all({key for key in row if key.startswith("eval/")} == added for row in validations) and validations


def test_an_evaluator_can_name_its_model() -> None:
    assert Evaluator[bm.LanguageModel].__origin__ is Evaluator and "bpb" in evaluations


# --- text ------------------------------------------------------------------------------------------------------


def test_generate_has_its_other_names(ran: tuple[Any, Hooks, Any]) -> None:
    trainer = ran[0]
    found = trainer.generate(prompts="the red", max_tokens=3)
    assert isinstance(found, GenerationResults)
    for name in ("generate_unified", "generate_aio"):
        before = CALLED["generate"]
        again = getattr(trainer, name)(prompts="the red", max_tokens=3)
        assert again.generation_results == found.generation_results and CALLED["generate"] == before + 1


# --- showing ---------------------------------------------------------------------------------------------------

METRICS: list[dict[str, Any]] = [{}, {"loss": 2.0}, {"reward": np.float32(0.5), "name": "a"}, {"x": jax.numpy.ones(3)}]


@pytest.mark.parametrize("metrics", METRICS, ids=["none", "loss", "reward", "array"])
@pytest.mark.parametrize("kind", ["rich", "plain", "json", "tqdm", "none"])
def test_log_metrics_takes_any_metrics(
    ran: tuple[Any, Hooks, Any], kind: str, metrics: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    if kind == "tqdm":
        pytest.importorskip("tqdm")
    bar = display.make_progress(kind, Console(file=io.StringIO()), said.append, 10, "step")
    ran[0].log_metrics(metrics, bar, 4)
    bar.close()
    ran[0].log_metrics(metrics, None, 4)
    if kind == "plain" and "reward" in metrics:
        assert said == ["step      4/10  reward 0.5"]
    if kind == "json" and metrics:
        assert json.loads(capsys.readouterr().out).keys() == metrics.keys()


# --- names that mean something else here -----------------------------------------------------------------------


@pytest.mark.slow
def test_gradient_checkpointing_as_a_callback_says_what_to_set(settings: dict[str, object], tmp_path: Path) -> None:
    asked = {**settings, "callbacks": ["gradient_checkpointing"]}
    trainer: Any = bm.BaseTrainer(spec(tmp_path, "a"), dataset_train=TEXTS, arguments=asked)
    with pytest.raises(InputError, match=r"architecture\.remat=block"):
        trainer.run()
    assert not trainer.run_directory.path.exists()
    asked |= {"architecture.remat": "block", "training.steps": 1, "training.validation": False}
    asked |= {"eval.evaluations": [], "logging.preview_interval": 0}
    bm.BaseTrainer(spec(tmp_path, "b"), dataset_train=TEXTS, arguments=asked).run()


# --- KL --------------------------------------------------------------------------------------------------------


def test_a_kl_config_with_one_weight() -> None:
    assert bm.KLConfig(beta=0.2) == bm.KLConfig(beta=(0.2,))  # type: ignore[arg-type]
    assert compares(bm.KLConfig(beta=0.2)) and not compares(bm.KLConfig(beta=0))  # type: ignore[arg-type]
    assert bm.KLConfig(refresh=True).refresh == (True,)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_kl_trainer_starts_with_its_own_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: dict[str, object]
) -> None:
    """Two stages on `fineweb` where a store of that name is; else on text that comes with Python, and it says so."""
    monkeypatch.chdir(tmp_path)
    made: Any = bm.KLDivergenceTrainer(spec(tmp_path, "a"))
    assert [[one.name for one in mixture] for mixture in made.settings.datasets] == [
        ["python-stdlib"],
        ["python-reference"],
    ]
    assert str(made.config.provenance["training/dataset"]).startswith("chosen: there is no store 'fineweb' here")
    assert any("python-stdlib" in note for note in made.config.notes)
    assert [stage.beta for stage in made.stages] == [0.0, 0.1] and made.tokenizer.vocab_size == 8192
    from bessemer.data import Tokenizer, prepare

    prepare([{"text": text * 20} for text in TEXTS], "fineweb", Tokenizer.train(TEXTS, 300), val_fraction=0.1)
    own: Any = bm.KLDivergenceTrainer(spec(tmp_path, "b"))
    assert [[Path(one.name).name for one in mixture] for mixture in own.settings.datasets] == [["fineweb"]] * 2
