"""Streaming text: nothing half, nothing of a stop string, and joined exactly the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.errors import InputError
from bessemer.generate import StopDetector, TextStream
from tiny_run import tiny_tokenizer

TEXT = st.text("ab<>|", max_size=40)
STOPS = st.lists(st.text("ab<>|", min_size=1, max_size=5), max_size=3)


def reference(text, stops):
    """The text before the stop string that ends first, found by looking at every beginning of the text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], max(ending, key=len)
    return text, None


@settings(max_examples=300)
@given(TEXT, STOPS, st.lists(st.integers(0, 6), max_size=40))
def test_a_stop_string_is_found_however_the_text_is_cut(text, stops, sizes):
    detector, pieces, at = StopDetector(stops), [], 0
    expected, found = reference(text, stops)
    for size in [*sizes, len(text)]:
        pieces.append(detector.push(text[at : at + size]))
        at += size
        assert expected.startswith("".join(pieces))  # nothing that has to be taken back
    pieces.append(detector.finish())
    assert "".join(pieces) == expected and detector.found == found


def test_text_is_held_only_while_it_may_become_a_stop_string():
    detector = StopDetector(["<|end|>"])
    assert [detector.push(piece) for piece in ("a<", "|e", "x<|en", "d|>b", "c")] == ["a", "", "<|ex", "", ""]
    assert detector.found == "<|end|>"
    with pytest.raises(InputError):
        StopDetector(["a", ""])


@settings(max_examples=150)
@given(st.text(max_size=20), st.lists(st.integers(0, 299), max_size=12), st.lists(st.integers(1, 5), max_size=60))
def test_pieces_join_to_the_decoded_text_and_no_character_is_cut(text, noise, sizes):
    """Any text (several tokens a character), and any tokens at all: a model writes what it likes."""
    tokenizer = tiny_tokenizer()
    for ids in (tokenizer.encode(text), [*noise, *tokenizer.encode(text), *noise]):
        stream, pieces, at = TextStream(tokenizer), [], 0
        whole = tokenizer.decode(ids)
        for size in [*sizes, len(ids)]:
            if at < len(ids):
                pieces.append(stream.push(ids[at : at + size]))
                at += size
                assert whole.startswith("".join(pieces))
        pieces.append(stream.finish())
        assert "".join(pieces) == whole


def test_a_character_of_four_bytes_comes_whole():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("a🙂b")
    stream = TextStream(tokenizer)
    assert [stream.push([token]) for token in ids] == ["a", "", "", "", "🙂", "b"]
    assert stream.finish() == ""
    cut = TextStream(tokenizer)
    assert cut.push(ids[:3]) + cut.finish() == tokenizer.decode(ids[:3]) == "a\ufffd"


def test_a_stop_string_over_several_tokens_names_the_token_that_completed_it():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("one STOP two")
    stream = TextStream(tokenizer, ["STOP"])
    text, taken = stream.push_until_stop(ids)
    assert (text, stream.stop) == ("one ", "STOP") and tokenizer.decode(ids[:taken]).endswith("STOP")
    assert stream.push([5]) == "" and stream.finish() == ""
