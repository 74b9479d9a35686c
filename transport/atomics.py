"""Host atomics and the wait of an idle thread, compiled or in plain Python."""

from __future__ import annotations

from typing import Any

from transport.jit import JIT_DISABLED, host

if JIT_DISABLED:
    from transport.atomics_python import (
        atomic_add,
        clock_ns,
        compare_and_swap,
        copy_bytes,
        fence,
        load_acquire,
        load_relaxed,
        nap,
        pause,
        store_release,
        yield_core,
    )
else:
    from transport.atomics_jit import (
        atomic_add,
        clock_ns,
        compare_and_swap,
        copy_bytes,
        fence,
        load_acquire,
        load_relaxed,
        nap,
        pause,
        store_release,
        yield_core,
    )

__all__ = [
    "atomic_add", "clock_ns", "compare_and_swap", "copy_bytes", "fence", "load_acquire",
    "load_relaxed", "nap", "pause", "read_word", "relax", "store_release", "swap_word",
    "wait_any", "write_word", "yield_core",
]  # fmt: skip

PAUSES_BEFORE_YIELD = 4
SPINS_BEFORE_NAP = 160
NAP_NS = 20_000


def _relax(spins: int) -> None:
    # Far more threads than cores wait at once here: after a short spin the core must go
    # to whoever is waited for. A yield does that among the threads of one process; where
    # the scheduler groups threads by session (Linux's autogroup), as mpirun's ranks are,
    # it gives nothing to another process, and only sleeping does.
    if spins % (PAUSES_BEFORE_YIELD + 1) != PAUSES_BEFORE_YIELD:
        pause()
    elif spins < SPINS_BEFORE_NAP:
        yield_core()
    else:
        nap(NAP_NS)


relax = host.jit(_relax, inline="always")


@host.jit
def wait_any(addresses: Any, seen: Any, timeout_ns: int) -> bool:
    """Wait until the word at some `addresses[i]` differs from `seen[i]`.

    addresses, seen: [n] int64. Returns False after `timeout_ns` without a change.
    Compiled, it holds no interpreter lock while it waits.
    """
    deadline = clock_ns() + timeout_ns
    spins = 0
    while True:
        for i in range(addresses.shape[0]):
            if load_relaxed(addresses[i], 0) != seen[i]:
                # The caller reads what the word announced: order those reads after it.
                fence()
                return True
        if spins % 64 == 63 and clock_ns() > deadline:
            return False
        relax(spins)
        spins += 1


# Single words for the host's Python code, which cannot call an intrinsic itself.
@host.jit
def read_word(address: int) -> int:
    """Load the word at `address` with acquire order."""
    return load_acquire(address, 0)


@host.jit
def write_word(address: int, value: int) -> None:
    """Store the word at `address` with release order."""
    store_release(address, 0, value)


@host.jit
def swap_word(address: int, expected: int, value: int) -> int:
    """Store `value` where the word is `expected`; the word before is returned."""
    return compare_and_swap(address, 0, expected, value)
