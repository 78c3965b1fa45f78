"""Chat templates from elsewhere: bounded in time, memory and output, and of no use for anything else."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from bessemer.data.tokenize import templates
from bessemer.data.tokenize.template_worker import MOST_OUTPUT
from bessemer.data.tokenize.templates import ChatTemplate, Worker
from bessemer.errors import InputError

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
FOR = "{% for x in range(99999) %}"
END = "{% endfor %}"
LOOPS = FOR * 3 + "{{ '' }}" + END * 3
EXCEEDING = {
    "nested loops": LOOPS,
    "loops without output": FOR * 2 + "{% set y = x %}" + END * 2,
    "one long string": "{{ 'x' * 3000000000 }}",
    "a string that doubles": "{% set ns = namespace(x='x') %}" + FOR + "{% set ns.x = ns.x + ns.x %}" + END,
    "a wide field": "{{ '%03000000000d' % 1 }}",
    "a centred word": "{{ 'x'|center(3000000000) }}",
    "a list": "{% set x = [1] * 3000000000 %}",
    "a power": "{{ (9 ** (9 ** 9))|string|length }}",
    "output": "{% set y = 'x' * 1000 %}" + FOR * 2 + "{{ y }}" + END * 2,
}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker of the test's own: what others did with the shared one is forgotten."""
    worker = Worker()
    monkeypatch.setattr(templates, "_shared", [worker])
    return worker


def process_of(worker: Worker) -> int:
    assert worker._process is not None
    return worker._process.pid


@pytest.mark.parametrize("source", EXCEEDING.values(), ids=EXCEEDING)
def test_a_template_that_exceeds_its_limits_is_refused(own: Worker, source: str) -> None:
    good = ChatTemplate("{{ messages[0]['content'] }}", {})
    assert good.render(TALK, False) == "Hi"
    for _ in range(2):
        with pytest.raises(InputError, match=r"took more than 2 s|needs more than 512 MiB"):
            ChatTemplate(source, {}).render(TALK, True)
        assert good.render(TALK, False) == "Hi", "others are rendered as before"
    before = process_of(own)
    with pytest.raises(InputError, match="not tried again"):
        ChatTemplate(source, {}).render(TALK, True)
    assert process_of(own) == before


@pytest.mark.slow
def test_many_who_ask_for_a_hostile_template_wait_for_two_of_them(own: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight requests took eight times the limit once; now all but two are refused when their turn comes."""
    monkeypatch.setattr(templates, "WALL_SECONDS", 600.0)  # the machine may be busy
    template, problems = ChatTemplate(LOOPS, {}), []

    def ask() -> None:
        with pytest.raises(InputError) as caught:
            template.render(TALK, True)
        problems.append(str(caught.value))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("took more" in problem for problem in problems) == 2
    assert sum("not tried again" in problem for problem in problems) == 6


def test_a_long_conversation_is_within_the_limits(own: Worker) -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m['content'] }}>{% endfor %}", {})
    long = [{"role": "user", "content": "word " * 20_000}] * 20
    assert len(template.render(long, False)) == 20 * 100_002 < MOST_OUTPUT
    many = [{"role": "assistant", "content": str(n)} for n in range(400)]
    texts = template.render_prefixes(many, [(count, False) for count in range(400)])
    assert texts[2] == "<0><1>" and len(texts) == 400


def test_prefixes_are_what_each_of_them_is_alone(own: Worker) -> None:
    source = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{{ add_generation_prompt }}"
    template = ChatTemplate(source, {})
    prefixes = [(2, False), (0, True), (1, True)]
    assert template.render_prefixes(TALK, prefixes) == [template.render(TALK[:n], opened) for n, opened in prefixes]
    assert template.render([{"role": "user", "content": "\ud800 ü \u2028"}], False) == "[user]\ud800 ü \u2028False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ ''|attr('__class__') }}",
        "{{ 'a{0.__class__}'.format(1) }}",
        "{{ ('{0.__class__}'|attr('format'))(1) }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_reaches_nothing_but_its_arguments(own: Worker, source: str) -> None:
    try:
        text = ChatTemplate(source, {}).render(TALK, False)
    except InputError:
        return
    assert "class" not in text and "root:" not in text


def test_the_worker_has_no_secrets_and_no_files(own: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "AKIA-not-for-you")
    ChatTemplate("x", {}).render(TALK, False)
    place = Path(f"/proc/{process_of(own)}")
    if not place.exists():
        pytest.skip("needs /proc")
    assert b"AKIA" not in (place / "environ").read_bytes()
    limits = (place / "limits").read_text()
    assert f"{512 << 20}" in limits and "Max file size             0" in limits


def test_a_worker_that_was_killed_is_started_again(own: Worker) -> None:
    template = ChatTemplate("{{ messages|length }}", {})
    assert template.render(TALK, False) == "2"
    os.kill(process_of(own), signal.SIGKILL)
    own._process.wait()  # type: ignore[union-attr]
    assert template.render(TALK, False) == "2"


def test_a_mistake_is_named_with_its_line(own: Worker) -> None:
    with pytest.raises(InputError, match="mistake in line 2"):
        ChatTemplate("a\n{% if %}", {}).render(TALK, False)
    with pytest.raises(InputError, match="refuses the conversation: only one"):
        ChatTemplate("{{ raise_exception('only one') }}", {}).render(TALK, False)
