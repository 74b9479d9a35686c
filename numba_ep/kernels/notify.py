"""Notify: the exchange of rows that opens every operation; its only meeting of ranks.

    count    (dispatch) rows for each peer on each channel, each token's position there
    send     one row to every peer through the FIFO of channel 0
    wait     for the row of every peer
    judge    do all ranks agree? Every rank computes the same verdict from the same rows
    prefix   (dispatch) where the rows of each (source rank, channel) will lie

One block. No token leaves before every rank's row is in, so when the next kernel starts
all peers are done with the operation before, and rings may change their shape. Row n
uses area n % 2 at both ends: nobody can write row n + 2 before all have read row n.
"""

from __future__ import annotations

from numba_ep.config import Refusal
from numba_ep.device import (
    WARP_SIZE,
    add_release_block,
    block_sync,
    clock_ns,
    cuda,
    fence,
    lane_id,
    ld_acquire_block,
    ld_relaxed,
    load_i32,
    load_i64,
    load_u8,
    num_warps,
    st_release,
    st_release_block,
    store_i32,
    store_i64,
    warp_broadcast,
    warp_count_below,
    warp_id,
    warp_max,
    warp_sum,
    warp_sync,
)
from numba_ep.kernels.channel import (
    GO_ON,
    TIMED_OUT,
    first_token,
    push_put,
    report_timeout,
    wait_verdict,
)
from numba_ep.kernels.records import (
    LINE_BYTES,
    NOTIFY,
    NUM_HEADER_WORDS,
    RESULT_CULPRIT,
    RESULT_EXPECTED,
    RESULT_EXPERTS,
    RESULT_FIELD,
    RESULT_GOT,
    RESULT_OPERATION,
    RESULT_RECEIVED,
    RESULT_REFUSAL,
    ROW_TOKENS,
    SCRATCH_COUNTS,
    SCRATCH_MET,
    SCRATCH_STATUS,
    STATE_OPERATION,
    STATE_VERDICT,
)

INVALID_EXPERT_ID = int(Refusal.INVALID_EXPERT_ID)
LAYOUT_MISMATCH = int(Refusal.LAYOUT_MISMATCH)
RANKS_DISAGREE = int(Refusal.RANKS_DISAGREE)
TOO_MANY_TOKENS = int(Refusal.TOO_MANY_TOKENS)
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


# Send.


@cuda.jit(device=True)
def area(comm, operation, peer):
    """Offset of a row within the row areas, at either end."""
    return (operation % 2 * comm.num_ranks + peer) * comm.row_bytes


@cuda.jit(device=True)
def row_from(comm, operation, src_rank):
    """Address of the row of `src_rank`; one's own is read where it was written."""
    if src_rank == comm.rank:
        return comm.send_rows + area(comm, operation, src_rank)
    return comm.receive + comm.rows_at + area(comm, operation, src_rank)


@cuda.jit(device=True)
def write_header(row, header, status):
    """Lane 0: the words that must be equal on all ranks, in the order of Header."""
    store_i64(row, 0, status)
    store_i64(row, 1, header.kind)
    store_i64(row, 2, header.hidden)
    store_i64(row, 3, header.dtype)
    store_i64(row, 4, header.num_topk)
    store_i64(row, 5, header.has_weights)
    store_i64(row, 6, header.num_experts)
    store_i64(row, 7, header.expert_alignment)
    store_i64(row, 8, header.chunk)
    store_i64(row, 9, header.capacity)
    store_i64(row, 10, header.num_channels)
    store_i64(row, 11, header.handle_operation)
    store_i64(row, 12, header.num_worst_tokens)


@cuda.jit(device=True)
def write_row(comm, header, notice, status, row, dst_rank):
    """One warp: the whole row for `dst_rank`. A refusal is its header alone."""
    if lane_id() == 0:
        write_header(row, header, status)
    if status != 0 or notice.is_token_in_rank == 0:
        return
    for rank in range(lane_id(), comm.num_ranks, WARP_SIZE):
        store_i64(row, ROW_TOKENS + rank, load_i32(notice.tokens_per_rank, rank))
    channels = ROW_TOKENS + comm.num_ranks
    for channel in range(lane_id(), header.num_channels, WARP_SIZE):
        index = dst_rank * header.num_channels + channel
        count = load_i64(notice.scratch, SCRATCH_COUNTS + index)
        store_i64(row, channels + channel, count)
    if notice.tokens_per_expert != 0:
        experts = channels + comm.max_channels
        local = header.num_experts // comm.num_ranks
        for expert in range(lane_id(), local, WARP_SIZE):
            count = load_i32(notice.tokens_per_expert, dst_rank * local + expert)
            store_i64(row, experts + expert, count)


@cuda.jit(device=True)
def send_row(comm, header, notice, status, operation, dst_rank):
    """One warp: write the row for a peer and push it; the own one just stays."""
    offset = area(comm, operation, dst_rank)
    write_row(comm, header, notice, status, comm.send_rows + offset, dst_rank)
    warp_sync()
    if lane_id() == 0 and dst_rank != comm.rank:
        push_put(
            comm, 0, dst_rank,
            comm.send_rows_at + offset,
            comm.rows_at + area(comm, operation, comm.rank),
            comm.row_bytes,
            comm.row_counters_at + comm.rank * LINE_BYTES,
            operation,
        )  # fmt: skip
    warp_sync()


# Wait.


@cuda.jit(device=True)
def wait_for_row_of(comm, operation, src_rank):
    """One warp: until the row of `src_rank` is here; False if the Buffer aborts."""
    word = comm.receive + comm.row_counters_at + src_rank * LINE_BYTES
    spins = 0
    since = clock_ns()
    while True:
        arrived = warp_broadcast(ld_relaxed(word, 0))
        if arrived >= operation:
            fence()  # the row is read after its counter
            warp_sync()
            return True
        verdict = wait_verdict(comm, spins, since)
        spins += 1
        if verdict == TIMED_OUT:
            report_timeout(comm, NOTIFY, src_rank, 0, arrived, arrived, operation)
        if verdict != GO_ON:
            return False


@cuda.jit(device=True)
def wait_for_rows(comm, notice, operation):
    """Each warp waits for its share of the rows, warp 0 then for all warps."""
    for src_rank in range(warp_id(), comm.num_ranks, num_warps()):
        if src_rank != comm.rank and not wait_for_row_of(comm, operation, src_rank):
            return False
    warp_sync()
    if lane_id() == 0:
        add_release_block(notice.scratch, SCRATCH_MET, 1)
    if warp_id() > 0:
        return False
    # No block barrier here: a warp that gave up never comes to it.
    spins = 0
    since = clock_ns()
    while warp_broadcast(ld_acquire_block(notice.scratch, SCRATCH_MET)) < num_warps():
        if wait_verdict(comm, spins, since) != GO_ON:
            return False
        spins += 1
    return True


# Judge. Warp 0; every step is a function of the equal parts of the rows.


@cuda.jit(device=True)
def first_fault(comm, operation):
    """The least (class, rank, field) that is wrong as one number, or a huge one.

    Class 0: a rank refuses. Class 1: a rank's field differs from rank 0's.
    """
    ranks = comm.num_ranks
    none = 2 * ranks * NUM_HEADER_WORDS
    least = none
    for src_rank in range(lane_id(), ranks, WARP_SIZE):
        row = row_from(comm, operation, src_rank)
        if load_i64(row, 0) != 0:
            least = min(least, src_rank * NUM_HEADER_WORDS)
        for field in range(1, NUM_HEADER_WORDS):
            expected = load_i64(row_from(comm, operation, 0), field)
            if load_i64(row, field) != expected:
                fault = (ranks + src_rank) * NUM_HEADER_WORDS + field
                least = min(least, fault)
    # The least over the lanes, by way of the largest.
    return none, none - warp_max(none - least)


@cuda.jit(device=True)
def most_received(comm, operation):
    """The largest number of rows that any rank receives, and the first such rank."""
    most = -1
    where = 0
    for dst_rank in range(comm.num_ranks):
        total = 0
        for src_rank in range(lane_id(), comm.num_ranks, WARP_SIZE):
            row = row_from(comm, operation, src_rank)
            total += load_i64(row, ROW_TOKENS + dst_rank)
        total = warp_sum(total)
        if total > most:
            most = total
            where = dst_rank
    return most, where


@cuda.jit(device=True)
def judge(comm, header, notice, operation):
    """Leave the refusal and what it is about in the result; returns the refusal."""
    none, fault = first_fault(comm, operation)
    refusal = 0
    culprit = fault // NUM_HEADER_WORDS
    field = fault % NUM_HEADER_WORDS
    expected = header.num_worst_tokens
    got = 0
    if fault < none and culprit >= comm.num_ranks:
        refusal = RANKS_DISAGREE
        culprit -= comm.num_ranks
        expected = load_i64(row_from(comm, operation, 0), field)
        got = load_i64(row_from(comm, operation, culprit), field)
    elif fault < none:
        refusal = load_i64(row_from(comm, operation, culprit), 0)
    elif expected > 0:
        got, culprit = most_received(comm, operation)
        if got > expected:
            refusal = TOO_MANY_TOKENS
    if lane_id() == 0:
        store_i64(notice.result, RESULT_REFUSAL, refusal)
        store_i64(notice.result, RESULT_CULPRIT, culprit)
        store_i64(notice.result, RESULT_FIELD, field)
        store_i64(notice.result, RESULT_EXPECTED, expected)
        store_i64(notice.result, RESULT_GOT, got)
    return refusal


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
        store_i64(notice.result, RESULT_RECEIVED, received)


@cuda.jit(device=True)
def sum_experts(comm, header, notice, operation):
    """Rows for each local expert over all sources, rounded up to the alignment."""
    experts = ROW_TOKENS + comm.num_ranks + comm.max_channels
    alignment = header.expert_alignment
    local = header.num_experts // comm.num_ranks
    for expert in range(lane_id(), local, WARP_SIZE):
        total = 0
        for src_rank in range(comm.num_ranks):
            row = row_from(comm, operation, src_rank)
            total += load_i64(row, experts + expert)
        aligned = (total + alignment - 1) // alignment * alignment
        store_i64(notice.result, RESULT_EXPERTS + expert, aligned)


@cuda.jit(device=True)
def conclude(comm, notice, operation, verdict):
    """Lane 0 of warp 0: the next kernel and the host may go on."""
    store_i64(comm.state, STATE_OPERATION, operation)
    store_i64(comm.state, STATE_VERDICT, verdict)
    if verdict != NOT_JUDGED:
        # Released last: the host reads counts and verdict after this word.
        st_release(notice.result, RESULT_OPERATION, operation)


@cuda.jit
def notify_kernel(comm, header, notice):
    """Open operation `state + 1`. One block; runs on a rank that refuses, too."""
    operation = load_i64(comm.state, STATE_OPERATION) + 1
    if warp_id() == 0 and lane_id() == 0:
        store_i64(notice.scratch, SCRATCH_MET, 0)
        store_i64(notice.scratch, SCRATCH_STATUS, header.status)
    block_sync()
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
