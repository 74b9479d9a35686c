"""The verbs transport over a fake pyverbs that enforces every rule of the API.

What only a kernel's RDMA stack can show is in tests/rdma.
"""

from __future__ import annotations

import gc
import itertools
import sys
from typing import Any

import fake_pyverbs
import numpy as np
import pytest
from fake_pyverbs import STATUS, Fabric, gid, port
from faulty import Case, run_case
from transport_contract import TransportContract, connected, finish, post, view

import transport
from numba_ep import Config
from transport import TransportError, wr

ORDER = ["QP", "MR", "CQ", "PD", "Context"]
IPV4 = "0000:0000:0000:0000:0000:ffff:"
LOCAL = "fe80:0000:0000:0000:0000:0000:0000:0001"


def create_verbs(rank: int, num_ranks: int, receive_bytes: int, send_bytes: int) -> Any:
    return transport.create(
        "verbs", rank, num_ranks, receive_bytes, send_bytes, False, 2
    )


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    return fake_pyverbs.install(monkeypatch)


@pytest.fixture
def small_fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    return fake_pyverbs.install(
        monkeypatch, send_queue=4, completion_queue=8, longest=4096
    )


class TestContract(TransportContract):
    """All of the contract, on queues of 4 requests."""

    create = staticmethod(create_verbs)

    @pytest.fixture(autouse=True)
    def network(self, small_fabric: Fabric) -> Any:
        yield
        assert small_fabric.violations == []

    def test_another_process_hammers_and_is_killed(self) -> None:
        pytest.skip("the fake network lies within one process; tests/rdma has it")


# Send and completion queues.


def test_c58_queues_of_4_completions_of_8_messages_of_4_kib(
    small_fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 ranks, 64 tokens: nothing overflows, long chunks are split, all is exact."""
    create = transport.create
    made: list[Any] = []

    def create_wrapped(name: str, *rest: Any) -> Any:
        made.append(create("verbs", *rest))
        return made[-1]

    monkeypatch.setattr(transport, "create", create_wrapped)
    case = Case([64] * 8, 512, 4, 16, Config(4, 8, 16, 8, 16))
    refused: list[int] = []

    def watch(buffer: Any) -> None:
        buffer._endpoint.at_close.append(
            lambda: refused.append(buffer.statistics().refused)
        )

    run_case(case, before=watch)
    assert small_fabric.violations == []
    assert small_fabric.most_queued == 4
    assert small_fabric.most_completions <= 8
    assert sum(refused) > 0, "no queue was ever full: the test shows nothing"
    sizes = [r.length for call in small_fabric.posts for r in call]
    assert max(sizes) == 4096, "no chunk was longer than a message"


def test_c58_a_put_that_is_longer_than_all_of_a_send_queue(
    small_fabric: Fabric,
) -> None:
    size = 40_000  # ten messages, queues of four
    with connected(create_verbs, 2, size + 256, size) as (writer, reader):
        data = np.random.default_rng(1).integers(0, 256, size, np.uint8)
        view(writer.send)[:] = data
        put = wr.put(1, 0, 0, 128, size, 0, 7)
        batch = np.array([put, wr.counter_write(1, 0, 8, 5)], np.int64)
        small_fabric.frozen = True
        # Taken, though it has no room yet; what comes after it has to wait.
        assert writer.post(batch).tolist() == [1]
        batch[:] = 0
        assert writer.poll() > 0
        assert small_fabric.most_queued == 4
        small_fabric.frozen = False
        finish(writer)
        assert (view(reader.receive)[128 : 128 + size] == data).all()
        assert view(reader.receive)[:8].view(np.int64) == 7
        assert (view(reader.receive)[8:16] == 0xFF).all()
    assert small_fabric.violations == []


def test_c58_no_completion_is_lost(small_fabric: Fabric) -> None:
    """All queues of many peers at once: every request completes, all room is back."""
    ranks = 9
    with connected(create_verbs, ranks, 4096, 4096) as ends:
        for turn in range(20):
            post(ends[0], *[
                wr.counter_write(peer, queue, 128 * queue, turn)
                for peer in range(1, ranks)
                for queue in range(2)
            ])  # fmt: skip
        finish(ends[0])
        queues = ends[0]._by_qp.values()
        assert all(queue.free == queue.depth for queue in queues)
        assert ends[0]._asked == ends[0]._under_way == 0
    assert small_fabric.violations == []


def test_entries_of_a_queue_go_in_one_post(fabric: Fabric) -> None:
    with connected(create_verbs, 2, 4096, 4096) as (writer, _):
        fabric.posts.clear()
        puts = [wr.put(1, i % 2, 0, 1024, 64, 0, i) for i in range(20)]
        post(writer, *puts, wr.counter_write(1, 0, 8, 1))
        calls = [[r.length for r in call] for call in fabric.posts]
        assert calls == [[64, 8] * 10, [8], [64, 8] * 10]
        finish(writer)


def test_few_requests_ask_for_a_completion(fabric: Fabric) -> None:
    with connected(create_verbs, 2, 4096, 4096) as (writer, _):
        fabric.posts.clear()
        for value in range(64):
            post(writer, wr.put(1, 0, 0, 1024, 64, 0, value))
        finish(writer)
        requests = [r for call in fabric.posts for r in call]
        asked = [r for r in requests if r.flags & fake_pyverbs.SIGNALED]
        assert 128 <= len(requests) <= 140
        assert 8 <= len(asked) <= 16


def test_requests_are_made_once(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(create_verbs, 2, 4096, 4096) as (writer, _):
        monkeypatch.delattr(fake_pyverbs.SendWR, "__init__")
        monkeypatch.delattr(fake_pyverbs.SGE, "__init__")
        for value in range(200):
            post(writer, wr.put(1, 0, 0, 1024, 64, 0, value))
        finish(writer)


# Registration and release.


def closed_in_groups(fabric: Fabric) -> list[str]:
    return [name for name, _ in itertools.groupby(fabric.closed)]


def test_c60_closed_in_order(fabric: Fabric) -> None:
    with connected(create_verbs, 3, 4096, 4096) as ends:
        fabric.closed.clear()
        ends[0].close()
        assert closed_in_groups(fabric) == ORDER
        assert fabric.closed.count("QP") == 4
        assert fabric.closed.count("MR") == 2
    assert fabric.violations == []


def test_c60_after_a_failure_the_queues_fail_before_they_close(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    close = fake_pyverbs.QP.close

    def note(qp: fake_pyverbs.QP) -> None:
        states.append(qp.state)
        close(qp)

    monkeypatch.setattr(fake_pyverbs.QP, "close", note)
    with connected(create_verbs, 2, 4096, 4096) as ends:
        ends[0].close(keep_memory=True)
        assert states == ["ERR"] * 2
        assert closed_in_groups(fabric) == ORDER
        view(ends[0].receive)[:] = 1  # kernels may still run
    assert fabric.violations == []


def test_c60_dropped_without_close(fabric: Fabric) -> None:
    end = create_verbs(0, 2, 4096, 4096)
    assert fabric.closed == []
    del end
    gc.collect()
    assert closed_in_groups(fabric) == ORDER
    assert fabric.violations == []


def test_c60_a_region_that_is_registered_short(fabric: Fabric) -> None:
    fabric.registers = lambda size: size - 4096
    with pytest.raises(TransportError, match=r"register 8192 bytes .* only 4096"):
        create_verbs(0, 2, 8192, 8192)
    assert fabric.closed == ["MR", "CQ", "PD", "Context"]


def test_c60_a_region_above_the_device_s_limit(fabric: Fabric) -> None:
    fabric.largest_region = 4096
    with pytest.raises(TransportError, match=r"8192 .* takes 4096 .* num_rdma_bytes"):
        create_verbs(0, 2, 8192, 8192)
    assert fabric.closed == ["CQ", "PD", "Context"]


def test_c60_whatever_fails_what_was_made_is_closed(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric.inline = 4
    with pytest.raises(TransportError, match="8 bytes inline"):
        create_verbs(0, 2, 4096, 4096)
    assert closed_in_groups(fabric) == ORDER[1:]
    assert fabric.violations == []


def test_memory_that_may_not_be_locked(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    fabric.memlock = True
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    with pytest.raises(TransportError, match=r"only 65536 bytes .*ulimit -l unlimited"):
        create_verbs(0, 2, 4096, 4096)


# Failed completions.


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("RETRY_EXC_ERR", "no answer: the peer is gone, or a port"),
        ("RNR_RETRY_EXC_ERR", "never ready to receive"),
        ("REM_ACCESS_ERR", "wrong rkey"),
        ("LOC_PROT_ERR", "own region"),
        ("WR_FLUSH_ERR", "see the first error"),
        ("LOC_QP_OP_ERR", "could not carry it out"),
    ],
)
def test_a_failed_completion_names_peer_queue_and_cause(
    fabric: Fabric, name: str, sentence: str
) -> None:
    with connected(create_verbs, 3, 4096, 4096) as ends:
        number = ends[0].card().queues[2][1]
        fabric.fails[number] = STATUS[name]
        requests = [wr.put(2, 1, 0, 0, 64, 128, 1), wr.counter_write(1, 0, 0, 4)]
        ends[0].post(np.array(requests, np.int64))
        with pytest.raises(TransportError) as info:
            finish(ends[0])
        assert info.value.peer == 2
        expected = f"write of data to rank 2 on queue 1 failed with {name}"
        assert expected in str(info.value)
        assert sentence in str(info.value)
        # The others go on; this one stays as it is.
        finish(ends[0])
        assert view(ends[1].receive)[:8].view(np.int64) == 4
        post(ends[0], wr.counter_write(2, 0, 0, 5))
        finish(ends[0])
        with pytest.raises(TransportError, match=rf"queue 1 .* {name}"):
            post(ends[0], wr.counter_write(2, 1, 0, 5))


def test_a_write_out_of_bounds_and_a_wrong_key(fabric: Fabric) -> None:
    for change in ("bounds", "key"):
        with connected(create_verbs, 2, 4096, 8192) as (writer, reader):
            if change == "key":
                for queue in writer._queues:
                    queue.rkey += 1
            at = 4000 if change == "bounds" else 0
            writer.post(np.array([wr.put(1, 0, 0, at, 1000, 0, 1)], np.int64))
            with pytest.raises(TransportError, match="REM_ACCESS_ERR") as info:
                finish(writer)
            assert info.value.peer == 1
            # The counter behind it is not written.
            assert (view(reader.receive) == 0xFF).all()


def test_a_peer_that_has_closed(fabric: Fabric) -> None:
    with connected(create_verbs, 2, 4096, 4096) as (writer, reader):
        reader.close()
        writer.post(np.array([wr.counter_write(1, 0, 0, 1)], np.int64))
        with pytest.raises(TransportError, match=r"RETRY_EXC_ERR: no answer"):
            finish(writer)


def test_a_peer_on_another_host_is_asked_whether_it_is_there(fabric: Fabric) -> None:
    """Also where nothing is to be posted to it: who waits for its tokens must hear."""
    ends = [create_verbs(rank, 2, 4096, 4096) for rank in range(2)]
    cards = [end.card() for end in ends]
    far = [c._replace(process=c.process._replace(boot="elsewhere")) for c in cards]
    for end in ends:
        end.connect(far)
    fabric.posts.clear()
    assert not ends[0].peer_is_dead(1)
    assert fabric.posts == [], "the peer may not be ready yet"
    ends[0].connected()
    for _ in range(3):
        assert not ends[0].peer_is_dead(1)
    assert [len(call) for call in fabric.posts] == [1], "one at a time is enough"
    finish(ends[0])
    ends[1].close()
    assert not ends[0].peer_is_dead(1)
    with pytest.raises(TransportError, match=r"empty write .* RETRY_EXC_ERR") as info:
        finish(ends[0])
    assert info.value.peer == 1
    assert not ends[0].peer_is_dead(1), "asked again after its queue has failed"
    ends[0].close()
    assert fabric.violations == []


def test_the_answer_to_a_farewell_is_lost(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is gone has all it needs: nobody fails, and MPI is not left alone."""
    from numba_ep import closing

    create, lost, left = transport.create, [], []
    monkeypatch.setattr(transport, "create", lambda name, *r: create("verbs", *r))
    place = "numba_ep.endpoint."
    monkeypatch.setattr(place + "leave_mpi_alone", lambda: left.append(True))
    kept: list[bool] = []
    close = closing.close_locally

    def close_locally(*rest: Any, **options: Any) -> None:
        kept.append(options["keep_memory"])
        close(*rest, **options)

    monkeypatch.setattr(place + "close_locally", close_locally)

    def watch(buffer: Any) -> None:
        at = buffer._endpoint._receive_map["farewell"]
        size = buffer._endpoint._receive_map.sizes["farewell"]
        queues = buffer._endpoint.transport._by_qp

        def loses_answer(request: Any) -> bool:
            if request.qp_num not in queues or not request.length:
                return False
            is_farewell = 0 <= request.to - queues[request.qp_num].base - at < size
            lost.extend([request] * is_farewell)
            return is_farewell

        if buffer.rank == 0:
            fabric.loses_answer = loses_answer

    case = Case([9, 5, 7], 128, 4, 6, Config(4, 2, 4, 2, 4))
    run_case(case, before=watch)
    assert lost
    assert (kept, left) == ([False] * 3, [])


# Device, port, GID.


def test_default_gid_is_of_roce_v2_and_ipv4(fabric: Fabric) -> None:
    fabric.gids[:] = [
        gid(0, "ROCE_V1", LOCAL), gid(1, "ROCE_V2", LOCAL), gid(2, "ROCE_V1"),
        gid(3, "ROCE_V2", port=2), gid(4, "ROCE_V2", IPV4 + "0a00:0001"),
    ]  # fmt: skip
    end = create_verbs(0, 2, 64, 64)
    assert end.card().gid == IPV4 + "0a00:0001"
    assert end._port.gid_index == 4
    del fabric.gids[4]
    assert create_verbs(0, 2, 64, 64)._port.gid_index == 1


def test_the_environment_chooses(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric.devices = ("fake0", "fake1")
    fabric.ports[:] = [port(), port()]
    fabric.gids[:] = [gid(0), gid(0, port=2), gid(1, "ROCE_V1", LOCAL, port=2)]
    monkeypatch.setenv("NUMBA_EP_IB_DEVICE", "fake1")
    monkeypatch.setenv("NUMBA_EP_IB_PORT", "2")
    monkeypatch.setenv("NUMBA_EP_IB_GID_INDEX", "1")
    monkeypatch.setenv("NUMBA_EP_IB_TIMEOUT", "14")
    monkeypatch.setenv("NUMBA_EP_IB_RETRY", "2")
    with connected(create_verbs, 2, 4096, 4096) as ends:
        assert ends[0]._port.name == "fake1 port 2"
        for qp in fabric.qps.values():
            attributes = qp.attributes
            assert attributes.port_num == attributes.ah_attr.port_num == 2
            assert attributes.ah_attr.gr.sgid_index == 1
            assert attributes.ah_attr.gr.dgid.gid == LOCAL
            assert (attributes.timeout, attributes.retry_cnt) == (14, 2)
            assert attributes.rnr_retry < 7, "7 means for ever"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("DEVICE", "mlx5_9", r"no device 'mlx5_9'; there are fake0"),
        ("PORT", "3", "expected 1 to 1, got '3'"),
        ("GID_INDEX", "5", r"has no GID there, only in rows \[0\]"),
        ("GID_INDEX", "x", "expected 0 to 15, got 'x'"),
        ("RETRY", "7", "expected 0 to 6, got '7'"),
        ("TIMEOUT", "0", "expected 1 to 31, got '0'"),
    ],
)
def test_a_wrong_choice_is_named(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str
) -> None:
    monkeypatch.setenv(f"NUMBA_EP_IB_{name}", value)
    with pytest.raises((ValueError, TransportError), match=text) as info:
        create_verbs(0, 2, 64, 64)
    assert f"NUMBA_EP_IB_{name}" in str(info.value)
    assert set(fabric.closed) <= {"Context"}


def test_infiniband_goes_by_lid(fabric: Fabric) -> None:
    link = fake_pyverbs.ENUMS["IBV_LINK_LAYER_INFINIBAND"]
    fabric.ports[:] = [port(state=1, lid=3), port(link_layer=link, lid=9, active_mtu=4)]
    with connected(create_verbs, 2, 4096, 4096) as (writer, _):
        card = writer.card()
        assert (card.lid, card.gid, card.mtu) == (9, "", 4)
        way = next(iter(fabric.qps.values())).attributes.ah_attr
        assert (way.dlid, way.is_global, way.gr, way.port_num) == (9, 0, None, 2)
        post(writer, wr.put(1, 0, 0, 0, 64, 128, 1))
        finish(writer)


def test_the_smaller_mtu_is_used(fabric: Fabric) -> None:
    ends = [create_verbs(rank, 2, 64, 64) for rank in range(2)]
    cards = [end.card() for end in ends]
    ends[0].connect([cards[0], cards[1]._replace(mtu=3)])
    qps = list(fabric.qps.values())
    assert [qp.attributes.path_mtu for qp in qps if vars(qp.attributes)] == [3, 3]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gid": "", "lid": 4}, "rank 0 uses RoCE, rank 1 InfiniBand"),
        ({"queues": [[1], [1]]}, "2 queues .* rank 1 has 1"),
    ],
)
def test_ranks_that_do_not_fit(fabric: Fabric, change: Any, text: str) -> None:
    ends = [create_verbs(rank, 2, 64, 64) for rank in range(2)]
    cards = [end.card() for end in ends]
    with pytest.raises(TransportError, match=text) as info:
        ends[0].connect([cards[0], cards[1]._replace(**change)])
    assert info.value.peer == 1


def test_nothing_there(fabric: Fabric) -> None:
    fabric.ports[:] = [port(state=1), port(state=2)]
    with pytest.raises(TransportError, match=r"port 1: down, .* port 2: initialising"):
        create_verbs(0, 2, 64, 64)
    assert fabric.closed == ["Context"]
    fabric.ports[:] = [port()]
    fabric.gids[:] = []
    with pytest.raises(TransportError, match="no GID: give its interface an IP"):
        create_verbs(0, 2, 64, 64)
    fabric.devices = ()
    with pytest.raises(TransportError, match=r"no RDMA device .* transport='shm'"):
        create_verbs(0, 2, 64, 64)


def test_no_pyverbs_and_no_rdma_core(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("pyverbs")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(TransportError, match=r"install .* python3-pyverbs"):
        create_verbs(0, 2, 64, 64)

    class NoLibrary:
        def find_spec(self, name: str, *rest: Any) -> None:
            if name == "pyverbs.device":
                raise ImportError("libibverbs.so.1: cannot open shared object file")

    fake_pyverbs.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "pyverbs.device")
    monkeypatch.setattr(sys.modules["pyverbs"], "__path__", [], raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoLibrary(), *sys.meta_path])
    with pytest.raises(TransportError, match="rdma-core is not; install libibverbs1"):
        create_verbs(0, 2, 64, 64)
