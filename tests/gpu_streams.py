"""On GPUs: streams, events, late refusals, and what a call costs the host.

    mpirun -np 2 python tests/gpu_streams.py    one GPU will do; two are better

One line a check; the exit status is 1 if one fails.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ml_dtypes
import numpy as np

import numba_ep
from numba_ep import device as devices
from numba_ep import reference as ref
from numba_ep.arrays import from_host, to_host
from numba_ep.group import members
from numba_ep.meeting import use_local_gpu

TOKENS, HIDDEN, TOPK, EXPERTS = 64, 1024, 4, 16
BF16 = np.dtype(ml_dtypes.bfloat16)


class Rank:
    """One rank's Buffer and a dispatch to repeat."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.comm = numba_ep.world()
        self.ranks = members(self.comm)
        use_local_gpu(self.ranks, devices.select("cuda"))
        self.config = numba_ep.Config(8, 8, 32, 8, 32)
        num_bytes = self.config.get_rdma_buffer_size_hint(
            2 * HIDDEN, self.ranks.num_ranks
        )
        self.buffer = numba_ep.Buffer(
            self.comm, num_rdma_bytes=num_bytes, device="cuda", timeout_s=timeout_s
        )
        ranks = range(self.ranks.num_ranks)
        ids = [ref.random_topk(rank, TOKENS, TOPK, EXPERTS)[0] for rank in ranks]
        in_ranks = [ref.layout(i, EXPERTS, len(ranks)).is_token_in_rank for i in ids]
        self.inputs = [
            ref.RankInput(
                ref.unique_rows(rank, TOKENS, HIDDEN, BF16), None, in_ranks[rank],
                None, None,
            )
            for rank in ranks
        ]  # fmt: skip
        self.x = from_host(self.inputs[self.ranks.rank].x, True)
        topk_idx = from_host(ids[self.ranks.rank], True)
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            topk_idx, EXPERTS
        )
        self.received, _, _, _, self.handle, _ = self.buffer.dispatch(
            self.x, None, per_rank, None, in_rank, per_expert, config=self.config
        )
        assert self.handle is not None
        self.expected = ref.dispatch(self.inputs, self.ranks.rank, EXPERTS)

    def check_rows(self, x: Any, factor: int = 1) -> None:
        """`x` is what the dispatch of factor * self.x must bring."""
        want = (self.expected.x.astype(np.float32) * factor).astype(BF16)
        difference = ref.first_difference(to_host(x, BF16), want)
        assert difference is None, difference

    def again(self, x: Any, **options: Any) -> tuple[Any, Any]:
        """A cached dispatch: rows and event."""
        result = self.buffer.dispatch(x, self.handle, config=self.config, **options)
        return result[0], result[-1]


def caught(call: Any) -> Exception | None:
    """What `call` raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (the checks look at it)
        return error
    return None


def check_fresh(rank: Rank) -> None:
    """The first dispatch of all."""
    rank.check_rows(rank.received)


def check_input_is_waited_for(rank: Rank) -> None:
    """x is still being computed on the caller's stream when dispatch is called."""
    import cupy

    busy = cupy.ones((4096, 4096), cupy.float32)
    x = cupy.zeros_like(rank.x)
    for _ in range(20):
        busy = busy @ busy * 1e-4
    x[...] = rank.x
    got, _ = rank.again(x)
    x[...] = 0  # after the dispatch has read it, by stream order
    rank.check_rows(got)


def check_other_stream(rank: Rank) -> None:
    """A caller that works on a stream of its own."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = rank.x + rank.x
        got, _ = rank.again(x)
        stream.synchronize()
        rank.check_rows(got, 2)


def check_async_finish(rank: Rank) -> None:
    """Several operations under way; inputs are dropped; events are waited for late."""
    kept = []
    for factor in (1, 2, 1, 2, 1, 2, 1, 2, 1, 2):
        x = rank.x if factor == 1 else rank.x + rank.x
        kept.append((factor, *rank.again(x, async_finish=True)))
        del x
    for factor, got, event in kept:
        event.current_stream_wait()
        event.current_stream_wait()
        rank.check_rows(got, factor)


def check_combine(rank: Rank) -> None:
    """There and back without a word from the host."""
    got, event = rank.again(rank.x, async_finish=True)
    assert rank.handle is not None
    combined, _, _ = rank.buffer.combine(
        got, rank.handle, config=rank.config, previous_event=event
    )
    times = rank.inputs[rank.ranks.rank].is_token_in_rank.sum(axis=1)[:, None]
    x = rank.inputs[rank.ranks.rank].x.astype(np.float32)
    want = (x * times).astype(BF16)
    assert ref.first_difference(to_host(combined, BF16), want) is None


def check_late_refusal(rank: Rank) -> None:
    """The culprit raises at once, the others at the event's wait or the next call."""
    for waits in (True, False):
        x = rank.x if rank.ranks.rank else rank.x.astype(np.float32)
        if rank.ranks.rank == 0:
            error = caught(functools.partial(rank.again, x, async_finish=True))
            assert isinstance(error, ValueError), repr(error)
        else:
            _, event = rank.again(x, async_finish=True)
            if waits:
                error = caught(event.current_stream_wait)
                assert isinstance(error, numba_ep.RefusedError), repr(error)
                assert error.culprit == 0
        if not waits:
            rank.buffer._endpoint.runtime.synchronize()
            # Raised late, it refuses the next operation: the ranks stay in step.
            error = caught(lambda: rank.again(rank.x))
            assert isinstance(error, numba_ep.RefusedError), repr(error)
            assert error.culprit == int(rank.ranks.rank == 0)
    got, _ = rank.again(rank.x)
    rank.check_rows(got)


def check_host_time(rank: Rank) -> None:
    """What a cached dispatch costs the host while the GPU is idle."""
    times = []
    for _ in range(60):
        rank.buffer._endpoint.runtime.synchronize()
        rank.ranks.barrier()
        began = time.perf_counter()
        _, event = rank.again(rank.x, async_finish=True)
        times.append(time.perf_counter() - began)
        event.current_stream_wait()
    slowest = max(rank.ranks.allgather(statistics.median(times)))
    if rank.ranks.rank == 0:
        print(f"    host time of a cached dispatch: median {slowest * 1e6:.0f} us")


def check_timeout(rank: Rank) -> None:
    """A rank that does not come ends the Buffer, not the CUDA context."""
    import cupy

    rank.buffer.destroy()
    late = Rank(timeout_s=1.5)
    if late.ranks.rank == 0:
        _, event = late.again(late.x, async_finish=True)
        began = time.monotonic()
        error = caught(event.current_stream_wait)
        assert isinstance(error, numba_ep.PeerTimeout), repr(error)
        assert error.culprit == 1
        assert time.monotonic() - began < 10
        assert isinstance(caught(lambda: late.again(late.x)), numba_ep.PeerTimeout)
    else:
        time.sleep(4)
        assert isinstance(caught(lambda: late.again(late.x)), numba_ep.PeerTimeout)
    late.buffer.destroy()
    assert int(cupy.arange(1000).sum()) == 499500


CHECKS = (
    check_fresh, check_input_is_waited_for, check_other_stream, check_async_finish,
    check_combine, check_late_refusal, check_host_time, check_timeout,
)  # fmt: skip


def main() -> int:
    """Run all checks in order; the first failure ends the job."""
    rank = Rank()
    for check in CHECKS:
        try:
            check(rank)
        except BaseException:  # noqa: BLE001 (printed; the others cannot go on)
            print(f"FAILED on rank {rank.ranks.rank}: {check.__name__}")
            traceback.print_exc()
            sys.stderr.flush()
            rank.comm.Abort(1)
        if rank.ranks.rank == 0:
            print(f"  {check.__name__.removeprefix('check_').replace('_', ' ')}: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
