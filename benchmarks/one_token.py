"""Host time of the smallest operations: one token a rank, cached dispatch and combine.

    python benchmarks/one_token.py [ranks]

Ranks are threads of one process (4 unless told). Every round begins after a barrier;
printed are the median and the 90th percentile of rank 0 over 200 rounds, in ms.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np

# The package of this source tree, also where it is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numba_ep

HIDDEN, NUM_EXPERTS, NUM_TOPK = 2048, 64, 8
NUM_ROUNDS = 200


def measure(group: Any) -> np.ndarray:
    """Seconds, [2, NUM_ROUNDS]: cached dispatch, combine."""
    num_ranks, rank = group.Get_size(), group.Get_rank()
    config = numba_ep.Buffer.get_dispatch_config(num_ranks)
    num_bytes = config.get_rdma_buffer_size_hint(2 * HIDDEN, num_ranks)
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((1, HIDDEN)).astype(ml_dtypes.bfloat16)
    topk_idx = rng.permutation(NUM_EXPERTS)[None, :NUM_TOPK].astype(np.int64)
    seconds = np.empty((2, NUM_ROUNDS))
    with numba_ep.Buffer(group, num_rdma_bytes=num_bytes) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(
            topk_idx, NUM_EXPERTS
        )
        handle = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )[4]
        assert handle is not None
        for i in range(NUM_ROUNDS):
            group.Barrier()
            began = perf_counter()
            received = buffer.dispatch(x, handle=handle)[0]
            seconds[0, i] = perf_counter() - began
            group.Barrier()
            began = perf_counter()
            buffer.combine(received, handle)
            seconds[1, i] = perf_counter() - began
    return seconds


def main() -> None:
    """Measure and print."""
    num_ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    ms = numba_ep.spawn(measure, num_ranks)[0] * 1e3
    for name, row in zip(("cached dispatch", "combine"), ms, strict=True):
        median, late = np.percentile(row, [50, 90])
        print(f"{name:16} median {median:.2f} ms, 90 % below {late:.2f} ms")


if __name__ == "__main__":
    main()
