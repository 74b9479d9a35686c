"""A piece of memory that kernels may use, as every target's Runtime hands it out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Memory(NamedTuple):
    """Where a kernel finds it, and how the host sees it (if the host can).

    address: what a kernel passes to load and store; 128-byte aligned.
    host: the host's view of the same bytes, [num_bytes] uint8, or None.
    keep: whatever must live as long as the memory is used.
    """

    address: int
    num_bytes: int
    host: np.ndarray | None
    keep: Any = None

    @property
    def host_address(self) -> int:
        """Where the host finds what kernels find at `address`."""
        assert self.host is not None
        return int(self.host.ctypes.data)
