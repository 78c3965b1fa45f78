"""Saving, restoring, finding: bit-exact, on any mesh, strict, and never fooled by damage."""

from __future__ import annotations

import json
import logging
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint.store import superfluous
from bessemer.errors import InputError, StorageError
from bessemer.topology import TopologySettings, make_topology


def small(value=1.0):
    return {"w": jnp.full((4, 2), value, jnp.float32), "step": jnp.int32(value)}


def abstract(tree, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture
def store(tmp_path):
    store = Checkpoints(tmp_path / "checkpoints", keep_last=3)
    yield store
    store.close()


def full_state(sharding):
    w = jax.device_put(jax.random.normal(jax.random.key(0), (8, 6)).at[0, 0].set(jnp.nan), sharding)
    params = {"block": {"w": w}, "b": jnp.arange(3, dtype=jnp.bfloat16), "none": jnp.zeros((0, 3))}
    extra = {"flag": jnp.array(True), "u": jnp.array([1, 2**31], jnp.uint32), "host": np.arange(5.0)}
    return {"params": params, "opt": optax.adamw(1e-3).init(params), "step": jnp.int32(7), **extra}


def test_round_trip_is_bit_exact_and_lands_on_another_mesh(store):
    mesh = make_topology(TopologySettings(data=1, fsdp=4, tensor=2)).mesh
    state = full_state(NamedSharding(mesh, P("fsdp", "tensor")))
    store.save(7, state, files={"loop.json": '{"a": 1}', "tokenizer.json": b"{}"}, meta={"tokens": 9})
    store.wait()
    assert store.verify(7) == [] and store.read(7, "loop.json") == '{"a": 1}'
    assert json.loads(store.read(7, "meta.json")) == {"step": 7, "tokens": 9}
    assert store.leaves(7)["params/block/w"] == ("float32", (8, 6))
    assert_same_bits(store.restore(7, state), state)

    other = make_topology(TopologySettings(data=4, fsdp=2)).mesh
    moved = dict(state, params=dict(state["params"], block={"w": None}))
    moved["params"]["block"]["w"] = jax.ShapeDtypeStruct(
        (8, 6), jnp.float32, sharding=NamedSharding(other, P(None, "fsdp"))
    )
    back = store.restore(7, moved)
    assert back["params"]["block"]["w"].sharding.mesh == other
    assert_same_bits(back, state)

    single = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    part = store.restore(7, abstract(state["params"], single), only="params")
    assert_same_bits(part, state["params"])
    host = jax.tree.map(np.asarray, state["params"])
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(store.restore(7, host, only="params")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: {**s, "w": jnp.zeros((4, 3))}, ["'w'", "(4, 2)", "(4, 3)"]),
        (lambda s: {**s, "w": s["w"].astype(jnp.bfloat16)}, ["'w'", "float32", "bfloat16"]),
        (lambda s: {**s, "ema": jnp.zeros(1)}, ["'ema' is not in the checkpoint"]),
        (lambda s: {"w": s["w"]}, ["'step' is in the checkpoint only"]),
    ],
)
def test_a_state_that_does_not_fit_is_named_never_cast(store, change, words):
    store.save(1, small(), wait=True)
    with pytest.raises(StorageError) as caught:
        store.restore(1, change(small()))
    assert all(word in str(caught.value) for word in words)


def test_donating_right_after_save_does_not_change_what_is_saved(store):
    mesh = make_topology(TopologySettings(data=1, fsdp=8)).mesh
    placed = NamedSharding(mesh, P("fsdp"))
    step = jax.jit(lambda x: x * 1.5 + 1.0, donate_argnums=0)
    for number, sharding in ((1, placed), (2, jax.sharding.SingleDeviceSharding(jax.devices()[0]))):
        x = jax.device_put(jnp.arange(64 * 512, dtype=jnp.float32).reshape(64, 512), sharding)
        expected = np.array(x)
        store.save(number, {"x": x})
        for _ in range(10):
            x = step(x)
        store.wait()
        saved = store.restore(number, {"x": np.zeros_like(expected)})["x"]
        np.testing.assert_array_equal(saved, expected)


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_flip, "sha256 differs"),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "bytes instead of"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
@pytest.mark.parametrize("which", ["data", "loop.json", "COMMIT"])
def test_damage_is_named_and_the_previous_checkpoint_is_used(store, damage, words, which):
    for step in (1, 2):
        store.save(step, small(step), files={"loop.json": '{"smooth": 3.25}'}, wait=True)
    folder = store.path(2)
    target = folder / which
    if which == "data":
        target = max((folder / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    damage(target)
    problems = store.verify(2)
    assert problems and target.name in problems[0]
    if which != "COMMIT":
        assert words in problems[0]
    step, messages = store.newest_valid()
    assert step == 1 and len(messages) == 1 and "step_00000002" in messages[0] and target.name in messages[0]
    assert_same_bits(store.restore(1, small()), small(1))
    # The run goes on from 1 and reaches 2 again: the damaged one is replaced, not kept as "already there".
    store.save(2, small(5), files={"loop.json": "{}"}, wait=True)
    assert store.newest_valid() == (2, []) and int(store.restore(2, small())["step"]) == 5


def test_all_damaged_is_an_error_not_a_fresh_start(store):
    assert store.newest_valid() == (None, [])
    store.save(3, small(), wait=True)
    (store.path(3) / "meta.json").write_text("{}")
    with pytest.raises(StorageError, match=r"no checkpoint .* can be used.*meta.json"):
        store.newest_valid()


def test_only_committed_directories_are_seen_and_leftovers_are_cleaned(store):
    for step in (1, 2):
        store.save(step, small(step), wait=True)
    shutil.copytree(store.path(2), store.root / "step_00000009.tmp")
    shutil.copytree(store.path(2), store.root / "step_00000008.deleted")
    shutil.copytree(store.path(2), store.root / "step_00000007")  # a copy under a wrong name
    (store.root / "step_00000006").mkdir()
    (store.root / "notes").mkdir()
    assert store.committed() == [1, 2] and store.latest() == 2
    assert store.clean() == ["step_00000008.deleted", "step_00000009.tmp"]
    assert (store.root / "notes").is_dir() and store.committed() == [1, 2]
    store.save(6, small(6), wait=True)
    assert store.latest() == 6


def test_a_committed_step_is_left_alone(store):
    store.save(4, small(1), wait=True)
    before = (store.path(4) / "COMMIT").read_bytes()
    store.save(4, small(2), wait=True)
    assert (store.path(4) / "COMMIT").read_bytes() == before


def test_retention_keeps_last_every_and_best(tmp_path):
    store = Checkpoints(tmp_path / "c", keep_last=2, keep_every=4)
    store.protect(3)
    for step in range(1, 8):
        store.save(step, small(step))
    store.wait()
    assert store.committed() == [3, 4, 6, 7]
    store.protect(7)
    store.save(8, small(8), wait=True)
    assert store.committed() == [4, 7, 8]
    assert sorted(entry.name for entry in store.root.iterdir()) == [f"step_0000000{n}" for n in (4, 7, 8)]
    store.close()


@given(
    st.sets(st.integers(0, 50), min_size=1),
    st.integers(0, 5),
    st.integers(0, 7),
    st.sets(st.integers(0, 50), max_size=2),
)
def test_retention_never_deletes_what_it_promises(steps, last, every, protected):
    newest = max(steps)
    doomed = set(superfluous(steps, newest=newest, keep_last=last, keep_every=every, protected=protected))
    kept = steps - doomed
    assert newest in kept and not doomed & protected
    assert set(sorted(steps)[-last:] if last else steps) <= kept
    assert not every or all(step in kept for step in steps if step % every == 0)


def test_going_on_from_an_older_step_sets_newer_ones_aside(store):
    for step in (1, 2, 3):
        store.save(step, small(step), wait=True)
    assert store.set_aside_after(1) == [2, 3] and store.committed() == [1]
    store.save(2, small(20), wait=True)
    assert int(store.restore(2, small())["step"]) == 20
    assert sorted(p.name for p in store.root.glob("*.aside")) == ["step_00000003.aside"]


def test_what_cannot_be_saved_is_an_input_error(store):
    with pytest.raises(InputError, match="'name' is a str"):
        store.save(1, {"name": "x"})
    with pytest.raises(InputError, match="typed random key"):
        store.save(1, {"key": jax.random.key(0)})
    with pytest.raises(InputError, match="COMMIT"):
        store.save(1, small(), files={"COMMIT": ""})
    with pytest.raises(InputError, match="up"):
        store.save(1, small(), files={"../up": ""})
    assert store.committed() == [] and not store.root.exists()
    with pytest.raises(StorageError, match="never committed"):
        store.restore(1, small())
    store.save(1, small(), wait=True)
    with pytest.raises(StorageError, match=r"no file 'loop.json'"):
        store.read(1, "loop.json")


def test_logging_and_hooks_are_as_before(store):
    before = logging.getLogger("absl").level, sys.unraisablehook
    store.save(1, small(), wait=True)
    store.restore(1, small())
    assert (logging.getLogger("absl").level, sys.unraisablehook) == before
