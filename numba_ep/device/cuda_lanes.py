"""What the 32 lanes of a warp do together, on a GPU: shuffles, votes, reductions.

All lanes of the warp must call these, and together: a lane that stays away is waited
for. None of them orders memory; that is `warp_sync`'s task.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numba_ep.device.cuda_ir import ALL_LANES, named, ptx
from numba_ep.device.memory_ir import I32, I64


def _integer(value: Any) -> Any:
    """The type in which lanes exchange `value`: int32 stays, all others widen."""
    value = types.unliteral(value)
    if not isinstance(value, (types.Integer, types.Boolean)):
        return None
    return types.int32 if value == types.int32 else types.int64


def _shuffle(builder: Any, how: str, value: Any) -> Any:
    """`value` of another lane; a 64-bit one travels in two halves."""
    text = f"shfl.sync.{how}, 0x1f, {ALL_LANES};"
    if value.type == I32:
        return ptx(builder, text, I32, value, lanes=True)
    half = ir.Constant(I64, 32)
    low = ptx(builder, text, I32, builder.trunc(value, I32), lanes=True)
    upper = builder.trunc(builder.lshr(value, half), I32)
    high = ptx(builder, text, I32, upper, lanes=True)
    return builder.or_(
        builder.zext(low, I64), builder.shl(builder.zext(high, I64), half)
    )


def _reduction(name: str, combine: Any, redux: str, meaning: str) -> Any:
    def reduce(typingctx, value):
        kind = _integer(value)
        if kind is None:
            return None

        def codegen(context, builder, signature, args):
            total = args[0]
            if total.type == I32:  # one instruction since compute capability 8.0
                text = f"redux.sync.{redux}.s32 $0, $1, {ALL_LANES};"
                return ptx(builder, text, I32, total, lanes=True)
            for distance in (16, 8, 4, 2, 1):
                other = _shuffle(builder, f"bfly.b32 $0, $1, {distance}", total)
                total = combine(builder, total, other)
            return total

        return kind(kind), codegen

    return named(reduce, name, meaning)


def _add(builder: Any, a: Any, b: Any) -> Any:
    return builder.add(a, b)


def _max(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


warp_sum = _reduction("warp_sum", _add, "add", "The sum over the lanes, in each lane.")
warp_max = _reduction(
    "warp_max", _max, "max", "The largest of the lanes, in each lane."
)


@intrinsic
def warp_broadcast(typingctx, value):
    """Lane 0's `value`, in each lane."""
    kind = _integer(value)
    if kind is None:
        return None

    def codegen(context, builder, signature, args):
        return _shuffle(builder, "idx.b32 $0, $1, 0", args[0])

    return kind(kind), codegen


def _ballot(builder: Any, flag: Any) -> Any:
    """One bit for each lane's flag."""
    text = (
        "{ .reg .pred flag; setp.ne.u32 flag, $1, 0; "
        f"vote.sync.ballot.b32 $0, flag, {ALL_LANES}; }}"
    )
    return ptx(builder, text, I32, builder.zext(flag, I32), lanes=True)


@intrinsic
def warp_any(typingctx, flag):
    """Whether some lane has the flag, in each lane."""

    def codegen(context, builder, signature, args):
        return builder.icmp_unsigned(
            "!=", _ballot(builder, args[0]), ir.Constant(I32, 0)
        )

    return types.boolean(types.boolean), codegen


@intrinsic
def warp_count_below(typingctx, flag):
    """How many lanes below this one have the flag."""

    def codegen(context, builder, signature, args):
        below = ptx(builder, "mov.u32 $0, %lanemask_lt;", I32)
        count = builder.ctpop(builder.and_(_ballot(builder, args[0]), below))
        return builder.zext(count, I64)

    return types.int64(types.boolean), codegen
