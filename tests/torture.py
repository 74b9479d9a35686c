"""Random operations over a network at its worst: each one exact, or refused, or ended.

    python tests/torture.py 17           # the episode of seed 17, as a failure names it
    python tests/torture.py 0 1250       # seeds 0 to 1249
    python tests/torture.py 0 24 --timeout 2    # waits end after 2 s, not 20

An episode is the life of one Buffer a rank: some forty operations, drawn from the seed
alike on all ranks. Dispatches with new shapes, dtypes, routing and configs; cached
dispatches and combines by any handle so far, in other dtypes and chunk sizes; calls
that one rank gets wrong. In some episodes a rank is cut off: then all must raise.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

# The package of this source tree, also where it is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from faulty import Wrapping
from faulty_transport import Faults, FaultyTransport
from world import (
    Scenario,
    World,
    caught,
    check_cached,
    check_combine,
    check_dispatch,
    check_layout,
    check_refused,
    poison,
    run,
)

import transport
from numba_ep.config import Config
from numba_ep.errors import BufferAborted, RefusedError

OPERATIONS = 40
KINDS = ["dispatch", "cached", "combine", "combine", "reject"]
CUT_SHARE = 0.15
CUT_S = 3.0  # how long waits last where a rank is cut off
WAITS_S = 20.0  # and elsewhere: slow is no fault
MAX_CHANNELS = 3
LARGEST = (384, 4)  # hidden, top-k

Check = Callable[[Any, dict[int, Any]], None]


class Episode(NamedTuple):
    """What a seed means."""

    num_ranks: int
    warps: int
    faults: Faults
    operations: list[tuple[str, Check]]


def _config(rng: random.Random, channels: int) -> Config:
    chunk = rng.randint(1, 4)
    capacity = rng.randint(2 * chunk, 4 * chunk)
    return Config(2 * channels, chunk, capacity, chunk, capacity)


def _scenario(rng: random.Random, num_ranks: int) -> Scenario:
    num_experts = num_ranks * rng.randint(1, 4)
    num_topk = rng.randint(1, min(LARGEST[1], num_experts))
    channels = rng.randint(1, MAX_CHANNELS)
    fp8 = rng.random() < 0.4
    hot = rng.random() < 0.15
    hottest = rng.randrange(num_experts)
    return Scenario(
        tokens=[rng.choice([0, 1, 5, 13, 37]) for _ in range(num_ranks)],
        hidden=128 * rng.randint(1, 3) if fp8 else 8 * rng.randint(1, 48),
        num_topk=1 if hot else num_topk,
        num_experts=num_experts,
        config=_config(rng, channels),
        combine_config=_config(rng, channels),
        fp8=fp8,
        with_topk=rng.random() < 0.8,
        with_weights=rng.random() < 0.7,
        expert_alignment=rng.choice([1, 1, 3, 128]),
        dropped=rng.choice([0.0, 0.1, 0.9]),
        seed=rng.randrange(1 << 30),
        route=functools.partial(_hot_route, hottest) if hot else None,
    )


def _hot_route(expert: int, rank: int, tokens: int) -> np.ndarray:
    return np.full((tokens, 1), expert, np.int64)


def _same_routing(rng: random.Random, world: World) -> World:
    """Another payload, dtype and chunk for the handle of `world`."""
    s = world.scenario
    ids = [world._ids(rank) for rank in range(s.num_ranks)]
    channels = s.config.num_channels
    return World(
        replace(
            s,
            route=lambda rank, tokens: ids[rank],
            fp8=s.hidden % 128 == 0 and rng.random() < 0.5,
            config=_config(rng, channels),
            combine_config=_config(rng, channels),
            seed=rng.randrange(1 << 30),
        )
    )


# Operations. A check gets the Buffer and the rank's handles by number.


def _dispatch(number: int, world: World) -> Check:
    def operation(buffer: Any, handles: dict[int, Any]) -> None:
        check_layout(buffer, world)
        handles[number] = check_dispatch(buffer, world)

    return operation


def _cached(number: int, world: World) -> Check:
    return lambda buffer, handles: check_cached(buffer, world, handles[number])


def _combine(number: int, world: World, num_biases: int) -> Check:
    return lambda buffer, handles: check_combine(
        buffer, world, handles[number], num_biases
    )


def _refused(call: Callable[[], Any]) -> Callable[[], Any]:
    """`call`, made now; raises at once what ended the Buffer, the rest when called."""
    error = caught(call)
    if isinstance(error, BufferAborted):
        raise error

    def again() -> None:
        raise error

    return again


def _wrong_dtype(world: World, culprit: int) -> Check:
    def operation(buffer: Any, handles: dict[int, Any]) -> None:
        args = world.dispatch_args(buffer.rank)
        if buffer.rank == culprit:
            args["x"] = world.inputs[culprit].x.astype(np.float64)
        call = _refused(functools.partial(buffer.dispatch, **args))
        check_refused(buffer, call, culprit, "^x: ")

    return operation


def _wrong_chunk(world: World, culprit: int) -> Check:
    def operation(buffer: Any, handles: dict[int, Any]) -> None:
        config = world.scenario.config
        if buffer.rank == culprit:
            capacity = 2 * config.chunk + 2
            config = Config(config.num_sms, 1, 2, config.chunk + 1, capacity)
        args = {**world.dispatch_args(buffer.rank), "config": config}
        error = caught(_refused(functools.partial(buffer.dispatch, **args)))
        assert isinstance(error, RefusedError), repr(error)

    return operation


def _wrong_rows(number: int, world: World, culprit: int) -> Check:
    def operation(buffer: Any, handles: dict[int, Any]) -> None:
        args = world.combine_args(buffer.rank)
        if buffer.rank == culprit:
            extra = np.zeros((1, args["x"].shape[1]), args["x"].dtype)
            args["x"] = np.concatenate([args["x"], extra])
        combine = functools.partial(buffer.combine, handle=handles[number], **args)
        call = _refused(combine)
        check_refused(buffer, call, culprit, "^x: ")

    return operation


def episode(seed: int) -> Episode:
    """Everything that happens is drawn here, before any rank runs."""
    rng = random.Random(seed)
    num_ranks = rng.choice([1, 2, 2, 3, 3, 4, 5])
    faults = Faults(
        seed,
        delay_s=rng.choice([0.0, 0.2e-3, 1e-3]),
        late_completion_s=rng.choice([0.0, 0.5e-3]),
        send_queue=rng.choice([1, 4, 4, 64]),
        completion_queue=rng.choice([2, 8, 8, 256]),
        torn=rng.choice([0.0, 0.5]),
        repeated=rng.choice([0.0, 0.3]),
    )
    if num_ranks > 1 and rng.random() < CUT_SHARE:
        faults = replace(
            faults,
            cut_rank=rng.randrange(num_ranks),
            cut_after=rng.randint(0, 200),
            cut_tells=rng.random() < 0.5,
        )
    worlds: list[World] = []
    operations: list[tuple[str, Check]] = []
    for _ in range(OPERATIONS):
        kind = rng.choice(KINDS)
        if not worlds or kind == "dispatch":
            world = World(_scenario(rng, num_ranks))
            if rng.random() < 0.2:
                worst = max(1, world.most_received) + rng.choice([0, 3])
                world = World(replace(world.scenario, num_worst_tokens=worst))
            operations.append((kind, _dispatch(len(worlds), world)))
            worlds.append(world)
            continue
        number = rng.randrange(len(worlds))
        world = _same_routing(rng, worlds[number])
        culprit = rng.randrange(num_ranks)
        if kind == "cached":
            check = _cached(number, world)
        elif kind == "combine":
            check = _combine(number, world, rng.randint(0, 2))
        elif num_ranks > 1 and rng.random() < 0.4:
            check = _wrong_chunk(world, culprit)
        elif rng.random() < 0.5:
            check = _wrong_rows(number, world, culprit)
        else:
            check = _wrong_dtype(world, culprit)
        operations.append((kind, check))
    return Episode(num_ranks, rng.choice([1, 1, 2, 3]), faults, operations)


# Running.


def _largest_bytes(num_ranks: int) -> int:
    hidden, num_topk = LARGEST
    config = Config(2 * MAX_CHANNELS, 4, 16, 4, 16)
    return config.get_rdma_buffer_size_hint(2 * hidden, num_ranks, num_topk)


class _InHostMemory(Wrapping):
    """Rings in the host's memory, on a GPU too: there a CPU can tear and delay."""

    def __call__(self, name: str, rank: int, *sizes: Any) -> Any:
        return super().__call__(name, rank, *sizes[:3])  # no word of the GPU


def run_episode(seed: int, timeout_s: float = WAITS_S) -> int:
    """Operations of the rank that did most. Raises AssertionError with the seed."""
    this = episode(seed)
    cut = this.faults.cut_rank >= 0
    cut_ranks: set[int] = set()
    poisons = random.Random(seed).random() < 0.5

    def program(buffer: Any) -> tuple[int, BufferAborted | None]:
        handles: dict[int, Any] = {}
        for done, (kind, check) in enumerate(this.operations):
            try:
                if poisons and not cut:
                    poison(buffer)
                check(buffer, handles)
            except BufferAborted as error:
                if not cut:
                    raise AssertionError(
                        f"operation {done} ({kind}): {error}"
                    ) from error
                assert type(caught(lambda: buffer.dispatch(None))) is type(error)
                return done, error
            except Exception as error:
                raise AssertionError(f"operation {done} ({kind}): {error}") from error
        return len(this.operations), None

    wrapping = _InHostMemory(
        FaultyTransport, faults=this.faults, cut_ranks=cut_ranks
    )
    try:
        with mock.patch.object(transport, "create", wrapping):
            num_bytes = _largest_bytes(this.num_ranks)
            results = run(
                program, this.num_ranks, num_bytes, this.warps,
                num_qps_per_rank=MAX_CHANNELS, timeout_s=CUT_S if cut else timeout_s,
            )  # fmt: skip
        check_ends(results, this.faults, bool(cut_ranks))
    except Exception as error:
        raise AssertionError(
            f"python tests/torture.py {seed}: {this.num_ranks} ranks, "
            f"{this.warps} warps, {this.faults}: {error}"
        ) from error
    return max(done for done, _ in results)


def check_ends(
    results: list[tuple[int, BufferAborted | None]], faults: Faults, was_cut: bool
) -> None:
    """Nobody raises without a cut; after one all do, naming a rank.

    Not always the one that is cut off: who waits for a rank that waits for that one may
    give up first, and names the rank that it waits for.
    """
    for rank, (_, error) in enumerate(results):
        if was_cut:
            assert error is not None, f"rank {rank} went on without {faults.cut_rank}"
            assert 0 <= error.culprit < len(results), f"rank {rank} names nobody"
        else:
            assert error is None, f"rank {rank} raised {error!r}"


def main() -> None:
    """Seeds from the command line; a line now and then says how far it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("behind_last", type=int, nargs="?")
    parser.add_argument("--timeout", type=float, default=WAITS_S, metavar="S")
    args = parser.parse_args()
    behind_last = args.seed + 1 if args.behind_last is None else args.behind_last
    began = told = time.monotonic()
    operations = 0
    for seed in range(args.seed, behind_last):
        operations += run_episode(seed, args.timeout)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(f"seed {seed}: {operations} operations, {told - began:.0f} s")
    seconds = time.monotonic() - began
    print(f"{operations} operations exact or refused, {seconds:.0f} s")


if __name__ == "__main__":
    main()
