"""Every name of `numba_ep.device`, on the cpu target and on the python target.

The last test of the file runs the file once more without the JIT: the same bodies then
check the python target, and so do a few tests of its own.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import int64

from numba_ep import device
from transport.atomics import read_word, write_word
from transport.jit import JIT_DISABLED

if device.wanted_target() == "cuda":
    pytest.skip("gpu_device_names.py checks the cuda target", allow_module_level=True)

from numba_ep.device import (
    WARP_SIZE,
    add_bf16x8,
    add_i32,
    add_release_block,
    atomic_add,
    block_id,
    block_sync,
    clock_ns,
    compare_and_swap,
    copy_row,
    cuda,
    fence,
    lane_id,
    ld_acquire,
    ld_acquire_block,
    ld_relaxed,
    load_bf16,
    load_bf16_magnitude,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    magnitude_to_f32,
    num_blocks,
    num_warps,
    relax,
    splat_f32x8,
    st_release,
    st_release_block,
    st_release_host,
    store_bf16x8,
    store_e4m3,
    store_f32,
    store_i32,
    store_i64,
    store_u8,
    warp_any,
    warp_broadcast,
    warp_count_below,
    warp_id,
    warp_max,
    warp_sum,
    warp_sync,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LINE = 16  # words
TIMEOUT_NS = 5_000_000_000
# What plain Python gets through in the time that compiled code needs for all of it.
MANY = 300 if JIT_DISABLED else 20_000
SAMPLES = 10_000 if JIT_DISABLED else 4_000_000


@pytest.fixture(scope="module")
def runtime() -> Iterator[Any]:
    runtime = device.make_runtime("test", 0)
    yield runtime
    runtime.close()


def words(count: int) -> np.ndarray:
    return np.zeros(count, np.int64)


def at(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def run(runtime: Any, kernel: Any, grid: tuple[int, int], *args: Any) -> None:
    """Compile first, so that all warps start at about the same time."""
    device.compile_kernel(kernel, args)
    runtime.launch(kernel, *grid, args)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


def test_the_targets_have_every_name_and_this_file_uses_it() -> None:
    assert device.__doc__ is not None
    text = device.__doc__[device.__doc__.index("Who and where") :]
    names = set(re.findall(r"\b([a-z]\w+)\(", text)) | {
        "load_i64", "store_i64", "load_i32", "store_i32",
        "load_u8", "store_u8", "load_f32", "store_f32",
    }  # fmt: skip
    assert len(names) == 41
    assert not [name for name in names if not hasattr(device, name)]
    source = Path(__file__).read_text()
    source = source[source.index("def runtime") :]
    assert not [name for name in names if f"{name}(" not in source]


# Who and where.


@cuda.jit
def who_kernel(out: int, met: int) -> None:
    me = block_id() * num_warps() + warp_id()
    store_i64(out, 4 * me, block_id())
    store_i64(out, 4 * me + 1, warp_id())
    store_i64(out, 4 * me + 2, num_blocks())
    store_i64(out, 4 * me + 3, num_warps() + lane_id())
    add_i32(met, me, 1)


@pytest.mark.parametrize("grid", [(1, 1), (3, 2), (2, 5), (1, 9), (3, 2)])
def test_identities(runtime: Any, grid: tuple[int, int]) -> None:
    blocks, warps = grid
    for _ in range(3):
        out, met = words(4 * blocks * warps), np.zeros(blocks * warps + 1, np.int32)
        run(runtime, who_kernel, grid, at(out), at(met))
        assert met.tolist() == [1] * (blocks * warps) + [0]
        expected = [[b, w, blocks, warps] for b in range(blocks) for w in range(warps)]
        assert out.reshape(-1, 4).tolist() == expected


@cuda.jit
def lanes_kernel(out: int) -> None:
    warp_sync()
    store_i64(out, 0, WARP_SIZE)
    store_i64(out, 1, lane_id())
    store_i64(out, 2, warp_sum(7))
    store_i64(out, 3, warp_max(-3))
    store_i64(out, 4, 1 if warp_any(True) else 0)
    store_i64(out, 5, 1 if warp_any(False) else 0)
    store_i64(out, 6, warp_broadcast(11))
    store_i64(out, 7, warp_count_below(True))


def test_one_lane_is_a_whole_warp(runtime: Any) -> None:
    out = words(8)
    run(runtime, lanes_kernel, (1, 1), at(out))
    assert out.tolist() == [1, 0, 7, -3, 1, 0, 11, 0]


# Warps of a block.


@cuda.jit
def rounds_kernel(rounds: int, count: int, late: int) -> None:
    """Nobody is behind by a round when the barrier lets go, nobody ahead by two."""
    own = rounds + 8 * LINE * block_id() * num_warps()
    for turn in range(1, count + 1):
        st_release_block(own, LINE * warp_id(), turn)
        block_sync()
        for warp in range(num_warps()):
            there = ld_acquire_block(own, LINE * warp)
            if there < turn or there > turn + 1:
                add_i32(late, block_id(), 1)


@pytest.mark.parametrize("grid", [(1, 1), (1, 4), (3, 3)])
def test_block_sync(runtime: Any, grid: tuple[int, int]) -> None:
    # The barrier's count is never cleared between launches.
    for count in (1, 2, MANY // 100, 3):
        rounds, late = words(LINE * grid[0] * grid[1]), np.zeros(grid[0], np.int32)
        run(runtime, rounds_kernel, grid, at(rounds), count, at(late))
        assert not late.any()
        assert (rounds[::LINE] == count).all()


@cuda.jit(device=True)
def announce(flag: int, turn: int, block_words: int) -> None:
    if block_words:
        add_release_block(flag, 0, 1)
    else:
        st_release(flag, 0, turn)


@cuda.jit
def pass_on_kernel(
    data: int, flag: int, block_words: int, count: int, wrong: int
) -> None:
    """Warp 0 writes three words and announces them, warp 1 reads them when it hears."""
    for turn in range(1, count + 1):
        if warp_id() == 0:
            for i in range(3):
                store_i64(data, LINE * i, turn * (i + 1))
            announce(flag, turn, block_words)
        spins = 0
        since = clock_ns()
        mine = flag if warp_id() == 1 else flag + 8 * LINE
        while True:
            if warp_id() == 1 and block_words:
                heard = ld_acquire_block(mine, 0)
            else:
                heard = ld_acquire(mine, 0)
            if heard >= turn or clock_ns() - since > TIMEOUT_NS:
                break
            relax(spins)
            spins += 1
        if warp_id() == 1:
            for i in range(3):
                if load_i64(data, LINE * i) != turn * (i + 1):
                    add_i32(wrong, 0, 1)
            st_release(flag, LINE, turn)


@pytest.mark.parametrize("block_words", [0, 1])
def test_release_and_acquire_pass_data_on(runtime: Any, block_words: int) -> None:
    data, flag, wrong = words(3 * LINE), words(2 * LINE), np.zeros(1, np.int32)
    args = (at(data), at(flag), block_words, MANY // 10, at(wrong))
    run(runtime, pass_on_kernel, (1, 2), *args)
    assert flag[[0, LINE]].tolist() == [MANY // 10] * 2
    assert wrong[0] == 0


ROW_BYTES = 1024
ROWS = 8


@cuda.jit
def pass_rows_kernel(
    of: int, to: int, flag: int, block_words: int, count: int, wrong: int
) -> None:
    """Warp 0 copies row turn % ROWS and announces it, warp 1 looks at every word."""
    for turn in range(1, count + 1):
        if warp_id() == 0:
            copy_row(to, of + turn % ROWS * ROW_BYTES, ROW_BYTES)
            announce(flag, turn, block_words)
        spins = 0
        since = clock_ns()
        mine = flag if warp_id() == 1 else flag + 8 * LINE
        while ld_acquire(mine, 0) < turn and clock_ns() - since < TIMEOUT_NS:
            relax(spins)
            spins += 1
        if warp_id() == 1:
            # Backwards: what was written last is the first to be missed.
            for i in range(ROW_BYTES // 8 - 1, -1, -1):
                if load_i64(to, i) != turn % ROWS:
                    add_i32(wrong, 0, 1)
            st_release(flag, LINE, turn)


@pytest.mark.parametrize("block_words", [0, 1])
def test_a_release_passes_a_copied_row_on(runtime: Any, block_words: int) -> None:
    of = np.repeat(np.arange(ROWS), ROW_BYTES // 8)
    to, flag, wrong = words(ROW_BYTES // 8 + 8), words(2 * LINE), np.zeros(1, np.int32)
    to[:] = -1
    target = at(to) + -at(to) % 64
    args = (at(of), target, at(flag), block_words, MANY, at(wrong))
    run(runtime, pass_rows_kernel, (1, 2), *args)
    assert flag[[0, LINE]].tolist() == [MANY] * 2
    assert wrong[0] == 0


def copies_then(release: Callable[..., Any]) -> Any:
    @cuda.jit(device=True)
    def copy(to: int, of: int, flag: int) -> None:
        copy_row(to, of, ROW_BYTES)
        release(flag, 0, 1)

    return copy


if not JIT_DISABLED:

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="looks at x86's code")
    @pytest.mark.parametrize(
        "release", [st_release, st_release_block, st_release_host, add_release_block]
    )
    def test_a_release_waits_for_streamed_lines(release: Callable[..., Any]) -> None:
        """The same in the code itself, whatever cores the two warps happen to get."""
        copy = copies_then(release)
        copy.compile((int64, int64, int64))
        (code,) = copy.inspect_asm().values()
        streamed = [m.start() for m in re.finditer(r"\bv?movnt", code)]
        fences = [m.start() for m in re.finditer(r"\bsfence", code)]
        assert streamed
        assert any(fence > max(streamed) for fence in fences)


# The whole system.


@cuda.jit
def contend_kernel(word: int, seen: int, small: int, count: int) -> None:
    me = block_id() * num_warps() + warp_id()
    # All at once: a thread that has not started yet contends with nobody.
    atomic_add(word, 2 * LINE, 1)
    spins = 0
    while ld_acquire(word, 2 * LINE) < num_blocks() * num_warps():
        relax(spins)
        spins += 1
    for i in range(count):
        store_i64(seen, me * count + i, atomic_add(word, 0, 1))
        add_release_block(word, LINE, 3)
        add_i32(small, 1, 1)


def test_atomics_under_contention(runtime: Any) -> None:
    count, grid = MANY if JIT_DISABLED else 10 * MANY, (2, 4)
    total = count * 8
    word, seen, small = words(3 * LINE), words(total), np.zeros(3, np.int32)
    small[:] = -5, -5, 9
    run(runtime, contend_kernel, grid, at(word), at(seen), at(small), count)
    assert word[0] == total
    assert word[LINE] == 3 * total
    assert small.tolist() == [-5, total - 5, 9]
    # Each addition saw another value, and one thread's values grow.
    assert (np.sort(seen) == np.arange(total)).all()
    assert (np.diff(seen.reshape(8, count), axis=1) > 0).all()


@cuda.jit
def lock_kernel(lock: int, plain: int, count: int) -> None:
    block_sync()
    for _ in range(count):
        spins = 0
        while compare_and_swap(lock, 0, 0, warp_id() + 1) != 0:
            relax(spins)
            spins += 1
        store_i64(plain, 0, load_i64(plain, 0) + 1)
        st_release_host(lock, 0, 0)


def test_compare_and_swap_makes_a_lock(runtime: Any) -> None:
    lock, plain = words(1), words(1)
    count = MANY // 10 if JIT_DISABLED else 5 * MANY
    run(runtime, lock_kernel, (1, 2), at(lock), at(plain), count)
    assert plain[0] == 2 * count


@cuda.jit
def race_kernel(gate: int, prizes: int, wins: int, count: int) -> None:
    """All warps swap a new word at the same moment, again and again."""
    won = 0
    for i in range(count):
        atomic_add(gate, 0, 1)
        spins = 0
        while ld_acquire(gate, 0) < (i + 1) * num_warps():
            spins += 1
            if spins % 200 == 0:
                relax(spins)
        if compare_and_swap(prizes, i, 0, 1 + warp_id()) == 0:
            won += 1
    store_i64(wins, warp_id(), won)


def test_compare_and_swap_has_one_winner(runtime: Any) -> None:
    count = MANY // 3 if JIT_DISABLED else MANY // 10
    gate, prizes, wins = words(1), words(count), words(2)
    run(runtime, race_kernel, (1, 2), at(gate), at(prizes), at(wins), count)
    assert wins.sum() == count
    assert wins.tolist() == [(prizes == 1).sum(), (prizes == 2).sum()]


@cuda.jit
def swap_kernel(word: int, out: int) -> None:
    store_i64(out, 0, compare_and_swap(word, 1, 5, 6))
    store_i64(out, 1, compare_and_swap(word, 1, 5, 7))
    store_i64(out, 2, atomic_add(word, 1, -8))
    store_i64(out, 3, ld_relaxed(word, 1))
    fence()


def test_swap_and_add_return_what_was_there(runtime: Any) -> None:
    word, out = np.array([1, 5, 1], np.int64), words(4)
    run(runtime, swap_kernel, (1, 1), at(word), at(out))
    assert out.tolist() == [5, 6, 6, -2]
    assert word.tolist() == [1, -2, 1]


@cuda.jit
def wait_relaxed_kernel(word: int, out: int, limit_ns: int) -> None:
    since = clock_ns()
    spins = 0
    while ld_relaxed(word, 0) == 0:
        if clock_ns() - since > limit_ns:
            return
        relax(spins)
        spins += 1
    fence()
    store_i64(out, 0, load_i64(word, 1))


@cuda.jit
def wait_bare_kernel(word: int, out: int, limit_ns: int) -> None:
    """Nothing in the loop but the load; the host opens it in any case."""
    while ld_relaxed(word, 0) == 0:
        pass
    store_i64(out, 0, ld_acquire(word, 1))


@cuda.jit
def wait_acquire_kernel(word: int, out: int, limit_ns: int) -> None:
    while ld_acquire(word, 0) == 0:
        pass
    while ld_acquire_block(word, 0) == 0:
        pass
    store_i64(out, 0, load_i64(word, 1))


@pytest.mark.parametrize(
    "kernel", [wait_relaxed_kernel, wait_bare_kernel, wait_acquire_kernel]
)
def test_a_waiting_loop_sees_another_threads_store(runtime: Any, kernel: Any) -> None:
    word, out = words(2), words(1)
    args = (at(word), at(out), TIMEOUT_NS)
    device.compile_kernel(kernel, args)
    waiter = threading.Thread(
        target=runtime.launch, args=(kernel, 1, 1, args), daemon=True
    )
    waiter.start()
    time.sleep(0.05)
    assert waiter.is_alive()
    write_word(at(word) + 8, 42)
    write_word(at(word), 1)
    waiter.join(2)
    assert not waiter.is_alive(), "the load was hoisted out of the loop"
    assert out[0] == 42


@cuda.jit
def clock_kernel(out: int, spins: int) -> None:
    store_i64(out, 0, clock_ns())
    for i in range(spins):
        relax(i)
    store_i64(out, 1, clock_ns())


def test_clock_is_the_hosts_and_relax_returns(runtime: Any) -> None:
    out = words(2)
    device.compile_kernel(clock_kernel, (0, 0))
    before = time.monotonic_ns()
    run(runtime, clock_kernel, (1, 1), at(out), 200)
    assert before <= out[0] <= out[1] <= time.monotonic_ns()
    assert out[1] - out[0] < 2_000_000_000


@cuda.jit
def relay_kernel(word: int, rounds: int) -> None:
    """The word goes round all warps, one at a time, far more of them than cores."""
    me = block_id() * num_warps() + warp_id()
    warps = num_blocks() * num_warps()
    for turn in range(rounds):
        spins = 0
        while ld_relaxed(word, 0) < turn * warps + me:
            relax(spins)
            spins += 1
        st_release(word, 0, turn * warps + me + 1)


def test_relax_lets_the_awaited_thread_run(runtime: Any) -> None:
    word, rounds = words(1), 20
    device.compile_kernel(relay_kernel, (0, 0))
    since = time.monotonic()
    run(runtime, relay_kernel, (4, 6), at(word), rounds)
    assert word[0] == 24 * rounds
    # If those that wait kept their cores for their time slices, 30 ms and more each.
    assert time.monotonic() - since < 24 * rounds * 1e-2


# Plain memory.


@cuda.jit
def plain_kernel(of: int, to: int, wide: int) -> None:
    for i in range(4):
        store_i64(wide, i, load_i32(of, i))
        store_i64(wide, 4 + i, load_u8(of, i))
        store_i64(wide, 8 + i, load_i64(of, i))
        store_f32(to, i, load_f32(of, i))
        store_i32(to, 4 + i, load_i64(of, i))
        store_u8(to, 4 * 8 + i, load_i64(of, i))


def test_plain_loads_and_stores(runtime: Any) -> None:
    of = np.array([-2, 2**40 + 3, 0x7F800001_80000000, -(2**63)], np.int64)
    to, wide = np.full(40, 0xAA, np.uint8), words(12)
    run(runtime, plain_kernel, (1, 1), at(of), at(to), at(wide))
    assert wide[:4].tolist() == of.view(np.int32)[:4].tolist()
    assert wide[4:8].tolist() == of.view(np.uint8)[:4].tolist()
    assert wide[8:].tolist() == of.tolist()
    # Floats move without a change of a bit, signalling NaNs too.
    assert (to[:16] == of.view(np.uint8)[:16]).all()
    assert to[16:32].view(np.int32).tolist() == [-2, 3, -(2**31), 0]
    assert to[32:].tolist() == [254, 3, 0, 0, *[0xAA] * 4]


@cuda.jit
def floats_kernel(of: int, to: int, count: int) -> None:
    for i in range(count):
        store_f32(to, i, load_f32(of, i))


def test_floats_keep_their_bits(runtime: Any) -> None:
    of = np.array([0, 1, 0x80000000, 0x7F800001, 0xFFC12345, 0xFF800000], np.uint32)
    to = np.zeros_like(of)
    run(runtime, floats_kernel, (1, 1), at(of), at(to), len(of))
    assert to.tolist() == of.tolist()


@cuda.jit
def copy_kernel(to: int, of: int, count: int) -> None:
    copy_row(to, of, count)


@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 3), (5, 7)])
def test_copy_row(runtime: Any, offsets: tuple[int, int]) -> None:
    of = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    for size in (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 4096, 4099):
        to = np.full(5000, 0xAA, np.uint8)
        args = (at(to) + offsets[0], at(of) + offsets[1], size)
        run(runtime, copy_kernel, (1, 1), *args)
        expected = np.full(5000, 0xAA, np.uint8)
        expected[offsets[0] : offsets[0] + size] = of[offsets[1] : offsets[1] + size]
        assert (to == expected).all()


# Numbers.


@cuda.jit
def widen_kernel(of: int, wide: int, magnitudes: int, again: int, count: int) -> None:
    for i in range(count):
        store_f32(wide, i, load_bf16(of, i))
        magnitude = load_bf16_magnitude(of, i)
        store_i32(magnitudes, i, np.int64(magnitude))
        store_f32(again, i, magnitude_to_f32(magnitude))


def test_all_bf16_codes_widen_exactly(runtime: Any) -> None:
    codes = np.arange(1 << 16).astype(np.uint16)
    wide, magnitudes, again = (np.zeros(1 << 16, np.uint32) for _ in range(3))
    arrays = (codes, wide, magnitudes, again)
    run(runtime, widen_kernel, (1, 1), *(at(a) for a in arrays), 1 << 16)
    assert (wide == codes.astype(np.uint32) << 16).all()
    assert (magnitudes == codes & 0x7FFF).all()
    assert (again == (codes & np.uint16(0x7FFF)).astype(np.uint32) << 16).all()


@cuda.jit
def narrow_kernel(of: int, to: int, count: int) -> None:
    for i in range(count):
        store_e4m3(to, i, load_f32(of, i))


def nearest_e4m3(values: np.ndarray) -> np.ndarray:
    """The code of each float32 from the list of all numbers, ties to the even code."""
    numbers = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float64)
    boundaries = (numbers[:-1] + numbers[1:]) / 2
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(values.astype(np.float64))
    code = np.searchsorted(boundaries, magnitude, "left")
    tie = (code < len(boundaries)) & (code % 2 == 1)
    tie &= magnitude == boundaries[np.minimum(code, len(boundaries) - 1)]
    code = np.where(np.isnan(values), 0x7F, code + tie)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def e4m3_inputs() -> np.ndarray:
    numbers = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    edges = np.concatenate([numbers, (numbers[:-1] + numbers[1:]) / 2])
    tiny = np.array([1, 2, 0x7FFFFF, 0x800000, 0x800001], np.uint32).view(np.float32)
    big = np.array([448, 449, 463.9, 464, 464.1, 480, 1e9, 3.4e38, np.inf], np.float32)
    nan = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32).view(np.float32)
    edges = np.concatenate([edges, tiny, big])
    below, above = (np.nextafter(edges, np.float32(end)) for end in (0, np.inf))
    positive = np.concatenate([edges, below, above, nan])
    random = np.random.default_rng(0)
    any_bits = random.integers(0, 1 << 32, SAMPLES, np.uint32).view(np.float32)
    # Most of all float32 are out of e4m3's range: as many again within it.
    exponents = random.integers(127 - 14, 127 + 10, SAMPLES, np.uint32) << np.uint32(23)
    within = (bits(any_bits) & np.uint32(0x807FFFFF)) | exponents
    sets = [positive, -positive, any_bits, within.view(np.float32)]
    return np.concatenate(sets)


def test_store_e4m3(runtime: Any) -> None:
    values = e4m3_inputs()
    codes = np.zeros(len(values), np.uint8)
    run(runtime, narrow_kernel, (1, 1), at(values), at(codes), len(values))
    expected = nearest_e4m3(values)
    wrong = np.flatnonzero(codes != expected)
    assert not len(wrong), f"{values[wrong[0]]!r}: {codes[wrong[0]]}"
    assert set(np.unique(codes)) == set(range(256))
    with np.errstate(invalid="ignore"):
        clipped = np.clip(values, np.float32(-448), np.float32(448)).astype(E4M3)
    assert (codes == bits(clipped)).all()


@cuda.jit
def sum_kernel(first: np.float32, parts: int, terms: int, groups: int, to: int) -> None:
    """first + parts[0] + parts[1] + ...; parts: bfloat16 [terms, 8 * groups]."""
    for group in range(groups):
        total = splat_f32x8(first)
        for term in range(terms):
            total = add_bf16x8(total, parts, term * groups + group)
        store_bf16x8(to, group, total)


def bf16_sums(
    runtime: Any, parts: np.ndarray, first: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """(what the kernel makes of bfloat16 codes [terms, n], what NumPy makes), codes."""
    parts = np.ascontiguousarray(parts)
    got = np.full(parts.shape[1] + 8, 0xAAAA, np.uint16)
    groups = parts.shape[1] // 8
    start = np.float32(first)
    run(runtime, sum_kernel, (1, 1), start, at(parts), len(parts), groups, at(got))
    assert (got[-8:] == 0xAAAA).all()
    total = np.full(parts.shape[1], first, np.float32)
    with np.errstate(all="ignore"):
        for term in parts:
            total = total + term.view(BF16).astype(np.float32)
        expected = bits(total.astype(BF16))
    return got[:-8], expected


def assert_same_bf16(got: np.ndarray, expected: np.ndarray) -> None:
    """A NaN may have either sign, but must be the quiet one."""
    nan = np.isnan(expected.view(BF16).astype(np.float32))
    assert ((got & 0x7FFF)[nan] == 0x7FC0).all()
    wrong = np.flatnonzero(got[~nan] != expected[~nan])
    assert not len(wrong), f"{len(wrong)} differ, the first at {wrong[0]}"


def test_all_bf16_codes_survive_a_sum(runtime: Any) -> None:
    codes = np.arange(1 << 16).astype(np.uint16)
    got, expected = bf16_sums(runtime, codes[None])
    assert_same_bf16(got, expected)
    finite = (codes & 0x7FFF) <= 0x7F80
    unchanged = got == np.where(codes == 0x8000, 0, codes)  # +0 + -0 = +0
    assert unchanged[finite].all()


def test_a_sum_that_begins_with_minus_0_keeps_the_sign_of_zero(runtime: Any) -> None:
    codes = np.arange(1 << 16).astype(np.uint16)
    got, expected = bf16_sums(runtime, codes[None], -0.0)
    assert_same_bf16(got, expected)
    finite = (codes & 0x7FFF) <= 0x7F80
    assert (got == codes)[finite].all()


@pytest.mark.parametrize("nudge", [-1, 0, 1])
@pytest.mark.parametrize("sign", [0, 0x8000])
def test_bf16_rounding_at_every_boundary(runtime: Any, nudge: int, sign: int) -> None:
    """x + half a unit in the last place, and 2**-15 of that more or less."""
    codes = np.arange(24 << 7, 0x7F80).astype(np.uint16)
    exponent = codes >> 7
    half = ((exponent - 8) << 7).astype(np.uint16)
    little = ((exponent - 23) << 7).astype(np.uint16)
    little |= np.uint16(0x8000 if nudge < 0 else 0)
    if nudge == 0:
        little[:] = 0
    parts = np.stack([codes, half, little]) ^ np.uint16(sign)
    got, expected = bf16_sums(runtime, parts)
    assert_same_bf16(got, expected)
    up = codes + (codes & 1 if nudge == 0 else max(nudge, 0))
    assert (got == up.astype(np.uint16) | np.uint16(sign)).all()


def test_bf16_sums_of_anything(runtime: Any) -> None:
    count = SAMPLES // 8 * 8
    parts = np.random.default_rng(1).integers(0, 1 << 16, (4, count), np.uint16)
    assert_same_bf16(*bf16_sums(runtime, parts))
    # Like numbers, whose order of addition matters.
    parts = (parts & np.uint16(0x83FF)) | np.uint16(0x3C00)
    assert_same_bf16(*bf16_sums(runtime, parts))


def test_bf16_infinities_and_nans(runtime: Any) -> None:
    special = np.array([0, 0x8000, 1, 0x8001, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0xFFFF])
    pairs = np.array(np.meshgrid(special, special)).reshape(2, -1).astype(np.uint16)
    pairs = np.concatenate([pairs, np.zeros((2, -pairs.shape[1] % 8), np.uint16)], 1)
    assert_same_bf16(*bf16_sums(runtime, pairs))


def test_cast_kernel_is_the_references(runtime: Any) -> None:
    """float32 stays float32 where a kernel divides and multiplies."""
    from numba_ep.kernels.cast import cast_kernel
    from numba_ep.reference import cast_to_fp8, unique_rows

    x = unique_rows(0, MANY // 100, 384, BF16)
    x[0, :128], x[1, 7], x[2, :] = 0, 3e38, 1e-30
    out, scales = np.zeros(x.shape, np.uint8), np.zeros((len(x), 3), np.float32)
    args = (at(x), at(out), at(scales), 3 * len(x))
    run(runtime, cast_kernel, (1, 1), *args)
    expected, expected_scales = cast_to_fp8(x)
    assert (out == bits(expected)).all()
    assert (bits(scales) == bits(expected_scales)).all()


if JIT_DISABLED:

    def fails_in_one_warp(barrier_first: bool) -> Callable[[int], None]:
        def kernel(left: int) -> None:
            if warp_id() == 1:
                raise ZeroDivisionError("in a kernel")
            if barrier_first:
                block_sync()
            spins = 0
            while ld_relaxed(left, 0) == 0:
                relax(spins)
                spins += 1
            add_i32(left, 2, 1)

        return kernel

    def test_an_error_ends_the_waits_of_the_other_warps() -> None:
        """The hook must be called, and `launch` returns when all have left."""
        runtime, left = device.make_runtime("fails", 0), words(2)
        runtime.abort = lambda: write_word(at(left), 1)
        with pytest.raises(ZeroDivisionError, match="in a kernel"):
            runtime.launch(fails_in_one_warp(False), 1, 4, (at(left),))
        assert left.view(np.int32)[2] == 3
        runtime.close()

    def test_an_error_opens_the_barrier() -> None:
        runtime, left = device.make_runtime("fails", 0), words(2)
        runtime.abort = lambda: write_word(at(left), 1)
        with pytest.raises(ZeroDivisionError, match="in a kernel"):
            runtime.launch(fails_in_one_warp(True), 1, 4, (at(left),))
        assert left.view(np.int32)[2] == 0
        runtime.close()

    def test_kernel_threads_do_not_warn_as_compiled_code_does_not() -> None:
        def kernel(out: int) -> None:
            store_f32(out, 0, np.float32(1) / np.float32(0))
            store_f32(out, 1, np.float32(3e38) * np.float32(10))

        runtime, out = device.make_runtime("silent", 0), np.zeros(2, np.float32)
        with np.errstate(all="raise"):
            runtime.launch(kernel, 1, 1, (at(out),))
        assert np.isinf(out).all()
        runtime.close()

    def small_case(num_ranks: int) -> Any:
        from faulty import Case

        from numba_ep import Config

        return Case([5, 0, 13, 3][:num_ranks], 64, 2, 8, Config(4, 1, 2, 2, 4))

    def test_c04_a_rank_is_slow_between_a_tail_and_the_copy(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The others are in the next operation long before."""
        from faulty import Case, run_case

        from numba_ep import Config
        from numba_ep.kernels import dispatch

        unpack_row = dispatch.unpack_row

        def slow(comm: Any, *args: Any) -> None:
            if comm.rank == 1:
                time.sleep(2e-3)
            unpack_row(comm, *args)

        monkeypatch.setattr(dispatch, "unpack_row", slow)
        case = Case([16, 16], 64, 2, 8, Config(4, 2, 4, 2, 4))
        run_case(case, repeats=3, barriers=False)

    @pytest.mark.parametrize("num_ranks", [1, 2, 4])
    def test_dispatch_and_combine_are_exact(num_ranks: int) -> None:
        from faulty import run_case

        run_case(small_case(num_ranks), repeats=2)

    def test_breakpoint_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
        from faulty import run_case

        from numba_ep.kernels import dispatch

        stops: list[tuple[str, int, int]] = []

        def hook() -> None:
            frame = sys._getframe(1)
            names = frame.f_locals
            stops.append((threading.current_thread().name, names["row"], warp_id()))
            time.sleep(0.05)  # somebody looks around; the others wait meanwhile

        unpack_row = dispatch.unpack_row

        def stopping(comm: Any, arrivals: Any, slot: int, rows: Any, row: int) -> None:
            if row == 3:
                breakpoint()
            unpack_row(comm, arrivals, slot, rows, row)

        monkeypatch.setattr(sys, "breakpointhook", hook)
        monkeypatch.setattr(dispatch, "unpack_row", stopping)
        run_case(small_case(2), repeats=1)
        assert stops
        assert all("warp" in name and row == 3 for name, row, _ in stops)

    def test_an_error_in_a_kernel_ends_the_buffer_on_all_ranks(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from faulty import run_case

        from numba_ep import BufferAborted
        from numba_ep.kernels import dispatch

        unpack_row = dispatch.unpack_row

        def failing(comm: Any, *args: Any) -> None:
            if comm.rank == 1:
                raise LookupError("quit the debugger")
            unpack_row(comm, *args)

        monkeypatch.setattr(dispatch, "unpack_row", failing)
        since = time.monotonic()
        errors = run_case(small_case(4), repeats=1, catch=(LookupError, BufferAborted))
        assert time.monotonic() - since < 5
        assert isinstance(errors[1], LookupError)
        for error in (errors[0], *errors[2:]):
            assert isinstance(error, BufferAborted)
            assert error.culprit == 1

else:

    def test_the_python_target_in_its_own_process() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "NUMBA_EP_DEVICE": "cpu"}
        done = subprocess.run(
            [*command, __file__], env=environment, cwd=Path(__file__).parent.parent,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        assert "skipped" not in done.stdout


def test_read_word_is_the_hosts_load() -> None:
    word = np.array([0, -3], np.int64)
    assert read_word(at(word) + 8) == -3
