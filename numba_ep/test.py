"""`mpirun -np 16 python -m numba_ep.test`: is it right, and how fast is it?

Checks layout, dispatch, cached dispatch and combine against the NumPy oracle, bit for
bit, then times chunk sizes. `--ranks N` runs N ranks as threads of this process
instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from numba_ep import device as devices
from numba_ep.checks import check_experts
from numba_ep.config import Config
from numba_ep.group import Members, members, world
from numba_ep.meeting import use_local_gpu
from numba_ep.report import PROGRESS, Lines, report_for

FULL_SIZES = (4096, 7168, 8, 256)
CALLS_IN_A_ROW = 4  # on a GPU
OPERATIONS = (("dispatch", "fp8"), ("dispatch", "bf16"), ("combine", "bf16"))
SIZE_NAMES = ("num_tokens", "hidden", "num_topk", "num_experts")


class Work(NamedTuple):
    """The sizes of a run and who chose them."""

    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    chosen: bool


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m numba_ep.test", description=__doc__)
    p.add_argument("--ranks", type=int, help="run as threads of this process")
    p.add_argument("--num-tokens", type=int, help="tokens a rank")
    p.add_argument("--hidden", type=int, help="columns of a token")
    p.add_argument("--num-topk", type=int, help="experts a token")
    p.add_argument("--num-experts", type=int, help="experts in all")
    p.add_argument("--num-sms", type=int, help="two a channel")
    p.add_argument("--transport", default="shm", help="shm or verbs")
    p.add_argument("--device", choices=devices.DEVICES, help="default: auto")
    p.add_argument("--skip-tuning", action="store_true", help="time the default config")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--timeout", type=float, default=30.0, help="seconds a wait may be")
    p.add_argument(
        "--progress", choices=PROGRESS, default="auto",
        help="bars and tables instead of lines; auto: on a terminal",
    )  # fmt: skip
    p.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    p.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="record one dispatch and combine more, as JSON for ui.perfetto.dev",
    )  # fmt: skip
    return p


def choose_work(options: argparse.Namespace, num_ranks: int, on_gpu: bool) -> Work:
    """DeepEP's sizes on a GPU; on a CPU what 16 ranks on 2 cores do in seconds."""
    experts = 256 if 256 % num_ranks == 0 else 8 * num_ranks
    defaults = FULL_SIZES[:3] if on_gpu else (64, 1024, 8)
    given = [getattr(options, name) for name in SIZE_NAMES]
    pairs = zip(given, (*defaults, experts))
    values = [default if value is None else value for value, default in pairs]
    work = Work._make([*values, not on_gpu and None in given[:2]])
    # Known before any rank waits for another, so all ranks say the same.
    check_experts(work.num_experts, num_ranks)
    if not 0 < work.num_topk <= work.num_experts:
        raise ValueError(
            f"num_topk: expected 1 to {work.num_experts} (num_experts), got "
            f"{work.num_topk}"
        )
    return work


def ring_bytes(work: Work, configs: list[Config], num_ranks: int) -> int:
    """num_rdma_bytes for every config that the run uses."""
    hint = Config.get_rdma_buffer_size_hint
    row = 2 * work.hidden
    return max(hint(config, row, num_ranks, work.num_topk) for config in configs)


def chunk_sizes(config: Config, skip_tuning: bool, step: int) -> list[Config]:
    """The default config, or its rings with chunks up to half a ring, `step` apart."""
    if skip_tuning:
        return [config]
    chunks, chunk = [], max(2, config.capacity // 32)
    while chunk <= config.capacity // 2:
        chunks.append(Config(config.num_sms, chunk, config.capacity, chunk,
                             config.capacity))  # fmt: skip
        chunk *= step
    return chunks


class Run:
    """One rank's run."""

    def __init__(self, options: argparse.Namespace, group: Any, report: Lines) -> None:
        self.options, self.group, self.report = options, group, report
        self.ranks: Members = members(group)
        device = devices.select(options.device)
        self.on_gpu = devices.target() == "cuda"
        if self.on_gpu and options.ranks is None:
            use_local_gpu(self.ranks, device)
        self.work = choose_work(options, self.ranks.num_ranks, self.on_gpu)
        self.checks: list[dict[str, Any]] = []

    def all(self) -> dict[str, Any]:
        """Check, time and return the results."""
        from numba_ep.buffer import Buffer

        if self.options.num_sms is not None:
            Buffer.set_num_sms(self.options.num_sms)
        num_ranks = self.ranks.num_ranks
        dispatch = Buffer.get_dispatch_config(num_ranks)
        combine = Buffer.get_combine_config(num_ranks)
        skip = self.options.skip_tuning
        step = 2 if self.on_gpu else 4
        configs = {"dispatch": chunk_sizes(dispatch, skip, step),
                   "combine": chunk_sizes(combine, skip, step)}  # fmt: skip
        every = [dispatch, combine, *configs["dispatch"], *configs["combine"]]
        self._announce(dispatch)
        with Buffer(
            self.group,
            num_rdma_bytes=ring_bytes(self.work, every, num_ranks),
            num_qps_per_rank=max(config.num_channels for config in every),
            transport=self.options.transport,
            device=self.options.device,
            timeout_s=self.options.timeout,
        ) as buffer:
            self._check(buffer)
            results = self._time(buffer, configs)
            if self.options.trace is not None:
                self._trace(buffer, dispatch)
        config = {name: getattr(self.work, name) for name in SIZE_NAMES}
        return {
            "ranks": num_ranks,
            "device": devices.target(),
            "transport": self.options.transport,
            "config": {**config, "num_sms": dispatch.num_sms},
            "checks": self.checks,
            **results,
        }

    def _announce(self, config: Config) -> None:
        work = self.work
        self.report.say(
            f"{self.ranks.num_ranks} ranks on {devices.target()}, transport "
            f"{self.options.transport}: {work.num_tokens} tokens, "
            f"hidden {work.hidden}, top-{work.num_topk} of {work.num_experts} experts, "
            f"{config.num_sms} SMs"
        )
        if work.chosen:
            full = " ".join(
                f"--{name.replace('_', '-')} {size}"
                for name, size in zip(SIZE_NAMES, FULL_SIZES)
            )
            self.report.say(f"small sizes, chosen for a CPU; the full ones: {full}")

    def _check(self, buffer: Any) -> None:
        from numba_ep.selfcheck import NUM_CHECKS, Checker, Sizes

        sizes = Sizes(*self.work[:4], self.options.seed)
        checker = Checker(buffer, sizes, self.on_gpu)
        self.report.checks_begin(NUM_CHECKS)
        for steps in (checker.layout, checker.journeys):
            for outcome in steps():
                # Every rank hears of every rank's result and so ends in the same way.
                everyone = enumerate(self.ranks.allgather(outcome.difference))
                wrong = {rank: found for rank, found in everyone if found is not None}
                self.checks.append({"name": outcome.name, "ok": not wrong})
                self.report.check(outcome.name, wrong)

    def _time(self, buffer: Any, configs: dict[str, list[Config]]) -> dict[str, Any]:
        from numba_ep.selfcheck import Sizes
        from numba_ep.tuning import Tuner

        sizes = Sizes(*self.work[:4], self.options.seed)
        tuner = Tuner(buffer, self.ranks, sizes, self.on_gpu, 5, CALLS_IN_A_ROW)
        if tuner.calls > 1:
            self.report.say(f"  times: one of {tuner.calls} calls in a row")
        self.report.times_begin(sum(len(configs[kind]) for kind, _ in OPERATIONS))
        results: dict[str, Any] = {"dispatch": {}, "combine": {}}
        for kind, data in OPERATIONS:
            figures = []
            for config in configs[kind]:
                one = (
                    tuner.combine(config) if kind == "combine"
                    else tuner.dispatch(data, config)
                )  # fmt: skip
                figures.append(one)
                self.report.time(f"{kind} {data}", one)
            best = min(figures)
            results[kind][data] = best._asdict()
            if len(figures) > 1:
                self.report.best(f"{kind} {data}", best)
        return results

    def _trace(self, buffer: Any, config: Config) -> None:
        from numba_ep import trace
        from numba_ep.selfcheck import Sizes
        from numba_ep.tuning import Tuner

        sizes = Sizes(*self.work[:4], self.options.seed)
        tuner = Tuner(buffer, self.ranks, sizes, self.on_gpu, repeats=1)
        with trace.record(buffer, 4 * trace.DEFAULT_CAPACITY) as recorded:
            tuner.journey(config)
        if self.ranks.rank == 0:
            recorded.write(self.options.trace)
        lost = f", {sum(recorded.lost)} older ones lost" if any(recorded.lost) else ""
        found = f"{len(recorded.events)} events{lost}"
        self.report.say(f"  trace: {found}: {self.options.trace}")


def run_rank(options: argparse.Namespace, group: Any) -> bool:
    """One rank, start to end; True if every check of every rank passed."""
    is_first = group.Get_rank() == 0
    start = time.monotonic()
    with report_for(is_first, options.progress) as report:
        results = Run(options, group, report).all()
        passed = all(check["ok"] for check in results["checks"])
        if is_first and options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
        report.end(
            passed,
            f"{len(results['checks'])} checks on {results['ranks']} ranks in "
            f"{time.monotonic() - start:.1f} s",
        )
    return passed


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if every rank passed."""
    options = parser().parse_args(arguments)
    try:
        if options.ranks is not None:
            from numba_ep.spawn import spawn

            passed = spawn(lambda group: run_rank(options, group), options.ranks)
            return 0 if all(passed) else 1
        return 0 if run_rank(options, world()) else 1
    except (ValueError, RuntimeError, OSError) as error:
        print(f"numba_ep.test: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
