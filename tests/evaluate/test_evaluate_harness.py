"""lm-evaluation-harness through the adapter gives our own numbers, on a task file of the test's."""

import json
import types

import pytest
from tests.evaluate.bundles import choices_task

from bessemer.errors import InputError
from bessemer.evaluate import Evaluator
from bessemer.evaluate.scoring import Row, score
from bessemer.generate import load_model
from tiny_run import make_run

TASK = """\
task: pets
dataset_path: json
dataset_kwargs: {{data_files: {{test: '{file}'}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: " "
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("harness"))


def requests(*args):
    return [types.SimpleNamespace(args=one) for one in args]


def test_what_to_install_is_said(run):
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match=r"pip install .*\[eval\]"):
            Evaluator.from_run(run, tasks=["harness:piqa"]).run()
    with pytest.raises(InputError, match="nothing after the colon"):
        Evaluator.from_run(run, tasks=["harness:"])


def test_likelihoods_are_ours(run):
    pytest.importorskip("lm_eval")
    from bessemer.evaluate.harness.model import HarnessModel

    loaded = load_model(run)
    model = HarnessModel(loaded, batch_size=4)
    bos, encode = loaded.tokenizer.bos_id, loaded.tokenizer.encode
    found = model.loglikelihood(requests(("The cats", " were walking"), ("", "grey dogs")), disable_tqdm=True)
    before, whole = encode("The cats"), encode("The cats were walking")
    assert whole[: len(before)] == before
    own = score(loaded, [Row([bos, *whole], 1 + len(before)), Row([bos, *encode("grey dogs")], 1)], 4)
    assert [value for value, _ in found] == pytest.approx([-one.nats for one in own], rel=1e-6)
    assert [greedy for _, greedy in found] == [one.greedy for one in own]


def test_a_long_text_is_scored_token_by_token_once(run):
    pytest.importorskip("lm_eval")
    from bessemer.evaluate.harness.model import HarnessModel, windows

    loaded = load_model(run)
    model = HarnessModel(loaded, batch_size=4)
    ids = list(range(80))
    rows = windows(ids, 32)
    assert [token for row in rows for token in row.ids[row.start :]] == ids[1:]
    assert max(len(row.ids) for row in rows) == 33 and len(rows[-1].ids) == 33
    text = "The grey cats were walking in the rain. " * 4
    (found,) = model.loglikelihood_rolling(requests((text,)))
    own = score(loaded, windows(model.tok_encode(text), 32), 4)
    assert found == pytest.approx(-sum(one.nats for one in own)) and model.cropped == 0


def test_it_writes_until_a_stop_string(run):
    pytest.importorskip("lm_eval")
    from bessemer.evaluate.harness.model import HarnessModel
    from bessemer.generate import sample

    loaded = load_model(run)
    (whole, other), _ = sample(loaded, ["The cats", "A dog"], max_tokens=12)
    stop = whole.text[4:6]
    asked = ("The cats", {"until": [stop], "max_gen_toks": 12}), ("A dog", {"until": [], "max_gen_toks": 12})
    found = HarnessModel(loaded).generate_until(requests(*asked))
    assert found == [whole.text[: whole.text.index(stop)], other.text]


def test_a_local_task_has_the_accuracy_of_our_likelihoods(run, tmp_path):
    pytest.importorskip("lm_eval")
    rows = choices_task(8)
    file = tmp_path / "pets.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "pets.yaml").write_text(TASK.format(file=file))
    found = Evaluator.from_run(run, tasks=[f"harness:{tmp_path / 'pets.yaml'}"], batch_size=4).run()["harness"]
    loaded = load_model(run)
    right = 0
    for row in rows:
        whole = [loaded.tokenizer.encode(f"{row['query']} {choice}") for choice in row["choices"]]
        start = 1 + len(loaded.tokenizer.encode(row["query"]))
        scores = score(loaded, [Row([loaded.tokenizer.bos_id, *ids], start) for ids in whole], 4)
        nats = [one.nats for one in scores]
        right += nats.index(min(nats)) == row["gold"]
    assert found["tasks"]["pets"]["acc"] == pytest.approx(right / len(rows)) == found["value"]
