"""What the proxy posted and when, for a trace: a ring of rows, one a request."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from transport import wr
from transport.atomics import clock_ns
from transport.jit import host

# Words of a row; times are CLOCK_MONOTONIC's, in ns. The requests of one batch are
# posted by one call and share its times. DONE: `NUM_BYTES` is not bytes but the number
# of requests whose completion was seen at END, not before START.
START, END, OPCODE, PEER, QUEUE, COUNTER_AT, VALUE, NUM_BYTES = range(8)
NUM_WORDS = 8
DONE = 0


# Words of Log.state.
MADE, NEW, UNDER_WAY, LAST_POLL = range(4)


class Log(NamedTuple):
    """rows: [capacity, NUM_WORDS] int64; no rows: nobody records. state: [4] int64,
    rows ever made, requests posted since the last poll, those that were under way then,
    and when that was."""

    rows: np.ndarray
    state: np.ndarray


NO_LOG = Log(np.empty((0, NUM_WORDS), np.int64), np.zeros(4, np.int64))


@host.jit
def log_posted(log: Any, batch: Any, start: int) -> None:
    """`batch` has just been posted by a call that began at `start`."""
    rows, state = log
    if rows.shape[0] == 0:
        return
    end = clock_ns()
    for i in range(batch.shape[0]):
        row = rows[state[MADE] % rows.shape[0]]
        request = batch[i]
        row[START] = start
        row[END] = end
        row[OPCODE] = request[wr.OPCODE]
        row[PEER] = request[wr.PEER]
        row[QUEUE] = request[wr.QUEUE]
        row[COUNTER_AT] = request[wr.COUNTER_AT]
        row[VALUE] = request[wr.VALUE]
        is_put = request[wr.OPCODE] == wr.PUT
        row[NUM_BYTES] = request[wr.NUM_BYTES] if is_put else 0
        state[MADE] += 1
        state[NEW] += 1


@host.jit
def log_polled(log: Any, under_way: int) -> None:
    """The transport has just said how many requests are under way."""
    rows, state = log
    if rows.shape[0] == 0:
        return
    done = state[UNDER_WAY] + state[NEW] - under_way
    if state[UNDER_WAY] > 0 or under_way > 0:
        now = clock_ns()
        # What has ended with its post, as a copy by the CPU does, needs no row more.
        if done > 0:
            row = rows[state[MADE] % rows.shape[0]]
            row[:] = -1
            row[START], row[END], row[OPCODE] = state[LAST_POLL], now, DONE
            row[COUNTER_AT], row[VALUE], row[NUM_BYTES] = 0, 0, done
            state[MADE] += 1
        state[LAST_POLL] = now
    state[UNDER_WAY], state[NEW] = under_way, 0


class PostLog:
    """Filled by the proxy's thread alone; the newest `capacity` rows stay."""

    def __init__(self, capacity: int) -> None:
        # Not np.zeros, whose pages come when they are first touched.
        rows = np.full((capacity, NUM_WORDS), 0, np.int64)
        self.log = Log(rows, np.zeros(4, np.int64))
        log_posted(self.log, np.empty((0, wr.NUM_FIELDS), np.int64), 0)

    @property
    def made(self) -> int:
        """Rows ever made."""
        return int(self.log.state[MADE])

    def newest(self) -> np.ndarray:
        """A copy of the rows that are still here, oldest first."""
        rows, made = self.log.rows, self.made
        kept = min(made, len(rows))
        return np.asarray(rows[np.arange(made - kept, made) % len(rows)])
