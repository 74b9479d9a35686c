"""A GPU's words, order, places and clock as inline PTX: what LLVM leaves open.

Text in PTX says exactly which order and which scope an access has; LLVM's own atomics
would leave both to the compiler's reading. Addresses are generic: a word may lie in GPU
memory or in pinned host memory. Everything that orders clobbers memory, so that the
compiler moves no plain load or store across it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numba_ep.device.memory_ir import F32, I16, I32, I64

LANES = 32
ALL_LANES = "0xffffffff"

VOID = ir.VoidType()
_OPERANDS = {I16: "h", I32: "r", I64: "l", F32: "f"}


def ptx(
    builder: Any,
    text: str,
    result: Any,
    *args: Any,
    memory: bool = False,
    lanes: bool = False,
) -> Any:
    """Inline PTX: `$0` is the result (if there is one), the arguments follow.

    memory: it touches memory or orders it. lanes: lanes meet in it. Either way it stays
    where it is and runs as often as written; otherwise it is a pure function.
    """
    constraints = [] if result is VOID else ["=" + _OPERANDS[result]]
    constraints += [_OPERANDS[a.type] for a in args]
    if memory:
        constraints.append("~{memory}")
    kind = ir.FunctionType(result, [a.type for a in args])
    body = ir.InlineAsm(kind, text, ",".join(constraints), side_effect=memory or lanes)
    # convergent: never moved under a condition that not all lanes share.
    return builder.call(body, args, attrs=("convergent",) if memory or lanes else ())


def address_of(builder: Any, base: Any, index: Any, size: int = 8) -> Any:
    return builder.add(base, builder.mul(index, ir.Constant(I64, size)))


def named(fn: Any, name: str, meaning: str) -> Any:
    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = meaning
    return intrinsic(fn)


def _loader(name: str, order: str, meaning: str) -> Any:
    def load(typingctx, base, index):
        def codegen(context, builder, signature, args):
            text = f"ld.{order}.b64 $0, [$1];"
            return ptx(builder, text, I64, address_of(builder, *args), memory=True)

        return types.int64(types.int64, types.int64), codegen

    return named(load, name, meaning)


def _storer(name: str, order: str, meaning: str) -> Any:
    def store(typingctx, base, index, value):
        def codegen(context, builder, signature, args):
            text = f"st.{order}.b64 [$0], $1;"
            address = address_of(builder, args[0], args[1])
            ptx(builder, text, VOID, address, args[2], memory=True)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return named(store, name, meaning)


def _adder(name: str, order: str, meaning: str) -> Any:
    def add(typingctx, base, index, value):
        def codegen(context, builder, signature, args):
            text = f"atom.{order}.add.u64 $0, [$1], $2;"
            address = address_of(builder, args[0], args[1])
            return ptx(builder, text, I64, address, args[2], memory=True)

        return types.int64(types.int64, types.int64, types.int64), codegen

    return named(add, name, meaning)


ld_relaxed = _loader("ld_relaxed", "relaxed.sys", "The word, in no order.")
ld_acquire = _loader("ld_acquire", "acquire.sys", "The word; later reads are younger.")
ld_acquire_block = _loader(
    "ld_acquire_block", "acquire.cta", "`ld_acquire` among the warps of a block."
)
st_release = _storer(
    "st_release", "release.sys", "Write the word after all this thread wrote or saw."
)
st_release_block = _storer(
    "st_release_block", "release.cta", "`st_release` among the warps of a block."
)
atomic_add = _adder("atomic_add", "acq_rel.gpu", "Add; the word before is returned.")
add_release_block = _adder(
    "add_release_block", "acq_rel.cta", "`atomic_add` among the warps of a block."
)


@intrinsic
def compare_and_swap(typingctx, base, index, expected, value):
    """Write `value` where the word is `expected`; the word before is returned."""

    def codegen(context, builder, signature, args):
        text = "atom.acq_rel.sys.cas.b64 $0, [$1], $2, $3;"
        address = address_of(builder, args[0], args[1])
        return ptx(builder, text, I64, address, args[2], args[3], memory=True)

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


def _order(name: str, text: str, meaning: str) -> Any:
    def order(typingctx):
        def codegen(context, builder, signature, args):
            ptx(builder, text, VOID, memory=True)
            return context.get_dummy_value()

        return types.void(), codegen

    return named(order, name, meaning)


fence = _order(
    "fence", "fence.acq_rel.sys;", "Order what is before against what is after."
)
warp_sync = _order(
    "warp_sync", f"bar.warp.sync {ALL_LANES};", "All lanes' memory is seen by each."
)
block_sync = _order("block_sync", "barrier.sync 0;", "All warps of the block meet.")


def _register(name: str, special: str, width: Any, meaning: str) -> Any:
    def read(typingctx):
        def codegen(context, builder, signature, args):
            # LLVM's own names: it knows how large these can be, and that they stay.
            kind = ir.FunctionType(I32, [])
            called = f"llvm.nvvm.read.ptx.sreg.{special}"
            try:
                function = builder.module.get_global(called)
            except KeyError:
                function = ir.Function(builder.module, kind, called)
            return width(builder, builder.zext(builder.call(function, []), I64))

        return types.int64(), codegen

    return named(read, name, meaning)


def _low(builder: Any, n: Any) -> Any:
    return builder.and_(n, ir.Constant(I64, LANES - 1))


def _warps(builder: Any, n: Any) -> Any:
    return builder.lshr(n, ir.Constant(I64, 5))


def _whole(builder: Any, n: Any) -> Any:
    return n


# Blocks have one dimension and whole warps, so a thread's number tells both.
lane_id = _register("lane_id", "tid.x", _low, "This lane, 0 to 31.")
warp_id = _register("warp_id", "tid.x", _warps, "This warp of its block.")
num_warps = _register("num_warps", "ntid.x", _warps, "Warps of a block.")
block_id = _register("block_id", "ctaid.x", _whole, "This block of the grid.")
num_blocks = _register("num_blocks", "nctaid.x", _whole, "Blocks of the grid.")


@intrinsic
def clock_ns(typingctx):
    """Nanoseconds of a clock that all of the GPU shares, in steps of up to 1 us."""

    def codegen(context, builder, signature, args):
        return ptx(builder, "mov.u64 $0, %globaltimer;", I64, memory=True)

    return types.int64(), codegen


@intrinsic
def nap(typingctx, nanoseconds):
    """Leave the SM to other warps for about that long (at most twice that)."""

    def codegen(context, builder, signature, args):
        ptx(builder, "nanosleep.u32 $0;", VOID, args[0], memory=True)
        return context.get_dummy_value()

    return types.void(types.uint32), codegen
