"""The work request: what a kernel asks the proxy to post, eight words and a commit
word.

A request of opcode PUT is two writes on one queue, in this order: `num_bytes` from
`source` of the sender's send region to `destination` of the peer's receive region, then
the 64-bit `value` to `counter` of the peer's receive region. COUNTER is the second
alone. All offsets are bytes from the start of their region; no field is packed or
narrowed.
"""

from __future__ import annotations

from typing import NamedTuple

PUT = 1
COUNTER = 2

LINE_BYTES = 128  # every polled word has a line of its own

# Word positions within an entry.
OPCODE, PEER, QUEUE, SOURCE, DESTINATION, NUM_BYTES, COUNTER_AT, VALUE = range(8)
NUM_FIELDS = 8
COMMIT = 8  # sequence number + 1, written last
ENTRY_BYTES = LINE_BYTES  # no two entries share a line


class WorkRequest(NamedTuple):
    """One work request as the host sees it (bytes, and offsets in bytes)."""

    opcode: int
    peer: int
    queue: int
    source: int
    destination: int
    num_bytes: int
    counter: int
    value: int


def put(
    peer: int, queue: int, source: int, destination: int, num_bytes: int,
    counter: int, value: int,
) -> WorkRequest:  # fmt: skip
    """Data, then its counter."""
    return WorkRequest(
        PUT, peer, queue, source, destination, num_bytes, counter, value
    )


def counter_write(peer: int, queue: int, counter: int, value: int) -> WorkRequest:
    """A counter alone, as an absolute value."""
    return WorkRequest(COUNTER, peer, queue, 0, 0, 0, counter, value)


# Why a Buffer died. An abort word is 0, or cause * 2**32 + culprit rank + 1.
ABORT_TIMEOUT = 1
ABORT_DEAD = 2
ABORT_TRANSPORT = 3
ABORT_CANCELLED = 4
ABORT_LEFT = 5
ABORT_CAUSE = 1 << 32


def abort_value(cause: int, culprit: int) -> int:
    """The abort word for `cause` with `culprit` (a rank, or -1 for nobody)."""
    return cause * ABORT_CAUSE + culprit + 1


def abort_parts(value: int) -> tuple[int, int]:
    """(cause, culprit) of an abort word."""
    return value // ABORT_CAUSE, value % ABORT_CAUSE - 1
