"""The verbs that the roles share: credit, publish, tail, return; all bounded waits.

One ring (channel c, source -> destination) has two counters that only ever grow:
`tail`, tokens published, beside the ring at the destination; `head`, tokens consumed,
at the source. `start` is where this operation begins on either: each end keeps its own
cursor, and a position counts tokens from there.
"""

from __future__ import annotations

from numba_ep.device import (
    atomic_add,
    clock_ns,
    compare_and_swap,
    cuda,
    fence,
    lane_id,
    ld_relaxed,
    load_i32,
    load_i64,
    relax,
    st_release,
    store_i64,
    warp_broadcast,
    warp_sync,
)
from numba_ep.kernels.records import (
    ABORT,
    FIFO,
    LINE_BYTES,
    RECORD,
    STATE_CLAIM,
    STATE_OPERATION,
)
from transport.wr import (
    ABORT_CAUSE,
    ABORT_TIMEOUT,
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

SPINS_PER_CHECK = 64

# What `wait_verdict` says.
GO_ON = 0
ABORTED = 1
TIMED_OUT = 2


# Waiting.


@cuda.jit(device=True)
def wait_verdict(comm, spins, since):
    """Relax; every 64th time see whether to give up. The same answer on every lane."""
    relax(spins)
    if spins % SPINS_PER_CHECK != SPINS_PER_CHECK - 1:
        return GO_ON
    verdict = GO_ON
    if ld_relaxed(comm.control, ABORT) != 0:
        verdict = ABORTED
    elif clock_ns() - since > comm.timeout_ns:
        verdict = TIMED_OUT
    return warp_broadcast(verdict)


@cuda.jit(device=True)
def report_timeout(comm, role, peer, channel, head, tail, expected):
    """Leave a status record and end the Buffer on this rank; the first record stays."""
    if lane_id() == 0 and compare_and_swap(comm.state, STATE_CLAIM, 0, 1) == 0:
        store_i64(comm.control, RECORD, role)
        store_i64(comm.control, RECORD + 1, peer)
        store_i64(comm.control, RECORD + 2, channel)
        store_i64(comm.control, RECORD + 3, head)
        store_i64(comm.control, RECORD + 4, tail)
        store_i64(comm.control, RECORD + 5, expected)
        store_i64(comm.control, RECORD + 6, ld_relaxed(comm.state, STATE_OPERATION))
        if ld_relaxed(comm.control, ABORT) == 0:
            # Release: the host reads the record after it sees this word.
            abort = ABORT_TIMEOUT * ABORT_CAUSE + peer + 1
            st_release(comm.control, ABORT, abort)
    warp_sync()


def over_peers(advance, report):
    """Build a role that serves all peers and never waits for one while another can go.

    advance(comm, ring, work, rows, channel, peer) -> (steps done, whether any is left).
    report(comm, ring, work, channel, peer) leaves the status record of a wait for
    `peer` that lasted too long. The role returns False where the Buffer aborts.
    """

    @cuda.jit(device=True)
    def role(comm, ring, work, rows, channel):
        spins = 0
        since = clock_ns()
        while True:
            steps = 0
            waits_for = -1
            # Every rank begins with another peer, or all would send to rank 0 at once.
            for i in range(comm.num_ranks):
                peer = (comm.rank + i) % comm.num_ranks
                done, left = advance(comm, ring, work, rows, channel, peer)
                steps += done
                if left:
                    waits_for = peer
            if waits_for < 0:
                return True
            if steps > 0:
                spins = 0
                since = clock_ns()
                continue
            verdict = wait_verdict(comm, spins, since)
            spins += 1
            if verdict == TIMED_OUT:
                report(comm, ring, work, channel, waits_for)
            if verdict != GO_ON:
                return False

    return role


# The device end of the FIFO (its host end is transport/fifo.py).


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
    while sequence - ld_relaxed(freed, 0) >= comm.fifo_depth:
        relax(spins)
        spins += 1
        if spins % SPINS_PER_CHECK == 0:
            if ld_relaxed(comm.control, ABORT) != 0:
                return 0, sequence
            if clock_ns() - since > comm.timeout_ns:
                report_timeout(
                    comm, FIFO, comm.rank, channel, ld_relaxed(freed, 0), sequence,
                    comm.fifo_depth,
                )  # fmt: skip
                return 0, sequence
    fence()  # the host has read the entry before it counted it as freed
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
        st_release(entry, COMMIT, sequence + 1)


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
        st_release(entry, COMMIT, sequence + 1)


# Counters and cursors.


@cuda.jit(device=True)
def counter_at(comm, table, peer, channel):
    """Offset in the receive region of the counter of (peer, channel) in `table`."""
    return table + (peer * comm.max_channels + channel) * LINE_BYTES


@cuda.jit(device=True)
def counter_word(comm, table, peer, channel):
    """Address of that counter here. Traffic with oneself has its own, in device
    memory."""
    base = comm.own if peer == comm.rank else comm.receive
    return base + counter_at(comm, table, peer, channel)


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
    word = counter_word(comm, comm.heads_at, dst_rank, channel)
    consumed = warp_broadcast(ld_relaxed(word, 0)) - start
    credit = consumed + ring.capacity if consumed >= 0 else 0
    # Acquire: the slot's reader was done before this head was written.
    fence()
    return max(seen, credit)


@cuda.jit(device=True)
def poll_tail(comm, src_rank, channel, seen):
    """Positions below this may be read. `seen`: what the last poll returned."""
    start = cursor(comm, comm.head_cursors, src_rank, channel)
    word = counter_word(comm, comm.tails_at, src_rank, channel)
    published = warp_broadcast(ld_relaxed(word, 0)) - start
    if published <= seen:
        return seen
    # Acquire, once per advance: rows are read only after the tail that covers them.
    fence()
    warp_sync()
    return published


@cuda.jit(device=True)
def publish_chunk(comm, ring, dst_rank, channel, first, count):
    """Send `count` packed rows from position `first`; they never wrap. Lane 0 alone."""
    tail = cursor(comm, comm.tail_cursors, dst_rank, channel) + first + count
    if dst_rank == comm.rank:
        st_release(counter_word(comm, comm.tails_at, dst_rank, channel), 0, tail)
        return
    push_put(
        comm, channel, dst_rank,
        ring.send_at + slot_at(ring, dst_rank, channel, first),
        # At the destination the ring is this rank's.
        ring.receive_at + slot_at(ring, comm.rank, channel, first),
        count * ring.slot_bytes,
        counter_at(comm, comm.tails_at, comm.rank, channel),
        tail,
    )  # fmt: skip


@cuda.jit(device=True)
def return_credit(comm, src_rank, channel, consumed):
    """Tell the source that positions below `consumed` have been read. Lane 0 alone."""
    head = cursor(comm, comm.head_cursors, src_rank, channel) + consumed
    if src_rank == comm.rank:
        st_release(counter_word(comm, comm.heads_at, src_rank, channel), 0, head)
        return
    at = counter_at(comm, comm.heads_at, comm.rank, channel)
    push_counter(comm, channel, src_rank, at, head)
