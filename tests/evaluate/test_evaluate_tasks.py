"""Tasks by likelihood: scores against a float64 reference, rows of each kind, drawing, and any batch size."""

import functools
import json
import random

import jax
import numpy as np
import pytest
from tests.evaluate.bundles import EXACT, SCHEMA, choices_task, write_rows

from bessemer.errors import InputError
from bessemer.evaluate import Evaluator, check_tasks, split_tasks
from bessemer.evaluate.scoring import Row, Score, score
from bessemer.evaluate.tasks import KINDS, Task, centred, lowest, rows_of, run_task, shared, shots_of
from bessemer.generate import load_model
from bessemer.topology import TopologySettings, make_topology
from tiny_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def loaded(run):
    return load_model(run)


@pytest.fixture(scope="module")
def rows(loaded):
    """Rows of all lengths up to beyond the block of 32."""
    rng = np.random.default_rng(0)
    lengths = [2, 3, 9, 17, 18, 25, 33, 34, 45]
    return [
        Row(rng.integers(12, 300, n).tolist(), 1 + int(rng.integers(0, n - 1)) if n < 30 else n - 5) for n in lengths
    ]


def ask(kind, example, shots, delimiter, tokenizer):
    """Rows of one example."""
    ids = tokenizer.encode_batch(KINDS[kind].texts(example, shots, delimiter))
    return KINDS[kind].rows(ids, example, tokenizer)


@functools.cache
def forward(model):
    return jax.jit(lambda params, ids: model.apply({"params": params}, ids))


def reference(loaded, row):
    """(nats, greedy) from the logits of a full forward of the row alone, in float64."""
    ids = np.array(row.ids[-33:])
    start = max(1, row.start - (len(row.ids) - len(ids)))
    padded = np.pad(ids[:-1], (0, 33 - len(ids)))[None]
    logits = np.asarray(forward(loaded.model)(loaded.params, padded)[0, : len(ids) - 1], np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    logprobs -= logits.max(1, keepdims=True)
    picks = np.arange(start - 1, len(ids) - 1)
    return -logprobs[picks, ids[start:]].sum(), bool((logits[picks].argmax(1) == ids[start:]).all())


def test_scores_are_the_reference_at_any_batch_size(loaded, rows):
    expected = [reference(loaded, row) for row in rows]
    for batch_size in (1, 16):
        found = score(loaded, rows, batch_size)
        assert [one.nats for one in found] == pytest.approx([nats for nats, _ in expected], rel=1e-5)
        assert [one.greedy for one in found] == [greedy for _, greedy in expected]
        assert [one.tokens for one in found] == [len(row.ids) - row.start for row in rows]
    assert [one.cropped for one in found] == [0] * 7 + [1, 12]


def test_one_compilation_a_bucket(run, rows):
    fresh = load_model(run)
    score(fresh, rows, 16)
    score(fresh, rows[::-1] * 3, 16)
    assert fresh.programs["token_scores"]._cache_size() == 2, "lengths up to 16, and up to 32"


def test_a_mesh_gives_the_same_scores(run, loaded, rows):
    sharded = load_model(run, topology=make_topology(TopologySettings(data=2, fsdp=2, tensor=2)))
    rows = rows[4:]  # of one bucket
    found = [one.nats for one in score(sharded, rows, 5)]
    assert found == pytest.approx([one.nats for one in score(loaded, rows, 16)], rel=1e-4)


def test_greedy_targets_are_found(loaded):
    """What greedy decoding writes is an exact continuation; with one token changed it is none."""
    prompt = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode("The cats")]
    made = loaded.decoder(loaded.params, [prompt], max_tokens=6).row(0)
    other = [*made[:-1], (made[-1] + 1) % 256]
    good, bad = score(loaded, [Row([*prompt, *ids], len(prompt)) for ids in (made, other)], 16)
    assert good.greedy and not bad.greedy


def test_a_continuation_longer_than_the_context_is_never_right(loaded):
    (found,) = score(loaded, [Row(list(range(40, 80)), 2)], 16)
    assert not found.whole and found.cropped == 7
    assert not KINDS["language_modeling"].right({}, [found._replace(greedy=True)])


def test_multiple_choice_scores_what_follows_the_shared_beginning(loaded):
    tokenizer = loaded.tokenizer
    example = {"query": "The", "choices": ["cats", "dogs were", "cats"], "gold": 1}
    found = ask("multiple_choice", example, "Shot.\n\n", " ", tokenizer)
    for row, choice in zip(found, example["choices"], strict=True):
        assert tokenizer.decode(row.ids) == f"<|bos|>Shot.\n\nThe {choice}"
    prefix = shared([row.ids for row in found])
    assert {row.start for row in found} == {prefix} and prefix >= len(tokenizer.encode("Shot.\n\nThe"))
    same = ask("multiple_choice", {"query": "a", "choices": ["b", "b c"], "gold": 0}, "", " ", tokenizer)
    assert all(row.start < len(row.ids) for row in same), "a choice that begins another has a token too"


def test_schema_scores_the_shared_end(loaded):
    tokenizer = loaded.tokenizer
    found = ask("schema", SCHEMA[0], "", " ", tokenizer)
    ends = [row.ids[row.start :] for row in found]
    assert ends[0] == ends[1] and tokenizer.decode(ends[0]).endswith("in the rain.")
    assert found[0].ids[found[0].start - 1] != found[1].ids[found[1].start - 1]


def test_an_exact_continuation_begins_where_the_prompt_ends(loaded):
    (row,) = ask("language_modeling", EXACT[1], "", " ", loaded.tokenizer)
    assert loaded.tokenizer.decode(row.ids[row.start :]) == " 2 dogs"


def test_letters_are_asked_through_the_conversation(loaded):
    example = {"query": "Which?", "choices": ["cats", "dogs"], "gold": 1}
    found = ask("letter", example, "", " ", loaded.tokenizer)
    text = loaded.tokenizer.decode(found[1].ids)
    assert text.startswith("<|bos|><|user_start|>Which?\nA. cats\nB. dogs\n")
    assert text.endswith("<|user_end|><|assistant_start|>B")
    assert loaded.tokenizer.decode(found[1].ids[found[1].start :]) == "B"


def test_ties_go_to_the_first(loaded):
    scores = [Score(3.0, 1, False), Score(4.0, 2, False), Score(2.000001, 1, False)]
    assert lowest(scores) == 1


@pytest.mark.parametrize("kind", ["multiple_choice", "schema", "language_modeling", "letter"])
def test_a_task_is_judged_as_by_hand_at_any_batch_size(loaded, kind):
    examples = {"schema": SCHEMA, "language_modeling": EXACT}.get(kind) or choices_task(6)
    task = Task("t", kind, examples, fewshot=1)
    order = list(examples)
    random.Random(1337).shuffle(order)
    right = 0
    for index, example in enumerate(order):
        (own,) = rows_of(task, order, [index], loaded.tokenizer)
        values = [reference(loaded, row) for row in own]
        counts = [len(row.ids) - row.start for row in own]
        if kind == "language_modeling":
            right += values[0][1]
        else:
            means = [nats / count for (nats, _), count in zip(values, counts, strict=True)]
            right += int(np.argmin(means)) == example["gold"]
    for batch_size in (1, 16):
        assert run_task(loaded, task, batch_size=batch_size)["accuracy"] == right / len(examples)


def test_few_shot_examples_are_drawn_from_the_others_and_always_the_same():
    examples = choices_task(30)
    for index in (0, 7, 29):
        others = [place for place in range(30) if place != index]
        drawn = random.Random(1234 + index).sample(others, 5)
        assert shots_of(examples, index, 5) == [examples[place] for place in drawn]
        assert examples[index] not in shots_of(examples, index, 29)
    task = Task("t", "multiple_choice", examples)
    order = list(examples)
    random.Random(1337).shuffle(order)
    assert task.chosen(4) == order[:4] and task.chosen() == order


def test_few_shot_texts_come_before_the_question(loaded):
    examples = choices_task(3)
    task = Task("t", "multiple_choice", examples, fewshot=2, delimiter="\nAnswer: ")
    ((row, *_),) = rows_of(task, examples, [0], loaded.tokenizer)
    text = loaded.tokenizer.decode(row.ids)
    solved = [f"{shot['query']}\nAnswer: {shot['choices'][shot['gold']]}" for shot in shots_of(examples, 0, 2)]
    first = examples[0]
    asked = f"{first['query']}\nAnswer: {first['choices'][0]}"
    assert text == "<|bos|>" + "\n\n".join([*solved, asked])


def test_a_model_that_guesses_scores_about_zero(loaded):
    """400 questions of 4 choices about nothing: within 4 deviations of 0.25, so within 0.12 of 0 when centred."""
    task = Task("guess", "multiple_choice", choices_task(400, choices=4), baseline=0.25)
    found = run_task(loaded, task, batch_size=16)
    assert abs(found["centred"]) < 0.12 and found["examples"] == 400
    assert centred(1.0, 0.25) == 1 and centred(0.25, 0.25) == 0


def test_too_few_examples_for_the_shots_are_said(loaded):
    task = Task("t", "multiple_choice", choices_task(20), fewshot=10)
    assert "leave 2 few-shot" in run_task(loaded, task, limit=3, batch_size=16)["note"]


@pytest.mark.parametrize(
    ("kind", "example", "problem"),
    [
        ("multiple_choice", {"query": "a", "choices": ["b"]}, "no 'gold'"),
        ("multiple_choice", {"query": "a", "choices": ["b"], "gold": 1}, "not one of its 1"),
        ("multiple_choice", {"query": "a", "choices": "b", "gold": 0}, "list of texts"),
        ("schema", {"context_options": ["a"], "continuation": 3, "gold": 0}, "not text"),
        ("generative", {"question": "a", "answer": 3}, "no text 'answer'"),
        ("riddle", {}, "unknown kind"),
    ],
)
def test_bad_examples_are_named(kind, example, problem):
    with pytest.raises(InputError, match=problem):
        Task("t", kind, [example])


def test_a_file_with_a_header_is_a_task(run, tmp_path):
    header = {"task": "pets", "kind": "multiple_choice", "random_baseline": 0.5, "fewshot": 1}
    for name in ("pets.jsonl", "pets.jsonl.gz"):
        write_rows(tmp_path / name, [header, *choices_task(4, choices=2)])
        evaluator = Evaluator.from_run(run, tasks=[str(tmp_path / name)], batch_size=2)
        results = evaluator.run()
        assert evaluator.done and results["pets"]["examples"] == 4
    saved = json.loads((run.eval / "pets_step20.json").read_text())
    assert saved["metric"] == "accuracy" and saved["kind"] == "multiple_choice"
    write_rows(tmp_path / "bare.jsonl", choices_task(2))
    with pytest.raises(InputError, match="header"):
        Evaluator.from_run(run, tasks=[str(tmp_path / "bare.jsonl")]).run()
    write_rows(tmp_path / "odd.jsonl", [{**header, "shots": 1}])
    with pytest.raises(InputError, match="unknown name 'shots'"):
        Evaluator.from_run(run, tasks=[str(tmp_path / "odd.jsonl")]).run()
    with pytest.raises(InputError, match="no task file"):
        check_tasks([str(tmp_path / "none.jsonl")])


def test_words_of_the_command_line():
    assert split_tasks("bpb, harness:piqa,copa,core:x") == ["bpb", "harness:piqa,copa", "core:x"]
    assert split_tasks("harness:piqa,my_eval.py:score") == ["harness:piqa", "my_eval.py:score"]
    assert check_tasks(["core:dir", "bpb", "bpb"]) == ["core:dir", "bpb"]
    assert split_tasks("gsm8k:a.jsonl,b.jsonl") == ["gsm8k:a.jsonl", "b.jsonl"]
    assert check_tasks(["gsm8k:a.jsonl"]) == ["gsm8k:a.jsonl"], "its own file, not a task file"
    with pytest.raises(InputError, match="bpb takes nothing"):
        check_tasks(["bpb:dir"])
    with pytest.raises(InputError, match="Known"):
        check_tasks(["os:system"])


def test_programs_are_handed_on(loaded, rows):
    """The same model with newer parameters compiles nothing again."""
    import dataclasses

    score(loaded, rows, 16)
    before = loaded.programs["token_scores"]._cache_size()
    newer = dataclasses.replace(loaded, params=jax.tree.map(lambda leaf: leaf * 2, loaded.params))
    score(newer, rows, 16)
    assert newer.programs["token_scores"]._cache_size() == before


def test_progress_names_what_is_under_way(loaded, rows):
    import io

    from bessemer import console

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    with console.showing_ticks(screen), console.task_name("core"), console.task_name("copa"):
        score(loaded, rows, 16)
    assert "core copa" in screen.getvalue() and f"{len(rows)}/{len(rows)}" in screen.getvalue()
    console.tick(1, 2)  # nothing is shown unless asked for


def test_many_examples_are_taken_in_portions(loaded, monkeypatch):
    task = Task("t", "multiple_choice", choices_task(7), fewshot=1)
    whole = run_task(loaded, task, batch_size=16)
    monkeypatch.setattr("bessemer.evaluate.tasks.EXAMPLES_AT_ONCE", 3)
    assert run_task(loaded, task, batch_size=16) == whole
