"""The verdict on an operation, from the rows of all ranks.

Only the parts that are equal for all destinations count, so every rank reaches the same
verdict without asking anyone. Warp 0 alone; its lanes share the ranks.
"""

from __future__ import annotations

from numba_ep.config import Refusal
from numba_ep.device import (
    WARP_SIZE,
    cuda,
    lane_id,
    load_i64,
    store_i64,
    warp_max,
    warp_sum,
)
from numba_ep.kernels.records import (
    NUM_HEADER_WORDS,
    RESULT_CULPRIT,
    RESULT_EXPECTED,
    RESULT_FIELD,
    RESULT_GOT,
    RESULT_REFUSAL,
    RESULTS,
    ROW_TOKENS,
)
from numba_ep.kernels.rows import (
    row_from,
)

RANKS_DISAGREE = int(Refusal.RANKS_DISAGREE)
TOO_MANY_TOKENS = int(Refusal.TOO_MANY_TOKENS)


@cuda.jit(device=True)
def result_of(notice, operation):
    """Address of the operation's result."""
    return notice.results + operation % RESULTS * notice.result_bytes


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
        result = result_of(notice, operation)
        store_i64(result, RESULT_REFUSAL, refusal)
        store_i64(result, RESULT_CULPRIT, culprit)
        store_i64(result, RESULT_FIELD, field)
        store_i64(result, RESULT_EXPECTED, expected)
        store_i64(result, RESULT_GOT, got)
    return refusal
