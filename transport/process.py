"""Whether the process of a peer on the same host still runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, as its peers know it: `started` in clock ticks, `boot` of its host."""

    pid: int
    started: str
    boot: str

    def is_visible(self) -> bool:
        """Whether it runs on this host and in this PID namespace.

        One that is not visible cannot be watched: never call it dead.
        """
        return self.boot == _boot() and _started(self.pid) == self.started

    def has_ended(self) -> bool:
        """Whether a process that was visible has ended or is a zombie."""
        return self.pid != os.getpid() and _started(self.pid) != self.started


def own_process() -> Process:
    """This process."""
    return Process(os.getpid(), _started(os.getpid()) or "", _boot())


def _started(pid: int) -> str | None:
    """A living process's start in clock ticks; None if it ended or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # The command's name is in parentheses and may hold anything.
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
