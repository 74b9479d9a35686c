"""The memory of a Buffer, laid out in one place: named regions and their offsets.

    receive region (peers write)   abort | farewell | tails | heads | row counters |
                                   probe | rows | receive rings
    send region (the NIC reads)    rows | send rings
    local (kernels, host)          state | cursors | FIFO tickets;  control;  FIFO

The host reads abort and farewell words, kernels the rest: where that lies in a GPU, the
two stay in host memory. Everything before the rings has a fixed size and place, equal
on all ranks. The rings take what `num_rdma_bytes` gives, one half at either end, and
are laid out anew by each operation. All arithmetic is Python's, so no size overflows.
"""

from __future__ import annotations

from numba_ep.config import MAX_EXPERTS
from numba_ep.kernels.records import LINE_BYTES, NUM_HEADER_WORDS

ALIGNMENT = LINE_BYTES


class MemoryMap:
    """Named regions one after the other, each aligned to a line of 128 bytes."""

    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.num_bytes = 0

    def add(self, name: str, num_bytes: int) -> MemoryMap:
        """Append a region."""
        self.offsets[name], self.sizes[name] = self.num_bytes, num_bytes
        self.num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return self

    def __getitem__(self, name: str) -> int:
        """Offset of a region in bytes."""
        return self.offsets[name]

    def __str__(self) -> str:
        rows = [f"{self[n]:>14,}  {s:>14,}  {n}" for n, s in self.sizes.items()]
        return "\n".join([f"{'offset':>14}  {'bytes':>14}  region", *rows])


def row_bytes(num_ranks: int, max_channels: int) -> int:
    """Bytes of one row: header, tokens a rank, rows a channel, rows a local expert."""
    local_experts = MAX_EXPERTS // num_ranks
    words = NUM_HEADER_WORDS + num_ranks + max_channels + local_experts
    return -(-8 * words // ALIGNMENT) * ALIGNMENT


def receive_map(num_ranks: int, max_channels: int, ring_bytes: int) -> MemoryMap:
    """The region that peers write. `probe`: counters of plain puts, when measuring."""
    counters = num_ranks * max_channels * LINE_BYTES
    rows = 2 * num_ranks * row_bytes(num_ranks, max_channels)
    return (
        MemoryMap()
        .add("abort", num_ranks * LINE_BYTES)
        .add("farewell", counters)
        .add("tails", counters)  # the host reads what is before, kernels the rest
        .add("heads", counters)
        .add("row counters", num_ranks * LINE_BYTES)
        .add("probe", num_ranks * LINE_BYTES)
        .add("rows", rows)
        .add("rings", ring_bytes)
    )


def send_map(num_ranks: int, max_channels: int, ring_bytes: int) -> MemoryMap:
    """The region that this rank's writes read from."""
    rows = 2 * num_ranks * row_bytes(num_ranks, max_channels)
    return MemoryMap().add("rows", rows).add("rings", ring_bytes)
