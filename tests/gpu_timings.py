"""What a launch and a row cost on a real GPU (see gpu_device_names.py)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from gpu_common import d, gpu
from gpu_runtime import records, records_kernel

from numba_ep.device.cuda_rows import copier


def median_us(fn: Callable[[], None], times: int = 1000) -> float:
    samples = []
    for _ in range(times):
        started = time.perf_counter()
        fn()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples) * 1e6


def launch_cost(run: Any) -> None:
    out = run.allocate(8)
    args = records(out.address)

    def ours() -> None:
        run.launch(records_kernel, 1, 1, args)
        if not run.synchronize(5.0):
            raise TimeoutError

    def without_waiting() -> None:
        run.launch(records_kernel, 1, 1, args)

    print(f"launch of 40 arguments, and its end: {median_us(ours):.1f} us")
    print(f"a look whether all has ended: {median_us(run.synchronize):.1f} us")
    costs = []
    for _ in range(10):
        costs.append(median_us(without_waiting, 100))
        run.synchronize()
    print(f"launch of 40 arguments alone: {statistics.median(costs):.1f} us")
    stream = gpu.numba.cuda.external_stream(run.stream)
    configured = records_kernel[1, 32, stream]
    theirs = median_us(lambda: configured(*args), 100)
    run.synchronize()
    print(f"the same through numba-cuda's dispatcher: {theirs:.1f} us")


def copy_rows_with(unroll: int) -> Any:
    """A kernel whose warps copy rows one after another."""
    copy = copier(unroll)

    @d.cuda.jit(cache=False, launch_bounds=(512, 1))
    def rows_kernel(source: int, out: int, num_rows: int, row_bytes: int) -> None:
        first = d.block_id() * d.num_warps() + d.warp_id()
        for i in range(first, num_rows, d.num_blocks() * d.num_warps()):
            copy(out + i * row_bytes, source + i * row_bytes, row_bytes)

    return rows_kernel


def copy_bandwidth(run: Any) -> None:
    total = 1 << 29
    source, out = run.allocate(total), run.allocate(total)
    pinned = run.allocate_host(1 << 28)
    print(
        "GB/s read by copy_row: rows of 7424 bytes within GPU memory, and from pinned"
    )
    print(
        f"{'blocks x warps':>16}" + "".join(f"{f'unroll {u}':>18}" for u in (4, 8, 16))
    )
    kernels = [copy_rows_with(unroll) for unroll in (4, 8, 16)]
    grids = [(4, 8), (4, 16), (12, 8), (12, 16), (20, 8), (20, 16), (24, 16), (132, 8)]
    for blocks, warps in grids:
        cells = []
        for kernel in kernels:
            speeds = []
            for memory, size in ((source, total), (pinned, 1 << 28)):
                if blocks > 24 and memory is pinned:
                    continue
                count = size // 7424 // (1 if memory is source else 2)
                args = (memory.address, out.address, count, 7424)
                seconds = []
                for _ in range(4):
                    run.synchronize()
                    started = time.perf_counter()
                    run.launch(kernel, blocks, warps, args)
                    if not run.synchronize(10.0):
                        raise TimeoutError
                    seconds.append(time.perf_counter() - started)
                speeds.append(
                    f"{count * 7424 / statistics.median(seconds[1:]) / 1e9:.0f}"
                )
            cells.append(" / ".join(speeds))
        print(f"{f'{blocks} x {warps}':>16}" + "".join(f"{c:>18}" for c in cells))
