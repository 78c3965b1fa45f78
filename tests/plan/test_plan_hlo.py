"""Collectives are read off a program's text with loops multiplied, groups named by mesh axes, and bytes as sent."""

from __future__ import annotations

import pytest

from bessemer.plan.collectives import Collective, Layout, collectives_of, merged

LAYOUT = Layout({"data": 2, "fsdp": 4, "tensor": 1, "context": 1}, node=4)

TEXT = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %b)
}

%inner.1 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0:T(8,128)S(1)} parameter(0)
  ROOT %ar = f32[1024]{0:T(1024)} all-reduce(%p), channel_id=7, replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
}

%cond (c: (s32[], f32[4])) -> pred[] {
  %limit = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (c: (s32[], f32[4])) -> (s32[], f32[4]) {
  %c = (s32[], /*index=1*/f32[4]{0}) parameter(0)
  %ag = (bf16[16,8]{1,0}, bf16[64,8]{1,0}) all-gather-start(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %done = bf16[64,8]{1,0} all-gather-done(%ag)
  %f = f32[1024]{0} fusion(%done), kind=kCustom, calls=%inner.1
  ROOT %t = (s32[], f32[4]) tuple(%i, %f)
}

ENTRY %main.9_spmd (param: f32[8]) -> f32[8] {
  %param = f32[8]{0} parameter(0), sharding={devices=[8]<=[8]}, metadata={op_name="all-gather(not one)"}
  %w1 = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %w2 = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%body
  %rs = f32[16]{0} reduce-scatter(%y), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%add
  %cp = u8[10]{0} collective-permute(%z), channel_id=4, source_target_pairs={{0,1},{1,2}}
  ROOT %alone = f32[8]{0} all-reduce(%v), channel_id=5, replica_groups=[8,1]<=[8], to_apply=%add
}
"""


def test_loops_groups_and_bytes() -> None:
    found = {(one.kind, one.axes): one for one in collectives_of(TEXT, LAYOUT)}
    turns = 3 + 5  # as the compiler says, and by the bound of the condition
    gather = found["all-gather", ("fsdp",)]
    assert (gather.count, gather.group, gather.nodes) == (turns, 4, 1)
    assert gather.sent == turns * 64 * 8 * 2 * 3 / 4
    reduce = found["all-reduce", ("data",)]
    assert (reduce.count, reduce.group, reduce.nodes) == (turns, 2, 2)
    assert reduce.sent == turns * 1024 * 4 * 2 / 2
    scatter = found["reduce-scatter", ("fsdp",)]
    assert scatter.sent == 16 * 4 * 4 * 3 / 4, "its payload is what went in"
    assert found["collective-permute", ("fsdp",)].sent == 10
    assert len(found) == 4, "a group of one device sends nothing"


def test_groups_by_the_names_of_a_mesh() -> None:
    """What a TPU's compiler writes, and an exchange that it names in several pieces of work is one."""

    def program(*groups: str, attributes: str = "") -> str:
        lines = [
            f"  %g.{place} = bf16[64]{{0}} all-gather(%x), channel_id=9, replica_groups={group}{attributes}"
            for place, group in enumerate(groups)
        ]
        return "\n".join(["ENTRY %main (x: bf16[8]) -> bf16[8] {", *lines, "}"])

    def found(group: str) -> tuple[tuple[str, ...], int]:
        (one,) = collectives_of(program(group), LAYOUT)
        return one.axes, one.group

    assert found("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}") == (("fsdp",), 4)
    assert found("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}") == (("data", "fsdp"), 8)
    assert found("mesh['a'=8] {'a':(1)2}") == (("data",), 2)
    assert found("mesh['a'=8] {'a':(2)4}") == (("fsdp",), 4)
    assert found("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}") == (("data",), 2)
    twice = ["mesh['axis_0'=2,'axis_1'=4] {'axis_1'}"] * 2
    assert collectives_of(program(*twice), LAYOUT)[0].count == 2
    chained = program(*twice, attributes=', frontend_attributes={chain_id="3"}')
    assert collectives_of(chained, LAYOUT)[0].count == 1


def test_time_beyond_a_node() -> None:
    """Eight devices in two nodes: half of the payload crosses, on four links at once."""
    inside = Collective("all-gather", ("fsdp",), 8, 1, 8e9, nodes=1)
    across = Collective("all-gather", ("fsdp",), 8, 1, 8e9, nodes=2)
    assert inside.seconds(link=7e9, outside=1e9) == pytest.approx(1.0)
    assert across.seconds(link=7e9, outside=1e9) == pytest.approx(1.0), "4 GB over four links of 1 GB/s"
    assert across.seconds(link=7e9, outside=0.1e9) == pytest.approx(10.0)
    both = merged([inside, inside])[0]
    assert both.count == 2 and both.sent == 2 * inside.sent


def test_layout_names_axes() -> None:
    layout = Layout({"data": 2, "fsdp": 4, "tensor": 2, "context": 1}, node=8)
    assert layout.members(("fsdp",)).tolist() == [0, 2, 4, 6]
    assert layout.members(("data", "tensor")).tolist() == [0, 1, 8, 9]
    assert layout.axes_of([1, 3, 5, 7]) == ("fsdp",) and layout.axes_of([0, 9]) == ("data", "tensor")
    assert layout.nodes(layout.members(("data",))) == 2


def test_of_two_branches_the_one_that_sends_more_is_counted() -> None:
    """A stage of a pipeline takes one of them."""
    branches = "".join(
        f"%{name} (p: f32[{size}]) -> f32[{size}] {{\n  ROOT %ar = f32[{size}]{{0}} all-reduce(%p), channel_id={size}, "
        "replica_groups=[2,4]<=[8], to_apply=%add\n}\n\n"
        for name, size in (("first", 8), ("second", 32))
    )
    for words in ("branch_computations={%first, %second}", "true_computation=%first, false_computation=%second"):
        entry = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  ROOT %c = f32[8]{{0}} conditional(%i, %a, %b), {words}\n}}\n"
        (found,) = collectives_of(branches + entry, LAYOUT)
        assert (found.kind, found.axes, found.count, found.payload) == ("all-reduce", ("fsdp",), 1, 32 * 4)


def test_a_ragged_exchange_sends_the_rows_there_are() -> None:
    """Of its two sides one has room for the worst case; the rows of an even load are those of the other."""
    there = "%there = bf16[64,8]{1,0} ragged-all-to-all(%rows, %room, %a, %b, %c, /*index=5*/%d)"
    back = "%back = bf16[16,8]{1,0} ragged-all-to-all(%there, %empty, %a, %b, %c, /*index=5*/%d)"
    groups = "replica_groups={{0,1,2,3},{4,5,6,7}}"
    text = f"""\
ENTRY %main (p: bf16[16,8]) -> bf16[16,8] {{
  %rows = bf16[16,8]{{1,0}} parameter(0)
  {there}, channel_id=1, {groups}
  ROOT {back}, channel_id=2, {groups}
}}
"""
    (one,) = collectives_of(text, LAYOUT)
    assert (one.kind, one.axes, one.count) == ("ragged-all-to-all", ("fsdp",), 2)
    assert one.sent == 2 * 16 * 8 * 2 * 3 / 4


GPU_TEXT = """\
HloModule jit_train_step, is_scheduled=true

%async_computation (p: f32[256,128]) -> f32[64,128] {
  %p = f32[256,128]{1,0} parameter(0)
  ROOT %reduce-scatter.2 = f32[64,128]{1,0} reduce-scatter(%p), channel_id=9, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}

%body (c: (s32[], bf16[1,2048,256])) -> (s32[], bf16[1,2048,256]) {
  %c = (s32[], bf16[1,2048,256]{2,1,0}) parameter(0)
  %collective-permute-start = (bf16[1,2048,256]{2,1,0}, bf16[1,2048,256]{2,1,0}) collective-permute-start(%x), channel_id=1, source_target_pairs={{4,0},{5,1},{6,2},{7,3}}
  %collective-permute-done = bf16[1,2048,256]{2,1,0} collective-permute-done(%collective-permute-start)
  %ragged-all-to-all-start = ((bf16[4096,256]{1,0}, bf16[8192,256]{1,0}, s64[4]{0}, s64[4]{0}, s64[4]{0}, /*index=5*/s64[4]{0}), bf16[8192,256]{1,0}) ragged-all-to-all-start(%rows, %room, %a, %b, %d, /*index=5*/%e), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}
  %ragged-all-to-all-start.1 = ((bf16[8192,256]{1,0}, bf16[4096,256]{1,0}, s64[4]{0}, s64[4]{0}, s64[4]{0}, /*index=5*/s64[4]{0}), bf16[4096,256]{1,0}) ragged-all-to-all-start(%room, %rows, %a, %b, %d, /*index=5*/%e), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %t = (s32[], bf16[1,2048,256]{2,1,0}) tuple(%i, %collective-permute-done)
}

ENTRY %main.1_spmd (param: f32[8]) -> f32[8] {
  %w = (s32[], bf16[1,2048,256]{2,1,0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"9"},"known_init_step":{"init":"0","step":"1"}}
  %all-gather-start = ((bf16[64,128]{1,0}, f32[64,8]{1,0}), (bf16[256,128]{1,0}, f32[256,8]{1,0})) all-gather-start(%y, %z), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true
  %all-gather-done = (bf16[256,128]{1,0}, f32[256,8]{1,0}) all-gather-done(%all-gather-start)
  %reduce-scatter-start = ((f32[256,128]{1,0}, f32[256,128]{1,0}), (f32[64,128]{1,0}, f32[64,128]{1,0})) reduce-scatter-start(%g, %h), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %async-start = ((f32[256,128]{1,0}), f32[64,128]{1,0}) async-start(%g), calls=%async_computation
  %async-done = f32[64,128]{1,0} async-done(%async-start)
  %all-to-all-start = ((s32[2,4]{1,0}), s32[2,4]{1,0}) all-to-all-start(%n), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
  ROOT %all-reduce-start = f32[4,512]{1,0} all-reduce-start(%v), channel_id=27, replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}, use_global_device_ids=true, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":true}}
}
"""  # noqa: E501


def test_what_a_gpus_compiler_writes() -> None:
    """Lines of a step of experts and stages that jax 0.10.2 compiled for h200:64, with fewer devices; and a call of
    an exchange in the background, as other versions write it."""
    found = {(one.kind, one.axes): one for one in collectives_of(GPU_TEXT, LAYOUT)}
    counts = {key: (one.count, one.group) for key, one in found.items()}
    assert counts == {
        ("collective-permute", ("data",)): (9, 2),
        ("ragged-all-to-all", ("fsdp",)): (18, 4),
        ("all-gather", ("fsdp",)): (1, 4),
        ("reduce-scatter", ("fsdp",)): (2, 4),
        ("all-to-all", ("data",)): (1, 2),
        ("all-reduce", ("data",)): (1, 2),
    }
    assert found["collective-permute", ("data",)].sent == 9 * 2048 * 256 * 2
    assert found["ragged-all-to-all", ("fsdp",)].sent == 18 * 4096 * 256 * 2 * 3 / 4, "the rows, not the room for them"
    assert found["all-gather", ("fsdp",)].sent == (256 * 128 * 2 + 256 * 8 * 4) * 3 / 4
    assert found["reduce-scatter", ("fsdp",)].sent == 3 * 256 * 128 * 4 * 3 / 4
    assert found["all-reduce", ("data",)].sent == 4 * 512 * 4 * 2 / 2
