"""Plain memory and number formats as LLVM, for the cpu target and for CUDA alike.

Every access names a base address and an element index: address arithmetic in Python
would hide the stride from the compiler and stop it from using SIMD.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32 = ir.FloatType()

# e4m3: 448 is the largest number, 2**-6 the smallest normal one, 2**-9 the smallest.
E4M3_MAX_BITS = 0x43E00000
E4M3_MIN_NORMAL_BITS = 0x3C800000
NAN_ABOVE_BITS = 0x7F800000
TWO_TO_14_BITS = 0x46800000


def element_pointer(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    """Element `index` of an array of `kind` that starts at address `base`."""
    return builder.gep(builder.inttoptr(base, kind.as_pointer()), [index])


def _loader(name: str, kind: Any, result: Any, widen: bool = False) -> Any:
    def load(typingctx, base, index):
        def codegen(context, builder, signature, args):
            value = builder.load(element_pointer(builder, args[0], args[1], kind))
            if not widen:
                return value
            return (builder.sext if kind is I32 else builder.zext)(value, I64)

        return result(types.int64, types.int64), codegen

    load.__name__ = load.__qualname__ = name
    return intrinsic(load)


def _storer(name: str, kind: Any, argument: Any) -> Any:
    def store(typingctx, base, index, value):
        def codegen(context, builder, signature, args):
            value = builder.trunc(args[2], kind) if kind in (I8, I32) else args[2]
            builder.store(value, element_pointer(builder, args[0], args[1], kind))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, argument), codegen

    store.__name__ = store.__qualname__ = name
    return intrinsic(store)


load_i64 = _loader("load_i64", I64, types.int64)
load_i32 = _loader("load_i32", I32, types.int64, widen=True)
load_u8 = _loader("load_u8", I8, types.int64, widen=True)
load_f32 = _loader("load_f32", F32, types.float32)
store_i64 = _storer("store_i64", I64, types.int64)
store_i32 = _storer("store_i32", I32, types.int64)
store_u8 = _storer("store_u8", I8, types.int64)
store_f32 = _storer("store_f32", F32, types.float32)


@intrinsic
def add_i32(typingctx, base, index, value):
    """Add to element `index`, atomically among the warps of a kernel; in no order."""

    def codegen(context, builder, signature, args):
        pointer = element_pointer(builder, args[0], args[1], I32)
        builder.atomic_rmw("add", pointer, builder.trunc(args[2], I32), "monotonic")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def load_bf16(typingctx, base, index):
    """Element `index` as float32 (exact)."""

    def codegen(context, builder, signature, args):
        half = builder.load(element_pointer(builder, args[0], args[1], I16))
        bits = builder.shl(builder.zext(half, I32), ir.Constant(I32, 16))
        return builder.bitcast(bits, F32)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def load_bf16_magnitude(typingctx, base, index):
    """The bits of |x|: they order as the numbers do, and integers reduce in SIMD."""

    def codegen(context, builder, signature, args):
        half = builder.load(element_pointer(builder, args[0], args[1], I16))
        return builder.zext(builder.and_(half, ir.Constant(I16, 0x7FFF)), I32)

    return types.int32(types.int64, types.int64), codegen


@intrinsic
def magnitude_to_f32(typingctx, bits):
    """What `load_bf16_magnitude` gave, as float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.shl(args[0], ir.Constant(I32, 16)), F32)

    return types.float32(types.int32), codegen


def e4m3_code(builder: Any, value: Any) -> Any:
    """The e4m3 byte of a float32, rounded to nearest even, clipped to 448 (as i32)."""

    def const(bits: int) -> Any:
        return ir.Constant(I32, bits)

    bits = builder.bitcast(value, I32)
    sign = builder.and_(builder.lshr(bits, const(24)), const(0x80))
    magnitude = builder.and_(bits, const(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, const(NAN_ABOVE_BITS))
    above = builder.icmp_unsigned(">", magnitude, const(E4M3_MAX_BITS))
    clipped = builder.select(above, const(E4M3_MAX_BITS), magnitude)
    # Normal: keep three mantissa bits (half an ulp added, ties to even), move the bias
    # from 127 to 7.
    odd = builder.and_(builder.lshr(clipped, const(20)), const(1))
    half_up = builder.add(builder.add(clipped, const(0x7FFFF)), odd)
    normal = builder.sub(builder.lshr(half_up, const(20)), const((127 - 7) << 3))
    # Subnormal: next to 2**14 one ulp of float32 is 2**-9, so the addition rounds.
    shifted = builder.fadd(
        builder.bitcast(clipped, F32), builder.bitcast(const(TWO_TO_14_BITS), F32)
    )
    subnormal = builder.sub(builder.bitcast(shifted, I32), const(TWO_TO_14_BITS))
    is_normal = builder.icmp_unsigned(">=", clipped, const(E4M3_MIN_NORMAL_BITS))
    code = builder.select(is_normal, normal, subnormal)
    return builder.or_(sign, builder.select(is_nan, const(0x7F), code))


@intrinsic
def store_e4m3(typingctx, base, index, value):
    """Convert a float32 to e4m3 (nearest even, clipped to 448) and store the byte."""

    def codegen(context, builder, signature, args):
        code = builder.trunc(e4m3_code(builder, args[2]), I8)
        builder.store(code, element_pointer(builder, args[0], args[1], I8))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen
