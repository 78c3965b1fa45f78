"""Prompts and conversations of published tokenizers are those of transformers; what is trained is what is generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.reference.prompts import LAYOUTS, MESSAGES, OUT, PROMPTS, cases, make, name_of

from bessemer.data import DatasetStyle, Tokenizer, make_rows
from bessemer.data.tokenize import chat

STORED: dict[str, Any] = json.loads(OUT.read_text())["cases"]


def load(folder: Path, **changes: Any) -> Tokenizer:
    case = {"layout": "bytes", "begins": "file", "bos": True, "add_bos": None, "template": True, **changes}
    return Tokenizer.load(make(folder, case))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_and_conversations_are_those_of_transformers(layout: str, tmp_path: Path) -> None:
    """With and without bos in the post-processor, bos_token, add_bos_token and a template."""
    compared = [case for case in cases() if case["layout"] == layout]
    assert len(compared) == 24
    for number, case in enumerate(compared):
        tokenizer = Tokenizer.load(make(tmp_path / str(number), case)).as_published()
        expected = STORED[name_of(case)]
        for prompt, ids in zip(PROMPTS, expected["prompts"], strict=True):
            assert tokenizer.prompt(prompt) == ids, (case, prompt)
        if case["template"]:
            assert chat.render(MESSAGES, tokenizer) == expected["chat"], case


def test_only_published_weights_are_prompted_without_bos(tmp_path: Path) -> None:
    """A model trained here knows documents that begin with bos, whatever the tokenizer's file says."""
    tokenizer = load(tmp_path, begins="none")
    assert tokenizer.prompt("x")[0] == tokenizer.bos_id
    assert tokenizer.as_published().prompt("x") == tokenizer.encode("x")
    assert tokenizer.as_published().prompt("") == [tokenizer.bos_id]  # nothing could be continued
    own = Tokenizer.train(PROMPTS, 300)
    assert own.as_published().prompt("x") == own.prompt("x") == [own.bos_id, *own.encode("x")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_answer_is_trained_as_it_is_generated(layout: str, tmp_path: Path) -> None:
    """The whole conversation at once gives the same ids as the prompt and then the answer: no space is added where the
    answer begins."""
    tokenizer = load(tmp_path, layout=layout)
    talk = MESSAGES[:2]
    ids, mask = chat.supervised(talk, tokenizer)
    text = "<s>[INST] Hello world [/INST] two words </s>"
    assert ids == tokenizer.encode(text, allow_special=True)
    prompt = chat.render(talk[:1], tokenizer)
    assert ids[: len(prompt)] == prompt and mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    assert tokenizer.decode(ids[len(prompt) :]).strip() == "two words </s>"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_of_targets_are_those_of_the_text(layout: str, tmp_path: Path) -> None:
    """The space that a tokenizer puts before a document is none of its bytes."""
    tokenizer = load(tmp_path, layout=layout)
    texts = ["Hello world", "日本", "two lines\nof words", "x"]
    batch = make_rows(texts, DatasetStyle.PACKED, 64, tokenizer=tokenizer, allow_short=True).get(np.arange(1))
    counted = tokenizer.target_bytes(batch["input_ids"], batch["target_ids"])
    assert counted.sum() == sum(len(text.encode()) for text in texts)
    assert (counted >= 0).all() and not counted[batch["target_ids"] < 0].any()
    if layout == "prepend":  # unlike the others it puts its space before one of the text, too
        ids = tokenizer.encode("  two")
        found = tokenizer.target_bytes(np.array([tokenizer.bos_id, *ids[:-1]]), np.array(ids))
        assert found.sum() == 5
