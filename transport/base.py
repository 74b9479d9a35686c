"""What a transport is: two regions of memory a rank, queues between ranks, writes.

Ordering contract, the only one the protocol relies on. On one (peer, queue)
* the counter of a put becomes visible at the peer only after its data, and after data
  and counters of all puts that were posted to that (peer, queue) before;
* counters written alone become visible in the order in which they were posted. They may
  overtake puts, and puts them.
Nothing is promised between queues or between peers. Counters are absolute values, so a
repeated or a late older write does no harm: readers keep the largest value they have
seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np


class MemoryRegion(NamedTuple):
    """Registered memory: its address and its size in bytes.

    on_gpu: whether it lies in a GPU; else it is this process's own, and kernels on a
    GPU need it pinned. words: where the host finds the beginning of a region on a GPU.
    """

    address: int
    num_bytes: int
    on_gpu: bool = False
    words: int = 0

    @property
    def host_address(self) -> int:
        """For the first `host_bytes`, which the host reads."""
        return self.words or self.address


NO_WORDS = np.empty(0, np.int64)


class TransportError(RuntimeError):
    """The transport failed: message names the peer and what usually causes it."""

    def __init__(self, message: str, peer: int = -1) -> None:
        super().__init__(message)
        self.peer = peer


class AbortWords(NamedTuple):
    """Where the words are that end a Buffer.

    local: address of the word that this rank's kernels check.
    from_peers: address of the word that each peer writes, [num_ranks] int64.
    at_peers: offset in every peer's receive region of the word for this rank.
    farewells: address of the word in which each peer says farewell, [num_ranks] int64.
    """

    local: int
    from_peers: np.ndarray
    at_peers: int
    farewells: np.ndarray


class Transport(Protocol):
    """One rank's end of the network. Every method is called from one thread at a time.
    One that posts from compiled code also has `serve`, see transport/service.py.

    receive: region that peers write, where the host sees it. landing: where puts come
    to lie, data and their counters, at the same offsets: this very region, or one in
    the GPU; counters written alone are in `receive`. send: region that this rank's
    writes read from.
    """

    name: str
    details: str  # the device, and where the regions lie; for people
    # What writes to this rank ring (`transport.atomics.ring_bell`), or 0: then its
    # waiting threads poll. They look now and then by themselves, rung or not.
    bell: int
    receive: MemoryRegion
    landing: MemoryRegion
    send: MemoryRegion
    # Addresses of words that peers change when there is something to do for `poll`, and
    # what the last one saw there: [n] int64 each.
    words: np.ndarray
    seen: np.ndarray

    def card(self) -> Any:
        """What peers need to reach this rank (keys, addresses): sent by allgather."""

    def connect(self, cards: list[Any]) -> None:
        """Make the queues to every peer from all ranks' cards, in rank order."""

    def connected(self) -> None:
        """Called once every rank has returned from `connect`."""

    def post(self, batch: np.ndarray) -> np.ndarray:
        """Start the writes of `batch`, [n, NUM_FIELDS] int64, in order.

        Returns the positions that were refused because their queue is full, ascending.
        Once one entry of a queue is refused, so are the later ones of that queue.
        Raises TransportError where a queue has failed.
        """

    def poll(self) -> int:
        """Reap completions, and do this rank's part of what peers have posted to it;
        returns how many posted requests are still under way."""

    def peer_is_dead(self, peer: int) -> bool:
        """True only where the transport knows that the peer's process has ended."""

    def close(self, keep_memory: bool = False) -> None:
        """Release everything in order. `keep_memory`: a peer may still write here."""
