"""Bandwidth of dispatch and combine between two hosts, beside perftest's.

    mpirun -np 2 tests/rdma/hosts on python tests/rdma/figures.py

Wire GB/s, both directions added: of `ib_write_bw -b` with messages of a chunk's bytes
on as many queue pairs as there are channels, of plain puts by the proxies, of dispatch
and of combine. They take turns, each alone on the network; medians of the turns, for
the shares as well.

In a guest without a card the CPUs are the card, and pack and reduce besides. So there
are two kinds of network: cables of a fixed rate, which leave the CPUs time, and such
without a limit, where a share says how much of the CPUs the rest takes. What dispatch
and combine cost without any card is what they cost over shared memory.
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
from numba_ep.tuning import Figure, Tuner
from transport.verbs_device import TIMEOUT

HOSTS = str(Path(__file__).resolve().parent / "hosts")
TURNS, REPEATS = 5, 3
# Rows of a chunk, cable, packets.
CASES = (
    (8, "64mbit", ""), (32, "64mbit", ""), (8, "64mbit", "loss 1%"), (8, "", ""),
    (32, "", ""),
)  # fmt: skip
SIZES = Sizes(num_tokens=512, hidden=7168, num_topk=8, num_experts=16, seed=0)
RING = 128  # rows
WRITTEN = 1200  # rows by perftest, a queue pair
LIMIT_S = 200.0
RATES = ("ib_write_bw -b", "plain puts", "dispatch", "combine")
TIMES = ("verbs dispatch", "verbs combine", "shm dispatch", "shm combine")


def perftest(config: numba_ep.Config) -> float:
    """GB/s of ib_write_bw between the two hosts, both directions added."""
    message = str(config.chunk * 2 * SIZES.hidden)
    common = [
        "ib_write_bw", "-b", "-F", "-x", "1", "-s", message, "-u", str(TIMEOUT),
        "-q", str(config.num_channels), "-n", str(WRITTEN // config.chunk),
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
    (row,) = [row for row in rows if row and row[0] == message]
    return float(row[3]) / 8  # size, iterations, peak, average


def measured(group: Any, transport: str, config: numba_ep.Config) -> list[Figure]:
    """Dispatch and combine over this transport."""
    num_bytes = config.get_rdma_buffer_size_hint(2 * SIZES.hidden, 2, SIZES.num_topk)
    with numba_ep.Buffer(
        group, num_rdma_bytes=num_bytes, num_qps_per_rank=config.num_channels,
        transport=transport, timeout_s=LIMIT_S,
    ) as buffer:  # fmt: skip
        tuner = Tuner(buffer, members(group), SIZES, False, repeats=REPEATS)
        return [tuner.dispatch("bf16", config), tuner.combine(config)]


def turn(group: Any, chunk: int, cable: str, packets: str) -> list[float]:
    """RATES, then TIMES in ms; perftest's rate is rank 0's alone."""
    config = numba_ep.Config(4, chunk, RING, chunk, RING)
    rate = 0.0
    if group.Get_rank() == 0:
        for change in (["netem", *packets.split()], ["rate", *cable.split()]):
            subprocess.run([HOSTS, *change], check=True)
        rate = perftest(config)
    members(group).barrier()  # asleep, and without a Buffer
    verbs, shm = [measured(group, name, config) for name in ("verbs", "shm")]
    rates = [rate, 2 * verbs[0].raw_gbps, *(2 * figure.wire_gbps for figure in verbs)]
    return rates + [figure.time_us / 1e3 for figure in verbs + shm]


def table(case: tuple[int, str, str], rows: list[list[float]]) -> None:
    """Medians of the turns."""
    chunk, cable, packets = case
    print(f"\nchunks of {chunk}, cables: {cable or 'any rate'}, {packets or 'no loss'}")
    for column, name in enumerate(RATES):
        rate = statistics.median(row[column] for row in rows)
        share = statistics.median(row[column] / row[0] for row in rows)
        print(f"{name:<16}{rate:>9.4f} GB/s {share:>6.0%}")
    for column, name in enumerate(TIMES, len(RATES)):
        ms = statistics.median(row[column] for row in rows)
        print(f"{name:<16}{ms:>9.0f} ms", flush=True)


def main() -> None:
    """Rank 0 prints a line a turn, and the tables."""
    group = numba_ep.world()
    seen: dict[tuple[int, str, str], list[list[float]]] = {case: [] for case in CASES}
    for number in range(TURNS):
        for case, rows in seen.items():
            rows.append(turn(group, *case))
            members(group).barrier()
            if group.Get_rank() == 0:
                figures = " ".join(f"{figure:.4g}" for figure in rows[-1])
                print(f"turn {number} {case} {figures}", flush=True)
    if group.Get_rank() == 0:
        print(f"medians of {TURNS} turns")
        for case, rows in seen.items():
            table(case, rows)


if __name__ == "__main__":
    main()
