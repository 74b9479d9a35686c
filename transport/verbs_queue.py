"""One RC QP to a peer: what is in its send queue; and the requests that go into it.

A put is two RDMA WRITEs, linked so that one call posts both: the data, then the 8 bytes
of the counter. The counter is inline: the driver copies it when the request is posted,
right out of the batch that the proxy took from the FIFOs.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from pyverbs import enums
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.wr import SGE, SendWR

from transport import wr
from transport.base import TransportError

DATA = 3  # an opcode of this transport alone: a part of a put, without a counter
INLINE_BYTES = 8  # a counter
VALUE_AT = 8 * wr.VALUE
ENTRY_BYTES = 8 * wr.NUM_FIELDS

# `wr_id` says what a request was; its queue is known by the completion's QP number.
DATA_WRITE, COUNTER_WRITE, EMPTY_WRITE = range(3)
OPERATIONS = ("write of data", "write of a counter", "empty write")

UNSIGNALLED = 0
INLINE, SIGNALLED = enums.IBV_SEND_INLINE, enums.IBV_SEND_SIGNALED
SUCCESS = enums.IBV_WC_SUCCESS
ERRORS = (PyverbsError,)  # what a post or a poll may raise

# What usually lies behind a failed completion.
CAUSES = {
    "RETRY_EXC_ERR": "no answer: the peer is gone, or a port on the way is down",
    "RNR_RETRY_EXC_ERR": "the peer was never ready to receive",
    "REM_ACCESS_ERR": "the peer's card refused it: wrong rkey, or not in its region",
    "REM_INV_REQ_ERR": "the peer's card took it for invalid: is its QP the right one?",
    "REM_OP_ERR": "the peer's card failed at it",
    "LOC_PROT_ERR": "outside of this rank's own region, or a wrong lkey",
    "LOC_LEN_ERR": "longer than the port's longest message",
    "LOC_QP_OP_ERR": "this rank's card could not carry it out",
    "WR_FLUSH_ERR": "its queue had failed before: see the first error, here or there",
}


def failure(queue: Queue, status: int, operation: int) -> TransportError:
    """The error for a completion that failed."""
    name = next(
        (
            name.removeprefix("IBV_WC_")
            for name in dir(enums)
            if name.startswith("IBV_WC_")
            and name.endswith("ERR")
            and int(getattr(enums, name)) == status
        ),
        f"status {status}",
    )
    cause = CAUSES.get(name, "see ibv_poll_cq(3)")
    what = OPERATIONS[operation] if operation < len(OPERATIONS) else "write"
    return TransportError(
        f"verbs: {what} to rank {queue.peer} on queue {queue.number} failed with "
        f"{name}: {cause}",
        queue.peer,
    )


class Rest(NamedTuple):
    """What is still to be posted of a put that is longer than a message.

    pieces: [n, NUM_FIELDS] int64, DATA and at last a PUT. rows: the same as lists.
    """

    pieces: np.ndarray
    rows: list[list[int]]
    first: int


class Queue:
    """One QP. `free`: room in its send queue.

    Only some requests ask for a completion, which then stands for all before it.
    quiet: requests behind the last that asked. asked: for each that did, oldest first,
    how many it stands for.
    """

    def __init__(self, qp: Any, peer: int, number: int, depth: int) -> None:
        self.qp, self.peer, self.number = qp, peer, number
        self.rkey, self.base = 0, 0
        self.host_bytes = 0  # of the peer's region: they have another key and address
        self.words_rkey, self.words = 0, 0
        self.depth = self.free = depth
        self.ask_every = max(1, depth // 4)
        self.quiet = 0
        self.asked: deque[int] = deque()
        self.rest: Rest | None = None
        self.error: TransportError | None = None

    def aim(self, target: Any) -> None:
        """Write there (transport.verbs_resources.Target)."""
        self.base, self.rkey = target.address, target.rkey
        self.host_bytes = target.host_bytes
        self.words, self.words_rkey = target.words, target.words_rkey

    def under_way(self) -> int:
        """Requests in the send queue that are not known to be complete."""
        return self.depth - self.free

    def fail(self, error: TransportError) -> None:
        """Whatever is under way is lost."""
        self.error, self.rest = error, None
        self.asked.clear()
        self.free, self.quiet = self.depth, 0


def split(row: list[int], longest: int) -> Rest:
    """A put in pieces of at most `longest` bytes; the last one brings the counter."""
    pieces = []
    opcode, peer, queue, source, to, left, counter, value = row
    while opcode == wr.PUT and left > longest:
        pieces.append([DATA, peer, queue, source, to, longest, 0, 0])
        source, to, left = source + longest, to + longest, left - longest
    pieces.append([opcode, peer, queue, source, to, left, counter, value])
    return Rest(np.array(pieces, np.int64), pieces, 0)


def make_write(kind: int, lkey: int, num_bytes: int, flags: int) -> tuple[Any, Any]:
    """An RDMA WRITE and its SGE: changing the SGE changes the request."""
    sge = SGE(0, num_bytes, lkey)
    request = SendWR(
        wr_id=kind, opcode=enums.IBV_WR_RDMA_WRITE, num_sge=1, sg=[sge],
        send_flags=flags,
    )  # fmt: skip
    # Else the request has a copy of the SGE as it is now.
    request.sg_list = sge
    return request, sge


class Chain:
    """Requests that were linked once and are changed in place before every post.

    A driver is done with them when the call that posts returns, so all queues share a
    chain. The last n steps of it are a post of n steps; so its very last request alone
    ever asks for a completion.

    depth: requests that a queue takes. width: requests a step. source: address and lkey
    of the send region.
    """

    width = 1
    flags = INLINE  # of the last request of a step

    def __init__(self, depth: int, source: tuple[int, int]) -> None:
        self._send, self._lkey = source
        self._requests: list[Any] = []  # a link keeps nothing alive by itself
        # For each step, of each of its requests: SGE, and what sets key and address.
        steps = [tuple(self._make_step()) for _ in range(depth // self.width)]
        # The first request and the steps of the last n, by n.
        self._last: list[tuple[Any, list[tuple[Any, ...]]]] = [(None, [])]
        for n in range(1, len(steps) + 1):
            self._last.append((self._requests[-n * self.width], steps[-n:]))
        for one, following in zip(self._requests, self._requests[1:]):
            one.next_wr = following
        self._asks = False

    def _make_step(self) -> list[Any]:
        raise NotImplementedError

    def _add(self, kind: int, lkey: int, num_bytes: int, flags: int) -> list[Any]:
        request, sge = make_write(kind, lkey, num_bytes, flags)
        self._requests.append(request)
        return [sge, request.set_wr_rdma]

    def fill(
        self, queue: Queue, rows: list[list[int]], positions: Any, values: int
    ) -> Any:
        """Make the last steps writes for `rows[positions]`; returns the first request.

        values: address of the first row's value, where an inline counter is read.
        """
        raise NotImplementedError

    def ask(self, asks: bool) -> None:
        """Whether the next post asks for a completion."""
        if asks is not self._asks:
            self._asks = asks
            self._requests[-1].send_flags = self.flags | (SIGNALLED if asks else 0)


class PutChain(Chain):
    """Data, then counter."""

    width = 2

    def _make_step(self) -> list[Any]:
        data = self._add(DATA_WRITE, self._lkey, 0, UNSIGNALLED)
        return data + self._add(COUNTER_WRITE, 0, INLINE_BYTES, INLINE)

    def fill(
        self, queue: Queue, rows: list[list[int]], positions: Any, values: int
    ) -> Any:
        """See Chain. The proxy's hot path: every line here is paid for each chunk."""
        rkey, base, send = queue.rkey, queue.base, self._send
        first, steps = self._last[len(positions)]
        for position, (data, aim_data, counter, aim_counter) in zip(positions, steps):
            _, _, _, source, to, num_bytes, counter_at, _ = rows[position]
            data.addr = send + source
            data.length = num_bytes
            aim_data(rkey, base + to)
            counter.addr = values + ENTRY_BYTES * position
            aim_counter(rkey, base + counter_at)
        return first


class CounterChain(Chain):
    """Counters alone."""

    def _make_step(self) -> list[Any]:
        return self._add(COUNTER_WRITE, 0, INLINE_BYTES, INLINE)

    def fill(
        self, queue: Queue, rows: list[list[int]], positions: Any, values: int
    ) -> Any:
        """See Chain."""
        first, steps = self._last[len(positions)]
        for position, (counter, aim) in zip(positions, steps):
            counter.addr = values + ENTRY_BYTES * position
            at = rows[position][wr.COUNTER_AT]
            if at < queue.host_bytes:
                aim(queue.words_rkey, queue.words + at)
            else:
                aim(queue.rkey, queue.base + at)
        return first


class DataChain(Chain):
    """Parts of puts."""

    flags = UNSIGNALLED

    def _make_step(self) -> list[Any]:
        return self._add(DATA_WRITE, self._lkey, 0, UNSIGNALLED)

    def fill(
        self, queue: Queue, rows: list[list[int]], positions: Any, values: int
    ) -> Any:
        """See Chain."""
        first, steps = self._last[len(positions)]
        for position, (data, aim) in zip(positions, steps):
            data.addr = self._send + rows[position][wr.SOURCE]
            data.length = rows[position][wr.NUM_BYTES]
            aim(queue.rkey, queue.base + rows[position][wr.DESTINATION])
        return first
