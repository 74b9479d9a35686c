"""What the receiving blocks of dispatch and combine share: progress, and the receiver
coordinator, which returns credit for the rows that no warp needs any more.

Every receiver warp keeps, per source, the next position that it still needs. What lies
below the smallest of them has been read by all. A block of one warp coordinates itself.
"""

from __future__ import annotations

from numba_ep.device import (
    WARP_SIZE,
    block_sync,
    cuda,
    lane_id,
    ld_acquire_block,
    load_i64,
    num_warps,
    st_release_block,
    store_i64,
    warp_broadcast,
    warp_id,
    warp_sync,
)
from numba_ep.kernels.channel import (
    cursor,
    poll_tail,
    return_credit,
    rows_on,
)
from numba_ep.kernels.events import WAIT_READ
from numba_ep.kernels.records import (
    FOR_OWN_WARPS,
    RECEIVE_COORDINATOR,
    RECEIVER,
)
from numba_ep.kernels.sender import block_scratch, move_cursors, num_workers
from numba_ep.kernels.waiting import (
    over_peers,
    report_timeout,
)

# A receiving block's scratch: for every warp and source the next position it needs,
# then for every warp and source the tail seen, then for every source the credit
# returned and the tail that the coordinator has seen. A reducing block has, behind
# these, a list of addresses for every warp.


@cuda.jit(device=True)
def needed_word(comm, warp, src_rank):
    """Scratch index of the next position that `warp` needs from `src_rank`."""
    return warp * comm.num_ranks + src_rank


@cuda.jit(device=True)
def seen_word(comm, warp, src_rank):
    """Scratch index of the tail that `warp` has seen from `src_rank`."""
    return (num_warps() + warp) * comm.num_ranks + src_rank


@cuda.jit(device=True)
def returned_word(comm, src_rank):
    """Scratch index of the credit that the coordinator has returned to `src_rank`."""
    return 2 * num_warps() * comm.num_ranks + src_rank


@cuda.jit(device=True)
def arrived_word(comm, src_rank):
    """Scratch index of the tail that the warps may see: the coordinator's."""
    return (2 * num_warps() + 1) * comm.num_ranks + src_rank


@cuda.jit(device=True)
def start_receiver(comm, ring):
    """Before the first wait: nothing is read, seen or returned."""
    for src_rank in range(lane_id(), comm.num_ranks, WARP_SIZE):
        store_i64(block_scratch(ring), needed_word(comm, warp_id(), src_rank), 0)
        store_i64(block_scratch(ring), seen_word(comm, warp_id(), src_rank), 0)
        if warp_id() == 0:
            store_i64(block_scratch(ring), returned_word(comm, src_rank), 0)
            store_i64(block_scratch(ring), arrived_word(comm, src_rank), 0)
    block_sync()


@cuda.jit(device=True)
def more_rows(comm, ring, channel, src_rank, seen):
    """Positions below this may be read, asked by a warp that has seen `seen`."""
    if num_warps() == 1:
        return poll_tail(comm, src_rank, channel, seen)
    # Acquire from the coordinator, which has acquired it from the source.
    tail = ld_acquire_block(block_scratch(ring), arrived_word(comm, src_rank))
    return max(seen, warp_broadcast(tail))


@cuda.jit(device=True)
def watch_tail(comm, ring, channel, src_rank, count):
    """The coordinator looks for its warps, or hundreds of them would ask at once.

    Returns whether rows have come.
    """
    index = arrived_word(comm, src_rank)
    seen = load_i64(block_scratch(ring), index)
    if num_warps() == 1 or seen >= count:
        return False
    tail = poll_tail(comm, src_rank, channel, seen)
    if tail > seen and lane_id() == 0:
        st_release_block(block_scratch(ring), index, tail)
    warp_sync()
    return tail > seen


@cuda.jit(device=True)
def set_needed(comm, ring, src_rank, position):
    """This warp has read what it needs from `src_rank` below `position`. One lane."""
    index = needed_word(comm, warp_id(), src_rank)
    # Release: the head that follows from this must not overtake the reads of the slot.
    st_release_block(block_scratch(ring), index, position)


@cuda.jit(device=True)
def smallest_needed(comm, ring, src_rank, count):
    """Rows from `src_rank` that every receiver warp is done with."""
    smallest = count
    for warp in range(num_workers()):
        index = needed_word(comm, warp, src_rank)
        smallest = min(smallest, ld_acquire_block(block_scratch(ring), index))
    return warp_broadcast(smallest)


@cuda.jit(device=True)
def credit_for(comm, ring, arrivals, rows, channel, src_rank):
    """Return the credit of one source once a chunk, or the rest, has been read.

    Returns (times credit was returned or rows have come, whether any rows are left).
    """
    count = rows_on(arrivals.channel_prefix, src_rank, channel, ring.num_channels)
    index = returned_word(comm, src_rank)
    returned = load_i64(block_scratch(ring), index)
    if returned >= count:
        return 0, False
    steps = 1 if watch_tail(comm, ring, channel, src_rank, count) else 0
    consumed = smallest_needed(comm, ring, src_rank, count)
    if consumed - returned < ring.chunk and consumed < count:
        return steps, True
    if lane_id() == 0:
        return_credit(comm, src_rank, channel, returned, consumed)
    store_i64(block_scratch(ring), index, consumed)
    warp_sync()
    return steps + 1, consumed < count


@cuda.jit(device=True)
def report_role(comm, ring, arrivals, channel, src_rank, role):
    """The status record of a receiving role that waited for `src_rank` in vain."""
    scratch = block_scratch(ring)
    start = cursor(comm, comm.head_cursors, src_rank, channel)
    # The coordinator reports what warp 0 has seen and needs.
    warp = warp_id() % num_workers()
    tail = start + load_i64(scratch, seen_word(comm, warp, src_rank))
    head = start + load_i64(scratch, needed_word(comm, warp, src_rank))
    count = rows_on(arrivals.channel_prefix, src_rank, channel, ring.num_channels)
    report_timeout(comm, role, src_rank, channel, head, tail, start + count)


@cuda.jit(device=True)
def report_receiver(comm, ring, arrivals, channel, src_rank):
    """The status record of a receiver warp."""
    report_role(comm, ring, arrivals, channel, src_rank, RECEIVER)


@cuda.jit(device=True)
def report_coordinator(comm, ring, arrivals, channel, src_rank):
    """The status record of a receiver coordinator."""
    report_role(comm, ring, arrivals, channel, src_rank, RECEIVE_COORDINATOR)


return_credits = over_peers(
    credit_for, report_coordinator, WAIT_READ, FOR_OWN_WARPS
)


@cuda.jit(device=True)
def end_receives(comm, ring, arrivals, channel):
    """All credit is returned: move the cursors, once."""
    move_cursors(comm, ring, arrivals.channel_prefix, channel, comm.head_cursors)
