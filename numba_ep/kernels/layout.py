"""Layout: top-k expert ids -> how many tokens go to each rank and to each expert.

The first step of a token's journey, local to its rank. One block: every warp counts a
share of the tokens, and the block meets before and after.
"""

from __future__ import annotations

from numba_ep.device import (
    WARP_SIZE,
    add_i32,
    block_sync,
    cuda,
    lane_id,
    ld_acquire_block,
    load_i64,
    load_u8,
    num_warps,
    st_release_block,
    store_i32,
    store_u8,
    warp_id,
)


@cuda.jit(device=True)
def count_token(arrays, token):
    """Count one token once a rank and once an expert."""
    ranks = arrays.num_ranks
    experts_per_rank = arrays.num_experts // ranks
    for rank in range(ranks):
        store_u8(arrays.is_token_in_rank, token * ranks + rank, 0)
    for k in range(arrays.num_topk):
        expert = load_i64(arrays.topk_idx, token * arrays.num_topk + k)
        if expert < -1 or expert >= arrays.num_experts:
            st_release_block(arrays.invalid, 0, 1)
        elif expert >= 0:
            add_i32(arrays.tokens_per_expert, expert, 1)
            at = token * ranks + expert // experts_per_rank
            if load_u8(arrays.is_token_in_rank, at) == 0:
                store_u8(arrays.is_token_in_rank, at, 1)
                add_i32(arrays.tokens_per_rank, expert // experts_per_rank, 1)


@cuda.jit(device=True)
def fill(arrays, first, step, count):
    """Set every count to `count`."""
    for rank in range(first, arrays.num_ranks, step):
        store_i32(arrays.tokens_per_rank, rank, count)
    for expert in range(first, arrays.num_experts, step):
        store_i32(arrays.tokens_per_expert, expert, count)


@cuda.jit
def layout_kernel(arrays):
    """One block. An id outside [-1, num_experts) turns every count into -1, which
    dispatch refuses: such a token is never routed anywhere."""
    first = warp_id() * WARP_SIZE + lane_id()
    step = num_warps() * WARP_SIZE
    fill(arrays, first, step, 0)
    if first == 0:
        st_release_block(arrays.invalid, 0, 0)
    block_sync()
    for token in range(first, arrays.num_tokens, step):
        count_token(arrays, token)
    block_sync()
    if ld_acquire_block(arrays.invalid, 0) != 0:
        fill(arrays, first, step, -1)
        for i in range(first, arrays.num_tokens * arrays.num_ranks, step):
            store_u8(arrays.is_token_in_rank, i, 0)
