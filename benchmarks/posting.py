"""What the proxy's own code costs per chunk, over verbs, without a network card.

    python benchmarks/posting.py [FOLDER_OF_PYVERBS]

The provider's post and poll are stubs that take no time; everything else is real: the
FIFOs, the proxy, the transport, and pyverbs' request objects where it is installed (the
folder of an unpacked python3-pyverbs may be given). Prints microseconds per chunk, data
and tail, for so many chunks ready at a time, each on another queue or all on one.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import fake_pyverbs

import transport
from transport import wr
from transport.base import AbortWords
from transport.fifo import FifoReader, fifo_bytes
from transport.proxy import Proxy

QUEUES, DEPTH, CHUNK = 24, 64, 118_784
ROUNDS, REPEATS = 400, 7


class StubQP(fake_pyverbs.QP):
    """Every request is complete at once."""

    def post_send(self, request: Any) -> None:
        pass


class StubCQ(fake_pyverbs.CQ):
    """Makes a WC for every completion that was asked for, as pyverbs does."""

    end: Any = None
    make: Any = None

    def poll(self, most: int) -> tuple[int, list[Any]]:
        if not self.end._asked:
            return 0, []
        found = []
        for number, queue in self.end._by_qp.items():
            for _ in queue.asked:
                found.append(self.make(number))
        return len(found), found[:most]


def own_wc(number: int) -> Any:
    return SimpleNamespace(qp_num=number, wr_id=1, status=0)


def install() -> str:
    """The fake pyverbs with the stubs; which request objects it has."""
    patch = pytest.MonkeyPatch()
    kind, make = "plain Python", own_wc
    real: Any = None
    try:
        from pyverbs import cq, enums
        from pyverbs import wr as requests

        real = requests

        def make(number: int) -> Any:
            return cq.WC(
                wr_id=1, status=0, opcode=0, vendor_err=0, byte_len=0, qp_num=number,
                src_qp=0, imm_data=0, wc_flags=0, pkey_index=0, slid=0, sl=0,
                dlid_path_bits=0,
            )  # fmt: skip

        kind = f"pyverbs ({Path(enums.__file__).parent})"
    except ImportError:
        pass
    fake_pyverbs.install(patch)
    if real is not None:
        patch.setitem(sys.modules, "pyverbs.wr", real)
    qp, cq_module = sys.modules["pyverbs.qp"], sys.modules["pyverbs.cq"]
    patch.setattr(qp, "QP", StubQP)
    patch.setattr(cq_module, "CQ", StubCQ)
    StubCQ.make = staticmethod(make)
    return kind


class Rig:
    """FIFOs, proxy (not started) and transport of rank 0 of 2."""

    def __init__(self) -> None:
        ends = [
            transport.create("verbs", r, 2, 1 << 20, 1 << 28, False, QUEUES)
            for r in (0, 1)
        ]
        cards = [end.card() for end in ends]
        ends[0].connect(cards)
        self.end: Any = ends[0]
        StubCQ.end = self.end
        self.memory = np.zeros(fifo_bytes(QUEUES, DEPTH) + 128, np.uint8)
        address = -(-self.memory.ctypes.data // 128) * 128
        at = address - self.memory.ctypes.data
        entries = self.memory[at:][: QUEUES * DEPTH * wr.ENTRY_BYTES].view(np.int64)
        self.entries = entries.reshape(QUEUES, DEPTH, wr.ENTRY_BYTES // 8)
        self.sequence = [0] * QUEUES
        self.words = np.zeros(64, np.int64)
        base = int(self.words.ctypes.data)
        addresses = np.array([base, base + 8], np.int64)
        words = AbortWords(base + 16, addresses, 0, addresses)
        self.fifo = FifoReader(address, QUEUES, DEPTH)
        self.proxy = Proxy(0, self.end, self.fifo, words)
        self.batch = np.empty((64, wr.NUM_FIELDS), np.int64)

    def commit(self, chunks: int, spread: bool) -> None:
        """What kernels do: so many puts, on as many queues or on one."""
        for i in range(chunks):
            queue = i % QUEUES if spread else 0
            number = self.sequence[queue]
            entry = self.entries[queue, number % DEPTH]
            entry[: wr.NUM_FIELDS] = wr.put(
                1, queue, number % 1000 * CHUNK, 4096, CHUNK, 128 * queue, number
            )
            entry[wr.COMMIT] = self.sequence[queue] = number + 1

    def times(self, chunks: int, spread: bool) -> list[float]:
        """Seconds of one turn: pop, post, poll, and the proxy's step in all."""
        clock = time.perf_counter
        self.commit(chunks, spread)
        start = clock()
        count = self.fifo.pop(self.batch)
        popped = clock()
        self.end.post(self.batch[:count])
        posted = clock()
        self.end.poll()
        polled = clock()
        self.commit(chunks, spread)
        before = clock()
        self.proxy._step()
        after = clock()
        return [popped - start, posted - popped, polled - posted, after - before]


def main() -> None:
    """Print the table."""
    sys.path[1:1] = sys.argv[1:]
    print(f"request objects: {install()}")
    rig = Rig()
    print(f"{'ready':>6} {'queues':>7} {'pop':>6} {'build':>6} {'poll':>6} "
          f"{'rest':>6} {'all':>6}   us a chunk")  # fmt: skip
    for chunks, spread in ((1, True), (4, True), (24, True), (64, True), (24, False)):
        medians = []
        for _ in range(REPEATS):
            rounds = [rig.times(chunks, spread) for _ in range(ROUNDS)]
            # The quick rounds: in the others something else had the core.
            quick = np.quantile(rounds, 0.1, axis=0)
            medians.append(quick / chunks * 1e6)
        pop, build, poll, total = (statistics.median(c) for c in zip(*medians))
        rest = total - pop - build - poll
        queues = min(chunks, QUEUES) if spread else 1
        print(f"{chunks:>6} {queues:>7} {pop:>6.2f} {build:>6.2f} {poll:>6.2f} "
              f"{rest:>6.2f} {total:>6.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
