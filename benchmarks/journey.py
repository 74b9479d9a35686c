"""One token's whole journey, numba_ep against NumPy and MPI_Alltoallv.

    mpirun -np 4 python benchmarks/journey.py

A round is cast (BF16 to FP8 with a float32 scale per 128 values), layout, dispatch,
and combine in BF16. Between dispatch and combine both sides turn the received rows
back into BF16 with the same function; that stands for the experts and is not timed.
Both sides get the same routing; layout and the allocation of results count on both.

The rounds of the sides take turns in one run. Both parts of a round begin after a
barrier, and a round takes as long as its slowest rank. Before any of it, the
results of the two sides are compared bit by bit. The peer is also timed before a
numba_ep.Buffer exists: when "peer alone" is faster than "peer" in run after run, the
Buffer's idle threads disturb the peer and the ratio flatters numba_ep. (Those rounds
come earlier, not in turn, so one run does not tell.)

A step's time holds its waiting: on fewer cores than ranks, dispatch of the rank that
was cast first waits for the last. Compare totals; steps only show where to look.

The peer casts with ml_dtypes; "peer, table" replaces only that by a table lookup.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import traceback
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from alltoallv_peer import (
    BFLOAT16,
    GROUP,
    AlltoallvPeer,
    Array,
    Layout,
    Received,
    cast_to_fp8_by_table,
    dequantise,
)
from meeting_points import meet, sleeping_barrier
from mpi4py import MPI

# The package of this source tree, also where it is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

STEPS = ("cast", "layout", "dispatch", "combine", "total")
NUM_WARMUP_ROUNDS = 3


class Inputs(NamedTuple):
    """One rank's tokens.

    x: [num_tokens, hidden] bfloat16; topk_idx: [num_tokens, num_topk] int64, distinct
    in a row; topk_weights: [num_tokens, num_topk] float32.
    """

    x: Array
    topk_idx: Array
    topk_weights: Array


class NumbaEpSide:
    """numba_ep behind the methods of AlltoallvPeer."""

    def __init__(self, comm: MPI.Intracomm, num_experts: int, hidden: int) -> None:
        import numba_ep

        self.numba_ep = numba_ep
        self.num_experts = num_experts
        num_ranks = comm.Get_size()
        configs = (
            numba_ep.Buffer.get_dispatch_config(num_ranks),
            numba_ep.Buffer.get_combine_config(num_ranks),
        )
        num_rdma_bytes = max(
            config.get_rdma_buffer_size_hint(hidden * BFLOAT16.itemsize, num_ranks)
            for config in configs
        )
        self.buffer = numba_ep.Buffer(comm, num_rdma_bytes=num_rdma_bytes)

    def cast(self, x: Array) -> tuple[Array, Array]:
        x_fp8, scales = self.numba_ep.cast_to_fp8(x, buffer=self.buffer)
        return x_fp8, scales

    def layout(self, topk_idx: Array) -> Layout:
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            topk_idx, self.num_experts
        )
        return Layout(per_rank, per_expert, in_rank)

    def dispatch(
        self,
        x_fp8: Array,
        scales: Array,
        topk_idx: Array,
        topk_weights: Array,
        layout: Layout,
    ) -> Received:
        (recv_x, recv_scales), recv_idx, recv_weights, counts, handle, _ = (
            self.buffer.dispatch(
                (x_fp8, scales),
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                num_tokens_per_rank=layout.tokens_per_rank,
                is_token_in_rank=layout.is_token_in_rank,
                num_tokens_per_expert=layout.tokens_per_expert,
            )
        )
        return Received(
            recv_x, recv_scales, recv_idx, recv_weights, list(counts), handle
        )

    def combine(
        self, rows: Array, handle: Any, topk_weights: Array
    ) -> tuple[Array, Array]:
        combined, combined_weights, _ = self.buffer.combine(
            rows, handle, topk_weights=topk_weights
        )
        return combined, combined_weights

    def close(self) -> None:
        """Collective."""
        self.buffer.destroy()


Side = AlltoallvPeer | NumbaEpSide


def make_inputs(args: argparse.Namespace, rank: int) -> Inputs:
    """Draw one rank's tokens from (seed, rank)."""
    rng = np.random.default_rng((args.seed, rank))
    x = rng.standard_normal((args.num_tokens, args.hidden), dtype=np.float32)
    scores = rng.random((args.num_tokens, args.num_experts), dtype=np.float32)
    topk_idx = np.argsort(scores, axis=1)[:, : args.num_topk].astype(np.int64)
    topk_weights = rng.random((args.num_tokens, args.num_topk), dtype=np.float32)
    return Inputs(x.astype(BFLOAT16), topk_idx, topk_weights)


def run_round(
    side: Side, comm: MPI.Intracomm, inputs: Inputs
) -> tuple[dict[str, Array], list[float]]:
    """One round. Returns every result by name and this rank's seconds by STEPS."""
    meet(comm)
    began = perf_counter()
    x_fp8, scales = side.cast(inputs.x)
    cast_done = perf_counter()
    layout = side.layout(inputs.topk_idx)
    layout_done = perf_counter()
    received = side.dispatch(
        x_fp8, scales, inputs.topk_idx, inputs.topk_weights, layout
    )
    dispatch_done = perf_counter()

    # Untimed work must not take the cores from ranks that are still dispatching.
    sleeping_barrier(comm)
    rows = dequantise(received.x, received.scales)

    meet(comm)
    combine_began = perf_counter()
    combined, combined_weights = side.combine(
        rows, received.handle, received.topk_weights
    )
    combine_s = perf_counter() - combine_began
    sleeping_barrier(comm)

    results = {
        "x_fp8": x_fp8,
        "scales": scales,
        **layout._asdict(),
        "recv_x": received.x,
        "recv_scales": received.scales,
        "recv_topk_idx": received.topk_idx,
        "recv_topk_weights": received.topk_weights,
        "recv_tokens_per_expert": np.array(received.tokens_per_expert),
        "combined": combined,
        "combined_topk_weights": combined_weights,
    }
    seconds = [
        cast_done - began,
        layout_done - cast_done,
        dispatch_done - layout_done,
        combine_s,
        dispatch_done - began + combine_s,
    ]
    return results, seconds


def first_difference(got: dict[str, Array], expected: dict[str, Array]) -> str:
    """Describe the first element that differs in its bits; "" when none does.

    Integer arrays may differ in width (counts are int32 or int64).
    """
    for name, want in expected.items():
        have = np.asarray(got[name])
        if have.shape != want.shape:
            return f"{name}: expected shape {want.shape}, got {have.shape}"
        if want.dtype.kind == "i" and have.dtype.kind == "i":
            differs = have != want
        elif have.dtype != want.dtype:
            return f"{name}: expected {want.dtype}, got {have.dtype}"
        else:
            bits = np.dtype(f"u{want.dtype.itemsize}")
            differs = have.view(bits) != want.view(bits)
        if differs.any():
            at = tuple(int(i) for i in np.argwhere(differs)[0])
            return (
                f"{name}{list(at)}: expected {want[at]}, got {have[at]} "
                f"({np.count_nonzero(differs)} of {want.size} differ)"
            )
    return ""


def check_equal(
    sides: dict[str, Side], comm: MPI.Intracomm, inputs: Inputs, reference: str
) -> None:
    """Run every side once and compare it with the reference side on all ranks."""
    expected, _ = run_round(sides[reference], comm, inputs)
    for name, side in sides.items():
        got, _ = run_round(side, comm, inputs)
        for rank, text in enumerate(comm.allgather(first_difference(got, expected))):
            if text:
                raise AssertionError(f"{name}, rank {rank}: {text}")


def time_rounds(
    sides: dict[str, Side], comm: MPI.Intracomm, inputs: Inputs, num_rounds: int
) -> dict[str, Array]:
    """Rounds of all sides in turn. Returns seconds, [num_rounds, len(STEPS)], of the
    slowest rank at each step; its total is that of one rank, not the sum of these."""
    local = np.zeros((len(sides), NUM_WARMUP_ROUNDS + num_rounds, len(STEPS)))
    in_order = list(enumerate(sides.values()))
    for round_index in range(local.shape[1]):
        # There and back: no side always runs in the wake of the same other one.
        for side_index, side in in_order if round_index % 2 == 0 else in_order[::-1]:
            _, seconds = run_round(side, comm, inputs)
            local[side_index, round_index] = seconds
    slowest = np.empty_like(local)
    comm.Allreduce(local, slowest, op=MPI.MAX)
    return dict(zip(sides, slowest[:, NUM_WARMUP_ROUNDS:], strict=True))


def report(
    args: argparse.Namespace, num_ranks: int, times: dict[str, Array]
) -> dict[str, Any]:
    """Print the table and return it with every round's total, for --json."""
    sizes = ", ".join(
        f"{name.replace('_', ' ')} {getattr(args, name)}"
        for name in ("num_tokens", "hidden", "num_topk", "num_experts", "rounds")
    )
    print(f"{num_ranks} ranks, {sizes}; {os.cpu_count()} CPUs")
    print("median of the slowest rank, ms")
    print(" " * 18 + "".join(f"{step:>10}" for step in STEPS) + "  (min - max)")
    medians = {}
    for name, seconds in times.items():
        ms = seconds * 1e3
        medians[name] = dict(zip(STEPS, np.median(ms, axis=0).tolist(), strict=True))
        columns = "".join(f"{medians[name][step]:10.2f}" for step in STEPS)
        spread = f"  ({ms[:, -1].min():.1f} - {ms[:, -1].max():.1f})"
        print(f"{name:18}" + columns + spread)
    ratios = {}
    if "numba_ep" in times:
        for name in times:
            if name != "numba_ep" and not name.endswith(" alone"):
                ratio = medians[name]["total"] / medians["numba_ep"]["total"]
                ratios[name] = ratio
                print(f"{name} / numba_ep: {ratio:.2f}")
    return {
        "num_ranks": num_ranks,
        "options": {k: v for k, v in vars(args).items() if k != "json"},
        "cpus": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "ml_dtypes": ml_dtypes.__version__,
            "mpi": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        },
        "median_ms": medians,
        "ratio": ratios,
        "total_ms": {k: (v[:, -1] * 1e3).tolist() for k, v in times.items()},
    }


def parse_arguments(num_ranks: int) -> argparse.Namespace:
    """Read the command line; refuse sizes that do not divide."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-tokens", type=int, default=512, help="tokens a rank")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer-only", action="store_true", help="no numba_ep")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    if args.hidden % GROUP:
        parser.error(f"--hidden: expected a multiple of {GROUP}, got {args.hidden}")
    if args.num_experts % num_ranks:
        parser.error(
            f"--num-experts: expected a multiple of {num_ranks} ranks, "
            f"got {args.num_experts}"
        )
    if not 1 <= args.num_topk <= args.num_experts:
        parser.error(f"--num-topk: expected 1 to {args.num_experts} (--num-experts)")
    if args.num_tokens < 1 or args.rounds < 1:
        parser.error("--num-tokens and --rounds: expected at least 1")
    return args


def main() -> None:
    """Compare, time, print."""
    comm = MPI.COMM_WORLD
    args = parse_arguments(comm.Get_size())
    inputs = make_inputs(args, comm.Get_rank())
    peers: dict[str, Side] = {
        "peer": AlltoallvPeer(comm, args.num_experts),
        "peer, table": AlltoallvPeer(comm, args.num_experts, cast_to_fp8_by_table),
    }
    check_equal(peers, comm, inputs, reference="peer")
    alone = time_rounds(peers, comm, inputs, args.rounds)
    times = {f"{name} alone": seconds for name, seconds in alone.items()}
    if not args.peer_only:
        ours = NumbaEpSide(comm, args.num_experts, args.hidden)
        sides: dict[str, Side] = {"numba_ep": ours, **peers}
        check_equal(sides, comm, inputs, reference="peer")
        times = {**time_rounds(sides, comm, inputs, args.rounds), **times}
        ours.close()
    if comm.Get_rank() == 0:
        figures = report(args, comm.Get_size(), times)
        if args.json:
            Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001 (reported, and every rank ended)
        # The other ranks may be inside a collective call and would wait for ever.
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
