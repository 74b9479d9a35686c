"""The verbs transport on a kernel's RDMA stack; run by `tests/rdma/run` in a guest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transport_contract
from transport_contract import TransportContract

import transport

if not list(Path("/sys/class/infiniband").glob("*")):
    pytest.skip("no RDMA device here", allow_module_level=True)

# The guest is an emulation: everything takes ten times as long.
transport_contract.LIMIT_S = 200.0


def create_verbs(rank: int, num_ranks: int, receive_bytes: int, send_bytes: int) -> Any:
    return transport.create(
        "verbs", rank, num_ranks, receive_bytes, send_bytes, False, 2
    )


class TestVerbs(TransportContract):
    """All of the contract."""

    create = staticmethod(create_verbs)
