"""What a dispatch checks, opens with, allocates and returns."""

from __future__ import annotations

import operator
from typing import Any

from numba_ep import checks
from numba_ep.arrays import (
    BFLOAT16,
    FLOAT8,
    ArgumentError,
    address,
    current_stream,
    empty,
)
from numba_ep.checks import Payload
from numba_ep.config import Config, Kind
from numba_ep.endpoint import Endpoint
from numba_ep.handle import EventOverlap, Handle
from numba_ep.kernels.dispatch import dispatch_kernel
from numba_ep.kernels.records import (
    RESULT_EXPERTS,
    RESULT_OPERATION,
    RESULT_RECEIVED,
    Arrivals,
    Plan,
)
from numba_ep.operation import EMPTY_NOTICE, Operation


class Dispatch(Operation):
    """A dispatch by a fresh layout, or by the routing of a handle."""

    handle: Handle

    def __init__(
        self, endpoint: Endpoint, expert_alignment: int, num_worst_tokens: int,
        async_finish: bool,
    ) -> None:  # fmt: skip
        super().__init__(endpoint, async_finish)
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
        self.kind, self.needs_counts = Kind.DISPATCH, True
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
        """The same by the routing of `handle`; allocate what is received."""
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
        self._arrange()

    def deliver(self) -> tuple[Any, Any, Any, Any, Handle | None, EventOverlap]:
        """Move the tokens, return DeepEP's tuple."""
        fresh = self.kind == Kind.DISPATCH
        if fresh:
            # Only the rows told how many tokens come.
            self.handle = self._complete(int(self.words[RESULT_RECEIVED]))
            self._arrange()
            # Outputs may have been filled on the caller's stream.
            self.endpoint.begin(self.payload.x)
        event = self.launch()
        handle, to = self.handle, self.to
        recv_x = to.x if to.scales is None else (to.x, to.scales)
        if not fresh:
            return recv_x, None, None, None, None, event
        counts = self.words[RESULT_EXPERTS:][: handle.num_experts // self.num_ranks]
        per_expert = [] if self.num_worst_tokens else counts.tolist()
        return recv_x, to.topk_idx, to.topk_weights, per_expert, handle, event

    def _arrange(self) -> None:
        handle = self.handle
        plan = Plan(
            channel_prefix=address(handle.rdma_channel_prefix_matrix),
            token_list=address(handle.token_list) or 1,
            rank_prefix=0,
            num_tokens=self.payload.num_tokens,
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
        to = self._outputs(self.num_worst_tokens or handle.num_rows)
        self.arrange(dispatch_kernel, plan, arrivals, to, handle)

    def _complete(self, received: int) -> Handle:
        """The handle with what only the exchange of rows could tell."""
        handle = self.handle._replace(num_recv_tokens=received)
        handle.__dict__.update(self.handle.__dict__)
        handle.operation = int(self.words[RESULT_OPERATION])
        handle.num_rows = self.num_worst_tokens or received
        return handle

    def _outputs(self, rows: int) -> Payload:
        payload, x = self.payload, self.payload.x
        scales = topk_idx = topk_weights = None
        if payload.scales is not None:
            scales = empty(x, (rows, payload.num_scales), "float32")
        # Rows beyond the received ones name no expert, -1, and have weight 0.
        if payload.topk_idx is not None:
            topk_idx = self._topk_array(rows, "int64", 0xFF)
        if payload.topk_weights is not None:
            topk_weights = self._topk_array(rows, "float32", 0)
        dtype = BFLOAT16 if payload.scales is None else FLOAT8
        recv_x = empty(x, (rows, payload.hidden), dtype)
        return Payload(recv_x, scales, topk_idx, topk_weights, dtype)

    def _topk_array(self, rows: int, dtype: str, byte: int) -> Any:
        x = self.payload.x
        array = empty(x, (rows, self.payload.num_topk), dtype)
        if self.num_worst_tokens and array.nbytes:
            # The library's own fill may load a kernel. CUDA would wait with that until
            # no kernel runs, and one of another rank here may be waiting for this rank.
            stream = current_stream(x) if self.on_gpu else 0
            self.endpoint.runtime.fill(address(array), array.nbytes, byte, stream)
        return array
