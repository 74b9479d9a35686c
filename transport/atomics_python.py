"""The names of `atomics_jit` in plain Python, for `NUMBA_DISABLE_JIT=1`.

An aligned 8-byte access through ctypes is one load or store of the machine. Order comes
from x86-64, which keeps stores in order, and from the interpreter's own lock; on a
weakly ordered CPU use one process (`spawn`), whose lock orders everything.

Arguments may be NumPy integers, as in compiled code; ctypes takes Python's alone.
"""

from __future__ import annotations

import ctypes
import threading
import time

_lock = threading.Lock()
PAUSE_S, YIELD_S = 2e-5, 1e-4


def _word(base: int, index: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(int(base + 8 * index))


def load_relaxed(base: int, index: int) -> int:
    """The word at `base + 8 * index`."""
    return _word(base, index).value


load_acquire = load_relaxed


def store_release(base: int, index: int, value: int) -> None:
    """Write the word at `base + 8 * index`."""
    _word(base, index).value = int(value)


def atomic_add(base: int, index: int, value: int) -> int:
    """Add to the word; the value before is returned. Atomic within this process."""
    with _lock:
        word = _word(base, index)
        before = word.value
        word.value = before + int(value)
        return before


def compare_and_swap(base: int, index: int, expected: int, value: int) -> int:
    """Write `value` where the word is `expected`; the word before is returned."""
    with _lock:
        word = _word(base, index)
        before = word.value
        if before == expected:
            word.value = int(value)
        return before


def fence() -> None:
    """Nothing to do: see the module's docstring."""


# Dozens of waiting threads share one interpreter lock with the one that they wait for.
# Released for an instant (`sleep(0)`) the lock mostly goes back to who just had it, so
# a waiting thread sleeps for real.
def pause() -> None:
    """Leave the interpreter's lock to others for a moment."""
    time.sleep(PAUSE_S)


def yield_core() -> None:
    """The same for somewhat longer."""
    time.sleep(YIELD_S)


def futex_wait(word: int, value: int, timeout_ns: int) -> None:
    """Nobody is woken in plain Python: sleep for a moment."""
    time.sleep(YIELD_S)


def futex_wake(word: int) -> None:
    """Nothing to do: see `futex_wait`."""


def clock_ns() -> int:
    """Monotonic time in nanoseconds."""
    return time.monotonic_ns()


def copy_bytes(destination: int, source: int, num_bytes: int) -> None:
    """`memcpy` between two addresses."""
    ctypes.memmove(int(destination), int(source), int(num_bytes))


def stream_fence() -> None:
    """Nothing to do: `copy_bytes` makes plain stores."""
