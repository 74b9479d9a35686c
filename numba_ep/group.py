"""What a Buffer needs of its ranks (members), MPI's world, and the way out of MPI."""

import atexit
import ctypes
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from numba_ep.spawn import ThreadGroup

if TYPE_CHECKING:
    from mpi4py import MPI

_leave_lock = threading.Lock()


class Members(NamedTuple):
    """One rank's view of its group; allgather and barrier are collective and sleep."""

    rank: int
    num_ranks: int
    allgather: Callable[[Any], list[Any]]
    barrier: Callable[[], Any]


def members(
    group: Any = None, comm: Any = None, timeout_s: float | None = None
) -> Members:
    """Take an mpi4py intracommunicator, spawn's group or a torch process group.

    group and comm are alike; exactly one is given (ValueError); no other communicator
    is touched. timeout_s bounds MPI's waits in seconds (TimeoutError, MPI is of no use
    afterwards); the other two have bounds of their own. TypeError: it is none of them.
    """
    if (group is None) == (comm is None):
        got = "neither" if group is None else "both"
        raise ValueError(
            f"expected exactly one of group and comm, got {got}: pass numba_ep.world() "
            f"under mpirun, the group that spawn gives, or a torch process group"
        )
    comm = group if comm is None else comm
    mpi = sys.modules.get("mpi4py.MPI")  # loaded already if comm comes from it
    if mpi is not None and isinstance(comm, mpi.Intracomm):
        return _of_mpi(comm, timeout_s)
    if isinstance(comm, ThreadGroup):
        return Members(comm.Get_rank(), comm.Get_size(), comm.allgather, comm.Barrier)
    if all(callable(getattr(comm, name, None)) for name in ("rank", "size")):
        return _of_torch(comm)
    kinds = "an mpi4py intracommunicator, spawn's group or a torch process group"
    raise TypeError(f"group, comm: expected {kinds}, got {type(comm).__name__}")


def _of_mpi(comm: Any, timeout_s: float | None) -> Members:
    def barrier() -> None:
        # MPICH's blocking collectives poll without pause and so slow down the ranks
        # that are waited for, which compile. Here the early ones sleep.
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        request, pause_s = comm.Ibarrier(), 1e-4
        while not request.Test():
            if time.monotonic() > deadline:
                raise TimeoutError(f"MPI: not every rank came within {timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-3)

    def allgather(obj: Any) -> list[Any]:
        barrier()
        return comm.allgather(obj)

    return Members(comm.Get_rank(), comm.Get_size(), allgather, barrier)


def _of_torch(group: Any) -> Members:
    def allgather(obj: Any) -> list[Any]:
        from torch import distributed

        gathered: list[Any] = [None] * group.size()
        distributed.all_gather_object(gathered, obj, group=group)
        return gathered

    return Members(group.rank(), group.size(), allgather, lambda: allgather(None))


def world() -> "MPI.Intracomm":
    """Return MPI.COMM_WORLD. RuntimeError: it is not that of the launcher's ranks."""
    from mpi4py import MPI

    # mpiruns first: one may itself be a Slurm step of one task a host. No SLURM_NTASKS:
    # plain shells of an allocation have it, too. PMIx tells no size, only a rank.
    mpiruns = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
    for name in (*mpiruns, "SLURM_STEP_NUM_TASKS", "PMIX_RANK"):
        told = os.environ.get(name, "")
        if told.isdecimal():
            break
    least = int(told) + (name == "PMIX_RANK") if told.isdecimal() else 1
    if least > 1 and MPI.COMM_WORLD.Get_size() == 1:
        library = " ".join(re.split(r"[,\n]", MPI.Get_library_version())[0].split())
        mpirun = os.path.join(os.path.dirname(sys.executable), "mpirun")
        raise RuntimeError(
            f"{name}={told} tells of several processes, MPI.COMM_WORLD has one: a "
            f"foreign mpirun starts N singletons. Start with the mpirun of the MPI "
            f"that mpi4py uses, {library}{f': {mpirun}' * os.path.exists(mpirun)}"
        )
    return MPI.COMM_WORLD


def leave_without_mpi() -> None:
    """Keep MPI_Finalize from being called when this process exits.

    For the survivors of a dead rank, whom any MPI call may end or hang. Exit status,
    traceback, atexit functions and output are not changed; from any thread, repeatable.
    Outside of Linux and CPython: status 1, and earlier atexit functions do not run.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    with _leave_lock:
        if mpi is not None and not _drop_exit_function(str(mpi.__file__)):
            atexit.register(lambda: (sys.stdout.flush(), os._exit(1)))


@functools.cache
def _drop_exit_function(mpi_path: str) -> bool:
    # mpi4py reads rc.finalize when MPI is imported, never again, and gave Py_AtExit a C
    # function that calls MPI_Finalize. os._exit in an atexit function would come first,
    # but cannot know the n of sys.exit(n). So mpi4py's entry goes from Python's list of
    # 32: found before one of our own, and known by pointing into mpi4py's code.
    pointer = ctypes.c_size_t
    try:
        with open("/proc/self/maps") as maps:
            bounds = [line.split()[0].split("-") for line in maps]
        ranges = [range(int(start, 16), int(stop, 16)) for start, stop in bounds]
        initialiser = pointer.from_buffer(ctypes.CDLL(mpi_path).PyInit_MPI).value
        code = next(found for found in ranges if initialiser in found)
        runtime = ctypes.addressof(pointer.in_dll(ctypes.pythonapi, "_PyRuntime"))
        data = next(found for found in ranges if runtime in found)
        num_words = (data.stop - runtime) // ctypes.sizeof(pointer)
        words = (pointer * num_words).from_address(runtime)
        nothing = ctypes.CDLL(None).getpid  # harmless after the interpreter's end
        ctypes.pythonapi.Py_AtExit(nothing)
        own = words[:].index(pointer.from_buffer(nothing).value)
    except (AttributeError, OSError, ValueError):
        return False
    entries = [i for i in range(max(0, own - 31), own) if words[i] in code]
    for i in entries:
        words[i] = words[own]
    return len(entries) > 0
