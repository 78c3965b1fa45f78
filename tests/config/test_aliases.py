"""Names of other systems: every answer is a setting that really resolves, and values mean what they meant there."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bessemer.cli import COMMANDS, LazyGroup
from bessemer.cli.options import refuse_flags
from bessemer.cli.train import split_words
from bessemer.config import Schema, recipe_names, resolve
from bessemer.config.aliases import ALIASES, answer, on_hub
from bessemer.config.resolve import select_schema
from bessemer.data.sources.files import find_files
from bessemer.errors import InputError
from bessemer.job.runs import find_run
from bessemer.plan.trainer import planned_trainer
from bessemer.training.setup.schema import schema_of

RECIPES = ("quickstart", "sft", "dpo", "grpo", "kl", "distill")


@cache
def schema(recipe: str) -> Schema:
    return select_schema(schema_of, recipe)


@cache
def every_setting() -> set[str]:
    """Settings of any part, dotted."""
    found = {key for recipe in recipe_names() for key in schema(recipe).settings} | {"training/patience"}
    for family, optimizer, schedule in (("llama", "adamw", "wsd"), ("gpt", "adafactor", "cosine")):
        given = {"model.family": family, "optimization.name": optimizer, "optimization.schedule": schedule}
        found |= set(select_schema(schema_of, given).settings)
    return {key.replace("/", ".") for key in found}


def sample(setting: str) -> str:
    """A value that the setting takes."""
    if setting in ("lora.whole", "grpo.rewards"):
        return "exact_match"
    given = {"model.family": "llama", "optimization.name": "adamw", "optimization.schedule": "cosine"}
    places = [select_schema(schema_of, given), *map(schema, RECIPES)]
    known = next((run[setting] for run in places if setting in run), None)
    if known is None or known.required:
        return "1"
    if known.choices or known.type is bool:
        return str(known.choices[0] if known.choices else "true")
    return str(known.default) if isinstance(known.default, int | float | str) and known.default != -1 else "1"


@cache
def resolved(recipe: str, words: tuple[str, ...]) -> None:
    resolve(schema_of, recipe, [word.replace("=DIR", "=/tmp") for word in words], allow_open=True)


DISTINCT = {id(alias): name for name, alias in ALIASES.items()}.values()  # names that share an answer are tested once


@pytest.mark.parametrize("name", DISTINCT)
def test_every_answer_resolves(name: str) -> None:
    alias = ALIASES[name]
    answered = False
    for recipe in RECIPES:
        run = schema(recipe)
        setting = next((word for word in alias.settings.split() if word in run), alias.settings.split(" ")[0])
        for value in {sample(setting), *alias.values}:
            found = answer(name, value, run.__contains__)
            if found is None or str(found) != run.instead(name, value):
                continue  # a setting of another objective, which the message then names
            answered = True
            resolved(recipe, found.words)
    assert answered
    assert set(re.findall(r"\b[a-z]+(?:\.[a-z_0-9]+)+\b", alias.note)) <= every_setting()
    assert re.fullmatch(r"[a-z0-9_.]+", name)


# (recipe, name, value there, settings here). -1 and 0 as the source system has them.
MEANINGS = [
    # nanochat
    ("quickstart", "--l3-after-layers", "1,2", "architecture.lookup.after_layers=[1,2]"),
    ("quickstart", "--l3-after-layers", "1", "architecture.lookup.after_layers=[1]"),
    ("quickstart", "--core-metric-every", "-1", "eval.core_interval=0"),
    ("quickstart", "--core-metric-every", "0", "eval.core_interval=0"),
    ("quickstart", "--core-metric-max-per-task", "-1", "eval.limit=1000000000"),
    ("quickstart", "--eval-every", "-1", "training.validation=false"),
    ("quickstart", "--eval-every", "0", "training.validation=false"),
    ("quickstart", "--eval-every", "250", "logging.validation_interval=250"),
    ("quickstart", "--sample-every", "-1", "logging.preview_interval=0"),
    ("quickstart", "--sample-every", "0", "logging.preview_interval=0"),
    ("quickstart", "--save-every", "-1", "logging.checkpoint_interval=-1"),
    ("quickstart", "--save-every", "0", "logging.checkpoint_interval=0"),
    ("quickstart", "--target-flops", "-1.0", "training.flops=none"),
    ("quickstart", "--target-param-data-ratio", "-1", "training.ratio=none"),
    ("quickstart", "--depth", "2", "model.depth=2"),
    ("quickstart", "--fp8-recipe", "rowwise", "architecture.fp8.scaling=rowwise architecture.precision=fp8"),
    ("quickstart", "--matrix-lr", "0.02", "optimization.matrix_lr=0.02"),
    ("quickstart", "--adam-beta1", "0.8", "optimization.adam_beta1=0.8"),
    ("quickstart", "--warmup-ratio", "0.1", "training.warmup_pct=0.1"),
    ("quickstart", "--final-lr-frac", "0.05", "optimization.final_lr_frac=0.05"),
    ("quickstart", "--device-type", "cpu", "topology.platform=cpu"),
    # Hugging Face, TRL, PEFT
    ("quickstart", "learning_rate", "2e-5", "optimization.lr=2e-5 optimization.name=adamw"),
    ("sft", "training.learning_rate", "2e-5", "optimization.lr=2e-5"),
    ("sft", "training.lr", 2e-5, "optimization.lr=2e-05"),
    ("sft", "num_train_epochs", "3", "training.epochs=3"),
    ("sft", "max_steps", "20", "training.steps=20"),
    ("sft", "warmup_ratio", "0.03", "training.warmup_pct=0.03"),
    ("sft", "lr_scheduler_type", "linear", "optimization.schedule=wsd training.warmup_pct=0 training.decay_pct=1"),
    ("sft", "lr_scheduler_type", "cosine_with_restarts", "optimization.schedule=sgdr"),
    ("sft", "optim", "adamw_torch_fused", "optimization.name=adamw"),
    ("sft", "optimizer", "adam", "optimization.name=adamw optimization.weight_decay=0"),
    ("sft", "bf16", "True", "architecture.precision=bf16"),
    ("sft", "bf16", False, "architecture.precision=float32"),
    ("sft", "gradient_checkpointing", "True", "architecture.remat=block"),
    ("sft", "eval_strategy", "no", "training.validation=false"),
    ("sft", "save_total_limit", None, "logging.keep_last=1000000"),
    ("sft", "lora.r", "8", "lora.rank=8"),
    ("sft", "lora_alpha", "32", "lora.alpha=32"),
    ("sft", "target_modules", "all-linear", "lora.targets=all-linear"),
    ("sft", "lora_dropout", "0.1", "lora.dropout=0.1"),
    ("sft", "lora.bits", "4", "lora.quantize=nf4"),
    ("sft", "load_in_4bit", "True", "lora.quantize=nf4"),
    ("sft", "load_in_8bit", True, "lora.quantize=int8"),
    ("sft", "optim", "adamw_8bit", "optimization.name=adamw optimization.state_dtype=int8"),
    ("sft", "neftune_noise_alpha", "5", "sft.neftune_alpha=5"),
    ("dpo", "beta", "0.2", "dpo.beta=0.2"),
    ("grpo", "beta", "0.04", "grpo.kl_coef=0.04"),
    ("grpo", "epsilon", "0.2", "grpo.clip_eps=0.2"),
    ("grpo", "num_generations", "4", "grpo.group_size=4"),
    # nanoGPT, MaxText, Levanter, torchtitan
    ("quickstart", "model.n_layer", 2, "model.depth=2"),
    ("quickstart", "init_from", "scratch", "init=none"),
    ("quickstart", "base_num_decoder_layers", "2", "model.depth=2"),
    ("quickstart", "gradient_clipping_threshold", "0", "training.max_grad_norm=0"),
    ("quickstart", "eval_interval", "-1", "training.validation=false"),
    ("quickstart", "trainer.num_train_steps", "20", "training.steps=20"),
    ("quickstart", "trainer.per_device_parallelism", "-1", "training.per_device_batch_size=-1"),
    ("quickstart", "optimizer.min_lr_ratio", "0.1", "optimization.final_lr_frac=0.1"),
    ("quickstart", "parallelism.data_parallel_shard_degree", "1", "topology.fsdp=1"),
    ("quickstart", "activation_checkpoint.mode", "full", "architecture.remat=block"),
    ("quickstart", "checkpoint.interval", "500", "logging.checkpoint_interval=500"),
    ("quickstart", "lr_scheduler.warmup_steps", "10", "optimization.warmup_steps=10"),
]


@pytest.mark.parametrize(("recipe", "name", "value", "words"), MEANINGS)
def test_values_mean_what_they_mean_in_the_source_system(recipe: str, name: str, value: Any, words: str) -> None:
    found = answer(name, value, schema(recipe).__contains__)
    assert found is not None and found.words == tuple(words.split())
    resolve(schema_of, recipe, list(found.words))


@pytest.mark.parametrize(
    "words", sorted({w for recipe, _, _, w in MEANINGS if recipe == "quickstart" and "fp8" not in w})
)
def test_answers_can_be_planned(words: str) -> None:
    """The trainer itself accepts them, beyond the type and range of each. (fp8 needs a GPU that has it.)"""
    planned_trainer("quickstart", words.split(), compiles=False)


@pytest.mark.parametrize(
    "name", ["validation.steps", "data.name", "run.name", "lora.bits", "lora.bias", "guard.alpha", "zzz"]
)
def test_no_suggestion_is_better_than_a_wrong_one(name: str) -> None:
    message = schema("quickstart").unknown(name.replace(".", "/"), 3)
    assert "did you mean" not in message and "write" not in message


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("training.lora_rank", "write lora.rank=3"),
        ("training.lora_quantize", "did you mean 'lora.quantize'?"),
        ("lora_quantize", "did you mean 'lora.quantize'?"),
        ("training.blocksize", "did you mean 'architecture.block_size'?"),
        ("blocksize", "did you mean 'architecture.block_size'?"),
        ("model.chekpoint_interval", "did you mean 'logging.checkpoint_interval'?"),
        ("training.rank", "that name is in another section: lora.rank"),
        ("training.depth", "that name is in another section: model.depth"),
    ],
)
def test_a_setting_of_another_section_is_found(key: str, hint: str) -> None:
    assert schema("quickstart").unknown(key.replace(".", "/"), 3).startswith(f"unknown setting '{key}'")
    assert schema("quickstart").unknown(key.replace(".", "/"), 3).endswith(hint)


@pytest.mark.parametrize("words", ["quickstart training.steps", "training.steps", "training.steps model.depth=2"])
def test_a_setting_without_a_value_is_not_taken_for_a_recipe(words: str) -> None:
    assert refused(*words.split()) == "the setting 'training.steps' has no value: write training.steps=VALUE."


def test_several_unknown_settings_are_named_at_once() -> None:
    message = refused("training.lora_rank=8", "training.rank=4", "zzz=1", "model.stepz=3")
    for key in ("training.lora_rank", "training.rank", "zzz", "model.stepz"):
        assert f"unknown setting '{key}'" in message


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("optimizaton.lr_multiplier", "optimization.lr_multiplier"),
        ("training.stepz", "training.steps"),
        ("trainig.batch_siz", "training.batch_size"),
        ("data.validation_interval", "logging.validation_interval"),
        ("steps", "training.steps"),
        ("sed", "seed"),
    ],
)
def test_misspelled_settings(key: str, setting: str) -> None:
    assert schema("quickstart").unknown(key.replace(".", "/"), 3).endswith(f"did you mean '{setting}'?")


def test_a_setting_of_another_objective_says_how_to_select_it() -> None:
    message = schema("sft").unknown("num_generations", 4)
    assert "write grpo.group_size=4" in message and "add job=GRPOTrainer" in message


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--depth", "12"], "write model.depth=12"),
        (["pretrain", "--depth=12", "training.dataset=x"], "write model.depth=12"),
        (["--eval-every", "-1", "quickstart"], "write training.validation=false"),
        (["--fp8", "pretrain"], "write architecture.precision=fp8"),
        (["--lr", "1e-3", "optimization.name=lion"], "write optimization.lr=1e-3."),
        (["--training.steps", "5"], "settings have no dashes: write training.steps=5"),
        (["--l3-after-layers=1,2"], "write 'architecture.lookup.after_layers=[1,2]'"),
    ],
)
def test_flags_on_the_command_line(words: list[str], instead: str) -> None:
    with pytest.raises(InputError, match=re.escape(instead)):
        split_words(tuple(words))


def refused(*words: str) -> str:
    with pytest.raises(InputError) as caught:
        recipe, overrides = split_words(words)
        resolve(schema_of, recipe, overrides, allow_open=True)
    return str(caught.value)


TRL = "--learning_rate 1e-4 --num_train_epochs 3 --per_device_train_batch_size 4 --model_name_or_path X --bf16"
SFT = "optimization.lr=1e-4 training.epochs=3 training.per_device_batch_size=4 init=X architecture.precision=bf16"


@pytest.mark.parametrize("recipe", ["quickstart", "sft"])
def test_all_flags_are_answered_at_once(recipe: str) -> None:
    message = refused(recipe, *TRL.split(), "--no_such_thing", "training.stepz=3")
    for flag, setting in zip(TRL.split("--")[1:], SFT.split(), strict=True):
        assert f"--{flag.split()[0]}: write {setting}" in message
    assert "--no_such_thing: unknown." in message and "did you mean 'training.steps'?" in message
    together = message.rpartition("Together: ")[2].split()
    assert set(together) - {"optimization.name=adamw"} == set(SFT.split()) and "\n" not in message
    resolve(schema_of, recipe, together)


@pytest.mark.parametrize(
    ("words", "together"),
    [
        ("--lr 1e-4 --optim lion", "optimization.lr=1e-4 optimization.name=lion"),
        ("lr=1e-4 optim=lion", "optimization.lr=1e-4 optimization.name=lion"),
        ("sft learning_rate=1e-4 num_train_epochs=3", "optimization.lr=1e-4 training.epochs=3"),
        ("sft --lr 1e-4 num_train_epochs=3", "optimization.lr=1e-4 training.epochs=3"),
        ("sft --lora_r 32 --use_peft --lora_alpha 8", "lora.rank=32 lora.alpha=8"),
        (
            "--lr_scheduler_type linear --warmup_ratio 0.03",
            "optimization.schedule=wsd training.warmup_pct=0.03 training.decay_pct=1",
        ),
        ("sft --num_generations 4 --lr 1e-4 --seed 3", "optimization.lr=1e-4 seed=3"),
    ],
)
def test_answers_fit_together(words: str, together: str) -> None:
    assert refused(*words.split()).rpartition("Together: ")[2] == together
    recipe = "sft" if words.startswith("sft") else "quickstart"
    resolve(schema_of, recipe, together.split())


def test_names_of_the_hub_get_its_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused("sft", "--model_name_or_path", "Qwen/Qwen2.5-0.5B", "--dataset_name", "trl-lib/Capybara")
    assert message.endswith("Together: init=hf:Qwen/Qwen2.5-0.5B training.dataset=hf:trl-lib/Capybara")
    (tmp_path / "mine").mkdir()
    for path in ("mine/a", "runs/a", "data/a", "x/a.jsonl", "a", "/x/a", "../x", "x/y/z", "hf:x/y"):
        assert on_hub(path) is None
    with pytest.raises(InputError, match=r"hub is named hf:Qwen/Qwen2\.5-0\.5B where"):
        find_run("Qwen/Qwen2.5-0.5B")
    with pytest.raises(InputError, match="hub is named hf:trl-lib/Capybara"):
        find_files("trl-lib/Capybara")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=r"For several, write \[a\.txt,b\.txt\]\."):
        find_files("a.txt,b.txt")


def test_flags_without_a_schema() -> None:
    with pytest.raises(InputError, match=r"write training\.per_device_batch_size=4"):
        refuse_flags(["--device-batch-size", "4"])


def test_commands_and_flags_in_notes_exist() -> None:
    notes = {alias.note for alias in ALIASES.values()}
    group = LazyGroup(COMMANDS)
    for note in notes:
        for line in re.findall(r"`bessemer ([^`]+)`", note):
            name, *rest = shlex.split(line.replace("N", "3"))
            command: Any = group.get_command(None, name)  # type: ignore[arg-type]
            command.make_context(name, rest, resilient_parsing=True)
        train: Any = group.get_command(None, "train")  # type: ignore[arg-type]
        plain = re.sub(r"`[^`]*`", "", note)
        options = {option for parameter in train.params for option in parameter.opts}
        assert set(re.findall(r"(?<!\w)--[a-z-]+", plain)) <= options


def test_a_recipe_file_gets_the_same_answers(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: quickstart\ntrainer: {train_batch_size: 8}\noptimizer: {learning_rate: 0.01}\n")
    from bessemer.cli.config import command

    result = CliRunner().invoke(command, [str(path)])
    assert isinstance(result.exception, InputError)
    assert "write training.batch_size=8" in str(result.exception)
    assert "write optimization.lr=0.01 optimization.name=adamw" in str(result.exception)
