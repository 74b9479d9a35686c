"""What numba_ep.trace costs: a dispatch and its combine recorded, not recorded, and by
kernels that have no recorder at all.

    python benchmarks/trace_cost.py

They take turns in one run, each round in another order; a round begins after a
barrier and takes as long as its slowest rank. Ranks are threads, so that the kernels
without a recorder are compiled once (on the CPU, outside of the cache).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

# The package of this source tree, also where it is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numba_ep
from numba_ep import device as devices
from numba_ep import trace

HERE = {  # who launches which kernel
    "notify_kernel": "numba_ep.operation",
    "dispatch_kernel": "numba_ep.dispatch",
    "combine_kernel": "numba_ep.combine",
}
SHARED = ("numba_ep.kernels.records", "numba_ep.kernels.events")
# Twice the same shows how far chance goes.
VARIANTS = ("absent", "off", "off again", "on")
NUM_WARMUP_ROUNDS = 5


def kernels_without_recorder() -> dict[str, Any]:
    """Copies of the kernels whose calls of the recorder are calls of nothing."""
    cpu = devices.select("cpu")
    jit, compiler = cpu.cuda.jit, cpu._compiler
    own = [
        name for name in sys.modules
        if name.startswith("numba_ep.kernels.") and name not in SHARED
    ]  # fmt: skip
    kept = {name: sys.modules.pop(name) for name in own}

    def without_cache(fn: Any = None, *, device: bool = False) -> Any:
        if fn is None:
            return lambda f: without_cache(f, device=device)
        return jit(fn, device=True) if device else compiler.jit(fn, cache=False)

    cpu.cuda.jit = without_cache
    try:
        tracing = importlib.import_module("numba_ep.kernels.tracing")

        @without_cache(device=True)
        def now(comm: Any) -> int:
            return 0

        @without_cache(device=True)
        def record(
            comm: Any, kind: int, channel: int, peer: int, since: int, until: int,
            value: int, count: int,
        ) -> None:  # fmt: skip
            pass

        for name, nothing in (
            ("now", now), ("record", record), ("record_alone", record),
        ):  # fmt: skip
            setattr(tracing, name, nothing)
        kinds = ("notify", "dispatch", "combine")
        modules = [importlib.import_module(f"numba_ep.kernels.{k}") for k in kinds]
        named = zip((f"{kind}_kernel" for kind in kinds), modules)
        found = {name: getattr(module, name) for name, module in named}
    finally:
        cpu.cuda.jit = jit
        for name in own:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
    return found


class Side:
    """One rank: rounds of each variant on one Buffer."""

    def __init__(self, group: Any, args: argparse.Namespace) -> None:
        from numba_ep.group import members
        from numba_ep.selfcheck import Sizes, payload
        from numba_ep.tuning import Tuner

        num_ranks = group.Get_size()
        self.config = numba_ep.Buffer.get_dispatch_config(num_ranks)
        hint = self.config.get_rdma_buffer_size_hint(2 * args.hidden, num_ranks)
        self.buffer = numba_ep.Buffer(group, num_rdma_bytes=hint, device="cpu")
        sizes = Sizes(args.num_tokens, args.hidden, args.num_topk, args.num_experts, 0)
        self.members = members(group)
        self.tuner = Tuner(self.buffer, self.members, sizes, False, 1)
        x, _ = payload(self.members.rank, sizes, "bf16")
        self.x = x
        self.journey()  # what is imported late is there now
        self.recorder = trace._Recorder(self.buffer._endpoint, trace.DEFAULT_CAPACITY)

    def journey(self) -> None:
        """A dispatch and the combine of what it brought."""
        received = self.tuner._fresh_dispatch(self.x, self.config)
        self.buffer.combine(received[0], received[4], config=self.config)

    def round(self, variant: str, kernels: dict[str, Any]) -> float:
        """Seconds of the slowest rank."""
        if self.members.rank == 0:
            for name, kernel in kernels.items():
                setattr(sys.modules[HERE[name]], name, kernel)
        if variant == "on":
            self.recorder.start()
        self.members.barrier()
        start = perf_counter()
        self.journey()
        seconds = perf_counter() - start
        if variant == "on":
            # Off again, and no more: gathering would leave cold caches to the next.
            self.recorder.pause()
        return max(self.members.allgather(seconds))


def measure(group: Any, args: argparse.Namespace, absent: dict[str, Any]) -> Any:
    """Times by variant, [rounds]; and how many events a round has."""
    side = Side(group, args)
    present = {name: getattr(sys.modules[at], name) for name, at in HERE.items()}
    side.members.barrier()  # before rank 0 puts others in their place
    orders = itertools.cycle(itertools.permutations(VARIANTS))
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(NUM_WARMUP_ROUNDS + args.rounds):
        for variant in next(orders):
            kernels = absent if variant == "absent" else present
            times[variant].append(side.round(variant, kernels))
    events, lost = side.recorder.stop()
    num_events = (len(events) + lost) / (NUM_WARMUP_ROUNDS + args.rounds)
    side.buffer.destroy()
    return {v: t[NUM_WARMUP_ROUNDS:] for v, t in times.items()}, num_events


def _median_and_tenth(times: list[float]) -> tuple[float, float]:
    """The median, and what a tenth of the rounds were faster than: others' work on the
    machine only ever adds."""
    return statistics.median(times), statistics.quantiles(times, n=10)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="the cost of numba_ep.trace")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    for module in HERE.values():
        importlib.import_module(module)
    absent = kernels_without_recorder()
    results = numba_ep.spawn(lambda group: measure(group, args, absent), args.ranks)
    times, events = results[0]
    print(f"{'ms':10}{'median':>9}{'':9}{'tenth':>9}")
    off = _median_and_tenth(times["off"])
    for variant in VARIANTS:
        line = f"{variant:10}"
        for figure, of_off in zip(_median_and_tenth(times[variant]), off):
            line += f"{figure * 1e3:9.2f}{100 * (figure / of_off - 1):+7.1f} %"
        print(line)
    print(f"{events:.0f} events a rank, {args.ranks} ranks, {args.rounds} rounds")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
