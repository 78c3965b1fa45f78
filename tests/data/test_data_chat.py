"""Conversations as tokens: what is learned is the assistant's words and its end of turn, whatever the template."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.chat_forms import CHATML, Form, forms, with_specials

from bessemer.cli.data import command
from bessemer.data import DatasetStyle, Tokenizer, TokenStore, make_rows, prepare
from bessemer.data.stores.catalog import sample_texts
from bessemer.data.stores.prepare import as_source
from bessemer.data.tokenize import chat
from bessemer.data.tokenize.documents import Bad, document_of
from bessemer.data.tokenize.templates import ChatTemplate
from bessemer.errors import InputError

NAMES = sorted({name for form in forms() for name in form.tokenizer.specials})
texts = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=("Cs",)), max_size=8), st.sampled_from(NAMES)), max_size=4
).map("".join)
exchanges = st.lists(st.tuples(texts, texts), min_size=1, max_size=3)
each_form = pytest.mark.parametrize("form", forms(), ids=lambda form: form.name)


def messages_of(said: list[tuple[str, str]], system: str | None = None) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in said:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def runs(ids: list[int], mask: list[int]) -> list[list[int]]:
    """Stretches of neighboring supervised tokens."""
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return [ids[a:b] for a, b in pairwise(edges) if mask[a]]


@each_form
@settings(max_examples=40)
@given(said=exchanges, system=st.none() | texts)
def test_what_is_learned_is_what_the_assistant_says_and_its_end(form: Form, said, system) -> None:
    """Also: what looks like a special token is text, and a prompt is the beginning of what was trained on."""
    tokenizer, messages = form.tokenizer, messages_of(said, system)
    ids, mask = chat.supervised(messages, tokenizer)
    spans = runs(ids, mask)
    end = tokenizer.id_of(form.end)
    assert [tokenizer.decode(span[:-1]) for span in spans] == [form.said(answer) for _, answer in said]
    assert all(span[-1] == end and end in chat.stop_ids(tokenizer) for span in spans)
    harmless = messages_of([("a", "b") for _ in said], None if system is None else "c")
    specials = set(tokenizer.specials.values())
    skeleton = [token for token in chat.supervised(harmless, tokenizer)[0] if token in specials]
    assert [token for token in ids if token in specials] == skeleton
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = chat.render(messages[:place], tokenizer)
            assert prompt == ids[: len(prompt)] and mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]


@each_form
@settings(max_examples=25)
@given(said=st.lists(exchanges, min_size=1, max_size=5), block=st.integers(4, 48), style=st.data())
def test_rows_train_on_those_tokens_and_no_others(form: Form, said, block, style) -> None:
    """Packed: all of them, once. Padded: those the truncation leaves."""
    tokenizer = form.tokenizer
    rows_of = [{"messages": messages_of(one)} for one in said]
    written = [chat.supervised(row["messages"], tokenizer) for row in rows_of]
    packed = make_rows(rows_of, DatasetStyle.PACKED, block, tokenizer=tokenizer, allow_short=True)
    batch = packed.get(np.arange(len(packed)))
    learned = [token for ids, mask in written for token, one in zip(ids, mask, strict=True) if one]
    assert sorted(batch["target_ids"][batch["target_ids"] >= 0]) == sorted(learned)
    assert ((batch["target_ids"] >= 0) == (batch["loss_mask"] > 0)).all()
    assert (batch["target_ids"] >= 0).any(axis=1).all(), "a row without a loss"
    if all(len(ids) <= block + 1 for ids, _ in written):  # whole: each piece is one conversation
        pieces = [
            row["target_ids"][(row["segment_ids"] == part) & (row["target_ids"] >= 0)].tolist()
            for row in ({name: array[i] for name, array in batch.items()} for i in range(len(packed)))
            for part in range(1, row["segment_ids"].max() + 1)
        ]
        assert sorted(map(tokenizer.decode, pieces)) == sorted(
            "".join(form.said(answer) + form.end for _, answer in one) for one in said
        )
    truncation = style.draw(st.sampled_from(["keep_end", "keep_start"]))
    kept = [
        (pair[0][-block - 1 :], pair[1][-block - 1 :])
        if truncation == "keep_end"
        else (pair[0][: block + 1], pair[1][: block + 1])
        for pair in written
    ]
    wanted = [[t for t, one in zip(ids[1:], mask[1:], strict=True) if one] for ids, mask in kept]
    given = {"tokenizer": tokenizer, "truncation": truncation}
    if not all(wanted):
        with pytest.raises(InputError, match=r"have nothing to train on|no example has anything"):
            make_rows(rows_of, DatasetStyle.PADDED, block, **given)
    if any(wanted):
        padded = make_rows(rows_of, DatasetStyle.PADDED, block, on_empty="skip", **given)
        batch = padded.get(np.arange(len(padded)))
        assert [row[row >= 0].tolist() for row in batch["target_ids"]] == [one for one in wanted if one]
        assert padded.stats["without_targets"] == sum(not one for one in wanted)
        long = [len(ids) > block + 1 for ids, _ in written]
        assert padded.stats["truncated"] == sum(a and bool(b) for a, b in zip(long, wanted, strict=True))


def test_tool_calls_are_learned_and_tool_outputs_never() -> None:
    tokenizer = forms()[0].tokenizer
    parts = [
        {"type": "text", "text": "It is "},
        {"type": "python", "text": "3*4"},
        {"type": "python_output", "text": "12"},
        {"type": "text", "text": "."},
    ]
    messages = [{"role": "user", "content": "3*4?"}, {"role": "assistant", "content": parts}]
    ids, mask = chat.supervised(messages, tokenizer)
    spans = [tokenizer.decode(span) for span in runs(ids, mask)]
    assert spans == ["It is <|python_start|>3*4<|python_end|>", ".<|assistant_end|>"]
    assert "<|output_start|>12<|output_end|>" in tokenizer.decode(ids)
    wrong = [
        [{"role": "user", "content": parts}],
        [{"role": "tool", "content": "12"}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}],
        [{"role": "assistant", "content": [{"type": "image", "text": "x"}]}],
        [{"role": "assistant", "content": 3}],
        [{"role": "assistant", "content": "\ud800"}],
        [{"role": "user", "content": "no answer"}],
    ]
    for messages in wrong:
        with pytest.raises(InputError, match=r"chat message|part of|content|surrogate|nothing to learn"):
            chat.supervised(messages, tokenizer)


def test_rows_of_every_kind_are_conversations() -> None:
    tokenizer = forms()[0].tokenizer
    want = document_of({"messages": messages_of([("Say hi.\n\nTo me.", "Hi.")])}, "here", None, tokenizer)
    rows = [
        {"prompt": "Say hi.\n\nTo me.", "completion": "Hi."},
        {
            "prompt": [{"role": "user", "content": "Say hi.\n\nTo me."}],
            "completion": [{"role": "assistant", "content": "Hi."}],
        },
        {"instruction": "Say hi.", "input": "To me.", "output": "Hi."},
        {"instruction": "Say hi.\n\nTo me.", "input": "", "output": "Hi.", "source": "x"},
        {"instruction": "Say hi.\n\nTo me.", "input": None, "output": "Hi."},
        {"question": "Say hi.\n\nTo me.", "answer": "Hi."},
        {"conversations": [{"from": "human", "value": "Say hi.\n\nTo me."}, {"from": "gpt", "value": "Hi."}]},
    ]
    assert want.mask and all(document_of(row, "here", None, tokenizer) == want for row in rows)
    named = {"text": "other", "turns": messages_of([("Say hi.\n\nTo me.", "Hi.")])}
    assert document_of(named, "here", "turns", tokenizer) == want
    assert document_of(named, "here", None, tokenizer).text == "other"
    assert isinstance(document_of(rows[0], "here", "turns", tokenizer), Bad)


def test_a_template_travels_with_its_tokenizer(tmp_path) -> None:
    form = forms()[1]
    form.tokenizer.save(tmp_path / "a")
    again = Tokenizer.load(tmp_path / "a")
    plain = Tokenizer(form.tokenizer.to_json())
    assert again.hash == form.tokenizer.hash != plain.hash
    messages = messages_of([("Hi", "Hello")], "Be kind.")
    assert chat.supervised(messages, again) == chat.supervised(messages, form.tokenizer)
    plain.save(tmp_path / "b")
    (tmp_path / "b" / "chat_template.jinja").write_text(CHATML)
    assert chat.render(messages[:2], Tokenizer.load(tmp_path / "b")) == chat.render(messages[:2], again)
    several = {"chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": CHATML}]}
    several["eos_token"] = {"content": "<|im_end|>"}
    (tmp_path / "b" / "chat_template.jinja").unlink()
    (tmp_path / "b" / "tokenizer_config.json").write_text(json.dumps(several))
    assert Tokenizer.load(tmp_path / "b").hash == form.tokenizer.hash
    (tmp_path / "b" / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path / "b")


LAST_ONLY = "{% for m in messages %}{{ m.content if loop.last else '…' }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (LAST_ONLY, "changes earlier text"),
        ("{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}", "could not learn to stop"),
        ("{% for m in messages %}", "mistake in line 1"),
        ("{{ ''.__class__.__mro__ }}", "refuses the conversation"),
        ("{{ messages[0].absent.deeper }}", "refuses the conversation"),
        ("{{ raise_exception('no systems here') }}", "no systems here"),
        (CHATML.replace("<|im_start|>", "[ASK]"), r"\[ASK\], which chatml does not know"),
    ],
)
def test_a_template_that_cannot_be_used_says_why(template: str, problem: str) -> None:
    tokens = {"eos_token": "<|im_end|>", "unk_token": "[ASK]"}
    text = with_specials("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = Tokenizer(text, "chatml", ChatTemplate(template, tokens))
    with pytest.raises(InputError, match=problem):
        chat.supervised(messages_of([("a", "b"), ("c", "d")]), tokenizer)


def test_templates_may_mark_what_is_generated_and_tokens_may_swallow_spaces() -> None:
    marked = CHATML.replace("{{ '<|im_start|>'", "{% generation %}{{ '<|im_start|>'", 1)
    marked = marked.replace("}}\n{%- endfor", "}}{% endgeneration %}\n{%- endfor", 1)
    assert "endgeneration" in marked
    form, messages = forms()[1], messages_of([("a", " b ")])
    tokens = {"eos_token": "<|im_end|>"}
    tokenizer = Tokenizer(form.tokenizer.to_json(), "marked", ChatTemplate(marked, tokens))
    assert chat.supervised(messages, tokenizer) == chat.supervised(messages, form.tokenizer)
    described = json.loads(form.tokenizer.to_json())
    next(t for t in described["added_tokens"] if t["content"] == "<|im_end|>").update(lstrip=True, rstrip=True)
    greedy = Tokenizer(json.dumps(described), "greedy", ChatTemplate(CHATML, tokens))
    ids, mask = chat.supervised(messages, greedy)
    assert greedy.decode(ids) == "<|im_start|>user\na<|im_end|><|im_start|>assistant\n b<|im_end|>"
    whole = greedy.encode(greedy.chat_template.render(messages, False), allow_special=True)
    assert ids == whole and sum(mask) == len(greedy.encode(" b")) + 1


def test_only_the_first_words_get_the_space_of_a_sentencepiece_tokenizer() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    pieces = ["<s>", "</s>", "[INST]", "[/INST]", "▁", *map(chr, range(33, 127))]
    backend = Backend(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(pieces[:4])
    mistral = forms()[3].tokenizer.chat_template
    tokenizer = Tokenizer(backend.to_str(), "metaspace", mistral)
    messages = messages_of([("ab", "cd"), ("ef", "gh")])
    ids, mask = chat.supervised(messages, tokenizer)
    assert ids == tokenizer.encode(mistral.render(messages, False), allow_special=True)
    assert [tokenizer.id_of(c) for c in "▁cd"] == runs(ids, mask)[0][:-1]


def write_jsonl(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("form", forms()[:2], ids=lambda form: form.name)
def test_a_file_of_conversations_becomes_a_store(form: Form, tmp_path) -> None:
    """By workers too, which find the template beside the tokenizer; `inspect` says what is masked."""
    said = [[(f"How many are {n}?", f"There are {n}.")] for n in range(30)]
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages_of(one), "source": "x"} for one in said])
    info = prepare(file, tmp_path / "one", form.tokenizer, shard_bytes=2048)
    written = [chat.supervised(messages_of(one), form.tokenizer) for one in said]
    store = TokenStore(tmp_path / "one")
    assert store.tokens.tolist() == [token for ids, _ in written for token in ids]
    assert store.mask.tolist() == [one for _, mask in written for one in mask]
    assert info.splits["train"]["supervised"] == store.mask.sum()
    assert info.splits["train"]["bytes"] == sum(len(f"{q}\n{a}") for one in said for q, a in one)
    if form.name == "chatml":
        prepare(file, tmp_path / "two", form.tokenizer, shard_bytes=2048, workers=2)
        assert TokenStore(tmp_path / "two").fingerprint == store.fingerprint
    assert Tokenizer.load(tmp_path / "one").hash == form.tokenizer.hash
    shown = CliRunner().invoke(command, ["inspect", str(tmp_path / "one")], catch_exceptions=False).stdout
    share = store.mask.mean()
    assert f"({share:.1%}) are trained on, {1 - share:.1%} are masked" in shown
    assert "How many are 0" in "".join(sample_texts([as_source(file)]))


@pytest.mark.parametrize("form", forms(), ids=lambda form: form.name)
def test_threads_that_encode_do_not_change_a_byte(form: Form, tmp_path, monkeypatch) -> None:
    """Order, lines that are skipped, and rows of ids beside conversations: as one thread writes them."""
    rng = random.Random(0)
    rows: list[dict] = []
    for number in range(300):
        turns = [(f"How many are {n}? " * rng.randint(1, 9), "x " * rng.randint(1, 400)) for n in range(number % 3 + 1)]
        rows.append({"messages": messages_of(turns)})
        if number % 50 == 7:
            rows.append({"messages": rows[-1]["messages"][:1]})
        if number % 50 == 9:
            rows.append({"input_ids": [1, 2, number % 7], "loss_mask": [0, 1, 1]})
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    pairs = [{"prompt": f"a{n}", "chosen": "b " * (n + 1), "rejected": "c"} for n in range(60)]
    judged = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    seen = []
    for threads in (1, 2, 8):
        monkeypatch.setattr("bessemer.data.stores.prepare.encoding_threads", lambda threads=threads: threads)
        monkeypatch.setattr("bessemer.data.tokenize.documents.MOST_AHEAD", 1000 * threads)
        out = tmp_path / str(threads)
        abouts = [
            prepare(source, out / name, form.tokenizer, on_error="skip", val_fraction=0.1).about
            for name, source in (("files", file), ("pairs", judged), ("python", rows))
        ]
        files = {str(path.relative_to(out)): path for path in sorted(out.rglob("*")) if path.is_file()}
        seen.append({name: path.read_bytes() for name, path in files.items() if path.name != ".lock"})
        assert [about["skipped"] for about in abouts] == [6, 0, 6] and "line 9:" in abouts[0]["skipped_where"][0]
    assert seen[0] == seen[1] == seen[2]


def test_a_bad_conversation_says_file_line_and_reason(tmp_path) -> None:
    good = {"messages": messages_of([("a", "b")])}
    odd = {"messages": [{"role": "assistant", "content": "first"}, *good["messages"]]}
    file = write_jsonl(tmp_path / "a.jsonl", [good, good, {"messages": good["messages"][:1]}, odd, good])
    mistral = forms()[3].tokenizer
    with pytest.raises(InputError, match=r"a\.jsonl line 3: the conversation has no message of the assistant"):
        prepare(file, tmp_path / "store", mistral)
    info = prepare(file, tmp_path / "store", mistral, on_error="skip")
    assert info.about["skipped"] == 2 and info.splits["train"]["documents"] == 3
    assert "line 4" in info.about["skipped_where"][1] and "take turns" in info.about["skipped_where"][1]


def test_parquet_holds_conversations_too(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokenizer = forms()[0].tokenizer
    rows = [{"messages": messages_of([(f"a{n}", f"b{n}")]), "id": n} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    prepare(str(tmp_path / "a.parquet"), tmp_path / "a", tokenizer)
    alpaca = [{"instruction": f"a{n}", "input": "", "output": f"b{n}"} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(alpaca), tmp_path / "b.parquet")
    prepare(str(tmp_path / "b.parquet"), tmp_path / "b", tokenizer)
    stores = [TokenStore(tmp_path / name) for name in "ab"]
    assert stores[0].fingerprint == stores[1].fingerprint and stores[0].mask.any()
