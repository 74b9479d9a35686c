"""Dispatch: every token to every rank that holds one of its experts.

    even blocks  send channel block_id // 2 (kernels/sender.py)
    odd blocks   receive it: slot -> user row, ordered by (source rank, token)

The last warp of a block is its coordinator, unless it is the only one. `notify` has run
before: every rank knows how many rows come from where, so nobody waits for a row that
does not exist.
"""

from __future__ import annotations

import numpy as np

from numba_ep.device import (
    WARP_SIZE,
    block_id,
    cuda,
    lane_id,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i64,
    warp_id,
    warp_sync,
)
from numba_ep.kernels.channel import (
    cursor,
    receive_slot,
    rows_before,
    rows_on,
)
from numba_ep.kernels.events import UNPACK, WAIT_TAIL
from numba_ep.kernels.receiver import (
    credit_for,
    end_receives,
    more_rows,
    needed_word,
    report_receiver,
    return_credits,
    seen_word,
    set_needed,
    start_receiver,
)
from numba_ep.kernels.records import STATE_VERDICT
from numba_ep.kernels.row_copy import copy_with_scales, in_array, in_slot
from numba_ep.kernels.sender import (
    block_scratch,
    num_workers,
    sending_block,
)
from numba_ep.kernels.tracing import now, record
from numba_ep.kernels.waiting import (
    by_warp,
    over_peers,
)


@cuda.jit(device=True)
def unpack_topk(comm, arrivals, ids, rows, row):
    """Expert ids become local, others' get -1 and weight 0."""
    weights = ids + 4 * rows.num_topk
    first = comm.rank * arrivals.num_local_experts
    for k in range(lane_id(), rows.num_topk, WARP_SIZE):
        local = load_i32(ids, k) - first
        is_local = 0 <= local and local < arrivals.num_local_experts
        at = row * rows.num_topk + k
        weight = np.float32(0)
        if is_local and rows.topk_weights != 0:
            weight = load_f32(weights, k)
        store_i64(rows.topk_idx, at, local if is_local else -1)
        if rows.topk_weights != 0:
            store_f32(rows.topk_weights, at, weight)


@cuda.jit(device=True)
def unpack_row(comm, arrivals, slot, rows, row):
    """Slot -> user row `row`."""
    of = in_slot(rows, slot)
    copy_with_scales(in_array(rows, row), of, rows)
    if rows.topk_idx != 0:
        unpack_topk(comm, arrivals, of.scales + 4 * rows.num_scales, rows, row)


@cuda.jit(device=True)
def first_row(ring, arrivals, src_rank, channel):
    """The user row of position 0 from `src_rank` on this channel."""
    prefix = arrivals.channel_prefix
    row = rows_before(prefix, src_rank, channel, ring.num_channels)
    if src_rank > 0:
        row += load_i32(arrivals.rank_prefix, src_rank - 1)
    return row


@cuda.jit(device=True)
def unpack_from(comm, ring, arrivals, rows, channel, src_rank):
    """Unpack this warp's rows that have arrived from one source.

    Returns (rows unpacked, whether any are left).
    """
    scratch = block_scratch(ring)
    needed = needed_word(comm, warp_id(), src_rank)
    position = load_i64(scratch, needed)
    count = rows_on(arrivals.channel_prefix, src_rank, channel, ring.num_channels)
    if position >= count:
        return 0, False
    seen = load_i64(scratch, seen_word(comm, warp_id(), src_rank))
    if position >= seen:
        more = more_rows(comm, ring, channel, src_rank, seen)
        # Who finds nothing stores nothing, see `pack_for`.
        if more > seen:
            store_i64(scratch, seen_word(comm, warp_id(), src_rank), more)
        if position >= more:
            return 0, True
        seen = more
    first = first_row(ring, arrivals, src_rank, channel)
    unpacked = 0
    since = now(comm)
    # Exactly the rows that the row of notify announced, never "up to tail".
    stop = min(seen, count, position + ring.chunk)
    while position < stop:
        slot = receive_slot(comm, ring, src_rank, channel, position)
        unpack_row(comm, arrivals, slot, rows, first + position)
        position += num_workers()
        unpacked += 1
    # Read before the coordinator hears of the last row, and moves the cursors.
    start = cursor(comm, comm.head_cursors, src_rank, channel)
    warp_sync()
    if lane_id() == 0:
        set_needed(comm, ring, src_rank, position)
    warp_sync()
    tail = start + position - num_workers() + 1
    record(comm, UNPACK, channel, src_rank, since, now(comm), tail, unpacked)
    return unpacked, position < count


receive_rows = over_peers(unpack_from, report_receiver, WAIT_TAIL)


@cuda.jit(device=True)
def unpack_and_return(comm, ring, arrivals, rows, channel, src_rank):
    """Both roles of a block of one warp."""
    unpacked, left = unpack_from(comm, ring, arrivals, rows, channel, src_rank)
    returned, left = credit_for(comm, ring, arrivals, rows, channel, src_rank)
    return unpacked + returned, left


receive_alone = over_peers(unpack_and_return, report_receiver, WAIT_TAIL)


@cuda.jit(device=True)
def start_positions(comm, ring):
    """Rows of a source are dealt to the receiver warps in turn."""
    for src_rank in range(lane_id(), comm.num_ranks, WARP_SIZE):
        needed = needed_word(comm, warp_id(), src_rank)
        store_i64(block_scratch(ring), needed, warp_id())
    warp_sync()


@cuda.jit(device=True)
def receive_along(comm, ring, arrivals, rows, channel):
    """A receiver warp beside a coordinator."""
    start_positions(comm, ring)
    return receive_rows(comm, ring, arrivals, rows, channel)


receive_by_warp = by_warp(receive_alone, return_credits, receive_along)


@cuda.jit(device=True)
def receiving_block(comm, ring, arrivals, rows, channel):
    """One channel's receiving block."""
    start_receiver(comm, ring)
    if receive_by_warp(comm, ring, arrivals, rows, channel):
        end_receives(comm, ring, arrivals, channel)


@cuda.jit
def dispatch_kernel(comm, ring, plan, arrivals, sent, received):
    """Send the rows of `sent` by `plan`, fill `received` by `arrivals`.

    Grid: 2 x num_channels blocks.
    """
    if load_i64(comm.state, STATE_VERDICT) != 0:
        return
    channel = block_id() // 2
    if block_id() % 2 == 0:
        sending_block(comm, ring, plan, sent, channel)
    else:
        receiving_block(comm, ring, arrivals, received, channel)
