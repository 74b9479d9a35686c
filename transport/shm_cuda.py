"""One host, GPUs, no NIC: the copy engines play the NIC, twice.

    send region            receive region                    landing region
    in the sender's GPU ─► the receiver's pinned memory ───► in the receiver's GPU
        the sender's engine                 the receiver's engine

No CPU core touches the payload. The sender's proxy starts the first copy and leaves a
note of it; the stream counts the copy as arrived; the receiver's proxy starts the
second copy, and the counter of the put behind it. A kernel could read the rows from
pinned memory itself, but waits 2 to 4 us for every load then, and its reads and the
engines' writes slow each other down (docs/performance.md).

A stream keeps the order of what is posted to it, so the puts of a queue have their
stream; all queues of a process share `STREAMS` of them each way. Counters alone need
not wait for puts: the CPU writes them at once, and they stay in pinned memory.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver

from transport import wr
from transport.atomics import clock_ns, load_acquire, store_release
from transport.base import MemoryRegion
from transport.cuda_call import call_driver, entry_point
from transport.cuda_driver import (
    allocate_zeroed,
    call,
    current_device,
    error_of,
    register,
    take_stream,
    unregister,
)
from transport.fifo import Entries
from transport.jit import host
from transport.service import Work, goes_on, posted, take
from transport.shm import SharedMemoryTransport
from transport.wr import LINE_BYTES

# Each way. More than one, so that one's copy runs while another writes its counter.
# Few: streams share the GPU's hardware queues (32 at most), and a copy must never stand
# behind a kernel that waits for it.
STREAMS = 2

# A mailbox: what one peer sends by one stream. Words that are polled, then the notes.
ARRIVED = 0  # copies that have come, counted by the sender's stream
TAKEN = LINE_BYTES  # of these, how many the receiver has sent on
NOTES = 2 * LINE_BYTES
DEPTH = 128
AT, NUM_BYTES, COUNTER_AT, VALUE = range(4)  # words of a note
NOTE_BYTES = 32
BOX_BYTES = NOTES + DEPTH * NOTE_BYTES


class Ends(NamedTuple):
    """One rank's end as compiled code sees it; arrays are by peer and stream.

    out, into: the streams, [STREAMS]. boxes: at the peers, their addresses for the CPU
    and for the GPU. own_boxes: those that peers write. done: requests posted to each
    peer, copies of each peer sent on. peers: where the CPU finds their receive regions.
    copy_out, copy_in, write: functions of the driver.
    """

    out: np.ndarray
    into: np.ndarray
    boxes: np.ndarray
    own_boxes: np.ndarray
    done: np.ndarray
    peers: np.ndarray
    receive: int
    landing: int
    send: int
    copy_out: int
    copy_in: int
    write: int


@host.jit
def _post(batch, ends, refused):
    """Start the writes of `batch`: (how many of `refused` are filled, CUresult)."""
    boxes, peers, done = ends.boxes, ends.peers, ends.done[0]
    count = 0
    for i in range(batch.shape[0]):
        peer = batch[i, wr.PEER]
        if batch[i, wr.OPCODE] == wr.COUNTER:
            counter = peers[peer] + batch[i, wr.COUNTER_AT]
            store_release(counter, 0, batch[i, wr.VALUE])
            continue
        k = batch[i, wr.QUEUE] % STREAMS
        box = boxes[0, peer, k]
        # `taken` may grow in between: what follows a refused put must not slip in.
        is_behind = False
        for j in range(count):
            earlier = batch[refused[j]]
            same = earlier[wr.QUEUE] % STREAMS == k
            is_behind = is_behind or (earlier[wr.PEER] == peer and same)
        if is_behind or done[peer, k] - load_acquire(box + TAKEN, 0) >= DEPTH:
            refused[count] = i
            count += 1
            continue
        at, num_bytes = batch[i, wr.DESTINATION], batch[i, wr.NUM_BYTES]
        note = box + NOTES + done[peer, k] % DEPTH * NOTE_BYTES
        store_release(note, AT, at)
        store_release(note, NUM_BYTES, num_bytes)
        store_release(note, COUNTER_AT, batch[i, wr.COUNTER_AT])
        store_release(note, VALUE, batch[i, wr.VALUE])
        done[peer, k] += 1
        stream, status = ends.out[k], 0
        if num_bytes > 0:
            to, source = peers[peer] + at, ends.send + batch[i, wr.SOURCE]
            status = call_driver(ends.copy_out, to, source, num_bytes, stream)
        if status == 0:
            # Written once the copy before it is complete and visible.
            arrived = boxes[1, peer, k] + ARRIVED
            status = call_driver(ends.write, stream, arrived, done[peer, k], 0)
        if status != 0:
            return count, status
    return count, 0


@host.jit
def _take(ends, seen):
    """Send on whatever has arrived; the CUresult.

    seen: what was counted as arrived, [peers x streams].
    """
    boxes, taken, landing = ends.own_boxes, ends.done[1], ends.landing
    for peer in range(boxes.shape[0]):
        for k in range(STREAMS if boxes[peer, 0] != 0 else 0):
            box, stream = boxes[peer, k], ends.into[k]
            # Acquire: the note was written before the copy was started.
            arrived = load_acquire(box + ARRIVED, 0)
            seen[peer * STREAMS + k] = arrived
            while taken[peer, k] < arrived:
                note = box + NOTES + taken[peer, k] % DEPTH * NOTE_BYTES
                at, num_bytes = load_acquire(note, AT), load_acquire(note, NUM_BYTES)
                status = 0
                if num_bytes > 0:
                    to, source = landing + at, ends.receive + at
                    status = call_driver(ends.copy_in, to, source, num_bytes, stream)
                if status == 0:
                    counter = landing + load_acquire(note, COUNTER_AT)
                    value = load_acquire(note, VALUE)
                    status = call_driver(ends.write, stream, counter, value, 0)
                if status != 0:
                    return status
                taken[peer, k] += 1
                # Release: the note may be overwritten from here on.
                store_release(box + TAKEN, 0, taken[peer, k])
    return 0


@host.jit
def _count_under_way(ends):
    """Streams to peers whose copies have not all arrived."""
    count, boxes, posted = 0, ends.boxes, ends.done[0]
    for peer in range(posted.shape[0]):
        for k in range(posted.shape[1]):
            if posted[peer, k] > 0:
                arrived = load_acquire(boxes[0, peer, k] + ARRIVED, 0)
                count += arrived < posted[peer, k]
    return count


@host.jit
def _serve(entries, work, ends):
    """Turns of the proxy's work, see service.py; the CUresult."""
    first = entries.words.shape[0]
    seen = work.seen[first : first + ends.own_boxes.size]
    going = True
    while going:
        popped = take(entries, work)
        status = 0
        if popped > 0:
            since = clock_ns()
            num_refused, status = _post(work.batch[:popped], ends, work.refused)
            posted(work, popped, num_refused, since)
        if status == 0:
            status = _take(ends, seen)
        if status != 0:
            return status
        going = goes_on(entries, work, popped, _count_under_way(ends))
    return 0


_lock = threading.Lock()
_streams: dict[int, np.ndarray] = {}  # by context; they live as long as the process


def _streams_of(context: Any) -> np.ndarray:
    """The streams out of and into a GPU, [2, STREAMS] int64."""
    with _lock:
        if int(context) not in _streams:
            made = [[take_stream() for _ in range(STREAMS)] for _ in range(2)]
            _streams[int(context)] = np.array(made, np.int64)
        return _streams[int(context)]


class CopyEngineTransport(SharedMemoryTransport):
    """One rank's end; see `transport.base.Transport`. `send` and `landing` lie in the
    GPU."""

    name = "shm"
    details = "copy engines and shared memory"

    def __init__(
        self, rank: int, num_ranks: int, receive_bytes: int, send_bytes: int
    ) -> None:
        self._boxes_at = -(-receive_bytes // LINE_BYTES) * LINE_BYTES
        self._boxes_bytes = num_ranks * STREAMS * BOX_BYTES
        super().__init__(rank, num_ranks, self._boxes_at + self._boxes_bytes, 0)
        self._mapped_bytes = self.receive.num_bytes
        self.receive = MemoryRegion(self.receive.address, receive_bytes)
        _, self._context = current_device()
        self._thread = 0
        self._enter()
        self.send, self.landing = (
            MemoryRegion(allocate_zeroed(num_bytes), num_bytes, on_gpu=True)
            for num_bytes in (send_bytes, receive_bytes)
        )
        out, into = _streams_of(self._context)
        shape = num_ranks, STREAMS
        self._ends = Ends(
            out, into, np.zeros((2, *shape), np.int64), np.zeros(shape, np.int64),
            np.zeros((2, *shape), np.int64), self._peers, self.receive.address,
            self.landing.address, self.send.address,
            entry_point("cuMemcpyDtoHAsync_v2"), entry_point("cuMemcpyHtoDAsync_v2"),
            entry_point("cuStreamWriteValue64_v2"),
        )  # fmt: skip
        # Where peers count what has come; in the own rank's mailboxes nobody does.
        boxes = np.arange(num_ranks * STREAMS) * BOX_BYTES
        self.words = self.receive.address + self._boxes_at + boxes + ARRIVED
        self.seen = np.zeros_like(self.words)
        self._pinned: list[tuple[int, int]] = []

    def _enter(self) -> None:
        call(driver.cuCtxSetCurrent, self._context)

    def _enter_once(self) -> None:
        """Before traffic: the proxy's thread has never used CUDA."""
        if self._thread != threading.get_ident():
            self._enter()
            self._thread = threading.get_ident()

    def card(self) -> Any:
        """As in shared memory; the file has the mailboxes, too."""
        return super().card()._replace(receive_bytes=self._mapped_bytes)

    def connect(self, cards: list[Any]) -> None:
        """Map and pin every peer's receive region."""
        super().connect(cards)
        self._enter()
        for peer, card in enumerate(cards):
            if peer == self.rank:
                continue  # nothing is posted to oneself
            place = (int(self._peers[peer]), card.receive_bytes)
            gpu = register(*place)
            self._pinned.append(place)
            for k in range(STREAMS):
                own = (peer * STREAMS + k) * BOX_BYTES
                theirs = (self.rank * STREAMS + k) * BOX_BYTES
                ends = self._ends
                ends.own_boxes[peer, k] = self.receive.address + self._boxes_at + own
                ends.boxes[:, peer, k] = place[0], gpu
                # A peer's region may be larger or smaller than this rank's.
                boxes_at = card.receive_bytes - self._boxes_bytes
                ends.boxes[:, peer, k] += boxes_at + theirs
                note = int(ends.boxes[0, peer, k]) + NOTES
                self._use_once(int(ends.out[k]), int(ends.into[k]), note)

    def _use_once(self, out: int, into: int, pinned: int) -> None:
        """The driver might not make what a stream needs while a kernel waits for it."""
        at = self.landing.address  # all zeros still
        call(driver.cuMemcpyDtoHAsync, pinned, at, LINE_BYTES, out)
        call(driver.cuMemcpyHtoDAsync, at, pinned, LINE_BYTES, into)
        for stream in (out, into):
            call(driver.cuStreamWriteValue64, stream, at, 0, 0)
            call(driver.cuStreamSynchronize, stream)

    def post(self, batch: np.ndarray) -> np.ndarray:
        """Hand all writes to the streams, as far as there is room for their notes."""
        self._enter_once()
        refused = np.empty(len(batch), np.int64)
        count, status = _post(batch, self._ends, refused)
        if status:
            raise error_of("a copy out of the GPU", status)
        return refused[:count]

    def serve(self, entries: Entries, work: Work) -> None:
        """Post what is in the FIFOs, until the proxy is needed (service.py)."""
        self._enter_once()
        status = _serve(entries, work, self._ends)
        if status:
            raise error_of("a copy out of or into the GPU", status)

    def poll(self) -> int:
        """Send on what has arrived. Returns the streams that still have to arrive."""
        self._enter_once()
        status = _take(self._ends, self.seen)
        if status:
            raise error_of("a copy into the GPU", status)
        return int(_count_under_way(self._ends))

    def close(self, keep_memory: bool = False) -> None:
        """Free everything; with `keep_memory` what copies may still touch stays."""
        if self.landing.num_bytes and not keep_memory:
            self._enter()
            for stream in (*self._ends.out.tolist(), *self._ends.into.tolist()):
                call(driver.cuStreamSynchronize, stream)
            for place in self._pinned:
                unregister(*place)
            call(driver.cuMemFree, self.send.address)
            call(driver.cuMemFree, self.landing.address)
        self._pinned = []
        self.send = self.landing = MemoryRegion(0, 0)
        super().close(keep_memory)
