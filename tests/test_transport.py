"""The shm transport: the contract, and the hygiene of /dev/shm (C55)."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from numba import int64
from transport_contract import TransportContract, connected, view

import transport
from transport import TransportError, shm
from transport.jit import JIT_DISABLED, host

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 30.0


def create_shm(rank: int, num_ranks: int, receive_bytes: int, send_bytes: int) -> Any:
    return transport.create("shm", rank, num_ranks, receive_bytes, send_bytes)


class TestSharedMemory(TransportContract):
    """All of the contract."""

    create = staticmethod(create_shm)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm: other programs may use that one meanwhile."""
    monkeypatch.setattr(shm, "FOLDER", tmp_path)
    return tmp_path


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"transport.*shm.*'tcp'"):
        transport.create("tcp", 0, 1, 64, 64)


def test_c55_names_are_unique_and_owned(folder: Path) -> None:
    ends = [create_shm(rank % 2, 2, 4096, 4096) for rank in range(8)]
    files = sorted(folder.iterdir())
    assert sorted(Path(end.card().path) for end in ends) == files
    assert len(files) == 8
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o600
        assert f"-{os.getuid()}-{os.getpid()}-" in file.name
        # Whoever has got the card finds the whole file (never "size 0").
        assert file.stat().st_size >= 4096
    for end in ends:
        end.close()
    assert not list(folder.iterdir())


def test_no_file_and_no_descriptor_is_left_once_connected(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with connected(create_shm, 3, 4096, 4096) as ends:
        assert not list(folder.iterdir())
        # The memory lives on without a name.
        view(ends[0].receive)[:] = 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_peer_that_cannot_be_reached_is_named(folder: Path) -> None:
    ends = [create_shm(rank, 2, 4096, 4096) for rank in range(2)]
    cards = [end.card() for end in ends]
    ends[1].close()
    with pytest.raises(TransportError, match=r"rank 0 cannot open .* of rank 1") as no:
        ends[0].connect(cards)
    assert no.value.peer == 1
    ends[0].close()
    assert not list(folder.iterdir())


# Orphans.


class Job:
    """A process that makes `count` ends in `folder`, says so, and waits."""

    def __init__(self, folder: Path, count: int = 1, connects: bool = False) -> None:
        program = f"""
            import sys, time
            from pathlib import Path
            import transport
            from transport import shm
            shm.FOLDER = Path({str(folder)!r})
            ranks = range({count})
            ends = [transport.create("shm", r, {count}, 4096, 64) for r in ranks]
            if {connects}:
                cards = [end.card() for end in ends]
                for end in ends:
                    end.connect(cards)
                for end in ends:
                    end.connected()
            print("made", flush=True)
            sys.stdin.read()
            for end in ends:
                end.close()
        """
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def started(self) -> Job:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "made\n"
        return self

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=LIMIT_S)

    def end(self) -> str:
        """Let it end in good order; returns what it wrote to stderr."""
        errors = self.process.communicate("", timeout=LIMIT_S)[1]
        assert self.process.returncode == 0, errors
        return errors


@pytest.fixture
def jobs(folder: Path) -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        if job.process.poll() is None:
            job.process.kill()


def test_files_of_a_killed_process_go_and_those_of_a_living_one_stay(
    folder: Path, jobs: list[Job]
) -> None:
    jobs += [Job(folder, count=2), Job(folder), Job(folder, count=2, connects=True)]
    killed, living, joined = (job.started() for job in jobs)
    own = {f for f in folder.iterdir() if f"-{living.process.pid}-" in f.name}
    assert len(own) == 1
    assert not [f for f in folder.iterdir() if f"-{joined.process.pid}-" in f.name]
    killed.kill()
    joined.kill()
    assert len(list(folder.iterdir())) == 3
    # kill -9 and rerun: the next job starts cleanly and leaves nothing.
    with connected(create_shm, 2, 4096, 4096):
        assert set(folder.iterdir()) == own
    assert set(folder.iterdir()) == own
    assert living.end() == ""  # no tracker's warnings, either
    assert not list(folder.iterdir())


def test_foreign_files_are_left_alone(folder: Path) -> None:
    others = [f"numba_ep-{os.getuid() + 1}-1-aa", "numba_ep", "sem.numba_ep-0-1"]
    for name in others:
        (folder / name).write_bytes(b"theirs")
    (folder / f"numba_ep-{os.getuid()}-1-stale").write_bytes(b"")
    create_shm(0, 1, 64, 64).close()
    assert sorted(f.name for f in folder.iterdir()) == sorted(others)


def test_a_file_that_is_swept_away_as_it_is_made_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job starts between this one's `open` and its lock."""
    lock, sweeps = fcntl.flock, iter([True, False, True, False, False])

    def flock(file: int, operation: int) -> None:
        if next(sweeps, False):
            monkeypatch.setattr(fcntl, "flock", lock)
            shm.remove_files_without_owner()
            monkeypatch.setattr(fcntl, "flock", flock)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    end = create_shm(0, 1, 4096, 64)
    assert [str(f) for f in folder.iterdir()] == [end.card().path]
    end.close()
    assert not list(folder.iterdir())


def test_a_file_that_another_job_holds_as_it_is_made_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job has the lock, and has not removed the file yet."""
    lock = fcntl.flock
    held: list[int] = []

    def flock(file: int, operation: int) -> None:
        if not held:
            (name,) = folder.iterdir()
            held.append(os.open(name, os.O_RDWR))
            lock(held[0], fcntl.LOCK_EX)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    end = create_shm(0, 1, 4096, 64)
    (first,) = {str(f) for f in folder.iterdir()} - {end.card().path}
    os.unlink(first)  # what the other job does next
    os.close(held[0])
    assert Path(end.card().path).exists()
    end.close()
    assert not list(folder.iterdir())


# Too little room.


def test_c55_a_full_dev_shm_is_an_error_that_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(OSError, match=r"123457\d\d\d bytes .*--shm-size") as info:
            create_shm(0, 2, 123_456_789, 64)
    assert info.value.errno == errno.ENOSPC
    assert not list(folder.iterdir())
    assert len(os.listdir("/proc/self/fd")) == descriptors
    create_shm(0, 2, 4096, 64).close()


def test_no_memory_to_map_leaves_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", no_memory)
        with pytest.raises(OSError, match="Cannot allocate"):
            create_shm(0, 2, 4096, 64)
    assert not list(folder.iterdir())
    assert len(os.listdir("/proc/self/fd")) == descriptors


SMALL_SHM = """
import numba_ep
from numba_ep.spawn import spawn

def program(group):
    try:
        numba_ep.Buffer(group, num_rdma_bytes=2 * 40_000_000, num_qps_per_rank=1)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"

for text in spawn(program, 3, 60):
    print(text)
# What fits still works after the failure.
with_room = lambda group: numba_ep.Buffer(group, num_rdma_bytes=80_000).destroy()
spawn(with_room, 2, 60)
import os
print("left:", os.listdir("/dev/shm"))
"""


def test_c55_a_really_small_dev_shm() -> None:
    """A tmpfs of 64 MB: one rank fits, three do not, and nobody gets a SIGBUS."""
    mount = ["unshare", "-m", "sh", "-c"]
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
    try:
        command = [*mount, small + "true"]
        probe = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare(1)")
    if probe.returncode:
        pytest.skip(f"no private mount here: {probe.stderr.decode().strip()}")
    since = time.monotonic()
    done = subprocess.run(
        [*mount, small + 'exec "$0" -c "$1"', sys.executable, SMALL_SHM],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"NUMBA_EP_DEVICE": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *texts, left = done.stdout.splitlines()
    assert len(texts) == 3
    assert any(text.startswith("OSError") and "--shm-size" in text for text in texts)
    assert all("--shm-size" in text for text in texts)
    assert left == "left: []"
    assert time.monotonic() - since < 60


@pytest.mark.skipif(JIT_DISABLED, reason="looks at machine code")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks at x86's code")
def test_the_code_waits_for_streamed_lines_before_the_counter() -> None:
    """Whatever cores writer and reader happen to get in the contract's tests."""
    post = host.jit(shm._post.py_func, cache=False)
    post.compile((int64[:, ::1], int64[::1], int64[::1], int64, int64[::1]))
    (code,) = post.inspect_asm().values()
    assert re.search(r"\bv?movnt", code)
    assert re.search(r"\bsfence", code)
