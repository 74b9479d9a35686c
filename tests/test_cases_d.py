"""Faults that people met with comparable libraries, by case number: C45 to C52.

Stragglers, limits, events, and the life of a Buffer.
"""

import gc
import time
from typing import Any

import numpy as np
import pytest
from world import (
    Change,
    Scenario,
    World,
    caught,
    check,
    check_combine,
    check_dispatch,
    check_round,
    compare_received,
    on_cpu,
    poison,
    refuse_each,
    run,
    same,
    spawn,
)

from numba_ep.config import Config

SMALL = Scenario((13, 9, 11, 12))


def test_c45_a_straggler_is_no_failure() -> None:
    world = World(SMALL)

    def program(buffer: Any) -> None:
        for turn in range(3):
            if buffer.rank == turn:
                time.sleep(0.3)
            handle = check_dispatch(buffer, world)
            if buffer.rank == turn + 1:
                time.sleep(0.3)
            check_combine(buffer, world, handle, 1)

    run(program, 4, SMALL.num_bytes, timeout_s=5.0)


def test_c45_the_timeout_is_the_callers() -> None:
    """A rank that never comes: the others name it after timeout_s, not later."""
    from numba_ep.errors import BufferAborted, PeerTimeout

    world = World(SMALL)

    def program(buffer: Any) -> None:
        handle = check_round(buffer, world)
        if buffer.rank == 2:
            time.sleep(3.0)
        else:
            started = time.monotonic()
            error = caught(lambda: check_combine(buffer, world, handle))
            assert isinstance(error, PeerTimeout) and isinstance(error, TimeoutError), (
                repr(error)
            )
            assert error.culprit == 2 and "rank 2" in str(error)
            assert 0.9 < time.monotonic() - started < 2.5
        # Late as it is, it hears of the end as well; then only destroy is left.
        for _ in range(2):
            error = caught(lambda: check_combine(buffer, world, handle))
            assert isinstance(error, BufferAborted), repr(error)
        started = time.monotonic()
        buffer.destroy()
        assert time.monotonic() - started < 1.0

    run(program, 4, SMALL.num_bytes, timeout_s=1.0)


@pytest.mark.parametrize("num_experts", [520, 768, 2050, 4096])
def test_c48_more_experts_than_workers(num_experts: int) -> None:
    config = Config(48, 1, 2, 1, 2)
    check(Scenario((16, 16), 32, 8, num_experts, config))


def test_c48_more_channels_than_queues() -> None:
    config = Config(4, 2, 4, 2, 4)
    world = World(Scenario((16, 16), config=config))

    def program(buffer: Any) -> None:
        args = world.dispatch_args(buffer.rank)
        args["config"] = Config(6, 2, 4, 2, 4)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"num_sms.*num_qps_per_rank"):
                buffer.dispatch(**args)
            check_round(buffer, world)

    run(program, 2, 1 << 20, num_qps_per_rank=2)


@pytest.mark.parametrize("num_sms", [-2, 0, 1, 3, 2.0, "4", None, True])
def test_c50_num_sms(num_sms: Any) -> None:
    from numba_ep.buffer import Buffer

    before = Buffer.num_sms
    for refuse in (Config, Buffer.set_num_sms):
        with pytest.raises((ValueError, TypeError), match="num_sms"):
            refuse(num_sms)
    assert Buffer.num_sms == before


def test_c50_more_sms_than_queues() -> None:
    bad: dict[str, tuple[Change, str]] = {
        "1000": (lambda a: {"config": Config(1000, 2, 4, 2, 4)}, "num_sms: .*48")
    }
    refuse_each(World(SMALL), "dispatch", bad)


def test_c51_inputs_change_after_the_call() -> None:
    """On a CPU an operation has ended when its call returns."""
    world = World(SMALL)

    def program(buffer: Any) -> None:
        rank = buffer.rank
        for _ in range(2):
            poison(buffer)
            args = world.dispatch_args(rank)
            args["x"] = args["x"].copy()
            result = buffer.dispatch(
                **args,
                async_finish=True,
                previous_event=buffer.capture(),
                allocate_on_comm_stream=True,
            )
            args["x"][:] = np.nan
            del args
            gc.collect()
            *received, handle, event = result
            event.current_stream_wait()
            event.current_stream_wait()
            compare_received(received, world, rank)
            events, results = [event], []
            for num_biases in (1, 2):
                args = world.combine_args(rank, num_biases)
                args["x"] = args["x"].copy()
                x, weights, event = buffer.combine(
                    handle=handle, **args, async_finish=True, previous_event=events[-1]
                )
                args["x"][:] = np.nan
                events.append(event)
                results.append((x, weights))
            with events[-1]:
                pass
            for num_biases, (x, weights) in zip((1, 2), results):
                same(x, world.combined(rank, num_biases)[0], "x")
                same(weights, world.combined(rank, num_biases)[1], "weights")

    run(program, 4, SMALL.num_bytes)


def test_c51_flags_that_do_not_go_together() -> None:
    stream = {"allocate_on_comm_stream": True}
    bad: dict[str, tuple[Change, str]] = {
        "stream": (lambda a: dict(stream), "allocate_on_comm_stream"),
        "async": (
            lambda a: {**stream, "async_finish": True},
            "allocate_on_comm_stream",
        ),
    }
    for operation in ("dispatch", "combine"):
        refuse_each(World(SMALL), operation, bad)

    def program(buffer: Any) -> None:
        ids = np.zeros((3, 2), np.int64)
        with pytest.raises(ValueError, match="allocate_on_comm_stream"):
            buffer.get_dispatch_layout(ids, 4, allocate_on_comm_stream=True)

    run(program, 2, 0)


def test_c52_after_destroy() -> None:
    world = World(Scenario((5, 6)))

    def program(buffer: Any) -> None:
        handle = check_round(buffer, world)
        buffer.destroy()
        buffer.destroy()
        args = world.dispatch_args(buffer.rank)
        for call in (
            lambda: buffer.dispatch(**args),
            lambda: buffer.combine(handle=handle, **world.combine_args(buffer.rank)),
            lambda: buffer.get_dispatch_layout(args["topk_idx"], 8),
        ):
            error = caught(call)
            assert isinstance(error, RuntimeError) and "destroyed" in str(error)

    run(program, 2, world.scenario.num_bytes)


@on_cpu("it reads a Buffer's memory after its end, and CUDA's is unmapped then")
@pytest.mark.parametrize("ending", ["destroy", "collect"])
def test_c52_the_groups_end_after_the_buffers(ending: str) -> None:
    """An abort of the group touches no memory of a Buffer that is gone already."""
    from numba_ep.buffer import Buffer

    memory: list[tuple[np.ndarray, bytes]] = []

    def program(group: Any) -> None:
        buffer = Buffer(group, num_rdma_bytes=1024, device="cpu")
        words = buffer._endpoint.control.host
        if ending == "destroy":
            buffer.destroy()
        group.Barrier()
        del buffer
        gc.collect()
        memory.append((words, words.tobytes()))
        group.Barrier()
        raise KeyError("later")

    with pytest.raises(KeyError, match="later"):
        spawn(program, 2, 20.0)
    assert len(memory) == 2
    assert all(words.tobytes() == before for words, before in memory)


def test_c52_an_exception_within_with() -> None:
    """It comes out at once, and ends the others' waits at once."""
    from numba_ep.buffer import Buffer
    from numba_ep.errors import BufferAborted

    world = World(SMALL)
    ended: list[int] = []

    def program(group: Any) -> None:
        rank = group.Get_rank()
        started = time.monotonic()
        try:
            with Buffer(
                group, num_rdma_bytes=SMALL.num_bytes, timeout_s=20.0
            ) as buffer:
                handle = check_dispatch(buffer, world)
                if rank == 1:
                    raise KeyError("of rank 1")
                check_combine(buffer, world, handle)
        except KeyError:
            assert rank == 1
        except BufferAborted as error:
            assert error.culprit == 1 and rank != 1
        assert time.monotonic() - started < 5.0
        ended.append(rank)

    spawn(program, 4, 30.0)
    assert sorted(ended) == [0, 1, 2, 3]
