"""Dispatch and combine without numba_ep: NumPy, ml_dtypes and MPI_Alltoallv.

This is the program that numba_ep is measured against (see journey.py): what one
would write for the same job with the usual tools, every step vectorised. A token
is cast to FP8, gathered once per destination rank into a contiguous send buffer,
exchanged with Alltoallv, and arrives ordered by (source rank, token). Its result
row returns the same way and is added in float32 by ascending rank.

Run with four ranks on two cores, 512 tokens a rank, hidden 2048, top-8 of 64 experts,
the alternatives below took (median of 30 interleaved rounds, slowest rank, ms):

cast      float32 amax 37, amax on the bfloat16 bits 34, either in blocks of 64 tokens
          38 and 35: the cast of ml_dtypes is nearly all of it. Through a table of
          65,536 entries 14: not what one writes first, so it is a second method here
          (cast_to_fp8_by_table) and journey.py times both.
dispatch  one Alltoallv each for rows, scales, ids and weights 4.8; rows plus one
          structured array of the rest 4.8; all in one structured array 7.6, or 5.8 when
          strided views of it are returned; Isend/Irecv per rank 4.6; a send
          buffer kept between rounds 6.0.
return    rows and weights apart 4.0; in one structured array 6.7.
reduce    acc[tokens] += rows per source rank 19, the same in blocks of 32 tokens 12;
          gather by position, absent rows pointing at a row of zeros, in blocks of 32
          tokens 9.0; its sum over an axis 10; bfloat16 widened by a shift, not astype:
          no gain (measured apart from these rounds).

Ialltoall and Ialltoallv with sched_yield or a short sleep between tests, for ranks that
share a core, made whole rounds no faster (sleeping in the data exchange: slower).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Array = NDArray[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
GROUP = 128  # values that share one scale
FLOAT8_MAX = np.float32(448)
SMALLEST_AMAX = np.float32(1e-4)  # keeps 448 / amax finite for a group of zeros
REDUCE_BLOCK_TOKENS = 32  # the float32 accumulator of a block stays in the L2 cache


class Layout(NamedTuple):
    """Where the local tokens go.

    tokens_per_rank: [num_ranks] int64; tokens_per_expert: [num_experts] int64;
    is_token_in_rank: [num_tokens, num_ranks] bool.
    """

    tokens_per_rank: Array
    tokens_per_expert: Array
    is_token_in_rank: Array


class Handle(NamedTuple):
    """What combine must know of a dispatch.

    position: [num_ranks, num_tokens] int64, the place of each token's row among the
    rows sent, num_sent where the token did not go to that rank;
    sent, received: [num_ranks] int64, rows exchanged with each rank.
    """

    position: Array
    sent: Array
    received: Array


class Received(NamedTuple):
    """What dispatch delivers, ordered by (source rank, token).

    x: [num_received, hidden] float8_e4m3fn; scales: [num_received, hidden / 128]
    float32; topk_idx: [num_received, num_topk] int64, local expert ids, -1 for the
    experts of other ranks; topk_weights: the same shape, float32, 0 there;
    tokens_per_expert: rows for each local expert.
    """

    x: Array
    scales: Array
    topk_idx: Array
    topk_weights: Array
    tokens_per_expert: list[int]
    handle: Any


def _fp8_table() -> Array:
    """float8_e4m3fn bytes by the upper 16 bits of a float32: [65536] uint8."""
    upper = np.arange(1 << 16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        values = np.clip((upper << 16).view(np.float32), -FLOAT8_MAX, FLOAT8_MAX)
        return values.astype(FLOAT8).view(np.uint8)


FP8_TABLE = _fp8_table()


def _by_group(rows: Array) -> Array:
    """[num_rows, hidden] as [num_rows, hidden / 128, 128]; a view, also of no rows."""
    return rows.reshape(len(rows), rows.shape[1] // GROUP, GROUP)


def _amax_per_group(x: Array) -> Array:
    """Largest magnitude of each group of 128: [num_tokens, groups] float32.

    Without its sign bit, a bfloat16 orders like the integer of the same bits.
    """
    magnitude = x.view(np.uint16) & np.uint16(0x7FFF)
    amax = _by_group(magnitude).max(axis=-1).view(BFLOAT16).astype(np.float32)
    return np.asarray(np.maximum(amax, SMALLEST_AMAX))


def cast_to_fp8(x: Array) -> tuple[Array, Array]:
    """Quantise x, [num_tokens, hidden] bfloat16, in groups of 128.

    Returns ([num_tokens, hidden] float8_e4m3fn, [num_tokens, hidden / 128] float32);
    a value is about float32(x_fp8) * scale.
    """
    amax = _amax_per_group(x)
    values = _by_group(x.astype(np.float32))
    values *= (FLOAT8_MAX / amax)[..., None]
    np.clip(values, -FLOAT8_MAX, FLOAT8_MAX, out=values)
    return values.astype(FLOAT8).reshape(x.shape), amax / FLOAT8_MAX


def cast_to_fp8_by_table(x: Array, block_tokens: int = 64) -> tuple[Array, Array]:
    """The same bytes as cast_to_fp8 from a table of 65,536 entries.

    The lower half of a float32 matters only by being zero or not, so its upper half
    with the last bit set in that case (rounding to odd) still rounds as the whole.
    """
    amax = _amax_per_group(x)
    factors = (FLOAT8_MAX / amax)[..., None]
    x_fp8 = np.empty(x.shape, np.uint8)
    for start in range(0, len(x), block_tokens):
        block = slice(start, start + block_tokens)
        values = _by_group(x[block].astype(np.float32))
        values *= factors[block]
        halves = values.astype("<f4", copy=False).view("<u2").reshape(-1, x.shape[1], 2)
        FP8_TABLE.take(
            halves[..., 1] | (halves[..., 0] != 0), out=x_fp8[block], mode="clip"
        )
    return x_fp8.view(FLOAT8), amax / FLOAT8_MAX


def dequantise(x: Array, scales: Array) -> Array:
    """The stand-in for the experts: float32(x) * scale as bfloat16, the shape of x."""
    values = _by_group(x.astype(np.float32))
    values *= scales[..., None]
    return values.reshape(x.shape).astype(BFLOAT16)


def _starts(counts: Array) -> Array:
    """Exclusive prefix sum."""
    return np.cumsum(counts) - counts


class AlltoallvPeer:
    """Cast, dispatch and combine over an MPI communicator; dispatch and combine are
    collective. num_experts must be a multiple of the number of ranks."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        num_experts: int,
        cast: Callable[[Array], tuple[Array, Array]] = cast_to_fp8,
    ) -> None:
        self.comm = comm
        self.cast = cast
        self.num_ranks = comm.Get_size()
        self.num_experts = num_experts
        self.experts_per_rank = num_experts // self.num_ranks
        if self.experts_per_rank * self.num_ranks != num_experts:
            raise ValueError(
                f"num_experts: expected a multiple of {self.num_ranks} ranks, "
                f"got {num_experts}"
            )

    def layout(self, topk_idx: Array) -> Layout:
        """Count the tokens of topk_idx, [num_tokens, num_topk] int64, -1 for none."""
        num_tokens = len(topk_idx)
        # An id of -1 is rank -1 here, which indexes the spare last column.
        dst_rank = topk_idx // self.experts_per_rank
        in_rank = np.zeros((num_tokens, self.num_ranks + 1), bool)
        in_rank[np.arange(num_tokens)[:, None], dst_rank] = True
        in_rank = in_rank[:, :-1]
        per_expert = np.bincount(topk_idx.ravel() + 1, minlength=self.num_experts + 1)
        return Layout(in_rank.sum(axis=0), per_expert[1:], in_rank)

    def dispatch(
        self,
        x: Array,
        scales: Array,
        topk_idx: Array,
        topk_weights: Array,
        layout: Layout,
    ) -> Received:
        """Send each token's row once to every rank that owns one of its experts.

        x: [num_tokens, hidden] float8_e4m3fn; scales: [num_tokens, hidden / 128]
        float32; topk_idx, topk_weights: [num_tokens, num_topk] int64 and float32.
        """
        sent = layout.tokens_per_rank
        received, tokens_per_expert = self._exchange_counts(layout)
        # Sorted by destination rank, then by token: the order of the send buffers.
        dst_rank, token = np.nonzero(layout.is_token_in_rank.T)
        local_idx = topk_idx[token] - (dst_rank * self.experts_per_rank)[:, None]
        is_local = (local_idx >= 0) & (local_idx < self.experts_per_rank)
        columns = (
            x.view(np.uint8)[token],
            scales[token],
            np.where(is_local, local_idx, -1),
            np.where(is_local, topk_weights[token], np.float32(0)),
        )
        x_bytes, recv_scales, recv_idx, recv_weights = (
            self._exchange(column, sent, received) for column in columns
        )
        position = np.full((self.num_ranks, len(x)), len(token))
        position[dst_rank, token] = np.arange(len(token))
        return Received(
            x_bytes.view(FLOAT8),
            recv_scales,
            recv_idx,
            recv_weights,
            tokens_per_expert,
            Handle(position, sent, received),
        )

    def combine(
        self, rows: Array, handle: Handle, topk_weights: Array
    ) -> tuple[Array, Array]:
        """Return rows to the ranks they came from and add those of each token.

        rows: [num_received, hidden] bfloat16 and topk_weights: [num_received,
        num_topk] float32, both in dispatch's order. Sums in float32, from +0, by
        ascending rank; one rounding to bfloat16 at the end. Returns ([num_tokens,
        hidden] bfloat16, [num_tokens, num_topk] float32).
        """
        back = self._exchange(rows, handle.received, handle.sent, spare_rows=1)
        back_weights = self._exchange(
            topk_weights, handle.received, handle.sent, spare_rows=1
        )
        # Tokens that did not visit a rank read these rows of zeros.
        back[-1] = 0
        back_weights[-1] = 0

        num_tokens, hidden = handle.position.shape[1], rows.shape[1]
        combined = np.empty((num_tokens, hidden), BFLOAT16)
        for start in range(0, num_tokens, REDUCE_BLOCK_TOKENS):
            block = handle.position[:, start : start + REDUCE_BLOCK_TOKENS]
            total = np.zeros((block.shape[1], hidden), np.float32)
            for position in block:
                total += back[position].astype(np.float32)
            combined[start : start + REDUCE_BLOCK_TOKENS] = total
        combined_weights = np.zeros((num_tokens, topk_weights.shape[1]), np.float32)
        for position in handle.position:
            combined_weights += back_weights[position]
        return combined, combined_weights

    def _exchange_counts(self, layout: Layout) -> tuple[Array, list[int]]:
        """Tell every rank its rows and their counts by expert: one small Alltoall.

        Returns the rows coming from each rank, [num_ranks] int64, and the rows for
        each local expert.
        """
        send = np.empty((self.num_ranks, 1 + self.experts_per_rank), np.int64)
        send[:, 0] = layout.tokens_per_rank
        send[:, 1:] = layout.tokens_per_expert.reshape(self.num_ranks, -1)
        recv = np.empty_like(send)
        self.comm.Alltoall(send, recv)
        return recv[:, 0].copy(), recv[:, 1:].sum(axis=0).tolist()

    def _exchange(
        self, rows: Array, sent: Array, received: Array, spare_rows: int = 0
    ) -> Array:
        """Alltoallv of contiguous rows, sent and received counted by rank.

        spare_rows more rows are allocated after the received ones, not set.
        """
        shape = (int(received.sum()) + spare_rows, *rows.shape[1:])
        out = np.empty(shape, rows.dtype)
        row_bytes = rows.dtype.itemsize * int(np.prod(rows.shape[1:]))
        send_counts, recv_counts = sent * row_bytes, received * row_bytes
        self.comm.Alltoallv(
            [rows.view(np.uint8), (send_counts, _starts(send_counts)), MPI.BYTE],
            [out.view(np.uint8), (recv_counts, _starts(recv_counts)), MPI.BYTE],
        )
        return out
