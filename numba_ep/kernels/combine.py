"""Combine: every row back to its token's rank, where the rows of a token are added.

    even blocks  send channel block_id // 2 (kernels/sender.py): received rows, in the
                 order in which dispatch delivered them
    odd blocks   reduce: for each token, wait for its row from every rank that got it,
                 add in float32 by ascending rank, round once

The handle knows the position of each token's row on each ring.
"""

from __future__ import annotations

import numpy as np

from numba_ep.device import (
    WARP_SIZE,
    add_bf16x8,
    block_id,
    clock_ns,
    cuda,
    lane_id,
    load_f32,
    load_i32,
    load_i64,
    num_warps,
    splat_f32x8,
    store_bf16x8,
    store_f32,
    store_i64,
    warp_id,
    warp_sync,
)
from numba_ep.kernels.channel import (
    cursor,
    first_token,
    receive_slot,
    rows_on,
)
from numba_ep.kernels.events import REDUCE, WAIT_TAIL
from numba_ep.kernels.receiver import (
    credit_for,
    end_receives,
    more_rows,
    report_receiver,
    return_credits,
    seen_word,
    set_needed,
    start_receiver,
)
from numba_ep.kernels.records import (
    FOR_A_PEER,
    FOR_OWN_WARPS,
    STATE_VERDICT,
)
from numba_ep.kernels.sender import (
    block_scratch,
    num_workers,
    sending_block,
)
from numba_ep.kernels.sums import GROUP_BYTES, SEVEN, add_x7, splat_x7, store_x7
from numba_ep.kernels.tracing import now, record
from numba_ep.kernels.waiting import (
    GO_ON,
    TIMED_OUT,
    by_warp,
    wait_verdict,
)

MOST_BIASES = 2


@cuda.jit(device=True)
def wait_for_row(comm, ring, arrivals, channel, src_rank, position):
    """Wait until the row at `position` has come; False if the Buffer aborts.

    A receiver may wait for one peer: senders skip, so the row it needs always comes.
    """
    scratch = block_scratch(ring)
    word = seen_word(comm, warp_id(), src_rank)
    seen = load_i64(scratch, word)
    if position < seen:
        return True
    before = seen
    spins = 0
    since = clock_ns()
    while True:
        seen = more_rows(comm, ring, channel, src_rank, seen)
        if position < seen:
            store_i64(scratch, word, seen)
            tail = cursor(comm, comm.head_cursors, src_rank, channel) + seen
            rows = seen - before
            record(comm, WAIT_TAIL, channel, src_rank, since, now(comm), tail, rows)
            return True
        patience = FOR_OWN_WARPS if src_rank == comm.rank else FOR_A_PEER
        verdict = wait_verdict(comm, spins, since, patience)
        spins += 1
        if verdict == TIMED_OUT:
            store_i64(scratch, word, seen)
            report_receiver(comm, ring, arrivals, channel, src_rank)
        if verdict != GO_ON:
            return False


@cuda.jit(device=True)
def terms_of_warp(comm, ring):
    """Address of this warp's list of what it adds up: biases, then slots."""
    before = (2 * num_warps() + 2) * comm.num_ranks
    words = before + warp_id() * (MOST_BIASES + comm.num_ranks)
    return block_scratch(ring) + words * 8


@cuda.jit(device=True)
def num_biases(arrivals):
    """0, 1 or 2."""
    if arrivals.bias_1 != 0:
        return 2
    return 1 if arrivals.bias_0 != 0 else 0


@cuda.jit(device=True)
def wait_for_token(comm, ring, arrivals, rows, channel, token):
    """Wait for the token's row from every rank that got it.

    Lists what is to be added: its row of each bias, then its slots by ascending rank.
    Returns how many, or -1 on an abort.
    """
    terms = terms_of_warp(comm, ring)
    # The same values from every lane.
    if arrivals.bias_0 != 0:
        store_i64(terms, 0, arrivals.bias_0 + token * rows.row_bytes)
    if arrivals.bias_1 != 0:
        store_i64(terms, 1, arrivals.bias_1 + token * rows.row_bytes)
    count = num_biases(arrivals)
    for src_rank in range(comm.num_ranks):
        at = token * comm.num_ranks + src_rank
        position = load_i32(arrivals.positions, at)
        if position >= 0:
            if not wait_for_row(comm, ring, arrivals, channel, src_rank, position):
                return -1
            slot = receive_slot(comm, ring, src_rank, channel, position)
            store_i64(terms, count, slot)
            count += 1
    warp_sync()
    return count


@cuda.jit(device=True)
def before_all(arrivals):
    """What every sum begins with: +0, and -0 with a bias, whose -0 shall stay."""
    return np.float32(-0.0) if arrivals.bias_0 != 0 else np.float32(0.0)


@cuda.jit(device=True)
def reduce_token(comm, ring, arrivals, rows, token, count):
    """bias_0 + bias_1 + the rows by ascending rank, in float32, rounded once.

    A last round that would be short begins earlier: some groups come out twice, equal.
    The first term stands apart: on a GPU 112 registers need not be cleared before it.
    """
    terms = terms_of_warp(comm, ring)
    start = before_all(arrivals)
    row = rows.x + token * rows.row_bytes
    groups = rows.row_bytes // GROUP_BYTES
    if count == 0:
        for group in range(lane_id(), groups, WARP_SIZE):
            store_bf16x8(row, group, splat_f32x8(start))
    elif groups >= 2 * SEVEN:
        for first in range(0, groups, 2 * SEVEN):
            group = min(first, groups - 2 * SEVEN) + lane_id()
            term = load_i64(terms, 0)
            totals = add_x7(splat_x7(start), term, group)
            others = add_x7(splat_x7(start), term, group + SEVEN)
            for i in range(1, count):
                term = load_i64(terms, i)
                totals = add_x7(totals, term, group)
                others = add_x7(others, term, group + SEVEN)
            store_x7(row, group, totals)
            store_x7(row, group + SEVEN, others)
    elif groups >= SEVEN:
        for first in range(0, groups, SEVEN):
            group = min(first, groups - SEVEN) + lane_id()
            totals = splat_x7(start)
            for i in range(count):
                totals = add_x7(totals, load_i64(terms, i), group)
            store_x7(row, group, totals)
    else:
        for group in range(lane_id(), groups, WARP_SIZE):
            total = splat_f32x8(start)
            for i in range(count):
                total = add_bf16x8(total, load_i64(terms, i), group)
            store_bf16x8(row, group, total)


@cuda.jit(device=True)
def reduce_weights(comm, ring, arrivals, rows, token, count):
    """Sum of the token's weights over ranks, ascending, for each top-k position."""
    if rows.topk_weights == 0:
        return
    terms = terms_of_warp(comm, ring)
    for k in range(lane_id(), rows.num_topk, WARP_SIZE):
        total = np.float32(0)
        for i in range(num_biases(arrivals), count):
            total += load_f32(load_i64(terms, i) + rows.row_bytes, k)
        store_f32(rows.topk_weights, token * rows.num_topk + k, total)


@cuda.jit(device=True)
def set_next_needed(comm, ring, arrivals, channel, token, stop, src_rank):
    """This warp next needs the first row from `src_rank` of `token` or a later one.

    Looking ahead matters: a warp whose next row lies beyond the ring's end would
    otherwise hold back the credit that this row is waiting for.
    """
    needed = rows_on(arrivals.channel_prefix, src_rank, channel, ring.num_channels)
    while token < stop:
        position = load_i32(arrivals.positions, token * comm.num_ranks + src_rank)
        if position >= 0:
            needed = position
            break
        token += num_workers()
    set_needed(comm, ring, src_rank, needed)


@cuda.jit(device=True)
def advance_needed(comm, ring, arrivals, channel, token, stop):
    """`token` is reduced: tell the coordinator what this warp needs next."""
    for src_rank in range(lane_id(), comm.num_ranks, WARP_SIZE):
        at = token * comm.num_ranks + src_rank
        # Where this token had no row, the next needed position is still the same.
        if load_i32(arrivals.positions, at) >= 0:
            set_next_needed(
                comm, ring, arrivals, channel, token + num_workers(), stop, src_rank
            )
    warp_sync()


@cuda.jit(device=True)
def return_all(comm, ring, arrivals, rows, channel):
    """The coordinator's part of a block of one warp, after every token."""
    for src_rank in range(comm.num_ranks):
        credit_for(comm, ring, arrivals, rows, channel, src_rank)


@cuda.jit(device=True)
def reduce_rows(comm, ring, arrivals, rows, channel):
    """A receiver warp: reduce every num_workers-th token; False on an abort."""
    token = first_token(arrivals.num_tokens, channel, ring.num_channels) + warp_id()
    stop = first_token(arrivals.num_tokens, channel + 1, ring.num_channels)
    for src_rank in range(lane_id(), comm.num_ranks, WARP_SIZE):
        set_next_needed(comm, ring, arrivals, channel, token, stop, src_rank)
    since = now(comm)
    reduced = 0
    while token < stop:
        count = wait_for_token(comm, ring, arrivals, rows, channel, token)
        if count < 0:
            return False
        reduce_token(comm, ring, arrivals, rows, token, count)
        reduce_weights(comm, ring, arrivals, rows, token, count)
        warp_sync()
        advance_needed(comm, ring, arrivals, channel, token, stop)
        if num_warps() == 1:
            return_all(comm, ring, arrivals, rows, channel)
        token += num_workers()
        reduced += 1
        if reduced == ring.chunk or token >= stop:
            record(comm, REDUCE, channel, -1, since, now(comm), token, reduced)
            since = now(comm)
            reduced = 0
    return True


reduce_by_warp = by_warp(reduce_rows, return_credits, reduce_rows)


@cuda.jit(device=True)
def reducing_block(comm, ring, arrivals, rows, channel):
    """One channel's reducing block."""
    start_receiver(comm, ring)
    if reduce_by_warp(comm, ring, arrivals, rows, channel):
        end_receives(comm, ring, arrivals, channel)


@cuda.jit
def combine_kernel(comm, ring, plan, arrivals, sent, reduced):
    """Send the rows of `sent` by `plan`, reduce what comes into `reduced`.

    Grid: 2 x num_channels blocks.
    """
    if load_i64(comm.state, STATE_VERDICT) != 0:
        return
    channel = block_id() // 2
    if block_id() % 2 == 0:
        sending_block(comm, ring, plan, sent, channel)
    else:
        reducing_block(comm, ring, arrivals, reduced, channel)
