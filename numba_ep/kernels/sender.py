"""The two sending roles, the same in dispatch and in combine.

    sender warps        user row -> slot of the send ring, wherever there is credit
    sender coordinator  a chunk whose rows are all packed -> FIFO entry

The rows for one peer are dealt to the warps in turn, so that a single peer still gets
the whole block's bandwidth. Warps therefore finish out of order: they count into one
word a chunk, and the coordinator publishes a chunk when its count is complete. A block
of one warp, the default on a CPU, plays both roles in turn.
"""

from __future__ import annotations

from numba_ep.device import (
    WARP_SIZE,
    add_release_block,
    block_id,
    block_sync,
    cuda,
    lane_id,
    ld_acquire_block,
    load_f32,
    load_i32,
    load_i64,
    num_warps,
    st_release_block,
    store_f32,
    store_i32,
    store_i64,
    warp_broadcast,
    warp_id,
    warp_sync,
)
from numba_ep.kernels.channel import (
    cursor,
    first_token,
    poll_credit,
    publish_chunk,
    rows_before,
    rows_on,
    send_slot,
)
from numba_ep.kernels.events import PACK, WAIT_CREDIT, WAIT_PACKED
from numba_ep.kernels.records import (
    FOR_CREDIT,
    FOR_OWN_WARPS,
    SEND_COORDINATOR,
    SENDER,
)
from numba_ep.kernels.row_copy import copy_with_scales, in_array, in_slot
from numba_ep.kernels.tracing import now, record
from numba_ep.kernels.waiting import (
    by_warp,
    over_peers,
    report_timeout,
)

# A sending block's scratch: a packed count for every (peer, chunk of the ring), then a
# part for every warp and one for the coordinator. A warp's part: the next position for
# every peer, then the credit seen from every peer. The coordinator's: rows published,
# then the credit that it has seen and the warps may see.


@cuda.jit(device=True)
def packed_count(ring, dst_rank, position):
    """Scratch index of the count of packed rows in the chunk of `position`."""
    chunks = ring.capacity // ring.chunk
    return dst_rank * chunks + position // ring.chunk % chunks


@cuda.jit(device=True)
def block_scratch(ring):
    """Address of this block's scratch."""
    return ring.scratch + block_id() * ring.scratch_words * 8


@cuda.jit(device=True)
def scratch_part(comm, ring, warp):
    """Address of a warp's part of the scratch; `num_warps()`: the coordinator's."""
    chunks = ring.capacity // ring.chunk
    words = comm.num_ranks * chunks + warp * 2 * comm.num_ranks
    return block_scratch(ring) + words * 8


@cuda.jit(device=True)
def num_workers():
    """Warps of a block that move rows: all but the coordinator, if there is one."""
    return max(num_warps() - 1, 1)


@cuda.jit(device=True)
def row_of(ring, plan, dst_rank, channel, position):
    """Which user row is `position` on the ring to `dst_rank`."""
    if plan.token_list != 0:
        first = first_token(plan.num_tokens, channel, ring.num_channels)
        return load_i32(plan.token_list, dst_rank * plan.num_tokens + first + position)
    row = rows_before(plan.channel_prefix, dst_rank, channel, ring.num_channels)
    if dst_rank > 0:
        row += load_i32(plan.rank_prefix, dst_rank - 1)
    return row + position


@cuda.jit(device=True)
def pack_row(slot, rows, row):
    """User row `row` -> slot: x | scales | top-k ids | top-k weights."""
    lane = lane_id()
    to = in_slot(rows, slot)
    copy_with_scales(to, in_array(rows, row), rows)
    ids = to.scales + 4 * rows.num_scales
    weights = ids
    if rows.topk_idx != 0:
        weights += 4 * rows.num_topk
        for k in range(lane, rows.num_topk, WARP_SIZE):
            expert = load_i64(rows.topk_idx, row * rows.num_topk + k)
            # Cut to 32 bits, an id that is out of range could become a valid one.
            fits = 0 <= expert and expert < 1 << 31
            store_i32(ids, k, expert if fits else -1)
    if rows.topk_weights != 0:
        for k in range(lane, rows.num_topk, WARP_SIZE):
            weight = load_f32(rows.topk_weights, row * rows.num_topk + k)
            store_f32(weights, k, weight)


@cuda.jit(device=True)
def start_sender(comm, ring):
    """Before the first wait: no row is packed, every warp begins with its own first."""
    own = scratch_part(comm, ring, warp_id())
    coordinator = scratch_part(comm, ring, num_warps())
    counts = comm.num_ranks * (ring.capacity // ring.chunk)
    lanes = num_warps() * WARP_SIZE
    for i in range(warp_id() * WARP_SIZE + lane_id(), counts, lanes):
        store_i64(block_scratch(ring), i, 0)
    for peer in range(lane_id(), comm.num_ranks, WARP_SIZE):
        store_i64(own, peer, warp_id())
        store_i64(own, comm.num_ranks + peer, 0)
        if warp_id() == 0:
            store_i64(coordinator, peer, 0)
            store_i64(coordinator, comm.num_ranks + peer, 0)
    block_sync()


@cuda.jit(device=True)
def more_credit(comm, ring, channel, dst_rank, seen):
    """Positions below this may be written, asked by a warp that has seen `seen`."""
    if num_warps() == 1:
        return poll_credit(comm, ring, dst_rank, channel, seen)
    part = scratch_part(comm, ring, num_warps())
    # Acquire from the coordinator, which has acquired it from the reader.
    credit = ld_acquire_block(part, comm.num_ranks + dst_rank)
    return max(seen, warp_broadcast(credit))


@cuda.jit(device=True)
def watch_credit(comm, ring, channel, dst_rank, published, count):
    """The coordinator looks for its warps: on a GPU heads lie in the host's memory, and
    if every warp asked for them, their reads would hold up the rows on the link."""
    part = scratch_part(comm, ring, num_warps())
    seen = load_i64(part, comm.num_ranks + dst_rank)
    # While half a ring may still be written, nobody waits.
    if seen >= min(count, published + ring.capacity // 2 + 1):
        return
    credit = poll_credit(comm, ring, dst_rank, channel, seen)
    if credit > seen and lane_id() == 0:
        st_release_block(part, comm.num_ranks + dst_rank, credit)
    warp_sync()


@cuda.jit(device=True)
def pack_for(comm, ring, plan, rows, channel, dst_rank):
    """Pack this warp's next rows for one peer, at most to the end of a chunk.

    Returns (rows packed, whether any are left).
    """
    own = scratch_part(comm, ring, warp_id())
    position = load_i64(own, dst_rank)
    count = rows_on(plan.channel_prefix, dst_rank, channel, ring.num_channels)
    if position >= count:
        return 0, False
    credit = load_i64(own, comm.num_ranks + dst_rank)
    if position >= credit:
        more = more_credit(comm, ring, channel, dst_rank, credit)
        # Who finds nothing stores nothing: on a GPU a fence across the system waits for
        # all stores of its SM, and would hardly end while warps that wait store.
        if more > credit:
            store_i64(own, comm.num_ranks + dst_rank, more)
        if position >= more:
            return 0, True
        credit = more
    # No further than this chunk: one count is enough then.
    chunk_end = (position // ring.chunk + 1) * ring.chunk
    index = packed_count(ring, dst_rank, position)
    packed = 0
    since = now(comm)
    stop = min(count, credit, chunk_end)
    row = row_of(ring, plan, dst_rank, channel, position)
    while position < stop:
        following = position + num_workers()
        # Looked up before this row is copied, or its copy would wait for that.
        next_row = (
            row_of(ring, plan, dst_rank, channel, following) if following < stop else 0
        )
        pack_row(send_slot(comm, ring, dst_rank, channel, position), rows, row)
        position, row = following, next_row
        packed += 1
    # Read before the coordinator hears of the last row, and moves the cursors.
    start = cursor(comm, comm.tail_cursors, dst_rank, channel)
    warp_sync()
    if lane_id() == 0:
        # Release to the coordinator: the rows are packed before they are counted.
        add_release_block(block_scratch(ring), index, packed)
    store_i64(own, dst_rank, position)
    warp_sync()
    tail = start + position - num_workers() + 1
    record(comm, PACK, channel, dst_rank, since, now(comm), tail, packed)
    return packed, position < count


@cuda.jit(device=True)
def report_sender(comm, ring, plan, channel, dst_rank):
    """The status record of a sender warp that waited for credit in vain."""
    own = scratch_part(comm, ring, warp_id())
    start = cursor(comm, comm.tail_cursors, dst_rank, channel)
    head = start + load_i64(own, comm.num_ranks + dst_rank) - ring.capacity
    tail = start + load_i64(own, dst_rank)
    expected = tail + 1 - ring.capacity
    report_timeout(comm, SENDER, dst_rank, channel, head, tail, expected)


send_rows = over_peers(pack_for, report_sender, WAIT_CREDIT, FOR_CREDIT)


@cuda.jit(device=True)
def publish_for(comm, ring, plan, rows, channel, dst_rank):
    """Publish the next chunk for one peer if all its rows are packed.

    Returns (chunks published, whether any are left).
    """
    own = scratch_part(comm, ring, num_warps())
    done = load_i64(own, dst_rank)
    count = rows_on(plan.channel_prefix, dst_rank, channel, ring.num_channels)
    if done >= count:
        return 0, False
    if num_warps() > 1:
        watch_credit(comm, ring, channel, dst_rank, done, count)
    expected = min(ring.chunk, count - done)
    packed = packed_count(ring, dst_rank, done)
    scratch = block_scratch(ring)
    # Acquire from the sender warps: the rows come before their count.
    if warp_broadcast(ld_acquire_block(scratch, packed)) != expected:
        return 0, True
    if lane_id() == 0:
        # Nobody counts here again before this chunk's credit has come back.
        store_i64(scratch, packed, 0)
        publish_chunk(comm, ring, dst_rank, channel, done, expected)
    store_i64(own, dst_rank, done + expected)
    warp_sync()
    return 1, done + expected < count


@cuda.jit(device=True)
def report_coordinator(comm, ring, plan, channel, dst_rank):
    """The status record of a sender coordinator whose warps packed no row any more."""
    start = cursor(comm, comm.tail_cursors, dst_rank, channel)
    tail = start + load_i64(scratch_part(comm, ring, num_warps()), dst_rank)
    report_timeout(comm, SEND_COORDINATOR, dst_rank, channel, tail, tail, tail + 1)


publish_chunks = over_peers(
    publish_for, report_coordinator, WAIT_PACKED, FOR_OWN_WARPS
)


@cuda.jit(device=True)
def move_cursors(comm, ring, prefix, channel, cursors):
    """The operation is over on this channel: the next one starts behind its rows."""
    for peer in range(lane_id(), comm.num_ranks, WARP_SIZE):
        moved = cursor(comm, cursors, peer, channel)
        moved += rows_on(prefix, peer, channel, ring.num_channels)
        store_i64(cursors, peer * comm.max_channels + channel, moved)


@cuda.jit(device=True)
def pack_and_publish_for(comm, ring, plan, rows, channel, dst_rank):
    """Both roles of a block of one warp."""
    packed, left = pack_for(comm, ring, plan, rows, channel, dst_rank)
    published, left = publish_for(comm, ring, plan, rows, channel, dst_rank)
    return packed + published, left


send_alone = over_peers(
    pack_and_publish_for, report_sender, WAIT_CREDIT, FOR_CREDIT
)


send_by_warp = by_warp(send_alone, publish_chunks, send_rows)


@cuda.jit(device=True)
def sending_block(comm, ring, plan, rows, channel):
    """One channel's sending block."""
    start_sender(comm, ring)
    if send_by_warp(comm, ring, plan, rows, channel):
        move_cursors(comm, ring, plan.channel_prefix, channel, comm.tail_cursors)
