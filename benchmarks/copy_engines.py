"""What the copy engines alone carry, from GPU to GPU through shared host memory.

    mpirun -np 2 python benchmarks/copy_engines.py

Every rank has a GPU (rank r the r-th). All copy at once, in chunks, round a region of
pinned memory that they share: out (GPU to the peer's region), in (own region to GPU),
both. Medians of 10 rounds of 1 GB; GB/s of the slowest rank, each way. Last, jobs of
the size of DeepEP's FP8 and BF16 dispatches, 30.2 and 58.5 MB each way from GPU to GPU:
every chunk goes out with its counter, and in as soon as the counter has come.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from cuda.bindings import driver
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transport.cuda_driver import call, register, take_stream

REGION, ROUND = 64 << 20, 1 << 30
JOBS = (30_200_000, 58_500_000)
CHUNKS = (65_536, 118_784, 237_568, 475_136, 950_272, 1_900_544)
ROUNDS = 10
COUNTER_AT = REGION - 4096  # of a region, behind the job's bytes
AT_LEAST = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)


class Engines:
    """One rank: GPU memory, pinned memory of the peer and its own, two streams."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        rank, ranks = comm.Get_rank(), comm.Get_size()
        call(driver.cuInit, 0)
        device = call(driver.cuDeviceGet, rank % call(driver.cuDeviceGetCount))
        call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, device))
        path = f"/dev/shm/copy_engines-{os.getpid()}"
        self.own = self._map(path, os.O_CREAT | os.O_RDWR)
        paths = comm.allgather(path)
        self.peer = self._map(paths[(rank + 1) % ranks], os.O_RDWR)
        comm.Barrier()
        os.unlink(path)
        self.source = int(call(driver.cuMemAlloc, REGION))
        self.target = int(call(driver.cuMemAlloc, REGION))
        self.out, self.back = take_stream(), take_stream()
        self.flag = int(call(driver.cuMemHostAlloc, 4096, 3))
        self.jobs = 0

    def _map(self, path: str, flags: int) -> int:
        file = os.open(path, flags, 0o600)
        os.posix_fallocate(file, 0, REGION)
        self._maps = [*getattr(self, "_maps", []), mmap.mmap(file, REGION)]
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._maps[-1]))
        register(address, REGION)
        return address

    def round(self, chunk: int, ways: str, flags: bool) -> float:
        """Seconds of one round on this rank, after a barrier."""
        self.comm.Barrier()
        began = perf_counter()
        at = 0
        for _ in range(ROUND // chunk):
            at = at + chunk if at + 2 * chunk <= REGION else 0
            if "out" in ways:
                self._copy(driver.cuMemcpyDtoHAsync, self.peer, self.source, at, chunk,
                           self.out, flags)  # fmt: skip
            if "in" in ways:
                self._copy(driver.cuMemcpyHtoDAsync, self.target, self.own, at, chunk,
                           self.back, flags)  # fmt: skip
        for stream in (self.out, self.back):
            call(driver.cuStreamSynchronize, stream)
        return perf_counter() - began

    def job(self, num_bytes: int, chunk: int) -> float:
        """Seconds from the first chunk out of this GPU to the last one into it."""
        self.jobs += 1
        self.comm.Barrier()
        began = perf_counter()
        for i in range(num_bytes // chunk):
            at, value = i * chunk, (self.jobs << 20) + i
            self._copy(driver.cuMemcpyDtoHAsync, self.peer, self.source, at, chunk,
                       self.out, False)  # fmt: skip
            word = self.peer + COUNTER_AT
            call(driver.cuStreamWriteValue64, self.out, word, value, 0)
            word = self.own + COUNTER_AT
            call(driver.cuStreamWaitValue64, self.back, word, value, AT_LEAST)
            self._copy(driver.cuMemcpyHtoDAsync, self.target, self.own, at, chunk,
                       self.back, False)  # fmt: skip
        for stream in (self.out, self.back):
            call(driver.cuStreamSynchronize, stream)
        return perf_counter() - began

    def _copy(
        self, function: Any, to: int, of: int, at: int, chunk: int, stream: Any,
        flag: bool,
    ) -> None:  # fmt: skip
        call(function, to + at, of + at, chunk, stream)
        if flag:
            call(driver.cuStreamWriteValue64, stream, self.flag, at, 0)


def main() -> None:
    """Measure and print."""
    comm = MPI.COMM_WORLD
    engines = Engines(comm)
    if comm.Get_rank() == 0:
        print("GB/s each way       out      in    both  both, a counter a chunk   jobs")
    for chunk in CHUNKS:
        line = f"{chunk:>12} bytes"
        for ways, flags in (("out", False), ("in", False), ("out in", False),
                            ("out in", True)):  # fmt: skip
            times = [engines.round(chunk, ways, flags) for _ in range(ROUNDS + 1)][1:]
            slowest = max(comm.allgather(statistics.median(times)))
            line += f"{ROUND // chunk * chunk / slowest / 1e9:8.1f}"
        for job in JOBS:
            times = [engines.job(job, chunk) for _ in range(ROUNDS + 1)][1:]
            slowest = max(comm.allgather(statistics.median(times)))
            line += f"{job // chunk * chunk / slowest / 1e9:8.1f}"
        if comm.Get_rank() == 0:
            print(line, flush=True)


if __name__ == "__main__":
    main()
