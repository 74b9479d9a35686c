"""The device end of the FIFO to the proxy; its host end is transport/fifo.py.

A full FIFO makes the kernel wait. What is reserved is committed, unless the Buffer
aborts.
"""

from __future__ import annotations

from numba_ep.device import (
    SPINS_PER_CHECK,
    atomic_add,
    clock_ns,
    cuda,
    ld_acquire,
    ld_relaxed,
    relax,
    st_release_host,
    store_i64,
)
from numba_ep.kernels.records import (
    FIFO,
    FOR_A_PEER,
    LINE_BYTES,
)
from numba_ep.kernels.waiting import (
    GO_ON,
    TIMED_OUT,
    look,
    report_timeout,
)
from transport.wr import (
    COMMIT,
    COUNTER,
    COUNTER_AT,
    DESTINATION,
    ENTRY_BYTES,
    NUM_BYTES,
    OPCODE,
    PEER,
    PUT,
    QUEUE,
    SOURCE,
    VALUE,
)


@cuda.jit(device=True)
def reserve_entry(comm, channel):
    """Take the next entry of the channel's FIFO: (address, sequence), address 0 if the
    Buffer aborts first. Lane 0 alone; what is reserved must be committed."""
    sequence = atomic_add(comm.fifo_tickets + channel * LINE_BYTES, 0, 1)
    freed = comm.fifo_freed + channel * LINE_BYTES
    spins = 0
    since = clock_ns()
    # A full FIFO makes the kernel wait: an entry that the host has not taken is never
    # overwritten.
    # Acquire: the host has read the entry before it counted it as freed.
    while sequence - ld_acquire(freed, 0) >= comm.fifo_depth:
        relax(spins)
        spins += 1
        if spins % SPINS_PER_CHECK == 0:
            verdict = look(comm, since, FOR_A_PEER)
            if verdict == TIMED_OUT:
                report_timeout(
                    comm, FIFO, comm.rank, channel, ld_relaxed(freed, 0), sequence,
                    comm.fifo_depth,
                )  # fmt: skip
            if verdict != GO_ON:
                return 0, sequence
    index = channel * comm.fifo_depth + sequence % comm.fifo_depth
    return comm.fifo + index * ENTRY_BYTES, sequence


@cuda.jit(device=True)
def push_put(
    comm, channel, peer, source, destination, num_bytes, counter, value
):
    """Ask the proxy for a data write followed by its counter. Lane 0 alone."""
    entry, sequence = reserve_entry(comm, channel)
    if entry != 0:
        store_i64(entry, OPCODE, PUT)
        store_i64(entry, PEER, peer)
        store_i64(entry, QUEUE, channel)
        store_i64(entry, SOURCE, source)
        store_i64(entry, DESTINATION, destination)
        store_i64(entry, NUM_BYTES, num_bytes)
        store_i64(entry, COUNTER_AT, counter)
        store_i64(entry, VALUE, value)
        # Commit last, with release: the proxy that sees the word sees the entry, and
        # the rows in the send ring that the entry speaks of.
        st_release_host(entry, COMMIT, sequence + 1)


@cuda.jit(device=True)
def push_counter(comm, channel, peer, counter, value):
    """Ask the proxy for a counter write alone. Lane 0 alone."""
    entry, sequence = reserve_entry(comm, channel)
    if entry != 0:
        store_i64(entry, OPCODE, COUNTER)
        store_i64(entry, PEER, peer)
        store_i64(entry, QUEUE, channel)
        store_i64(entry, COUNTER_AT, counter)
        store_i64(entry, VALUE, value)
        st_release_host(entry, COMMIT, sequence + 1)
