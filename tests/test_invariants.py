"""The protocol's invariants, each with a test that fails when it is broken.

     1  data before tail            test_transport.py (the contract), and here: one
                                    request carries both, on the ring's own queue
     2  drained before reuse        here
     3  rows open every operation   here
     4  slots                       here
     5  state lives on the device   here
     6  commit last                 test_fifo_proxy.py, with kernels that push
     7  no head-of-line blocking    test_fifo_proxy.py for the proxy, here for senders
     8  every wait is bounded       here, and test_fifo_proxy.py (a full FIFO)
     9  destroy is collective       here
    10  own rank short-cuts         here
    11  deterministic               here, and every exact comparison anywhere
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from faulty import (
    Case,
    DelayedTransport,
    Wrapped,
    Wrapping,
    answer,
    assert_same,
    combine,
    dispatch,
    make_buffer,
    poison,
    round_trip,
    run_case,
    spawn_ranks,
)

import transport
from numba_ep import Buffer, BufferAborted, Config, PeerTimeout, RefusedError, device
from numba_ep.slot import slot_bytes
from numba_ep.spawn import ThreadGroup
from transport import proxy, wr
from transport.atomics import read_word
from transport.jit import JIT_DISABLED

if device.wanted_target() == "cuda":
    pytest.skip("these tests are for kernels on the CPU", allow_module_level=True)

from numba_ep.device import (
    add_i32,
    clock_ns,
    cuda,
    ld_acquire,
    load_i64,
    relax,
    st_release,
    store_i64,
)
from numba_ep.kernels.channel import poll_credit
from numba_ep.kernels.records import (
    LINE_BYTES,
    RESULT_EXPERTS,
    RESULT_OPERATION,
    RESULT_RECEIVED,
    RESULTS,
    STATE_OPERATION,
    STATE_VERDICT,
    Comm,
    Ring,
)

LIMIT_S = 30.0
BF16 = np.dtype(ml_dtypes.bfloat16)
SMALL = Config(4, 1, 2, 1, 2)


class Recording(Wrapped):
    """Keeps every request that was posted."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.posted: list[wr.WorkRequest] = []

    def post(self, batch: np.ndarray) -> np.ndarray:
        self.posted += [wr.WorkRequest(*entry) for entry in batch.tolist()]
        return super().post(batch)


class Map:
    """Where things lie in the receive regions of a Buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self.regions = buffer._endpoint._receive_map
        self.channels = buffer._endpoint.settings.max_channels
        self.ranks = buffer.group_size

    def line(self, region: str, peer: int, channel: int = 0) -> int:
        """Offset of a counter that lies there for (peer, channel)."""
        index = peer if region == "row counters" else peer * self.channels + channel
        return self.regions[region] + index * LINE_BYTES

    def is_in(self, region: str, offset: int) -> bool:
        start = self.regions[region]
        return start <= offset < start + self.regions.sizes[region]


def is_row(entry: Any, regions: Map) -> bool:
    return regions.is_in("row counters", int(entry[wr.COUNTER_AT]))


def is_farewell(entry: Any, regions: Map) -> bool:
    return regions.is_in("farewell", int(entry[wr.COUNTER_AT]))


def words(memory: Any) -> np.ndarray:
    view: np.ndarray = memory.host.view(np.int64)
    return view


def wait_until(condition: Callable[[], Any], limit_s: float = 5) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(1e-3)


def use_warps(monkeypatch: pytest.MonkeyPatch, warps: int) -> None:
    """Blocks as on a GPU have several warps and a coordinator; a CPU's have one."""
    monkeypatch.setattr(device.select(), "WARPS_PER_BLOCK", warps)


# 1. Data before tail.


def test_1_one_request_carries_data_and_tail_on_the_rings_own_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "create", made := Wrapping(Recording))
    case = Case([21, 13, 0], 64, 2, 6, Config(4, 2, 4, 2, 4), max_channels=3)
    buffers: dict[int, Map] = {}

    def keep(buffer: Buffer) -> None:
        buffers[buffer.rank] = Map(buffer)

    run_case(case, repeats=2, before=keep)
    slots = slot_bytes(128, 0, 2), slot_bytes(128, 0, 0) + 16
    for rank, end in made.made.items():
        regions = buffers[rank]
        tails: dict[tuple[int, int], int] = {}
        for request in end.posted:
            assert request.counter % LINE_BYTES == 0
            if regions.is_in("tails", request.counter):
                key = request.peer, request.queue
                assert request.opcode == wr.PUT
                assert request.counter == regions.line("tails", rank, request.queue)
                assert regions.is_in("rings", request.destination)
                # The counter is the absolute number of rows ever sent on this ring.
                rows = request.value - tails.get(key, 0)
                assert 1 <= rows <= 2
                assert request.num_bytes in [rows * slot for slot in slots]
                tails[key] = request.value
            elif regions.is_in("heads", request.counter):
                assert request.opcode == wr.COUNTER
                assert request.counter == regions.line("heads", rank, request.queue)
            elif is_row(request, regions):
                assert (request.opcode, request.queue) == (wr.PUT, 0)
                assert request.counter == regions.line("row counters", rank)
                assert regions.is_in("rows", request.destination)
            else:
                assert is_farewell(request, regions)
        rows_of = [r.value for r in end.posted if is_row(r, regions) and r.peer != rank]
        assert sorted(rows_of) == sorted([1, 2, 3, 4] * 2)


# 2. Drained before reuse.


@pytest.mark.parametrize(("chunk", "warps"), [(1, 1), (2, 1), (5, 1), (2, 4)])
def test_2_all_credit_is_back_when_an_operation_is_over(
    monkeypatch: pytest.MonkeyPatch, chunk: int, warps: int
) -> None:
    use_warps(monkeypatch, warps)
    config = Config(4, chunk, 2 * chunk, chunk, 2 * chunk)
    case = Case([13, 4, 27], 64, 2, 6, config, timeout_s=4)
    want = answer(case)

    def check(buffer: Buffer) -> None:
        endpoint, regions = buffer._endpoint, Map(buffer)
        assert endpoint.proxy.drain(5)
        pairs = buffer.group_size * regions.channels
        tails, heads = words(endpoint._cursors)[: 2 * pairs].reshape(2, pairs)
        received = endpoint.transport.receive.address
        for peer in range(buffer.group_size):
            for channel in range(regions.channels):
                ring = peer * regions.channels + channel
                head = received + regions.line("heads", peer, channel)
                tail = received + regions.line("tails", peer, channel)
                # Heads come from the peer; what it sent is what this rank consumed.
                wait_until(lambda at=head, n=tails[ring]: read_word(at) == n)  # type: ignore[misc]
                assert read_word(tail) == heads[ring]

    def program(group: Any) -> None:
        buffer = make_buffer(group, case)
        for _ in range(2):
            got = dispatch(buffer, case, want)
            check(buffer)
            group.Barrier()
            combine(buffer, case, want, got)
            check(buffer)
            group.Barrier()
        buffer.destroy()

    spawn_ranks(program, 3)


@cuda.jit
def credit_kernel(comm: Any, ring: Any, seen: int, out: int) -> None:
    store_i64(out, 0, poll_credit(comm, ring, 1, 0, seen))


def test_2_no_credit_until_the_last_heads_of_the_operation_before() -> None:
    runtime = device.make_runtime("credit", 0)
    heads, cursors, out = (np.zeros(32, np.int64) for _ in range(3))
    comm = Comm(*[0] * len(Comm._fields))._replace(
        num_ranks=2, max_channels=1, receive=heads.ctypes.data,
        tail_cursors=cursors.ctypes.data,
    )  # fmt: skip
    ring = Ring(*[0] * len(Ring._fields))._replace(capacity=6)
    start = cursors[1] = 40

    def credit(head: int, seen: int = 0) -> int:
        heads[LINE_BYTES // 8] = head
        args = (comm, ring, seen, out.ctypes.data)
        device.compile_kernel(credit_kernel, args)
        runtime.launch(credit_kernel, 1, 1, args)
        return int(out[0])

    # Four rows of the operation before have not been confirmed, then one.
    assert [credit(start - 4), credit(start - 1)] == [0, 0]
    assert [credit(start), credit(start + 1), credit(start + 9)] == [6, 7, 15]
    assert credit(start + 1, seen=9) == 9  # a late older head takes nothing back
    runtime.close()


# 3. Every operation opens with an exchange of rows.


class SlowRows(DelayedTransport):
    """Row n from one rank to another takes a while, and its source is read late."""

    def __init__(self, inner: Any, pair: tuple[int, int], operation: int) -> None:
        super().__init__(inner, delay_s=0.0, slow=self._slow_row)
        self._pair, self._operation = pair, operation
        self.row_counters = range(0)

    def _slow_row(self, rank: int, entry: np.ndarray) -> float | None:
        is_it = (
            (rank, int(entry[wr.PEER])) == self._pair
            and int(entry[wr.COUNTER_AT]) in self.row_counters
            and int(entry[wr.VALUE]) == self._operation
        )
        return 0.15 if is_it else None


@pytest.mark.parametrize("pair", [(2, 1), (0, 1)])
def test_3_a_row_is_not_overwritten_before_all_have_read_it(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[int, int]
) -> None:
    """Rank 0 opens operation 4 while rank 1 has not yet got all of operation 3.

    (2, 1): rank 1 holds row 3 of rank 0 and waits for another one.
    (0, 1): row 3 of rank 0 is still queued when rank 0 writes row 4.
    """
    made = Wrapping(SlowRows, pair=pair, operation=3)
    monkeypatch.setattr(transport, "create", made)
    shape = Case([0, 0, 0], 64, 1, 3, Config(2, 2, 4, 2, 4))
    cases = [shape, shape, shape._replace(num_tokens=[0, 0, 3]), shape._replace(seed=9)]
    answers = [answer(case) for case in cases]

    def program(group: Any) -> str:
        buffer = make_buffer(group, shape)
        regions = Map(buffer)
        start = regions.line("row counters", 0)
        made.made[buffer.rank].row_counters = range(start, start + 3 * LINE_BYTES)
        group.Barrier()
        for case, want in zip(cases[:3], answers[:3], strict=True):
            dispatch(buffer, case, want)
        mine = answers[3].inputs[buffer.rank]
        layout = buffer.get_dispatch_layout(mine.topk_idx, 3)
        with pytest.raises(ValueError, match=r"expert_alignment|rank 0 ref") as no:
            buffer.dispatch(
                mine.x, None, layout[0], None, layout[3], layout[2], mine.topk_idx,
                mine.topk_weights, 0 if buffer.rank == 0 else 1, config=shape.config,
            )  # fmt: skip
        for _ in range(2):
            dispatch(buffer, cases[3], answers[3])
        buffer.destroy()
        return type(no.value).__name__

    names = spawn_ranks(program, 3)
    assert names == ["ArgumentError", "RefusedError", "RefusedError"]


def refused_dispatch(buffer: Buffer, case: Case, want: Any, **wrong: Any) -> Exception:
    """A dispatch that must be refused; returns what it raises."""
    mine = want.inputs[buffer.rank]
    layout = buffer.get_dispatch_layout(mine.topk_idx, case.num_experts)
    arguments: dict[str, Any] = {"expert_alignment": 1, "config": case.config} | wrong
    with pytest.raises((ValueError, TypeError)) as info:
        buffer.dispatch(
            mine.x, None, layout[0], None, layout[3], layout[2], mine.topk_idx,
            mine.topk_weights, **arguments,
        )  # fmt: skip
    return info.value


def test_3_a_refusal_moves_no_token_and_counts_as_an_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "create", made := Wrapping(Recording))
    case = Case([13, 5, 20], 64, 2, 6, Config(4, 2, 4, 2, 4))
    want = answer(case)

    def program(group: Any) -> tuple[int, int]:
        buffer = make_buffer(group, case)
        regions, posted = Map(buffer), made.made[buffer.rank].posted
        state = words(buffer._endpoint._state)
        operations: list[int] = []
        for turn, alignment in enumerate([0, 1, 0, 0]):
            round_trip(buffer, case, want)
            assert buffer._endpoint.proxy.drain(5)
            before = len(posted)
            wrong = {"expert_alignment": alignment} if buffer.rank == 1 else {}
            if alignment == 0:
                error = refused_dispatch(buffer, case, want, **wrong)
                assert isinstance(error, RefusedError) == (buffer.rank != 1)
                assert "rank 1" in str(error) or buffer.rank == 1
            assert buffer._endpoint.proxy.drain(5)
            assert all(is_row(request, regions) for request in posted[before:])
            assert len(posted) - before == (2 if alignment == 0 else 0)
            assert int(state[STATE_OPERATION]) == 2 * (turn + 1) + len(operations) + (
                alignment == 0
            )
            operations += [turn] if alignment == 0 else []
            group.Barrier()
        round_trip(buffer, case, want)
        buffer.destroy()
        return int(state[STATE_OPERATION]), len(operations)

    assert spawn_ranks(program, 3) == [(13, 3)] * 3


@pytest.mark.parametrize(
    ("wrong", "culprit", "text"),
    [
        ({1: {"expert_alignment": 0}, 2: {"expert_alignment": 4}}, 1, "rank 1 refused"),
        ({2: {"expert_alignment": 4}}, 2, "expert_alignment: 1 on rank 0, 4 on rank 2"),
        ({0: {"expert_alignment": 4}}, 1, "expert_alignment: 4 on rank 0, 1 on rank 1"),
        ({3: {"config": Config(4, 3, 6, 3, 6)}}, 3, "chunk: 2 on rank 0, 3 on rank 3"),
        ({1: {"config": Config(2, 2, 4, 2, 4)}}, 1, "num_channels: 2 on rank 0, 1 on"),
        ({2: {"num_worst_tokens": 99}}, 2, "num_worst_tokens: 0 on rank 0, 99 on"),
    ],
)
def test_3_every_rank_reaches_the_same_verdict(
    wrong: dict[int, dict[str, Any]], culprit: int, text: str
) -> None:
    case = Case([13, 5, 0, 7], 64, 2, 8, Config(4, 2, 4, 2, 4))
    roomy = case._replace(config=Config(4, 3, 6, 3, 6))
    want = answer(case)

    def program(group: Any) -> Exception:
        buffer = make_buffer(group, case, roomy)
        error = refused_dispatch(buffer, case, want, **wrong.get(buffer.rank, {}))
        round_trip(buffer, case, want)
        buffer.destroy()
        return error

    errors = spawn_ranks(program, 4)
    others = [e for e in errors if isinstance(e, RefusedError)]
    assert len(others) >= 3
    assert {error.culprit for error in others} == {culprit}
    assert len({str(error) for error in others}) == 1
    assert text in str(others[0])


def test_3_a_failure_after_the_verdict_is_an_abort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No memory for the outputs on rank 1: the others must not wait for it."""
    from numba_ep import dispatch

    make_outputs = dispatch.Dispatch._outputs

    def outputs(self: Any, rows: int) -> Any:
        if self.endpoint.rank == 1:
            raise MemoryError("no memory for outputs")
        return make_outputs(self, rows)

    monkeypatch.setattr(dispatch.Dispatch, "_outputs", outputs)
    case = Case([40, 40, 40], 64, 2, 6, SMALL, timeout_s=20)
    since = time.monotonic()
    errors = run_case(case, catch=(MemoryError, BufferAborted), barriers=False)
    assert isinstance(errors[1], MemoryError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, BufferAborted)
        assert error.culprit == 1
    assert time.monotonic() - since < 10, "they waited for the timeout"


def test_3_the_exchange_of_rows_is_the_only_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case([13, 5, 20], 64, 2, 6, Config(4, 2, 4, 2, 4))
    want, meetings = answer(case), []

    def program(group: Any) -> None:
        buffer = make_buffer(group, case)
        group.Barrier()
        monkeypatch.setattr(ThreadGroup, "allgather", lambda *a: meetings.append(a))
        monkeypatch.setattr(ThreadGroup, "Barrier", lambda *a: meetings.append(a))
        for _ in range(2):
            round_trip(buffer, case, want)
        buffer.destroy()

    spawn_ranks(program, 3)
    assert not meetings


# 4. Slots.


def test_4_positions_start_anew_and_chunks_never_wrap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Odd numbers of rows in rings of 9 by chunks of 3, then of 4 by 2, and again."""
    monkeypatch.setattr(transport, "create", made := Wrapping(Recording))
    shapes = [Config(4, 3, 7, 3, 7), Config(2, 2, 4, 2, 4), Config(4, 3, 7, 3, 7)]
    cases = [Case([37, 11], 64, 2, 4, config) for config in shapes]
    answers = [answer(case) for case in cases]
    slot = slot_bytes(128, 0, 2)

    def program(group: Any) -> None:
        buffer = make_buffer(group, *cases)
        regions, posted = Map(buffer), made.made[buffer.rank].posted
        for case, want in zip(cases, answers, strict=True):
            group.Barrier()
            poison(buffer)
            before = len(posted)
            group.Barrier()
            dispatch(buffer, case, want)
            assert buffer._endpoint.proxy.drain(5)
            data = [r for r in posted[before:] if regions.is_in("tails", r.counter)]
            check_slots(buffer, case, data, regions)
        buffer.destroy()

    def check_slots(buffer: Buffer, case: Case, data: Any, regions: Map) -> None:
        config = case.config
        positions: dict[tuple[int, int, int], int] = {}
        receive_at, send_at = regions.regions["rings"], buffer._endpoint.rings()[3]
        for request in data:
            for region_at, offset, ring_rank in (
                (receive_at, request.destination, buffer.rank),
                (send_at, request.source, request.peer),
            ):
                ring = ring_rank * config.num_channels + request.queue
                at = (offset - region_at) // slot - ring * config.capacity
                rows = request.num_bytes // slot
                assert 0 <= at < at + rows <= config.capacity, "a chunk wraps"
                key = (request.queue, ring_rank, region_at)
                assert at == positions.get(key, 0) % config.capacity
                positions[key] = positions.get(key, 0) + rows
        assert positions

    spawn_ranks(program, 2)


class Boasting(Wrapped):
    """Tails announce five rows more than there are."""

    tails = range(0)

    def post(self, batch: np.ndarray) -> np.ndarray:
        batch = batch.copy()
        for entry in batch:
            if int(entry[wr.COUNTER_AT]) in self.tails:
                entry[wr.VALUE] += 5
        return super().post(batch)


def test_4_the_receiver_takes_what_the_row_states_never_up_to_tail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "create", made := Wrapping(Boasting))
    case = Case([3, 2], 64, 2, 4, Config(2, 8, 16, 8, 16))
    want = answer(case)

    def program(group: Any) -> None:
        buffer = make_buffer(group, case)
        start = Map(buffer).line("tails", 0)
        made.made[buffer.rank].tails = range(start, start + 2 * LINE_BYTES)
        # A slot of zeros names expert 0, of rank 0: a row too many would show there.
        poison(buffer, 0)
        group.Barrier()
        mine, expected = want.inputs[buffer.rank], want.received[buffer.rank]
        layout = buffer.get_dispatch_layout(mine.topk_idx, 4)
        x, ids, weights, _, _, _ = buffer.dispatch(
            mine.x, None, layout[0], None, layout[3], layout[2], mine.topk_idx,
            mine.topk_weights, num_worst_tokens=32, config=case.config,
        )  # fmt: skip
        rows = len(expected.x)
        assert_same(x[:rows], expected.x, "rows")
        assert_same(ids[:rows], expected.topk_idx, "ids")
        assert (ids[rows:] == -1).all()
        assert (weights[rows:] == 0).all()
        buffer.destroy()

    spawn_ranks(program, 2)


# 5. State lives on the device.


def test_5_no_launch_argument_counts_operations() -> None:
    case = Case([13, 5], 64, 2, 4, Config(4, 2, 4, 2, 4))
    want = answer(case)

    def program(group: Any) -> list[list[Any]]:
        buffer = make_buffer(group, case)
        endpoint, launch, seen = buffer._endpoint, buffer._endpoint.launch, []

        def recording(kernel: Any, blocks: int, warps: int, args: Any) -> None:
            # Comm, Ring and Header; the other records hold addresses of user arrays.
            fixed = [a for a in args if type(a).__name__ in ("Comm", "Ring", "Header")]
            fixed += [a[-3:] for a in args if type(a).__name__ == "Notice"]
            seen.append([blocks, warps, fixed])
            launch(kernel, blocks, warps, args)

        endpoint.launch = recording  # type: ignore[method-assign]
        rounds = []
        for _ in range(3):
            dispatch(buffer, case, want)
            rounds.append(seen.copy())
            seen.clear()
        buffer.destroy()
        return rounds

    for first, second, third in spawn_ranks(program, 2):
        assert len(first) == 2
        assert first == second == third


def test_5_operation_number_and_cursors_are_in_device_memory() -> None:
    case = Case([13, 6, 20], 64, 2, 6, Config(4, 2, 4, 2, 4), max_channels=3)
    want, turns = answer(case), 3
    sent = np.zeros((3, 3, 3), np.int64)  # rows by (source, destination, channel)
    for src, inputs in enumerate(want.inputs):
        tokens = case.num_tokens[src]
        for channel in range(2):
            part = slice(tokens * channel // 2, tokens * (channel + 1) // 2)
            sent[src, :, channel] = inputs.is_token_in_rank[part].sum(axis=0)

    def program(group: Any) -> None:
        buffer = make_buffer(group, case)
        rank, endpoint = buffer.rank, buffer._endpoint
        for turn in range(1, turns + 1):
            round_trip(buffer, case, want)
            assert words(endpoint._state)[STATE_OPERATION] == 2 * turn
            tails, heads = words(endpoint._cursors)[:18].reshape(2, 3, 3)
            both = turn * (sent[rank] + sent[:, rank])
            assert (tails == both).all()
            assert (heads == both).all()
        buffer.destroy()

    spawn_ranks(program, 3)


@cuda.jit
def watch_kernel(
    results: int, result_bytes: int, wanted: int, turns: int, wrong: int, watched: int
) -> None:
    """Look at the last count as soon as the number of each operation changes."""
    last = RESULT_EXPERTS + 2047
    for turn in range(turns):
        spins = 0
        since = clock_ns()
        result = results + (turn + 1) % RESULTS * result_bytes
        while ld_acquire(result, RESULT_OPERATION) <= turn:
            if clock_ns() - since > 10_000_000_000:
                return
            relax(spins)
            spins += 1
        if load_i64(result, last) != load_i64(wanted, turn):
            add_i32(wrong, 0, 1)
        st_release(watched, 0, turn + 1)


def test_5_counts_are_there_when_the_number_of_the_operation_is() -> None:
    """Whoever polls the pinned words sees no number before its counts."""
    turns, experts = 150, 4096
    shape = Case([8, 8], 64, 1, experts, Config(2, 4, 8, 4, 8))
    rng = np.random.default_rng(5)
    chosen = rng.integers(0, 9, (turns, 2, 2))  # rows for the last expert of each rank

    def program(group: Any) -> tuple[int, int]:
        buffer = make_buffer(group, shape)
        rank = buffer.rank
        wanted = np.ascontiguousarray(chosen[:, :, rank].sum(axis=1))
        wrong, watched = np.zeros(1, np.int32), np.zeros(1, np.int64)
        arrays = (wanted.ctypes.data, turns, wrong.ctypes.data, watched.ctypes.data)
        results = buffer._endpoint.results
        args = (results.memory.address, results.result_bytes, *arrays)
        device.compile_kernel(watch_kernel, args)
        runtime = device.make_runtime("watch", 0)
        threading.Thread(
            target=runtime.launch, args=(watch_kernel, 1, 1, args), daemon=True
        ).start()
        group.Barrier()
        for turn in range(turns):
            ids = np.array([[experts // 2 - 1]] * 8 + [[experts - 1]] * 8, np.int64)
            zero, one = chosen[turn, rank]
            ids = np.concatenate([ids[:zero], ids[8 : 8 + one]])
            layout = buffer.get_dispatch_layout(ids, experts)
            buffer.dispatch(
                np.zeros((len(ids), 64), BF16), None, layout[0], None, layout[3],
                layout[2], ids, config=shape.config,
            )  # fmt: skip
            # The next operation must not write while this one's words are looked at.
            wait_until(lambda n=turn: read_word(watched.ctypes.data) > n, LIMIT_S)  # type: ignore[misc]
        buffer.destroy()
        return int(wrong[0]), int(watched[0])

    assert spawn_ranks(program, 2) == [(0, turns)] * 2


def test_5_a_kernel_after_a_refusal_moves_nothing() -> None:
    """On a GPU it is launched before the host can know; here it is launched by hand."""
    case = Case([13], 64, 2, 4, Config(4, 2, 4, 2, 4))
    want = answer(case)

    def program(group: Any) -> None:
        buffer = make_buffer(group, case)
        endpoint, launches = buffer._endpoint, []
        launch = endpoint.launch
        endpoint.launch = lambda *a: (launches.append(a), launch(*a))[0]  # type: ignore
        got = dispatch(buffer, case, want)
        combine(buffer, case, want, got)
        tails = words(endpoint._cursors).copy()
        words(endpoint._state)[STATE_VERDICT] = 1
        outputs = [a[3][-1] for a in launches if type(a[3][-1]).__name__ == "Rows"]
        assert len(outputs) == 2
        # Output of dispatch and of combine: poisoned, and left alone.
        keep = np.full(13 * 64, 0x5A5A, np.uint16)
        for kernel, blocks, warps, args in launches[1::2]:
            rows = args[-1]._replace(x=keep.ctypes.data)
            launch(kernel, blocks, warps, (*args[:-1], rows))
        assert (keep == 0x5A5A).all()
        assert (words(endpoint._cursors) == tails).all()
        buffer.destroy()

    spawn_ranks(program, 1)


# 7. No head-of-line blocking: combine deadlocks where a sender waits for one peer.


@pytest.mark.parametrize("warps", [1, 3])
def test_7_a_sender_skips_a_peer_that_gives_no_credit(
    monkeypatch: pytest.MonkeyPatch, warps: int
) -> None:
    use_warps(monkeypatch, warps)
    monkeypatch.setattr(
        transport, "create", Wrapping(DelayedTransport, seed=7, delay_s=3e-4, depth=1)
    )
    for seed in range(3):
        case = Case([60, 60, 60, 60], 64, 4, 16, SMALL, seed=seed, timeout_s=5)
        run_case(case, repeats=2)


# 8. Every wait is bounded.


class Losing(Wrapped):
    """Loses what `loses(rank, entry)` says; aborts get through."""

    loses: Callable[[int, np.ndarray], bool] = staticmethod(lambda rank, entry: False)

    def post(self, batch: np.ndarray) -> np.ndarray:
        kept = batch[[not self.loses(self.rank, entry) for entry in batch]]
        if len(kept):
            super().post(kept)
        return np.empty(0, np.int64)


@pytest.mark.parametrize(
    ("region", "operation", "role", "warps"),
    [
        ("row counters", 1, "notify", 1),
        ("tails", 1, "receiver", 1),
        ("heads", 1, "sender", 1),
        ("row counters", 2, "notify", 1),
        ("tails", 2, "receiver", 1),
        ("heads", 2, "sender", 1),
        ("tails", 1, "receiver", 3),
        ("heads", 1, "sender", 3),
        ("tails", 2, "receiver", 3),
        ("heads", 2, "sender", 3),
    ],
)
def test_8_what_never_comes_is_a_timeout_that_names_the_peer(
    monkeypatch: pytest.MonkeyPatch, region: str, operation: int, role: str, warps: int
) -> None:
    """Rank 1 loses its rows, tails or heads for rank 0, in dispatch or in combine.

    Rank 0 has the least patience. What its other warps wait for meanwhile, its own
    receiver for instance, is a consequence and no cause.
    """
    use_warps(monkeypatch, warps)
    monkeypatch.setattr(transport, "create", made := Wrapping(Losing))
    case = Case([40, 40, 40], 64, 2, 6, SMALL, timeout_s=0.5)
    want = answer(case)

    def program(group: Any) -> tuple[BufferAborted, float]:
        patience = 0.5 if group.Get_rank() == 0 else 10
        buffer = make_buffer(group, case._replace(timeout_s=patience))
        regions = Map(buffer)

        def loses(rank: int, entry: np.ndarray) -> bool:
            way = rank == 1 and int(entry[wr.PEER]) == 0
            return way and regions.is_in(region, int(entry[wr.COUNTER_AT]))

        got = dispatch(buffer, case, want) if operation == 2 else None
        group.Barrier()
        if buffer.rank == 1:
            # Heads of the dispatch are still needed, those of the combine get lost.
            assert buffer._endpoint.proxy.drain(5)
            made.made[1].loses = loses
        group.Barrier()
        since = time.monotonic()
        with pytest.raises(BufferAborted) as info:
            if got is None:
                dispatch(buffer, case, want)
            else:
                combine(buffer, case, want, got)
            dispatch(buffer, case, want)  # who has got everything hears of it here
        took = time.monotonic() - since
        # The Buffer is dead: the first cause stays, whatever is called.
        for _ in range(2):
            with pytest.raises(BufferAborted) as again:
                buffer.get_dispatch_layout(want.inputs[buffer.rank].topk_idx, 6)
            assert str(again.value) == str(info.value)
        buffer.destroy()
        return info.value, took

    results = spawn_ranks(program, 3)
    for rank, (error, took) in enumerate(results):
        assert isinstance(error, PeerTimeout), error
        assert took < 5
        assert error.culprit == 1, error
        assert str(error).startswith(f"rank {rank}: rank 1 ")
    text = str(results[0][0])
    assert f"operation {operation}: the {role} of channel" in text
    # Credit is waited for longer: a peer may hold it back that waits itself.
    assert f"waited {1 if role == 'sender' else 0.5:g} s for rank 1" in text


def test_8_a_waiting_kernel_hears_an_abort() -> None:
    """Rank 0 waits for rows that come late; a peer gives up long before."""
    case = Case([13, 13], 64, 2, 4, SMALL, timeout_s=25)
    want = answer(case)

    def program(group: Any) -> float:
        buffer = make_buffer(group, case)
        group.Barrier()
        since = time.monotonic()
        if buffer.rank == 1:
            time.sleep(0.1)
            buffer._endpoint.proxy.abort(wr.ABORT_CANCELLED, 1)
        with pytest.raises(BufferAborted, match="rank 1 was interrupted"):
            dispatch(buffer, case, want)
        buffer.destroy()
        return time.monotonic() - since

    assert max(spawn_ranks(program, 2)) < 10


# 9. Destroy is collective.


class Watching(DelayedTransport):
    """Notes what happens to a rank's memory after it is given back."""

    def __init__(self, inner: Any, ends: dict[int, Any], faults: list[str]) -> None:
        super().__init__(inner, seed=9, delay_s=0.05)
        self.ends, self.faults = ends, faults
        self.is_closed, self.kept = False, False
        self.delivered: list[wr.WorkRequest] = []
        ends[self.rank] = self

    def deliver(self, entry: np.ndarray) -> None:
        peer = int(entry[wr.PEER])
        if self.ends[peer].is_closed:
            self.faults.append(f"{self.rank} writes to {peer}, which is closed")
        self.delivered.append(wr.WorkRequest(*entry.tolist()))
        super().deliver(entry)

    def close(self, keep_memory: bool = False) -> None:
        waiting = sum(len(line) for line in self._queues.values())
        if waiting and not self.is_closed and not keep_memory:
            self.faults.append(f"{self.rank} closes with {waiting} under way")
        self.is_closed, self.kept = True, self.kept or keep_memory
        super().close(keep_memory)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, Watching], list[str]]:
    ends: dict[int, Watching] = {}
    faults: list[str] = []
    wrapped = Wrapping(Watching, ends=ends, faults=faults)
    monkeypatch.setattr(transport, "create", wrapped)
    return ends, faults


def test_9_nobody_gives_memory_back_while_a_peer_still_writes(
    watched: tuple[dict[int, Watching], list[str]],
) -> None:
    ends, faults = watched
    case = Case([2, 30, 5], 64, 2, 6, Config(4, 2, 4, 2, 4), max_channels=3)
    regions: list[Map] = []
    for _ in range(3):
        run_case(case, 1, before=lambda b: regions.append(Map(b)))
        assert faults == []
        for end in ends.values():
            assert end.is_closed
            assert not end.kept
            last = [r for r in end.delivered if is_farewell(r, regions[0])]
            # One farewell on every queue to every peer, each the last there.
            assert {(r.peer, r.queue) for r in last} == {
                (peer, queue) for peer in ends if peer != end.rank for queue in range(3)
            }
            for request in last:
                line = [r for r in end.delivered if r[1:3] == request[1:3]]
                assert line[-1] == request


def test_9_a_peer_that_does_not_come_is_not_waited_for_longer_than_the_timeout(
    watched: tuple[dict[int, Watching], list[str]],
) -> None:
    ends, faults = watched
    case = Case([3, 3], 64, 2, 4, SMALL, timeout_s=0.5)

    def program(group: Any) -> float:
        buffer = make_buffer(group, case)
        group.Barrier()
        since = time.monotonic()
        if buffer.rank == 0:
            with pytest.raises(PeerTimeout, match="rank 1 did not come") as raised:
                buffer.destroy()
            assert raised.value.culprit == 1
            buffer.destroy()
            with pytest.raises(RuntimeError, match="destroyed"):
                buffer.get_dispatch_layout(np.zeros((1, 1), np.int64), 4)
        took = time.monotonic() - since
        group.Barrier()
        if buffer.rank == 1:
            with pytest.raises(PeerTimeout, match="rank 1 did not answer"):
                dispatch(buffer, case, answer(case))  # it has heard
        buffer.destroy()
        return took

    assert 0.4 < spawn_ranks(program, 2)[0] < 5
    assert ends[0].kept, "rank 1 might still write there"
    assert not faults or all("to 0" in fault for fault in faults)


def test_9_after_an_abort_memory_is_left(
    watched: tuple[dict[int, Watching], list[str]],
) -> None:
    ends, _ = watched
    case = Case([3, 3], 64, 2, 4, SMALL, timeout_s=20)

    def program(group: Any) -> float:
        buffer = make_buffer(group, case)
        group.Barrier()
        if buffer.rank == 0:
            buffer._endpoint.proxy.abort(wr.ABORT_CANCELLED, 0)
        since = time.monotonic()
        with pytest.raises(BufferAborted):
            dispatch(buffer, case, answer(case))
        buffer.destroy()
        return time.monotonic() - since

    # Rank 0 is gone at once, but not before rank 1 has heard why.
    assert max(spawn_ranks(program, 2)) < 10, "the abort was lost"
    assert all(end.kept for end in ends.values())


def test_9_a_dropped_buffer_asks_nobody() -> None:
    case = Case([3, 3], 64, 2, 4, SMALL, timeout_s=20)

    def program(group: Any) -> float:
        buffer = make_buffer(group, case)
        round_trip(buffer, case, answer(case))
        group.Barrier()
        since = time.monotonic()
        if group.Get_rank() == 0:
            del buffer
            gc.collect()
        took = time.monotonic() - since
        group.Barrier()
        return took

    assert spawn_ranks(program, 2)[0] < 5


def test_9_a_later_abort_of_the_group_does_not_touch_freed_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The abort word is gone with its Buffer; the group lives on."""
    case, touched = Case([3, 3], 64, 2, 4, SMALL), []

    def program(group: Any) -> None:
        buffer = make_buffer(group, case)
        round_trip(buffer, case, answer(case))
        buffer.destroy()
        del buffer
        gc.collect()
        group.Barrier()
        if group.Get_rank() == 0:
            monkeypatch.setattr(proxy, "swap_word", lambda *a: touched.append(a))
            raise LookupError("after the end")

    with pytest.raises(LookupError):
        spawn_ranks(program, 2)
    assert not touched, "an abort word was written after destroy"


EXITS = """
import sys
import numba_ep
from numba_ep.spawn import spawn

def program(group):
    buffer = numba_ep.Buffer(group, num_rdma_bytes=1 << 16, num_qps_per_rank=1)
    keep.append(buffer)
    group.Barrier()

keep = []
spawn(program, 2, 60)
if sys.argv[1] == "raises":
    raise LookupError("a bug")
"""


@pytest.mark.parametrize(("how", "status"), [("ends", 0), ("raises", 1)])
def test_9_exit_without_destroy_does_not_hang(how: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITS, how], cwd=Path(__file__).parent.parent,
        env=os.environ | {"NUMBA_EP_DEVICE": "cpu"}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert ("LookupError: a bug" in done.stderr) == (status == 1)
    assert status == 1 or done.stderr == ""


# 10. Own rank short-cuts.


def test_10_nothing_is_posted_to_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "create", made := Wrapping(Recording))
    case = Case([40, 13, 20], 64, 2, 6, Config(4, 2, 4, 2, 4))
    slot = slot_bytes(128, 0, 2)

    def program(group: Any) -> None:
        buffer = make_buffer(group, case)
        poison(buffer)
        group.Barrier()
        want = answer(case)
        got = dispatch(buffer, case, want)
        # Own tokens have not passed through the send ring to oneself, either.
        own = want.inputs[buffer.rank].is_token_in_rank[:, buffer.rank]
        assert own.any()
        ring = case.config.ring_bytes(1, slot)
        start = buffer._endpoint.rings()[2] - buffer._endpoint.send_address
        sending = buffer._endpoint.transport.send
        memory = bytes(view_of(sending, start + buffer.rank * ring, ring))
        assert memory == b"\xff" * ring
        combine(buffer, case, want, got)
        buffer.destroy()

    spawn_ranks(program, 3)
    for rank, end in made.made.items():
        assert end.posted
        assert rank not in {request.peer for request in end.posted}


def view_of(region: Any, start: int, count: int) -> Any:
    import ctypes

    return (ctypes.c_char * count).from_address(region.address + start).raw


def test_10_one_rank_posts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "create", made := Wrapping(Recording))
    case, counts = Case([101], 64, 3, 8, SMALL), []

    def program(group: Any) -> None:
        buffer = make_buffer(group, case)
        for turn in range(2):
            round_trip(buffer, case, answer(case, turn))
        buffer._endpoint.proxy.drain(5)
        counts.append(buffer.statistics())
        buffer.destroy()

    spawn_ranks(program, 1)
    assert made.made[0].posted == []
    (statistics,) = counts
    assert statistics.puts == statistics.put_bytes == statistics.counter_writes == 0


# 11. Deterministic.


def combined(parts: list[float], biases: list[float]) -> list[float]:
    """What rank 0 gets for a token whose row from rank r is all `parts[r]`."""
    ranks = len(parts)
    case = Case([1] * ranks, 64, ranks, ranks, Config(2, 2, 4, 2, 4))
    topk = np.tile(np.arange(ranks), (1, 1))

    def program(group: Any) -> Any:
        buffer = make_buffer(group, case)
        layout = buffer.get_dispatch_layout(topk, ranks)
        x = np.ones((1, 64), BF16)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, None, layout[0], None, layout[3], layout[2], topk, config=case.config
        )
        assert handle is not None
        rows[:] = parts[buffer.rank]
        bias = tuple(np.full((1, 64), value, BF16) for value in biases) or None
        sums, _, _ = buffer.combine(rows, handle, bias=bias, config=case.config)
        buffer.destroy()
        return sums

    sums = spawn_ranks(program, ranks)
    assert all(s.tobytes() == sums[0].tobytes() for s in sums)
    assert len({float(value) for value in sums[0][0]}) == 1
    return [float(sums[0][0, 0])]


@pytest.mark.parametrize(
    ("parts", "biases", "expected"),
    [
        # C14: rounded once; bfloat16 in between would give 256.
        ([256, 1, 1], [], 258),
        # Ascending rank: (1 + 2**30) - 2**30, and no other order, is 0 in float32.
        ([1, 2.0**30, -(2.0**30)], [], 0),
        ([2.0**30, 1, -(2.0**30)], [], 0),
        ([2.0**30, -(2.0**30), 1], [], 1),
        # The biases come first, and bias_0 + bias_1 before any row.
        ([1, -(2.0**30)], [2.0**30], 0),
        ([-(2.0**30), 1], [2.0**30], 1),
        ([2.0**30, 1], [1, -(2.0**30)], 1),
        ([2.0**30, 0], [1, -(2.0**30)], 0),
        # Ties to even, once.
        ([256, 1], [], 256),
        ([258, 1], [], 260),
        ([256, 1], [2.0**-7], 258),
    ],
)
def test_11_sums_are_in_float32_by_ascending_rank_rounded_once(
    parts: list[float], biases: list[float], expected: float
) -> None:
    assert combined(parts, biases) == [expected]


@pytest.mark.parametrize("warps", [1, 2, 5])
def test_11_rows_and_sums_are_the_same_from_run_to_run(
    monkeypatch: pytest.MonkeyPatch, warps: int
) -> None:
    """Whatever the order in which data arrive: by (source rank, token)."""
    use_warps(monkeypatch, warps)
    for seed in range(3):
        with monkeypatch.context() as patch:
            wrapped = Wrapping(DelayedTransport, seed=seed, delay_s=2e-3)
            patch.setattr(transport, "create", wrapped)
            run_case(Case([20, 33, 7], 128, 3, 6, SMALL), repeats=2)


# In plain Python the moment of a store can be caught, whatever the machine's order.

if JIT_DISABLED:

    def test_in_python_5_counts_are_written_when_the_number_is_released(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from numba_ep.kernels import notify

        case, released = Case([9, 4], 64, 2, 8, SMALL), []

        def release(base: int, index: int, value: int) -> None:
            assert index == RESULT_OPERATION
            counts = [load_i64(base, RESULT_EXPERTS + i) for i in range(4)]
            received = load_i64(base, RESULT_RECEIVED)
            released.append((value, received, counts))
            st_release(base, index, value)

        monkeypatch.setattr(notify, "st_release", release)
        run_case(case, repeats=3)
        want = [
            (2 * turn + 1, len(r.x), r.num_recv_tokens_per_expert)
            for turn in range(3)
            for r in answer(case, turn).received
        ]
        dispatches = [words for words in released if words[0] % 2]
        assert len(released) == 12
        assert sorted(dispatches) == sorted(want)

    def test_in_python_6_an_entry_is_whole_when_it_is_committed(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from numba_ep.kernels import fifo

        monkeypatch.setattr(transport, "create", made := Wrapping(Recording))
        committed, lock = Counter[tuple[int, ...]](), threading.Lock()

        def essence(fields: Any) -> tuple[int, ...]:
            request = wr.WorkRequest(*fields)
            if request.opcode == wr.PUT:
                return tuple(request)
            return (*request[:3], *request[6:])  # it has no data

        def release(base: int, index: int, value: int) -> None:
            if index == wr.COMMIT:
                fields = [load_i64(base, field) for field in range(wr.NUM_FIELDS)]
                with lock:
                    committed[essence(fields)] += 1
            st_release(base, index, value)

        monkeypatch.setattr(fifo, "st_release_host", release)
        maps: list[Map] = []
        case = Case([9, 14, 3], 64, 2, 6, SMALL)
        run_case(case, before=lambda b: maps.append(Map(b)))
        posted = Counter(
            essence(request)
            for end in made.made.values()
            for request in end.posted
            if not is_farewell(request, maps[0])
        )
        assert committed == posted

else:

    def test_the_moments_of_stores_in_plain_python() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "NUMBA_EP_DEVICE": "cpu"}
        done = subprocess.run(
            [*command, __file__, "-k", "in_python"], env=environment,
            cwd=Path(__file__).parent.parent, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        assert "2 passed" in done.stdout
