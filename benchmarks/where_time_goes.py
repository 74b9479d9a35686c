"""What each role does while an operation lasts, from a trace.

    mpirun -np 2 python benchmarks/where_time_goes.py [num_sms:capacity:chunk]

FP8 dispatch and BF16 combine in a row, DeepEP's sizes on a GPU and small ones on a CPU.
For every kind of event: how long a warp of that role is in it, microseconds an
operation and share of the operation's time; means over warps, operations and ranks.
Senders that wait for credit and receivers that wait for tails stand for what is between
them: the link, or a proxy whose posts take as long as the chunks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import numba_ep
from numba_ep import device as devices
from numba_ep import trace
from numba_ep.arrays import from_host
from numba_ep.group import members
from numba_ep.kernels.events import KINDS, POST_CHUNK
from numba_ep.meeting import use_local_gpu
from numba_ep.selfcheck import Sizes, payload, routing

IN_A_ROW, SKIPPED = 8, 2  # operations; of them the first, which begin a row
TRACED = 32768  # events a warp, and of the proxy


class Share(NamedTuple):
    """One kind of event: microseconds a warp and operation."""

    role: str
    what: str
    us: float


def operation_ns(events: np.ndarray) -> float:
    """From one operation's first event on a rank to the next one's, on average."""
    steps: list[float] = []
    for rank in np.unique(events["rank"]):
        mine = events[(events["rank"] == rank) & (events["operation"] >= 0)]
        numbers = np.unique(mine["operation"])[SKIPPED:]
        starts = [mine["start_ns"][mine["operation"] == n].min() for n in numbers]
        steps += np.diff(starts).tolist()
    return float(np.mean(steps))


def shares(events: np.ndarray) -> list[Share]:
    """A Share for each kind that occurs, in the order of KINDS.

    The proxy is one thread; its events belong to no operation and are counted from the
    first operation that counts.
    """
    found = []
    kernels = events[events["operation"] >= 0]
    numbers = np.unique(kernels["operation"])[SKIPPED:]
    begin = kernels["start_ns"][kernels["operation"] == numbers[0]].min()
    for kind, (role, what) in enumerate(KINDS):
        mine = events[(events["kind"] == kind) & (events["start_ns"] >= begin)]
        if not len(mine):
            continue
        of_role = [k for k, (name, _) in enumerate(KINDS) if name == role]
        everyone = events[np.isin(events["kind"], of_role)]
        names = ["rank"] if kind >= POST_CHUNK else ["rank", "channel", "warp"]
        warps = len(np.unique(everyone[names]))
        total = float((mine["end_ns"] - mine["start_ns"]).sum())
        found.append(Share(role, what, total / warps / len(numbers) / 1e3))
    return found


def table(name: str, events: np.ndarray) -> None:
    """Print the shares of one kind of operation."""
    whole = operation_ns(events) / 1e3
    print(f"{name}: {whole:.0f} us an operation")
    for role, what, us in shares(events):
        print(f"    {role:22}{what:22}{us:8.1f} us {us / whole:6.0%}", flush=True)


def main() -> None:
    """Record and print."""
    comm = numba_ep.world()
    ranks = members(comm)
    device = devices.select(None)
    on_gpu = devices.target() == "cuda"
    if on_gpu:
        use_local_gpu(ranks, device)
    size = (4096, 7168, 8, 256) if on_gpu else (512, 1024, 8, 16 * ranks.num_ranks)
    sizes = Sizes(*size, 0)
    config = numba_ep.Buffer.get_dispatch_config(ranks.num_ranks)
    if len(sys.argv) > 1:
        num_sms, capacity, chunk = (int(part) for part in sys.argv[1].split(":"))
        config = numba_ep.Config(num_sms, chunk, capacity, chunk, capacity)
    hint = config.get_rdma_buffer_size_hint(2 * sizes.hidden, ranks.num_ranks)
    with numba_ep.Buffer(
        comm, num_rdma_bytes=hint, num_qps_per_rank=config.num_channels
    ) as buffer:
        topk_idx = from_host(routing(ranks.rank, sizes)[0], on_gpu)
        layout = buffer.get_dispatch_layout(topk_idx, sizes.num_experts)
        per_rank, _, per_expert, in_rank, _ = layout
        x, scales = payload(ranks.rank, sizes, "fp8")
        assert scales is not None
        sent = from_host(x, on_gpu), from_host(scales, on_gpu)
        handle = buffer.dispatch(
            sent, None, per_rank, None, in_rank, per_expert, config=config
        )[4]
        assert handle is not None
        rows = from_host(payload(ranks.rank, sizes, "bf16")[0], on_gpu)
        rows = buffer.dispatch(rows, handle=handle, config=config)[0]
        finish = buffer._endpoint.asynchronous
        for name in ("dispatch FP8", "combine BF16"):
            with trace.record(buffer, TRACED) as recorded:
                for _ in range(IN_A_ROW):
                    if name == "combine BF16":
                        buffer.combine(rows, handle, config=config, async_finish=finish)
                    else:
                        buffer.dispatch(
                            sent, handle=handle, config=config, async_finish=finish
                        )
                buffer._endpoint.runtime.synchronize()
            if ranks.rank == 0:
                if any(recorded.lost):
                    print(f"{name}: events lost, the shares are too small")
                table(name, recorded.events)


if __name__ == "__main__":
    main()
