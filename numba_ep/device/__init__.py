"""The machine that kernels are written for: one set of names, three meanings.

    target   compiled by          a warp is                  for
    cuda     numba-cuda           32 lanes                   GPUs
    cpu      numba (nogil)        one OS thread, 1 lane      any machine
    python   nothing              one Python thread, 1 lane  breakpoint() in a kernel

Kernels import their names from here and never ask which target it is. The first Buffer
(or `select`) picks the target for the whole process; `NUMBA_EP_DEVICE` = auto, cuda or
cpu sets it from outside, and `NUMBA_DISABLE_JIT=1` turns cpu into python.

Who and where (all counts are int64):
    lane_id() warp_id() block_id() num_warps() num_blocks() WARP_SIZE
Lanes of a warp:
    warp_sync() warp_sum(n) warp_max(n) warp_any(flag) warp_broadcast(n) [of lane 0]
    warp_count_below(flag): how many lower lanes have the flag
Warps of a block:
    block_sync(): only before a kernel's first wait
    ld_acquire_block(base, i) st_release_block(base, i, n) add_release_block(base, i, n)
The whole system (other blocks, the host, the NIC):
    ld_relaxed(base, i) ld_acquire(base, i) st_release(base, i, n) fence()
    st_release_host(base, i, n): the same where the host's proxy waits for the word
    atomic_add(base, i, n) compare_and_swap(base, i, expected, n): among blocks
Words are int64 at `base + 8 * i`. Plain memory, `i` counting elements:
    load_i64 store_i64 load_i32 store_i32 load_u8 store_u8 load_f32 store_f32
    add_i32(base, i, n): atomic among the warps of a kernel, orders nothing
    copy_row(destination, source, num_bytes): addresses; the lanes share the bytes
Numbers:
    load_bf16(base, i) -> float32; load_bf16_magnitude(base, i) -> int32, |x| as bits
    magnitude_to_f32(int32) -> float32; store_e4m3(base, i, float32), clipped to 448
    splat_f32x8(float32) add_bf16x8(sum, base, group)
    store_bf16x8(base, group, sum): eight bfloat16 of a 16-byte group as float32
Time:
    clock_ns() relax(spins) SPINS_PER_CHECK: turns of a waiting loop between two looks
    at the clock and the abort word
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any, NamedTuple

DEVICES = ("auto", "cuda", "cpu")
VARIABLE = "NUMBA_EP_DEVICE"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"

_chosen: ModuleType | None = None


def cuda_is_there() -> bool:
    """Whether a CUDA driver with a visible GPU is here; creates no context.

    Asks for all hardware queues of a GPU, where the environment says nothing of them.
    """
    import ctypes

    # CUDA reads this in cuInit. Kernels of several ranks on one GPU wait for each
    # other: two streams that share one of the (by default 8) queues would make one
    # kernel stand behind the very kernel that waits for it.
    os.environ.setdefault(QUEUES, "32")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    started = driver.cuInit(0) == 0
    return started and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 < count.value


def wanted_target(device: str | None = None) -> str:
    """cuda, cpu or python for `device`, else for the environment's setting.

    Raises ValueError for an unknown name, RuntimeError for cuda without a GPU.
    """
    wanted = device or os.environ.get(VARIABLE) or "auto"
    if wanted not in DEVICES:
        origin = "device" if device else VARIABLE
        expected = ", ".join(DEVICES)
        raise ValueError(f"{origin}: expected one of {expected}, got {wanted!r}")
    if wanted != "cpu" and cuda_is_there():
        return "cuda"
    if wanted == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        raise RuntimeError(
            "device: cuda was asked for, but there is no CUDA driver with a visible "
            f"GPU (CUDA_VISIBLE_DEVICES={visible}); use device='cpu' or {VARIABLE}=cpu"
        )
    from transport.jit import JIT_DISABLED

    return "python" if JIT_DISABLED else "cpu"


class Defaults(NamedTuple):
    """What configs are made of: SMs an operation, slots of all rings together."""

    num_sms: int
    ring_slots: int


_DEFAULTS = {
    "cpu": Defaults(2, 2048),
    "python": Defaults(2, 2048),
    # Between two H200 more SMs are slower: their waiting warps slow down what all
    # others tell the host. A copy engine wants chunks of 500 KB (docs/performance.md).
    "cuda": Defaults(8, 8192),
}


def defaults() -> Defaults:
    """Of the selected target, else of the one that would be; asking selects none."""
    return _DEFAULTS[target() or wanted_target()]


def check_queues(num_ranks: int) -> None:
    """Raise ValueError where a GPU has too few hardware queues for a process's ranks.

    CUDA deals its streams to the queues, and what is in one runs in order. With two
    queues a rank no kernel or copy was seen to stand behind a kernel that waits for it;
    with one a rank they do, with one rank as with eight.
    """
    queues = os.environ.get(QUEUES, "8")  # CUDA's own default
    if target() == "cuda" and queues.isdecimal() and int(queues) < 2 * num_ranks:
        raise ValueError(
            f"{QUEUES}: expected at least {2 * num_ranks}, two for each of the "
            f"{num_ranks} ranks of this process, got {queues}; leave it unset, or set "
            "it before CUDA starts; 32 is the most"
        )


def select(device: str | None = None) -> ModuleType:
    """The target's module; the first call decides for the process.

    Raises RuntimeError where a later call names another device.
    """
    global _chosen
    if _chosen is None:
        _chosen = importlib.import_module(f"{__name__}.{wanted_target(device)}")
    elif device not in (None, "auto") and wanted_target(device) != target():
        raise RuntimeError(
            f"device: this process already runs on {target()!r}, got {device!r}; a "
            f"process has one device: set {VARIABLE} before the first Buffer"
        )
    return _chosen


def target() -> str | None:
    """cuda, cpu or python; None as long as nothing is selected."""
    return None if _chosen is None else _chosen.__name__.rpartition(".")[2]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(select(), name)
