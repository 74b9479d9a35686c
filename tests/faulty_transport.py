"""A network at its worst that still keeps the ordering contract of `transport.base`.

    monkeypatch.setattr(transport, "create", Wrapping(FaultyTransport, faults=faults))

Everything is drawn from a seed. On one (peer, queue) puts land in the order in which
they were posted, and so do counters alone; else nothing is in order. A put's data lands
in pieces, the last one first as often as not; its counter comes later; a counter may be
written again, also with the value before, followed by the newest. Completions come
late, and queues are tiny. A rank may be cut off in the middle.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from faulty import Queue, Wrapped

from transport import wr
from transport.base import TransportError


@dataclass(frozen=True)
class Faults:
    """How bad it gets. Times are the longest ones, in seconds."""

    seed: int
    delay_s: float = 0.5e-3
    late_completion_s: float = 0.5e-3
    send_queue: int = 4  # requests of one queue that are under way
    completion_queue: int = 8  # requests of a rank whose completion was not reaped
    torn: float = 0.3  # share of puts whose data lands in pieces
    repeated: float = 0.2  # share of counters that are written again
    cut_rank: int = -1  # the rank that is cut off, or -1
    cut_after: int = 0  # requests that it posts before that
    cut_tells: bool = False  # whether its queues then fail, or are silent


class Step(NamedTuple):
    """At a time: bytes land, or a counter lands, or else the request completes."""

    due_s: float
    entry: wr.WorkRequest
    piece: tuple[int, int] | None = None  # first byte, and the one behind the last
    value: int | None = None  # what is written to the counter


class FaultyTransport(Wrapped):
    """Wraps the shm transport of one rank; all ranks are threads of this process."""

    cut_ranks: set[int]

    def __init__(self, inner: Any, faults: Faults, cut_ranks: set[int]) -> None:
        super().__init__(inner)
        self.faults, self.cut_ranks = faults, cut_ranks
        self._random = random.Random(faults.seed * 1000 + inner.rank)
        # By (peer, queue) and whether it is for counters alone: those overtake puts.
        self._lines: dict[tuple[Queue, bool], deque[Step]] = {}
        self._under_way: dict[Queue, int] = {}
        self._written: dict[tuple[int, int], int] = {}  # (peer, counter): last value
        self._num_posted = 0

    # What the proxy calls.

    def post(self, batch: np.ndarray) -> np.ndarray:
        self._complain()
        refused: list[int] = []
        full: set[Queue] = set()
        for position, values in enumerate(batch.tolist()):
            entry = wr.WorkRequest(*values)
            queue = entry.peer, entry.queue
            if queue in full or not self._has_room(queue):
                full.add(queue)
                refused.append(position)
                continue
            self._under_way[queue] = self._under_way.get(queue, 0) + 1
            line = queue, entry.opcode == wr.COUNTER
            self._lines.setdefault(line, deque()).extend(self._plan(line, entry))
            self._num_posted += 1
            is_cut = self.rank == self.faults.cut_rank
            if is_cut and self._num_posted > self.faults.cut_after:
                self.cut_ranks.add(self.rank)
        return np.array(refused, np.int64)

    def poll(self) -> int:
        self._complain()
        now, busy = time.monotonic(), False
        for (queue, _), line in self._lines.items():
            while line and line[0].due_s <= now and not self._is_cut(queue[0]):
                self._carry_out(queue, line.popleft())
                busy = True
        left = sum(self._under_way.values())
        if left and not busy:
            time.sleep(2e-5)  # leave the core to the kernels
        return left

    def close(self, keep_memory: bool = False) -> None:
        self._lines.clear()
        super().close(keep_memory)

    # What befalls a request.

    def _has_room(self, queue: Queue) -> bool:
        mine = self._under_way.get(queue, 0)
        # What goes to a rank that is cut off never completes, and holds nobody up.
        total = sum(n for q, n in self._under_way.items() if not self._is_cut(q[0]))
        return mine < self.faults.send_queue and total < self.faults.completion_queue

    def _later(self, longest_s: float) -> float:
        # Mostly short, now and then long: queues overtake each other.
        return longest_s * self._random.random() ** 3

    def _plan(self, key: tuple[Queue, bool], entry: wr.WorkRequest) -> list[Step]:
        line = self._lines.get(key)
        now = max(time.monotonic(), line[-1].due_s if line else 0.0)
        steps = []
        if entry.opcode == wr.PUT:
            for piece in self._pieces(entry.num_bytes):
                now += self._later(self.faults.delay_s)
                steps.append(Step(now, entry, piece=piece))
        now += self._later(self.faults.delay_s)
        steps.append(Step(now, entry, value=entry.value))
        word = entry.peer, entry.counter
        before = self._written.get(word)
        self._written[word] = entry.value
        if self._random.random() < self.faults.repeated:
            again = [entry.value] if before is None else [before, entry.value]
            for value in again:
                now += self._later(self.faults.delay_s)
                steps.append(Step(now, entry, value=value))
        now += self._later(self.faults.late_completion_s)
        return [*steps, Step(now, entry)]

    def _pieces(self, num_bytes: int) -> list[tuple[int, int]]:
        if num_bytes < 2 or self._random.random() >= self.faults.torn:
            return [(0, num_bytes)]
        middle = self._random.randrange(1, num_bytes)
        pieces = [(0, middle), (middle, num_bytes)]
        self._random.shuffle(pieces)
        return pieces

    def _carry_out(self, queue: Queue, step: Step) -> None:
        entry = step.entry
        if step.piece is not None:
            first, last = step.piece
            ctypes.memmove(
                int(self.inner._peers[entry.peer]) + entry.destination + first,
                self.send.address + entry.source + first,
                last - first,
            )
        elif step.value is not None:
            request = wr.counter_write(*queue, entry.counter, step.value)
            assert not len(self.inner.post(np.array([request], np.int64)))
        else:
            self._under_way[queue] -= 1

    # A rank that is cut off.

    def _is_cut(self, peer: int) -> bool:
        return self.rank in self.cut_ranks or peer in self.cut_ranks

    def _complain(self) -> None:
        """A NIC that notices: retries exceeded, on the first queue that has waited."""
        if not (self.faults.cut_tells and self.cut_ranks):
            return
        for (queue, _), line in self._lines.items():
            if line and self._is_cut(queue[0]):
                line.clear()
                self._under_way[queue] = 0
                peer = queue[0]
                raise TransportError(f"faulty: no answer from rank {peer}", peer)
