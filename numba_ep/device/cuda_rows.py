"""Rows on a GPU: 16 bytes a lane at a time, bfloat16 sums, float32 -> e4m3."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.targetconfig import ConfigStack
from numba.extending import intrinsic

from numba_ep.device.cuda_ir import LANES, VOID, address_of, named, ptx
from numba_ep.device.memory_ir import F32, I8, I16, I32, e4m3_code, element_pointer

VECTOR_BYTES = 16
# Vectors a lane has in flight: 8 KB a warp. On an H200, 12 blocks of 8 warps copy rows
# of 7424 bytes at 303, 448 and 552 GB/s with 4, 8, 16; 16 take 32 registers more, which
# a block that has an SM to itself can spare.
UNROLL = 16
# The first compute capability that converts float32 to e4m3 itself.
FIRST_WITH_E4M3 = (8, 9)
GLOBAL = 1  # LLVM's number for the address space of GPU and pinned host memory


def copier(unroll: int) -> Any:
    """`copy_row` with `unroll` vectors of each lane in flight."""

    def copy(typingctx, destination, source, num_bytes):
        def codegen(context, builder, signature, args):
            ptx(builder, _copy_text(unroll), VOID, *args, memory=True)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return named(
        copy,
        "copy_row",
        "The lanes copy together; addresses and size are multiples of 16 bytes.",
    )


def _copy_text(unroll: int) -> str:
    # All loads of a round before its first store: the store might alias a later load,
    # so nobody could move the loads up, and each would wait a latency of its own.
    # Predicates instead of a tail loop keep that true for the last, short round too.
    # The loop is part of the text, or the compiler would unroll it once more.
    # Ring slots are rewritten while the kernel runs: never ld.global.nc here.
    step = LANES * VECTOR_BYTES
    turn = unroll * step
    every = range(unroll)
    pairs = [f"{{v{2 * k}, v{2 * k + 1}}}" for k in every]
    lines = [
        f"{{ .reg .pred has<{unroll}>; .reg .b64 v<{2 * unroll}>;",
        ".reg .b64 to, of, lane, left, rest; .reg .b32 thread;",
        "mov.u32 thread, %tid.x; and.b32 thread, thread, 31;",
        f"mul.wide.u32 lane, thread, {VECTOR_BYTES};",
        "add.s64 to, $0, lane; add.s64 of, $1, lane;",
        "sub.s64 left, $2, lane; mov.b64 rest, $2;",
        # A predicated load alone does not begin a register's life: without these, all
        # of them would stay occupied throughout the loop around this row.
        *(f"mov.b64 v{i}, 0;" for i in range(2 * unroll)),
        "round:",
        *(f"setp.gt.s64 has{k}, left, {k * step};" for k in every),
        *(f"@has{k} ld.global.v2.b64 {pairs[k]}, [of+{k * step}];" for k in every),
        *(f"@has{k} st.global.v2.b64 [to+{k * step}], {pairs[k]};" for k in every),
        f"add.s64 to, to, {turn}; add.s64 of, of, {turn};",
        f"sub.s64 left, left, {turn}; sub.s64 rest, rest, {turn};",
        # `rest` is the same on all lanes, so that they stay together.
        "setp.gt.s64 has0, rest, 0; @has0 bra round; }",
    ]
    return " ".join(lines)


copy_row = copier(UNROLL)


def _has_e4m3() -> bool:
    """Whether the GPU that is compiled for converts to e4m3 itself."""
    return ConfigStack().top().compute_capability >= FIRST_WITH_E4M3


@intrinsic
def store_e4m3(typingctx, base, index, value):
    """Convert a float32 to e4m3 (nearest even, clipped to 448) and store the byte."""

    def codegen(context, builder, signature, args):
        if _has_e4m3():
            text = "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;"
            zero = ir.Constant(F32, 0.0)
            code = builder.trunc(ptx(builder, text, I16, zero, args[2]), I8)
            # A NaN comes without its sign; for all else the sign is there already.
            sign = builder.lshr(builder.bitcast(args[2], I32), ir.Constant(I32, 24))
            sign = builder.and_(sign, ir.Constant(I32, 0x80))
            code = builder.or_(code, builder.trunc(sign, I8))
        else:
            code = builder.trunc(e4m3_code(builder, args[2]), I8)
        builder.store(code, element_pointer(builder, args[0], args[1], I8))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


_I32X4 = ir.VectorType(I32, 4)
_SUMS = types.UniTuple(types.float32, 8)
_HIGH_HALF = ir.Constant(I32, -65536)


def _group_pointer(builder: Any, base: Any, group: Any) -> Any:
    address = address_of(builder, base, group, VECTOR_BYTES)
    return builder.inttoptr(address, ir.PointerType(_I32X4, GLOBAL))


@intrinsic
def splat_f32x8(typingctx, value):
    """Eight sums that are `value`."""

    def codegen(context, builder, signature, args):
        sums = ir.Constant(ir.ArrayType(F32, 8), ir.Undefined)
        for i in range(8):
            sums = builder.insert_value(sums, args[0], i)
        return sums

    return _SUMS(types.float32), codegen


def _terms(builder: Any, base: Any, group: Any) -> list[Any]:
    """The eight bfloat16 of 16-byte group `group` at `base`, as float32."""
    words = builder.load(_group_pointer(builder, base, group), align=16)
    terms = []
    for i in range(8):
        word = builder.extract_element(words, ir.Constant(I32, i // 2))
        if i % 2:
            bits = builder.and_(word, _HIGH_HALF)
        else:
            bits = builder.shl(word, ir.Constant(I32, 16))
        terms.append(builder.bitcast(bits, F32))
    return terms


@intrinsic
def add_bf16x8(typingctx, total, base, group):
    """`total` plus the eight bfloat16 of 16-byte group `group` at `base`."""

    def codegen(context, builder, signature, args):
        sums = args[0]
        for i, term in enumerate(_terms(builder, args[1], args[2])):
            one = builder.fadd(builder.extract_value(sums, i), term)
            sums = builder.insert_value(sums, one, i)
        return sums

    return _SUMS(_SUMS, types.int64, types.int64), codegen


@intrinsic
def store_bf16x8(typingctx, base, group, total):
    """Round each sum to nearest even and store the eight as one 16-byte group.

    A NaN becomes 0x7fff, as the instruction makes it.
    """

    def codegen(context, builder, signature, args):
        words = ir.Constant(_I32X4, ir.Undefined)
        for i in range(4):
            low, high = (builder.extract_value(args[2], 2 * i + j) for j in (0, 1))
            pair = ptx(builder, "cvt.rn.bf16x2.f32 $0, $1, $2;", I32, high, low)
            words = builder.insert_element(words, pair, ir.Constant(I32, i))
        builder.store(words, _group_pointer(builder, args[0], args[1]), align=16)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, _SUMS), codegen
