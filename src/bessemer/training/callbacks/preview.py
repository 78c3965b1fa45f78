"""What the model writes as it learns: prompts continued greedily, in RUN/samples.jsonl and on the screen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.config import field
from bessemer.data import Tokenizer
from bessemer.data.chat import can_chat, render, stop_ids
from bessemer.generate import Completion, Decoder, complete
from bessemer.generate.decoder import end_tokens
from bessemer.registry import callbacks, objectives
from bessemer.report.metrics import MetricsFile
from bessemer.training.callback import Callback
from bessemer.training.fetch import fetch
from bessemer.training.loop import Loop
from bessemer.training.outcome import doing

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

TOKENS = 16
SHOWN = 2
"""Continuations that are also said; all of them are in the file."""

PROMPTS = (
    "Water freezes at a temperature of",
    "The largest planet of the solar system is",
    "The opposite of hot is",
    "7 + 5 =",
    "The days of the week are Monday, Tuesday,",
    "Once upon a time there was",
    "def add(a, b):\n    return",
)


HELD_OUT = "held-out"
PROMPT_TOKENS = 12


def held_out_prompts(trainer: BaseTrainer, count: int = len(PROMPTS)) -> list[str]:
    """The first words of lines of held-out text, so that a prompt is of the kind the model reads."""
    held_out, tokenizer = trainer.data.validation, trainer.tokenizer
    if held_out is None or tokenizer is None:
        return []
    prompts = []
    for row in range(min(4 * count, held_out.count)):
        ids = held_out.read(row, 1)["input_ids"][0].tolist()
        text = beginning(tokenizer.decode(ids), tokenizer.special_names)
        start = tokenizer.decode(tokenizer.encode(text)[:PROMPT_TOKENS]).rstrip()
        if start.strip():
            prompts.append(start)
    return list(dict.fromkeys(prompts))[:count]


def beginning(text: str, special: re.Pattern[str]) -> str:
    """`text` from the first line that begins in it, else document, else word: a row may begin inside of each."""
    _, newline, rest = text.partition("\n")
    if not newline:
        documents = special.split(text)[1:]
        rest = next(filter(str.strip, documents), "") or text.partition(" ")[2] or text
    return next(filter(str.strip, special.split(rest)), "").strip("\n")


def held_out_questions(trainer: BaseTrainer, count: int = len(PROMPTS)) -> dict[str, list[int]]:
    """Held-out conversations up to the first answer: how they look, and their tokens."""
    held_out, tokenizer = trainer.data.validation, trainer.tokenizer
    if tokenizer is None:
        return {}
    asked: list[list[int]] = []
    rows = [] if held_out is None else [held_out.read(row, 1) for row in range(min(count, held_out.count))]
    for batch in rows:
        answers = np.flatnonzero(batch["target_ids"][0] >= 0)
        if len(answers):
            asked.append(batch["input_ids"][0][: answers[0] + 1].tolist())
    prompts = getattr(trainer.data.plan, "held_out", [])[:count]  # reinforcement: prompts are all there is
    asked += [source.ids[place] for source, place in prompts]
    return {tokenizer.special_names.sub("", tokenizer.decode(ids)): ids for ids in asked}


@callbacks.register("preview")
@dataclass
class Preview(Callback):
    """16 tokens at temperature 0 from each prompt, with the live parameters (they are read, never copied).

    Every process takes part; process 0 writes. The preview after the last step comes after the final save.
    """

    interval: int = field(
        "logging/preview_interval",
        default=512,
        minimum=-1,
        help="steps between previews; -1 = only at the end, 0 = never",
    )
    prompts: list[str] = field(
        "logging/preview_prompts",
        default_factory=list,
        help="prompts of the previews; none: seven shipped ones; held-out: beginnings of held-out text",
    )

    def on_train_begin(self, loop: Loop) -> None:
        self.previewed: int | None = None
        self.prepare(loop.trainer)
        self.on_rollback(loop)

    def prepare(self, trainer: BaseTrainer) -> None:
        """Make the decoder, or say why there is none."""
        self.decoder: Decoder | None = None
        if self.interval == 0:
            return
        if trainer.tokenizer is None or not hasattr(trainer.model, "decode"):
            missing = "tokenizer" if trainer.tokenizer is None else "model that can decode"
            trainer.say(f"no previews: they need a {missing}")
            return
        end = end_tokens(trainer.model, trainer.tokenizer)
        self.decoder = Decoder(trainer.model, pad_id=trainer.tokenizer.pad_id, end_ids=end, fetch=fetch)
        self.file = MetricsFile(trainer.run_directory.samples)

    def due(self, step: int) -> bool:
        return self.interval > 0 and step % self.interval == 0

    def on_rollback(self, loop: Loop) -> None:
        trainer, self.previewed = loop.trainer, None
        if self.decoder is not None and trainer.is_process_zero:
            # the preview of a finished step count is made again, by all processes: a kill may have cut it short
            self.file.truncate_after(loop.step - 1 if trainer.done else loop.step if loop.step > 0 else -1)

    def on_batch_end(self, loop: Loop) -> None:
        if self.due(loop.step) and loop.step < loop.steps:
            self.preview(loop)

    def on_train_end(self, loop: Loop) -> None:
        if self.previewed != loop.step:
            self.preview(loop)

    def preview(self, loop: Loop) -> None:
        """Sample, write, say the first few, and tell the other callbacks."""
        trainer = loop.trainer
        if self.decoder is None:
            return
        loop.flush()
        self.previewed = loop.step
        remedy = "Give fewer or shorter logging.preview_prompts"
        with loop.paused(), doing(trainer, f"the preview at step {loop.step}", remedy):
            found = self.show(trainer, trainer.full_params(), loop.step)
            loop.callbacks.fire("on_samples", loop, found)

    def show(self, trainer: BaseTrainer, params: Any, step: int) -> list[Completion]:
        """Continue the prompts with `params`; into the file, and the first few on the screen."""
        if self.decoder is None or trainer.tokenizer is None:
            return []
        asked, stops = self.starts(trainer, trainer.tokenizer)
        found, notices = complete(
            self.decoder,
            params,
            trainer.tokenizer,
            list(asked),
            max_tokens=TOKENS,
            stop_ids=stops,
            ids=list(asked.values()),
        )
        if trainer.is_process_zero:
            self.write(step, found)
        for notice in notices:
            trainer.say(f"preview: {notice}")
        for completion in found[:SHOWN]:
            trainer.say(f"step {step:>6}  {one_line(completion)}")
        return found

    def starts(
        self, trainer: BaseTrainer, tokenizer: Tokenizer
    ) -> tuple[dict[str, list[int]], tuple[int, ...]]:
        """(prompts with their tokens, what ends an answer). An objective of the trait `chat` is asked questions."""
        held_out = self.prompts == [HELD_OUT]
        if objectives.entry(trainer.settings.objective).traits.get("chat") and can_chat(tokenizer):
            asked = held_out_questions(trainer) if held_out else {}
            texts = [] if asked else list(PROMPTS) if held_out or not self.prompts else self.prompts
            asked |= {text: render([{"role": "user", "content": text}], tokenizer) for text in texts}
            return asked, stop_ids(tokenizer)
        texts = (held_out_prompts(trainer) if held_out else self.prompts) or list(PROMPTS)
        return {text: tokenizer.prompt(text) for text in texts}, ()

    def write(self, step: int, found: Sequence[Completion]) -> None:
        for completion in found:
            self.file.append({"step": step, "prompt": completion.prompt, "completion": completion.text})


def one_line(completion: Completion, width: int = 66) -> str:
    """`prompt ▸ continuation` with line ends as \\n, cut to fit a terminal of 80 columns."""
    text = completion.text or " (end of document)"
    line = f"{completion.prompt} ▸{text}".replace("\n", "\\n")
    return line if len(line) <= width else line[: width - 1] + "…"
