"""Launches, streams and clocks on a real GPU (see gpu_device_names.py)."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import numpy as np
from gpu_common import check, d, gpu, result, same, wait_for

from numba_ep.kernels.cast import cast_kernel


@d.cuda.jit
def busy_kernel(nanoseconds: int, out: int) -> None:
    since = d.clock_ns()
    spins = 0
    while d.clock_ns() - since < nanoseconds:
        d.relax(spins)
        spins += 1
    if d.lane_id() == 0:
        d.store_i64(out, 0, d.clock_ns() - since)
        d.store_i64(out, 1, spins)


@check
def clock_and_bounded_synchronize(run: Any) -> None:
    out = run.allocate(16)
    run.launch(busy_kernel, 1, 1, (0, out.address))
    assert run.synchronize(5.0)
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    started = time.perf_counter()
    run.launch(busy_kernel, 1, 1, (500_000_000, out.address))
    assert not run.synchronize(0.1), "synchronize did not give up"
    assert time.perf_counter() - started < 0.2
    assert run.synchronize(5.0)
    took = time.perf_counter() - started
    stop.set()
    thread.join()
    assert 0.49 < took < 0.7, took
    assert counted > 50, f"another thread ran only {counted} times"
    got = result(run, out, np.int64)
    print(f"        a turn of relax and clock_ns: {got[0] / got[1]:.0f} ns")


@d.cuda.jit
def meet_kernel(word: int, expected: int, wrong: int) -> None:
    if d.lane_id() == 0:
        d.atomic_add(word, 0, 1)
    if d.warp_any(not wait_for(word, expected)):
        d.atomic_add(wrong, 0, 1)


@check
def streams_run_at_once(run: Any) -> None:
    # Each kernel ends only when all have begun.
    count = 24
    word, wrong = run.allocate(8), run.allocate(8)
    others = [gpu.make_runtime(f"rank {i}", 0) for i in range(count)]
    for other in others:
        other.launch(meet_kernel, 1, 1, (word.address, count, wrong.address))
    for other in others:
        assert other.synchronize(20.0)
        other.close()
    same(result(run, wrong, np.int64), np.zeros(1, np.int64))


class Twelve(NamedTuple):
    a: int
    b: int
    c: int
    d: int
    e: int
    f: int
    g: int
    h: int
    i: int
    j: int
    k: int
    out: int


@d.cuda.jit
def records_kernel(x, y, z, first, second, third, fourth):  # type: ignore[no-untyped-def]
    if d.lane_id() == 0:
        total = x.a + x.k * 10 + y.a * 100 + y.k * 1000 + z.c * 10000 + first + fourth
        d.store_i64(z.out, 0, total + second - third)


def records(out: int) -> tuple[Any, ...]:
    x, y = Twelve(*range(12)), Twelve(*range(20, 32))
    z = Twelve(*[*range(-5, 6), out])
    return (x, y, z, 1, 2, 3, np.int64(4))


@check
def named_tuples_as_arguments(run: Any) -> None:
    out = run.allocate(8)
    run.launch(records_kernel, 1, 1, records(out.address))
    expected = 0 + 100 + 2000 + 30000 - 30000 + 1 + 4 + 2 - 3
    same(result(run, out, np.int64), np.array([expected]))
    for wrong in [(records(0)[0],), (*records(0)[:-1], 1.5)]:
        try:
            run.launch(records_kernel, 1, 1, wrong)
        except TypeError:
            continue
        raise AssertionError(f"{wrong} was accepted")


@check
def occupancy(run: Any) -> None:
    blocks = run.resident_blocks(cast_kernel, 8, (0, 0, 0, 0))
    assert blocks >= 8, blocks
    print(f"        {blocks} blocks of 8 warps of the cast kernel are resident at once")
