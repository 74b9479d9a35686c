"""RDMA between ranks: InfiniBand or RoCE, through pyverbs.

    send region ── RDMA WRITE of the data ──►  receive region of the peer
                ── RDMA WRITE of 8 inline bytes, the counter, behind it ──►

One RC QP for each (peer, queue) keeps their order; nobody else writes to the region.
All of a rank's QPs share one completion queue, which `poll` reaps. Few requests ask for
a completion: it costs more to look at one than to post a put. Should nothing be posted
while some are without one, `poll` posts an empty write that asks.

Everything is closed in the order QP, MR, CQ, PD, device, also when the object is
dropped or the process ends.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from pyverbs import enums
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from transport import wr
from transport.base import MemoryRegion, TransportError
from transport.process import Process, own_process
from transport.verbs_device import explained, open_port, patience, translated
from transport.verbs_queue import (
    COUNTER_BYTES,
    DATA,
    EMPTY_WRITE,
    Chain,
    Queue,
    Rest,
    failure,
    make_write,
    split,
)

SEND_QUEUE = 64  # requests: what the proxy takes out of the FIFOs at once
REAP = 64
HOPS = 64


class Card(NamedTuple):
    """What a peer needs. queues: QP numbers, [num_ranks][num_queues]."""

    address: int
    rkey: int
    queues: list[list[int]]
    gid: str
    lid: int
    mtu: int
    process: Process


class VerbsTransport:
    """One rank's end; see `transport.base.Transport` for the meaning of each method."""

    name = "verbs"
    bell = 0  # a write by a network card rings nothing

    def __init__(
        self, rank: int, num_ranks: int, receive_bytes: int, send_bytes: int,
        num_queues: int,
    ) -> None:  # fmt: skip
        self.rank, self.num_ranks, self._num_queues = rank, num_ranks, num_queues
        self._patience = patience()
        self._under_way = 0  # requests that are not known to be complete
        self._asked = 0  # completions that are to come
        self._has_posted = False
        self._resting: list[Queue] = []
        self._quiet: set[Queue] = set()
        self._watched: list[Process | None] = []
        self._maps: list[mmap.mmap] = []
        # Closed from the last to the first.
        with ExitStack() as opened:
            opened.callback(_unmap, self._maps)
            self._port = open_port()
            opened.callback(self._port.context.close)
            with explained("no protection domain", "is the device in use up?"):
                self._pd = PD(self._port.context)
            opened.callback(self._pd.close)
            self._make_completion_queue(opened)
            remote = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
            self.receive, self._receive_mr = self._region(opened, receive_bytes, remote)
            self.send, self._send_mr = self._region(opened, send_bytes, 0)
            self._make_queues(opened)
            self._end = weakref.finalize(self, opened.pop_all().close)

    # Making it.

    def _make_completion_queue(self, opened: ExitStack) -> None:
        self._depth = min(SEND_QUEUE, self._port.most_writes)
        peers = max(self.num_ranks - 1, 1)
        # After an error every request completes, whether it asked or not.
        wanted = peers * self._num_queues * self._depth
        self._most_asked = min(wanted, self._port.most_completions)
        with explained("no completion queue", "use fewer queues (num_qps_per_rank)"):
            self._cq = CQ(self._port.context, self._most_asked, None, None, 0)
        opened.callback(self._cq.close)

    def _region(
        self, opened: ExitStack, num_bytes: int, access: int
    ) -> tuple[MemoryRegion, Any]:
        """Zeroed memory on pages of its own, registered for `access`."""
        size = max(num_bytes, 1)
        what = f"cannot register {size} bytes with {self._port.name}"
        if size > self._port.largest_region:
            raise TransportError(
                f"verbs: {what}: it takes {self._port.largest_region} at once; give a "
                "smaller num_rdma_bytes"
            )
        memory = mmap.mmap(-1, size)
        self._maps.append(memory)
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        with explained(what, "or give a smaller num_rdma_bytes"):
            mr = MR(self._pd, length=size, access=access, address=address)
        opened.callback(mr.close)
        if mr.length != size:
            raise TransportError(f"verbs: {what}: it took only {mr.length}")
        return MemoryRegion(address, num_bytes), mr

    def _make_queues(self, opened: ExitStack) -> None:
        lkey = self._send_mr.lkey
        steps = max(1, self._depth // 2)
        self._chains = {
            wr.PUT: Chain(steps, lkey, has_data=True, has_counter=True),
            wr.COUNTER: Chain(steps, lkey, has_data=False, has_counter=True),
            DATA: Chain(steps, lkey, has_data=True, has_counter=False),
        }
        self._empty = make_write(EMPTY_WRITE, lkey, 0, enums.IBV_SEND_SIGNALED).request
        self._queues: list[Queue] = []  # [num_ranks * num_queues], own rank's unused
        self._by_qp: dict[int, Queue] = {}
        for peer in range(self.num_ranks):
            for number in range(self._num_queues):
                qp = None if peer == self.rank else self._make_qp(opened)
                queue = Queue(qp, peer, number, self._depth)
                self._queues.append(queue)
                if qp is not None:
                    self._by_qp[qp.qp_num] = queue

    def _make_qp(self, opened: ExitStack) -> Any:
        cap = QPCap(
            max_send_wr=self._depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1,
            max_inline_data=COUNTER_BYTES,
        )  # fmt: skip
        init = QPInitAttr(
            qp_type=enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=0
        )
        way_out = "use fewer queues (num_qps_per_rank)"
        with explained(f"no queue pair on {self._port.name}", way_out):
            qp = QP(self._pd, init)
        opened.callback(qp.close)
        return qp

    def card(self) -> Card:
        """Address, key, QP numbers and port: all that peers need, at once."""
        numbers = [0 if queue.qp is None else queue.qp.qp_num for queue in self._queues]
        each = self._num_queues
        rows = [numbers[i : i + each] for i in range(0, len(numbers), each)]
        port = self._port
        return Card(
            self.receive.address, self._receive_mr.rkey, rows, port.gid, port.lid,
            port.mtu, own_process(),
        )  # fmt: skip

    def connect(self, cards: list[Any]) -> None:
        """Take every QP through INIT and RTR to RTS."""
        for peer, card in enumerate(cards):
            if peer == self.rank:
                continue
            self._check(peer, card)
            for queue in self._queues[peer * self._num_queues :][: self._num_queues]:
                queue.rkey, queue.base = card.rkey, card.address
                number = card.queues[self.rank][queue.number]
                what = f"rank {self.rank} cannot reach rank {peer} by {self._port.name}"
                way_out = "can the two hosts ping each other by that interface?"
                with explained(what, way_out):
                    queue.qp.to_rts(self._attributes(card, number))
        self._watched = [c.process if c.process.is_visible() else None for c in cards]

    def _check(self, peer: int, card: Card) -> None:
        def kind(gid: str) -> str:
            return "RoCE" if gid else "InfiniBand"

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

    def _attributes(self, card: Card, number: int) -> Any:
        """What takes a QP to RTS: INIT, RTR and RTS each use their part of it."""
        attributes = QPAttr(port_num=self._port.number)
        attributes.qp_access_flags = enums.IBV_ACCESS_REMOTE_WRITE
        # The smaller of both ends': larger packets would be dropped on the way.
        attributes.path_mtu = min(self._port.mtu, card.mtu)
        attributes.dest_qp_num = number
        attributes.min_rnr_timer = 12
        attributes.rnr_retry = attributes.retry_cnt = self._patience.retries
        attributes.timeout = self._patience.timeout
        route = None
        if card.gid:
            route = GlobalRoute(
                dgid=GID(card.gid), sgid_index=self._port.gid_index, hop_limit=HOPS
            )
        attributes.ah_attr = AHAttr(
            dlid=card.lid, is_global=int(route is not None), gr=route,
            port_num=self._port.number,
        )  # fmt: skip
        return attributes

    def connected(self) -> None:
        """Nothing to do: keys and numbers stay."""

    # Writing.

    def post(self, batch: np.ndarray) -> np.ndarray:
        """Post what there is room for, all of a queue's entries in one call."""
        batch = np.ascontiguousarray(batch)
        rows, values = batch.tolist(), batch.ctypes.data
        groups: dict[int, list[int]] = {}
        for position, row in enumerate(rows):
            key = row[wr.PEER] * self._num_queues + row[wr.QUEUE]
            groups.setdefault(key, []).append(position)
        refused: list[int] = []
        for key, positions in groups.items():
            queue = self._queues[key]
            if queue.error is not None:
                raise queue.error
            taken = self._take(queue, rows, positions, values)
            refused += positions[taken:]
        self._has_posted = True
        return np.array(sorted(refused), np.int64)

    def _take(
        self, queue: Queue, rows: list[list[int]], positions: list[int], values: int
    ) -> int:
        """Post the first of `positions`; returns how many of them were taken."""
        longest = self._port.longest
        if max(rows[position][wr.NUM_BYTES] for position in positions) <= longest:
            if queue.rest is not None:
                return 0
            return self._post_rows(queue, rows, positions, values)
        for taken, position in enumerate(positions):
            if queue.rest is not None:
                return taken
            queue.rest = split(rows[position], longest)
            self._resting.append(queue)
            self._go_on(queue)
        return len(positions)

    def _go_on(self, queue: Queue) -> None:
        """Post what there is room for of a put in pieces."""
        rest = queue.rest
        if rest is not None:
            positions = range(rest.first, len(rest.rows))
            address = rest.pieces.ctypes.data
            first = rest.first + self._post_rows(queue, rest.rows, positions, address)
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
            room = min(count - done, queue.free // chain.width, chain.num_steps)
            if room == 0 or self._asked >= self._most_asked:
                break
            end = done + 1
            while end < done + room and rows[positions[end]][wr.OPCODE] == opcode:
                end += 1
            request = chain.fill(
                queue, rows, positions[done:end], values, self.send.address
            )
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
        except PyverbsError as error:
            raise translated(
                error, f"cannot post to rank {queue.peer}", "is the device still up?"
            ) from error
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
        except PyverbsError as error:
            raise translated(error, "cannot poll", "is the device still up?") from error
        failed = None
        for completion in completions:
            error = self._complete(completion)
            failed = failed or error
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
            if not queue.asked and self._asked < self._most_asked:
                # Of no bytes; the address only has to be one of the peer's.
                self._empty.set_wr_rdma(queue.rkey, queue.base)
                queue.quiet += 1
                self._post_request(queue, self._empty, 1, asks=True)

    def _complete(self, completion: Any) -> TransportError | None:
        queue = self._by_qp[completion.qp_num]
        if queue.error is not None:
            return None  # what was behind the request that failed
        if completion.status == enums.IBV_WC_SUCCESS:
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
        """Whether the peer's process, if on this host, has ended or is a zombie."""
        process = self._watched[peer]
        return process is not None and process.has_ended()

    def close(self, keep_memory: bool = False) -> None:
        """Release everything in order; with `keep_memory` the regions stay mapped."""
        if not self._end.alive:
            return
        if keep_memory:
            # Kernels may still run on it. No peer can write it once its QP has failed.
            _kept.extend(self._maps)
            self._maps.clear()
            for queue in self._by_qp.values():
                queue.qp.modify(QPAttr(qp_state=enums.IBV_QPS_ERR), enums.IBV_QP_STATE)
        self._end()


_kept: list[mmap.mmap] = []


def _unmap(maps: list[mmap.mmap]) -> None:
    for memory in maps:
        memory.close()
    maps.clear()
