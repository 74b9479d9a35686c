"""Transports with faults and delays, and journeys of tokens through them.

    monkeypatch.setattr(transport, "create", Wrapping(DelayedTransport, seed=1))
    run_case(Case([13, 5], 64, 2, 8, Config(4, 1, 2, 2, 4)), repeats=2)

`run_case` sends every token of some in-process ranks out and back and compares each
array with `reference.py`, bit for bit.
"""

from __future__ import annotations

import ctypes
import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import transport
from numba_ep import Buffer, Config, device
from numba_ep import reference as ref
from numba_ep.spawn import spawn
from transport import wr
from transport.base import NO_WORDS, MemoryRegion
from transport.service import goes_on, posted, take

LIMIT_S = 30.0
NONE = np.empty(0, np.int64)
Queue = tuple[int, int]  # (peer, queue)


class Wrapped:
    """A transport that does what the one inside does; subclasses change a method."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.rank, self.name = inner, inner.rank, inner.name
        self.receive: MemoryRegion = inner.receive
        self.landing: MemoryRegion = inner.landing
        self.send: MemoryRegion = inner.send
        self.words: np.ndarray = inner.words
        self.seen: np.ndarray = inner.seen
        self.bell: int = inner.bell
        self.details: str = inner.details

    def card(self) -> Any:
        return self.inner.card()

    def connect(self, cards: list[Any]) -> None:
        self.inner.connect(cards)

    def connected(self) -> None:
        self.inner.connected()

    def post(self, batch: np.ndarray) -> np.ndarray:
        return self.inner.post(batch)

    def poll(self) -> int:
        return self.inner.poll()

    def peer_is_dead(self, peer: int) -> bool:
        return self.inner.peer_is_dead(peer)

    def close(self, keep_memory: bool = False) -> None:
        self.inner.close(keep_memory)


class DelayedTransport(Wrapped):
    """Carries each request out after a random time: in order within a queue alone.

    A NIC may read the source at any time before the completion; this one reads it at
    the end. delay_s: the longest delay. slow: the same for chosen requests, or None.
    depth: requests that a queue holds, 0 for any number; more are refused.
    """

    def __init__(
        self,
        inner: Any,
        seed: int = 0,
        delay_s: float = 1e-3,
        depth: int = 0,
        slow: Callable[[int, np.ndarray], float | None] = lambda rank, entry: None,
    ) -> None:
        super().__init__(inner)
        self._random = random.Random(seed * 1000 + inner.rank)
        self._delay_s, self._depth, self._slow = delay_s, depth, slow
        self._queues: dict[Queue, deque[tuple[float, np.ndarray]]] = {}
        self.num_out_of_order = 0
        self._last_posted = 0

    def post(self, batch: np.ndarray) -> np.ndarray:
        refused: list[int] = []
        now = time.monotonic()
        for position, entry in enumerate(batch):
            key = (int(entry[wr.PEER]), int(entry[wr.QUEUE]))
            line = self._queues.setdefault(key, deque())
            if self._depth and len(line) >= self._depth:
                refused.append(position)
                continue
            delay = self._slow(self.rank, entry)
            if delay is None:
                # Mostly short, now and then long: queues overtake each other.
                delay = self._delay_s * self._random.random() ** 3
            due = max(now + delay, line[-1][0] if line else 0.0)
            line.append((due, entry.copy()))
        return np.array(refused, np.int64)

    def poll(self) -> int:
        now, done = time.monotonic(), 0
        for line in self._queues.values():
            while line and line[0][0] <= now:
                self.deliver(line.popleft()[1])
                done += 1
        left = sum(len(line) for line in self._queues.values())
        if left and not done:
            time.sleep(2e-5)  # leave the core to the kernels
        return left + self.inner.poll()

    def deliver(self, entry: np.ndarray) -> None:
        """Carry out a request whose time has come."""
        assert not len(self.inner.post(entry[None]))

    def close(self, keep_memory: bool = False) -> None:
        self._queues.clear()
        super().close(keep_memory)


class FakeTransport:
    """Keeps what is posted, by queue, until the test takes it; writes nothing.

    room: requests that each queue still takes, by (peer, queue); any number if absent.
    """

    name, details, rank, bell = "fake", "", 0, 0

    def __init__(self, num_ranks: int, receive_bytes: int = 1 << 16) -> None:
        self._memory = np.zeros(receive_bytes, np.uint8)
        self.receive = MemoryRegion(self._memory.ctypes.data, receive_bytes)
        self.landing, self.send = self.receive, MemoryRegion(0, 0)
        self.words = self.seen = NO_WORDS
        self.room: dict[Queue, int] = {}
        self.posted: list[wr.WorkRequest] = []
        self.dead: set[int] = set()
        self.pending = 0
        self.fails: BaseException | None = None
        self.polls = 0
        self.lock = threading.Lock()

    def card(self) -> Any:
        return None

    def connect(self, cards: list[Any]) -> None:
        pass

    def connected(self) -> None:
        pass

    def post(self, batch: np.ndarray) -> np.ndarray:
        if self.fails is not None:
            raise self.fails
        refused: list[int] = []
        full: set[Queue] = set()
        with self.lock:
            for position, entry in enumerate(batch):
                request = wr.WorkRequest(*entry.tolist())
                key = (request.peer, request.queue)
                if key in full or self.room.get(key, 1) < 1:
                    full.add(key)
                    refused.append(position)
                    continue
                if key in self.room:
                    self.room[key] -= 1
                self.posted.append(request)
        return np.array(refused, np.int64)

    def poll(self) -> int:
        self.polls += 1
        return self.pending

    def peer_is_dead(self, peer: int) -> bool:
        return peer in self.dead

    def close(self, keep_memory: bool = False) -> None:
        pass

    def give_room(self, key: Queue, count: int) -> None:
        """Let a queue take `count` requests more."""
        with self.lock:
            self.room[key] = self.room.get(key, 0) + count

    def on(self, key: Queue) -> list[wr.WorkRequest]:
        """What was posted on one queue, in order."""
        with self.lock:
            return [r for r in self.posted if (r.peer, r.queue) == key]


class ServingTransport(FakeTransport):
    """The same for a proxy that leaves its turns to the transport."""

    def serve(self, entries: Any, work: Any) -> None:
        going = True
        while going:
            popped = take(entries, work)
            refused = self.post(work.batch[:popped]) if popped else NONE
            work.refused[: len(refused)] = refused
            if popped:
                posted(work, popped, len(refused), 0)
            going = goes_on(entries, work, popped, self.poll())


class Wrapping:
    """A `transport.create` whose transports are wrapped; `made` has them by rank."""

    def __init__(self, wrapper: Callable[..., Any], **options: Any) -> None:
        self._create, self._wrapper, self._options = transport.create, wrapper, options
        self.made: dict[int, Any] = {}

    def __call__(self, name: str, rank: int, *sizes: Any) -> Any:
        inner = self._create(name, rank, *sizes)
        self.made[rank] = self._wrapper(inner, **self._options)
        return self.made[rank]


# Journeys.


class Case(NamedTuple):
    """One shape of work: tokens by rank, and what all ranks have in common."""

    num_tokens: list[int]
    hidden: int
    num_topk: int
    num_experts: int
    config: Config
    max_channels: int = 0  # 0: as many as config has
    seed: int = 0
    timeout_s: float = LIMIT_S / 2


class Answer(NamedTuple):
    """What a case means: inputs, received rows and sums, each by rank."""

    inputs: list[ref.RankInput]
    received: list[ref.Received]
    combined: list[tuple[np.ndarray, np.ndarray | None]]


def answer(case: Case, turn: int = 0) -> Answer:
    """Every turn has other tokens and another routing."""
    seed, ranks = 1000 * case.seed + turn, len(case.num_tokens)
    inputs = []
    for rank, tokens in enumerate(case.num_tokens):
        topk = ref.random_topk(rank, tokens, case.num_topk, case.num_experts, seed)
        in_rank = ref.layout(topk[0], case.num_experts, ranks).is_token_in_rank
        x = ref.unique_rows(rank, tokens, case.hidden, ref.BF16, seed)
        inputs.append(ref.RankInput(x, None, in_rank, *topk))
    received = [ref.dispatch(inputs, rank, case.num_experts) for rank in range(ranks)]
    rows, weights = [r.x for r in received], [r.topk_weights for r in received]
    combined = [
        ref.combine(rows, received, rank, tokens, weights)  # type: ignore[arg-type]
        for rank, tokens in enumerate(case.num_tokens)
    ]
    return Answer(inputs, received, combined)


def assert_same(got: Any, expected: Any, what: str) -> None:
    """Equal in dtype, shape and every bit."""
    difference = ref.first_difference(got, expected)
    assert difference is None, f"{what}: {difference}"


def dispatch(buffer: Buffer, case: Case, want: Answer) -> tuple[Any, ...]:
    """Send this rank's tokens and check what it receives; (rows, weights, handle)."""
    mine, expected = want.inputs[buffer.rank], want.received[buffer.rank]
    layout = buffer.get_dispatch_layout(mine.topk_idx, case.num_experts)
    per_rank, _, per_expert, in_rank, _ = layout
    assert_same(in_rank, mine.is_token_in_rank, "is_token_in_rank")
    x, ids, weights, counts, handle, _ = buffer.dispatch(
        mine.x, None, per_rank, None, in_rank, per_expert, mine.topk_idx,
        mine.topk_weights, config=case.config,
    )  # fmt: skip
    who = f"rank {buffer.rank} received "
    assert_same(x, expected.x, who + "rows")
    assert_same(ids, expected.topk_idx, who + "ids")
    assert_same(weights, expected.topk_weights, who + "weights")
    assert counts == expected.num_recv_tokens_per_expert
    return x, weights, handle


def combine(buffer: Buffer, case: Case, want: Answer, got: tuple[Any, ...]) -> None:
    """Send the rows of `got` back and check the sums."""
    x, weights, handle = got
    sums, weight_sums, _ = buffer.combine(x, handle, weights, config=case.config)
    expected, expected_weights = want.combined[buffer.rank]
    assert_same(sums, expected, f"rank {buffer.rank} combined")
    assert_same(weight_sums, expected_weights, f"rank {buffer.rank} weights")


def round_trip(buffer: Buffer, case: Case, want: Answer) -> None:
    """Dispatch and combine, exact."""
    combine(buffer, case, want, dispatch(buffer, case, want))


def poison(buffer: Buffer, byte: int = 0xFF) -> None:
    """Fill both ends' rings with a byte; no operation may be under way anywhere."""
    endpoint = buffer._endpoint
    receive, _, send, _ = endpoint.rings()
    for rings in (receive, send):
        ctypes.memset(rings, byte, endpoint.ring_bytes)


@functools.cache
def compile_all() -> None:
    """Have every kernel: a compiler's time belongs into no test's limit."""
    from numba_ep.kernels import all_kernels

    for kernel, args in all_kernels():
        device.compile_kernel(kernel, args)


def spawn_ranks(program: Callable[[Any], Any], num_ranks: int) -> list[Any]:
    """`spawn` within LIMIT_S."""
    compile_all()
    return spawn(program, num_ranks, LIMIT_S)


def make_buffer(group: Any, *cases: Case) -> Buffer:
    """A Buffer large enough for every case."""
    ranks = len(cases[0].num_tokens)
    return Buffer(
        group,
        num_rdma_bytes=max(
            case.config.get_rdma_buffer_size_hint(2 * case.hidden, ranks, case.num_topk)
            for case in cases
        ),
        num_qps_per_rank=max(c.max_channels or c.config.num_channels for c in cases),
        timeout_s=cases[0].timeout_s,
    )


def run_case(
    case: Case,
    repeats: int = 2,
    catch: type[BaseException] | tuple[type[BaseException], ...] = (),
    barriers: bool = True,
    before: Callable[[Buffer], Any] = lambda buffer: None,
) -> list[BaseException | None]:
    """Round trips on in-process ranks; returns by rank the error of `catch`, if any.

    barriers: poison the rings before each turn, for which the ranks must meet. before:
    called with every new Buffer.
    """
    answers = [answer(case, turn) for turn in range(repeats)]

    def program(group: Any) -> BaseException | None:
        buffer = make_buffer(group, case)
        before(buffer)
        try:
            for turn, want in enumerate(answers):
                if barriers or turn == 0:
                    group.Barrier()
                    poison(buffer)
                    group.Barrier()
                round_trip(buffer, case, want)
        except catch as error:
            return error
        finally:
            buffer.destroy()
        return None

    return spawn_ranks(program, len(case.num_tokens))
