"""Bytes, peers and queues under numba_ep. Knows nothing of tokens."""

from __future__ import annotations

import threading

from transport.base import MemoryRegion, Transport, TransportError

__all__ = ["TRANSPORTS", "MemoryRegion", "Transport", "TransportError", "create"]

TRANSPORTS = ("shm", "verbs")
_importing = threading.Lock()


def create(
    name: str, rank: int, num_ranks: int, receive_bytes: int, send_bytes: int,
    on_gpu: bool = False, num_queues: int = 1, host_bytes: int = 0,
) -> Transport:  # fmt: skip
    """Make this rank's end of transport `name` with regions of the given sizes.

    on_gpu: what is sent is packed by a GPU. num_queues: to each peer. host_bytes: of
    the receive region's beginning, for words that the host reads; they lie in its
    memory even where the rest does not. Raises ValueError for an unknown name, OSError
    where memory cannot be had, TransportError where a device is missing.
    """
    if name == "shm" and on_gpu:
        from transport.shm_cuda import CopyEngineTransport

        return CopyEngineTransport(rank, num_ranks, receive_bytes, send_bytes)
    if name == "shm":
        from transport.shm import SharedMemoryTransport

        return SharedMemoryTransport(rank, num_ranks, receive_bytes, send_bytes)
    if name == "verbs":
        # A thread that imports what is failing in another one finds half a module.
        with _importing:
            from transport.verbs import VerbsTransport

            gpu = None
            if on_gpu:
                from transport.verbs_cuda import Gpu

                gpu = Gpu()
        return VerbsTransport(
            rank, num_ranks, receive_bytes, send_bytes, num_queues, gpu, host_bytes
        )
    raise ValueError(
        f"transport: expected one of {', '.join(TRANSPORTS)}, got {name!r}"
    )
