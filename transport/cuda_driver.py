"""CUDA's driver API as both packages call it: errors as exceptions, pinned memory.

Imported on a GPU alone.
"""

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings import driver

_REGISTER_FLAGS = (
    driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
)

_lock = threading.Lock()
# CUDA registers a range once a process, while several ranks of a process may share it.
_registered: dict[tuple[int, int], int] = {}


def call(function: Any, *args: Any) -> Any:
    """What a driver function returns after its status.

    Raises RuntimeError with the function's and the error's name.
    """
    status, *results = function(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise error_of(function.__name__, status)
    return results[0] if len(results) == 1 else results


def error_of(what: str, status: int) -> RuntimeError:
    """What a CUresult other than success means."""
    name = driver.CUresult(status).name
    _, text = driver.cuGetErrorString(driver.CUresult(status))
    return RuntimeError(f"{what}: {name}: {(text or b'unknown error').decode()}")


def current_device() -> tuple[Any, Any]:
    """The calling thread's device (or the first one) and its primary context."""
    call(driver.cuInit, 0)
    current = call(driver.cuCtxGetCurrent)
    device = (
        call(driver.cuCtxGetDevice) if int(current) else call(driver.cuDeviceGet, 0)
    )
    return device, call(driver.cuDevicePrimaryCtxRetain, device)


# Streams share the GPU's hardware queues, and what is in one queue runs in order: a
# kernel behind another one that waits for it would never run. So few streams are made,
# and those that are given back are used again.
_idle_streams: dict[int, list[int]] = {}  # by context


def take_stream() -> int:
    """A stream that the default stream does not wait for, nor it for that one."""
    with _lock:
        idle = _idle_streams.get(int(call(driver.cuCtxGetCurrent)), [])
        if idle:
            return idle.pop()
    flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    return int(call(driver.cuStreamCreate, flags))


def give_stream_back(stream: int) -> None:
    """What is still under way on it comes first for whoever takes it next."""
    with _lock:
        context = int(call(driver.cuCtxGetCurrent))
        _idle_streams.setdefault(context, []).append(stream)


def allocate_zeroed(num_bytes: int) -> int:
    """GPU memory, cleared when this returns; no kernel that waits is waited for."""
    address = int(call(driver.cuMemAlloc, max(num_bytes, 1)))
    stream = take_stream()
    call(driver.cuMemsetD8Async, address, 0, max(num_bytes, 1), stream)
    call(driver.cuStreamSynchronize, stream)
    give_stream_back(stream)
    return address


def device_address(address: int) -> int:
    """Where kernels and streams find pinned host memory."""
    return int(call(driver.cuMemHostGetDevicePointer, address, 0))


def register(address: int, num_bytes: int) -> int:
    """Pin existing host memory until `unregister`; returns its address for the GPU."""
    place = (address, num_bytes)
    with _lock:
        if place not in _registered:
            call(driver.cuMemHostRegister, address, num_bytes, _REGISTER_FLAGS)
        _registered[place] = _registered.get(place, 0) + 1
    return device_address(address)


def unregister(address: int, num_bytes: int) -> None:
    """Undo one `register`."""
    place = (address, num_bytes)
    with _lock:
        _registered[place] -= 1
        if _registered[place] == 0:
            del _registered[place]
            call(driver.cuMemHostUnregister, address)
