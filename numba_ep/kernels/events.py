"""What a trace's records hold; kernels write them (tracing.py), numba_ep.trace reads.

Every warp has a ring of records of its own: a line with the number of records ever
made, then `Comm.trace_records` records. So no two warps share a word.
"""

from __future__ import annotations

from numba_ep.kernels.records import LINE_BYTES

# Words of a record. Times are the kernel's clock_ns. VALUE is absolute: a tail, a head
# or, in notify, the operation. COUNT is rows (tokens of a reduction).
KIND, CHANNEL, PEER, START, END, VALUE, COUNT, OPERATION = range(8)
RECORD_WORDS = 8
RECORD_BYTES = 8 * RECORD_WORDS

# Kinds of records: who makes them is in KINDS. Then those of the proxy, which
# numba_ep.trace makes from what the thread has logged.
(
    WAIT_CREDIT, PACK, WAIT_PACKED, PUBLISH, WAIT_TAIL, UNPACK, REDUCE, WAIT_READ,
    RETURN, SEND_ROW, WAIT_ROW, POST_CHUNK, POST_CREDIT, POST_ROW, POST_OTHER, COMPLETE,
) = range(16)  # fmt: skip

# By kind: the role, and what it did.
KINDS = (
    ("sender", "wait for credit"),
    ("sender", "pack"),
    ("sender coordinator", "wait for packed rows"),
    ("sender coordinator", "publish"),
    ("receiver", "wait for tail"),
    ("receiver", "unpack"),
    ("receiver", "reduce"),
    ("receiver coordinator", "wait for reads"),
    ("receiver coordinator", "return credit"),
    ("notify", "send row"),
    ("notify", "wait for row"),
    ("proxy", "post chunk"),
    ("proxy", "post credit"),
    ("proxy", "post row"),
    ("proxy", "post other"),
    ("proxy", "complete"),
)


def ring_bytes(records: int) -> int:
    """Bytes of one warp's ring."""
    return LINE_BYTES + records * RECORD_BYTES
