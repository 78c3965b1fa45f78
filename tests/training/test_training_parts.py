"""What a trainer is made of: horizons and the dial, stages, weights from another run, parts given from Python."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import bessemer as bm
from bessemer.config import Origin, OriginKind, resolve
from bessemer.data import Validation, prepare
from bessemer.errors import InputError, Stopped, TrainingError
from bessemer.job import RestoreableJob
from bessemer.report import write_report
from bessemer.scaling import fine_tuning_rate
from bessemer.topology import make_topology
from bessemer.training import launch
from bessemer.training.display import shipped_rates
from bessemer.training.output import write_setup
from bessemer.training.setup import microbatch
from bessemer.training.setup.compiled import check_step, planned_memory
from bessemer.training.setup.data import CollatedRows
from bessemer.training.setup.horizon import derive, rate_for_weights, repeats, sizes_for_own_data
from bessemer.training.setup.schema import schema_of, without_effect
from bessemer.training.trainer import BaseTrainer

pytestmark = pytest.mark.usefixtures("on_one_device")


def without(settings: dict[str, object], *keys: str) -> dict[str, object]:
    return {key: value for key, value in settings.items() if key not in keys}


def test_the_dial_sets_up_depth_12(tiny: dict[str, object], tmp_path: Path) -> None:
    """The check values of the specification, through the recipe; building a trainer makes no array."""
    small = without(tiny, "training.steps", "training.batch_size", "model.depth", "model.width", "model.head_dim")
    settings = {**small, "model.depth": 12, "model.vocab_size": 32768}
    trainer = launch.build_trainer("pretrain", settings, name="dial", root=tmp_path)
    assert trainer.model_parts.counts["scaling"] == 110_100_480
    assert trainer.tokens_per_step == 2**19
    assert trainer.steps == int(10.5 * 110_100_480) // 2**19
    assert trainer.config["optimization/lr_multiplier"] == 1.0
    assert trainer.config["optimization/weight_decay"] == pytest.approx(0.2, rel=1e-3)
    assert all(entry["reason"] for entry in trainer.derived.values())
    assert not trainer.run_state.is_created


def test_derive_returns_a_configuration_and_leaves_the_one_it_was_given(
    tiny: dict[str, object], tmp_path: Path
) -> None:
    trainer = launch.build_trainer("quickstart", tiny, name="a", root=tmp_path)
    given = {**without(tiny, "training.steps", "training.batch_size"), "training.tokens": 2_000_000}
    config = resolve(schema_of, "pretrain", {**given, "training.batch_tokens": -1}).freeze()
    before = dict(config.values)
    derived = derive(config, trainer.model_parts, epoch_rows=1000)
    assert dict(config.values) == before and config["training/batch_tokens"] == -1
    assert derived.config["training/batch_tokens"] == derived.batch_size * config["architecture/block_size"]
    assert derived.config["training/steps"] == derived.steps
    assert {row.name: row.value for row in derived.rows}["training/steps"] == derived.steps
    assert all(row.reason for row in derived.rows)
    assert derived.config.provenance["training/steps"].kind is OriginKind.DEPTH_DIAL


def test_the_configuration_of_a_built_run_is_frozen_and_has_no_open_micro_batch(
    tiny: dict[str, object], tmp_path: Path
) -> None:
    settings = {**without(tiny, "training.per_device_batch_size"), "training.per_device_batch_size": -1}
    config = resolve(schema_of, "quickstart", settings)
    with bm.configuration(config):
        trainer = BaseTrainer(bm.ExecutionSpec.local(tmp_path, name="frozen"))
    with pytest.raises(TypeError, match=r"seed cannot be set: the configuration is frozen"):
        trainer.config.set("seed", 1, "too late")
    chosen = trainer.config["training/per_device_batch_size"]
    assert chosen > 0 and trainer.settings.per_device_batch_size == chosen
    assert trainer.plan.context.settings is trainer.context.settings is trainer.settings
    assert trainer.plan.context.config is trainer.config
    assert trainer.functions.micro == chosen * trainer.topology.data_parallel
    assert config["training/per_device_batch_size"] == -1, "the caller's configuration is not written to"


def test_settings_that_do_nothing_as_the_others_are_get_a_line(tiny: dict[str, object], tmp_path: Path) -> None:
    given = {"lora.alpha": 32, "guard.spike_action": "rollback", "data.crossfade": "cosine", "lora.init": "kaiming"}
    trainer = launch.build_trainer("quickstart", {**tiny, **given}, name="a", root=tmp_path)
    assert sorted(without_effect(trainer.config, len(trainer.stages))) == [
        "data.crossfade has no effect, as the run has one stage",
        "guard.spike_action has no effect, as guard.spike_sigma is 0.0",
        "lora.alpha has no effect, as lora.rank is 0",
    ]
    unused = {"model.experts_active": 3, "model.expert_groups": 2, "architecture.experts.bias_rate": 0.5}
    dense = launch.build_trainer("quickstart", {**tiny, **unused}, name="c", root=tmp_path)
    assert sorted(without_effect(dense.config, 1)) == [
        "architecture.experts.bias_rate has no effect, as model.experts is 0",
        "model.expert_groups has no effect, as model.experts is 0",
        "model.experts_active has no effect, as model.experts is 0",
    ]
    unused = {"model.experts": 4, "architecture.experts.aux_loss": 0.5, "architecture.experts.group_score": "max"}
    sparse = launch.build_trainer("quickstart", {**tiny, **unused}, name="d", root=tmp_path)
    assert sorted(without_effect(sparse.config, 1)) == [
        "architecture.experts.aux_loss has no effect, as architecture.experts.balance is bias",
        "architecture.experts.group_score has no effect, as model.expert_groups is 0",
    ]
    working = {"guard.spike_sigma": 6, "guard.spike_action": "rollback", "lora.rank": 2, "lora.alpha": 32}
    other = launch.build_trainer("quickstart", {**tiny, **working}, name="b", root=tmp_path)
    assert not [*without_effect(other.config, len(other.stages))]


@pytest.mark.parametrize(
    ("horizon", "steps"),
    [({"training.tokens": 1300}, 10), ({"training.epochs": 1}, None), ({"training.flops": 1e9}, None)],
)
def test_horizons(horizon: dict[str, object], steps: int | None, tiny: dict[str, object], tmp_path: Path) -> None:
    trainer = launch.build_trainer(
        "quickstart", {**without(tiny, "training.steps"), **horizon}, name="h", root=tmp_path
    )
    if "training.epochs" in horizon:
        steps = trainer.data.plan.rows // 8
    if "training.flops" in horizon:
        steps = round(1e9 / (trainer.model_parts.flops_per_token * 128))
    assert trainer.steps == steps


def test_a_little_text_many_times_is_said_to_who_did_not_choose_it() -> None:
    mine = resolve(schema_of, "quickstart", ["training.dataset=my.txt"])
    [said] = repeats(mine, 19.75)
    assert "20 times" in said and "training.epochs=4" in said
    assert not repeats(mine, 3.0)
    assert not repeats(resolve(schema_of, "quickstart", ["training.steps=1000"]), 19.75)


OWN = ["init=models/llama", "training.dataset=chats.jsonl"]


@pytest.mark.parametrize(
    ("recipe", "words", "parameters", "rate"),
    [
        ("sft", [], 1_240_000_000, 1.8e-5),
        ("sft", [], 8_030_000_000, 7.1e-6),
        ("sft", ["lora.rank=16"], 1_240_000_000, 1.9e-4),
        ("sft", ["lora.rank=16", "optimization.schedule=cosine"], 8_030_000_000, 1.2e-4),
        ("sft", [], 150_000, 1e-3),  # the recipe's own, for its own model
        ("dpo", [], 8_030_000_000, 4.7e-7),
        ("dpo", ["lora.rank=16"], 8_030_000_000, 7.9e-6),
        ("grpo", [], 1_240_000_000, 9e-7),
        ("grpo", ["objective=dapo", "lora.rank=16"], 8_030_000_000, 5.9e-6),
        ("reward", [], 8_030_000_000, 3.5e-6),
    ],
)
def test_rates_follow_from_the_size_of_the_weights(recipe: str, words: list[str], parameters: int, rate: float) -> None:
    """The recipes train tiny models: their rates on a model from elsewhere would undo what it knows."""
    derived = rate_for_weights(resolve(schema_of, recipe, [*OWN, *words]), parameters)
    assert derived is not None and derived.value == rate
    assert f"{parameters:,} parameters" in derived.reason


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("sft", [*OWN, "optimization.lr=3e-4"]),
        ("sft", [*OWN, "optimization.name=lion"]),
        ("sft", OWN[1:]),  # from the recipe's own toy, which its rate is for
        ("grpo", []),
        ("quickstart", OWN),
    ],
)
def test_rates_that_were_given_or_fit_stay(recipe: str, words: list[str]) -> None:
    config = resolve(schema_of, recipe, words)
    if words == OWN[1:]:
        config.set("init", "runs/toy-base", Origin(OriginKind.BASE_RUN, "toy"))
    assert rate_for_weights(config, 1_000_000_000) is None


def test_rates_of_a_demonstration_on_weights_of_ones_own_get_a_note() -> None:
    config = resolve(schema_of, "sft", [*OWN, "optimization.name=muon"])
    [note] = shipped_rates(config, 1_240_000_000)
    assert "optimization.name=adamw optimization.lr=1.8e-05" in note
    derived = resolve(schema_of, "grpo", OWN)
    derived.set("optimization/lr", 9e-7, "the formula's")
    assert not shipped_rates(derived, 1_240_000_000)
    assert not shipped_rates(
        resolve(schema_of, "sft", [*OWN, "optimization.name=muon", "optimization.lr_multiplier=0.1"]), 10**9
    )


@pytest.mark.parametrize("name", ["lion", "sgd", "adafactor", "muon"])
@pytest.mark.parametrize("recipe", ["sft", "grpo", "quickstart"])
@pytest.mark.parametrize("words", [OWN, OWN[:1]])
def test_no_optimizer_keeps_a_demonstrations_rate_silently(name: str, recipe: str, words: list[str]) -> None:
    """Lion under sft took 1e-3, the recipe's rate for AdamW and a tiny model, without a word; so did a run of own
    weights on the recipe's data, and one whose data was passed in Python."""
    [note] = shipped_rates(resolve(schema_of, recipe, [*words, f"optimization.name={name}"]), 1_240_000_000)
    assert "optimization.name=adamw optimization.lr=" in note
    rate = "lr_multiplier" if name == "muon" else "lr"
    given = [*words, f"optimization.name={name}", f"optimization.{rate}=0.01"]
    assert not shipped_rates(resolve(schema_of, recipe, given), 1_240_000_000)
    assert not shipped_rates(resolve(schema_of, recipe, [f"optimization.name={name}"]), 1_240_000_000)


def test_adamw_without_a_derived_rate_gets_a_note() -> None:
    [note] = shipped_rates(resolve(schema_of, "quickstart", [*OWN, "optimization.name=adamw"]), 1_240_000_000)
    assert "Try optimization.lr=1.8e-05" in note


@pytest.mark.parametrize("recipe", ["sft", "dpo", "grpo", "reward"])
def test_rates_follow_from_the_weights_whatever_the_data(recipe: str, tmp_path: Path) -> None:
    """Own weights on the recipe's data, and both in a recipe file of one's own, kept the toy's rate."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: {recipe}\ninit: models/llama\ntraining: {{dataset: chats.jsonl}}\n")
    wanted = rate_for_weights(resolve(schema_of, recipe, OWN), 1_240_000_000)
    assert wanted is not None
    assert rate_for_weights(resolve(schema_of, recipe, OWN[:1]), 1_240_000_000) == wanted
    own = resolve(schema_of, str(mine))
    assert rate_for_weights(own, 1_240_000_000) == wanted
    sizes = sizes_for_own_data(own, 300, own_rows=False, parallel=1)
    assert sizes == sizes_for_own_data(resolve(schema_of, recipe, OWN), 300, own_rows=False, parallel=1)


@pytest.mark.parametrize("recipe", ["sft", "dpo", "grpo", "reward"])
@pytest.mark.parametrize("adapters", [[], ["lora.rank=16"]])
def test_the_advised_rate_is_the_one_that_would_be_derived(recipe: str, adapters: list[str]) -> None:
    """GRPO was advised 20 times the rate that AdamW would get from here, as the safer one."""
    [note] = shipped_rates(resolve(schema_of, recipe, [*OWN, *adapters, "optimization.name=muon"]), 1_240_000_000)
    derived = rate_for_weights(resolve(schema_of, recipe, [*OWN, *adapters]), 1_240_000_000)
    assert derived is not None and note.endswith(f"optimization.lr={derived.value:g}")
    if not adapters:
        assert derived.value < resolve(schema_of, recipe, [])["optimization/lr"]


@pytest.mark.parametrize(
    ("recipe", "words", "rows", "parallel", "expected"),
    [
        ("sft", [], 100_000, 1, {"training/steps": None, "training/epochs": 2, "training/batch_size": 16}),
        ("finetune-lora", [], 100_000, 8, {"training/steps": None, "training/epochs": 2, "training/batch_size": 16}),
        ("finetune-qlora", [], 100_000, 8, {"training/steps": None, "training/epochs": 2, "training/batch_size": 16}),
        ("sft", [], 300, 1, {"training/steps": None, "training/epochs": 2, "training/batch_size": 4}),
        ("sft", [], 10, 8, {"training/steps": None, "training/epochs": 2, "training/batch_size": 8}),
        ("sft", ["training.steps=7"], 300, 1, {"training/batch_size": 16}),
        ("sft", ["training.steps=7"], 10, 1, {"training/batch_size": 8}),
        ("sft", ["training.epochs=5"], 300, 1, {"training/batch_size": 8}),
        ("sft", ["training.epochs=0.5"], 10, 1, {"training/batch_size": 1}),
        ("sft", ["training.batch_size=3"], 300, 1, {"training/steps": None, "training/epochs": 2}),
        ("sft", ["training.steps=7", "training.batch_tokens=4096"], 300, 1, {}),
        ("dpo", [], 300, 1, {}),
    ],
)
def test_own_data_decides_passes_and_batch(
    recipe: str, words: list[str], rows: int, parallel: int, expected: dict[str, object]
) -> None:
    """The recipes' own 200 steps of 32 rows are for the demonstration with a tiny model."""
    config = resolve(schema_of, recipe, [*OWN, "architecture.block_size=2048", *words])
    derived = sizes_for_own_data(config, rows, own_rows=False, parallel=parallel)
    assert {row.name: row.value for row in derived} == expected
    assert all("your own data" in row.reason for row in derived)


def test_finetune_qlora_is_finetune_lora_over_nf4() -> None:
    lora, qlora = (resolve(schema_of, name, OWN).values for name in ("finetune-lora", "finetune-qlora"))
    assert {key: value for key, value in qlora.items() if lora[key] != value} == {"lora/quantize": "nf4"}


def test_a_demonstration_keeps_its_own_steps_and_batch() -> None:
    config = resolve(schema_of, "finetune-lora", [])
    config.set("init", "runs/toy-start-base", Origin(OriginKind.BASE_RUN, "toy-start"))
    assert sizes_for_own_data(config, 10_000, own_rows=False, parallel=1) == []


@pytest.mark.slow
def test_a_fine_tuning_run_derives_passes_and_resumes_with_them(tiny: dict[str, object], tmp_path: Path) -> None:
    base = launch.build_trainer("quickstart", {**tiny, "training.steps": 1}, name="base", root=tmp_path)
    base.run()
    data = tmp_path / "chats.jsonl"
    turns = [("user", "hello"), ("assistant", "good day")]
    rows = [{"messages": [{"role": r, "content": f"{c} {n}"} for r, c in turns]} for n in range(200)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {"init": str(tmp_path / "base"), "training.dataset": str(data), "eval.evaluations": []}
    trainer = launch.build_trainer("finetune-lora", words, name="tuned", root=tmp_path)
    epoch = trainer.data.plan.rows
    assert trainer.config["training/epochs"] == 2 and trainer.config["training/steps"] is None
    assert trainer.steps == 2 * epoch // trainer.training_batch_size
    trainer.run_directory.create()
    write_setup(trainer.plan, trainer.branches)
    again = launch.reopen(tmp_path / "tuned")
    assert (again.steps, again.training_batch_size) == (trainer.steps, trainer.training_batch_size)


@pytest.mark.slow
def test_a_fine_tuning_run_derives_its_rate_and_resumes_with_it(tiny: dict[str, object], tmp_path: Path) -> None:
    base = launch.build_trainer("quickstart", {**tiny, "training.steps": 1}, name="base", root=tmp_path)
    base.run()
    data = tmp_path / "chats.jsonl"
    turns = [("user", "hello"), ("assistant", "good day")]
    rows = [{"messages": [{"role": r, "content": f"{c} {n}"} for r, c in turns]} for n in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {"init": str(tmp_path / "base"), "training.dataset": str(data), "training.steps": 1}
    words |= {"training.batch_size": 2, "eval.evaluations": [], "training.validation": False}
    trainer = launch.build_trainer("sft", words, name="tuned", root=tmp_path)
    total = trainer.model_parts.counts["total"]
    assert trainer.config["optimization/lr"] == fine_tuning_rate(total).value
    assert "parameters" in trainer.derived["optimization.lr"]["reason"]
    trainer.run_directory.create()
    write_setup(trainer.plan, trainer.branches)
    again = launch.reopen(tmp_path / "tuned")
    assert again.config["optimization/lr"] == trainer.config["optimization/lr"]


def test_a_state_larger_than_the_machine_is_refused_before_it_is_made(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing would say so: the system kills the process, after minutes."""
    trainer = launch.build_trainer("quickstart", tiny, name="large", root=tmp_path)
    monkeypatch.setattr(microbatch, "machine_memory", lambda: 1000)
    with pytest.raises(InputError, match=r"optimizer's state take .* GiB, and this machine has .*bessemer plan"):
        trainer.run()
    assert not (tmp_path / "large").exists()


def step_total(trainer: Any, per_device: int) -> int:
    functions = trainer.functions
    with trainer.topology.scope():
        abstract, placed = functions.abstract_state, functions.state_shardings
        needed = planned_memory(trainer.plan, trainer.hooks, abstract, placed, per_device)
    assert needed is not None
    return needed


@pytest.mark.slow
@pytest.mark.parametrize("fits", [1, pytest.param(2, marks=pytest.mark.long)])
def test_out_of_memory_names_the_largest_micro_batch_that_fits(
    fits: int, tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a batch may not fit either; what is named has been compiled."""
    wide = {**tiny, "training.batch_size": 8, "training.per_device_batch_size": 8, "architecture.block_size": 256}
    trainer = launch.build_trainer("quickstart", wide, name="large", root=tmp_path)
    limit = (step_total(trainer, fits) + step_total(trainer, 2 * fits)) // 2
    monkeypatch.setattr(microbatch, "machine_memory", lambda: limit)
    with pytest.raises(
        TrainingError, match=rf"out of memory before the first step.*resume .* training.per_device_batch_size={fits} \("
    ):
        trainer.run()
    assert trainer.run_directory.read_status()["exit_code"] == 3
    resumed = launch.reopen(tmp_path / "large", [f"training.per_device_batch_size={fits}"])
    resumed.compile_aot()
    check_step(resumed.plan, resumed.hooks, resumed.functions)


@pytest.mark.slow
def test_out_of_memory_says_when_no_micro_batch_fits(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = launch.build_trainer("quickstart", tiny, name="large", root=tmp_path)
    limit = step_total(trainer, 1) - 1
    monkeypatch.setattr(microbatch, "machine_memory", lambda: limit)
    with pytest.raises(TrainingError, match=r"No micro-batch fits: even one sequence") as raised:
        trainer.run()
    assert "resume" not in str(raised.value) and "architecture.remat=block" in str(raised.value)
    config = trainer.config.replace({"architecture/remat": ["block"]}, "test")
    assert "remat" not in microbatch.without_a_fit(config, 1, 2, 3)  # already so
    huge = microbatch.without_a_fit(config, 331 * 2**30, 331 * 2**30, 80 * 2**30)
    assert "block_size" not in huge and "lora.rank" in huge and "topology.fsdp" in huge


@pytest.mark.parametrize(("limit", "size"), [(0, None), (1, 1), (5, 4), (8, 8), (100, 12)])
def test_the_largest_that_fits_is_found_by_bisection(limit: int, size: int | None) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    assert microbatch.largest_fitting([12, 8, 6, 4, 3, 2, 1], fits) == size
    assert len(tried) <= 3


def test_an_epoch_of_a_mixture_ends(tiny: dict[str, object], corpus: Path, tmp_path: Path) -> None:
    """Two passes over all rows of all sources, though the rates use up the smaller source first."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(corpus.read_text().splitlines(keepends=True)[:8]))
    settings = {
        **without(tiny, "training.steps"),
        "training.dataset": [{"name": str(corpus), "rate": 0.5}, {"name": str(few), "rate": 0.5}],
        "training.epochs": 2,
    }
    trainer = launch.build_trainer("quickstart", settings, name="m", root=tmp_path)
    drawn = trainer.data.plan.shares.before(trainer.steps)
    passes = [count / len(rows) for count, rows in zip(drawn, trainer.data.plan.sources, strict=True)]
    assert trainer.steps == 2 * trainer.data.plan.rows // 8
    assert max(passes) > 2 > min(passes) > 0


def test_what_is_asked_of_prepared_data_in_vain_is_said(
    tiny: dict[str, object], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    store = tmp_path / "store"
    prepare([str(corpus)], store, bm.Tokenizer.train(texts, 300), val_fraction=0.2)
    plain = {**without(tiny, "data.val_fraction"), "training.dataset": str(store), "data.tokenizer": "auto"}
    launch.build_trainer("quickstart", plain, name="a", root=tmp_path)
    assert "no effect" not in capsys.readouterr().out
    launch.build_trainer("quickstart", {**plain, "data.dedup": True}, name="a", root=tmp_path)
    assert "note: data.dedup has no effect: the data is prepared already" in capsys.readouterr().out


def test_what_cropping_and_truncation_leave_out_is_in_the_report(
    tiny: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    """Documents of up to 60 tokens in rows of 16: the shares are numbers, from the data to report.md."""
    styles = [{"name": str(corpus), "style": style, "rate": 0.5} for style in ("CROPPED", "PADDED")]
    trainer = launch.build_trainer("quickstart", {**tiny, "training.dataset": styles}, name="a", root=tmp_path)
    trainer.run_directory.create()
    trainer.write_facts()
    cropped, padded = trainer.data.plan.stats.values()
    assert cropped["cropped_share"] > 0.1 and padded["truncated"] > 0 and padded["truncated_tokens"] > 0
    text = write_report(trainer.run_directory).read_text()
    assert f"| cropped share | {cropped['cropped_share']:.2%} |" in text
    assert re.search(rf"\| truncated \| [^|]+ \| {padded['truncated']} \|", text)


@pytest.mark.slow
def test_stages_change_the_data_at_their_step(tiny: dict[str, object], corpus: Path, tmp_path: Path) -> None:
    settings = {
        **without(tiny, "training.steps"),
        "training.dataset": [[{"name": str(corpus)}], [{"name": str(corpus), "style": "PACKED"}]],
        "training.tokens": [6 * 128, 4 * 128],
        "optimization.schedule": "rewarm",
        "training.warmup_pct": 0.5,
        "training.decay_pct": 0.0,
    }
    trainer = launch.build_trainer("quickstart", settings, name="s", root=tmp_path)
    assert trainer.data.stage_starts == [0, 6] and trainer.steps == 10
    trainer.run()
    assert trainer.step == 10
    rates = [json.loads(line) for line in (tmp_path / "s/metrics.jsonl").read_text().splitlines()]
    by_step = {row["step"]: row["lrm"] for row in rates if "lrm" in row}
    assert by_step[6] == 1.0 and by_step[7] == pytest.approx(0.01), "the schedule warms up again with the stage"


@pytest.mark.slow
def test_weights_from_another_run_and_the_class_from_a_checkpoint(tiny: dict[str, object], tmp_path: Path) -> None:
    first = launch.build_trainer("quickstart", {**tiny, "training.steps": 3}, name="first", root=tmp_path)
    first.run()
    second = launch.build_trainer("quickstart", {**tiny, "init": "first"}, name="second", root=tmp_path)
    assert second.step == 0 and not second.done, "only weights are taken: never 'already done'"
    for a, b in zip(*map(jax.tree.leaves, (first.state.params, second.state.params)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(second.state.opt_state) if leaf.ndim == 2)
    spec = bm.ExecutionSpec("first", root=tmp_path, topology=make_topology(devices=jax.devices()[:1]))
    again = RestoreableJob.from_checkpoint(tmp_path / "first", spec)
    assert isinstance(again, BaseTrainer) and again.step == 3 and again.done


@pytest.mark.slow
def test_resume_from_an_older_checkpoint_is_the_same_run(tiny: dict[str, object], tmp_path: Path) -> None:
    whole = launch.build_trainer("quickstart", tiny, name="a", root=tmp_path)
    whole.run()
    rows = (tmp_path / "a/metrics.jsonl").read_text().splitlines()
    back = launch.reopen(tmp_path / "a", step=6)
    assert back.step == 6
    assert 9 in back.checkpoint_manager.committed(), "nothing is set aside before the run owns its directory"
    back.run()
    for a, b in zip(*map(jax.tree.leaves, (whole.state.params, back.state.params)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    kept = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in kept] == [json.loads(row)["step"] for row in rows]


@pytest.mark.slow
def test_a_list_and_a_collator_from_python(tiny: dict[str, object], corpus: Path, tmp_path: Path) -> None:
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    tokenizer = bm.Tokenizer.train(texts, 300)
    settings = {**without(tiny, "training.dataset", "data.tokenizer"), "training.steps": 2}
    run = launch.build_trainer(
        "quickstart",
        settings,
        name="list",
        root=tmp_path,
        dataset_train=texts,
        dataset_eval=texts[:4],
        tokenizer=tokenizer,
    )
    assert run.validates and set(run.batch()) >= {"input_ids", "target_ids", "loss_mask"}
    collect = run.create_collect_function(16, "keep_start")
    given = launch.build_trainer(
        "quickstart",
        {**settings, "training.validation": False},
        name="collated",
        root=tmp_path,
        dataset_train=texts,
        data_collator=collect,
        tokenizer=tokenizer,
    )
    given.run()
    assert given.step == 2
    with pytest.raises(InputError, match="missing"):
        launch.build_trainer(
            "quickstart",
            settings,
            name="bad",
            root=tmp_path,
            dataset_train=texts,
            tokenizer=tokenizer,
            data_collator=lambda examples: {"input_ids": np.zeros((len(examples), 16), np.int32)},
        )


def test_a_collator_may_leave_out_segments_and_must_return_the_same_fields(tmp_path: Path) -> None:
    def collate(examples: list[int]) -> dict[str, np.ndarray]:
        ids = np.repeat(np.array(examples, np.int32)[:, None], 8, axis=1)
        batch = {"input_ids": ids, "target_ids": ids, "loss_mask": np.ones(ids.shape, np.float32)}
        return batch | ({"positions": ids} if examples[-1] == 5 else {})

    rows = CollatedRows([0, 1, 2], collate, 8)
    held_out = Validation([(bm.Sampling("given"), rows)], 3).batch(1, 2)  # one real row and one blank
    assert sorted(held_out["target_ids"].max(1).tolist())[0] == -1 and held_out["loss_mask"].sum() == 8
    with pytest.raises(InputError, match=r"returned input_ids .* positions .* the same fields"):
        CollatedRows([0, 5], collate, 8).get(np.arange(2))


def test_a_spec_without_topology_is_an_assertion(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="topology"):
        BaseTrainer(bm.ExecutionSpec("x", root=tmp_path))


def test_sharded_init_makes_arrays_on_their_devices() -> None:
    from bessemer.models.gpt import GPT
    from bessemer.topology import TopologySettings

    mesh = make_topology(TopologySettings(data=1, fsdp=8)).mesh
    model = GPT(depth=1, width=32, head_dim=16, vocab_size=64, block_size=16)
    variables, placed = BaseTrainer.sharded_init(model, jax.random.key(0), np.zeros((1, 4), np.int32), mesh=mesh)
    head: Any = variables["params"]["head"]
    assert head.sharding == placed["params"]["head"] and len(head.addressable_shards) == 8


@pytest.mark.slow
def test_a_run_with_given_data_is_resumed_only_with_it(tiny: dict[str, object], corpus: Path, tmp_path: Path) -> None:
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    tokenizer = bm.Tokenizer.train(texts, 300)
    settings = {**without(tiny, "training.dataset", "data.tokenizer"), "training.time_limit": 0.001}
    given = {"dataset_train": texts, "tokenizer": tokenizer}
    trainer = launch.build_trainer("quickstart", settings, name="own", root=tmp_path, **given)
    with pytest.raises(Stopped):
        trainer.run()
    with pytest.raises(InputError):
        bm.resume("own", runs=tmp_path)
    run = bm.resume("own", runs=tmp_path, **{"training.time_limit": 1000}, **given)
    assert run.status["state"] == "done" and run.status["step"] == 10


@pytest.mark.slow
def test_weights_from_one_checkpoint(tiny: dict[str, object], tmp_path: Path) -> None:
    first = launch.build_trainer("quickstart", {**tiny, "training.steps": 6}, name="first", root=tmp_path)
    first.run()
    path = first.checkpoint_manager.path(3)
    second = launch.build_trainer("quickstart", {**tiny, "init": str(path)}, name="second", root=tmp_path)
    assert second.config["init"] == str(path)
    newest = launch.build_trainer("quickstart", {**tiny, "init": "first"}, name="third", root=tmp_path)
    assert newest.config["init"].endswith("step_00000006"), "the choice is kept, so a restart takes the same weights"
    with pytest.raises(InputError, match="no run 'frist'"):
        launch.build_trainer("quickstart", {**tiny, "init": "frist"}, name="fourth", root=tmp_path)
    assert not (tmp_path / "fourth").exists()


def test_weights_of_another_shape_are_refused(tiny: dict[str, object], tmp_path: Path) -> None:
    """Neither cut, nor filled up, nor left fresh with a warning."""
    small = {**tiny, "model.depth": 2, "optimization.name": "adamw", "training.validation": False}
    first = launch.build_trainer("quickstart", small, name="first", root=tmp_path)
    first.run_directory.create()
    first.run_directory.config.write_text(first.config.to_yaml())
    first.save()  # as it begins, without a step
    first.finish()
    for change, words in (
        ({"model.width": 48}, r"has shape \(.*\) there and \(.*48\) here"),
        ({"model.depth": 1}, "is in the checkpoint only"),
    ):
        other = {**small, **change, "init": "first"}
        with pytest.raises(InputError, match=words):
            launch.build_trainer("quickstart", other, name="second", root=tmp_path)
        assert not (tmp_path / "second").exists()


def test_an_early_end_validates_once(tiny: dict[str, object], tmp_path: Path) -> None:
    class End(bm.Callback):
        def on_validation(self, loop: Any, row: dict[str, Any]) -> None:
            if row["step"] == 4:
                loop.request_finish("enough")

    trainer = launch.build_trainer("quickstart", tiny, name="a", root=tmp_path, callbacks=[End()])
    trainer.run()
    rows = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 4]
    assert trainer.run_directory.read_status()["message"] == "enough"
