"""The oracle against loops over single elements, and against cases met in practice.

Case names (C14, C20, ...) are those of the project's list of public reports. Payloads
are unique in (rank, token, column) and compared bit for bit.
"""

import doctest
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_ep import reference
from numba_ep.reference import (
    RankInput,
    Received,
    cast_back,
    cast_to_fp8,
    combine,
    dispatch,
    first_difference,
    layout,
    random_topk,
    unique_rows,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def make_inputs(
    num_tokens: Sequence[int],
    hidden: int = 64,
    num_topk: int = 2,
    num_experts: int = 8,
    dtype: np.dtype = BF16,
    seed: int = 0,
    dropped: float = 0.1,
) -> list[RankInput]:
    """One RankInput a rank; num_tokens: tokens of each rank. FP8 rows carry scales."""
    inputs = []
    for rank, rows in enumerate(num_tokens):
        ids, weights = random_topk(rank, rows, num_topk, num_experts, seed, dropped)
        scales = None
        if dtype == E4M3:
            groups = -(-hidden // 128)
            scales = unique_rows(rank, rows, groups, BF16, seed + 1).astype(np.float32)
        in_rank = layout(ids, num_experts, len(num_tokens)).is_token_in_rank
        x = unique_rows(rank, rows, hidden, dtype, seed)
        inputs.append(RankInput(x, scales, in_rank, ids, weights))
    return inputs


def with_ids(ids: list[list[int]], hidden: int, ranks: int, experts: int) -> RankInput:
    """Rank 0's input for given expert ids, without weights."""
    topk_idx = np.array(ids, np.int64)
    in_rank = layout(topk_idx, experts, ranks).is_token_in_rank
    x = unique_rows(0, len(ids), hidden, BF16)
    return RankInput(x, None, in_rank, topk_idx, None)


def dispatch_all(
    inputs: list[RankInput], num_experts: int = 8, alignment: int = 1
) -> list[Received]:
    return [dispatch(inputs, r, num_experts, alignment) for r in range(len(inputs))]


def same(got: Any, expected: Any) -> None:
    """Both None, or equal in every bit."""
    if got is None or expected is None:
        assert got is None and expected is None
    else:
        assert first_difference(got, expected) is None


def bits_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def round_to_bf16_bits(value: np.float32) -> int:
    """Nearest even on the integer bits, for finite values; independent of ml_dtypes."""
    bits = int(np.float32(value).view(np.uint32))
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) & 0xFFFF


# ---- loops over single elements ----


def loop_dispatch(
    inputs: list[RankInput], rank: int, num_experts: int, alignment: int
) -> dict[str, list[Any]]:
    """What `rank` receives, element by element, routed by expert ids alone."""
    first = rank * (num_experts // len(inputs))
    local_ids = range(first, first + num_experts // len(inputs))
    out: dict[str, list[Any]] = {name: [] for name in Received._fields}
    counts = [0] * len(local_ids)
    for src, sent in enumerate(inputs):
        assert sent.topk_idx is not None and sent.topk_weights is not None
        for token, ids in enumerate(sent.topk_idx.tolist()):
            if not any(expert in local_ids for expert in ids):
                continue
            out["x"].append(bits_of(sent.x)[token].tolist())
            if sent.scales is not None:
                out["scales"].append(bits_of(sent.scales)[token].tolist())
            row_ids, row_weights = [], []
            for k, expert in enumerate(ids):
                mine = expert in local_ids
                row_ids.append(expert - first if mine else -1)
                row_weights.append(float(sent.topk_weights[token, k]) if mine else 0.0)
                if mine:
                    counts[expert - first] += 1
            out["topk_idx"].append(row_ids)
            out["topk_weights"].append(row_weights)
            out["src_rank"].append(src)
            out["src_token"].append(token)
    for count in counts:
        while count % alignment:
            count += 1
        out["num_recv_tokens_per_expert"].append(count)
    return out


def loop_combine(
    rows: list[np.ndarray],
    origins: list[dict[str, list[Any]]],
    rank: int,
    shape: tuple[int, int],
    bias: tuple[np.ndarray, ...],
) -> list[list[int]]:
    """Bits of what `rank` gets back, one float32 addition at a time."""
    out = []
    for token in range(shape[0]):
        row = []
        for column in range(shape[1]):
            total = np.float32(bias[0][token, column]) if bias else np.float32(0)
            if len(bias) == 2:
                total = total + np.float32(bias[1][token, column])
            for src, origin in enumerate(origins):
                pairs = zip(origin["src_rank"], origin["src_token"])
                for i, pair in enumerate(pairs):
                    if pair == (rank, token):
                        total = total + np.float32(rows[src][i, column])
            row.append(round_to_bf16_bits(total))
        out.append(row)
    return out


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(
    num_tokens=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    hidden=st.integers(1, 5),
    num_topk=st.integers(1, 4),
    local_experts=st.integers(1, 3),
    alignment=st.integers(1, 4),
    num_biases=st.integers(0, 2),
    dtype=st.sampled_from([BF16, E4M3]),
    seed=st.integers(0, 2**20),
)
def test_equal_to_loops(
    num_tokens: list[int],
    hidden: int,
    num_topk: int,
    local_experts: int,
    alignment: int,
    num_biases: int,
    dtype: np.dtype,
    seed: int,
) -> None:
    num_experts = local_experts * len(num_tokens)
    num_topk = min(num_topk, num_experts)
    inputs = make_inputs(num_tokens, hidden, num_topk, num_experts, dtype, seed, 0.3)
    received = dispatch_all(inputs, num_experts, alignment)
    origins = []
    for rank, got in enumerate(received):
        loop = loop_dispatch(inputs, rank, num_experts, alignment)
        origins.append(loop)
        assert got.topk_idx is not None and got.topk_weights is not None
        assert got.x.dtype == dtype and got.x.flags.c_contiguous
        assert bits_of(got.x).tolist() == loop["x"]
        if dtype == E4M3:
            assert got.scales is not None and got.scales.dtype == np.float32
            assert bits_of(got.scales).tolist() == loop["scales"]
        else:
            assert got.scales is None
        assert got.topk_idx.tolist() == loop["topk_idx"]
        assert got.topk_weights.tolist() == loop["topk_weights"]
        assert got.num_recv_tokens_per_expert == loop["num_recv_tokens_per_expert"]
        assert got.src_rank.tolist() == loop["src_rank"]
        assert got.src_token.tolist() == loop["src_token"]
        ids = (got.topk_idx, got.src_rank, got.src_token)
        assert all(array.dtype == np.int64 for array in ids)
        assert got.topk_weights.dtype == np.float32

    rows = [
        unique_rows(rank, len(got.src_rank), hidden, BF16, seed + 2)
        for rank, got in enumerate(received)
    ]
    for rank, count in enumerate(num_tokens):
        bias = tuple(
            unique_rows(rank, count, hidden, BF16, seed + 3 + i)
            for i in range(num_biases)
        )
        combined, weights = combine(rows, received, rank, count, bias=bias)
        assert weights is None and combined.dtype == BF16
        assert combined.shape == (count, hidden)
        expected = loop_combine(rows, origins, rank, (count, hidden), bias)
        assert bits_of(combined).tolist() == expected


def test_module_example() -> None:
    result = doctest.testmod(reference)
    assert result.attempted > 0 and result.failed == 0


# ---- layout ----


def test_layout_counts() -> None:
    nothing = layout(np.zeros((0, 3), np.int64), 6, 3)
    assert [array.shape for array in nothing] == [(3,), (6,), (0, 3)]
    assert not any(array.any() for array in nothing)
    got = layout(np.array([[0, 1], [0, 3], [-1, -1], [2, -1]], np.int64), 4, 2)
    same(got.num_tokens_per_rank, np.array([2, 2], np.int32))
    same(got.num_tokens_per_expert, np.array([2, 1, 1, 1], np.int32))
    expected = np.array([[1, 0], [1, 1], [0, 0], [0, 1]], np.bool_)
    same(got.is_token_in_rank, expected)


@pytest.mark.parametrize("num_experts", [10, 2, 0])
def test_c21_experts_not_divisible_by_ranks(num_experts: int) -> None:
    with pytest.raises(ValueError, match="num_experts"):
        layout(np.array([[0, 1]], np.int64), num_experts, 4)


def test_c21_dispatch_refuses_the_same() -> None:
    with pytest.raises(ValueError, match="num_experts"):
        dispatch(make_inputs([3, 3, 3, 3]), 0, 10)


@pytest.mark.parametrize("bad", [8, -2, 2**32 + 3, -(2**63), 2**63 - 1])
def test_c22_id_out_of_range_marks_the_layout_invalid(bad: int) -> None:
    got = layout(np.array([[0, 1], [2, bad]], np.int64), 8, 4)
    same(got.num_tokens_per_rank, np.full(4, -1, np.int32))
    same(got.num_tokens_per_expert, np.full(8, -1, np.int32))
    same(got.is_token_in_rank, np.zeros((2, 4), np.bool_))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint64, np.float64])
def test_c23_ids_of_another_dtype(dtype: type) -> None:
    with pytest.raises(TypeError, match="int64"):
        layout(np.array([[0, 1]], dtype), 8, 4)


# ---- dispatch ----


@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens", [[0, 5, 0, 3], [3, 0, 5, 0], [0, 0, 0, 0]])
def test_c01_zero_tokens(tokens: list[int], dtype: np.dtype) -> None:
    inputs = make_inputs(tokens, 200, dtype=dtype)
    received = dispatch_all(inputs)
    weights = [r.topk_weights for r in received if r.topk_weights is not None]
    rows = [unique_rows(i, len(r.x), 200, BF16) for i, r in enumerate(received)]
    for rank, (count, got) in enumerate(zip(tokens, received)):
        assert got.x.dtype == dtype and got.x.shape[1] == 200
        assert (got.scales is None) == (dtype == BF16)
        assert got.scales is None or got.scales.shape == (len(got.x), 2)
        combined, combined_weights = combine(rows, received, rank, count, weights)
        assert combined.shape == (count, 200)
        assert combined_weights is not None and combined_weights.shape == (count, 2)
        if not any(tokens):
            assert got.num_recv_tokens_per_expert == [0, 0]


def test_c20_two_experts_of_a_rank_are_one_copy() -> None:
    sent = with_ids([[0, 1], [0, 3]], 64, 2, 4)
    received = dispatch_all([sent, with_ids([[-1, -1]], 64, 2, 4)], 4)
    assert [len(got.x) for got in received] == [2, 1]
    combined, _ = combine([got.x for got in received], received, 0, 2)
    expected = sent.x.astype(np.float32) * np.array([[1], [2]], np.float32)
    same(combined, expected.astype(BF16))


def test_c25_c26_strided_inputs() -> None:
    """Slices, Fortran order and padded column-major scales give the same bytes."""
    plain = make_inputs([5, 5, 5, 5], 384, dtype=E4M3)
    strided = []
    for sent in plain:
        assert sent.scales is not None and sent.topk_idx is not None
        assert sent.topk_weights is not None
        wide = np.repeat(sent.x, 2, axis=1)[:, ::2]
        padded = np.full((3, 8), np.nan, np.float32)
        padded[:, :5] = sent.scales.T
        backwards = np.asfortranarray(sent.topk_weights[::-1])[::-1]
        ids = np.asfortranarray(sent.topk_idx)
        in_rank = np.asfortranarray(sent.is_token_in_rank)
        strided.append(RankInput(wide, padded.T[:5], in_rank, ids, backwards))
    for got, expected in zip(dispatch_all(strided), dispatch_all(plain)):
        assert got.scales is not None and got.scales.flags.c_contiguous
        for field in ("x", "scales", "topk_idx", "topk_weights", "src_token"):
            same(getattr(got, field), getattr(expected, field))


def test_dispatch_copies_bits_of_nan_and_minus_zero() -> None:
    sent = with_ids([[0, -1]], 4, 1, 2)
    bits = np.array([[0x7F81, 0xFFC1, 0x8000, 0xFF80]], np.uint16)
    got = dispatch([sent._replace(x=bits.view(BF16))], 0, 2)
    assert bits_of(got.x).tolist() == bits.tolist()


def test_dispatch_without_topk() -> None:
    with_topk = make_inputs([3, 4])
    bare = [sent._replace(topk_idx=None, topk_weights=None) for sent in with_topk]
    for got, expected in zip(dispatch_all(bare), dispatch_all(with_topk)):
        assert got.topk_idx is None and got.topk_weights is None
        assert got.num_recv_tokens_per_expert == []
        same(got.x, expected.x)
        same(got.src_token, expected.src_token)


@pytest.mark.parametrize("field", ["topk_idx", "topk_weights", "x"])
def test_dispatch_refuses_ranks_that_differ(field: str) -> None:
    inputs = make_inputs([3, 4])
    change = {"x": inputs[1].x.astype(E4M3), "topk_idx": None, "topk_weights": None}
    inputs[1] = inputs[1]._replace(**{field: change[field]})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=field):
        dispatch(inputs, 0, 8)


def test_c40_alignment_rounds_counts_and_moves_no_row() -> None:
    ids = [[1, -1]] * 1 + [[2, -1]] * 128 + [[3, -1]] * 129
    sent = with_ids(ids, 8, 1, 4)
    rows = {1: [0, 1, 128, 129], 3: [0, 3, 129, 129], 128: [0, 128, 128, 256]}
    for alignment, counts in rows.items():
        got = dispatch([sent], 0, 4, alignment)
        assert got.num_recv_tokens_per_expert == counts
        same(got.x, sent.x)
        assert got.topk_idx is not None
        assert [(got.topk_idx == e).sum() for e in range(4)] == [0, 1, 128, 129]
    with pytest.raises(ValueError, match="expert_alignment"):
        dispatch([sent], 0, 4, 0)


# ---- combine ----


def received_by_three(num_tokens: int = 1) -> list[Received]:
    """Rank 0's tokens, each sent to all three ranks."""
    ids = [[0, 1, 2]] * num_tokens
    idle = with_ids([[-1, -1, -1]], 1, 3, 3)
    return dispatch_all([with_ids(ids, 1, 3, 3), idle, idle], 3)


def bf16(*values: float) -> np.ndarray:
    return np.array(values, np.float32).astype(BF16)[:, None]


def test_c14_combine_rounds_once() -> None:
    received = received_by_three()
    rows = [bf16(256), bf16(1), bf16(1)]
    same(combine(rows, received, 0, 1)[0], bf16(258))
    in_bf16 = rows[0] + rows[1] + rows[2]
    assert float(in_bf16[0, 0]) == 256, "the values do not tell one rounding from three"


def test_combine_adds_in_order_of_ranks_after_the_biases() -> None:
    """2**30 swallows a 1 in float32, so only one order gives the value expected."""
    received = received_by_three()
    big = 2.0**30
    same(combine([bf16(1), bf16(big), bf16(-big)], received, 0, 1)[0], bf16(0))
    same(combine([bf16(big), bf16(-big), bf16(1)], received, 0, 1)[0], bf16(1))
    bias = (bf16(big), bf16(-big))
    same(combine([bf16(1), bf16(0), bf16(0)], received, 0, 1, bias=bias)[0], bf16(1))
    bias = (bf16(big), bf16(1))
    same(combine([bf16(-big), bf16(0), bf16(0)], received, 0, 1, bias=bias)[0], bf16(0))


def test_c16_bias() -> None:
    received = received_by_three(2)[:1]
    rows = [unique_rows(0, 2, 1, BF16)]
    for bias in [(), (bf16(3, -0.0),), (bf16(3, -0.0), bf16(-0.0, -0.0))]:
        wide = np.zeros((2, 1), np.float32) if not bias else bias[0].astype(np.float32)
        wide = wide + bias[1].astype(np.float32) if len(bias) == 2 else wide
        before = [bits_of(b).tolist() for b in bias]
        got, _ = combine(rows, received, 0, 2, bias=bias)
        same(got, (wide + rows[0].astype(np.float32)).astype(BF16))
        assert [bits_of(b).tolist() for b in bias] == before


def test_c16_token_without_destination_is_its_bias() -> None:
    received = [dispatch([with_ids([[-1], [-1]], 1, 1, 1)], 0, 1)]
    rows = [np.zeros((0, 1), BF16)]
    same(combine(rows, received, 0, 2)[0], bf16(0, 0))
    same(combine(rows, received, 0, 2, bias=(bf16(5, -0.0),))[0], bf16(5, -0.0))


def test_c16_c42_arrays_that_do_not_fit() -> None:
    received = received_by_three(2)
    rows = [unique_rows(r, 2, 1, BF16) for r in range(3)]
    good = bf16(1, 2)
    for bias in [(bf16(1),), (good.astype(np.float32),), (good, good, good)]:
        with pytest.raises(ValueError, match="bias"):
            combine(rows, received, 0, 2, bias=bias)
    for wrong in [rows[1][:1], rows[1].astype(np.float16), np.repeat(rows[1], 2, 1)]:
        with pytest.raises(ValueError):
            combine([rows[0], wrong, rows[2]], received, 0, 2)
    with pytest.raises(ValueError):
        combine(rows[:2], received, 0, 2)


def test_c31_weights_come_back() -> None:
    inputs = make_inputs([13, 13], num_topk=3, num_experts=4)
    received = dispatch_all(inputs, 4)
    rows = [got.x for got in received]
    weights = [got.topk_weights for got in received if got.topk_weights is not None]
    for rank, sent in enumerate(inputs):
        assert sent.topk_idx is not None and sent.topk_weights is not None
        selected = np.where(sent.topk_idx >= 0, sent.topk_weights, np.float32(0))
        combined, got = combine(rows, received, rank, 13, weights)
        same(got, selected)
        same(combined, combine(rows, received, rank, 13)[0])

        noise = [w + np.float32(1 + r) for r, w in enumerate(weights)]
        combined, got = combine(rows, received, rank, 13, noise)
        expected = np.zeros((13, 3), np.float32)
        for src, origin in enumerate(received):
            for i in np.flatnonzero(origin.src_rank == rank):
                expected[origin.src_token[i]] += noise[src][i]
        same(got, expected)
        same(combined, combine(rows, received, rank, 13)[0])


# ---- FP8 ----


def e4m3_table() -> list[float]:
    """Magnitudes of codes 0x00..0x7e from the format: 4 exponent bits of bias 7."""
    table = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        if exponent == 0:
            table.append(mantissa * 2.0**-9)
        else:
            table.append((8 + mantissa) * 2.0 ** (exponent - 10))
    return table


def nearest_code(value: float, table: list[float]) -> int:
    """Nearest even among the finite codes, so 448 is the limit."""
    distance = [abs(abs(value) - entry) for entry in table]
    ties = [code for code, d in enumerate(distance) if d == min(distance)]
    code = next(c for c in ties if len(ties) == 1 or c % 2 == 0)
    return code | (0x80 if np.signbit(value) else 0)


def with_amax(values: np.ndarray, amax: float) -> np.ndarray:
    """bfloat16 rows of 128 that hold all values, each row with |amax| in column 0."""
    padded = np.zeros(-(-len(values) // 127) * 127, values.dtype)
    padded[: len(values)] = values
    rows = padded.reshape(-1, 127)
    first = np.full((len(rows), 1), amax).astype(values.dtype)
    return np.concatenate([first, rows], axis=1)


def test_c28_cast_agrees_with_a_table_of_all_codes() -> None:
    """Amax 448 makes the factor 1: every bfloat16 up to 448, midpoints included."""
    table = e4m3_table()
    codes = np.arange(256).astype(np.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    decoded = finite.view(E4M3).astype(BF16)
    signed = [table[c & 0x7F] * (-1 if c & 0x80 else 1) for c in finite.tolist()]
    assert decoded.astype(float).tolist() == signed

    got = cast_to_fp8(with_amax(decoded, 448))[0][:, 1:].ravel()[: len(finite)]
    same(got, finite.view(E4M3))

    every = np.arange(2**16).astype(np.uint16).view(BF16)
    every = every[np.abs(every.astype(np.float32)) <= 448]
    every = every[np.abs(every.astype(np.float32)) > 2.0**-12]  # below: all 0
    values, scales = cast_to_fp8(with_amax(every, -448))
    same(scales, np.ones_like(scales))
    got_codes = bits_of(values[:, 1:]).ravel()[: len(every)].tolist()
    assert got_codes == [nearest_code(float(v), table) for v in every]


def test_c28_amax_becomes_448_and_nothing_nan() -> None:
    """448 / amax is rounded: x * (448 / amax) passes 448 for some amax."""
    positive = np.arange(0x7F80).astype(np.uint16).view(BF16)
    amax = positive[positive.astype(np.float32) >= np.float32(1e-4)]
    factor = np.float32(448) / amax.astype(np.float32)
    assert (amax.astype(np.float32) * factor > 448).any()
    x = np.zeros((len(amax), 128), BF16)
    x[:, 5], x[:, 6] = amax, -amax
    values, scales = cast_to_fp8(x)
    assert values.dtype == E4M3 and scales.dtype == np.float32
    assert (bits_of(values[:, 5]) == 0x7E).all()
    assert (bits_of(values[:, 6]) == 0xFE).all()
    same(scales, amax.astype(np.float32)[:, None] / np.float32(448))


def test_c28_one_element_at_a_time_in_float32() -> None:
    x = unique_rows(3, 6, 256, BF16)
    values, scales = cast_to_fp8(x)
    table = e4m3_table()
    for token in range(6):
        for group in range(2):
            row = x[token, group * 128 :][:128].astype(np.float32)
            amax = max(np.float32(1e-4), np.abs(row).max())
            assert scales[token, group] == np.float32(amax / np.float32(448))
            factor = np.float32(448) / amax
            expected = [nearest_code(float(v * factor), table) for v in row]
            got = bits_of(values[token, group * 128 :][:128])
            assert got.tolist() == expected


def test_c27_groups_without_amax() -> None:
    x = np.zeros((3, 256), BF16)
    x[1, 200] = 3.0
    x[2, 7] = 1e-30
    values, scales = cast_to_fp8(x)
    floor = np.float32(1e-4) / np.float32(448)
    assert f"{float(floor):.7e}" == "2.2321429e-07"
    three = np.float32(3) / np.float32(448)
    expected = np.array([[floor] * 2, [floor, three], [floor] * 2], np.float32)
    same(scales, expected)
    codes = np.zeros((3, 256), np.uint8)
    codes[1, 200] = 0x7E
    same(values, codes.view(E4M3))
    back = cast_back(values, scales)
    assert float(back[1, 200]) == 3.0 and np.count_nonzero(back) == 1


def test_cast_shapes() -> None:
    values, scales = cast_to_fp8(np.zeros((0, 256), BF16))
    assert values.shape == (0, 256) and scales.shape == (0, 2)
    assert cast_back(values, scales).shape == (0, 256)
    with pytest.raises(ValueError, match="hidden"):
        cast_to_fp8(np.zeros((2, 200), BF16))


def test_cast_back_scales_by_group_and_rounds_once() -> None:
    x = unique_rows(0, 3, 200, E4M3)
    scales = np.array([[0.1, 7.3], [1, 1e-3], [3e4, 0.7]], np.float32)
    got = cast_back(x, scales)
    assert got.dtype == BF16
    for token in range(3):
        for column in range(200):
            product = np.float32(x[token, column]) * scales[token, column // 128]
            assert bits_of(got)[token, column] == round_to_bf16_bits(product)


# ---- comparing and payloads ----


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.float32, BF16, E4M3])
@pytest.mark.parametrize("shape", [(7,), (4, 5), (0,), (0, 5), (5, 0)])
def test_first_difference_of_every_dtype(dtype: Any, shape: tuple[int, ...]) -> None:
    expected = np.zeros(shape, dtype)
    assert first_difference(expected.copy(), expected) is None
    assert first_difference(np.asfortranarray(expected), expected) is None
    if expected.size:
        got = expected.copy()
        got.reshape(-1)[-1] = 1
        message = first_difference(got, expected)
        place = "token 6:" if len(shape) == 1 else "token 3, column 4:"
        assert message is not None and message.startswith(place)


def test_first_difference_sees_bits_dtype_and_shape() -> None:
    zeros = np.zeros((2, 3), np.float32)
    message = first_difference(-zeros, zeros)
    assert message is not None and "got -0.0 (0x80000000), expected 0.0" in message
    assert "6 of 6" in message
    nan = np.array([[0x7FC0, 0x7FC1]], np.uint16).view(BF16)
    assert first_difference(nan, nan.copy()) is None
    assert "column 0" in str(first_difference(nan[:, ::-1], nan))
    assert "float64" in str(first_difference(zeros.astype(float), zeros))
    assert "(3, 2)" in str(first_difference(zeros.reshape(3, 2), zeros))
    assert first_difference(np.zeros((0, 2)), np.zeros((0, 3))) is not None


def test_c38_a_wrong_result_is_found() -> None:
    """One corrupted row, two swapped rows and one dropped contribution all show."""
    inputs = make_inputs([13, 13, 13, 13], dropped=0)
    received = dispatch_all(inputs)
    good = received[1].x
    corrupted = good.copy()
    corrupted[4, 17] = -corrupted[4, 17]
    assert "token 4, column 17" in str(first_difference(corrupted, good))
    swapped = good.copy()
    swapped[[2, 9]] = good[[9, 2]]
    assert "token 2, column 0" in str(first_difference(swapped, good))
    shifted = good.copy()
    shifted[3, [10, 11]] = good[3, [11, 10]]
    assert "token 3, column 10" in str(first_difference(shifted, good))

    rows = [unique_rows(r, len(got.x), 64, BF16, 1) for r, got in enumerate(received)]
    result, _ = combine(rows, received, 0, 13)
    src, i = next(
        (src, int(np.flatnonzero(got.src_rank == 0)[0]))
        for src, got in enumerate(received)
        if (got.src_rank == 0).any()
    )
    less = [part.copy() for part in rows]
    less[src][i] = 0
    dropped, _ = combine(less, received, 0, 13)
    token = received[src].src_token[i]
    assert f"token {token}, column" in str(first_difference(dropped, result))


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_c38_payload_is_unique_and_finite(dtype: np.dtype) -> None:
    blocks = [unique_rows(rank, 128, 256, dtype) for rank in range(16)]
    rows = np.concatenate(blocks)
    assert rows.dtype == dtype and rows.shape == (16 * 128, 256)
    assert np.isfinite(rows.astype(np.float32)).all()
    assert len({row.tobytes() for row in rows}) == len(rows)
    assert len({column.tobytes() for column in rows.T}) == 256
    assert 0.45 < np.signbit(rows.astype(np.float32)).mean() < 0.55
    neighbours = (bits_of(rows[:, 1:]) == bits_of(rows[:, :-1])).mean()
    assert neighbours < (0.001 if dtype == BF16 else 0.01)
    if dtype == BF16:
        size = np.abs(rows.astype(np.float32))
        assert 2.0**-8 <= size.min() and size.max() < 2.0**8
    else:
        assert len(np.unique(bits_of(rows))) == 254
    same(unique_rows(3, 128, 256, dtype), blocks[3])
    same(unique_rows(3, 5, 9, dtype), blocks[3][:5, :9])
    assert first_difference(unique_rows(3, 128, 256, dtype, 1), blocks[3]) is not None


def test_unique_rows_of_another_dtype() -> None:
    assert unique_rows(0, 2, 2, ml_dtypes.bfloat16).dtype == BF16
    with pytest.raises(ValueError, match="dtype"):
        unique_rows(0, 2, 2, np.float32)


def test_random_topk() -> None:
    ids, weights = random_topk(1, 500, 4, 16)
    assert ids.shape == weights.shape == (500, 4)
    assert ids.dtype == np.int64 and weights.dtype == np.float32
    assert ids.min() == -1 and ids.max() == 15
    assert (weights > 0).all() and (weights <= 1).all()
    assert 0.07 < (ids == -1).mean() < 0.13
    for row in ids.tolist():
        chosen = [expert for expert in row if expert >= 0]
        assert len(set(chosen)) == len(chosen)
    same(random_topk(1, 500, 4, 16)[0], ids)
    assert first_difference(random_topk(2, 500, 4, 16)[0], ids) is not None
    assert (random_topk(0, 9, 2, 4, dropped=0)[0] >= 0).all()
    assert random_topk(0, 0, 2, 4)[0].shape == (0, 2)
    with pytest.raises(ValueError, match="num_topk"):
        random_topk(0, 3, 5, 4)
