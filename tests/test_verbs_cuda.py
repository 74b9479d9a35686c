"""Bounce buffers in GPU memory under the verbs transport, over two fakes.

The fake CUDA driver checks every call; its GPU memory is the host's, so that the fake
network can move real bytes through it and kernels on the CPU can read them. None of
this has run on a GPU with a network card.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
from pathlib import Path
from typing import Any

import fake_pyverbs
import numpy as np
import pytest
from cuda.bindings import driver as real
from fake_pyverbs import Fabric
from faulty import Case, run_case
from transport_contract import connected, finish, post, view

import transport
import transport.cuda_driver
from numba_ep import Config
from transport import wr

FILE = "GPU memory"
CONTEXT, DEVICE, STREAM = 77, 5, 99
UNIT = 2 << 20
ATTRIBUTES = real.CUdevice_attribute
GPUDIRECT = ATTRIBUTES.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED
ORDERING = ATTRIBUTES.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
DMA_BUF = real.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
SYNC = real.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
OK = real.CUresult.CUDA_SUCCESS


class FakeDriver:
    """As cuda.bindings.driver: every function returns its status first."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.able = {GPUDIRECT: 1, ORDERING: 100}
        self.exports = 99  # how often memory can still be had as a file
        self.memory: dict[int, mmap.mmap] = {}
        self.synced: set[int] = set()
        self.freed: list[int] = []
        self.filled: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)  # enums

    def cuInit(self, flags: int) -> Any:
        return (OK,)

    def cuCtxGetCurrent(self) -> Any:
        return OK, CONTEXT

    def cuCtxGetDevice(self) -> Any:
        return OK, DEVICE

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        assert device == DEVICE
        return OK, CONTEXT

    def cuCtxSetCurrent(self, context: int) -> Any:
        assert context == CONTEXT
        return (OK,)

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> Any:
        assert (length, device) == (13, DEVICE)
        return OK, b"0000:3B:00.0\0"

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> Any:
        assert device == DEVICE
        return OK, self.able[attribute]

    def cuMemAlloc(self, size: int) -> Any:
        assert size % UNIT == 0 < size, "not the driver's own unit"
        memory = mmap.mmap(-1, size)
        memory[:] = b"\xee" * size
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self.memory[address] = memory
        return OK, address

    def cuPointerSetAttribute(self, value: int, attribute: Any, address: int) -> Any:
        assert (value, attribute) == (1, SYNC)
        assert address in self.memory
        self.synced.add(address)
        return (OK,)

    def cuStreamCreate(self, flags: int) -> Any:
        assert flags == int(real.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return OK, STREAM

    def cuMemsetD8Async(self, address: int, byte: int, size: int, stream: int) -> Any:
        assert (byte, stream, size) == (0, STREAM, len(self.memory[address]))
        ctypes.memset(address, byte, size)
        self.filled.append(address)
        return (OK,)

    def cuStreamSynchronize(self, stream: int) -> Any:
        assert stream == STREAM
        return (OK,)

    cuStreamDestroy = cuStreamSynchronize

    def cuMemGetHandleForAddressRange(
        self, address: int, size: int, kind: Any, flags: int
    ) -> Any:
        assert (kind, flags) == (DMA_BUF, 0)
        assert size == len(self.memory[address]), "all of an allocation"
        assert address in self.synced and address in self.filled
        if not self.exports:
            return real.CUresult.CUDA_ERROR_NOT_SUPPORTED, 0
        self.exports -= 1
        file = os.memfd_create(FILE)
        self.fabric.files[file] = address
        return OK, file

    def cuMemFree(self, address: int) -> Any:
        assert self.memory.pop(address, None) is not None
        for region in self.fabric.regions.values():
            assert not (region.open and region.memory == address), "still registered"
        self.freed.append(address)
        return (OK,)

    def cuGetErrorString(self, status: Any) -> Any:
        return OK, b"operation not supported"


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    return fake_pyverbs.install(monkeypatch)


@pytest.fixture
def driver(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(fabric)
    fabric.is_on_gpu = fake.memory.__contains__
    monkeypatch.setattr("cuda.bindings.driver", fake)
    monkeypatch.setattr(transport.cuda_driver, "driver", fake)
    return fake


def create_on_gpu(rank: int, num_ranks: int, receive: int, send: int) -> Any:
    return transport.create("verbs", rank, num_ranks, receive, send, True, 2, 256)


def open_files() -> list[Path]:
    """Exported files that nobody has closed."""
    files = Path("/proc/self/fd").iterdir()
    return [file for file in files if FILE in os.path.realpath(file)]


WAYS = {
    "dma-buf": {},
    "nvidia-peermem": {"dma_buf": False},
    "host memory": {"dma_buf": False, "peermem": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_through_every_kind_of_memory(
    way: str, fabric: Fabric, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole journeys of 3 ranks, exact; all memory goes when they end."""
    vars(fabric).update(WAYS[way])
    create: Any = transport.create
    texts: list[str] = []

    def create_wrapped(name: str, *rest: Any) -> Any:
        *sizes, _, queues, host_bytes = rest
        assert host_bytes > 0
        return create("verbs", *sizes, True, queues, host_bytes)

    monkeypatch.setattr(transport, "create", create_wrapped)
    case = Case([9, 5, 7], 128, 4, 6, Config(4, 2, 4, 2, 4))
    run_case(case, before=lambda buffer: texts.append(repr(buffer)))
    assert all(f"(fake0 port 1, {way})" in text for text in texts)
    assert fabric.violations == []
    assert not driver.memory, "GPU memory is left"
    assert len(driver.freed) == 6
    assert open_files() == []


@pytest.mark.parametrize("way", ["dma-buf", "nvidia-peermem"])
def test_what_the_host_reads_is_in_its_memory(
    way: str, fabric: Fabric, driver: FakeDriver
) -> None:
    vars(fabric).update(WAYS[way])
    with connected(create_on_gpu, 2, 4096, 4096) as (writer, reader):
        region = reader.receive
        assert region.on_gpu and region.address in driver.memory
        ctypes.memset(region.host_address, 0, 256)
        requests = [wr.counter_write(1, 0, at, 7 + at) for at in (0, 248, 256, 4088)]
        post(writer, *requests, wr.put(1, 1, 8, 1024, 64, 512, 3))
        finish(writer)
        words = np.ctypeslib.as_array((ctypes.c_int64 * 32).from_address(region.words))
        assert (words[0], words[31]) == (7, 255)
        received = view(region).view(np.int64)
        assert (received[:32] == -1).all(), "the host's words went to the GPU"
        assert (received[32], received[511], received[64]) == (263, 4095, 3)


def test_memory_that_kernels_may_still_use_is_left(
    fabric: Fabric, driver: FakeDriver
) -> None:
    with connected(create_on_gpu, 2, 4096, 4096) as ends:
        ends[0].close(keep_memory=True)
        assert driver.freed == []
        view(ends[0].receive)[:] = 1
    assert len(driver.freed) == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({GPUDIRECT: 0}, "has no GPUDirect"),
        ({ORDERING: 0}, "writes out of order"),
        ({}, "dma-buf: .*NOT_SUPPORTED.*; nvidia-peermem: Failed to register"),
    ],
)
def test_host_memory_where_there_is_no_other_way(
    change: Any, text: str, fabric: Fabric, driver: FakeDriver,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Said once, not for every region and rank."""
    driver.able.update(change)
    driver.exports, fabric.peermem = 0, False
    with connected(create_on_gpu, 2, 4096, 4096) as (writer, reader):
        assert not (writer.send.on_gpu or reader.receive.on_gpu)
        assert writer.details == "fake0 port 1, host memory"
        post(writer, wr.put(1, 0, 0, 1024, 64, 0, 7))
        finish(writer)
        assert view(reader.receive)[:8].view(np.int64) == 7
    assert not driver.memory
    said = [r for r in caplog.records if r.name == "numba_ep"]
    assert [record.levelno for record in said] == [logging.WARNING]
    assert "in host memory, not in the GPU's" in said[0].getMessage()
    assert re.search(text, said[0].getMessage())


def test_gpudirect_can_be_switched_off(
    fabric: Fabric, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_EP_GPUDIRECT", "0")
    with connected(create_on_gpu, 2, 4096, 4096) as ends:
        assert ends[0].details == "fake0 port 1, host memory"
    assert driver.filled == []


def test_regions_may_lie_apart(fabric: Fabric, driver: FakeDriver) -> None:
    """The card takes only one of them on the GPU: too small a window."""
    fabric.peermem, driver.exports = False, 1
    end = create_on_gpu(0, 2, 4096, 4096)
    assert (end.receive.on_gpu, end.send.on_gpu) == (True, False)
    assert end.details == "fake0 port 1, dma-buf; sends from host memory"
    end.close()
    assert not driver.memory


# The nearest card.


def test_the_nearest_card_is_the_default(
    fabric: Fabric, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    create_on_gpu(0, 2, 64, 64).close()
    import transport.verbs_device as module

    def nearest(names: list[str], gpu: str) -> list[str]:
        asked.append((names, gpu))
        return names[::-1]

    fabric.devices = ("fake0", "fake1")
    monkeypatch.setattr(module, "nearest", nearest)
    assert create_on_gpu(0, 2, 64, 64).details.startswith("fake1 port 1")
    assert asked == [(["fake0", "fake1"], "0000:3b:00.0")]
    monkeypatch.setenv("NUMBA_EP_IB_DEVICE", "fake0")
    assert create_on_gpu(0, 2, 64, 64).details.startswith("fake0 port 1")


@pytest.mark.usefixtures("fabric")
def test_distance_is_the_way_through_pci(tmp_path: Path) -> None:
    """One switch, one root port, one processor, another processor."""
    import transport.verbs_device as module

    root = tmp_path / "devices"
    places = {
        "far": ("pci0000:80/0000:80:01.0/0000:81:00.0", "1"),
        "same_node": ("pci0000:10/0000:10:01.0/0000:11:00.0", "0"),
        "soft": ("virtual/net/eth0", None),
        "same_switch": ("pci0000:3a/0000:3a:00.0/0000:3b:10.0/0000:3c:00.0", "0"),
        "same_root": ("pci0000:3a/0000:3a:05.0/0000:40:00.0", "0"),
        "gpu": ("pci0000:3a/0000:3a:00.0/0000:3b:00.0", "0"),
    }
    for name, (place, node) in places.items():
        folder = root / place
        folder.mkdir(parents=True)
        if node is not None:
            (folder / "numa_node").write_text(f"{node}\n")
        if name == "gpu":
            link = tmp_path / "bus/pci/devices/0000:3b:00.0"
        else:
            link = tmp_path / "class/infiniband" / name / "device"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    names = [name for name in places if name != "gpu"]
    order = ["same_switch", "same_root", "same_node", "far", "soft"]
    assert module.nearest(names, "0000:3b:00.0", tmp_path) == order
    assert module.nearest(names, "", tmp_path) == names
