"""The engine: requests join and leave a running batch, and none can tell that it was not alone."""

import functools
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.errors import InputError
from bessemer.generate import Decoder, Engine, EngineThread, QueueFull, Request, SamplingOptions
from bessemer.generate.rows import _decode, _empty_rows, row_sizes
from bessemer.topology import TopologySettings, make_topology, shardings
from compilations import cache_at, counted_compilations
from tiny_run import tiny_model, tiny_params, tiny_tokenizer

BLOCK = 32
PROMPTS = [[1, 5, 9, 2], [1, 7], [1, 3, 3, 8, 20, 41, 66], [4], [1, 250, 17]]
DRAWN = SamplingOptions(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def params():
    return tiny_params(1)


@pytest.fixture(scope="module")
def shared(params):
    return Engine(tiny_model(), params, slots=4, steps=4, tokenizer=tiny_tokenizer(), end_ids=(), seed=3)


@pytest.fixture
def engine(shared):
    """One engine for all tests, so that little is compiled; every test leaves it idle."""
    yield shared
    assert shared.active == 0 and shared.waiting == 0 and len(shared._free) == shared.slots
    shared.end_ids, shared.queue, shared.reuse = (), None, False
    shared._prefixes.clear()


@pytest.fixture(scope="module")
def batch(params):
    """The plain batch path, for four rows."""
    decoder = Decoder(tiny_model())

    def run(prompts, **options):
        found = decoder(params, prompts, max_tokens=10, **options)
        return [found.row(index) for index in range(len(prompts))]

    return run


@pytest.fixture(scope="module")
def forward(params):
    """ids → log-probabilities of the full forward."""
    call = jax.jit(lambda ids: jax.nn.log_softmax(tiny_model().apply({"params": params}, ids)))

    def run(ids):
        padded = np.zeros((1, BLOCK), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(call(padded))[0, : len(ids)]

    return run


def greedy(prompt, tokens=10, **options):
    return Request(prompt, tokens, **options)


def drawn(prompt, seed, tokens=10, **options):
    return Request(prompt, tokens, SamplingOptions(temperature=1.2), seed=seed, **options)


def ids_of(results):
    return [[sample.ids for sample in result.samples] for result in results]


def test_greedy_requests_equal_the_full_forward_and_the_batch_decoder(engine, batch, forward):
    results = engine.generate([greedy(prompt, logprobs=True) for prompt in PROMPTS])  # five, for four slots
    for prompt, result in zip(PROMPTS, results, strict=True):
        (sample,) = result.samples
        scores = forward([*prompt, *sample.ids])[len(prompt) - 1 : -1]
        assert scores.argmax(axis=-1).tolist() == list(sample.ids) and sample.finish == "length"
        np.testing.assert_allclose(sample.logprobs, scores[np.arange(10), sample.ids], atol=1e-4)
        assert sample.text == tiny_tokenizer().decode(sample.ids)
    assert batch(PROMPTS[:4]) == [list(results[i].samples[0].ids) for i in range(4)]


def test_drawn_tokens_carry_untempered_teacher_forced_log_probabilities(engine, forward):
    options = SamplingOptions(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3)
    (result,) = engine.generate([Request(PROMPTS[0], 12, options, seed=1, logprobs=True)])
    (sample,) = result.samples
    scores = forward([*PROMPTS[0], *sample.ids])[len(PROMPTS[0]) - 1 : -1]
    np.testing.assert_allclose(sample.logprobs, scores[np.arange(12), sample.ids], atol=1e-4)


def test_presence_and_frequency_penalties_equal_a_plain_loop(engine, forward):
    """Greedy, of generated tokens alone: token by token, from the full forward and a count in Python."""
    for presence, frequency in ((1.0, 0.0), (0.0, 0.6), (-0.4, 0.9)):
        options = SamplingOptions(presence_penalty=presence, frequency_penalty=frequency)
        (result,) = engine.generate([Request(PROMPTS[0], 24, options)])
        ids: list[int] = []
        for _ in result.samples[0].ids:
            scores = forward([*PROMPTS[0], *ids])[-1].astype(np.float64)
            made = np.bincount(ids, minlength=len(scores))
            ids.append(int(np.argmax(scores - presence * (made > 0) - frequency * made)))
        assert list(result.samples[0].ids) == ids
        if presence > 0:
            plain = engine.generate([greedy(PROMPTS[0], 24)])[0].samples[0].ids
            assert plain != result.samples[0].ids and len(set(ids)) > len(set(plain))


def test_the_most_likely_tokens_are_those_of_the_full_forward(engine, forward):
    requests = [
        drawn(PROMPTS[1], 5, logprobs=True, top_logprobs=7),
        greedy(PROMPTS[0], 12, logprobs=True, top_logprobs=20),
        greedy(PROMPTS[2], 9, logprobs=True),
    ]
    results = engine.generate(requests)
    for request, result in zip(requests, results, strict=True):
        (sample,) = result.samples
        if not request.top_logprobs:
            assert sample.top == ()
            continue
        scores = forward([*request.prompt_ids, *sample.ids])[len(request.prompt_ids) - 1 : -1]
        assert len(sample.top) == len(sample.ids)
        for place, ranking in enumerate(sample.top):
            assert len(ranking) == request.top_logprobs
            found = [score for _, score in ranking]
            np.testing.assert_allclose(found, np.sort(scores[place])[::-1][: len(found)], atol=1e-4)
            np.testing.assert_allclose(scores[place, [token for token, _ in ranking]], found, atol=1e-4)
    assert results[1].samples[0].ids == tuple(ranking[0][0] for ranking in results[1].samples[0].top)


def test_penalties_and_rankings_of_others_change_nothing(engine):
    mine = [drawn(PROMPTS[0], 31, 15), greedy(PROMPTS[1], 15)]
    alone = ids_of(engine.generate([*mine, greedy([4]), greedy([5])]))[:2]
    loud = SamplingOptions(temperature=0.9, presence_penalty=2.0, frequency_penalty=2.0)
    others = [Request(PROMPTS[2], 15, loud, seed=8, logprobs=True, top_logprobs=20)] * 2
    assert ids_of(engine.generate([*mine, *others]))[:2] == alone
    repeated = engine.generate([others[0], greedy([4])])[0].samples[0]
    assert repeated.ids == engine.generate([others[0]])[0].samples[0].ids


def test_a_slot_that_is_used_again_has_forgotten_its_tokens(engine):
    request = Request(PROMPTS[3], 10, SamplingOptions(presence_penalty=2.0, frequency_penalty=1.0))
    first = ids_of(engine.generate([request] * 4))
    assert ids_of(engine.generate([request] * 4)) == first and len({str(one) for one in first}) == 1


def test_first_tokens_of_many_samples_follow_the_models_distribution(engine, forward):
    """Chi-square through all of it: prefill, slots, streams of many seeds; the rarer tokens counted together."""
    (result,) = engine.generate([drawn(PROMPTS[2], 21, tokens=1, n=400)])
    p = np.exp(forward(PROMPTS[2])[-1].astype(np.float64) / 1.2)
    p /= p.sum()
    common = np.argsort(-p)[:12]
    cells = {int(token): place for place, token in enumerate(common)}
    counts = np.bincount([cells.get(sample.ids[0], 12) for sample in result.samples], minlength=13)
    expected = 400 * np.append(p[common], 1 - p[common].sum())
    assert np.sum((counts - expected) ** 2 / expected) < 12 + 5 * np.sqrt(2 * 12)


def test_a_seed_gives_the_same_text_in_any_company(engine):
    alone = engine.generate([drawn(PROMPTS[0], 11), drawn(PROMPTS[1], 12), drawn(PROMPTS[2], 13), greedy([4])])
    filtered = [
        Request(PROMPTS[4], 7, SamplingOptions(temperature=0.5, top_p=0.5, repetition_penalty=2.0), seed=seed)
        for seed in range(3)
    ]
    mixed = engine.generate([*filtered, drawn(PROMPTS[2], 13), greedy([4]), drawn(PROMPTS[0], 11)])
    assert [mixed[i].samples[0].ids for i in (5, 3, 4)] == [alone[i].samples[0].ids for i in (0, 2, 3)]
    other = engine.generate([drawn(PROMPTS[0], 14)])
    assert other[0].samples[0].ids != alone[0].samples[0].ids


def test_seeds_are_chosen_and_told_when_none_is_given(engine):
    request = Request(PROMPTS[0], 10, SamplingOptions(temperature=1.5))
    first, second = engine.generate([request, request])
    assert first.seed != second.seed and first.samples[0].ids != second.samples[0].ids
    (again,) = engine.generate([Request(PROMPTS[0], 10, SamplingOptions(temperature=1.5, seed=first.seed))])
    assert again.samples[0].ids == first.samples[0].ids


def test_samples_of_one_prompt_equal_separate_prompts_and_share_a_prefill(engine, batch):
    engine.prompt_tokens = 0
    (result,) = engine.generate([drawn(PROMPTS[2], 7, n=4)])
    assert engine.prompt_tokens == len(PROMPTS[2])
    options = SamplingOptions(temperature=1.2, seed=7)  # row j of a batch draws from the stream (seed, j) too
    separate = batch([PROMPTS[2]] * 4, sampling=options)
    assert [list(sample.ids) for sample in result.samples] == separate
    (more,) = engine.generate([drawn(PROMPTS[2], 7, n=6)])  # more samples than slots
    assert [sample.ids for sample in more.samples[:4]] == [sample.ids for sample in result.samples]
    assert [sample.index for sample in more.samples] == list(range(6))


def test_requests_join_a_running_batch_and_slots_are_used_again(engine):
    long = [engine.submit(greedy(PROMPTS[i], 20)) for i in range(3)]
    engine.step()
    assert engine.active == 3 and all(not handle.done for handle in long)
    late = [engine.submit(greedy([4], 3)), engine.submit(greedy([1, 7], 5))]
    engine.step()
    assert late[0].done and engine.active == 3 and engine.waiting == 1  # admitted, written, gone in one round
    engine.step()
    engine.step()
    assert late[1].done and not long[0].done
    engine.run_until_idle()
    expected = engine.generate([greedy(PROMPTS[i], 20) for i in range(3)])
    assert [handle.result().samples[0].ids for handle in long] == [r.samples[0].ids for r in expected]


def test_one_compilation_a_bucket_and_one_fetch_a_round(params):
    fetched = []

    def fetch(tree):
        fetched.append(tree)
        return jax.device_get(tree)

    engine = Engine(tiny_model(), params, slots=2, steps=4, fetch=fetch)
    engine.generate([greedy(PROMPTS[0], 9)])
    assert engine.compilations == 2 and len(fetched) == engine.rounds == 3  # a prefill and a decode program
    engine.generate([drawn([3], 1, 5, stop_ids=[8])])
    engine.generate([Request(PROMPTS[2], 8, SamplingOptions(0.7, 5, 0.9, 0.1, 3, 1.2), logprobs=True)])
    assert engine.compilations == 2


@pytest.mark.slow
def test_rollouts_of_prompts_of_any_length_share_one_prefill_width_and_one_decode_program(params):
    """As RL samples on an accelerator: one width, all slots in every round, a kernel that reads what rows hold."""
    model = tiny_model().clone(kernels="pallas", block_size=256)
    engine = Engine(model, params, slots=8, capacity=256, steps=8, narrowest=16, whole=True)
    random = np.random.default_rng(0)

    def rollout(groups):
        lengths = random.integers(1, 18, groups)
        requests = [drawn(random.integers(1, 300, length).tolist(), 1, 9, n=2) for length in lengths]
        limits = random.integers(1, 120, groups)  # rows end at different times
        return engine.generate([replace(r, max_tokens=int(n)) for r, n in zip(requests, limits, strict=True)])

    with counted_compilations() as made:
        rollout(6)
    assert made and engine.compilations == 3  # prefill of several prompts, prefill of one, decode
    with counted_compilations() as made:
        for groups in (3, 8, 1):
            rollout(groups)
    assert not made and engine.compilations == 3


@pytest.mark.slow
def test_programs_compiled_ahead_from_shapes_are_all_that_a_rollout_needs(params, tmp_path):
    """As RL does beside the compilation of its step: the first rollout finds every program in the cache on disk."""
    topology = make_topology(TopologySettings(data=1), jax.devices()[:1])
    model = tiny_model().clone(kernels="pallas", block_size=64, precision="bf16")
    placed = jax.device_put(params, topology.replicated)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), placed)
    settings = {"slots": 4, "capacity": 64, "steps": 8, "narrowest": 16, "whole": True, "scope": topology.scope}
    requests = [drawn(list(range(1, length)), 1, 9, n=2) for length in (3, 20, 18, 25, 2)]
    with cache_at(tmp_path) as (asked, found):
        ahead = Engine(model, None, **settings)
        for program in ahead.lower_ahead(abstract, 25):
            program.compile()
        del asked[:], found[:]
        engine = Engine(model, placed, **settings)
        engine.generate(requests)
        assert len(asked) > 4 and len(found) == len(asked)


def test_a_second_request_compiles_nothing_for_parameters_that_are_committed_to_a_device(params):
    """As loaded and trained ones are."""
    device = jax.devices()[1]
    engine = Engine(tiny_model(), jax.device_put(params, device), slots=1, steps=4)
    first = engine.generate([greedy(PROMPTS[0], 5)])
    assert engine._slots.rows.token.devices() == {device}
    with counted_compilations() as made:
        assert ids_of(engine.generate([greedy(PROMPTS[0], 5)])) == ids_of(first)
    assert not made and engine.compilations == 2


def test_buckets_of_rows_are_few_where_few_rows_take_as_long_as_many(monkeypatch):
    assert row_sizes(1) == (1,) and row_sizes(3) == (1, 3) and row_sizes(128) == (1, 4, 16, 64, 128)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert row_sizes(16) == (1, 16) and row_sizes(128) == (1, 16, 128)


@pytest.mark.slow
def test_parameters_are_cast_once_until_they_change_and_no_program_casts_them_again(monkeypatch):
    model = tiny_model().clone(precision="bf16")
    params = tiny_params(1)
    engine = Engine(model, params, slots=2, steps=4)
    casts, admissions = [], []
    for name, calls in (("_cast", casts), ("admit", admissions)):
        monkeypatch.setattr(engine._slots, name, recorded(getattr(engine._slots, name), calls))
    first = engine.generate([greedy(prompt, 9) for prompt in PROMPTS])
    assert engine.rounds > 3 and len(admissions) > 1 and len(casts) == 1
    cast = admissions[0][0]
    assert cast["blocks_0"]["q"].dtype == jnp.bfloat16 and cast["embedding"] is params["embedding"]
    rows = jax.eval_shape(functools.partial(_empty_rows, model, 2, 32), cast)
    program = functools.partial(_decode, model, 0, 4, reach=32, way=None)
    text = str(jax.make_jaxpr(program)(cast, rows, np.ones(2, bool), None, np.int32(4)))
    matrices = {leaf.shape for leaf in jax.tree.leaves(cast) if leaf.dtype == jnp.bfloat16}
    for shape in matrices:
        assert f"bf16[{','.join(map(str, shape))}] = convert_element_type" not in text, shape
    engine.update_params(params)
    assert ids_of(engine.generate([greedy(prompt, 9) for prompt in PROMPTS])) == ids_of(first) and len(casts) == 2


def recorded(call, calls):
    """Return `call`, noting the arguments of each call."""
    return lambda *args, **named: calls.append(args) or call(*args, **named)


def test_samples_of_a_request_enter_together_so_that_every_prompt_is_prefilled_once(engine, monkeypatch):
    requests = [drawn(prompt, 7, 2 + n, n=3) for n, prompt in enumerate(PROMPTS)]
    alone = [engine.generate([request])[0] for request in requests]
    admissions = []
    monkeypatch.setattr(engine._slots, "admit", recorded(engine._slots.admit, admissions))
    engine.prompt_tokens = 0
    assert ids_of(engine.generate(requests)) == ids_of(alone)
    assert engine.prompt_tokens == sum(map(len, PROMPTS))
    prompts = [set(new.sources[new.slots < engine.slots].tolist()) for _, new, *_ in admissions]
    assert sum(map(len, prompts)) == len(PROMPTS), "a prompt of several samples was prefilled more than once"


def test_new_parameters_are_used_from_the_next_round_without_compiling(engine, params):
    requests = [greedy(prompt) for prompt in PROMPTS]
    before = engine.generate(requests)
    compiled = engine.compilations
    engine.update_params(tiny_params(2))
    changed = engine.generate(requests)
    engine.update_params(params)
    assert engine.compilations == compiled
    assert ids_of(changed) != ids_of(before) == ids_of(engine.generate(requests))


def test_end_tokens_stop_ids_and_the_context_end_a_row(engine):
    (free,) = engine.generate([greedy(PROMPTS[0], 12)])
    tokens = free.samples[0].ids
    stop = tokens[5]
    end = tokens.index(stop) + 1
    (stopped,) = engine.generate([greedy(PROMPTS[0], 12, stop_ids=[stop], logprobs=True)])
    (sample,) = stopped.samples
    assert sample.ids == tokens[:end] and (sample.finish, sample.stop) == ("stop", stop)
    assert sample.text == tiny_tokenizer().decode(tokens[: end - 1]) and len(sample.logprobs) == end
    engine.end_ids = (stop,)
    assert engine.generate([greedy(PROMPTS[0], 12)])[0].samples[0].ids == tokens[:end]
    engine.end_ids = ()
    full, short = engine.generate([Request(PROMPTS[0]), greedy([1] * 30, 20)])
    assert (len(full.samples[0].ids), full.samples[0].finish) == (BLOCK - 3, "context")
    assert (len(short.samples[0].ids), short.samples[0].finish) == (3, "context")


def test_streamed_pieces_join_to_the_text_and_stop_strings_never_show(engine):
    (free,) = engine.generate([drawn(PROMPTS[1], 2, 20)])
    text = free.samples[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    handle = engine.submit(drawn(PROMPTS[1], 2, 20, stop_strings=["never comes", stop], logprobs=True))
    events = list(handle)
    (sample,) = handle.result().samples
    assert sample.text == "".join(event.text for event in events) == text[: text.find(stop)]
    assert (sample.finish, sample.stop) == ("stop", stop) and events[-1].finish == "stop"
    assert sum((event.ids for event in events), ()) == sample.ids == free.samples[0].ids[: len(sample.ids)]
    assert len(sample.logprobs) == len(sample.ids)
    assert stop in tiny_tokenizer().decode(sample.ids) and stop not in tiny_tokenizer().decode(sample.ids[:-1])


def test_cancel_frees_the_slot_at_once_and_keeps_what_was_written(engine):
    running, queued = engine.submit(greedy(PROMPTS[0], 25, n=4)), engine.submit(greedy(PROMPTS[1], 25))
    engine.step()
    running.cancel()
    queued.cancel()
    assert not engine.step() and engine.active == 0
    for sample in running.result().samples:
        assert sample.finish == "cancelled" and len(sample.ids) == 4
    assert [sample.finish for sample in queued.result().samples] == ["cancelled"]
    running.cancel()  # nothing more


def test_a_storm_of_requests_changes_none_of_them(engine):
    """Random lengths, samples, settings, arrivals, readers and cancellations; every request as if it were alone."""
    rng = np.random.default_rng(8)

    def draw(seed):
        sampling = SamplingOptions(
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 20])),
            top_p=float(rng.choice([1.0, 0.9])),
            repetition_penalty=float(rng.choice([1.0, 1.4])),
        )
        prompt = rng.integers(0, 300, rng.integers(1, 16)).tolist()
        stops = [] if seed % 3 else ["e", "th"]
        return Request(prompt, int(rng.integers(1, 16)), sampling, int(rng.integers(1, 4)), (7, 8), stops, seed)

    requests = [draw(seed) for seed in range(24)]
    alone = [engine.generate([request])[0] for request in requests]
    handles, doomed = [], {5, 11, 17}
    for number, request in enumerate(requests):
        handles.append(engine.submit(replace(request, stream=number % 2 == 0)))
        for _ in range(rng.integers(0, 3)):
            engine.step()
        if number - 1 in doomed:
            handles[number - 1].cancel()
    for number, (handle, expected) in enumerate(zip(handles, alone, strict=True)):
        for sample, whole in zip(handle.result().samples, expected.samples, strict=True):
            if number in doomed and sample.finish == "cancelled":
                assert whole.ids[: len(sample.ids)] == sample.ids and whole.text.startswith(sample.text[:-1])
            else:
                assert sample == whole


def test_a_full_queue_refuses_and_bad_requests_say_why(engine):
    engine.queue = 2
    handle = engine.submit(greedy(PROMPTS[0], 2, n=2))
    with pytest.raises(QueueFull, match="3 rows would wait for 4 slots, and 2 may"):
        engine.submit(greedy(PROMPTS[0]))
    handle.result()
    engine.submit(greedy(PROMPTS[0], 1)).result()
    for request, words in (
        (Request([]), "no tokens"),
        (Request([300]), "vocabulary"),
        (Request([1] * 33), "33 tokens and the context 32"),
        (Request([1], 0), "max tokens"),
        (Request([1], n=0), "n is 0"),
        (Request([1], stop_ids=range(17)), "17 stop tokens"),
        (Request([1], stop_strings=[""]), "empty"),
        (Request([1], sampling=SamplingOptions(seed=[1, 2])), "one seed"),
        (Request([1], seed=-1), "seed"),
    ):
        with pytest.raises(InputError, match=words):
            engine.submit(request)
    with pytest.raises(InputError, match="tokenizer"):
        Engine(tiny_model(), {}).submit(Request([1], stop_strings=["a"]))


def test_a_prompt_that_continues_a_finished_row_is_prefilled_from_there(engine, forward):
    engine.reuse = True
    (first,) = engine.generate([greedy(PROMPTS[2], 6)])
    prompt = [*PROMPTS[2], *first.samples[0].ids, 9, 2]
    reused = engine.reused_tokens
    (sample,) = engine.submit(greedy(prompt, 8, logprobs=True)).result().samples
    assert engine.reused_tokens - reused == len(PROMPTS[2]) + 5, "the newest token of a row is not in its cache"
    scores = forward([*prompt, *sample.ids])[len(prompt) - 1 : -1]
    np.testing.assert_allclose(sample.logprobs, scores[np.arange(8), sample.ids], atol=1e-4)
    engine.update_params(engine.params)
    reused = engine.reused_tokens
    engine.generate([greedy([*prompt, *sample.ids, 1], 2)])
    assert engine.reused_tokens == reused, "computed with the parameters before"


def test_an_error_reaches_every_open_request_and_the_engine_goes_on(engine):
    handles = [engine.submit(greedy(PROMPTS[0], 20)) for _ in range(5)]
    engine.step()
    fetch = engine.fetch
    engine.fetch = lambda tree: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.fetch = fetch
    for handle in handles:
        with pytest.raises(ZeroDivisionError):
            handle.result()
    assert len(engine.submit(greedy(PROMPTS[0], 3)).result().samples[0].ids) == 3


def test_many_threads_share_a_running_engine(engine):
    seeds = range(12)
    expected = ids_of(engine.generate([drawn(PROMPTS[seed % 5], seed, 8) for seed in seeds]))
    found = {}

    def ask(seed):
        handle = engine.submit(drawn(PROMPTS[seed % 5], seed, 8))
        events = list(handle)
        assert sum((event.ids for event in events), ()) == handle.result().samples[0].ids
        found[seed] = [handle.result().samples[0].ids]

    with EngineThread(engine):
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        with engine._stepping, pytest.raises(TimeoutError):  # no round meanwhile
            engine.submit(greedy(PROMPTS[0], 20)).result(timeout=0.0)
        open_at_the_end = engine.submit(greedy(PROMPTS[0], 29, n=40))
    assert [found[seed] for seed in seeds] == expected
    assert {sample.finish for sample in open_at_the_end.result().samples} <= {"cancelled", "length"}


@pytest.mark.slow
def test_a_mesh_of_eight_gives_the_same_tokens_from_parameters_where_they_rest(engine, params):
    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=2))
    model = tiny_model()
    with topology.scope():
        boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
        placed = jax.device_put(params, shardings(boxed, topology.mesh, topology.rest_rules))
    meshed = Engine(model, placed, slots=3, steps=4, scope=topology.scope)
    assert meshed.slots == 4  # rows divide over data and fsdp
    requests = [drawn(PROMPTS[i], i, 6 + i) for i in range(3)] + [drawn(PROMPTS[3], 9, n=3)]
    assert ids_of(meshed.generate(requests)) == ids_of(engine.generate(requests))
    before = meshed.compilations
    assert ids_of(meshed.generate(requests)) == ids_of(engine.generate(requests))
    assert meshed.compilations == before
