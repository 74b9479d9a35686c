"""members, world and leave_without_mpi; MPI runs in processes of its own, bounded."""

import os
import shutil
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
from conftest import require

from numba_ep.device.cores import warn_of_one_core
from numba_ep.group import Members, members
from numba_ep.spawn import ThreadGroup, spawn

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 60.0
# Not for children: traces of a launcher around pytest, unbuffered output.
HIDDEN = ("OMPI_COMM_WORLD", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_", "HYD", "PYTHONUNB")


def find_mpirun() -> str:
    """Return the mpirun beside this Python, which belongs to the MPI that it loads."""
    mpirun = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    require(mpirun, f"mpirun in {os.path.dirname(sys.executable)} is missing")
    return str(mpirun)


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(HIDDEN)}
    return subprocess.run(
        command,
        env={**kept, **variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def write(folder: Path, script: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    return str(path)


def run_ranks(folder: Path, num_ranks: int, script: str) -> str:
    """Run script under mpirun; return what it printed. Every rank must exit with 0."""
    path = write(folder, script)
    done = run([find_mpirun(), "-np", str(num_ranks), sys.executable, path])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def mpi() -> None:
    pytest.importorskip("mpi4py") if os.environ.get("CI") != "true" else None


def test_members_of_a_thread_group() -> None:
    def program(group: ThreadGroup) -> tuple[int, int, list[int]]:
        for found in (members(group), members(comm=group)):
            found.barrier()
            gathered = found.allgather(10 * found.rank)
        return found.rank, found.num_ranks, gathered

    expected = [(rank, 3, [0, 10, 20]) for rank in range(3)]
    assert spawn(program, 3, TIMEOUT_S) == expected


class FakeProcessGroup:
    """rank() and size() as a torch.distributed ProcessGroup has them."""

    def __init__(self, group: ThreadGroup) -> None:
        self.group = group

    def rank(self) -> int:
        return self.group.Get_rank()

    def size(self) -> int:
        return self.group.Get_size()


def test_members_of_a_torch_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather_object(gathered: list[Any], obj: Any, group: Any = None) -> None:
        gathered[:] = group.group.allgather(obj)

    torch = types.ModuleType("torch")
    torch.distributed = types.ModuleType("torch.distributed")  # type: ignore[attr-defined]
    torch.distributed.all_gather_object = all_gather_object
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch.distributed)

    def program(group: ThreadGroup) -> tuple[int, int, list[str]]:
        found = members(FakeProcessGroup(group))
        found.barrier()
        return found.rank, found.num_ranks, found.allgather(f"rank {found.rank}")

    expected = [(rank, 2, ["rank 0", "rank 1"]) for rank in range(2)]
    assert spawn(program, 2, TIMEOUT_S) == expected


def test_torch_is_not_imported_before_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # any import of it would fail

    def program(group: ThreadGroup) -> Members:
        return members(FakeProcessGroup(group))

    assert spawn(program, 1, TIMEOUT_S)[0][:2] == (0, 1)


def test_exactly_one_of_group_and_comm() -> None:
    with pytest.raises(ValueError, match=r"got neither.*numba_ep\.world\(\)"):
        members()
    with pytest.raises(ValueError, match="got both"):
        members(object(), object())


@pytest.mark.parametrize(
    "wrong", [0, "world", [0, 1], object(), types.SimpleNamespace()]
)
def test_wrong_type(wrong: object) -> None:
    with pytest.raises(TypeError, match=f"got {type(wrong).__name__}$"):
        members(wrong)
    with pytest.raises(TypeError, match="expected an mpi4py intracommunicator"):
        members(comm=wrong)


def test_import_starts_neither_mpi_nor_torch() -> None:
    code = "import sys, numba_ep.group; print({'mpi4py', 'torch'} & set(sys.modules))"
    assert run([sys.executable, "-c", code]).stdout.strip() == "set()"


def test_members_of_mpi_communicators(tmp_path: Path) -> None:
    printed = run_ranks(
        tmp_path,
        3,
        """
        from numba_ep.group import members, world
        comm = world()
        found = members(comm)
        assert found[:2] == (comm.Get_rank(), 3)
        found.barrier()
        assert found.allgather({"rank": found.rank}) == [{"rank": r} for r in range(3)]
        half = comm.Split(color=found.rank == 2)
        part = members(comm=half)
        expected = [2] if found.rank == 2 else [0, 1]
        assert part.num_ranks == len(expected)
        assert part.allgather(found.rank) == expected
        # Ranks 0 and 1 as one side, rank 2 as the other: no group of equals.
        inter = half.Create_intercomm(0, comm, 0 if found.rank == 2 else 2)
        for wrong in (inter, type(comm)):
            try:
                members(wrong)
            except TypeError as error:
                print(error)
        """,
    )
    assert printed.count("got Intercomm") == 3
    assert printed.count("got type") == 3


def test_only_the_given_communicator_is_used(tmp_path: Path) -> None:
    """Rank 2 calls nothing: whoever waited for all of COMM_WORLD would not return."""
    run_ranks(
        tmp_path,
        3,
        f"""
        import os, sys, time
        from mpi4py import MPI
        from numba_ep.group import members
        done = {str(tmp_path / "done")!r}
        rank = MPI.COMM_WORLD.Get_rank()
        part = MPI.COMM_WORLD.Split(color=rank == 2)
        if rank == 2:
            deadline = time.monotonic() + 20
            while not os.path.exists(done):
                if time.monotonic() > deadline:
                    sys.exit("ranks 0 and 1 wait for rank 2")
                time.sleep(0.01)
        else:
            found = members(part)
            found.barrier()
            assert found.allgather(rank) == [0, 1]
            open(done, "w").close()
        """,
    )


@pytest.mark.parametrize("cores", [1, 2])
def test_one_core_for_a_rank_on_a_gpu_is_said(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_one_core("rank 3")
    expected = ["--bind-to none"] if cores == 1 else []
    assert [str(one.message)[-14:] for one in said] == expected


def test_waiting_ranks_sleep(tmp_path: Path) -> None:
    run_ranks(
        tmp_path,
        3,
        """
        import time
        from numba_ep.group import members, world
        found = members(world())
        found.allgather(0)
        for meet in (found.barrier, lambda: found.allgather(0)):
            if found.rank == 0:
                time.sleep(1.0)
            wall_s, cpu_s = time.monotonic(), time.process_time()
            meet()
            wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
            if found.rank != 0:
                assert wall_s > 0.5, wall_s
                assert cpu_s / wall_s < 0.25, (cpu_s, wall_s)
        """,
    )


def test_mpi_wait_is_bounded(tmp_path: Path) -> None:
    run_ranks(
        tmp_path,
        2,
        """
        import time
        from numba_ep.group import members, world
        comm = world()
        found = members(comm, timeout_s=0.2)
        if found.rank == 0:
            start = time.monotonic()
            try:
                found.barrier()
                raise SystemExit("no TimeoutError")
            except TimeoutError as error:
                assert "0.2 s" in str(error)
            assert 0.2 <= time.monotonic() - start < 1.0
            comm.Barrier()
        else:
            time.sleep(1.2)
            found.barrier()  # finds rank 0 in it, long since
            comm.Barrier()
        """,
    )


def test_world_under_mpirun(tmp_path: Path) -> None:
    script = "from numba_ep.group import world; assert world().Get_size() == 2"
    run_ranks(tmp_path, 2, script)


def test_world_of_singletons_is_refused(tmp_path: Path, mpi: None) -> None:
    """The variables are set after MPI's start, which some of them would break."""
    script = """
        import os, sys
        from numba_ep.group import world
        world()
        for case in sys.argv[1:]:
            settings = dict(setting.split("=") for setting in case.split(","))
            os.environ.update(settings)
            try:
                print(case, "size", world().Get_size())
            except RuntimeError as error:
                print(case, error)
            for name in settings:
                del os.environ[name]
    """
    refused = [
        "OMPI_COMM_WORLD_SIZE=4",
        "PMI_SIZE=2",
        "MPI_LOCALNRANKS=3",
        "PMIX_RANK=1",
        "SLURM_STEP_NUM_TASKS=16,SLURM_PROCID=0",
    ]
    accepted = [
        "OMPI_COMM_WORLD_SIZE=1",
        "PMIX_RANK=0",
        "SLURM_NTASKS=8,SLURM_PROCID=0",  # the batch script of an allocation
        "SLURM_STEP_NUM_TASKS=1,SLURM_NTASKS=8",
        "PMI_SIZE=1,SLURM_STEP_NUM_TASKS=2",  # mpirun -np 1 in a job of two hosts
        "PMI_SIZE=",
    ]
    done = run([sys.executable, write(tmp_path, script), *refused, *accepted])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(refused) + len(accepted)
    for case, line in zip(refused, lines, strict=False):
        assert f"{case} {case.split(',')[0]} tells of several processes" in line
        assert "the mpirun of the MPI that mpi4py uses" in line
    for case, line in zip(accepted, lines[len(refused) :], strict=True):
        assert line == f"{case} size 1"


def test_world_refuses_from_the_start(mpi: None) -> None:
    code = "import warnings; warnings.simplefilter('ignore')\n"
    code += "from numba_ep.group import world; world()"
    done = run([sys.executable, "-c", code], MPI_LOCALNRANKS="4")
    assert done.returncode == 1
    assert "RuntimeError: MPI_LOCALNRANKS=4 tells" in done.stderr


# MPICH removes its shared memory in MPI_Finalize, which these tests avoid.
TIDY = """
import os
if os.path.exists("/proc/self/maps"):
    lines = [line.split() for line in open("/proc/self/maps")]
    for path in {line[-1] for line in lines if "/mpich_shm_" in line[-1]}:
        os.unlink(path)
"""
# MPI_Finalize first deletes the attributes of COMM_SELF: here, by calling C's abort.
ABORT_IN_FINALIZE = """
import atexit, ctypes, sys, threading
from mpi4py import MPI
from numba_ep.group import leave_without_mpi

library = ctypes.CDLL(MPI.__file__)
Handle = ctypes.c_int if MPI._sizeof(MPI.Comm) == 4 else ctypes.c_void_p
key = ctypes.c_int()
abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p)
assert library.MPI_Comm_create_keyval(abort, abort, ctypes.byref(key), None) == 0
assert library.MPI_Comm_set_attr(Handle(MPI.COMM_SELF.handle), key, None) == 0
atexit.register(print, "atexit ran")
"""
LEAVE = """
leave_without_mpi()
threads = [threading.Thread(target=leave_without_mpi) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def run_finalize_probe(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, write(folder, ABORT_IN_FINALIZE + TIDY + script)])


def test_probe_sees_mpi_finalize(tmp_path: Path, mpi: None) -> None:
    """Without leave_without_mpi, even if mpi4py is told afterwards not to finalize."""
    script = "import mpi4py\nmpi4py.rc.finalize = False\n"
    assert run_finalize_probe(tmp_path, script).returncode == -6


@pytest.mark.parametrize(
    ("ending", "status", "stderr"),
    [
        ("", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("raise SystemExit(8)", 8, ""),
        ("sys.exit('gone')", 1, "gone"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    ],
)
def test_leaving_keeps_the_exit_status(
    tmp_path: Path, mpi: None, ending: str, status: int, stderr: str
) -> None:
    done = run_finalize_probe(tmp_path, f"{LEAVE}\nprint('last words')\n{ending}\n")
    assert done.returncode == status, done.stderr
    assert done.stdout == "last words\natexit ran\n"
    assert stderr in done.stderr


def test_leaving_without_the_list_still_avoids_finalize(
    tmp_path: Path, mpi: None
) -> None:
    """Where Python's list of exit functions is not found, by os._exit with status 1."""
    script = "import numba_ep.group\n"
    script += "numba_ep.group._drop_exit_function = lambda path: False\n"
    ending = "\natexit.register(print, 'last words')\nsys.exit(3)\n"
    done = run_finalize_probe(tmp_path, f"{script}{LEAVE}{ending}")
    assert done.returncode == 1, done.stderr
    assert done.stdout == "last words\n"


def test_leaving_without_mpi_loaded_does_nothing() -> None:
    code = "from numba_ep.group import leave_without_mpi as leave\nleave()\nleave()\n"
    assert run([sys.executable, "-c", code + "raise SystemExit(5)"]).returncode == 5


def test_survivors_of_a_dead_rank_leave(tmp_path: Path) -> None:
    """Rank 1 is killed; the others leave with the output and status that they want.

    A shell stands between mpirun and each rank, since mpirun kills all ranks when a
    process of its own ends by a signal; it also notes the status. It must survive
    SIGUSR1, by which mpirun tells the process groups of the living about a death.
    """
    script = """
        import os, signal, sys, time
        from numba_ep.group import leave_without_mpi, members, world
        found = members(world())
        found.allgather(found.rank)
        time.sleep(0.5)  # all are out of MPI
        if found.rank == 0:
            exec(os.environ["TIDY"])
        if found.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        leave_without_mpi()
        print(f"last words of rank {found.rank}")
        if found.rank == 0:
            raise ValueError("a peer died")
        sys.exit(7)
    """
    is_hydra = "HYDRA" in run([find_mpirun(), "--version"]).stdout
    require(is_hydra, "MPICH's mpirun, which has -disable-auto-cleanup, is missing")
    shell = """trap '' USR1; "$@"; echo $? > "$0/$PMI_RANK.status"; exit 0"""
    launch = [find_mpirun(), "-disable-auto-cleanup", "-np", "3", "sh", "-c", shell]
    path = write(tmp_path, script)
    done = run([*launch, str(tmp_path), sys.executable, path], TIDY=TIDY)
    statuses = [(tmp_path / f"{rank}.status").read_text().strip() for rank in range(3)]
    assert statuses == ["1", "137", "7"], done.stderr
    assert "last words of rank 0" in done.stdout
    assert "last words of rank 2" in done.stdout
    assert "ValueError: a peer died" in done.stderr
