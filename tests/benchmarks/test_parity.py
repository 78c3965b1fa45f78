"""benchmarks/parity.py on a tiny corpus in the reference's layout: its windows, its settings, three steps."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import parity
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import stream
from tests.conftest import WORDS

from bessemer.config import configuration, configure
from bessemer.data import Tokenizer
from bessemer.errors import InputError
from bessemer.optim import build_schedule
from bessemer.optim.muon import MuonSettings, decay_schedule, momentum_schedule

HEADER = {"depth": 8, "width": 512, "block_size": 1024, "batch": 64, "steps": 600, "vocab": 8192, "window": "L"}
TINY = ["model.depth=2", "model.width=32", "model.head_dim=16", "architecture.block_size=16"]
TINY += ["training.batch_size=4", "training.steps=3"]


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    rng = random.Random(0)
    made = [" ".join(rng.choices(WORDS, k=rng.randint(10, 30))) + " ünï <|bos|>." for _ in range(24)]
    return {"train-00000-of-00002": made[:10], "train-00001-of-00002": made[10:20], "val-00000-of-00001": made[20:]}


@pytest.fixture(scope="module")
def reference(texts: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory that is both: the parquet files, the tokenizer and a stored curve of depth 8."""
    directory = tmp_path_factory.mktemp("reference")
    for name, rows in texts.items():
        pq.write_table(pa.table({"text": rows, "source": ["test"] * len(rows)}), directory / f"{name}.parquet")
    size = Tokenizer.train([text for rows in texts.values() for text in rows], 300)
    size.save(directory)
    rows = [{"step": 0, "val_loss": 5.7}, {"step": 0, "train_loss": 5.7}, {"step": 3, "val_loss": 5.0}]
    stored = {**HEADER, "vocab": size.vocab_size, "steps": 3, "seed": 0, "rows": rows}
    (directory / "nanochat_d8_s0_lr04.json").write_text(json.dumps(stored))
    slower = [*rows[:2], {"step": 3, "val_loss": 5.2}]  # at a rate of .02: not what ours at .04 is compared with
    (directory / "nanochat_d8_s0.json").write_text(json.dumps({**stored, "rows": slower}))
    return directory


def test_the_stream_is_bos_and_tokens_of_each_document_in_order(
    texts: dict[str, list[str]], reference: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(reference)
    expected, size = [], 0
    for text in texts["train-00000-of-00002"] + texts["train-00001-of-00002"]:
        expected += [tokenizer.bos_id, *tokenizer.encode(text)]
        size += len(text.encode())
    cache = tmp_path / "stream.npz"
    for _ in range(2):  # encoded, then from the cache
        streams = stream.load_streams(reference, reference, cache)
        np.testing.assert_array_equal(streams["train"].tokens, expected)
        facts = stream.Facts(20, size, len(expected), sum(expected), tuple(expected[:8]))
        assert streams["train"].facts == facts and streams["train"].tokens.dtype == np.uint16
    stream.check("train", facts, facts)
    with pytest.raises(InputError, match="not the reference's"):
        stream.check("train", facts, replace(facts, total=facts.total + 1))


def test_windows_are_contiguous_and_wrap_around() -> None:
    tokens = np.arange(23, dtype=np.uint16)  # T = 5: windows 0-3 are whole, the fifth has only 3 tokens
    np.testing.assert_array_equal(stream.windows(tokens, 0, 3, 5)[:, 0], [0, 5, 10])
    got = stream.windows(tokens, 1, 3, 5)  # the second step begins where the first ended
    np.testing.assert_array_equal(got[:, 0], [15, 0, 5])
    for row in got:
        np.testing.assert_array_equal(row, row[0] + np.arange(6))
    assert len(stream.windows(np.arange(21), 0, 4, 5)) == 4  # 21 = 4·5 + 1: the fourth is just whole
    batch = stream.batch_of(got)
    np.testing.assert_array_equal(batch["input_ids"] + 1, batch["target_ids"])
    with pytest.raises(InputError, match="no window"):
        stream.windows(np.arange(5), 0, 1, 5)


def test_the_reference_settings_are_expressed() -> None:
    """Rates (but for the matrices', which is twice theirs), decay, warmup, warmdown and momentum of the reference."""
    config = parity.settings_of(HEADER)
    with configuration(config):
        settings = configure(MuonSettings)
        schedule = build_schedule("trapezoid", configure, 600)
    scale, narrow = (64 * 1024 / 2**19) ** 0.5, (512 / 768) ** -0.5
    rates = {group.name: group.lr for group in settings.groups(512)}
    expected = {"matrix": 0.04 * scale, "head": 0.008 * scale * narrow, "embedding": 0.3 * scale * narrow}
    expected |= {"value_embedding": 0.15 * scale * narrow, "xi": 0.5 * scale, "rho": 0.005 * scale, "scalar": 0.2}
    assert rates == pytest.approx(expected)
    np.testing.assert_allclose(schedule(jnp.array([0, 39, 210, 600])), [1 / 40, 1, 1, 0.05], rtol=1e-6)
    momentum = momentum_schedule(settings, schedule, 600)(jnp.array([0, 200, 400, 600]))
    np.testing.assert_allclose(momentum, [0.85, 0.91, 0.97, 0.97], rtol=1e-6)
    np.testing.assert_allclose(decay_schedule(settings, 600)(jnp.array([0, 300, 600])), [0.1, 0.05, 0], atol=1e-7)
    assert config["training/max_grad_norm"] == 0 and config["model/window_short"] == 0.25
    other = parity.settings_of(HEADER, ["optimization.name=adamw", "optimization.lr=0.001"])
    assert other["optimization/lr"] == 0.001
    with pytest.raises(InputError, match="matrix_rl"):
        parity.settings_of(HEADER, ["optimization.matrix_rl=0.1"])


def test_curves_are_compared_at_equal_rates(reference: Path) -> None:
    ends = {
        rate: [curve["rows"][-1]["val_loss"] for curve in parity.references_of(reference, 8, rate)]
        for rate in (0.02, 0.03, 0.04)
    }
    assert ends == {0.02: [5.2], 0.03: [], 0.04: [5.0]}
    with pytest.raises(InputError, match="nanochat_d12"):
        parity.references_of(reference, 12, 0.02)


@pytest.mark.parametrize(
    ("depth", "rate", "bar"), [(8, 0.02, 3.576), (8, 0.04, 3.461), (12, 0.02, 3.389), (12, 0.04, 3.301)]
)
def test_the_bar_is_that_of_our_rate(depth: int, rate: float, bar: float) -> None:
    """3.5 at depth 8 is below what nanochat reaches at .02, and above what it reaches at .04."""
    results = [{"val_loss": bar - 0.001}] * parity.SEEDS[depth]
    final = parity.summary(results, [], depth, rate, same=True)
    assert final["reached"] is True and final["bar"].endswith(str(bar)) and final["matrix_lr"] == rate
    assert parity.summary([{"val_loss": bar + 0.001}] * 3, [], depth, rate, same=True)["reached"] is False
    assert parity.summary(results[1:], [], depth, rate, same=True)["reached"] is None  # too few seeds
    assert parity.summary(results, [], depth, rate, same=False)["reached"] is None
    assert parity.summary(results, [], depth, 0.03, same=True)["bar"] is None  # no stored curve at this rate


@pytest.mark.slow
def test_three_steps_of_two_seeds(reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole script: one line a seed, a curve that falls from ln V, a summary that claims no bar."""
    words = [str(reference), str(reference), "--any-stream", "--json", "--seeds", "0,1"]
    parity.main([*words, "--set", *TINY, "optimization.lr_multiplier=1", "optimization.warmup_steps=0"])
    *seeds, final = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["seed"] for line in seeds] == [0, 1]
    vocab = Tokenizer.load(reference).vocab_size
    for line in seeds:
        kinds = [(row["step"], *[name for name in row if name != "step"]) for row in line["rows"]]
        assert kinds == [(0, "val_loss"), (0, "train_loss"), (3, "val_loss")]
        start, end = line["rows"][0]["val_loss"], line["val_loss"]
        assert abs(start - np.log(vocab)) < 0.02 and end < start - 0.1
    assert seeds[0]["rows"] != seeds[1]["rows"]
    assert final["reached"] is None and final["nanochat"] == [5.0]
    assert final["mean"] == pytest.approx((seeds[0]["val_loss"] + seeds[1]["val_loss"]) / 2, abs=1e-5)
