"""Ranks as threads, each with a Buffer, checked bit for bit against the oracle.

    check(Scenario(tokens=(13, 0, 7, 5)))   # two rounds of everything on one Buffer

Before every operation the rings and the kernels' scratch are filled with 0xFF, and so
is every new output array. What goes in and what must come out is made in scenario.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from scenario import (
    SMALL_RINGS,
    Scenario,
    World,
    all_ids,
    compare_handle,
    compare_received,
    same,
)

from numba_ep import device as devices
from numba_ep.spawn import spawn

if devices.wanted_target() == "cuda":
    pytest.skip("these tests are for kernels on the CPU", allow_module_level=True)

__all__ = [
    "SMALL_RINGS",
    "TIMEOUT_S",
    "Change",
    "Scenario",
    "World",
    "all_ids",
    "caught",
    "check",
    "check_cached",
    "check_combine",
    "check_disagreement",
    "check_dispatch",
    "check_layout",
    "check_refused",
    "check_round",
    "compare_received",
    "poison",
    "refuse_each",
    "run",
    "same",
]  # fmt: skip

TIMEOUT_S = 20.0  # of a Buffer's waits
LIMIT_S = 60.0  # of a whole run of all ranks
POISON = 0xFF
Change = Callable[[dict[str, Any]], dict[str, Any]]


# Poison.


def poison(buffer: Any) -> None:
    """Collective: fill what the next operation must write before it reads it."""
    endpoint = buffer._endpoint
    buffer.group.Barrier()
    for region, regions in (
        (endpoint.transport.receive, endpoint._receive_map),
        (endpoint.transport.send, endpoint._send_map),
    ):
        at, num_bytes = regions["rings"], regions.sizes["rings"]
        ctypes.memset(region.address + at, POISON, num_bytes)
    for memory in (endpoint._scratch, endpoint.notify_scratch):
        memory.host[:] = POISON
    buffer.group.Barrier()


def _poisoned(empty: Callable[..., Any]) -> Callable[..., Any]:
    def make(like: Any, shape: Any, dtype: str, fill: int | None = None) -> Any:
        made = empty(like, shape, dtype, fill)
        if fill is None and made.nbytes < 1 << 30:
            ctypes.memset(made.ctypes.data, POISON, made.nbytes)
        return made

    return make


@functools.cache
def _compile() -> None:
    """Once, and before any time limit runs."""
    device = devices.select("cpu")
    from numba_ep.kernels import all_kernels

    for kernel, args in all_kernels():
        device.compile_kernel(kernel, args)


@contextlib.contextmanager
def patched(warps: int) -> Iterator[None]:
    """New outputs hold 0xFF, every block has `warps` warps: the last of two or more
    coordinates, a single one does that too."""
    from numba_ep import arrays

    _compile()
    for name in ("buffer", "cast", "combine", "dispatch"):
        importlib.import_module(f"numba_ep.{name}")
    poisoned = _poisoned(arrays.empty)
    own = [
        sys.modules[name] for name in list(sys.modules) if name.startswith("numba_ep.")
    ]
    with contextlib.ExitStack() as patches:
        for module in own:
            if module is not arrays and vars(module).get("empty") is arrays.empty:
                patches.enter_context(mock.patch.object(module, "empty", poisoned))
        for name in ("WARPS_PER_BLOCK", "ONE_BLOCK_WARPS"):
            patches.enter_context(mock.patch.object(devices.select(), name, warps))
        yield


# Running.


def run(
    program: Callable[[Any], Any],
    num_ranks: int,
    num_bytes: int,
    warps: int = 1,
    limit_s: float = LIMIT_S,
    **options: Any,
) -> list[Any]:
    """program(buffer) on every rank, each with a Buffer of num_bytes; the results."""
    from numba_ep.buffer import Buffer

    options = {"device": "cpu", "timeout_s": TIMEOUT_S, **options}

    def of_rank(group: Any) -> Any:
        buffer = Buffer(group, num_rdma_bytes=num_bytes, **options)
        result = program(buffer)  # where it fails, spawn ends the others' buffers
        buffer.destroy()
        return result

    with patched(warps):
        return spawn(of_rank, num_ranks, limit_s)


def check(scenario: Scenario, rounds: int = 2, warps: int = 1, **options: Any) -> None:
    """Rounds of everything, each with a payload of its own, on one Buffer a rank."""
    worlds = [World(scenario)]
    for _ in range(rounds - 1):
        worlds.append(World(worlds[-1].scenario.next_round()))

    def program(buffer: Any) -> None:
        for world in worlds:
            check_round(buffer, world)

    num_bytes = options.pop("num_bytes", scenario.num_bytes)
    run(program, scenario.num_ranks, num_bytes, warps, **options)


def check_round(buffer: Any, world: World) -> Any:
    """Layout, dispatch, cached dispatch, combine with 0, 1, 2 biases; the handle."""
    rank = buffer.rank
    check_layout(buffer, world)
    poison(buffer)
    handle = check_dispatch(buffer, world)
    matrices = [
        handle.rdma_channel_prefix_matrix,
        handle.recv_rdma_channel_prefix_matrix,
    ]
    compare_handle(handle, world, rank, buffer.group.allgather(matrices))
    poison(buffer)
    check_cached(buffer, world, handle)
    for num_biases in range(3):
        poison(buffer)
        check_combine(buffer, world, handle, num_biases)
    return handle


def check_layout(buffer: Any, world: World) -> None:
    """get_dispatch_layout against the oracle."""
    s, expected = world.scenario, world.layouts[buffer.rank]
    ids = world._ids(buffer.rank)
    per_rank, nothing, per_expert, in_rank, event = buffer.get_dispatch_layout(
        ids, s.num_experts
    )
    event.current_stream_wait()
    assert nothing is None
    same(per_rank, expected.num_tokens_per_rank, "num_tokens_per_rank")
    same(per_expert, expected.num_tokens_per_expert, "num_tokens_per_expert")
    same(in_rank, expected.is_token_in_rank, "is_token_in_rank")


def check_dispatch(buffer: Any, world: World) -> Any:
    """Dispatch against the oracle; returns the handle."""
    result = buffer.dispatch(**world.dispatch_args(buffer.rank))
    *received, handle, event = result
    event.current_stream_wait()
    compare_received(received, world, buffer.rank)
    return handle


def check_cached(buffer: Any, world: World, handle: Any) -> None:
    """A dispatch by the handle's routing: the same rows, nothing else."""
    args = world.dispatch_args(buffer.rank)
    x, *others, event = buffer.dispatch(args["x"], handle, config=args["config"])
    event.current_stream_wait()
    assert others == [None] * 4
    expected, num_rows = world.received[buffer.rank], len(world.rows[buffer.rank])
    x, scales = x if world.scenario.fp8 else (x, None)
    assert len(x) == (world.scenario.num_worst_tokens or num_rows)
    same(x[:num_rows], expected.x, "cached x")
    scales = scales if scales is None else scales[:num_rows]
    same(scales, expected.scales, "cached scales")


def check_combine(buffer: Any, world: World, handle: Any, num_biases: int = 0) -> None:
    """Combine against the oracle."""
    args = world.combine_args(buffer.rank, num_biases)
    x, weights, event = buffer.combine(handle=handle, **args)
    event.current_stream_wait()
    expected_x, expected_weights = world.combined(buffer.rank, num_biases)
    same(x, expected_x, f"combined x, {num_biases} biases")
    same(weights, expected_weights, "combined weights")


# Errors.


def caught(call: Callable[[], Any]) -> Exception:
    """What `call` raises; failing if it returns."""
    try:
        result = call()
    except Exception as error:  # noqa: BLE001, which one is the caller's to check
        return error
    raise AssertionError(f"expected an error, got {result!r:.80}")


def check_refused(
    buffer: Any, call: Callable[[], Any], culprit: int, own: str
) -> Exception:
    """`call` raises on every rank: the culprit its own error, the others name it.

    own: what the culprit's message must match. Returns the error.
    """
    from numba_ep.errors import RefusedError

    error = caught(call)
    text = f"{type(error).__name__}: {error}"
    if buffer.rank == culprit:
        assert isinstance(error, (ValueError, TypeError)), text
        assert re.search(own, str(error)), text
    else:
        assert isinstance(error, RefusedError), text
        assert error.culprit == culprit, text
        assert re.search(rf"\brank {culprit}\b", str(error)), text
    return error


def check_disagreement(
    buffer: Any, call: Callable[[], Any], culprit: int, field: str
) -> None:
    """`call` raises on every rank, each naming the culprit and the field."""
    from numba_ep.errors import RefusedError

    error = caught(call)
    text = f"{type(error).__name__}: {error}"
    assert isinstance(error, RefusedError), text
    assert error.culprit == culprit, text
    assert re.search(rf"\b{field}\b.*\brank {culprit}\b", str(error)), text


def refuse_each(
    world: World, operation: str, bad: dict[str, tuple[Change, str]]
) -> None:
    """Rank after rank gives `operation` each wrong argument, and is refused everywhere.

    bad: by name, the change to the valid arguments and what its error must match.
    """

    def program(buffer: Any) -> None:
        handle = check_round(buffer, world)
        for case, (name, (change, own)) in enumerate(bad.items()):
            culprit = case % world.scenario.num_ranks
            if operation == "dispatch":
                args = world.dispatch_args(buffer.rank)
            else:
                args = {"handle": handle, **world.combine_args(buffer.rank)}
            if buffer.rank == culprit:
                args.update(change(args))
            call = functools.partial(getattr(buffer, operation), **args)
            try:
                check_refused(buffer, call, culprit, own)
                check_round(buffer, world)
            except BaseException as error:
                raise AssertionError(
                    f"{operation} with wrong {name}: {error}"
                ) from error

    run(program, world.scenario.num_ranks, world.scenario.num_bytes)
