"""numba_ep.view: what a slot is said to hold is what a trace says of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from conftest import require
from test_trace import WARPS, WORLD, traced_round

import numba_ep
from numba_ep.config import Config
from numba_ep.kernels import events as words
from numba_ep.ring_history import (
    ARRIVED,
    CREDITED,
    NEVER,
    PACKED,
    PUBLISHED,
    READ,
    RETURNED,
    Ring,
    follow,
)
from numba_ep.trace import EVENT, Trace, in_order

CONFIG = Config(2, 2, 4, 2, 4)  # chunks of 2, rings of 4 slots


def made(*rows: tuple[int, ...], lost: int = 0) -> Trace:
    """A trace of (rank, kind, warp, peer, start, end, value, count) in operation 5, the
    proxy's in none."""
    trace = Trace()
    events = np.zeros(len(rows), EVENT)
    names = ["rank", "kind", "warp", "peer", "start_ns", "end_ns", "value", "count"]
    for name, column in zip(names, zip(*rows)):
        events[name] = column
    events["operation"] = np.where(events["kind"] < words.POST_CHUNK, 5, -1)
    trace.events, trace.lost = in_order(events), [lost, 0]
    return trace


# Six rows from rank 0 to rank 1, whose counters stand at 100 before: three chunks, the
# third after credit for the first.
SENT = (
    (0, words.PACK, 0, 1, 10, 20, 102, 2),
    (0, words.PUBLISH, 0, 1, 20, 21, 102, 2),
    (0, words.POST_CHUNK, 0, 1, 25, 30, 102, 1),
    (0, words.PACK, 0, 1, 21, 31, 104, 2),
    (0, words.PUBLISH, 0, 1, 31, 32, 104, 2),
    (0, words.POST_CHUNK, 0, 1, 35, 90, 104, 1),  # logged late: it was read at 50
    (0, words.PACK, 0, 1, 60, 70, 106, 2),
    (0, words.PUBLISH, 0, 1, 70, 71, 106, 2),
    (0, words.POST_CHUNK, 0, 1, 75, 80, 106, 1),
)
RECEIVED = (
    (1, words.UNPACK, 0, 0, 32, 42, 102, 2),
    (1, words.RETURN, 0, 0, 43, 44, 102, 2),
    (1, words.POST_CREDIT, 0, 0, 45, 65, 102, 1),  # logged late: it was used at 60
    (1, words.UNPACK, 0, 0, 46, 50, 104, 2),
    (1, words.RETURN, 0, 0, 51, 52, 104, 2),
    (1, words.UNPACK, 0, 0, 81, 85, 106, 2),
    (1, words.RETURN, 0, 0, 86, 87, 106, 2),
    (1, words.POST_CREDIT, 0, 0, 88, 95, 106, 1),  # has replaced the head of 104
)


def test_times_of_every_stage() -> None:
    ring = follow(made(*SENT, *RECEIVED), CONFIG)
    assert (ring.operation, ring.capacity) == (5, 4)
    assert ring.times.tolist() == [
        [15, 20, 30, 37, 43, 60],
        [20, 20, 30, 42, 43, 60],
        [26, 31, 46, 48, 51, 95],
        [31, 31, 46, 50, 51, 95],
        [65, 70, 80, 83, 86, 95],
        [70, 70, 80, 85, 86, 95],
    ]


def test_slots_and_counters_at_a_time() -> None:
    ring = follow(made(*SENT, *RECEIVED), CONFIG)
    send, receive = ring.at(14)
    assert (send.rows == -1).all() and (send.stages == CREDITED).all()
    assert (send.tail, send.head, receive.tail, receive.head) == (0, 0, 0, 0)

    send, receive = ring.at(26)
    assert send.rows.tolist() == [0, 1, 2, -1]
    assert send.stages.tolist() == [PUBLISHED, PUBLISHED, PACKED, CREDITED]
    assert receive.rows.tolist() == [0, 1, -1, -1]
    assert receive.stages.tolist() == [PUBLISHED, PUBLISHED, CREDITED, CREDITED]
    assert (send.tail, send.head, receive.tail, receive.head) == (2, 0, 0, 0)

    send, receive = ring.at(43)  # credit for row 0 is on its way
    assert send.stages.tolist() == [RETURNED, RETURNED, PUBLISHED, PUBLISHED]
    assert receive.stages.tolist() == [CREDITED, CREDITED, PUBLISHED, PUBLISHED]
    assert (send.tail, send.head, receive.tail, receive.head) == (4, 0, 2, 2)

    send, receive = ring.at(84)  # rows 4 and 5 took the slots of 0 and 1
    assert send.rows.tolist() == receive.rows.tolist() == [4, 5, 2, 3]
    assert send.stages.tolist() == [READ, ARRIVED, RETURNED, RETURNED]
    assert receive.stages.tolist() == [READ, ARRIVED, CREDITED, CREDITED]
    assert (send.tail, send.head, receive.tail, receive.head) == (6, 2, 6, 4)

    send, receive = ring.at(95)
    assert (send.stages == CREDITED).all() and (receive.stages == CREDITED).all()
    assert (send.tail, send.head, receive.tail, receive.head) == (6, 6, 6, 6)


def test_rows_of_several_warps() -> None:
    """Warps 0 and 1 pack rows in turn, warp 2 coordinates."""
    ring = follow(
        made(
            (0, words.PACK, 1, 1, 10, 14, 4, 2),
            (0, words.PACK, 0, 1, 20, 24, 3, 2),
            (0, words.PUBLISH, 2, 1, 30, 31, 4, 4),
        ),
        CONFIG,
    )
    assert ring.times[:, PACKED].tolist() == [22, 12, 24, 14]
    assert (ring.times[:, PUBLISHED] == 30).all()
    assert (ring.times[:, READ] == NEVER).all()  # the receiver's events are missing
    send, _ = ring.at(13)
    assert send.rows.tolist() == [-1, 1, -1, -1]


def test_moments() -> None:
    ring = follow(made(*SENT, *RECEIVED), CONFIG)
    every = ring.moments(1000)
    assert every.tolist() == [14, *np.unique(ring.times)]
    few = ring.moments(5)
    assert len(few) == 5 and few[0] == 14 and few[-1] == 95


def test_what_cannot_be_followed() -> None:
    with pytest.raises(ValueError, match="3 older events are lost; give"):
        follow(made(*SENT, lost=3), CONFIG)
    with pytest.raises(ValueError, match=r"rank 1 to rank 0 on channel 0$"):
        follow(made(*SENT), CONFIG, 1, 0)
    with pytest.raises(ValueError, match=r"in operation 9$"):
        follow(made(*SENT), CONFIG, operation=9)


# Of real runs.


def check_history(ring: Ring, num_rows: int) -> None:
    times = ring.times
    assert len(times) == num_rows and (times < NEVER).all()
    assert (np.diff(times, axis=1) >= 0).all()
    for stage in (PUBLISHED, ARRIVED, RETURNED, CREDITED):
        assert (np.diff(times[:, stage]) >= 0).all(), stage
    # Drained before reuse.
    capacity = ring.capacity
    assert (times[:-capacity, CREDITED] <= times[capacity:, PACKED]).all()
    for now in ring.moments(10**6).tolist():
        send, receive = ring.at(now)
        assert receive.head <= receive.tail <= send.tail
        assert send.head <= receive.head
        assert send.tail - send.head <= capacity


@pytest.mark.parametrize("warps", WARPS)
def test_every_ring_of_real_operations(warps: int) -> None:
    trace = traced_round(warps)
    published = trace.events[trace.events["kind"] == words.PUBLISH]
    names = ["rank", "peer", "channel", "operation"]
    rings = np.unique(published[names])
    assert len(rings) > 30
    for ring in rings:
        rows = published["count"][published[names] == ring].sum()
        check_history(follow(trace, WORLD.scenario.config, *ring.tolist()), int(rows))


def test_animation(tmp_path: Path) -> None:
    require(importlib.util.find_spec("matplotlib"), "matplotlib is missing")
    trace = made(*SENT, *RECEIVED)
    movie = numba_ep.view.animate(trace, CONFIG, num_frames=3)
    movie.save(tmp_path / "ring.gif", "pillow", dpi=40)
    assert (tmp_path / "ring.gif").read_bytes()[:4] == b"GIF8"
    html = movie.to_jshtml()
    assert html.count("data:image/png") == 3

    figure = numba_ep.view.draw(numba_ep.view.follow(trace, CONFIG), 84)
    send, receive, counters = figure.axes
    texts = [text.get_text() for text in send.texts]
    assert texts[:4] == ["4", "5", "2", "3"]
    assert "tail 6" in texts[4] and "head 2" in texts[5]
    assert "head 4" in receive.texts[5].get_text()
    assert len({patch.get_facecolor() for patch in send.patches}) == 3
    assert {line.get_label() for line in counters.lines} >= {"tail", "head"}

    large = numba_ep.view.follow(trace, Config(2, 32, 64, 32, 64))
    cells = numba_ep.view.draw(large, 84).axes[0].patches
    assert len({cell.get_xy() for cell in cells}) == 64
    assert len({cell.get_y() for cell in cells}) == 2  # lines of 32
