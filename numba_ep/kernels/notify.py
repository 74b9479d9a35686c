"""Notify: the exchange of rows that opens every operation; its only meeting of ranks.

    count    (dispatch) rows for each peer on each channel, each token's position there
    send     one row to every peer, and wait for theirs (kernels/rows.py)
    judge    do all ranks agree? (kernels/verdict.py)
    prefix   (dispatch) where the rows of each (source rank, channel) will lie

One block. No token leaves before every rank's row is in, so when the next kernel starts
all peers are done with the operation before, and rings may change their shape.
"""

from __future__ import annotations

from numba_ep.config import Refusal
from numba_ep.device import (
    WARP_SIZE,
    block_sync,
    cuda,
    fence,
    lane_id,
    ld_acquire_block,
    load_i32,
    load_i64,
    load_u8,
    num_warps,
    st_release,
    st_release_block,
    store_i32,
    store_i64,
    warp_count_below,
    warp_id,
    warp_sum,
    warp_sync,
)
from numba_ep.kernels.channel import (
    first_token,
)
from numba_ep.kernels.records import (
    RESULT_EXPERTS,
    RESULT_OPERATION,
    RESULT_RECEIVED,
    ROW_TOKENS,
    SCRATCH_COUNTS,
    SCRATCH_MET,
    SCRATCH_STATUS,
    STATE_OPERATION,
    STATE_VERDICT,
)
from numba_ep.kernels.rows import (
    row_from,
    send_row,
    wait_for_rows,
)
from numba_ep.kernels.verdict import (
    judge,
    result_of,
)

INVALID_EXPERT_ID = int(Refusal.INVALID_EXPERT_ID)
LAYOUT_MISMATCH = int(Refusal.LAYOUT_MISMATCH)
NOT_JUDGED = -1  # the verdict of an operation whose rows never came


# Count.


@cuda.jit(device=True)
def count_channel(comm, header, notice, dst_rank, channel):
    """One warp: positions of a channel's tokens on the ring to `dst_rank`."""
    first = first_token(notice.num_tokens, channel, header.num_channels)
    stop = first_token(notice.num_tokens, channel + 1, header.num_channels)
    count = 0
    for base in range(first, stop, WARP_SIZE):
        token = base + lane_id()
        goes = False
        if token < stop:
            at = token * comm.num_ranks + dst_rank
            goes = load_u8(notice.is_token_in_rank, at) != 0
        position = count + warp_count_below(goes)
        if token < stop:
            store_i32(
                notice.positions, token * comm.num_ranks + dst_rank,
                position if goes else -1,
            )  # fmt: skip
        if goes:
            at = dst_rank * notice.num_tokens + first + position
            store_i32(notice.token_list, at, token)
        count += warp_sum(1 if goes else 0)
    index = dst_rank * header.num_channels + channel
    if lane_id() == 0:
        store_i64(notice.scratch, SCRATCH_COUNTS + index, count)


@cuda.jit(device=True)
def sum_channels(comm, header, notice, dst_rank):
    """One lane: the inclusive sums of a peer; they must end at the caller's count."""
    total = 0
    for channel in range(header.num_channels):
        index = dst_rank * header.num_channels + channel
        total += load_i64(notice.scratch, SCRATCH_COUNTS + index)
        store_i32(notice.channel_prefix, index, total)
    given = load_i32(notice.tokens_per_rank, dst_rank)
    if given < 0:
        st_release_block(notice.scratch, SCRATCH_STATUS, INVALID_EXPERT_ID)
    elif given != total:
        st_release_block(notice.scratch, SCRATCH_STATUS, LAYOUT_MISMATCH)


@cuda.jit(device=True)
def count_tokens(comm, header, notice):
    """Fill positions, token list and channel prefix; the block has met before."""
    pairs = comm.num_ranks * header.num_channels
    for pair in range(warp_id(), pairs, num_warps()):
        dst_rank = pair // header.num_channels
        channel = pair % header.num_channels
        count_channel(comm, header, notice, dst_rank, channel)
    block_sync()
    lanes = num_warps() * WARP_SIZE
    first = warp_id() * WARP_SIZE + lane_id()
    for dst_rank in range(first, comm.num_ranks, lanes):
        sum_channels(comm, header, notice, dst_rank)
    block_sync()


# Prefix. Warp 0.


@cuda.jit(device=True)
def sum_received(comm, header, notice, operation):
    """Where the rows of each source and channel will lie, and how many there are."""
    channels = ROW_TOKENS + comm.num_ranks
    for src_rank in range(lane_id(), comm.num_ranks, WARP_SIZE):
        row = row_from(comm, operation, src_rank)
        total = 0
        for channel in range(header.num_channels):
            total += load_i64(row, channels + channel)
            index = src_rank * header.num_channels + channel
            store_i32(notice.recv_channel_prefix, index, total)
        store_i32(notice.recv_rank_prefix, src_rank, total)
    warp_sync()
    if lane_id() == 0:
        received = 0
        for src_rank in range(comm.num_ranks):
            received += load_i32(notice.recv_rank_prefix, src_rank)
            store_i32(notice.recv_rank_prefix, src_rank, received)
        store_i64(result_of(notice, operation), RESULT_RECEIVED, received)


@cuda.jit(device=True)
def sum_experts(comm, header, notice, operation):
    """Rows for each local expert over all sources, rounded up to the alignment."""
    experts = ROW_TOKENS + comm.num_ranks + comm.max_channels
    alignment = header.expert_alignment
    local = header.num_experts // comm.num_ranks
    result = result_of(notice, operation)
    for expert in range(lane_id(), local, WARP_SIZE):
        total = 0
        for src_rank in range(comm.num_ranks):
            row = row_from(comm, operation, src_rank)
            total += load_i64(row, experts + expert)
        aligned = (total + alignment - 1) // alignment * alignment
        store_i64(result, RESULT_EXPERTS + expert, aligned)


@cuda.jit(device=True)
def conclude(comm, notice, operation, verdict):
    """Lane 0 of warp 0: the next kernel and the host may go on."""
    store_i64(comm.state, STATE_VERDICT, verdict)
    if verdict != NOT_JUDGED:
        # Released last: the host reads counts and verdict after this word.
        st_release(result_of(notice, operation), RESULT_OPERATION, operation)


@cuda.jit
def notify_kernel(comm, header, notice):
    """Open operation `state + 1`. One block; runs on a rank that refuses, too."""
    operation = load_i64(comm.state, STATE_OPERATION) + 1
    if warp_id() == 0 and lane_id() == 0:
        store_i64(notice.scratch, SCRATCH_MET, 0)
        store_i64(notice.scratch, SCRATCH_STATUS, header.status)
    block_sync()
    if warp_id() == 0 and lane_id() == 0:
        # All have read it. A status record of this kernel is about this operation.
        store_i64(comm.state, STATE_OPERATION, operation)
    if notice.is_token_in_rank != 0 and header.status == 0:
        count_tokens(comm, header, notice)
    status = ld_acquire_block(notice.scratch, SCRATCH_STATUS)
    for i in range(warp_id(), comm.num_ranks, num_warps()):
        dst_rank = (comm.rank + i) % comm.num_ranks
        send_row(comm, header, notice, status, operation, dst_rank)
    verdict = NOT_JUDGED
    if wait_for_rows(comm, notice, operation):
        verdict = judge(comm, header, notice, operation)
        if verdict == 0 and notice.is_token_in_rank != 0:
            sum_received(comm, header, notice, operation)
            if notice.tokens_per_expert != 0:
                sum_experts(comm, header, notice, operation)
    warp_sync()
    if warp_id() == 0 and lane_id() == 0:
        fence()  # what the other lanes wrote comes before the words that announce it
        conclude(comm, notice, operation, verdict)
