"""GB/s over configs, one rank a GPU: which SMs, rings and chunks carry the link.

    mpirun -np 2 python benchmarks/gpu_sweep.py 8:1024:128 20:400:50 ...

Each argument is num_sms:capacity:chunk. DeepEP's sizes (4096 tokens, hidden 7168, top-8
of 256 experts); medians of 10, cached dispatch and combine: a call alone, and one of
eight in a row, whose host time hides behind the call before. Wire counts what goes to
other ranks, algorithm the rows that stay as well.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numba_ep
from numba_ep import device as devices
from numba_ep.group import members
from numba_ep.meeting import use_local_gpu
from numba_ep.selfcheck import Sizes
from numba_ep.tuning import Tuner

SIZES = Sizes(4096, 7168, 8, 256, 0)
REPEATS = 10


def main() -> None:
    """Time every config; a line each."""
    comm = numba_ep.world()
    ranks = members(comm)
    use_local_gpu(ranks, devices.select("cuda"))
    configs = []
    for text in sys.argv[1:]:
        num_sms, capacity, chunk = (int(part) for part in text.split(":"))
        configs.append(numba_ep.Config(num_sms, chunk, capacity, chunk, capacity))
    num_bytes = max(
        config.get_rdma_buffer_size_hint(2 * SIZES.hidden, ranks.num_ranks, 8)
        for config in configs
    )
    most = max(config.num_channels for config in configs)
    with numba_ep.Buffer(
        comm, num_rdma_bytes=num_bytes, num_qps_per_rank=most, device="cuda"
    ) as buffer:
        alone = Tuner(buffer, ranks, SIZES, True, REPEATS)
        in_a_row = Tuner(buffer, ranks, SIZES, True, REPEATS, calls_in_a_row=8)
        if ranks.rank == 0:
            head = f"{'us alone':>9}{'in a row':>9}{'wire':>6}{'algorithm':>11}"
            print(
                f"{'':<12}{'dispatch fp8':>35}{'dispatch bf16':>35}{'combine bf16':>35}"
            )
            print(f"{'':<12}" + 3 * head)
        for config in configs:
            parts = []
            for operation in ("fp8", "bf16", "combine"):
                one, many = (
                    tuner.combine(config) if operation == "combine"
                    else tuner.dispatch(operation, config)
                    for tuner in (alone, in_a_row)
                )  # fmt: skip
                parts.append(
                    f"{one.time_us:9.0f}{many.time_us:9.0f}{many.wire_gbps:6.1f}"
                    f"{many.algorithm_gbps:11.1f}"
                )
            if ranks.rank == 0:
                shape = f"{config.num_sms}:{config.capacity}:{config.chunk}"
                print(f"{shape:<12}" + "".join(parts), flush=True)


if __name__ == "__main__":
    main()
