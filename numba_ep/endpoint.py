"""One rank's end of a Buffer: memory, transport, proxy, threads, and their end.

`Buffer` checks arguments and allocates outputs; everything that lives longer than one
operation is here. Construction and `destroy` are collective, nothing else is.
"""

from __future__ import annotations

import functools
import os
import socket
import time
import weakref
from typing import Any

import numpy as np

import transport
from numba_ep import device as devices
from numba_ep.arrays import current_stream
from numba_ep.bounce import receive_map, row_bytes, send_map
from numba_ep.closing import close_locally, leave, leave_mpi_alone
from numba_ep.errors import BufferAborted, PeerTimeout, aborted
from numba_ep.group import Members
from numba_ep.kernels.records import (
    ABORT,
    LINE_BYTES,
    RECORD,
    RECORD_FIELDS,
    SCRATCH_COUNTS,
    STATE_WORDS,
    Comm,
)
from numba_ep.meeting import Settings, agree, all_or_none, compile_kernels
from numba_ep.results import Results
from transport import wr
from transport.atomics import BELL_BYTES, read_word
from transport.base import AbortWords
from transport.fifo import FifoReader, fifo_bytes
from transport.proxy import Proxy

FIFO_DEPTH = 64
WORD = 8
BELL_AT = 2 * LINE_BYTES  # behind the abort word and the status record


class Endpoint:
    """Made collectively by all ranks of `members`."""

    def __init__(self, members: Members, settings: Settings) -> None:
        self.rank, self.num_ranks = members.rank, members.num_ranks
        self.settings = settings
        self.device = devices.select(settings.device)
        self.on_gpu = devices.target() == "cuda"
        # Ranks of one process may share a stream, where each would wait for the others.
        processes = members.allgather((socket.gethostname(), os.getpid()))
        self.asynchronous = self.on_gpu and len(set(processes)) == len(processes)
        agree(members, settings)
        compile_kernels(members, self.device, processes)
        self.runtime = self.device.make_runtime(f"numba_ep rank {self.rank}", 0)
        self._map_memory()
        self._allocate()
        with all_or_none(members, "transport", self._undo):
            self.transport = transport.create(
                settings.transport, self.rank, self.num_ranks,
                self._receive_map.num_bytes, self._send_map.num_bytes,
                self.on_gpu, settings.max_channels, self._receive_map["tails"],
            )  # fmt: skip
        cards = members.allgather(self.transport.card())
        with all_or_none(members, "transport", self._undo):
            self.transport.connect(cards)
            if self.runtime.synchronous:
                # Kernels on a GPU ring no bell: there everybody polls.
                proxy_bell = self.control.address + BELL_AT
                self.runtime.bells = (self.transport.bell, proxy_bell)
            self.comm = self._make_comm()
            self.proxy = self._make_proxy()
            # It serves before the first kernel runs anywhere.
            self.proxy.start()
        self.transport.connected()
        # Nothing that the finaliser holds may hold this object.
        self.runtime.abort = functools.partial(
            self.proxy.abort, wr.ABORT_CANCELLED, self.rank
        )
        self.at_close: list[Any] = []  # called once, before anything is released
        self._close = weakref.finalize(
            self, leave, self.rank, self.proxy, self.transport, self.runtime,
            self.at_close,
        )  # fmt: skip
        self.ended_by: BufferAborted | None = None

    def _undo(self) -> None:
        """Construction failed on some rank: release what this one has."""
        if hasattr(self, "proxy"):
            self.proxy.stop()
        if hasattr(self, "transport"):
            self.transport.close()
        self.runtime.close()

    # Memory.

    def _map_memory(self) -> None:
        half = self.settings.num_rdma_bytes // 2
        channels = self.settings.max_channels
        self.ring_bytes = half
        self._receive_map = receive_map(self.num_ranks, channels, half)
        self._send_map = send_map(self.num_ranks, channels, half)

    def _allocate(self) -> None:
        runtime, ranks = self.runtime, self.num_ranks
        pairs = ranks * self.settings.max_channels
        self.control = runtime.allocate_host(BELL_AT + BELL_BYTES)
        self._abort_at = self.control.host_address + WORD * ABORT
        self.results = Results(runtime, ranks, self.asynchronous, self._abort_at)
        self._fifo_memory = runtime.allocate_host(
            fifo_bytes(self.settings.max_channels, FIFO_DEPTH)
        )
        self._state = runtime.allocate(WORD * STATE_WORDS)
        self._cursors = runtime.allocate(2 * WORD * pairs)
        self._tickets = runtime.allocate(LINE_BYTES * self.settings.max_channels)
        self.notify_scratch = runtime.allocate(WORD * (SCRATCH_COUNTS + pairs))
        self._scratch = runtime.allocate(0)
        self._own: Any = None
        self._own_rings: Any = None
        self.trace_memory: Any = None  # numba_ep.trace

    def _make_comm(self) -> Comm:
        runtime, offsets, ends = self.runtime, self._receive_map, self.transport
        receive, self.landing_address, self.send_address = (
            region.address if region.on_gpu
            else runtime.register(region.address, region.num_bytes)
            for region in (ends.receive, ends.landing, ends.send)
        )  # fmt: skip
        own = receive
        if not runtime.synchronous:
            # On a GPU the counters of traffic with oneself lie in its own memory.
            self._own = runtime.allocate(offsets["row counters"])
            own = self._own.address
        channels, fifo = self.settings.max_channels, self._fifo_memory.host_address
        self._fifo = FifoReader(fifo, channels, FIFO_DEPTH)
        entries = channels * FIFO_DEPTH * wr.ENTRY_BYTES
        pairs = self.num_ranks * self.settings.max_channels
        return Comm(
            rank=self.rank,
            num_ranks=self.num_ranks,
            max_channels=self.settings.max_channels,
            timeout_ns=int(self.settings.timeout_s * 1e9),
            landing=self.landing_address,
            receive=receive,
            own=own,
            tails_at=offsets["tails"],
            heads_at=offsets["heads"],
            row_counters_at=offsets["row counters"],
            rows_at=offsets["rows"],
            send_rows=self.send_address + self._send_map["rows"],
            send_rows_at=self._send_map["rows"],
            row_bytes=row_bytes(self.num_ranks, self.settings.max_channels),
            control=self.control.address,
            state=self._state.address,
            tail_cursors=self._cursors.address,
            head_cursors=self._cursors.address + WORD * pairs,
            fifo=self._fifo_memory.address,
            fifo_freed=self._fifo_memory.address + entries,
            fifo_tickets=self._tickets.address,
            fifo_depth=FIFO_DEPTH,
            trace=0,
            trace_records=0,
        )

    def _make_proxy(self) -> Proxy:
        aborts = self._receive_map["abort"]
        farewells = self._receive_map["farewell"]
        base = self.transport.receive.host_address
        ranks = np.arange(self.num_ranks)
        queues = self.settings.max_channels
        words = AbortWords(
            local=self._abort_at,
            from_peers=base + aborts + ranks * LINE_BYTES,
            at_peers=aborts + self.rank * LINE_BYTES,
            farewells=base + farewells + ranks * queues * LINE_BYTES,
        )
        return Proxy(
            self.rank, self.transport, self._fifo, words, self.runtime.bells[1]
        )

    def rings(self) -> tuple[int, int, int, int]:
        """Receive rings (address, offset) and send rings (address, offset)."""
        receive_at, send_at = self._receive_map["rings"], self._send_map["rings"]
        receive, send = self.landing_address + receive_at, self.send_address + send_at
        return receive, receive_at, send, send_at

    @property
    def probe_at(self) -> int:
        """Offset in every receive region of the counters of plain puts, one a rank."""
        return self._receive_map["probe"]

    def own_rings(self, num_bytes: int) -> int:
        """Address of `num_bytes` for the rings of traffic with oneself."""
        if self._own_rings is None or self._own_rings.num_bytes < num_bytes:
            self._own_rings = self.runtime.allocate(num_bytes)
        return int(self._own_rings.address)

    def scratch(self, num_bytes: int) -> int:
        """Address of at least `num_bytes` for the blocks of one kernel."""
        if self._scratch.num_bytes < num_bytes:
            self._scratch = self.runtime.allocate(num_bytes)
        return int(self._scratch.address)

    def regions(self) -> str:
        """The memory map, for people."""
        return f"receive region\n{self._receive_map}\nsend region\n{self._send_map}"

    # Operations.

    def launch(
        self, kernel: Any, blocks: int, warps: int, args: tuple[Any, ...]
    ) -> None:
        """Start a kernel that may wait for peers; raises what ended the Buffer."""
        self.raise_if_ended()
        self.runtime.launch(kernel, blocks, warps, args)
        if not self.asynchronous:
            self.runtime.synchronize()
            self.raise_if_ended()

    def begin(self, like: Any) -> None:
        """On a GPU: all that follows begins after what the caller's stream holds."""
        if self.on_gpu:
            self.runtime.wait_for(current_stream(like))

    def wait_until(self, operation: int) -> None:
        """Wait for the end of an operation; raise what became of it."""
        self.results.read_until(operation)
        self.raise_if_ended()

    def settle(self) -> None:
        """Before an operation returns or raises: the proxy has posted all of it.

        Peers need what the kernels asked for, and the caller may go on to a call that
        keeps the interpreter's lock from the proxy, as MPI.Finalize does.
        """
        if not self.asynchronous and not self._abort_word():
            self.proxy.drain(min(1.0, self.settings.timeout_s))

    def run_local(
        self, like: Any, kernel: Any, blocks: int, warps: int, args: tuple[Any, ...]
    ) -> None:
        """Run a kernel that waits for nobody between what the caller's stream does."""
        self.begin(like)
        self.runtime.launch_local(kernel, blocks, warps, args)
        if self.asynchronous:
            self.runtime.let_wait(current_stream(like))
        else:
            self.runtime.synchronize()

    def raise_if_ended(self) -> None:
        """Raise BufferAborted, RuntimeError after destroy; the first cause stays."""
        if not self._close.alive:
            raise RuntimeError(f"rank {self.rank}: this Buffer has been destroyed")
        if self.ended_by is None:
            value = self._abort_word()
            if value:
                words = self.control.host.view(np.int64)[RECORD:][: len(RECORD_FIELDS)]
                self.ended_by = aborted(
                    self.rank, value, words, self.settings.timeout_s, self.proxy.error
                )
                if wr.abort_parts(value)[0] != wr.ABORT_LEFT:
                    leave_mpi_alone()
        if self.ended_by is not None:
            raise type(self.ended_by)(str(self.ended_by), self.ended_by.culprit)

    def _abort_word(self) -> int:
        return int(read_word(self._abort_at))

    # The end.

    def destroy(self) -> None:
        """Collective: say farewell on every queue, wait for every peer's, release.

        After an abort local and without error. Raises PeerTimeout where a peer does not
        come in time: it may be at work still, and has heard that nobody waits for it.
        """
        if not self._close.alive:
            return
        timeout_s = self.settings.timeout_s
        met = self.ended_by is None and self.runtime.synchronize(timeout_s)
        late = self._part() if met else -1
        is_late = late >= 0 and not self._abort_word()
        if is_late:
            self.proxy.abort(wr.ABORT_TIMEOUT, late)
        met = met and late < 0 and not self._abort_word()
        if not met and wr.abort_parts(self._abort_word())[0] != wr.ABORT_LEFT:
            leave_mpi_alone()
        self._close.detach()
        close_locally(
            self.proxy, self.transport, self.runtime, self.at_close,
            keep_memory=not met,
        )  # fmt: skip
        if is_late:
            raise PeerTimeout(
                f"rank {self.rank}: rank {late} did not come to destroy within "
                f"{timeout_s:g} s; is it still at work? Give the Buffer a longer "
                "timeout_s",
                late,
            )

    def _part(self) -> int:
        """Say farewell and wait for the peers': -1, or the rank that is waited for."""
        deadline = time.monotonic() + self.settings.timeout_s
        if not self.proxy.drain(self.settings.timeout_s):
            return self.rank
        at, queues = self._receive_map["farewell"], self.settings.max_channels
        own = at + self.rank * queues * LINE_BYTES
        batch = [
            wr.counter_write(peer, queue, own + queue * LINE_BYTES, 1)
            for peer in range(self.num_ranks)
            for queue in range(queues)
            if peer != self.rank
        ]
        if batch:
            self.proxy.submit(np.array(batch, np.int64))
        for peer in range(self.num_ranks):
            base = self.transport.receive.host_address
            base += at + peer * queues * LINE_BYTES
            for queue in range(queues if peer != self.rank else 0):
                while not read_word(base + queue * LINE_BYTES):
                    if time.monotonic() > deadline or self._abort_word():
                        return peer
                    time.sleep(0.0002)
        met = self.proxy.drain(max(0.1, deadline - time.monotonic()))
        return -1 if met else self.rank
