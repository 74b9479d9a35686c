"""The `python` target (`NUMBA_DISABLE_JIT=1`): kernels run as the Python that they are.

A warp is one Python thread with one lane, so `breakpoint()`, `print` and a debugger's
steps work inside a kernel; give the Buffer a `timeout_s` longer than you will look
around. Results are those of the cpu target, bit for bit, a thousand times slower.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from numba_ep.device.pool import BARRIER, BLOCK, NUM_BLOCKS, NUM_WARPS, WARP, Runtime
from transport.atomics import (
    atomic_add,
    clock_ns,
    compare_and_swap,
    copy_bytes,
    fence,
    relax,
)
from transport.atomics import load_acquire as ld_acquire
from transport.atomics import load_relaxed as ld_relaxed
from transport.atomics import store_release as st_release

st_release_host = st_release  # the proxy polls

__all__ = ["clock_ns", "compare_and_swap", "fence", "ld_relaxed", "relax", "st_release"]

SPINS_PER_CHECK = 1  # a turn is a sleep
WARP_SIZE = 1
WARPS_PER_BLOCK = 1  # as on the cpu target
CAST_GRID = (1, 1)
ONE_BLOCK_WARPS = 1

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F32 = np.dtype(np.float32)
E4M3_MAX = np.float32(448)


class cuda:
    """Stands in for `numba.cuda`: the same decorators, which change nothing."""

    @staticmethod
    def jit(fn: Any = None, **options: Any) -> Any:
        """`@cuda.jit` and `@cuda.jit(device=True)`: the function itself."""
        return (lambda f: f) if fn is None else fn


# Who a thread is.


class _Identity(threading.local):
    words: Any = (0, 0, 1, 1, 0)


_identity = _Identity()


def set_identity(address: int) -> None:
    """Make the calling thread the warp described at `address` (`identity_block`)."""
    _identity.words = tuple((ctypes.c_int64 * 5).from_address(address))
    # Of this thread alone. Compiled float arithmetic does not warn, either.
    np.seterr(all="ignore")


def block_id() -> int:
    return int(_identity.words[BLOCK])


def warp_id() -> int:
    return int(_identity.words[WARP])


def num_blocks() -> int:
    return int(_identity.words[NUM_BLOCKS])


def num_warps() -> int:
    return int(_identity.words[NUM_WARPS])


def lane_id() -> int:
    return 0


def warp_sync() -> None:
    pass


def warp_sum(value: int) -> int:
    return value


def warp_max(value: Any) -> Any:
    return value


def warp_any(flag: Any) -> Any:
    return flag


def warp_broadcast(value: int) -> int:
    return value


def warp_count_below(flag: Any) -> int:
    return 0


# The barrier. Python code may raise where compiled code cannot. Who waits here for a
# warp that did would wait for ever, so its failure opens the barrier.
BROKEN = 1 << 40


class _BarrierBroken(Exception):
    """Another warp of the block failed: leave silently, it tells what happened."""


def block_sync() -> None:
    word, warps = _identity.words[BARRIER], num_warps()
    # The count only grows during a launch: whoever completes a round lets it go.
    count = atomic_add(word, 0, 1)
    target = (count // warps + 1) * warps
    spins = 0
    while count < target and count < BROKEN:
        relax(spins)
        spins += 1
        count = ld_acquire(word, 0)
    if count >= BROKEN:
        raise _BarrierBroken


def _breaks_barrier(kernel: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        try:
            kernel(*args)
        except _BarrierBroken:
            pass
        except BaseException:
            atomic_add(_identity.words[BARRIER], 0, BROKEN)
            raise

    return run


ld_acquire_block = ld_acquire
st_release_block = st_release
add_release_block = atomic_add


# Plain memory. Kernels also pass NumPy integers, which ctypes does not take.


def load_i64(base: int, index: int) -> int:
    return ctypes.c_int64.from_address(int(base + 8 * index)).value


def load_i32(base: int, index: int) -> int:
    return ctypes.c_int32.from_address(int(base + 4 * index)).value


def load_u8(base: int, index: int) -> int:
    return ctypes.c_uint8.from_address(int(base + index)).value


def store_i64(base: int, index: int, value: int) -> None:
    ctypes.c_int64.from_address(int(base + 8 * index)).value = int(value)


def store_i32(base: int, index: int, value: int) -> None:
    ctypes.c_int32.from_address(int(base + 4 * index)).value = int(value)


def store_u8(base: int, index: int, value: int) -> None:
    ctypes.c_uint8.from_address(int(base + index)).value = int(value)


_add_lock = threading.Lock()


def add_i32(base: int, index: int, value: int) -> None:
    """Add to element `index`, atomically among the warps of a kernel; in no order."""
    with _add_lock:
        store_i32(base, index, load_i32(base, index) + value)


copy_row = copy_bytes


# Numbers. Everything stays float32, as in compiled code, and NaNs keep their bits.


def _array(base: int, index: int, count: int, dtype: np.dtype) -> np.ndarray:
    """The `index`-th `count` elements at `base`, in place."""
    size = count * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(int(base + size * index))
    return np.frombuffer(memoryview(memory), dtype)


def load_f32(base: int, index: int) -> np.float32:
    return _array(base, index, 1, F32)[0]


def store_f32(base: int, index: int, value: np.float32) -> None:
    _array(base, index, 1, F32)[0] = value


def load_bf16(base: int, index: int) -> np.float32:
    """Element `index` as float32 (exact)."""
    half = ctypes.c_uint16.from_address(int(base + 2 * index)).value
    return np.uint32(half << 16).view(np.float32)


def load_bf16_magnitude(base: int, index: int) -> np.int32:
    """The bits of |x|: they order as the numbers do."""
    half = ctypes.c_uint16.from_address(int(base + 2 * index)).value
    return np.int32(half & 0x7FFF)


def magnitude_to_f32(bits: np.int32) -> np.float32:
    """What `load_bf16_magnitude` gave, as float32."""
    return np.uint32(int(bits) << 16).view(np.float32)


def store_e4m3(base: int, index: int, value: np.float32) -> None:
    """Convert a float32 to e4m3 (nearest even, clipped to 448) and store the byte."""
    clipped = np.clip(np.float32(value), -E4M3_MAX, E4M3_MAX)
    _array(base, index, 1, E4M3)[0] = clipped.astype(E4M3)


def splat_f32x8(value: np.float32) -> np.ndarray:
    """Eight sums that are `value`."""
    return np.full(8, value, np.float32)


def add_bf16x8(total: np.ndarray, base: int, group: int) -> np.ndarray:
    """`total` plus the eight bfloat16 of 16-byte group `group` at `base`."""
    return total + _array(base, group, 8, BF16).astype(np.float32)


def store_bf16x8(base: int, group: int, total: np.ndarray) -> None:
    """Round each sum to nearest even and store it; a NaN stays a (quiet) NaN."""
    _array(base, group, 8, BF16)[:] = total.astype(BF16)


# The host's side.


class PythonRuntime(Runtime):
    """Threads and memory for one Buffer."""

    def launch(
        self, kernel: Any, blocks: int, warps: int, args: tuple[Any, ...]
    ) -> None:
        """Run `kernel(*args)` in blocks x warps threads; raises their first error."""
        super().launch(_breaks_barrier(kernel), blocks, warps, args)


def compile_kernel(kernel: Any, args: tuple[Any, ...]) -> None:
    """Nothing to do."""


def make_runtime(name: str, num_workers: int) -> PythonRuntime:
    """Threads and memory for one Buffer."""
    return PythonRuntime(name, num_workers, set_identity)
