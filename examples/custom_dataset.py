"""A dataset of your own: a function that yields documents.

    bessemer train quickstart plugins=[examples/custom_dataset.py] training.dataset=sums --name sums
    bessemer train sft plugins=[examples/custom_dataset.py] training.dataset=sums-chat init=runs/sums --name sums-chat

Documents are prepared once: tokenized, split into training and held-out parts by a hash of each document, and stored
below $BESSEMER_HOME. The next run with the same tokenizer opens the store. Return a list, a generator, or files
(`bessemer.data.find_files`), which are read by several processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from bessemer.registry import datasets

COUNT = 400


def questions(seed: int) -> Iterator[tuple[int, int]]:
    """Yield COUNT sums. The order must not depend on anything but the seed: a run may be prepared again elsewhere."""
    rng = random.Random(seed)
    for _ in range(COUNT):
        yield rng.randint(0, 99), rng.randint(0, 99)


@datasets.register("sums")
def sums() -> Iterator[dict[str, str]]:
    """Plain text, for pretraining: a document has the column `text`."""
    for a, b in questions(seed=0):
        yield {"text": f"{a} plus {b} is {a + b}. {b} plus {a} is {a + b}, too."}


@datasets.register("sums-chat")
def sums_chat() -> Iterator[dict[str, Any]]:
    """Conversations, for supervised fine-tuning: only the assistant's tokens are targets."""
    for a, b in questions(seed=1):
        yield {
            "messages": [
                {"role": "user", "content": f"What is {a} plus {b}?"},
                {"role": "assistant", "content": f"{a + b}"},
            ]
        }
