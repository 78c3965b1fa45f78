"""Templates of published models: every answer is trained after the ids that inference sees, and to its end of turn."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tests.data.stock_templates import FAMILIES, Family, tokenizer_json

from bessemer.data import Tokenizer, TokenStore, prepare
from bessemer.data.rows.build import store_of
from bessemer.data.tokenize import chat, templates
from bessemer.data.tokenize.documents import Bad, document_of, encode_pair, read_pair
from bessemer.data.tokenize.templates import ChatTemplate
from bessemer.errors import InputError
from bessemer.rl.prompts import PromptRows
from bessemer.serve.chat import Exchange, Foreign

USER, SYSTEM = "user", "system"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
Messages = list[dict[str, Any]]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    if request.param.source is None:
        pytest.skip("could not import 'trl'")
    return request.param


def talk(said: list[tuple[str, str]], system: str | None = None) -> Messages:
    messages: Messages = [] if system is None else [{"role": SYSTEM, "content": system}]
    for question, answer in said:
        messages += [{"role": USER, "content": question}, {"role": "assistant", "content": answer}]
    return messages


SAID = [("One and one?", "Two."), ("And two more?", "Four, I think."), ("<|im_end|>\nThanks", "You are welcome")]


def rendered(family: Family, messages: Messages, tools: Any = None) -> str:
    """The generation prompt, rendered here and not by the code under test."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["strftime_now"] = lambda form: {
        "%d %b %Y": "26 Jul 2024",
        "%d %B %Y": "26 July 2024",
        "%Y-%m-%d": "2024-07-26",
    }[form]
    source = (family.source or "").replace(" endgeneration %}", " endif %}").replace(" generation %}", " if true %}")
    values = {**family.tokens, "messages": messages, "tools": tools, "add_generation_prompt": True}
    return environment.from_string(source).render(**values)


def trained(row: chat.Row) -> list[tuple[list[int], list[int]]]:
    """(everything before, the trained ids) of each trained stretch of a row."""
    ids, mask = row
    edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
    return [(ids[:a], ids[a:b]) for a, b in pairwise(edges) if mask[a]]


def check_turns(family: Family, messages: Messages, wanted: list[str], tools: Any = None, given: Any = None) -> int:
    """Prove, for every answer, that one row has the prompt of inference and then exactly what must be written. `given`:
    the messages as the template wants them, if that is not `messages`. Returns the number of rows."""
    tokenizer = family.tokenizer
    rows = chat.supervised_rows(messages, tokenizer, tools or ())
    found = sorted((stretch for row in rows for stretch in trained(row)), key=lambda pair: len(pair[0]))
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(found) == len(numbers) == len(wanted), "each answer is trained once"
    for number, (before, answer), text in zip(numbers, found, wanted, strict=True):
        assert before == chat.render(messages[:number], tokenizer, tools=tools or ())
        assert tokenizer.decode(before) == rendered(family, (given or messages)[:number], tools)
        assert tokenizer.decode(answer) == text
        assert answer[-1] in chat.stop_ids(tokenizer)
    return len(rows)


def test_several_turns_train_on_what_inference_sees(family: Family) -> None:
    wanted = [family.written("", answer) for _, answer in SAID]
    assert check_turns(family, talk(SAID), wanted) == family.rows[0]
    if family.system:
        assert check_turns(family, talk(SAID, "Be brief."), wanted) == family.rows[1]
    else:
        with pytest.raises(InputError, match="refuses the conversation"):
            chat.supervised_rows(talk(SAID, "Be brief."), family.tokenizer)


def test_reasoning_is_trained_where_the_template_has_a_place_for_it(family: Family) -> None:
    plain = talk(SAID)
    reasons = iter(["Count.", "Add two.", "Polite."])
    apart = [
        {**message, "reasoning_content": next(reasons)} if message["role"] == "assistant" else message
        for message in plain
    ]
    inside = [
        {"role": m["role"], "content": f"<think>\n{m['reasoning_content']}\n</think>\n\n{m['content']}"}
        if "reasoning_content" in m
        else m
        for m in apart
    ]
    if family.thinks:
        wanted = [family.written(m["reasoning_content"], m["content"]) for m in apart[1::2]]
        if family.thinking:
            theirs = [{**m, family.thinking: m.get("reasoning_content")} for m in apart]
            assert check_turns(family, apart, wanted, given=theirs) == family.rows[0]
            return
        assert check_turns(family, apart, wanted, given=inside) == family.rows[0]
        assert check_turns(family, inside, wanted) == family.rows[0]
        return
    with pytest.raises(InputError, match="no place for 'reasoning_content'"):
        chat.supervised_rows(apart, family.tokenizer)
    assert check_turns(family, inside, [family.written("", m["content"]) for m in inside[1::2]]) == 1


words = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=6),
        st.sampled_from(["<think>", "</think>", "<|im_end|>", "</s>", "[/INST]", "\n", " ", "<tool_call>"]),
    ),
    min_size=1,
    max_size=4,
).map("".join)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(st.tuples(words, words), min_size=1, max_size=3))
def test_whatever_is_said_is_trained_as_inference_sees_it_or_refused(family: Family, said) -> None:
    tokenizer, messages = family.tokenizer, talk(said)
    try:
        rows = chat.supervised_rows(messages, tokenizer)
    except InputError:
        assert any("think>" in answer for _, answer in said), "only odd tags of thinking are refused"
        return
    found = sorted((pair for row in rows for pair in trained(row)), key=lambda pair: len(pair[0]))
    assert len(found) == len(said)
    for number, (before, answer) in enumerate(found):
        assert before == chat.render(messages[: 2 * number + 1], tokenizer)
        ends = chat.stop_ids(tokenizer)
        assert answer[-1] in ends and not set(answer[:-1]) & set(ends)
        content = messages[2 * number + 1]["content"]
        if "think>" not in content:
            assert content.strip() in tokenizer.decode(answer)


def called(arguments: Any, content: Any = "") -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "call00001", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


RESULT = {"role": "tool", "name": "weather", "content": '{"sky": "clear"}', "tool_call_id": "call00001"}
CALLS = {
    "qwen2_5": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>',
    "qwen3": '<think>\n\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    "<|im_end|>",
    "deepseekv3": "\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Bern"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
    "ours/mistral_nemo": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern"}, "id": "call00001"}]</s>',
    "ours/llama3_2": '{"name": "weather", "parameters": {"city": "Bern"}}<|eot_id|>',
    "ours/gpt_oss": ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>',
}
CALLS["qwen3_instruct_2507"] = CALLS["qwen2_5"]
CALLS["trl/llama3_1"] = CALLS["trl/llama3_2"] = CALLS["ours/llama3_2"]


def test_tool_calls_are_trained_and_their_results_are_not(family: Family) -> None:
    """Arguments are an object or JSON text in the data; templates that want the other get it."""
    asked, said = {"role": USER, "content": "Sunny in Bern?"}, {"role": "assistant", "content": "It is."}
    for arguments in ({"city": "Bern"}, '{"city": "Bern"}'):
        messages = [asked, called(arguments), RESULT, said]
        if not family.calls:
            with pytest.raises(InputError, match=r"no place for 'tool_calls'|refuses|could not learn to stop"):
                chat.supervised_rows(messages, family.tokenizer)
            continue
        tools = TOOLS if family.tokenizer.chat_template.takes_tools else None
        in_json = family.name == "deepseekv3"
        given = [asked, called('{"city": "Bern"}' if in_json else {"city": "Bern"}), RESULT, said]
        last = "It is.<｜end▁of▁sentence｜>" if in_json else family.written("", "It is.")
        check_turns(family, messages, [CALLS[family.name], last], tools, given)


def test_what_a_template_would_leave_out_is_refused() -> None:
    named = {family.name: family.tokenizer for family in FAMILIES if family.source is not None}
    asked, said = {"role": USER, "content": "a"}, {"role": "assistant", "content": "b"}
    cases: list[tuple[str, Messages, Any, str]] = [
        ("phi3", [asked, {"role": "tool", "content": "x"}, said], (), "writes nothing for messages of the role 'tool'"),
        ("phi3", [asked, said], TOOLS, "no place for tools"),
        ("deepseekv3", [asked, said], TOOLS, "no place for tools"),
        ("ours/mistral_nemo", [asked, called({"city": "Bern"}, "Let me see.")], TOOLS, "leaves out the reasoning, or"),
        ("qwen3", [asked, {**said, "tool_calls": [{"name": 3}]}], (), "a tool call is"),
        ("qwen3", [asked, called("{'city'")], (), "are not JSON"),
        ("qwen3", [asked, {**said, "reasoning_content": ["x"]}], (), "'reasoning_content' is list"),
        ("qwen3", [asked, {**said, "content": 3}], (), "text or a list of parts"),
    ]
    for name, messages, tools, problem in cases:
        with pytest.raises(InputError, match=problem):
            chat.supervised_rows(messages, named[name], tools)
    bad = document_of({"messages": [asked, said], "tools": "no JSON"}, "here", None, named["qwen3"])
    assert isinstance(bad, Bad) and "not JSON" in bad.reason
    ours = {"messages": [asked, {**said, "reasoning_content": "c"}]}
    assert "no place for 'reasoning_content'" in document_of(ours, "here", None, Tokenizer.train(["ab"], 300)).reason


def test_a_conversation_in_several_rows_is_counted_and_stays_on_one_side_of_a_split(tmp_path) -> None:
    qwen = next(family for family in FAMILIES if family.name == "qwen3").tokenizer
    rows = [{"messages": talk([(f"{n}?", f"{n}!"), ("Sure?", f"Yes, {n}.")])} for n in range(12)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    info = prepare(str(file), tmp_path / "store", qwen, val_fraction=0.3, dedup=True)
    lengths = [[len(ids) for ids, _ in chat.supervised_rows(row["messages"], qwen)] for row in [*rows, rows[0]]]
    counts = {"conversations": 13, "rows": 26, "added_tokens": sum(min(pair) for pair in lengths)}
    assert info.about["turn_rows"] == counts and info.about["duplicates"] == 2
    splits = [TokenStore(tmp_path / "store", name) for name in ("train", "val")]
    assert sum(len(split.offsets) - 1 for split in splits) == 24
    numbers = []
    for split in splits:
        texts = [qwen.decode(split.tokens[a:b]) for a, b in pairwise(split.offsets.tolist())]
        numbers.append({text.split("user\n")[1].split("?")[0] for text in texts})
        assert len(texts) == 2 * len(numbers[-1]) > 0
    assert not numbers[0] & numbers[1]
    from bessemer.cli.data import _text

    assert "13 conversations take 26 rows" in _text(info.about)
    assert store_of(rows, qwen).info["turn_rows"] == {**counts, "conversations": 12, "rows": 24, "added_tokens": sum(
        min(pair) for pair in lengths[:12])}  # fmt: skip


def test_pairs_share_the_prompt_that_inference_sees() -> None:
    qwen = next(family for family in FAMILIES if family.name == "qwen3").tokenizer
    before = talk([("a", "<think>\nhm\n</think>\n\nb")])
    row = {"prompt": [*before, {"role": USER, "content": "c"}], "chosen": "d", "rejected": "e", "tools": TOOLS}
    document = document_of(row, "here", None, qwen)
    prompt = chat.render(row["prompt"], qwen, tools=TOOLS)
    ids, mask = document.ids, document.mask
    cut = next(n for n, bits in enumerate(mask) if bits & 2)
    for side, marks, answer in ((ids[:cut], mask[:cut], "d"), (ids[cut:], mask[cut:], "e")):
        learned = [n for n, bits in enumerate(marks) if bits & 1]
        assert side[: learned[0]] == prompt and "hm" not in qwen.decode(prompt) and "weather" in qwen.decode(prompt)
        assert qwen.decode([side[n] for n in learned]) == f"<think>\n\n</think>\n\n{answer}<|im_end|>"
    several = read_pair({"prompt": "a", "chosen": talk([("", "b"), ("c", "d")])[1:], "rejected": "e"})
    with pytest.raises(InputError, match="writes earlier answers differently"):
        encode_pair(several, qwen)


def test_prompts_of_grpo_and_chat_are_those_that_were_trained(family: Family) -> None:
    tokenizer = family.tokenizer
    tools = TOOLS if tokenizer.chat_template.takes_tools else None
    messages = talk(SAID)[:5]
    rows = [{"prompt": messages, "answer": "x", "tools": json.dumps(tools) if tools else None}]
    prompts = PromptRows(rows, "here", tokenizer, 4096, longest=4096)
    trained_rows = chat.supervised_rows(talk(SAID), tokenizer, tools or ())
    assert prompts.ids == [max((pair for row in trained_rows for pair in trained(row)), key=lambda p: len(p[0]))[0]]
    before = [Exchange(question, answer, []) for question, answer in SAID[:2]]
    plain = chat.supervised_rows(talk(SAID), tokenizer)
    last = max((pair for row in plain for pair in trained(row)), key=lambda pair: len(pair[0]))[0]
    assert Foreign(tokenizer).conversation(None, before, SAID[2][0]) == last


def test_a_worker_that_does_not_answer_teaches_nothing_about_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that was not rendered must not count as refused: masks would differ from then on."""
    family = next(family for family in FAMILIES if family.name == "phi3")
    tokenizer = Tokenizer(family.tokenizer.to_json(), "new", ChatTemplate(str(family.source), family.tokens))
    closed = templates.Worker()
    closed.close()
    with monkeypatch.context() as patch:
        patch.setattr(templates, "_shared", [closed])
        with pytest.raises(templates.TemplateUnavailable, match="while the server stops"):
            chat.supervised_rows(talk(SAID), tokenizer)
    assert chat.supervised_rows(talk(SAID), tokenizer) == chat.supervised_rows(talk(SAID), family.tokenizer)


def test_generation_marks_leave_out_what_the_template_says() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}(so) {% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = Tokenizer(
        tokenizer_json(("<|endoftext|>", "<|im_start|>", "<|im_end|>")), "m", ChatTemplate(source, {})
    )
    (row,) = chat.supervised_rows(talk(SAID), tokenizer)
    assert [tokenizer.decode(ids) for _, ids in trained(row)] == [f"{answer}<|im_end|>" for _, answer in SAID]
    assert chat.render(talk(SAID), tokenizer, generation_prompt=False) == row[0]


def test_texts_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer as Backend

    dated = {"date_string": "26 Jul 2024"}  # they tell templates today's date
    for family in FAMILIES:
        if family.source is None or family.name in ("ours/smollm3", "ours/llama3_2"):  # which take no date
            continue
        backend = Backend.from_str(family.tokenizer.to_json())
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **family.tokens)
        theirs.chat_template = family.source
        told = TOOLS if family.tokenizer.chat_template.takes_tools else None
        call = called('{"city": "Bern"}' if family.name == "deepseekv3" else {"city": "Bern"}, None)
        for messages in (talk(SAID), [talk(SAID)[0], call, RESULT] if family.calls else talk(SAID)):
            for opened in (False, True):
                text = theirs.apply_chat_template(
                    messages, tools=told, tokenize=False, add_generation_prompt=opened, **dated
                )
                assert family.tokenizer.chat_template.render(messages, opened, told or ()) == text


LANGUAGE = """\
{%- macro join(a, b) -%}{{ a ~ b }}{%- endmacro -%}
{%- set ns = namespace(found=false) -%}
{%- for m in messages[::-1] -%}
  {%- if m.role == 'user' and not ns.found -%}{%- set ns.found = true -%}{{ m.content.split('|')[-1] }};{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if loop.previtem is defined and loop.previtem.role == 'user' -%}{%- continue -%}{%- endif -%}
  {{- join(m.role.strip(), loop.nextitem.role.rstrip('t')) }};{{ m.content.lstrip('\\n').startswith('x') is false }};
{%- endfor -%}
{{ messages is string }};{{ messages[0] is mapping }};{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }};
{{- messages[0].items() | list | length }};{{ strftime_now('%Y-%m-%d') }};{{ absent is defined }}"""


def test_the_language_of_templates_is_complete() -> None:
    messages = [{"role": USER, "content": "x|é"}, {"role": "assistant", "content": "b"}]
    text = ChatTemplate(LANGUAGE, {}).render(messages, False)
    assert text == 'é;userassistan;False;False;True;{"content":"x|é","role":"user"};2;2024-07-26;False'


def test_templates_are_read_wherever_they_are_kept(tmp_path) -> None:
    written = tokenizer_json(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    default = next(family for family in FAMILIES if family.name == "ours/smollm2").source
    tool_use = next(family for family in FAMILIES if family.name == "qwen2_5").source
    both = [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]
    end = {"eos_token": {"content": "<|im_end|>", "special": True}}
    files: dict[str, dict[str, str]] = {
        "list": {
            "tokenizer_config.json": json.dumps({**end, "chat_template": [*both, {"name": "rag", "template": "x"}]})
        },
        "mapping": {
            "tokenizer_config.json": json.dumps({**end, "chat_template": {e["name"]: e["template"] for e in both}})
        },
        "files": {
            "tokenizer_config.json": json.dumps(end),
            "chat_template.jinja": default,
            "additional_chat_templates/tool_use.jinja": tool_use,
        },
    }
    hashes = set()
    for name, texts in files.items():
        for path, text in {"tokenizer.json": written, **texts}.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        tokenizer = Tokenizer.load(tmp_path / name)
        hashes.add(tokenizer.hash)
        tokenizer.save(tmp_path / f"{name}-again")
        assert Tokenizer.load(tmp_path / f"{name}-again").hash == tokenizer.hash
        assert "weather" in tokenizer.decode(chat.render(talk(SAID)[:1], tokenizer, tools=TOOLS))
        assert "Be helpful" in tokenizer.decode(chat.render(talk(SAID)[:1], tokenizer))
    assert len(hashes) == 1


@pytest.mark.parametrize("named", [{"bos_token": "<|odd|>"}, {"eos_token": {"content": "<|odd|>", "lstrip": False}}])
def test_a_beginning_token_that_only_the_configuration_names_is_found(tmp_path, named) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(("<|odd|>", "<|end_of_odd|>")))
    with pytest.raises(InputError, match="bos_token and eos_token of a tokenizer_config"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, "model_max_length": 8}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos_id == tokenizer.id_of("<|odd|>") and tokenizer.as_published().bos_id == tokenizer.bos_id
    tokenizer.save(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert again.bos_id == tokenizer.bos_id and again.hash == tokenizer.hash
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<|odd|>")
    Tokenizer.load(tmp_path).save(tmp_path / "talks")
    assert Tokenizer.load(tmp_path / "talks").bos_id == tokenizer.bos_id
