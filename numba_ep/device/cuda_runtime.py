"""Stream, memory and launches of one Buffer on a GPU, through CUDA's driver API.

numba-cuda compiles a kernel; from there on it is called without it: its dispatcher
would type and convert each of some forty arguments again on every launch.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver
from numba import types

from numba_ep.device.memory import Memory
from transport.atomics import read_word, wait_any
from transport.cuda_driver import (
    call,
    current_device,
    device_address,
    give_stream_back,
    register,
    take_stream,
    unregister,
)

LANES = 32
LOOK_NS = 20_000_000  # how often a waiting thread asks whether a kernel has failed

_HOST_FLAGS = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
_lock = threading.Lock()
_functions: dict[tuple[Any, int], Any] = {}  # by kernel and context


def _flatten(args: tuple[Any, ...]) -> list[int]:
    """The members of all NamedTuples in line."""
    values: list[int] = []
    for arg in args:
        if isinstance(arg, tuple):
            values.extend(arg)
        else:
            values.append(arg)
    return values


def argument_type(value: Any) -> Any:
    """The kernel's type for an argument: int64, or a (Named)Tuple of such."""
    if not isinstance(value, tuple):
        return types.int64
    members = [argument_type(v) for v in value]
    fields = getattr(value, "_fields", None)
    if len(set(members)) == 1:
        count = len(members)
        if fields is None:
            return types.UniTuple(members[0], count)
        return types.NamedUniTuple(members[0], count, type(value))
    return (
        types.Tuple(members)
        if fields is None
        else types.NamedTuple(members, type(value))
    )


class _Prepared(NamedTuple):
    """A loaded kernel and room for the arguments of its next launch."""

    function: Any
    layout: struct.Struct
    values: Any
    pointers: Any


class Runtime:
    """One Buffer's stream and memory. One thread at a time may use it.

    num_threads: the warps of its largest grid; a GPU has no use for the number.
    """

    synchronous = False  # a launch returns at once; `synchronize` waits for it

    def __init__(self, name: str, num_threads: int) -> None:
        self.name = name
        self._device, self._context = current_device()
        self._enter()
        self.stream = take_stream()  # the handle, for other libraries
        self._event = create_event()
        # What a Buffer's end sets; kernels on a GPU leave by the abort word alone.
        self.abort: Callable[[], None] = lambda: None
        self.bells = (0, 0)  # kernels ring none: everybody polls
        self._kernels: dict[Any, _Prepared] = {}
        self._device_memory: list[int] = []
        self._host_memory: list[int] = []
        self._registered: list[tuple[int, int]] = []
        self._closed = False
        self._marks, self._done = 0, self.allocate_host(8)

    def _enter(self) -> None:
        # The caller's thread may never have used CUDA, or may have used another device.
        call(driver.cuCtxSetCurrent, self._context)

    def _prepared(self, kernel: Any, args: tuple[Any, ...]) -> _Prepared:
        self._enter()
        if kernel not in self._kernels:
            count = len(_flatten(args))
            values = ctypes.create_string_buffer(8 * count)
            start = ctypes.addressof(values)
            pointers = (ctypes.c_void_p * count)(*range(start, start + 8 * count, 8))
            layout = struct.Struct(f"{count}q")
            function = load(kernel, args)
            self._kernels[kernel] = _Prepared(function, layout, values, pointers)
        return self._kernels[kernel]

    def launch(
        self, kernel: Any, blocks: int, warps: int, args: tuple[Any, ...]
    ) -> None:
        """Start `kernel(*args)` as `blocks` x `warps`, in order on the Buffer's stream.

        args: integers and NamedTuples of integers; all are int64 in the kernel.
        """
        function, layout, values, pointers = self._prepared(kernel, args)
        try:
            layout.pack_into(values, 0, *_flatten(args))
        except struct.error as error:
            raise TypeError(
                f"{kernel.__name__}: expected {layout.size // 8} integers of 64 bits, "
                f"each member of a NamedTuple counted; {error}"
            ) from None
        grid = (blocks, 1, 1, warps * LANES, 1, 1)
        where = ctypes.addressof(pointers)
        call(driver.cuLaunchKernel, function, *grid, 0, self.stream, where, 0)

    launch_local = launch  # the stream keeps the order of all of them

    def wait_for(self, stream: int) -> None:
        """What is launched from now on begins after all that `stream` holds now."""
        self._enter()
        call(driver.cuEventRecord, self._event, stream)
        call(driver.cuStreamWaitEvent, self.stream, self._event, 0)

    def let_wait(self, stream: int) -> None:
        """What is put on `stream` from now on begins after all launched so far."""
        self._enter()
        call(driver.cuEventRecord, self._event, self.stream)
        call(driver.cuStreamWaitEvent, stream, self._event, 0)

    def mark(self) -> int:
        """A number for all that was launched so far, for `is_done` and `wait`."""
        self._enter()
        self._marks += 1
        at = self._done.address
        call(driver.cuStreamWriteValue64, self.stream, at, self._marks, 0)
        return self._marks

    def is_done(self, mark: int) -> bool:
        """Whether all before the mark has ended."""
        return int(read_word(self._done.host_address)) >= mark

    def wait(self, mark: int, timeout_s: float | None = None) -> bool:
        """Wait for the mark: False after `timeout_s`; raises where a kernel failed.

        In compiled code that asks the driver nothing: a thread that polls a stream
        takes the interpreter's and the driver's locks from the proxy, which then needs
        50 us and more for a copy that it posts in 3.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        word = np.array([self._done.host_address])
        while not self.is_done(mark):
            if deadline is not None and time.monotonic() > deadline:
                return False
            seen = np.array([read_word(self._done.host_address)])
            if seen[0] < mark and wait_any(word, seen, LOOK_NS, 0) < 0:
                self._enter()
                status = driver.cuStreamQuery(self.stream)[0]
                if status != driver.CUresult.CUDA_ERROR_NOT_READY:
                    call(driver.cuStreamQuery, self.stream)
        return True

    def resident_blocks(self, kernel: Any, warps: int, args: tuple[Any, ...]) -> int:
        """How many blocks of `warps` warps of `kernel` the whole GPU holds at once."""
        per_sm = call(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor,
            self._prepared(kernel, args).function,
            warps * LANES,
            0,
        )
        number = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return per_sm * call(driver.cuDeviceGetAttribute, number, self._device)

    def allocate(self, num_bytes: int) -> Memory:
        """Zeroed GPU memory, 256-byte aligned; the host cannot see it."""
        self._enter()
        pointer = call(driver.cuMemAlloc, max(num_bytes, 1))
        self._device_memory.append(int(pointer))
        call(driver.cuMemsetD8Async, pointer, 0, num_bytes, self.stream)
        call(driver.cuStreamSynchronize, self.stream)
        return Memory(int(pointer), num_bytes, None)

    def allocate_host(self, num_bytes: int) -> Memory:
        """Zeroed pinned host memory at the same address for kernels and host.

        Never write-combined: the host reads it, and polls words in it.
        """
        self._enter()
        address = int(call(driver.cuMemHostAlloc, max(num_bytes, 1), _HOST_FLAGS))
        self._host_memory.append(address)
        ctypes.memset(address, 0, num_bytes)
        host = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
        return Memory(device_address(address), num_bytes, host)

    def register(self, address: int, num_bytes: int) -> int:
        """Pin existing host memory until `close`; returns its address for kernels."""
        self._enter()
        self._registered.append((address, num_bytes))
        return register(address, num_bytes)

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Wait until all launches have ended; other Python threads run meanwhile.

        Returns False after `timeout_s`; raises RuntimeError where a kernel failed.
        """
        return self.wait(self.mark(), timeout_s)

    def fill(self, address: int, num_bytes: int, byte: int, stream: int) -> None:
        """Set user memory to a byte, in the order of the caller's stream."""
        self._enter()
        call(driver.cuMemsetD8Async, address, byte, num_bytes, stream)

    def copy_to_host(self, memory: Memory) -> np.ndarray:
        """A copy of `memory` after everything launched so far, [num_bytes] uint8."""
        self.synchronize()
        if memory.host is not None:
            return memory.host.copy()
        out = np.empty(memory.num_bytes, np.uint8)
        call(
            driver.cuMemcpyDtoHAsync,
            out.ctypes.data,
            memory.address,
            memory.num_bytes,
            self.stream,
        )
        call(driver.cuStreamSynchronize, self.stream)
        return out

    def copy_from_host(self, memory: Memory, data: np.ndarray) -> None:
        """Write `data` to the beginning of `memory`, after all launches so far."""
        self._enter()
        data = np.ascontiguousarray(data)
        if data.nbytes > memory.num_bytes:
            raise ValueError(
                f"data: expected at most {memory.num_bytes} bytes, got {data.nbytes}"
            )
        call(
            driver.cuMemcpyHtoDAsync,
            memory.address,
            data.ctypes.data,
            data.nbytes,
            self.stream,
        )
        call(driver.cuStreamSynchronize, self.stream)

    def close(self) -> None:
        """Give back stream and memory; kernels must have ended. May be repeated."""
        if self._closed:
            return
        self._closed = True
        self._enter()
        give_stream_back(self.stream)
        call(driver.cuEventDestroy, self._event)
        for place in self._registered:
            unregister(*place)
        for address in self._device_memory:
            call(driver.cuMemFree, address)
        for address in self._host_memory:
            call(driver.cuMemFreeHost, address)


def create_event() -> Any:
    """An event that takes no time."""
    flag = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
    return call(driver.cuEventCreate, flag)


def load(kernel: Any, args: tuple[Any, ...]) -> Any:
    """The CUfunction of `kernel` for arguments like `args`, ready on this device.

    Loading may wait for running kernels. So every kernel must be loaded before the
    first one runs that waits for another rank.
    """
    _, context = current_device()
    key = (kernel, int(context))
    with _lock:
        if key not in _functions:
            call(driver.cuCtxSetCurrent, context)
            signature = tuple(argument_type(a) for a in args)
            compiled = kernel.compile(signature)._codelibrary.get_cufunc()
            loose = driver.CUkernel(int(compiled.handle))
            function = call(driver.cuKernelGetFunction, loose)
            # CUDA loads lazily, at the first launch, unless told so.
            call(driver.cuFuncLoad, function)
            _functions[key] = function
    return _functions[key]
