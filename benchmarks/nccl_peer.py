"""numba_ep beside torch and NCCL, NVLink and peer access unused by either.

    mpirun -np 2 python benchmarks/nccl_peer.py [num_sms:capacity:chunk]

The same job both ways, one rank a GPU: dispatch FP8 rows and scales, combine BF16 rows,
routing known (numba_ep: by a handle; the peer: index lists and splits made before).
DeepEP's sizes: 4096 tokens, hidden 7168, top-8 of 256 experts. The peer is what one
writes in torch: index_select, all_to_all_single, index_add_ in float32, cast to BF16.
Rows must be equal, sums as close as float32 sums in another order are. The two take
turns; medians of the slowest rank, each call alone (the GPU idle before it) and one of
four rounds in a row. GB/s: bytes of rows and scales sent to other ranks. Last,
all_to_all_single alone on BF16 rows.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ["NCCL_P2P_DISABLE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from mpi4py import MPI

import numba_ep
from numba_ep import reference
from numba_ep.selfcheck import Sizes, payload, routing

SIZES = Sizes(4096, 7168, 8, 256, 0)
ROUNDS, WARM_UP, IN_A_ROW = 10, 2, 4


class NcclPeer:
    """Dispatch and combine by all_to_all_single; the routing is given."""

    def __init__(self, in_rank: torch.Tensor) -> None:
        ranks = in_rank.shape[1]
        lists = [in_rank[:, rank].nonzero().flatten() for rank in range(ranks)]
        self.tokens = torch.cat(lists)  # by destination rank, ascending in each
        sent = torch.tensor([len(one) for one in lists], device="cuda")
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        self.sent, self.received = sent.tolist(), received.tolist()
        self.num_tokens = in_rank.shape[0]

    def exchange(
        self, rows: torch.Tensor, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        """all_to_all_single of rows of bytes."""
        rows = rows.view(torch.uint8)
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent)
        return out

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """FP8 rows and scales to the ranks of their experts."""
        packed = (one.view(torch.uint8)[self.tokens] for one in (x, scales))
        rows, factors = (self.exchange(p, self.sent, self.received) for p in packed)
        return rows.view(x.dtype), factors.view(scales.dtype)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """BF16 rows back to their tokens, added in float32."""
        back = self.exchange(rows, self.received, self.sent).view(rows.dtype)
        total = torch.zeros(
            self.num_tokens, rows.shape[1], dtype=torch.float32, device="cuda"
        )
        return total.index_add_(0, self.tokens, back.float()).to(rows.dtype)


def on_gpu(array: Any) -> torch.Tensor:
    """A NumPy array of any dtype of ml_dtypes on this rank's GPU."""
    dtype = getattr(torch, str(array.dtype))
    raw = torch.from_numpy(array.view("u1").copy())
    return raw.cuda().view(dtype).reshape(array.shape)


def medians_ms(
    comm: MPI.Intracomm, sides: dict[str, Callable[[], Any]]
) -> dict[str, float]:
    """Of the slowest rank; the sides take turns, all ranks begin together."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS + WARM_UP):
        for name, call in sides.items():
            torch.cuda.synchronize()
            comm.Barrier()
            began = perf_counter()
            call()
            torch.cuda.synchronize()
            times[name].append((perf_counter() - began) * 1e3)
    return {
        name: max(comm.allgather(statistics.median(all_times[WARM_UP:])))
        for name, all_times in times.items()
    }


def main() -> None:
    """Compare results, then times."""
    comm = MPI.COMM_WORLD
    rank, ranks = comm.Get_rank(), comm.Get_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    where = comm.bcast(f"/tmp/nccl_peer-{os.getpid()}")
    dist.init_process_group(
        "nccl", init_method=f"file://{where}", rank=rank, world_size=ranks
    )
    shape = sys.argv[1] if len(sys.argv) > 1 else None
    if shape is None:
        config = numba_ep.Buffer.get_dispatch_config(ranks)
    else:
        num_sms, capacity, chunk = (int(part) for part in shape.split(":"))
        config = numba_ep.Config(num_sms, chunk, capacity, chunk, capacity)
    topk, _ = routing(rank, SIZES)
    in_rank = on_gpu(reference.layout(topk, SIZES.num_experts, ranks).is_token_in_rank)
    peer = NcclPeer(in_rank)
    x, scales = (on_gpu(part) for part in payload(rank, SIZES, "fp8"))
    with numba_ep.Buffer(
        comm,
        num_rdma_bytes=config.get_rdma_buffer_size_hint(2 * SIZES.hidden, ranks, 8),
        num_qps_per_rank=config.num_channels,
        device="cuda",
    ) as buffer:
        layout = buffer.get_dispatch_layout(on_gpu(topk), SIZES.num_experts)
        per_rank, _, per_expert, in_rank, _ = layout
        (rows, factors), _, _, _, handle, _ = buffer.dispatch(
            (x, scales), None, per_rank, None, in_rank, per_expert, config=config
        )
        assert handle is not None
        theirs = peer.dispatch(x, scales)
        y = torch.randn(rows.shape, device="cuda").to(torch.bfloat16)
        sums = buffer.combine(y, handle, config=config)[0].float()
        their_sums = peer.combine(y).float()
        assert torch.equal(rows.view(torch.uint8), theirs[0].view(torch.uint8))
        assert torch.equal(factors, theirs[1])
        assert torch.allclose(sums, their_sums, rtol=2**-7, atol=1e-6)

        def dispatch() -> Any:
            return buffer.dispatch(
                (x, scales), handle, config=config, async_finish=True
            )[-1]

        def combine() -> Any:
            return buffer.combine(y, handle, config=config, async_finish=True)[-1]

        def ours_in_a_row() -> None:
            for _ in range(IN_A_ROW):
                dispatch()
                event = combine()
            event.current_stream_wait()

        def nccl_in_a_row() -> None:
            for _ in range(IN_A_ROW):
                peer.dispatch(x, scales)
                peer.combine(y)

        packed = y[: sum(peer.sent)].contiguous()
        packed = torch.cat([packed, packed])[: sum(peer.sent)]
        times = medians_ms(
            comm,
            {
                "dispatch": lambda: dispatch().current_stream_wait(),
                "combine": lambda: combine().current_stream_wait(),
                "in a row": ours_in_a_row,
                "NCCL dispatch": lambda: peer.dispatch(x, scales),
                "NCCL combine": lambda: peer.combine(y),
                "NCCL in a row": nccl_in_a_row,
                "all_to_all": lambda: peer.exchange(packed, peer.sent, peer.received),
            },
        )
    remote = sum(peer.sent) - peer.sent[rank]
    back = sum(peer.received) - peer.received[rank]
    fp8, bf16 = remote * SIZES.hidden // 32 * 33, back * 2 * SIZES.hidden
    sides = ("", "NCCL ")
    alone = [times[side + "dispatch"] + times[side + "combine"] for side in sides]
    row = [times[side + "in a row"] / IN_A_ROW for side in sides]
    lines = [
        ("dispatch FP8", times["dispatch"], times["NCCL dispatch"], fp8),
        ("combine BF16", times["combine"], times["NCCL combine"], bf16),
        ("both, alone", *alone, fp8 + bf16),
        ("both, in a row", *row, fp8 + bf16),
    ]
    if rank == 0:
        print(f"{'':<16}{'numba_ep':^20}{'torch + NCCL':^20}{'ratio':>6}")
        for name, ours_ms, theirs_ms, num_bytes in lines:
            parts = (
                f"{ms:8.3f} ms {num_bytes / ms / 1e6:5.1f} GB/s"
                for ms in (ours_ms, theirs_ms)
            )
            print(f"{name:<16}" + "".join(parts) + f"{theirs_ms / ours_ms:6.2f}")
        speed = remote * 2 * SIZES.hidden / times["all_to_all"] / 1e6
        print(f"all_to_all_single alone, BF16: {speed:.1f} GB/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
