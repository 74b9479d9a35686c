"""The cast that goes before an FP8 dispatch."""

from __future__ import annotations

from typing import Any

from numba_ep.arrays import BFLOAT16, FLOAT8, ArgumentError, address, check, empty
from numba_ep.buffer import Buffer
from numba_ep.slot import SCALE_GROUP


def cast_to_fp8(x: Any, buffer: Buffer) -> tuple[Any, Any]:
    """x: [num_tokens, hidden] bfloat16, hidden a multiple of 128.

    Returns (x float8_e4m3fn, scales float32 [num_tokens, hidden / 128]), what
    `Buffer.dispatch` takes; x is about the first times its scale. The largest magnitude
    of a group of 128 becomes 448; groups below 1e-4 are scaled as if it were 1e-4. Runs
    on the threads or the GPU of `buffer`. Raises ValueError for another dtype or shape.
    """
    endpoint = buffer._endpoint
    endpoint.raise_if_ended()
    check("x", x, (BFLOAT16,), (None, None), endpoint.on_gpu)
    num_tokens, hidden = (int(n) for n in x.shape)
    if hidden % SCALE_GROUP:
        raise ArgumentError(
            f"x: expected hidden to be a multiple of {SCALE_GROUP}, got {hidden}"
        )
    from numba_ep.kernels.cast import cast_kernel

    num_scales = hidden // SCALE_GROUP
    cast = empty(x, (num_tokens, hidden), FLOAT8)
    scales = empty(x, (num_tokens, num_scales), "float32")
    args = (address(x), address(cast), address(scales), num_tokens * num_scales)
    blocks, warps = endpoint.device.CAST_GRID
    endpoint.run_local(x, cast_kernel, blocks, warps, args)
    return cast, scales
