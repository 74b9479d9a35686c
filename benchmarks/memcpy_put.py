"""How close a put through shared memory comes to a plain memcpy.

    mpirun -np 2 python benchmarks/memcpy_put.py

A round moves --total-bytes in chunks of one size, which walk through a region of
--region-bytes from start to end, again and again. The put moves them from a region of
one process to the same offsets of the other's; memcpy moves them between two buffers
of one process, every page touched before. All methods walk the same chunks and take
turns within a run; the medians over rounds are compared. memcpy comes in three forms,
since NumPy asks for huge pages where shared memory has small ones, and since the calls
differ in cost:

memmove         ctypes.memmove, private pages
copyto          numpy.copyto on slices, private pages
memmove shared  ctypes.memmove, pages of shared mappings

By default rank 0 moves and rank 1 waits in a barrier; with --both-ways both move at
once and the slower one counts. GB = 1e9 bytes, one direction.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

# The packages of this source tree, also where they are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from meeting_points import sleeping_barrier

import transport
from transport import wr
from transport.service import BATCH

CHUNK_SIZES_BYTES = (64 << 10, 118_784, 475_136, 1 << 20)
NUM_WARMUP_ROUNDS = 2
BASELINE = "memmove"

# Moves one chunk to each offset of the list, all of the given size, in order; returns
# when the last byte is in place.
MoveChunks = Callable[[list[int], int], None]
# (comm, region_bytes) -> (put of a chunk sequence, close). Collective, and so is close.
# The put moves from this rank's region to the other's, at the same offsets.
MakePut = Callable[[MPI.Intracomm, int], tuple[MoveChunks, Callable[[], None]]]


def chunk_offsets(total_bytes: int, region_bytes: int, chunk_bytes: int) -> list[int]:
    """Offsets of a round's chunks: whole chunks only, wrapping where none fits."""
    slots = region_bytes // chunk_bytes
    return [i % slots * chunk_bytes for i in range(total_bytes // chunk_bytes)]


def make_memmove(src: NDArray[np.uint8], dst: NDArray[np.uint8]) -> MoveChunks:
    """memcpy by address; the addresses stay valid while the function is kept."""
    src_address, dst_address = src.ctypes.data, dst.ctypes.data

    def move(offsets: list[int], chunk_bytes: int) -> None:
        memmove = ctypes.memmove
        for offset in offsets:
            memmove(dst_address + offset, src_address + offset, chunk_bytes)

    move.buffers = src, dst  # type: ignore[attr-defined]
    return move


def make_copyto(src: NDArray[np.uint8], dst: NDArray[np.uint8]) -> MoveChunks:
    """memcpy as NumPy does it."""

    def move(offsets: list[int], chunk_bytes: int) -> None:
        for offset in offsets:
            end = offset + chunk_bytes
            np.copyto(dst[offset:end], src[offset:end])

    return move


def touched_pair(
    region_bytes: int, seed: int, shared: bool
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A source of random bytes and a destination, every page of both written."""
    content = np.random.default_rng(seed).integers(0, 256, region_bytes, np.uint8)
    if not shared:
        return content, np.full(region_bytes, 0xFF, np.uint8)
    src, dst = (np.frombuffer(mmap.mmap(-1, region_bytes), np.uint8) for _ in range(2))
    src[:] = content
    dst[:] = 0xFF
    return src, dst


def make_memcpy_methods(region_bytes: int, seed: int) -> dict[str, MoveChunks]:
    """The three forms of memcpy, each checked once: every byte arrives."""
    methods: dict[str, MoveChunks] = {}
    for name, make, shared in (
        (BASELINE, make_memmove, False),
        ("copyto", make_copyto, False),
        ("memmove shared", make_memmove, True),
    ):
        src, dst = touched_pair(region_bytes, seed, shared)
        methods[name] = make(src, dst)
        methods[name]([0], region_bytes)
        if not np.array_equal(src, dst):
            raise AssertionError(f"{name}: source and destination differ")
    return methods


def time_rounds(
    comm: MPI.Intracomm,
    methods: dict[str, MoveChunks],
    offsets: list[int],
    chunk_bytes: int,
    args: argparse.Namespace,
) -> dict[str, NDArray[np.float64]]:
    """Rounds of all methods in turn; seconds of the slower rank, [rounds]."""
    moves = args.both_ways or comm.Get_rank() == 0
    local = np.zeros((len(methods), NUM_WARMUP_ROUNDS + args.rounds))
    for round_index in range(local.shape[1]):
        for method_index, move in enumerate(methods.values()):
            sleeping_barrier(comm)
            if moves:
                began = perf_counter()
                move(offsets, chunk_bytes)
                local[method_index, round_index] = perf_counter() - began
            # Nobody begins the next method while the other still copies.
            sleeping_barrier(comm)
    slowest = np.empty_like(local)
    comm.Allreduce(local, slowest, op=MPI.MAX)
    return dict(zip(methods, slowest[:, NUM_WARMUP_ROUNDS:], strict=True))


def run(
    comm: MPI.Intracomm, args: argparse.Namespace, make_put: MakePut
) -> list[dict[str, Any]]:
    """Measure every chunk size; one record a size, the same on both ranks."""
    put, close = make_put(comm, args.region_bytes)
    memcpy = make_memcpy_methods(args.region_bytes, seed=comm.Get_rank())
    methods = {"put": put, **memcpy}
    records = []
    for chunk_bytes in CHUNK_SIZES_BYTES:
        offsets = chunk_offsets(args.total_bytes, args.region_bytes, chunk_bytes)
        times = time_rounds(comm, methods, offsets, chunk_bytes, args)
        moved_bytes = len(offsets) * chunk_bytes
        medians = {name: float(np.median(s)) for name, s in times.items()}
        records.append(
            {
                "chunk_bytes": chunk_bytes,
                "moved_bytes": moved_bytes,
                "median_gb_per_s": {
                    name: moved_bytes / median / 1e9 for name, median in medians.items()
                },
                "ratio_to_memmove": {
                    name: medians[BASELINE] / median for name, median in medians.items()
                },
                "seconds": {name: s.tolist() for name, s in times.items()},
            }
        )
    close()
    return records


def report(args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Print GB/s and, in brackets, the speed relative to memmove."""
    names = list(records[0]["median_gb_per_s"])
    ways = "both ways at once" if args.both_ways else "one way"
    print(
        f"{args.total_bytes} bytes a round through a region of {args.region_bytes}, "
        f"{ways}, median of {args.rounds} rounds"
    )
    print("GB/s (1.00 is the speed of memmove)")
    print(f"{'chunk bytes':>12}" + "".join(f"{name:>20}" for name in names))
    for record in records:
        rates, ratios = record["median_gb_per_s"], record["ratio_to_memmove"]
        cells = (f"{rates[name]:.2f} ({ratios[name]:.2f})" for name in names)
        print(f"{record['chunk_bytes']:>12}" + "".join(f"{c:>20}" for c in cells))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--total-bytes", type=int, default=256 << 20, help="a round")
    parser.add_argument("--region-bytes", type=int, default=32 << 20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--both-ways", action="store_true", help="both ranks at once")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    largest = max(CHUNK_SIZES_BYTES)
    if min(args.total_bytes, args.region_bytes) < largest:
        parser.error(f"--total-bytes, --region-bytes: expected at least {largest}")
    if args.rounds < 1:
        parser.error("--rounds: expected at least 1")
    return args


def make_shm_put(
    comm: MPI.Intracomm, region_bytes: int
) -> tuple[MoveChunks, Callable[[], None]]:
    """Puts of the shm transport as the proxy posts them: batches of work requests."""
    counter = region_bytes
    rank = comm.Get_rank()
    network = transport.create("shm", rank, 2, region_bytes + 8, region_bytes)
    network.connect(comm.allgather(network.card()))
    comm.Barrier()
    network.connected()
    ctypes.memset(network.send.address, 1, region_bytes)
    comm.Barrier()

    def put(offsets: list[int], chunk_bytes: int) -> None:
        requests = np.zeros((len(offsets), wr.NUM_FIELDS), np.int64)
        requests[:, wr.OPCODE], requests[:, wr.PEER] = wr.PUT, 1 - rank
        requests[:, wr.SOURCE] = requests[:, wr.DESTINATION] = offsets
        requests[:, wr.NUM_BYTES], requests[:, wr.COUNTER_AT] = chunk_bytes, counter
        for first in range(0, len(requests), BATCH):
            network.post(requests[first : first + BATCH])

    return put, network.close


def main(make_put: MakePut = make_shm_put) -> None:
    """Measure and print."""
    comm = MPI.COMM_WORLD
    args = parse_arguments()
    if comm.Get_size() != 2:
        raise SystemExit(f"expected 2 ranks (mpirun -np 2), got {comm.Get_size()}")
    records = run(comm, args, make_put)
    if comm.Get_rank() == 0:
        report(args, records)
        if args.json:
            figures = {
                "total_bytes": args.total_bytes,
                "region_bytes": args.region_bytes,
                "both_ways": args.both_ways,
                "records": records,
            }
            Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001 (reported, and both ranks ended)
        # The other rank may be inside a collective call and would wait for ever.
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
