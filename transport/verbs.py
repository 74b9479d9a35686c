"""RDMA between ranks: InfiniBand or RoCE, through pyverbs.

    send region ── RDMA WRITE of the data ──►  receive region of the peer
                ── RDMA WRITE of 8 inline bytes, the counter, behind it ──►

One RC QP for each (peer, queue) keeps their order; nobody else writes to the region.
All of a rank's QPs share one completion queue, which `poll` reaps. Few requests ask for
a completion: it costs more to look at one than to post a put. Should nothing be posted
while some are without one, `poll` posts an empty write that asks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from transport import wr
from transport.atomics import BELL_BYTES, SLEEP_NS, ring, write_word
from transport.base import NO_WORDS, TransportError
from transport.process import Process, own_process
from transport.verbs_device import explained, translated
from transport.verbs_queue import (
    DATA,
    EMPTY_WRITE,
    ERRORS,
    SIGNALLED,
    SUCCESS,
    VALUE_AT,
    Chain,
    CounterChain,
    DataChain,
    PutChain,
    Queue,
    Rest,
    failure,
    make_write,
    split,
)
from transport.verbs_resources import Card, Resources, Target

REAP = 64
SLEEP = 300_000  # ns between looks at what a card may have written
NONE_REFUSED = np.empty(0, np.int64)
UP = "is the device still up?"


class VerbsTransport:
    """One rank's end; see `transport.base.Transport` for the meaning of each method."""

    name = "verbs"

    def __init__(
        self, rank: int, num_ranks: int, receive_bytes: int, send_bytes: int,
        num_queues: int, gpu: Any = None, host_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.rank, self.num_ranks, self._num_queues = rank, num_ranks, num_queues
        # A write by a network card rings nothing: who sleeps on this bell looks again
        # after a while, and whenever writes of this rank have arrived.
        self._bell = np.zeros(2 * BELL_BYTES, np.uint8)
        self.bell = -(-self._bell.ctypes.data // BELL_BYTES) * BELL_BYTES
        write_word(self.bell + 8 * SLEEP_NS, SLEEP)
        self._under_way = 0  # requests that are not known to be complete
        self._asked = 0  # completions that are to come
        self._has_posted = False
        self._resting: list[Queue] = []
        self._quiet: set[Queue] = set()
        self._watched: list[Process | None] = []
        self._all_connected = False
        num_peers = num_ranks - 1
        self._resources = Resources(self, num_peers * num_queues, gpu)
        try:
            self._make(receive_bytes, send_bytes, host_bytes)
        except BaseException:
            self._resources.close(keep_memory=False)
            raise

    def _make(self, receive_bytes: int, send_bytes: int, host_bytes: int) -> None:
        resources = self._resources
        self._port, self._cq = resources.port, resources.cq
        self._most_asked = resources.most_asked
        received = resources.region(receive_bytes, peers_write=True)
        sent = resources.region(send_bytes, peers_write=False)
        self.receive, self.send = received.region, sent.region
        self._target = Target(received.base, received.mr.rkey)
        if self.receive.on_gpu:
            words = resources.host_region(host_bytes, peers_write=True)
            self.receive = self.receive._replace(words=words.region.address)
            self._target = self._target._replace(
                host_bytes=host_bytes, words=words.base, words_rkey=words.mr.rkey
            )
        self.landing, self.words, self.seen = self.receive, NO_WORDS, NO_WORDS
        self.details = f"{self._port.name}, {received.way}"
        if sent.way != received.way:
            self.details += f"; sends from {sent.way}"
        source = sent.base, sent.mr.lkey
        self._chains: dict[int, Chain] = {
            wr.PUT: PutChain(resources.depth, source),
            wr.COUNTER: CounterChain(resources.depth, source),
            DATA: DataChain(resources.depth, source),
        }
        self._empty = make_write(EMPTY_WRITE, sent.mr.lkey, 0, SIGNALLED)[0]
        self._queues: list[Queue] = []  # [num_ranks * num_queues], own rank's unused
        self._by_qp: dict[int, Queue] = {}
        for peer in range(self.num_ranks):
            for number in range(self._num_queues):
                qp = None if peer == self.rank else resources.make_qp()
                queue = Queue(qp, peer, number, resources.depth)
                self._queues.append(queue)
                if qp is not None:
                    self._by_qp[qp.qp_num] = queue

    def card(self) -> Card:
        """Address, key, QP numbers and port: all that peers need, at once."""
        numbers = [0 if queue.qp is None else queue.qp.qp_num for queue in self._queues]
        each = self._num_queues
        rows = [numbers[i : i + each] for i in range(0, len(numbers), each)]
        port = self._port
        return Card(
            self._target, rows, port.gid, port.lid, port.mtu, own_process()
        )

    def connect(self, cards: list[Any]) -> None:
        """Take every QP through INIT and RTR to RTS."""
        for peer, card in enumerate(cards):
            if peer == self.rank:
                continue
            self._check(peer, card)
            for queue in self._queues[peer * self._num_queues :][: self._num_queues]:
                queue.aim(card.target)
                number = card.queues[self.rank][queue.number]
                what = f"rank {self.rank} cannot reach rank {peer} by {self._port.name}"
                with explained(what, "can the hosts ping each other by it?"):
                    self._resources.connect(queue.qp, card, number)
        self._watched = [c.process if c.process.is_visible() else None for c in cards]

    def _check(self, peer: int, card: Card) -> None:
        def kind(gid: str) -> str:
            return "RoCE" if gid else "InfiniBand"

        if len(card.queues[self.rank]) != self._num_queues:
            raise TransportError(
                f"verbs: rank {self.rank} has {self._num_queues} queues to each peer, "
                f"rank {peer} has {len(card.queues[self.rank])}",
                peer,
            )
        own = self._port.gid
        if bool(own) != bool(card.gid):
            raise TransportError(
                f"verbs: rank {self.rank} uses {kind(own)}, rank {peer} "
                f"{kind(card.gid)}; choose by NUMBA_EP_IB_DEVICE",
                peer,
            )
        if not own and not (self._port.lid and card.lid):
            raise TransportError(
                f"verbs: rank {self.rank if card.lid else peer} has no LID: does a "
                "subnet manager run?",
                peer,
            )

    def connected(self) -> None:
        """From now on every peer's card answers."""
        self._all_connected = True

    # Writing.

    def post(self, batch: np.ndarray) -> np.ndarray:
        """Post what there is room for, all of a queue's entries in one call."""
        batch = np.ascontiguousarray(batch)
        rows, values = batch.tolist(), batch.ctypes.data + VALUE_AT
        num_queues, longest = self._num_queues, self._port.longest
        groups: dict[int, list[int]] = {}
        long = set()
        for position, row in enumerate(rows):
            key = row[wr.PEER] * num_queues + row[wr.QUEUE]
            if key in groups:
                groups[key].append(position)
            else:
                groups[key] = [position]
            # A counter's number of bytes means nothing.
            if row[wr.NUM_BYTES] > longest and row[wr.OPCODE] == wr.PUT:
                long.add(key)
        refused: list[int] = []
        for key, positions in groups.items():
            queue = self._queues[key]
            if queue.error is not None:
                raise queue.error
            if queue.rest is not None:
                taken = 0
            elif key in long:
                taken = self._post_in_pieces(queue, rows, positions)
            else:
                taken = self._post_rows(queue, rows, positions, values)
            if taken < len(positions):
                refused += positions[taken:]
        self._has_posted = True
        return np.array(sorted(refused), np.int64) if refused else NONE_REFUSED

    def _post_in_pieces(
        self, queue: Queue, rows: list[list[int]], positions: list[int]
    ) -> int:
        """Some of these puts are longer than a message; how many were taken."""
        for taken, position in enumerate(positions):
            if queue.rest is not None:
                return taken
            queue.rest = split(rows[position], self._port.longest)
            self._resting.append(queue)
            self._go_on(queue)
        return len(positions)

    def _go_on(self, queue: Queue) -> None:
        """Post what there is room for of a put in pieces."""
        rest = queue.rest
        if rest is not None:
            positions = range(rest.first, len(rest.rows))
            values = rest.pieces.ctypes.data + VALUE_AT
            first = rest.first + self._post_rows(queue, rest.rows, positions, values)
            is_done = first == len(rest.rows)
            queue.rest = None if is_done else Rest(rest.pieces, rest.rows, first)

    def _post_rows(
        self, queue: Queue, rows: list[list[int]], positions: Any, values: int
    ) -> int:
        """Runs of one opcode, each in one call; returns how many rows had room."""
        done, count = 0, len(positions)
        while done < count:
            opcode = rows[positions[done]][wr.OPCODE]
            chain = self._chains[opcode]
            room = queue.free // chain.width
            if room == 0 or self._asked >= self._most_asked:
                break
            end, limit = done + 1, count if room >= count - done else done + room
            while end < limit and rows[positions[end]][wr.OPCODE] == opcode:
                end += 1
            request = chain.fill(queue, rows, positions[done:end], values)
            writes = (end - done) * chain.width
            queue.quiet += writes
            asks = queue.quiet >= queue.ask_every
            chain.ask(asks)
            self._post_request(queue, request, writes, asks)
            done = end
        return done

    def _post_request(
        self, queue: Queue, request: Any, writes: int, asks: bool
    ) -> None:
        try:
            queue.qp.post_send(request)
        except ERRORS as error:
            what = f"cannot post to rank {queue.peer}"
            raise translated(error, what, UP) from error
        queue.free -= writes
        self._under_way += writes
        if asks:
            queue.asked.append(queue.quiet)
            queue.quiet = 0
            self._asked += 1
            self._quiet.discard(queue)
        else:
            self._quiet.add(queue)

    def poll(self) -> int:
        """Reap completions; raises TransportError for the first that failed."""
        try:
            count, completions = self._cq.poll(REAP)
        except ERRORS as error:
            raise translated(error, "cannot poll", UP) from error
        failed = None
        for completion in completions:
            failure_of_it = self._complete(completion)
            failed = failed or failure_of_it
        if count:
            ring(self.bell)
        if self._resting:
            for queue in self._resting:
                self._go_on(queue)
            self._resting = [q for q in self._resting if q.rest is not None]
        if self._quiet and not (count or self._has_posted):
            self._ask_all()
        self._has_posted = False
        if failed is not None:
            raise failed
        return self._under_way + len(self._resting)

    def _ask_all(self) -> None:
        """Nothing else is going on: ask for what nobody has asked for."""
        for queue in list(self._quiet):
            self._ask(queue)

    def _ask(self, queue: Queue) -> None:
        if not queue.asked and self._asked < self._most_asked:
            # Of no bytes; the address only has to be one of the peer's.
            self._empty.set_wr_rdma(queue.rkey, queue.base)
            queue.quiet += 1
            self._post_request(queue, self._empty, 1, asks=True)

    def _complete(self, completion: Any) -> TransportError | None:
        queue = self._by_qp[completion.qp_num]
        if queue.error is not None:
            return None  # what was behind the request that failed
        if completion.status == SUCCESS:
            writes = queue.asked.popleft()
            queue.free += writes
            self._under_way -= writes
            self._asked -= 1
            return None
        error = failure(queue, completion.status, completion.wr_id)
        self._under_way -= queue.under_way()
        self._asked -= len(queue.asked)
        self._quiet.discard(queue)
        queue.fail(error)
        return error

    def peer_is_dead(self, peer: int) -> bool:
        """Whether the peer's process, if on this host, has ended or is a zombie.

        Of one on another host its card is asked, by an empty write: where that stays
        without an answer, `poll` says so.
        """
        process = self._watched[peer]
        if process is not None:
            return process.has_ended()
        queue = self._queues[peer * self._num_queues]
        if self._all_connected and queue.error is None and not queue.under_way():
            self._ask(queue)
        return False

    def close(self, keep_memory: bool = False) -> None:
        """Release everything in order; with `keep_memory` the regions stay mapped."""
        self._resources.close(keep_memory)
