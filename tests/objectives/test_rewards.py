"""Rewards: what they see, what they are worth, and how a bad one ends a run."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from bessemer.errors import InputError, TrainingError
from bessemer.registry import rewards
from bessemer.rl.rewards import Rewards, RewardSpec, exact_match, gsm8k, gsm8k_number


def score(specs, completions, **columns):
    columns = {"completion_tokens": [len(text) for text in completions], **columns}
    made = Rewards([RewardSpec(s) if isinstance(s, str) else RewardSpec(**s) for s in specs])
    made.check_columns(list(columns))
    return made(["?"] * len(completions), completions, columns)


def test_shipped_rewards():
    assert {"exact_match", "gsm8k", "regex", "length_penalty"} <= set(rewards.names())
    assert exact_match(["a"] * 3, [" 12", "12 apples", "21"], answer=[12, 12, "12"]) == [1, 0, 0]
    total, each = score(
        [
            {"name": "format", "options": {"pattern": r"<a>.*</a>"}},
            {"name": "length_penalty", "weight": 0.5, "options": {"free": 8, "scale": 10}},
        ],
        ["<a>1\n2</a>", "x <a>1</a> x", "<a>" + "y" * 40 + "</a>"],
    )
    np.testing.assert_allclose(each["format"], [1, 0, 1])
    np.testing.assert_allclose(each["length_penalty"], [-0.2, -0.4, -1])
    np.testing.assert_allclose(total, [0.9, -0.2, 0.5])


def test_gsm8k_reads_the_number_after_the_mark():
    right = "She sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"
    texts = {
        "#### 72": 1,
        "x = <<1+1=2>>2\n#### $72.00": 1,
        "#### 72<<70+2=72>>": 1,
        "so <|python_start|>48+24<|python_end|><|output_start|>72<|output_end|> #### 72 clips": 1,
        "72": 0,  # without the mark there is no answer
        "#### 71": 0,
        "#### 7 #### 72": 1,
        "#### -72": 0,
        "": 0,
    }
    assert gsm8k(["q"] * len(texts), list(texts), answer=[right] * len(texts)) == list(texts.values())
    assert gsm8k_number("#### 1,234.5") == 1234.5 and gsm8k_number("#### none") is None
    assert gsm8k(["q"], ["#### 1,000"], answer=["1000"]) == [1]
    with pytest.raises(InputError, match="no number in the answer"):
        gsm8k(["q"], ["#### 1"], answer=["#### many"])


def test_a_reward_that_hangs_ends_the_run_after_its_time():
    over = threading.Event()

    def hangs(prompts, completions, **columns):
        over.wait()
        return [0.0] * len(completions)

    made = Rewards([RewardSpec("exact_match")], timeout=0.2)
    made.functions = [hangs]
    with pytest.raises(TrainingError, match=r"'exact_match' did not return within grpo.reward_timeout=0.2 seconds"):
        made(["?"], ["a"], {})
    over.set()
    patient = Rewards([RewardSpec("exact_match")], timeout=600)
    np.testing.assert_array_equal(patient(["?"] * 2, ["a", "b"], {"answer": ["a", "a"]})[0], [1, 0])
    with pytest.raises(TrainingError, match="'exact_match' failed: KeyError"):
        patient.functions = [fails]
        patient(["?"], ["a"], {})


def fails(prompts, completions, **columns):
    raise KeyError("colour")


def leaves(prompts, completions, **columns):
    raise SystemExit(0)  # what unittest.main does in a reward that runs tests


def huge(prompts, completions, **columns):
    return [1e308] * len(completions)


def greedy(prompts, completions, tests, **columns):
    """Empties what it is given."""
    return [
        float(len(prompt) + len([rows.pop() for _ in rows[:]])) for prompt, rows in zip(prompts, tests, strict=True)
    ]


def short(prompts, completions, **columns):
    return [1.0] * (len(completions) - 1)


def infinite(prompts, completions, **columns):
    return [float("nan")] * len(completions)


def words(prompts, completions, **columns):
    return ["good"] * len(completions)


def sees(prompts, completions, answer, colour, completion_tokens, **columns):
    return [float((c, o) == (a, "red")) for c, a, o in zip(completions, answer, colour, strict=True)]


def plain(prompts, completions):
    return [0.5] * len(completions)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", "KeyError: 'colour'"),
        ("short", "shape"),
        ("infinite", "nan"),
        ("words", "not return a list of numbers"),
        ("leaves", "failed: SystemExit: 0"),
    ],
)
def test_a_bad_reward_ends_the_run_with_its_name(name, says):
    with pytest.raises(TrainingError, match=f"{name}.*{says}") as error:
        score([f"{__name__}:{name}"], ["a", "b"])
    assert error.value.exit_code == 3


def test_a_reward_that_fails_is_named_with_its_line(tmp_path):
    file = tmp_path / "failing_reward.py"
    file.write_text("def late(prompts, completions, **columns):\n    return [1 / len(prompts[0][4:])]\n")
    with pytest.raises(TrainingError, match=r"ZeroDivisionError: .* \(.*failing_reward.py line 2\)\. It was called"):
        score([f"{file}:late"], ["a"])


def test_sums_that_overflow_end_the_run_and_weights_that_are_nan_are_refused():
    with pytest.raises(TrainingError, match="the rewards sum to"):
        score([{"name": f"{__name__}:huge", "weight": 10.0}], ["a"])
    with pytest.raises(InputError, match=r"the weight of the reward .* is nan"):
        Rewards([RewardSpec(f"{__name__}:huge", float("nan"))])


def test_a_reward_that_changes_its_arguments_changes_no_later_rollout():
    tests = ["one", "two"]
    rows = {"tests": [tests] * 3}  # the completions of a group share the row of their prompt
    for _ in range(2):
        _, each = score([f"{__name__}:greedy"], ["a"] * 3, **rows)
        assert [values.tolist() for values in each.values()] == [[3.0, 3.0, 3.0]]
    assert tests == ["one", "two"]


def test_every_column_reaches_a_reward_by_module_and_function():
    total, each = score(
        [f"{__name__}:sees", {"name": f"{__name__}:plain", "weight": 2}],
        ["1", "2"],
        answer=["1", "2"],
        colour=["red", "blue"],
    )
    np.testing.assert_array_equal(total, [2, 1])
    assert [values.tolist() for values in each.values()] == [[1, 0], [0.5, 0.5]]


def test_what_is_wrong_before_the_first_completion():
    with pytest.raises(InputError, match=r"needs answer.*columns"):
        score(["exact_match"], ["a"])
    with pytest.raises(InputError, match=r"needs the column 'answer', and 1 of 9 rows lack it"):
        Rewards([RewardSpec("exact_match")]).check_columns(["prompt"], {"answer": "1 of 9 rows lack it"})
    with pytest.raises(InputError, match=r"grpo\.rewards is empty"):
        Rewards([])
    with pytest.raises(InputError, match="twice"):
        Rewards([RewardSpec("regex"), RewardSpec("regex")])
    with pytest.raises(InputError, match=r"Did you mean 'gsm8k'"):
        Rewards([RewardSpec("gsm8")])
