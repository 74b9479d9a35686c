"""Host end of the FIFOs through which kernels hand work requests to the proxy.

One FIFO a channel. A kernel reserves a sequence number, waits until the entry of
`depth` requests ago is free, fills the fields and writes the commit word last, with
release order. The host copies an entry out and frees it at once, so a request that
must wait for its queue never holds up the FIFO.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from transport import wr
from transport.atomics import load_acquire, store_release
from transport.jit import host
from transport.wr import LINE_BYTES


def fifo_bytes(num_fifos: int, depth: int) -> int:
    """Bytes of all entries and of the words that count the freed ones."""
    return num_fifos * (depth * wr.ENTRY_BYTES + LINE_BYTES)


class Entries(NamedTuple):
    """FIFOs as compiled code sees them; arrays have an element a FIFO."""

    base: int
    freed: int
    depth: int
    taken: np.ndarray
    # For `wait_any`: words that change when the next entry is committed.
    words: np.ndarray
    seen: np.ndarray


@host.jit
def pop(entries, batch):
    """Copy committed entries of all FIFOs to `batch`; returns how many."""
    base, freed, depth, taken, words, seen = entries
    count = 0
    for fifo in range(taken.shape[0]):
        first = base + fifo * depth * wr.ENTRY_BYTES
        sequence = taken[fifo]
        while count < batch.shape[0]:
            entry = first + (sequence % depth) * wr.ENTRY_BYTES
            # Acquire: the fields below were written before this word.
            if load_acquire(entry, wr.COMMIT) != sequence + 1:
                break
            for field in range(wr.NUM_FIELDS):
                batch[count, field] = load_acquire(entry, field)
            count += 1
            sequence += 1
            # Release: the kernel may overwrite the entry once it reads this.
            store_release(freed + fifo * LINE_BYTES, 0, sequence)
        taken[fifo] = sequence
        # What the next entry's commit word holds as long as nothing is committed there.
        words[fifo] = first + (sequence % depth) * wr.ENTRY_BYTES + 8 * wr.COMMIT
        seen[fifo] = sequence + 1 - depth if sequence >= depth else 0
    return count


@host.jit
def _is_empty(words, seen):
    """Whether no FIFO has a committed entry that was not taken."""
    for fifo in range(words.shape[0]):
        if load_acquire(words[fifo], 0) != seen[fifo]:
            return False
    return True


class FifoReader:
    """Takes committed work requests out of `num_fifos` FIFOs of `depth` entries.

    address: memory of `fifo_bytes(num_fifos, depth)` zeroed bytes, shared with kernels:
    the entries of every FIFO, then one freed-count word a FIFO on its own line.
    """

    def __init__(self, address: int, num_fifos: int, depth: int) -> None:
        self.address, self.depth = address, depth
        self.freed_address = address + num_fifos * depth * wr.ENTRY_BYTES
        taken, self.words, self.seen = np.zeros((3, num_fifos), np.int64)
        self.entries = Entries(
            address, self.freed_address, depth, taken, self.words, self.seen
        )
        self.pop(np.empty((0, wr.NUM_FIELDS), np.int64))

    def is_empty(self) -> bool:
        """Whether every committed entry was taken; any thread may ask."""
        return bool(_is_empty(self.words, self.seen))

    def pop(self, batch: np.ndarray) -> int:
        """Fill `batch`, [n, NUM_FIELDS] int64, from the front; returns the count."""
        return int(pop(self.entries, batch))
