"""The conversation in the terminal: streamed, remembered, repeatable; it ends when its user does."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.processes import TIMEOUT
from tests.tiny_run import make_run

from bessemer.errors import InputError
from bessemer.generate import Engine, LoadedModel, Sample, SamplingOptions
from bessemer.serve.chat import GREETING, Chat, Repl, Transcript, Turns, read_line, remark, template_of

GREEDY = SamplingOptions()
DRAWN = SamplingOptions(temperature=1.0)


@pytest.fixture(scope="module")
def own(loaded: LoadedModel) -> Engine:
    """As the command makes it: one slot that keeps what it holds."""
    return Engine.of(loaded, slots=1, reuse=True)


@pytest.fixture(scope="module")
def forgetful(loaded: LoadedModel) -> Engine:
    """Prefills every prompt from its beginning."""
    return Engine.of(loaded, slots=1)


class Said:
    """What a conversation writes."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, text: str) -> None:
        self.text += text


def make_chat(engine: Engine, loaded: LoadedModel, template: str, sampling: SamplingOptions = DRAWN) -> Chat:
    return Chat(engine, template_of(loaded, template), sampling, seed=3, max_tokens=6, write=Said())


def lines(*given: str) -> Callable[[], str]:
    left = iter(given)

    def read() -> str:
        for line in left:
            if line == "^C":
                raise KeyboardInterrupt
            return line
        raise EOFError

    return read


def exchanges(chat: Chat) -> list[list[int]]:
    """The tokens of each question with its answer."""
    return [turn.ids for turn in chat.turns]


def talk(chat: Chat, *given: str) -> list[str]:
    notes: list[str] = []
    Repl(chat, lines(*given), notes.append).run()
    return notes


@pytest.mark.parametrize("template", ["chat", "plain"])
def test_a_conversation_is_remembered_until_it_is_cleared(own: Engine, loaded: LoadedModel, template: str) -> None:
    chat = make_chat(own, loaded, template)
    leave = "/quit" if template == "chat" else "/exit"
    talk(chat, "cats", "dogs", leave, "never read")
    assert len(exchanges(chat)) == 2
    text = loaded.tokenizer.decode(token for exchange in exchanges(chat) for token in exchange)
    assert text.index("cats") < text.index("dogs") and "never" not in text
    assert talk(chat, "/clear") == ["the conversation was cleared."] and not exchanges(chat)


@pytest.mark.parametrize("template", ["chat", "plain"])
def test_the_cache_changes_nothing(own: Engine, forgetful: Engine, loaded: LoadedModel, template: str) -> None:
    """Turn by turn with the kept cache == the whole conversation read again each turn."""
    kept = make_chat(own, loaded, template)
    talk(kept, "cats", "dogs")
    fresh = make_chat(forgetful, loaded, template)
    talk(fresh, "cats", "dogs")
    assert kept.write.text == fresh.write.text and exchanges(kept) == exchanges(fresh)


def test_an_answer_is_written_as_it_comes(own: Engine, loaded: LoadedModel) -> None:
    chat, before = make_chat(own, loaded, "plain"), own.rounds
    talk(chat, "cats")
    assert own.rounds - before > 1, "six tokens, fewer than a whole round has"


def test_programs_are_compiled_before_the_first_question(loaded: LoadedModel) -> None:
    engine = Engine.of(loaded, slots=1, reuse=True)
    plain, chat = (make_chat(engine, loaded, "plain") for _ in range(2))
    chat.warm_up()
    compiled = engine.compilations
    assert compiled > 0 and not chat.turns and chat.asked == 0
    talk(chat, GREETING)
    assert engine.compilations == compiled, "the answer waits for no compiler"
    engine.reset()
    talk(plain, GREETING)
    assert exchanges(chat) == exchanges(plain), "and it is the same"


def test_the_same_seed_says_the_same(own: Engine, loaded: LoadedModel) -> None:
    chat = make_chat(own, loaded, "plain")
    talk(chat, "cats")
    first, chat.write.text = chat.write.text, ""
    notes = talk(chat, "/clear", "/seed 3", "cats", "/seed", "/seed x", "/seed 5000000000")
    assert chat.write.text == first
    assert "seed 3" in notes and notes.count("a seed must be between 0 and 4294967295.") == 2


def test_commands_are_explained(own: Engine, loaded: LoadedModel) -> None:
    helped, unknown = talk(make_chat(own, loaded, "plain"), "", "  ", "/help", "/what")
    assert "/clear" in helped and unknown.startswith("unknown command /what") and "/seed" in unknown


def test_the_oldest_is_forgotten_when_the_context_is_full(own: Engine, loaded: LoadedModel) -> None:
    chat = make_chat(own, loaded, "plain")
    notes = talk(chat, *["The grey cats and dogs were walking in the rain"] * 12, "cat " * 500)
    assert any("the oldest 1 exchange(s) were dropped" in note for note in notes)
    assert "too long" in notes[-1]
    assert 0 < sum(map(len, exchanges(chat))) < own.capacity


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts its background jobs with Ctrl-C ignored, and tests may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_the_answer_and_twice_leaves(own: Engine, loaded: LoadedModel, interruptible: None) -> None:
    """A real signal while an answer is shown: what was shown stays, and nothing else; the conversation goes on."""
    chat = make_chat(own, loaded, "plain")
    chat.max_tokens = 60
    shown: list[str] = []

    def write(text: str) -> None:
        shown.append(text)
        if text.strip() and len(exchanges(chat)) == 0:
            signal.raise_signal(signal.SIGINT)  # to this thread: os.kill may reach another one, later

    chat.write = write
    notes = talk(chat, "cats", "dogs", "^C", "/help", "^C", "^C", "never read")
    assert notes[0] == "(stopped)" and len(exchanges(chat)) == 2
    first = shown.index("\n")
    kept = Transcript(loaded.tokenizer)
    assert exchanges(chat)[0] == [*kept.question("cats"), *kept.answer("".join(shown[:first]), ())]
    assert notes.count("\n/quit or Ctrl-D leaves, or Ctrl-C again.") == 2


def test_a_base_model_gets_a_transcript_and_is_told_so(loaded: LoadedModel) -> None:
    base = template_of(loaded)
    assert isinstance(base, Transcript) and "trained on documents" in str(remark(base, "auto"))
    assert remark(base, "plain") is None
    tuned = LoadedModel(loaded.model, None, loaded.tokenizer, 1, {"objective": "sft"})
    assert isinstance(template_of(tuned), Turns) and remark(template_of(tuned), "auto") is None
    with pytest.raises(InputError, match="without a tokenizer"):
        template_of(LoadedModel(loaded.model, None, None, 1, {}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield make_run(tmp_path_factory.mktemp("chat"), steps=(20,)).path


@pytest.mark.slow
def test_the_command_talks_to_a_pipe(run: Path, home: Path) -> None:
    variables = {**os.environ, "BESSEMER_HOME": str(home), "JAX_NUM_CPU_DEVICES": "1"}
    words = [sys.executable, "-m", "bessemer", "chat", str(run), "--seed", "1", "--temperature", "0"]
    process = subprocess.Popen(
        words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    said, notes = process.communicate("cats\n/seed 9\n/clear\ncats\n", timeout=TIMEOUT)
    assert process.returncode == 0, notes
    first, second, end = said.split("\n")[0], said.split("\n")[1], said[-1:]
    assert first == second and first and end == "\n"
    assert "trained on documents" in notes and "tiny, step 20, seed 1" in notes and "seed 9" in notes
    assert "Traceback" not in notes


def test_the_calculator_answers_within_the_answer(
    own: Engine, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first piece is scripted, as a tuned model would write it; the engine goes on after the value."""
    tokenizer = loaded.tokenizer
    call = [tokenizer.specials["<|python_start|>"], *tokenizer.encode("12*3"), tokenizer.specials["<|python_end|>"]]
    prompts: list[list[int]] = []
    chat = make_chat(own, loaded, "chat", GREEDY)
    chat.max_tokens = 40
    stream = chat._stream

    def scripted(prompt: list[int], stop: int | None, used: int) -> Sample:
        prompts.append(prompt)
        if len(prompts) == 1:
            return Sample(0, tuple(call), (), tokenizer.decode(call[:-1]), "stop", stop)
        return stream(prompt, stop, used)

    monkeypatch.setattr(chat, "_stream", scripted)
    talk(chat, "what is 12*3?")
    shown = tokenizer.decode(prompts[1])
    assert shown.endswith("<|python_start|>12*3<|python_end|><|output_start|>36<|output_end|>")
    assert "<|output_start|>36<|output_end|>" in chat.write.text
    assert "<|output_start|>36" in tokenizer.decode(exchanges(chat)[0])


def test_a_pipe_that_is_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input, not a bug: one paragraph, exit code 2."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    with pytest.raises(InputError, match="not valid Unicode"):
        read_line()
