"""One host, GPUs, no NIC: the copy engines play the NIC.

    send region            receive region
    in this rank's GPU  ── copy engine ──►  the peer's pinned memory in /dev/shm
                        ── the counter, by the same stream, after the copy ──►

No CPU core touches the payload. A stream keeps the order of what is posted to it, so
the puts of a (peer, queue) have their stream; queues share `STREAMS_A_PEER` of them.
Counters alone need not wait for puts: the CPU writes them at once.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from cuda.bindings import driver

from transport import wr
from transport.atomics import write_word
from transport.base import MemoryRegion
from transport.cuda_driver import (
    call,
    create_stream,
    current_device,
    register,
    unregister,
)
from transport.shm import NONE_REFUSED, SharedMemoryTransport

# More than one, so that one's copy runs while another writes its counter.
STREAMS_A_PEER = 4
# The counter is written once everything before it in the stream is visible.
WITH_BARRIER = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
LOOK_S = 200e-6  # between looks at the streams: only the end of a Buffer minds
NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY


class CopyEngineTransport(SharedMemoryTransport):
    """One rank's end; see `transport.base.Transport`. `send` lies in the GPU."""

    name = "shm"

    def __init__(
        self, rank: int, num_ranks: int, receive_bytes: int, send_bytes: int
    ) -> None:
        super().__init__(rank, num_ranks, receive_bytes, 0)
        _, self._context = current_device()
        self._enter()
        self._send = call(driver.cuMemAlloc, max(send_bytes, 1))
        # On a stream of its own: kernels do not wait for the default stream.
        stream = create_stream()
        call(driver.cuMemsetD8Async, self._send, 0, max(send_bytes, 1), stream)
        call(driver.cuStreamSynchronize, stream)
        call(driver.cuStreamDestroy, stream)
        self.send = MemoryRegion(int(self._send), send_bytes, on_gpu=True)
        self._streams: dict[tuple[int, int], Any] = {}
        self._busy: dict[tuple[int, int], Any] = {}
        self._pinned: list[tuple[int, int]] = []
        self._gpu_peers: list[int] = []
        self._next_look = 0.0

    def _enter(self) -> None:
        # The proxy's thread has never used CUDA.
        call(driver.cuCtxSetCurrent, self._context)

    def connect(self, cards: list[Any]) -> None:
        """Map and pin every peer's receive region."""
        super().connect(cards)
        self._enter()
        for peer, card in enumerate(cards):
            if peer == self.rank:
                self._gpu_peers.append(0)  # nothing is posted to oneself
                continue
            place = (int(self._peers[peer]), card.receive_bytes)
            self._gpu_peers.append(register(*place))
            self._pinned.append(place)
            for number in range(STREAMS_A_PEER):
                self._streams[peer, number] = create_stream()

    def post(self, batch: np.ndarray) -> np.ndarray:
        """Hand all writes to the streams; they have room for any number."""
        self._enter()
        for entry in batch.tolist():
            peer, counter = entry[wr.PEER], entry[wr.COUNTER_AT]
            if entry[wr.OPCODE] == wr.COUNTER:
                write_word(int(self._peers[peer]) + counter, entry[wr.VALUE])
                continue
            key = peer, entry[wr.QUEUE] % STREAMS_A_PEER
            stream = self._busy[key] = self._streams[key]
            if entry[wr.NUM_BYTES]:
                call(
                    driver.cuMemcpyDtoHAsync,
                    int(self._peers[peer]) + entry[wr.DESTINATION],
                    self.send.address + entry[wr.SOURCE],
                    entry[wr.NUM_BYTES],
                    stream,
                )
            at, value = self._gpu_peers[peer] + counter, entry[wr.VALUE]
            call(driver.cuStreamWriteValue64, stream, at, value, WITH_BARRIER)
        return NONE_REFUSED

    def poll(self) -> int:
        """Streams that still have something to do."""
        now = time.monotonic()
        if self._busy and now > self._next_look:
            self._next_look = now + LOOK_S
            self._enter()
            for key, stream in list(self._busy.items()):
                status = driver.cuStreamQuery(stream)[0]
                if status == driver.CUresult.CUDA_SUCCESS:
                    del self._busy[key]
                elif status != NOT_READY:
                    call(driver.cuStreamQuery, stream)
        return len(self._busy)

    def close(self, keep_memory: bool = False) -> None:
        """Free everything; with `keep_memory` what copies may still touch stays."""
        if self._streams and not keep_memory:
            self._enter()
            for stream in self._streams.values():
                call(driver.cuStreamSynchronize, stream)
                call(driver.cuStreamDestroy, stream)
            for place in self._pinned:
                unregister(*place)
        if not keep_memory and self.send.num_bytes:
            self._enter()
            call(driver.cuMemFree, self._send)
        self._streams, self._pinned = {}, []
        self.send = MemoryRegion(0, 0)
        super().close(keep_memory)
