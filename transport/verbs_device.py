"""The device, port and GID that all traffic of a rank goes through.

    NUMBA_EP_IB_DEVICE      its name, as `rdma link` or ibv_devices print it
    NUMBA_EP_IB_PORT        number of the port, from 1
    NUMBA_EP_IB_GID_INDEX   row of the port's GID table
    NUMBA_EP_IB_TIMEOUT     how long a packet waits for its answer: 4.096 us * 2**n
    NUMBA_EP_IB_RETRY       how often it is sent again before the peer counts as gone

By default the first device with an active port (where kernels run on a GPU, the nearest
to it), and on Ethernet the GID of RoCE v2 that stands for an IPv4 address. Whatever is
missing is said in one sentence with a way out.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from transport.base import TransportError

try:
    from pyverbs import enums
    from pyverbs.device import Context, get_device_list
    from pyverbs.pyverbs_error import PyverbsError
except ModuleNotFoundError as missing:
    raise TransportError(
        f"verbs: {missing}: install Debian's or Ubuntu's python3-pyverbs, for the "
        "system's own Python, and make the environment with --system-site-packages"
    ) from missing
except ImportError as missing:
    raise TransportError(
        f"verbs: {missing}: pyverbs is there, rdma-core is not; install libibverbs1 "
        "and ibverbs-providers"
    ) from missing

# A packet that is lost for 4 s: the peer is gone. Shorter outages cost only time.
TIMEOUT, RETRY = 17, 6
# 7 would mean for ever to SoftRoCE.
MOST_RETRIES, LONGEST_TIMEOUT = 6, 31
IPV4 = "0000:0000:0000:0000:0000:ffff:"
LINK_LOCAL = "fe80:"


class Port(NamedTuple):
    """An open device with the port to use, and what it can do.

    gid: as text; "" where the port has LIDs (InfiniBand). mtu: the enum, 128 << mtu.
    longest: bytes of one message. most_writes: of one send queue. most_completions: of
    one completion queue.
    """

    context: Any
    device: str
    number: int
    lid: int
    gid: str
    gid_index: int
    mtu: int
    longest: int
    most_writes: int
    most_completions: int
    largest_region: int

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.device} port {self.number}"


class Patience(NamedTuple):
    """`timeout` and `retry_cnt` of every QP."""

    timeout: int
    retries: int


@contextmanager
def explained(what: str, way_out: str) -> Iterator[None]:
    """Turn an error of pyverbs into a TransportError that says what to do."""
    try:
        yield
    except PyverbsError as error:
        raise translated(error, what, way_out) from error


def translated(error: Any, what: str, way_out: str) -> TransportError:
    """The TransportError for one of pyverbs."""
    code = getattr(error, "error_code", 0)
    reason = os.strerror(code) if code > 0 else str(error)
    if code == errno.ENOMEM:
        way_out = f"{_memlock()}; {way_out}"
    return TransportError(f"verbs: {what}: {reason}; {way_out}")


def _memlock() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return "memory that may be locked has no limit here (ulimit -l)"
    return f"only {limit} bytes may be locked: raise it (ulimit -l unlimited)"


def patience() -> Patience:
    """From the environment. Raises ValueError."""
    timeout = _number("NUMBA_EP_IB_TIMEOUT", 1, LONGEST_TIMEOUT)
    retries = _number("NUMBA_EP_IB_RETRY", 0, MOST_RETRIES)
    return Patience(
        TIMEOUT if timeout is None else timeout, RETRY if retries is None else retries
    )


def _number(name: str, least: int, most: int) -> int | None:
    text = os.environ.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise ValueError(f"{name}: expected {least} to {most}, got {text!r}")
    return int(text)


def open_port(gpu: str = "") -> Port:
    """The port that the environment names, or the first that is active.

    gpu: PCI address of the GPU whose kernels use it; near devices are tried first.
    """
    wanted = os.environ.get("NUMBA_EP_IB_DEVICE", "")
    names = _device_names()
    if wanted and wanted not in names:
        raise TransportError(
            f"verbs: NUMBA_EP_IB_DEVICE: no device {wanted!r}; there are "
            f"{', '.join(names)}"
        )
    states: list[str] = []
    for name in [wanted] if wanted else nearest(names, gpu):
        with explained(f"cannot open {name}", "is /dev/infiniband readable for you?"):
            context = Context(name=name)
        port = None
        try:
            port = _active_port(context, name, states)
        finally:
            if port is None:
                context.close()
        if port is not None:
            return port
    raise TransportError(
        f"verbs: no port is active ({', '.join(states)}); see `rdma link`: is the "
        "cable in, the interface up, the subnet manager running?"
    )


def _device_names() -> list[str]:
    try:
        names = [device.name.decode() for device in get_device_list()]
    except PyverbsError:
        names = []  # the kernel knows no RDMA
    if not names:
        raise TransportError(
            "verbs: this host has no RDMA device (`ls /sys/class/infiniband` lists "
            "them): load the card's driver, or use transport='shm' on one host; in a "
            "container pass --device=/dev/infiniband"
        )
    return names


def nearest(names: list[str], gpu: str, sysfs: Path = Path("/sys")) -> list[str]:
    """The devices, first those that share most of their way through PCI with `gpu`.

    Behind one switch, below one root port, on one processor, elsewhere; among equals
    their order stays.
    """
    if not gpu:
        return names
    of_gpu = sysfs / "bus/pci/devices" / gpu

    def far(name: str) -> tuple[int, bool]:
        device = sysfs / "class/infiniband" / name / "device"
        ways = [str(device.resolve()), str(of_gpu.resolve())]
        shared = Path(os.path.commonpath(ways)).parts
        return -len(shared), _numa_node(device) != _numa_node(of_gpu)

    return sorted(names, key=far)


def _numa_node(device: Path) -> str:
    try:
        return (device / "numa_node").read_text().strip()
    except OSError:
        return ""  # of no PCI device


def _active_port(context: Any, device: str, states: list[str]) -> Port | None:
    """The first active port; notes the state of the others in `states`."""
    able = context.query_device()
    wanted = _number("NUMBA_EP_IB_PORT", 1, able.phys_port_cnt)
    for number in range(1, able.phys_port_cnt + 1) if wanted is None else [wanted]:
        with explained(f"cannot query {device} port {number}", "is the driver loaded?"):
            port = context.query_port(number)
        if port.state != enums.IBV_PORT_ACTIVE:
            states.append(f"{device} port {number}: {_state(port.state)}")
            continue
        gid, gid_index = "", 0
        if port.link_layer == enums.IBV_LINK_LAYER_ETHERNET:
            gid, gid_index = _choose_gid(context, device, number, port.gid_tbl_len)
        return Port(
            context, device, number, port.lid, gid, gid_index, port.active_mtu,
            port.max_msg_sz, able.max_qp_wr, able.max_cqe, able.max_mr_size,
        )  # fmt: skip
    return None


def _state(state: int) -> str:
    names = {1: "down", 2: "initialising, no subnet manager has seen it", 3: "armed"}
    return names.get(state, f"state {state}")


def _choose_gid(context: Any, device: str, port: int, rows: int) -> tuple[str, int]:
    """(GID, row of the table) for RoCE: the one asked for, or the best."""
    wanted = _number("NUMBA_EP_IB_GID_INDEX", 0, max(rows - 1, 0))
    with explained(f"no GIDs of {device} port {port}", "see `rdma link`"):
        # Of all ports; empty rows are left out.
        found = context.query_gid_table(rows * max(port, 1))
    usable = {
        entry.gid_index: (entry.gid_type, _gid(entry))
        for entry in found
        if entry.port_num == port
    }
    if wanted is not None and wanted not in usable:
        raise TransportError(
            f"verbs: NUMBA_EP_IB_GID_INDEX={wanted}: {device} port {port} has no GID "
            f"there, only in rows {sorted(usable)}"
        )
    if not usable:
        raise TransportError(
            f"verbs: {device} port {port} has no GID: give its interface an IP address"
        )

    def rank(index: int) -> tuple[bool, bool, bool, int]:
        kind, gid = usable[index]
        is_v1 = kind != enums.IBV_GID_TYPE_ROCE_V2
        return is_v1, not gid.startswith(IPV4), gid.startswith(LINK_LOCAL), index

    index = min(usable, key=rank) if wanted is None else wanted
    return usable[index][1], index


def _gid(entry: Any) -> str:
    """Eight groups of four hex digits, as pyverbs wants them back."""
    return str(entry.gid_str())
