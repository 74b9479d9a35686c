"""Order and scope of words on a real GPU (see gpu_device_names.py)."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from typing import Any

import numpy as np
from gpu_common import LANES, LIMIT_NS, check, d, gpu, result, same, wait_for

from transport.atomics import read_word, write_word


@d.cuda.jit
def words_kernel(words: int, out: int) -> None:
    d.atomic_add(words, 0, d.lane_id() + (1 << 40))
    won = d.compare_and_swap(words, 16, 0, d.block_id() + 1) == 0
    if won:
        d.atomic_add(words, 32, 1)
    d.add_release_block(out, d.block_id(), 1)


@check
def words_atomics(run: Any) -> None:
    blocks, warps = 40, 8
    words, out = run.allocate(8 * 48), run.allocate(8 * blocks)
    run.launch(words_kernel, blocks, warps, (words.address, out.address))
    got = result(run, words, np.int64)
    assert got[0] == blocks * warps * ((32 << 40) + 496), hex(got[0])
    assert 1 <= got[16] <= blocks and got[32] == 1, (got[16], got[32])
    same(result(run, out, np.int64), np.full(blocks, warps * LANES))


@d.cuda.jit(device=True)
def wait_in_block(word: int, value: int) -> bool:
    since = d.clock_ns()
    while d.ld_acquire_block(word, 0) < value:
        if d.clock_ns() - since > LIMIT_NS:
            return False
    return True


@d.cuda.jit
def block_ping_kernel(words: int, data: int, rounds: int, wrong: int) -> None:
    # Warp 0 and warp 1 take turns; each checks every lane's number of the other.
    me = d.warp_id()
    d.block_sync()
    for turn in range(rounds):
        if turn % 2 == me:
            d.store_i64(data, d.lane_id(), turn * 1000 + d.lane_id())
            d.warp_sync()
            if d.lane_id() == 0:
                d.st_release_block(words, 0, turn + 1)
        elif not d.warp_any(not wait_in_block(words, turn + 1)):
            # The next lane's number, so that no lane reads its own.
            lane = (d.lane_id() + 1) % d.WARP_SIZE
            if d.load_i64(data, lane) != turn * 1000 + lane:
                d.atomic_add(wrong, 0, 1)
        else:
            d.atomic_add(wrong, 0, 1 << 32)
            break
        d.warp_sync()


@check
def block_release_and_acquire(run: Any) -> None:
    words, data, wrong = run.allocate(8), run.allocate(256), run.allocate(8)
    args = (words.address, data.address, 20000, wrong.address)
    run.launch(block_ping_kernel, 1, 2, args)
    same(result(run, wrong, np.int64), np.zeros(1, np.int64))


@d.cuda.jit
def system_ping_kernel(words: int, data: int, rounds: int, wrong: int) -> None:
    # Blocks take turns through GPU memory; the other's row is read with plain loads.
    me = d.block_id()
    for turn in range(rounds):
        if turn % d.num_blocks() == me:
            d.store_i64(data, d.lane_id(), turn * 1000 + d.lane_id())
            d.warp_sync()
            if d.lane_id() == 0:
                d.st_release(words, 0, turn + 1)
        else:
            went = wait_for(words, turn + 1)
            if d.warp_any(not went):
                d.atomic_add(wrong, 0, 1 << 32)
                break
            lane = (d.lane_id() + 1) % d.WARP_SIZE
            if d.load_i64(data, lane) != turn * 1000 + lane:
                d.atomic_add(wrong, 0, 1)
            d.warp_sync()
            # All have read: only then may the next one write.
        if d.lane_id() == 0:
            d.atomic_add(words, 16, 1)
        if d.warp_any(not wait_for(words + 128, (turn + 1) * d.num_blocks())):
            d.atomic_add(wrong, 0, 1 << 32)
            break


@check
def words_between_blocks(run: Any) -> None:
    words, data, wrong = run.allocate(256), run.allocate(256), run.allocate(8)
    args = (words.address, data.address, 5000, wrong.address)
    run.launch(system_ping_kernel, 8, 1, args)
    same(result(run, wrong, np.int64), np.zeros(1, np.int64))


@d.cuda.jit
def host_ping_kernel(words: int, rounds: int, wrong: int) -> None:
    # words[0]: written by the host; words[16]: by the GPU; words[32 + lane]: a row.
    for turn in range(1, rounds + 1):
        if d.warp_any(not wait_for(words, turn)):
            d.atomic_add(wrong, 0, 1 << 32)
            break
        if d.load_i64(words, 32 + d.lane_id()) != turn * 100 + d.lane_id():
            d.atomic_add(wrong, 0, 1)
        d.store_i64(words, 64 + d.lane_id(), turn * 200 + d.lane_id())
        d.warp_sync()
        if d.lane_id() == 0:
            d.st_release(words, 16, turn)


def host_side(host: np.ndarray, rounds: int) -> float:
    """The host's half of `host_ping_kernel`; returns microseconds a round trip."""
    words = host.view(np.int64)
    base, lanes = words.ctypes.data, np.arange(LANES)
    started = time.perf_counter()
    for turn in range(1, rounds + 1):
        words[32:64] = turn * 100 + lanes
        write_word(base, turn)
        deadline = time.monotonic() + 5
        while read_word(base + 128) < turn:
            assert time.monotonic() < deadline, f"no answer in round {turn}"
        same(words[64:96].copy(), turn * 200 + lanes)
    return (time.perf_counter() - started) / rounds * 1e6


@check
def host_words_in_pinned_memory(run: Any) -> None:
    shared, wrong = run.allocate_host(8 * 96), run.allocate(8)
    assert shared.host is not None and not shared.host.any()
    write_word(shared.host.ctypes.data, 0)  # compiled before the kernel waits for it
    read_word(shared.host.ctypes.data)
    run.launch(host_ping_kernel, 1, 1, (shared.address, 3000, wrong.address))
    us = host_side(shared.host, 3000)
    same(result(run, wrong, np.int64), np.zeros(1, np.int64))
    print(f"        {us:.1f} us a round trip with a row each way")


@check
def host_words_in_registered_memory(run: Any) -> None:
    other = gpu.make_runtime("second rank", 0)
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(1 << 20)
        pages = mmap.mmap(file.fileno(), 1 << 20)
        host = np.frombuffer(pages, np.uint8)
        address = run.register(host.ctypes.data, host.size)
        assert other.register(host.ctypes.data, host.size) == address
        other.close()  # the first registration is still in use
        wrong = run.allocate(8)
        run.launch(host_ping_kernel, 1, 1, (address, 500, wrong.address))
        host_side(host[: 8 * 96], 500)
        same(result(run, wrong, np.int64), np.zeros(1, np.int64))


@d.cuda.jit
def barrier_kernel(scratch: int, out: int) -> None:
    warps = d.num_warps()
    place = d.block_id() * warps
    d.store_i64(scratch, place + d.warp_id(), d.warp_id() + 1)
    d.block_sync()
    total = 0
    for i in range(warps):
        total += d.load_i64(scratch, place + i)
    d.store_i64(out, place + d.warp_id(), total)


@check
def block_barrier(run: Any) -> None:
    blocks, warps = 132, 8
    scratch, out = run.allocate(8 * blocks * warps), run.allocate(8 * blocks * warps)
    run.launch(barrier_kernel, blocks, warps, (scratch.address, out.address))
    same(result(run, out, np.int64), np.full(blocks * warps, 36))
