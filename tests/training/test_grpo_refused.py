"""Ways to sample that a model lacks are refused before anything is written, by the commands that sample, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import words
from tests.tiny_run import CONFIG, TEXTS, random_params, tiny_tokenizer
from tests.training.tiny_rl import grpo_settings

from bessemer.checkpoint import Checkpoints
from bessemer.cli import main
from bessemer.config.recipes import saved_tree
from bessemer.job import RunDirectory
from bessemer.job.trust import mark_origin
from bessemer.models.qwennext import QwenNext

pytestmark = pytest.mark.usefixtures("on_one_device")

DELTA = {"model.family": "qwennext", "model.depth": 2, "model.delta_layers": "DF"}
SLIDING = {"model.family": "llama", "model.sliding_window": 4}
NGRAM = {"generate.speculate": "ngram"}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "drafts over delta layers": (DELTA | NGRAM, "recurrent layers, whose state cannot. Set generate.speculate=none"),
    "drafts longer than the window": (SLIDING | NGRAM, "Set generate.draft=3"),
    "8 bits of 4": (
        {"model.family": "llama", "lora.rank": 2, "lora.quantize": "int8", "generate.weights": "fp8"},
        "generate.weights=fp8 has nothing to quantize: the matrices are quantized already (lora.quantize). Set "
        "generate.weights=auto",
    ),
    "experts that are not there": ({"grpo.router_replay": True}, "grpo.router_replay=true trains with the experts"),
    "packed rows without a mask": (
        {"grpo.pack": True, "architecture.document_mask": False},
        "set architecture.document_mask=true, or grpo.pack=false",
    ),
    "exact rollouts in 8 bits": (
        {"grpo.exact": True, "generate.weights": "int8"},
        "grpo.exact=true does not support generate.weights=int8",
    ),
    "exact rollouts of experts": (
        {"grpo.exact": True, "model.experts": 4, "model.experts_active": 2},
        "grpo.exact=true does not support mixtures of experts",
    ),
}


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[dict[str, Any]], str]:
    """Run `bessemer train` with GRPO; check the form of the refusal and return its text."""
    rewards = '[{"name": "length_penalty"}]'
    settings = grpo_settings(tmp_path, [{"prompt": text[:20]} for text in TEXTS], {"grpo.rewards": rewards})

    def call(changes: dict[str, Any]) -> str:
        given = {**settings, "training.steps": 2, **changes}
        with pytest.raises(SystemExit) as caught:
            main(["train", *words(given), "--runs", str(tmp_path / "runs"), "--name", "bad"])
        text = capsys.readouterr().err.strip()
        assert caught.value.code == 2, text
        assert not (tmp_path / "runs" / "bad").exists(), "a refused run leaves nothing behind"
        assert text.startswith("error: ") and "\n" not in text
        return text

    return call


@pytest.mark.parametrize("name", list(CASES))
def test_a_run_is_refused(name: str, refuse: Callable[[dict[str, Any]], str]) -> None:
    changes, message = CASES[name]
    assert message in refuse(changes)


OWN = """\
import flax.linen as nn
import jax.numpy as jnp
import bessemer as bm


class Plain(bm.LanguageModel):
    @nn.compact
    def __call__(self, input_ids, positions=None, segment_ids=None, deterministic=True):
        scale = self.param("scale", lambda key: jnp.ones(()))
        return scale * jnp.zeros((*input_ids.shape, self.vocab_size))
"""
DECODES = """
    def init_cache(self, batch, length):
        return jnp.zeros((batch,))

    def decode(self, input_ids, cache, lengths=None, last_only=False):
        return self(input_ids)[:, -1:], cache
"""
OF_GPT = ("model.depth", "model.width", "model.head_dim")


@pytest.mark.parametrize(
    ("methods", "changes", "message"),
    [
        ("", {}, "objective=grpo samples, and Plain has no `decode` and `init_cache`"),
        (DECODES, NGRAM, "Plain has none. Set generate.speculate=none"),
        (DECODES, {"generate.weights": "int8"}, "Plain is not one. Set generate.weights=auto"),
        (DECODES, {"grpo.pack": True}, "Plain has no document mask (architecture.document_mask): set grpo.pack=false"),
    ],
    ids=["decoding", "drafts", "weights", "packing"],
)
def test_a_model_of_ones_own_is_refused_what_it_lacks(
    methods: str, changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain.py").write_text(OWN + methods)
    settings = grpo_settings(tmp_path, [{"prompt": text[:20]} for text in TEXTS], {})
    settings = {name: value for name, value in settings.items() if name not in OF_GPT}
    settings |= {"grpo.rewards": '[{"name": "length_penalty"}]', "training.steps": 2}
    settings |= {"model.family": f"{tmp_path / 'plain.py'}:Plain", **changes}
    with pytest.raises(SystemExit) as caught:
        main(["train", *words(settings), "--runs", str(tmp_path / "runs"), "--name", "bad"])
    text = capsys.readouterr().err.strip()
    assert caught.value.code == 2 and message in text, text
    assert not (tmp_path / "runs" / "bad").exists()


@pytest.fixture
def delta_run(tmp_path: Path) -> str:
    """A run of delta layers with random weights."""
    model = QwenNext(
        depth=2, width=32, head_dim=16, vocab_size=300, block_size=32, precision="float32", delta_layers="DF"
    )
    config = CONFIG.replace("family: gpt", "family: qwennext, delta_layers: DF").replace(", window: L", "")
    config = config.format(data=tmp_path / "cats.jsonl", root=tmp_path / "store")
    run = RunDirectory(tmp_path / "runs" / "delta").create()
    run.config.write_text(config)
    checkpoints = Checkpoints(run.checkpoints)
    files = {"config.yaml": config, "tokenizer.json": tiny_tokenizer().to_json()}
    checkpoints.save(1, {"params": random_params(model)}, files=files, wait=True)
    checkpoints.close()
    mark_origin(run, saved_tree(run.config))
    return str(run.path)


@pytest.mark.parametrize("command", [["sample", "--prompt", "The"], ["chat"], ["serve", "--port", "0"]])
def test_commands_refuse_drafts_over_delta_layers(
    command: list[str], delta_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path(delta_run).rglob("*"))
    with pytest.raises(SystemExit) as caught:
        main([command[0], delta_run, *command[1:], "--speculate", "ngram"])
    text = capsys.readouterr().err.strip().splitlines()[-1]
    assert caught.value.code == 2, text
    assert text.startswith("error: ") and "recurrent layers" in text and "leave --speculate out" in text
    assert sorted(Path(delta_run).rglob("*")) == before
