"""Bytes, peers and queues under numba_ep. Knows nothing of tokens."""

from __future__ import annotations

from transport.base import MemoryRegion, Transport, TransportError

__all__ = ["TRANSPORTS", "MemoryRegion", "Transport", "TransportError", "create"]

TRANSPORTS = ("shm",)


def create(
    name: str, rank: int, num_ranks: int, receive_bytes: int, send_bytes: int,
    on_gpu: bool = False,
) -> Transport:  # fmt: skip
    """Make this rank's end of transport `name` with regions of the given sizes.

    on_gpu: what is sent is packed by a GPU. Raises ValueError for an unknown name,
    OSError where memory cannot be had.
    """
    if name == "shm" and on_gpu:
        from transport.shm_cuda import CopyEngineTransport

        return CopyEngineTransport(rank, num_ranks, receive_bytes, send_bytes)
    if name == "shm":
        from transport.shm import SharedMemoryTransport

        return SharedMemoryTransport(rank, num_ranks, receive_bytes, send_bytes)
    raise ValueError(
        f"transport: expected one of {', '.join(TRANSPORTS)}, got {name!r}"
    )
