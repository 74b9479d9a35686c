"""numba_ep.trace: what is recorded is what happened, and off, nothing is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, require
from test_command import mpirun_test, run_test, small
from world import DEVICE, Scenario, World, caught, check_round, run

import numba_ep
from numba_ep import clocks, trace
from numba_ep.kernels import events as words
from numba_ep.perfetto import document, flows, tracks
from transport import wr
from transport.jit import JIT_DISABLED
from transport.post_log import (
    DONE,
    END,
    NO_LOG,
    NUM_BYTES,
    OPCODE,
    START,
    VALUE,
    PostLog,
    log_polled,
    log_posted,
)

if DEVICE == "cuda":
    pytest.skip("these tests are for kernels on the CPU", allow_module_level=True)

# 1: a block's only warp plays all its roles. 3: two that move rows and a coordinator.
WARPS = (1, 3)
WORLD = World(Scenario(tokens=(13, 9, 11), num_experts=12))
# check_round: dispatch, cached dispatch, three combines.
DISPATCHES, OPERATIONS = 2, 5


def traced_round(warps: int, capacity: int = trace.DEFAULT_CAPACITY) -> trace.Trace:
    """A round that is recorded after one that is not."""

    def program(buffer: Any) -> trace.Trace:
        check_round(buffer, WORLD)
        assert buffer._endpoint.trace_memory is None
        with numba_ep.trace.record(buffer, capacity) as recorded:
            check_round(buffer, WORLD)
        return recorded

    traces = run(program, WORLD.scenario.num_ranks, WORLD.scenario.num_bytes, warps)
    for other in traces:
        assert (other.events == traces[0].events).all()
        assert other.lost == traces[0].lost
        assert other.error_ns == [0] * len(traces)  # one host, one clock
    return traces[0]


@pytest.fixture(scope="module", params=WARPS, ids=lambda n: f"{n}-warps")
def recorded(request: pytest.FixtureRequest) -> trace.Trace:
    return traced_round(request.param)


def of(events: np.ndarray, *kinds: int) -> np.ndarray:
    return events[np.isin(events["kind"], kinds)]


def by_ring(events: np.ndarray, from_peer: bool) -> Counter[tuple[int, ...]]:
    """Rows by (operation, source, destination, channel)."""
    rows: Counter[tuple[int, ...]] = Counter()
    for e in events:
        pair = (e["peer"], e["rank"]) if from_peer else (e["rank"], e["peer"])
        ring = (e["operation"], *pair, e["channel"])
        rows[tuple(map(int, ring))] += int(e["count"])
    return rows


def test_every_row_is_packed_published_received_and_credited(
    recorded: trace.Trace,
) -> None:
    events = recorded.events
    assert recorded.lost == [0, 0, 0]
    published = by_ring(of(events, words.PUBLISH), False)
    assert by_ring(of(events, words.PACK), False) == published
    assert by_ring(of(events, words.RETURN), True) == published
    unpacked = by_ring(of(events, words.UNPACK), True)
    assert unpacked == {r: n for r, n in published.items() if r in unpacked}
    operations = sorted({ring[0] for ring in published})
    assert len(operations) == OPERATIONS
    assert {ring[0] for ring in unpacked} == set(operations[:DISPATCHES])
    rows = sum(len(received.src_rank) for received in WORLD.received)
    assert sum(unpacked.values()) == DISPATCHES * rows
    assert sum(published.values()) == OPERATIONS * rows
    reduced = of(events, words.REDUCE)["count"].sum()
    tokens = sum(WORLD.scenario.tokens)
    assert reduced == (OPERATIONS - DISPATCHES) * tokens


def test_counters_end_where_their_rows_do(recorded: trace.Trace) -> None:
    """A ring's tails are the running sums of its counts, and so are its heads."""
    for kind in (words.PUBLISH, words.RETURN):
        rings: dict[tuple[int, ...], int] = {}
        for e in of(recorded.events, kind):
            ring = (int(e["rank"]), int(e["peer"]), int(e["channel"]))
            before = rings.get(ring, int(e["value"] - e["count"]))
            assert e["value"] - e["count"] == before, ring
            rings[ring] = int(e["value"])
        assert rings


def test_notify_sends_and_awaits_one_row_a_peer(recorded: trace.Trace) -> None:
    for kind in (words.SEND_ROW, words.WAIT_ROW, words.POST_ROW):
        rows = of(recorded.events, kind)
        assert len(rows) == OPERATIONS * 3 * 2
        assert len(np.unique(rows[["rank", "peer", "value"]])) == len(rows)


def test_the_proxy_posts_what_kernels_ask_for(recorded: trace.Trace) -> None:
    for asked, posted in (
        (words.PUBLISH, words.POST_CHUNK), (words.RETURN, words.POST_CREDIT),
    ):  # fmt: skip
        pairs = []
        for kind in (asked, posted):
            chosen = of(recorded.events, kind)
            chosen = chosen[chosen["peer"] != chosen["rank"]]
            pairs.append(np.sort(chosen[["rank", "peer", "channel", "value"]]))
        assert (pairs[0] == pairs[1]).all()
    bytes_by_kind = {
        kind: of(recorded.events, kind)["num_bytes"]
        for kind in (words.POST_CHUNK, words.POST_CREDIT)
    }
    assert (bytes_by_kind[words.POST_CHUNK] > 0).all()
    assert (bytes_by_kind[words.POST_CREDIT] == 0).all()


def test_intervals_are_in_order(recorded: trace.Trace) -> None:
    events = recorded.events
    assert (events["start_ns"] > 0).all()
    assert (events["end_ns"] >= events["start_ns"]).all()
    assert (np.diff(events["start_ns"]) >= 0).all()
    # Of one role of one warp, an event begins after the one before, or lies in it.
    for track, positions in tracks(events).items():
        ends: list[int] = []
        for _, _, _, _, _, start, end, *_ in events[positions].tolist():
            while ends and ends[-1] <= start:
                ends.pop()
            same_batch = track[1] == "proxy"
            assert not ends or end <= ends[-1] or same_batch, track
            ends.append(end)


def test_every_chunk_has_one_flow_to_its_receiver(recorded: trace.Trace) -> None:
    events, found = recorded.events, flows(recorded.events)
    sent = np.flatnonzero(np.isin(events["kind"], (words.PUBLISH, words.SEND_ROW)))
    assert sorted(flow.publish for flow in found) == sent.tolist()
    for flow in found:
        publish, receive = events[flow.publish], events[flow.receive]
        assert (publish["rank"], publish["peer"]) == (receive["peer"], receive["rank"])
        assert publish["channel"] == receive["channel"]
        assert publish["operation"] == receive["operation"]
        assert publish["value"] <= receive["value"]
        assert publish["start_ns"] <= receive["end_ns"]
        assert (flow.post < 0) == (publish["rank"] == publish["peer"])
        if flow.post >= 0:
            post = events[flow.post]
            assert publish["start_ns"] <= post["start_ns"] <= receive["end_ns"]


def check_json(written: dict[str, Any], num_ranks: int) -> Counter[str]:
    """A file's structure; how many entries of each phase there are."""
    assert set(written) == {"traceEvents", "displayTimeUnit", "otherData"}
    entries = written["traceEvents"]
    names = [e["args"]["name"] for e in entries if e["name"] == "process_name"]
    assert names == [f"rank {rank}" for rank in range(num_ranks)]
    threads = {(e["pid"], e["tid"]) for e in entries if e["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    arrows: dict[int, list[Any]] = {}
    for e in entries:
        if e["ph"] == "X":
            track = slices.setdefault((e["pid"], e["tid"]), [])
            assert not track or track[-1][0] <= e["ts"], "not monotone"
            assert e["dur"] >= 0 and e["name"] and e["args"]
            track.append((e["ts"], e["ts"] + e["dur"] + 1e-6))
        elif e["ph"] in "stf":
            arrows.setdefault(e["id"], []).append(e)
    assert set(slices) == threads
    for arrow in arrows.values():
        assert "".join(e["ph"] for e in arrow) in ("sf", "stf")
        assert len({e["name"] for e in arrow}) == 1 and arrow[-1]["bp"] == "e"
        times = [e["ts"] for e in arrow]
        assert times == sorted(times)
        for e in arrow:  # it hangs on a slice
            around = slices[e["pid"], e["tid"]]
            assert any(start <= e["ts"] <= end for start, end in around)
    return Counter(e["ph"] for e in entries)


def test_json(recorded: trace.Trace, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    recorded.write(file)
    phases = check_json(json.loads(file.read_text()), 3)
    sent = of(recorded.events, words.PUBLISH, words.SEND_ROW)
    assert phases["s"] == phases["f"] == len(sent)
    assert phases["X"] <= len(recorded.events)


def test_json_of_nothing() -> None:
    nothing = trace.Trace()
    assert document(nothing.events, [])["traceEvents"] == []


def test_rings_wrap_and_count_what_is_lost(recorded: trace.Trace) -> None:
    warps = 3 if (recorded.events["warp"] > 0).any() else 1
    short = traced_round(warps, capacity=3)  # becomes 4
    assert min(short.lost) > 0
    tracks_of = short.events[["rank", "channel", "warp"]][short.events["kind"] < 11]
    _, counts = np.unique(tracks_of, return_counts=True)
    assert counts.max() <= 2 * 4  # a sending and a receiving block
    # The newest are kept. (A warp may have had few of the last operation.)
    last = recorded.events["operation"].max()
    kernels = of(short.events, words.PUBLISH, words.REDUCE)
    assert (kernels["operation"] >= last - 1).all()
    total = len(short.events) + sum(short.lost)
    assert total == pytest.approx(len(recorded.events), rel=0.3)  # waits vary
    check_json(document(short.events, short.lost), 3)


def test_off_again_and_on_again() -> None:
    def program(buffer: Any) -> None:
        endpoint = buffer._endpoint
        with trace.record(buffer, 64) as first:
            check_round(buffer, WORLD)
        before = endpoint.trace_memory[0].host.copy()
        check_round(buffer, WORLD)
        assert (endpoint.trace_memory[0].host == before).all()
        assert endpoint.proxy._log is NO_LOG and endpoint.comm.trace == 0
        with trace.record(buffer, 64) as nothing:
            pass
        assert len(nothing.events) == 0 and nothing.lost == [0, 0, 0]
        with trace.record(buffer, 64) as second:
            check_round(buffer, WORLD)
        operations = [np.unique(t.events["operation"]) for t in (first, second)]
        assert operations[0].max() < operations[1][operations[1] >= 0].min()

    run(program, 3, WORLD.scenario.num_bytes)


def test_wrong_use() -> None:
    def program(buffer: Any) -> None:
        def twice() -> None:
            with trace.record(buffer), trace.record(buffer):
                pass

        def nothing() -> None:
            with trace.record(buffer, 0):
                pass

        assert "expected 1 or more, got 0" in str(caught(nothing))
        error = caught(twice)
        assert isinstance(error, RuntimeError) and "already" in str(error)
        assert buffer._endpoint.comm.trace == 0

    run(program, 1, WORLD.scenario.num_bytes)


def test_a_block_that_raises_leaves_this_ranks_events() -> None:
    def program(buffer: Any) -> None:
        check_round(buffer, WORLD)
        try:
            with trace.record(buffer) as own:
                check_round(buffer, WORLD)
                raise KeyError("stop")
        except KeyError:
            assert set(own.events["rank"]) == {buffer.rank}

    run(program, 3, WORLD.scenario.num_bytes)


# The proxy's log and the clocks alone.


def test_completions_that_come_later() -> None:
    log = PostLog(4)
    batch = np.zeros((3, wr.NUM_FIELDS), np.int64)
    batch[:, wr.OPCODE] = wr.PUT, wr.COUNTER, wr.PUT
    batch[:, wr.NUM_BYTES] = 100, 7, 200  # a counter's is what the entry held before
    batch[:, wr.VALUE] = 5, 6, 7
    log_posted(log.log, batch, 1)
    log_polled(log.log, 0)  # all done at once: nothing more to say
    assert log.newest()[:, NUM_BYTES].tolist() == [100, 0, 200]
    assert log.newest()[:, VALUE].tolist() == [5, 6, 7]
    log_posted(log.log, batch, 1)
    log_polled(log.log, 2)
    log_polled(log.log, 2)
    log_polled(log.log, 0)
    rows = log.newest()
    assert log.made == 8 and len(rows) == 4
    done = rows[rows[:, OPCODE] == DONE]
    assert done[:, NUM_BYTES].tolist() == [1, 2]
    assert (done[:, START] <= done[:, END]).all()


def test_offsets_of_clocks() -> None:
    assert clocks.between(-5, 7) == (0, 0)
    assert clocks.between(100, 140) == (120, 20)
    assert clocks.between(-140, -100) == (-120, 20)


def test_clocks_of_ranks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's clock is an hour ahead."""
    import threading
    import time

    ahead: dict[int, int] = {}
    true = time.monotonic_ns

    def monotonic_ns() -> int:
        return true() + ahead.get(threading.get_ident(), 0)

    def program(group: Any) -> clocks.Offset:
        from numba_ep.group import members

        ahead[threading.get_ident()] = group.Get_rank() * 3600 * 10**9
        return clocks.of_rank(members(group))

    monkeypatch.setattr(time, "monotonic_ns", monotonic_ns)
    first, second = numba_ep.spawn(program, 2, 60.0)
    assert first == (0, 0)
    assert second.ns == pytest.approx(-3600 * 10**9, abs=second.error_ns)
    assert 0 < second.error_ns < 10**8


# The picture, the command, plain Python.


def test_plot(recorded: trace.Trace, tmp_path: Path) -> None:
    require(importlib.util.find_spec("matplotlib"), "matplotlib is missing")
    figure = numba_ep.trace.plot(recorded)
    (ax,) = figure.axes
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert len(labels) == len(tracks(recorded.events)) == len(set(labels))
    assert sum("proxy" in label for label in labels) == 3
    assert ax.get_xlabel() == "time, us"
    assert {text.get_text() for text in ax.get_legend().get_texts()} >= {
        "wait", "pack", "publish", "post", "unpack", "reduce", "return credit",
    }  # fmt: skip
    figure.savefig(tmp_path / "trace.png")
    assert numba_ep.trace.plot(recorded, ax) is figure


@pytest.mark.parametrize("how", ["mpirun", "threads"])
def test_command(tmp_path: Path, how: str) -> None:
    file = tmp_path / "trace.json"
    arguments = small(12, "--skip-tuning", "--trace", str(file))
    if how == "mpirun":
        done = mpirun_test(2, *arguments)
    else:
        done = run_test(*arguments, "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert f"events: {file}\n" in done.stdout
    phases = check_json(json.loads(file.read_text()), 2)
    assert phases["s"] == phases["f"] > 0


if not JIT_DISABLED:

    def test_in_plain_python() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "NUMBA_EP_DEVICE": "cpu"}
        done = subprocess.run(
            [*command, __file__, "-k", "row or chunk or lost or json"],
            env=environment, cwd=ROOT / "tests", capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        assert " passed" in done.stdout
