"""Step 4 of the ladder: the real kernel, through the API.

What was one loop of one thread is four roles, each a warp or more, and a host thread:

    sender                row -> slot where there is credit    kernels/sender.py
    sender coordinator    a full chunk -> the host's queue     kernels/sender.py
    (proxy)               posts data, then tail                transport/proxy.py
    receiver              slot below tail -> row               kernels/dispatch.py
    receiver coordinator  returns credit                       kernels/receiver.py

So packing, sending and unpacking of different chunks go on at once, and nobody but the
proxy knows how bytes travel. Tokens are cut into channels with rings and roles of their
own; on a CPU a block has one warp, which plays two roles in turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import numba_ep


def open_buffer(group: Any, hidden_bytes: int, config: numba_ep.Config) -> Any:
    """A Buffer whose rings are as large as `config` says; to be used by `with`."""
    num_bytes = config.get_rdma_buffer_size_hint(hidden_bytes, group.Get_size())
    numba_ep.Buffer.set_num_sms(config.num_sms)
    return numba_ep.Buffer(group, num_rdma_bytes=num_bytes, device="cpu")


def dispatch(
    buffer: Any, config: numba_ep.Config, x: np.ndarray, in_rank: np.ndarray,
    num_tokens_per_expert: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Rows that this rank receives, ordered by (source rank, token)."""
    received, *_ = buffer.dispatch(
        x,
        num_tokens_per_rank=in_rank.sum(axis=0, dtype=np.int32),
        is_token_in_rank=in_rank,
        num_tokens_per_expert=num_tokens_per_expert,
        config=config,
    )
    return np.asarray(received)
