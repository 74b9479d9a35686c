"""The `cpu` target: Numba-compiled kernels, a warp is one OS thread with one lane."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

import numba_ep
import transport
from numba_ep.device.cpu_rows import (
    add_bf16x8,
    splat_f32x8,
    store_bf16x8,
)
from numba_ep.device.memory_ir import (
    add_i32,
    load_bf16,
    load_bf16_magnitude,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    magnitude_to_f32,
    store_e4m3,
    store_f32,
    store_i32,
    store_i64,
    store_u8,
)
from numba_ep.device.pool import (
    BARRIER,
    BELL,
    BLOCK,
    HEARD,
    LINE_WORDS,
    NUM_BLOCKS,
    NUM_WARPS,
    PROXY_BELL,
    WARP,
    Runtime,
    identity_block,
)
from transport.atomics import (
    atomic_add,
    clock_ns,
    compare_and_swap,
    fence,
    ring_bell,
    store_release,
    stream_fence,
    wait_for_bell,
)
from transport.atomics import copy_bytes as copy_row
from transport.atomics import load_acquire as ld_acquire
from transport.atomics import load_relaxed as ld_relaxed
from transport.jit import Compiler

SPINS_PER_CHECK = 1  # a turn may be a sleep of milliseconds
WARP_SIZE = 1
WARPS_PER_BLOCK = 1  # it moves rows and coordinates: two threads would wait in turns
CAST_GRID = (1, 1)
ONE_BLOCK_WARPS = 1  # of layout and notify: more threads only wait for each other

_compiler = Compiler(
    "numba_ep",
    Path(numba_ep.__file__ or "").parent,
    Path(transport.__file__ or "").parent,
)


class cuda:
    """Stands in for `numba.cuda`: the same decorators."""

    @staticmethod
    def jit(fn: Any = None, *, device: bool = False, **options: Any) -> Any:
        """`@cuda.jit` for kernels, `@cuda.jit(device=True)` for their helpers."""
        if fn is None:
            return lambda f: cuda.jit(f, device=device, **options)
        # A kernel's cached code holds its helpers: they need no files of their own.
        if device:
            return _compiler.jit(
                fn, cache=False, no_cpython_wrapper=True, no_cfunc_wrapper=True
            )
        return _compiler.jit(fn, no_cfunc_wrapper=True)


def jit(fn: Any) -> Any:
    """A helper of this module, callable from kernels."""
    return _compiler.jit(fn, cache=False, inline="always")


# Who a thread is: the launcher points a pthread key at the thread's identity block.
# The key's number is published as a symbol, so that code from the cache finds the key
# of the process that loads it.
_libc = ctypes.CDLL(None)
_key = ctypes.c_uint()
if _libc.pthread_key_create(ctypes.byref(_key), None) != 0:
    raise OSError("pthread_key_create: no thread-specific key is left")
_key_number = ctypes.c_int32(_key.value)
_KEY_SYMBOL = "numba_ep_identity_key"
llvmlite.binding.add_symbol(_KEY_SYMBOL, ctypes.addressof(_key_number))
# A thread that no launch has named, such as one that calls a kernel like a function.
_nobody = identity_block(0, 0, 1, 1, (0, 0))
_NOBODY_SYMBOL = "numba_ep_nobody"
llvmlite.binding.add_symbol(_NOBODY_SYMBOL, _nobody.ctypes.data)
_libc.pthread_setspecific.argtypes = [ctypes.c_uint, ctypes.c_void_p]


def set_identity(address: int) -> None:
    """Make the calling thread the warp described at `address` (`identity_block`).

    0: nobody again, a block and a warp of its own.
    """
    _libc.pthread_setspecific(_key, address)


def _own_block(builder: Any) -> Any:
    """Pointer to the calling thread's identity block."""
    i32, i64 = ir.IntType(32), ir.IntType(64)
    module = builder.module
    try:
        key = module.get_global(_KEY_SYMBOL)
    except KeyError:
        key = ir.GlobalVariable(module, i32, _KEY_SYMBOL)
    kind = ir.FunctionType(i64.as_pointer(), [i32])
    get = cgutils.get_or_insert_function(module, kind, "pthread_getspecific")
    own = builder.call(get, [builder.load(key)])
    try:
        default = module.get_global(_NOBODY_SYMBOL)
    except KeyError:
        default = ir.GlobalVariable(
            module, ir.ArrayType(i64, 2 * LINE_WORDS), _NOBODY_SYMBOL
        )
    nobody = builder.bitcast(default, i64.as_pointer())
    return builder.select(cgutils.is_null(builder, own), nobody, own)


@intrinsic
def _identity(typingctx, field):
    def codegen(context, builder, signature, args):
        return builder.load(builder.gep(_own_block(builder), [args[0]]))

    return types.int64(types.int64), codegen


@intrinsic
def _set_heard(typingctx, value):
    def codegen(context, builder, signature, args):
        pointer = builder.gep(_own_block(builder), [ir.Constant(ir.IntType(64), HEARD)])
        builder.store(args[0], pointer)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@jit
def block_id() -> int:
    return _identity(BLOCK)


@jit
def warp_id() -> int:
    return _identity(WARP)


@jit
def num_blocks() -> int:
    return _identity(NUM_BLOCKS)


@jit
def num_warps() -> int:
    return _identity(NUM_WARPS)


@jit
def lane_id() -> int:
    return 0


@jit
def warp_sync() -> None:
    pass


@jit
def warp_sum(value: int) -> int:
    return value


@jit
def warp_max(value: Any) -> Any:
    return value


@jit
def warp_any(flag: Any) -> Any:
    return flag


@jit
def warp_broadcast(value: int) -> int:
    return value


@jit
def warp_count_below(flag: Any) -> int:
    return 0


@cuda.jit(device=True)
def block_sync() -> None:
    warps = _identity(NUM_WARPS)
    # The count only grows during a launch: whoever completes a round lets it go.
    arrived = atomic_add(_identity(BARRIER), 0, 1)
    target = (arrived // warps + 1) * warps
    spins = 0
    while ld_acquire(_identity(BARRIER), 0) < target:
        relax(spins)
        spins += 1


ld_acquire_block = ld_acquire
# Whoever writes a word that another warp, the proxy or a peer may wait for rings the
# rank's bell. A thread looks at its words again after each ring that it hears.
# Rows are streamed past the caches, so a release must wait for them by name.


@jit
def st_release(base: int, index: int, value: int) -> None:
    stream_fence()
    store_release(base, index, value)
    ring_bell(_identity(BELL))


@jit
def st_release_host(base: int, index: int, value: int) -> None:
    stream_fence()
    store_release(base, index, value)
    ring_bell(_identity(PROXY_BELL))


@jit
def _ring_block() -> None:
    if _identity(NUM_WARPS) > 1:  # else the block is this thread
        ring_bell(_identity(BELL))


@jit
def add_release_block(base: int, index: int, value: int) -> int:
    stream_fence()
    before = atomic_add(base, index, value)
    _ring_block()
    return before


@jit
def st_release_block(base: int, index: int, value: int) -> None:
    stream_fence()
    store_release(base, index, value)
    _ring_block()


@cuda.jit(device=True)
def relax(spins: int) -> None:
    _set_heard(wait_for_bell(_identity(BELL), _identity(HEARD), spins))


def compile_kernel(kernel: Any, args: tuple[Any, ...]) -> None:
    """Have machine code for `kernel(*args)` before it is needed."""
    kernel.compile(tuple(typeof(arg) for arg in args))


def make_runtime(name: str, num_workers: int) -> Runtime:
    """Threads and memory for one Buffer."""
    return Runtime(name, num_workers, set_identity, uses_caller=True)
