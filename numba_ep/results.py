"""What operations leave for the host, and who reads it when.

A call waits for its kernels, unless it has async_finish=True on a GPU: then the event's
wait or the next call reads whether the operation was refused.

It is the host that waits, not a stream of the caller's: the driver holds its lock while
a copy to pageable memory (an array's `.get()`, `.cpu()`) waits behind a kernel that has
not ended, and the proxy's thread could post nothing that this kernel is waiting for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ep.config import MAX_EXPERTS
from numba_ep.errors import refused
from numba_ep.kernels.records import (
    LINE_BYTES,
    RESULT_CULPRIT,
    RESULT_EXPECTED,
    RESULT_EXPERTS,
    RESULT_FIELD,
    RESULT_GOT,
    RESULT_OPERATION,
    RESULT_REFUSAL,
    RESULTS,
)
from transport.atomics import wait_any

WORD = 8
WAIT_NS = 20_000_000
ABOUT = (
    RESULT_OPERATION, RESULT_REFUSAL, RESULT_CULPRIT, RESULT_FIELD, RESULT_EXPECTED,
    RESULT_GOT,
)  # fmt: skip


class Results:
    """The results of a rank's latest operations.

    asynchronous: calls return before their kernels have ended. abort_at: address of the
    abort word.
    """

    def __init__(
        self, runtime: Any, num_ranks: int, asynchronous: bool, abort_at: int
    ) -> None:
        self.runtime, self.asynchronous = runtime, asynchronous
        words = RESULT_EXPERTS + MAX_EXPERTS // num_ranks
        self.result_bytes = -(-WORD * words // LINE_BYTES) * LINE_BYTES
        self.memory = runtime.allocate_host(RESULTS * self.result_bytes)
        self.num_operations = 0  # whose row kernel was launched
        self._words = self.memory.host.view(np.int64).reshape(RESULTS, -1)
        self._abort_at = abort_at
        # Operations whose verdict nobody has read: number, mark, arrays in use.
        self._unread: list[tuple[int, int, Any]] = []

    def words(self, operation: int) -> np.ndarray:
        """What the row kernel left: [..] int64, see RESULT_* in kernels/records.py.

        Waits for it, or until the Buffer aborts. Raises RefusedError.
        """
        words = self._words[operation % RESULTS]
        if self.asynchronous:
            watched = np.array([words.ctypes.data, self._abort_at])
            seen = np.array([words[RESULT_OPERATION], 0])
            while seen[0] != operation and wait_any(watched, seen, WAIT_NS, 0) < 1:
                seen[0] = words[RESULT_OPERATION]
        if words[RESULT_OPERATION] == operation and words[RESULT_REFUSAL]:
            raise refused(*(int(words[i]) for i in ABOUT))
        return words.copy()

    def leave(self, used: Any) -> int:
        """The operation's kernels are launched: its number, for `read_until`.

        used: what must live until they have ended.
        """
        self._unread.append((self.num_operations, self.runtime.mark(), used))
        return self.num_operations

    def read_until(self, operation: int) -> None:
        """Wait for all operations up to this one, raise what became of them."""
        while self._unread and self._unread[0][0] <= operation:
            number, mark, _ = self._unread[0]
            self.runtime.wait(mark)
            del self._unread[0]
            self.words(number)

    def read_earlier(self) -> None:
        """The same for operations that have ended, or must end now."""
        while self._unread:
            # The next operation but one would overwrite the oldest result.
            must_wait = len(self._unread) >= RESULTS - 1
            if not (must_wait or self.runtime.is_done(self._unread[0][1])):
                return
            self.read_until(self._unread[0][0])
