"""Faults that people met with comparable libraries, by case number: C35 to C43.

Sizes, the tests' own strength, worst-case outputs, ranks that disagree.
"""

import functools
from typing import Any

import numpy as np
import pytest
from world import (
    DEVICE,
    Change,
    Scenario,
    World,
    all_ids,
    caught,
    check,
    check_combine,
    check_disagreement,
    check_refused,
    check_round,
    compare_received,
    refuse_each,
    run,
    same,
    spawn,
)

from numba_ep import reference
from numba_ep.config import Config
from numba_ep.handle import EventOverlap
from numba_ep.reference import BF16, unique_rows

SMALL = Scenario((13, 9, 11, 12))


@pytest.mark.parametrize("lacking", [16, 1])
def test_c35_buffer_too_small(lacking: int) -> None:
    """Exact with the least size (every round here); below it on one rank: refused."""
    from numba_ep.buffer import Buffer

    # 129 scales a row; dispatch needs more than combine with its own config.
    config = Config(4, 2, 8, 2, 8)
    world = World(
        Scenario((5, 6), 16512, 2, 4, config, Config(4, 2, 4, 2, 4), fp8=True)
    )
    num_bytes = world.scenario.num_bytes

    def program(buffer: Any) -> None:
        for less in (lacking, num_bytes):
            mine = num_bytes - (less if buffer.rank == 1 else 0)
            with Buffer(buffer.group, num_rdma_bytes=mine, timeout_s=20.0) as other:
                args = world.dispatch_args(buffer.rank)
                call = functools.partial(other.dispatch, **args)
                for _ in range(2):
                    check_refused(other, call, 1, rf"num_rdma_bytes: .*{num_bytes}")
        check_round(buffer, world)

    run(program, 2, num_bytes)


def test_c36_row_offsets_beyond_32_bits() -> None:
    """The last rows of an x of over 4 GB that is never touched elsewhere."""
    hidden, tokens = 7168, 300_000
    x = np.zeros((tokens, hidden), BF16)
    assert x.nbytes > 1 << 32
    chosen = np.array([2**31 // (2 * hidden) + 1, 2**31 // hidden + 1, tokens - 1])
    x[chosen] = unique_rows(0, 3, hidden, BF16)
    ids = np.full((tokens, 1), -1, np.int64)
    ids[chosen] = [[0], [1], [0]]
    config = Config(4, 2, 4, 2, 4)

    def program(buffer: Any) -> None:
        empty = buffer.rank == 1
        own_ids = ids[:0] if empty else ids
        layout = buffer.get_dispatch_layout(own_ids, 2)
        result = buffer.dispatch(
            x[:0] if empty else x,
            num_tokens_per_rank=layout[0],
            is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2],
            topk_idx=own_ids,
            config=config,
        )
        mine = chosen[[1]] if empty else chosen[[0, 2]]
        same(result[0], np.ascontiguousarray(x[mine]), "x")

    run(program, 2, 2 * config.ring_bytes(2, 2 * hidden + 16))


def test_c38_the_checks_see_every_fault() -> None:
    """One wrong element, two swapped rows, a dropped contribution, a stale weight."""
    world = World(Scenario((13, 9), 128, fp8=True, dropped=0.0))
    good = world.received[0]

    def compare(**changed: Any) -> None:
        got = good._replace(**changed)
        counts = good.num_recv_tokens_per_expert
        arrays = (got.x, got.scales), got.topk_idx, got.topk_weights
        compare_received((*arrays, counts), world, 0)

    compare()
    swapped = np.arange(len(good.x))
    swapped[[2, 3]] = [3, 2]
    for name in ("x", "scales", "topk_idx", "topk_weights"):
        array = getattr(good, name)
        corrupted = array.copy()
        corrupted.view(np.uint8)[5, 1] ^= 1
        for wrong in (corrupted, array[swapped], array[:-1], array.astype(np.float64)):
            with pytest.raises(AssertionError):
                compare(**{name: wrong})
    with pytest.raises(AssertionError):
        compare(x=np.asfortranarray(good.x))

    back, part = world.received[1], [rows.copy() for rows in world.rows]
    part[1][(back.src_rank == 0) & (back.src_token == 7)] = 0

    class Fake:
        """Combines `rows`."""

        rank = 0

        def __init__(self, rows: list[np.ndarray]) -> None:
            self.rows = rows

        def combine(self, **args: Any) -> Any:
            every = (self.rows, world.received, 0, 13, world.weights)
            return *reference.combine(*every, args["bias"] or ()), EventOverlap()

    check_combine(Fake(world.rows), world, None, 1)
    with pytest.raises(AssertionError, match=r"combined x.*token 7,"):
        check_combine(Fake(part), world, None, 1)


def test_c39_num_worst_tokens() -> None:
    total = World(SMALL).most_received
    for worst in (sum(SMALL.tokens), total):
        check(Scenario(SMALL.tokens, num_worst_tokens=worst))
    check(Scenario((5, 5), num_topk=1, route=all_ids(-1), num_worst_tokens=3))


def test_c39_too_few_worst_tokens() -> None:
    """One less than the fullest rank receives: refused on all, nothing is written."""
    world = World(SMALL)
    counts = [len(received.src_rank) for received in world.received]
    fullest = counts.index(world.most_received)

    def program(buffer: Any) -> None:
        handle = check_round(buffer, world)
        args = world.dispatch_args(buffer.rank)
        args["num_worst_tokens"] = world.most_received - 1
        rank = f"{world.most_received}.*rank {fullest}"
        error = caught(lambda: buffer.dispatch(**args))
        assert isinstance(error, ValueError), repr(error)
        with pytest.raises(ValueError, match=rank):
            raise error
        args = {"x": args["x"], "handle": handle, "config": args["config"]}
        args["num_worst_tokens"] = world.most_received
        x = buffer.dispatch(**args)[0]
        assert len(x) == world.most_received
        same(x[: counts[buffer.rank]], world.received[buffer.rank].x, "x")
        if buffer.rank == fullest:
            args["num_worst_tokens"] -= 1
        call = functools.partial(buffer.dispatch, **args)
        check_refused(buffer, call, fullest, "num_worst_tokens")
        check_round(buffer, world)

    run(program, 4, SMALL.num_bytes)


@pytest.mark.parametrize("alignment", [1, 3, 128])
def test_c40_expert_alignment(alignment: int) -> None:
    """Experts with 0, 1, 128 and 129 tokens; neither rows nor ids are padded."""

    def route(rank: int, tokens: int) -> np.ndarray:
        ids = [1, *[2] * 128, *[3] * 129] if rank == 0 else [4] * 3
        return np.array(ids, np.int64)[:, None]

    scenario = Scenario((258, 3), 16, 1, 8, route=route, expert_alignment=alignment)
    world = World(scenario)
    counts = {1: [0, 1, 128, 129], 3: [0, 3, 129, 129], 128: [0, 128, 128, 256]}
    assert world.received[0].num_recv_tokens_per_expert == counts[alignment]
    topk_idx = world.received[0].topk_idx
    assert topk_idx is not None
    assert np.bincount(topk_idx[:, 0]).tolist() == counts[1]
    check(scenario)


def test_c42_combine_rows_that_differ_from_the_handle() -> None:
    row = np.zeros((1, 64), BF16)
    bad: dict[str, tuple[Change, str]] = {
        "n + 1": (lambda a: {"x": np.concatenate([a["x"], row])}, "x: .*shape"),
        "n - 1": (lambda a: {"x": a["x"][:-1]}, "x: .*shape"),
        "other hidden": (lambda a: {"x": a["x"][:, :32].copy()}, "x: .*shape"),
        "float16": (lambda a: {"x": a["x"].astype(np.float16)}, "x: .*dtype"),
        "float8": (lambda a: {"x": a["x"].astype("float8_e4m3fn")}, "x: .*dtype"),
        "top-k": (
            lambda a: {"topk_weights": a["topk_weights"][:, :1].copy()},
            "topk_w",
        ),
    }
    refuse_each(World(SMALL), "combine", bad)


def test_c43_ranks_that_disagree() -> None:
    """Every rank learns who differs, and in what."""
    base = Scenario((6, 6, 6), hidden=128, num_experts=6)
    others = {
        "chunk": Scenario((6, 6, 6), 128, 2, 6, Config(4, 1, 4, 1, 4)),
        "num_channels": Scenario((6, 6, 6), 128, 2, 6, Config(6, 2, 4, 2, 4)),
        "capacity": Scenario((6, 6, 6), 128, 2, 6, Config(4, 2, 6, 2, 6)),
        "num_topk": Scenario((6, 6, 6), 128, 3, 6),
        "hidden": Scenario((6, 6, 6), 136, 2, 6),
        "num_experts": Scenario((6, 6, 6), 128, 2, 9),
        "dtype": Scenario((6, 6, 6), 128, 2, 6, fp8=True),
        "has_weights": Scenario((6, 6, 6), 128, 2, 6, with_weights=False),
        "expert_alignment": Scenario((6, 6, 6), 128, 2, 6, expert_alignment=8),
        "num_worst_tokens": Scenario((6, 6, 6), 128, 2, 6, num_worst_tokens=18),
    }
    worlds = {field: World(scenario) for field, scenario in others.items()}
    world = World(base)
    num_bytes = max(each.num_bytes for each in (base, *others.values()))

    def program(buffer: Any) -> None:
        rank = buffer.rank
        handle = check_round(buffer, world)
        for odd, (field, other) in enumerate(worlds.items()):
            odd = odd % 2 + 1
            args = (other if rank == odd else world).dispatch_args(rank)
            call = functools.partial(buffer.dispatch, **args)
            check_disagreement(buffer, call, odd, field)
            check_round(buffer, world)
        x, config = world.inputs[rank].x, base.config
        combine = functools.partial(
            buffer.combine, handle=handle, **world.combine_args(rank)
        )
        cached = functools.partial(buffer.dispatch, x, handle, config=config)
        check_disagreement(buffer, combine if rank == 1 else cached, 1, "kind")
        dispatch = functools.partial(buffer.dispatch, **world.dispatch_args(rank))
        check_disagreement(buffer, cached if rank == 2 else dispatch, 2, "kind")
        check_combine(buffer, world, handle)

    run(program, 3, num_bytes)


def test_c43_constructors_that_disagree() -> None:
    from numba_ep.buffer import Buffer

    def program(group: Any) -> None:
        queues = 3 if group.Get_rank() == 1 else 2
        with pytest.raises(ValueError, match=r"num_qps_per_rank.*rank 1"):
            Buffer(group, num_rdma_bytes=1024, num_qps_per_rank=queues, device=DEVICE)

    spawn(program, 3, 20.0)
