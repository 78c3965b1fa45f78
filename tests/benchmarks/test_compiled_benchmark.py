"""What the script reads in a compiled program: kernels, the bytes they move, and the loop that holds them."""

from __future__ import annotations

import compiled

PROGRAM = """HloModule jit_step

%fused_convert (param_0: f32[16,8]) -> bf16[16,8] {
  %param_0 = f32[16,8]{1,0} parameter(0)
  ROOT %convert.1 = bf16[16,8]{1,0} convert(%param_0)
}

%body (arg: (s32[], f32[16,8], bf16[4,16])) -> (s32[], f32[16,8], bf16[4,16]) {
  %arg = (s32[], f32[16,8]{1,0}, bf16[4,16]{1,0}) parameter(0)
  %w = f32[16,8]{1,0} get-tuple-element(%arg), index=1
  %x = bf16[4,16]{1,0} get-tuple-element(%arg), index=2
  %wrapped_convert.1 = bf16[16,8]{1,0} fusion(%w), kind=kLoop, calls=%fused_convert, metadata={op_name="a"}
  %wrapped_convert.2 = bf16[16,8]{1,0} fusion(%w), kind=kLoop, calls=%fused_convert, metadata={op_name="b"}
  %custom-call.7 = (bf16[4,8]{1,0}, /*index=1*/s8[64]{0}) custom-call(%x, %wrapped_convert.1), custom_call_target="mm"
}

ENTRY %main (p: f32[16,8]) -> f32[16,8] {
  %p = f32[16,8]{1,0} parameter(0)
  ROOT %copy.1 = f32[16,8]{1,0} copy(%p)
}
"""


def test_bytes_are_those_of_results_and_operands():
    assert compiled.size_of("f32[16,8]") == 512
    assert compiled.size_of("(bf16[4,8], s8[64], pred[])") == 64 + 64 + 1


def test_kernels_of_the_loop_are_counted_by_kind():
    found = compiled.kinds_of(compiled.computation(PROGRAM))
    (cast, product) = found.items()
    assert cast == (("wrapped_convert", "bf16[16,8]", ("f32[16,8]",)), (2, 2 * (256 + 512)))
    assert product[0].name == "mm" and product[0].operands == ("bf16[4,16]", "bf16[16,8]")
    assert product[1] == (1, 64 + 64 + 128 + 256)


def test_arguments_name_the_program_and_its_case():
    args = compiled.arguments(["decode", "--model", "8b", "--rows", "64", "--lora", "16"])
    assert (args.program, args.model, args.rows, args.lora, args.weights) == ("decode", "8b", 64, 16, "auto")
