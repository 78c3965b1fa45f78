"""The tokenizer: round trips, specials, bytes per token, foreign files."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data import SPECIAL_TOKENS, Tokenizer
from bessemer.errors import InputError, StorageError

TEXT = "def main(arguments):\n    return len(arguments) + 12345\n\nthe quick brown fox — naïve café 世界\n" * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT], 400)


@given(st.text())
@settings(max_examples=200)
def test_round_trip_and_bytes(text):
    tokenizer = _shared()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())


_CACHE: list[Tokenizer] = []


def _shared() -> Tokenizer:
    if not _CACHE:
        _CACHE.append(Tokenizer.train([TEXT], 400))
    return _CACHE[0]


def test_specials_are_first_and_weigh_nothing(tokenizer):
    assert [tokenizer.specials[name] for name in SPECIAL_TOKENS] == list(range(12))
    assert tokenizer.bos_id == 0 and tokenizer.pad_id == 11
    assert (tokenizer.token_bytes[:12] == 0).all() and (tokenizer.token_bytes[12:] > 0).all()
    assert tokenizer.token_bytes.dtype == np.int32 and tokenizer.token_bytes.shape == (tokenizer.vocab_size,)


def test_special_names_in_text_stay_text(tokenizer):
    ids = tokenizer.encode("a<|bos|>b")
    assert tokenizer.bos_id not in ids and tokenizer.decode(ids) == "a<|bos|>b"
    assert tokenizer.bos_id in tokenizer.encode("a<|bos|>b", allow_special=True)


def test_digits_in_groups_of_at_most_two(tokenizer):
    trained = Tokenizer.train(["1234567890 " * 500], 400)
    pieces = [trained.decode([i]) for i in trained.encode("1234567")]
    assert pieces == ["12", "34", "56", "7"]


def test_training_is_repeatable_and_saved_exactly(tokenizer, tmp_path):
    again = Tokenizer.train([TEXT], 400)
    assert again.hash == tokenizer.hash
    tokenizer.save(tmp_path / "t")
    for path in (tmp_path / "t", tmp_path / "t" / "tokenizer.json"):
        assert Tokenizer.load(path).hash == tokenizer.hash
    assert Tokenizer(tokenizer.to_json()).encode(TEXT) == tokenizer.encode(TEXT)
    assert tokenizer.encode_batch(["a b", TEXT]) == [tokenizer.encode("a b"), tokenizer.encode(TEXT)]


def test_bad_files_are_input_errors(tmp_path):
    with pytest.raises(InputError, match="too small"):
        Tokenizer.train(["a"], 100)
    with pytest.raises(InputError, match="no tokenizer"):
        Tokenizer.load(tmp_path / "missing")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"not a readable tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_foreign_tokenizer_without_bos_says_what_to_add(tokenizer, tmp_path):
    described = json.loads(tokenizer.to_json())
    described["added_tokens"] = []
    described["model"]["vocab"] = {k: v for k, v in described["model"]["vocab"].items() if v >= 12}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(InputError, match="begin a document"):
        Tokenizer.load(tmp_path)
    described["added_tokens"] = [
        {
            "id": 0,
            "content": "<s>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.specials == {"<s>": loaded.bos_id} and loaded.decode([loaded.bos_id]) == "<s>"


def test_a_word_without_end_does_not_hold_up_training():
    """Merging costs the square of a word's length; ordinary text beside it is learned from as it is."""
    plain = Tokenizer.train([TEXT], 400)
    assert Tokenizer.train([TEXT, ""], 400).to_json() == plain.to_json()
    endless = ["x" * 3_000_000, "=" * 300_000, " " * 300_000, "ab" * 500_000]
    learned = Tokenizer.train([TEXT, *endless], 300)
    assert learned.decode(learned.encode(endless[3][:5000])) == endless[3][:5000]


def test_what_is_no_unicode_is_an_input_error(tokenizer):
    for text in ("half \ud800 of a pair", b"\xff".decode("utf-8", "surrogateescape")):
        with pytest.raises(InputError, match="not valid Unicode"):
            tokenizer.encode(text)
        with pytest.raises(InputError, match="not valid Unicode"):
            tokenizer.encode_batch(["fine", text])


def test_a_place_that_cannot_be_written_is_a_storage_error(tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot make the directory"):
        tokenizer.save(tmp_path / "file")
    (tmp_path / "taken" / "tokenizer.json").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"cannot write .*tokenizer\.json"):
        tokenizer.save(tmp_path / "taken")
