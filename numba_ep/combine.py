"""What a combine checks, opens with, allocates and returns."""

from __future__ import annotations

from typing import Any

from numba_ep import checks
from numba_ep.arrays import BFLOAT16, address, empty
from numba_ep.checks import Payload
from numba_ep.config import Config, Kind
from numba_ep.handle import EventOverlap, Handle
from numba_ep.kernels.combine import combine_kernel
from numba_ep.kernels.records import (
    Arrivals,
    Plan,
)
from numba_ep.operation import Operation


class Combine(Operation):
    """The way back of a dispatch, given by its handle."""

    kind = Kind.COMBINE
    handle: Handle
    biases: tuple[Any, ...]

    def prepare(
        self, x: Any, handle: Any, topk_weights: Any, bias: Any, config: Config
    ) -> None:
        """Check everything, allocate the sums."""
        self.check_config(config)
        self.handle = checks.check_handle(handle, self.endpoint, config)
        self.payload, self.biases = checks.check_combine(
            x, self.handle, topk_weights, bias, self.on_gpu
        )
        self.set_header(handle_operation=self.handle.operation)
        self._arrange()

    def _arrange(self) -> None:
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
        self.arrange(combine_kernel, plan, arrivals, to, (handle, self.biases))

    def deliver(self) -> tuple[Any, Any, EventOverlap]:
        """Move and add the rows, return DeepEP's tuple."""
        event = self.launch()
        return self.to.x, self.to.topk_weights, event
