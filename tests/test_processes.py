"""Ranks as processes that die, stop, raise, are interrupted, or share what they need.

A shell stands between mpirun and each rank: mpirun kills all ranks when a process of
its own ends by a signal. The shell notes the rank's status and survives SIGUSR1, by
which mpirun tells the living about a death. Ranks and the test meet by files.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from conftest import LONG, ROOT, SHARED_MEMORY, require
from test_group import HIDDEN, TIDY, find_mpirun

from numba_ep import device as devices
from transport import TransportError

LIMIT_S = 60.0  # of a job; of one that compiles, see COMPILE_S
COMPILE_S = 600.0
# A dead rank is noticed long before a Buffer's waits end: they are given this time.
PATIENT_S = 60.0
NOTICED_S = 15.0

PRELUDE = """
import json, os, signal, sys, threading, time
from pathlib import Path
import numba_ep
from scenario import Scenario, World, compare_received, same

folder = Path(sys.argv[1])
group = numba_ep.world()
rank, num_ranks = group.Get_rank(), group.Get_size()
(folder / f"{rank}.pid").write_text(str(os.getpid()))
world = World(Scenario((300,) * num_ranks, hidden=512, num_experts=2 * num_ranks))

def make(timeout_s):
    return numba_ep.Buffer(
        group, num_rdma_bytes=world.scenario.num_bytes, timeout_s=timeout_s,
        device="cpu",
    )

def dispatch(buffer):
    *received, handle, _ = buffer.dispatch(**world.dispatch_args(rank))
    compare_received(received, world, rank)
    return handle

def combine(buffer, handle):
    x, weights, _ = buffer.combine(handle=handle, **world.combine_args(rank))
    for got, expected in zip((x, weights), world.combined(rank)):
        same(got, expected, "combined")

def signal_self(number):
    os.kill(os.getpid(), number)

def touch(name):
    (folder / name).touch()

def wait_for(name, limit_s=40.0):
    deadline = time.monotonic() + limit_s
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            sys.exit(f"rank {rank}: nobody wrote {name}")
        time.sleep(0.005)

def report(call):
    start, error = time.monotonic(), None
    try:
        call()
    except BaseException as caught:
        error = caught
    found = {
        "type": type(error).__name__,
        "is_timeout": isinstance(error, numba_ep.PeerTimeout),
        "is_aborted": isinstance(error, numba_ep.BufferAborted),
        "text": str(error),
        "culprit": getattr(error, "culprit", None),
        "seconds": time.monotonic() - start,
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
"""
# MPICH removes its shared memory in MPI_Finalize, which survivors do not call.
ALL_ARE_IN = f"""
group.Barrier()
if rank == 0:
    exec({TIDY!r})
"""
SHELL = """trap '' USR1; "$@"; echo $? > "$0/$PMI_RANK.status"; exit 0"""


def environment(**variables: str) -> dict[str, str]:
    """This process's, without traces of a launcher around pytest."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(HIDDEN)}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**kept, **variables, "PYTHONPATH": paths}


def write(folder: Path, script: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    return str(path)


class Job:
    """Ranks under mpirun, each below a shell; `with` ends what still runs."""

    def __init__(
        self, folder: Path, script: str, num_ranks: int = 3, **variables: str
    ) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        mpirun = find_mpirun()
        version = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, check=False
        )
        require("HYDRA" in version.stdout, "requires MPICH's mpirun")
        path = write(folder, PRELUDE + ALL_ARE_IN + textwrap.dedent(script))
        launch = [mpirun, "-disable-auto-cleanup", "-np", str(num_ranks)]
        words = [str(folder), sys.executable, path, str(folder)]
        with open(folder / "output", "w") as output:
            self.process = subprocess.Popen(
                [*launch, "sh", "-c", SHELL, *words],
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.kill_all()
            self.process.kill()
            self.process.wait()
        if isinstance(error, AssertionError):
            error.args = (f"{error}\n{self.output}",)

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def pid(self, rank: int) -> int:
        return int((self.folder / f"{rank}.pid").read_text())

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S} s"
            assert self.process.poll() is None, f"{what}: the job has ended"
            time.sleep(0.01)

    def until_file(self, name: str) -> None:
        self.until((self.folder / name).exists, name)

    def until_stopped(self, rank: int) -> None:
        """Wait until the rank has stopped itself by SIGSTOP."""
        file = self.folder / f"{rank}.pid"
        self.until(lambda: file.exists() and file.read_text() != "", file.name)
        stat = Path(f"/proc/{self.pid(rank)}/stat")
        self.until(
            lambda: stat.read_text().rpartition(")")[2].split()[0] == "T",
            f"rank {rank} stopped",
        )

    def kill_all(self) -> None:
        for file in self.folder.glob("*.pid"):
            try:
                os.kill(int(file.read_text()), signal.SIGKILL)
            except (ProcessLookupError, ValueError):
                pass

    def finish(self, limit_s: float = LIMIT_S) -> list[int]:
        """Wait for the end; the exit status of every rank."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended within {limit_s} s") from None
        files = [self.folder / f"{rank}.status" for rank in range(self.num_ranks)]
        return [int(file.read_text()) for file in files]

    def reports(self, *ranks: int) -> list[dict[str, Any]]:
        files = [self.folder / f"{rank}.json" for rank in ranks]
        return [json.loads(file.read_text()) for file in files]


def run(
    command: list[str], limit_s: float = LIMIT_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def run_script(
    folder: Path, script: str, *arguments: str, limit_s: float = LIMIT_S,
    **variables: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run script in one process."""
    path = write(folder, script)
    return run([sys.executable, path, *arguments], limit_s, **variables)


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No time limit of a test is spent on compiling what the cache will hold."""
    script = """
        import numba_ep
        numba_ep.spawn(lambda group: numba_ep.Buffer(group, device="cpu").destroy(), 1)
    """
    done = run_script(tmp_path_factory.mktemp("warm"), script, limit_s=COMPILE_S)
    assert done.returncode == 0, done.stderr


# A rank dies.


KILLED = """
import sys
WHEN = {when!r}
buffer = make({timeout_s})
combine(buffer, dispatch(buffer))

def work():
    if rank == 1 and WHEN == "before a dispatch":
        signal_self(signal.SIGKILL)
    handle = dispatch(buffer)
    if rank == 1 and WHEN == "between":
        signal_self(signal.SIGKILL)
    args = world.combine_args(rank)
    if rank == 1:
        threading.Timer(0.1, signal_self, [signal.SIGKILL]).start()
    while True:
        buffer.combine(handle=handle, **args)

report(work)
for _ in range(2):
    try:
        buffer.dispatch(**world.dispatch_args(rank))
        sys.exit("no error")
    except numba_ep.PeerTimeout as error:
        assert error.culprit == 1
start = time.monotonic()
buffer.destroy()
assert time.monotonic() - start < 2.0
print(f"last words of rank {{rank}}", flush=True)
sys.exit(7 if rank == 2 else 0)
"""


@pytest.mark.parametrize("when", ["before a dispatch", "between", "during a combine"])
def test_c44_a_rank_is_killed(tmp_path: Path, when: str) -> None:
    """Its end is noticed, long before the time limit of the waits."""
    with Job(tmp_path, KILLED.format(when=when, timeout_s=PATIENT_S)) as job:
        assert job.finish() == [0, 128 + signal.SIGKILL, 7]
        for rank, found in zip((0, 2), job.reports(0, 2)):
            assert found["is_timeout"], found
            assert found["culprit"] == 1
            assert f"rank {rank}: rank 1 has ended" in found["text"]
            assert found["seconds"] < NOTICED_S
            assert f"last words of rank {rank}" in job.output
        assert "Traceback" not in job.output


# A rank stops.


STOPPED = """
buffer = make({timeout_s})
combine(buffer, dispatch(buffer))

def work():
    handle = dispatch(buffer)
    if rank == 1:
        stop = threading.Timer(0.1, signal_self, [signal.SIGSTOP])
        stop.start()
    for _ in range({rounds}):
        combine(buffer, handle)
        handle = dispatch(buffer)
    if rank == 1:
        stop.join()

report(work)
buffer.destroy()
"""


def test_c44_a_short_stop_is_no_failure(tmp_path: Path) -> None:
    """A straggler in the midst of operations, and all comes out right."""
    with Job(tmp_path, STOPPED.format(timeout_s=5.0, rounds=30)) as job:
        job.until_stopped(1)
        time.sleep(1.0)
        os.kill(job.pid(1), signal.SIGCONT)
        assert job.finish() == [0, 0, 0]
        for found in job.reports(0, 1, 2):
            assert found["type"] == "NoneType", found
        assert job.reports(0)[0]["seconds"] > 0.9


DETAILS = re.compile(
    r"rank \d+: rank 1 did not answer within 2 s \(operation \d+: the "
    r"(sender|sender coordinator|receiver|receiver coordinator|notify|FIFO) of "
    r"channel \d+ waited 2 s for rank 1: head -?\d+, tail -?\d+, expected -?\d+\)"
)


def test_c44_a_long_stop_ends_the_buffer(tmp_path: Path) -> None:
    """Who waited, for whom, for what, and how far it had come."""
    script = STOPPED.format(timeout_s=2.0, rounds=100_000)
    with Job(tmp_path, script) as job:
        job.until_stopped(1)
        for rank in (0, 2):
            job.until_file(f"{rank}.status")
        os.kill(job.pid(1), signal.SIGCONT)
        assert job.finish() == [0, 0, 0]
        survivors = job.reports(0, 2)
        for found in survivors:
            assert found["is_timeout"], found
            assert found["culprit"] == 1
            assert "did not answer within 2 s" in found["text"]
            assert found["seconds"] < NOTICED_S
        texts = [found["text"] for found in survivors]
        assert any(DETAILS.search(text) for text in texts), texts
        # Who is told by a peer before its own clock runs out may have no details.
        for text in texts:
            assert "channel" not in text or DETAILS.search(text), text
        stopped = job.reports(1)[0]
        assert stopped["is_aborted"], stopped


def test_c45_compiling_on_one_rank_alone_is_no_failure(tmp_path: Path) -> None:
    """Every rank compiles before the first wait of any; here one at a time."""
    require_long()
    script = f"""
        import os, runpy, sys
        if os.environ["PMI_RANK"] == "1":
            os.environ["NUMBA_EP_CACHE_DIR"] = sys.argv[1] + "/cache"
        runpy.run_path({str(tmp_path / "inner.py")!r}, run_name="__main__")
    """
    inner = "buffer = make(2.0)\ncombine(buffer, dispatch(buffer))\nbuffer.destroy()\n"
    (tmp_path / "inner.py").write_text(PRELUDE + inner)
    path = write(tmp_path, script)
    command = [find_mpirun(), "-np", "3", sys.executable, path, str(tmp_path)]
    done = run(command, COMPILE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "cache").rglob("*.nbi"))


def require_long() -> None:
    if not LONG:
        pytest.skip("requires NUMBA_EP_LONG=1: it compiles all kernels")


# A rank raises, or is interrupted.


RAISES = """
buffer = make(60.0)
combine(buffer, dispatch(buffer))
if rank == 1:
    raise SystemError("boom")
if {caught}:
    report(lambda: combine(buffer, dispatch(buffer)))
else:
    combine(buffer, dispatch(buffer))
sys.exit(7)
"""


@pytest.mark.parametrize("caught", [True, False])
def test_an_uncaught_exception_ends_the_others(tmp_path: Path, caught: bool) -> None:
    with Job(tmp_path, RAISES.format(caught=caught)) as job:
        job.until_file("1.status")
        start = time.monotonic()
        assert job.finish() == ([7, 1, 7] if caught else [1, 1, 1])
        assert time.monotonic() - start < NOTICED_S
        assert "SystemError: boom" in job.output
        assert job.output.count("Traceback") == (1 if caught else 3)
        for found in job.reports(*((0, 2) if caught else ())):
            assert found["is_timeout"], found
            assert found["culprit"] == 1
            assert re.search("rank 1 has (left without destroy|ended)", found["text"])


def test_an_uncaught_exception_under_mpirun_alone(tmp_path: Path) -> None:
    """As users start it: mpirun ends, with a status of its own."""
    script = PRELUDE + ALL_ARE_IN + RAISES.format(caught=False)
    command = [find_mpirun(), "-np", "3", sys.executable, write(tmp_path, script)]
    done = run([*command, str(tmp_path)], PATIENT_S)
    assert done.returncode not in (0, 7)
    assert "SystemError: boom" in done.stderr


def test_a_rank_exits_in_the_midst(tmp_path: Path) -> None:
    """sys.exit is no exception that anyone sees; the others hear of it all the same."""
    script = """
        buffer = make(60.0)
        combine(buffer, dispatch(buffer))
        if rank == 1:
            sys.exit(5)
        report(lambda: combine(buffer, dispatch(buffer)))
        buffer.destroy()
        sys.exit(7)
    """
    with Job(tmp_path, script) as job:
        assert job.finish(LIMIT_S / 2) == [7, 5, 7]
        for found in job.reports(0, 2):
            assert found["is_timeout"], found
            assert found["culprit"] == 1
            assert re.search("rank 1 has (left without destroy|ended)", found["text"])


def test_c44_ctrl_c_in_one_waiting_rank(tmp_path: Path) -> None:
    script = """
        buffer = make(60.0)
        combine(buffer, dispatch(buffer))
        if rank == 1:
            wait_for("go")
        touch(f"{rank}.waits")
        report(lambda: combine(buffer, dispatch(buffer)))
        buffer.destroy()
        sys.exit(7 if rank == 2 else 0)
    """
    with Job(tmp_path, script) as job:
        for rank in (0, 2):
            job.until_file(f"{rank}.waits")
        time.sleep(0.3)
        os.kill(job.pid(0), signal.SIGINT)
        for rank in (0, 2):  # while rank 1 has not come
            job.until_file(f"{rank}.json")
        (tmp_path / "go").touch()
        assert job.finish(LIMIT_S / 2) == [0, 0, 7]
        interrupted, late, other = job.reports(0, 1, 2)
        assert interrupted["type"] == "KeyboardInterrupt"
        for found in (other, late):
            assert found["is_aborted"], found
            assert found["culprit"] == 0
            assert found["seconds"] < NOTICED_S
        assert "rank 2: rank 0 was interrupted" in other["text"]
        assert "Traceback" not in job.output


# Shared memory.


WELL = """
buffer = make(60.0)
for _ in range(10):
    combine(buffer, dispatch(buffer))
buffer.destroy()
"""
# Dies where the file of its memory still has a name.
KILLED_WITH_FILES = """
import transport.shm

def connect(self, cards):
    touch(f"{rank}.named")
    time.sleep(60)

transport.shm.SharedMemoryTransport.connect = connect
make(60.0)
"""


def files_of(pids: list[int]) -> list[str]:
    starts = tuple(f"numba_ep-{os.getuid()}-{pid}-" for pid in pids)
    found = [path.name for path in SHARED_MEMORY.iterdir()]
    return [name for name in found if name.startswith(starts)]


def test_c55_all_ranks_are_killed_and_a_rerun(tmp_path: Path) -> None:
    """What they left goes with the next job; and it is not in its way."""
    folders = [tmp_path / name for name in ("killed", "working", "rerun")]
    for folder in folders:
        folder.mkdir()
    with Job(folders[0], KILLED_WITH_FILES) as job:
        for rank in range(3):
            job.until_file(f"{rank}.named")
        pids = [job.pid(rank) for rank in range(3)]
        assert len(files_of(pids)) == 3
        job.kill_all()
        assert job.finish() == [128 + signal.SIGKILL] * 3
        assert len(files_of(pids)) == 3  # otherwise this tests nothing
    forever = "buffer = make(60.0)\ntouch(f'{rank}.up')\nwhile True:\n"
    with Job(folders[1], forever + "    combine(buffer, dispatch(buffer))\n") as job:
        for rank in range(3):
            job.until_file(f"{rank}.up")
        pids += [job.pid(rank) for rank in range(3)]
        job.kill_all()
        assert job.finish() == [128 + signal.SIGKILL] * 3
    with Job(folders[2], WELL) as job:
        assert job.finish() == [0, 0, 0]
        pids += [job.pid(rank) for rank in range(3)]
        assert "Traceback" not in job.output
    assert files_of(pids) == []


def test_c55_two_jobs_at_once(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with Job(folders[0], WELL) as one, Job(folders[1], WELL) as two:
        assert one.finish() == [0, 0, 0]
        assert two.finish() == [0, 0, 0]


# The compile cache.


HOST_CODE = """
import numpy as np
from transport.atomics import read_word, swap_word
words = np.array([5, 0])
assert swap_word(words.ctypes.data, 5, 9) == 5
assert swap_word(words.ctypes.data, 5, 7) == 9
assert read_word(words.ctypes.data) == 9
print("right")
"""
# A Buffer, and so every kernel, checked against the oracle.
EVERYTHING = """
import sys
from numba_ep.test import main
sizes = "--num-tokens 13 --hidden 128 --num-topk 2 --num-experts 12 --device cpu"
if main(["--ranks", "1", "--skip-tuning", *sizes.split()]) == 0:
    print("right")
"""


def check_right(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1:] == ["right"], done.stdout + done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("code", ["host code", "kernels"])
def test_c57_eight_processes_fill_one_cache(tmp_path: Path, code: str) -> None:
    """An empty folder, and all compile at once; without MPI."""
    if code == "kernels":
        require_long()
    script = HOST_CODE if code == "host code" else EVERYTHING
    path = write(tmp_path, script)
    for number in range(5 if LONG and code == "host code" else 1):
        cache = str(tmp_path / f"cache {number}")
        started = [
            subprocess.Popen(
                [sys.executable, path],
                env=environment(NUMBA_EP_CACHE_DIR=cache),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(8)
        ]
        try:
            for process in started:
                out, err = process.communicate(timeout=COMPILE_S)
                status = process.returncode
                check_right(subprocess.CompletedProcess([], status, out, err))
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        assert list(Path(cache).rglob("*.nbi"))


@pytest.fixture
def copied_cache(tmp_path: Path) -> Iterator[Path]:
    """A copy of the compile cache, to be damaged."""
    from transport.jit import host

    require(host.folder is not None, "requires a compile cache")
    kernels = importlib.import_module("numba_ep.device.cpu")._compiler.folder
    cache = tmp_path / "cache"
    for folder in (host.folder, kernels):
        shutil.copytree(str(folder), cache / Path(str(folder)).name)
    yield cache
    shutil.rmtree(cache)


@pytest.mark.parametrize("package", ["transport", "numba_ep"])
@pytest.mark.parametrize(("suffix", "left"), [("nbi", 0), ("nbi", 50), ("nbc", 50)])
def test_c57_a_truncated_cache_file(
    copied_cache: Path, tmp_path: Path, package: str, suffix: str, left: int
) -> None:
    """What a full disk or a crash left is compiled anew."""
    name = "swap_word" if package == "transport" else "layout_kernel"
    found = [*copied_cache.glob(f"{package}-*/*/*{name}*.{suffix}")]
    assert found, [path.name for path in copied_cache.rglob("*.nbi")]
    for path in found:
        path.write_bytes(path.read_bytes()[:left])
    script = HOST_CODE if package == "transport" else EVERYTHING
    cache = str(copied_cache)
    check_right(run_script(tmp_path, script, NUMBA_EP_CACHE_DIR=cache))


def test_c57_no_folder_for_the_cache(tmp_path: Path) -> None:
    """Read-only for whoever runs, root too, since a file stands in its place."""
    (tmp_path / "file").touch()
    script = EVERYTHING if LONG else HOST_CODE
    cache = str(tmp_path / "file" / "cache")
    done = run_script(tmp_path, script, limit_s=COMPILE_S, NUMBA_EP_CACHE_DIR=cache)
    check_right(done)


# What cannot be had.


def test_c56_cuda_without_a_gpu(tmp_path: Path) -> None:
    """One sentence on every rank, and the CPU is there all the same."""
    script = """
        import re, sys
        import numba_ep
        group = numba_ep.world()
        for _ in range(2):
            try:
                numba_ep.Buffer(group, device="cuda")
                sys.exit("no error")
            except RuntimeError as error:
                assert type(error) is RuntimeError
                assert "device: cuda was asked for" in str(error), error
                assert "CUDA_VISIBLE_DEVICES=)" in str(error), error
                assert "use device='cpu'" in str(error), error
        numba_ep.Buffer(group, device="cpu").destroy()
    """
    command = [find_mpirun(), "-np", "2", sys.executable, write(tmp_path, script)]
    done = run(command, CUDA_VISIBLE_DEVICES="", NUMBA_EP_DEVICE="")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nonsense", "transport: .*shm.*got 'nonsense'"),
        ("", "transport: .*shm.*got ''"),
        # No pyverbs here, or no device: what is missing, and the way out.
        ("verbs", "verbs: .*(install|device)"),
    ],
)
def test_c56_a_transport_that_is_not_there(name: str, sentence: str) -> None:
    from numba_ep import Buffer, spawn

    if devices.wanted_target() == "cuda":
        pytest.skip("these tests are for kernels on the CPU")

    def program(group: Any) -> str:
        errors = (ValueError, TransportError)
        with pytest.raises(errors, match=sentence) as caught:
            Buffer(group, transport=name, device="cpu")
        buffer = Buffer(group, device="cpu")  # all ranks are as before
        buffer.destroy()
        return str(caught.value)

    texts = spawn(program, 3, COMPILE_S)
    assert len(set(texts)) == 1


def test_one_rank_wants_another_transport() -> None:
    from numba_ep import Buffer, spawn

    if devices.wanted_target() == "cuda":
        pytest.skip("these tests are for kernels on the CPU")

    def program(group: Any) -> None:
        name = "nonsense" if group.Get_rank() == 1 else "shm"
        with pytest.raises(ValueError, match=r"transport: .*'nonsense'.*rank 1"):
            Buffer(group, transport=name, device="cpu")

    spawn(program, 3, COMPILE_S)


# The end of a Buffer, and of its process.


def test_c52_use_after_destroy_and_destroy_after_finalize(tmp_path: Path) -> None:
    """One sentence each, and the process ends well."""
    script = """
        from mpi4py import MPI
        first, second = make(60.0), make(60.0)
        handle = dispatch(first)
        combine(first, handle)
        handle = dispatch(second)
        first.destroy()
        first.destroy()
        ids = world.inputs[rank].topk_idx
        for use in (
            lambda: first.dispatch(**world.dispatch_args(rank)),
            lambda: first.combine(handle=handle, **world.combine_args(rank)),
            lambda: first.get_dispatch_layout(ids, world.scenario.num_experts),
        ):
            try:
                use()
                sys.exit("no error")
            except RuntimeError as error:
                assert "destroyed" in str(error), error
        combine(second, handle)
        MPI.Finalize()
        combine(second, dispatch(second))
        second.destroy()
        second.destroy()
    """
    with Job(tmp_path, script, num_ranks=2) as job:
        assert job.finish() == [0, 0]
        assert job.output == ""


@pytest.mark.parametrize(
    ("ending", "status", "last_line"),
    [
        ("", 0, ""),
        ("sys.exit(5)", 5, ""),
        ("del buffer; import gc; gc.collect()", 0, ""),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
    ],
)
@pytest.mark.parametrize("ranks", ["processes", "one process"])
def test_c52_never_destroyed(
    tmp_path: Path, ending: str, status: int, last_line: str, ranks: str
) -> None:
    """No hang, the status that the program wants, nothing said by threads."""
    if ranks == "processes":
        script = f"buffer = make(60.0)\ncombine(buffer, dispatch(buffer))\n{ending}\n"
        with Job(tmp_path, script, num_ranks=2) as job:
            assert job.finish() == [status] * 2
            output = job.output
        count = 2
    else:
        script = f"""
import sys
import numba_ep
from scenario import Scenario, World
world = World(Scenario((13, 13)))
def program(group):
    buffer = numba_ep.Buffer(
        group, num_rdma_bytes=world.scenario.num_bytes, device="cpu"
    )
    buffer.dispatch(**world.dispatch_args(group.Get_rank()))
    return buffer
buffer = numba_ep.spawn(program, 2)
{ending}
"""
        done = run_script(tmp_path, script)
        assert done.returncode == status, done.stderr
        output, count = done.stdout + done.stderr, 1
    assert output.count("Traceback") == (count if last_line else 0), output
    assert last_line in output
    assert last_line or output == ""


def test_c64_mpi_initialised_for_one_thread(tmp_path: Path) -> None:
    """The proxy's thread makes no MPI call."""
    script = f"""
import mpi4py
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI
assert MPI.Query_thread() == MPI.THREAD_FUNNELED
{PRELUDE}
{WELL}
"""
    path = write(tmp_path, script)
    done = run([find_mpirun(), "-np", "3", sys.executable, path, str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout + done.stderr == ""
