"""Step 2 of the ladder: one thread a rank, and each sees only its own tokens.

Two things are new. Ranks tell each other how many rows will come, so that a source
knows where its rows begin at each destination: this is notify. And a source writes into
the destination's memory, which the destination has opened to it: this is an RDMA write.

What is wrong with it on a network: a card writes only into memory that it knows, and
the array made for every dispatch would have to be registered every time; and everyone
waits for the slowest before anybody may read its first row.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def dispatch(
    group: Any, windows: list[np.ndarray | None], x: np.ndarray, in_rank: np.ndarray
) -> np.ndarray:
    """Rows that this rank receives, ordered by (source rank, token).

    windows: by rank, shared by all; the array that a rank has opened to the others.
    """
    rank = group.Get_rank()
    counts = np.array(group.allgather(in_rank.sum(axis=0)))  # [source, destination]
    received = np.empty((counts[:, rank].sum(), x.shape[1]), x.dtype)
    windows[rank] = received
    group.Barrier()  # nobody writes before the window is open
    first = counts[:rank].sum(axis=0)  # rows of the sources before this one
    for dst_rank in range(group.Get_size()):
        packed = x[in_rank[:, dst_rank]]
        window = windows[dst_rank]
        assert window is not None
        window[first[dst_rank] : first[dst_rank] + len(packed)] = packed
    group.Barrier()  # nobody reads before all have written
    return received
