"""`gymnasium`: any environment with Gymnasium's interface, played in words.

    reset(seed=…, options=row) -> observation, info
    step(action) -> observation, reward, terminated, truncated, info

    grpo.environment='{name: gymnasium, options: {target: my_env.py:Maze, actions: [left, right]}}'

`target` is a class or function that makes one (`file.py:Class`, `module:Class`), or an id of the package gymnasium, if
that is installed. What the model says is the action: one of `actions` by its name (its number is what the environment
gets), else a whole number if the environment's actions are numbered, else the text itself. Anything else is answered
with what can be said, and costs `penalty`. Observations are shown as text.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from bessemer.errors import InputError
from bessemer.registry import environments
from bessemer.rl.environments.base import Completion, Environment, Row
from bessemer.user_code import load_attribute


@environments.register("gymnasium", aliases=("gym",))
class Gymnasium(Environment):
    """prompt: stands before the first observation. make: arguments of the target."""

    def __init__(
        self,
        target: str,
        actions: Sequence[str] = (),
        prompt: str = "",
        penalty: float = 0.0,
        make: dict[str, Any] | None = None,
    ):
        self.env = _made(target, make or {})
        self.actions, self.prompt, self.penalty = [word.strip().lower() for word in actions], prompt, penalty

    def reset(self, row: Row, seed: int) -> str:
        takes = inspect.signature(self.env.reset).parameters
        every = any(one.kind is one.VAR_KEYWORD for one in takes.values())
        given = {"seed": seed, "options": dict(row)}
        found = self.env.reset(**{name: one for name, one in given.items() if every or name in takes})
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"reset returned {found!r:.100}, not (observation, info)")
        return "\n".join(filter(None, (self.prompt, shown(found[0]))))

    def step(self, completion: Completion) -> tuple[str | None, float, bool]:
        try:
            action = self.action(completion.text.strip())
        except ValueError as error:
            return str(error), -self.penalty, False
        found = self.env.step(action)
        if not isinstance(found, tuple) or len(found) != 5:
            raise TypeError(f"step returned {found!r:.100}, not (observation, reward, terminated, truncated, info)")
        observation, reward, terminated, truncated, _ = found
        return shown(observation), reward, bool(terminated or truncated)

    def action(self, text: str) -> Any:
        if self.actions:
            if text.lower() not in self.actions:
                raise ValueError(f"Say {', '.join(self.actions)}.")
            return self.actions.index(text.lower())
        space = getattr(self.env, "action_space", None)
        count = getattr(space, "n", None)  # of Gymnasium's Discrete
        if count is None:
            return text
        first = int(getattr(space, "start", 0))
        if not text.isdecimal() or not first <= int(text[:20]) < first + int(count):
            raise ValueError(f"Say a number from {first} to {first + int(count) - 1}.")
        return int(text)


def shown(observation: Any) -> str:
    """Return an observation as text that is not empty."""
    return str(observation).strip() or "(nothing)"


def _made(target: str, arguments: dict[str, Any]) -> Any:
    if ":" in target:
        made = load_attribute(target, "Gymnasium environment")(**arguments)
    else:
        try:
            import gymnasium
        except ImportError:
            raise InputError(
                f"'{target}' is an id of the package gymnasium, which is not installed: `pip install gymnasium`, or "
                "name a class, as file.py:Class."
            ) from None
        made = gymnasium.make(target, **arguments)
    if not callable(getattr(made, "reset", None)) or not callable(getattr(made, "step", None)):
        raise InputError(f"'{target}' has no `reset` and `step`, so it is not a Gymnasium environment.")
    return made
