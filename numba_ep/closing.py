"""How one rank's end of a Buffer is released; nothing here is collective."""

from __future__ import annotations

import sys
from typing import Any

from transport import wr


def close_locally(
    proxy: Any, network: Any, runtime: Any, at_close: list[Any], keep_memory: bool
) -> None:
    """Release one rank's own things; no peer is asked."""
    for function in at_close:
        function()
    stopped = proxy.stop()
    runtime.close()
    # Memory that the thread or a peer may still write to is left to the process's end.
    network.close(keep_memory=keep_memory or not stopped)


def leave(
    rank: int, proxy: Any, network: Any, runtime: Any, at_close: list[Any]
) -> None:
    """The Buffer is dropped, or the process ends, without destroy: not collective.

    Peers that wait for this rank hear of it. If the process ends by an exception, it
    leaves without MPI's collective end, to which a failed job may never come, and tells
    them so; else they have to join it there.
    """
    failed = getattr(sys, "last_value", None) is not None
    # What this rank's kernels asked for, peers may still need.
    proxy.drain(timeout_s=1.0)
    proxy.abort(wr.ABORT_DEAD if failed else wr.ABORT_LEFT, rank)
    close_locally(proxy, network, runtime, at_close, keep_memory=True)
    if failed:
        leave_mpi_alone()


def leave_mpi_alone() -> None:
    """A peer may be dead: where MPI runs, its finalisation would end or hang us too."""
    if "mpi4py.MPI" in sys.modules:
        from numba_ep.group import leave_without_mpi

        leave_without_mpi()
