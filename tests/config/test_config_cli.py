"""`bessemer config`, `bessemer recipes`, and answers to the flags of other systems."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from click.testing import CliRunner

from bessemer.cli.config import command as config_command
from bessemer.cli.config import config_text
from bessemer.cli.options import refuse_flags
from bessemer.cli.recipes import command as recipes_command
from bessemer.config import field, gather, recipe_names, resolve
from bessemer.config.aliases import answer
from bessemer.console import show
from bessemer.errors import InputError

LONG = "/a/very/long/path/" + "x" * 120


@dataclass
class Settings:
    seed: int = field("seed", default=1337, help="the only source of randomness; every key is folded from it")
    root: str = field("data/root", default=LONG, help="where stores live " * 6)
    words: list[str] = field("data/words", default_factory=lambda: ["[red]a[/red]", ""])
    limit: float | None = field("training/limit", default=None)


def render(width: int | None) -> str:
    return config_text(resolve(lambda values: gather(Settings), None, ["seed=5"]), width)


def test_in_a_file_each_setting_is_one_whole_line_without_colour():
    text = render(None)
    assert "\x1b" not in text and "…" not in text
    assert re.search(rf"^data\.root +{LONG} +default +where stores live", text, re.M)
    assert re.search(r"^seed +5 +command line +the only source", text, re.M)
    assert re.search(r'^data\.words +\["\[red\]a\[/red\]", ""\] ', text, re.M)
    assert re.search(r"^training\.limit +none +default", text, re.M)
    assert text.index("seed") < text.index("data.root") < text.index("training.limit")


def test_on_a_terminal_of_80_columns_nothing_is_cut():
    text = re.sub(r"\x1b\[[0-9;]*m", "", render(80))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert text.count("x") >= 120
    assert re.search(r"^data +value +from +help", text, re.M) and re.search(r"^root +/a/very", text, re.M)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "none"), (True, "true"), (1e-5, "1e-05"), ("a", "a"), ("", '""'), ([1, "é"], '[1, "é"]')]
)
def test_values_are_shown_as_they_can_be_typed(value, text):
    assert show(value) == text


def test_recipes_are_listed():
    result = CliRunner().invoke(recipes_command, [])
    assert result.exit_code == 0, result.output
    for name in recipe_names():
        assert re.search(rf"^{name} ", result.output, re.M)


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_resolves(name):
    """Every setting of it exists and takes its value."""
    result = CliRunner().invoke(config_command, [name], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "flag", ["--grad_accum_steps", "--grad-accum-steps", "--grad-accum-steps=4", "grad_accum_steps"]
)
def test_spellings_of_a_foreign_flag(flag):
    found = str(answer(flag.partition("=")[0]))
    assert "training.batch_size" in found and "training.per_device_batch_size" in found


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--device-batch-size=32", "training.per_device_batch_size=32"),
        ("--total-batch-size", "training.batch_tokens=VALUE"),
        ("--num-iterations=5", "training.steps=5"),
        ("--target-param-data-ratio", "training.ratio"),
        ("--depth=12", "model.depth=12"),
        ("--max-seq-len", "architecture.block_size"),
        ("--matrix-lr", "optimization.matrix_lr"),
        ("--fp8", "architecture.precision"),
        ("--l3-k-max=9", "architecture.lookup.k_max=9"),
        ("--resume-from-step", "bessemer resume RUN --step N"),
        ("--model-tag", "--name"),
        ("--nprocs", "topology.data"),
        ("--batch_per_device", "training.per_device_batch_size"),
        ("--ckpt_interval=9", "logging.checkpoint_interval=9"),
        ("--random_seed=3", "seed=3"),
        ("--n_epoch", "training.epochs"),
        ("--param_path", "init"),
    ],
)
def test_foreign_flags_are_answered_with_our_setting(flag, setting):
    with pytest.raises(InputError, match=re.escape(setting)) as raised:
        refuse_flags(["quickstart", flag])
    assert "\n" not in str(raised.value)


def test_unknown_flags_and_plain_words():
    assert answer("--no-such-flag") is None
    refuse_flags(["quickstart", "a.b=c", "-"])
    with pytest.raises(InputError, match="unknown flag '--zzz'"):
        refuse_flags(["--zzz=1"])
