"""Dispatch and combine on ranks that are threads, bit for bit as the oracle says."""

from typing import Any

import numpy as np
import pytest
from conftest import LONG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from world import (
    MOST_RANKS,
    Scenario,
    World,
    check,
    check_cached,
    check_combine,
    check_dispatch,
    check_round,
    run,
)

from numba_ep.config import Config

TINY = Config(2, 2, 4, 2, 4)
RANKS = [n for n in (1, 2, 3, 4, 8, 16, 33) if n <= MOST_RANKS]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_numbers_of_ranks(num_ranks: int, fp8: bool) -> None:
    tokens = [3 + 5 * rank % 7 for rank in range(num_ranks)]
    check(
        Scenario(
            tokens,
            hidden=256 if fp8 else 72,
            num_topk=min(6, 2 * num_ranks),
            num_experts=2 * num_ranks,
            fp8=fp8,
        )
    )


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    ("with_topk", "with_weights"),
    [(False, False), (True, False), (True, True)],
    ids=["no top-k", "ids alone", "ids and weights"],
)
def test_top_k_arrays(with_topk: bool, with_weights: bool, fp8: bool) -> None:
    check(
        Scenario(
            (13, 4, 9),
            hidden=128,
            num_topk=3,
            num_experts=9,
            fp8=fp8,
            with_topk=with_topk,
            with_weights=with_weights,
        )
    )


@pytest.mark.parametrize("warps", [1, 2, 3, 4, 8])
def test_tiny_rings(warps: int) -> None:
    """37 tokens through four slots; with more warps rows are packed out of order."""
    check(Scenario((37,) * 4, config=TINY, num_topk=3), warps=warps)


@pytest.mark.parametrize("chunk", [1, 3])
def test_smallest_rings(chunk: int) -> None:
    config = Config(2, chunk, 2 * chunk, chunk, 2 * chunk)
    check(Scenario((29, 31, 30), num_experts=6, config=config), warps=3)


@pytest.mark.parametrize("num_sms", [2, 6, 48])
def test_channels(num_sms: int) -> None:
    """Also with fewer tokens than channels, some of them without any token."""
    config = Config(num_sms, 2, 4, 2, 4)
    check(Scenario((5, 0, 17), num_experts=3, config=config))


def test_no_tokens_at_all() -> None:
    check(Scenario((0, 0, 0), num_experts=6))


def test_all_tokens_dropped() -> None:
    check(Scenario((11, 5), dropped=1.1))


@pytest.mark.parametrize("hot", [0, 5])
def test_one_hot_expert(hot: int) -> None:
    def route(rank: int, tokens: int) -> np.ndarray:
        return np.full((tokens, 1), hot, np.int64)

    check(Scenario((19,) * 3, num_topk=1, num_experts=6, config=TINY, route=route))


def test_rows_that_are_no_power_of_two() -> None:
    """Rows of 16 bytes up, no row a multiple of another's."""
    for hidden in (8, 24, 1000, 2000, 4000):
        check(Scenario((6, 7), hidden=hidden, num_topk=1, num_experts=2), rounds=1)


def test_all_experts_of_a_token() -> None:
    check(Scenario((6, 7, 8), num_topk=12, num_experts=12, dropped=0.0))


def test_shapes_that_change_between_calls() -> None:
    """Config, hidden, dtype, top-k and experts change on one Buffer."""
    narrow = Scenario((9, 12, 4), hidden=64, num_topk=1, num_experts=3, config=TINY)
    wide = Scenario(
        (4, 0, 21),
        hidden=384,
        num_topk=5,
        num_experts=12,
        config=Config(6, 3, 9, 3, 9),
        combine_config=Config(6, 1, 7, 1, 7),
        fp8=True,
    )
    plain = Scenario((3, 3, 3), num_experts=6, config=Config(2, 4, 8, 4, 8))
    scenarios = [narrow, wide, plain, wide.next_round(), narrow.next_round()]
    worlds = [World(scenario) for scenario in scenarios]

    def program(buffer: Any) -> None:
        for world in worlds:
            check_round(buffer, world)

    run(program, 3, max(scenario.num_bytes for scenario in scenarios))


def test_handles_outlive_later_operations() -> None:
    worlds = [World(Scenario((9, 12, 4), num_experts=6, seed=i)) for i in range(3)]

    def program(buffer: Any) -> None:
        handles = [check_dispatch(buffer, world) for world in worlds]
        for i in (1, 0, 2, 0):
            check_combine(buffer, worlds[i], handles[i], i)
            check_cached(buffer, worlds[i], handles[i])

    run(program, 3, worlds[0].scenario.num_bytes)


def test_two_buffers_take_turns() -> None:
    from numba_ep.buffer import Buffer

    worlds = [World(Scenario((9, 12), seed=i)) for i in range(2)]
    num_bytes = worlds[0].scenario.num_bytes

    def program(buffer: Any) -> None:
        with Buffer(buffer.group, num_rdma_bytes=num_bytes) as other:
            for _ in range(2):
                handle = check_dispatch(buffer, worlds[0])
                check_round(other, worlds[1])
                check_combine(buffer, worlds[0], handle, 1)

    run(program, 2, num_bytes)


@pytest.mark.parametrize("warps", [1, 3])
def test_two_hundred_rounds_back_to_back(warps: int) -> None:
    """Nothing but the operations themselves orders the ranks; rings of two slots."""
    scenario = Scenario((7, 3, 5, 0), config=Config(4, 1, 2, 1, 2))
    worlds = []
    for _ in range(200):
        scenario = scenario.next_round()
        worlds.append(World(scenario))

    def program(buffer: Any) -> None:
        for world in worlds:
            check_combine(buffer, world, check_dispatch(buffer, world), 1)

    run(program, 4, scenario.num_bytes, warps)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_own_tokens_post_nothing(num_ranks: int) -> None:
    """Tokens that stay on their rank never reach the transport."""

    def route(rank: int, tokens: int) -> np.ndarray:
        return np.full((tokens, 1), rank, np.int64)

    scenario = Scenario(
        (9,) * num_ranks, num_topk=1, num_experts=num_ranks, route=route
    )
    world = World(scenario)

    def program(buffer: Any) -> int:
        check_round(buffer, world)
        return buffer.statistics().puts

    # Five operations, each with one row of counts for every peer.
    rows = 5 * (num_ranks - 1)
    assert run(program, num_ranks, scenario.num_bytes) == [rows] * num_ranks


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Shapes and routing of up to six ranks, ids repeated and skewed."""
    num_ranks = draw(st.integers(1, 6))
    fp8, with_topk = draw(st.booleans()), draw(st.booleans())
    num_experts = num_ranks * draw(st.integers(1, 5))
    num_topk = draw(st.integers(1, 9))
    chunk = draw(st.integers(1, 5))
    num_sms = 2 * draw(st.integers(1, 6))
    capacities = st.integers(2 * chunk, 5 * chunk)
    configs = [Config(num_sms, 1, 2, chunk, draw(capacities)) for _ in range(2)]
    skew = draw(st.sampled_from([0.0, 1.0, 4.0]))
    seed = draw(st.integers(0, 1 << 30))

    def route(rank: int, tokens: int) -> np.ndarray:
        rng = np.random.default_rng([seed, rank])
        odds = np.arange(1, num_experts + 2) ** -skew
        odds /= odds.sum()
        return rng.choice(num_experts + 1, (tokens, num_topk), p=odds) - 1

    scenario = Scenario(
        tokens=draw(
            st.lists(st.integers(0, 40), min_size=num_ranks, max_size=num_ranks)
        ),
        hidden=128 * draw(st.integers(1, 4)) if fp8 else 8 * draw(st.integers(1, 40)),
        num_topk=num_topk,
        num_experts=num_experts,
        config=configs[0],
        combine_config=configs[1],
        fp8=fp8,
        with_topk=with_topk,
        with_weights=draw(st.booleans()),
        expert_alignment=draw(st.sampled_from([1, 3, 128])),
        seed=seed,
        route=route,
    )
    worst = draw(st.sampled_from([0, 1, 100]))
    if worst:
        worst = max(1, World(scenario).most_received) + worst - 1
    return Scenario(**{**vars(scenario), "num_worst_tokens": worst})


@settings(
    max_examples=2000 if LONG else 40,
    print_blob=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(scenario=scenarios(), warps=st.integers(1, 5))
def test_any_shape_and_routing(scenario: Scenario, warps: int) -> None:
    check(scenario, rounds=1, warps=warps)
