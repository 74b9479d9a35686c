"""Buffer: validate -> open the operation -> allocate -> launch -> raise.

The names, arguments, order and results are those of `deep_ep.Buffer`.
"""

from __future__ import annotations

import operator
from typing import Any

from numba_ep import arrays, checks
from numba_ep import device as devices
from numba_ep.arrays import ArgumentError, address, empty
from numba_ep.config import Config, check_num_sms, default_config
from numba_ep.endpoint import Endpoint
from numba_ep.group import members
from numba_ep.handle import EventOverlap, Handle
from numba_ep.kernels.records import LayoutArrays
from numba_ep.meeting import Settings, all_or_none

DEFAULT_TIMEOUT_S = 30.0


class _DefaultNumSms:
    """`Buffer.num_sms` until somebody sets it: the device's default."""

    def __get__(self, instance: Any, owner: Any) -> int:
        return devices.defaults().num_sms


class Buffer:
    """Dispatch and combine among the ranks of `group` (or `comm`), without NVLink.

    group: an mpi4py communicator, the group that `spawn` hands out, or a torch process
    group. num_rdma_bytes: bytes of the rings, see `Config.get_rdma_buffer_size_hint`.
    num_qps_per_rank: the most channels that an operation may use, 2 SMs each. The
    NVLink arguments, low_latency_mode=False and explicitly_destroy are DeepEP's and
    mean nothing here. transport: "shm" (one host) or "verbs" (RDMA). device: "auto",
    "cuda" or "cpu", the same for the whole process. timeout_s: seconds after which a
    wait for a peer ends the Buffer.

    Construction and `destroy` are collective. All operations are ordered; every rank
    must call the same ones in the same order.
    """

    num_sms: Any = _DefaultNumSms()

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_normal_mode: bool = True,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
        *,
        transport: str = "shm",
        device: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.group = comm if group is None else group
        ranks = members(group, comm)
        with all_or_none(ranks, "Buffer"):
            if low_latency_mode:
                raise ValueError("low_latency_mode: numba_ep has the normal mode only")
            settings = Settings(
                operator.index(num_rdma_bytes), operator.index(num_qps_per_rank),
                float(timeout_s), transport, device,
            )  # fmt: skip
            settings.check()
            devices.select(device)
        self._endpoint = Endpoint(ranks, settings)
        self.rank, self.group_size = ranks.rank, ranks.num_ranks
        self.num_rdma_bytes = int(num_rdma_bytes)
        if hasattr(self.group, "on_abort"):
            undo = self.group.on_abort(self._endpoint.runtime.abort)
            self._endpoint.at_close.append(undo)

    def __repr__(self) -> str:
        settings = self._endpoint.settings
        return (
            f"<numba_ep.Buffer rank {self.rank} of {self.group_size}, "
            f"{devices.target()}, transport {settings.transport} "
            f"({self._endpoint.transport.details}), "
            f"{self.num_rdma_bytes:,} bytes of rings, up to {settings.max_channels} "
            f"channels, timeout {settings.timeout_s:g} s>"
        )

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            # The peers may be in an operation that this rank will not take part in.
            self._endpoint.runtime.abort()
        self.destroy()

    def destroy(self) -> None:
        """Collective: wait until no peer needs this rank's memory, and release it.

        Returns also after an abort; a second call does nothing. PeerTimeout where a
        peer does not come in time.
        """
        self._endpoint.destroy()

    def statistics(self) -> Any:
        """What the proxy has posted so far (`transport.statistics.Statistics`)."""
        return self._endpoint.proxy.statistics()

    def regions(self) -> str:
        """The memory map of this rank, for people."""
        return self._endpoint.regions()

    # Configs.

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """SMs of the default configs of this process; a positive even number."""
        Buffer.num_sms = check_num_sms(new_num_sms)

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The default config for dispatch; there is one for every number of ranks."""
        return default_config(num_ranks, Buffer.num_sms, devices.defaults().ring_slots)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The default config for combine."""
        return default_config(num_ranks, Buffer.num_sms, devices.defaults().ring_slots)

    # Layout.

    def get_dispatch_layout(
        self,
        topk_idx: Any,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, None, Any, Any, EventOverlap]:
        """Count the tokens for each rank and expert; local, no peer is involved.

        topk_idx: [num_tokens, num_topk] int64, -1 for no selection. Returns
        num_tokens_per_rank [R] int32, None (DeepEP's count per RDMA rank),
        num_tokens_per_expert [E] int32, is_token_in_rank [num_tokens, R] bool, event.

        Raises ValueError for a wrong array or num_experts. An id outside [-1, E) makes
        every count -1: the dispatch that is given them is refused on all ranks.
        """
        self._endpoint.raise_if_ended()
        _check_events(previous_event, async_finish, allocate_on_comm_stream)
        checks.check_experts(num_experts, self.group_size)
        on_gpu = self._endpoint.on_gpu
        arrays.check("topk_idx", topk_idx, ("int64",), (None, None), on_gpu)
        num_tokens, num_topk = (int(n) for n in topk_idx.shape)
        per_rank = empty(topk_idx, (self.group_size,), "int32")
        per_expert = empty(topk_idx, (num_experts,), "int32")
        in_rank = empty(topk_idx, (num_tokens, self.group_size), "bool")
        from numba_ep.kernels.layout import layout_kernel

        record = LayoutArrays(
            address(topk_idx), num_tokens, num_topk, num_experts, self.group_size,
            address(per_rank), address(per_expert), address(in_rank),
            self._endpoint.notify_scratch.address,
        )  # fmt: skip
        warps = self._endpoint.device.ONE_BLOCK_WARPS
        self._endpoint.run_local(topk_idx, layout_kernel, 1, warps, (record,))
        return per_rank, None, per_expert, in_rank, EventOverlap()

    # Dispatch.

    def dispatch(
        self,
        x: Any,
        handle: Handle | None = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Any, Any, Any, Handle | None, EventOverlap]:
        """Send every token to the ranks that hold its experts.

        x: [num_tokens, hidden] bfloat16, or (x float8_e4m3fn, scales float32
        [num_tokens, hidden / 128] of any stride). The three layout arrays come from
        `get_dispatch_layout`. topk_idx, topk_weights: [num_tokens, num_topk] int64 and
        float32. handle: routing of an earlier dispatch, in place of layout and top-k.
        num_worst_tokens: rows to allocate for; too few is an error on all ranks.

        Returns recv_x (as x; rows ordered by source rank and token), recv_topk_idx
        (local ids, -1 for others' experts), recv_topk_weights (0 there), the list of
        rows for each local expert rounded up to expert_alignment (empty with
        num_worst_tokens), handle, event. With a handle all but recv_x and event are
        None.

        Raises ValueError or TypeError on every rank if any rank's arguments are wrong;
        no token has moved then, and the Buffer goes on working. BufferAborted where a
        peer does not come in time.
        """
        from numba_ep.dispatch import Dispatch

        operation = Dispatch(
            self._endpoint, expert_alignment, num_worst_tokens, async_finish
        )
        with operation.opened():
            if config is None:
                config = self.get_dispatch_config(self.group_size)
            _check_events(previous_event, async_finish, allocate_on_comm_stream)
            if handle is None:
                layout = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
                operation.prepare(x, layout, topk_idx, topk_weights, config)
            else:
                operation.prepare_cached(x, handle, topk_idx, topk_weights, config)
        with operation.under_way():
            result = operation.deliver()
        operation.end()
        return result

    # Combine.

    def combine(
        self,
        x: Any,
        handle: Handle,
        topk_weights: Any = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Any, EventOverlap]:
        """Send every row back to its token's rank and add the rows of a token.

        x: [rows of recv_x, hidden] bfloat16, in the order in which dispatch delivered.
        topk_weights: [rows of recv_x, num_topk] float32, added the same way; rows are
        not multiplied by them. bias: none, one or two [num_tokens, hidden] bfloat16.

        Returns combined_x [num_tokens, hidden] bfloat16: bias_0 + bias_1 + rows by
        ascending rank in float32, rounded once; combined_topk_weights; event. Raises
        as dispatch does.
        """
        from numba_ep.combine import Combine

        operation = Combine(self._endpoint, async_finish)
        with operation.opened():
            if config is None:
                config = self.get_combine_config(self.group_size)
            _check_events(previous_event, async_finish, allocate_on_comm_stream)
            operation.prepare(x, handle, topk_weights, bias, config)
        with operation.under_way():
            result = operation.deliver()
        operation.end()
        return result


def _check_events(
    previous_event: EventOverlap | None, async_finish: bool, on_comm_stream: bool
) -> None:
    if previous_event is not None and not isinstance(previous_event, EventOverlap):
        raise TypeError(
            "previous_event: expected an EventOverlap or None, got "
            f"{type(previous_event).__name__}"
        )
    if on_comm_stream and (previous_event is None or not async_finish):
        raise ArgumentError(
            "allocate_on_comm_stream: expected previous_event and async_finish=True "
            "with it, as DeepEP does"
        )
    if previous_event is not None:
        previous_event.current_stream_wait()
