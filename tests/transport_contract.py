"""What every transport must do, as a class of tests over a factory.

    class TestShm(TransportContract):
        create = staticmethod(create_shm)

`create(rank, num_ranks, receive_bytes, send_bytes)` makes one end; a function of a
module, because other processes import it. Nothing here knows how a transport works:
only `transport.base.Transport` is used.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from transport import wr
from transport.atomics import load_acquire, read_word
from transport.jit import host

LIMIT_S = 20.0
LINE = 128
Create = Callable[[int, int, int, int], Any]


@contextmanager
def connected(
    create: Create, num_ranks: int, receive_bytes: int, send_bytes: int
) -> Iterator[list[Any]]:
    """All ends in this process; memory is 0xFF at first."""
    ends: list[Any] = []
    try:
        for rank in range(num_ranks):
            ends.append(create(rank, num_ranks, receive_bytes, send_bytes))
        # Cards travel between processes.
        cards = pickle.loads(pickle.dumps([end.card() for end in ends]))
        for end in ends:
            ctypes.memset(end.receive.address, 0xFF, receive_bytes)
            ctypes.memset(end.send.address, 0xFF, send_bytes)
            end.connect(cards)
        for end in ends:
            end.connected()
        yield ends
    finally:
        for end in ends:
            end.close()


def view(region: Any) -> np.ndarray:
    """A region's bytes, in place."""
    array = (ctypes.c_uint8 * region.num_bytes).from_address(region.address)
    return np.ctypeslib.as_array(array)


def post(end: Any, *requests: wr.WorkRequest) -> None:
    """Post all, again and again what is refused."""
    batch = np.array(requests, np.int64)
    deadline = time.monotonic() + LIMIT_S
    while len(batch):
        refused = end.post(batch)
        check_refusal(batch, refused)
        batch = batch[refused]
        end.poll()
        assert time.monotonic() < deadline, "the queues stay full"


def check_refusal(batch: np.ndarray, refused: np.ndarray) -> None:
    """Ascending, and after the first of a queue all later ones of that queue."""
    assert (np.diff(refused) > 0).all()
    keys = [(int(entry[wr.PEER]), int(entry[wr.QUEUE])) for entry in batch]
    gone = set(refused.tolist())
    for position in gone:
        later = range(position, len(keys))
        assert gone >= {i for i in later if keys[i] == keys[position]}


def finish(*ends: Any) -> None:
    """Until nothing is under way."""
    deadline = time.monotonic() + LIMIT_S
    while any([end.poll() for end in ends]):  # noqa: C419, all must be polled
        assert time.monotonic() < deadline, "requests never complete"


# Two ranks write to each other as fast as they can, with credit, as a Buffer does.

SLOTS, QUEUES = 4, 2


def load_bytes(size: int) -> int:
    """Bytes of the region that `hammer` needs at either end."""
    return QUEUES * (2 * LINE + SLOTS * (size + LINE))


def hammer(end: Any, peer: int, count: int, size: int) -> None:
    """Send `count` slots a queue and read as many; each is complete when announced."""
    stride, counters = size + LINE - size % 8, 2 * LINE * QUEUES
    received, sending = view(end.receive), view(end.send)
    deadline = time.monotonic() + LIMIT_S
    sent, seen = [0] * QUEUES, [0] * QUEUES

    def slot(queue: int, number: int) -> int:
        # An odd start for odd numbers: nothing says that data is aligned.
        return counters + (queue * SLOTS + number % SLOTS) * stride + number % 2

    while min(sent + seen) < count:
        assert time.monotonic() < deadline, (sent, seen)
        for queue in range(QUEUES):
            tail, head = 2 * LINE * queue, 2 * LINE * queue + LINE
            number = sent[queue] + 1
            heads = max(0, read_word(end.receive.address + head))
            if number <= count and number - heads <= SLOTS:
                at = slot(queue, number)
                sending[at : at + size] = number % 251
                post(end, wr.put(peer, queue, at, at, size, tail, number))
                sent[queue] = number
            tails = max(0, read_word(end.receive.address + tail))
            assert tails >= seen[queue], "a counter went back"
            for number in range(seen[queue] + 1, tails + 1):
                at = slot(queue, number)
                data = received[at : at + size]
                # The last byte first: it comes last where data come late.
                assert data[-1] == number % 251, f"{number}: announced before its data"
                assert (data == number % 251).all(), f"{number}: not whole"
                data[:] = 0xFF
            if tails > seen[queue]:
                seen[queue] = tails
                post(end, wr.counter_write(peer, queue, head, tails))
    finish(end)


ROW_WORDS = 4096


def _stale_words(counter: int, row: int, turns: int) -> int:
    """Words of `row` that were older than the counter seen just before."""
    stale = last = 0
    while last < turns:
        last = load_acquire(counter, 0)
        # Backwards: what was written last is the first to be missed.
        for i in range(ROW_WORDS - 1, -1, -1):
            if load_acquire(row, i) < last:
                stale += 1
    return stale


stale_words = host.jit(_stale_words, cache=False)


def serve_peer(create: Create, pipe: Any, count: int, size: int) -> None:
    """Rank 1 in a process of its own: hammer, then wait to be killed."""
    need = load_bytes(size)
    end = create(1, 2, need, need)
    ctypes.memset(end.receive.address, 0xFF, need)
    pipe.send(end.card())
    end.connect(pipe.recv())
    pipe.send("connected")
    pipe.recv()
    end.connected()
    hammer(end, 0, count, size)
    pipe.send("hammered")
    pipe.recv()


class TransportContract:
    """Subclass it as Test...; see the module's docstring."""

    create: Create

    # Order.

    def test_data_is_complete_when_its_counter_shows(self) -> None:
        size = 200_001
        regions = [load_bytes(size)] * 2
        pool = ThreadPoolExecutor(2)
        with connected(self.create, 2, *regions) as ends, pool:
            jobs = [pool.submit(hammer, e, 1 - e.rank, 150, size) for e in ends]
            for job in jobs:
                job.result(LIMIT_S)

    def test_a_queue_keeps_its_order(self) -> None:
        """Two counters of puts on a queue: the first is never behind the second."""
        turns = 3000
        with connected(self.create, 2, 4096, 4096) as (writer, reader):
            first, second = reader.receive.address, reader.receive.address + LINE

            def write() -> None:
                for turn in range(1, turns + 1, 3):
                    requests = []
                    for value in range(turn, turn + 3):
                        requests.append(wr.put(1, 0, 8, 1024, 8, 0, value))
                        requests.append(wr.put(1, 0, 8, 1024, 8, LINE, value))
                    post(writer, *requests)
                finish(writer)

            with ThreadPoolExecutor(1) as pool:
                job, last = pool.submit(write), 0
                while last < turns:
                    last = read_word(second)
                    assert read_word(first) >= last
                    if job.done():
                        job.result()
                        assert read_word(second) == turns
                job.result(LIMIT_S)

    def test_every_word_is_there_before_the_counter(self) -> None:
        """A reader that is as fast as it can be, against many small writes."""
        rows, rounds, row_bytes = 16, 600, 8 * ROW_WORDS
        size = rows * row_bytes
        with connected(self.create, 2, size, size) as (writer, reader):
            view(reader.receive)[:] = 0
            row, counter = reader.receive.address, reader.receive.address + row_bytes
            sent = view(writer.send).view(np.int64).reshape(rows, ROW_WORDS)

            def write() -> None:
                for first in range(0, rounds * rows, rows):
                    sent[:] = first + np.arange(1, rows + 1)[:, None]
                    requests = [
                        wr.put(
                            1, 0, i * row_bytes, 0, row_bytes, row_bytes, first + i + 1
                        )
                        for i in range(rows)
                    ]
                    post(writer, *requests)
                    finish(writer)

            stale_words(counter, row, 0)  # compile it
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(stale_words, counter, row, rounds * rows)
                write()
                assert job.result(LIMIT_S) == 0

    # What a request does, and what it leaves alone.

    def test_counters_are_absolute(self) -> None:
        with connected(self.create, 2, 4096, 4096) as (writer, reader):
            expected = view(reader.receive).copy()
            # A repeated and a late older value are written as they are: readers keep
            # the largest they have seen.
            for value in (5, 5, 2**62 + 1, 7, 0, -1, 3):
                post(writer, wr.counter_write(1, 0, 1024, value))
                finish(writer)
                expected[1024:1032] = np.array([value]).view(np.uint8)
                assert (view(reader.receive) == expected).all()

    @pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65, 4095, 4096, 9001])
    def test_exactly_the_bytes_asked_for(self, size: int) -> None:
        with connected(self.create, 2, 20_000, 20_000) as (writer, reader):
            data = np.random.default_rng(size).integers(0, 256, 20_000, np.uint8)
            view(writer.send)[:] = data
            expected = np.full(20_000, 0xFF, np.uint8)
            for number, (source, to) in enumerate([(0, 0), (3, 1001), (4099, 10_007)]):
                post(writer, wr.put(1, 0, source, to, size, 19_968, number + 1))
                expected[to : to + size] = data[source : source + size]
            finish(writer)
            expected[19_968:19_976] = np.array([3]).view(np.uint8)
            assert (view(reader.receive) == expected).all()
            assert (view(writer.send) == data).all()
            assert (view(writer.receive) == 0xFF).all()

    def test_many_peers(self) -> None:
        ranks, size = 9, 777
        regions = [ranks * (1024 + LINE), ranks * 1024]
        with connected(self.create, ranks, *regions) as ends:
            for end in ends:
                for peer in range(ranks):
                    view(end.send)[peer * 1024 :][:size] = end.rank * ranks + peer
                requests = [
                    wr.put(
                        peer, queue, peer * 1024, end.rank * 1024, size,
                        ranks * 1024 + end.rank * LINE, 10 + queue,
                    )
                    for queue in range(2)
                    for peer in range(ranks)
                    if peer != end.rank
                ]  # fmt: skip
                post(end, *requests)
            finish(*ends)
            for end in ends:
                for src in set(range(ranks)) - {end.rank}:
                    data = view(end.receive)[src * 1024 : (src + 1) * 1024]
                    assert (data[:size] == src * ranks + end.rank).all()
                    assert (data[size:] == 0xFF).all()
                    counter = end.receive.address + ranks * 1024 + src * LINE
                    # Two queues promise no order between them.
                    assert read_word(counter) in (10, 11)

    def test_offsets_beyond_32_bits_are_not_cut(self) -> None:
        """C47: every field of a request is a 64-bit word."""
        request = wr.put(31, 64, 2**33 + 1, 2**34 + 2, 2**32 + 3, 2**35 + 8, 2**62)
        batch = np.array([request], np.int64)
        assert wr.WorkRequest(*batch[0].tolist()) == request

    # Life and death.

    def test_regions_are_as_asked_for(self) -> None:
        with connected(self.create, 2, 4096, 0) as ends:
            for end in ends:
                assert end.receive.num_bytes == 4096
                assert end.send.num_bytes == 0
                assert end.receive.address % 64 == 0
                assert isinstance(end.name, str)

    def test_close_twice_and_before_connect(self) -> None:
        end = self.create(0, 2, 4096, 4096)
        end.close()
        end.close()
        with connected(self.create, 2, 4096, 4096) as ends:
            for end in ends:
                end.close()
                end.close(keep_memory=True)

    def test_keep_memory_keeps_it(self) -> None:
        """After a failure a peer or a kernel may still write what was not freed."""
        with connected(self.create, 2, 4096, 4096) as (kept, _):
            kept.close(keep_memory=True)
            ctypes.memset(kept.receive.address, 7, 4096)
            ctypes.memset(kept.send.address, 8, 4096)
            assert (view(kept.receive) == 7).all()
            assert (view(kept.send) == 8).all()

    def test_two_ranks_of_one_process_are_alive(self) -> None:
        with connected(self.create, 2, 4096, 4096) as ends:
            assert not ends[0].peer_is_dead(1)
            assert not ends[1].peer_is_dead(0)

    def test_another_process_hammers_and_is_killed(self) -> None:
        context, size, count = multiprocessing.get_context("spawn"), 50_001, 60
        pipe, other = context.Pipe()
        args = (self.create, other, count, size)
        child = context.Process(target=serve_peer, args=args, daemon=True)
        child.start()
        end = self.create(0, 2, *[load_bytes(size)] * 2)
        try:
            ctypes.memset(end.receive.address, 0xFF, end.receive.num_bytes)
            assert pipe.poll(LIMIT_S)
            cards = [end.card(), pipe.recv()]
            end.connect(cards)
            pipe.send(cards)
            assert pipe.poll(LIMIT_S)
            assert pipe.recv() == "connected"
            pipe.send("all are")
            end.connected()
            hammer(end, 1, count, size)
            assert pipe.poll(LIMIT_S)
            assert pipe.recv() == "hammered"
            assert not end.peer_is_dead(1)
            os.kill(child.pid or 0, signal.SIGSTOP)
            time.sleep(0.05)
            assert not end.peer_is_dead(1), "a stopped process may go on"
            os.kill(child.pid or 0, signal.SIGKILL)
            deadline = time.monotonic() + 3
            while not end.peer_is_dead(1):  # nobody has waited for it: a zombie
                assert time.monotonic() < deadline
                time.sleep(0.01)
            child.join(5)
            assert end.peer_is_dead(1)
        finally:
            child.kill()
            end.close()
