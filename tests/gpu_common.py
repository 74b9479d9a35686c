"""What the checks on a real GPU share: the target, the list of checks, comparisons.

No kernel waits for longer than LIMIT_NS, so that a mistake ends in a failed check
rather than in a hang.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from numba_ep import device

d: Any = device
gpu: Any = device.select("cuda")

LANES = 32
LIMIT_NS = 3_000_000_000
BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
CHECKS: list[Callable[[Any], None]] = []


def check(fn: Callable[[Any], None]) -> Callable[[Any], None]:
    CHECKS.append(fn)
    return fn


def upload(run: Any, data: np.ndarray) -> int:
    """Address of a copy of `data` in GPU memory."""
    memory = run.allocate(data.nbytes)
    run.copy_from_host(memory, data)
    return int(memory.address)


def result(run: Any, memory: Any, kind: Any) -> np.ndarray:
    assert run.synchronize(20.0), "the kernel does not end"
    return run.copy_to_host(memory).view(kind)


def same(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape, f"shape {got.shape}, not {expected.shape}"
    wrong = np.flatnonzero(got != expected)
    if wrong.size:
        i = wrong[0]
        raise AssertionError(
            f"{wrong.size} differ; [{i}] is {got[i]}, not {expected[i]}"
        )


@d.cuda.jit(device=True)
def wait_for(word: int, value: int) -> bool:
    since = d.clock_ns()
    spins = 0
    while d.ld_relaxed(word, 0) < value:
        d.relax(spins)
        spins += 1
        if d.clock_ns() - since > LIMIT_NS:
            return False
    d.fence()
    return True
