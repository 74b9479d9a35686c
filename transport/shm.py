"""Ranks of one host without a NIC: POSIX shared memory, and a CPU copy plays the NIC.

Each rank's receive region is a file in /dev/shm that its peers map. A put is a `memcpy`
into the peer's mapping and then a release store of the counter, so the ordering
contract of `transport.base` holds by construction: there is one queue of instructions.

The file exists by name only until every rank has mapped it. Should a rank be killed in
that window, the next job on the host removes what it left: the owner holds a lock on
its file for as long as it lives, and a file whose lock is free has no owner.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transport import wr
from transport.atomics import (
    BELL_BYTES,
    clock_ns,
    copy_bytes,
    ring_bell,
    store_release,
    stream_fence,
)
from transport.base import NO_WORDS, MemoryRegion, TransportError
from transport.fifo import Entries
from transport.jit import host
from transport.process import Process, own_process
from transport.service import Work, goes_on, posted, take

FOLDER = Path("/dev/shm")
PREFIX = "numba_ep-"
NONE_REFUSED = np.empty(0, np.int64)


class Card(NamedTuple):
    """What a peer needs: the file to map, and the process to watch."""

    path: str
    receive_bytes: int
    process: Process


@host.jit
def _post(batch, peers, bells, send, written):
    """Carry out the writes of `batch` in order. Bounds were checked by the caller.

    written: [num_ranks] zeros, and so again at the end.
    """
    for i in range(batch.shape[0]):
        peer = batch[i, wr.PEER]
        base = peers[peer]
        if batch[i, wr.OPCODE] == wr.PUT:
            copy_bytes(
                base + batch[i, wr.DESTINATION],
                send + batch[i, wr.SOURCE],
                batch[i, wr.NUM_BYTES],
            )
            stream_fence()
        # Release: whoever sees the counter sees the data copied before it.
        store_release(base + batch[i, wr.COUNTER_AT], 0, batch[i, wr.VALUE])
        written[peer] = 1
    for peer in range(peers.shape[0]):
        if written[peer]:
            written[peer] = 0
            ring_bell(bells[peer])


@host.jit
def _serve(entries, work, peers, bells, send, written):
    """Turns of the proxy's work, see service.py."""
    going = True
    while going:
        popped = take(entries, work)
        if popped > 0:
            since = clock_ns()
            _post(work.batch[:popped], peers, bells, send, written)
            posted(work, popped, 0, since)
        going = goes_on(entries, work, popped, 0)


class SharedMemoryTransport:
    """One rank's end; see `transport.base.Transport` for the meaning of each method."""

    name = "shm"
    details = "shared memory"

    def __init__(
        self, rank: int, num_ranks: int, receive_bytes: int, send_bytes: int
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        remove_files_without_owner()
        size = _bell_at(receive_bytes) + BELL_BYTES
        self._file, self._path = _create_file(size)
        try:
            self._maps: list[mmap.mmap] = [mmap.mmap(self._file, size)]
            self._maps.append(mmap.mmap(-1, max(send_bytes, 1)))
        except BaseException:
            self._forget_file()
            raise
        self.receive = MemoryRegion(_address(self._maps[0]), receive_bytes)
        self.landing = self.receive
        self.words = self.seen = NO_WORDS
        self.send = MemoryRegion(_address(self._maps[1]), send_bytes)
        self.bell = self.receive.address + _bell_at(receive_bytes)
        self._peers = np.zeros(num_ranks, np.int64)
        self._bells = np.zeros(num_ranks, np.int64)
        self._written = np.zeros(num_ranks, np.int64)
        self._watched: list[Process | None] = []

    def card(self) -> Card:
        """The file's path and this process."""
        return Card(str(self._path), self.receive.num_bytes, own_process())

    def connect(self, cards: list[Any]) -> None:
        """Map every peer's receive region. Raises TransportError if that fails."""
        for peer, card in enumerate(cards):
            if peer == self.rank:
                self._peers[peer], self._bells[peer] = self.receive.address, self.bell
                continue
            try:
                file = os.open(card.path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise TransportError(
                    f"shm: rank {self.rank} cannot open {card.path} of rank {peer} "
                    f"({error.strerror}); all ranks must run on one host, as one user, "
                    "and share one /dev/shm",
                    peer,
                ) from error
            try:
                bell_at = _bell_at(card.receive_bytes)
                self._maps.append(mmap.mmap(file, bell_at + BELL_BYTES))
            finally:
                os.close(file)
            self._peers[peer] = _address(self._maps[-1])
            self._bells[peer] = self._peers[peer] + bell_at
        self._watched = [c.process if c.process.is_visible() else None for c in cards]

    def connected(self) -> None:
        """Every rank has mapped the file: its name is no longer needed."""
        self._forget_file()

    def post(self, batch: np.ndarray) -> np.ndarray:
        """Carry out all writes; a CPU copy has no queue that could be full."""
        _post(batch, self._peers, self._bells, self.send.address, self._written)
        return NONE_REFUSED

    def serve(self, entries: Entries, work: Work) -> None:
        """Post what is in the FIFOs, until the proxy is needed (service.py)."""
        _serve(
            entries, work, self._peers, self._bells, self.send.address, self._written
        )

    def poll(self) -> int:
        """Writes are complete when `post` returns."""
        return 0

    def peer_is_dead(self, peer: int) -> bool:
        """Whether the peer's process has ended or is a zombie."""
        process = self._watched[peer]
        return process is not None and process.has_ended()

    def close(self, keep_memory: bool = False) -> None:
        """Unmap everything; with `keep_memory` only the file's name goes."""
        self._forget_file()
        if keep_memory:
            _kept.extend(self._maps)
        else:
            for mapping in self._maps:
                mapping.close()
        self._maps = []

    def _forget_file(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._path = None  # type: ignore[assignment]


# Mappings that a peer of this process may still write to after a failure.
_kept: list[mmap.mmap] = []


def _bell_at(receive_bytes: int) -> int:
    """The bell lies behind the receive region, on a line of its own."""
    return -(-receive_bytes // BELL_BYTES) * BELL_BYTES


def _address(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def _create_file(num_bytes: int) -> tuple[int, Path]:
    """A new, locked file of reserved pages; raises OSError where there is no room."""
    while True:
        path = FOLDER / f"{PREFIX}{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink == 0:
                raise BlockingIOError
            # Without reserved pages a full /dev/shm is a SIGBUS at some later store.
            os.posix_fallocate(file, 0, num_bytes)
            return file, path
        except BlockingIOError:
            # Not locked yet, it was taken for an orphan and is being removed.
            os.close(file)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(file)
            raise _no_room(num_bytes, error) from error


def _no_room(num_bytes: int, error: OSError) -> OSError:
    space = os.statvfs(FOLDER)
    return OSError(
        error.errno or errno.ENOSPC,
        f"shm: {num_bytes} bytes wanted in {FOLDER}, {space.f_bavail * space.f_frsize} "
        f"of {space.f_blocks * space.f_frsize} are free; give a smaller num_rdma_bytes "
        "or more shared memory (docker run --shm-size=...)",
    )


def remove_files_without_owner() -> None:
    """Remove files of this user that killed processes left in /dev/shm."""
    for path in FOLDER.glob(f"{PREFIX}{os.getuid()}-*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(file)
