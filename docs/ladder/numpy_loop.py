"""Step 1 of the ladder: what dispatch is, as a loop that sees all ranks at once.

There are no ranks yet, only their arrays: who receives what, and in which order.
"""

from __future__ import annotations

import numpy as np


def dispatch(x: list[np.ndarray], in_rank: list[np.ndarray]) -> list[np.ndarray]:
    """Rows that every rank receives, ordered by (source rank, token).

    x: by rank, [num_tokens, hidden]. in_rank: by rank, [num_tokens, num_ranks] bool.
    """
    num_ranks = len(x)
    received = []
    for dst_rank in range(num_ranks):
        num_rows = sum(int(goes[:, dst_rank].sum()) for goes in in_rank)
        rows = np.empty((num_rows, x[0].shape[1]), x[0].dtype)
        next_row = 0
        for src_rank in range(num_ranks):
            for token in range(len(x[src_rank])):
                if in_rank[src_rank][token, dst_rank]:
                    rows[next_row] = x[src_rank][token]
                    next_row += 1
        received.append(rows)
    return received
