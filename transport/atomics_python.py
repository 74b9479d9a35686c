"""The names of `atomics_jit` in plain Python, for `NUMBA_DISABLE_JIT=1`.

An aligned 8-byte access through ctypes is one load or store of the machine. Order comes
from x86-64, which keeps stores in order, and from the interpreter's own lock; on a
weakly ordered CPU use one process (`spawn`), whose lock orders everything.
"""

from __future__ import annotations

import ctypes
import threading
import time

_lock = threading.Lock()


def _word(base: int, index: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(base + 8 * index)


def load_relaxed(base: int, index: int) -> int:
    """The word at `base + 8 * index`."""
    return _word(base, index).value


load_acquire = load_relaxed


def store_release(base: int, index: int, value: int) -> None:
    """Write the word at `base + 8 * index`."""
    _word(base, index).value = value


def atomic_add(base: int, index: int, value: int) -> int:
    """Add to the word; the value before is returned. Atomic within this process."""
    with _lock:
        word = _word(base, index)
        before = word.value
        word.value = before + value
        return before


def compare_and_swap(base: int, index: int, expected: int, value: int) -> int:
    """Write `value` where the word is `expected`; the word before is returned."""
    with _lock:
        word = _word(base, index)
        before = word.value
        if before == expected:
            word.value = value
        return before


def fence() -> None:
    """Nothing to do: see the module's docstring."""


def pause() -> None:
    """Release the interpreter's lock: the thread waited for needs it."""
    time.sleep(0)


def yield_core() -> None:
    """Sleep for a moment: dozens of waiting Python threads share one lock."""
    time.sleep(0.00005)


def clock_ns() -> int:
    """Monotonic time in nanoseconds."""
    return time.monotonic_ns()


def copy_bytes(destination: int, source: int, num_bytes: int) -> None:
    """`memcpy` between two addresses."""
    ctypes.memmove(destination, source, num_bytes)
