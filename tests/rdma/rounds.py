"""One rank of a job that sends tokens round after round, whatever the network does.

    mpirun -np 3 tests/rdma/hosts on python tests/rdma/rounds.py plain:500 loss:30 cut

Each argument is what befalls the network, and for how many rounds:

    plain    nothing
    loss     a hundredth of all packets is lost
    noise    packets are lost, duplicated, corrupted and overtaken
    outage   host 1 is off the network for 0.3 s, in the middle of a dispatch
    cut      the same for good
    killed   rank 1 is killed in the middle of a dispatch

After `far` no rank sees whether another one's process lives, as on another host.

Every round has other tokens, and what comes out is compared bit for bit. Before each
operation a rank fills its receive rings with 0xFF while its peers are still at work: no
token may come before the rank has opened the operation. So a row that is read before
it has arrived is no row of any round. After `cut` and `killed` every rank must raise
before its waits end, name rank 1 (rank 1 itself: another one) and destroy its Buffer.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from faulty import Answer, Case, answer, combine, dispatch

import numba_ep
from numba_ep.errors import BufferAborted
from transport import process

HERE = Path(__file__).resolve().parent
NETEM = {
    "loss": "loss 1%",
    # 3 % of them are late.
    "noise": "loss 0.5% duplicate 2% corrupt 1% delay 2ms reorder 97%",
}
FAULTS = {"outage": "outage 1 0.3", "cut": "unplug 1"}
ENDS = ("cut", "killed")
CULPRIT = 1
TOKENS, HIDDEN, TOP_K, EXPERTS, ANSWERS = 24, 512, 4, 8, 8
CONFIG = numba_ep.Config(4, 4, 8, 4, 8)
TIMEOUT_S, NOTICED_S = 90.0, 45.0
FAULT_AT = 3  # round
FAULT_LIMIT_S = 30.0


def hosts(arguments: str) -> None:
    """Change the network."""
    command = [str(HERE / "hosts"), *arguments.split()]
    subprocess.run(command, check=True, timeout=FAULT_LIMIT_S)


def sent_bytes() -> int:
    """What this rank's host has sent over its interface; 0 where it has none."""
    device = os.environ.get("NUMBA_EP_IB_DEVICE", "")
    interface = device.replace("host", "eth")
    path = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    return int(path.read_text()) if device else 0


def say(text: str) -> None:
    """A line in one piece, whoever else prints."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Job:
    """One rank's Buffer and the rounds on it."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, ranks = group, group.Get_rank(), group.Get_size()
        self.case = Case([TOKENS] * ranks, HIDDEN, TOP_K, EXPERTS * ranks, CONFIG)
        self.answers = [answer(self.case, turn) for turn in range(ANSWERS)]
        self.buffer = numba_ep.Buffer(
            group, timeout_s=TIMEOUT_S, transport="verbs",
            num_rdma_bytes=CONFIG.get_rdma_buffer_size_hint(2 * HIDDEN, ranks, TOP_K),
            num_qps_per_rank=CONFIG.num_channels,
        )  # fmt: skip

    def phase(self, name: str, rounds: int) -> None:
        """Rounds on a network of this kind: all exact, or all ranks raise."""
        self.group.Barrier()
        if self.rank == 0:
            hosts(f"netem {NETEM.get(name, '')}")
        self.group.Barrier()
        sent, posted = sent_bytes(), self.posted()
        begin = start = time.monotonic()
        thread, raised = None, None
        try:
            for turn in range(rounds):
                start = time.monotonic()
                if turn == FAULT_AT:
                    thread = self.fault_in_dispatch(name)
                self.round(self.answers[turn % ANSWERS])
        except BufferAborted as error:
            raised = error
        took_s = time.monotonic() - (start if raised else begin)
        if thread is not None:
            thread.join(FAULT_LIMIT_S)
        sent, posted = sent_bytes() - sent, self.posted() - posted
        say(
            f"rank {self.rank}, {name}: {raised or f'{rounds} rounds exact'} after "
            f"{took_s:.1f} s, {posted / 1e6:.1f} MB posted, {sent / 1e6:.1f} MB sent"
        )
        if name in ENDS:
            assert raised is not None
            assert (raised.culprit == CULPRIT) == (self.rank != CULPRIT)
            assert raised.culprit >= 0
            assert took_s < NOTICED_S
        else:
            assert raised is None
            # Nothing goes from host to host but by its interface.
            assert sent_bytes() == 0 or sent > posted

    def posted(self) -> int:
        """Bytes of data so far."""
        return int(self.buffer.statistics().put_bytes)

    def round(self, want: Answer) -> None:
        """A dispatch and a combine, compared with the oracle."""
        self.poison()
        got = dispatch(self.buffer, self.case, want)
        self.poison()
        combine(self.buffer, self.case, want, got)

    def poison(self) -> None:
        """Between two operations of this rank; the peers may be in either."""
        endpoint = self.buffer._endpoint
        ctypes.memset(endpoint.rings()[0], 0xFF, endpoint.ring_bytes)

    def fault_in_dispatch(self, name: str) -> threading.Thread | None:
        """The fault comes once the next operation has posted its first tokens."""
        mine = CULPRIT if name == "killed" else 0
        if self.rank != mine or name not in {**FAULTS, "killed": ""}:
            return None
        rows = self.buffer.group_size - 1
        before = self.buffer.statistics().puts

        def wait() -> None:
            while self.buffer.statistics().puts <= before + rows:
                time.sleep(0.0005)
            if name == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            hosts(FAULTS[name])

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        return thread


def main() -> None:
    """Prints what this rank saw, and at last that it was as expected."""
    group = numba_ep.world()
    phases = sys.argv[1:]
    if "far" in phases:
        host = f"host {group.Get_rank()}"
        mock.patch.object(process, "_boot", lambda: host).start()
        phases.remove("far")
    job = Job(group)
    for phase in phases:
        name, _, rounds = phase.partition(":")
        job.phase(name, int(rounds or 1000))
    begin = time.monotonic()
    job.buffer.destroy()
    took_s = time.monotonic() - begin
    say(f"rank {job.rank} as expected, destroyed in {took_s:.1f} s")


if __name__ == "__main__":
    main()
