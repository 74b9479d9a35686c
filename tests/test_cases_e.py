"""Faults that people met with comparable libraries: C03, C06, C36 and C47.

These call the kernels' verbs and waits alone, on the cpu target, over memory of
their own.
"""

import functools
import mmap
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import on_cpu

calls_kernels = on_cpu("a test calls kernels' code itself, over the host's memory")
LOCAL: list[np.ndarray] = []
WRITER = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    words = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
time.sleep(0.2)
words[256:264] = (1).to_bytes(8, "little")
"""


@functools.cache
def device_kernels() -> dict[str, Any]:
    """Verbs and waits of kernels/ as functions that a test can call."""
    from numba_ep import device as devices

    cuda = devices.select("cpu").cuda
    from numba_ep.device import clock_ns
    from numba_ep.kernels.channel import first_token, poll_credit, poll_tail, slot_at
    from numba_ep.kernels.fifo import push_counter, push_put
    from numba_ep.kernels.records import FOR_A_PEER
    from numba_ep.kernels.rows import wait_for_row_of
    from numba_ep.kernels.waiting import wait_verdict

    @cuda.jit
    def tail(comm, ring):  # type: ignore[no-untyped-def]
        spins, since = 0, clock_ns()
        while poll_tail(comm, 1, 0, 0) < 1:
            if wait_verdict(comm, spins, since, FOR_A_PEER) != 0:
                return False
            spins += 1
        return True

    @cuda.jit
    def head(comm, ring):  # type: ignore[no-untyped-def]
        spins, since = 0, clock_ns()
        while poll_credit(comm, ring, 1, 0, 0) < ring.capacity + 1:
            if wait_verdict(comm, spins, since, FOR_A_PEER) != 0:
                return False
            spins += 1
        return True

    @cuda.jit
    def credit(comm, ring, seen):  # type: ignore[no-untyped-def]
        return poll_credit(comm, ring, 1, 0, seen)

    @cuda.jit
    def tail_now(comm, seen):  # type: ignore[no-untyped-def]
        return poll_tail(comm, 1, 0, seen)

    @cuda.jit
    def row(comm, ring):  # type: ignore[no-untyped-def]
        return wait_for_row_of(comm, 1, 1)

    @cuda.jit
    def put(comm, channel, peer, source, destination, num_bytes, counter, value):  # type: ignore[no-untyped-def]
        push_put(comm, channel, peer, source, destination, num_bytes, counter, value)

    @cuda.jit
    def count(comm, channel, peer, counter, value):  # type: ignore[no-untyped-def]
        push_counter(comm, channel, peer, counter, value)

    @cuda.jit
    def slot(ring, peer, channel, position):  # type: ignore[no-untyped-def]
        return slot_at(ring, peer, channel, position)

    @cuda.jit
    def token(num_tokens, channel, num_channels):  # type: ignore[no-untyped-def]
        return first_token(num_tokens, channel, num_channels)

    return {
        "tail": tail, "head": head, "row": row, "put": put, "count": count,
        "credit": credit, "tail_now": tail_now, "slot_at": slot, "first_token": token,
    }  # fmt: skip


def small_comm(word: int = 0, **fields: int) -> Any:
    """A record whose counters of peer 1 all lie at `word`; its memory is kept."""
    from numba_ep.kernels.records import Comm

    local = np.zeros(1024, np.int64)
    LOCAL.append(local)
    comm = Comm(*[0] * len(Comm._fields))._replace(
        num_ranks=2,
        max_channels=1,
        timeout_ns=300_000_000,
        landing=word - 128,
        receive=word - 128,
        control=local.ctypes.data,
        state=local.ctypes.data + 1024,
        tail_cursors=local.ctypes.data + 2048,
        head_cursors=local.ctypes.data + 3072,
        fifo_tickets=local.ctypes.data + 4096,
    )
    return comm._replace(**fields)


@calls_kernels
def test_c03_counters_of_the_operation_before() -> None:
    """Credit that is still under way is none yet; counters never go back."""
    from numba_ep.kernels.records import Ring

    words = np.zeros(32, np.int64)
    ring = Ring(*[0] * len(Ring._fields))._replace(num_channels=1, capacity=8)
    comm = small_comm(words.ctypes.data + 128)
    cursors = LOCAL[-1]
    cursors[[256 + 1, 384 + 1]] = 1000  # both ends of the ring to peer 1 start here
    credit, tail = device_kernels()["credit"], device_kernels()["tail_now"]
    for head, expected in ((0, 0), (993, 0), (999, 0), (1000, 8), (1003, 11)):
        words[16] = head
        assert credit(comm, ring, 0) == expected
        assert credit(comm, ring, 20) == 20
        assert tail(comm, 0) == max(0, head - 1000)
        assert tail(comm, 20) == 20


@calls_kernels
@pytest.mark.parametrize("wait", ["wait_any", "tail", "head", "row"])
def test_c06_waits_see_another_process(wait: str, tmp_path: Path) -> None:
    """A waiting loop reads its word anew every time, and ends without a writer."""
    from numba_ep.kernels.records import Ring
    from transport.atomics import wait_any

    path = tmp_path / "words"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file:
        words = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
    word = words.ctypes.data + 256
    ring = Ring(*[0] * len(Ring._fields))._replace(num_channels=1, capacity=4)

    def arrived(timeout_ns: int) -> bool:
        if wait == "wait_any":
            one = np.array([word], np.int64)
            return wait_any(one, np.zeros(1, np.int64), timeout_ns, 0) == 0
        comm = small_comm(word, timeout_ns=timeout_ns)
        return bool(device_kernels()[wait](comm, ring))

    assert not arrived(1)  # compiles
    started = time.monotonic()
    assert not arrived(200_000_000)
    assert 0.2 <= time.monotonic() - started < 1.0
    command = [sys.executable, "-I", "-S", "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert arrived(5_000_000_000)
        assert time.monotonic() - started < 5.0


@calls_kernels
def test_c36_slot_offsets_beyond_32_bits() -> None:
    from numba_ep.kernels.records import Ring

    kernels = device_kernels()
    ring = Ring(0, 0, 0, 0, 0, 12, 4096, 16, 14_400, 0, 0)
    slots = 32 * 12 * 4096
    assert slots * 14_400 > 1 << 34
    assert kernels["slot_at"](ring, 31, 11, 4095) == (slots - 1) * 14_400
    assert kernels["slot_at"](ring, 31, 11, 2**40 + 3) == (slots - 4093) * 14_400
    assert kernels["first_token"](2**40, 23, 24) == 2**40 * 23 // 24


@calls_kernels
@pytest.mark.parametrize("depth", [1, 4])
def test_c47_work_requests_keep_every_bit(depth: int) -> None:
    """The largest fields go through the FIFO unchanged, many times around it."""
    from transport import wr
    from transport.fifo import FifoReader, fifo_bytes

    channels, largest = 64, 2**63 - 1
    memory = np.zeros(fifo_bytes(channels, depth) // 8, np.int64)
    tickets = np.zeros(16 * channels, np.int64)
    fifo = FifoReader(memory.ctypes.data, channels, depth)
    comm = small_comm(
        fifo=fifo.address, fifo_freed=fifo.freed_address, fifo_depth=depth,
        fifo_tickets=tickets.ctypes.data,
    )  # fmt: skip
    put, count = device_kernels()["put"], device_kernels()["count"]
    batch = np.zeros((4, wr.NUM_FIELDS), np.int64)
    for turn in range(3 * depth):
        fields = [31, 2**33 + turn, 2**40 + 128, 600 * 16_384, 2**34, 2**62 + turn]
        for channel in (0, 63):
            put(comm, channel, *fields)
            assert fifo.pop(batch) == 1
            peer, *others = fields
            assert batch[0].tolist() == list(wr.put(peer, channel, *others))
        put(comm, 5, *[largest] * 6)
        assert fifo.pop(batch) == 1
        assert batch[0].tolist() == [wr.PUT, largest, 5] + [largest] * 5
        count(comm, 63, 4095, 2**35, largest)
        assert fifo.pop(batch) == 1
        expected = wr.counter_write(4095, 63, 2**35, largest)
        used = [wr.OPCODE, wr.PEER, wr.QUEUE, wr.COUNTER_AT, wr.VALUE]
        assert batch[0, used].tolist() == [expected[i] for i in used]


@calls_kernels
def test_c47_full_fifo_is_never_overwritten() -> None:
    """The kernel waits, gives up after its timeout, and says so."""
    from numba_ep.errors import PeerTimeout, aborted
    from numba_ep.kernels.records import ABORT, RECORD, RECORD_FIELDS
    from transport import wr
    from transport.fifo import FifoReader, fifo_bytes

    depth = 4
    memory = np.zeros(fifo_bytes(1, depth) // 8, np.int64)
    fifo = FifoReader(memory.ctypes.data, 1, depth)
    comm = small_comm(
        fifo=fifo.address, fifo_freed=fifo.freed_address, fifo_depth=depth
    )
    control = LOCAL[-1]
    for i in range(depth):
        device_kernels()["put"](comm, 0, 1, i, i, i, i, i)
    assert control[ABORT] == 0
    started = time.monotonic()
    device_kernels()["put"](comm, 0, 1, 99, 99, 99, 99, 99)
    assert 0.3 <= time.monotonic() - started < 1.0
    record = control[RECORD : RECORD + len(RECORD_FIELDS)]
    error = aborted(0, int(control[ABORT]), record, 0.3, None)
    assert isinstance(error, PeerTimeout) and "FIFO" in str(error)
    batch = np.zeros((9, wr.NUM_FIELDS), np.int64)
    assert fifo.pop(batch) == depth
    assert batch[:depth, wr.SOURCE].tolist() == [0, 1, 2, 3]
