"""bfloat16 rows -> e4m3 rows with one float32 scale per 128 columns.

Each warp takes one group of 128 after another. Before dispatch: its output is what
`Buffer.dispatch` takes as `(x, scales)`.
"""

from __future__ import annotations

import numpy as np

from numba_ep.device import (
    WARP_SIZE,
    block_id,
    cuda,
    lane_id,
    load_bf16,
    load_bf16_magnitude,
    magnitude_to_f32,
    num_blocks,
    num_warps,
    store_e4m3,
    store_f32,
    warp_id,
    warp_max,
)
from numba_ep.slot import SCALE_GROUP

# float32 on purpose: a Python float would make the scales float64 and change bytes.
E4M3_MAX = np.float32(448.0)
SMALLEST_AMAX = np.float32(1e-4)


@cuda.jit
def cast_kernel(x: int, out: int, scales: int, num_groups: int) -> None:
    """x: address of bfloat16 groups; out: of e4m3; scales: of float32 [num_groups]."""
    lane = lane_id()
    warps = num_blocks() * num_warps()
    for group in range(block_id() * num_warps() + warp_id(), num_groups, warps):
        first = group * SCALE_GROUP
        largest = np.int32(0)
        for i in range(lane, SCALE_GROUP, WARP_SIZE):
            largest = max(largest, load_bf16_magnitude(x, first + i))
        amax = max(magnitude_to_f32(warp_max(largest)), SMALLEST_AMAX)
        store_f32(scales, group, amax / E4M3_MAX)
        factor = E4M3_MAX / amax
        for i in range(lane, SCALE_GROUP, WARP_SIZE):
            store_e4m3(out, first + i, load_bf16(x, first + i) * factor)
