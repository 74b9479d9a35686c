"""What the proxy posted and when, for a trace: a ring of rows, one a request."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from transport import wr
from transport.jit import host

# Words of a row; times are CLOCK_MONOTONIC's, in ns. The requests of one batch are
# posted by one call and share its times. DONE: `NUM_BYTES` is not bytes but the number
# of requests whose completion was seen at END, not before START.
START, END, OPCODE, PEER, QUEUE, COUNTER_AT, VALUE, NUM_BYTES = range(8)
NUM_WORDS = 8
DONE = 0


@host.jit
def _append(rows: Any, made: int, batch: Any, start: int, end: int) -> int:
    for i in range(batch.shape[0]):
        row = rows[made % rows.shape[0]]
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
        made += 1
    return made


class PostLog:
    """Filled by the proxy's thread alone. rows: [capacity, NUM_WORDS] int64."""

    def __init__(self, capacity: int) -> None:
        # Not np.zeros, whose pages come when they are first touched.
        self.rows = np.full((capacity, NUM_WORDS), 0, np.int64)
        self.made = _append(self.rows, 0, np.empty((0, wr.NUM_FIELDS), np.int64), 0, 0)
        self._new = 0  # posted since the last poll
        self._under_way = 0  # at the last poll, and when that was
        self._last_poll_ns = 0

    def posted(self, batch: np.ndarray, start_ns: int) -> None:
        """`batch` has just been posted by a call that began at `start_ns`."""
        end_ns = time.monotonic_ns()
        self.made = _append(self.rows, self.made, batch, start_ns, end_ns)
        self._new += len(batch)

    def polled(self, under_way: int) -> None:
        """The transport has just said how many requests are under way."""
        done = self._under_way + self._new - under_way
        # What has ended with its post, as a copy by the CPU does, needs no row more.
        if done > 0 and (self._under_way or under_way):
            row = [self._last_poll_ns, time.monotonic_ns(), DONE, -1, -1, 0, 0, done]
            self.rows[self.made % len(self.rows)] = row
            self.made += 1
        if self._under_way or under_way:
            self._last_poll_ns = time.monotonic_ns()
        self._under_way, self._new = under_way, 0

    def newest(self) -> np.ndarray:
        """A copy of the rows that are still here, oldest first."""
        kept = min(self.made, len(self.rows))
        return self.rows[np.arange(self.made - kept, self.made) % len(self.rows)]
