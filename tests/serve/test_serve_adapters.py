"""Several adapters over one base in one server: held once, chosen by model name, each as if it were served alone."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import openai
import pytest
from tests.interop.tiny_hf import foreign_tokenizer
from tests.interop.tiny_peft import make_base, make_peft
from tests.serve.conftest import Gate, Live
from tests.training.test_frozen_base import flip_a_bit, without_checksums

from bessemer.cli.serve import named_adapters
from bessemer.errors import InputError
from bessemer.generate import Engine, EngineThread, Request, Speculation, load_model
from bessemer.generate.adapters import import_adapters, load_several
from bessemer.interop.folder import Folder, import_folder
from bessemer.job import RunDirectory
from bessemer.serve.app import entries_of
from bessemer.serve.service import Service
from bessemer.storage.weights import flatten

PROMPT = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, two folders of PEFT's over it, and a run of each: `ranks` and `dora`."""
    root = tmp_path_factory.mktemp("adapters")
    base = make_base(root / "base", "patterns", vocab_size=262, eos_token_id=0)
    foreign_tokenizer(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(root / "home"))
        for name, case in (("ranks", "patterns"), ("dora", "dora")):
            peft = make_peft(root / f"peft-{name}", case, base)
            import_adapters(peft, root / "runs" / name, base, Folder(base).tree)
        import_folder(base, root / "runs" / "whole")
    return root


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("BESSEMER_HOME", str(place / "home"))


def run(place: Path, name: str) -> RunDirectory:
    return RunDirectory(place / "runs" / name)


def alone(place: Path, name: str) -> tuple[tuple[int, ...], np.ndarray]:
    """Greedy tokens of a run by itself, and their log-probabilities."""
    engine = Engine.of(load_model(run(place, name)), slots=4, steps=4, capacity=32)
    sample = engine.generate([Request(PROMPT, 6, logprobs=True)])[0].samples[0]
    return sample.ids, np.array(sample.logprobs)


@pytest.fixture(scope="module")
def several(place: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("BESSEMER_HOME", str(place / "home"))
        return load_several(run(place, "ranks"), {"style": "peft-dora"}, root=place / "runs")


@pytest.mark.slow
def test_the_base_is_in_memory_once(place: Path) -> None:
    """Every byte of the devices belongs to the one tree, in which each matrix of the base stands once."""
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    loaded, _ = load_several(run(place, "ranks"), {"style": "peft-dora", "again": "dora"}, root=place / "runs")
    gc.collect()
    new = [array for array in jax.live_arrays() if id(array) not in before]
    held = jax.tree.leaves(loaded.params)
    assert sum(array.nbytes for array in new) == sum(array.nbytes for array in held)
    base = flatten(load_model(run(place, "whole")).params)
    matrices = sum(array.nbytes for array in held if array.ndim < 3 and array.shape[0] != 4)  # adapters are stacked
    assert matrices == sum(array.nbytes for array in base.values())


@pytest.mark.slow
def test_rows_of_different_adapters_in_one_batch_answer_as_each_alone(several: Any, place: Path) -> None:
    loaded, served = several
    assert {one.name: one.adapter for one in served} == {"base": 0, "ranks": 1, "style": 2}
    engine = Engine.of(loaded, slots=4, steps=4, capacity=32)
    asked = [Request(PROMPT, 6, logprobs=True, adapter=number) for number in (2, 0, 1, 0)]
    made = [result.samples[0] for result in engine.generate(asked)]
    assert engine.rounds <= 2  # together
    for name, sample in zip(("dora", "whole", "ranks", "whole"), made, strict=True):
        ids, logprobs = alone(place, name)
        assert sample.ids == ids, name
        np.testing.assert_allclose(sample.logprobs, logprobs, atol=1e-4, err_msg=name)
    assert len({made[0].logprobs, made[1].logprobs, made[2].logprobs}) == 3


@pytest.mark.slow
def test_drafts_prefixes_stop_strings_and_8_bit_weights_work_with_adapters(place: Path) -> None:
    """Two turns of each adapter: the text is that of an engine without drafts and prefixes, cut at the same string."""
    loaded, _ = load_several(run(place, "ranks"), {"style": "peft-dora"}, root=place / "runs")
    loaded.quantize("int8")
    options: dict[str, Any] = {"slots": 4, "steps": 4, "capacity": 64, "whole": True}
    fast = Engine.of(loaded, **options, speculate=Speculation(3, 2), reuse=True)
    plain = Engine.of(loaded, **options)
    texts, ended = dict.fromkeys((0, 1, 2), PROMPT * 10), set()
    whole = {one: plain.generate([Request(text, 12, adapter=one)])[0].samples[0].text for one, text in texts.items()}
    stops = {one: (text[4:6],) for one, text in whole.items()}
    for turn in range(2):
        asked = [Request(text, 12, adapter=one, stop_strings=stops[one], seed=turn) for one, text in texts.items()]
        pairs = list(zip(fast.generate(asked), plain.generate(asked), strict=True))
        for made, expected in pairs:
            one, other = made.samples[0], expected.samples[0]
            assert (one.ids, one.text, one.stop) == (other.ids, other.text, other.stop)
            ended.add(one.finish)
        texts = {one: [*text, *pairs[one][0].samples[0].ids, 44] for one, text in texts.items()}
    assert "stop" in ended and fast.reused_tokens >= 40 and fast.acceptance is not None
    one, other = (engine.generate([Request(texts[1], 4, adapter=2)])[0].samples[0] for engine in (fast, plain))
    assert one.ids == other.ids, "what another adapter computed is not used"


@pytest.mark.slow
def test_the_requests_model_chooses_the_adapter(several: Any) -> None:
    loaded, served = several
    gate = Gate()
    engine = Engine.of(loaded, slots=4, steps=4, capacity=32, scope=gate)
    entries = entries_of(served, "plain")
    own = entries.pop("ranks")
    service = Service(engine, own.template, "ranks", 0, own.adapter, entries)
    with EngineThread(engine), Live(service, gate) as live:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["ranks", "base", "style"]
        assert client.models.retrieve("style").id == "style"
        wanted = [engine.submit(Request(PROMPT, 4, adapter=number)).result(300).samples[0].text for number in (0, 1, 2)]
        for name, text in zip(("base", "ranks", "style"), wanted, strict=True):
            answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=4, temperature=0)
            assert answer.choices[0].text == text and answer.model == name
        with pytest.raises(openai.NotFoundError, match="'ranks', 'base' and 'style' are"):
            client.completions.create(model="other", prompt="a", max_tokens=1)
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


def test_a_whole_model_and_its_folder_are_the_same_base(place: Path) -> None:
    """Runs that name the folder are served over the import of it, which stores matrices transposed."""
    _, served = load_several(run(place, "whole"), {"one": "ranks", "two": "peft-dora"}, root=place / "runs")
    assert [one.name for one in served] == ["whole", "one", "two"]


def test_adapters_of_another_base_are_refused(place: Path, tmp_path: Path) -> None:
    other = make_base(tmp_path / "other", "dora", vocab_size=262, eos_token_id=0)
    import_adapters(make_peft(tmp_path / "peft", "dora"), tmp_path / "runs" / "strange", other, Folder(other).tree)
    with pytest.raises(InputError, match=r"strange.* was trained over another base than .*base: "):
        load_several(run(place, "ranks"), {"a": str(tmp_path / "runs" / "strange")}, root=place / "runs")
    changed = shutil.copytree(place / "base", tmp_path / "changed")
    flip_a_bit(changed)
    without_checksums(changed)
    import_adapters(place / "peft-dora", tmp_path / "runs" / "changed", changed, Folder(changed).tree)
    with pytest.raises(InputError, match=r"another base than .*base: '.*' has the sha256 .*… here and had .*…"):
        load_several(run(place, "ranks"), {"a": str(tmp_path / "runs" / "changed")}, root=place / "runs")
    (tmp_path / "peft" / "adapter_config.json").write_text(
        (place / "peft-dora/adapter_config.json").read_text().replace(str(place / "base"), str(changed))
    )
    with pytest.raises(InputError, match=r"not opened on the word of a file.*bessemer import"):
        load_several(run(place, "ranks"), {"a": str(tmp_path / "peft")}, root=place / "runs")
    with pytest.raises(InputError, match=r"whole .*holds no adapters"):
        load_several(run(place, "ranks"), {"a": "whole"}, root=place / "runs")


def test_names_must_be_distinct_and_whole(place: Path) -> None:
    with pytest.raises(InputError, match="the name 'ranks' is taken"):
        load_several(run(place, "ranks"), {"ranks": "dora"}, root=place / "runs")
    assert named_adapters(["a=b", "c=d=e"]) == {"a": "b", "c": "d=e"}
    for words, message in ((["a"], "write NAME=RUN"), (["=b"], "write NAME=RUN"), (["a=b", "a=c"], "given twice")):
        with pytest.raises(InputError, match=message):
            named_adapters(words)
