"""On GPUs: a peer that is killed in mid-traffic ends the Buffer, not the CUDA context.

    python tests/gpu_killed_peer.py     one GPU will do; two are better

Two processes in a torch process group: mpirun would end both. Rank 1 kills itself while
both dispatch. Rank 0 must raise, name it, compute on, and leave nothing in /dev/shm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

LIMIT_S = 60.0
TIMEOUT_S = 5.0
TOKENS, HIDDEN, EXPERTS = 512, 7168, 16
LEFT = f"numba_ep-{os.getuid()}-*"


def rank_main(rank: int, meeting: str) -> None:
    """One rank: dispatch until the end."""
    import cupy
    from torch import distributed

    import numba_ep
    from numba_ep.arrays import from_host
    from numba_ep.reference import BF16, random_topk, unique_rows

    cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    config = numba_ep.Buffer.get_dispatch_config(2)
    buffer = numba_ep.Buffer(
        distributed.group.WORLD, device="cuda", timeout_s=TIMEOUT_S,
        num_rdma_bytes=config.get_rdma_buffer_size_hint(2 * HIDDEN, 2),
    )  # fmt: skip
    x = from_host(unique_rows(rank, TOKENS, HIDDEN, BF16), True)
    topk_idx = from_host(random_topk(rank, TOKENS, 4, EXPERTS)[0], True)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    handle = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert)[4]
    if rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        while time.monotonic() - began < LIMIT_S:
            buffer.dispatch(x, handle, async_finish=True)[-1].current_stream_wait()
    except numba_ep.BufferAborted as error:
        took = time.monotonic() - began
        assert error.culprit == 1, error
        assert int(cupy.arange(1000).sum()) == 499500
        assert np.array_equal(cupy.asnumpy(x.view(np.uint8)), x.view(np.uint8).get())
        buffer.destroy()
        print(f"after {took:.1f} s: {type(error).__name__}: {error}", flush=True)
        os._exit(0)  # the process group cannot be left in good order any more
    raise AssertionError("nothing was raised")


def main() -> int:
    """Start both ranks, wait for the one that lives."""
    if len(sys.argv) == 3:
        rank_main(int(sys.argv[1]), sys.argv[2])
        return 0
    before = set(Path("/dev/shm").glob(LEFT))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen([sys.executable, __file__, str(rank), f"{folder}/meet"])
            for rank in range(2)
        ]
        survivor = ranks[0].wait(2 * LIMIT_S)
        killed = ranks[1].wait(5.0)
    left = set(Path("/dev/shm").glob(LEFT)) - before
    print(f"exit codes {survivor} and {killed}, left in /dev/shm: {len(left)}")
    passed = survivor == 0 and killed == -signal.SIGKILL and not left
    print("all checks passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
