"""Every name of `numba_ep.device` on a real GPU, and what a launch and a row cost.

    python tests/gpu_device_names.py            all checks, then the timings
    python tests/gpu_device_names.py words      only checks with "words" in the name

One line a check; the exit status is 1 if one fails.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from typing import Any

import numpy as np
from gpu_common import CHECKS, LANES, check, d, gpu, result, same, upload
from gpu_timings import copy_bandwidth, launch_cost

for module in ("gpu_numbers", "gpu_words", "gpu_runtime"):
    importlib.import_module(module)  # registers its checks


@d.cuda.jit
def places_kernel(out: int) -> None:
    thread = (d.block_id() * d.num_warps() + d.warp_id()) * d.WARP_SIZE + d.lane_id()
    d.store_i64(out, 5 * thread, d.lane_id())
    d.store_i64(out, 5 * thread + 1, d.warp_id())
    d.store_i64(out, 5 * thread + 2, d.block_id())
    d.store_i64(out, 5 * thread + 3, d.num_warps())
    d.store_i64(out, 5 * thread + 4, d.num_blocks())


@check
def places(run: Any) -> None:
    blocks, warps = 3, 5
    out = run.allocate(blocks * warps * LANES * 40)
    run.launch(places_kernel, blocks, warps, (out.address,))
    got = result(run, out, np.int64).reshape(blocks, warps, LANES, 5)
    block, warp, lane = np.indices((blocks, warps, LANES))
    full = np.ones_like(lane)
    expected = np.stack([lane, warp, block, warps * full, blocks * full], axis=-1)
    same(got.ravel(), expected.ravel())


@d.cuda.jit
def lanes_kernel(values: int, out: int) -> None:
    lane = d.lane_id()
    value = d.load_i64(values, lane)
    small = np.int32(d.load_i32(values, 2 * lane))
    flag = value % 3 == 0
    d.store_i64(out, lane, d.warp_sum(value))
    d.store_i64(out, 32 + lane, d.warp_max(value))
    d.store_i64(out, 64 + lane, d.warp_sum(small))
    d.store_i64(out, 96 + lane, d.warp_max(small))
    d.store_i64(out, 128 + lane, d.warp_broadcast(value))
    d.store_i64(out, 160 + lane, 1 if d.warp_any(flag) else 0)
    d.store_i64(out, 192 + lane, 1 if d.warp_any(value == 1 << 62) else 0)
    d.store_i64(out, 224 + lane, d.warp_count_below(flag))
    d.store_i64(out, 256 + lane, d.warp_broadcast(small))


@check
def warp_functions(run: Any) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values = rng.integers(-(1 << 57), 1 << 57, LANES, np.int64)
        out = run.allocate(9 * 256)
        run.launch(lanes_kernel, 1, 1, (upload(run, values), out.address))
        small = values.view(np.int32)[::2]
        flags = values % 3 == 0
        below = np.cumsum(flags) - flags
        rows = [values.sum(), values.max(), small.sum(dtype=np.int32), small.max()]
        rows += [values[0], flags.any(), False, below, small[0]]
        expected = np.stack([np.broadcast_to(np.int64(r), LANES) for r in rows])
        same(result(run, out, np.int64), expected.ravel())


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    run = gpu.make_runtime("test", 0)
    failed = 0
    for test in CHECKS:
        if wanted not in test.__name__:
            continue
        started = time.perf_counter()
        try:
            test(run)
            outcome = "ok"
        except Exception:  # noqa: BLE001 - the other checks still run
            failed += 1
            outcome = f"FAILED\n{traceback.format_exc()}"
        seconds = time.perf_counter() - started
        print(f"{test.__name__:52} {seconds:6.2f} s  {outcome}", flush=True)
    if not wanted:
        launch_cost(run)
        copy_bandwidth(run)
    run.close()
    print(f"{failed} checks failed" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
