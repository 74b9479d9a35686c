"""Threads that run a grid on the CPU, for the cpu and the python targets.

A launch runs every (block, warp) as one thread of a persistent pool and returns when
all have ended; starting threads for each launch would cost 50-60 us apiece. A grid of
one may run on the thread that launches it: nobody has to be woken.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from numba_ep.device.memory import Memory

BLOCK, WARP, NUM_BLOCKS, NUM_WARPS, BARRIER, BELL, PROXY_BELL, HEARD = range(8)
LINE_WORDS = 16
ALIGNMENT = 128


def identity_block(
    block: int, warp: int, blocks: int, warps: int, bells: tuple[int, int]
) -> Any:
    """What a kernel's thread can ask about itself; room for a barrier word behind."""
    words = np.zeros(2 * LINE_WORDS, np.int64)
    words[:HEARD] = block, warp, blocks, warps, 0, *bells
    return words


class _Launch:
    """One grid under way: who is still running, and the first error."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.lock = threading.Lock()
        self.done = threading.Lock()
        self.done.acquire()
        self.error: BaseException | None = None

    def end_of_one(self, error: BaseException | None) -> bool:
        """Returns whether this warp is the first that failed."""
        with self.lock:
            is_first = error is not None and self.error is None
            self.error = self.error or error
            self.left -= 1
            last = self.left == 0
        if last:
            self.done.release()
        return is_first


class Runtime:
    """One Buffer's threads and memory.

    num_threads: to begin with; it grows. uses_caller: whether a grid of one may run on
    the caller's thread.
    """

    synchronous = True  # a launch has ended when `launch` returns

    def __init__(
        self, name: str, num_threads: int, set_identity: Callable[[int], None],
        uses_caller: bool = False,
    ) -> None:  # fmt: skip
        self._name, self._set_identity = name, set_identity
        self._uses_caller = uses_caller
        self._queues: list[queue.SimpleQueue[Any]] = []
        self._grids: dict[tuple[int, int], list[np.ndarray]] = {}
        # What these threads hear, and what the proxy hears: see transport/atomics.py.
        self.bells = (0, 0)
        # What makes the other warps of a launch leave when one fails or Ctrl-C comes.
        self.abort: Callable[[], None] = lambda: None
        self._grow(num_threads)

    def _grow(self, num_threads: int) -> None:
        for i in range(len(self._queues), num_threads):
            jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
            threading.Thread(
                target=self._serve, args=(jobs,), name=f"{self._name} warp {i}",
                daemon=True,
            ).start()  # fmt: skip
            self._queues.append(jobs)

    def launch(
        self, kernel: Any, blocks: int, warps: int, args: tuple[Any, ...]
    ) -> None:
        """Run `kernel(*args)` as blocks x warps threads; raises their first error."""
        # Ctrl-C comes to the main thread alone, and only while no kernel runs there.
        if threading.current_thread() is threading.main_thread():
            self._launch_on_pool(kernel, blocks, warps, args)
        else:
            self.launch_local(kernel, blocks, warps, args)

    def launch_local(
        self, kernel: Any, blocks: int, warps: int, args: tuple[Any, ...]
    ) -> None:
        """`launch` for a kernel that waits for nobody."""
        if blocks * warps > 1 or not self._uses_caller:
            self._launch_on_pool(kernel, blocks, warps, args)
            return
        (identity,) = self._identities(blocks, warps)
        self._set_identity(identity.ctypes.data)
        try:
            kernel(*args)
        finally:
            self._set_identity(0)

    def _launch_on_pool(
        self, kernel: Any, blocks: int, warps: int, args: tuple[Any, ...]
    ) -> None:
        identities = self._identities(blocks, warps)
        self._grow(len(identities))
        launch = _Launch(len(identities))
        for jobs, identity in zip(self._queues, identities):
            jobs.put((launch, kernel, identity, args))
        try:
            launch.done.acquire()
        except BaseException:
            self.abort()
            launch.done.acquire()  # kernels leave in good order, within a moment
            raise
        if launch.error is not None:
            raise launch.error

    def _identities(self, blocks: int, warps: int) -> list[np.ndarray]:
        grid = (blocks, warps)
        if grid not in self._grids:
            # The barrier's word of a block lies in the identity block of its warp 0.
            identities = []
            for block in range(blocks):
                first = identity_block(block, 0, blocks, warps, self.bells)
                for warp in range(warps):
                    word = first.ctypes.data + 8 * LINE_WORDS
                    own = first if warp == 0 else identity_block(
                        block, warp, blocks, warps, self.bells
                    )  # fmt: skip
                    own[BARRIER] = word
                    identities.append(own)
            self._grids[grid] = identities
        return self._grids[grid]

    def _serve(self, jobs: queue.SimpleQueue[Any]) -> None:
        while (job := jobs.get()) is not None:
            launch, kernel, identity, args = job
            error: BaseException | None = None
            try:
                self._set_identity(identity.ctypes.data)
                kernel(*args)
            except BaseException as caught:  # noqa: BLE001 (raised by `launch`)
                error = caught
            del kernel, args, job
            if launch.end_of_one(error):
                self.abort()

    def allocate(self, num_bytes: int) -> Memory:
        """Zeroed memory that kernels may use."""
        raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        host = raw[start : start + num_bytes]
        return Memory(host.ctypes.data, num_bytes, host, raw)

    allocate_host = allocate  # a GPU's memory is another; here it is all one

    def fill(self, address: int, num_bytes: int, byte: int, stream: int) -> None:
        """Set user memory to a byte, before this returns."""
        ctypes.memset(address, byte, num_bytes)

    def register(self, address: int, num_bytes: int) -> int:
        """Where kernels find the host's memory at `address`."""
        return address

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Nothing to wait for: `launch` has waited."""
        return True

    def close(self) -> None:
        """End the threads."""
        for jobs in self._queues:
            jobs.put(None)
        self._queues = []
