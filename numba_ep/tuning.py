"""Times and bandwidths of `python -m numba_ep.test`.

GB are 1e9 bytes, per rank, over the median time of the slowest rank. With several
calls in a row (on a GPU) a figure is one of them: what the host does for one call then
hides behind the call before.

algorithm  rows of x (and scales) for each (token, destination rank), own rank counted
wire       data bytes that were posted to the transport
raw        plain puts of the same rows in the same chunks, by all ranks at once
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numba_ep import reference
from numba_ep.arrays import from_host
from numba_ep.buffer import Buffer
from numba_ep.config import Config
from numba_ep.group import Members
from numba_ep.kernels.records import LINE_BYTES
from numba_ep.selfcheck import Sizes, payload, routing
from numba_ep.slot import slot_bytes
from transport import wr


class Figure(NamedTuple):
    """One operation at one chunk size (tokens)."""

    time_us: float
    algorithm_gbps: float
    wire_gbps: float
    raw_gbps: float
    chunk: int


class Tuner:
    """Measures one Buffer; every method is collective.

    repeats: times whose median counts, each of `calls_in_a_row`.
    """

    def __init__(
        self, buffer: Buffer, members: Members, sizes: Sizes, on_gpu: bool,
        repeats: int, calls_in_a_row: int = 1,
    ) -> None:  # fmt: skip
        self.buffer, self.members, self.sizes = buffer, members, sizes
        self.on_gpu, self.repeats = on_gpu, repeats
        # Elsewhere a call returns only when its operation has ended.
        self.asynchronous = buffer._endpoint.asynchronous
        self.calls = calls_in_a_row if self.asynchronous else 1
        topk_idx, _ = routing(buffer.rank, sizes)
        self.topk_idx = from_host(topk_idx, on_gpu)
        self.layout = buffer.get_dispatch_layout(self.topk_idx, sizes.num_experts)
        in_rank = reference.layout(topk_idx, sizes.num_experts, buffer.group_size)
        self.rows_to = in_rank.num_tokens_per_rank

    def dispatch(self, data: str, config: Config) -> Figure:
        """A cached dispatch: the path without the exchange of counts."""
        x, scales = payload(self.buffer.rank, self.sizes, data)
        given = from_host(x, self.on_gpu)
        sent = given if scales is None else (given, from_host(scales, self.on_gpu))
        handle = self._handle(sent, config)
        row_bytes = x.itemsize * x.shape[1]
        num_scales = 0 if scales is None else scales.shape[1]
        return self._measure(
            lambda: self.buffer.dispatch(
                sent, handle=handle, config=config, async_finish=self.asynchronous
            ),
            row_bytes + 4 * num_scales, slot_bytes(row_bytes, num_scales, 0), config,
        )  # fmt: skip

    def combine(self, config: Config) -> Figure:
        """A combine without bias or weights."""
        x, _ = payload(self.buffer.rank, self.sizes, "random")
        sent = from_host(x, self.on_gpu)
        handle = self._handle(sent, config)
        rows = self.buffer.dispatch(sent, handle=handle, config=config)[0]
        row_bytes = x.itemsize * x.shape[1]
        return self._measure(
            lambda: self.buffer.combine(
                rows, handle, config=config, async_finish=self.asynchronous
            ),
            row_bytes, slot_bytes(row_bytes, 0, 0), config,
        )  # fmt: skip

    def journey(self, config: Config) -> None:
        """One dispatch and the combine of what it brought, without any timing."""
        x, _ = payload(self.buffer.rank, self.sizes, "bf16")
        received = self._fresh_dispatch(from_host(x, self.on_gpu), config)
        self.buffer.combine(received[0], received[4], config=config)

    def _handle(self, sent: Any, config: Config) -> Any:
        return self._fresh_dispatch(sent, config)[4]

    def _fresh_dispatch(self, sent: Any, config: Config) -> Any:
        per_rank, _, per_expert, in_rank, _ = self.layout
        return self.buffer.dispatch(
            sent,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            config=config,
        )

    def _measure(
        self, call: Callable[[], Any], bytes_a_row: int, slot: int, config: Config
    ) -> Figure:
        endpoint = self.buffer._endpoint

        def whole() -> None:
            for _ in range(self.calls):
                call()
            endpoint.runtime.synchronize()

        whole()
        endpoint.proxy.drain(endpoint.settings.timeout_s)
        before = self.buffer.statistics().put_bytes
        seconds = self._slowest_median(whole) / self.calls
        endpoint.proxy.drain(endpoint.settings.timeout_s)
        posted = self.buffer.statistics().put_bytes - before
        posted /= self.repeats * self.calls
        algorithm = float(self.rows_to.sum()) * bytes_a_row
        puts = self._plain_puts(slot, config)
        raw_seconds = self._slowest_median(lambda: self._put_all(puts))
        raw_bytes = float(puts[:, wr.NUM_BYTES].sum()) if len(puts) else 0.0
        sums = self.members.allgather((algorithm, posted, raw_bytes))
        algorithm, posted, raw_bytes = np.mean(sums, axis=0)
        return Figure(
            time_us=seconds * 1e6,
            algorithm_gbps=algorithm / seconds / 1e9,
            wire_gbps=posted / seconds / 1e9,
            raw_gbps=raw_bytes / raw_seconds / 1e9,
            chunk=config.chunk,
        )

    def _slowest_median(self, call: Callable[[], Any]) -> float:
        """Seconds; every repetition starts together on all ranks."""
        times = []
        for _ in range(self.repeats):
            self.members.barrier()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return max(self.members.allgather(statistics.median(times)))

    def _plain_puts(self, slot: int, config: Config) -> np.ndarray:
        """What a dispatch posts, without kernels: chunks round the rings, by peer."""
        endpoint = self.buffer._endpoint
        _, receive_at, _, send_at = endpoint.rings()
        ring = config.capacity * slot
        counter = endpoint.probe_at + endpoint.rank * LINE_BYTES
        puts = []
        for peer in range(endpoint.num_ranks):
            rows = int(self.rows_to[peer]) if peer != endpoint.rank else 0
            for first in range(0, rows, config.chunk):
                count = min(config.chunk, rows - first)
                at = first % config.capacity * slot
                source = send_at + peer * config.num_channels * ring + at
                to = receive_at + endpoint.rank * config.num_channels * ring + at
                queue = first // config.chunk % config.num_channels
                puts.append(
                    wr.put(peer, queue, source, to, count * slot, counter, first)
                )
        # Peers in turn, each rank beginning with another.
        ranks, rank = endpoint.num_ranks, endpoint.rank
        puts.sort(key=lambda p: (p.value, (p.peer - rank) % ranks))
        return np.array(puts, np.int64).reshape(-1, wr.NUM_FIELDS)

    def _put_all(self, puts: np.ndarray) -> None:
        proxy = self.buffer._endpoint.proxy
        if len(puts):
            proxy.submit(puts)
        if not proxy.drain(self.buffer._endpoint.settings.timeout_s):
            raise TimeoutError(f"rank {self.buffer.rank}: plain puts did not complete")
