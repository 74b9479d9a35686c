"""What a rank opens of its device, and closes in order: QP, MR, CQ, PD, device.

Also when the owner is dropped or the process ends: pyverbs by itself would close in
whatever order the objects go, and a device refuses to close what is in use.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from pyverbs import enums
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from transport.base import MemoryRegion, TransportError
from transport.process import Process
from transport.verbs_device import explained, open_port, patience
from transport.verbs_queue import INLINE_BYTES

SEND_QUEUE = 64  # requests: what the proxy takes out of the FIFOs at once
HOPS = 64
# After 0.65 ms the peer may be asked again whether it is ready to receive.
RNR_TIMER = 12
# Not IBV_ACCESS_RELAXED_ORDERING: a counter must not overtake its data.
ACCESS = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
TOO_MANY = "use fewer queues (num_qps_per_rank)"


class Target(NamedTuple):
    """Where peers write: what the card calls the region's beginning, and its key.

    The first `host_bytes` of the region lie at `words` and have a key of their own.
    """

    address: int
    rkey: int
    host_bytes: int = 0
    words: int = 0
    words_rkey: int = 0


class Registered(NamedTuple):
    """A region, its MR, what the card calls its beginning, and the way to it."""

    region: MemoryRegion
    mr: Any
    base: int
    way: str


class Card(NamedTuple):
    """What a peer needs. queues: QP numbers, [num_ranks][num_queues]."""

    target: Target
    queues: list[list[int]]
    gid: str
    lid: int
    mtu: int
    process: Process


class Resources:
    """Device, PD, CQ; then regions and QPs are made one by one. `close` ends them all.

    depth: requests that a QP takes. most_asked: completions that the CQ takes.
    """

    def __init__(self, owner: object, num_qps: int, gpu: Any = None) -> None:
        self._gpu = gpu  # transport.verbs_cuda.Gpu, where kernels run on one
        self._patience = patience()
        self._memory: list[Callable[[], None]] = []  # each gives a region's back
        self._qps: list[Any] = []
        # Closed from the last to the first.
        self._opened = ExitStack()
        self._opened.callback(_give_back, self._memory)
        self._end = weakref.finalize(owner, self._opened.close)
        self.port = open_port("" if gpu is None else gpu.pci_address())
        self._opened.callback(self.port.context.close)
        with explained("no protection domain", "are there too many on this host?"):
            self._pd = PD(self.port.context)
        self._opened.callback(self._pd.close)
        self.depth = min(SEND_QUEUE, self.port.most_writes)
        # After an error every request completes, whether it asked or not.
        self.most_asked = min(max(num_qps, 1) * self.depth, self.port.most_completions)
        with explained("no completion queue", TOO_MANY):
            self.cq = CQ(self.port.context, self.most_asked, None, None, 0)
        self._opened.callback(self.cq.close)

    def region(self, num_bytes: int, peers_write: bool) -> Registered:
        """Zeroed memory, on the GPU if kernels run there and the card reaches it."""
        if self._gpu is not None:
            access = ACCESS if peers_write else 0
            found = self._gpu.region(self._pd, num_bytes, access)
            if found is not None:
                self._memory.append(found.free)
                self._opened.callback(found.mr.close)
                region = MemoryRegion(found.address, num_bytes, on_gpu=True)
                return Registered(region, found.mr, found.base, found.way)
        return self.host_region(num_bytes, peers_write)

    def host_region(self, num_bytes: int, peers_write: bool) -> Registered:
        """Zeroed memory of this process, on pages of its own."""
        size = max(num_bytes, 1)
        what = f"cannot register {size} bytes with {self.port.name}"
        if size > self.port.largest_region:
            raise TransportError(
                f"verbs: {what}: it takes {self.port.largest_region} at once; give a "
                "smaller num_rdma_bytes"
            )
        memory = mmap.mmap(-1, size)
        self._memory.append(memory.close)
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        with explained(what, "or give a smaller num_rdma_bytes"):
            mr = MR(
                self._pd, length=size, access=ACCESS if peers_write else 0,
                address=address,
            )  # fmt: skip
        self._opened.callback(mr.close)
        if mr.length != size:
            raise TransportError(f"verbs: {what}: it took only {mr.length}")
        return Registered(MemoryRegion(address, num_bytes), mr, address, "host memory")

    def make_qp(self) -> Any:
        """A queue pair, still without a peer."""
        cap = QPCap(
            max_send_wr=self.depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1,
            max_inline_data=INLINE_BYTES,
        )  # fmt: skip
        init = QPInitAttr(
            qp_type=enums.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=0
        )
        way_out = f"it must take {INLINE_BYTES} bytes inline; if it does, {TOO_MANY}"
        with explained(f"no queue pair on {self.port.name}", way_out):
            qp = QP(self._pd, init)
        self._opened.callback(qp.close)
        self._qps.append(qp)
        return qp

    def connect(self, qp: Any, card: Card, number: int) -> None:
        """Take a QP through INIT and RTR to RTS, towards QP `number` of a peer."""
        attributes = QPAttr(port_num=self.port.number)
        attributes.qp_access_flags = enums.IBV_ACCESS_REMOTE_WRITE
        # The smaller of both ends': larger packets would be dropped on the way.
        attributes.path_mtu = min(self.port.mtu, card.mtu)
        attributes.dest_qp_num = number
        attributes.min_rnr_timer = RNR_TIMER
        attributes.rnr_retry = attributes.retry_cnt = self._patience.retries
        attributes.timeout = self._patience.timeout
        route = None
        if card.gid:
            route = GlobalRoute(
                dgid=GID(card.gid), sgid_index=self.port.gid_index, hop_limit=HOPS
            )
        attributes.ah_attr = AHAttr(
            dlid=card.lid, is_global=int(route is not None), gr=route,
            port_num=self.port.number,
        )  # fmt: skip
        # INIT, RTR and RTS each use their part of the attributes.
        qp.to_rts(attributes)

    def close(self, keep_memory: bool) -> None:
        """Once; with `keep_memory` the regions stay mapped."""
        if not self._end.alive:
            return
        if keep_memory:
            # Kernels may still run on it. No peer can write it once its QP has failed.
            _kept.extend(self._memory)
            self._memory.clear()
            for qp in self._qps:
                qp.modify(QPAttr(qp_state=enums.IBV_QPS_ERR), enums.IBV_QP_STATE)
        self._end()


# Memory that kernels may still use after a failure.
_kept: list[Callable[[], None]] = []


def _give_back(memory: list[Callable[[], None]]) -> None:
    for function in memory:
        function()
    memory.clear()
