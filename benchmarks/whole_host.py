"""All figures for 4 and 8 GPUs of one host, one rank a GPU, in one call.

    python benchmarks/whole_host.py [4 8]     as many ranks as there are GPUs, or fewer

For each number of ranks: all checks against the oracle at DeepEP's sizes; what the copy
engines carry with all GPUs copying both ways at once; FP8 and BF16 dispatch and combine
over configs; torch and NCCL with P2P disabled doing the same job; and where the time
goes. Beside them stands what DeepEP's pull request 375 reports for 8 GPUs of a host.
At most eight minutes for 4 and 8 together; a step that takes longer than its share is
ended and named. The exit status says whether all steps went well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from cuda.bindings import driver

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transport.cuda_driver import call

HERE = Path(__file__).resolve().parent
# Of its EP8 row; the own rank is counted.
PULL_REQUEST_375 = "53.0 dispatch FP8, 53.7 combine BF16"
SWEEP = (
    "4:1024:128", "6:1024:128", "8:256:32", "8:512:64", "8:768:96", "8:1024:128",
    "12:512:64", "20:256:32",
)  # fmt: skip
LIMIT_S = {"exact": 45.0, "engines": 30.0, "sweep": 65.0, "nccl": 30.0, "where": 20.0}
# More for the first: it compiles, and every rank computes what all ranks sent.
EXACT_MORE_S = 8.0  # a rank
STOP_S = 5.0


class Step(NamedTuple):
    """A program that every rank runs."""

    name: str
    title: str
    command: tuple[str, ...]


def steps() -> list[Step]:
    """What to run, in this order."""

    def script(name: str) -> str:
        return str(HERE / f"{name}.py")

    return [
        Step("exact", "against the oracle, DeepEP's sizes", (
            "-m", "numba_ep.test", "--device", "cuda", "--skip-tuning",
            "--progress", "never")),
        Step("engines", "copy engines alone", (script("copy_engines"),)),
        Step("sweep", "SMs : slots a ring : chunk", (script("gpu_sweep"), *SWEEP)),
        Step("nccl", "beside torch and NCCL", (script("nccl_peer"),)),
        Step("where", "where the time goes", (script("where_time_goes"),)),
    ]  # fmt: skip


def run(step: Step, num_ranks: int) -> bool:
    """Run it with its output passed on; whether it ended well and in time."""
    print(f"\n== {num_ranks} ranks: {step.title}", flush=True)
    began = time.monotonic()
    limit_s = LIMIT_S[step.name]
    if step.name == "exact":
        limit_s += EXACT_MORE_S * num_ranks
    # Open MPI binds each of two ranks to one core: caller and proxy would share it.
    environment = {**os.environ, "OMPI_MCA_hwloc_base_binding_policy": "none"}
    command = ["mpirun", "-np", str(num_ranks), sys.executable, *step.command]
    with subprocess.Popen(command, env=environment, cwd=HERE.parent) as job:
        try:
            status = job.wait(limit_s)
            outcome = f", exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            outcome = f", ended after {limit_s:.0f} s"
            job.terminate()  # mpirun then ends the ranks
            try:
                job.wait(STOP_S)
            except subprocess.TimeoutExpired:
                job.kill()
    took_s = time.monotonic() - began
    print(f"-- {step.name}: {took_s:.0f} s{outcome or ', done'}", flush=True)
    return not outcome


def main() -> int:
    """Run all steps for each number of ranks."""
    call(driver.cuInit, 0)
    gpus = call(driver.cuDeviceGetCount)
    numbers = [int(text) for text in sys.argv[1:]] or [n for n in (4, 8) if n <= gpus]
    if not numbers or max(numbers) > gpus:
        print(f"expected GPUs for {numbers or 4} ranks, found {gpus}")
        return 2
    print(f"{gpus} x {call(driver.cuDeviceGetName, 64, 0).decode().strip(chr(0))}")
    failed = [
        f"{num_ranks} ranks: {step.title}"
        for num_ranks in numbers
        for step in steps()
        if not run(step, num_ranks)
    ]
    print(f"\nDeepEP's pull request 375, 8 ranks, algorithm GB/s: {PULL_REQUEST_375}")
    print("\n".join(["failed:", *failed]) if failed else "all steps done")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
