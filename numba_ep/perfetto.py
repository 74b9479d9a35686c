"""A trace as Chrome's JSON: a process a rank, a thread for each role of each channel.

Every published chunk has a flow: from the sender's coordinator by the proxy that posts
it to the receiver that first reads behind it. Rows of notify have one, too.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from numba_ep.kernels.events import (
    KINDS,
    POST_CHUNK,
    POST_ROW,
    PUBLISH,
    SEND_ROW,
    UNPACK,
    WAIT_ROW,
    WAIT_TAIL,
)

ROLES = tuple(dict.fromkeys(role for role, _ in KINDS))


class Flow(NamedTuple):
    """One chunk's or row's way, as positions in the events; post -1: its own rank's."""

    publish: int
    post: int
    receive: int


def tracks(events: np.ndarray) -> dict[tuple[int, str, int, int], list[int]]:
    """Positions of events by (rank, role, channel, warp), as they are to be drawn."""
    found: dict[tuple[int, str, int, int], list[int]] = {}
    for i, event in enumerate(events.tolist()):
        rank, kind, channel, warp = event[:4]
        role = KINDS[kind][0]
        if role in ("notify", "proxy"):
            channel = -1  # they serve all channels
        found.setdefault((rank, role, channel, warp), []).append(i)

    def place(track: tuple[int, str, int, int]) -> tuple[int, ...]:
        rank, role, channel, warp = track
        return rank, role == "proxy", channel, ROLES.index(role), warp

    return {track: found[track] for track in sorted(found, key=place)}


def track_name(role: str, channel: int, warp: int, many_warps: bool) -> str:
    """What a thread is called."""
    name = role if channel < 0 else f"channel {channel} {role}"
    return f"{name} warp {warp}" if many_warps and role != "proxy" else name


def flows(events: np.ndarray) -> list[Flow]:
    """The way of every published chunk and row whose two ends are in the trace."""
    sent: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    received: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    posts: dict[tuple[int, ...], int] = {}
    for i, event in enumerate(events):
        rank, kind, channel, peer = (
            int(event[name]) for name in ("rank", "kind", "channel", "peer")
        )
        value, operation = int(event["value"]), int(event["operation"])
        is_row = int(kind in (SEND_ROW, WAIT_ROW, POST_ROW))
        if kind in (PUBLISH, SEND_ROW):
            ring: tuple[int, ...] = (is_row, operation, rank, peer, channel)
            sent.setdefault(ring, []).append((value, i))
        elif kind in (UNPACK, WAIT_ROW) or (kind == WAIT_TAIL and event["count"]):
            ring = (is_row, operation, peer, rank, channel)
            received.setdefault(ring, []).append((int(event["end_ns"]), value, i))
        elif kind in (POST_CHUNK, POST_ROW):
            posts[is_row, rank, peer, channel, value] = i
    found = []
    for ring, chunks in sent.items():
        is_row, _, rank, peer, channel = ring
        chunks.sort(reverse=True)
        for _, value, receive in sorted(received.get(ring, [])):
            # Whoever reads behind a chunk's last row has seen its tail.
            while chunks and chunks[-1][0] <= value:
                tail, publish = chunks.pop()
                post = posts.get((is_row, rank, peer, channel, tail), -1)
                found.append(Flow(publish, post, receive))
    return found


def document(events: np.ndarray, lost: list[int]) -> dict[str, Any]:
    """What to write as JSON. Times are us since the first event."""
    first = int(events["start_ns"].min()) if len(events) else 0
    written: list[dict[str, Any]] = []
    threads: dict[int, tuple[int, int]] = {}  # by event: pid, tid
    for rank in np.unique(events["rank"]).tolist():
        written += _named("process", rank, 0, f"rank {rank}", rank)
    many = bool((events["warp"] > 0).any())
    for tid, (track, members) in enumerate(tracks(events).items(), start=1):
        rank, role, channel, warp = track
        written += _named("thread", rank, tid, track_name(role, channel, warp, many))
        threads.update(dict.fromkeys(members, (rank, tid)))
        times = events[["start_ns", "end_ns"]]
        for _, group in itertools.groupby(members, key=lambda i: tuple(times[i])):
            same = list(group)
            written.append(_slice(events[same], rank, tid, first))
    for number, flow in enumerate(flows(events)):
        written += _arrow(events, flow, number, threads, first)
    return {
        "traceEvents": written,
        "displayTimeUnit": "ns",
        "otherData": {"lost events by rank": lost},
    }


def _named(
    what: str, pid: int, tid: int, name: str, index: int | None = None
) -> list[dict[str, Any]]:
    common = {"ph": "M", "pid": pid, "tid": tid}
    order = {"sort_index": tid if index is None else index}
    return [
        {**common, "name": f"{what}_name", "args": {"name": name}},
        {**common, "name": f"{what}_sort_index", "args": order},
    ]


def _us(time_ns: Any, first: int) -> float:
    return (int(time_ns) - first) / 1000


def _slice(same: np.ndarray, pid: int, tid: int, first: int) -> dict[str, Any]:
    """One event, or the requests that the proxy posted by one call."""
    event = same[0]
    role, name = KINDS[event["kind"]]
    args: dict[str, Any] = {}
    if len(same) > 1:
        name = f"post {len(same)}"
        args["requests"] = [
            f"{KINDS[e['kind']][1]} to {e['peer']}: {e['value']}" for e in same
        ]
        args["num_bytes"] = int(same["num_bytes"].sum())
    else:
        names = ["peer", "value", "count", "operation"]
        names += ["num_bytes"] if role == "proxy" else []
        args = {name: int(event[name]) for name in names}
    duration = (int(event["end_ns"]) - int(event["start_ns"])) / 1000
    start = _us(event["start_ns"], first)
    return {"ph": "X", "name": name, "cat": role, "pid": pid, "tid": tid, "ts": start,
            "dur": duration, "args": args}  # fmt: skip


def _arrow(
    events: np.ndarray,
    flow: Flow,
    number: int,
    threads: dict[int, tuple[int, int]],
    first: int,
) -> list[dict[str, Any]]:
    """A flow's beginning, its step at the proxy if it has one, and its end."""
    kind = "row" if events["kind"][flow.publish] == SEND_ROW else "chunk"
    arrow = []
    for phase, i in zip("stf", flow):
        if i < 0:
            continue
        at = int(events["start_ns"][i])
        if phase == "f" and events["kind"][i] in (WAIT_TAIL, WAIT_ROW):
            at = max(at, int(events["end_ns"][i]) - 1)  # a wait ends when it comes
        pid, tid = threads[i]
        arrow.append({"ph": phase, "id": number, "name": kind, "cat": "flow",
                      "pid": pid, "tid": tid, "ts": _us(at, first)})  # fmt: skip
    arrow[-1]["bp"] = "e"  # the slice around it, not the next one
    return arrow
