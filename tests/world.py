"""Ranks as threads, each with a Buffer, checked bit for bit against the oracle.

    check(Scenario(tokens=(13, 0, 7, 5)))   # two rounds of everything on one Buffer

Before every operation the rings and the kernels' scratch are filled with 0xFF, and so
is every new output array. What goes in and what must come out is made in scenario.py.

The same tests run on a CPU and on a GPU (NUMBA_EP_DEVICE): worlds and tests have NumPy
arrays, and on a GPU every Buffer within `run` or `spawn` is given CuPy arrays for them
and its results are fetched.
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

import numpy as np
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

from numba_ep import arrays
from numba_ep import device as devices
from numba_ep.handle import Handle
from numba_ep.reference import E4M3
from numba_ep.spawn import spawn as spawn_threads

__all__ = [
    "DEVICE",
    "MOST_RANKS",
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
    "fetched",
    "given",
    "on_cpu",
    "poison",
    "refuse_each",
    "run",
    "same",
    "spawn",
]  # fmt: skip

TIMEOUT_S = 20.0  # of a Buffer's waits
LIMIT_S = 60.0  # of a whole run of all ranks
POISON = 0xFF
Change = Callable[[dict[str, Any]], dict[str, Any]]


DEVICE = "cuda" if devices.wanted_target() == "cuda" else "cpu"
# Of a process: a GPU has 32 hardware queues, and a rank takes two
# (`numba_ep.device.check_queues`). A CPU takes as many ranks as anyone asks for.
MOST_RANKS = 16 if DEVICE == "cuda" else 1 << 20


def on_cpu(reason: str) -> pytest.MarkDecorator:
    """Marks a test that cannot run on a GPU, and says why."""
    return pytest.mark.skipif(DEVICE == "cuda", reason=f"for a CPU: {reason}")


# The border: NumPy arrays in tests, CuPy arrays in a Buffer on a GPU.


def given(value: Any) -> Any:
    """`value` as a Buffer takes it: an array, a handle, or a tuple or list of such."""
    if DEVICE == "cpu":
        return value
    if isinstance(value, Handle):
        return vars(value).get("of_buffer", value)
    if type(value) in (tuple, list):
        return type(value)(map(given, value))
    # CuPy has one byte order: an array of the other one is refused as it is.
    if not isinstance(value, np.ndarray) or not value.dtype.isnative:
        return value
    if value.flags.c_contiguous:
        return arrays.from_host(value, True)
    return _strided(value)


def _strided(array: np.ndarray) -> Any:
    """A copy on the GPU with the same strides: what lies in between goes along."""
    import cupy

    steps = [(n - 1) * step for n, step in zip(array.shape, array.strides)]
    first = sum(step for step in steps if step < 0)
    behind_last = sum(step for step in steps if step > 0) + array.itemsize
    at = ctypes.c_uint8 * (behind_last - first)
    raw = np.ctypeslib.as_array(at.from_address(array.ctypes.data + first))
    start = arrays.from_host(raw, True).data + -first
    dtype = arrays._dtype("cupy", str(array.dtype))
    return cupy.ndarray(array.shape, dtype, start, array.strides)


def fetched(value: Any) -> Any:
    """What a Buffer returned, as NumPy has it; such a handle is good for `given`."""
    if DEVICE == "cpu":
        return value
    if isinstance(value, Handle):
        handle = Handle(*map(fetched, value))
        vars(handle).update(vars(value), of_buffer=value)
        return handle
    if type(value) in (tuple, list):
        return type(value)(map(fetched, value))
    import cupy

    if not isinstance(value, cupy.ndarray):
        return value
    # E4M3 is the only dtype that goes as uint8.
    return arrays.to_host(value, E4M3 if value.dtype == np.uint8 else value.dtype)


def _at_the_border(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(buffer: Any, *args: Any, **options: Any) -> Any:
        named = {name: given(value) for name, value in options.items()}
        return fetched(method(buffer, *map(given, args), **named))

    return call


@contextlib.contextmanager
def border() -> Iterator[None]:
    """While it lasts, Buffers take and return what NumPy has, also on a GPU."""
    from numba_ep.buffer import Buffer

    with contextlib.ExitStack() as patches:
        for name in ("get_dispatch_layout", "dispatch", "combine"):
            if DEVICE == "cuda":
                method = _at_the_border(getattr(Buffer, name))
                patches.enter_context(mock.patch.object(Buffer, name, method))
        yield


# Poison.


def poison(buffer: Any) -> None:
    """Collective: fill what the next operation must write before it reads it."""
    endpoint = buffer._endpoint
    network = endpoint.transport
    buffer.group.Barrier()
    # Where puts come to lie may be another region than the one that peers write.
    maps = {
        network.receive: endpoint._receive_map,
        network.landing: endpoint._receive_map,
        network.send: endpoint._send_map,
    }
    for region, regions in maps.items():
        at, num_bytes = regions["rings"], regions.sizes["rings"]
        _fill(endpoint, region.address + at, num_bytes, region.on_gpu)
    for memory in (endpoint._scratch, endpoint.notify_scratch, endpoint._own_rings):
        if memory is not None:
            _fill(endpoint, memory.address, memory.num_bytes, memory.host is None)
    buffer.group.Barrier()


def _fill(endpoint: Any, address: int, num_bytes: int, on_gpu: bool) -> None:
    if not on_gpu:
        ctypes.memset(address, POISON, num_bytes)
    elif num_bytes:
        from cuda.bindings import driver

        from transport.cuda_driver import call

        stream = endpoint.runtime.stream
        call(driver.cuMemsetD8Async, address, POISON, num_bytes, stream)
        endpoint.runtime.synchronize()


def _poisoned(empty: Callable[..., Any]) -> Callable[..., Any]:
    def make(like: Any, shape: Any, dtype: str) -> Any:
        made = empty(like, shape, dtype)
        # Of expert numbers, 0xFF would be -1: no expert.
        poison = 0x7F if dtype == "int64" else POISON
        if 0 < made.nbytes < 1 << 30:
            if isinstance(made, np.ndarray):
                ctypes.memset(made.ctypes.data, poison, made.nbytes)
            else:
                # No kernel: the driver might load it only when other ranks' have ended.
                made.data.memset_async(poison, made.nbytes)
        return made

    return make


# Running.


@functools.cache
def _compile() -> Any:
    """Once, and before any time limit runs; returns the device's module."""
    device = devices.select(DEVICE)
    _use_gpu()
    from numba_ep.kernels import all_kernels

    for kernel, args in all_kernels():
        device.compile_kernel(kernel, args)
    return device


def _use_gpu() -> None:
    """Every rank, a thread each, works on the first GPU."""
    if DEVICE == "cuda":
        devices.select().use_gpu(0)


@contextlib.contextmanager
def patched(warps: int) -> Iterator[None]:
    """New outputs hold 0xFF, every block has `warps` warps: the last of two or more
    coordinates, a single one does that too."""
    device = _compile()
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
            patches.enter_context(mock.patch.object(device, name, warps))
        yield


def spawn(
    program: Callable[[Any], Any], num_ranks: int, limit_s: float = LIMIT_S
) -> list[Any]:
    """`numba_ep.spawn` of a program that makes its own Buffers, on DEVICE."""
    _compile()

    def of_rank(group: Any) -> Any:
        _use_gpu()
        return program(group)

    with border():
        return spawn_threads(of_rank, num_ranks, limit_s)


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

    options = {"device": DEVICE, "timeout_s": TIMEOUT_S, **options}

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
