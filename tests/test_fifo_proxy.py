"""FIFO and proxy: alone, against kernels, and in a Buffer whose transport is faulty."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import LONG
from faulty import (
    Case,
    DelayedTransport,
    FakeTransport,
    ServingTransport,
    Wrapped,
    Wrapping,
    answer,
    dispatch,
    make_buffer,
    poison,
    round_trip,
    run_case,
    spawn_ranks,
)

import transport
from numba_ep import BufferAborted, Config, PeerTimeout, device
from numba_ep.slot import slot_bytes
from transport import TransportError, wr
from transport.atomics import read_word, ring, wait_any, write_word
from transport.base import AbortWords
from transport.fifo import FifoReader, fifo_bytes
from transport.proxy import Proxy
from transport.statistics import Statistics

if device.wanted_target() == "cuda":
    pytest.skip("these tests are for kernels on the CPU", allow_module_level=True)

from numba_ep.device import block_id, cuda, num_warps, warp_id
from numba_ep.kernels.fifo import push_counter, push_put
from numba_ep.kernels.records import (
    ABORT,
    FIFO,
    LINE_BYTES,
    LINE_WORDS,
    RECORD,
    STATE_OPERATION,
    STATE_WORDS,
    Comm,
)

LIMIT_S = 20.0
DEPTH = 4


def wait_until(condition: Callable[[], Any], limit_s: float = 5) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(1e-3)


def lines(count: int) -> np.ndarray:
    """`count` zeroed words, each on a line of its own."""
    return np.zeros((count, LINE_WORDS), np.int64)


# The FIFO: kernels push, the host pops.


@cuda.jit
def push_kernel(comm: Any, count: int, num_fifos: int) -> None:
    """Every word of a request tells which warp it comes from, and its number there."""
    me = block_id() * num_warps() + warp_id()
    for i in range(count):
        mark = (me << 32) + (i << 8)
        push_put(
            comm, block_id() % num_fifos, mark + 1, mark + 2, mark + 3, mark + 4,
            mark + 5, mark + 6,
        )  # fmt: skip


@cuda.jit
def push_counters_kernel(comm: Any, count: int) -> None:
    for i in range(count):
        push_counter(comm, 0, 3, 1 << 35, i)


class KernelFifo:
    """The memory of some FIFOs, their host end, and kernels that push into them."""

    def __init__(
        self, num_fifos: int, depth: int = DEPTH, timeout_s: float = 5
    ) -> None:
        self.runtime = device.make_runtime("fifo", 0)
        self.memory = self.runtime.allocate_host(fifo_bytes(num_fifos, depth))
        self.tickets, self.control = lines(num_fifos), lines(2)
        self.state = np.zeros(STATE_WORDS, np.int64)
        self.state[STATE_OPERATION] = 7
        self.reader = FifoReader(self.memory.address, num_fifos, depth)
        self.num_fifos, self.depth = num_fifos, depth
        self.comm = Comm(*[0] * len(Comm._fields))._replace(
            rank=2,
            timeout_ns=int(timeout_s * 1e9),
            control=self.control.ctypes.data,
            state=self.state.ctypes.data,
            fifo=self.memory.address,
            fifo_freed=self.reader.freed_address,
            fifo_tickets=self.tickets.ctypes.data,
            fifo_depth=depth,
        )
        self._thread: threading.Thread | None = None

    def start(self, kernel: Any, blocks: int, warps: int, *args: int) -> None:
        device.compile_kernel(kernel, (self.comm, *args))
        launch = (kernel, blocks, warps, (self.comm, *args))
        self._thread = threading.Thread(
            target=self.runtime.launch, args=launch, daemon=True
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the kernel does not leave"

    def pop(self, most: int) -> list[wr.WorkRequest]:
        batch = np.full((most, wr.NUM_FIELDS), -1, np.int64)
        count = self.reader.pop(batch)
        return [wr.WorkRequest(*entry) for entry in batch[:count].tolist()]

    def pop_all(self, expected: int, batches: Iterator[int]) -> list[wr.WorkRequest]:
        got: list[wr.WorkRequest] = []
        deadline = time.monotonic() + LIMIT_S
        while len(got) < expected:
            assert time.monotonic() < deadline, f"{len(got)} of {expected} came"
            wait_any(self.reader.words, self.reader.seen, 1_000_000, 0)
            got += self.pop(next(batches))
        return got

    def freed(self) -> list[int]:
        at = self.reader.freed_address
        return [read_word(at + i * LINE_BYTES) for i in range(self.num_fifos)]

    def snapshot(self) -> bytes:
        assert self.memory.host is not None
        return self.memory.host.tobytes()


@pytest.fixture
def made() -> Iterator[list[KernelFifo]]:
    fifos: list[KernelFifo] = []
    yield fifos
    for fifo in fifos:
        write_word(fifo.control.ctypes.data, 1)
        fifo.runtime.close()


def check_requests(
    requests: list[wr.WorkRequest], blocks: int, warps: int, count: int, num_fifos: int
) -> None:
    """Every request is whole, none is lost or doubled, each warp's are in order."""
    numbers: dict[int, list[int]] = {}
    for request in requests:
        mark = request.peer - 1
        rest = (mark + 2, mark + 3, mark + 4, mark + 5, mark + 6)
        assert request[3:] == rest, f"torn: {request}"
        who, number = mark >> 32, (mark & 0xFFFFFFFF) >> 8
        assert request[0] == wr.PUT
        assert request.queue == who // warps % num_fifos
        numbers.setdefault(who, []).append(number)
    assert numbers == {who: list(range(count)) for who in range(blocks * warps)}


@pytest.mark.parametrize(
    ("blocks", "warps", "num_fifos", "count", "depth"),
    [(1, 1, 1, 5000, 4), (1, 4, 1, 500, 4), (3, 2, 3, 500, 4), (4, 2, 2, 50, 1),
     (2, 1, 2, 20000, 64)],
)  # fmt: skip
def test_every_request_arrives_whole_and_in_order(
    made: list[KernelFifo], blocks: int, warps: int, num_fifos: int, count: int,
    depth: int,
) -> None:  # fmt: skip
    made.append(fifo := KernelFifo(num_fifos, depth))
    fifo.start(push_kernel, blocks, warps, count, num_fifos)
    total = blocks * warps * count
    requests = fifo.pop_all(total, itertools.cycle([1, 64, 3, 7]))
    fifo.join()
    check_requests(requests, blocks, warps, count, num_fifos)
    # What was reserved was committed, taken and freed.
    assert fifo.freed() == [total // num_fifos] * num_fifos
    assert fifo.tickets[:, 0].tolist() == fifo.freed()
    assert fifo.pop(64) == []


def test_a_full_fifo_makes_the_kernel_wait_and_overwrites_nothing(
    made: list[KernelFifo],
) -> None:
    made.append(fifo := KernelFifo(2))
    fifo.start(push_kernel, 2, 3, 50, 2)
    wait_until(lambda: (fifo.tickets[:, 0] == DEPTH + 3).all())  # 3 warps wait
    time.sleep(0.02)
    before = fifo.snapshot()
    time.sleep(0.05)
    assert fifo.snapshot() == before
    assert fifo.is_running
    requests = fifo.pop(1)
    wait_until(lambda: fifo.tickets[0, 0] == DEPTH + 4)  # one slot, one push
    time.sleep(0.02)
    assert fifo.tickets[:, 0].tolist() == [DEPTH + 4, DEPTH + 3]
    requests += fifo.pop_all(299, itertools.repeat(64))
    fifo.join()
    check_requests(requests, 2, 3, 50, 2)


def test_a_full_fifo_and_an_abort(made: list[KernelFifo]) -> None:
    made.append(fifo := KernelFifo(1))
    fifo.start(push_kernel, 1, 2, 50, 1)
    wait_until(lambda: fifo.tickets[0, 0] == DEPTH + 2)
    before = fifo.snapshot()
    write_word(fifo.control.ctypes.data + 8 * ABORT, wr.abort_value(2, 1))
    fifo.join()
    assert fifo.snapshot() == before
    assert len(fifo.pop(64)) == DEPTH


def test_a_full_fifo_and_no_proxy_ends_in_time(made: list[KernelFifo]) -> None:
    made.append(fifo := KernelFifo(2, timeout_s=0.2))
    fifo.start(push_kernel, 2, 2, DEPTH, 2)
    since = time.monotonic()
    fifo.join()
    assert time.monotonic() - since < 2
    abort = int(fifo.control.ravel()[ABORT])
    assert wr.abort_parts(abort) == (wr.ABORT_TIMEOUT, 2)
    role, peer, channel, freed, sequence, depth, operation = (
        fifo.control.ravel()[RECORD : RECORD + 7].tolist()
    )
    assert (role, peer, freed, depth, operation) == (FIFO, 2, 0, DEPTH, 7)
    assert channel in (0, 1)
    assert DEPTH <= sequence < 2 * DEPTH


def test_counters_alone(made: list[KernelFifo]) -> None:
    made.append(fifo := KernelFifo(1))
    fifo.start(push_counters_kernel, 1, 1, 10)
    requests = fifo.pop_all(10, itertools.repeat(3))
    fifo.join()
    for i, request in enumerate(requests):
        assert request.opcode == wr.COUNTER
        assert (request.peer, request.queue) == (3, 0)
        assert (request.counter, request.value) == (1 << 35, i)


def test_the_host_can_sleep_until_the_next_commit(made: list[KernelFifo]) -> None:
    """Also when the FIFO has wrapped and old commit words lie where new ones come."""
    made.append(fifo := KernelFifo(2))
    for _ in range(3 * DEPTH):
        assert wait_any(fifo.reader.words, fifo.reader.seen, 0, 0) == -1
        fifo.start(push_kernel, 2, 1, 1, 2)
        fifo.join()
        assert wait_any(fifo.reader.words, fifo.reader.seen, 0, 0) in (0, 1)
        assert len(fifo.pop(64)) == 2


# The proxy over a transport that keeps what it is given.


class Rig:
    """A proxy of rank 0 with its FIFOs, abort words and a FakeTransport."""

    def __init__(self, kind: Any, num_ranks: int = 4, num_fifos: int = 3) -> None:
        self.transport = kind(num_ranks)
        self._memory = np.zeros(fifo_bytes(num_fifos, DEPTH) // 8 + 16, np.int64)
        self.reader = FifoReader(self._memory.ctypes.data, num_fifos, DEPTH)
        self._pushed = [0] * num_fifos
        self.local, self.aborts = lines(1), lines(num_ranks)
        self.farewells = lines(num_ranks)
        steps = np.arange(num_ranks) * LINE_BYTES
        self.words = AbortWords(
            local=self.local.ctypes.data,
            from_peers=self.aborts.ctypes.data + steps,
            at_peers=4096,
            farewells=self.farewells.ctypes.data + steps,
        )
        self.bell = lines(1)
        bell = self.bell.ctypes.data
        self.proxy = Proxy(0, self.transport, self.reader, self.words, bell)

    def push(self, fifo: int, request: wr.WorkRequest) -> None:
        """What a kernel does; waits where the FIFO is full."""
        number = self._pushed[fifo]
        wait_until(lambda: number - self.freed(fifo) < DEPTH)
        entry = self.reader.address + (fifo * DEPTH + number % DEPTH) * wr.ENTRY_BYTES
        for field, value in enumerate(request):
            write_word(entry + 8 * field, value)
        write_word(entry + 8 * wr.COMMIT, number + 1)
        ring(self.bell.ctypes.data)
        self._pushed[fifo] += 1

    def freed(self, fifo: int) -> int:
        return read_word(self.reader.freed_address + fifo * LINE_BYTES)

    def abort(self) -> tuple[int, int]:
        return wr.abort_parts(int(self.local[0, 0]))

    def told(self) -> dict[int, tuple[int, int]]:
        """Abort words that went to peers."""
        at = self.words.at_peers
        posted = [r for r in self.transport.posted if r.counter == at]
        assert len({r.peer for r in posted}) == len(posted)
        return {r.peer: wr.abort_parts(r.value) for r in posted}


@pytest.fixture(params=[FakeTransport, ServingTransport])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    rig.proxy.start()
    yield rig
    rig.transport.pending = 0
    assert rig.proxy.stop()


def numbered(peer: int, queue: int, number: int) -> wr.WorkRequest:
    return wr.put(peer, queue, 64 * number, 64 * number, 64, 128 * queue, number)


def test_a_full_queue_holds_up_no_other(rig: Rig) -> None:
    blocked, others = (1, 0), [(2, 0), (1, 1), (3, 2)]
    rig.transport.room[blocked] = 1
    for number in range(20):
        for key in (blocked, *others):
            rig.push(0, numbered(*key, number))  # through one FIFO, eight times full
    wait_until(lambda: rig.freed(0) == 80)
    for key in others:
        wait_until(lambda key=key: len(rig.transport.on(key)) == 20)  # type: ignore[misc]
        assert [r.value for r in rig.transport.on(key)] == list(range(20))
    assert [r.value for r in rig.transport.on(blocked)] == [0]
    assert rig.proxy.statistics().most_parked == 19
    for room in (1, 3, 2, 13):
        rig.transport.give_room(blocked, room)
        time.sleep(0.01)
    wait_until(lambda: len(rig.transport.on(blocked)) == 20)
    assert [r.value for r in rig.transport.on(blocked)] == list(range(20))


def test_a_queue_keeps_its_order_while_it_is_parked_and_filled(rig: Rig) -> None:
    """New requests come from the FIFO as parked ones leave, never before them."""
    keys = [(1, 0), (1, 1), (2, 0)]
    for key in keys:
        rig.transport.room[key] = 0
    for number in range(200):
        for fifo, key in enumerate(keys):
            rig.push(fifo, numbered(*key, number))
            if (number + fifo) % 3 == 0:
                rig.transport.give_room(key, 1 + number % 4)
    for key in keys:
        rig.transport.give_room(key, 200)
    assert rig.proxy.drain(LIMIT_S)
    for key in keys:
        assert [r.value for r in rig.transport.on(key)] == list(range(200))


def test_a_newer_counter_replaces_a_parked_one(rig: Rig) -> None:
    rig.transport.room[1, 0] = 0
    rig.push(0, numbered(1, 0, 1))
    for value in (3, 4, 9, 5):
        rig.push(0, wr.counter_write(1, 0, 256, value))
    rig.push(0, wr.counter_write(1, 0, 384, 1))  # another counter
    rig.push(0, wr.counter_write(2, 0, 256, 6))  # another peer
    rig.push(0, numbered(1, 0, 2))
    wait_until(lambda: rig.freed(0) == 8)
    wait_until(lambda: rig.transport.on((2, 0)))
    wait_until(lambda: rig.proxy.statistics().most_parked == 4)
    assert rig.proxy.statistics().replaced_counters == 3
    rig.transport.give_room((1, 0), 100)
    assert rig.proxy.drain(LIMIT_S)
    counters = [(r.counter, r.value) for r in rig.transport.on((1, 0))]
    assert counters == [(0, 1), (256, 9), (384, 1), (0, 2)]


def test_a_put_is_never_replaced(rig: Rig) -> None:
    rig.transport.room[1, 0] = 0
    for number in (1, 2, 3):
        rig.push(0, numbered(1, 0, number))
    wait_until(lambda: rig.freed(0) == 3)
    rig.transport.give_room((1, 0), 100)
    assert rig.proxy.drain(LIMIT_S)
    assert [r.value for r in rig.transport.on((1, 0))] == [1, 2, 3]


def test_statistics_count(rig: Rig) -> None:
    for number in range(10):
        rig.push(number % 3, numbered(1, 0, number))
    rig.proxy.submit(np.array([wr.counter_write(2, 1, 256, n) for n in (1, 2, 3)]))
    assert rig.proxy.drain(LIMIT_S)
    statistics = rig.proxy.statistics()
    assert (statistics.puts, statistics.put_bytes) == (10, 640)
    assert statistics.counter_writes == 3
    assert 2 <= statistics.posts <= 11
    assert statistics.refused == statistics.replaced_counters == 0
    assert statistics.most_parked == 0
    rig.push(0, numbered(1, 0, 10))
    assert rig.proxy.drain(LIMIT_S)
    assert statistics.puts == 10  # a copy
    assert rig.proxy.statistics().puts == 11


def test_what_was_refused_is_counted_once_as_posted(rig: Rig) -> None:
    rig.transport.room[1, 0] = 0
    rig.push(0, numbered(1, 0, 1))
    wait_until(lambda: rig.proxy.statistics().refused > 3)
    assert rig.proxy.statistics().puts == 0
    rig.transport.give_room((1, 0), 1)
    assert rig.proxy.drain(LIMIT_S)
    assert rig.proxy.statistics().puts == 1
    assert rig.proxy.statistics().put_bytes == 64


def test_drain_waits_for_parked_and_for_pending(rig: Rig) -> None:
    rig.transport.room[1, 0] = 0
    rig.push(0, numbered(1, 0, 1))
    assert not rig.proxy.drain(0.1)
    rig.transport.pending = 1
    rig.transport.give_room((1, 0), 1)
    assert not rig.proxy.drain(0.1)
    assert len(rig.transport.posted) == 1
    rig.transport.pending = 0
    assert rig.proxy.drain(LIMIT_S)
    # What is submitted just before is seen.
    for number in range(50):
        rig.proxy.submit(np.array([numbered(1, 1, number)]))
        assert rig.proxy.drain(LIMIT_S)
        assert len(rig.transport.on((1, 1))) == number + 1


def test_stop(rig: Rig) -> None:
    assert rig.proxy.stop()
    assert rig.proxy.stop()
    since = time.monotonic()
    assert not rig.proxy.drain(LIMIT_S)
    assert time.monotonic() - since < 1
    assert rig.told() == {}


def test_an_idle_proxy_sleeps(rig: Rig) -> None:
    """It takes no core while nothing happens, and wakes when a kernel rings."""
    rig.proxy.drain(LIMIT_S)
    rounds, used = rig.transport.polls, time.process_time()
    time.sleep(0.3)
    assert rig.transport.polls - rounds < 60
    assert time.process_time() - used < 0.15
    rig.push(0, numbered(1, 0, 1))
    wait_until(lambda: rig.transport.posted)


# The proxy and aborts.


def test_an_abort_reaches_every_peer_once(rig: Rig) -> None:
    rig.proxy.abort(wr.ABORT_CANCELLED, 0)
    wait_until(lambda: len(rig.told()) == 3)
    assert rig.told() == dict.fromkeys((1, 2, 3), (wr.ABORT_CANCELLED, 0))
    rig.proxy.abort(wr.ABORT_DEAD, 2)
    assert rig.abort() == (wr.ABORT_CANCELLED, 0)  # the first cause stays
    time.sleep(0.05)
    rig.told()


def test_a_peers_abort_is_folded_into_the_local_word_and_passed_on(rig: Rig) -> None:
    write_word(int(rig.words.from_peers[2]), wr.abort_value(wr.ABORT_TIMEOUT, 3))
    wait_until(lambda: rig.abort()[0])
    assert rig.abort() == (wr.ABORT_TIMEOUT, 3)
    wait_until(lambda: len(rig.told()) == 3)


def test_a_kernels_abort_is_passed_on(rig: Rig) -> None:
    write_word(rig.words.local, wr.abort_value(wr.ABORT_TIMEOUT, 1))
    wait_until(lambda: len(rig.told()) == 3)
    assert rig.told()[2] == (wr.ABORT_TIMEOUT, 1)


@pytest.mark.parametrize("why", ["a parked request", "a completion that never comes"])
def test_aborts_are_heard_while_the_proxy_has_work(rig: Rig, why: str) -> None:
    """The queue to a peer that hangs stays full: just then somebody aborts."""
    if why == "a parked request":
        rig.transport.room[1, 1] = 0
        rig.push(0, numbered(1, 1, 1))
        wait_until(lambda: rig.freed(0) == 1)
    else:
        rig.transport.pending = 1
    time.sleep(0.05)
    write_word(int(rig.words.from_peers[2]), wr.abort_value(wr.ABORT_TIMEOUT, 3))
    wait_until(lambda: rig.abort() == (wr.ABORT_TIMEOUT, 3))
    wait_until(lambda: set(rig.told()) >= {2, 3})


def test_an_own_abort_is_told_while_the_proxy_has_work(rig: Rig) -> None:
    rig.transport.room[1, 1] = 0
    rig.push(0, numbered(1, 1, 1))
    wait_until(lambda: rig.freed(0) == 1)
    time.sleep(0.05)
    rig.proxy.abort(wr.ABORT_CANCELLED, 0)
    wait_until(lambda: set(rig.told()) == {1, 2, 3})


def test_an_abort_waits_for_room_in_a_full_queue(rig: Rig) -> None:
    """It must not be lost where queue 0, which carries it, is full just then."""
    rig.transport.room[2, 0] = 0
    rig.proxy.abort(wr.ABORT_CANCELLED, 0)
    wait_until(lambda: set(rig.told()) >= {1, 3})
    time.sleep(0.05)
    rig.transport.give_room((2, 0), 1)
    wait_until(lambda: set(rig.told()) == {1, 2, 3})


def test_an_abort_just_before_stop_is_told(rig: Rig) -> None:
    rig.proxy.abort(wr.ABORT_CANCELLED, 0)
    assert rig.proxy.stop()
    assert set(rig.told()) == {1, 2, 3}


@pytest.mark.parametrize("has_work", [False, True])
def test_a_dead_peer_is_an_abort_that_names_it(rig: Rig, has_work: bool) -> None:
    if has_work:
        rig.transport.room[2, 0] = 0
        rig.push(0, numbered(2, 0, 1))
    rig.transport.dead.add(2)
    wait_until(lambda: rig.abort()[0])
    assert rig.abort() == (wr.ABORT_DEAD, 2)
    wait_until(lambda: set(rig.told()) >= {1, 3})


def test_a_peer_that_has_said_farewell_may_go(rig: Rig) -> None:
    write_word(int(rig.words.farewells[2]), 1)
    rig.transport.dead.add(2)
    time.sleep(0.7)
    assert rig.abort()[0] == 0


@pytest.mark.parametrize(
    ("error", "culprit"),
    [(TransportError("queue pair in error", 2), 2), (ZeroDivisionError("a bug"), 0)],
)
def test_an_error_of_the_transport_is_an_abort(
    rig: Rig, error: Exception, culprit: int
) -> None:
    rig.transport.fails = error
    rig.push(0, numbered(1, 0, 1))
    wait_until(lambda: rig.abort()[0])
    assert rig.abort() == (wr.ABORT_TRANSPORT, culprit)
    assert rig.proxy.error is error
    # It goes on serving: kernels that still push must not find the FIFO full.
    for number in range(3 * DEPTH):
        rig.push(0, numbered(1, 0, number))
    wait_until(lambda: rig.freed(0) == 3 * DEPTH + 1)
    assert rig.proxy.drain(LIMIT_S)


# A Buffer over faulty transports.


def test_delayed_transport_is_out_of_order_across_queues_alone() -> None:
    inner = FakeTransport(2)
    delayed = DelayedTransport(inner, seed=3, delay_s=0.02)
    requests = [numbered(1, queue, n) for n in range(20) for queue in range(3)]
    assert not len(delayed.post(np.array(requests)))
    wait_until(lambda: delayed.poll() == 0)
    assert inner.posted != requests
    for queue in range(3):
        assert [r.value for r in inner.on((1, queue))] == list(range(20))


def test_delayed_transport_refuses_as_the_contract_says() -> None:
    inner = FakeTransport(3)
    delayed = DelayedTransport(inner, delay_s=0, depth=2)
    requests = [numbered(peer, 0, n) for n in range(4) for peer in (1, 2)]
    assert delayed.post(np.array(requests)).tolist() == [4, 5, 6, 7]
    assert delayed.poll() == 0
    assert delayed.post(np.array(requests[4:])).tolist() == []


SMALL_RINGS = Config(4, 1, 2, 1, 2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_random_delays(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    monkeypatch.setattr(transport, "create", Wrapping(DelayedTransport, seed=1))
    config = Config(4, 3, 6, 3, 6)
    run_case(Case([13, 0, 40, 7][:num_ranks], 64, 2, 8, config), repeats=4)
    run_case(Case([13, 0, 40, 7][:num_ranks], 64, 2, 8, config), 4, barriers=False)


def test_c03_credit_of_the_operation_before_comes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads take up to 5 ms, the next operation starts at once."""

    def slow(rank: int, entry: np.ndarray) -> float:
        is_head = entry[wr.OPCODE] == wr.COUNTER
        return float(rng.random() ** 2 * 5e-3) if is_head else 0.0

    rng = np.random.default_rng(3)
    monkeypatch.setattr(transport, "create", Wrapping(DelayedTransport, slow=slow))
    tokens, repeats = ([64, 64], 200) if LONG else ([16, 16], 25)
    case = Case(tokens, 64, 2, 8, Config(2, 1, 2, 1, 2))
    run_case(case, repeats, barriers=False)


def test_c03_shapes_change_while_credit_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same with rings laid out anew: other chunk, capacity, channels and hidden."""
    wrapped = Wrapping(DelayedTransport, seed=5, delay_s=4e-3)
    monkeypatch.setattr(transport, "create", wrapped)
    cases = [
        Case([17, 5, 9], 64, 2, 6, Config(4, 1, 2, 1, 2)),
        Case([3, 21, 8], 256, 3, 6, Config(2, 3, 9, 3, 9)),
        Case([10, 10, 1], 8, 1, 3, Config(6, 2, 5, 2, 5)),
    ]
    answers = [answer(case, turn) for turn, case in enumerate(cases * 4)]

    def program(group: Any) -> None:
        buffer = make_buffer(group, *cases)
        for case, want in zip(cases * 4, answers, strict=True):
            round_trip(buffer, case, want)
        buffer.destroy()

    spawn_ranks(program, 3)


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_c04_a_rank_is_slow_to_read_what_notify_left(
    monkeypatch: pytest.MonkeyPatch, slow_rank: int
) -> None:
    """The others are in the next operation long before."""

    def sleepy(buffer: Any) -> None:
        if buffer.rank == slow_rank:
            results, read = buffer._endpoint.results, buffer._endpoint.results.words

            def late(operation: int) -> np.ndarray:
                time.sleep(0.03)
                return read(operation)

            monkeypatch.setattr(results, "words", late)

    case = Case([64, 64], 64, 2, 8, Config(2, 2, 4, 2, 4))
    run_case(case, 4, barriers=False, before=sleepy)
    # Without rows for each other only the exchange of rows holds them together.
    run_case(case._replace(num_tokens=[0, 0]), 4, barriers=False, before=sleepy)


@pytest.mark.parametrize("delay_s", [0.0, 2e-4])
def test_c05_no_row_of_poison(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    """Many chunks through small rings that are 0xFF before each operation."""
    if delay_s:
        wrapped = Wrapping(DelayedTransport, seed=2, delay_s=delay_s)
        monkeypatch.setattr(transport, "create", wrapped)
    tokens = (4096 if LONG else 1500) // (4 if delay_s else 1)
    case = Case([tokens, tokens], 2048, 1, 8, Config(4, 4, 8, 4, 8))
    answers = [answer(case, turn) for turn in range(2)]

    def program(group: Any) -> None:
        buffer = make_buffer(group, case)
        for turn in range(100 if LONG else 4):
            group.Barrier()
            poison(buffer)
            group.Barrier()
            got = dispatch(buffer, case, answers[turn % 2])
            group.Barrier()
            poison(buffer)
            group.Barrier()
            sums, _, _ = buffer.combine(got[0], got[2], got[1], config=case.config)
            expected = answers[turn % 2].combined[buffer.rank][0]
            assert sums.tobytes() == expected.tobytes()
        buffer.destroy()

    spawn_ranks(program, 2)


@pytest.mark.parametrize("depth", [1, 4])
def test_c58_tiny_send_queues(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Requests are parked most of the time."""
    wrapped = Wrapping(DelayedTransport, seed=4, delay_s=5e-4, depth=depth)
    monkeypatch.setattr(transport, "create", wrapped)
    parked: list[Statistics] = []
    answers = [answer(Case([64, 30, 0, 64], 64, 3, 8, SMALL_RINGS), t) for t in (0, 1)]
    case = Case([64, 30, 0, 64], 64, 3, 8, SMALL_RINGS)

    def program(group: Any) -> None:
        buffer = make_buffer(group, case)
        for want in answers:
            round_trip(buffer, case, want)
        parked.append(buffer.statistics())
        buffer.destroy()

    spawn_ranks(program, 4)
    if depth == 1:
        assert all(statistics.most_parked for statistics in parked)


def test_statistics_of_a_round_trip() -> None:
    """Every chunk is one put of its rows' bytes, and every row exchange one a peer."""
    case = Case([13, 5, 0, 9], 64, 2, 8, Config(4, 2, 4, 2, 4))
    want, ranks, channels = answer(case), 4, 2
    slots = [slot_bytes(128, 0, 2), slot_bytes(128, 0, 0) + 16]
    found: dict[int, tuple[Statistics, int]] = {}

    def program(group: Any) -> None:
        buffer = make_buffer(group, case)
        round_trip(buffer, case, want)
        buffer._endpoint.proxy.drain(LIMIT_S)
        found[buffer.rank] = buffer.statistics(), buffer._endpoint.comm.row_bytes
        buffer.destroy()

    spawn_ranks(program, 4)
    for rank, (statistics, row_bytes) in found.items():
        puts = put_bytes = 0
        for there, slot in zip(("out", "back"), slots, strict=True):
            for peer in set(range(ranks)) - {rank}:
                src, dst = (rank, peer) if there == "out" else (peer, rank)
                tokens = case.num_tokens[src]
                chosen = want.inputs[src].is_token_in_rank[:, dst]
                for channel in range(channels):
                    stop = tokens * (channel + 1) // channels
                    rows = int(chosen[tokens * channel // channels : stop].sum())
                    puts += -(-rows // 2)
                    put_bytes += rows * slot
        puts += 2 * (ranks - 1)
        put_bytes += 2 * (ranks - 1) * row_bytes
        assert (statistics.puts, statistics.put_bytes) == (puts, put_bytes)


class Failing(Wrapped):
    """On one rank: a queue to rank 2 breaks for good, or a bug shows once."""

    def __init__(self, inner: Any, on_rank: int, error: Exception, method: str) -> None:
        super().__init__(inner)
        self._error = error
        self._calls_left = {method: 3} if self.rank == on_rank else {}

    def _fail(self, method: str, touches_rank_2: bool) -> None:
        left = self._calls_left.get(method, -1)
        self._calls_left[method] = max(left - 1, 0) if left >= 0 else -1
        if left == 0 and touches_rank_2:
            if not isinstance(self._error, TransportError):
                self._calls_left = {}
            raise self._error

    def post(self, batch: np.ndarray) -> np.ndarray:
        self._fail("post", bool((batch[:, wr.PEER] == 2).any()))
        return super().post(batch)

    def poll(self) -> int:
        self._fail("poll", True)
        return super().poll()


@pytest.mark.parametrize("method", ["post", "poll"])
@pytest.mark.parametrize(
    ("error", "culprit"),
    [(TransportError("queue pair to rank 2 failed", 2), 2), (MemoryError("a bug"), 0)],
)
def test_a_failing_transport_ends_the_buffer_everywhere_and_names_the_rank(
    monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, culprit: int
) -> None:
    wrapped = Wrapping(Failing, on_rank=0, error=error, method=method)
    monkeypatch.setattr(transport, "create", wrapped)
    case = Case([40, 40, 40], 64, 2, 6, SMALL_RINGS, timeout_s=20)
    since = time.monotonic()
    errors = run_case(case, catch=BufferAborted, barriers=False)
    assert time.monotonic() - since < 10
    assert [type(e) for e in errors] == [BufferAborted] * 3
    assert [e.culprit for e in errors if isinstance(e, BufferAborted)] == [culprit] * 3
    assert str(error) in str(errors[0])


class Silent(Wrapped):
    """Loses some of what is posted, as a link that is down would."""

    def __init__(self, inner: Any, loses: Callable[[int, np.ndarray], bool]) -> None:
        super().__init__(inner)
        self._loses = loses

    def post(self, batch: np.ndarray) -> np.ndarray:
        kept = batch[[not self._loses(self.rank, entry) for entry in batch]]
        if len(kept):
            self.inner.post(kept)
        return np.empty(0, np.int64)


def test_a_lost_request_ends_in_a_timeout_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything from rank 1 to rank 2 is lost, aborts too: rank 0 passes them on."""

    def lost(rank: int, entry: np.ndarray) -> bool:
        return rank == 1 and int(entry[wr.PEER]) == 2

    monkeypatch.setattr(transport, "create", Wrapping(Silent, loses=lost))
    case = Case([40, 40, 40], 64, 2, 6, SMALL_RINGS, timeout_s=0.5)
    since = time.monotonic()
    errors = run_case(case, catch=BufferAborted, barriers=False)
    assert time.monotonic() - since < 4
    assert all(isinstance(error, PeerTimeout) for error in errors)
    # Rank 2 waits for rank 1's row, the others a moment later for rank 2's data; on a
    # busy machine either wait may be the first to end. Everybody names a rank that was
    # waited for, and nobody names rank 0.
    causes = Counter(e.culprit for e in errors if isinstance(e, BufferAborted))
    assert sum(causes.values()) == 3 and set(causes) <= {1, 2}, errors
    assert any("waited 0.5 s for rank" in str(error) for error in errors), errors
