"""Rows: what ranks tell each other before an operation, and how they get there.

A row goes from its area in the send region to the same area of the peer's receive
region, through the FIFO of channel 0, followed by a counter that holds the operation's
number. Row n uses area n % 2 at both ends: nobody can write row n + 2 before all have
read row n, since no row n + 1 is sent before.
"""

from __future__ import annotations

from numba_ep.device import (
    WARP_SIZE,
    add_release_block,
    clock_ns,
    cuda,
    lane_id,
    ld_acquire,
    ld_acquire_block,
    ld_relaxed,
    load_i32,
    load_i64,
    num_warps,
    store_i64,
    warp_broadcast,
    warp_id,
    warp_sync,
)
from numba_ep.kernels.events import SEND_ROW, WAIT_ROW
from numba_ep.kernels.fifo import (
    push_put,
)
from numba_ep.kernels.records import (
    FOR_A_PEER,
    FOR_OWN_WARPS,
    LINE_BYTES,
    NOTIFY,
    ROW_TOKENS,
    SCRATCH_COUNTS,
    SCRATCH_MET,
)
from numba_ep.kernels.tracing import now, record, record_alone
from numba_ep.kernels.waiting import (
    GO_ON,
    TIMED_OUT,
    report_timeout,
    wait_verdict,
)


@cuda.jit(device=True)
def area(comm, operation, peer):
    """Offset of a row within the row areas, at either end."""
    return (operation % 2 * comm.num_ranks + peer) * comm.row_bytes


@cuda.jit(device=True)
def row_from(comm, operation, src_rank):
    """Address of the row of `src_rank`; one's own is read where it was written."""
    if src_rank == comm.rank:
        return comm.send_rows + area(comm, operation, src_rank)
    return comm.landing + comm.rows_at + area(comm, operation, src_rank)


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
    since = now(comm)
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
        record_alone(comm, SEND_ROW, 0, dst_rank, since, now(comm), operation, 1)
    warp_sync()


@cuda.jit(device=True)
def wait_for_row_of(comm, operation, src_rank):
    """One warp: until the row of `src_rank` is here; False if the Buffer aborts."""
    word = comm.landing + comm.row_counters_at + src_rank * LINE_BYTES
    spins = 0
    since = clock_ns()
    while True:
        arrived = warp_broadcast(ld_relaxed(word, 0))
        if arrived >= operation:
            ld_acquire(word, 0)  # the row is read after its counter
            warp_sync()
            record(comm, WAIT_ROW, 0, src_rank, since, now(comm), operation, 1)
            return True
        verdict = wait_verdict(comm, spins, since, FOR_A_PEER)
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
        if wait_verdict(comm, spins, since, FOR_OWN_WARPS) != GO_ON:
            return False
        spins += 1
    return True
