"""What a dispatch leaves for combine and cached dispatches; the event object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class _Fields(NamedTuple):
    is_token_in_rank: Any
    rdma_channel_prefix_matrix: Any
    recv_rdma_channel_prefix_matrix: Any
    recv_rdma_rank_prefix_sum: Any
    num_recv_tokens: int
    send_rdma_head: Any


class Handle(_Fields):
    """Unpacks into the six fields of DeepEP's pull request 375, in its order.

    is_token_in_rank: [T, R] bool, as given. rdma_channel_prefix_matrix: [R, C] int32,
    rows for each rank up to and with each channel. recv_rdma_channel_prefix_matrix: [R,
    C] int32, the same for rows received. recv_rdma_rank_prefix_sum: [R] int32.
    num_recv_tokens: rows received. send_rdma_head: [T, R] int32, position of the
    token's row on the ring of its channel, counted from the operation's start, or -1.
    """

    # Beside the six: what the next calls check and need.
    operation: int
    num_channels: int
    num_rows: int  # rows that recv_x has: more than received with num_worst_tokens
    hidden: int
    num_topk: int
    num_experts: int
    token_list: Any  # [R, T] int32: tokens by destination rank and position
    owner: object  # the Buffer that made it


class EventOverlap:
    """DeepEP's event: marks the end of an operation on its stream.

    On the CPU an operation has ended when its call returns, so there is nothing to wait
    for; waiting any number of times is fine.
    """

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self._wait = wait
        self.event = self if wait else None

    def current_stream_wait(self) -> None:
        """Return once the operation has ended; raises what ended it early."""
        if self._wait is not None:
            self._wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: object) -> None:
        self.current_stream_wait()
