"""A row and its scales on their way between a user array and a slot."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numba_ep.device import WARP_SIZE, copy_row, cuda, lane_id, load_f32, store_f32


class Place(NamedTuple):
    """Addresses of a row and of its first scale; scales are `stride` elements apart."""

    x: int
    scales: int
    stride: int


@cuda.jit(device=True)
def in_slot(rows, slot):
    """Where a slot has a row like those of `rows`: the scales behind it."""
    return Place(slot, slot + rows.row_bytes, 1)


@cuda.jit(device=True)
def in_array(rows, row):
    """Where the user has row `row`."""
    first = rows.scales + 4 * row * rows.token_stride
    return Place(rows.x + row * rows.row_bytes, first, rows.scale_stride)


@cuda.jit(device=True)
def load_scale(place, i, num_scales):
    """Scale `i`, or 0 behind the last one."""
    if i < num_scales:
        return load_f32(place.scales, i * place.stride)
    return np.float32(0)


@cuda.jit(device=True)
def store_scale(place, i, num_scales, scale):
    """Keep scale `i`, if there is one."""
    if i < num_scales:
        store_f32(place.scales, i * place.stride, scale)


@cuda.jit(device=True)
def copy_with_scales(to, of, rows):
    """The lanes copy a row and its scales from one place to the other."""
    lane, count = lane_id(), rows.num_scales
    # The first ones are asked for before the row is copied: on a GPU each load that
    # waits for another one costs 0.6 us, in every row.
    scale_0 = load_scale(of, lane, count)
    scale_1 = load_scale(of, lane + WARP_SIZE, count)
    copy_row(to.x, of.x, rows.row_bytes)
    store_scale(to, lane, count, scale_0)
    store_scale(to, lane + WARP_SIZE, count, scale_1)
    for i in range(lane + 2 * WARP_SIZE, count, WARP_SIZE):
        store_scale(to, i, count, load_scale(of, i, count))
