"""Previews: greedy continuations of prompts during training, in RUN/samples.jsonl and on the screen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from bessemer.config import field
from bessemer.console import fit
from bessemer.data import Tokenizer
from bessemer.data.tokenize.chat import can_chat, render, stop_ids
from bessemer.generate import Completion
from bessemer.models.protocol import Decoding
from bessemer.registry import callbacks, objectives
from bessemer.report.metrics import MetricsFile
from bessemer.training.callbacks.base import Callback
from bessemer.training.generation import left_padded
from bessemer.training.outcome import doing

if TYPE_CHECKING:
    from bessemer.training.callbacks.base import BaseTrainer, Loop
    from bessemer.training.setup.data import DataParts
    from bessemer.training.state import TrainState
    from bessemer.training.validation import ValidationSet

TOKENS = 16
ARROW = " ▸"
MARGIN = 14  # columns of a line that a preview does not have: the step, and one to spare
SHOWN = 2
"""Continuations that are also printed; all of them are in the file."""

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
PROMPTS_KEY = "logging/preview_prompts"
PROMPT_TOKENS = 12


def held_out_prompts(held_out: ValidationSet | None, tokenizer: Tokenizer) -> list[str]:
    """Return the first words of lines of held-out text, so that prompts resemble the training data."""
    if held_out is None:
        return []
    prompts = []
    for row in range(min(4 * len(PROMPTS), held_out.count)):
        ids = held_out.read(row, 1)["input_ids"][0].tolist()
        text = beginning(tokenizer.decode(ids), tokenizer.special_names)
        start = tokenizer.decode(tokenizer.encode(text)[:PROMPT_TOKENS]).rstrip()
        if start.strip():
            prompts.append(start)
    return list(dict.fromkeys(prompts))[: len(PROMPTS)]


def beginning(text: str, special: re.Pattern[str]) -> str:
    """`text` from the first line that begins in it, else document, else word: a row may begin inside of each."""
    _, newline, rest = text.partition("\n")
    if not newline:
        documents = special.split(text)[1:]
        rest = next(filter(str.strip, documents), "") or text.partition(" ")[2] or text
    return next(filter(str.strip, special.split(rest)), "").strip("\n")


@runtime_checkable
class HoldsOutPrompts(Protocol):
    """A plan whose held-out examples are prompts without answers, as RL's."""

    held_out: Sequence[tuple[Any, int]]  # (source, place in it)


def held_out_questions(data: DataParts) -> list[list[int]]:
    """Return the tokens of held-out conversations up to the first answer."""
    held_out, asked, count = data.validation, [], len(PROMPTS)
    rows = [] if held_out is None else [held_out.read(row, 1) for row in range(min(count, held_out.count))]
    for batch in rows:
        answers = np.flatnonzero(batch["target_ids"][0] >= 0)
        if len(answers):
            asked.append(batch["input_ids"][0][: answers[0] + 1].tolist())
    prompts = data.plan.held_out[:count] if isinstance(data.plan, HoldsOutPrompts) else []
    # an environment's may be empty
    return asked + [source.ids[place] for source, place in prompts if source.ids[place]]


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
        PROMPTS_KEY,
        default_factory=list,
        help="prompts of the previews; held-out: beginnings of held-out text (also the default for data you name "
        "yourself); [] for seven shipped ones",
    )

    @property
    def finishing(self) -> str:
        return "" if self.file is None else "previews"

    def on_train_begin(self, loop: Loop) -> None:
        self.previewed: int | None = None
        self.prepare(loop.trainer)
        loop.trainer.preview = self  # what `maybe_generate` goes by
        self.on_rollback(loop)

    def prepare(self, trainer: BaseTrainer) -> None:
        """Open the file, or say why there are no previews."""
        self.file: MetricsFile | None = None
        if self.interval == 0:
            return
        if trainer.tokenizer is None or not isinstance(trainer.model, Decoding):
            missing = "tokenizer" if trainer.tokenizer is None else "model that can decode"
            trainer.say(f"no previews: they need a {missing}")
            return
        self.file = MetricsFile(trainer.run_directory.samples)

    def due(self, trainer: BaseTrainer, step: int) -> bool:
        """Return whether a preview is due: at every interval, and at the end of the run."""
        ended = trainer.done and step == trainer.step
        return self.interval != 0 and (ended or (self.interval > 0 and step % self.interval == 0))

    def on_rollback(self, loop: Loop) -> None:
        trainer, self.previewed = loop.trainer, None
        if self.file is not None and trainer.is_process_zero:
            # the preview of a finished step count is made again, by all processes: a kill may have cut it short
            self.file.truncate_after(loop.step - 1 if trainer.done else loop.step if loop.step > 0 else -1)

    def on_batch_end(self, loop: Loop) -> None:
        if self.due(loop.trainer, loop.step) and not loop.trainer.done:
            self.preview(loop)

    def on_train_end(self, loop: Loop) -> None:
        if self.previewed != loop.step:
            self.preview(loop)

    def preview(self, loop: Loop) -> None:
        """Have the trainer sample, and pass the samples to the other callbacks."""
        trainer = loop.trainer
        if self.file is None:
            return
        loop.flush()
        self.previewed = loop.step
        remedy = "Give fewer or shorter logging.preview_prompts"
        with loop.paused(), doing(trainer.run_state, f"the preview at step {loop.step}", remedy):
            found = trainer.maybe_generate(trainer.state, loop.step)
            loop.callbacks.fire("on_samples", loop, found or [])

    def show_if_due(self, trainer: BaseTrainer, state: TrainState, step: int, metrics: Any) -> list[Completion]:
        """See BaseTrainer.maybe_generate."""
        if not self.due(trainer, step):
            return []
        found = self.show(trainer, state, step)
        if metrics is not None:
            metrics["samples"] = [f"{sample.prompt} ▸ {sample.text}" for sample in found]
        return found

    def show(self, trainer: BaseTrainer, state: TrainState, step: int) -> list[Completion]:
        """Continue the prompts with the parameters of `state`; write them to the file, print the first few."""
        if self.file is None or trainer.tokenizer is None:
            return []
        asked, stops = self.starts(trainer, trainer.tokenizer)
        found = self.continued(trainer, state, asked, stops)
        if trainer.is_process_zero:
            for completion in found:
                self.file.append({"step": step, "prompt": completion.prompt, "completion": completion.text})
        for completion in found[:SHOWN]:
            trainer.say(f"step {step:>6}  {one_line(completion, trainer.output.console.width - MARGIN)}")
        return found

    def chosen(self, trainer: BaseTrainer) -> list[str]:
        """Return the caller's prompts. A recipe's own and the shipped ones only suit the recipe's data: other data is
        previewed with its own held-out text."""
        config = trainer.config
        given = self.prompts != config[PROMPTS_KEY] or bool(config.asked(PROMPTS_KEY))
        return self.prompts if given or trainer.has_recipe_data else [HELD_OUT]

    def starts(self, trainer: BaseTrainer, tokenizer: Tokenizer) -> tuple[dict[str, list[int]], tuple[int, ...]]:
        """Return prompts with their tokens, and what ends an answer. Objectives of the trait `chat` get questions."""
        prompts = self.chosen(trainer)
        held_out = prompts == [HELD_OUT]
        if objectives.entry(trainer.settings.objective).traits.get("chat") and can_chat(tokenizer):
            questions = held_out_questions(trainer.data) if held_out else []
            asked = {tokenizer.special_names.sub("", tokenizer.decode(ids)): ids for ids in questions}
            texts = [] if asked else list(PROMPTS) if held_out or not prompts else prompts
            asked |= {text: render([{"role": "user", "content": text}], tokenizer) for text in texts}
            return asked, stop_ids(tokenizer)
        texts = (held_out_prompts(trainer.data.validation, tokenizer) if held_out else prompts) or list(PROMPTS)
        return {text: tokenizer.prompt(text) for text in texts}, ()

    def continued(
        self, trainer: BaseTrainer, state: TrainState, asked: dict[str, list[int]], stops: tuple[int, ...]
    ) -> list[Completion]:
        """Return a few greedy tokens after each prompt, from the trainer's own `generate`."""
        shape = len(asked), max(map(len, asked.values()))
        ids, mask = left_padded(list(asked.values()), shape, trainer.tokenizer.pad_id if trainer.tokenizer else 0)
        results = trainer.generate(
            ids,
            mask,
            state=state,
            shard_inputs=False,  # few rows, and every process reads them all
            return_metadata=True,
            max_tokens=TOKENS,
            stop_ids=stops,
        )
        about, found = results.metadata or {}, []
        for row, prompt in enumerate(asked):
            length = int(results.completion_mask[row].sum()) - (about["finish"][row] == "stop")
            tokens = results.completion_ids[row, :length].tolist()
            logprobs = about["logprobs"][row, :length].tolist()
            text = results.generation_results[row]
            found.append(Completion(prompt, text, tokens, logprobs, about["finish"][row]))
        return found


def one_line(completion: Completion, width: int = 66) -> str:
    """`prompt ▸ continuation` with line ends as \\n. Both are shown: a long one is cut to what the other leaves, and to
    half of the width at least."""
    prompt, text = (
        words.replace("\n", "\\n") for words in (completion.prompt, completion.text or " (end of document)")
    )
    room = width - len(ARROW)
    prompt = fit(prompt, max(room - len(text), room // 2))
    left = room - len(prompt)
    return prompt + ARROW + (text if len(text) <= left else text[: left - 1] + "…")
