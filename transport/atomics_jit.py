"""Host atomics for compiled code, as Numba intrinsics over (base address, index).

Every word that another thread, process or device may change is read through these. A
plain array load in a waiting loop is moved out of the loop by the compiler, and no
plain load or store orders anything on a weakly ordered CPU.

A word is a 64-bit integer at `base + 8 * index`, aligned to 8 bytes.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from transport.jit import host

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
STREAM_BYTES = 64
LINE = ir.VectorType(I64, STREAM_BYTES // 8)


def word_pointer(builder: Any, base: Any, index: Any, width: Any = I64) -> Any:
    """`base` as a pointer and `index` as an element: keeps loops open to SIMD."""
    pointer = builder.inttoptr(base, width.as_pointer())
    return builder.gep(pointer, [index])


def libc_function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """The external C function `name` in the module being built."""
    try:
        return builder.module.get_global(name)
    except KeyError:
        kind = ir.FunctionType(result, arguments)
        return ir.Function(builder.module, kind, name)


@intrinsic
def load_relaxed(typingctx, base, index):
    """The word, atomically and in no order with anything else."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(word_pointer(builder, *args), "monotonic", 8)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typingctx, base, index):
    """The word; nothing after this load is seen as older than the store it reads."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(word_pointer(builder, *args), "acquire", 8)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def store_release(typingctx, base, index, value):
    """Write the word after everything that this thread wrote before."""

    def codegen(context, builder, signature, args):
        pointer = word_pointer(builder, args[0], args[1])
        builder.store_atomic(args[2], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def atomic_add(typingctx, base, index, value):
    """Add to the word, acquire and release; the value before is returned."""

    def codegen(context, builder, signature, args):
        pointer = word_pointer(builder, args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "acq_rel")

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def compare_and_swap(typingctx, base, index, expected, value):
    """Write `value` where the word is `expected`; the word before is returned."""

    def codegen(context, builder, signature, args):
        pointer = word_pointer(builder, args[0], args[1])
        pair = builder.cmpxchg(pointer, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(pair, 0)

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def fence(typingctx):
    """Acquire and release: loads before stay before, stores after stay after."""

    def codegen(context, builder, signature, args):
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that this is a waiting loop (nothing where there is no hint)."""

    def codegen(context, builder, signature, args):
        if llvmlite.binding.get_process_triple().startswith("x86_64"):
            hint = libc_function(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
            builder.call(hint, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx):
    """Let another thread run on this core: `sched_yield(2)`."""

    def codegen(context, builder, signature, args):
        builder.call(libc_function(builder, "sched_yield", I32, []), [])
        return context.get_dummy_value()

    return types.void(), codegen


def _futex(builder: Any, word: Any, operation: int, value: Any, timespec: Any) -> None:
    machine = llvmlite.binding.get_process_triple().partition("-")[0]
    number = 202 if machine == "x86_64" else 98  # aarch64 and all later ones
    call = libc_function(builder, "syscall", I64, [I64] * 6)
    constants = [ir.Constant(I64, n) for n in (number, operation)]
    zero = ir.Constant(I64, 0)
    builder.call(call, [constants[0], word, constants[1], value, timespec, zero])


@intrinsic
def futex_wait(typingctx, word, value, timeout_ns):
    """Sleep until `futex_wake`, unless the low half of the word is not `value`'s.

    Works between processes that share the memory; timeout_ns is below a second.
    """

    def codegen(context, builder, signature, args):
        with builder.goto_entry_block():
            timespec = builder.alloca(ir.ArrayType(I64, 2))
        words = builder.bitcast(timespec, I64.as_pointer())
        builder.store(ir.Constant(I64, 0), words)
        builder.store(args[2], builder.gep(words, [ir.Constant(I64, 1)]))
        _futex(builder, args[0], 0, args[1], builder.ptrtoint(timespec, I64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def futex_wake(typingctx, word):
    """Wake every thread that sleeps on the word."""

    def codegen(context, builder, signature, args):
        everyone = ir.Constant(I64, 0x7FFFFFFF)
        _futex(builder, args[0], 1, everyone, ir.Constant(I64, 0))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def clock_ns(typingctx):
    """Monotonic time in nanoseconds (`time.monotonic_ns`)."""

    def codegen(context, builder, signature, args):
        # Room for struct timespec; in the entry block, or a loop would eat the stack.
        with builder.goto_entry_block():
            timespec = builder.alloca(ir.ArrayType(I64, 2))
        read = libc_function(builder, "clock_gettime", I32, [I32, I8.as_pointer()])
        monotonic = ir.Constant(I32, 1)
        builder.call(read, [monotonic, builder.bitcast(timespec, I8.as_pointer())])
        both = builder.load(timespec)
        seconds = builder.extract_value(both, 0)
        nanoseconds = builder.extract_value(both, 1)
        billion = ir.Constant(I64, 1_000_000_000)
        return builder.add(builder.mul(seconds, billion), nanoseconds)

    return types.int64(), codegen


@intrinsic
def move_bytes(typingctx, destination, source, num_bytes):
    """`memcpy` between two addresses that do not overlap."""

    def codegen(context, builder, signature, args):
        pointers = [builder.inttoptr(a, I8.as_pointer()) for a in args[:2]]
        kind = [I8.as_pointer(), I8.as_pointer(), I64]
        memcpy = libc_function(builder, "memcpy", I8.as_pointer(), kind)
        builder.call(memcpy, [*pointers, args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def stream_line(typingctx, destination, source, index):
    """Copy line `index` of 64 bytes past the caches; destination: aligned to 64."""

    def codegen(context, builder, signature, args):
        to, of = (word_pointer(builder, a, args[2], LINE) for a in args[:2])
        store = builder.store(builder.load(of, align=1), to, align=STREAM_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def stream_fence(typingctx):
    """Streamed lines come before all later stores, as plain stores do by themselves."""

    def codegen(context, builder, signature, args):
        if llvmlite.binding.get_process_triple().startswith("x86_64"):
            order = libc_function(builder, "llvm.x86.sse.sfence", ir.VoidType(), [])
            builder.call(order, [])
        return context.get_dummy_value()

    return types.void(), codegen


@host.jit_inline
def copy_bytes(destination: int, source: int, num_bytes: int) -> None:
    """Copy between two addresses that do not overlap; `stream_fence` before a release.

    Past the caches: another core reads what is written here, and to fetch a line only
    to overwrite it would cost a third of the memory's bandwidth.
    """
    head = min(-destination % STREAM_BYTES, num_bytes)
    lines = (num_bytes - head) // STREAM_BYTES
    move_bytes(destination, source, head)
    for line in range(lines):
        stream_line(destination + head, source + head, line)
    done = head + lines * STREAM_BYTES
    move_bytes(destination + done, source + done, num_bytes - done)
