"""The verbs transport on a kernel's RDMA stack; run by `tests/rdma/run` in a guest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transport_contract
from transport_contract import TransportContract, connected, finish, view

import transport
from transport import TransportError, wr

if not list(Path("/sys/class/infiniband").glob("*")):
    pytest.skip("no RDMA device here", allow_module_level=True)

# The guest is an emulation: everything takes ten times as long.
transport_contract.LIMIT_S = 200.0


def create_verbs(rank: int, num_ranks: int, receive_bytes: int, send_bytes: int) -> Any:
    return transport.create(
        "verbs", rank, num_ranks, receive_bytes, send_bytes, False, 2
    )


@pytest.mark.parametrize("what", ["bounds", "key"])
def test_a_write_that_the_peer_s_card_refuses(what: str) -> None:
    with connected(create_verbs, 2, 4096, 8192) as (writer, reader):
        for queue in writer._queues:
            queue.rkey += what == "key"
        at = 4000 if what == "bounds" else 0
        # The counter behind it, in the same post, is not written either.
        writer.post(np.array([wr.put(1, 0, 0, at, 1000, 0, 1)], np.int64))
        with pytest.raises(TransportError, match=r"rank 1 .* REM_ACCESS_ERR") as info:
            finish(writer)
        assert info.value.peer == 1
        assert (view(reader.receive) == 0xFF).all()


def test_a_peer_that_has_closed_its_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_EP_IB_TIMEOUT", "12")
    with connected(create_verbs, 2, 4096, 4096) as (writer, reader):
        reader.close()
        writer.post(np.array([wr.counter_write(1, 0, 0, 1)], np.int64))
        with pytest.raises(TransportError, match=r"rank 1 .* RETRY_EXC_ERR: no answer"):
            finish(writer)
        with pytest.raises(TransportError, match="RETRY_EXC_ERR"):
            writer.post(np.array([wr.counter_write(1, 0, 0, 1)], np.int64))


class TestVerbs(TransportContract):
    """All of the contract."""

    create = staticmethod(create_verbs)
