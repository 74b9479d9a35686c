"""The definition of dispatch and combine: a NumPy oracle that sees all ranks at once.

`layout` counts the router's choices, `dispatch` says which rows a rank receives and in
which order, `combine` says what the senders get back; kernels must match bit for bit.
R ranks; T tokens of a rank, H hidden, K top-k, E experts, n rows received. Rank r owns
the E / R experts from r * E / R on. A token travels once to each rank that owns one of
its experts. Here two ranks send the same tokens; the second goes to both ranks:

>>> ids = np.array([[0, 1], [0, 3]], np.int64)
>>> x = np.array([[1], [10]], ml_dtypes.bfloat16)
>>> sent = RankInput(x, None, layout(ids, 4, 2).is_token_in_rank, ids, None)
>>> received = [dispatch([sent, sent], rank, num_experts=4) for rank in range(2)]
>>> received[1].src_rank, received[1].src_token, received[1].topk_idx.tolist()
(array([0, 1]), array([1, 1]), [[-1, 1], [-1, 1]])
>>> combine([r.x for r in received], received, 0, 2)[0].astype(int).tolist()
[[1], [20]]
"""

from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
GROUP = 128  # elements of a row that share one scale
E4M3_MAX = np.float32(448)
AMAX_MIN = np.float32(1e-4)  # an all-zero group gets a usable scale


class Layout(NamedTuple):
    num_tokens_per_rank: np.ndarray  # [R] int32, a token counts once for a rank
    num_tokens_per_expert: np.ndarray  # [E] int32, every selection counts
    is_token_in_rank: np.ndarray  # [T, R] bool


class RankInput(NamedTuple):
    x: np.ndarray  # [T, H] bfloat16 or float8_e4m3fn
    scales: np.ndarray | None  # [T, ceil(H / 128)] float32
    is_token_in_rank: np.ndarray  # [T, R] bool
    topk_idx: np.ndarray | None  # [T, K] int64, -1: no selection
    topk_weights: np.ndarray | None  # [T, K] float32


class Received(NamedTuple):
    x: np.ndarray  # [n, H], rows ordered by (source rank, token)
    scales: np.ndarray | None  # [n, ceil(H / 128)] float32, row-major
    topk_idx: np.ndarray | None  # [n, K] int64, local ids, -1: another rank's expert
    topk_weights: np.ndarray | None  # [n, K] float32, 0: another rank's expert
    num_recv_tokens_per_expert: list[int]  # [E / R], rounded up; [] without top-k
    src_rank: np.ndarray  # [n] int64
    src_token: np.ndarray  # [n] int64


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def layout(topk_idx: np.ndarray, num_experts: int, num_ranks: int) -> Layout:
    """Where the tokens of one rank go; topk_idx: [T, K] int64, -1: no selection.

    An id outside [-1, E) marks the result invalid: every count -1, no token in a rank.
    Raises ValueError when E is no multiple of R, TypeError when ids are not int64.
    """
    whole = num_experts > 0 and num_experts % num_ranks == 0
    _check(whole, f"num_experts: expected a multiple of {num_ranks}, got {num_experts}")
    if topk_idx.dtype != np.int64:
        raise TypeError(f"topk_idx: expected int64, got {topk_idx.dtype}")
    if ((topk_idx < -1) | (topk_idx >= num_experts)).any():
        per_rank, per_expert = np.full(num_ranks, -1), np.full(num_experts, -1)
        in_rank = np.zeros((len(topk_idx), num_ranks), np.bool_)
    else:
        owner = topk_idx // (num_experts // num_ranks)  # -1 stays -1
        in_rank = (owner[:, :, None] == np.arange(num_ranks)).any(axis=1)
        per_rank = in_rank.sum(axis=0)
        per_expert = np.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
    return Layout(per_rank.astype(np.int32), per_expert.astype(np.int32), in_rank)


def dispatch(
    inputs: Sequence[RankInput], rank: int, num_experts: int, expert_alignment: int = 1
) -> Received:
    """What `rank` receives when rank r sends inputs[r]; no byte of x is changed.

    Counts per expert are rounded up to a multiple of expert_alignment, rows are not
    padded. Raises ValueError when inputs differ in dtype, row shape or None fields.
    """
    whole = num_experts % len(inputs) == 0 and expert_alignment > 0
    _check(whole, f"{num_experts=} on {len(inputs)} ranks, {expert_alignment=}")
    num_local_experts = num_experts // len(inputs)
    tokens = [np.flatnonzero(sent.is_token_in_rank[:, rank]) for sent in inputs]

    def gather(field: str) -> np.ndarray | None:
        parts = [getattr(sent, field) for sent in inputs]
        kinds = {None if p is None else (p.dtype, p.shape[1:]) for p in parts}
        _check(len(kinds) == 1, f"{field}: expected one dtype and shape, got {kinds}")
        rows = [part[t] for part, t in zip(parts, tokens) if part is not None]
        return np.ascontiguousarray(np.concatenate(rows)) if rows else None

    x, scales = gather("x"), gather("scales")
    topk_idx, weights = gather("topk_idx"), gather("topk_weights")
    counts: list[int] = []
    if topk_idx is not None:
        local = topk_idx - rank * num_local_experts
        mine = (local >= 0) & (local < num_local_experts)
        topk_idx = np.where(mine, local, -1)
        weights = None if weights is None else np.where(mine, weights, np.float32(0))
        true_counts = np.bincount(local[mine], minlength=num_local_experts)
        counts = (-(-true_counts // expert_alignment) * expert_alignment).tolist()
    src_rank = np.repeat(np.arange(len(inputs)), [len(chosen) for chosen in tokens])
    src_token = np.concatenate(tokens)
    assert x is not None
    return Received(x, scales, topk_idx, weights, counts, src_rank, src_token)


def combine(
    rows: Sequence[np.ndarray],
    received: Sequence[Received],
    rank: int,
    num_tokens: int,
    weights: Sequence[np.ndarray] | None = None,
    bias: tuple[np.ndarray, ...] = (),
) -> tuple[np.ndarray, np.ndarray | None]:
    """What `rank` gets back: [num_tokens, H] bfloat16, [num_tokens, K] float32 or None.

    Rank r passes rows[r] [n_r, H] bfloat16 and weights[r] [n_r, K] float32, ordered as
    received[r]; bias: up to two [num_tokens, H] bfloat16. Float32 sum: bias_0 + bias_1
    (+0 without bias), then rows by ascending rank, rounded once, ties to even. Weights
    are added by ascending rank and do not multiply rows. A NaN result may have any
    sign and payload. Raises ValueError for arrays of another shape or dtype.
    """
    shape = (num_tokens, rows[0].shape[1])
    fits = len(bias) <= 2 and all(array.shape == shape for array in bias)
    _check(fits, f"bias: expected at most two arrays of shape {shape}")
    _check(all(a.dtype == BF16 for a in (*rows, *bias)), "rows, bias: need bfloat16")

    def add(total: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
        for src, (part, origin) in enumerate(zip(parts, received, strict=True)):
            expected = (len(origin.src_rank), total.shape[1])
            _check(part.shape == expected, f"{src=} {part.shape=}, expected {expected}")
            mine = origin.src_rank == rank
            tokens = origin.src_token[mine]  # distinct, so += adds every row
            total[tokens] += part[mine].astype(np.float32)
        return total

    wide = [array.astype(np.float32) for array in bias] or [np.zeros(shape, np.float32)]
    combined = add(wide[0] + wide[1] if len(bias) == 2 else wide[0], rows).astype(BF16)
    if weights is None:
        return combined, None
    zeros = np.zeros((num_tokens, weights[0].shape[1]), np.float32)
    return combined, add(zeros, weights)


def cast_to_fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[T, H] bfloat16 to [T, H] float8_e4m3fn and [T, H / 128] float32 scales.

    All arithmetic is float32. Raises ValueError when H is no multiple of 128.
    """
    _check(x.shape[1] % GROUP == 0, f"hidden: {x.shape[1]} is no multiple of {GROUP}")
    groups = x.astype(np.float32).reshape(len(x), x.shape[1] // GROUP, GROUP)
    amax = np.maximum(np.abs(groups).max(axis=2), AMAX_MIN)
    values = np.clip(groups * (E4M3_MAX / amax)[:, :, None], -E4M3_MAX, E4M3_MAX)
    return values.astype(E4M3).reshape(x.shape), amax / E4M3_MAX


def cast_back(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[T, H] e4m3 and [T, ceil(H / 128)] float32 to [T, H] bfloat16, rounded once."""
    by_column = np.repeat(scales, GROUP, axis=1)[:, : x.shape[1]]
    return (x.astype(np.float32) * by_column).astype(BF16)


def first_difference(got: np.ndarray, expected: np.ndarray) -> str | None:
    """None when dtype, shape and every bit agree, else the first difference."""
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return f"got {got.dtype}{got.shape}, expected {expected.dtype}{expected.shape}"
    arrays = [np.ascontiguousarray(array) for array in (got, expected)]
    bits = [array.view(f"u{array.itemsize}") for array in arrays]
    differs = bits[0] != bits[1]
    if not differs.any():
        return None
    at = np.unravel_index(differs.argmax(), differs.shape)
    place = ", ".join(f"{axis} {i}" for axis, i in zip(("token", "column"), at))
    a, b = (f"{v[at]} (0x{u[at]:0{2 * u.itemsize}x})" for v, u in zip(arrays, bits))
    return f"{place}: got {a}, expected {b}; {differs.sum()} of {got.size} differ"


def unique_rows(
    rank: int, num_tokens: int, hidden: int, dtype: np.dtype | type, seed: int = 0
) -> np.ndarray:
    """[T, H] finite values, each a hash of (seed, rank, token, column)."""
    state = np.ones((1, 1), np.uint32)
    for part in (seed, rank, np.arange(num_tokens)[:, None], np.arange(hidden)):
        state = state ^ np.asarray(part).astype(np.uint32)
        for odd in (0x9E3779B1, 0x85EBCA77):  # odd factors lose nothing
            state *= np.uint32(odd)
            state ^= state >> np.uint32(15)
    bits = (state >> np.uint32(16)).astype(np.uint16)
    if np.dtype(dtype) == BF16:  # magnitudes in [2**-8, 2**8): exponents 119 + 4 bits
        return ((bits & 0x87FF) + np.uint16(119 << 7)).view(BF16)
    _check(np.dtype(dtype) == E4M3, f"dtype: expected {BF16} or {E4M3}, got {dtype}")
    return ((bits % 127) | (bits >> 8 & 0x80)).astype(np.uint8).view(E4M3)


def random_topk(
    rank: int,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    seed: int = 0,
    dropped: float = 0.1,
) -> tuple[np.ndarray, np.ndarray]:
    """Distinct experts or -1, [T, K] int64; weights in (0, 1], [T, K] float32."""
    _check(num_topk <= num_experts, f"num_topk: {num_topk} of {num_experts} experts")
    rng = np.random.default_rng([seed, rank])
    experts = rng.random((num_tokens, num_experts)).argsort(axis=1)[:, :num_topk]
    experts = np.where(rng.random(experts.shape) < dropped, -1, experts)
    return experts, np.float32(1) - rng.random(experts.shape, np.float32)
