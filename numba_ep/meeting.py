"""What the ranks of a new Buffer settle among themselves, by the communicator.

Every function is collective and ends in the same way on all ranks.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from numba_ep import device as devices
from numba_ep.group import Members


class Settings(NamedTuple):
    """What a Buffer is made with; `shared` fields must be equal on all ranks."""

    num_rdma_bytes: int
    max_channels: int
    timeout_s: float
    transport: str
    device: str | None

    def check(self) -> None:
        """Raise ValueError for what no Buffer can be made with."""
        if self.num_rdma_bytes < 0:
            raise ValueError(
                f"num_rdma_bytes: expected 0 or more, got {self.num_rdma_bytes}"
            )
        if self.max_channels < 1:
            raise ValueError(
                f"num_qps_per_rank: expected 1 or more, got {self.max_channels}"
            )
        if not self.timeout_s > 0:
            raise ValueError(
                f"timeout_s: expected a positive time, got {self.timeout_s}"
            )

    def shared(self) -> dict[str, Any]:
        """The fields that all ranks must agree on, by their public names."""
        return {
            "num_qps_per_rank": self.max_channels,
            "transport": self.transport,
            "device": devices.target(),
        }


@contextlib.contextmanager
def all_or_none(members: Members, what: str, undo: Any = None) -> Iterator[None]:
    """Collective: if the body fails on one rank, every rank raises."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 (raised below, after all know)
        error = caught
    texts = members.allgather(None if error is None else f"{error}")
    failed = [rank for rank, text in enumerate(texts) if text is not None]
    if failed and undo is not None:
        undo()
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"{what}: rank {failed[0]} failed: {texts[failed[0]]}")


def agree(members: Members, settings: Settings) -> None:
    """Collective: raise ValueError on every rank unless shared settings are equal."""
    everyone = members.allgather(settings.shared())
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise ValueError(
                    f"{name}: the ranks disagree: {everyone[0][name]!r} on rank 0, "
                    f"{value!r} on rank {rank}"
                )


def use_local_gpu(members: Members, device: Any) -> None:
    """Collective: each rank of a host takes another of its GPUs, counted round."""
    hosts = members.allgather(socket.gethostname())
    device.use_gpu(hosts[: members.rank].count(hosts[members.rank]))


def compile_kernels(
    members: Members, device: Any, processes: list[tuple[str, int]]
) -> None:
    """Have every kernel's machine code before the first wait of any rank.

    processes: host and pid of every rank. Raises ValueError where those of a process
    are too many for a GPU's hardware queues.

    A process or two a host compile, each its share, and the others then load what is in
    the cache: sixteen compilers at once on two cores take four times as long.
    """
    from numba_ep.kernels import all_kernels

    with all_or_none(members, "device"):
        devices.check_queues(processes.count(processes[members.rank]))
    host, own = processes[members.rank]
    here = dict.fromkeys(pid for name, pid in processes if name == host)
    compilers = list(here)[: min(2, os.cpu_count() or 1)]
    for i, (kernel, args) in enumerate(all_kernels()):
        # The two large kernels, which come last, go to different compilers.
        if compilers[i % len(compilers)] == own:
            device.compile_kernel(kernel, args)
    members.barrier()
    for kernel, args in all_kernels():
        device.compile_kernel(kernel, args)
    members.barrier()
