"""The environments that ship, and the adapters: what they say, reward and refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bessemer.data.tokenize.chat import ToolCall
from bessemer.errors import InputError
from bessemer.registry import environments
from bessemer.rl.environments.base import Completion
from bessemer.rl.environments.python_expression import evaluate
from bessemer.rl.environments.tools import ToolError, tool_of

OWN = '''
def weather(city: str, days: int = 1) -> str:
    """Return the weather."""
    if city == "Atlantis":
        raise KeyError("drowned")
    return f"{city} is sunny for {days}"

def add(a, b):
    return a + b

TOOLS = [
    weather,
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {}}}},
        "call": add,
    },
]

class Corridor:
    """Gymnasium's interface: walk right to the end."""

    class action_space:
        n = 2

    def __init__(self, length=3):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.place = options.get("start", 0)
        return self.place, {"seed": seed}

    def step(self, action):
        self.place += 1 if action == 1 else -1
        return self.place, float(self.place == self.length), self.place == self.length, self.place < -3, {}

class Loose(Corridor):
    def reset(self, **given):
        return super().reset(**given)
'''


@pytest.fixture
def own(tmp_path: Path) -> Any:
    file = tmp_path / "own_tools.py"
    file.write_text(OWN)
    yield file
    sys.modules.pop("own_tools", None)


def say(text: str, *calls: ToolCall) -> Completion:
    return Completion(text, calls)


def test_guess_says_higher_or_lower() -> None:
    game = environments.get("guess")()
    assert game.reset({"low": 10, "high": 16, "secret": 12}, 0) == "Guess 10 to 16"
    assert game.step(say("10")) == ("higher", 0, False)
    assert game.step(say(" 15\n")) == ("lower", 0, False)
    assert game.step(say("twelve")) == ("a number", 0, False)
    assert game.step(say("12")) == (None, 1, True)
    seeded = []
    for seed in (1, 1, 2, 3):
        game.reset({}, seed)
        seeded.append(game.secret)
    assert seeded[0] == seeded[1] and len(set(seeded)) > 1


def test_treasure_is_found_by_walking() -> None:
    game = environments.get("treasure")(cost=0.1)
    assert "at 0,0" in game.reset({"start": [0, 0], "treasure": [1, 1]}, 5)
    assert game.step(say("west")) == ("A wall.", -0.1, False)
    assert game.step(say("up"))[0] == "Say north, south, east or west."
    assert game.step(say("North"))[0] == "Warmer." and game.step(say("north"))[0] == "Colder."
    assert game.step(say("south"))[0] == "Warmer."
    assert game.step(say("east")) == (None, 0.9, True)
    with pytest.raises(InputError, match="outside the grid"):
        game.reset({"start": [9, 0]}, 0)
    assert environments.get("treasure")().reset({}, 1) == environments.get("treasure")().reset({}, 1)


def test_calculator_answers_calls_and_rewards_the_answer() -> None:
    game = environments.get("calculator")()
    assert game.reset({"prompt": "Add 17 and 25", "answer": 42}, 0) == "Add 17 and 25"
    call = ToolCall("python", {"expression": "17+25"})
    assert game.step(say("", call)) == ([{"role": "tool", "content": "42", "name": "python"}], 0, False)
    for bad, says in (
        (ToolCall("python", {"expression": "__import__('os')"}), "is not part of arithmetic"),
        (ToolCall("open", {"expression": "1"}), "there is no function open"),
        (ToolCall("calculate", {"x": "1"}), "takes one text"),
        (ToolCall("", error="not a JSON object"), "not a JSON object"),
    ):
        ((message,), reward, done) = game.step(say("", bad))
        assert message["content"].startswith("error: ") and says in message["content"] and (reward, done) == (0, False)
    assert game.step(say(" 42 ")) == (None, 1, True) and game.step(say("41")) == (None, 0, True)
    number = environments.get("calculator")(match="number")
    number.reset({"question": "?", "answer": "so #### 1,000"}, 0)
    assert number.step(say("It is 1000.0")) == (None, 1, True)
    with pytest.raises(InputError, match="no column 'answer'"):
        game.reset({"prompt": "Add"}, 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 ** 10 + 7 // 2", "1027"),
        ("sum([1, 2, 3]) / 2", "3.0"),
        ("max(range(5)) if 3 in [1, 2, 3] else -1", "4"),
        ("not (1 < 2 <= 2 and 'a' == 'a')", "False"),
        ("sorted([3, 1, 2])[::-1][0]", "3"),
        ("str(12) + 'x'", "12x"),
        ("round(2.5678, 2)", "2.57"),
        ("True or 1 / 0", "True"),
    ],
)
def test_expressions_have_the_values_that_python_gives_them(text: str, value: str) -> None:
    assert evaluate(text) == value == str(eval(text))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__",
        "[x for x in range(3)]",
        "lambda: 1",
        "open('f')",
        "x",
        "10 ** 10 ** 10",
        "'a' * 10 ** 9",
        "[0] * 999 * 999",
        "range(10 ** 12)",
        "round(1, -10 ** 9)",
        "int('9' * 400)",
        "'%s' % 1",
        "1e308 * 10",
        "(-1) ** 0.5",
        "1 / 0",
        "1 +",
        "a := 1",
        "(" * 300 + ")" * 300,
        "-" * 390 + "1",
        "sorted([1, 'a'])",
        "f'{1}'",
        "b'1'",
        "print(1)",
        "max(1, key=1)",
    ],
)
def test_what_is_not_a_bounded_expression_is_refused(text: str) -> None:
    with pytest.raises(ToolError):
        evaluate(text)


def test_python_is_a_tool() -> None:
    game = environments.get("python")()
    game.reset({"prompt": "?", "answer": "3"}, 0)
    ((message,), *_) = game.step(say("", ToolCall("evaluate", {"expression": "len([1, 2, 3])"})))
    assert message["content"] == "3"


def test_functions_of_the_user_are_tools(own: Path) -> None:
    game = environments.get("tools")(target=f"{own}:TOOLS")
    weather, add = game.tools
    assert weather["function"]["description"] == "Return the weather."
    assert weather["function"]["parameters"]["properties"] == {"city": {"type": "string"}, "days": {"type": "integer"}}
    assert weather["function"]["parameters"]["required"] == ["city"] and add["function"]["name"] == "add"
    game.reset({"prompt": "?", "answer": "sunny"}, 0)

    def answer(name: str, **arguments: Any) -> str:
        ((message,), *_) = game.step(say("", ToolCall(name, arguments)))
        return str(message["content"])

    assert answer("weather", city="Rome", days=2) == "Rome is sunny for 2"
    assert answer("weather", city="Atlantis") == "error: KeyError: 'drowned'"
    assert answer("weather") == "error: the argument city is missing"
    assert answer("weather", city=3) == "error: the argument city is 3, not of type string"
    assert answer("weather", city="Rome", days=True) == "error: the argument days is True, not of type integer"
    assert answer("weather", town="Rome", city="a") == "error: there is no argument town; there are city, days"
    assert answer("add", a=1, b=2.5) == "3.5"
    assert answer("rain") == "error: there is no function rain; there are weather, add"
    assert len(game.step(say("", ToolCall("add", {"a": 1, "b": 1}), ToolCall("add", {"a": 2, "b": 2})))[0]) == 2
    assert game.counts == {"tool_calls": 10, "tool_errors": 6}
    with pytest.raises(InputError, match="not a list of functions"):
        environments.get("tools")(target=f"{own}:weather")
    with pytest.raises(InputError, match="parameter 'a' of add needs a type"):
        tool_of(game.functions["add"][1], "own")


def test_gymnasium_environments_are_played_in_words(own: Path) -> None:
    game = environments.get("gymnasium")(target=f"{own}:Corridor", make={"length": 2}, prompt="Walk.", penalty=0.5)
    assert game.reset({"start": 1}, 7) == "Walk.\n1"
    assert game.step(say("right")) == ("Say a number from 0 to 1.", -0.5, False)
    assert game.step(say("0")) == ("0", 0, False)
    assert environments.get("gym")(target=f"{own}:Loose").reset({"start": 1}, 7) == "1"  # it gets the seed too
    named = environments.get("gym")(target=f"{own}:Corridor", actions=["left", "right"])
    named.reset({}, 0)
    assert named.step(say("1"))[0] == "Say left, right."
    assert [named.step(say(word))[2] for word in ("Right", "right", "right")] == [False, False, True]
    named.reset({}, 0)
    assert [named.step(say("left"))[2] for _ in range(4)] == [False, False, False, True], "truncated"
    with pytest.raises(InputError, match="not a Gymnasium environment"):
        environments.get("gymnasium")(target=f"{own}:weather", make={"city": "a"})
    with pytest.raises(InputError, match="not installed"):
        environments.get("gymnasium")(target="CartPole-v1")
