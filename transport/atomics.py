"""Host atomics and the wait of an idle thread, compiled or in plain Python."""

from __future__ import annotations

from typing import Any

from transport.jit import JIT_DISABLED, host
from transport.wr import LINE_BYTES

if JIT_DISABLED:
    from transport.atomics_python import (
        atomic_add,
        clock_ns,
        compare_and_swap,
        copy_bytes,
        fence,
        futex_wait,
        futex_wake,
        load_acquire,
        load_relaxed,
        pause,
        store_release,
        stream_fence,
        yield_core,
    )
else:
    from transport.atomics_jit import (
        atomic_add,
        clock_ns,
        compare_and_swap,
        copy_bytes,
        fence,
        futex_wait,
        futex_wake,
        load_acquire,
        load_relaxed,
        pause,
        store_release,
        stream_fence,
        yield_core,
    )

__all__ = [
    "atomic_add", "clock_ns", "compare_and_swap", "copy_bytes", "fence", "load_acquire",
    "load_relaxed", "pause", "read_word", "relax", "ring_bell", "store_release",
    "stream_fence", "swap_word", "wait_any", "wait_for_bell", "write_word",
    "yield_core",
]  # fmt: skip

PAUSES_BEFORE_YIELD = 4
YIELDS_BEFORE_SLEEP = 8
SPINS_BEFORE_SLEEP = YIELDS_BEFORE_SLEEP * (PAUSES_BEFORE_YIELD + 1)
LONGEST_SLEEP_NS = 2_000_000

# A bell: a count of rings, and how many threads sleep until the next one. All waiting
# threads of one rank have one bell, and whoever writes a word that one of them may wait
# for rings it. Far more threads than cores wait here at once. A yield hands the core on
# among the threads of one process, but where the scheduler groups threads by session
# (Linux's autogroup), as mpirun's ranks are, it gives nothing to another process.
BELL_BYTES = LINE_BYTES
RINGS = 0
SLEEPERS = 8  # on the same line; each ring reads it, hardly anybody writes it
# There, too: the longest sleep where not all writers can ring; 0: LONGEST_SLEEP_NS.
SLEEP_NS = 12


@host.jit_inline
def relax(spins: int) -> None:
    """One turn of a waiting loop without a bell: pauses, now and then a yield."""
    if spins % (PAUSES_BEFORE_YIELD + 1) == PAUSES_BEFORE_YIELD:
        yield_core()
    else:
        pause()


@host.jit_inline
def ring_bell(bell: int) -> None:
    """Have every waiting thread of the bell's rank look again; 0: no bell.

    The caller has written its word. Adding is a full fence: either this sees a sleeper,
    or the sleeper sees the new count and does not sleep.
    """
    if bell != 0:
        atomic_add(bell, RINGS, 1)
        if load_relaxed(bell, SLEEPERS) > 0:
            futex_wake(bell)


@host.jit_inline
def wait_for_bell(bell: int, heard: int, spins: int) -> int:
    """One turn of a waiting loop: returns the rings heard by now.

    Sleeps only if nothing has rung since `heard`, which was read before the words that
    the caller waits for; and only for a while, for writers that ring no bell.
    """
    if bell == 0 or spins < SPINS_BEFORE_SLEEP:
        relax(spins)
        return heard if bell == 0 else load_acquire(bell, RINGS)
    rings = load_acquire(bell, RINGS)
    if rings == heard:
        sleep_ns = load_relaxed(bell, SLEEP_NS)
        atomic_add(bell, SLEEPERS, 1)
        futex_wait(bell, heard, sleep_ns if sleep_ns > 0 else LONGEST_SLEEP_NS)
        atomic_add(bell, SLEEPERS, -1)
        rings = load_acquire(bell, RINGS)
    return rings


@host.jit
def wait_any(addresses: Any, seen: Any, timeout_ns: int, bell: int) -> int:
    """Wait until the word at some `addresses[i]` differs from `seen[i]`: returns i.

    addresses, seen: [n] int64. bell: address of the bell that writers of the words
    ring, or 0. Returns -1 after `timeout_ns` without a change. Compiled, it holds no
    interpreter lock while it waits.
    """
    deadline = clock_ns() + timeout_ns
    spins = 0
    heard = load_acquire(bell, RINGS) if bell != 0 else 0
    while True:
        for i in range(addresses.shape[0]):
            if load_relaxed(addresses[i], 0) != seen[i]:
                # The caller reads what the word announced: order those reads after it.
                fence()
                return i
        # Asleep, a turn takes long; awake, reading the clock each time would.
        asleep = bell != 0 and spins >= SPINS_BEFORE_SLEEP
        if (asleep or spins % 64 == 63) and clock_ns() > deadline:
            return -1
        heard = wait_for_bell(bell, heard, spins)
        spins += 1


@host.jit
def ring(bell: int) -> None:
    """`ring_bell` for the host's Python code."""
    ring_bell(bell)


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
