"""What all tests share: the checkout's packages, Hypothesis profiles, no leftovers."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
SHARED_MEMORY = Path("/dev/shm")

if importlib.util.find_spec("numba_ep") is None:
    # Not installed: for the tests, and for the processes that they start.
    sys.path.insert(0, str(ROOT))
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([given] if given else [])])

# Reproducible in the short runs, new examples in each of the long ones.
settings.register_profile("short", deadline=None, derandomize=True, database=None)
settings.register_profile("long", deadline=None, max_examples=2000, database=None)
LONG = os.environ.get("NUMBA_EP_LONG") == "1"
settings.load_profile("long" if LONG else "short")


def require(tool_present: object, reason: str) -> None:
    """Skip where a tool is missing; fail in CI, which has to install everything."""
    if tool_present:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI=true")
    pytest.skip(reason)


@pytest.fixture(autouse=True, scope="session")
def no_shared_memory_is_left() -> Iterator[None]:
    """No test may leave a file of the shm transport behind."""
    before = set(_shared_files())
    yield
    deadline = time.monotonic() + 5.0  # ranks of the last test may be on their way out
    while left := [p.name for p in _shared_files() if p not in before and _is_left(p)]:
        if time.monotonic() > deadline:
            pytest.fail(f"left in {SHARED_MEMORY}: {', '.join(left)}")
        time.sleep(0.1)


def _shared_files() -> list[Path]:
    return sorted(SHARED_MEMORY.glob(f"numba_ep-{os.getuid()}-*"))


def _is_left(path: Path) -> bool:
    """Whether no other job owns the file: an owner holds a lock as long as it lives."""
    if f"-{os.getpid()}-" in path.name:
        return True
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
