"""What a proxy has posted so far, for people and tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transport import wr
from transport.jit import host


@dataclass
class Statistics:
    """Counts since the start; bytes are data bytes, counters not included."""

    puts: int = 0
    put_bytes: int = 0
    counter_writes: int = 0
    posts: int = 0
    refused: int = 0
    replaced_counters: int = 0
    most_parked: int = 0
    idle_waits: int = 0


def with_counts(statistics: Statistics, counts: Any) -> Statistics:
    """A copy of `statistics` with what was counted while posting."""
    names = ("puts", "put_bytes", "counter_writes", "posts", "idle_waits")
    return replace(statistics, **dict(zip(names, counts.tolist())))


# Words of what is counted while posting.
PUTS, PUT_BYTES, COUNTER_WRITES, POSTS, IDLE_WAITS = range(5)
NUM_COUNTS = 5


@host.jit
def count(batch: Any, counts: Any) -> None:
    """Add what `batch` posts to puts, bytes put and counters written alone."""
    for i in range(batch.shape[0]):
        if batch[i, wr.OPCODE] == wr.PUT:
            counts[PUTS] += 1
            counts[PUT_BYTES] += batch[i, wr.NUM_BYTES]
        else:
            counts[COUNTER_WRITES] += 1
