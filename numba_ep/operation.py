"""One dispatch or combine: what it checks, opens with, allocates and launches.

    with operation.opened():     # the row exchange follows the block
        operation.prepare(...)   # raises what is wrong here
    operation.deliver()          # outputs, the kernel, the result

What `prepare` raises is held back until all ranks have this rank's refusal.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

from numba_ep import checks
from numba_ep.arrays import BFLOAT16, FLOAT8, ArgumentError, address, empty
from numba_ep.checks import DTYPE_CODES, BufferTooSmall, Payload
from numba_ep.config import Config, Kind, Refusal
from numba_ep.endpoint import WORD, Endpoint
from numba_ep.errors import refused
from numba_ep.handle import EventOverlap, Handle
from numba_ep.kernels.combine import combine_kernel
from numba_ep.kernels.dispatch import dispatch_kernel
from numba_ep.kernels.notify import notify_kernel
from numba_ep.kernels.records import (
    LINE_WORDS,
    RESULT_CULPRIT,
    RESULT_EXPECTED,
    RESULT_EXPERTS,
    RESULT_FIELD,
    RESULT_GOT,
    RESULT_OPERATION,
    RESULT_RECEIVED,
    RESULT_REFUSAL,
    Arrivals,
    Header,
    Notice,
    Plan,
    Ring,
)

EMPTY_HEADER = Header(*[0] * len(Header._fields))
EMPTY_NOTICE = Notice(*[0] * len(Notice._fields))


class Operation:
    """What dispatch and combine share: the opening, and the shape of the rings."""

    kind: Kind
    config: Config
    payload: Payload

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.num_ranks = endpoint.num_ranks
        self.on_gpu = endpoint.on_gpu
        self.header, self.notice = EMPTY_HEADER, EMPTY_NOTICE
        self.words: Any = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Exchange rows after the block: a refusal of any rank raises on all ranks."""
        self.endpoint.raise_if_ended()
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 (raised when all ranks know)
            error = caught
        header, notice = self.header, self.notice
        if error is not None:
            small = isinstance(error, BufferTooSmall)
            status = Refusal.BUFFER_TOO_SMALL if small else Refusal.INVALID_ARGUMENT
            header = EMPTY_HEADER._replace(status=int(status))
            notice = EMPTY_NOTICE
        notice = notice._replace(
            result=self.endpoint.result.address,
            scratch=self.endpoint.notify_scratch.address,
        )
        warps = self.endpoint.device.ONE_BLOCK_WARPS
        args = (self.endpoint.comm, header, notice)
        self.endpoint.launch(notify_kernel, 1, warps, args)
        if error is not None:
            raise error
        self.words = self.endpoint.result_words().copy()
        if self.words[RESULT_REFUSAL]:
            fields = (RESULT_OPERATION, RESULT_REFUSAL, RESULT_CULPRIT, RESULT_FIELD)
            about = (*fields, RESULT_EXPECTED, RESULT_GOT)
            raise refused(*(int(self.words[i]) for i in about))

    def check_config(self, config: Config) -> None:
        """Keep `config` if this Buffer has the channels for it."""
        checks.check_channels(config, self.endpoint.settings.max_channels)
        self.config = config

    def set_header(self, **fields: int) -> None:
        """The header of an operation that moves `payload` by `config`."""
        payload, config = self.payload, self.config
        ring_bytes = self.endpoint.ring_bytes
        checks.check_room(config, payload.slot_bytes, self.num_ranks, ring_bytes)
        self.header = EMPTY_HEADER._replace(
            kind=int(self.kind),
            hidden=payload.hidden,
            dtype=DTYPE_CODES[payload.dtype],
            num_topk=payload.num_topk,
            has_weights=int(payload.topk_weights is not None),
            chunk=config.chunk,
            capacity=config.capacity,
            num_channels=config.num_channels,
            **fields,
        )

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """All ranks have agreed to move tokens: a failure now ends it for all."""
        try:
            yield
        except BaseException:
            self.endpoint.runtime.abort()
            raise

    def launch(self, kernel: Any, plan: Plan, arrivals: Arrivals, to: Payload) -> None:
        """Move `payload` by `plan`; what arrives goes to `to` by `arrivals`."""
        warps = self.endpoint.device.WARPS_PER_BLOCK
        blocks = 2 * self.config.num_channels
        ring = self._ring(blocks, warps)
        sent, received = self.payload.rows(), to.rows()
        args = (self.endpoint.comm, ring, plan, arrivals, sent, received)
        self.endpoint.launch(kernel, blocks, warps, args)

    def _ring(self, blocks: int, warps: int) -> Ring:
        config, slot, ranks = self.config, self.payload.slot_bytes, self.num_ranks
        chunks = config.capacity // config.chunk
        # The larger of what a sending and a reducing block keep, see their modules.
        words = ranks * max(chunks + 2 * (warps + 1), 3 * warps + 1)
        words = -(-words // LINE_WORDS) * LINE_WORDS
        receive, receive_at, send, send_at = self.endpoint.rings()
        own_bytes = config.ring_bytes(1, slot)
        if self.on_gpu:
            own = self.endpoint.own_rings(own_bytes)
        else:
            own = receive + self.endpoint.rank * own_bytes
        return Ring(
            receive=receive,
            receive_at=receive_at,
            send=send,
            send_at=send_at,
            own=own,
            num_channels=config.num_channels,
            capacity=config.capacity,
            chunk=config.chunk,
            slot_bytes=slot,
            scratch=self.endpoint.scratch(WORD * blocks * words),
            scratch_words=words,
        )


class Dispatch(Operation):
    """A dispatch by a fresh layout, or by the routing of a handle."""

    handle: Handle

    def __init__(
        self, endpoint: Endpoint, expert_alignment: int, num_worst_tokens: int
    ) -> None:
        super().__init__(endpoint)
        self.expert_alignment = expert_alignment
        self.num_worst_tokens = num_worst_tokens

    def _check_numbers(self) -> None:
        for name in ("expert_alignment", "num_worst_tokens"):
            value = getattr(self, name)
            try:
                value = operator.index(value)
            except TypeError:
                kind = type(value).__name__
                raise TypeError(f"{name}: expected an int, got {kind}") from None
            if value >= 1 << 31:
                raise ArgumentError(f"{name}: expected less than 2**31, got {value}")
            setattr(self, name, value)
        if self.expert_alignment < 1:
            raise ArgumentError(
                f"expert_alignment: expected 1 or more, got {self.expert_alignment}"
            )
        if self.num_worst_tokens < 0:
            raise ArgumentError(
                f"num_worst_tokens: expected 0 or more, got {self.num_worst_tokens}"
            )

    def prepare(
        self, x: Any, layout: tuple[Any, Any, Any], topk_idx: Any, topk_weights: Any,
        config: Config,
    ) -> None:  # fmt: skip
        """Check everything for a fresh dispatch; make the handle and the notice."""
        self.kind = Kind.DISPATCH
        self.check_config(config)
        self._check_numbers()
        payload = checks.check_payload(x, topk_idx, topk_weights, self.on_gpu)
        self.payload = payload
        per_rank, in_rank, per_expert = layout
        checks.check_layout(
            per_rank, in_rank, per_expert, payload.num_tokens, self.num_ranks,
            self.on_gpu,
        )  # fmt: skip
        num_experts = int(per_expert.shape[0])
        self.set_header(
            num_experts=num_experts,
            expert_alignment=self.expert_alignment,
            num_worst_tokens=self.num_worst_tokens,
        )
        self.handle = self._new_handle(in_rank, num_experts)
        self.notice = EMPTY_NOTICE._replace(
            is_token_in_rank=address(in_rank) or 1,
            num_tokens=payload.num_tokens,
            tokens_per_rank=address(per_rank),
            tokens_per_expert=address(per_expert),
            positions=address(self.handle.send_rdma_head),
            token_list=address(self.handle.token_list),
            channel_prefix=address(self.handle.rdma_channel_prefix_matrix),
            recv_channel_prefix=address(self.handle.recv_rdma_channel_prefix_matrix),
            recv_rank_prefix=address(self.handle.recv_rdma_rank_prefix_sum),
        )

    def _new_handle(self, in_rank: Any, num_experts: int) -> Handle:
        payload, x = self.payload, self.payload.x
        ranks, channels = self.num_ranks, self.config.num_channels
        tokens = payload.num_tokens
        handle = Handle(
            is_token_in_rank=in_rank,
            rdma_channel_prefix_matrix=empty(x, (ranks, channels), "int32"),
            recv_rdma_channel_prefix_matrix=empty(x, (ranks, channels), "int32"),
            recv_rdma_rank_prefix_sum=empty(x, (ranks,), "int32"),
            num_recv_tokens=0,
            send_rdma_head=empty(x, (tokens, ranks), "int32"),
        )
        handle.token_list = empty(x, (ranks, tokens), "int32")
        handle.num_channels = channels
        handle.hidden, handle.num_topk = payload.hidden, payload.num_topk
        handle.num_experts, handle.owner = num_experts, self.endpoint
        return handle

    def prepare_cached(
        self, x: Any, handle: Any, topk_idx: Any, topk_weights: Any, config: Config
    ) -> None:
        """Check everything for a dispatch by the routing of `handle`."""
        self.kind = Kind.CACHED_DISPATCH
        self.check_config(config)
        self._check_numbers()
        if topk_idx is not None or topk_weights is not None:
            raise ArgumentError(
                "topk_idx, topk_weights: expected None with a handle, whose routing is "
                "used"
            )
        self.handle = checks.check_handle(handle, self.endpoint, config)
        self.payload = checks.check_payload(x, None, None, self.on_gpu)
        expected = int(self.handle.is_token_in_rank.shape[0])
        if self.payload.num_tokens != expected:
            raise ArgumentError(
                f"x: expected {expected} tokens as in the dispatch that made the "
                f"handle, got {self.payload.num_tokens}"
            )
        if 0 < self.num_worst_tokens < self.handle.num_recv_tokens:
            raise ArgumentError(
                f"num_worst_tokens: expected at least {self.handle.num_recv_tokens}, "
                f"got {self.num_worst_tokens}"
            )
        self.set_header(handle_operation=self.handle.operation)

    def deliver(self) -> tuple[Any, Any, Any, Any, Handle | None, EventOverlap]:
        """Allocate what is received, move the tokens, return DeepEP's tuple."""
        fresh = self.kind == Kind.DISPATCH
        if fresh:
            received = int(self.words[RESULT_RECEIVED])
            self.handle = self._complete(received)
        handle, payload = self.handle, self.payload
        rows = self.num_worst_tokens or handle.num_rows
        to = self._outputs(rows)
        plan = Plan(
            channel_prefix=address(handle.rdma_channel_prefix_matrix),
            token_list=address(handle.token_list) or 1,
            rank_prefix=0,
            num_tokens=payload.num_tokens,
        )
        arrivals = Arrivals(
            channel_prefix=address(handle.recv_rdma_channel_prefix_matrix),
            rank_prefix=address(handle.recv_rdma_rank_prefix_sum),
            positions=0,
            num_tokens=0,
            num_local_experts=handle.num_experts // self.num_ranks,
            bias_0=0,
            bias_1=0,
        )
        self.launch(dispatch_kernel, plan, arrivals, to)
        recv_x = to.x if to.scales is None else (to.x, to.scales)
        if not fresh:
            return recv_x, None, None, None, None, EventOverlap()
        counts = self.words[RESULT_EXPERTS:][: handle.num_experts // self.num_ranks]
        per_expert = [] if self.num_worst_tokens else counts.tolist()
        event = EventOverlap()
        return recv_x, to.topk_idx, to.topk_weights, per_expert, handle, event

    def _complete(self, received: int) -> Handle:
        """The handle with what only the exchange of rows could tell."""
        handle = self.handle._replace(num_recv_tokens=received)
        handle.__dict__.update(self.handle.__dict__)
        handle.operation = int(self.words[RESULT_OPERATION])
        handle.num_rows = self.num_worst_tokens or received
        return handle

    def _outputs(self, rows: int) -> Payload:
        payload, x = self.payload, self.payload.x
        # Rows beyond the received ones name no expert.
        no_expert = -1 if self.num_worst_tokens else None
        no_weight = 0 if self.num_worst_tokens else None
        scales = topk_idx = topk_weights = None
        if payload.scales is not None:
            scales = empty(x, (rows, payload.num_scales), "float32")
        if payload.topk_idx is not None:
            shape = (rows, payload.num_topk)
            topk_idx = empty(x, shape, "int64", no_expert)
        if payload.topk_weights is not None:
            shape = (rows, payload.num_topk)
            topk_weights = empty(x, shape, "float32", no_weight)
        dtype = BFLOAT16 if payload.scales is None else FLOAT8
        recv_x = empty(x, (rows, payload.hidden), dtype)
        return Payload(recv_x, scales, topk_idx, topk_weights, dtype)


class Combine(Operation):
    """The way back of a dispatch, given by its handle."""

    kind = Kind.COMBINE
    handle: Handle
    biases: tuple[Any, ...]

    def prepare(
        self, x: Any, handle: Any, topk_weights: Any, bias: Any, config: Config
    ) -> None:
        """Check everything."""
        self.check_config(config)
        self.handle = checks.check_handle(handle, self.endpoint, config)
        self.payload, self.biases = checks.check_combine(
            x, self.handle, topk_weights, bias, self.on_gpu
        )
        self.set_header(handle_operation=self.handle.operation)

    def deliver(self) -> tuple[Any, Any, EventOverlap]:
        """Allocate the sums, move and add the rows, return DeepEP's tuple."""
        handle, payload = self.handle, self.payload
        num_tokens = int(handle.is_token_in_rank.shape[0])
        combined = empty(payload.x, (num_tokens, payload.hidden), BFLOAT16)
        weights = None
        if payload.topk_weights is not None:
            weights = empty(payload.x, (num_tokens, payload.num_topk), "float32")
        plan = Plan(
            channel_prefix=address(handle.recv_rdma_channel_prefix_matrix),
            token_list=0,
            rank_prefix=address(handle.recv_rdma_rank_prefix_sum),
            num_tokens=0,
        )
        biases = [address(array) or 1 for array in self.biases] + [0, 0]
        arrivals = Arrivals(
            channel_prefix=address(handle.rdma_channel_prefix_matrix),
            rank_prefix=0,
            positions=address(handle.send_rdma_head),
            num_tokens=num_tokens,
            num_local_experts=0,
            bias_0=biases[0],
            bias_1=biases[1],
        )
        to = Payload(combined, None, None, weights, BFLOAT16)
        self.launch(combine_kernel, plan, arrivals, to)
        return combined, weights, EventOverlap()
