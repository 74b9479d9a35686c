"""The ladder's table: is every step right, and how long does it take?

    python docs/ladder/run.py [--ranks 4] [--num-tokens 512] [--hidden 2048]

Every step gets the same BF16 tokens and must give what numba_ep.reference gives, bit
for bit, every time. A time is that of the slowest rank, in ms: the median of the
repeats and the fastest of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

# The package of this source tree, also where it is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import chunks_and_credits
import four_roles
import numpy_loop
import thread_a_rank

import numba_ep
from numba_ep import reference

LIMIT_S = 300.0  # of a step; the first run of the last one compiles
EXPERTS_A_RANK, NUM_TOPK = 16, 8


class Work(NamedTuple):
    """What is to be dispatched. x, layouts and expected: by rank."""

    x: list[np.ndarray]
    layouts: list[reference.Layout]
    expected: list[np.ndarray]
    config: numba_ep.Config
    repeats: int

    @property
    def in_rank(self) -> list[np.ndarray]:
        """By rank, [num_tokens, num_ranks] bool."""
        return [layout.is_token_in_rank for layout in self.layouts]


    def is_exact(self, rank: int, received: np.ndarray) -> bool:
        """Whether `rank` has received what it should, to the last bit."""
        return reference.first_difference(received, self.expected[rank]) is None


Rounds = list[tuple[float, bool]]  # of one rank: seconds, and whether it was exact


def make_work(options: argparse.Namespace) -> Work:
    """Unique rows, random routing, and what must come out."""
    num_ranks, experts = options.ranks, options.ranks * EXPERTS_A_RANK
    everyone, layouts = [], []
    for rank in range(num_ranks):
        x = reference.unique_rows(
            rank, options.num_tokens, options.hidden, reference.BF16, 0
        )
        topk_idx, _ = reference.random_topk(
            rank, options.num_tokens, NUM_TOPK, experts, 0
        )
        layouts.append(reference.layout(topk_idx, experts, num_ranks))
        in_rank = layouts[-1].is_token_in_rank
        everyone.append(reference.RankInput(x, None, in_rank, None, None))
    return Work(
        [sent.x for sent in everyone],
        layouts,
        [reference.dispatch(everyone, r, experts).x for r in range(num_ranks)],
        numba_ep.Config(2, options.chunk, options.capacity, options.chunk,
                        options.capacity),
        options.repeats,
    )  # fmt: skip


def rounds(group: Any, work: Work, dispatch: Callable[[], np.ndarray]) -> Rounds:
    """Once to warm up, then the repeats; ranks begin together."""
    found = []
    for _ in range(1 + work.repeats):
        group.Barrier()
        began = perf_counter()
        received = dispatch()
        seconds = perf_counter() - began
        group.Barrier()  # checking must not slow down those who still run
        found.append((seconds, work.is_exact(group.Get_rank(), received)))
    return found[1:]


def run_loop(work: Work) -> list[Rounds]:
    """Step 1: one thread, whose time counts for all."""
    found = []
    for _ in range(work.repeats):
        began = perf_counter()
        received = numpy_loop.dispatch(work.x, work.in_rank)
        seconds = perf_counter() - began
        exact = all(work.is_exact(rank, rows) for rank, rows in enumerate(received))
        found.append((seconds, exact))
    return [found]


def run_windows(work: Work) -> list[Rounds]:
    """Step 2."""
    windows: list[np.ndarray | None] = [None] * len(work.x)

    def program(group: Any) -> Rounds:
        x, in_rank = of_rank(work, group)
        return rounds(
            group, work, lambda: thread_a_rank.dispatch(group, windows, x, in_rank)
        )

    return numba_ep.spawn(program, len(work.x), LIMIT_S)


def run_rings(work: Work) -> list[Rounds]:
    """Step 3."""
    chunk = work.config.chunk
    hidden, dtype = work.x[0].shape[1], work.x[0].dtype
    rings = [
        [chunks_and_credits.Ring(work.config.capacity, hidden, dtype) for _ in work.x]
        for _ in work.x
    ]

    def program(group: Any) -> Rounds:
        x, in_rank = of_rank(work, group)
        return rounds(
            group, work,
            lambda: chunks_and_credits.dispatch(group, rings, chunk, x, in_rank),
        )  # fmt: skip

    return numba_ep.spawn(program, len(work.x), LIMIT_S)


def run_roles(work: Work) -> list[Rounds]:
    """Step 4."""

    def program(group: Any) -> Rounds:
        x, in_rank = of_rank(work, group)
        per_expert = work.layouts[group.Get_rank()].num_tokens_per_expert
        row_bytes = x.itemsize * x.shape[1]
        with four_roles.open_buffer(group, row_bytes, work.config) as buffer:
            return rounds(
                group, work,
                lambda: four_roles.dispatch(
                    buffer, work.config, x, in_rank, per_expert
                ),
            )  # fmt: skip

    return numba_ep.spawn(program, len(work.x), LIMIT_S)


def of_rank(work: Work, group: Any) -> tuple[np.ndarray, np.ndarray]:
    """x and in_rank of this rank."""
    return work.x[group.Get_rank()], work.in_rank[group.Get_rank()]


# The table.

STEPS: tuple[tuple[str, Any, Callable[[Work], list[Rounds]]], ...] = (
    ("NumPy loop", numpy_loop, run_loop),
    ("one thread a rank", thread_a_rank, run_windows),
    ("chunks and credits", chunks_and_credits, run_rings),
    ("four roles", four_roles, run_roles),
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--ranks", type=int, default=4)
    p.add_argument("--num-tokens", type=int, default=512, help="a rank")
    p.add_argument("--hidden", type=int, default=2048)
    p.add_argument("--chunk", type=int, default=64, help="rows a write")
    p.add_argument("--capacity", type=int, default=256, help="slots a ring")
    p.add_argument("--repeats", type=int, default=11)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Print a line a step; exit status 0 if every one is exact."""
    options = parser().parse_args(arguments)
    work, all_exact = make_work(options), True
    rows = sum(len(expected) for expected in work.expected)
    print(f"{options.ranks} ranks, {options.num_tokens} tokens a rank, hidden "
          f"{options.hidden}, {rows} rows in all")  # fmt: skip
    print(f"{'step':<24}{'file':<24}{'lines':>5}{'ms':>9}{'fastest':>9}  result")
    for number, (name, module, run) in enumerate(STEPS, start=1):
        by_rank = run(work)
        slowest = [max(of_round)[0] for of_round in zip(*by_rank)]
        exact = all(exact for rounds_of in by_rank for _, exact in rounds_of)
        all_exact &= exact
        file = Path(module.__file__)
        lines = len(file.read_text(encoding="utf-8").splitlines())
        print(
            f"{number} {name:<22}{file.name:<24}{lines:>5}"
            f"{1000 * statistics.median(slowest):>9.2f}{1000 * min(slowest):>9.2f}"
            f"  {'exact' if exact else 'WRONG'}",
            flush=True,
        )
    return 0 if all_exact else 1


if __name__ == "__main__":
    sys.exit(main())
