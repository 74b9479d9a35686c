"""Configs and their defaults, and the reasons for which a rank refuses an operation."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from numba_ep.slot import SCALE_GROUP, slot_bytes

MAX_EXPERTS = 4096
MAX_HINT_TOPK = 32


class Refusal(IntEnum):
    """Why an operation was refused; the same number on every rank."""

    NONE = 0
    INVALID_ARGUMENT = 1
    BUFFER_TOO_SMALL = 2
    INVALID_EXPERT_ID = 3
    LAYOUT_MISMATCH = 4
    RANKS_DISAGREE = 5
    TOO_MANY_TOKENS = 6


class Kind(IntEnum):
    """The operation that a row opens."""

    DISPATCH = 1
    CACHED_DISPATCH = 2
    COMBINE = 3


def check_num_sms(num_sms: object) -> int:
    """`num_sms` if it is a positive even int; TypeError or ValueError otherwise."""
    if isinstance(num_sms, bool) or not isinstance(num_sms, int):
        raise TypeError(f"num_sms: expected an int, got {type(num_sms).__name__}")
    if num_sms <= 0 or num_sms % 2:
        raise ValueError(
            f"num_sms: expected a positive even number (a channel takes one SM to send "
            f"and one to receive), got {num_sms}"
        )
    return num_sms


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value <= 0:
        raise ValueError(f"{name}: expected a positive number, got {value}")
    return value


class _Fields(NamedTuple):
    num_sms: int
    num_max_nvl_chunked_send_tokens: int
    num_max_nvl_chunked_recv_tokens: int
    num_max_rdma_chunked_send_tokens: int
    num_max_rdma_chunked_recv_tokens: int


class Config(_Fields):
    """DeepEP's tuning numbers; the two for NVLink are kept and mean nothing.

    chunk: tokens a write, `num_max_rdma_chunked_send_tokens`. capacity: slots a ring,
    `num_max_rdma_chunked_recv_tokens` rounded up to a multiple of chunk. Raises
    ValueError unless 0 < chunk <= capacity / 2: half a ring must be on its way while
    the other half is read.
    """

    __slots__ = ()

    def __new__(
        cls,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> Config:
        check_num_sms(num_sms)
        chunk = _positive(
            "num_max_rdma_chunked_send_tokens", num_max_rdma_chunked_send_tokens
        )
        recv = _positive(
            "num_max_rdma_chunked_recv_tokens", num_max_rdma_chunked_recv_tokens
        )
        self = super().__new__(
            cls, num_sms, num_max_nvl_chunked_send_tokens,
            num_max_nvl_chunked_recv_tokens, chunk, recv,
        )  # fmt: skip
        if self.chunk > self.capacity // 2:
            raise ValueError(
                "num_max_rdma_chunked_send_tokens: expected at most half of the ring "
                f"of {self.capacity} tokens, got {chunk}; raise "
                f"num_max_rdma_chunked_recv_tokens to {2 * chunk} or more"
            )
        return self

    @classmethod
    def _make(cls, iterable: Any) -> Any:  # type: ignore[override]
        # `_replace` comes here, too, and must check what it makes.
        return cls(*iterable)

    @property
    def chunk(self) -> int:
        """Tokens a write."""
        return self.num_max_rdma_chunked_send_tokens

    @property
    def capacity(self) -> int:
        """Slots a ring: a multiple of `chunk`, so that no chunk wraps."""
        chunk = self.num_max_rdma_chunked_send_tokens
        return -(-self.num_max_rdma_chunked_recv_tokens // chunk) * chunk

    @property
    def num_channels(self) -> int:
        """Independent slices of the tokens, two SMs each."""
        return self.num_sms // 2

    def ring_bytes(self, num_ranks: int, slot: int) -> int:
        """Bytes of all rings of `slot`-byte slots at one end."""
        return num_ranks * self.num_channels * self.capacity * slot

    def get_rdma_buffer_size_hint(
        self, hidden_bytes: int, num_ranks: int, num_topk: int = MAX_HINT_TOPK
    ) -> int:
        """Bytes of `num_rdma_bytes` that this config needs: send rings, receive rings.

        hidden_bytes: bytes of a token's row in its widest dtype. It covers the scales
        of an FP8 row of as many bytes and up to `num_topk` experts a token.
        """
        _positive("hidden_bytes", hidden_bytes)
        _positive("num_ranks", num_ranks)
        slot = slot_bytes(hidden_bytes, -(-hidden_bytes // SCALE_GROUP), num_topk)
        return 2 * self.ring_bytes(num_ranks, slot)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: nothing goes over NVLink."""
        return 0


def default_config(num_ranks: int, num_sms: int, slots: int = 2048) -> Config:
    """A config for any number of ranks: the more rings, the fewer slots a ring.

    Some `slots` slots in all, 64 to a quarter of them a ring, an eighth of a ring a
    chunk (see docs/performance.md).
    """
    _positive("num_ranks", num_ranks)
    rings = num_ranks * (check_num_sms(num_sms) // 2)
    capacity = min(slots // 4, max(64, slots // rings // 8 * 8))
    chunk = capacity // 8
    return Config(num_sms, chunk, capacity, chunk, capacity)
