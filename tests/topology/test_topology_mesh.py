"""Mesh sizes, chips, rule tables: what is silent in flax is an error here."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bessemer.errors import InputError
from bessemer.topology import (
    AXES,
    CHIPS,
    TopologySettings,
    check_rules,
    chip_of,
    init_sharded,
    make_topology,
    shardings,
    validate_divisible,
)


def box(names, shape, dtype=jnp.float32):
    return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, dtype), names)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5e", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v5p", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU7x", "TPU v7x"),
    ],
)
def test_chip_is_recognised_by_its_device_kind(kind, name):
    assert chip_of(kind) is CHIPS[name]


@pytest.mark.parametrize(
    "kind", ["cpu", "NVIDIA GB10", "NVIDIA L40", "NVIDIA A10", "NVIDIA GeForce RTX 4090 Laptop GPU", "TPU v3"]
)
def test_unknown_chip_is_none_not_a_guess(kind):
    assert chip_of(kind) is None


def test_peaks_are_dense_and_plausible():
    for chip in CHIPS.values():
        assert chip.fp8_flops is None or 1.9 < chip.fp8_flops / chip.bf16_flops < 2.1
        assert chip.peak_flops("fp8") >= chip.peak_flops() == chip.bf16_flops
        assert 1e13 < chip.bf16_flops < 1e16 and 5e11 < chip.hbm_bytes_s < 1e13


def test_minus_one_fills_what_is_left():
    topology = make_topology(TopologySettings(fsdp=2, tensor=2))
    assert dict(topology.mesh.shape) == dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 2, "tensor": 2}
    assert topology.data_parallel == 4 and topology.device_count == 8 and topology.is_process_zero
    filled = make_topology(TopologySettings(data=1, fsdp=-1))
    assert filled.mesh.shape["fsdp"] == 8
    assert make_topology(devices=jax.devices()[:1]).data_parallel == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": 3}, ["topology.data=3", "8 device"]),
        ({"data": -1, "fsdp": -1}, ["topology.data and topology.fsdp", "-1"]),
        ({"tensor": 3}, ["topology.tensor=3", "8 device"]),
        ({"context": 0}, ["topology.context=0"]),
        ({"data": 2, "fsdp": 2}, ["topology.data=2", "topology.fsdp=2", "8 device"]),
        ({"platform": "tpu"}, ["topology.platform=tpu", "cpu"]),
    ],
)
def test_bad_mesh_sizes_name_settings_and_device_count(settings, words):
    with pytest.raises(InputError) as caught:
        make_topology(TopologySettings(**settings))
    assert all(word in str(caught.value) for word in words)


def test_batch_sharding_splits_rows_and_sequence():
    topology = make_topology(TopologySettings(fsdp=2, context=2))
    assert topology.batch_sharding().spec == P(("data", "fsdp", "expert", "pipeline"), "context")
    batch = jax.device_put(np.zeros((3, 8, 4)), topology.batch_sharding(1))
    assert batch.addressable_shards[0].data.shape == (3, 2, 2)
    assert topology.describe()["axes"] == dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 2, "context": 2}
    assert topology.describe()["cpu_threads"] >= 8 and topology.compiler_options is None


def test_rest_and_compute_tables_make_fsdp():
    topology = make_topology(TopologySettings(data=1, fsdp=4, tensor=2))
    tree = {"w": box(("embed", "mlp"), (8, 6)), "layers": {"g": box(("layers", "gate"), (3, 5))}, "s": 1.0}
    rest = shardings(tree, topology.mesh)
    assert rest["w"].spec == P(("fsdp", "pipeline"), "tensor") and rest["layers"]["g"].spec == P(None, None)
    assert rest["s"].is_fully_replicated
    assert shardings(tree, topology.mesh, topology.compute_rules)["w"].spec == P(None, "tensor")
    specs = shardings({"x": P(("data", "fsdp"), None), "y": P("vocab")}, topology.mesh)
    assert specs["x"].spec == P(("data", "fsdp"), None) and specs["y"].spec == P("tensor")


def test_what_flax_passes_silently_is_an_error():
    topology = make_topology(TopologySettings(data=1, fsdp=4, tensor=2))
    with pytest.raises(InputError, match=r"'block/w'.*'embd'.*Did you mean 'embed'"):
        shardings({"block": {"w": box(("embd",), (8,))}}, topology.mesh)
    with pytest.raises(InputError, match=r"'w'.*'tensor' would split two"):
        shardings({"w": box(("heads", "mlp"), (8, 8))}, topology.mesh)
    with pytest.raises(InputError, match="twice"):
        check_rules([("embed", "fsdp"), ("embed", None)], topology.mesh)
    with pytest.raises(InputError, match="'elsewhere'"):
        check_rules([("embed", "elsewhere")], topology.mesh)
    with pytest.raises(InputError, match="name each axis"):
        shardings({"w": box(("embed",), (8, 8))}, topology.mesh)


def test_indivisible_dimension_names_parameter_and_setting():
    topology = make_topology(TopologySettings(data=1, fsdp=4, tensor=2))
    with pytest.raises(InputError, match=r"'attn/k'.*'kv' has 3.*topology.tensor=2.*model.kv_heads"):
        validate_divisible({"attn": {"k": box(("embed", "kv", "head_dim"), (8, 3, 4))}}, topology)
    validate_divisible({"attn": {"k": box(("embed", "kv", "head_dim"), (8, 4, 4))}}, topology)


class Tiny(nn.Module):
    @nn.compact
    def __call__(self, x):
        make = nn.with_logical_partitioning(nn.initializers.normal(), ("embed", "mlp"))
        w = nn.with_logical_constraint(self.param("w", make, (8, 4)), ("embed", "mlp"))
        return nn.with_logical_constraint(x @ w, ("batch", "mlp"))


def test_variables_are_born_sharded_and_the_scope_constrains():
    topology = make_topology(TopologySettings(data=1, fsdp=4, tensor=2))
    key = jax.random.key(0)
    variables, placement = init_sharded(lambda k: Tiny().init(k, jnp.ones((4, 8))), key, topology)
    w = variables["params"]["w"]
    assert w.sharding == placement["params"]["w"] and w.addressable_shards[0].data.shape == (2, 2)
    with topology.scope():
        y = jax.jit(Tiny().apply)(variables, jnp.ones((4, 8)))
    assert y.sharding.shard_shape(y.shape) == (1, 2)
    single, _ = init_sharded(lambda k: Tiny().init(k, jnp.ones((4, 8))), key, make_topology(devices=jax.devices()[:1]))
    np.testing.assert_array_equal(single["params"]["w"], w)
