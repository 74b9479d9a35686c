"""The proxy's work for transports that post from compiled code.

A chunk then passes from FIFO to queue without the interpreter: the caller may hold its
lock meanwhile, as he does while he prepares the next call. A transport's `serve` is a
loop of turns,

    take -> its own post -> posted -> its own poll -> goes_on

that ends where Python is needed: something was refused, one of the proxy's own words
changed, time for a look at the peers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from transport import wr
from transport.atomics import clock_ns, ring_bell, wait_any
from transport.fifo import Entries, pop
from transport.jit import host
from transport.post_log import NO_LOG, Log, log_polled, log_posted
from transport.statistics import IDLE_WAITS, NUM_COUNTS, POSTS, count

BATCH = 64
IDLE_NS = 20_000_000
WATCH_NS = 1_000_000  # how often Python looks at the peers while there is work
# How long to leave the core to others before the next look at completions.
PENDING_NS = 50_000

# Words of Work.state.
WORKING = 0  # whether requests are in the hands of a turn, or under way
REFUSED = 1  # how many of the last batch
FIRST_OWN = 2  # of the words that are waited for, from here on they are Python's
BELL = 3
UNTIL = 4  # when to return while there is work
STATE_WORDS = 5


class Work(NamedTuple):
    """What a proxy and its turns share.

    batch: [n, NUM_FIELDS] requests of this turn. refused: [n] positions in it. words,
    seen: addresses of all words that are waited for, and what they held: the FIFOs',
    the transport's, the proxy's own. counts: see transport/statistics.py.
    """

    batch: np.ndarray
    refused: np.ndarray
    words: np.ndarray
    seen: np.ndarray
    counts: np.ndarray
    state: np.ndarray
    log: Log


def make_work(words: np.ndarray, first_own: int, bell: int) -> Work:
    """For a proxy that waits for `words`, its own from `first_own` on."""
    batch = np.empty((BATCH, wr.NUM_FIELDS), np.int64)
    state = np.zeros(STATE_WORDS, np.int64)
    state[FIRST_OWN], state[BELL] = first_own, bell
    return Work(
        batch, np.empty(BATCH, np.int64), words, np.zeros_like(words),
        np.zeros(NUM_COUNTS, np.int64), state, NO_LOG,
    )  # fmt: skip


@host.jit
def take(entries: Entries, work: Work) -> int:
    """Fill the batch from the FIFOs; how many."""
    # Before anything is taken: who drains the proxy looks at the FIFOs first.
    work.state[WORKING] = 1
    popped = pop(entries, work.batch)
    if popped == work.batch.shape[0]:
        ring_bell(work.state[BELL])  # a kernel may wait for room in the FIFO
    return popped


@host.jit
def posted(work: Work, popped: int, num_refused: int, since_ns: int) -> None:
    """A call that began at `since_ns` has posted the batch, but for the refused."""
    work.state[REFUSED] = num_refused
    work.counts[POSTS] += 1
    skipped = 0
    for i in range(popped):
        if skipped < num_refused and work.refused[skipped] == i:
            skipped += 1
        else:
            count(work.batch[i : i + 1], work.counts)
            log_posted(work.log, work.batch[i : i + 1], since_ns)


@host.jit
def goes_on(entries: Entries, work: Work, popped: int, pending: int) -> bool:
    """After a turn: wait for the next one; False where Python is needed."""
    state = work.state
    log_polled(work.log, pending)
    if state[REFUSED] > 0:
        return False
    state[WORKING] = pending > 0
    if popped > 0:
        return clock_ns() < state[UNTIL]
    for i in range(entries.words.shape[0]):
        work.words[i], work.seen[i] = entries.words[i], entries.seen[i]
    if pending > 0:
        changed = wait_any(work.words, work.seen, PENDING_NS, 0)
        return changed < state[FIRST_OWN] and clock_ns() < state[UNTIL]
    work.counts[IDLE_WAITS] += 1
    changed = wait_any(work.words, work.seen, IDLE_NS, state[BELL])
    state[UNTIL] = clock_ns() + WATCH_NS
    return 0 <= changed < state[FIRST_OWN]
