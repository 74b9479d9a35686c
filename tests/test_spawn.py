"""spawn: results by rank, meetings, aborts, timeouts. Every wait here is bounded."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from numba_ep.spawn import GRACE_S, GroupAborted, ThreadGroup, spawn

TIMEOUT_S = 20.0


@pytest.mark.parametrize("num_ranks", [1, 3, 33])
def test_results_and_meetings_by_rank(num_ranks: int) -> None:
    def program(group: ThreadGroup) -> tuple[int, list[int], str]:
        rank = group.Get_rank()
        assert group.Get_size() == num_ranks
        group.Barrier()
        gathered = group.allgather(rank * rank)
        return rank, gathered, group.bcast(f"from {rank}", root=num_ranks - 1)

    squares = [rank * rank for rank in range(num_ranks)]
    last = f"from {num_ranks - 1}"
    expected = [(rank, squares, last) for rank in range(num_ranks)]
    assert spawn(program, num_ranks, TIMEOUT_S) == expected


def test_many_meetings_in_a_row_do_not_mix() -> None:
    def program(group: ThreadGroup) -> None:
        rank = group.Get_rank()
        delays = random.Random(rank)
        for turn in range(200):
            if delays.random() < 0.1:
                time.sleep(delays.random() * 1e-3)
            assert group.allgather((turn, rank)) == [(turn, r) for r in range(4)]

    spawn(program, 4, TIMEOUT_S)


def test_barrier_holds_back_the_early() -> None:
    came: list[int] = []

    def program(group: ThreadGroup) -> int:
        time.sleep(0.05 * group.Get_rank())
        came.append(group.Get_rank())
        group.Barrier()
        return len(came)

    assert spawn(program, 3, TIMEOUT_S) == [3, 3, 3]


def test_receivers_get_copies_of_their_own() -> None:
    sent = [[0], [1]]

    def program(group: ThreadGroup) -> tuple[list[list[int]], list[int]]:
        own = sent[group.Get_rank()]
        gathered = group.allgather(own)
        received = group.bcast(own)
        assert (received is own) == (group.Get_rank() == 0)
        if group.Get_rank() == 1:
            gathered[0].append(99)
            received.append(99)
        return gathered, received

    rank_0, _ = spawn(program, 2, TIMEOUT_S)
    assert rank_0 == ([[0], [1]], [0])
    assert sent == [[0], [1]]


def test_exception_keeps_its_type_and_tells_its_rank() -> None:
    raised: list[BaseException] = []

    def fails(group: ThreadGroup) -> None:
        if group.Get_rank() == 2:
            try:
                raise KeyError("inner")
            except KeyError as inner:
                raised.append(ValueError("wrong dtype"))
                raise raised[0] from inner
        group.Barrier()

    with pytest.raises(ValueError, match="wrong dtype") as caught:
        spawn(fails, 3, TIMEOUT_S)
    error = caught.value
    assert error is raised[0]
    assert error.rank == 2  # type: ignore[attr-defined]
    assert "rank 2 of 3" in error.__notes__[-1]
    assert isinstance(error.__cause__, KeyError)
    assert "fails" in [entry.name for entry in caught.traceback]


def test_exception_with_a_rank_of_its_own_passes() -> None:
    class Stubborn(Exception):
        @property
        def rank(self) -> str:
            return "mine"

    def fails(group: ThreadGroup) -> None:
        raise Stubborn

    with pytest.raises(Stubborn) as caught:
        spawn(fails, 2, TIMEOUT_S)
    assert caught.value.rank == "mine"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration()])
def test_exceptions_that_are_no_errors_are_raised(error: BaseException) -> None:
    def fails(group: ThreadGroup) -> None:
        if group.Get_rank() == 1:
            raise error
        group.Barrier()

    with pytest.raises(type(error)) as caught:
        spawn(fails, 2, TIMEOUT_S)
    assert caught.value is error


@pytest.mark.parametrize("operation", ["Barrier", "allgather", "bcast"])
def test_first_exception_aborts_the_others_at_once(operation: str) -> None:
    left: dict[int, str] = {}

    def program(group: ThreadGroup) -> None:
        rank = group.Get_rank()
        if rank == 1:
            time.sleep(0.1)
            raise ValueError("culprit")
        call = getattr(group, operation)
        for _ in range(2):  # out of the meeting, and never into another
            with pytest.raises(GroupAborted) as caught:
                call() if operation == "Barrier" else call(rank)
        left[rank] = str(caught.value)
        raise caught.value

    start = time.monotonic()
    with pytest.raises(ValueError, match="culprit"):
        spawn(program, 4, TIMEOUT_S)
    assert time.monotonic() - start < GRACE_S
    assert sorted(left) == [0, 2, 3]
    for rank, text in left.items():
        assert f"rank {rank} left {operation}" in text
        assert "rank 1 raised ValueError" in text


def test_first_cause_wins_over_mere_aborts() -> None:
    def program(group: ThreadGroup) -> None:
        if group.Get_rank() == 0:
            group.abort("no more memory")
            group.Barrier()
        try:
            group.Barrier()
        finally:
            if group.Get_rank() == 2:
                time.sleep(0.1)  # after the others' GroupAborted
                raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause") as caught:
        spawn(program, 3, TIMEOUT_S)
    assert caught.value.rank == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("swallow", [False, True])
def test_abort_without_exception_is_not_a_success(swallow: bool) -> None:
    def program(group: ThreadGroup) -> None:
        if group.Get_rank() == 1:
            group.abort("no more memory")
        elif not swallow:
            group.Barrier()

    with pytest.raises(GroupAborted, match="no more memory"):
        spawn(program, 2, TIMEOUT_S)


def test_timeout_names_the_ranks_still_running() -> None:
    release = threading.Event()
    left: list[int] = []

    def program(group: ThreadGroup) -> None:
        if group.Get_rank() == 1:
            release.wait(TIMEOUT_S)
            return
        try:
            group.Barrier()
        finally:
            left.append(group.Get_rank())

    start = time.monotonic()
    try:
        with pytest.raises(TimeoutError) as caught:
            spawn(program, 3, 0.3)
        assert time.monotonic() - start < 0.3 + GRACE_S + 1
    finally:
        release.set()
    assert "[0, 1, 2] of 3 still running after 0.3 s" in str(caught.value)
    assert str(caught.value).count("'Barrier'") == 2
    assert sorted(left) == [0, 2]


def test_timeout_leaves_out_the_finished() -> None:
    release = threading.Event()

    def program(group: ThreadGroup) -> None:
        if group.Get_rank() == 1:
            release.wait(TIMEOUT_S)

    try:
        with pytest.raises(TimeoutError, match=r"ranks \[1\] of 3"):
            spawn(program, 3, 0.1)
    finally:
        release.set()


def test_process_exits_although_a_rank_never_returns() -> None:
    script = (
        "import threading\n"
        "from numba_ep.spawn import spawn\n"
        "spawn(lambda group: threading.Event().wait(), 2, timeout_s=0.2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "TimeoutError: ranks [0, 1] of 2" in done.stderr


def test_ctrl_c_in_the_caller_aborts_the_group() -> None:
    left: list[int] = []

    def program(group: ThreadGroup) -> None:
        group.Barrier()  # every thread has been started
        if group.Get_rank() == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)  # the caller, not this rank, aborts
            return
        try:
            group.Barrier()
        except GroupAborted:
            left.append(group.Get_rank())

    with pytest.raises(KeyboardInterrupt):
        spawn(program, 3, TIMEOUT_S)
    assert sorted(left) == [1, 2]


def test_rank_that_returned_is_not_waited_for() -> None:
    def program(group: ThreadGroup) -> None:
        if group.Get_rank() == 0:
            group.Barrier()

    with pytest.raises(RuntimeError, match="Barrier: rank 1 has returned") as caught:
        spawn(program, 2, TIMEOUT_S)
    assert not isinstance(caught.value, GroupAborted)


def test_different_operations_do_not_meet() -> None:
    def program(group: ThreadGroup) -> None:
        if group.Get_rank() == 0:
            group.Barrier()
        group.allgather(1)

    with pytest.raises(
        RuntimeError, match=r"rank \d calls (Barrier|allgather) instead"
    ):
        spawn(program, 2, TIMEOUT_S)


def test_unpicklable_object_raises_at_its_sender() -> None:
    def program(group: ThreadGroup) -> None:
        group.allgather(threading.Lock() if group.Get_rank() == 1 else 0)

    with pytest.raises(TypeError, match="pickle") as caught:
        spawn(program, 2, TIMEOUT_S)
    assert caught.value.rank == 1  # type: ignore[attr-defined]


def test_on_abort_runs_each_registered_callback_once() -> None:
    ran: list[str] = []

    def bad() -> None:
        raise ValueError("bad callback")

    def program(group: ThreadGroup) -> None:
        rank = group.Get_rank()
        group.on_abort(lambda: ran.append(f"kept {rank}"))
        group.on_abort(bad)
        group.on_abort(lambda: ran.append(f"dropped {rank}"))()
        group.Barrier()
        if rank == 1:
            raise KeyError("culprit")
        with pytest.raises(GroupAborted):
            group.Barrier()
        group.abort("once is enough")
        undo = group.on_abort(lambda: ran.append(f"late {rank}"))
        undo()

    with pytest.raises(KeyError):
        spawn(program, 2, TIMEOUT_S)
    assert sorted(ran) == ["kept 0", "kept 1", "late 0"]


def test_no_callback_without_an_abort() -> None:
    ran: list[int] = []
    spawn(lambda group: group.on_abort(lambda: ran.append(1)), 2, TIMEOUT_S)
    assert ran == []


def test_unregistering_waits_for_a_running_callback() -> None:
    """A Buffer frees the memory that its callback writes after unregistering it."""
    events: list[str] = []
    running = threading.Event()

    def slow() -> None:
        running.set()
        time.sleep(0.2)
        events.append("callback over")

    def program(group: ThreadGroup) -> None:
        if group.Get_rank() == 1:
            group.Barrier()
            raise ValueError("culprit")
        undo = group.on_abort(slow)
        group.Barrier()
        assert running.wait(TIMEOUT_S)
        undo()
        events.append("unregistered")

    with pytest.raises(ValueError, match="culprit"):
        spawn(program, 2, TIMEOUT_S)
    assert events == ["callback over", "unregistered"]


def test_failed_ranks_do_not_keep_their_objects() -> None:
    """Reference counting alone frees a rank's locals once the exception is handled."""

    class Big:
        pass

    seen: list[weakref.ref[Big]] = []

    def program(group: ThreadGroup) -> None:
        big = Big()
        seen.append(weakref.ref(big))
        raise ValueError(group.Get_rank())

    gc.collect()
    gc.disable()
    try:
        try:
            spawn(program, 1, TIMEOUT_S)
        except ValueError:
            pass
        deadline = time.monotonic() + TIMEOUT_S
        while seen[0]() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # the thread itself may be about to end
        assert seen[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("num_ranks", "timeout_s"),
    [(0, None), (-1, 1.0), (2, 0), (2, -1), (2, float("nan"))],
)
def test_wrong_arguments(num_ranks: int, timeout_s: float | None) -> None:
    with pytest.raises(ValueError, match=f"num_ranks={num_ranks}"):
        spawn(lambda group: None, num_ranks, timeout_s)


@pytest.mark.parametrize("root", [-1, 2])
def test_wrong_root(root: int) -> None:
    with pytest.raises(ValueError, match=f"got {root}"):
        spawn(lambda group: group.bcast(1, root=root), 2, TIMEOUT_S)
