"""Faults that people met with comparable libraries, by case number: C20 to C32.

Expert ids, dtypes, strides, the FP8 cast, cached handles.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
from world import (
    Change,
    Scenario,
    World,
    check_cached,
    check_combine,
    check_disagreement,
    check_dispatch,
    check_refused,
    check_round,
    fetched,
    given,
    on_cpu,
    refuse_each,
    run,
    same,
)

from numba_ep import reference
from numba_ep.config import Config
from numba_ep.reference import BF16

SMALL = Scenario((13, 9, 11, 12))


def test_c20_experts_of_one_rank_share_a_copy() -> None:
    def route(rank: int, tokens: int) -> np.ndarray:
        return np.array([[0, 1], [0, 3]] if rank == 0 else [[-1, -1]] * 2, np.int64)

    world = World(Scenario((2, 2), num_experts=4, route=route))

    def program(buffer: Any) -> int:
        args = world.dispatch_args(buffer.rank)
        x, _, _, _, handle, _ = buffer.dispatch(**args)
        combined, _, _ = buffer.combine(x, handle, config=args["config"])
        factor = np.array([[1], [2]] if buffer.rank == 0 else [[0], [0]], np.float32)
        expected = (args["x"].astype(np.float32) * factor + np.float32(0)).astype(BF16)
        same(combined, expected, "combined")
        return len(x)

    assert run(program, 2, world.scenario.num_bytes) == [2, 1]


@pytest.mark.parametrize("experts", [10, 2, 0, -4, 4100])
def test_c21_experts_that_ranks_do_not_divide(experts: int) -> None:
    world = World(SMALL)

    def program(buffer: Any) -> None:
        with pytest.raises(ValueError, match="num_experts"):
            buffer.get_dispatch_layout(np.zeros((3, 2), np.int64), experts)
        check_round(buffer, world)

    run(program, 4, SMALL.num_bytes)


@pytest.mark.parametrize("expert", [8, -2, 2**32 + 3, -(2**32) + 3, 2**63 - 1])
def test_c22_expert_ids_out_of_range(expert: int) -> None:
    world = World(SMALL)

    def program(buffer: Any) -> None:
        args = world.dispatch_args(buffer.rank)
        if buffer.rank == 2:
            ids = args["topk_idx"].copy()
            ids[5, 1] = expert
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 8)
            assert (per_rank == -1).all() and (per_expert == -1).all()
            assert not in_rank.any()
            args.update(
                topk_idx=ids,
                num_tokens_per_rank=per_rank,
                num_tokens_per_expert=per_expert,
                is_token_in_rank=in_rank,
            )
        check_refused(buffer, lambda: buffer.dispatch(**args), 2, "expert id")
        check_round(buffer, world)

    run(program, 4, SMALL.num_bytes)


@pytest.mark.parametrize("expert", [8, -2, 2**32 + 3, -(2**32) + 3])
def test_c22_ids_that_layout_never_saw(expert: int) -> None:
    """Dispatch is given other ids than the layout was: no expert gets such a token."""
    world = World(SMALL)

    def program(buffer: Any) -> None:
        args = world.dispatch_args(buffer.rank)
        args["topk_idx"] = np.full_like(args["topk_idx"], expert)
        try:
            ids = buffer.dispatch(**args)[1]
        except ValueError:
            ids = np.array([-1])
        assert (ids == -1).all()
        check_round(buffer, world)

    run(program, 4, SMALL.num_bytes)


def test_c23_index_and_weight_dtypes() -> None:
    kinds = ("int32", "uint32", "uint64", "float64", ">i8")

    def change(name: str, kind: str) -> Change:
        return lambda args: {name: args[name].astype(kind)}

    bad = {kind: (change("topk_idx", kind), "topk_idx: .*int64") for kind in kinds}
    for kind in ("float64", "float16", "bfloat16", ">f4"):
        name = "topk_weights"
        bad[f"weights {kind}"] = (change(name, kind), f"{name}: .*float32")
    refuse_each(World(SMALL), "dispatch", bad)

    def program(buffer: Any) -> None:
        for kind in kinds:
            with pytest.raises((TypeError, ValueError), match=r"topk_idx: .*int64"):
                buffer.get_dispatch_layout(np.zeros((3, 2), kind), 4)

    run(program, 2, 1024)


def strided(array: np.ndarray) -> dict[str, np.ndarray]:
    """The same values in memory of other shapes."""
    return {
        "columns": np.repeat(array, 2, axis=1)[:, ::2],
        "rows": np.repeat(array, 2, axis=0)[::2],
        "Fortran": np.asfortranarray(array),
        "reversed": array[::-1].copy()[::-1],
        "slice": np.concatenate([array, array], axis=1)[:, : array.shape[1]],
    }


def in_each_form(name: str) -> dict[str, tuple[Change, str]]:
    """`name` in every form that is not contiguous, and its error."""

    def change(form: str) -> Change:
        return lambda args: {name: strided(args[name])[form]}

    forms = ("columns", "rows", "Fortran", "reversed", "slice")
    return {form: (change(form), f"{name}: .*contiguous") for form in forms}


@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights", "is_token_in_rank"])
def test_c25_strided_dispatch_inputs(name: str) -> None:
    refuse_each(World(SMALL), "dispatch", in_each_form(name))


def test_c25_strided_combine_inputs() -> None:
    bad = in_each_form("x")
    one = np.ones((1, 64), BF16)
    bad["bias"] = (lambda a: {"bias": np.broadcast_to(one, (9, 64))}, "bias: .*contig")
    refuse_each(World(SMALL), "combine", bad)


@on_cpu("a GPU takes addresses that are multiples of 16")
def test_c25_read_only_and_misaligned_inputs() -> None:
    """Any contiguous array does, at any address, and nothing is written to it."""
    world = World(SMALL)

    def moved(array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        raw = np.empty(array.nbytes + 1, np.uint8)
        view = raw[1:].view(array.dtype).reshape(array.shape)
        view[...] = array
        view.flags.writeable = False
        return view

    def program(buffer: Any) -> None:
        rank = buffer.rank
        args = {name: moved(a) for name, a in world.dispatch_args(rank).items()}
        x, _, _, _, handle, _ = buffer.dispatch(**args)
        same(x, world.received[rank].x, "x")
        args = {name: moved(a) for name, a in world.combine_args(rank).items()}
        args["bias"] = moved(world.biases[rank][0])
        x, weights, _ = buffer.combine(handle=handle, **args)
        same(x, world.combined(rank, 1)[0], "combined")
        same(weights, world.combined(rank, 1)[1], "weights")

    run(program, 4, SMALL.num_bytes)


def scale_forms(scales: np.ndarray) -> dict[str, np.ndarray]:
    """[T, 3] scales in memory of other shapes."""
    tokens, columns = scales.shape
    forms = strided(scales)
    padded = np.zeros((columns, tokens + 3), np.float32)
    padded[:, :tokens] = scales.T
    forms["padded columns"] = padded[:, :tokens].T
    forms["padded rows"] = np.zeros((tokens, columns + 1), np.float32)[:, :columns]
    forms["padded rows"][...] = scales
    packed = np.zeros(scales.shape, [("scale", "<f4"), ("other", "<u2")])
    packed["scale"] = scales
    forms["packed with others"] = packed["scale"]  # six bytes apart
    return forms


@pytest.mark.parametrize(
    "form", [*scale_forms(np.zeros((1, 3), np.float32)), "one for all"]
)
def test_c26_scale_strides(form: str) -> None:
    world = World(Scenario((5, 5, 5, 5), hidden=384, fp8=True))

    def program(buffer: Any) -> None:
        args = world.dispatch_args(buffer.rank)
        x, scales = args["x"]
        inputs = world.inputs
        if form == "one for all":
            given = np.broadcast_to(np.float32(0.5), scales.shape)
            inputs = [sent._replace(scales=given.copy()) for sent in inputs]
        else:
            given = scale_forms(scales)[form]
        assert (given == inputs[buffer.rank].scales).all()
        expected = reference.dispatch(inputs, buffer.rank, 8)
        args["x"] = (x, given)
        # Taken as it is, or refused: never something else.
        try:
            (got_x, got_scales), *_ = buffer.dispatch(**args)
        except ValueError as error:
            assert form == "packed with others" and "scales" in str(error), error
        else:
            same(got_x, expected.x, "x")
            same(got_scales, expected.scales, "scales")
        check_round(buffer, world)

    run(program, 4, world.scenario.num_bytes)


def test_c27_fp8_groups_of_zeros() -> None:
    """The smallest scale there is, and zero bytes; no NaN for tiny values."""
    x = np.zeros((4, 384), BF16)
    x[1, 200] = 3.0
    x[2, 5], x[2, 300], x[3, 7] = 1e-30, -1e-5, 1e-4
    q, scales = cast(x)
    expected_q, expected_scales = reference.cast_to_fp8(x)
    same(q, expected_q, "x")
    same(scales, expected_scales, "scales")
    assert (q[0].view(np.uint8) == 0).all()
    assert (scales[0] == np.float32(1e-4) / np.float32(448)).all()
    assert np.isfinite(q.astype(np.float32)).all() and np.isfinite(scales).all()


def test_c28_fp8_upper_limit_and_rounding() -> None:
    """Every bfloat16 with amax 448, so that the scaled values are the values; random
    rows, whose amax times 448 / amax may exceed 448; the largest numbers there are."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    values = bits[np.abs(bits.astype(np.float32)) <= 448]
    tied = np.zeros((-(-len(values) // 127), 128), BF16)
    tied[:, 0] = 448
    tied[:, 1:].flat[: len(values)] = values
    rng = np.random.default_rng(0)
    spread = rng.standard_normal((4096, 128)) * np.exp(rng.uniform(-40, 40, (4096, 1)))
    largest = np.full((1, 128), 0x7F7F, np.uint16).view(BF16)
    x = np.concatenate([tied, spread.astype(np.float32).astype(BF16), largest])
    q, scales = cast(x)
    expected_q, expected_scales = reference.cast_to_fp8(x)
    same(q, expected_q, "x")
    same(scales, expected_scales, "scales")
    amax = np.abs(x.astype(np.float32)).max(axis=1)
    reached = np.abs(q.astype(np.float32)).max(axis=1)
    assert (reached[amax >= 1e-4] == 448).all() and (reached <= 448).all()


def cast(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    from numba_ep.cast import cast_to_fp8

    def program(buffer: Any) -> Any:
        return fetched(cast_to_fp8(given(x), buffer))

    return run(program, 1, 0)[0]


def test_c31_combine_weights() -> None:
    """Received weights come back as they were; rows are not multiplied by them; what
    stands at others' experts is added like the rest."""

    def route(rank: int, tokens: int) -> np.ndarray:
        ids = np.arange(3 * tokens).reshape(tokens, 3) % 4
        ids[:, 1:] = [4, 5]  # two of the three on one rank
        return ids.astype(np.int64)

    world = World(Scenario((9, 10, 11), num_topk=3, num_experts=12, route=route))

    def program(buffer: Any) -> None:
        rank = buffer.rank
        args = world.dispatch_args(rank)
        x, _, weights, _, handle, _ = buffer.dispatch(**args)
        back = buffer.combine(x, handle, weights, config=args["config"])
        same(back[1], args["topk_weights"], "weights")
        same(back[0], buffer.combine(x, handle, config=args["config"])[0], "x")
        check_combine(buffer, world, handle)  # random weights everywhere

    for _ in range(2):
        run(program, 3, world.scenario.num_bytes)


def test_c32_cached_handle() -> None:
    """New rows, also in another dtype, travel by an earlier routing."""
    old = Scenario((9, 0, 12, 4), hidden=128)
    worlds = [World(old), World(Scenario(old.tokens, hidden=128, fp8=True))]
    num_bytes = max(world.scenario.num_bytes for world in worlds)

    def program(buffer: Any) -> None:
        rank = buffer.rank
        handle = check_round(buffer, worlds[0])
        for world in (*worlds, worlds[0]):
            check_cached(buffer, world, handle)
            check_combine(buffer, worlds[0], handle, 2)
        args = worlds[0].dispatch_args(rank)
        x, ids = args["x"], args["topk_idx"]
        other = Config(2, 2, 4, 2, 4)
        config = args["config"]
        bad: list[tuple[dict[str, Any], str]] = [
            ({"topk_idx": ids}, "topk_idx"),
            ({"topk_weights": args["topk_weights"]}, "topk_weights"),
            ({"config": other}, "num_sms 4"),
            ({"x": np.zeros((len(x) + 1, 128), BF16)}, "x: .*tokens"),
        ]
        for changes, own in bad:
            given = {"x": x, "handle": handle, "config": config}
            given.update(changes if rank == 1 else {})
            check_refused(buffer, partial(buffer.dispatch, **given), 1, own)
            check_cached(buffer, worlds[0], handle)
        # Every rank a valid handle of its own, but not of the same dispatch.
        second = check_dispatch(buffer, worlds[0])
        mixed = second if rank == 2 else handle
        for call in (
            lambda: buffer.dispatch(x, mixed, config=config),
            lambda: buffer.combine(handle=mixed, **worlds[0].combine_args(rank)),
        ):
            check_disagreement(buffer, call, 2, "handle_operation")
        check_combine(buffer, worlds[0], second)

    run(program, 4, num_bytes)


def test_c32_cached_handle_on_one_rank() -> None:
    world = World(Scenario((9,)))

    def program(buffer: Any) -> None:
        for _ in range(2):
            handle = check_round(buffer, world)
        check_cached(buffer, world, handle)

    run(program, 1, world.scenario.num_bytes)


def test_c32_handle_of_another_buffer() -> None:
    from numba_ep.buffer import Buffer

    world = World(SMALL)

    def program(buffer: Any) -> None:
        with Buffer(buffer.group, num_rdma_bytes=SMALL.num_bytes) as other:
            foreign = check_dispatch(other, world)
            handle = check_dispatch(buffer, world)
            args = world.combine_args(buffer.rank)
            args["handle"] = foreign if buffer.rank == 3 else handle
            check_refused(buffer, lambda: buffer.combine(**args), 3, "handle")
            check_combine(buffer, world, handle)
            check_combine(other, world, foreign)

    run(program, 4, SMALL.num_bytes)
