"""A token on the wire: x row | scales | top-k ids | top-k weights, padded to 16 bytes.

The kernels know the order (`pack_row`, `unpack_row`); this module knows the size.
"""

from __future__ import annotations

SLOT_ALIGNMENT = 16
SCALE_GROUP = 128  # columns of an FP8 row that share a scale
SCALE_BYTES = 4  # float32
TOPK_ID_BYTES = 4  # int32, global expert ids
TOPK_WEIGHT_BYTES = 4  # float32


def slot_bytes(row_bytes: int, num_scales: int, num_topk: int) -> int:
    """Bytes of a slot for a row of `row_bytes` bytes with its scales and experts."""
    exact = (
        row_bytes
        + SCALE_BYTES * num_scales
        + (TOPK_ID_BYTES + TOPK_WEIGHT_BYTES) * num_topk
    )
    return -(-exact // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
