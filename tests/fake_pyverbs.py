"""A pyverbs for one process: writes are memory copies, and all rules are enforced.

    fabric = fake_pyverbs.install(monkeypatch, send_queue=4, completion_queue=8)
    end = transport.create("verbs", ...)

A send queue takes `send_queue` requests; a request holds its place until the completion
of it or of a later one has been polled. A completion queue that overflows, an object
that is closed before what was made from it, and a write that breaks a rule of the API
raise at once, and stay in `fabric.violations`. What goes wrong on the network shows as
a failed completion, as on a real card. Between queues, writes land in random order;
within a queue, in order, and the data are read as late as possible.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ENUMS = {
    "IBV_PORT_DOWN": 1, "IBV_PORT_INIT": 2, "IBV_PORT_ACTIVE": 4,
    "IBV_LINK_LAYER_INFINIBAND": 1, "IBV_LINK_LAYER_ETHERNET": 2,
    "IBV_GID_TYPE_IB": 0, "IBV_GID_TYPE_ROCE_V1": 1, "IBV_GID_TYPE_ROCE_V2": 2,
    "IBV_ACCESS_LOCAL_WRITE": 1, "IBV_ACCESS_REMOTE_WRITE": 2,
    "IBV_QPT_RC": 2, "IBV_QPS_ERR": 6, "IBV_QP_STATE": 1,
    "IBV_WR_RDMA_WRITE": 0, "IBV_SEND_SIGNALED": 2, "IBV_SEND_INLINE": 8,
    "IBV_WC_SUCCESS": 0, "IBV_WC_LOC_LEN_ERR": 1, "IBV_WC_LOC_QP_OP_ERR": 2,
    "IBV_WC_LOC_PROT_ERR": 4, "IBV_WC_WR_FLUSH_ERR": 5, "IBV_WC_REM_INV_REQ_ERR": 9,
    "IBV_WC_REM_ACCESS_ERR": 10, "IBV_WC_REM_OP_ERR": 11, "IBV_WC_RETRY_EXC_ERR": 12,
    "IBV_WC_RNR_RETRY_EXC_ERR": 13,
}  # fmt: skip
STATUS = {n.removeprefix("IBV_WC_"): v for n, v in ENUMS.items() if "_WC_" in n}
INLINE, SIGNALED = ENUMS["IBV_SEND_INLINE"], ENUMS["IBV_SEND_SIGNALED"]


class PyverbsError(Exception):
    """As pyverbs has it."""


class PyverbsRDMAError(PyverbsError):
    """With the errno of the call that failed."""

    def __init__(self, message: str, error_code: int = -1) -> None:
        super().__init__(message)
        self.error_code = error_code


@dataclass
class Fabric:
    """The network, and what every device on it can do."""

    send_queue: int = 1024
    completion_queue: int = 4096
    longest: int = 1 << 31
    inline: int = 64
    largest_region: int = 1 << 40
    registers: Any = None  # given a size, how much of it is registered; None: all
    memlock: bool = False  # whether registering fails for want of lockable memory
    devices: tuple[str, ...] = ("fake0",)
    ports: list[Any] = field(default_factory=lambda: [port()])
    gids: list[Any] = field(default_factory=lambda: [gid(0)])
    seed: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.random = random.Random(self.seed)
        self.numbers = itertools.count(17)
        self.qps: dict[int, QP] = {}
        self.regions: dict[int, MR] = {}
        self.closed: list[str] = []
        self.violations: list[str] = []
        self.posts: list[list[SimpleNamespace]] = []  # each call's requests
        self.most_queued = self.most_completions = 0
        self.fails: dict[int, int] = {}  # QP number: status of its next request
        # Of the requests that are carried out: whose answer is lost.
        self.loses_answer: Callable[[Any], bool] = lambda request: False
        self.files: dict[int, int] = {}  # dma-buf: address of its memory
        self.dma_buf = self.peermem = True
        self.frozen = False
        self.is_on_gpu: Callable[[int], bool] = lambda address: False

    def violated(self, text: str) -> None:
        self.violations.append(text)
        raise AssertionError(text)

    def advance(self, steps: int) -> None:
        """Carry out some requests, of random queues."""
        for _ in range(0 if self.frozen else steps):
            busy = [qp for qp in self.qps.values() if qp.waiting]
            if not busy:
                return
            self.random.choice(busy).carry_out()


def port(**changes: Any) -> SimpleNamespace:
    """Attributes of a port: RoCE and active."""
    usual = {
        "state": ENUMS["IBV_PORT_ACTIVE"], "lid": 0, "active_mtu": 5, "gid_tbl_len": 16,
        "link_layer": ENUMS["IBV_LINK_LAYER_ETHERNET"],
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **changes})


def gid(index: int, kind: str = "ROCE_V2", text: str = "", port: int = 1) -> Any:
    """A row of the GID table; by default of an IPv4 address."""
    text = text or "0000:0000:0000:0000:0000:ffff:c000:0201"
    return SimpleNamespace(
        gid_index=index, port_num=port, gid_type=ENUMS[f"IBV_GID_TYPE_{kind}"],
        gid_str=lambda: text,
    )  # fmt: skip


FABRIC = Fabric()  # the one that `install` has put in place


class Resource:
    """Something to be closed after all that was made from it."""

    def __init__(self, *parents: Resource) -> None:
        self.open, self.children, self.fabric = True, 0, FABRIC
        self.parents = parents
        for parent in parents:
            parent.children += 1

    def close(self) -> None:
        with self.fabric.lock:
            if not self.open:
                return
            name = type(self).__name__
            if self.children:
                self.fabric.violated(f"{name} closed before its children (EBUSY)")
            self.open = False
            self.fabric.closed.append(name)
            for parent in self.parents:
                parent.children -= 1


def get_device_list() -> list[Any]:
    return [SimpleNamespace(name=name.encode()) for name in FABRIC.devices]


class Context(Resource):
    def __init__(self, name: str) -> None:
        super().__init__()
        assert name in FABRIC.devices

    def query_device(self) -> Any:
        return SimpleNamespace(
            phys_port_cnt=len(FABRIC.ports), max_qp_wr=FABRIC.send_queue,
            max_cqe=FABRIC.completion_queue, max_mr_size=FABRIC.largest_region,
        )  # fmt: skip

    def query_port(self, number: int) -> Any:
        return SimpleNamespace(
            max_msg_sz=FABRIC.longest, **vars(FABRIC.ports[number - 1])
        )

    def query_gid_table(self, most: int) -> list[Any]:
        return FABRIC.gids[:most]


class PD(Resource):
    def __init__(self, context: Context) -> None:
        super().__init__(context)


class MR(Resource):
    def __init__(self, pd: PD, length: int, access: int, address: int) -> None:
        if FABRIC.memlock:
            raise PyverbsRDMAError("Failed to register a MR", errno.ENOMEM)
        if not FABRIC.peermem and FABRIC.is_on_gpu(address):
            raise PyverbsRDMAError("Failed to register a MR", errno.EFAULT)
        assert address % 4096 == 0, "not page-aligned"
        self._register(pd, length, access, address, address)

    def _register(
        self, pd: PD, length: int, access: int, address: int, memory: int
    ) -> None:
        super().__init__(pd)
        # memory: where that is which the card calls `address`.
        self.address, self.memory, self.access = address, memory, access
        self.length = FABRIC.registers(length) if FABRIC.registers else length
        self.lkey = self.rkey = next(FABRIC.numbers)
        FABRIC.regions[self.lkey] = self

    def holds(self, address: int, length: int) -> bool:
        first = address - self.address
        return self.open and 0 <= first and first + length <= self.length

    def place(self, address: int) -> int:
        return self.memory + address - self.address


class DmaBufMR(MR):
    """Of a file; the card calls its first byte 0."""

    def __init__(self, pd: PD, length: int, access: int, dmabuf: int) -> None:
        if not FABRIC.dma_buf:
            raise PyverbsRDMAError("Failed to register a dma-buf MR", errno.EOPNOTSUPP)
        os.fstat(dmabuf)  # it is still open
        memory = FABRIC.files[dmabuf]
        assert memory % 4096 == length % 4096 == 0, "not whole pages"
        self._register(pd, length, access, 0, memory)


class CQ(Resource):
    def __init__(self, context: Context, cqe: int, *rest: Any) -> None:
        assert 0 < cqe <= FABRIC.completion_queue
        super().__init__(context)
        self.depth, self.waiting = cqe, deque[Any]()

    def push(self, completion: Any) -> None:
        if len(self.waiting) >= self.depth:
            FABRIC.violated("the completion queue overflows")
        self.waiting.append(completion)
        FABRIC.most_completions = max(FABRIC.most_completions, len(self.waiting))

    def poll(self, most: int) -> tuple[int, list[Any]]:
        with FABRIC.lock:
            FABRIC.advance(FABRIC.random.randrange(16))
            found: list[Any] = []
            while self.waiting and len(found) < most:
                found.append(self.waiting.popleft())
                found[-1].release()
            return len(found), found


class QP(Resource):
    def __init__(self, pd: PD, init: Any) -> None:
        if init.cap.max_inline_data > FABRIC.inline:
            raise PyverbsRDMAError("Failed to create QP", errno.EINVAL)
        super().__init__(pd, init.scq)
        self.cq, self.depth = init.scq, init.cap.max_send_wr
        assert self.depth <= FABRIC.send_queue
        self.qp_num = next(FABRIC.numbers)
        self.state, self.attributes = "RESET", SimpleNamespace()
        self.waiting: deque[Any] = deque()
        self.posted = self.released = 0
        FABRIC.qps[self.qp_num] = self

    def to_rts(self, attributes: Any) -> None:
        self.state, self.attributes = "RTS", attributes

    def modify(self, attributes: Any, mask: int) -> None:
        assert attributes.qp_state == ENUMS["IBV_QPS_ERR"]
        with FABRIC.lock:
            self.state = "ERR"

    def post_send(self, request: Any) -> None:
        with FABRIC.lock:
            assert self.state in ("RTS", "ERR")
            call = []
            while request is not None:
                if self.posted - self.released >= self.depth:
                    raise PyverbsRDMAError("Failed to post send", errno.ENOMEM)
                call.append(self._copy(request))
                self.waiting.append(call[-1])
                request = request._next
            FABRIC.posts.append(call)
            queued = self.posted - self.released
            FABRIC.most_queued = max(FABRIC.most_queued, queued)

    def _copy(self, request: Any) -> SimpleNamespace:
        """What the driver takes of a request; later changes of it do no harm."""
        sge, inline = request._sge, None
        if request.send_flags & INLINE:
            assert sge.length <= FABRIC.inline
            inline = ctypes.string_at(sge.addr, sge.length)
        self.posted += 1
        return SimpleNamespace(
            qp_num=self.qp_num, number=self.posted, wr_id=request.wr_id,
            flags=request.send_flags, inline=inline, source=sge.addr, lkey=sge.lkey,
            length=sge.length, rkey=request._rkey, to=request._address,
        )  # fmt: skip

    def carry_out(self) -> None:
        request = self.waiting[0]
        status = self._write(request) if self.state == "RTS" else STATUS["WR_FLUSH_ERR"]
        if status == STATUS["SUCCESS"] and FABRIC.loses_answer(request):
            return  # it is sent again and again, until the peer is gone
        self.waiting.popleft()
        if status != STATUS["SUCCESS"]:
            self.state = "ERR"
        if status != STATUS["SUCCESS"] or request.flags & SIGNALED:
            self.cq.push(Completion(self, request, status))

    def _write(self, request: Any) -> int:
        if self.qp_num in FABRIC.fails:
            return FABRIC.fails.pop(self.qp_num)
        if request.length > FABRIC.longest:
            return STATUS["LOC_LEN_ERR"]
        own, source = FABRIC.regions.get(request.lkey), request.source
        is_inline = request.inline is not None
        is_own = own is not None and own.holds(source, request.length)
        if request.length and not (is_inline or is_own):
            return STATUS["LOC_PROT_ERR"]
        peer = FABRIC.qps.get(self.attributes.dest_qp_num)
        if peer is None or not peer.open or peer.state != "RTS":
            return STATUS["RETRY_EXC_ERR"]
        if request.length:
            to = FABRIC.regions.get(request.rkey)
            may = to is not None and to.access & ENUMS["IBV_ACCESS_REMOTE_WRITE"]
            if to is None or not may or not to.holds(request.to, request.length):
                peer.state = "ERR"
                return STATUS["REM_ACCESS_ERR"]
            data = request.inline if own is None or is_inline else own.place(source)
            ctypes.memmove(to.place(request.to), data, request.length)
        return STATUS["SUCCESS"]


class Completion:
    """A WC; polling it frees its place in the send queue, and those before."""

    def __init__(self, qp: QP, request: Any, status: int) -> None:
        self.qp_num, self.wr_id, self.status = qp.qp_num, request.wr_id, status
        self._qp, self._number = qp, request.number

    def release(self) -> None:
        self._qp.released = max(self._qp.released, self._number)


class SGE:
    def __init__(self, addr: int, length: int, lkey: int) -> None:
        self.addr, self.length, self.lkey = addr, length, lkey


class SendWR:
    def __init__(
        self, wr_id: int, opcode: int, num_sge: int, sg: list[SGE], send_flags: int
    ) -> None:
        assert num_sge == len(sg) == 1
        assert opcode == ENUMS["IBV_WR_RDMA_WRITE"]
        self.wr_id, self.send_flags = wr_id, send_flags
        self._sge = SGE(sg[0].addr, sg[0].length, sg[0].lkey)  # a copy, as in pyverbs
        self._next: SendWR | None = None
        self._rkey = self._address = 0

    def _set_sge(self, sge: SGE) -> None:
        self._sge = sge

    def _set_next(self, request: SendWR) -> None:
        assert isinstance(request, SendWR), "a link cannot be undone"
        self._next = request

    sg_list = property(None, _set_sge)
    next_wr = property(None, _set_next)

    def set_wr_rdma(self, rkey: int, address: int) -> None:
        self._rkey, self._address = rkey, address


def _record(name: str, *positional: str) -> type:
    """A class that keeps its arguments as attributes."""

    def init(self: Any, *values: Any, **named: Any) -> None:
        vars(self).update(zip(positional, values), **named)

    return type(name, (), {"__init__": init})


def install(monkeypatch: pytest.MonkeyPatch, **able: Any) -> Fabric:
    """Have `import pyverbs` find this, and the verbs transport imported anew."""
    global FABRIC
    FABRIC = Fabric(**able)
    parts = {
        "enums": SimpleNamespace(**ENUMS).__dict__,
        "device": {"Context": Context, "get_device_list": get_device_list},
        "pyverbs_error": {"PyverbsError": PyverbsError},
        "addr": {n: _record(n, "gid") for n in ("GID", "AHAttr", "GlobalRoute")},
        "cq": {"CQ": CQ},
        "mr": {"MR": MR, "DmaBufMR": DmaBufMR},
        "pd": {"PD": PD},
        "qp": {"QP": QP, **{n: _record(n) for n in ("QPAttr", "QPCap", "QPInitAttr")}},
        "wr": {"SGE": SGE, "SendWR": SendWR},
    }
    package = ModuleType("pyverbs")
    monkeypatch.setitem(sys.modules, "pyverbs", package)
    for name, content in parts.items():
        module = ModuleType(f"pyverbs.{name}")
        vars(module).update(content)
        setattr(package, name, module)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    forget(monkeypatch)
    return FABRIC


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the transport's modules imported anew, now and after the test."""
    parts = ("verbs", "verbs_cuda", "verbs_resources", "verbs_queue", "verbs_device")
    for name in parts:
        # Set first: then what is imported meanwhile goes when the test ends.
        monkeypatch.setitem(sys.modules, f"transport.{name}", ModuleType(name))
        monkeypatch.delitem(sys.modules, f"transport.{name}")
