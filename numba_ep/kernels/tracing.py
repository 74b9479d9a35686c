"""The recorder: what a role did, with whom and when, once a chunk or a wait.

Off, `Comm.trace` is 0 and both functions come down to that comparison.
"""

from __future__ import annotations

from numba_ep.device import (
    block_id,
    clock_ns,
    cuda,
    lane_id,
    load_i64,
    num_warps,
    store_i64,
    warp_id,
    warp_sync,
)
from numba_ep.kernels.events import (
    CHANNEL,
    COUNT,
    END,
    KIND,
    OPERATION,
    PEER,
    RECORD_BYTES,
    START,
    VALUE,
)
from numba_ep.kernels.records import LINE_BYTES, STATE_OPERATION


@cuda.jit(device=True)
def now(comm):
    """The clock where somebody records, else 0: unread, it costs nothing."""
    return clock_ns() if comm.trace != 0 else 0


@cuda.jit(device=True)
def record_alone(comm, kind, channel, peer, since, until, value, count):
    """Write one record into this warp's ring; the oldest makes room. Lane 0 alone.

    since, until: from `now`. The host reads when the kernel has ended, so nothing here
    needs an order.
    """
    if comm.trace == 0:
        return
    warp = block_id() * num_warps() + warp_id()
    ring = comm.trace + warp * (LINE_BYTES + comm.trace_records * RECORD_BYTES)
    made = load_i64(ring, 0)
    store_i64(ring, 0, made + 1)
    # trace_records is a power of two: a division would take as long as all the rest.
    entry = ring + LINE_BYTES + (made & (comm.trace_records - 1)) * RECORD_BYTES
    store_i64(entry, KIND, kind)
    store_i64(entry, CHANNEL, channel)
    store_i64(entry, PEER, peer)
    store_i64(entry, START, since)
    store_i64(entry, END, until)
    store_i64(entry, VALUE, value)
    store_i64(entry, COUNT, count)
    store_i64(entry, OPERATION, load_i64(comm.state, STATE_OPERATION))


@cuda.jit(device=True)
def record(comm, kind, channel, peer, since, until, value, count):
    """`record_alone` for a whole warp."""
    if lane_id() == 0:
        record_alone(comm, kind, channel, peer, since, until, value, count)
    # All lanes go on together. Where a compiler has to think of one that comes later,
    # it keeps what is equal in all of them in registers of each (12 more on sm_86).
    warp_sync()


@cuda.jit
def clock_kernel(words):
    """Leave the kernels' time in words[0], for the host to compare with its own."""
    if warp_id() == 0 and lane_id() == 0:
        store_i64(words, 0, clock_ns())
