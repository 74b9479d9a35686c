"""Float32 sums of bfloat16 rows, many groups of a lane at once."""

from __future__ import annotations

from numba_ep.device import (
    WARP_SIZE,
    add_bf16x8,
    cuda,
    splat_f32x8,
    store_bf16x8,
)

GROUP_BYTES = 16  # eight bfloat16

# Groups of a lane that are on their way at once: one load after the other would wait
# for each of them, 0.6 us within a GPU and 2 us over PCIe. Twice seven are half of
# a row of 7168.
SEVEN = 7 * WARP_SIZE


@cuda.jit(device=True)
def splat_x7(value):
    """Seven groups of a lane, all of `value`."""
    one = splat_f32x8(value)
    return one, one, one, one, one, one, one


@cuda.jit(device=True)
def add_x7(totals, row, group):
    """`totals` plus seven groups of a lane."""
    return (
        add_bf16x8(totals[0], row, group),
        add_bf16x8(totals[1], row, group + WARP_SIZE),
        add_bf16x8(totals[2], row, group + 2 * WARP_SIZE),
        add_bf16x8(totals[3], row, group + 3 * WARP_SIZE),
        add_bf16x8(totals[4], row, group + 4 * WARP_SIZE),
        add_bf16x8(totals[5], row, group + 5 * WARP_SIZE),
        add_bf16x8(totals[6], row, group + 6 * WARP_SIZE),
    )


@cuda.jit(device=True)
def store_x7(row, group, totals):
    """Round and store seven groups of a lane."""
    store_bf16x8(row, group, totals[0])
    store_bf16x8(row, group + WARP_SIZE, totals[1])
    store_bf16x8(row, group + 2 * WARP_SIZE, totals[2])
    store_bf16x8(row, group + 3 * WARP_SIZE, totals[3])
    store_bf16x8(row, group + 4 * WARP_SIZE, totals[4])
    store_bf16x8(row, group + 5 * WARP_SIZE, totals[5])
    store_bf16x8(row, group + 6 * WARP_SIZE, totals[6])
