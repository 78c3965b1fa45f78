"""Answers in words: parsing, and the calculator's part in what is written."""

import dataclasses
import json
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.evaluate.bundles import write_rows

from bessemer.data import Tokenizer
from bessemer.errors import InputError
from bessemer.evaluate import Evaluator
from bessemer.evaluate.evaluator import choose
from bessemer.evaluate.scoring import is_right, parse_answer, question_ids, write
from bessemer.evaluate.word_problems import gsm8k, problems
from bessemer.generate import LoadedModel
from tiny_run import make_run, tiny_tokenizer

QUESTION = "How many are 16 less 3 and 4?"


class Position(NamedTuple):
    lengths: jax.Array


class Scripted(nn.Module):
    """A model that has learned one text by heart: after n tokens it writes the text's token n."""

    script: tuple[int, ...]
    vocab_size: int = 300
    block_size: int = 128

    def init_cache(self, batch: int, length: int) -> Position:
        return Position(jnp.zeros(batch, jnp.int32))

    def decode(self, input_ids, cache, lengths=None, last_only=False):
        now = cache.lengths + lengths
        script = jnp.array(self.script)
        following = script[jnp.minimum(now, len(self.script) - 1)]
        return jax.nn.one_hot(following, self.vocab_size)[:, None] * 20, Position(now)


def scripted(answer: list) -> LoadedModel:
    """`answer` mixes text and names of special tokens."""
    tokenizer: Tokenizer = tiny_tokenizer()
    ids = question_ids(tokenizer, QUESTION)
    for part in answer:
        ids += [tokenizer.specials[part]] if part in tokenizer.specials else tokenizer.encode(part)
    return LoadedModel(Scripted(tuple(ids)), {}, tokenizer, 0, {})


CALL = ["<|python_start|>", "16-3-4", "<|python_end|>"]


def test_the_calculator_is_asked_and_the_model_writes_on():
    loaded = scripted(["It is ", *CALL, "<|output_start|>", "9", "<|output_end|>", "\n#### 9", "<|assistant_end|>"])
    (text,) = write(loaded, [question_ids(loaded.tokenizer, QUESTION)], 64)
    assert text == ("It is <|python_start|>16-3-4<|python_end|><|output_start|>9<|output_end|>\n#### 9") and is_right(
        text, "16 - 3 - 4 = <<16-3-4=9>>9\n#### 9"
    )


def test_what_is_no_arithmetic_gets_no_output():
    loaded = scripted(["<|python_start|>", "print(9)", "<|python_end|>", " #### 7", "<|assistant_end|>"])
    (text,) = write(loaded, [question_ids(loaded.tokenizer, QUESTION)], 64)
    assert text == "<|python_start|>print(9)<|python_end|> #### 7"


def test_endless_calls_come_to_an_end():
    """Calculations count into the tokens of an answer, and there are at most so many."""
    again = [*CALL, "<|output_start|>", "9", "<|output_end|>"]
    loaded = scripted(again * 40)
    prompt = question_ids(loaded.tokenizer, QUESTION)
    (short,) = write(loaded, [prompt], 20)
    assert short.count("<|output_end|>") <= 3
    (full,) = write(loaded, [prompt], 1000)
    assert 0 < full.count("<|output_end|>") <= 16


def test_gsm8k_is_scored_from_its_file(tmp_path):
    loaded = scripted([*CALL, "<|output_start|>", "9", "<|output_end|>", " #### 9", "<|assistant_end|>"])
    rows = [{"question": QUESTION, "answer": "<<16-3-4=9>>\n#### 9"}, {"question": QUESTION, "answer": "#### 8"}]
    write_rows(tmp_path / "test.jsonl.gz", rows)
    found = gsm8k(loaded, source=str(tmp_path / "test.jsonl.gz"), batch_size=1)
    assert found["accuracy"] == 0.5 and found["examples"] == 2
    assert choose(f"gsm8k:{tmp_path / 'test.jsonl.gz'}").run(loaded, limit=1)["examples"] == 1
    with pytest.raises(InputError, match="gsm8k:FILE"):
        gsm8k(loaded)


def test_without_tokens_for_turns_it_is_plain_text():
    plain = tiny_tokenizer()
    described = json.loads(plain.to_json())
    described["added_tokens"] = [t for t in described["added_tokens"] if "user" not in t["content"]]
    tokenizer = Tokenizer(json.dumps(described))
    assert tokenizer.decode(question_ids(tokenizer, "Why?")) == "<|bos|>Question: Why?\nAnswer:"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 18", 18),
        ("so 3 then #### 1,234.50", 1234.5),
        ("#### -7 dollars", -7),
        ("#### $5", 5),
        ("#### 1 #### 2", 2),
        ("first 3, then 4.", 4),
        ("nothing", None),
        ("#### none of the 3", 3),
        ("#### nothing", None),
    ],
)
def test_parsing(text, value):
    assert parse_answer(text) == value


@given(st.integers(-(10**9), 10**9), st.text(max_size=20))
def test_a_marked_number_is_found_after_any_text(number, before):
    assert parse_answer(f"{before}#### {number:,}") == number


def test_a_word_is_compared_as_text():
    assert is_right(" Paris\n", "paris") and not is_right("Rome", "paris")


def test_arithmetic_problems_are_right_and_always_the_same(tmp_path):
    made = problems()
    assert made == problems() and len(made) == 300
    for problem in made:
        a, sign, b = problem["question"].removeprefix("What is ").rstrip("?").split()
        assert int(problem["answer"]) == {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(a), int(b))


@pytest.mark.slow
def test_a_real_model_writes_the_same_in_any_batch(tmp_path):
    run = make_run(tmp_path)
    job = Evaluator.from_run(run, tasks=["arithmetic"], limit=3, batch_size=4)
    found = job.run()["arithmetic"]
    assert found["examples"] == 3 and 0 <= found["value"] <= 1
    assert (run.eval / "arithmetic_step20.json").is_file()
    prompts = [question_ids(job.loaded.tokenizer, problem["question"]) for problem in problems()[:5]]
    compiled = len(job.loaded.programs)
    together = write(job.loaded, prompts, 256, 4)
    assert len(job.loaded.programs) == compiled, "the engine of the evaluation serves again"
    assert together == write(job.loaded, prompts, 256, 1) and len(set(together)) > 1


def test_a_model_that_cannot_decode_is_told():
    loaded = dataclasses.replace(scripted(["a"]), model=nn.Dense(3))
    with pytest.raises(InputError, match="cannot decode"):
        gsm8k_rows = [{"question": "a", "answer": "1"}]
        from bessemer.evaluate.scoring import answer_all

        answer_all(loaded, gsm8k_rows, 4, None)
