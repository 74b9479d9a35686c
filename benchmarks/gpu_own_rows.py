"""The kernels without a link: rows that stay on their rank, beside a plain copy.

    python benchmarks/gpu_own_rows.py 4 8 12 20 24      numbers of SMs

One rank, DeepEP's sizes (4096 tokens, hidden 7168), one of eight calls in a row,
medians of 5. Dispatch moves every row twice, user array -> ring -> user array, and so
does combine; beside them, a kernel of as many SMs that copies as many rows twice. The
exchange of counts before each operation is in its time.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numba_ep
from numba_ep import device as devices
from numba_ep.group import members
from numba_ep.selfcheck import Sizes
from numba_ep.tuning import Tuner

SIZES = Sizes(4096, 7168, 8, 256, 0)
ROW_BYTES = {"fp8": 7168 + 4 * 56, "bf16": 2 * 7168}
IN_A_ROW, REPEATS = 8, 5


def make_copy() -> Any:
    """A kernel whose warps copy rows one after another, as those of a dispatch do."""
    device = devices.select("cuda")
    block_id, num_blocks = device.block_id, device.num_blocks
    warp_id, num_warps, copy_row = device.warp_id, device.num_warps, device.copy_row

    @device.cuda.jit(cache=False)
    def copy_rows(source: int, out: int, num_rows: int, row_bytes: int) -> None:
        first = block_id() * num_warps() + warp_id()
        for row in range(first, num_rows, num_blocks() * num_warps()):
            copy_row(out + row * row_bytes, source + row * row_bytes, row_bytes)

    return copy_rows


class Copies:
    """Times the copy of all rows of an operation, there and back."""

    def __init__(self) -> None:
        self.device = devices.select("cuda")
        self.runtime = self.device.make_runtime("copies", 0)
        size = SIZES.num_tokens * max(ROW_BYTES.values())
        self.memory = [self.runtime.allocate(size).address for _ in range(3)]
        self.kernel = make_copy()

    def time_us(self, num_sms: int, row_bytes: int) -> float:
        """Microseconds of rows -> ring -> rows."""
        warps, (rows, ring, back) = self.device.WARPS_PER_BLOCK, self.memory
        seconds = []
        for _ in range(REPEATS + 1):
            began = perf_counter()
            for _ in range(IN_A_ROW):
                for source, to in ((rows, ring), (ring, back)):
                    args = (source, to, SIZES.num_tokens, row_bytes)
                    self.runtime.launch(self.kernel, num_sms, warps, args)
            self.runtime.synchronize()
            seconds.append(perf_counter() - began)
        return statistics.median(seconds[1:]) / IN_A_ROW * 1e6


def main() -> None:
    """A line for each number of SMs."""
    comm = numba_ep.world()
    ranks = members(comm)
    copies = Copies()
    configs = []
    for text in sys.argv[1:] or ("8", "20"):
        chunk = 128 * 8 // int(text)
        capacity = 8 * chunk
        configs.append(numba_ep.Config(int(text), chunk, capacity, chunk, capacity))
    num_bytes = max(
        config.get_rdma_buffer_size_hint(2 * SIZES.hidden, 1, 8) for config in configs
    )
    with numba_ep.Buffer(
        comm, num_rdma_bytes=num_bytes, device="cuda",
        num_qps_per_rank=max(config.num_channels for config in configs),
    ) as buffer:  # fmt: skip
        tuner = Tuner(buffer, ranks, SIZES, True, REPEATS, IN_A_ROW)
        print("us, and of the copy's rate, %")
        names = ("dispatch fp8", "dispatch bf16", "combine bf16")
        print(" SMs" + "".join(f"{name:>18}" for name in names))
        for config in configs:
            cells = []
            for operation in ("fp8", "bf16", "combine"):
                took = (
                    tuner.combine(config) if operation == "combine"
                    else tuner.dispatch(operation, config)
                ).time_us  # fmt: skip
                row_bytes = ROW_BYTES["fp8" if operation == "fp8" else "bf16"]
                copied = copies.time_us(config.num_sms, row_bytes)
                cells.append(f"{took:9.0f}  {100 * copied / took:4.0f} %")
            line = "".join(f"{cell:>18}" for cell in cells)
            print(f"{config.num_sms:>4}{line}", flush=True)


if __name__ == "__main__":
    main()
