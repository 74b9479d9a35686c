"""Ranks as threads of one process: notebooks, unit tests, many ranks on one GPU.

Each rank's function gets a group with the few names of an mpi4py communicator that a
Buffer needs, so one function runs under mpirun and here:
``spawn(lambda group: group.allgather(group.Get_rank()), 2) == [[0, 1], [0, 1]]``.
"""

import pickle
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
# After an abort ranks have this long to leave in good order; then they are left behind.
GRACE_S = 2.0


class GroupAborted(RuntimeError):
    """The group was aborted, as a rule by another rank's exception: not the cause."""


class _Meeting:
    """What the ranks of one spawn share; cond guards all fields but the callbacks."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.cond = threading.Condition()
        self.slots: dict[int, tuple[str, bytes]] = {}  # of the ranks that have come
        self.running = set(range(num_ranks))
        self.results: list[Any] = [None] * num_ranks
        self.failures: list[tuple[int, BaseException]] = []
        self.abort_reason: str | None = None
        # Held while callbacks run: unregistering waits, unless a callback does it.
        self.callback_lock = threading.RLock()
        self.callbacks: dict[object, Callable[[], None]] = {}
        self.callbacks_ran = False

    def meet(self, rank: int, operation: str, obj: Any) -> list[bytes]:
        """Sleep until every rank is here; return what all brought, pickled, by rank."""
        payload = pickle.dumps(obj)
        with self.cond:
            self._raise_if_hopeless(rank, operation)
            slots = self.slots  # this meeting's; the last to come opens the next
            slots[rank] = (operation, payload)
            if len(slots) == self.num_ranks:
                self.slots = {}
                self.cond.notify_all()
            while len(slots) < self.num_ranks:
                self._raise_if_hopeless(rank, operation)
                self.cond.wait()
        return [slots[peer][1] for peer in range(self.num_ranks)]

    def _raise_if_hopeless(self, rank: int, operation: str) -> None:
        if self.abort_reason is not None:
            raise GroupAborted(f"rank {rank} left {operation}: {self.abort_reason}")
        gone = set(range(self.num_ranks)) - self.running
        if gone:  # MPI would wait for ever
            raise RuntimeError(f"{operation}: rank {min(gone)} has returned already")
        for peer, (name, _) in self.slots.items():
            if name != operation:
                raise RuntimeError(f"{operation}: rank {peer} calls {name} instead")

    def abort(self, reason: str) -> None:
        with self.cond:
            if self.abort_reason is not None:
                return
            self.abort_reason = reason
            self.cond.notify_all()
        with self.callback_lock:
            self.callbacks_ran = True
            while self.callbacks:
                _, callback = self.callbacks.popitem()
                try:
                    callback()
                except Exception:  # noqa: BLE001, the others must be told all the same
                    traceback.print_exc()

    def run(self, fn: Callable[["ThreadGroup"], Any], rank: int) -> None:
        try:
            self.results[rank] = fn(ThreadGroup(self, rank))
        except BaseException as error:  # noqa: BLE001, a rank's sys.exit() counts too
            self.failures.append((rank, error))
            self.abort(f"rank {rank} raised {type(error).__name__}")
        finally:
            with self.cond:
                self.running.discard(rank)
                self.cond.notify_all()


class ThreadGroup:
    """One rank's end of the group; made by spawn.

    Objects travel pickled, as in mpi4py's lower-case methods: receivers get copies. To
    share an object itself, which only threads can, take it from the enclosing scope.
    """

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def Get_rank(self) -> int:
        """Return this rank, 0 .. Get_size() - 1."""
        return self._rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self._meeting.num_ranks

    def Barrier(self) -> None:
        """Sleep until every rank is here. Raise GroupAborted at an abort, at once."""
        self._meeting.meet(self._rank, "Barrier", None)

    def allgather(self, obj: Any) -> list[Any]:
        """Return a copy of each rank's obj, by rank. Raise GroupAborted at an abort."""
        return [*map(pickle.loads, self._meeting.meet(self._rank, "allgather", obj))]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return root's obj, except at root a copy. ValueError: root is no rank."""
        if root not in range(self.Get_size()):
            raise ValueError(f"root: expected 0 .. {self.Get_size() - 1}, got {root}")
        sent = obj if self._rank == root else None
        payloads = self._meeting.meet(self._rank, f"bcast from {root}", sent)
        return obj if self._rank == root else pickle.loads(payloads[root])

    def abort(self, reason: str = "") -> None:
        """Make all ranks leave; spawn raises GroupAborted if none raises better."""
        self._meeting.abort(f"rank {self._rank} called abort({reason!r})")

    def on_abort(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have callback called once, at an abort (now, if it was); return its undoing.

        The aborting thread calls it, so it must not wait for anything. When the undoing
        has returned, callback neither runs nor will run.
        """

        def unregister() -> None:
            with self._meeting.callback_lock:
                self._meeting.callbacks.pop(unregister, None)

        with self._meeting.callback_lock:
            if self._meeting.callbacks_ran:
                callback()
            else:
                self._meeting.callbacks[unregister] = callback
        return unregister


def spawn(
    fn: Callable[[ThreadGroup], T], num_ranks: int, timeout_s: float | None = None
) -> list[T]:
    """Call fn(group) once a rank, each in a daemon thread; return results by rank.

    The first exception aborts the others: they leave the group's methods at once. spawn
    raises that very object, with a note and an attribute ``rank``. After timeout_s
    seconds it aborts the group and raises a TimeoutError that names the ranks still
    running; Ctrl-C aborts too. ValueError: num_ranks or timeout_s is not positive.
    """
    if num_ranks < 1 or (timeout_s is not None and not timeout_s > 0):
        raise ValueError(f"expected both positive: {num_ranks=}, {timeout_s=}")
    deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
    meeting = _Meeting(num_ranks)
    try:
        for rank in range(num_ranks):
            threading.Thread(target=meeting.run, args=(fn, rank), daemon=True).start()
        with meeting.cond:
            while meeting.running and meeting.abort_reason is None:
                if time.monotonic() > deadline:
                    waiting = {rank: name for rank, (name, _) in meeting.slots.items()}
                    raise TimeoutError(
                        f"ranks {sorted(meeting.running)} of {num_ranks} still running "
                        f"after {timeout_s} s; of these waiting for others: {waiting}"
                    )
                meeting.cond.wait(0.1)  # a Ctrl-C just before a wait does not end it
    except BaseException as error:
        meeting.abort(f"spawn raises {type(error).__name__}")
        raise
    finally:
        with meeting.cond:
            meeting.cond.wait_for(lambda: not meeting.running, GRACE_S)
    if meeting.abort_reason is not None:
        raise _cause(meeting)
    return meeting.results


def _cause(meeting: _Meeting) -> BaseException:
    # Emptied, since a traceback that leads back to its own exception is a cycle.
    failures, meeting.failures = meeting.failures, []
    if not failures:  # a rank called abort() and all returned nevertheless
        return GroupAborted(meeting.abort_reason)
    causes = [pair for pair in failures if not isinstance(pair[1], GroupAborted)]
    rank, error = (causes or failures)[0]
    with suppress(AttributeError):  # a class may have a read-only "rank"
        error.rank = rank  # type: ignore[attr-defined]
    note = f"raised by rank {rank} of {meeting.num_ranks} in numba_ep.spawn"
    error.__notes__ = [*getattr(error, "__notes__", []), note]  # 3.10 has no add_note
    return error
