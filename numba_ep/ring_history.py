"""The history of one ring, out of a trace: when each row reached each stage of its way.

`follow` finds the times, `Ring.at` says what lies in every slot at one of them;
view.py draws it.

A record of the trace is about several rows: they are taken to be packed and read evenly
over its time. A put counts as arrived when the proxy's post has returned, or earlier
where the receiver began to read earlier; over verbs a post returns a little before the
data are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from numba_ep.config import Config
from numba_ep.kernels import events as words
from numba_ep.trace import Trace

# The stages of a row's way; a slot is in one of them, or free.
PACKED, PUBLISHED, ARRIVED, READ, RETURNED, CREDITED = range(6)
STAGES = ("packed", "in flight", "arrived", "read", "credit on its way", "free")
NEVER = np.iinfo(np.int64).max


class Slots(NamedTuple):
    """The slots of one end of a ring at a time.

    rows: [capacity] the row that was last written to a slot, -1: none so far.
    stages: [capacity] how far that row has come; CREDITED where nothing was written.
    tail, head: rows published and consumed as this end knows them.
    """

    rows: np.ndarray
    stages: np.ndarray
    tail: int
    head: int


class Ring(NamedTuple):
    """One operation on one ring: channel c, source -> destination.

    times: [num_rows, 6] int64 ns, when a row reached each stage; never falling along a
    row, NEVER where the trace does not say. Rows count from 0, as positions do.
    """

    src_rank: int
    dst_rank: int
    channel: int
    operation: int
    capacity: int
    times: np.ndarray

    def reached(self, stage: int, now: int) -> int:
        """How many rows have reached `stage` at `now`; they do so in order."""
        return int(np.count_nonzero(self.times[:, stage] <= now))

    def at(self, now: int) -> tuple[Slots, Slots]:
        """The send ring and the receive ring at `now`, in ns."""
        stages = np.count_nonzero(self.times <= now, axis=1) - 1
        sent = self._slots(PACKED, stages, now)
        received = self._slots(PUBLISHED, stages, now)
        # At the destination a slot is free once its credit has left.
        received[1][received[1] == RETURNED] = CREDITED
        return (
            Slots(*sent, self.reached(PUBLISHED, now), self.reached(CREDITED, now)),
            Slots(*received, self.reached(ARRIVED, now), self.reached(RETURNED, now)),
        )

    def _slots(
        self, written: int, stages: np.ndarray, now: int
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = np.full(self.capacity, -1)
        held = np.full(self.capacity, CREDITED)
        # Several warps pack rows out of order, so not every row below one is there.
        for row in np.flatnonzero(self.times[:, written] <= now):
            rows[row % self.capacity] = row
            held[row % self.capacity] = stages[row]
        return rows, held

    def moments(self, most: int) -> np.ndarray:
        """Times at which something changes, from just before the first; at most `most`,
        taken evenly."""
        changes = np.unique(self.times[self.times < NEVER])
        changes = np.concatenate([changes[:1] - 1, changes])
        count = min(most, len(changes))
        return changes[np.linspace(0, len(changes) - 1, count).round().astype(int)]


def follow(
    trace: Trace,
    config: Config,
    src_rank: int = 0,
    dst_rank: int = 1,
    channel: int = 0,
    operation: int | None = None,
) -> Ring:
    """What happened on one ring in one operation; None: the first one that used it.

    config: the operation's. ValueError: the trace has lost events, or has none of this
    ring.
    """
    if any(trace.lost):
        raise ValueError(
            f"trace: {sum(trace.lost)} older events are lost; give "
            "numba_ep.trace.record a larger capacity"
        )
    events = _of_ring(trace.events, src_rank, dst_rank, channel)
    published = events[events["kind"] == words.PUBLISH]
    if operation is not None:
        published = published[published["operation"] == operation]
    if not len(published):
        which = "" if operation is None else f" in operation {operation}"
        raise ValueError(
            f"trace: no rows from rank {src_rank} to rank {dst_rank} on channel "
            f"{channel}{which}"
        )
    operation = int(published["operation"][0])
    published = published[published["operation"] == operation]
    start = int((published["value"] - published["count"]).min())
    num_rows = int(published["value"].max()) - start
    in_operation = (events["operation"] == operation) | (events["operation"] < 0)
    times = _times(events[in_operation], start, num_rows, config.capacity)
    return Ring(src_rank, dst_rank, channel, operation, config.capacity, times)


def _of_ring(
    events: np.ndarray, src_rank: int, dst_rank: int, channel: int
) -> np.ndarray:
    """Events of the source's sending roles and of the destination's receiving ones."""

    def of(rank: int, peer: int, *kinds: int) -> np.ndarray:
        found: np.ndarray = np.isin(events["kind"], kinds) & (events["rank"] == rank)
        return found & (events["peer"] == peer)

    sending = of(src_rank, dst_rank, words.PACK, words.PUBLISH, words.POST_CHUNK)
    receiving = of(dst_rank, src_rank, words.UNPACK, words.RETURN, words.POST_CREDIT)
    return events[(sending | receiving) & (events["channel"] == channel)]


def _times(events: np.ndarray, start: int, num_rows: int, capacity: int) -> np.ndarray:
    """[num_rows, 6] int64: see Ring."""
    times = np.full((num_rows, len(STAGES)), NEVER, np.int64)
    # When the first use of a row, and of the slot that it leaves, has begun.
    used = np.full(num_rows, NEVER, np.int64)
    reused = np.full(num_rows + capacity, NEVER, np.int64)
    for rows, since, until in _rows_moved(events, words.PACK, words.PUBLISH):
        reused[rows - start], times[rows - start, PACKED] = since, until
    for rows, since, until in _rows_moved(events, words.UNPACK, words.RETURN):
        used[rows - start], times[rows - start, READ] = since, until
    posts = events[events["kind"] == words.POST_CHUNK]
    posted = dict(zip(posts["value"].tolist(), posts["end_ns"].tolist()))
    for event in events[events["kind"] == words.PUBLISH]:
        rows = _rows_of(event, start)
        times[rows, PUBLISHED] = event["start_ns"]
        arrived = posted.get(int(event["value"]), event["end_ns"])
        times[rows, ARRIVED] = min(arrived, used[rows].min())
    credit = events[events["kind"] == words.POST_CREDIT]
    for event in events[events["kind"] == words.RETURN]:
        rows = _rows_of(event, start)
        times[rows, RETURNED] = event["start_ns"]
        # A newer head may have replaced this one on its way to the queue.
        newer = credit["end_ns"][credit["value"] >= event["value"]]
        credited = newer.min() if len(newer) else event["end_ns"]
        times[rows, CREDITED] = min(credited, reused[rows + capacity].min())
    # A role tells others before it looks at the clock, so what comes later in a row's
    # way may have an earlier time. And a combine says only by its credit what it read.
    return np.minimum.accumulate(times[:, ::-1], axis=1)[:, ::-1]


def _rows_of(event: np.void, start: int) -> np.ndarray:
    """The rows below the event's counter that it is about."""
    end = int(event["value"]) - start
    return np.arange(end - int(event["count"]), end)


def _rows_moved(
    events: np.ndarray, kind: int, by_coordinator: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Positions that one warp moved, when each was begun and when it was done.

    Rows are dealt in turn to all warps but the last one, which coordinates, unless it
    is the only one.
    """
    coordinator = events["warp"][events["kind"] == by_coordinator]
    workers = max(1, int(coordinator.max(initial=1)))
    for event in events[events["kind"] == kind]:
        count = int(event["count"])
        last = int(event["value"]) - 1
        length = int(event["end_ns"] - event["start_ns"])
        times = event["start_ns"] + length * np.arange(count + 1) // count
        yield last - workers * np.arange(count)[::-1], times[:-1], times[1:]
