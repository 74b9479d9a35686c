"""The proxy: one thread a rank that posts what the kernels ask for.

    FIFO entry -> copied out, FIFO slot freed -> posted, or parked until its queue has
    room -> completion reaped

A request that its queue refuses is parked in a list of that queue alone: other queues
go on (a combine deadlocks otherwise), and order within the queue stays. The proxy runs
until `stop`, also after an abort, because its peers may still need to be told. It makes
no MPI call, ever. Where the transport's `serve` does these steps in compiled code
(service.py), they are left to it as long as nothing is parked.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import numpy as np

from transport import service, wr
from transport.atomics import read_word, ring, swap_word, wait_any
from transport.base import AbortWords, Transport, TransportError
from transport.fifo import FifoReader
from transport.post_log import NO_LOG, PostLog, log_polled, log_posted
from transport.service import REFUSED, UNTIL, WORKING
from transport.statistics import IDLE_WAITS, POSTS, Statistics, count, with_counts

LIVENESS_S = 0.25
# A peer that has ended may have finished the operation that this rank is still in, and
# all it posted is here: only who still waits after this time waits in vain.
GRACE_S = 0.5
WATCH_S = 1e-9 * service.WATCH_NS
LAST_WORDS_S = 0.5
DRAIN_POLL_S = 20e-6


class Proxy:
    """Drains `fifo` into `transport` from a thread of its own.

    bell: what kernels ring when they commit an entry; 0 where they cannot (on a GPU),
    and the thread polls.
    """

    def __init__(
        self, rank: int, transport: Transport, fifo: FifoReader, abort: AbortWords,
        bell: int = 0,
    ) -> None:  # fmt: skip
        self.rank, self._transport, self._fifo = rank, transport, fifo
        self._abort, self._bell = abort, bell
        self._peers = [p for p in range(len(abort.from_peers)) if p != rank]
        self._parked: dict[tuple[int, int], deque[np.ndarray]] = {}
        self._direct: deque[np.ndarray] = deque()
        self._stopped = False
        self._pokes = np.zeros(1, np.int64)  # counts reasons to look at once
        own_words = [abort.local, self._pokes.ctypes.data]
        # FIFOs, what the transport waits for, abort words, the proxy's own two.
        self._words = np.concatenate(
            [fifo.words, transport.words, abort.from_peers, np.array(own_words)]
        )
        self._first_own = len(fifo.words) + len(transport.words)
        self._work = service.make_work(self._words, self._first_own, bell)
        self._batch, self._seen = self._work.batch, self._work.seen
        self._state, self._counts = self._work.state, self._work.counts
        self._statistics = Statistics()
        self._untold = set(self._peers)
        self._next_watch = 0.0
        self._gone: tuple[float, int] | None = None  # when to give up, abort word
        self._watched = set(self._peers)
        self._next_liveness = time.monotonic() + LIVENESS_S
        self._last_poke = 0
        self._log = NO_LOG
        self.error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"numba_ep proxy {rank}", daemon=True
        )

    def start(self) -> None:
        """Begin to serve; before the first kernel runs anywhere."""
        self._thread.start()

    def submit(self, batch: np.ndarray) -> None:
        """Post `batch`, [n, NUM_FIELDS] int64, past the FIFOs, from any thread."""
        self._direct.append(np.ascontiguousarray(batch, np.int64))
        self._poke()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued, parked or under way; False on timeout."""
        deadline = time.monotonic() + timeout_s
        # In this order: what has left the queues is in the hands of a step, and a step
        # says that it works before it takes anything.
        while self._direct or not self._fifo.is_empty() or self._working:
            if time.monotonic() > deadline or not self._thread.is_alive():
                return False
            time.sleep(DRAIN_POLL_S)
        return self._thread.is_alive()

    def abort(self, cause: int, culprit: int) -> None:
        """End the Buffer here and at every peer; the first cause stays."""
        if self._stopped:
            return  # the word may be gone
        swap_word(self._abort.local, 0, wr.abort_value(cause, culprit))
        self._poke()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the thread; True once it has ended."""
        self._stopped = True
        self._poke()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def statistics(self) -> Statistics:
        """A copy of the counts, for people and tests."""
        return with_counts(self._statistics, self._counts)

    def record(self, log: PostLog | None) -> None:
        """Log what is posted from here on in `log`, or nothing."""
        self._log = NO_LOG if log is None else log.log
        self._poke()
        deadline = time.monotonic() + LAST_WORDS_S
        while self._work.log is not self._log and time.monotonic() < deadline:
            time.sleep(DRAIN_POLL_S)

    @property
    def _working(self) -> bool:
        """Whether requests are in the hands of a step, or under way."""
        return bool(self._state[WORKING])

    def _poke(self) -> None:
        """Have the thread look again, whether it polls or sleeps."""
        self._pokes[0] += 1
        ring(self._bell)

    # The thread.

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._step()
            except BaseException as error:  # noqa: BLE001 (ends the Buffer)
                self._fail(error)
        self._say_last_words()

    def _say_last_words(self) -> None:
        """Peers that still wait must hear of an abort that came with the stop."""
        deadline = time.monotonic() + LAST_WORDS_S
        while read_word(self._abort.local) and time.monotonic() < deadline:
            self._tell_peers()
            try:
                pending = self._transport.poll()
            except Exception:  # noqa: BLE001 (nobody is left to hear of it)
                return
            if not (pending or self._untold):
                return
            time.sleep(0.0001)

    def _step(self) -> None:
        # Read before anything is looked at: a later poke then ends the wait.
        self._last_poke = self._pokes[0]
        if self._work.log is not self._log:
            self._work = self._work._replace(log=self._log)
        serve = getattr(self._transport, "serve", None)
        if serve is not None and not (self._parked or self._direct or self.error):
            self._leave_to_transport(serve)
            return
        self._state[WORKING] = 1
        popped = self._fifo.pop(self._batch)
        if popped:
            self._post(self._batch[:popped])
        if popped == len(self._batch):
            ring(self._bell)  # a kernel may wait for room in the FIFO
        direct = len(self._direct)
        for _ in range(direct):
            self._post(self._direct.popleft())
        if self._parked:
            self._retry()
        pending = self._transport.poll()
        log_polled(self._log, pending)
        self._state[WORKING] = bool(self._parked or pending)
        if popped or direct or self._working:
            if time.monotonic() > self._next_watch:
                self._watch()
            if not (popped or direct):
                self._wait(service.PENDING_NS, 0)
        else:
            self._idle()

    def _leave_to_transport(self, serve: Any) -> None:
        """Turns of compiled code, until one needs what is here."""
        self._seen[-1] = self._last_poke
        self._state[REFUSED] = 0
        self._state[UNTIL] = time.monotonic_ns() + service.WATCH_NS
        serve(self._fifo.entries, self._work)
        refused = self._work.refused[: self._state[REFUSED]].tolist()
        for position in refused:
            self._park(self._batch[position])
        self._statistics.refused += len(refused)
        self._watch()

    def _watch(self) -> None:
        """Also while there is work: the queue to a peer that hangs stays full."""
        now = time.monotonic()
        self._next_watch = now + WATCH_S
        self._watch_aborts()
        if now > self._next_liveness:
            self._watch_peers()

    def _post(self, batch: np.ndarray) -> None:
        if self.error is not None:
            return
        if self._parked:
            # Order within a queue: behind its parked requests nothing may overtake.
            queues = batch[:, [wr.PEER, wr.QUEUE]].tolist()
            behind = np.array([tuple(queue) in self._parked for queue in queues])
            for entry in batch[behind]:
                self._park(entry)
            batch = batch[np.logical_not(behind)]
        if len(batch):
            self._offer(batch)

    def _offer(self, batch: np.ndarray) -> None:
        start_ns = time.monotonic_ns()
        refused = self._transport.post(batch)
        if len(refused):
            for position in refused:
                self._park(batch[position])
            self._statistics.refused += len(refused)
            batch = np.delete(batch, refused, axis=0)
        log_posted(self._log, batch, start_ns)
        self._counts[POSTS] += 1
        count(batch, self._counts)

    def _park(self, entry: np.ndarray) -> None:
        line = self._parked.setdefault(
            (int(entry[wr.PEER]), int(entry[wr.QUEUE])), deque()
        )
        if entry[wr.OPCODE] == wr.COUNTER:
            for earlier in line:
                same = earlier[wr.COUNTER_AT] == entry[wr.COUNTER_AT]
                if earlier[wr.OPCODE] == wr.COUNTER and same:
                    earlier[wr.VALUE] = max(earlier[wr.VALUE], entry[wr.VALUE])
                    self._statistics.replaced_counters += 1
                    return
        line.append(entry.copy())
        parked = sum(len(waiting) for waiting in self._parked.values())
        self._statistics.most_parked = max(self._statistics.most_parked, parked)

    def _retry(self) -> None:
        lines, self._parked = self._parked, {}
        if self.error is None:
            for line in lines.values():
                self._offer(np.stack(list(line)))

    def _idle(self) -> None:
        self._counts[IDLE_WAITS] += 1
        if self._gone is not None or time.monotonic() > self._next_liveness:
            self._watch()
        if self._wait(service.IDLE_NS, self._bell) >= self._first_own:
            self._watch()

    def _wait(self, timeout_ns: int, bell: int) -> int:
        """Until a FIFO or a word changes; which one, or -1."""
        fifos = len(self._fifo.words)
        self._words[:fifos] = self._fifo.words
        self._seen[:fifos] = self._fifo.seen
        self._seen[fifos : self._first_own] = self._transport.seen
        self._seen[-1] = self._last_poke
        return int(wait_any(self._words, self._seen, timeout_ns, bell))

    def _watch_aborts(self) -> None:
        for i in range(self._first_own, len(self._words) - 2):
            value = read_word(int(self._words[i]))
            if value != self._seen[i]:
                self._seen[i] = value
                if wr.abort_parts(value)[0] in (wr.ABORT_LEFT, wr.ABORT_DEAD):
                    self._set_gone(value)
                else:
                    swap_word(self._abort.local, 0, value)
        if self._gone is not None and time.monotonic() > self._gone[0]:
            swap_word(self._abort.local, 0, self._gone[1])
        self._seen[-2] = read_word(self._abort.local)
        if self._seen[-2]:
            self._tell_peers()

    def _watch_peers(self) -> None:
        self._next_liveness = time.monotonic() + LIVENESS_S
        for peer in list(self._watched):
            if self._transport.peer_is_dead(peer):
                self._watched.discard(peer)
                if read_word(int(self._abort.farewells[peer])):
                    continue  # it has left in good order
                self._set_gone(wr.abort_value(wr.ABORT_DEAD, peer))

    def _set_gone(self, value: int) -> None:
        if self._gone is None:
            self._gone = time.monotonic() + GRACE_S, value

    def _tell_peers(self) -> None:
        """Write the abort word to every peer, one at a time: some may be gone."""
        value = read_word(self._abort.local)
        for peer in list(self._untold) if value else []:
            request = wr.counter_write(peer, 0, self._abort.at_peers, value)
            try:
                if len(self._transport.post(np.array([request], np.int64))):
                    continue  # its queue is full: again at the next watch
            except Exception:  # noqa: BLE001 (that peer is gone, the next may not be)
                pass
            self._untold.discard(peer)

    def _fail(self, error: BaseException) -> None:
        peer = error.peer if isinstance(error, TransportError) else self.rank
        if peer not in (-1, self.rank) and read_word(int(self._abort.farewells[peer])):
            return  # it has all it needs and is gone: the last answer got lost
        if self.error is None:
            self.error = error
        swap_word(self._abort.local, 0, wr.abort_value(wr.ABORT_TRANSPORT, peer))
        self._parked.clear()
        self._tell_peers()
        time.sleep(0.001)  # an error that repeats must not burn a core
