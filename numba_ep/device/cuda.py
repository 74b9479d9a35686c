"""The `cuda` target: kernels compiled by numba-cuda, a warp is 32 lanes of a GPU.

Nothing else in the project imports numba.cuda, so that a successor can replace it.
Importing this module creates no CUDA context.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numba.cuda
from numba.core import config

import numba_ep
import transport
from numba_ep.device.cores import warn_of_one_core
from numba_ep.device.cuda_ir import (
    LANES,
    add_release_block,
    atomic_add,
    block_id,
    block_sync,
    clock_ns,
    compare_and_swap,
    fence,
    lane_id,
    ld_acquire,
    ld_acquire_block,
    ld_relaxed,
    nap,
    num_blocks,
    num_warps,
    st_release,
    st_release_block,
    warp_id,
    warp_sync,
)
from numba_ep.device.cuda_lanes import (
    warp_any,
    warp_broadcast,
    warp_count_below,
    warp_max,
    warp_sum,
)
from numba_ep.device.cuda_rows import (
    add_bf16x8,
    copy_row,
    splat_f32x8,
    store_bf16x8,
    store_e4m3,
)
from numba_ep.device.cuda_runtime import Runtime, load
from numba_ep.device.memory_ir import (
    add_i32,
    load_bf16,
    load_bf16_magnitude,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    magnitude_to_f32,
    store_f32,
    store_i32,
    store_i64,
    store_u8,
)
from transport.jit import cache_folder

st_release_host = st_release  # the proxy polls

SPINS_PER_CHECK = 64
WARP_SIZE = LANES
# Seven that move rows and their coordinator. Four blocks of 8 warps
# already read pinned host memory at the 50 GB/s that PCIe gives, and twelve copy rows
# within the GPU at 448 GB/s (H200). 16 would move more on few SMs, but leave 128
# registers a thread, and dispatch and combine want 140.
WARPS_PER_BLOCK = 8
CAST_GRID = (264, WARPS_PER_BLOCK)
ONE_BLOCK_WARPS = WARPS_PER_BLOCK  # of layout and notify

_folder = cache_folder(
    "numba_ep-cuda",
    Path(numba_ep.__file__ or "").parent,
    Path(transport.__file__ or "").parent,
)


def jit(fn: Any = None, *, device: bool = False, **options: Any) -> Any:
    """`@cuda.jit` for kernels, `@cuda.jit(device=True)` for their helpers."""
    if fn is None:
        return lambda f: jit(f, device=device, **options)
    # lto=False: a kernel and its helpers are compiled as one program anyway, and what
    # runs is the PTX that the tests look at.
    options = {"lto": False, **options}
    if device:
        return numba.cuda.jit(fn, device=True, **options)
    options = {
        "cache": _folder is not None,
        # Known to the compiler, so that a full block always fits on an SM.
        "launch_bounds": (WARPS_PER_BLOCK * WARP_SIZE, 1),
        **options,
    }
    # Read where the function is decorated: lent for that moment only, so that the
    # caches of other packages stay where they are.
    saved, config.CACHE_DIR = config.CACHE_DIR, _folder or ""
    try:
        return numba.cuda.jit(fn, **options)
    finally:
        config.CACHE_DIR = saved


# `from numba_ep.device import cuda` finds this module, the package's own submodule: it
# is what stands in for `numba.cuda`.
cuda = sys.modules[__name__]

SPINS_BEFORE_NAP = 32
NAP_NS = 64


@jit(device=True)
def relax(spins: int) -> None:
    """Called in a waiting loop with the number of turns so far."""
    # What is due at once arrives within a few loads (0.6-2 us each). After that a nap
    # leaves issue slots to the warps that copy, at less than one load's latency.
    if spins >= SPINS_BEFORE_NAP:
        nap(NAP_NS)


def compile_kernel(kernel: Any, args: tuple[Any, ...]) -> None:
    """Have `kernel(*args)` compiled and in GPU memory before it is needed."""
    load(kernel, args)


def make_runtime(name: str, num_threads: int) -> Runtime:
    """Stream and memory for one Buffer, on the calling thread's current device."""
    warn_of_one_core(name)
    return Runtime(name, num_threads)


def use_gpu(index: int) -> None:
    """Have the calling thread work on GPU `index` of this host, counted round."""
    import cupy

    cupy.cuda.Device(index % cupy.cuda.runtime.getDeviceCount()).use()
