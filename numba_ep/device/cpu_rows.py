"""Sums of bfloat16 rows on the cpu target."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

# Eight float32 sums in one vector register: LLVM does not find this by itself from
# scalar code (2-3 GB/s a core against 13-26).
_F32X8 = ir.VectorType(ir.FloatType(), 8)
_I16X8 = ir.VectorType(ir.IntType(16), 8)
_I32X8 = ir.VectorType(ir.IntType(32), 8)


class Float32x8(types.Type):
    """The type of eight float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Float32x8")


float32x8 = Float32x8()


@register_model(Float32x8)
class Float32x8Model(models.PrimitiveModel):
    """A plain LLVM vector."""

    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _F32X8)


def _splat(value: int) -> Any:
    return ir.Constant(_I32X8, [value] * 8)


@intrinsic
def splat_f32x8(typingctx, value):
    """Eight sums that are `value`."""

    def codegen(context, builder, signature, args):
        lane = ir.Constant(ir.IntType(32), 0)
        one = builder.insert_element(ir.Constant(_F32X8, ir.Undefined), args[0], lane)
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
        return builder.shuffle_vector(one, one, zeros)

    return float32x8(types.float32), codegen


def _group_pointer(builder: Any, base: Any, group: Any) -> Any:
    return builder.gep(builder.inttoptr(base, _I16X8.as_pointer()), [group])


def _terms(builder: Any, base: Any, group: Any) -> Any:
    """The eight bfloat16 of 16-byte group `group` at `base`, as float32."""
    halves = builder.load(_group_pointer(builder, base, group), align=2)
    bits = builder.shl(builder.zext(halves, _I32X8), _splat(16))
    return builder.bitcast(bits, _F32X8)


@intrinsic
def add_bf16x8(typingctx, total, base, group):
    """`total` plus the eight bfloat16 of 16-byte group `group` at `base`."""

    def codegen(context, builder, signature, args):
        return builder.fadd(args[0], _terms(builder, args[1], args[2]))

    return float32x8(float32x8, types.int64, types.int64), codegen


@intrinsic
def store_bf16x8(typingctx, base, group, total):
    """Round each sum to nearest even and store it; a NaN stays a (quiet) NaN."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[2], _I32X8)
        high = builder.lshr(bits, _splat(16))
        bias = builder.add(builder.and_(high, _splat(1)), _splat(0x7FFF))
        rounded = builder.lshr(builder.add(bits, bias), _splat(16))
        quiet = builder.or_(builder.and_(high, _splat(0x8000)), _splat(0x7FC0))
        is_nan = builder.fcmp_unordered("uno", args[2], args[2])
        halves = builder.trunc(builder.select(is_nan, quiet, rounded), _I16X8)
        builder.store(halves, _group_pointer(builder, args[0], args[1]), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, float32x8), codegen
