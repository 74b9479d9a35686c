"""One clock for all ranks and their kernels: rank 0's CLOCK_MONOTONIC, in ns.

What two clocks show at the same moment differs by an offset that lies between two
bounds, since nothing is read before it was written. Where the bounds leave 0 possible,
the clocks are taken for one and the same: that of ranks on one host, and of kernels on
its CPU.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from numba_ep.group import Members

ROUNDS = 10


class Offset(NamedTuple):
    """What to add to a time of one clock for the other's; right to +- error_ns."""

    ns: int
    error_ns: int


def between(low: int, high: int) -> Offset:
    """The offset that lies between the two bounds."""
    if low <= 0 <= high:
        return Offset(0, 0)
    return Offset((low + high) // 2, abs(high - low) // 2)


def of_kernels(endpoint: Any, word: Any) -> Offset:
    """From the kernels' clock to the host's. word: memory that both see."""
    from numba_ep.kernels.tracing import clock_kernel

    low, high = -(1 << 62), 1 << 62
    runtime, warps = endpoint.runtime, endpoint.device.ONE_BLOCK_WARPS
    for _ in range(ROUNDS):
        before = time.monotonic_ns()
        runtime.launch_local(clock_kernel, 1, warps, (word.address,))
        runtime.synchronize()
        after = time.monotonic_ns()
        read = int(word.host.view(np.int64)[0])
        # The kernel's clock was read after `before` and before `after`.
        low, high = max(low, before - read), min(high, after - read)
    return between(low, high)


def of_rank(members: Members) -> Offset:
    """From this rank's clock to that of rank 0. Collective."""
    times = []
    for _ in range(ROUNDS):
        sent = time.monotonic_ns()
        members.allgather(None)
        times.append((sent, time.monotonic_ns()))
    # No rank has all answers before every rank has sent its own.
    first = np.array(members.allgather(times)[0])
    own = np.array(times)
    low = int((first[:, 0] - own[:, 1]).max())
    high = int((first[:, 1] - own[:, 0]).min())
    return between(low, high)
