"""Plain memory, rows and number formats on a real GPU (see gpu_device_names.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu_common import BF16, E4M3, check, d, gpu, result, same, upload

from numba_ep.device.memory_ir import store_e4m3 as encode_e4m3
from numba_ep.kernels.cast import cast_kernel
from numba_ep.reference import cast_to_fp8


@d.cuda.jit
def plain_kernel(source: int, out: int, count: int) -> None:
    first = d.warp_id() * d.WARP_SIZE + d.lane_id()
    for i in range(first, count, d.num_warps() * d.WARP_SIZE):
        d.store_i64(out, i, d.load_i64(source, i) + 1)
        d.store_i64(out, count + i, d.load_i32(source, i))
        d.store_i64(out, 2 * count + i, d.load_u8(source, i))
        d.store_i32(out + 24 * count, i, d.load_i64(source, i))
        d.store_u8(out + 28 * count, i, d.load_i64(source, i))
        d.store_f32(out + 32 * count, i, d.load_f32(source, i))
        d.add_i32(out + 36 * count, i % 8, i)


@check
def plain_memory(run: Any) -> None:
    count = 1024
    data = np.random.default_rng(1).integers(-(1 << 62), 1 << 62, count, np.int64)
    out = run.allocate(36 * count + 32)
    run.launch(plain_kernel, 1, 4, (upload(run, data), out.address, count))
    got = result(run, out, np.uint8)
    words = got[: 24 * count].view(np.int64).reshape(3, count)
    same(words[0], data + 1)
    same(words[1], data.view(np.int32)[:count].astype(np.int64))
    same(words[2], data.view(np.uint8)[:count].astype(np.int64))
    same(got[24 * count : 28 * count].view(np.int32), data.astype(np.int32))
    same(got[28 * count : 29 * count], data.astype(np.uint8))
    same(got[32 * count : 36 * count].view(np.int32), data.view(np.int32)[:count])
    sums = np.arange(count, dtype=np.int32).reshape(-1, 8).sum(axis=0, dtype=np.int32)
    same(got[36 * count :].view(np.int32), sums)


@d.cuda.jit
def copy_kernel(source: int, out: int, room: int) -> None:
    # Warp i copies 16 * (i + 1) bytes to the middle of a place of `room` bytes.
    i = d.block_id() * d.num_warps() + d.warp_id()
    d.copy_row(out + i * room + 16, source + 16 * (i % 7), 16 * (i + 1))


@check
def copy_row_sizes(run: Any) -> None:
    rows, room = 512, 8192 + 32
    data = np.random.default_rng(2).integers(1, 256, 8192 + 128, np.uint8)
    out = run.allocate(rows * room)
    run.launch(copy_kernel, rows // 8, 8, (upload(run, data), out.address, room))
    expected = np.zeros((rows, room), np.uint8)
    for i in range(rows):
        size, start = 16 * (i + 1), 16 * (i % 7)
        expected[i, 16 : 16 + size] = data[start : start + size]
    same(result(run, out, np.uint8), expected.ravel())


# Numbers.


@d.cuda.jit
def bf16_kernel(source: int, out: int, count: int) -> None:
    first = (d.block_id() * d.num_warps() + d.warp_id()) * d.WARP_SIZE + d.lane_id()
    for i in range(first, count, d.num_blocks() * d.num_warps() * d.WARP_SIZE):
        d.store_f32(out, i, d.load_bf16(source, i))
        magnitude = d.load_bf16_magnitude(source, i)
        d.store_f32(out, count + i, d.magnitude_to_f32(magnitude))


@check
def all_bf16(run: Any) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    out = run.allocate(8 << 16)
    run.launch(bf16_kernel, 8, 8, (upload(run, halves), out.address, 1 << 16))
    got = result(run, out, np.uint32)
    same(got[: 1 << 16], halves.astype(np.uint32) << 16)
    same(got[1 << 16 :], (halves & 0x7FFF).astype(np.uint32) << 16)


@d.cuda.jit
def e4m3_kernel(source: int, out: int, count: int) -> None:
    first = (d.block_id() * d.num_warps() + d.warp_id()) * d.WARP_SIZE + d.lane_id()
    for i in range(first, count, d.num_blocks() * d.num_warps() * d.WARP_SIZE):
        d.store_e4m3(out, i, d.load_f32(source, i))
        encode_e4m3(out, count + i, d.load_f32(source, i))


@d.cuda.jit
def e4m3_all_kernel(scratch: int, differ: int) -> None:
    # All 2**32 float32: the instruction against the integer encoder.
    thread = (d.block_id() * d.num_warps() + d.warp_id()) * d.WARP_SIZE + d.lane_id()
    threads = d.num_blocks() * d.num_warps() * d.WARP_SIZE
    wrong = 0
    for bits in range(thread, 1 << 32, threads):
        d.store_i32(scratch, thread, bits)
        value = d.load_f32(scratch, thread)
        d.store_e4m3(scratch, 4 * threads + 2 * thread, value)
        encode_e4m3(scratch, 4 * threads + 2 * thread + 1, value)
        first = d.load_u8(scratch, 4 * threads + 2 * thread)
        if first != d.load_u8(scratch, 4 * threads + 2 * thread + 1):
            wrong += 1
    d.atomic_add(differ, 0, wrong)


def float32_samples() -> np.ndarray:
    """All bf16, every e4m3 number and midpoint with neighbours, random bits."""
    numbers = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    edges = np.concatenate(
        [numbers, (numbers[1:] + numbers[:-1]) / 2, [464, 480, -464]]
    )
    edges = edges.astype(np.float32).view(np.uint32).astype(np.int64)
    near = (edges[:, None] + np.arange(-4, 5)).ravel() & 0xFFFFFFFF
    halves = np.arange(1 << 16, dtype=np.int64) << 16
    strided = np.arange(0, 1 << 32, 1021, dtype=np.int64)
    return np.concatenate([near, halves, strided]).astype(np.uint32).view(np.float32)


@check
def e4m3_samples(run: Any) -> None:
    samples = float32_samples()
    with np.errstate(all="ignore"):
        codes = np.clip(samples, -448, 448).astype(E4M3).view(np.uint8)
    nan = np.where(np.signbit(samples), 0xFF, 0x7F)
    codes = np.where(np.isnan(samples), nan, codes).astype(np.uint8)
    out = run.allocate(2 * samples.size)
    args = (upload(run, samples), out.address, samples.size)
    run.launch(e4m3_kernel, 132, 8, args)
    got = result(run, out, np.uint8)
    same(got[: samples.size], codes)
    same(got[samples.size :], codes)


@check
def e4m3_instruction_and_encoder_agree_on_all_float32(run: Any) -> None:
    blocks = 1056
    scratch, differ = run.allocate(6 * blocks * 256), run.allocate(8)
    run.launch(e4m3_all_kernel, blocks, 8, (scratch.address, differ.address))
    same(result(run, differ, np.int64), np.zeros(1, np.int64))


@d.cuda.jit
def sums_kernel(a: int, b: int, out: int, groups: int) -> None:
    first = (d.block_id() * d.num_warps() + d.warp_id()) * d.WARP_SIZE + d.lane_id()
    for g in range(first, groups, d.num_blocks() * d.num_warps() * d.WARP_SIZE):
        sums = d.add_bf16x8(d.splat_f32x8(np.float32(0)), a, g)
        d.store_bf16x8(out, g, d.add_bf16x8(sums, b, g))


@d.cuda.jit
def round_kernel(source: int, out: int, groups: int) -> None:
    first = (d.block_id() * d.num_warps() + d.warp_id()) * d.WARP_SIZE + d.lane_id()
    for g in range(first, groups, d.num_blocks() * d.num_warps() * d.WARP_SIZE):
        i = 8 * g
        sums = (
            d.load_f32(source, i), d.load_f32(source, i + 1),
            d.load_f32(source, i + 2), d.load_f32(source, i + 3),
            d.load_f32(source, i + 4), d.load_f32(source, i + 5),
            d.load_f32(source, i + 6), d.load_f32(source, i + 7),
        )  # fmt: skip
        d.store_bf16x8(out, g, sums)


def rounded(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values as bfloat16, a NaN as a GPU makes it."""
    with np.errstate(all="ignore"):
        bits = values.astype(BF16).view(np.uint16)
    return np.where(np.isnan(values), 0x7FFF, bits).astype(np.uint16)


@check
def bf16_rounding(run: Any) -> None:
    samples = float32_samples()
    ties = (np.arange(1 << 16, dtype=np.int64) << 16) + 0x8000
    near = (ties[:, None] + np.arange(-1, 2)).ravel().astype(np.uint32)
    samples = np.concatenate([samples, near.view(np.float32)])
    samples = samples[: samples.size // 8 * 8]
    out = run.allocate(2 * samples.size)
    args = (upload(run, samples), out.address, samples.size // 8)
    run.launch(round_kernel, 132, 8, args)
    same(result(run, out, np.uint16), rounded(samples))


@check
def bf16_sums(run: Any) -> None:
    rng = np.random.default_rng(3)
    halves = rng.integers(0, 1 << 16, (2, 1 << 21), np.uint16)
    # Half of them of like size, so that sums round and cancel.
    halves[1, ::2] = (
        halves[0, ::2] ^ rng.integers(0, 1 << 11, 1 << 20, np.uint16) ^ 0x8000
    )
    a, b = halves.view(BF16).astype(np.float32)
    with np.errstate(all="ignore"):
        sums = (np.float32(0) + a) + b
    out = run.allocate(2 * sums.size)
    args = (upload(run, halves[0]), upload(run, halves[1]), out.address, sums.size // 8)
    run.launch(sums_kernel, 132, 8, args)
    got = result(run, out, np.uint16)
    same(got, rounded(sums))


@check
def cast_kernel_as_reference(run: Any) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((999, 7168)) * np.exp(rng.uniform(-12, 12, (999, 1)))
    x = x.astype(BF16)
    x[5, :128] = 0
    groups = x.size // 128
    cast, scales = run.allocate(x.size), run.allocate(4 * groups)
    args = (upload(run, x), cast.address, scales.address, groups)
    run.launch(cast_kernel, *gpu.CAST_GRID, args)
    expected, expected_scales = cast_to_fp8(x)
    same(result(run, scales, np.float32), expected_scales.ravel())
    same(result(run, cast, np.uint8), expected.view(np.uint8).ravel())
