"""One token from a GPU to another one and back: how long, and where the time goes.

    mpirun -np 2 python benchmarks/gpu_latency.py

Hidden 7168 in bfloat16, every token to an expert of the other rank. A cached dispatch
and the combine of what it brought, from a barrier to the end of the combine's event,
500 times; then 50 times with a trace, whose parts are medians in microseconds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import numba_ep
from numba_ep import device as devices
from numba_ep import trace
from numba_ep.arrays import from_host
from numba_ep.group import members
from numba_ep.kernels import events as kinds
from numba_ep.meeting import use_local_gpu
from numba_ep.reference import BF16, unique_rows

HIDDEN, EXPERTS = 7168, 16
ROUNDS, TRACED = 500, 50


class TokenThereAndBack:
    """One rank's Buffer and the journey to repeat."""

    def __init__(self) -> None:
        comm = numba_ep.world()
        self.ranks = members(comm)
        use_local_gpu(self.ranks, devices.select("cuda"))
        rank, num_ranks = self.ranks.rank, self.ranks.num_ranks
        config = numba_ep.Buffer.get_dispatch_config(num_ranks)
        num_bytes = config.get_rdma_buffer_size_hint(2 * HIDDEN, num_ranks)
        self.buffer = numba_ep.Buffer(comm, num_rdma_bytes=num_bytes, device="cuda")
        self.x = from_host(unique_rows(rank, 1, HIDDEN, BF16), True)
        expert = (rank + 1) % num_ranks * (EXPERTS // num_ranks)
        topk_idx = from_host(np.array([[expert]], np.int64), True)
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            topk_idx, EXPERTS
        )
        self.handle = self.buffer.dispatch(
            self.x, None, per_rank, None, in_rank, per_expert
        )[4]

    def once(self) -> float:
        """Microseconds until the token is back."""
        self.ranks.barrier()
        began = perf_counter()
        rows, *_, event = self.buffer.dispatch(
            self.x, handle=self.handle, async_finish=True
        )
        assert self.handle is not None
        *_, event = self.buffer.combine(
            rows, self.handle, previous_event=event, async_finish=True
        )
        event.current_stream_wait()
        return (perf_counter() - began) * 1e6


def parts(events: np.ndarray, rank: int) -> dict[str, float]:
    """Medians over the operations, in us, of what rank `rank` received."""
    mine, theirs = events[events["rank"] == rank], events[events["rank"] != rank]
    found: dict[str, list[float]] = {}

    def note(name: str, since: Any, until: Any) -> None:
        found.setdefault(name, []).append((int(until) - int(since)) / 1e3)

    for published in theirs[theirs["kind"] == kinds.PUBLISH]:
        same = (mine["value"] == published["value"]) & (
            mine["channel"] == published["channel"]
        )
        arrived = mine[same & (mine["kind"] == kinds.WAIT_TAIL)]
        posted = theirs[
            (theirs["kind"] == kinds.POST_CHUNK)
            & (theirs["start_ns"] > published["start_ns"])
        ]
        if len(posted):
            note("publish (FIFO entry)", published["start_ns"], published["end_ns"])
            note("until the proxy posts", published["end_ns"], posted["start_ns"][0])
            note("post", posted["start_ns"][0], posted["end_ns"][0])
            later = arrived["end_ns"] > posted["end_ns"][0]
            if later.any():
                note("two copies, until the row is seen", posted["end_ns"][0],
                     arrived["end_ns"][later][0])  # fmt: skip
    for sent in theirs[theirs["kind"] == kinds.SEND_ROW]:
        waits = mine[
            (mine["kind"] == kinds.WAIT_ROW) & (mine["value"] == sent["value"])
        ]
        if len(waits):
            note("notify's row: sent until seen", sent["end_ns"], waits["end_ns"][0])
    return {name: float(np.median(values)) for name, values in found.items()}


def main() -> None:
    """Measure and print."""
    journey = TokenThereAndBack()
    us = np.array([journey.once() for _ in range(ROUNDS)])[20:]
    with trace.record(journey.buffer) as recorded:
        for _ in range(TRACED):
            journey.once()
    everyone = journey.ranks.allgather(np.percentile(us, [50, 99]).tolist())
    if journey.ranks.rank == 0:
        median, late = np.max(np.array(everyone), axis=0)
        print(f"there and back: median {median:.0f} us, p99 {late:.0f}")
        for name, value in parts(recorded.events, 0).items():
            print(f"    {name:36}{value:7.1f} us")
    journey.buffer.destroy()


if __name__ == "__main__":
    main()
