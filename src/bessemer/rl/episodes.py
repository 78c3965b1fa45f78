"""Multi-turn rollouts: the model and an environment take turns until the environment ends the episode.

    prompt      sampled ids   observation   sampled ids   …
    target −1   trained       target −1     trained

Token in, token out: the ids of a turn are those that were sampled, and observations are appended to them as the chat
template continues (`render_next`), so nothing that the model wrote is tokenized again.

Environments work while others decode. A call made after round r is waited for before round r + 1 +
grpo.environment_overlap, however quick it was: which rows share a round decides the last bits of their
log-probabilities, so the schedule depends on counts alone, and a run resumed in the middle of an episode is the same
run. Process 0 alone runs environments and tells the others what they said.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from bessemer.config import dotted
from bessemer.data import key_of
from bessemer.data.tokenize.chat import CallParser, ToolCall, can_chat, render_next
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError, TrainingError
from bessemer.generate import Handle, Request, Result, Sample, SamplingOptions
from bessemer.generate.text import prompt_ids
from bessemer.objectives.grpo import GrpoSettings, SampledSettings, group_advantages
from bessemer.registry import environments
from bessemer.rl.environments.base import Environment, EnvironmentSpec
from bessemer.rl.prompts import Chosen, longest_prompt
from bessemer.rl.rollout import Rollout, completion_rows, row_types
from bessemer.rl.sampler import REWARD_SECONDS, Laps, Sampler
from bessemer.rl.workers import Outcome, Workers
from bessemer.topology import agree, broadcast, forget, process_index
from bessemer.user_code import label

COUNTED = ("timeouts", "errors", "retries")


def check_environment(spec: EnvironmentSpec, policy: SampledSettings) -> None:
    """Raise InputError if the run's environment cannot be used."""
    if not isinstance(policy, GrpoSettings) or policy.offline != "no":
        raise InputError(
            "grpo.environment answers completions that are sampled and rewarded: it works with GRPO and its family, "
            "without grpo.offline."
        )
    found = environments.get(spec.name)
    if not isinstance(found, type) or not issubclass(found, Environment):
        raise InputError(
            f"the environment '{spec.name}' is not a class derived from bessemer.rl.environments.base.Environment."
        )
    try:
        inspect.signature(found).bind(**spec.options)
    except TypeError as error:
        raise InputError(f"the options of the environment '{spec.name}' do not fit: {error}.") from None


@dataclass(frozen=True)
class EpisodeSample(Sample):
    """An episode after its prompt: `ids` are sampled tokens and observations, `logprobs` those of the sampled tokens,
    `text` is that of the last turn. `finish`: "stop" if the environment ended it, "length" if it was cut, "failed"."""

    mask: tuple[int, ...] = ()  # 1: sampled, of each of `ids`
    reward: float = 0.0
    turns: int = 0

    @property
    def length(self) -> int:
        return sum(self.mask)

    @property
    def kept(self) -> bool:
        return self.finish != "failed"


@dataclass
class Episode:
    """One episode, while it is played. `seed`: of its sampling; sample `sample` of prompt `group`."""

    number: int
    group: int
    sample: int
    row: Mapping[str, Any]
    where: str
    seed: int
    prompt: list[int] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy: list[float] = field(default_factory=list)  # see Sample.policy_logprobs
    routes: np.ndarray | None = None  # see Sample.routes
    reward: float = 0.0
    turns: int = 0
    last: Sample | None = None
    calls: tuple[ToolCall, ...] = ()
    finish: str | None = None
    counts: dict[str, int] = field(default_factory=dict)  # the environment's own

    def take(self, sample: Sample) -> None:
        """Add the tokens of a turn."""
        self.ids += sample.ids
        self.mask += [1] * len(sample.ids)
        self.logprobs += sample.logprobs
        self.policy += sample.policy_logprobs
        if (
            sample.routes is not None
        ):  # what was sampled keeps the experts of its turn; observations get those of prefill
            known = sample.routes[:0] if self.routes is None else self.routes
            self.routes = np.concatenate([known, sample.routes[len(known) :]])
        self.turns += 1
        self.last = sample

    def as_sample(self) -> EpisodeSample:
        if self.finish == "failed":
            return EpisodeSample(0, (), (), "", "failed")
        assert self.finish is not None
        return EpisodeSample(
            0,
            tuple(self.ids),
            tuple(self.logprobs),
            self.last.text if self.last is not None else "",
            self.finish,
            policy_logprobs=tuple(self.policy),
            routes=self.routes,
            mask=tuple(self.mask),
            reward=self.reward,
            turns=self.turns,
        )


@dataclass
class Pending:
    """A call of an environment; `due`: the round before which it is waited for. `future`: on process 0."""

    episode: Episode
    due: int
    future: Future[Outcome] | None


@dataclass
class EpisodeSampler(Sampler):
    """Samples episodes in place of completions. say: prints a line."""

    plugins: list[str]
    say: Callable[[str], None]
    played: list[EpisodeSample] = field(default_factory=list)  # of the last call of `complete`, or of the rollout
    counts: Counter[str] = field(default_factory=Counter)  # since the rollout began, also of episodes replaced
    counted_by_environments: Counter[str] = field(default_factory=Counter)
    waited: float = 0.0  # seconds that the sampler waited for environments

    @property
    def judges(self) -> bool:
        return True

    @property
    def longest(self) -> int:
        return self.settings.block_size  # a later turn's prompt is the episode so far

    @property
    def continues(self) -> bool:
        return True  # the engine prefills what a turn adds, if the row of the turn before is still in its slot

    @property
    def spec(self) -> EnvironmentSpec:
        assert self.settings.environment is not None
        return self.settings.environment

    @functools.cached_property
    def workers(self) -> Workers:
        settings = self.settings
        return Workers(
            self.spec,
            self.plugins,
            settings.environment_workers,
            settings.environment_timeout,
            settings.environment_retries,
        )

    def close(self) -> None:
        """End the worker processes; the next rollout starts new ones."""
        workers = self.__dict__.pop("workers", None)
        if workers is not None:
            workers.close()

    def complete(
        self, what: str, chosen: Chosen, seeds: Sequence[int], may_fail: bool = False, **options: Any
    ) -> list[Result]:
        """Return one result per episode, `n` for each prompt. Raise TrainingError if all fail, unless they may."""
        engine = self.engine
        engine.update_params(self.params())
        try:
            play = Play(self, what, chosen, seeds, **options)
            play.run()
        finally:
            engine.update_params(None)  # the next step donates them
            engine.reset()
            if process_index() == 0:
                self.workers.forget()
        self.played = [episode.as_sample() for episode in play.episodes]
        failed = [sample for sample in self.played if not sample.kept]
        self.counts.update(play.counts, failures=len(failed))
        for episode in play.episodes:
            self.counted_by_environments.update(episode.counts)
        self.waited += play.waited
        if len(failed) == len(self.played) and not may_fail:
            raise TrainingError(
                f"{what}: every one of {len(failed)} episodes of the environment '{label(self.spec.name)}' failed; the "
                f"last: {play.failure}."
            )
        if failed:
            self.say(
                f"note: {what}: {len(failed)} of {len(self.played)} episodes of '{label(self.spec.name)}' failed and "
                f"are skipped; the last: {play.failure}"
            )
        return [
            Result(tuple(episode.prompt) or (engine.pad_id,), (sample,), episode.seed)
            for episode, sample in zip(play.episodes, self.played, strict=True)
        ]

    def rows_of(self, results: Sequence[Result]) -> dict[str, np.ndarray]:
        """Return one row per episode; only sampled tokens are targets, and none of an episode that failed."""
        samples = [sample for result in results for sample in result.samples]
        masks = [sample.mask for sample in samples if isinstance(sample, EpisodeSample)]
        prompts, completions = [result.prompt_ids for result in results], [sample.ids for sample in samples]
        block, pad = self.settings.block_size, self.engine.pad_id
        rows = completion_rows(prompts, completions, masks, block, pad, row_types(self.policy))
        rows["target_ids"][rows["loss_mask"] == 0] = -1
        return rows

    def judge(self, chosen: Chosen, samples: Sequence[Sample], copies: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the environment's rewards, and those of grpo.rewards beside them. A skipped episode gets the mean of
        the others, so that means are theirs; its advantage is 0."""
        played = _episodes(samples)
        total = np.array([sample.reward for sample in played])
        each = {label(self.spec.name): total}
        if self.rewards is not None:
            more, others = super().judge(chosen, samples, copies)
            total, each = total + more, {**each, **others}
        return self.averaged(played, total), {name: self.averaged(played, values) for name, values in each.items()}

    def averaged(self, samples: Sequence[Sample], values: np.ndarray) -> np.ndarray:
        kept = self.kept(samples)
        return np.where(kept, values, values[kept].mean() if kept.any() else 0.0)

    def kept(self, samples: Sequence[Sample]) -> np.ndarray:
        return np.array([sample.kept for sample in _episodes(samples)])

    def advantages(self, samples: Sequence[Sample], grouped: np.ndarray) -> np.ndarray:
        assert isinstance(self.policy, GrpoSettings)
        kept = self.kept(samples).reshape(grouped.shape)
        return group_advantages(grouped, self.policy.baseline, self.policy.scale, kept)

    def flat(self, samples: Sequence[Sample], grouped: np.ndarray) -> np.ndarray:
        """Episodes that failed are not compared."""
        kept = self.kept(samples).reshape(grouped.shape)
        return np.array([len(np.unique(rewards[counts])) < 2 for rewards, counts in zip(grouped, kept, strict=True)])

    def take(self, samples: Sequence[Sample]) -> None:
        self.played = _episodes(samples)

    def rollout(self, number: int, clock: Laps | None = None) -> Rollout:
        self.counts.clear()
        self.counted_by_environments.clear()
        self.waited = 0.0
        made = super().rollout(number, clock)
        kept = [sample for sample in self.played if sample.kept]
        made.metrics |= {
            "completion_len": float(np.mean([sample.length for sample in kept])),
            "truncated": float(np.mean([sample.finish != "stop" for sample in kept])),
            "env/turns": float(np.mean([sample.turns for sample in kept])),
            "env/failures": float(self.counts["failures"]),
            **{f"env/{name}": float(self.counts[name]) for name in COUNTED},
            **{f"env/{name}": float(count) for name, count in sorted(self.counted_by_environments.items())},
            "time/env_s": self.waited,
        }
        return made

    def validate(self, step: int) -> dict[str, float]:
        row = super().validate(step)
        kept = [sample for sample in self.played if sample.kept]
        return row | {
            "val_completion_len": float(np.mean([sample.length for sample in kept])),
            "val_turns": float(np.mean([sample.turns for sample in kept])),
        }


def _episodes(samples: Sequence[Sample]) -> list[EpisodeSample]:
    """Return the samples of an EpisodeSampler as what they are."""
    return cast(list[EpisodeSample], list(samples))


class Play:
    """The episodes of one rollout, or of all held-out prompts."""

    def __init__(
        self,
        sampler: EpisodeSampler,
        what: str,
        chosen: Chosen,
        seeds: Sequence[int],
        n: int = 1,
        sampling: SamplingOptions | None = None,
        logprobs: bool = False,
    ):
        self.sampler, self.engine, self.settings, self.what = sampler, sampler.engine, sampler.settings, what
        self.longest = sampler.policy.max_completion_length
        self.options: dict[str, Any] = {"sampling": sampling or SamplingOptions(), "logprobs": logprobs}
        self.size = n
        self.episodes = [
            Episode(
                group * n + sample,
                group,
                sample,
                source.columns[place],
                f"{source.name} row {source.places[place]}",
                seed,
            )
            for group, ((source, place), seed) in enumerate(zip(chosen, seeds, strict=True))
            for sample in range(n)
        ]
        self.round = 0
        self.pending: list[Pending] = []
        self.writing: list[tuple[Handle, dict[int, Episode]]] = []  # requests, with the episode of each sample
        self.counts = dict.fromkeys(COUNTED, 0)
        self.waited = 0.0
        self.failure = ""

    def run(self) -> None:
        """Play all episodes to their ends."""
        for episode in self.episodes:
            seed = key_of(self.settings.seed, "environment", episode.seed, episode.group, episode.sample) % 2**32
            self._ask(episode, {"call": "reset", "row": episode.row, "seed": seed}, 0)
        self._show()
        self._begin(self._answers())
        while self.writing or self.pending:
            self._continue(self._answers())
            if self.engine.step():
                self.round += 1
                self._collect()
                self._show()

    def _show(self) -> None:
        done = sum(episode.finish is not None for episode in self.episodes)
        first = "" if self.engine.compilations else "; compiling the sampler first"
        self.sampler.show(f"{self.what} {done}/{len(self.episodes)}{first}")

    # --- the environment ---

    def _ask(self, episode: Episode, call: dict[str, Any], overlap: int) -> None:
        future = self.sampler.workers.submit(episode.number, call) if process_index() == 0 else None
        self.pending.append(Pending(episode, self.round + overlap, future))

    def _answers(self) -> list[tuple[Episode, dict[str, Any]]]:
        """Return the answers that are due, in the order of the episodes; if nothing can be decoded meanwhile, those
        that are due next. Failures are dealt with."""
        if not self.pending:
            return []
        now = self.round if self.writing else min(one.due for one in self.pending)
        due = sorted((one for one in self.pending if one.due <= now), key=lambda one: one.episode.number)
        if not due:
            return []
        self.pending = [one for one in self.pending if one.due > now]
        begun = time.monotonic()
        text = broadcast("environment", lambda: _outcomes(due), REWARD_SECONDS)
        agree("what the environment said", hashlib.sha256(text.encode()).hexdigest()[:16])
        forget("environment")  # all have read it
        self.waited += time.monotonic() - begun
        answers: list[tuple[Episode, dict[str, Any]]] = []
        for one, outcome in zip(due, json.loads(text), strict=True):
            for name in COUNTED:
                self.counts[name] += outcome.get(name, 0)
            if outcome.get("failure"):
                self._fail(one.episode, outcome["failure"])
            else:
                answers.append((one.episode, outcome["reply"]))
        return answers

    def _fail(self, episode: Episode, problem: str) -> None:
        self.failure = f"{episode.where}, turn {episode.turns}: {problem}"
        if self.settings.on_environment_error == "fail":
            raise TrainingError(
                f"the environment '{label(self.sampler.spec.name)}' failed at {self.failure}. To leave such episodes "
                f"out, counted, set {dotted('grpo/on_environment_error')}=skip."
            )
        episode.finish = "failed"

    # --- turns ---

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self.sampler.parts.tokenizer
        assert tokenizer is not None
        return tokenizer

    @property
    def _chats(self) -> bool:
        return self.settings.chat and can_chat(self._tokenizer)

    def _begin(self, answers: Iterable[tuple[Episode, dict[str, Any]]]) -> None:
        """Sample the first turn. A group with one prompt is one request, so that it is prefilled once."""
        ready: dict[int, list[Episode]] = {}
        for episode, reply in answers:
            try:
                episode.tools, episode.prompt = reply["tools"], self._prompt(reply)
            except InputError as error:
                self._fail(episode, str(error))
                continue
            ready.setdefault(episode.group, []).append(episode)
        for group in ready.values():
            if all(episode.prompt == group[0].prompt for episode in group):
                self._write(group[0].prompt, {one.sample: one for one in group}, group[0].seed, self.size)
                continue
            for episode in group:
                self._write(episode.prompt, {0: episode}, _seed(episode))

    def _prompt(self, reply: Mapping[str, Any]) -> list[int]:
        prompt, longest = reply["prompt"], longest_prompt(self.settings, self.sampler.policy)
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            ids = self._checked(prompt)
        else:
            tools = reply["tools"] if self._tokenizer.chat_template is not None else ()
            ids = prompt_ids(prompt, self._tokenizer, self.settings.chat, tools)
        if len(ids) > longest:
            raise InputError(f"the prompt of reset has {len(ids)} tokens, and {longest} are allowed")
        return ids

    def _checked(self, ids: Sequence[int]) -> list[int]:
        if any(not 0 <= token < self._tokenizer.vocab_size for token in ids):
            raise InputError(f"token ids outside the tokenizer's {self._tokenizer.vocab_size}")
        return list(ids)

    def _continue(self, answers: Iterable[tuple[Episode, dict[str, Any]]]) -> None:
        """Append observations and sample the next turns; end episodes that are over, or have no turn or room left."""
        for episode, reply in answers:
            episode.reward += reply["reward"]
            episode.counts = reply["counts"]
            if reply["done"]:
                episode.finish = "stop"
                continue
            if episode.turns >= self.settings.max_turns:
                episode.finish = "length"
                continue
            try:
                observation = self._observation(episode, reply["observation"])
            except InputError as error:
                self._fail(episode, str(error))
                continue
            context = [*episode.prompt, *episode.ids, *observation]
            if len(context) > self.settings.block_size:
                episode.finish = "length"
                continue
            episode.ids += observation
            episode.mask += [0] * len(observation)
            self._write(context, {0: episode}, _seed(episode))

    def _observation(self, episode: Episode, content: Any) -> list[int]:
        """Return the tokens of an observation, and of the opening of the model's next turn."""
        before, last = [*episode.prompt, *episode.ids], episode.last
        assert last is not None
        if isinstance(content, list) and isinstance(content[0], int):
            return self._checked(content)
        if isinstance(content, str):
            if not self._chats:
                return self._tokenizer.encode(content, after=before)
            call = next(iter(episode.calls), None)
            content = [{"role": "user", "content": content}]
            if call is not None:
                content = [{"role": "tool", "content": content[0]["content"], "name": call.name or "unknown"}]
        ended = last.finish == "stop" and last.stop != self._parser(episode).end_id
        return render_next(
            content, self._tokenizer, before=before, ended=ended, called=bool(episode.calls), tools=episode.tools
        )

    def _write(self, prompt: Sequence[int], episodes: dict[int, Episode], seed: int, n: int = 1) -> None:
        room = self.settings.block_size + 1 - len(prompt)  # the last token of a row is a target only
        end = self._parser(next(iter(episodes.values()))).end_id
        request = Request(
            tuple(prompt),
            min(self.longest, room),
            n=n,
            seed=seed,
            stop_ids=() if end is None else (end,),
            **self.options,
        )
        self.writing.append((self.engine.submit(request), episodes))

    def _collect(self) -> None:
        """Pass the turns that have ended to the environment."""
        ended: list[Episode] = []
        for handle, episodes in self.writing:
            for index in [index for index in episodes if index in handle.samples]:
                episode = episodes.pop(index)
                episode.take(handle.samples[index])
                ended.append(episode)
        self.writing = [(handle, episodes) for handle, episodes in self.writing if episodes]
        for episode in sorted(ended, key=lambda one: one.number):
            assert episode.last is not None
            episode.calls = self._parser(episode).parse(episode.last.text, episode.last.stop)
            said = {
                "text": episode.last.text,
                "calls": [vars(call) for call in episode.calls],
                "finish": episode.last.finish,
            }
            self._ask(episode, {"call": "step", "completion": said}, self.settings.environment_overlap)

    def _parser(self, episode: Episode) -> CallParser:
        return _parser_of(self._tokenizer, json.dumps(episode.tools) if self._chats else "[]")


@functools.lru_cache(maxsize=16)
def _parser_of(tokenizer: Tokenizer, tools: str) -> CallParser:
    return CallParser(tokenizer, json.loads(tools))


def _seed(episode: Episode) -> int:
    """The seed of an episode's next turn."""
    return key_of(episode.seed, "turn", episode.turns, episode.sample) % 2**32


def _outcomes(due: Sequence[Pending]) -> str:
    """Wait for the answers, and return them as JSON, which keeps every bit of a float."""
    return json.dumps([one.future.result().as_json() for one in due if one.future is not None])
