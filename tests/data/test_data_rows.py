"""Rows: every token is a target exactly once where it must be, and everything left out is counted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data import ArrayStore, DatasetStyle, Tokenizer, TokenStore, make_rows, prepare
from bessemer.data.rows.build import CroppedRows, crop, pack
from bessemer.errors import InputError

PAD = 1
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(lambda lengths: sum(lengths) >= 2)
BLOCKS = st.integers(1, 17)


def store_with(lengths, masks=None) -> ArrayStore:
    """Every token is a different number, so that a row says where each came from."""
    ends = np.cumsum(lengths)
    documents = [np.arange(end - n, end) + 10 for end, n in zip(ends, lengths, strict=True)]
    return ArrayStore.of(documents, masks, {"vocab_size": 1 << 20, "pad_id": PAD})


def all_rows(rows):
    return rows.get(np.arange(len(rows)))


def check_shapes(batch, rows, block):
    kinds = {"input_ids": "i4", "target_ids": "i4", "positions": "i4", "segment_ids": "i4", "loss_mask": "f4"}
    assert set(batch) == set(kinds)
    for name, kind in kinds.items():
        assert batch[name].shape == (len(rows), block) and batch[name].dtype == kind, name
    real = batch["target_ids"] >= 0
    assert (batch["loss_mask"] == real).all()
    padding = batch["segment_ids"] == 0
    assert not real[padding].any() and (batch["input_ids"][padding] == PAD).all()
    # the target follows the input in its document or stream; CROPPED puts documents in another order
    segments = batch["segment_ids"]
    if isinstance(rows, CroppedRows):
        real = real & (segments == np.concatenate([segments[:, 1:], np.zeros_like(segments[:, :1])], axis=1))
    assert (batch["target_ids"][real] == batch["input_ids"][real] + 1).all()


@given(LENGTHS, BLOCKS)
@settings(max_examples=100)
def test_pmd_targets_every_token_but_the_first_once(lengths, block):
    store = store_with(lengths)
    rows = make_rows(store, DatasetStyle.PMD, block, allow_short=True)
    batch = all_rows(rows)
    check_shapes(batch, rows, block)
    targets = batch["target_ids"][batch["target_ids"] >= 0]
    assert sorted(targets) == store.tokens[1:].tolist()
    assert rows.stats["target_tokens"] == len(targets)
    assert (batch["positions"] == np.arange(block)).all()
    # segments: 1, 2, … and a new one exactly where a document begins
    begins = set((store.offsets[:-1][np.diff(store.offsets) > 0] + 10).tolist())
    for ids, segments in zip(batch["input_ids"], batch["segment_ids"], strict=True):
        real = segments > 0
        new = np.diff(segments[real], prepend=0)
        assert new[0] == 1 and set(new.tolist()) <= {0, 1}
        assert [bool(n) for n in new[1:]] == [int(i) in begins for i in ids[real][1:]]


@given(LENGTHS, BLOCKS)
@settings(max_examples=100)
def test_packed_targets_every_token_but_each_documents_first_once(lengths, block):
    store = store_with(lengths)
    if max(lengths) < 2:
        return
    rows = make_rows(store, DatasetStyle.PACKED, block, allow_short=True)
    batch = all_rows(rows)
    check_shapes(batch, rows, block)
    first = set(store.offsets[:-1][np.diff(store.offsets) > 0].tolist())
    wanted = [t + 10 for t in range(len(store.tokens)) if t not in first]
    targets = batch["target_ids"][batch["target_ids"] >= 0]
    assert sorted(targets) == wanted and rows.stats["target_tokens"] == len(wanted)
    document = np.searchsorted(store.offsets, batch["input_ids"] - 10, side="right")
    for row in range(len(rows)):  # one document a segment, positions counted inside it
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            here = batch["segment_ids"][row] == segment
            assert len(set(document[row][here])) == 1
            assert batch["positions"][row][here].tolist() == list(range(here.sum()))


def slow_best_fit(sizes, capacity):
    """The rule itself, one row at a time."""
    left, rows = sorted(sizes), []
    while left:
        room, row = capacity, []
        while True:
            fitting = [size for size in left if size <= room]
            if not fitting:
                break
            row.append(max(fitting))
            left.remove(row[-1])
            room -= row[-1]
        rows.append(row)
    return rows


@given(st.lists(st.integers(2, 30), min_size=1, max_size=60), st.integers(2, 20))
@settings(max_examples=150)
def test_packing_is_best_fit(lengths, block):
    plan = pack(np.concatenate([[0], np.cumsum(lengths)]), block)
    rows = [plan.lengths[plan.first[i] : plan.first[i + 1]].tolist() for i in range(len(plan))]
    pieces = [piece for n in lengths for piece in [block] * ((n - 1) // block) + [(n - 1) % block] if piece]
    assert sorted(map(tuple, rows)) == sorted(map(tuple, slow_best_fit(pieces, block)))


def test_packing_two_million_documents_is_fast():
    """Seconds; comparing all pairs would take days, which the limit of a test ends."""
    lengths = np.random.default_rng(0).geometric(1 / 300, 2_000_000) + 1
    plan = pack(np.concatenate([[0], np.cumsum(lengths)]), 2048)
    assert plan.lengths.sum() == (lengths - 1).sum()
    assert plan.lengths.sum() / (len(plan) * 2048) > 0.999


@given(LENGTHS, BLOCKS, st.integers(1, 8))
@settings(max_examples=100)
def test_cropped_rows_are_full_and_begin_with_a_document(lengths, block, buffer):
    store = store_with(lengths)
    plan = crop(store.offsets, block, buffer)
    sums = [plan.lengths[plan.first[i] : plan.first[i + 1]].sum() for i in range(len(plan))]
    assert set(sums) <= {block + 1}
    assert set(plan.starts.tolist()) <= set(store.offsets[:-1].tolist())
    assert len(set(plan.starts.tolist())) == len(plan.starts)  # no document twice
    if sum(lengths) > block:
        rows = make_rows(store, DatasetStyle.CROPPED, block)
        batch = all_rows(rows)
        check_shapes(batch, rows, block)
        assert (batch["segment_ids"] > 0).all() and (batch["loss_mask"] == 1).all()
        kept = len(rows) * (block + 1)
        assert rows.stats["cropped_share"] == pytest.approx(1 - kept / len(store.tokens))
        assert (batch["positions"] == np.arange(block)).all()


def _longest(document):
    return (document[1], -document[0])


def slow_crop(lengths, capacity, buffer):
    """nanochat's loop, written down plainly."""
    waiting, held, rows, row, left = list(enumerate(lengths)), [], [], [], capacity
    while True:
        while len(held) < buffer and waiting:
            if waiting[0][1]:
                held.append(waiting.pop(0))
            else:
                waiting.pop(0)
        if not held:
            return rows
        fitting = [d for d in held if d[1] <= left]
        pick = max(fitting, key=_longest) if fitting else min(held, key=_longest)
        held.remove(pick)
        row.append((pick[0], min(pick[1], left)))
        left -= row[-1][1]
        if not left:
            rows.append(row)
            row, left = [], capacity


@given(LENGTHS, BLOCKS, st.integers(1, 8))
@settings(max_examples=100)
def test_cropping_is_nanochats_rule(lengths, block, buffer):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    plan = crop(offsets, block, buffer)
    wanted = slow_crop(lengths, block + 1, buffer)
    flat = [(offsets[document], taken) for row in wanted for document, taken in row]
    assert list(zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True)) == flat
    assert np.diff(plan.first).tolist() == [len(row) for row in wanted]


@pytest.mark.parametrize(("truncation", "kept"), [("keep_end", slice(-9, None)), ("keep_start", slice(0, 9))])
def test_padded_is_one_example_a_row(truncation, kept):
    store = store_with([5, 12, 1, 9, 2])
    with pytest.raises(InputError, match="1 examples have nothing to train on"):
        make_rows(store, DatasetStyle.PADDED, 8, truncation=truncation)
    rows = make_rows(store, DatasetStyle.PADDED, 8, truncation=truncation, on_empty="skip")
    batch = all_rows(rows)
    check_shapes(batch, rows, 8)
    assert len(rows) == 4
    counted = {name: rows.stats[name] for name in ("truncated", "truncated_tokens", "without_targets")}
    assert counted == {"truncated": 1, "truncated_tokens": 3, "without_targets": 1}
    for row, document in enumerate([0, 1, 3, 4]):
        tokens = store.tokens[store.offsets[document] : store.offsets[document + 1]][kept]
        assert batch["input_ids"][row][: len(tokens) - 1].tolist() == tokens[:-1].tolist()
        assert batch["target_ids"][row].tolist() == tokens[1:].tolist() + [-1] * (9 - len(tokens))


@pytest.mark.parametrize("style", [DatasetStyle.PMD, DatasetStyle.PACKED, DatasetStyle.CROPPED, DatasetStyle.PADDED])
def test_the_mask_takes_targets_away(style):
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 30, 40)
    masks = [(rng.random(n) < 0.5).astype(np.uint8) for n in lengths]
    for mask in masks:
        mask[-1] = 1
    store, plain = store_with(lengths, masks), store_with(lengths)
    batch, without = all_rows(make_rows(store, style, 16)), all_rows(make_rows(plain, style, 16))
    assert (batch["input_ids"] == without["input_ids"]).all()
    targets = without["target_ids"]
    trained = (targets >= 0) & (store.mask[np.maximum(targets - 10, 0)] > 0)
    assert (batch["target_ids"] == np.where(trained, targets, -1)).all()
    assert (batch["loss_mask"] == trained).all()
    stats = make_rows(store, style, 16).stats
    assert stats["target_tokens"] == trained.sum()
    if style is DatasetStyle.PACKED:
        assert stats["split_documents"] == (lengths > 17).sum() > 0


def test_too_little_data_and_later_styles():
    store = store_with([5, 5])
    for style in (DatasetStyle.PMD, DatasetStyle.PACKED, DatasetStyle.CROPPED):
        with pytest.raises(InputError, match="block_size=64 needs at least 65 tokens, but the data has 10"):
            make_rows(store, style, 64)
    assert len(make_rows(store, DatasetStyle.PMD, 64, allow_short=True)) == 1
    assert len(make_rows(store, DatasetStyle.CROPPED, 64, allow_short=True)) == 1
    with pytest.raises(InputError, match="CONTRASTIVE"):
        make_rows(store, DatasetStyle.CONTRASTIVE, 4)
    with pytest.raises(InputError, match="keep_end or keep_start"):
        make_rows(store, DatasetStyle.PADDED, 4, truncation="middle")


def test_plans_are_kept_beside_the_store_and_read_only_stores_work(tmp_path, monkeypatch):
    tokenizer = Tokenizer.train(["words " * 100], 280)
    prepare([{"text": f"words {i} " * (i % 9 + 1)} for i in range(60)], tmp_path / "s", tokenizer)
    store = TokenStore(tmp_path / "s")
    for style, function in ((DatasetStyle.PACKED, "pack"), (DatasetStyle.CROPPED, "crop")):
        first = all_rows(make_rows(store, style, 32))
        with monkeypatch.context() as patch:
            patch.setattr(f"bessemer.data.rows.build.{function}", None)
            again = all_rows(make_rows(store, style, 32))
            patch.undo()
            patch.setattr("bessemer.storage.files.os.rename", _refuse)
            unkept = all_rows(make_rows(store, style, 24))
        assert all((first[name] == again[name]).all() for name in first)
        kept = all_rows(make_rows(store, style, 24))
        assert all((unkept[name] == kept[name]).all() for name in kept)
    assert not list((tmp_path / "s" / "train" / ".plans").glob("*.tmp"))


def _refuse(*_):
    raise PermissionError("read-only")


def test_documents_from_python():
    tokenizer = Tokenizer.train(["some words here " * 50], 280)
    rows = make_rows(["some words", "more"], DatasetStyle.PADDED, 16, tokenizer=tokenizer)
    assert len(rows) == 2 and rows.get(np.array([0]))["input_ids"][0, 0] == tokenizer.bos_id
    mixed = [{"input_ids": [3, 4, 5], "loss_mask": [0, 0, 1]}, {"text": "words"}]
    batch = all_rows(make_rows(mixed, DatasetStyle.PADDED, 4, tokenizer=tokenizer))
    assert batch["target_ids"][0].tolist() == [-1, 5, -1, -1]
    with pytest.raises(InputError, match="resumed exactly"):
        make_rows(iter(["a"]), DatasetStyle.PADDED, 4, tokenizer=tokenizer)
    with pytest.raises(InputError, match="need a tokenizer"):
        make_rows(["a"], DatasetStyle.PADDED, 4)
    with pytest.raises(InputError, match="example 1: 'text' is int"):
        make_rows(["a", {"text": 1}], DatasetStyle.PADDED, 4, tokenizer=tokenizer)


def test_fingerprints_name_content_style_and_size():
    store, other = store_with([30, 30]), store_with([30, 31])
    prints = {
        make_rows(s, style, block).fingerprint
        for s in (store, other)
        for style in (DatasetStyle.PMD, DatasetStyle.PACKED, DatasetStyle.CROPPED, DatasetStyle.PADDED)
        for block in (8, 9)
    }
    assert len(prints) == 16
    assert make_rows(store_with([30, 30]), DatasetStyle.PMD, 8).fingerprint in prints


def test_what_preparation_left_out_is_counted_in_the_rows(tmp_path):
    """Duplicates, empty documents and skipped lines reach the report as `dropped`."""
    source = tmp_path / "lines.jsonl"
    lines = ['{"text": "one two three four"}', '{"text": "one two three four"}', '{"text": ""}', "{broken"]
    source.write_text("\n".join([*lines, '{"text": "five six seven eight nine"}']) + "\n")
    tokenizer = Tokenizer.train(["one two three four five six seven eight nine"] * 4, 280)
    prepare([str(source)], tmp_path / "store", tokenizer, on_error="skip", dedup=True)
    rows = make_rows(TokenStore(tmp_path / "store"), DatasetStyle.PMD, 4)
    assert rows.stats["dropped"] == 3 and rows.stats["documents"] == 2
