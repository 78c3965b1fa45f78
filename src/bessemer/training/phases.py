"""Several runs in a row as one job: each phase is an ordinary run below RUN/phases, and starts from the one before.

    phases: {pretrain: {recipe: toy}, sft: {recipe: sft, training: {steps: 100}}}

The state is in the phases' own directories: after a kill, finished phases are skipped and the current one is resumed.
At the end every phase is evaluated with `eval.evaluations`, and the last one's weights become those of the job.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bessemer.config import Config, Schema, current, dotted, field, gather, resolve
from bessemer.console import shown
from bessemer.errors import BessemerError, InputError, Stopped
from bessemer.evaluate import Evaluator, check_tasks
from bessemer.generate.load import flat
from bessemer.job import BasicJob, ExecutionSpec, RunDirectory, RunLock
from bessemer.registry import jobs
from bessemer.report import write_report
from bessemer.report.summary import PHASES
from bessemer.storage.files import atomic_write, storage
from bessemer.topology import TopologySettings
from bessemer.training.display import StartUp
from bessemer.training.output import Output, closing_lines, write_config
from bessemer.training.setup.schema import schema_of
from bessemer.training.signals import after_signal, signals_delayed

OPEN = "???"
PASSED = ("topology/", "data/root", "logging/progress", "plugins", "seed")
"""Settings of the whole that every phase gets."""


@dataclass
class PhasesConfig:
    job: str = field("job", default="phases", help="the job: several runs in a row")
    plugins: list[str] = field("plugins", default_factory=list, help="modules or .py files imported first")
    init: str | None = field("init", default=None, help="what the first phase starts from: a run or checkpoint")
    seed: int = field("seed", default=1337, minimum=0, maximum=2**32 - 1, help="the only source of randomness")
    root: str | None = field("data/root", default=None, help="where prepared data is kept")
    progress: str = field("logging/progress", default="auto", help="how progress is shown, as in a run")
    phases: dict[str, Any] = field(
        "phases",
        default_factory=dict,
        help="by name and in order: recipe, and settings of that phase; null leaves a phase of the recipe out",
    )
    evaluations: list[str] = field(
        "eval/evaluations", default_factory=list, help="evaluations of every phase, at the end"
    )
    limit: int = field("eval/limit", default=500, minimum=1, help="examples of one evaluation")


@jobs.register("phases")
class Phases(BasicJob):
    """A job that runs its phases in order. It has no state of its own, so `load` reads nothing."""

    def __init__(self, spec: ExecutionSpec):
        super().__init__(spec)
        config = current()
        assert config is not None, "a job of phases is made from a configuration"
        self.config: Config = config
        self.settings: PhasesConfig = config.make(PhasesConfig)
        self.phases = {name: phase for name, phase in self.settings.phases.items() if phase is not None}
        self.continues = False
        self.startup = StartUp()
        self.derived: dict[str, Any] = {}
        assert spec.topology is not None
        self.output = Output(spec.run_directory, spec.topology.is_process_zero)
        self.say = self.output.say
        check_tasks(self.settings.evaluations or ["bpb"])
        self.check_phases()

    @classmethod
    def config_class(cls) -> type[PhasesConfig]:
        return PhasesConfig

    @classmethod
    def settings_schema(cls, values: Mapping[str, Any]) -> Schema:
        return gather(PhasesConfig, TopologySettings)

    def check_phases(self) -> None:
        """Resolve every phase before the first one begins: an error in the last should not cost hours."""
        if not self.phases:
            raise InputError("the job has no phases: give phases.NAME.recipe=RECIPE for each, in order.")
        left_open = [name for name, value in flat({"phases": self.phases}).items() if value == OPEN]
        if left_open:
            words = " ".join(f"{dotted(name)}=…" for name in left_open)
            raise InputError(f"the recipe leaves settings of its phases open: give {words}")
        for name, phase in self.phases.items():
            if not isinstance(phase, Mapping) or not isinstance(phase.get("recipe"), str):
                raise InputError(f"phases.{name} needs a recipe: phases.{name}.recipe=RECIPE.")
            try:
                resolve(schema_of, phase["recipe"], self.overrides(phase, None))
            except InputError as error:
                raise InputError(f"phase {name}: {error}") from error

    def overrides(self, phase: Mapping[str, Any], before: RunDirectory | None) -> dict[str, Any]:
        given = {key: self.config[key] for key in self.config.given() if key.startswith(PASSED)}
        own = {key: value for key, value in phase.items() if key != "recipe"}
        start = str(before.path) if before is not None else self.settings.init
        return {**given, **own, **({"init": start} if start is not None else {})}

    @property
    def run_directory(self) -> RunDirectory:
        return self.spec.run_directory

    def directory(self, name: str) -> RunDirectory:
        return RunDirectory(self.run_directory.path / PHASES / name)

    @property
    def done(self) -> bool:
        status = self.run_directory.read_status()
        return status.get("state") == "done" and status.get("exit_code") == 0

    def load(self, suffix: str | None = None) -> bool:
        if suffix is not None:
            raise InputError("a job of phases has no checkpoint of its own: resume a phase with --step, then the job.")
        return True

    # --- running -------------------------------------------------------------------------------------------
    def run(self) -> None:
        with self.opened():
            before: RunDirectory | None = None
            for number, name in enumerate(self.phases):
                self.run_directory.write_status(step=number, message=f"phase {name}")
                self.run_phase(name, before, f"{number + 1} of {len(self.phases)}")
                before = self.directory(name)
            self.run_directory.write_status(step=len(self.phases), message="evaluations")
            self.evaluate()
            assert before is not None
            self.take_weights(before)
            self.run_directory.write_status(state="done", message="")
            write_report(self.run_directory)
            path = shown(self.run_directory.path)
            for line in ("", *closing_lines(path, [f"  bessemer chat {shlex.quote(path)}"])):
                self.say(line)

    def run_phase(self, name: str, before: RunDirectory | None, which: str) -> None:
        from bessemer.training import launch  # which begins every run, phases too

        directory = self.directory(name)
        if directory.exists() and launch.is_finished(directory.path):
            self.say(f"phase {which}: {name} is done")
            return
        phase, begun = self.phases[name], time.monotonic()
        self.say(f"phase {which}: {name} ({phase['recipe']})")
        if directory.config.is_file():
            trainer = launch.reopen(directory.path)
        else:
            shutil.rmtree(directory.path, ignore_errors=True)  # killed before its configuration was written
            root = directory.path.parent
            trainer = launch.build_trainer(phase["recipe"], self.overrides(phase, before), name=name, root=root)
        trainer.run()
        self.say(f"phase {which}: {name} took {time.monotonic() - begun:.0f} s")

    def evaluate(self) -> None:
        """Write RUN/eval/PHASE.json for phases that have none yet."""
        for name in self.phases if self.settings.evaluations else ():
            marker = self.run_directory.eval / f"{name}.json"
            if marker.is_file():
                continue
            topology = self.spec.topology
            several = topology if topology is not None and topology.device_count > 1 else None
            evaluator: Evaluator[Any] = Evaluator.from_run(
                self.directory(name), topology=several, tasks=self.settings.evaluations, limit=self.settings.limit
            )
            results = [{"phase": name, **result} for result in evaluator.run().values()]
            for result in results:
                self.say(f"{name:<12} {result['task']}  {result['metric']} {result['value']:.4f}")
            if self.output.enabled:
                atomic_write(marker, json.dumps(results, indent=1) + "\n")

    def take_weights(self, last: RunDirectory) -> None:
        """Copy the last phase's weights to RUN/model, for chat, sample, serve and export."""
        if self.output.enabled:
            with storage("cannot copy the final weights"):
                shutil.copytree(last.model, self.run_directory.model, dirs_exist_ok=True)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Own the run directory, and record in status.json how the job ended."""
        directory = self.run_directory
        if not self.output.enabled:
            yield
            return
        with contextlib.ExitStack() as stack:
            with signals_delayed():
                directory.create(exist_ok=self.continues)
                lock = stack.enter_context(RunLock(directory))
                self.output.open_log()
                write_config(directory, self.config, self.say)
                directory.write_status(state="running", exit_code=None, step=0, message="")
            stack.enter_context(after_signal(lambda code, words: self.left(code, words, lock)))
            try:
                yield
            except BaseException as error:
                code = error.exit_code if isinstance(error, BessemerError) else 1
                words = self.record(code, str(error))
                if isinstance(error, Stopped):
                    raise Stopped(words) from None
                raise
            lock.check_intact()
            directory.write_status(exit_code=0, message="")

    def record(self, code: int, words: str) -> str:
        if code == Stopped.exit_code:
            words += f" Continue the whole job with: bessemer resume {self.run_directory.word}"
        state = "stopped" if code == Stopped.exit_code else "failed"
        self.run_directory.write_status(state=state, exit_code=code, message=words)
        return words

    def left(self, code: int, words: str, lock: RunLock) -> str:
        """Record that a signal ended a phase outside its loop, and the process with it."""
        words = self.record(code, words)
        lock.release()
        return words
