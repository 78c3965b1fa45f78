"""A row of RL data: its prompt, and the columns that rewards and environments get."""

from __future__ import annotations

from typing import Any

from bessemer.data.tokenize.chat import is_messages
from bessemer.errors import InputError

Row = dict[str, Any]


def prompt_of(row: Row, where: str) -> tuple[Any, Row]:
    """Return the prompt of a row (a text or messages), and the row, with the answer that its messages end with."""
    column = next((name for name in ("prompt", "messages", "question") if name in row), None)
    if column is None:
        raise InputError(
            f"{where}: a row needs a prompt under 'prompt', 'messages' or 'question'; it has "
            f"{', '.join(row) or 'nothing'}."
        )
    prompt = row[column]
    if column == "messages":
        if not is_messages(prompt):
            raise InputError(f"{where}: 'messages' is not a list of messages.")
        if prompt[-1].get("role") == "assistant":
            row = {"answer": prompt[-1].get("content"), **row}
            prompt = prompt[:-1]
    if (isinstance(prompt, str) and prompt.strip()) or is_messages(prompt):
        return prompt, row
    raise InputError(f"{where}: a prompt is a text or a list of messages, and not empty; got {prompt!r:.100}.")


def question_of(row: Row) -> str | None:
    """Return the text that a row begins with, if it has one: an environment's row needs none."""
    messages: Any = row.get("messages")
    first = messages[0].get("content") if is_messages(messages) else None
    found = next((text for text in (row.get("prompt"), row.get("question"), first) if isinstance(text, str)), None)
    return found if found and found.strip() else None
