"""Faults that people met with comparable libraries, by case number: C01 to C17.

After every refused call the next dispatch and combine on the same Buffer are exact.
"""

import re
import time
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from world import (
    DEVICE,
    MOST_RANKS,
    TIMEOUT_S,
    Change,
    Scenario,
    World,
    all_ids,
    caught,
    check,
    check_dispatch,
    check_refused,
    check_round,
    refuse_each,
    run,
    same,
    spawn,
)

from numba_ep import device as devices
from numba_ep import reference
from numba_ep.config import Config, default_config
from numba_ep.reference import BF16, E4M3

SMALL = Scenario((13, 9, 11, 12))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_c01_zero_tokens(fp8: bool) -> None:
    """A rank without tokens takes part in every operation all the same."""
    counts = [(0, 5, 0, 3), (3, 0, 5, 0), (0, 0, 0, 0)]
    worlds = [World(Scenario(tokens, hidden=256, fp8=fp8)) for tokens in counts]

    def program(buffer: Any) -> None:
        for world in worlds * 2:
            check_round(buffer, world)
        # All empty: the right shapes and dtypes, no top-k arrays needed.
        args = worlds[2].dispatch_args(buffer.rank)
        args.update(topk_idx=None, topk_weights=None)
        x, _, _, per_expert, handle, _ = buffer.dispatch(**args)
        if fp8:
            assert (x[1].shape, x[1].dtype) == ((0, 2), np.float32)
            x = x[0]
        assert (x.shape, x.dtype) == ((0, 256), E4M3 if fp8 else BF16)
        assert per_expert == [0, 0]
        rows, weights = np.empty((0, 256), BF16), np.empty((0, 2), np.float32)
        x, w, _ = buffer.combine(rows, handle, weights, config=args["config"])
        assert (x.shape, x.dtype, w.shape) == ((0, 256), BF16, (0, 2))

    run(program, 4, worlds[0].scenario.num_bytes)


@pytest.mark.parametrize(
    ("chunk", "asked", "capacity"),
    [(1, 2, 2), (3, 7, 9), (6, 128, 132), (20, 128, 140), (5, 9, 10)],
)
def test_c07_rings_that_chunks_do_not_divide(
    chunk: int, asked: int, capacity: int
) -> None:
    config = Config(4, chunk, asked, chunk, asked)
    assert config.capacity == capacity
    scenario = Scenario((101,) * 4, config=config)
    hint = config.get_rdma_buffer_size_hint(2 * scenario.hidden, 4)
    assert hint >= scenario.num_bytes
    check(scenario, num_bytes=hint)


@pytest.mark.parametrize(("chunk", "asked"), [(4, 4), (8, 4), (0, 4), (-1, 4), (4, 0)])
def test_c07_chunk_beyond_half_a_ring(chunk: int, asked: int) -> None:
    with pytest.raises(ValueError, match="num_max_rdma_chunked"):
        Config(4, chunk, asked, chunk, asked)


@pytest.mark.parametrize("num_ranks", [3, 6, 12])
def test_c11_default_configs(num_ranks: int) -> None:
    """The way a user goes: defaults for any number of ranks, the hint, a Buffer."""
    config = default_config(num_ranks, 2)
    hint = config.get_rdma_buffer_size_hint(2 * 128, num_ranks)
    experts = 2 * num_ranks
    for fp8 in (False, True):
        check(
            Scenario(
                (21,) * num_ranks, 128, 4, experts, config, fp8=fp8, expert_alignment=8
            ),
            num_bytes=hint,
        )


@pytest.mark.parametrize("num_ranks", [min(33, MOST_RANKS)])
def test_c11_defaults_without_config(num_ranks: int) -> None:
    """Neither dispatch nor combine is given a config, on many ranks."""
    config = default_config(num_ranks, *devices.defaults())
    world = World(Scenario((3,) * num_ranks, num_experts=num_ranks, config=config))

    def program(buffer: Any) -> None:
        assert buffer.get_dispatch_config(num_ranks) == config
        assert buffer.get_combine_config(num_ranks) == config
        args = world.dispatch_args(buffer.rank)
        del args["config"]
        handle = buffer.dispatch(**args)[4]
        args = world.combine_args(buffer.rank)
        del args["config"]
        x, weights, _ = buffer.combine(handle=handle, **args)
        expected = world.combined(buffer.rank)
        same(x, expected[0], "x")
        same(weights, expected[1], "weights")

    run(program, num_ranks, world.scenario.num_bytes)


def test_c12_one_rank_gives_dispatch_wrong_arguments() -> None:
    wide = Config(50, 2, 4, 2, 4)
    bad: dict[str, tuple[Change, str]] = {
        "dtype": (lambda a: {"x": a["x"].astype(np.float32)}, "x: .*bfloat16"),
        "no array": (lambda a: {"x": None}, "x"),
        "list": (lambda a: {"x": a["x"].tolist()}, "x"),
        "rows": (lambda a: {"x": a["x"][:-1]}, "topk_idx|is_token"),
        "weights": (
            lambda a: {"topk_weights": a["topk_weights"][:, :1]},
            "topk_weights",
        ),
        "no ids": (lambda a: {"topk_idx": None}, "topk_weights"),
        "3-D": (lambda a: {"x": a["x"][None]}, "x"),
        "odd row": (lambda a: {"x": np.empty((len(a["x"]), 9), BF16)}, "x: .*16 bytes"),
        "no row": (lambda a: {"x": np.empty((len(a["x"]), 0), BF16)}, "x"),
        "scales": (lambda a: {"x": (a["x"], a["x"])}, "x: .*float8"),
        "triple": (lambda a: {"x": (a["x"],) * 3}, "x"),
        "no layout": (lambda a: {"is_token_in_rank": None}, "is_token_in_rank"),
        "counts": (
            lambda a: {
                "num_tokens_per_rank": a["num_tokens_per_rank"].astype(np.int64)
            },
            "num_tokens_per_rank",
        ),
        "fewer": (
            lambda a: {"num_tokens_per_rank": a["num_tokens_per_rank"][:3]},
            "num_tokens_per_rank",
        ),
        "other sums": (
            lambda a: {"num_tokens_per_rank": a["num_tokens_per_rank"] + np.int32(1)},
            "num_tokens_per_rank",
        ),
        "experts": (
            lambda a: {"num_tokens_per_expert": a["num_tokens_per_expert"][:7]},
            "num_experts",
        ),
        "num_sms": (lambda a: {"config": wide}, "num_sms"),
        "config": (lambda a: {"config": (4, 2, 4, 2, 4)}, "config"),
        "array config": (lambda a: {"config": np.zeros(5)}, "config"),
        "alignment": (lambda a: {"expert_alignment": 0}, "expert_alignment"),
        "fraction": (lambda a: {"expert_alignment": 1.5}, "expert_alignment"),
        "huge": (lambda a: {"expert_alignment": 1 << 70}, "expert_alignment"),
        "worst": (lambda a: {"num_worst_tokens": -1}, "num_worst_tokens"),
        "floating worst": (lambda a: {"num_worst_tokens": 1e3}, "num_worst_tokens"),
        "event": (lambda a: {"previous_event": 7}, "previous_event"),
        "handle": (lambda a: {"handle": 7}, "handle|topk_idx"),
        "too small": (
            lambda a: {"config": Config(4, 2, 400, 2, 400)},
            "num_rdma_bytes",
        ),
    }
    refuse_each(World(SMALL), "dispatch", bad)


def test_c12_two_ranks_at_once() -> None:
    """Each has its own error; the others hear of the first."""
    world = World(SMALL)

    def program(buffer: Any) -> None:
        args = world.dispatch_args(buffer.rank)
        if buffer.rank in (1, 3):
            args["x"] = args["x"][: buffer.rank]
        call = partial(buffer.dispatch, **args)
        check_refused(buffer, call, 3 if buffer.rank == 3 else 1, "is_token|topk_idx")
        check_round(buffer, world)

    run(program, 4, SMALL.num_bytes)


def test_c12_numbers_of_other_types_are_numbers() -> None:
    """NumPy's integers compile nothing anew: peers do not wait for it."""
    world = World(SMALL)

    def program(buffer: Any) -> None:
        args = world.dispatch_args(buffer.rank)
        for kind in (np.int8, np.int32, np.int64, np.uint64):
            args.update(expert_alignment=kind(1), num_worst_tokens=kind(0))
            buffer.dispatch(**args)

    # Far shorter than a compilation.
    run(program, 4, SMALL.num_bytes, timeout_s=2.0)


def test_c12_no_memory_for_outputs() -> None:
    """Rows are already on their way: every rank hears of it at once, none can go on."""
    from numba_ep.errors import BufferAborted

    world = World(SMALL)

    def program(buffer: Any) -> None:
        check_round(buffer, world)
        args = world.dispatch_args(buffer.rank)
        huge = 1 << 56
        args["num_worst_tokens"] = huge  # the same on all ranks, too much for each
        error = caught(lambda: buffer.dispatch(**args))
        assert isinstance(error, (MemoryError, ValueError, BufferAborted)), repr(error)
        # All ranks alike: dead, or alive and exact.
        later = caught(lambda: [check_round(buffer, world), 1 / 0])
        alive = isinstance(later, ZeroDivisionError)
        assert alive or isinstance(later, BufferAborted), repr(later)
        assert len(set(buffer.group.allgather(alive))) == 1

    run(program, 4, SMALL.num_bytes)


def test_c12_one_rank_has_no_memory_for_outputs() -> None:
    from numba_ep.dispatch import Dispatch
    from numba_ep.errors import BufferAborted

    world = World(SMALL)
    failing: set[Any] = set()

    def program(buffer: Any) -> None:
        check_round(buffer, world)
        buffer.group.Barrier()
        if buffer.rank == 2:
            failing.add(buffer._endpoint)
        buffer.group.Barrier()
        started = time.monotonic()
        error = caught(lambda: check_dispatch(buffer, world))
        assert time.monotonic() - started < TIMEOUT_S / 4
        if buffer.rank == 2:
            assert isinstance(error, MemoryError), repr(error)
        else:
            assert isinstance(error, BufferAborted), repr(error)
            assert error.culprit == 2 and "rank 2" in str(error), error
        for _ in range(2):
            again = caught(lambda: check_dispatch(buffer, world))
            assert isinstance(again, BufferAborted), repr(again)

    outputs = Dispatch._outputs

    def fails(self: Any, rows: int) -> Any:
        if self.endpoint in failing:
            raise MemoryError("none left")
        return outputs(self, rows)

    with mock.patch.object(Dispatch, "_outputs", fails):
        run(program, 4, SMALL.num_bytes)


def test_c12_one_rank_gives_combine_wrong_arguments() -> None:
    bad: dict[str, tuple[Change, str]] = {
        "handle": (lambda a: {"handle": None}, "handle"),
        "tuple": (lambda a: {"handle": tuple(a["handle"])}, "handle"),
        "num_sms": (lambda a: {"config": Config(2, 2, 4, 2, 4)}, "num_sms"),
        "weights": (lambda a: {"topk_weights": a["topk_weights"][1:]}, "topk_weights"),
        "biases": (lambda a: {"bias": [a["x"][:0]] * 3}, "bias"),
        "text": (lambda a: {"bias": "none"}, "bias"),
        "event": (lambda a: {"previous_event": "e"}, "previous_event"),
        "stream": (lambda a: {"allocate_on_comm_stream": True}, "allocate_on_comm"),
    }
    refuse_each(World(SMALL), "combine", bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_qps_per_rank": 0},
        {"num_rdma_bytes": -1},
        {"timeout_s": 0.0},
        {"low_latency_mode": True},
        {"device": "abacus"},
        {"transport": "pigeon"},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_c12_one_rank_gives_the_constructor_wrong_arguments(
    bad: dict[str, Any],
) -> None:
    """Construction is collective: the others learn who could not take part, and why."""
    from numba_ep.buffer import Buffer

    name = next(iter(bad))

    def program(group: Any) -> None:
        args: dict[str, Any] = {"num_rdma_bytes": 1024, "device": DEVICE}
        rank = group.Get_rank()
        args.update(bad if rank == 1 else {})
        error = caught(lambda: Buffer(group, **args))
        # Stay until all have come: MPI gives no hint that a rank has returned.
        done.append(rank)
        while len(done) < 3:
            time.sleep(0.001)
        assert isinstance(error, (ValueError, RuntimeError)), repr(error)
        assert re.search(
            rf"{name}.*rank 1|rank 1.*{name}" if rank != 1 else name, str(error)
        )

    done: list[int] = []
    spawn(program, 3, 5.0)


def test_c14_one_rounding() -> None:
    """256 + 1 + 1: bfloat16 sums would stay at 256."""
    world = World(Scenario((4,) * 3, num_topk=3, num_experts=3, route=all_ids(0, 1, 2)))

    def program(buffer: Any) -> None:
        handle = check_dispatch(buffer, world)
        rows = np.full((12, 64), (256, 1, 1)[buffer.rank], BF16)
        x, _, _ = buffer.combine(rows, handle, config=world.scenario.config)
        same(x, np.full((4, 64), 258, BF16), "x")

    run(program, 3, world.scenario.num_bytes)


def test_c16_bias() -> None:
    """Added once, at the source, in float32 and before the rows (checked in a round);
    also to a token that went nowhere, also if it is the very array that is sent."""
    world = World(Scenario((6, 6), num_topk=1, num_experts=2, route=all_ids(0)))
    nowhere = World(Scenario((6, 6), num_topk=1, num_experts=2, route=all_ids(-1)))

    def program(buffer: Any) -> None:
        for each in (world, nowhere):
            check_round(buffer, each)
        handle, rows = check_dispatch(buffer, world), world.rows[buffer.rank]
        args = world.combine_args(buffer.rank)
        bias = world.rows[0][:6]
        x, _, _ = buffer.combine(handle=handle, **{**args, "bias": (bias, bias)})
        every = (world.rows, world.received, buffer.rank, 6)
        same(x, reference.combine(*every, bias=(bias, bias))[0], "aliased")
        same(rows, World(world.scenario).rows[buffer.rank], "input")

    run(program, 2, world.scenario.num_bytes)


def test_c16_negative_zeros() -> None:
    """-0 + -0 is -0 in float32, with one bias and with two."""
    world = World(Scenario((6, 6), num_topk=1, num_experts=2, dropped=0.5))
    zeros = np.full((6, 64), -0.0, BF16)
    rows = [np.full_like(array, -0.0) for array in world.rows]

    def program(buffer: Any) -> None:
        handle = check_dispatch(buffer, world)
        for bias in ((), (zeros,), (zeros, zeros)):
            x, _, _ = buffer.combine(
                rows[buffer.rank], handle, bias=bias, config=world.scenario.config
            )
            every = (rows, world.received, buffer.rank, 6)
            same(x, reference.combine(*every, bias=bias)[0], f"{len(bias)} biases")

    run(program, 2, world.scenario.num_bytes)


def test_c16_wrong_biases() -> None:
    world = World(SMALL)
    longer = np.zeros((14, 64), BF16)
    bad: dict[str, tuple[Change, str]] = {
        "T + 1": (lambda a: {"bias": longer}, "bias: .*shape"),
        "second": (lambda a: {"bias": (longer[:9], longer[:8])}, "bias: .*shape"),
        "hidden": (lambda a: {"bias": longer[:11, :56].copy()}, "bias: .*shape"),
        "float32": (
            lambda a: {"bias": longer[:12].astype(np.float32)},
            "bias: .*dtype",
        ),
    }
    refuse_each(world, "combine", bad)


@pytest.mark.parametrize("hot", [0, 7])
def test_c17_all_tokens_to_one_expert(hot: int) -> None:
    config = Config(4, 1, 2, 1, 2)
    scenario = Scenario((37,) * 4, num_topk=1, config=config, route=all_ids(hot))
    received = [len(each.src_rank) for each in World(scenario).received]
    assert received == ([148, 0, 0, 0] if hot == 0 else [0, 0, 0, 148])
    check(scenario)
