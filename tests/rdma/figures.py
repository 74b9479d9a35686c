"""Bandwidth of dispatch and combine between two hosts, beside perftest's.

    mpirun -np 2 tests/rdma/hosts on python tests/rdma/figures.py

Wire GB/s, both directions added: of `ib_write_bw -b` with messages of a chunk's bytes
on as many queue pairs as there are channels, of plain puts by the proxies, of dispatch
and of combine; without and with 1 % of the packets lost. They take turns, each alone on
the network; medians of the turns. In a guest without a card the figures say how much of
the stack's own rate is used, and nothing about a card.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numba_ep
from numba_ep.group import members
from numba_ep.selfcheck import Sizes
from numba_ep.tuning import Tuner
from transport.verbs_device import TIMEOUT

HOSTS = str(Path(__file__).resolve().parent / "hosts")
TURNS, REPEATS, LOSSES = 5, 3, ("", "loss 1%")
SIZES = Sizes(num_tokens=512, hidden=7168, num_topk=8, num_experts=16, seed=0)
CONFIG = numba_ep.Config(4, 8, 128, 8, 128)
MESSAGE_BYTES = CONFIG.chunk * 2 * SIZES.hidden
WRITES = 150  # of perftest, a queue pair
LIMIT_S = 200.0
NAMES = ("ib_write_bw -b", "plain puts", "dispatch", "combine")


def perftest() -> float:
    """GB/s of ib_write_bw between the two hosts, both directions added."""
    common = [
        "ib_write_bw", "-b", "-F", "-x", "1", "-s", str(MESSAGE_BYTES),
        "-q", str(CONFIG.num_channels), "-n", str(WRITES), "-u", str(TIMEOUT),
        "--report_gbits",
    ]  # fmt: skip
    server = subprocess.Popen([*common, "-d", "host0"], stdout=subprocess.DEVNULL)
    time.sleep(2)  # until it listens
    client = subprocess.run(
        [*common, "-d", "host1", "127.0.0.1"],
        stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S,
    )  # fmt: skip
    server.wait(LIMIT_S)
    rows = [line.split() for line in client.stdout.splitlines()]
    (row,) = [row for row in rows if row and row[0] == str(MESSAGE_BYTES)]
    return float(row[3]) / 8  # size, iterations, peak, average


def own_figures(group: Any) -> list[float]:
    """GB/s of plain puts, dispatch and combine."""
    num_bytes = CONFIG.get_rdma_buffer_size_hint(2 * SIZES.hidden, 2, SIZES.num_topk)
    with numba_ep.Buffer(
        group, num_rdma_bytes=num_bytes, num_qps_per_rank=CONFIG.num_channels,
        transport="verbs", timeout_s=LIMIT_S,
    ) as buffer:  # fmt: skip
        tuner = Tuner(buffer, members(group), SIZES, False, repeats=REPEATS)
        dispatch, combine = tuner.dispatch("bf16", CONFIG), tuner.combine(CONFIG)
    return [2 * dispatch.raw_gbps, 2 * dispatch.wire_gbps, 2 * combine.wire_gbps]


def main() -> None:
    """Rank 0 prints a line a turn, and the table."""
    group = numba_ep.world()
    ranks = members(group)
    seen: dict[str, list[list[float]]] = {loss: [] for loss in LOSSES}
    for turn in range(TURNS):
        for loss in LOSSES:
            figures = []
            if ranks.rank == 0:
                subprocess.run([HOSTS, "netem", *loss.split()], check=True)
                figures.append(perftest())
            ranks.barrier()  # asleep, and without a Buffer
            figures += own_figures(group)
            ranks.barrier()
            seen[loss].append(figures)
            if ranks.rank == 0:
                row = "".join(f"{figure:>16.4f}" for figure in figures)
                print(f"turn {turn} {loss or 'no loss':<8}{row}", flush=True)
    if ranks.rank == 0:
        print(f"medians, GB/s; messages of {MESSAGE_BYTES} bytes, "
              f"{CONFIG.num_channels} queue pairs")  # fmt: skip
        print(" " * 8 + "".join(f"{name:>16}" for name in NAMES))
        for loss, rows in seen.items():
            medians = [statistics.median(column) for column in zip(*rows)]
            print(f"{loss or 'no loss':<8}" + "".join(f"{m:>16.4f}" for m in medians))
            shares = "".join(f"{m / medians[0]:>16.0%}" for m in medians)
            print(f"{'':<8}{shares}", flush=True)


if __name__ == "__main__":
    main()
