"""One dispatch or combine: what it checks, opens with, allocates and launches.

    with operation.opened():     # the row exchange follows the block
        operation.prepare(...)   # raises what is wrong here, allocates if it can
    operation.deliver()          # outputs, the kernel, the result

What `prepare` raises is held back until all ranks have this rank's refusal. What need
not wait for the rows is made ready before they leave, so that on a GPU the kernel that
moves tokens stands right behind the one that exchanges rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from numba_ep import checks
from numba_ep.checks import DTYPE_CODES, BufferTooSmall, Payload
from numba_ep.config import Config, Kind, Refusal
from numba_ep.endpoint import WORD, Endpoint
from numba_ep.errors import RefusedError
from numba_ep.handle import EventOverlap
from numba_ep.kernels.combine import MOST_BIASES
from numba_ep.kernels.notify import notify_kernel
from numba_ep.kernels.records import (
    LINE_WORDS,
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
    payload: Payload = None  # type: ignore[assignment]
    to: Payload  # what is received
    needs_counts = False  # whether the host must know what the rows say

    def __init__(self, endpoint: Endpoint, async_finish: bool) -> None:
        self.endpoint = endpoint
        self.num_ranks = endpoint.num_ranks
        self.on_gpu = endpoint.on_gpu
        self.header, self.notice = EMPTY_HEADER, EMPTY_NOTICE
        self.words: Any = None
        self._grid: Any = None
        self._used: Any = None
        self.async_finish = async_finish
        self.number = 0  # of the operation, where its end is not waited for

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Exchange rows after the block: a refusal of any rank raises on all ranks."""
        self.endpoint.raise_if_ended()
        error: Exception | None = None
        try:
            # What is raised here refuses this operation, too: ranks stay in step.
            self.endpoint.results.read_earlier()
            yield
        except Exception as caught:  # noqa: BLE001 (raised when all ranks know)
            error = caught
        header, notice = self.header, self.notice
        if error is not None:
            small = isinstance(error, BufferTooSmall)
            status = Refusal.BUFFER_TOO_SMALL if small else Refusal.INVALID_ARGUMENT
            header = EMPTY_HEADER._replace(status=int(status))
            notice = EMPTY_NOTICE
        if self.payload is not None:
            self.endpoint.begin(self.payload.x)
        results = self.endpoint.results
        notice = notice._replace(
            results=results.memory.address,
            result_bytes=results.result_bytes,
            scratch=self.endpoint.notify_scratch.address,
        )
        results.num_operations += 1
        warps = self.endpoint.device.ONE_BLOCK_WARPS
        args = (self.endpoint.comm, header, notice)
        try:
            self.endpoint.launch(notify_kernel, 1, warps, args)
        finally:
            if error is not None:
                self.endpoint.settle()
                # Says more than that a peer, which may have the same error, has left.
                raise error
        if self.needs_counts or not results.asynchronous:
            try:
                self.words = results.words(results.num_operations)
            except RefusedError:
                self.endpoint.settle()
                raise
            self.endpoint.raise_if_ended()

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

    def arrange(
        self, kernel: Any, plan: Plan, arrivals: Arrivals, to: Payload, used: Any
    ) -> None:
        """Have `launch` move `payload` by `plan`; what arrives goes to `to` by
        `arrivals`.

        used: what else the kernel reads, and must live as long as it runs.
        """
        warps = self.endpoint.device.WARPS_PER_BLOCK
        blocks = 2 * self.config.num_channels
        ring = self._ring(blocks, warps)
        sent, received = self.payload.rows(), to.rows()
        args = (self.endpoint.comm, ring, plan, arrivals, sent, received)
        self.to, self._used = to, (self.payload, to, used)
        self._grid = kernel, blocks, warps, args

    def launch(self) -> EventOverlap:
        """Start what was arranged."""
        self.endpoint.launch(*self._grid)
        if not self.endpoint.asynchronous:
            return EventOverlap()
        self.number = self.endpoint.results.leave(self._used)
        if self.async_finish:
            return EventOverlap(self.wait)
        return EventOverlap()

    def wait(self) -> None:
        """Until the kernels have ended; raises what became of the operation."""
        self.endpoint.wait_until(self.number)

    def end(self) -> None:
        """Before the call returns: see that nobody needs it for the rest."""
        if not self.endpoint.asynchronous:
            self.endpoint.settle()
        elif not self.async_finish:
            self.wait()

    def _ring(self, blocks: int, warps: int) -> Ring:
        config, slot, ranks = self.config, self.payload.slot_bytes, self.num_ranks
        chunks = config.capacity // config.chunk
        # The larger of what a sending and a reducing block keep, see their modules.
        sending = ranks * (chunks + 2 * (warps + 1))
        reducing = ranks * (3 * warps + 2) + MOST_BIASES * warps
        words = max(sending, reducing)
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
