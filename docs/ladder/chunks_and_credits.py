"""Step 3 of the ladder: rings of fixed size, filled a chunk at a time against credit.

A source and a destination share a ring of `capacity` slots, made once. The source may
write where there is credit and then raises `tail`; the destination may read below
`tail`, copies rows to the user's array and then raises `head`, which gives the credit
back. Whoever cannot go on with one peer goes on with the next: ranks that wait for each
other in a circle would wait for ever.

A thread plays sender and receiver in turn. In Python one store follows another;
compiled kernels and network cards must be told of the order: kernels/channel.py.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

LIMIT_S = 30.0


class Ring:
    """From one source to one destination.

    Two counters that only ever grow: rows below `tail` are written, below `head` read.
    """

    def __init__(self, capacity: int, hidden: int, dtype: Any) -> None:
        self.slots = np.empty((capacity, hidden), dtype)
        self.tail = self.head = 0

    def send(self, rows: np.ndarray, sent: int, chunk: int) -> int:
        """Write the next chunk of `rows` if there is credit; how many rows it has."""
        count = min(chunk, len(rows) - sent)
        credit = len(self.slots) - (self.tail - self.head)
        if credit < count:
            return 0
        slot = sent % len(self.slots)  # no chunk wraps: capacity is a multiple of it
        self.slots[slot : slot + count] = rows[sent : sent + count]
        self.tail += count  # data before tail
        return count

    def receive(self, out: np.ndarray, read: int, chunk: int) -> int:
        """Read what is there, at most a chunk, into `out`; how many rows it was."""
        count = min(chunk, self.tail - self.head, len(out) - read)
        slot = read % len(self.slots)
        out[read : read + count] = self.slots[slot : slot + count]
        self.head += count  # drained before reuse
        return count


def dispatch(
    group: Any, rings: list[list[Ring]], chunk: int, x: np.ndarray, in_rank: np.ndarray
) -> np.ndarray:
    """Rows that this rank receives, ordered by (source rank, token).

    rings: [source][destination], shared by all. Their capacity is a multiple of chunk.
    """
    rank, num_ranks = group.Get_rank(), group.Get_size()
    # Who has come here has read all its rows of the dispatch before: rings are empty.
    counts = np.array(group.allgather(in_rank.sum(axis=0)))  # [source, destination]
    received = np.empty((counts[:, rank].sum(), x.shape[1]), x.dtype)
    parts = np.split(received, np.cumsum(counts[:, rank])[:-1])  # by source
    rows = [x[in_rank[:, dst_rank]] for dst_rank in range(num_ranks)]
    sent, read = [0] * num_ranks, [0] * num_ranks
    left = sum(map(len, rows)) + len(received)
    deadline = time.monotonic() + LIMIT_S
    while left > 0:
        moved = 0
        for i in range(num_ranks):
            # Every rank begins with another peer, or all would send to rank 0 at once.
            peer = (rank + i) % num_ranks
            more = rings[rank][peer].send(rows[peer], sent[peer], chunk)
            sent[peer] += more
            came = rings[peer][rank].receive(parts[peer], read[peer], chunk)
            read[peer] += came
            moved += more + came
        left -= moved
        if moved == 0:
            time.sleep(0)  # let the others run
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank}: {left} rows are left")
    return received
