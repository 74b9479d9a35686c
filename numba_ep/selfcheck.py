"""The checks of `python -m numba_ep.test`: every result bit for bit against the oracle.

Every rank makes the inputs of all ranks from the seed, so that it can compute what it
must receive without asking anyone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from numba_ep import reference
from numba_ep.arrays import from_host, to_host
from numba_ep.buffer import Buffer
from numba_ep.reference import RankInput, Received
from numba_ep.slot import SCALE_GROUP

DATA = ("fp8", "bf16", "random")
NUM_CHECKS = 1 + 3 * 2 * len(DATA)  # of Checker: the layout, three a journey
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


class Sizes(NamedTuple):
    """The shape of the work, per rank."""

    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    seed: int


class Outcome(NamedTuple):
    """One check on one rank; `difference` is None where all bits agree."""

    name: str
    difference: str | None


def payload(
    rank: int, sizes: Sizes, data: str
) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
    """x and scales of a rank: fp8 and bf16 have every element unique in (rank, token,
    column); random is normally distributed."""
    shape = (sizes.num_tokens, sizes.hidden)
    if data == "random":
        rng = np.random.default_rng([sizes.seed, rank])
        return rng.standard_normal(shape, np.float32).astype(BFLOAT16), None
    dtype = FLOAT8 if data == "fp8" else BFLOAT16
    x = reference.unique_rows(rank, *shape, dtype, sizes.seed)
    if data != "fp8":
        return x, None
    rng = np.random.default_rng([sizes.seed, rank, 8])
    scales = rng.uniform(2.0**-8, 1, (shape[0], sizes.hidden // SCALE_GROUP))
    return x, scales.astype(np.float32)


def inputs(num_ranks: int, sizes: Sizes, data: str, with_topk: bool) -> list[RankInput]:
    """What every rank hands to dispatch."""
    everyone = []
    for rank in range(num_ranks):
        x, scales = payload(rank, sizes, data)
        topk_idx, weights = routing(rank, sizes)
        layout = reference.layout(topk_idx, sizes.num_experts, num_ranks)
        topk = (topk_idx, weights) if with_topk else (None, None)
        everyone.append(RankInput(x, scales, layout.is_token_in_rank, *topk))
    return everyone


def routing(rank: int, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Top-k ids and weights of a rank; a tenth of the ids is -1."""
    return reference.random_topk(
        rank, sizes.num_tokens, sizes.num_topk, sizes.num_experts, sizes.seed
    )


def expert_output(rank: int, received: Received) -> np.ndarray:
    """Stands in for the experts: rows in bfloat16 that tell the ranks apart."""
    x = received.x
    rows = x if received.scales is None else reference.cast_back(x, received.scales)
    return (rows.astype(np.float32) * np.float32(1 + rank / 8)).astype(BFLOAT16)


class Checker:
    """All checks of one rank on one Buffer."""

    def __init__(self, buffer: Buffer, sizes: Sizes, on_gpu: bool) -> None:
        self.buffer, self.sizes, self.on_gpu = buffer, sizes, on_gpu
        self.rank, self.num_ranks = buffer.rank, buffer.group_size

    def layout(self) -> Iterator[Outcome]:
        """get_dispatch_layout against the oracle; keeps it for the dispatches."""
        sizes = self.sizes
        topk_idx, _ = routing(self.rank, sizes)
        given = from_host(topk_idx, self.on_gpu)
        layout = self.buffer.get_dispatch_layout(given, sizes.num_experts)
        per_rank, _, per_expert, in_rank, _ = layout
        self.counts = per_rank, in_rank, per_expert
        expected = reference.layout(topk_idx, sizes.num_experts, self.num_ranks)
        got = (per_rank, per_expert, in_rank)
        yield Outcome("layout", differences(zip(expected._fields, got, expected)))

    def journeys(self) -> Iterator[Outcome]:
        """Dispatch, cached dispatch and combine for every kind of data."""
        for data in DATA:
            for with_topk in (True, False):
                yield from self.journey(data, with_topk)

    def journey(self, data: str, with_topk: bool) -> Iterator[Outcome]:
        """One token's way there and back."""
        name = f"{data}/{'topk' if with_topk else 'no-topk'}"
        everyone = inputs(self.num_ranks, self.sizes, data, with_topk)
        mine = everyone[self.rank]
        experts = self.sizes.num_experts
        expected = reference.dispatch(everyone, self.rank, experts)
        x, scales, _, topk_idx, weights = (
            None if part is None else from_host(part, self.on_gpu) for part in mine
        )
        per_rank, in_rank, per_expert = self.counts
        sent = x if scales is None else (x, scales)
        recv_x, recv_idx, recv_weights, counts, handle, _ = self.buffer.dispatch(
            sent,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=weights,
        )
        found = differences(_rows(recv_x, expected))
        if with_topk:
            arrays = (
                ("recv_topk_idx", recv_idx, expected.topk_idx),
                ("recv_topk_weights", recv_weights, expected.topk_weights),
            )
            found = found or differences(arrays)
            if counts != expected.num_recv_tokens_per_expert:
                found = found or f"rows for each expert: got {counts}"
        yield Outcome(f"dispatch/{name}", found)
        again = self.buffer.dispatch(sent, handle=handle)[0]
        yield Outcome(f"cached/{name}", differences(_rows(again, expected)))
        yield self._combine(name, mine, expected, recv_weights, handle)

    def _combine(
        self, name: str, mine: RankInput, received: Received, weights: Any, handle: Any
    ) -> Outcome:
        sizes, rank = self.sizes, self.rank
        rng = np.random.default_rng([sizes.seed, rank, 16])
        shape = (sizes.num_tokens, sizes.hidden)
        bias = tuple(
            rng.standard_normal(shape, np.float32).astype(BFLOAT16) for _ in range(2)
        )
        rows = from_host(expert_output(rank, received), self.on_gpu)
        given_bias = tuple(from_host(b, self.on_gpu) for b in bias)
        combined, got_weights, _ = self.buffer.combine(
            rows, handle, topk_weights=weights, bias=given_bias
        )
        # Only this rank's own tokens matter to it: leave the others' out.
        nothing = RankInput._make(
            None if part is None else part[:0] for part in mine
        )
        only_mine = [mine if r == rank else nothing for r in range(self.num_ranks)]
        parts = [
            reference.dispatch(only_mine, r, sizes.num_experts)
            for r in range(self.num_ranks)
        ]
        expected, expected_weights = reference.combine(
            [expert_output(r, part) for r, part in enumerate(parts)],
            parts,
            rank,
            sizes.num_tokens,
            None if weights is None else [_weights(part) for part in parts],
            bias,
        )
        arrays: list[tuple[str, Any, Any]] = [("combined_x", combined, expected)]
        if weights is not None:
            arrays.append(("combined_topk_weights", got_weights, expected_weights))
        return Outcome(f"combine/{name}", differences(arrays))


def _weights(received: Received) -> np.ndarray:
    assert received.topk_weights is not None
    return received.topk_weights


def _rows(recv_x: Any, expected: Received) -> list[tuple[str, Any, Any]]:
    if expected.scales is None:
        return [("recv_x", recv_x, expected.x)]
    x, scales = recv_x
    return [("recv_x", x, expected.x), ("recv_x scales", scales, expected.scales)]


def differences(arrays: Any) -> str | None:
    """The first difference among (name, got, expected) as a sentence, or None."""
    for name, got, expected in arrays:
        found = reference.first_difference(to_host(got, expected.dtype), expected)
        if found is not None:
            return f"{name}: {found}"
    return None
