"""Peak memory of a rank beside its arrays and rings.

mpirun -np 4 python benchmarks/peak_memory.py
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import ml_dtypes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numba_ep
from numba_ep import reference

NUM_TOKENS, HIDDEN, NUM_TOPK, NUM_EXPERTS = 512, 2048, 8, 64
ROUNDS = 5


def main() -> None:
    """Run some rounds and print bytes in MB (1e6 bytes) for every rank."""
    comm = numba_ep.world()
    rank, num_ranks = comm.Get_rank(), comm.Get_size()
    config = numba_ep.Buffer.get_dispatch_config(num_ranks)
    num_bytes = config.get_rdma_buffer_size_hint(2 * HIDDEN, num_ranks, NUM_TOPK)
    topk_idx, weights = reference.random_topk(rank, NUM_TOKENS, NUM_TOPK, NUM_EXPERTS)
    x = reference.unique_rows(rank, NUM_TOKENS, HIDDEN, ml_dtypes.bfloat16)
    with numba_ep.Buffer(comm, num_rdma_bytes=num_bytes) as buffer:
        layout = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
        per_rank, _, per_expert, in_rank, _ = layout
        for _ in range(ROUNDS):
            recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(
                x, None, per_rank, None, in_rank, per_expert, topk_idx, weights
            )
            assert handle is not None
            combined, _, _ = buffer.combine(recv_x, handle, recv_weights)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    known = x.nbytes + recv_x.nbytes + combined.nbytes + num_bytes
    print(
        f"rank {rank}: peak {peak / 1e6:.0f} MB, arrays and rings "
        f"{known / 1e6:.0f} MB, the rest {(peak - known) / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
