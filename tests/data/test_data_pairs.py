"""Preference data: every form of a row is the same pair, and rows of pairs lose nothing and mix nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny_run import tiny_tokenizer

from bessemer.data import DataPlan, DatasetStyle, Sampling, Tokenizer, TokenStore, make_rows, open_dataset, prepare
from bessemer.data.rows.rows import describe_store, fields_of
from bessemer.data.stores.catalog import DataSettings
from bessemer.data.tokenize.documents import Pair, encode_pair, read_pair
from bessemer.errors import InputError

BLOCK = 96
ASK, SAY, DENY = (
    {"role": role, "content": text} for role, text in (("user", "ask"), ("assistant", "yes"), ("assistant", "no"))
)


def rows_of(count: int = 40) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Is {n} odd?", "chosen": "yes " * (1 + n % 4), "rejected": "no, it is not " * (1 + n % 3)}
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def packed(tokenizer: Tokenizer) -> Any:
    return make_rows(rows_of(), DatasetStyle.CONTRASTIVE, BLOCK, tokenizer=tokenizer)


def answers(tokenizer: Tokenizer, batch: dict[str, np.ndarray]) -> dict[int, tuple[str, str]]:
    """Number of a pair → its answers as text, read off the targets of each segment."""
    found = {}
    for row in range(len(batch["pair_ids"])):
        for place, number in enumerate(batch["pair_ids"][row]):
            if number >= 0:
                sides = [batch["target_ids"][row][batch["segment_ids"][row] == 2 * place + s] for s in (1, 2)]
                found[int(number)] = tuple(tokenizer.decode(side[side >= 0].tolist()) for side in sides)
    return found


def test_every_pair_is_in_one_row_whole_and_only_its_answers_are_targets(packed: Any, tokenizer: Tokenizer) -> None:
    batch = packed.get(np.arange(len(packed)))
    found = answers(tokenizer, batch)
    end = "<|assistant_end|>"
    assert found == {n: (row["chosen"] + end, row["rejected"] + end) for n, row in enumerate(rows_of())}
    assert sorted(batch["pair_ids"][batch["pair_ids"] >= 0]) == list(range(40))


def test_sequences_are_segments_that_begin_at_position_0(packed: Any, tokenizer: Tokenizer) -> None:
    batch = packed.get(np.arange(len(packed)))
    for ids, segments, positions in zip(batch["input_ids"], batch["segment_ids"], batch["positions"], strict=True):
        for number in range(1, int(segments.max()) + 1):
            mine = segments == number
            assert positions[mine].tolist() == list(range(mine.sum()))
            assert ids[mine][0] == tokenizer.bos_id
            assert ids[mine][-1] == tokenizer.specials["<|assistant_end|>"]  # also an input: a reward reads it
        assert (ids[segments == 0] == tokenizer.pad_id).all()


def test_packing_wastes_less_than_a_pair_a_row(packed: Any) -> None:
    stats, sizes = packed.stats, np.diff(packed.store.offsets)
    used = int(sizes.sum())
    assert stats["padding_share"] == pytest.approx(1 - used / (len(packed) * BLOCK))
    assert len(packed) <= -(-used // (BLOCK - sizes.max() + 1))  # best fit never leaves room for the longest
    assert stats["pairs"] == 40 and stats["truncated"] == 0


def test_forms_of_a_row_are_the_same_pair(tokenizer: Tokenizer) -> None:
    ask = {"role": "user", "content": "Say hello"}
    good, bad = ({"role": "assistant", "content": text} for text in ("Hello", "No"))
    forms = [
        {"prompt": "Say hello", "chosen": "Hello", "rejected": "No"},
        {"prompt": [ask], "chosen": "Hello", "rejected": "No"},
        {"prompt": [ask], "chosen": [good], "rejected": [bad]},
        {"chosen": [ask, good], "rejected": [ask, bad]},
        {"prompt": "Say hello", "chosen": [ask, good], "rejected": [ask, bad]},  # as ultrafeedback_binarized
        {"prompt": " Say hello\n", "chosen": [ask, good], "rejected": [ask, bad]},
        {"prompt": [ask], "chosen": [ask, good], "rejected": [ask, bad]},
    ]
    encoded = [encode_pair(pair, tokenizer) for pair in map(read_pair, forms) if isinstance(pair, Pair)]
    assert len(encoded) == 7 and all(document == encoded[0] for document in encoded)
    ids, mask = encoded[0]
    cut = mask.index(2)  # the rejected sequence begins
    row = {
        "chosen": ids[:cut],
        "rejected": ids[cut:],
        "chosen_mask": mask[:cut],
        "rejected_mask": [0, *mask[cut + 1 :]],
    }
    tokens = read_pair(row)
    assert isinstance(tokens, Pair) and encode_pair(tokens, tokenizer) == encoded[0]


def test_earlier_turns_of_the_assistant_are_no_answer(tokenizer: Tokenizer) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    pair = read_pair({"prompt": talk, "chosen": "good", "rejected": "bad"})
    assert isinstance(pair, Pair)
    ids, mask = encode_pair(pair, tokenizer)
    learned = [i for i, m in zip(ids, mask, strict=True) if m & 1]
    assert tokenizer.decode(learned) == "good<|assistant_end|>bad<|assistant_end|>"


def test_a_prompt_that_the_answers_repeat_is_asked_once(tokenizer: Tokenizer) -> None:
    """Also after earlier turns and a system message; a question that only continues the prompt stays."""

    def written(row: dict[str, Any]) -> str:
        pair = read_pair(row)
        assert isinstance(pair, Pair), pair
        return tokenizer.decode(encode_pair(pair, tokenizer)[0])

    system, first, said, then = (
        {"role": role, "content": text}
        for role, text in (("system", "Be kind"), ("user", "one"), ("assistant", "two"), ("user", "three"))
    )
    sides = [{"role": "assistant", "content": text} for text in ("good", "bad")]
    talk = [system, first, said, then]
    whole = {side: [*talk, answer] for side, answer in zip(("chosen", "rejected"), sides, strict=True)}
    plain = written(whole)
    for prompt in ("one", "three", talk, [first], [system, first]):
        assert written({"prompt": prompt, **whole}) == plain
    follow = {side: [then, answer] for side, answer in zip(("chosen", "rejected"), sides, strict=True)}
    assert written({"prompt": [system, first, said], **follow}) == plain


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x", "chosen": [ASK, SAY], "rejected": [ASK, DENY]}, "a question that is not 'prompt'"),
        ({"prompt": "ask", "chosen": [ASK, SAY], "rejected": [DENY]}, "only one of"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "'prompt' is neither"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "the same"),
        ({"prompt": "x", "chosen": "", "rejected": "a"}, "'chosen' is neither"),
        ({"chosen": "a", "rejected": "b"}, "without 'prompt'"),
        ({"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]}, "different"),
        ({"chosen": [1, 2], "rejected": [3]}, "chosen_mask"),
        ({"chosen": [1, 2], "rejected": [3], "chosen_mask": [1], "rejected_mask": [1]}, "2 ids"),
    ],
)
def test_a_bad_row_says_why(row: dict[str, Any], reason: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match=f"example 0.*{reason}"):
        make_rows([row], DatasetStyle.CONTRASTIVE, 32, tokenizer=tokenizer)


def test_a_long_pair_loses_the_beginning_of_its_prompt_and_is_counted(tokenizer: Tokenizer) -> None:
    data = [{"prompt": "x" * 40 + " end", "chosen": "good", "rejected": "bad"}, *rows_of(2)]
    rows = make_rows(data, DatasetStyle.CONTRASTIVE, 64, tokenizer=tokenizer)
    whole = make_rows(data, DatasetStyle.CONTRASTIVE, 256, tokenizer=tokenizer)
    assert rows.stats["truncated"] == 1 and rows.stats["truncated_tokens"] > 0
    assert answers(tokenizer, rows.get(np.arange(len(rows)))) == answers(tokenizer, whole.get(np.arange(len(whole))))
    batch = rows.get(np.arange(len(rows)))
    row, place = np.argwhere(batch["pair_ids"] == 0)[0]
    ids, segments = batch["input_ids"][row], batch["segment_ids"][row]
    chosen, rejected = (ids[segments == 2 * place + side].tolist() for side in (1, 2))
    end = tokenizer.specials["<|user_end|>"]
    assert chosen[: chosen.index(end)] == rejected[: rejected.index(end)]  # cut alike
    assert tokenizer.decode(chosen[: chosen.index(end)]).endswith("x end")


def test_answers_that_do_not_fit_are_refused_or_counted(tokenizer: Tokenizer) -> None:
    data = [{"prompt": "p", "chosen": "long " * 30, "rejected": "b"}, *rows_of(3)]
    with pytest.raises(InputError, match=r"1 of 4 pairs.*number 0.*on_empty=skip"):
        make_rows(data, DatasetStyle.CONTRASTIVE, 64, tokenizer=tokenizer)
    rows = make_rows(data, DatasetStyle.CONTRASTIVE, 64, tokenizer=tokenizer, on_empty="skip")
    assert rows.stats["without_targets"] == 1 and rows.stats["pairs"] == 3
    assert set(answers(tokenizer, rows.get(np.arange(len(rows))))) == {1, 2, 3}


def test_pairs_and_documents_are_not_taken_for_each_other(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="CONTRASTIVE"):
        make_rows(rows_of(), DatasetStyle.PACKED, 32, tokenizer=tokenizer)
    with pytest.raises(InputError, match="chosen"):
        make_rows(["some text"] * 9, DatasetStyle.CONTRASTIVE, 16, tokenizer=tokenizer)
    with pytest.raises(InputError, match="two stores"):
        make_rows([*rows_of(3), {"text": "more"}], DatasetStyle.CONTRASTIVE, 64, tokenizer=tokenizer)


def test_a_store_of_pairs_holds_pairs_out_whole(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows_of(), rows_of(1)[0]]))
    made = [
        prepare(source, tmp_path / name, tokenizer, val_fraction=0.2, dedup=True, workers=workers, shard_bytes=500)
        for name, workers in (("one", 1), ("two", 2))
    ]
    assert made[0].splits == made[1].splits and made[0].about["duplicates"] == 1
    both: dict[str, Any] = {}
    for split in ("train", "val"):
        rows = make_rows(TokenStore(tmp_path / "one", split), DatasetStyle.CONTRASTIVE, BLOCK, allow_short=True)
        both[split] = set(answers(tokenizer, rows.get(np.arange(len(rows)))).values())
        assert rows.stats["pairs"] == made[0].splits[split]["documents"]
    assert len(both["val"]) > 0
    facts = describe_store(tmp_path / "one")
    assert facts["kind"] == "pairs" and "▸ chosen: yes" in facts["examples"]["train"][0]


def test_parquet_has_the_same_columns(tokenizer: Tokenizer, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows_of()), tmp_path / "pairs.parquet")
    info = prepare(tmp_path / "pairs.parquet", tmp_path / "store", tokenizer)
    assert info.about["kind"] == "pairs" and info.splits["train"]["documents"] == 40


def test_batches_and_blank_validation_rows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """batch(step) is pure, two sources of pairs mix, and what fills a validation batch holds no pair."""
    files = []
    for name, count in (("a", 40), ("b", 25)):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows_of(count)))
    settings = DataSettings(root=str(tmp_path), val_fraction=0.2)

    def opened(split: str) -> list[tuple[Sampling, Any]]:
        samplings = [Sampling(str(file), 0.5, DatasetStyle.CONTRASTIVE) for file in files]
        return [(s, open_dataset(s, tokenizer, None, split, BLOCK, settings=settings)) for s in samplings]

    plan = DataPlan([opened("train")], 4, 0, validation=opened("val"), validation_count=3)
    whole = plan.batch(3)
    for name, values in plan.batch(3, slice(1, 3)).items():
        np.testing.assert_array_equal(values, whole[name][1:3])
    assert plan.validation is not None
    last = plan.validation.batch(0, len(plan.validation) + 2)
    assert (last["pair_ids"][-2:] == -1).all() and (last["segment_ids"][-2:] == 0).all()
    assert (last["pair_ids"][:-2, 0] >= 0).all()


def test_pairs_and_documents_in_one_mixture_are_refused_with_sources_and_fields(
    packed: Any, tokenizer: Tokenizer
) -> None:
    """Rows of documents have no pair_ids; what stood there used to be whatever the memory held."""
    documents = make_rows(["one text", "another text"], DatasetStyle.PADDED, BLOCK, tokenizer=tokenizer)
    mixture = [
        (Sampling("pairs.jsonl", 0.5, DatasetStyle.CONTRASTIVE), packed),
        (Sampling("texts.jsonl", 0.5, DatasetStyle.PADDED), documents),
    ]
    message = r"'pairs.jsonl' \(CONTRASTIVE\) has pair_ids .* 'texts.jsonl' \(PADDED\) has only input_ids"
    with pytest.raises(InputError, match=message):
        DataPlan([mixture], 8, seed=0)
    with pytest.raises(InputError, match=message):  # also when they are in different stages
        stages = [[(Sampling(s.name, 1.0, s.style), rows)] for s, rows in mixture]
        DataPlan(stages, 8, seed=0, boundaries=[3])
    with pytest.raises(InputError, match=message):
        DataPlan([[(Sampling("a"), packed)]], 8, seed=0, validation=mixture, validation_count=4)


@pytest.mark.parametrize("style", list(DatasetStyle))
def test_rows_return_the_fields_they_declare(style: DatasetStyle, tokenizer: Tokenizer) -> None:
    data = rows_of() if style is DatasetStyle.CONTRASTIVE else ["a text of some words " * 9] * 5
    rows = make_rows(data, style, BLOCK, tokenizer=tokenizer)
    assert fields_of(rows.get(np.arange(2))) == rows.fields
