"""One rank of a job whose rank 1 is killed in the middle of a dispatch; see `job`.

The others must raise, name rank 1, and be able to destroy their Buffers.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np

import numba_ep
from numba_ep import reference
from numba_ep.errors import BufferAborted

CULPRIT, ROUNDS, NOTICED_S = 1, 1000, 30.0


def main() -> None:
    """Prints what this rank saw."""
    group = numba_ep.world()
    rank, ranks = group.Get_rank(), group.Get_size()
    config = numba_ep.Config(4, 8, 16, 8, 16)
    num_bytes = config.get_rdma_buffer_size_hint(2 * 256, ranks, 4)
    buffer = numba_ep.Buffer(
        group, num_rdma_bytes=num_bytes, num_qps_per_rank=2, transport="verbs",
        timeout_s=2 * NOTICED_S,
    )  # fmt: skip
    x = np.full((32, 256), rank, reference.BF16)
    ids, weights = reference.random_topk(rank, 32, 4, 8 * ranks, 0)
    start = time.monotonic()
    try:
        for turn in range(ROUNDS):
            if rank == CULPRIT and turn == 3:
                kill = (os.getpid(), signal.SIGKILL)
                threading.Timer(0.01, os.kill, kill).start()
            start = time.monotonic()
            layout = buffer.get_dispatch_layout(ids, 8 * ranks)
            per_rank, _, per_expert, in_rank, _ = layout
            buffer.dispatch(
                x, None, per_rank, None, in_rank, per_expert, ids, weights,
                config=config,
            )  # fmt: skip
    except BufferAborted as error:
        took_s = time.monotonic() - start
        buffer.destroy()
        named = error.culprit == CULPRIT and took_s < NOTICED_S
        print(f"rank {rank} after {took_s:.1f} s: {error}", flush=True)
        print("noticed" if named else "WRONG", flush=True)


if __name__ == "__main__":
    main()
