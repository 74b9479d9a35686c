"""The verbs that the roles share: credit, publish, tail, return.

One ring (channel c, source -> destination) has two counters that only ever grow:
`tail`, tokens published, beside the ring at the destination; `head`, tokens consumed,
at the source. `start` is where this operation begins on either: each end keeps its own
cursor, and a position counts tokens from there.
"""

from __future__ import annotations

from numba_ep.device import (
    cuda,
    ld_acquire,
    ld_relaxed,
    load_i32,
    load_i64,
    st_release,
    warp_broadcast,
    warp_sync,
)
from numba_ep.kernels.events import PUBLISH, RETURN
from numba_ep.kernels.fifo import (
    push_counter,
    push_put,
)
from numba_ep.kernels.records import (
    LINE_BYTES,
)
from numba_ep.kernels.tracing import now, record_alone

# Counters and cursors.


@cuda.jit(device=True)
def counter_at(comm, table, peer, channel):
    """Offset in the receive region of the counter of (peer, channel) in `table`."""
    return table + (peer * comm.max_channels + channel) * LINE_BYTES


@cuda.jit(device=True)
def tail_word(comm, peer, channel):
    """Address of the tail that `peer` writes here. Traffic with oneself has its own
    counters, in device memory."""
    base = comm.own if peer == comm.rank else comm.landing
    return base + counter_at(comm, comm.tails_at, peer, channel)


@cuda.jit(device=True)
def head_word(comm, peer, channel):
    """Address of the head that `peer` writes here."""
    base = comm.own if peer == comm.rank else comm.receive
    return base + counter_at(comm, comm.heads_at, peer, channel)


@cuda.jit(device=True)
def cursor(comm, cursors, peer, channel):
    """Where this operation starts on the ring."""
    return load_i64(cursors, peer * comm.max_channels + channel)


@cuda.jit(device=True)
def rows_on(prefix, peer, channel, num_channels):
    """Rows between this rank and `peer` on `channel`, from inclusive sums [R, C]."""
    return load_i32(prefix, peer * num_channels + channel) - rows_before(
        prefix, peer, channel, num_channels
    )


@cuda.jit(device=True)
def rows_before(prefix, peer, channel, num_channels):
    """Rows between this rank and `peer` on the channels before `channel`."""
    if channel == 0:
        return 0
    return load_i32(prefix, peer * num_channels + channel - 1)


@cuda.jit(device=True)
def first_token(num_tokens, channel, num_channels):
    """Channel c has tokens [first_token(c), first_token(c + 1))."""
    return num_tokens * channel // num_channels


# Slots.


@cuda.jit(device=True)
def slot_at(ring, peer, channel, position):
    """Offset of the slot of `position` from the start of the rings, either end."""
    index = (peer * ring.num_channels + channel) * ring.capacity
    return (index + position % ring.capacity) * ring.slot_bytes


@cuda.jit(device=True)
def send_slot(comm, ring, dst_rank, channel, position):
    """Address to pack a row at: tokens that stay go straight into the own ring."""
    if dst_rank == comm.rank:
        return ring.own + slot_at(ring, 0, channel, position)
    return ring.send + slot_at(ring, dst_rank, channel, position)


@cuda.jit(device=True)
def receive_slot(comm, ring, src_rank, channel, position):
    """Address to read a row at."""
    if src_rank == comm.rank:
        return ring.own + slot_at(ring, 0, channel, position)
    return ring.receive + slot_at(ring, src_rank, channel, position)


# The four verbs. Polls return at once: a role that cannot go on with one peer goes on
# with the next (a combine whose senders block deadlocks).


@cuda.jit(device=True)
def poll_credit(comm, ring, dst_rank, channel, seen):
    """Positions below this may be written. `seen`: what the last poll returned.

    A head that has not reached `start` belongs to the operation before, whose credit is
    still on its way: until then there is none.
    """
    start = cursor(comm, comm.tail_cursors, dst_rank, channel)
    word = head_word(comm, dst_rank, channel)
    consumed = warp_broadcast(ld_relaxed(word, 0)) - start
    credit = consumed + ring.capacity if consumed >= 0 else 0
    if credit <= seen:
        return seen
    # Acquire: the slot was read before this head was written. Once per advance, and by
    # a load: a fence across the system waits for all that is under way, 20 to 400 us
    # for hundreds at a time.
    ld_acquire(word, 0)
    return credit


@cuda.jit(device=True)
def poll_tail(comm, src_rank, channel, seen):
    """Positions below this may be read. `seen`: what the last poll returned."""
    start = cursor(comm, comm.head_cursors, src_rank, channel)
    word = tail_word(comm, src_rank, channel)
    published = warp_broadcast(ld_relaxed(word, 0)) - start
    if published <= seen:
        return seen
    # Acquire, once per advance: rows are read only after the tail that covers them.
    ld_acquire(word, 0)
    warp_sync()
    return published


@cuda.jit(device=True)
def publish_chunk(comm, ring, dst_rank, channel, first, count):
    """Send `count` packed rows from position `first`; they never wrap. Lane 0 alone."""
    since = now(comm)
    tail = cursor(comm, comm.tail_cursors, dst_rank, channel) + first + count
    if dst_rank == comm.rank:
        st_release(tail_word(comm, dst_rank, channel), 0, tail)
    else:
        push_put(
            comm, channel, dst_rank,
            ring.send_at + slot_at(ring, dst_rank, channel, first),
            # At the destination the ring is this rank's.
            ring.receive_at + slot_at(ring, comm.rank, channel, first),
            count * ring.slot_bytes,
            counter_at(comm, comm.tails_at, comm.rank, channel),
            tail,
        )  # fmt: skip
    record_alone(comm, PUBLISH, channel, dst_rank, since, now(comm), tail, count)


@cuda.jit(device=True)
def return_credit(comm, src_rank, channel, returned, consumed):
    """Tell the source that positions below `consumed` have been read, where it knows of
    `returned`. Lane 0 alone."""
    since = now(comm)
    head = cursor(comm, comm.head_cursors, src_rank, channel) + consumed
    if src_rank == comm.rank:
        st_release(head_word(comm, src_rank, channel), 0, head)
    else:
        at = counter_at(comm, comm.heads_at, comm.rank, channel)
        push_counter(comm, channel, src_rank, at, head)
    rows = consumed - returned
    record_alone(comm, RETURN, channel, src_rank, since, now(comm), head, rows)
