"""Bounce buffers in a GPU's memory, which the card reads and writes itself (GPUDirect).

A card gets at a GPU's memory in one of two ways, tried in this order:

    dma-buf          the driver hands the memory out as a file, which the card maps
    nvidia-peermem   a kernel module; a GPU's address registers like any other

Where neither is there (GeForce), or NUMBA_EP_GPUDIRECT=0, the buffers lie in pinned
host memory, which kernels reach over PCIe.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from cuda.bindings import driver
from pyverbs.mr import MR, DmaBufMR
from pyverbs.pyverbs_error import PyverbsError

from transport.cuda_driver import allocate_zeroed, call, current_device

# The driver's own unit: so much memory, or a multiple, is aligned for every way.
UNIT_BYTES = 2 << 20
PCI_CHARACTERS = 13  # 0000:17:00.0 and its end
_ORDERED = driver.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
_attributes = driver.CUdevice_attribute
_log = logging.getLogger("numba_ep")


class GpuRegion(NamedTuple):
    """Registered GPU memory.

    address: for kernels. base: what the card calls the same place. way: how the card
    gets there. free: gives it back, once the MR is closed.
    """

    address: int
    base: int
    mr: Any
    way: str
    free: Callable[[], None]


class Gpu:
    """The calling thread's GPU, as memory for a card."""

    def __init__(self) -> None:
        self._device, self._context = current_device()

    def pci_address(self) -> str:
        """As sysfs writes it."""
        text = call(driver.cuDeviceGetPCIBusId, PCI_CHARACTERS, self._device)
        return str(text.decode().rstrip("\0").lower())

    def region(self, pd: Any, num_bytes: int, access: int) -> GpuRegion | None:
        """Zeroed GPU memory that the card reaches, or None; says once which it is."""
        reasons = self._reasons_against()
        if not reasons:
            call(driver.cuCtxSetCurrent, self._context)
            size = -(-max(num_bytes, 1) // UNIT_BYTES) * UNIT_BYTES
            address = self._allocate(size)
            for register in (_by_dma_buf, _by_peermem):
                try:
                    base, mr, way = register(pd, address, size, access)
                except (PyverbsError, RuntimeError) as error:
                    reasons.append(f"{register.__doc__}: {error}")
                    continue
                _say_once(logging.INFO, f"bounce buffers in GPU memory, by {way}")
                free = functools.partial(self._free, address)
                return GpuRegion(address, base, mr, way, free)
            self._free(address)
        _say_once(
            logging.WARNING,
            f"bounce buffers in host memory, not in the GPU's: {'; '.join(reasons)}",
        )
        return None

    def _reasons_against(self) -> list[str]:
        if os.environ.get("NUMBA_EP_GPUDIRECT") == "0":
            return ["NUMBA_EP_GPUDIRECT=0"]
        if not self._has(_attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED):
            return ["this GPU has no GPUDirect RDMA"]
        # Else a running kernel might see a counter before the data that it stands for.
        ordering = _attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
        if self._has(ordering) < int(_ORDERED):
            return ["this GPU's kernels may see a card's writes out of order"]
        return []

    def _has(self, attribute: Any) -> int:
        return int(call(driver.cuDeviceGetAttribute, attribute, self._device))

    def _allocate(self, size: int) -> int:
        address = allocate_zeroed(size)
        # Copies and fills of CUDA's own that the host waits for are then complete.
        sync = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        call(driver.cuPointerSetAttribute, 1, sync, address)
        return address

    def _free(self, address: int) -> None:
        call(driver.cuCtxSetCurrent, self._context)
        call(driver.cuMemFree, address)


def _by_dma_buf(
    pd: Any, address: int, size: int, access: int
) -> tuple[int, Any, str]:  # fmt: skip
    """dma-buf"""
    kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    file = int(call(driver.cuMemGetHandleForAddressRange, address, size, kind, 0))
    try:
        mr = DmaBufMR(pd, size, access, dmabuf=file)
    finally:
        os.close(file)  # a registration keeps the memory by itself
    # Addresses count from the beginning of the file.
    return 0, mr, "dma-buf"


def _by_peermem(
    pd: Any, address: int, size: int, access: int
) -> tuple[int, Any, str]:  # fmt: skip
    """nvidia-peermem"""
    mr = MR(pd, length=size, access=access, address=address)
    return address, mr, "nvidia-peermem"


@functools.cache
def _say_once(level: int, text: str) -> None:
    _log.log(level, "verbs: %s", text)
