"""One scenario: the inputs of all ranks at once, and what the oracle says comes out.

`Scenario` states shapes, routing and config; `World` makes every rank's arrays and the
results of `numba_ep.reference`; `same` and the `compare_...` functions are bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numba_ep import reference
from numba_ep.config import Config
from numba_ep.reference import BF16, E4M3, RankInput, Received, unique_rows
from numba_ep.slot import slot_bytes

SMALL_RINGS = Config(4, 2, 4, 2, 4)
Route = Callable[[int, int], np.ndarray]


@dataclass(frozen=True)
class Scenario:
    """What the ranks send, and how. route(rank, tokens): ids [T, K], default random."""

    tokens: Sequence[int]  # one count a rank
    hidden: int = 64
    num_topk: int = 2
    num_experts: int = 8
    config: Config = SMALL_RINGS
    combine_config: Config | None = None  # default: config
    fp8: bool = False
    with_topk: bool = True
    with_weights: bool = True
    expert_alignment: int = 1
    num_worst_tokens: int = 0
    dropped: float = 0.1
    seed: int = 0
    route: Route | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def config_back(self) -> Config:
        return self.combine_config or self.config

    @property
    def num_bytes(self) -> int:
        """The least num_rdma_bytes that serves every operation of a round."""
        num_topk = self.num_topk if self.with_topk else 0
        scales = self.hidden // 128 if self.fp8 else 0
        sent = slot_bytes(self.hidden * (1 if self.fp8 else 2), scales, num_topk)
        back = slot_bytes(self.hidden * 2, 0, num_topk)
        return 2 * max(
            self.config.ring_bytes(self.num_ranks, sent),
            self.config_back.ring_bytes(self.num_ranks, back),
        )

    def next_round(self) -> Scenario:
        """The same shapes with another payload and other routing."""
        return replace(self, seed=self.seed + 1)


def all_ids(*ids: int) -> Route:
    """A route: every token has these experts."""
    return lambda rank, tokens: np.tile(np.array(ids, np.int64), (tokens, 1))


class World:
    """All ranks' inputs of one scenario, made once, and the oracle's results."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        s = scenario
        ids = [self._ids(rank) for rank in range(s.num_ranks)]
        layouts = [reference.layout(i, s.num_experts, s.num_ranks) for i in ids]
        self.layouts = layouts
        rngs = [np.random.default_rng([s.seed, r, 1]) for r in range(s.num_ranks)]
        weights = [g.random(i.shape, np.float32) for g, i in zip(rngs, ids)]
        full = [
            RankInput(*self._rows(rank), layouts[rank].is_token_in_rank, i, w)
            for rank, (i, w) in enumerate(zip(ids, weights))
        ]
        self.inputs = [self._given(sent) for sent in full]
        # Counts per expert come from num_tokens_per_expert, top-k arrays or not.
        self.received = [self._received(full, rank) for rank in range(s.num_ranks)]
        counts = [len(r.src_rank) for r in self.received]
        self.rows = [
            _order_matters(unique_rows(rank, n, s.hidden, BF16, s.seed + 1000), rng)
            for rank, (n, rng) in enumerate(zip(counts, rngs))
        ]
        self.weights = [
            rng.standard_normal((n, s.num_topk), np.float32)
            for rng, n in zip(rngs, counts)
        ]
        self.biases = [
            tuple(
                _order_matters(unique_rows(r, t, s.hidden, BF16, s.seed + i), rngs[r])
                for i in (2000, 3000)
            )
            for r, t in enumerate(s.tokens)
        ]

    def _ids(self, rank: int) -> np.ndarray:
        s, tokens = self.scenario, self.scenario.tokens[rank]
        if s.route is not None:
            return s.route(rank, tokens)
        return reference.random_topk(
            rank, tokens, s.num_topk, s.num_experts, s.seed, s.dropped
        )[0]

    def _rows(self, rank: int) -> tuple[np.ndarray, np.ndarray | None]:
        s, tokens = self.scenario, self.scenario.tokens[rank]
        if not s.fp8:
            return unique_rows(rank, tokens, s.hidden, BF16, s.seed), None
        rng = np.random.default_rng([s.seed, rank, 2])
        scales = rng.random((tokens, s.hidden // 128), np.float32)
        return unique_rows(rank, tokens, s.hidden, E4M3, s.seed), scales

    def _given(self, sent: RankInput) -> RankInput:
        if not self.scenario.with_topk:
            return sent._replace(topk_idx=None, topk_weights=None)
        if not self.scenario.with_weights:
            return sent._replace(topk_weights=None)
        return sent

    def _received(self, full: list[RankInput], rank: int) -> Received:
        s = self.scenario
        counts = reference.dispatch(full, rank, s.num_experts, s.expert_alignment)
        received = reference.dispatch(self.inputs, rank, s.num_experts)
        worst = s.num_worst_tokens > 0
        listed = [] if worst else counts.num_recv_tokens_per_expert
        return received._replace(num_recv_tokens_per_expert=listed)

    @property
    def most_received(self) -> int:
        """The largest number of rows that any rank receives."""
        return max(len(received.src_rank) for received in self.received)

    def dispatch_args(self, rank: int) -> dict[str, Any]:
        """Keyword arguments of this rank's dispatch, with the oracle's layout."""
        sent, layout, s = self.inputs[rank], self.layouts[rank], self.scenario
        return {
            "x": sent.x if sent.scales is None else (sent.x, sent.scales),
            "num_tokens_per_rank": layout.num_tokens_per_rank,
            "is_token_in_rank": layout.is_token_in_rank,
            "num_tokens_per_expert": layout.num_tokens_per_expert,
            "topk_idx": sent.topk_idx,
            "topk_weights": sent.topk_weights,
            "expert_alignment": s.expert_alignment,
            "num_worst_tokens": s.num_worst_tokens,
            "config": s.config,
        }

    def combine_args(self, rank: int, num_biases: int = 0) -> dict[str, Any]:
        """Keyword arguments of this rank's combine, but for the handle."""
        s = self.scenario
        weights = self.weights[rank] if s.with_topk and s.with_weights else None
        return {
            "x": self._padded(self.rows[rank]),
            "topk_weights": None if weights is None else self._padded(weights),
            "bias": self.biases[rank][:num_biases] or None,
            "config": s.config_back,
        }

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        """Rows that no token wants behind the true ones, with num_worst_tokens."""
        extra = max(0, self.scenario.num_worst_tokens - len(rows))
        padding = np.full((extra, rows.shape[1]), np.nan, np.float32)
        return np.concatenate([rows, padding.astype(rows.dtype)])

    def combined(
        self, rank: int, num_biases: int = 0
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """What this rank's combine must return."""
        s = self.scenario
        weights = self.weights if s.with_topk and s.with_weights else None
        bias = self.biases[rank][:num_biases]
        tokens = s.tokens[rank]
        return reference.combine(self.rows, self.received, rank, tokens, weights, bias)


def _order_matters(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Half the elements become +-2**24: they cancel, and swallow what came before."""
    large = rng.choice(np.array([2**24, -(2**24)], np.float32), rows.shape)
    return np.where(rng.random(rows.shape) < 0.5, large.astype(BF16), rows)


# Comparing.


def same(got: Any, expected: Any, what: str) -> None:
    """Fail unless both are None or agree in dtype, shape and every bit."""
    if expected is None or got is None:
        assert got is None and expected is None, f"{what}: got {got!r}"
        return
    difference = reference.first_difference(got, expected)
    assert difference is None, f"{what}: {difference}"
    assert got.flags.c_contiguous, f"{what}: expected row-major rows"


def compare_received(got: Sequence[Any], world: World, rank: int) -> None:
    """Fail unless `got` is what dispatch returns: x, ids, weights, list of counts."""
    x, topk_idx, topk_weights, counts = got
    expected, s = world.received[rank], world.scenario
    num_rows = len(expected.src_rank)
    x, scales = x if s.fp8 else (x, None)
    total = s.num_worst_tokens or num_rows
    parts = {"x": x, "scales": scales, "topk_idx": topk_idx}
    for name, part in {**parts, "topk_weights": topk_weights}.items():
        if part is not None:
            assert len(part) == total, f"recv {name}: {len(part)} rows for {total}"
        same(
            part if part is None else part[:num_rows],
            getattr(expected, name),
            f"rank {rank} recv {name}",
        )
    if topk_idx is not None:
        assert (topk_idx[num_rows:] == -1).all(), "rows without a token have experts"
    assert counts == expected.num_recv_tokens_per_expert, f"{counts=}"


def compare_handle(handle: Any, world: World, rank: int, gathered: list[Any]) -> None:
    """Fail unless the six fields are right; gathered: all ranks' [channel matrices]."""
    is_in_rank, sent, received, rank_prefix, num_received, heads = handle
    expected = world.received[rank]
    same(is_in_rank, world.layouts[rank].is_token_in_rank, "is_token_in_rank")
    counts = np.bincount(expected.src_rank, minlength=world.scenario.num_ranks)
    same(rank_prefix, np.cumsum(counts).astype(np.int32), "recv_rdma_rank_prefix_sum")
    assert num_received == len(expected.src_rank)
    totals = np.ascontiguousarray(sent[:, -1])
    same(totals, world.layouts[rank].num_tokens_per_rank, "channel prefix")
    for peer, (sent_by_peer, _) in enumerate(gathered):
        same(received[peer], sent_by_peer[rank], f"recv channel prefix from {peer}")
    per_channel = np.diff(sent, axis=1, prepend=0)
    assert (per_channel >= 0).all()
    for peer, rows in enumerate(per_channel):
        tokens = np.flatnonzero(is_in_rank[:, peer])
        positions = np.full(len(is_in_rank), -1, np.int32)
        positions[tokens] = np.concatenate([np.arange(n) for n in rows])
        same(np.ascontiguousarray(heads[:, peer]), positions, f"heads to {peer}")
